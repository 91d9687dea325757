// OpenMP with one thread, for builds that ignore its pragmas: GGML_MACKO_FUZZ, and GGML_MACKO_SANITIZE=thread,
// because ThreadSanitizer does not see the barriers of libgomp.
#pragma once

inline int omp_get_max_threads() { return 1; }
inline int omp_get_num_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
