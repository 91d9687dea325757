#include "cuda/graph/adapters.h"
#include "abi/op-numbers.h"

#include <cstring>

namespace macko::cuda {

namespace {

template <typename FROM, typename TO> struct enum_pair {
    FROM from;
    TO   to;
};

template <typename FROM, typename TO, size_t N>
std::optional<TO> find_pair(const enum_pair<FROM, TO> (&pairs)[N], FROM from) {
    for (const enum_pair<FROM, TO> & pair : pairs) {
        if (pair.from == from) {
            return pair.to;
        }
    }
    return std::nullopt;
}

constexpr enum_pair<ggml_op, binary_op> BINARY_OPS[] = {
    { GGML_OP_ADD, binary_op::ADD },
    { GGML_OP_SUB, binary_op::SUB },
    { GGML_OP_MUL, binary_op::MUL },
    { GGML_OP_DIV, binary_op::DIV },
};

constexpr enum_pair<ggml_op, unary_op> ONE_SOURCE_OPS[] = {
    { GGML_OP_SQR, unary_op::SQR },     { GGML_OP_SQRT, unary_op::SQRT }, { GGML_OP_LOG, unary_op::LOG },
    { GGML_OP_SIN, unary_op::SIN },     { GGML_OP_COS, unary_op::COS },   { GGML_OP_SCALE, unary_op::SCALE },
    { GGML_OP_CLAMP, unary_op::CLAMP }, { GGML_OP_FILL, unary_op::FILL },
};

constexpr enum_pair<ggml_unary_op, unary_op> UNARY_OPS[] = {
    { GGML_UNARY_OP_ABS, unary_op::ABS },
    { GGML_UNARY_OP_SGN, unary_op::SGN },
    { GGML_UNARY_OP_NEG, unary_op::NEG },
    { GGML_UNARY_OP_STEP, unary_op::STEP },
    { GGML_UNARY_OP_TANH, unary_op::TANH },
    { GGML_UNARY_OP_ELU, unary_op::ELU },
    { GGML_UNARY_OP_RELU, unary_op::RELU },
    { GGML_UNARY_OP_SIGMOID, unary_op::SIGMOID },
    { GGML_UNARY_OP_GELU, unary_op::GELU },
    { GGML_UNARY_OP_GELU_QUICK, unary_op::GELU_QUICK },
    { GGML_UNARY_OP_SILU, unary_op::SILU },
    { GGML_UNARY_OP_HARDSWISH, unary_op::HARDSWISH },
    { GGML_UNARY_OP_HARDSIGMOID, unary_op::HARDSIGMOID },
    { GGML_UNARY_OP_EXP, unary_op::EXP },
    { GGML_UNARY_OP_EXPM1, unary_op::EXPM1 },
    { GGML_UNARY_OP_SOFTPLUS, unary_op::SOFTPLUS },
    { GGML_UNARY_OP_GELU_ERF, unary_op::GELU_ERF },
    { GGML_UNARY_OP_FLOOR, unary_op::FLOOR },
    { GGML_UNARY_OP_CEIL, unary_op::CEIL },
    { GGML_UNARY_OP_ROUND, unary_op::ROUND },
    { GGML_UNARY_OP_TRUNC, unary_op::TRUNC },
};

constexpr enum_pair<ggml_glu_op, glu_op> GLU_OPS[] = {
    { GGML_GLU_OP_REGLU, glu_op::REGLU },         { GGML_GLU_OP_GEGLU, glu_op::GEGLU },
    { GGML_GLU_OP_SWIGLU, glu_op::SWIGLU },       { GGML_GLU_OP_SWIGLU_OAI, glu_op::SWIGLU_OAI },
    { GGML_GLU_OP_GEGLU_ERF, glu_op::GEGLU_ERF }, { GGML_GLU_OP_GEGLU_QUICK, glu_op::GEGLU_QUICK },
};

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

std::optional<unary_op> unary_op_of(const ggml_tensor * node) {
    return op_of(node) == GGML_OP_UNARY ? find_pair(UNARY_OPS, ggml_get_unary_op(node))
                                        : find_pair(ONE_SOURCE_OPS, op_of(node));
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
    p.offset = ggml_get_op_params_i32(node, 15);
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
