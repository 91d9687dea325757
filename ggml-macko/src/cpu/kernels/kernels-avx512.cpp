// Kernels for AVX-512 F, BW, VL and DQ. Processes sixteen columns at a time: values are widened to float, and vexpandps
// moves them to the lanes of their columns. Quantized weights with one x use AVX2 instructions.
#include "cpu/kernels/kernels-avx512-common.h"
#include "cpu/kernels/kernels-bundles-avx2.h"
#include "cpu/kernels/kernels-compress-avx2.h"

namespace macko::cpu {
namespace {

struct simd : avx512, compress_avx2, bundles_avx2 {
    static constexpr bool                     has_bundles     = true;
    template <int TYPE> static constexpr bool has_rows16      = is_quant_type(TYPE);
    template <int TYPE> static constexpr int  rows_compressed = 2;

    static void store_integers(uint8_t * scratch, int64_t col, vec v, float inverse) {
        const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
        _mm256_store_si256(reinterpret_cast<__m256i *>(scratch + 2 * col), _mm512_cvtsepi32_epi16(x));
    }
};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"
#include "cpu/kernels/span-ops-avx2.h"

const macko::cpu::kernel_set macko::cpu::kernels_avx512 = { "avx512",
                                                            prepare,
                                                            macko::cpu::MULTIPLY,
                                                            add_columns,
                                                            { true, 0.0f, 16, 0.04f, 0.032f, 0.12f, 0.5f, 0.46f },
                                                            macko::cpu::ROW_OPS,
                                                            { true, 0.55f },
                                                            &macko::cpu::SPAN_OPS };
