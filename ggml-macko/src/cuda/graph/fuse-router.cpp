// The choice of a router of a mixture of experts:
//
//   x (logits)
//   |
//   [SOFT_MAX | SIGMOID]
//   |         |
//   |         [ADD bias]
//   |         |
//   |         ARGSORT
//   |         | (view of the first)
//   GET_ROWS--+---- ids, for the products of experts
//   |
//   [SOFT_MAX]
//   |
//   [SUM_ROWS - CLAMP - DIV]
//   |
//   [SCALE]
//
// One launch computes the ids and the last result. ARGSORT stores only the ids in the view.
#include "cuda/graph/adapters.h"
#include "cuda/graph/fuse.h"

#include <algorithm>

namespace macko::cuda {

namespace {

bool is_plain_soft_max(const ggml_tensor * node) {
    return op_of(node) == GGML_OP_SOFT_MAX && !node->src[1] && !node->src[2] && ggml_get_op_params_f32(node, 0) == 1 &&
           ggml_get_op_params_f32(node, 1) == 0;
}

bool is_sigmoid(const ggml_tensor * node) {
    const std::optional<unary_params> p = unary_params_of(node);
    return p && p.value().op == unary_op::SIGMOID;
}

class fused_router : public fused_pattern {
public:
    bool        match(const op_context & ctx, const ggml_cgraph * graph, int i) override;
    bool        is_safe() const override;
    cudaError_t enqueue(const op_context & ctx) const override { return op_router(ctx, params_); }

private:
    const ggml_tensor * x_       = nullptr;
    const ggml_tensor * bias_    = nullptr; // null: none
    const ggml_tensor * ids_     = nullptr;
    const ggml_tensor * weights_ = nullptr;
    router_params       params_  = {};

