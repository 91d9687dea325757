// The GPU's part of a ggml graph: the supported nodes, their order, and the neighbors that one launch computes. The
// backend (cuda/device) calls these functions; everything else in this folder is private.
//
//   op-table            one row per ggml op: supported, scratch memory, enqueue
//   adapters            ggml tensors and op parameters -> the plain types of cuda/ops/ops.h
//   sparse-products     MUL_MAT and MUL_MAT_ID with a sparse weight, one node at a time
//   panels              products of many columns: makes the weight dense, one panel of rows at a time
//   fuse-*              one file per pattern of nodes that one launch computes
//   optimize            order and lifetimes of nodes, before ggml allocates the graph
//   enqueue             the loop over the nodes
#pragma once

#include "cuda/lib/staging.h"
#include "cuda/ops/ops.h"

#include "ggml-backend-impl.h"

namespace macko::cuda {

// Memory for dense panels (ranges of rows) of sparse weights, for products of many columns. A separate stream fills it:
// while one panel is multiplied, the next panel of the same or the next weight is filled.
struct panel_buffers {
    static constexpr int N         = 2;
    size_t               nbytes    = 0; // of each
    char *               memory[N] = {};
    void *               x16       = nullptr; // see cuda_sparse_mul_mat_params
    cudaStream_t         stream    = nullptr;
    cudaEvent_t          begin = nullptr, made[N] = {}, used[N] = {};
    host_staging *       staging   = nullptr; // for weights in host memory
    int                  n_threads = 1;       // host threads that make these weights dense
};

// These functions use types, shapes and parameters only, so tensors may have no data and no real buffer. sparse: src[0]
// is a sparse weight.
bool   graph_supports_op(const ggml_tensor * op, bool sparse); // whether the scheduler should assign op to this GPU
bool   graph_has_kernel(const ggml_tensor * op, bool sparse);  // whether op can be queued; any computing op is allowed
size_t graph_scratch_nbytes(const ggml_tensor * op, bool sparse); // memory after op's data for its kernels; 0 for most

// Whether a product with a sparse weight in host memory can be computed, with panels of panel_nbytes bytes on a GPU of
// compute capability cc / 10. Such a weight is made dense for any number of columns.
bool graph_supports_host_weight(const ggml_tensor * op, size_t panel_nbytes, int cc);
// Whether the graph has such products.
bool graph_has_host_weights(const ggml_cgraph * graph);

// Whether the host must wait for the GPU in the middle of the graph.
bool graph_multiplies_by_expert(const op_context & ctx, const ggml_cgraph * graph);

// Called before ggml allocates the graph. Moves matrix products with the same input together, and extends the lifetimes
// of operands that fused launches read.
void graph_optimize(const op_context & ctx, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);

// Queues all nodes on ctx.stream. On failure *failed is the failed node.
cudaError_t graph_enqueue(const op_context & ctx, const ggml_cgraph * graph, bool fuse, const ggml_tensor ** failed);

} // namespace macko::cuda
