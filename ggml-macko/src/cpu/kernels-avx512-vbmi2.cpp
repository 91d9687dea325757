// Kernels for AVX-512 with VBMI2: 16-bit values are spread 32 columns at a time by vpexpandw, then widened.
#include "cpu/kernels-avx512-common.h"

namespace macko {
namespace {

struct simd : avx512 {
    template <int TYPE> static constexpr int  step  = TYPE == GGML_MACKO_TYPE_F32 ? 16 : 32;
    template <int TYPE> static constexpr bool packs = TYPE != GGML_MACKO_TYPE_F32;

    template <int TYPE> static void expand(const uint8_t * values, uint32_t bits, vec * w) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            avx512::expand<TYPE>(values, bits, w);
        } else {
            const __m512i packed = in_register(_mm512_loadu_si512(values));
            const __m512i all    = _mm512_mask_expand_epi16(in_register(_mm512_setzero_si512()), bits, packed);
            w[0] = widen<TYPE>(_mm512_castsi512_si256(all));
            w[1] = widen<TYPE>(_mm512_extracti64x4_epi64(all, 1));
        }
    }
    // the x (32 16-bit numbers) whose bits are set, one behind the other; writes up to 64 bytes. Half-width stores, because a store of 64
    // bytes crosses a cache line nearly always and stores are what this loop waits for; more than 16 bits are rare at these densities.
    static void pack(const uint8_t * x, uint32_t bits, uint8_t * out) {
        const __m512i all = _mm512_mask_compress_epi16(in_register(_mm512_setzero_si512()), bits, _mm512_load_si512(x));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm512_castsi512_si256(all));
        if (__builtin_expect(__builtin_popcount(bits) > 16, 0)) {
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(out) + 1, _mm512_extracti64x4_epi64(all, 1));
        }
    }
    static void clear_halves(uint8_t * out) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm256_setzero_si256()); }
    // v, which has TYPE's precision, as 16-bit numbers
    template <int TYPE> static void narrow(uint8_t * out, vec v) {
        __m256i h;
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        } else {
            h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16));
        }
        _mm256_store_si256(reinterpret_cast<__m256i *>(out), h);
    }
};

} // namespace
} // namespace macko

#include "cpu/kernels-impl.h"

const macko::kernel_set macko::kernels_avx512_vbmi2 = {"avx512-vbmi2", prepare, multiply, { 0.2f, 16, 0.03f, 0.032f, 0.12f, 0.5f, 0.46f }};
