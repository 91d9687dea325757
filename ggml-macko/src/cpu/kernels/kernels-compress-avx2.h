// The layout rows16 in AVX2, for the kernel sets without AVX-512 VBMI2. x are 16-bit numbers: signed integers for
// quantized weights, F16 or BF16 for weights of these types. Only kernels-avx2.cpp and kernels-avx512.cpp include this
// file; their struct simd is derived from compress_avx2.
#pragma once

#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/mask-tables.h"

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wsign-conversion" // int template arguments as array bounds

namespace macko::cpu {
namespace {

struct compress_avx2 {
    static constexpr float X_OFFSET = 0; // the integers are signed

    // Approximate number of non-zeros in a segment. With fewer, too many groups cross a segment boundary and are
    // multiplied twice. With more, the compressed x (two rows, two segments) would push x out of an L1 cache of 32 KiB.
    static constexpr int segment_nonzeros = 512;

    static uint64_t rotate_right(uint64_t bits, int n) { return n == 0 ? bits : bits >> n | bits << (64 - n); }

    // Compresses the x of the non-zeros of some mask words of NR rows, whose masks are `stride` words apart, and writes
    // n[r] zeros, the x, and zeros up to a whole group. Adds the number of non-zeros to n[r]. Two rows share the loads
    // of x, and hide the latency of the addresses, each of which depends on the previous one.
    template <int TYPE, int NR>
    static void compress(const uint64_t * mask, int64_t stride, int64_t words, const uint8_t * x, bool,
                         int64_t (&n)[NR], compressed_x * out) {
        constexpr bool quant = is_quant_type(TYPE);
        constexpr int  zeros = quant ? 4 : 1; // vectors of zeros after the last x, and in front of a group
        const auto     clear = [](uint8_t * at) __attribute__((always_inline)) {
            for (int i = 0; i < zeros; i++) {
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(at) + i, _mm256_setzero_si256());
            }
        };
        const uint8_t * controls = tables_of_masks.pack[0];
        uint8_t *       to[NR];
        for (int r = 0; r < NR; r++) {
            if (quant) {
                clear(out[r].bytes);
            }
            to[r] = out[r].bytes + 2 * n[r];
        }
        for (int64_t word = 0; word < words; word++, x += 128) {
            uint64_t bits[NR]; // rotated, so that no byte needs a separate shift to become a table offset
            for (int r = 0; r < NR; r++) {
                bits[r] = rotate_right(mask[r * stride + word], 60);
            }
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                const __m128i xs = _mm_load_si128(reinterpret_cast<const __m128i *>(x) + s);
#pragma GCC unroll 4
                for (int r = 0; r < NR; r++) {
                    const uint64_t at = rotate_right(bits[r], 8 * s) & 0xff0;
                    // overwrites the part of the previous store after its last x
                    _mm_storeu_si128(
                        reinterpret_cast<__m128i *>(to[r]),
                        _mm_shuffle_epi8(xs, _mm_load_si128(reinterpret_cast<const __m128i *>(controls + at))));
                    to[r] += 2 * __builtin_popcountll(at);
                }
            }
        }
        for (int r = 0; r < NR; r++) {
            n[r] = (to[r] - out[r].bytes) / 2;
            clear(to[r]);
        }
    }

