// cuBLAS where it is installed: found at run time, never linked. Without it the matrix products use our own kernels.
#pragma once

#include "cuda/ops/ops.h"

#include <memory>

namespace macko::cuda {

struct cublas_library {
    virtual ~cublas_library() = default;
    // y[n, m] = w[m, :] . x[n, :]; w and x of 16-bit type (F16 or BF16) with rows of k elements ldw, ldx apart; y f32,
    // rows ldy apart
    virtual cudaError_t mul_mat(cudaStream_t stream, void * workspace, tensor_type type, int64_t m, int64_t n,
                                int64_t k, const void * w, int64_t ldw, const void * x, int64_t ldx, float * y,
                                int64_t ldy) = 0;
};

// what the library itself takes on Hopper; enough everywhere
constexpr size_t CUBLAS_WORKSPACE_NBYTES = size_t(32) << 20;

// one handle on the current device, for one thread at a time; null where there is no cuBLAS
std::unique_ptr<cublas_library> cublas_open();

} // namespace macko::cuda
