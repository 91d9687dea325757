// Finds the first fault of an untrusted matrix in several threads.
#pragma once

#include "codec/team.h"

#include <algorithm>

namespace macko {

// The first of n items (rows, values) for which bad(i) is true, or n; the same for any number of threads.
template <typename F> int64_t first_bad(int64_t n, int n_threads, F && bad) {
    int64_t    first = n;
    std::mutex mutex;
    parallel_ranges(n_threads, n, [&](int64_t begin, int64_t end) {
        while (begin < end && !bad(begin)) {
            begin++;
        }
        if (begin < end) {
            const std::lock_guard<std::mutex> lock(mutex);
            first = std::min(first, begin);
        }
    });
    return first;
}

} // namespace macko
