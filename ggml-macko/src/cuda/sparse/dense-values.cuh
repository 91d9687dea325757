// Dense values of quantized ones. Internal to cuda/sparse.
#pragma once

#include "cuda/lib/common.cuh"

namespace macko::cuda {

// d * q rounded to nearest even, the largest finite value where that overflows, +0 for 0 (FORMAT.md section 2)
__device__ __forceinline__ void to_dense(float * to, float v) { *to = v == 0.0f ? 0.0f : v; }
__device__ __forceinline__ void to_dense(__half * to, float v) {
    *to = v == 0.0f ? __half(0.0f) : __float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f));
}
__device__ __forceinline__ void to_dense(__nv_bfloat16 * to, float v) {
    *to = v == 0.0f ? __nv_bfloat16(0.0f) : __float2bfloat16_rn(v);
}

} // namespace macko::cuda
