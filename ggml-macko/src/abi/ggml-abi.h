// Checks that the plugin matches the running ggml. The structs of a backend have no version of their own, and
// GGML_BACKEND_API_VERSION does not change with their layout, so these functions use the structs and compare the
// results.
#pragma once

namespace macko {

// The range of ggml versions that the plugin supports, from cmake/llama-cpp.cmake.
extern const char * const OLDEST_GGML;
extern const char * const NEWEST_GGML;

// VERSION_MISMATCH, with the range in the message, for a version outside the range. GGML_MACKO_ENABLE=any-version
// disables the check.
[[nodiscard]] int check_ggml_version(const char * ggml_version);

// Runs once per process: check_ggml_version, resolve_ops (op-numbers.h), and first_different_member (struct-check.h),
// which compares the struct members of the running ggml with our headers. No other function of the plugin may be used
// before this one returns OK.
[[nodiscard]] int check_running_ggml();

// Whether the running ggml passes a third argument to graph_optimize. ggml 0.25.3 and later versions do.
bool passes_optimize_params();

} // namespace macko
