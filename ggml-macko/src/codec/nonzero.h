// Finds non-zeros. "Zero" means that all bits are zero (FORMAT.md section 2).
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace macko {

// Bit i is set if v[i] has any bit set, for n <= 64 elements.
inline uint64_t nonzero_mask_any(const uint16_t * v, int64_t n) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < n; i++) {
        mask |= static_cast<uint64_t>(v[i] != 0) << i;
    }
    return mask;
}

inline uint64_t nonzero_mask_any(const uint32_t * v, int64_t n) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < n; i++) {
        mask |= static_cast<uint64_t>(v[i] != 0) << i;
    }
    return mask;
}

#if defined(__SSE2__)
inline __m128i zero_lanes16(const void * v) {
    return _mm_cmpeq_epi16(_mm_loadu_si128(static_cast<const __m128i *>(v)), _mm_setzero_si128());
}
inline __m128i zero_lanes32(const void * v) {
    return _mm_cmpeq_epi32(_mm_loadu_si128(static_cast<const __m128i *>(v)), _mm_setzero_si128());
}
inline uint64_t nonzero_mask_64(const uint16_t * v) {
    uint64_t zero = 0;
    for (int i = 0; i < 4; i++) {
        const __m128i bytes = _mm_packs_epi16(zero_lanes16(v + 16 * i), zero_lanes16(v + 16 * i + 8));
        zero |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(bytes))) << (16 * i);
    }
    return ~zero;
}
inline uint64_t nonzero_mask_64(const uint32_t * v) {
    uint64_t zero = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t * p  = v + 16 * i;
        const __m128i    lo = _mm_packs_epi32(zero_lanes32(p), zero_lanes32(p + 4));
        const __m128i    hi = _mm_packs_epi32(zero_lanes32(p + 8), zero_lanes32(p + 12));
        zero |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(lo, hi)))) << (16 * i);
    }
    return ~zero;
}
#else
template <typename T> inline uint64_t nonzero_mask_64(const T * v) { return nonzero_mask_any(v, 64); }
#endif

// Sets bit c%64 of word c/64 if row[c] is a non-zero; writes (cols + 63) / 64 words.
template <typename T> inline void nonzero_words(const T * row, int64_t cols, uint64_t * words) {
    int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
        *words++ = nonzero_mask_64(row + c);
    }
    if (c < cols) {
        *words = nonzero_mask_any(row + c, cols - c);
    }
}

// Calls f(col) for each non-zero of a row, columns ascending.
template <typename T, typename F> inline void for_each_column(const T * row, int64_t cols, F && f) {
    int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
        for (uint64_t mask = nonzero_mask_64(row + c); mask; mask &= mask - 1) {
            f(c + __builtin_ctzll(mask));
        }
    }
    for (uint64_t mask = nonzero_mask_any(row + c, cols - c); mask; mask &= mask - 1) {
        f(c + __builtin_ctzll(mask));
    }
}

} // namespace macko
