#include "abi/parameter-check.h"
#include "abi/context.h"
#include "platform/platform.h"

#include "ggml-impl.h"

#include <cstring>

namespace macko {

namespace {

struct used_name {
    int          number;
    const char * name;
};

// The operations that cpu/ and cuda/ compare with.
#define UNARY(NAME) { GGML_UNARY_OP_##NAME, #NAME }
#define GLU(NAME)   { GGML_GLU_OP_##NAME, #NAME }
constexpr used_name USED_UNARY_OPS[] = {
    UNARY(ABS),   UNARY(SGN),         UNARY(NEG),   UNARY(STEP),       UNARY(TANH),     UNARY(ELU),
    UNARY(RELU),  UNARY(SIGMOID),     UNARY(GELU),  UNARY(GELU_QUICK), UNARY(SILU),     UNARY(HARDSWISH),
    UNARY(XIELU), UNARY(HARDSIGMOID), UNARY(EXP),   UNARY(EXPM1),      UNARY(SOFTPLUS), UNARY(GELU_ERF),
    UNARY(FLOOR), UNARY(CEIL),        UNARY(ROUND), UNARY(TRUNC),
};
constexpr used_name USED_GLU_OPS[] = {
    GLU(REGLU), GLU(GEGLU), GLU(SWIGLU), GLU(SWIGLU_OAI), GLU(GEGLU_ERF), GLU(GEGLU_QUICK),
};
#undef UNARY
#undef GLU

const char * check_names() {
    for (const used_name & op : USED_UNARY_OPS) {
        if (strcmp(ggml_unary_op_name(static_cast<ggml_unary_op>(op.number)), op.name) != 0) {
            return "the number of a unary operation";
        }
    }
    for (const used_name & op : USED_GLU_OPS) {
        if (strcmp(ggml_glu_op_name(static_cast<ggml_glu_op>(op.number)), op.name) != 0) {
            return "the number of a GLU operation";
        }
    }
    return nullptr;
}

// A function that versions may lack; null without it.
#define FIND(function) reinterpret_cast<decltype(&(function))>(platform::find_function("ggml-base", #function))

// Whether parameters of a node, from the index `first` on, have the given values.
template <typename T, size_t N> bool has(const ggml_tensor * node, int first, const T (&values)[N]) {
    static_assert(sizeof(T) == sizeof(node->op_params[0]), "parameters have 4 bytes");
    return memcmp(node->op_params + first, values, sizeof(values)) == 0;
}

const char * check_rope(ggml_context * ctx, ggml_tensor * x) {
    ggml_tensor *       at   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 1);
    const ggml_tensor * rope = ggml_rope_ext(ctx, x, at, nullptr, 4, GGML_ROPE_TYPE_NEOX, 64, 10, 2, 3, 4, 5, 6);
    return has(rope, 1, { 4, GGML_ROPE_TYPE_NEOX }) && has(rope, 4, { 64 }) &&
                   has(rope, 5, { 10.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f }) && has(rope, 11, { 0, 0, 0, 0, 0 })
               ? nullptr
               : "the parameters of ROPE";
}

// Operations of newer versions.
const char * check_new_ops(ggml_context * c, ggml_tensor * x) {
    const auto          clamp = FIND(ggml_swiglu_clamp);
    const ggml_tensor * glu   = clamp ? clamp(c, x, x, 3) : nullptr;
    if (glu && (ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU_CLAMP || !has(glu, 3, { 3.0f }))) {
        return "the parameters of SWIGLU_CLAMP";
    }
    const auto    comb = FIND(ggml_dsv4_hc_comb);
    ggml_tensor * hc   = ggml_new_tensor_3d(c, GGML_TYPE_F32, 24, 1, 1);
    if (comb) {
        const ggml_tensor * made = comb(c, hc, x, hc, 2, 3);
        if (!has(made, 0, { 2.0f }) || !has(made, 1, { 3 })) {
            return "the parameters of DSV4_HC_COMB";
        }
    }
    if (const auto gated = FIND(ggml_dsv4_hc_pre_gated)) {
        const ggml_tensor * made = gated(c, x, x, 2);
        if (!has(made, 0, { 2.0f }) || !has(made, 1, { 1 })) {
            return "the parameters of DSV4_HC_PRE";
        }
    }
    return nullptr;
}

} // namespace

