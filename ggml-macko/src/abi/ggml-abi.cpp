#include "abi/ggml-abi.h"
#include "abi/op-numbers.h"
#include "abi/parameter-check.h"
#include "abi/struct-check.h"
#include "codec/status.h"
#include "platform/environment.h"
#include "platform/platform.h"

#include <array>
#include <cstdio>
#include <mutex>

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
    const std::string error = environment::find_error(environment::ENABLE);
    if (!error.empty()) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s", error.c_str());
    }
    if (*untested_version() && environment::is_enabled("strict-versions")) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH, "%s; GGML_MACKO_ENABLE=strict-versions refuses it",
                    untested_version());
    }
    const char * different = first_different_member();
    different              = different ? different : first_different_parameter();
    if (different) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH,
                    "ggml-macko %s does not fit ggml %s: %s differs from tested versions (%s to %s)",
                    ggml_macko_version(), printable(ggml_version()).text, different, OLDEST_GGML, NEWEST_GGML);
    }
    int last   = 0;
    int status = find_last_op(&last);
    status     = status ? status : resolve_ops(last);
    if (status) {
        const std::string reason = ggml_macko_last_error();
        return fail(status, "ggml-macko %s does not fit ggml %s: %s", ggml_macko_version(),
                    printable(ggml_version()).text, reason.c_str());
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace

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

const char * untested_version() {
    static const std::string line = [] {
        const version running   = parse_version(ggml_version());
        const bool    is_tested = running >= parse_version(OLDEST_GGML) && running <= parse_version(NEWEST_GGML);
        return is_tested ? ""
                         : std::string("ggml-macko ") + ggml_macko_version() + " is tested with ggml " + OLDEST_GGML +
                               " to " + NEWEST_GGML + ", and ggml " + printable(ggml_version()).text + " is running";
    }();
    return line.c_str();
}

ggml_backend_graph_optimize_params * passed_optimize_params(ggml_backend_graph_optimize_params * params) {
    // it is a local variable of ggml's scheduler, and so is its user_data
    static const bool passes = [params] {
        return platform::is_on_stack(params, sizeof(*params)) && platform::is_on_stack(params->user_data, 1) &&
               platform::same_library(reinterpret_cast<const void *>(params->add_alloc_dep),
                                      reinterpret_cast<const void *>(ggml_backend_sched_new));
    }();
    return passes ? params : nullptr;
}

} // namespace macko
