// Kernels for arm64 CPUs with byte dot products (FEAT_DotProd), and with products of F16 that are added to floats
// (FEAT_FHM).
#include "cpu/kernels/kernels-bundles-neon.h"

namespace macko::cpu {
namespace {

struct simd : bundles_neon {};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"

const macko::cpu::kernel_set macko::cpu::kernels_neon_fhm =
    macko::cpu::make_set("neon-fhm", macko::cpu::NEON_COSTS, { 0.55f }, { nullptr, macko::cpu::expand_quantized });
