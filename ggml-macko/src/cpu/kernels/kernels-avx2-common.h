// Vector operations of the sets avx2 and avx2-vnni, in an unnamed namespace. Only kernels-avx2*.cpp include this.
#pragma once

#include "cpu/kernels/dispatch.h"

#include <immintrin.h>

namespace macko::cpu {
namespace {

struct avx2 {
    using vec = __m256;

    static constexpr int                width     = 8;
    static constexpr bool               has_basis = false;
    static constexpr const kernel_set * basis     = nullptr;

    static vec   zero() { return _mm256_setzero_ps(); }
    static vec   set1(float a) { return _mm256_set1_ps(a); }
    static vec   load(const float * p) { return _mm256_loadu_ps(p); }
    static void  store(float * p, vec v) { _mm256_storeu_ps(p, v); }
    static vec   add(vec a, vec b) { return _mm256_add_ps(a, b); }
    static vec   fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
    static vec   mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
    static float sum(vec v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s        = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    static void zip(vec a, vec b, vec & lo, vec & hi) {
        const vec l = _mm256_unpacklo_ps(a, b);
        const vec h = _mm256_unpackhi_ps(a, b);
        lo          = _mm256_permute2f128_ps(l, h, 0x20);
        hi          = _mm256_permute2f128_ps(l, h, 0x31);
    }

    // quantized matrices (kernels-quantized.h)
    static constexpr int x_vecs = 2;

    static __m256i no_sum() { return _mm256_setzero_si256(); }
    static __m256i load_sum(const int32_t * p) { return load_ints(p); }
    static __m256i load_ints(const void * p) { return _mm256_load_si256(static_cast<const __m256i *>(p)); }
    static vec     to_floats(__m256i v) { return _mm256_cvtepi32_ps(v); }
    static void    store_ints(void * p, __m256i v) { _mm256_store_si256(static_cast<__m256i *>(p), v); }
    // 8 / T lanes from p, T times
    template <int T> static __m256i load_weights(const void * p) {
        if constexpr (T == 1) {
            return load_ints(p);
        } else if constexpr (T == 2) {
            return _mm256_broadcastsi128_si256(_mm_load_si128(static_cast<const __m128i *>(p)));
        } else if constexpr (T == 4) {
            return _mm256_set1_epi64x(*static_cast<const long long *>(p));
        } else {
            return _mm256_set1_epi32(*static_cast<const int *>(p));
        }
    }
};

} // namespace
} // namespace macko::cpu
