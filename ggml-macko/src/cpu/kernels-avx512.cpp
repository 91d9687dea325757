// Kernels for AVX-512 F/BW/VL/DQ: sixteen columns at a time, widened to float and spread by vexpandps.
#include "cpu/kernels-avx512-common.h"

namespace macko {
namespace {

using simd = avx512;

} // namespace
} // namespace macko

#include "cpu/kernels-impl.h"

const macko::kernel_set macko::kernels_avx512 = {"avx512", prepare, multiply, 16, 0.15f, 0.05f, 1.0f, 0.6f};
