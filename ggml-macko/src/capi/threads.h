// The number of threads for a call of the C API.
#pragma once

#include <algorithm>
#include <cstdint>
#include <omp.h>

namespace macko {

// n_threads, or all cores if it is not positive, but no more than there is work for: starting a thread costs as much as
// some 64 Ki elements
inline int threads_for(int n_threads, int64_t elements) {
    return n_threads > 0 ? n_threads : static_cast<int>(std::min<int64_t>(omp_get_max_threads(), 1 + elements / 65536));
}

} // namespace macko
