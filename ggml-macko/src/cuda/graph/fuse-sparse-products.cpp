// Sparse products with the same x, with the nodes before and after them:
//
//       x                                       x
//       |                                       |
//   [RMS_NORM - MUL(weight)]                [RMS_NORM - MUL(weight)]
//       |                                       |
//   +---+------+----------+                 +---+----+
//   MUL_MAT    MUL_MAT    MUL_MAT  (1..4)   MUL_MAT  MUL_MAT
//   |          |          |                 | gate   | up
//   [GET_ROWS] |          |                 +---+----+
//   [ADD bias] [ADD bias] ...                   GLU (SWIGLU)
//   [ADD residual]
//
// One launch per kind of matrix computes y_i = W_i * norm(x) + bias_i + residual_i, or silu(W_0 x) * (W_1 x). The
// normalized x and the bare products are not stored. GET_ROWS is fused only if it selects the only row that exists:
// llama.cpp uses it in its last layer to select the tokens with outputs. Products of experts (MUL_MAT_ID) with the same
// x and ids are fused with each other and with GLU.
#include "cuda/graph/fuse.h"
#include "cuda/graph/panels.h"
#include "cuda/graph/sparse-products.h"
#include "cuda/lib/common.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

bool shares_kernel(const ggml_tensor * a, const ggml_tensor * b) {
    return have_same_kernel(stored(a->src[0])->matrix, stored(b->src[0])->matrix);
}

// Whether the kernels of a layout can fuse the preceding norm and the following product of gate and up.
bool fuses(const ggml_tensor * product) { return has_fused_products(stored(product->src[0])->matrix); }

// Whether t is a GET_ROWS that selects the only row of its source, and so changes nothing.
bool is_only_row(const ggml_tensor * t) {
    return op_of(t) == GGML_OP_GET_ROWS && t->src[0]->type == GGML_TYPE_F32 && t->src[0]->nb[0] == sizeof(float) &&
           ggml_nrows(t->src[0]) == 1 && ggml_are_same_shape(t, t->src[0]);
}

// The GET_ROWS nodes since the last sum; the next sum must use all of them.
class only_rows {
public:
    bool has_room() const { return n_ < MAX; }
    void add(const ggml_tensor * node) { nodes_[n_++] = node; }
    int  count() const { return n_; }
    void clear() { n_ = 0; }
    // A term of a sum without the preceding GET_ROWS.
    const ggml_tensor * source(const ggml_tensor * term) const {
        const bool chosen = std::find(nodes_, nodes_ + n_, term) != nodes_ + n_;
        return chosen ? term->src[0] : term;
    }

private:
    static constexpr int MAX         = 2; // one per term of a sum
    const ggml_tensor *  nodes_[MAX] = {};
    int                  n_          = 0;
};

class fused_sparse_products : public fused_pattern {
public:
    bool        match(const op_context & ctx, const ggml_cgraph * graph, int i) override;
    bool        is_safe() const override;
    cudaError_t enqueue(const op_context & ctx) const override;

private:
    struct member {
        ggml_tensor *       product;
        ggml_tensor *       result; // the product, or the last sum after it
        int                 index;  // index of result in the graph
        const ggml_tensor * bias;
        const ggml_tensor * residual;
    };
    const ggml_tensor * norm_                           = nullptr; // null: no norm
    const ggml_tensor * norm_weight_                    = nullptr;
    const ggml_tensor * x_                              = nullptr;
    const ggml_tensor * ids_                            = nullptr; // null: no experts
    member              members_[CUDA_SPARSE_MAX_BATCH] = {};
    int                 n_                              = 0;
    ggml_tensor *       glu_                            = nullptr;

    bool     match_norm(const ggml_cgraph * graph, int i, int mul);
    bool     match_products(const op_context & ctx, const ggml_cgraph * graph, int first, const ggml_tensor * input);
    void     match_sums(const ggml_cgraph * graph);
    bool     match_sum(const ggml_cgraph * graph, int k, const only_rows & chosen);
    void     match_glu(const ggml_cgraph * graph);
    member * member_of(const ggml_tensor * a, const ggml_tensor * b);
    bool     is_member(const ggml_tensor * t) const;
    bool     has_sums() const;
    cuda_sparse_mul_mat_params launch_params(const op_context & ctx, int first, bool * queued) const;
};

bool can_join(const op_context & ctx, const ggml_tensor * node, const ggml_tensor * x, const ggml_tensor * ids) {
    const ggml_tensor * w = node->src[0];
    if (ids) {
        return op_of(node) == GGML_OP_MUL_MAT_ID && node->src[1] == x && node->src[2] == ids && stored(w) &&
               groups_experts(node);
    }
    if (op_of(node) != GGML_OP_MUL_MAT || node->src[1] != x || !stored(w)) {
        return false;
    }
    const bool one_matrix = x->ne[2] * x->ne[3] == 1 && w->ne[2] * w->ne[3] == 1;
    return one_matrix && !densifies(ctx, node);
}

