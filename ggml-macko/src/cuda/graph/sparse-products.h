// MUL_MAT and MUL_MAT_ID with a sparse weight that stays sparse, one node at a time. panels.h has products of many
// columns.
#pragma once

#include "cuda/graph/nodes.h"
#include "cuda/ops/ops.h"

namespace macko::cuda {

// Checks the parts that a graph controls. The weight itself was validated when it was loaded.
bool sparse_mul_mat_supported(const ggml_tensor * op);

cudaError_t enqueue_sparse_mul_mat(const op_context & ctx, ggml_tensor * node);
cudaError_t enqueue_sparse_mul_mat_id(const op_context & ctx, ggml_tensor * node);

// Whether a product of experts is one product for all tokens, and its scratch memory.
bool                       groups_experts(const ggml_tensor * node);
size_t                     grouped_scratch_nbytes(const ggml_tensor * node);
cudaError_t                enqueue_grouped_experts(const op_context & ctx, ggml_tensor * node);
cuda_sparse_mul_mat_params grouped_experts_params(const op_context & ctx, const ggml_tensor * node);

// ---- for panels.cpp and fuse-sparse-products.cpp ----

// y = W x for the first rows_per_matrix rows of w and n columns; ldx and ldy: floats from one column to the next.
cuda_sparse_mul_mat_params sparse_mul_mat_params(const op_context & ctx, const stored_matrix & w, const float * x,
                                                 float * y, int64_t ldx, int64_t ldy, int64_t n);

// First row of the stored matrix for batch (i2, i3) of a product.
int64_t first_row_of_batch(const ggml_tensor * node, int64_t i2, int64_t i3);

// Calls f(i2, i3) for the batches of a product, until a call fails.
template <typename F> cudaError_t for_each_batch(const ggml_tensor * node, F && f) {
    for (int64_t i3 = 0; i3 < node->src[1]->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < node->src[1]->ne[2]; i2++) {
            const cudaError_t error = f(i2, i3);
            if (error != cudaSuccess) {
                return error;
            }
        }
    }
    return cudaSuccess;
}

} // namespace macko::cuda
