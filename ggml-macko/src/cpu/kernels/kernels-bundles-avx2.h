// Products with bundles (bundles.h) in AVX2, for the kernel sets without AVX-512 VBMI2: kernels-avx2.cpp and
// kernels-avx512.cpp derive their struct simd from bundles_avx2.
//
// x is converted to 16-bit numbers in two planes of bytes. A window is 16 bytes of each plane, and pshufb moves the
// bytes at the places of 16 slots to those slots.
//
//   F16, BF16  x has the type of the values. Both are converted to floats; each piece has one lane of a sum.
//   Q4_0       x + 32768 = 256 high + low, both unsigned, and q signed. pmaddubsw and pmaddwd multiply and add the four
//              products of each piece. Each y is too large by 32768 * scale * row_sums[row].
//   others     x = 255 high + low, both from -127 to 127: |q| is the unsigned operand, and x gets the sign of q.
//              Otherwise sums of two products would not fit in 16 bits.
#pragma once

#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/mask-tables.h"

#include <immintrin.h>

namespace macko::cpu {
namespace {

struct bundles_avx2 {
    template <int TYPE> static constexpr int64_t HEADER_NBYTES = bundle_header_nbytes(TYPE);
    template <int TYPE> static constexpr int64_t SCALES_AT     = bundle_scales_at(TYPE);
    template <int TYPE> static constexpr int64_t VECTOR_NBYTES = bundle_vector_nbytes(TYPE);

    // x is between -LARGEST and LARGEST
    template <int TYPE> static constexpr int   BUNDLE_LARGEST  = TYPE == GGML_MACKO_TYPE_Q4_0 ? 32767 : 255 * 127 + 127;
    template <int TYPE> static constexpr float BUNDLE_X_OFFSET = TYPE == GGML_MACKO_TYPE_Q4_0 ? 32768.0f : 0.0f;

    static constexpr int PLANE_STEP = 8;

    // Splits floats with the precision of TYPE (F16 or BF16).
    template <int TYPE> static void store_planes16(uint8_t * low, uint8_t * high, const float * x) {
        const __m256  v = _mm256_loadu_ps(x);
        const __m256i u = TYPE == GGML_MACKO_TYPE_F16
                              ? _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
                              : _mm256_srli_epi32(_mm256_castps_si256(v), 16);
        store_bytes(low, u);
        store_bytes(high, _mm256_srli_epi32(u, 8));
    }

    // Splits the 8 integers in x.
    template <int TYPE> static void store_planes(uint8_t * low, uint8_t * high, __m256i x) {
        __m256i h, l;
        if (TYPE == GGML_MACKO_TYPE_Q4_0) {
            const __m256i u = _mm256_add_epi32(x, _mm256_set1_epi32(32768));
            h               = _mm256_srli_epi32(u, 8);
            l               = _mm256_and_si256(u, _mm256_set1_epi32(255));
        } else {
            h = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(1.0f / 255)));
            l = _mm256_sub_epi32(x, _mm256_mullo_epi32(h, _mm256_set1_epi32(255)));
        }
        store_bytes(low, l);
        store_bytes(high, h);
    }
    static void store_bytes(uint8_t * to, __m256i x) { // stores the lowest byte of each element
        const __m256i b = _mm256_shuffle_epi8(
            x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to),
                         _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
    }

