// cuBLAS, if it is installed: found at run time, never linked. Without it, products use the kernels of cuda/ops.
#pragma once

#include "cuda/ops/ops.h"

#include <memory>

namespace macko::cuda {

struct cublas_library {
    virtual ~cublas_library() = default;
    // y[n, m] = w[m, :] . x[n, :]. w and x have rows of k elements of `type` (F16 or BF16); y has rows of m floats.
    // ldw, ldx and ldy: elements from one row to the next.
    virtual cudaError_t mul_mat(cudaStream_t stream, void * workspace, tensor_type type, int64_t m, int64_t n,
                                int64_t k, const void * w, int64_t ldw, const void * x, int64_t ldx, float * y,
                                int64_t ldy) = 0;
};

// cuBLAS's default on Hopper; enough on every GPU.
constexpr size_t CUBLAS_WORKSPACE_NBYTES = size_t(32) << 20;

// Opens a handle on the current device, for one thread at a time. Null if cuBLAS is not installed.
std::unique_ptr<cublas_library> cublas_open();

} // namespace macko::cuda
