// Products with bundles (bundles.h) in AVX2, for the kernel sets without AVX-512 VBMI2: kernels-avx2.cpp and
// kernels-avx512.cpp derive their struct simd from bundles_avx2.
//
// x is rounded to the type of the values and split into two planes of bytes. A window is 16 bytes of each plane, and
// pshufb moves the bytes at the places of 16 slots to those slots. x and values are then converted to floats. Each
// piece has one lane of a sum.
#pragma once

#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/mask-tables.h"

#include <immintrin.h>

namespace macko::cpu {
namespace {

struct bundles_avx2 {
    static constexpr int PLANE_STEP = 8;

    // Splits floats with the precision of TYPE (F16 or BF16).
    template <int TYPE> static void store_planes(uint8_t * low, uint8_t * high, const float * x) {
        const __m256  v = _mm256_loadu_ps(x);
        const __m256i u = TYPE == GGML_MACKO_TYPE_F16
                              ? _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
                              : _mm256_srli_epi32(_mm256_castps_si256(v), 16);
        store_bytes(low, u);
        store_bytes(high, _mm256_srli_epi32(u, 8));
    }

    static void store_bytes(uint8_t * to, __m256i x) { // stores the lowest byte of each element
        const __m256i b = _mm256_shuffle_epi8(
            x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to),
                         _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
    }

