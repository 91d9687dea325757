// What the GPU computes: which nodes of a GGML graph it takes, how it walks over them, and which neighbours it fuses
// into one launch.
#pragma once

#include "cuda/ops/ops.h"
#include "cuda/sparse/ec-csr/layout.h"
#include "cuda/sparse/mul-mat.cuh"
#include "ggml-backend-impl.h"

namespace macko::cuda {

// a sparse weight in one of our buffers: tensor->extra of the tensor that was loaded. Nothing else in our buffers has
// an extra.
struct stored_matrix {
    cuda_sparse_matrix           matrix;
    int64_t                      rows_per_matrix; // ne1; experts and other matrices follow each other
    std::unique_ptr<matrix_part> part;            // matrix.part, where the matrix has one
    cuda_memory                  outgrown;        // of a matrix that did not fit the memory reserved for it; else null
};
inline const stored_matrix * stored(const ggml_tensor * tensor) {
    return static_cast<const stored_matrix *>(tensor->extra);
}

// Where sparse weights are made dense, a panel of rows at a time, for products of many columns: on a stream of their
// own, so that the next panel,
// of this weight or of the one that comes next, is made while the last is multiplied.
struct panel_buffers {
    static constexpr int N         = 2;
    size_t               nbytes    = 0; // of each
    char *               memory[N] = {};
    void *               x16       = nullptr; // of sparse products of several columns (cuda_sparse_mul_mat_params)
    cudaStream_t         stream    = nullptr;
    cudaEvent_t          begin = nullptr, made[N] = {}, used[N] = {};
};

bool is_no_op(const ggml_tensor * node); // views: nothing to compute

// Looks at types, shapes and parameters only: tensors may have no data and no real buffer. sparse: src[0] is a sparse
// weight.
bool graph_supports_op(const ggml_tensor * op, bool sparse);
// memory behind the data of op's result that its kernels use while they run; 0 for most
size_t graph_scratch_nbytes(const ggml_tensor * op, bool sparse);

// before the graph is allocated: brings matrix products that share their input together, and keeps what fused launches
// read
void graph_optimize(const op_context & ctx, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);
// queues all nodes on ctx.stream; on failure *failed is the node
cudaError_t graph_queue(const op_context & ctx, const ggml_cgraph * graph, bool fuse, const ggml_tensor ** failed);

} // namespace macko::cuda
