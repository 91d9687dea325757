#include "cuda/graph/adapters.h"
#include "abi/op-numbers.h"

#include <cstring>
#include <utility>

namespace macko::cuda {

namespace {

template <typename FROM, typename TO, size_t N>
std::optional<TO> find_pair(const std::pair<FROM, TO> (&pairs)[N], FROM from) {
    for (const auto & [ggml, ours] : pairs) {
        if (ggml == from) {
            return ours;
        }
    }
    return std::nullopt;
}

#define BINARY(NAME)     { GGML_OP_##NAME, binary_op::NAME },
#define ONE_SOURCE(NAME) { GGML_OP_##NAME, unary_op::NAME },
#define UNARY(NAME)      { GGML_UNARY_OP_##NAME, unary_op::NAME },
#define GLU(NAME)        { GGML_GLU_OP_##NAME, glu_op::NAME },

constexpr std::pair<ggml_op, binary_op>      BINARY_OPS[]     = { MACKO_BINARY_OPS(BINARY) };
constexpr std::pair<ggml_op, unary_op>       ONE_SOURCE_OPS[] = { MACKO_ONE_SOURCE_OPS(ONE_SOURCE) };
constexpr std::pair<ggml_unary_op, unary_op> UNARY_OPS[]      = { MACKO_UNARY_OPS(UNARY) };
constexpr std::pair<ggml_glu_op, glu_op>     GLU_OPS[]        = { MACKO_GLU_OPS(GLU) };

} // namespace

op_tensor operand(const ggml_tensor * t) {
    op_tensor result = {};
    result.data      = static_cast<char *>(t->data);
    result.type      = static_cast<tensor_type>(t->type);
    for (int k = 0; k < 4; k++) {
        result.ne[k] = t->ne[k];
        result.nb[k] = static_cast<int64_t>(t->nb[k]);
    }
    return result;
}

std::optional<binary_op> binary_op_of(const ggml_tensor * node) { return find_pair(BINARY_OPS, op_of(node)); }

std::optional<unary_params> unary_params_of(const ggml_tensor * node) {
    const bool                    is_unary = op_of(node) == GGML_OP_UNARY;
    const std::optional<unary_op> op =
        is_unary ? find_pair(UNARY_OPS, ggml_get_unary_op(node)) : find_pair(ONE_SOURCE_OPS, op_of(node));
    if (!op) {
        return std::nullopt;
    }
    unary_params p = {};
    p.op           = *op;
    memcpy(p.p, node->op_params + (is_unary ? 1 : 0), sizeof(p.p)); // UNARY has its number first
    return p;
}

std::optional<glu_params> glu_params_of(const ggml_tensor * node) {
    const std::optional<glu_op> op = find_pair(GLU_OPS, ggml_get_glu_op(node));
    if (!op) {
        return std::nullopt;
    }
    glu_params p = {};
    p.op         = *op;
    p.swapped    = ggml_get_op_params_i32(node, 1) != 0;
    p.alpha      = ggml_get_op_params_f32(node, 2);
    p.limit      = ggml_get_op_params_f32(node, 3);
    return p;
}

std::optional<pool_params> pool_params_of(const ggml_tensor * node) {
    const int kind = ggml_get_op_params_i32(node, 0);
    if (kind != GGML_OP_POOL_MAX && kind != GGML_OP_POOL_AVG) {
        return std::nullopt;
    }
    pool_params p = {};
    p.maximum     = kind == GGML_OP_POOL_MAX;
    for (int k = 0; k < 2; k++) {
        p.size[k]    = ggml_get_op_params_i32(node, 1 + k);
        p.stride[k]  = ggml_get_op_params_i32(node, 3 + k);
        p.padding[k] = ggml_get_op_params_i32(node, 5 + k);
    }
    return p;
}

set_params set_params_of(const ggml_tensor * node) {
    set_params p = { operand(node), ggml_get_op_params_i32(node, 3), ggml_get_op_params_i32(node, 4) != 0 };
    for (int k = 0; k < 4; k++) {
        p.part.ne[k] = node->src[1]->ne[k];
    }
    for (int k = 1; k < 4; k++) {
        p.part.nb[k] = ggml_get_op_params_i32(node, k - 1);
    }
    return p;
}

rope_params rope_params_of(const ggml_tensor * node) {
    rope_params p = {};
    p.n_dims      = ggml_get_op_params_i32(node, 1);
    p.mode        = ggml_get_op_params_i32(node, 2);
    p.n_ctx_orig  = ggml_get_op_params_i32(node, 4);
    p.freq_base   = ggml_get_op_params_f32(node, 5);
    p.freq_scale  = ggml_get_op_params_f32(node, 6);
    p.ext_factor  = ggml_get_op_params_f32(node, 7);
    p.attn_factor = ggml_get_op_params_f32(node, 8);
    p.beta_fast   = ggml_get_op_params_f32(node, 9);
    p.beta_slow   = ggml_get_op_params_f32(node, 10);
    memcpy(p.sections, node->op_params + 11, sizeof(p.sections));
    p.offset  = ggml_get_op_params_i32(node, 15);
    p.inverse = op_of(node) == GGML_OP_ROPE_BACK;
    return p;
}

bool is_hadamard_product(const ggml_tensor * node) {
    return ggml_get_op_params_i32(node, 1) == GGML_HINT_SRC0_IS_HADAMARD &&
           op_hadamard_supported(operand(node->src[1]), operand(node));
}

attention_operands::attention_operands(const ggml_tensor * node) : mask_(node->src[3]), sinks_(node->src[4]) {
    params_.q        = operand(node->src[0]);
    params_.k        = operand(node->src[1]);
    params_.v        = operand(node->src[2]);
    params_.dst      = operand(node);
    params_.mask     = mask_.get();
    params_.sinks    = sinks_.get();
    params_.scale    = ggml_get_op_params_f32(node, 0);
    params_.max_bias = ggml_get_op_params_f32(node, 1);
    params_.softcap  = ggml_get_op_params_f32(node, 2);
}

rms_norm_operands::rms_norm_operands(const ggml_tensor * norm, const ggml_tensor * mul, const ggml_tensor * scale,
                                     const ggml_tensor * add)
    : scale_(scale), add_(add ? add->src[1] : nullptr), sum_(add) {
    params_.x     = operand(add ? add->src[0] : norm->src[0]);
    params_.dst   = operand(mul);
    params_.scale = scale_.get();
    params_.add   = add_.get();
    params_.sum   = sum_.get();
    params_.eps   = ggml_get_op_params_f32(norm, 0);
}

} // namespace macko::cuda