    static __m256i nibbles(const uint8_t * at) { // the low halves of 16 bytes, then the high halves
        const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    }
    // Moves the bytes of two windows of a plane to the slots with their places.
    static __m256i pick(const uint8_t * a, const uint8_t * b, __m256i places) {
        const __m256i windows =
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(a))),
                                    _mm_loadu_si128(reinterpret_cast<const __m128i *>(b)), 1);
        return _mm256_shuffle_epi8(windows, places);
    }

    static constexpr int BUNDLE_PREFETCH = 2048; // bytes ahead

    // Joins the bytes of x of both steps to 16-bit numbers: slots 0 ... 7 (`half` 0) or 8 ... 15, with the first step
    // in the lower lane and the second step in the upper lane, like the values.
    static __m256i join(__m256i xl, __m256i xh, int half) {
        return half ? _mm256_unpackhi_epi8(xl, xh) : _mm256_unpacklo_epi8(xl, xh);
    }

    // Adds w * x. There are four sums: F16 has one sum of eight pieces per step; BF16 has one sum of four pieces for
    // both steps, the first step in the lower lane.
    template <int TYPE>
    static void add_bundle(const uint8_t * rows, const uint8_t * at, const uint8_t * end, const uint8_t * low,
                           const uint8_t * high, float * y) {
        __m256  sum[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
        int64_t base   = 0;
        for (; at < end; at += BUNDLE_VECTOR_NBYTES) {
            __builtin_prefetch(at + BUNDLE_PREFETCH);
            __builtin_prefetch(at + BUNDLE_PREFETCH + 64);
            const int64_t a = base + at[0], b = a + at[1];
            base                 = b;
            const __m256i places = nibbles(at + 2);
            const __m256i xl = pick(low + a, low + b, places), xh = pick(high + a, high + b, places);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const auto *  values = reinterpret_cast<const __m128i *>(at + BUNDLE_VALUES_AT) + 2 * half;
                const __m256i x      = join(xl, xh, half);
                __m256 &      s0     = sum[2 * half];
                __m256 &      s1     = sum[2 * half + 1];
                if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
                    s0 = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128(values)),
                                         _mm256_cvtph_ps(_mm256_castsi256_si128(x)), s0);
                    s1 = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128(values + 1)),
                                         _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)), s1);
                } else {
                    const __m256i zero = _mm256_setzero_si256();
                    const __m256i w    = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(values));
                    s0                 = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, w)),
                                                         _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)), s0);
                    s1                 = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, w)),
                                                         _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x)), s1);
                }
            }
        }
        alignas(32) float of_piece[STEP_SLOTS];
        for (int half = 0; half < 2; half++) {
            const __m256 s0 = sum[2 * half], s1 = sum[2 * half + 1];
            const __m256 first  = TYPE == GGML_MACKO_TYPE_F16 ? s0 : _mm256_permute2f128_ps(s0, s1, 0x20);
            const __m256 second = TYPE == GGML_MACKO_TYPE_F16 ? s1 : _mm256_permute2f128_ps(s0, s1, 0x31);
            _mm256_store_ps(of_piece + 8 * half, _mm256_add_ps(first, second));
        }
        for (int i = 0; i < STEP_SLOTS; i++) {
            y[rows[i]] += of_piece[i];
        }
    }

    // Transposes eight rows of eight 16-bit numbers.
    static void transpose16(__m128i (&v)[8]) {
        __m128i t[8];
#pragma GCC unroll 3
        for (int round = 0; round < 3; round++) { // perfect shuffles of the rows
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                t[2 * i]     = _mm_unpacklo_epi16(v[i], v[i + 4]);
                t[2 * i + 1] = _mm_unpackhi_epi16(v[i], v[i + 4]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                v[i] = t[i];
            }
        }
    }

    // Appends the non-zeros of a bundle to the lists of their rows; `lists` has one list per row of the group.
    // Overwrites up to eight elements after the end of a list. Decodes eight steps at a time: columns and values of
    // each piece fill one register, and those of used slots are packed as by a mask.
    template <int TYPE, typename LIST> static const uint8_t * decode_bundle(const uint8_t * at, LIST * lists) {
        const uint8_t * rows = at + sizeof(bundle_header);
        uint16_t        column;
        __builtin_memcpy(&column, at, sizeof(column));
        const __m256i   first = _mm256_set1_epi32(column);
        const uint8_t * end = at + BUNDLE_HEADER_NBYTES + at[offsetof(bundle_header, n_vectors)] * BUNDLE_VECTOR_NBYTES;
        int             base = 0;
        for (at += BUNDLE_HEADER_NBYTES; at < end;) {
            __m128i columns[2][8], values[2][8]; // [half of the pieces][step], then [half][piece of it]
            for (int step = 0; step < 8; step += 2) {
                if (at == end) {
                    for (int i = 0; i < 4; i++) {
                        columns[i / 2][step + i % 2] = values[i / 2][step + i % 2] = _mm_setzero_si128();
                    }
                    continue;
                }
                const __m256i places = nibbles(at + 2);
                for (int i = 0; i < 2; i++) {
                    base += at[i];
                    const __m256i both = _mm256_add_epi16(
                        _mm256_cvtepu8_epi16(i ? _mm256_extracti128_si256(places, 1) : _mm256_castsi256_si128(places)),
                        _mm256_set1_epi16(static_cast<int16_t>(base)));
                    columns[0][step + i] = _mm256_castsi256_si128(both);
                    columns[1][step + i] = _mm256_extracti128_si256(both, 1);
                }
                for (int i = 0; i < 4; i++) {
                    values[i / 2][step + i % 2] =
                        _mm_loadu_si128(reinterpret_cast<const __m128i *>(at + BUNDLE_VALUES_AT) + i);
                }
                at += BUNDLE_VECTOR_NBYTES;
            }
            for (int half = 0; half < 2; half++) {
                transpose16(columns[half]);
                transpose16(values[half]);
                for (int i = 0; i < 8; i++) {
                    LIST &         list  = lists[rows[8 * half + i]];
                    const __m128i  empty = _mm_cmpeq_epi16(values[half][i], _mm_setzero_si128());
                    const uint32_t used =
                        ~static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(empty, empty))) & 255;
                    const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i *>(tables_of_masks.pack[used]));
                    const __m128i v     = _mm_shuffle_epi8(values[half][i], order);
                    const __m256i c     = _mm256_cvtepu16_epi32(_mm_shuffle_epi8(columns[half][i], order));
                    _mm256_storeu_si256(reinterpret_cast<__m256i *>(list.col + list.n), _mm256_add_epi32(c, first));
                    _mm256_storeu_ps(list.weight + list.n,
                                     TYPE == GGML_MACKO_TYPE_F16
                                         ? _mm256_cvtph_ps(v)
                                         : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)));
                    list.n += __builtin_popcount(used);
                }
            }
        }
        return at;
    }
};

} // namespace
} // namespace macko::cpu
