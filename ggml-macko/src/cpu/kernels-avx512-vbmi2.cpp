// Kernels for AVX-512 with VBMI2: 16-bit values are spread 32 columns at a time by vpexpandw, then widened.
#include "cpu/kernels-avx512-common.h"

namespace macko {
namespace {

struct simd : avx512 {
    template <int TYPE> static constexpr int step = TYPE == GGML_MACKO_TYPE_F32 ? 16 : 32;

    template <int TYPE> static void expand(const uint8_t * values, uint32_t bits, vec * w) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            avx512::expand<TYPE>(values, bits, w);
        } else {
            const __m512i all = _mm512_mask_expand_epi16(in_register(_mm512_setzero_si512()), bits, in_register(_mm512_loadu_si512(values)));
            w[0] = widen<TYPE>(_mm512_castsi512_si256(all));
            w[1] = widen<TYPE>(_mm512_extracti64x4_epi64(all, 1));
        }
    }
};

} // namespace
} // namespace macko

#include "cpu/kernels-impl.h"

const macko::kernel_set macko::kernels_avx512_vbmi2 = {"avx512-vbmi2", prepare, multiply, 16, 0.1f, 0.05f, 1.0f, 0.6f};
