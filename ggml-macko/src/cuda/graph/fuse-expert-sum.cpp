// The weighted sum of the results of a token's experts:
//
//   x [n, used, tokens]    weights [1, used, tokens]
//   |                      |
//   MUL -------------------+
//   | (a view for each expert)
//   ADD ... ADD
//   |
//   [ADD residual]
//
// One launch computes the last sum, in the same order.
#include "cuda/graph/adapters.h"
#include "cuda/graph/fuse.h"

namespace macko::cuda {

namespace {

class fused_expert_sum : public fused_pattern {
public:
    bool match(const op_context & ctx, const ggml_cgraph * graph, int i) override;
    bool is_safe() const override;
    // The views keep the results of experts, which MUL overwrites in place, until the last of them is added. To keep
    // these results and the sums would double the memory.
    bool        must_be_kept(const ggml_tensor * operand) const override { return operand == mul_->src[1]; }
    cudaError_t enqueue(const op_context & ctx) const override {
        return op_expert_sum(ctx, operand(mul_->src[0]), operand(mul_->src[1]), optional_operand(residual_).get(),
                             operand(sum_));
    }

private:
    const ggml_tensor * mul_      = nullptr;
    const ggml_tensor * sum_      = nullptr;
    const ggml_tensor * residual_ = nullptr; // null: none

    bool is_expert(const ggml_tensor * t, int64_t number) const;
    void match_residual(const ggml_cgraph * graph, int first);
};

bool fused_expert_sum::match(const op_context &, const ggml_cgraph * graph, int i) {
    *this = fused_expert_sum();
    mul_  = graph->nodes[i];
    if (op_of(mul_) != GGML_OP_MUL || mul_->ne[1] < 2) {
        return false;
    }
    last_ = i;
    for (int64_t number = 1; number < mul_->ne[1]; number++) {
        last_ = next_node(graph, last_);
        if (last_ >= graph->n_nodes || op_of(graph->nodes[last_]) != GGML_OP_ADD) {
            return false;
        }
        const ggml_tensor * before = sum_;
        sum_                       = graph->nodes[last_];
        if (!is_expert(sum_->src[1], number) || (before ? sum_->src[0] != before : !is_expert(sum_->src[0], 0))) {
            return false;
        }
    }
    if (!uses_stay_inside(graph, i, last_)) {
        return false;
    }
    match_residual(graph, i);
    return op_expert_sum_supported(operand(mul_->src[0]), operand(mul_->src[1]), optional_operand(residual_).get(),
                                   operand(sum_));
}

// Whether t is the view of the results of one expert of each token.
bool fused_expert_sum::is_expert(const ggml_tensor * t, int64_t number) const {
    return op_of(t) == GGML_OP_VIEW && t->src[0] == mul_ && t->ne[0] == mul_->ne[0] && t->ne[1] == mul_->ne[2] &&
           ggml_nrows(t) == t->ne[1] && t->nb[0] == mul_->nb[0] && t->nb[1] == mul_->nb[2] &&
           t->view_offs == mul_->view_offs + static_cast<size_t>(number) * mul_->nb[1];
}

// Matches the ADD after the sum.
void fused_expert_sum::match_residual(const ggml_cgraph * graph, int first) {
    const int k = next_node(graph, last_);
    if (k >= graph->n_nodes || op_of(graph->nodes[k]) != GGML_OP_ADD) {
        return;
    }
    const ggml_tensor * add   = graph->nodes[k];
    const ggml_tensor * other = add->src[0] == sum_ ? add->src[1] : add->src[0];
    if ((add->src[0] == sum_ || add->src[1] == sum_) && other != sum_ && ggml_are_same_shape(other, add) &&
        is_f32_rows(other) && uses_stay_inside(graph, first, k)) {
        residual_ = other;
        sum_      = add;
        last_     = k;
    }
}

bool fused_expert_sum::is_safe() const {
    return !overlaps(sum_, mul_->src[0]) && !overlaps(sum_, mul_->src[1]) &&
           !(residual_ && overlaps_not_in_place(residual_, sum_));
}

} // namespace

std::unique_ptr<fused_pattern> make_fused_expert_sum() { return std::make_unique<fused_expert_sum>(); }

} // namespace macko::cuda
