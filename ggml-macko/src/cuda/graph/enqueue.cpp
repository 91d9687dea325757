// The loop over the nodes of a graph: fused where a pattern matches and is safe, else one node at a time.
#include "cuda/graph/fuse.h"
#include "cuda/graph/graph.h"
#include "cuda/graph/op-table.h"

namespace macko::cuda {

namespace {

cudaError_t enqueue_node(panel_pipeline & panels, ggml_tensor * node) {
    const op_row * row = find_op(op_of(node), is_product(node) && is_sparse(node->src[0]));
    if (!row) {
        return cudaErrorInvalidValue;
    }
    if (op_of(node) != GGML_OP_MUL_MAT) { // the functions of MUL_MAT decide for themselves
        panels.forget_x16();
    }
    return row->enqueue(panels, node);
}

} // namespace

cudaError_t graph_enqueue(const op_context & ctx, const ggml_cgraph * graph, bool fuse, const ggml_tensor ** failed) {
    panel_pipeline panels(ctx, graph);
    fused_patterns patterns;
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        if (!computes(node)) {
            continue;
        }
        const fused_pattern * pattern = fuse ? patterns.match(ctx, graph, i) : nullptr;
        cudaError_t           error;
        if (pattern && pattern->is_safe()) {
            panels.forget_x16();
            error = pattern->enqueue(ctx);
            i     = pattern->last();
        } else {
            error = enqueue_node(panels, node);
        }
        if (error != cudaSuccess) {
            *failed = node;
            return error;
        }
    }
    return cudaSuccess;
}

} // namespace macko::cuda
