// Copies from global to shared memory that need no registers (cp.async), for the kernels that fill it with x.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace macko {

// 4 or 16 bytes from global to shared memory, on their way until wait_for_copies(): no registers, so all of x can be under way at once
__device__ __forceinline__ void copy_float(float * to, const float * from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
    *to = *from;
#endif
}
__device__ __forceinline__ void copy_float4(float * to, const float * from) { // both aligned to 16 bytes
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
    *reinterpret_cast<float4 *>(to) = *reinterpret_cast<const float4 *>(from);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

} // namespace macko
