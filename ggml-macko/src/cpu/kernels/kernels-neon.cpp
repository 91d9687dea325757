// Kernels for arm64 with Advanced SIMD of Armv8.0.
#include "cpu/kernels/kernels-neon-common.h"

namespace macko::cpu {
namespace {

struct simd : neon {};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"

const macko::cpu::kernel_set macko::cpu::kernels_neon = { "neon",
                                                          prepare,
                                                          macko::cpu::MULTIPLY,
                                                          macko::cpu::QUANTIZED,
                                                          add_columns,
                                                          macko::cpu::NEON_COSTS,
                                                          macko::cpu::ROW_OPS,
                                                          {},
                                                          { nullptr, macko::cpu::expand_quantized } };
