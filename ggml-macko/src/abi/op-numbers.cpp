#include "abi/op-numbers.h"
#include "abi/context.h"
#include "codec/status.h"

#include <cstring>

namespace macko {

op_translation op_numbers;

namespace {

struct used_op {
    ggml_op      op;
    const char * name;     // the result of ggml_op_name()
    bool         required; // every version in the range has it
};

// All ops that files in cpu/ or cuda/ compare with. NEW_USED: versions may lack it.
#define USED(name)     { GGML_OP_##name, #name, true }
#define NEW_USED(name) { GGML_OP_##name, #name, false }
constexpr used_op USED_OPS[] = {
    USED(NONE),
    USED(DUP),
    USED(ADD),
    USED(ADD_ID),
    USED(SUB),
    USED(MUL),
    USED(DIV),
    USED(SQR),
    USED(SQRT),
    USED(LOG),
    USED(SIN),
    USED(COS),
    USED(SUM_ROWS),
    USED(MEAN),
    USED(REPEAT),
    USED(CONCAT),
    USED(SET),
    USED(NORM),
    USED(RMS_NORM),
    USED(L2_NORM),
    USED(MUL_MAT),
    USED(SCALE),
    USED(MUL_MAT_ID),
    USED(CPY),
    USED(CONT),
    USED(RESHAPE),
    USED(VIEW),
    USED(PERMUTE),
    USED(TRANSPOSE),
    USED(GET_ROWS),
    USED(SET_ROWS),
    USED(SOFT_MAX),
    USED(ROPE),
    USED(ROPE_BACK),
    USED(CLAMP),
    USED(ARGSORT),
    USED(TOP_K),
    USED(POOL_2D),
    USED(ARANGE),
    NEW_USED(LIGHTNING_INDEXER),
    NEW_USED(DSV4_HC_COMB),
    NEW_USED(DSV4_HC_PRE),
    NEW_USED(DSV4_HC_POST),
    USED(FLASH_ATTN_EXT),
    USED(SSM_CONV),
    USED(SSM_SCAN),
    USED(GATED_LINEAR_ATTN),
    USED(RWKV_WKV6),
    USED(RWKV_WKV7),
    USED(GATED_DELTA_NET),
    USED(UNARY),
    USED(GLU),
    USED(FILL),
};
#undef USED
#undef NEW_USED

} // namespace

int find_last_op(int * last) {
    const context ctx = make_context(4);
    if (!ctx) {
        return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "out of memory");
    }
    ggml_tensor * x = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 4);
    const int     n = ggml_swiglu_split(ctx.get(), x, x)->op;
    if (n < 0 || static_cast<size_t>(n) >= op_numbers.ours.size() ||
        strcmp(ggml_op_name(static_cast<ggml_op>(n)), "GLU") != 0) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH, "the op of ggml_swiglu_split is not GLU");
    }
    *last = n;
    return GGML_MACKO_STATUS_OK;
}

int resolve_ops(int last) {
    op_numbers.ours.fill(GGML_OP_COUNT);
    for (const used_op & used : USED_OPS) {
        int i = 0;
        while (i <= last && strcmp(ggml_op_name(static_cast<ggml_op>(i)), used.name) != 0) {
            i++;
        }
        op_numbers.running[static_cast<size_t>(used.op)] = i > last ? GGML_OP_COUNT : static_cast<ggml_op>(i);
        if (i <= last) {
            op_numbers.ours[static_cast<size_t>(i)] = used.op;
        } else if (used.required) {
            return fail(GGML_MACKO_STATUS_VERSION_MISMATCH, "it has no operation %s", used.name);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
