// Products with bundles (bundles.h) by AVX2 instructions, for the kernel sets without AVX-512 VBMI2: kernels-avx2.cpp
// and kernels-avx512.cpp derive their struct simd from bundles_avx2.
//
// x becomes 16-bit integers in two planes of bytes. A window is 16 bytes of each, from which pshufb takes those at the
// places of 16 slots; pmaddubsw and pmaddwd multiply them with q and add up the four products of each piece.
//
//   Q4_0       x + 32768 = 256 high + low, both unsigned, and q signed. Each y is too large by 32768 * scale *
//              row_sums[row].
//   others     x = 255 high + low, both from -127 to 127: |q| is the unsigned operand, and its sign goes to x. Sums of
//              two products would not fit in 16 bits otherwise.
#pragma once

#include "cpu/dispatch.h"

#include <immintrin.h>

namespace macko::cpu {
namespace {

struct bundles_avx2 {
    // x is between -LARGEST and LARGEST
    template <int TYPE> static constexpr int   BUNDLE_LARGEST  = TYPE == GGML_MACKO_TYPE_Q4_0 ? 32767 : 255 * 127 + 127;
    template <int TYPE> static constexpr float BUNDLE_X_OFFSET = TYPE == GGML_MACKO_TYPE_Q4_0 ? 32768.0f : 0.0f;

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
    static void store_bytes(uint8_t * to, __m256i x) { // the lowest byte of each
        const __m256i b = _mm256_shuffle_epi8(
            x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to),
                         _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
    }

    // Columns begin ... end - 1, which are a multiple of 8; those from cols on become zero.
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

    static __m256i nibbles(const uint8_t * at) { // those in the low halves of 16 bytes, then those in the high halves
        const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    }
    template <int TYPE> static __m256i quants(const uint8_t * vector) {
        return TYPE == GGML_MACKO_TYPE_Q4_0 ? _mm256_sub_epi8(nibbles(vector + 18), _mm256_set1_epi8(8))
                                            : _mm256_loadu_si256(reinterpret_cast<const __m256i *>(vector + 18));
    }
    // two windows of a plane, each column's byte moved to the slots that have its place
    static __m256i pick(const uint8_t * a, const uint8_t * b, __m256i places) {
        const __m256i windows =
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(a))),
                                    _mm_loadu_si128(reinterpret_cast<const __m128i *>(b)), 1);
        return _mm256_shuffle_epi8(windows, places);
    }

    // Adds the sums of d * q * x of each piece to y, which has an element for each row of the group.
    template <int TYPE>
    static void multiply_bundles(const uint8_t * at, const uint8_t * end, const uint8_t * low, const uint8_t * high,
                                 float * y) {
        constexpr int  PREFETCH  = 2048; // bytes ahead
        constexpr int  nbytes    = static_cast<int>(bundle_vector_nbytes(TYPE));
        constexpr bool is_signed = TYPE != GGML_MACKO_TYPE_Q4_0;
        const __m256i  one = _mm256_set1_epi16(1), radix = _mm256_set1_epi16(is_signed ? 255 : 256);
        while (at < end) {
            const uint8_t * header = at;
            const uint8_t * next   = at + sizeof(bundle_header) + header[14] * nbytes;
            uint16_t        first;
            __builtin_memcpy(&first, header + 12, sizeof(first));
            int64_t base  = first;
            __m256i total = _mm256_setzero_si256();
            for (at += sizeof(bundle_header); at < next; at += nbytes) {
                __builtin_prefetch(at + PREFETCH);
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
            const __m128  d   = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(header)));
            const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
            const __m128  dx  = _mm_mul_ps(d, _mm_cvtepi32_ps(sum));
            y[header[8]] += _mm_cvtss_f32(dx);
            y[header[9]] += _mm_cvtss_f32(_mm_movehdup_ps(dx));
            y[header[10]] += _mm_cvtss_f32(_mm_movehl_ps(dx, dx));
            y[header[11]] += _mm_cvtss_f32(_mm_shuffle_ps(dx, dx, 3));
        }
    }

    // Appends the non-zeros of a bundle to the lists of their rows, `lists` has one for each row of the group. Up to
    // four elements behind the last of a list are overwritten.
    template <int TYPE, typename LIST> static const uint8_t * decode_bundle(const uint8_t * at, LIST * lists) {
        constexpr int       nbytes = static_cast<int>(bundle_vector_nbytes(TYPE));
        const uint8_t *     header = at;
        alignas(32) uint8_t place[32], q[32];
        alignas(16) float   d[4];
        uint16_t            first;
        __builtin_memcpy(&first, header + 12, sizeof(first));
        _mm_store_ps(d, _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(header))));
        int base = first;
        at += sizeof(bundle_header);
        for (int v = 0; v < header[14]; v++, at += nbytes) {
            const __m256i  all = quants<TYPE>(at);
            const uint32_t used =
                ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(all, _mm256_setzero_si256())));
            _mm256_store_si256(reinterpret_cast<__m256i *>(place), nibbles(at + 2));
            _mm256_store_si256(reinterpret_cast<__m256i *>(q), all);
            for (int i = 0; i < 8; i++) {
                base += i % 4 == 0 ? at[i / 4] : 0;
                LIST &        list = lists[header[8 + i % 4]];
                const __m128i c    = _mm_cvtepu8_epi32(_mm_loadu_si32(place + 4 * i));
                const __m128  w    = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_loadu_si32(q + 4 * i)));
                _mm_storeu_si128(reinterpret_cast<__m128i *>(list.col + list.n),
                                 _mm_add_epi32(c, _mm_set1_epi32(base)));
                _mm_storeu_ps(list.weight + list.n, _mm_mul_ps(w, _mm_set1_ps(d[i % 4])));
                list.n += __builtin_popcount(used >> (4 * i) & 15);
            }
        }
        return at;
    }
};

} // namespace
} // namespace macko::cpu
