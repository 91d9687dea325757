// New keys and values of a decoder layer on their way into the cache:
//
//   q          k          v
//   |          |          |
//   [ROPE]     ROPE       |
//   |          | (view)   | (view)
//   ...        SET_ROWS   SET_ROWS
//              K cache    V cache
//
// One launch rotates the queries, and writes rotated keys and the values to their rows of the caches. The rotated keys
// themselves are not stored.
#include "cuda/graph/fuse-rope-cache.h"

#include "cuda/graph/adapters.h"

#include <cstring>

namespace macko::cuda {

namespace {

bool same_rope(const ggml_tensor * a, const ggml_tensor * b) {
    return !memcmp(a->op_params, b->op_params, sizeof(a->op_params)) && a->src[1] == b->src[1] &&
           a->src[2] == b->src[2];
}

// Are `rows`, which set_k stores, a view of all of rope_k as whole rows of the cache?
bool is_rope_as_rows(const ggml_tensor * rows, const ggml_tensor * rope_k) {
    const bool same_elements = ggml_nelements(rows) == ggml_nelements(rope_k) && rows->view_offs == rope_k->view_offs &&
                               ggml_is_contiguous(rows) && ggml_is_contiguous(rope_k);
    return source_of_views(rows) == rope_k && same_elements && rows->ne[0] == rope_k->ne[0] * rope_k->ne[1] &&
           rows->ne[1] == rope_k->ne[2];
}

// Is the view `rows` between nodes rope_k and set_k used by anybody but set_k?
bool has_other_uses(const ggml_cgraph * graph, int rope_k, int set_k, const ggml_tensor * rows) {
    for (int j = rope_k + 1; j < set_k; j++) {
        if (graph->nodes[j] == rows && ggml_node_get_use_count(graph, j) != 1) {
            return true;
        }
    }
    return false;
}

bool are_row_numbers(const ggml_tensor * ids) { return ids->type == GGML_TYPE_I64 && ggml_is_contiguous(ids); }

class fused_rope_cache : public fused_pattern {
public:
    bool match(const op_context &, const ggml_cgraph * graph, int i) override {
        const bool found = nodes_.match(graph, i);
        last_            = nodes_.last;
        return found;
    }
    bool        is_safe() const override;
    cudaError_t enqueue(const op_context & ctx) const override;

private:
    rope_cache_nodes nodes_;
};

// the kernel may write rotated queries before it reads keys and values
bool fused_rope_cache::is_safe() const {
    const ggml_tensor * q = nodes_.rope_q;
    return !q || (!overlaps(q, nodes_.rope_k->src[0]) && !overlaps(q, nodes_.set_v->src[0]) &&
                  !overlaps_not_in_place(q, q->src[0]));
}

cudaError_t fused_rope_cache::enqueue(const op_context & ctx) const {
    const ggml_tensor * rope = nodes_.rope_k;
    return op_rope_cache(ctx, rope_params_of(rope), operand(rope->src[1]), optional_operand(rope->src[2]).get(),
                         nodes_.params());
}

} // namespace

const ggml_tensor * source_of_views(const ggml_tensor * t) {
    constexpr int MAX_VIEWS = 16; // models have three; in a graph that came over a network they may form a circle
    for (int i = 0; i < MAX_VIEWS && ggml_op_is_empty(op_of(t)) && t->src[0]; i++) {
        t = t->src[0];
    }
    return t;
}

bool rope_cache_nodes::match(const ggml_cgraph * graph, int i) {
    *this = rope_cache_nodes();
    if (op_of(graph->nodes[i]) != GGML_OP_ROPE) {
        return false;
    }
    int       k      = i;
    const int second = next_node(graph, i);
    if (second < graph->n_nodes && op_of(graph->nodes[second]) == GGML_OP_ROPE &&
        same_rope(graph->nodes[i], graph->nodes[second])) {
        rope_q = graph->nodes[i];
        k      = second;
    }
    const int k_set = next_node(graph, k), v_set = next_node(graph, k_set);
    if (v_set >= graph->n_nodes || op_of(graph->nodes[k_set]) != GGML_OP_SET_ROWS ||
        op_of(graph->nodes[v_set]) != GGML_OP_SET_ROWS || !ggml_node_has_n_uses(graph, k, 1)) {
        return false;
    }
    rope_k = graph->nodes[k];
    set_k  = graph->nodes[k_set];
    set_v  = graph->nodes[v_set];
    last   = v_set;

    const ggml_tensor * rows = set_k->src[0];
    if (has_other_uses(graph, k, k_set, rows) || !is_rope_as_rows(rows, rope_k) ||
        source_of_views(set_v->src[0]) == rope_k) {
        return false;
    }
    if (!are_row_numbers(set_k->src[1]) || !are_row_numbers(set_v->src[1]) ||
        ggml_nelements(set_v->src[1]) != rows->ne[1]) {
        return false;
    }
    return op_rope_cache_supported(rope_params_of(rope_k), operand(rope_k->src[1]),
                                   optional_operand(rope_k->src[2]).get(), params());
}

rope_cache_params rope_cache_nodes::params() const {
    rope_cache_params p = {};
    p.k                 = operand(rope_k->src[0]);
    p.k_cache           = operand(set_k);
    p.v                 = operand(set_v->src[0]);
    p.v_cache           = operand(set_v);
    p.k_ids             = static_cast<const int64_t *>(set_k->src[1]->data);
    p.v_ids             = static_cast<const int64_t *>(set_v->src[1]->data);
    p.q                 = rope_q ? operand(rope_q->src[0]) : p.k;
    p.q_dst             = rope_q ? operand(rope_q) : p.q;
    if (!rope_q) {
        p.q.ne[1] = p.q_dst.ne[1] = 0; // no heads
    }
    return p;
}

std::unique_ptr<fused_pattern> make_fused_rope_cache() { return std::make_unique<fused_rope_cache>(); }

} // namespace macko::cuda
