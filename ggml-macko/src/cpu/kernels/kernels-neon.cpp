// Kernels for arm64 with Advanced SIMD of Armv8.0.
#include "cpu/kernels/kernels-neon-common.h"

namespace macko::cpu {
namespace {

struct simd : neon {};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"

const macko::cpu::kernel_set macko::cpu::kernels_neon =
    macko::cpu::make_set("neon", macko::cpu::NEON_COSTS, {}, { nullptr, macko::cpu::expand_quantized });