bool fused_sparse_products::match(const op_context & ctx, const ggml_cgraph * graph, int i) {
    *this = fused_sparse_products();
    if (op_of(graph->nodes[i]) == GGML_OP_RMS_NORM) {
        const int mul = next_node(graph, i);
        if (!match_norm(graph, i, mul) || !match_products(ctx, graph, next_node(graph, mul), graph->nodes[mul]) ||
            !ggml_node_has_n_uses(graph, mul, n_)) {
            return false;
        }
    } else {
        x_   = graph->nodes[i]->src[1];
        ids_ = op_of(graph->nodes[i]) == GGML_OP_MUL_MAT_ID ? graph->nodes[i]->src[2] : nullptr;
        if (!match_products(ctx, graph, i, x_)) {
            return false;
        }
    }
    if (!ids_) {
        match_sums(graph);
    }
    match_glu(graph);
    return norm_ || n_ > 1 || glu_ || last_ != i;
}

// Matches the RMS_NORM at i and the product with its weight at mul.
bool fused_sparse_products::match_norm(const ggml_cgraph * graph, int i, int mul) {
    const ggml_op ops[]   = { running_op(GGML_OP_RMS_NORM), running_op(GGML_OP_MUL) };
    const int     nodes[] = { i, mul };
    if (!ggml_can_fuse_ext(graph, nodes, ops, 2) || graph->nodes[mul]->src[0] != graph->nodes[i]) {
        return false;
    }
    norm_        = graph->nodes[i];
    norm_weight_ = graph->nodes[mul]->src[1];
    x_           = norm_->src[0];
    // the kernel reads the weight before the preceding kernels end, so no node may compute it
    return is_row_vector(norm_weight_, norm_->ne[0]) && op_of(norm_weight_) == GGML_OP_NONE && is_f32_rows(x_);
}

// Matches the products of `input` from node `first` on.
bool fused_sparse_products::match_products(const op_context & ctx, const ggml_cgraph * graph, int first,
                                           const ggml_tensor * input) {
    for (int k = first; k < graph->n_nodes && n_ < CUDA_SPARSE_MAX_BATCH && can_join(ctx, graph->nodes[k], input, ids_);
         k     = next_node(graph, k)) {
        if (norm_ && !fuses(graph->nodes[k])) {
            return false;
        }
        members_[n_++] = { graph->nodes[k], graph->nodes[k], k, nullptr, nullptr };
        last_          = k;
    }
    return n_ > 0;
}

// Matches the sums that follow: biases and residuals.
void fused_sparse_products::match_sums(const ggml_cgraph * graph) {
    only_rows chosen;
    for (int k = next_node(graph, last_); k < graph->n_nodes; k = next_node(graph, k)) {
        const ggml_tensor * node = graph->nodes[k];
        if (chosen.has_room() && is_only_row(node) && ggml_node_has_n_uses(graph, k, 1)) {
            chosen.add(node);
            continue;
        }
        if (op_of(node) != GGML_OP_ADD || !match_sum(graph, k, chosen)) {
            return;
        }
        last_ = k;
        chosen.clear();
    }
}

// Matches the ADD at node k as a bias or residual of one member.
bool fused_sparse_products::match_sum(const ggml_cgraph * graph, int k, const only_rows & chosen) {
    ggml_tensor *       sum = graph->nodes[k];
    const ggml_tensor * a   = chosen.source(sum->src[0]);
    const ggml_tensor * b   = chosen.source(sum->src[1]);
    member *            m   = member_of(a, b);

    const bool uses_all_chosen = (a != sum->src[0]) + (b != sum->src[1]) == chosen.count();
    if (!m || !uses_all_chosen || a == b || !ggml_node_has_n_uses(graph, m->index, 1)) {
        return false;
    }
    const ggml_tensor * other = a == m->result ? b : a;
    if (is_member(other)) {
        return false; // a sum of two members
    }
    const bool is_bias = is_row_vector(other, sum->ne[0]) && a == m->result && ggml_is_contiguous(sum);
    const bool is_residual =
        ggml_are_same_shape(other, sum) && is_f32_rows(other) && is_f32_rows(sum) && other->nb[1] == sum->nb[1];
    if (is_bias && !m->bias && !m->residual) {
        m->bias = other;
    } else if (is_residual && !m->residual) {
        m->residual = other;
    } else {
        return false;
    }
    m->result = sum;
    m->index  = k;
    return true;
}

