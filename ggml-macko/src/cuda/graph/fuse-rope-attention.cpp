// Decoding of one token: the nodes of fuse-rope-cache.cpp and the attention after them.
//
//   q       k          v
//   |       |          |
//   ROPE    ROPE       |
//   |       SET_ROWS   SET_ROWS
//   |       |          |
//   |       K cache    V cache     mask [sinks]
//   | (view)| (view)   | (view)    |
//   +-------+----------+-----------+
//   FLASH_ATTN_EXT
//
// One launch computes all of it. It stores the new rows of the caches, but not the rotated query.
#include "cuda/graph/adapters.h"
#include "cuda/graph/fuse-rope-cache.h"

#include <algorithm>

namespace macko::cuda {

namespace {

class fused_rope_attention : public fused_pattern {
public:
    bool        match(const op_context & ctx, const ggml_cgraph * graph, int i) override;
    bool        is_safe() const override;
    cudaError_t enqueue(const op_context & ctx) const override;

private:
    rope_cache_nodes nodes_;
    ggml_tensor *    attention_ = nullptr;

    bool reads_only_inputs_early() const;
};

bool fused_rope_attention::match(const op_context &, const ggml_cgraph * graph, int i) {
    if (!nodes_.match(graph, i) || !nodes_.rope_q) {
        return false;
    }
    last_ = next_node(graph, nodes_.last);
    if (last_ >= graph->n_nodes || op_of(graph->nodes[last_]) != GGML_OP_FLASH_ATTN_EXT) {
        return false;
    }
    attention_ = graph->nodes[last_];
    if (!is_only_use(graph, i, attention_->src[0]) || !reads_only_inputs_early()) {
        return false;
    }
    const ggml_tensor * rope = nodes_.rope_k;
    return op_rope_attention_supported(rope_params_of(rope), operand(rope->src[1]),
                                       optional_operand(rope->src[2]).get(), nodes_.params(),
                                       attention_operands(attention_).params());
}

// The kernel reads positions, frequency factors, mask and row numbers before the preceding kernels end.
bool fused_rope_attention::reads_only_inputs_early() const {
    const ggml_tensor * early[] = { nodes_.rope_k->src[1], nodes_.rope_k->src[2], attention_->src[3],
                                    nodes_.set_k->src[1], nodes_.set_v->src[1] };
    return std::all_of(std::begin(early), std::end(early),
                       [](const ggml_tensor * t) { return !t || op_of(t) == GGML_OP_NONE; });
}

bool fused_rope_attention::is_safe() const {
    return !overlaps(attention_, nodes_.rope_q->src[0]) && !overlaps(attention_, nodes_.rope_k->src[0]) &&
           !overlaps(attention_, nodes_.set_v->src[0]);
}

cudaError_t fused_rope_attention::enqueue(const op_context & ctx) const {
    const ggml_tensor * rope = nodes_.rope_k;
    return op_rope_attention(ctx, rope_params_of(rope), operand(rope->src[1]), optional_operand(rope->src[2]).get(),
                             nodes_.params(), attention_operands(attention_).params(), scratch_of(ctx, attention_));
}

} // namespace

std::unique_ptr<fused_pattern> make_fused_rope_attention() { return std::make_unique<fused_rope_attention>(); }

} // namespace macko::cuda