const char * first_different_parameter() {
    if (const char * different = check_names()) {
        return different;
    }
    const context ctx = make_context(48);
    if (!ctx) {
        return "ggml_init, which returned null";
    }
    ggml_context * c = ctx.get();
    ggml_tensor *  x = ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 1, 1);
    ggml_tensor *  k = ggml_new_tensor_3d(c, GGML_TYPE_F16, 8, 1, 1);
    if (const char * different = check_rope(c, x)) {
        return different;
    }
    const ggml_tensor * glu = ggml_swiglu_oai(c, x, x, 2, 3);
    if (ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU_OAI || !has(glu, 2, { 2.0f, 3.0f }) ||
        !has(ggml_reglu_swapped(c, x), 1, { 1 })) {
        return "the parameters of GLU";
    }
    if (ggml_get_unary_op(ggml_relu(c, x)) != GGML_UNARY_OP_RELU) {
        return "the parameter of UNARY";
    }
    if (!has(ggml_flash_attn_ext(c, x, k, k, nullptr, 2, 0, 3), 0, { 2.0f, 0.0f, 3.0f })) {
        return "the parameters of FLASH_ATTN_EXT";
    }
    if (!has(ggml_soft_max_ext(c, x, nullptr, 2, 0), 0, { 2.0f, 0.0f })) {
        return "the parameters of SOFT_MAX";
    }
    if (!has(ggml_norm(c, x, 2), 0, { 2.0f }) || !has(ggml_l2_norm(c, x, 2), 0, { 2.0f })) {
        return "the parameter of NORM or L2_NORM";
    }
    if (!has(ggml_concat(c, x, x, 2), 0, { 2 })) {
        return "the parameter of CONCAT";
    }
    ggml_tensor * state = ggml_new_tensor_1d(c, GGML_TYPE_F32, 64);
    if (!has(ggml_gated_linear_attn(c, x, x, x, x, state, 2), 0, { 2.0f })) {
        return "the parameter of GATED_LINEAR_ATTN";
    }
    const ggml_tensor * xielu = ggml_xielu(c, x, 100, 200, 3, 4); // softplus of the first two
    if (ggml_get_unary_op(xielu) != GGML_UNARY_OP_XIELU || !has(xielu, 1, { 103.0f, 200.0f, 3.0f, 4.0f })) {
        return "the parameters of XIELU";
    }
    if (!has(ggml_arange(c, 2, 9, 3), 0, { 2.0f, 9.0f, 3.0f })) {
        return "the parameters of ARANGE";
    }
    if (!has(ggml_set(c, x, x, 32, 64, 96, 4), 0, { 32, 64, 96, 4, 0 })) {
        return "the parameters of SET";
    }
    if (!has(ggml_pool_2d(c, x, GGML_OP_POOL_MAX, 2, 1, 3, 4, 5, 6), 0, { int(GGML_OP_POOL_MAX), 2, 1, 3, 4, 5, 6 })) {
        return "the parameters of POOL_2D";
    }
    if (const char * different = check_new_ops(c, x)) {
        return different;
    }
    if (!has(ggml_scale_bias(c, x, 2, 3), 0, { 2.0f, 3.0f })) {
        return "the parameters of SCALE";
    }
    if (!has(ggml_clamp(c, x, 2, 3), 0, { 2.0f, 3.0f })) {
        return "the parameters of CLAMP";
    }
    if (!has(ggml_fill(c, x, 2), 0, { 2.0f })) {
        return "the parameter of FILL";
    }
    return has(ggml_argsort(c, x, GGML_SORT_ORDER_DESC), 0, { int(GGML_SORT_ORDER_DESC) }) ? nullptr
                                                                                           : "the parameter of ARGSORT";
}

} // namespace macko
