// Properties of nodes that all files of this folder test.
#pragma once

#include "abi/op-numbers.h"
#include "backend/host-weights.h"
#include "cuda/ops/ops.h"
#include "cuda/stored-matrix.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

namespace macko::cuda {

// Whether a node computes. false: a view, an empty tensor, or a node that the scheduler disabled.
inline bool computes(const ggml_tensor * node) {
    return !ggml_op_is_empty(op_of(node)) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) && !ggml_is_empty(node);
}

// Index of the next computing node after node i; n_nodes if there is none.
inline int next_node(const ggml_cgraph * graph, int i) {
    do {
        i++;
    } while (i < graph->n_nodes && !computes(graph->nodes[i]));
    return i;
}

inline bool is_weight(const ggml_tensor * t) {
    return op_of(t) == GGML_OP_NONE && t->buffer &&
           ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Whether a node is MUL_MAT or MUL_MAT_ID.
inline bool is_product(const ggml_tensor * node) {
    return op_of(node) == GGML_OP_MUL_MAT || op_of(node) == GGML_OP_MUL_MAT_ID;
}

// Whether w is a sparse weight, in GPU or host memory.
inline bool is_sparse(const ggml_tensor * w) { return stored(w) || host_weights_of(w); }

// Whether t has f32 rows with adjacent elements; rows may have gaps between them.
inline bool is_f32_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->nb[1] % sizeof(float) == 0;
}

// Whether t is one row of n f32 values.
inline bool is_row_vector(const ggml_tensor * t, int64_t n) {
    return t->type == GGML_TYPE_F32 && t->ne[0] == n && ggml_nrows(t) == 1 && t->nb[0] == sizeof(float);
}

// Scratch memory of graph_scratch_nbytes(): the context's, or after the node's result.
inline char * scratch_of(const op_context & ctx, const ggml_tensor * node) {
    return ctx.scratch ? ctx.scratch : static_cast<char *>(node->data) + GGML_PAD(ggml_nbytes(node), 256);
}

} // namespace macko::cuda
