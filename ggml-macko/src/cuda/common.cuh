// What the CUDA sources share: checked calls, warp reductions, value conversion. No ggml.
#pragma once

#include "format/status.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace macko {

// a failed CUDA call as a status with one line of text
[[nodiscard]] inline int cuda_fail(cudaError_t error, const char * what) {
    const int status = error == cudaErrorMemoryAllocation ? GGML_MACKO_STATUS_OUT_OF_MEMORY : GGML_MACKO_STATUS_LOAD_FAILED;
    return fail(status, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// in functions that return a ggml_macko_status
#define CUDA_OK(call)                                         \
    do {                                                      \
        const cudaError_t cuda_ok_error = (call);             \
        if (cuda_ok_error != cudaSuccess) {                   \
            return ::macko::cuda_fail(cuda_ok_error, #call);  \
        }                                                     \
    } while (0)

// in functions that return a cudaError_t
#define CUDA_TRY(call)                              \
    do {                                            \
        const cudaError_t cuda_try_error = (call);  \
        if (cuda_try_error != cudaSuccess) {        \
            return cuda_try_error;                  \
        }                                           \
    } while (0)

#ifdef __CUDACC__

constexpr unsigned FULL_WARP = 0xffffffffu;

// sum over groups of WIDTH neighbouring lanes, the same bits on each of them
template <int WIDTH = 32> __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
        v += __shfl_xor_sync(FULL_WARP, v, offset);
    }
    return v;
}

__device__ __forceinline__ float to_f32(float v)         { return v; }
__device__ __forceinline__ float to_f32(__half v)        { return __half2float(v); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }

// Programmatic dependent launch. cuda_wait_for_previous: what the kernel before wrote is visible afterwards.
// cuda_allow_next: the next kernel may be scheduled; it waits for our end where it says so. No-ops before sm_90 and in ordinary launches.
__device__ __forceinline__ void cuda_wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void cuda_allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif // __CUDACC__

} // namespace macko