    bool match_gate(const ggml_tensor * node);
    bool match_choice(const ggml_cgraph * graph, int argsort, const ggml_tensor * probs, const ggml_tensor * choice);
    void match_weights(const ggml_cgraph * graph);
    bool are_weights(const ggml_tensor * rows) const;
    int  index_after(const ggml_cgraph * graph, int n) const;
    void extend(const ggml_cgraph * graph, int n);
    const ggml_tensor * after(const ggml_cgraph * graph, int n, ggml_op op) const;
};

bool fused_router::match(const op_context &, const ggml_cgraph * graph, int i) {
    *this                     = fused_router();
    const ggml_tensor * first = graph->nodes[i];
    if (!match_gate(first)) {
        return false;
    }
    const bool          has_gate = params_.gate != router_gate::NONE;
    const ggml_tensor * probs    = has_gate ? first : x_;
    const ggml_tensor * choice   = probs;
    int                 k        = has_gate ? next_node(graph, i) : i;
    if (has_gate && k < graph->n_nodes && op_of(graph->nodes[k]) == GGML_OP_ADD && graph->nodes[k]->src[0] == probs &&
        is_row_vector(graph->nodes[k]->src[1], probs->ne[0])) {
        choice = graph->nodes[k];
        bias_  = choice->src[1];
        k      = next_node(graph, k);
    }
    if (!match_choice(graph, k, probs, choice)) {
        return false;
    }
    match_weights(graph);
    params_.x       = operand(x_);
    params_.ids     = operand(ids_);
    params_.weights = operand(weights_);
    params_.bias    = bias_ ? static_cast<const float *>(bias_->data) : nullptr;
    return op_router_supported(params_) && uses_stay_inside(graph, i, last_, ids_);
}

bool fused_router::match_gate(const ggml_tensor * node) {
    if (is_plain_soft_max(node)) {
        params_.gate = router_gate::SOFT_MAX;
    } else if (is_sigmoid(node)) {
        params_.gate = router_gate::SIGMOID;
    } else if (op_of(node) != GGML_OP_ARGSORT) {
        return false;
    }
    x_ = node->src[0];
    return true;
}

// Matches ARGSORT of `choice`, and GET_ROWS of the first of `probs` in this order.
bool fused_router::match_choice(const ggml_cgraph * graph, int argsort, const ggml_tensor * probs,
                                const ggml_tensor * choice) {
    const int rows = argsort < graph->n_nodes ? next_node(graph, argsort) : argsort;
    if (rows >= graph->n_nodes || op_of(graph->nodes[argsort]) != GGML_OP_ARGSORT ||
        op_of(graph->nodes[rows]) != GGML_OP_GET_ROWS) {
        return false;
    }
    const ggml_tensor * order = graph->nodes[argsort];
    weights_                  = graph->nodes[rows];
    ids_                      = weights_->src[1];
    last_                     = rows;

    const bool is_order = order->src[0] == choice && ggml_get_op_params_i32(order, 0) == GGML_SORT_ORDER_DESC;
    const bool are_ids  = op_of(ids_) == GGML_OP_VIEW && ids_->src[0] == order && ids_->view_offs == order->view_offs &&
                         ids_->nb[0] == order->nb[0] && ids_->nb[1] == order->nb[1] && ids_->ne[1] == order->ne[1];
    return is_order && are_ids && weights_->src[0]->ne[0] == 1 && is_reshaped(weights_->src[0], probs);
}

// Whether rows are the weights of each token.
bool fused_router::are_weights(const ggml_tensor * rows) const {
    return is_reshaped(rows, weights_) && rows->ne[0] == ids_->ne[0] && rows->ne[1] == ids_->ne[1];
}

void fused_router::match_weights(const ggml_cgraph * graph) {
    const ggml_tensor * soft_max = after(graph, 1, GGML_OP_SOFT_MAX);
    if (soft_max && is_plain_soft_max(soft_max) && are_weights(soft_max->src[0])) {
        params_.soft_max = true;
        extend(graph, 1);
    }
    const ggml_tensor * sum   = after(graph, 1, GGML_OP_SUM_ROWS);
    const ggml_tensor * clamp = after(graph, 2, GGML_OP_CLAMP);
    const ggml_tensor * div   = after(graph, 3, GGML_OP_DIV);
    if (sum && clamp && div && are_weights(sum->src[0]) && clamp->src[0] == sum && are_weights(div->src[0]) &&
        div->src[1] == clamp) {
        params_.norm = true;
        std::copy_n(unary_params_of(clamp)->p, 2, params_.clamp);
        extend(graph, 3);
    }
    const ggml_tensor * scale = after(graph, 1, GGML_OP_SCALE);
    if (scale && is_reshaped(scale->src[0], weights_)) {
        std::copy_n(unary_params_of(scale)->p, 2, params_.scale);
        extend(graph, 1);
    }
}

// The nth node after the last one if it is such an op, else null.
const ggml_tensor * fused_router::after(const ggml_cgraph * graph, int n, ggml_op op) const {
    const int k = index_after(graph, n);
    return k < graph->n_nodes && op_of(graph->nodes[k]) == op ? graph->nodes[k] : nullptr;
}

// Makes the nth node after the last one the last.
void fused_router::extend(const ggml_cgraph * graph, int n) {
    last_    = index_after(graph, n);
    weights_ = graph->nodes[last_];
}

int fused_router::index_after(const ggml_cgraph * graph, int n) const {
    int k = last_;
    for (; n > 0 && k < graph->n_nodes; n--) {
        k = next_node(graph, k);
    }
    return k;
}

bool fused_router::is_safe() const {
    const ggml_tensor * const inputs[] = { x_, bias_ };
    for (const ggml_tensor * in : inputs) {
        if (in && (overlaps(in, ids_) || overlaps(in, weights_))) {
            return false;
        }
    }
    return !overlaps(ids_, weights_);
}

} // namespace

std::unique_ptr<fused_pattern> make_fused_router() { return std::make_unique<fused_router>(); }

} // namespace macko::cuda
