// What the GPU computes of a ggml graph: which nodes it takes, in which order they run, and which neighbours one launch
// computes. Called by the backend (cuda/device); everything else in this folder is private to it.
//
//   op-table            one row per ggml op: supported, scratch memory, enqueue
//   adapters            ggml tensors and op parameters -> the plain types of cuda/ops/ops.h
//   sparse-products     MUL_MAT and MUL_MAT_ID with a sparse weight, one node at a time
//   panels              products of many columns: the weight is made dense, a panel of rows at a time
//   fuse-*              one file per pattern of nodes that one launch computes
//   optimize            order and lifetimes, before ggml allocates the graph
//   enqueue             the loop over the nodes
#pragma once

#include "cuda/lib/staging.h"
#include "cuda/ops/ops.h"

#include "ggml-backend-impl.h"

namespace macko::cuda {

// Memory in which sparse weights are made dense, a panel of rows at a time, for products of many columns. It is filled
// on a stream of its own: the next panel, of this weight or of the next one, is made while the last is multiplied.
struct panel_buffers {
    static constexpr int N         = 2;
    size_t               nbytes    = 0; // of each
    char *               memory[N] = {};
    void *               x16       = nullptr; // see cuda_sparse_mul_mat_params
    cudaStream_t         stream    = nullptr;
    cudaEvent_t          begin = nullptr, made[N] = {}, used[N] = {};
    host_staging *       staging   = nullptr; // for weights in host memory
    int                  n_threads = 1;       // that make those dense
};

// These look at types, shapes and parameters only: tensors may have no data and no real buffer.
// sparse: src[0] is a sparse weight.
bool   graph_supports_op(const ggml_tensor * op, bool sparse);    // what the scheduler is to give to this GPU
bool   graph_has_kernel(const ggml_tensor * op, bool sparse);     // what can be queued; op may be any that computes
size_t graph_scratch_nbytes(const ggml_tensor * op, bool sparse); // memory behind op's data for its kernels; 0 for most

// Can a product with a sparse weight in host memory be computed, with panels of so many bytes on a GPU of compute
// capability cc / 10? Such a weight is made dense, however few columns there are.
bool graph_supports_host_weight(const ggml_tensor * op, size_t panel_nbytes, int cc);
// whether the graph has such products
bool graph_has_host_weights(const ggml_cgraph * graph);

// whether the host has to wait for the GPU in the middle of it
bool graph_multiplies_by_expert(const op_context & ctx, const ggml_cgraph * graph);

// Before ggml allocates the graph: brings matrix products that share an input together, and keeps alive what fused
// launches read.
void graph_optimize(const op_context & ctx, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);

// Queues all nodes on ctx.stream. On failure *failed is the node.
cudaError_t graph_enqueue(const op_context & ctx, const ggml_cgraph * graph, bool fuse, const ggml_tensor ** failed);

} // namespace macko::cuda
