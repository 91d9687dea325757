// Kernels for AVX-512 F, BW, VL and DQ. Sixteen columns at a time: values are widened to float, and vexpandps moves
// them to the lanes of their columns.
#include "cpu/kernels-avx512-common.h"

namespace macko::cpu {
namespace {

using simd = avx512;

} // namespace
} // namespace macko::cpu

#include "cpu/kernels-impl.h"
#include "cpu/row-ops-impl.h"

const macko::cpu::kernel_set macko::cpu::kernels_avx512 = {
    "avx512", prepare, multiply, { 0.0f, 16, 0.04f, 0.032f, 0.12f, 0.5f, 0.46f }, macko::cpu::ROW_OPS
};
