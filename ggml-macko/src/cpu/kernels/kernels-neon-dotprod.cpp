// Kernels for arm64 CPUs with byte dot products (FEAT_DotProd).
#include "cpu/kernels/kernels-bundles-neon.h"

namespace macko::cpu {
namespace {

struct simd : bundles_neon {};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"

const macko::cpu::kernel_set macko::cpu::kernels_neon_dotprod =
    macko::cpu::make_set("neon-dotprod", macko::cpu::NEON_COSTS, { 0.55f }, { nullptr, macko::cpu::expand_quantized });
