// Kernels for AVX-512 F, BW, VL and DQ. Processes sixteen columns at a time: values are widened to float, and vexpandps
// moves them to the lanes of their columns. Bundles use AVX2 instructions.
#include "cpu/kernels/kernels-avx512-common.h"
#include "cpu/kernels/kernels-bundles-avx2.h"
#include "cpu/kernels/kernels-quantized-avx2.h"

namespace macko::cpu {
namespace {

struct simd : avx512, bundles_avx2, quantized_avx2 {
    static constexpr bool has_bundles = true;

    static __m512i dot(__m512i sum, __m512i w, __m512i x) {
        // GCC would make all products first, for which registers are too few
        return in_register(_mm512_add_epi32(sum, _mm512_madd_epi16(w, x)));
    }
    // Moves levels to the columns of a word of the bitmap: two vectors.
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        for_each_32(bits, levels,
                    [&](int i, __m256i part) __attribute__((always_inline)) { f(i, _mm512_cvtepi8_epi16(part)); });
    }
};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"
#include "cpu/kernels/span-ops-avx2.h"

const macko::cpu::kernel_set macko::cpu::kernels_avx512 = macko::cpu::make_set(
    "avx512", { 0.0f, 16, 0.04f, 0.032f, 0.12f, 0.5f, 0.46f }, { 0.55f }, {}, &macko::cpu::SPAN_OPS);
