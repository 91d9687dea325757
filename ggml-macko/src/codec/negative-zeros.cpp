#include "codec/negative-zeros.h"
#include "codec/codec.h"
#include "codec/team.h"

#include <atomic>

namespace macko {

template <typename T> static int64_t drop(T * v, int64_t n, int n_threads) {
    constexpr T          negative_zero = static_cast<T>(T(1) << (8 * sizeof(T) - 1));
    constexpr int        BLOCK         = 1 << 14; // the count of a block fits into T, so that whole vectors are counted
    std::atomic<int64_t> count{ 0 };
    parallel_parts(n_threads, n, BLOCK, [&](int64_t begin, int64_t end, int) {
        T here = 0;
        for (int64_t i = begin; i < end; i++) {
            const T is_negative_zero = v[i] == negative_zero;
            here                     = static_cast<T>(here + is_negative_zero);
            v[i]                     = static_cast<T>(is_negative_zero ? 0 : v[i]);
        }
        count += here;
    });
    return count;
}

int64_t drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads) {
    return type == GGML_MACKO_TYPE_F32 ? drop(static_cast<uint32_t *>(values), n, n_threads)
                                       : drop(static_cast<uint16_t *>(values), n, n_threads);
}

} // namespace macko
