// Vector operations of the two AVX-512 kernel sets, in an unnamed namespace. Only kernels-avx512*.cpp include this.
#pragma once

#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/mask-tables.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the undefined vectors inside its own AVX-512 intrinsics (GCC bug 105593), at the place of
// inlining. Without optimization some intrinsics are macros that pass -1 as a mask.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#endif
#include <immintrin.h>

namespace macko::cpu {
namespace {

struct avx512 : plain_mask_bits {
    using vec = __m512;

    static constexpr int                     width            = 16;
    static constexpr int                     tile_vecs        = 8;
    template <int TYPE> static constexpr int step             = 16;
    static constexpr int                     unrolled_columns = 64;
    static constexpr bool                    has_rows16       = false;
    // With several x, each vector of x is loaded once for two rows.
    template <int NX> static constexpr int rows_per_pass = NX == 1 ? 1 : 2;

    static vec      zero() { return _mm512_setzero_ps(); }
    static vec      set1(float a) { return _mm512_set1_ps(a); }
    static vec      load(const float * p) { return _mm512_loadu_ps(p); }
    static void     store(float * p, vec v) { _mm512_storeu_ps(p, v); }
    static vec      add(vec a, vec b) { return _mm512_add_ps(a, b); }
    static vec      fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    static vec      mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
    static float    sum(vec v) { return _mm512_reduce_add_ps(v); }
    static uint32_t nonzeros(vec v) { return _cvtmask16_u32(_mm512_cmp_ps_mask(v, zero(), _CMP_NEQ_UQ)); }
    static void     zip(vec a, vec b, vec & lo, vec & hi) {
        lo = _mm512_permutex2var_ps(a, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), b);
        hi = _mm512_permutex2var_ps(a, _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31),
                                        b);
    }

    static vec round_f16(vec v) {
        return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static vec round_bf16(vec v) {
        const __m512i   u   = _mm512_castps_si512(v);
        const __m512i   odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i   r   = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 num = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
        return _mm512_castsi512_ps(_mm512_mask_and_epi32(u, num, r, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }

    template <int TYPE> static vec widen(__m256i values) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            return _mm512_cvtph_ps(values);
        } else {
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
        }
    }
    template <int TYPE> static vec load_values(const uint8_t * p) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            return _mm512_loadu_ps(p);
        } else {
            return widen<TYPE>(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        }
    }
    // Hides the origin of v from the compiler. On AMD Zen 5, expand and compress need this twice: with a memory operand
    // they are microcoded, and with zero-masking they wait for the old content of the destination, which makes them
    // three times slower. A register of zeros as source avoids the wait.
    template <typename V> static V in_register(V v) {
        __asm__("" : "+v"(v));
        return v;
    }
    // quantized matrices (kernels-quantized.h)
    static constexpr int x_vecs = 4;

    static __m512i no_sum() { return _mm512_setzero_si512(); }
    static __m512i load_sum(const int32_t * p) { return _mm512_load_si512(p); }
    static __m512i load_ints(const void * p) { return _mm512_load_si512(p); }
    static void    store_ints(void * p, __m512i v) { _mm512_store_si512(p, v); }
    static vec     to_floats(__m512i v) { return _mm512_cvtepi32_ps(v); }
    static __m512i join_digits(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
    // 16 / T lanes from p, T times
    template <int T> static __m512i load_weights(const void * p) {
        if constexpr (T == 1) {
            return _mm512_load_si512(p);
        } else if constexpr (T == 2) {
            return _mm512_broadcast_i64x4(_mm256_load_si256(static_cast<const __m256i *>(p)));
        } else if constexpr (T == 4) {
            return _mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i *>(p)));
        } else if constexpr (T == 8) {
            return _mm512_set1_epi64(*static_cast<const long long *>(p));
        } else {
            return _mm512_set1_epi32(*static_cast<const int *>(p));
        }
    }
    template <int TYPE> static void expand(const uint8_t * values, uint32_t bits, vec * w) {
        w[0] = _mm512_mask_expand_ps(in_register(zero()), static_cast<__mmask16>(bits),
                                     in_register(load_values<TYPE>(values)));
    }
    static void columns(uint32_t bits, uint32_t base, uint32_t * out) {
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i all   = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(base)), lanes);
        _mm512_storeu_si512(
            out, _mm512_mask_compress_epi32(in_register(_mm512_setzero_si512()), static_cast<__mmask16>(bits), all));
    }
};

} // namespace
} // namespace macko::cpu
