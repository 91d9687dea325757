// A norm with its neighbors:
//
//   a    b
//   |    |
//   [ADD]          the sum is stored as well: later nodes may use it
//     |
//   RMS_NORM
//     |
//   [MUL scale]
//
// One launch computes sum = a + b and (a + b) / rms(a + b) * scale. At least one of ADD and MUL must be present.
#include "cuda/graph/adapters.h"
#include "cuda/graph/fuse.h"

namespace macko::cuda {

namespace {

class fused_rms_norm : public fused_pattern {
public:
    bool        match(const op_context & ctx, const ggml_cgraph * graph, int i) override;
    bool        is_safe() const override;
    cudaError_t enqueue(const op_context & ctx) const override {
        return op_rms_norm(ctx, rms_norm_operands(norm_, mul_, scale_, add_).params());
    }

private:
    const ggml_tensor * add_   = nullptr; // null: none
    const ggml_tensor * norm_  = nullptr;
    const ggml_tensor * mul_   = nullptr; // the MUL, or the norm itself
    const ggml_tensor * scale_ = nullptr; // null: none

    bool match_add(const ggml_cgraph * graph, int i, int norm);
    void match_mul(const ggml_cgraph * graph, int norm, int mul);
};

bool fused_rms_norm::match(const op_context &, const ggml_cgraph * graph, int i) {
    *this    = fused_rms_norm();
    int norm = i;
    if (op_of(graph->nodes[i]) == GGML_OP_ADD) {
        norm = next_node(graph, i);
        if (!match_add(graph, i, norm)) {
            return false;
        }
    }
    if (op_of(graph->nodes[norm]) != GGML_OP_RMS_NORM) {
        return false;
    }
    norm_ = mul_ = graph->nodes[norm];
    last_        = norm;
    match_mul(graph, norm, next_node(graph, norm));
    return last_ != i;
}

// Matches the ADD at i, if node `norm` normalizes its sum.
bool fused_rms_norm::match_add(const ggml_cgraph * graph, int i, int norm) {
    add_ = graph->nodes[i];
    return norm < graph->n_nodes && op_of(graph->nodes[norm]) == GGML_OP_RMS_NORM &&
           graph->nodes[norm]->src[0] == add_ && ggml_are_same_shape(add_->src[0], add_) &&
           ggml_are_same_shape(add_->src[1], add_);
}

// Matches the MUL at `mul`, if it multiplies the norm by rows of its length.
void fused_rms_norm::match_mul(const ggml_cgraph * graph, int norm, int mul) {
    const ggml_op ops[]   = { running_op(GGML_OP_RMS_NORM), running_op(GGML_OP_MUL) };
    const int     nodes[] = { norm, mul };
    if (!ggml_can_fuse_ext(graph, nodes, ops, 2)) {
        return;
    }
    const ggml_tensor * node  = graph->nodes[mul];
    const ggml_tensor * scale = node->src[1];
    if (node->src[0] == norm_ && scale != norm_ && scale->ne[0] == norm_->ne[0]) {
        mul_   = node;
        scale_ = scale;
        last_  = mul;
    }
}

bool fused_rms_norm::is_safe() const {
    if (!op_rms_norm_supported(rms_norm_operands(norm_, mul_, scale_, add_).params())) {
        return false;
    }
    const ggml_tensor * inputs[] = { add_ ? add_->src[0] : norm_->src[0], add_ ? add_->src[1] : nullptr };
    for (const ggml_tensor * in : inputs) {
        if (in && (overlaps_not_in_place(in, mul_) || (add_ && overlaps_not_in_place(in, add_)))) {
            return false;
        }
    }
    const bool results_overlap = add_ && overlaps(add_, mul_);
    return !results_overlap && !(scale_ && overlaps_not_in_place(scale_, mul_));
}

} // namespace

std::unique_ptr<fused_pattern> make_fused_rms_norm() { return std::make_unique<fused_rms_norm>(); }

} // namespace macko::cuda
