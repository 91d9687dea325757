#include "abi/ggml-abi.h"
#include "abi/op-numbers.h"
#include "abi/struct-check.h"
#include "codec/status.h"
#include "platform/environment.h"

#include <array>
#include <cstdio>
#include <mutex>
#include <string>

namespace macko {

const char * const OLDEST_GGML = GGML_MACKO_OLDEST_GGML;
const char * const NEWEST_GGML = GGML_MACKO_NEWEST_GGML;

namespace {

using version = std::array<int, 3>;

// Parses "0.25.3" or "0.25.3-dev". Other text gives all zeros, which is older than any version.
version parse_version(const char * text) {
    version v = {};
    return text && sscanf(text, "%9d.%9d.%9d", &v[0], &v[1], &v[2]) == 3 ? v : version{};
}

int find_out() {
    const char * running = ggml_version();
    TRY(check_ggml_version(running));
    if (const char * different = first_different_member()) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH,
                    "ggml-macko %s does not fit ggml %s: %s differs from tested versions", ggml_macko_version(),
                    printable(running).text, different);
    }
    int last   = 0;
    int status = find_last_op(&last);
    status     = status ? status : resolve_ops(last);
    if (status) {
        const std::string reason = ggml_macko_last_error();
        return fail(status, "ggml-macko %s does not fit ggml %s: %s", ggml_macko_version(), printable(running).text,
                    reason.c_str());
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace

int check_ggml_version(const char * ggml_version) {
    const std::string error = environment::find_error(environment::ENABLE);
    if (!error.empty()) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s", error.c_str());
    }
    const version v = parse_version(ggml_version);
    if (environment::is_enabled("any-version") ||
        (v >= parse_version(OLDEST_GGML) && v <= parse_version(NEWEST_GGML))) {
        return GGML_MACKO_STATUS_OK;
    }
    return fail(GGML_MACKO_STATUS_VERSION_MISMATCH,
                "ggml-macko %s is for ggml %s to %s (llama-cpp-python %s to %s), but ggml %s is running; "
                "GGML_MACKO_ENABLE=any-version tries it",
                ggml_macko_version(), OLDEST_GGML, NEWEST_GGML, ggml_macko_oldest_llama_cpp_python(),
                ggml_macko_newest_llama_cpp_python(), ggml_version ? printable(ggml_version).text : "(none)");
}

int check_running_ggml() {
    static std::once_flag once;
    static int            status;
    static std::string    message;
    std::call_once(once, [] {
        status  = c_boundary(find_out);
        message = status ? ggml_macko_last_error() : "";
    });
    return status ? fail(status, "%s", message.c_str()) : status;
}

bool passes_optimize_params() {
    static const bool passes = parse_version(ggml_version()) >= version{ 0, 25, 3 };
    return passes;
}

} // namespace macko
