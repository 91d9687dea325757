// Writing new keys and values to a quantized cache, where llama.cpp multiplies heads by Hadamard matrices:
//
//   q          k          v
//   |          |          |
//   ROPE       ROPE       |
//   | (view)   | (view)   | (view)
//   MUL_MAT    MUL_MAT    MUL_MAT    with one matrix for q and k, and another, which may be smaller, for v
//   |          | (view)   | (view)
//   ...        SET_ROWS   SET_ROWS
//              K cache    V cache
//
// The seven nodes are consecutive, in any order that begins with a ROPE. One launch computes them; it stores the query
// and the new rows of the caches.
#include "cuda/graph/adapters.h"
#include "cuda/graph/fuse-rope-cache.h"

namespace macko::cuda {

namespace {

class fused_rope_hadamard_cache : public fused_pattern {
public:
    bool        match(const op_context & ctx, const ggml_cgraph * graph, int i) override;
    bool        is_safe() const override;
    cudaError_t enqueue(const op_context & ctx) const override;

private:
    // the nodes of q, k or v; -1: none
    struct branch {
        int rope = -1, product = -1, set = -1;
    };
    const ggml_cgraph * graph_ = nullptr;
    branch              q_, k_, v_;

    ggml_tensor *     node(int i) const { return graph_->nodes[i]; }
    bool              find_branches(int i);
    int               find_source(const ggml_tensor * t, const int * among, int n) const;
    bool              has_only_these_uses() const;
    rope_cache_params params() const;
};

// Which of the nodes t is a view of; -1: none.
int fused_rope_hadamard_cache::find_source(const ggml_tensor * t, const int * among, int n) const {
    const ggml_tensor * source = source_of_views(t);
    for (int k = 0; k < n; k++) {
        if (node(among[k]) == source) {
            return among[k];
        }
    }
    return -1;
}

bool fused_rope_hadamard_cache::find_branches(int i) {
    int ropes[2], products[3], sets[2], n_ropes = 0, n_products = 0, n_sets = 0;
    for (int at = i; n_sets < 2; last_ = at, at = next_node(graph_, at)) {
        if (at >= graph_->n_nodes) {
            return false;
        }
        const ggml_op op = op_of(node(at));
        if (op == GGML_OP_ROPE && n_ropes < 2) {
            ropes[n_ropes++] = at;
        } else if (op == GGML_OP_MUL_MAT && n_products < 3 && is_hadamard_product(node(at))) {
            products[n_products++] = at;
        } else if (op == GGML_OP_SET_ROWS) {
            sets[n_sets++] = at;
        } else {
            return false;
        }
    }
    if (n_ropes != 2 || n_products != 3) {
        return false;
    }
    q_ = k_ = v_ = branch();
    for (const int product : products) {
        branch b;
        b.product = product;
        b.rope    = find_source(node(product)->src[1], ropes, n_ropes);
        for (const int set : sets) {
            b.set = find_source(node(set)->src[0], &product, 1) == product ? set : b.set;
        }
        (b.set < 0 ? q_ : b.rope < 0 ? v_ : k_) = b;
    }
    return q_.rope >= 0 && k_.rope >= 0 && v_.set >= 0;
}

// Whether the next of these nodes is the only use of every result except q's.
bool fused_rope_hadamard_cache::has_only_these_uses() const {
    return is_only_use(graph_, q_.rope, node(q_.product)->src[1]) &&
           is_only_use(graph_, k_.rope, node(k_.product)->src[1]) &&
           is_only_use(graph_, k_.product, node(k_.set)->src[0]) &&
           is_only_use(graph_, v_.product, node(v_.set)->src[0]);
}

// Whether the rows of a product, one after the other, form whole heads of all tokens.
bool makes_heads(const ggml_tensor * product, int64_t head_dim, int64_t n_tokens) {
    return head_dim % product->ne[0] == 0 && ggml_nelements(product) % (head_dim * n_tokens) == 0 &&
           ggml_is_contiguous(product) && ggml_is_contiguous(product->src[1]);
}

// Whether a product uses all elements that a ROPE node rotated.
bool turns_all_of(const ggml_tensor * product, const ggml_tensor * rope) {
    const ggml_tensor * x = product->src[1];
    return ggml_nelements(x) == ggml_nelements(rope) && x->view_offs == rope->view_offs && ggml_is_contiguous(rope);
}

bool stores_rows_of(const ggml_tensor * set, const ggml_tensor * product, int64_t n_tokens) {
    const ggml_tensor * ids = set->src[1];
    return are_rows_of(set->src[0], product, n_tokens) && are_row_numbers(ids) && ggml_nelements(ids) == n_tokens;
}

bool is_input(const ggml_tensor * t) { return !t || op_of(t) == GGML_OP_NONE; }

bool fused_rope_hadamard_cache::match(const op_context &, const ggml_cgraph * graph, int i) {
    graph_ = graph;
    if (op_of(node(i)) != GGML_OP_ROPE || !find_branches(i) || !has_only_these_uses()) {
        return false;
    }
    const ggml_tensor * rope     = node(k_.rope);
    const int64_t       head_dim = rope->ne[0], n_tokens = rope->ne[2];
    const bool          ropes_ok = same_rope(node(q_.rope), rope) && turns_all_of(node(q_.product), node(q_.rope)) &&
                          turns_all_of(node(k_.product), rope);
    const bool heads_ok = node(q_.product)->ne[0] == head_dim && node(k_.product)->ne[0] == head_dim &&
                          makes_heads(node(q_.product), head_dim, n_tokens) &&
                          makes_heads(node(k_.product), head_dim, n_tokens) &&
                          makes_heads(node(v_.product), head_dim, n_tokens);
    const bool sets_ok = stores_rows_of(node(k_.set), node(k_.product), n_tokens) &&
                         stores_rows_of(node(v_.set), node(v_.product), n_tokens);
    const bool reads_only_inputs_early = is_input(rope->src[1]) && is_input(rope->src[2]);
    return ropes_ok && heads_ok && sets_ok && reads_only_inputs_early &&
           op_rope_hadamard_cache_supported(rope_params_of(rope), operand(rope->src[1]),
                                            optional_operand(rope->src[2]).get(), params(), node(v_.product)->ne[0]);
}

// Adjacent rows as [head_dim, heads, tokens].
op_tensor heads_of(const ggml_tensor * rows, int64_t head_dim, int64_t n_tokens) {
    op_tensor t = operand(rows);
    t.ne[0]     = head_dim;
    t.ne[1]     = ggml_nelements(rows) / (head_dim * n_tokens);
    t.ne[2]     = n_tokens;
    t.ne[3]     = 1;
    t.nb[1]     = t.nb[0] * head_dim;
    t.nb[2]     = t.nb[1] * t.ne[1];
    t.nb[3]     = t.nb[2] * t.ne[2];
    return t;
}

rope_cache_params fused_rope_hadamard_cache::params() const {
    const int64_t     head_dim = node(k_.rope)->ne[0], n_tokens = node(k_.rope)->ne[2];
    rope_cache_params p = {};
    p.q                 = operand(node(q_.rope)->src[0]);
    p.q_dst             = heads_of(node(q_.product), head_dim, n_tokens);
    p.k                 = operand(node(k_.rope)->src[0]);
    p.k_cache           = operand(node(k_.set));
    p.v                 = heads_of(node(v_.product)->src[1], head_dim, n_tokens);
    p.v_cache           = operand(node(v_.set));
    p.k_ids             = static_cast<const int64_t *>(node(k_.set)->src[1]->data);
    p.v_ids             = static_cast<const int64_t *>(node(v_.set)->src[1]->data);
    return p;
}

// the kernel may write queries before it reads keys and values
bool fused_rope_hadamard_cache::is_safe() const {
    const ggml_tensor *q = node(q_.product), *raw = node(q_.rope)->src[0];
    return !overlaps(q, node(k_.rope)->src[0]) && !overlaps(q, node(v_.product)->src[1]) &&
           (!overlaps(q, raw) || (q->data == raw->data && ggml_is_contiguous(raw)));
}

cudaError_t fused_rope_hadamard_cache::enqueue(const op_context & ctx) const {
    const ggml_tensor * rope = node(k_.rope);
    return op_rope_hadamard_cache(ctx, rope_params_of(rope), operand(rope->src[1]),
                                  optional_operand(rope->src[2]).get(), params(), node(v_.product)->ne[0]);
}

} // namespace

std::unique_ptr<fused_pattern> make_fused_rope_hadamard_cache() {
    return std::make_unique<fused_rope_hadamard_cache>();
}

} // namespace macko::cuda
