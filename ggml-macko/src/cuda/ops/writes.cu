// Several small writes from host memory in one launch. Also op_compute_capability(), which returns the architecture
// that the kernels were compiled for.
#include "cuda/lib/common.cuh"
#include "cuda/ops/ops.h"

#include <algorithm>
#include <cstring>

namespace macko::cuda {

static_assert(sizeof(small_writes) <= 4096, "kernel parameters");

bool small_writes::add(void * dst, const void * src, size_t size) {
    const size_t padded = (size + 3) & ~size_t(3);
    if (n == MAX || nbytes + padded > MAX_NBYTES) {
        return false;
    }
    memcpy(reinterpret_cast<char *>(data) + nbytes, src, size);
    writes[n++] = { static_cast<char *>(dst), nbytes, static_cast<uint32_t>(size) };
    nbytes += static_cast<uint32_t>(padded);
    return true;
}

static __global__ void __launch_bounds__(256) small_writes_kernel(const __grid_constant__ small_writes w) {
    for (uint32_t i = 0; i < w.n; i++) {
        char * const   dst   = w.writes[i].dst;
        const uint32_t bytes = w.writes[i].nbytes, at = w.writes[i].at;
        const uint32_t words = reinterpret_cast<uintptr_t>(dst) % 4 == 0 ? bytes / 4 : 0;
        for (uint32_t k = threadIdx.x; k < words; k += blockDim.x) {
            reinterpret_cast<uint32_t *>(dst)[k] = w.data[at / 4 + k];
        }
        for (uint32_t k = words * 4 + threadIdx.x; k < bytes; k += blockDim.x) {
            dst[k] = reinterpret_cast<const char *>(w.data)[at + k];
        }
        __syncthreads(); // the next write may have the same destination
    }
}

cudaError_t op_small_writes(const small_writes & w, cudaStream_t stream) {
    if (w.n == 0) {
        return cudaSuccess;
    }
    small_writes_kernel<<<1, 256, 0, stream>>>(w);
    return cudaGetLastError();
}

cudaError_t op_compute_capability(int * cc) {
    cuda_device_info   device;
    cudaFuncAttributes code;
    CUDA_TRY(cuda_current_device(&device));
    CUDA_TRY(cudaFuncGetAttributes(&code, small_writes_kernel)); // all kernels are compiled for the same architectures
    *cc = std::min(device.cc, code.ptxVersion);
    return cudaSuccess;
}

} // namespace macko::cuda
