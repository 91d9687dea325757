// Kernels for AVX2 with VNNI, which many CPUs without AVX-512 have: products with quantized matrices, by bytes. The set
// avx2 has everything else for these CPUs.
#include "cpu/kernels/kernels-avx2-common.h"
#include "cpu/kernels/kernels-quantized-avx2.h"

namespace macko::cpu {
namespace {

struct simd : avx2, quantized_avx2 {
    // weights are not negative because of vpdpbusd
    using weight_t = uint8_t;
    using x_t      = int8_t;

    static constexpr int COLUMNS = 4, OFFSET = 128;

    static __m256i offsets() { return _mm256_set1_epi8(static_cast<char>(OFFSET)); }
    static __m256i dot(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
    static void store_negative(int32_t * p, __m256i v) { store_ints(p, _mm256_sub_epi32(_mm256_setzero_si256(), v)); }
    static __m256i join_digits(__m256i high, __m256i low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }
    // Moves levels to the columns of a word of the bitmap: two vectors.
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        for_each_32(bits, levels, [&](int i, __m256i part) __attribute__((always_inline)) {
            f(i, _mm256_xor_si256(part, offsets()));
        });
    }
};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-quantized.h"

const macko::cpu::quantized_kernels macko::cpu::kernels_avx2_vnni = { prepare_blocks, multiply_quantized };