    // Converts columns begin ... end - 1, a multiple of 8; columns from cols on become zero.
    template <int TYPE>
    static void prepare_planes(const float * x, int64_t cols, int64_t begin, int64_t end, float inverse, uint8_t * low,
                               uint8_t * high) {
        for (int64_t c = begin; c < end; c += 8) {
            alignas(32) float part[8] = {};
            const float *     src     = x + c;
            if (cols - c < 8) {
                for (int64_t i = 0; i < cols - c; i++) {
                    part[i] = x[c + i];
                }
                src = part;
            }
            store_planes<TYPE>(low + c, high + c,
                               _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(src), _mm256_set1_ps(inverse))));
        }
    }

    static __m256i nibbles(const uint8_t * at) { // the low halves of 16 bytes, then the high halves
        const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    }
    template <int TYPE> static __m256i quants(const uint8_t * vector) {
        const uint8_t * values = vector + BUNDLE_VALUES_AT;
        return TYPE == GGML_MACKO_TYPE_Q4_0 ? _mm256_sub_epi8(nibbles(values), _mm256_set1_epi8(8))
                                            : _mm256_loadu_si256(reinterpret_cast<const __m256i *>(values));
    }
    // Moves the bytes of two windows of a plane to the slots with their places.
    static __m256i pick(const uint8_t * a, const uint8_t * b, __m256i places) {
        const __m256i windows =
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(a))),
                                    _mm_loadu_si128(reinterpret_cast<const __m128i *>(b)), 1);
        return _mm256_shuffle_epi8(windows, places);
    }

    // Adds the sums of each piece to y, which has one element per row of the group.
    template <int TYPE>
    static void multiply_bundles(const uint8_t * at, const uint8_t * end, const uint8_t * low, const uint8_t * high,
                                 float * y) {
        while (at < end) {
            const uint8_t * header = at;
            const uint8_t * first  = at + HEADER_NBYTES<TYPE>;
            const uint8_t * rows   = header + sizeof(bundle_header);
            uint16_t        column;
            __builtin_memcpy(&column, header, sizeof(column));
            at = first + header[offsetof(bundle_header, n_vectors)] * VECTOR_NBYTES<TYPE>;
            if constexpr (is_quant_type(TYPE)) {
                add_quant_bundle<TYPE>(header + SCALES_AT<TYPE>, rows, first, at, low + column, high + column, y);
            } else {
                add_bundle<TYPE>(rows, first, at, low + column, high + column, y);
            }
        }
    }

    static constexpr int BUNDLE_PREFETCH = 2048; // bytes ahead

    // Adds d * q * x.
    template <int TYPE>
    static void add_quant_bundle(const uint8_t * scales, const uint8_t * rows, const uint8_t * at, const uint8_t * end,
                                 const uint8_t * low, const uint8_t * high, float * y) {
        constexpr bool is_signed = TYPE != GGML_MACKO_TYPE_Q4_0;
        const __m256i  one = _mm256_set1_epi16(1), radix = _mm256_set1_epi16(is_signed ? 255 : 256);
        int64_t        base  = 0;
        __m256i        total = _mm256_setzero_si256();
        for (; at < end; at += VECTOR_NBYTES<TYPE>) {
            __builtin_prefetch(at + BUNDLE_PREFETCH);
            const int64_t a = base + at[0], b = a + at[1];
            base                 = b;
            const __m256i places = nibbles(at + 2);
            const __m256i q      = quants<TYPE>(at);
            const __m256i xl = pick(low + a, low + b, places), xh = pick(high + a, high + b, places);
            __m256i       sl, sh;
            if (is_signed) {
                const __m256i magnitude = _mm256_abs_epi8(q);
                sl                      = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(xl, q));
                sh                      = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(xh, q));
            } else {
                sl = _mm256_maddubs_epi16(xl, q);
                sh = _mm256_maddubs_epi16(xh, q);
            }
            total = _mm256_add_epi32(total, _mm256_madd_epi16(sl, one));
            total = _mm256_add_epi32(total, _mm256_madd_epi16(sh, radix));
        }
        const __m128  d   = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(scales)));
        const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
        const __m128  dx  = _mm_mul_ps(d, _mm_cvtepi32_ps(sum));
        y[rows[0]] += _mm_cvtss_f32(dx);
        y[rows[1]] += _mm_cvtss_f32(_mm_movehdup_ps(dx));
        y[rows[2]] += _mm_cvtss_f32(_mm_movehl_ps(dx, dx));
        y[rows[3]] += _mm_cvtss_f32(_mm_shuffle_ps(dx, dx, 3));
    }

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
        for (; at < end; at += VECTOR_NBYTES<TYPE>) {
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

    // Appends the non-zeros of a bundle to the lists of their rows; `lists` has one list per row of the group.
    // Overwrites up to eight elements after the end of a list.
    template <int TYPE, typename LIST> static const uint8_t * decode_bundle(const uint8_t * at, LIST * lists) {
        if constexpr (is_quant_type(TYPE)) {
            return decode_quant_bundle<TYPE>(at, lists);
        } else {
            return decode_plain_bundle<TYPE>(at, lists);
        }
    }

    // _mm_loadu_si32, which GCC 10 lacks
    static __m128i load_4_bytes(const uint8_t * p) {
        int32_t four;
        __builtin_memcpy(&four, p, sizeof(four));
        return _mm_cvtsi32_si128(four);
    }

    template <int TYPE, typename LIST> static const uint8_t * decode_quant_bundle(const uint8_t * at, LIST * lists) {
        const uint8_t *     header = at;
        const uint8_t *     rows   = at + sizeof(bundle_header);
        alignas(32) uint8_t place[32], q[32];
        alignas(16) float   d[4];
        uint16_t            first;
        __builtin_memcpy(&first, header, sizeof(first));
        _mm_store_ps(d, _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(header + SCALES_AT<TYPE>))));
        int base = first;
        at += HEADER_NBYTES<TYPE>;
        for (int v = 0; v < header[offsetof(bundle_header, n_vectors)]; v++, at += VECTOR_NBYTES<TYPE>) {
            const __m256i  all = quants<TYPE>(at);
            const uint32_t used =
                ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(all, _mm256_setzero_si256())));
            _mm256_store_si256(reinterpret_cast<__m256i *>(place), nibbles(at + 2));
            _mm256_store_si256(reinterpret_cast<__m256i *>(q), all);
            for (int i = 0; i < 8; i++) {
                base += i % 4 == 0 ? at[i / 4] : 0;
                LIST &        list = lists[rows[i % 4]];
                const __m128i c    = _mm_cvtepu8_epi32(load_4_bytes(place + 4 * i));
                const __m128  w    = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(load_4_bytes(q + 4 * i)));
                _mm_storeu_si128(reinterpret_cast<__m128i *>(list.col + list.n),
                                 _mm_add_epi32(c, _mm_set1_epi32(base)));
                _mm_storeu_ps(list.weight + list.n, _mm_mul_ps(w, _mm_set1_ps(d[i % 4])));
                list.n += __builtin_popcount(used >> (4 * i) & 15);
            }
        }
        return at;
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

    // Decodes eight steps at a time: columns and values of each piece fill one register, and those of used slots are
    // packed as by a mask.
    template <int TYPE, typename LIST> static const uint8_t * decode_plain_bundle(const uint8_t * at, LIST * lists) {
        const uint8_t * rows = at + sizeof(bundle_header);
        uint16_t        column;
        __builtin_memcpy(&column, at, sizeof(column));
        const __m256i   first = _mm256_set1_epi32(column);
        const uint8_t * end   = at + HEADER_NBYTES<TYPE> + at[offsetof(bundle_header, n_vectors)] * VECTOR_NBYTES<TYPE>;
        int             base  = 0;
        for (at += HEADER_NBYTES<TYPE>; at < end;) {
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
                at += VECTOR_NBYTES<TYPE>;
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
