// Writing new keys and values of a decoder layer to the cache:
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

#include <algorithm>
#include <cstring>

namespace macko::cuda {

namespace {

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

bool is_only_use(const ggml_cgraph * graph, int i, const ggml_tensor * t) {
    if (source_of_views(t) != graph->nodes[i] || !ggml_node_has_n_uses(graph, i, 1)) {
        return false;
    }
    ggml_tensor ** const end = graph->nodes + graph->n_nodes;
    for (; t != graph->nodes[i]; t = t->src[0]) {
        ggml_tensor ** const at = std::find(graph->nodes + i, end, t);
        if (at == end || ggml_node_get_use_count(graph, static_cast<int>(at - graph->nodes)) != 1) {
            return false;
        }
    }
    return true;
}

bool same_rope(const ggml_tensor * a, const ggml_tensor * b) {
    return !memcmp(a->op_params, b->op_params, sizeof(a->op_params)) && a->src[1] == b->src[1] &&
           a->src[2] == b->src[2];
}

bool are_rows_of(const ggml_tensor * rows, const ggml_tensor * x, int64_t n_tokens) {
    return is_reshaped(rows, x) && rows->ne[1] == n_tokens && ggml_nrows(rows) == n_tokens;
}

bool are_row_numbers(const ggml_tensor * ids) { return ids->type == GGML_TYPE_I64 && ggml_is_contiguous(ids); }

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
        op_of(graph->nodes[v_set]) != GGML_OP_SET_ROWS) {
        return false;
    }
    rope_k = graph->nodes[k];
    set_k  = graph->nodes[k_set];
    set_v  = graph->nodes[v_set];
    last   = v_set;

    const ggml_tensor * rows = set_k->src[0];
    if (!is_only_use(graph, k, rows) || !are_rows_of(rows, rope_k, rope_k->ne[2]) ||
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
