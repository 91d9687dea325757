// The C API over the environment variables.
#include "codec/status.h"
#include "platform/environment.h"

using namespace macko;

bool ggml_macko_setting_at(int32_t i, ggml_macko_setting * setting) {
    const environment::setting * found = i < 0 || !setting ? nullptr : environment::setting_at(static_cast<size_t>(i));
    if (found) {
        *setting = { found->variable, found->word, found->help };
    }
    return found != nullptr;
}

int ggml_macko_check_environment(void) {
    return c_boundary([&]() -> int {
        const std::string error = environment::find_error();
        return error.empty() ? GGML_MACKO_STATUS_OK : fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s", error.c_str());
    });
}