    static __m256i widen_bytes(__m128i q) { return _mm256_cvtepi8_epi16(q); }
    // The 64 q of a group as 16-bit integers.
    template <int TYPE> static void all_quants(const uint8_t * group, __m256i (&q)[4]) {
        const __m128i * at = reinterpret_cast<const __m128i *>(group + GROUP_SCALES_NBYTES);
        if constexpr (TYPE == GGML_MACKO_TYPE_Q8_0) {
            for (int i = 0; i < 4; i++) {
                q[i] = widen_bytes(_mm_loadu_si128(at + i));
            }
            return;
        }
        for (int i = 0; i < 2; i++) { // 16 bytes: low nibbles of the first block, high nibbles of the second
            const __m128i both = _mm_loadu_si128(at + i);
            for (int half = 0; half < 2; half++) {
                const __m128i low = _mm_and_si128(half ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15));
                if constexpr (TYPE == GGML_MACKO_TYPE_Q4_NL) {
                    const __m128i levels =
                        _mm_load_si128(reinterpret_cast<const __m128i *>(Q4_NL_LEVELS[group[4 * half] & 1]));
                    q[2 * half + i] = widen_bytes(_mm_shuffle_epi8(levels, low));
                } else if constexpr (TYPE == GGML_MACKO_TYPE_Q5_0) {
                    uint16_t fifth; // the fifth bits; below, each becomes a byte of zeros or ones
                    __builtin_memcpy(&fifth, group + GROUP_SCALES_NBYTES + 32 + 4 * half + 2 * i, sizeof(fifth));
                    const __m128i bit    = _mm_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
                    const __m128i spread = _mm_shuffle_epi8(
                        _mm_cvtsi32_si128(fifth), _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
                    const __m128i is_set = _mm_cmpeq_epi8(_mm_and_si128(spread, bit), bit);
                    q[2 * half + i]      = widen_bytes(_mm_sub_epi8(low, _mm_andnot_si128(is_set, _mm_set1_epi8(16))));
                } else {
                    q[2 * half + i] = widen_bytes(_mm_sub_epi8(low, _mm_set1_epi8(8)));
                }
            }
        }
    }

    static float sum_of_lanes(__m256 v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s        = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }

    // Sum of d * q * x over the groups of n x. A lane has the sum of four products of each half of a group, which a
    // float represents exactly: 4 * 128 * 32767 < 2^24.
    template <int TYPE> static float dot_groups(const uint8_t * group, int64_t n, const compressed_x & compressed) {
        constexpr int   PREFETCH     = 4096; // bytes ahead
        constexpr int   group_nbytes = static_cast<int>(quant_group_nbytes(TYPE));
        const __m256i * x            = reinterpret_cast<const __m256i *>(compressed.bytes);
        __m256          total[2]     = { _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int64_t i = 0; i < n; i += 64, group += group_nbytes, x += 4) {
            __builtin_prefetch(group + PREFETCH);
            __m256i q[4];
            all_quants<TYPE>(group, q);
            for (int half = 0; half < 2; half++) {
                const __m256i sums =
                    _mm256_add_epi32(_mm256_madd_epi16(q[2 * half], _mm256_load_si256(x + 2 * half)),
                                     _mm256_madd_epi16(q[2 * half + 1], _mm256_load_si256(x + 2 * half + 1)));
                const __m256 scale = _mm256_broadcast_ss(reinterpret_cast<const float *>(group) + half);
                const __m256 d     = TYPE == GGML_MACKO_TYPE_Q4_NL
                                         ? _mm256_and_ps(scale, _mm256_castsi256_ps(_mm256_set1_epi32(~1)))
                                         : scale;
                total[half]        = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), d, total[half]);
            }
        }
        return sum_of_lanes(_mm256_add_ps(total[0], total[1]));
    }

    template <int TYPE> static __m256 widen_floats(__m128i values) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            return _mm256_cvtph_ps(values);
        } else {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
        }
    }
    // Sum of value * x over n x. The values after them are finite and multiplied by zeros.
    template <int TYPE> static float dot_floats(const uint8_t * values, int64_t n, const compressed_x & compressed) {
        constexpr int   PREFETCH = 4096; // bytes ahead
        const __m128i * w        = reinterpret_cast<const __m128i *>(values);
        const __m128i * x        = reinterpret_cast<const __m128i *>(compressed.bytes);
        __m256          total[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int64_t i = 0; i < n; i += 16, w += 2, x += 2) {
            __builtin_prefetch(reinterpret_cast<const uint8_t *>(w) + PREFETCH);
            for (int k = 0; k < 2; k++) {
                total[k] = _mm256_fmadd_ps(widen_floats<TYPE>(_mm_loadu_si128(w + k)),
                                           widen_floats<TYPE>(_mm_load_si128(x + k)), total[k]);
            }
        }
        return sum_of_lanes(_mm256_add_ps(total[0], total[1]));
    }
};

} // namespace
} // namespace macko::cpu
