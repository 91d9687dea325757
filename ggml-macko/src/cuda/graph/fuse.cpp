#include "cuda/graph/fuse.h"

#include <algorithm>

namespace macko::cuda {

const ggml_tensor * source_of_views(const ggml_tensor * t) {
    constexpr int MAX_VIEWS = 16; // models have three; a graph from a network may contain a cycle
    for (int i = 0; i < MAX_VIEWS && ggml_op_is_empty(op_of(t)) && t->src[0]; i++) {
        t = t->src[0];
    }
    return t;
}

bool is_reshaped(const ggml_tensor * t, const ggml_tensor * x) {
    return source_of_views(t) == x && ggml_nelements(t) == ggml_nelements(x) && t->view_offs == x->view_offs &&
           ggml_is_contiguous(t) && ggml_is_contiguous(x);
}

bool uses_stay_inside(const ggml_cgraph * graph, int first, int last, const ggml_tensor * stored) {
    for (int k = first; k < last; k++) {
        const ggml_tensor * node   = graph->nodes[k];
        int64_t             n_uses = 0;
        for (int j = k + 1; j <= last; j++) {
            n_uses += std::count(std::begin(graph->nodes[j]->src), std::end(graph->nodes[j]->src), node);
        }
        const bool is_inner = n_uses == ggml_node_get_use_count(graph, k) && !(node->flags & GGML_TENSOR_FLAG_OUTPUT);
        if (node != stored && !is_inner) {
            return false;
        }
    }
    return true;
}

} // namespace macko::cuda
