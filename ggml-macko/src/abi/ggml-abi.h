// Checks that the plugin matches the running ggml. The structs of a backend have no version of their own, and
// GGML_BACKEND_API_VERSION does not change with each layout, so these functions use the structs and compare the
// results. They never decide by a version.
#pragma once

#include "ggml-backend-impl.h"

namespace macko {

// The versions of ggml that the plugin is tested with, from cmake/llama-cpp.cmake.
extern const char * const OLDEST_GGML;
extern const char * const NEWEST_GGML;

// Runs once per process: first_different_member (struct-check.h), which finds the layouts of the running ggml,
// resolve_ops (op-numbers.h) and first_different_parameter (parameter-check.h). No other function of the plugin may be
// used before this one returns OK. Also VERSION_MISMATCH for an untested version if GGML_MACKO_ENABLE has
// strict-versions.
[[nodiscard]] int check_running_ggml();

// A line that says that the running ggml is outside the tested versions; "" if it is not.
const char * untested_version();

// params, the third argument of graph_optimize, or null if the running ggml passes only two arguments, as those before
// 0.25.3 do. The third is then any value.
ggml_backend_graph_optimize_params * passed_optimize_params(ggml_backend_graph_optimize_params * params);

} // namespace macko
