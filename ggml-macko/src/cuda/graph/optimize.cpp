// Prepares a graph before ggml allocates it: an order in which more nodes can be fused, and lifetimes that make the
// fused launches safe.
#include "cuda/graph/fuse.h"
#include "cuda/graph/graph.h"

#include <algorithm>

namespace macko::cuda {

namespace {

// maximum distance between products of one input: rope, norms and views of three projections
constexpr int REACH = 24;

bool is_weight_product(const ggml_tensor * node, const ggml_tensor * x) {
    return op_of(node) == GGML_OP_MUL_MAT && node->src[1] == x && is_weight(node->src[0]) && x->ne[2] * x->ne[3] == 1;
}

// Moves node `from` up to position `to`.
void move_up(ggml_cgraph * graph, int from, int to) {
    std::rotate(graph->nodes + to, graph->nodes + from, graph->nodes + from + 1);
}

// Moves products of the same x directly after the product at i, if their operands exist there. Returns their end.
int gather_products(ggml_cgraph * graph, int i) {
    const ggml_tensor * first = graph->nodes[i];
    int                 end   = i + 1;
    for (int k = end; k < std::min(graph->n_nodes, i + REACH) && end - i < CUDA_SPARSE_MAX_BATCH; k++) {
        const ggml_tensor * node = graph->nodes[k];
        if (is_weight_product(node, first->src[1]) && !stored(node->src[0]) == !stored(first->src[0])) {
            move_up(graph, k, end++);
        }
    }
    return end;
}

// Moves the biases of the products in [i, end) directly after them. Returns the end of the biases.
int gather_biases(ggml_cgraph * graph, int i, int end) {
    const auto is_product = [&](const ggml_tensor * t) {
        return std::find(graph->nodes + i, graph->nodes + end, t) != graph->nodes + end;
    };
    int sums = end;
    for (int k = end; k < std::min(graph->n_nodes, i + REACH); k++) {
        const ggml_tensor * node = graph->nodes[k];
        if (op_of(node) == GGML_OP_ADD && op_of(node->src[1]) == GGML_OP_NONE &&
            is_row_vector(node->src[1], node->ne[0]) && is_product(node->src[0])) {
            move_up(graph, k, sums++);
        }
    }
    return sums;
}

bool depends_on(const ggml_tensor * node, ggml_tensor * const * begin, ggml_tensor * const * end) {
    const auto is_among = [&](const ggml_tensor * t) { return t && std::find(begin, end, t) != end; };
    return is_among(node->view_src) || std::any_of(std::begin(node->src), std::end(node->src), is_among);
}

// Norms of keys lie between the rotations of queries and keys. Moves those after the rotation at i in front of it, so
// that rotations are neighbors. Returns the new index of the rotation.
int move_norms_up(ggml_cgraph * graph, int i) {
    for (int k = i + 1; k < std::min(graph->n_nodes, i + REACH); k++) {
        const ggml_tensor * node = graph->nodes[k];
        const ggml_op       op   = op_of(node);
        if (op == GGML_OP_SET_ROWS || op == GGML_OP_FLASH_ATTN_EXT) {
            break;
        }
        const bool is_of_norm = op == GGML_OP_RMS_NORM || op == GGML_OP_MUL || ggml_op_is_empty(op);
        if (is_of_norm && !depends_on(node, graph->nodes + i, graph->nodes + k)) {
            move_up(graph, k, i++);
        }
    }
    return i;
}

void gather(ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (op_of(node) == GGML_OP_ROPE) {
            i = move_norms_up(graph, i);
        }
        if (op_of(node) != GGML_OP_MUL_MAT || !is_weight_product(node, node->src[1])) {
            continue;
        }
        const int  end         = gather_products(graph, i);
        const bool is_gathered = end - i > 1;
        i                      = (is_gathered ? gather_biases(graph, i, end) : end) - 1;
    }
}

// Makes the operands of all members of a fused launch live until its last node.
void keep_operands(const op_context & ctx, const ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    fused_patterns patterns;
    for (int i = 0; i < graph->n_nodes; i++) {
        const fused_pattern * pattern = computes(graph->nodes[i]) ? patterns.match(ctx, graph, i) : nullptr;
        if (!pattern) {
            continue;
        }
        ggml_tensor * last = graph->nodes[pattern->last()];
        for (int k = i; k < pattern->last(); k++) {
            for (ggml_tensor * src : graph->nodes[k]->src) {
                if (src && op_of(src) != GGML_OP_NONE && pattern->must_be_kept(src)) {
                    params->add_alloc_dep(params->user_data, src->view_src ? src->view_src : src, last);
                }
            }
        }
        i = pattern->last();
    }
}

} // namespace

void graph_optimize(const op_context & ctx, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    gather(graph);
    if (params && params->add_alloc_dep) {
        keep_operands(ctx, graph, params);
    }
}

} // namespace macko::cuda
