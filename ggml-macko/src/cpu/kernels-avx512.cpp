// Kernels for AVX-512 F/BW/VL/DQ: sixteen columns at a time, widened to float and spread by vexpandps.
#include "cpu/kernels-avx512-common.h"

namespace macko {
namespace {

using simd = avx512;

} // namespace
} // namespace macko

#include "cpu/kernels-impl.h"
#include "cpu/row-ops-impl.h"

const macko::kernel_set macko::kernels_avx512 = {"avx512", prepare, multiply, { 0.0f, 16, 0.04f, 0.032f, 0.12f, 0.5f, 0.46f }, macko::ROW_OPS};
