// Whether the plugin fits the ggml that runs it. The structs of a backend have no version of their own, and
// GGML_BACKEND_API_VERSION does not change with their layout, so this compares them by using them.
#pragma once

namespace macko {

// The range of ggml versions that the plugin is for; cmake/llama-cpp.cmake has the ends.
extern const char * const OLDEST_GGML;
extern const char * const NEWEST_GGML;

// VERSION_MISMATCH, naming the range, if ggml_version is not in it. GGML_MACKO_ANY_VERSION=1 lets every version pass.
[[nodiscard]] int check_ggml_version(const char * ggml_version);

// Once per process: check_ggml_version, resolve_ops (op-numbers.h), and then, by calling exported functions with
// objects of our making, that the running ggml has every struct member where our headers have it. Nothing of the plugin
// may be used before this says OK.
[[nodiscard]] int check_running_ggml();

// whether the running ggml passes graph_optimize its third argument, which came with ggml 0.25.3 at the latest
bool passes_optimize_params();

} // namespace macko