// The last member with result a or b.
fused_sparse_products::member * fused_sparse_products::member_of(const ggml_tensor * a, const ggml_tensor * b) {
    for (int j = n_ - 1; j >= 0; j--) {
        if (members_[j].result == a || members_[j].result == b) {
            return &members_[j];
        }
    }
    return nullptr;
}

bool fused_sparse_products::is_member(const ggml_tensor * t) const {
    return std::any_of(members_, members_ + n_, [&](const member & m) { return t == m.result || t == m.product; });
}

bool fused_sparse_products::has_sums() const {
    return std::any_of(members_, members_ + n_, [](const member & m) { return m.bias || m.residual; });
}

// Matches gate and up, and the SWIGLU that follows.
void fused_sparse_products::match_glu(const ggml_cgraph * graph) {
    const int next = next_node(graph, last_);
    if (n_ != 2 || has_sums() || next >= graph->n_nodes || op_of(graph->nodes[next]) != GGML_OP_GLU) {
        return;
    }
    ggml_tensor *       glu = graph->nodes[next];
    const ggml_tensor * p0  = members_[0].product;
    const ggml_tensor * p1  = members_[1].product;

    const bool one_kernel = shares_kernel(p0, p1);
    const bool used_once =
        ggml_node_has_n_uses(graph, members_[0].index, 1) && ggml_node_has_n_uses(graph, members_[1].index, 1);
    const bool is_swiglu = ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && glu->src[1] && is_f32_rows(glu);
    if (!one_kernel || !used_once || !is_swiglu || !ggml_are_same_shape(p0, p1)) {
        return;
    }
    const bool gate_first = glu->src[0] == p0 && glu->src[1] == p1;
    const bool up_first   = glu->src[0] == p1 && glu->src[1] == p0;
    if (up_first) {
        std::swap(members_[0], members_[1]);
    }
    if (gate_first || up_first) {
        glu_  = glu;
        last_ = next;
    }
}

bool fused_sparse_products::is_safe() const {
    for (int j = 0; j < n_; j++) {
        const ggml_tensor * y = glu_ ? glu_ : members_[j].result;
        if (overlaps(y, x_) || (ids_ && overlaps(y, ids_))) {
            return false;
        }
        for (int k = 0; k < n_; k++) {
            const ggml_tensor * residual = members_[k].residual;
            if (k != j && !glu_ && overlaps(y, members_[k].result)) {
                return false;
            }
            // a member may be added to its own residual in place
            if (residual && (k == j ? overlaps_not_in_place(y, residual) : overlaps(y, residual))) {
                return false;
            }
        }
    }
    return true;
}

cudaError_t fused_sparse_products::enqueue(const op_context & ctx) const {
    bool queued[CUDA_SPARSE_MAX_BATCH] = {};
    for (int first = 0; first < n_; first++) {
        if (!queued[first]) {
            CUDA_TRY(cuda_sparse_mul_mat(launch_params(ctx, first, queued), ctx.stream));
        }
    }
    return cudaSuccess;
}

// Parameters of one launch: member `first`, and later members with the same kernel.
cuda_sparse_mul_mat_params fused_sparse_products::launch_params(const op_context & ctx, int first,
                                                                bool * queued) const {
    const auto                 f32 = [](const ggml_tensor * t) { return t ? static_cast<float *>(t->data) : nullptr; };
    const auto                 ld  = [](const ggml_tensor * t) { return static_cast<int64_t>(t->nb[1]) / 4; };
    const stored_matrix &      w0  = *stored(members_[first].product->src[0]);
    cuda_sparse_mul_mat_params p   = ids_ ? grouped_experts_params(ctx, members_[first].product)
                                          : sparse_mul_mat_params(ctx, w0, f32(x_), nullptr, ld(x_), 0, x_->ne[1]);
    p.n_matrices                   = 0;
    for (int j = first; j < n_; j++) {
        const member & m = members_[j];
        if (j != first && !shares_kernel(members_[first].product, m.product)) {
            continue;
        }
        const stored_matrix & w = *stored(m.product->src[0]);
        const ggml_tensor *   y = glu_ ? glu_ : m.result;
        const int             i = p.n_matrices++;
        p.w[i]                  = &w.matrix;
        p.y[i]                  = f32(y);
        p.ldy[i]                = ld(y);
        p.row_begin[i]          = 0;
        p.row_end[i]            = w.rows_per_matrix;
        p.bias[i]               = f32(m.bias);
        p.residual[i]           = f32(m.residual);
        queued[j]               = true;
    }
    if (norm_) {
        p.norm_weight = f32(norm_weight_);
        p.norm_eps    = ggml_get_op_params_f32(norm_, 0);
    }
    p.silu_mul = glu_ != nullptr;
    return p;
}

} // namespace

std::unique_ptr<fused_pattern> make_fused_sparse_products() { return std::make_unique<fused_sparse_products>(); }

} // namespace macko::cuda
