// Shared by all CUDA sources: checked calls, launches, warp reductions, value conversion. Does not use ggml.
#pragma once

#include "codec/status.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mutex>
#include <type_traits>

namespace macko::cuda {

// Sets the error message of a failed CUDA call, and returns its status.
[[nodiscard]] inline int cuda_fail(cudaError_t error, const char * what) {
    const int status =
        error == cudaErrorMemoryAllocation ? GGML_MACKO_STATUS_OUT_OF_MEMORY : GGML_MACKO_STATUS_LOAD_FAILED;
    return fail(status, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// for functions that return a ggml_macko_status
#define CUDA_OK(call)                                              \
    do {                                                           \
        const cudaError_t cuda_ok_error = (call);                  \
        if (cuda_ok_error != cudaSuccess) {                        \
            return ::macko::cuda::cuda_fail(cuda_ok_error, #call); \
        }                                                          \
    } while (0)

// for functions that return a cudaError_t
#define CUDA_TRY(call)                             \
    do {                                           \
        const cudaError_t cuda_try_error = (call); \
        if (cuda_try_error != cudaSuccess) {       \
            return cuda_try_error;                 \
        }                                          \
    } while (0)

constexpr int MAX_GRID_YZ = 65535; // blocks of a grid in its second and third dimension

// Returns f(std::integral_constant<int, N>()) for the N that n equals; `otherwise` if it equals none.
template <int... N, typename R, typename F> R with_constant(int64_t n, R otherwise, F && f) {
    (void)((n == N && (otherwise = f(std::integral_constant<int, N>()), true)) || ...);
    return otherwise;
}

// Properties of the current device for launches; queried once per device.
struct cuda_device_info {
    int multiprocessors;
    int shared_nbytes; // maximum for one block
    int cc;            // 10 * major + minor
};
inline cudaError_t cuda_current_device(cuda_device_info * out) {
    constexpr int           MAX_DEVICES = 64;
    static cuda_device_info known[MAX_DEVICES];
    static std::once_flag   once[MAX_DEVICES];
    static cudaError_t      error[MAX_DEVICES];
    int                     device = 0;
    CUDA_TRY(cudaGetDevice(&device));
    if (device >= MAX_DEVICES) {
        return cudaErrorInvalidDevice;
    }
    std::call_once(once[device], [&] {
        cuda_device_info & info  = known[device];
        int                major = 0, minor = 0;
        const auto         ask = [&](int * value, cudaDeviceAttr attribute) {
            if (error[device] == cudaSuccess) {
                error[device] = cudaDeviceGetAttribute(value, attribute, device);
            }
        };
        ask(&info.multiprocessors, cudaDevAttrMultiProcessorCount);
        ask(&info.shared_nbytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        ask(&major, cudaDevAttrComputeCapabilityMajor);
        ask(&minor, cudaDevAttrComputeCapabilityMinor);
        info.cc = 10 * major + minor;
    });
    *out = known[device];
    return error[device];
}

#ifdef __CUDACC__

constexpr unsigned FULL_WARP = 0xffffffffu;

__device__ __forceinline__ float add_squares(float sum, float4 v) {
    return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
}

// Sum over groups of WIDTH adjacent lanes; every lane gets the same bits.
template <int WIDTH = 32> __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
        v += __shfl_xor_sync(FULL_WARP, v, offset);
    }
    return v;
}

// Maximum over the warp; every lane gets it.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
    }
    return x;
}

// The largest number of the warp; every lane gets it. For the bits of floats that are not negative, too.
__device__ __forceinline__ uint32_t warp_max_bits(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, v);
#else
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        v = max(v, __shfl_xor_sync(FULL_WARP, v, offset));
    }
    return v;
#endif
}

// Sum of the lanes up to and including this one.
template <typename T> __device__ __forceinline__ T warp_prefix_sum(T v) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const T below = __shfl_up_sync(FULL_WARP, v, offset);
        v += lane >= offset ? below : 0;
    }
    return v;
}

// Launches a kernel. overlap: programmatic dependent launch (cc >= 9.0), which lets the kernel start before the
// previous kernel on the stream has ended.
template <typename... PARAMS, typename... ARGS>
cudaError_t cuda_launch(void (*kernel)(PARAMS...), dim3 grid, dim3 block, size_t shared_nbytes, bool overlap,
                        cudaStream_t stream, const ARGS &... args) {
    cudaLaunchAttribute attribute                        = {};
    attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config                            = {};
    config.gridDim                                       = grid;
    config.blockDim                                      = block;
    config.dynamicSmemBytes                              = shared_nbytes;
    config.stream                                        = stream;
    config.attrs                                         = &attribute;
    config.numAttrs                                      = overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<PARAMS>(args)...);
}

// Loads that bypass L1, for data that is read once. This leaves the memory of L1 to shared memory.
__device__ __forceinline__ uint4 load_streaming(const uint4 * p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_streaming(const uint2 * p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_streaming(const uint32_t * p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_streaming(const uint16_t * p) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_streaming(const uint8_t * p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Clamps values to the range of F16, because an infinity would turn whole rows of a product into NaN. NaN stays NaN.
__device__ __forceinline__ float saturate_f16(float v) {
    return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

__device__ __forceinline__ float to_f32(float v) { return v; }
__device__ __forceinline__ float to_f32(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }

// Programmatic dependent launch. After cuda_wait_for_previous(), all writes of earlier kernels are visible. After
// cuda_allow_next(), the next kernel may be scheduled; it waits for the end of this one in its own
// cuda_wait_for_previous(). Both functions do nothing before cc 9.0 and in ordinary launches.
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

} // namespace macko::cuda
