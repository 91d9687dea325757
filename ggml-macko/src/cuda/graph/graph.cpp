#include "cuda/graph/graph.h"

#include "cuda/lib/common.cuh"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace macko::cuda {

namespace {

op_tensor view(const ggml_tensor * t) {
    op_tensor v = {};
    v.data      = static_cast<char *>(t->data);
    v.type      = static_cast<tensor_type>(t->type);
    for (int k = 0; k < 4; k++) {
        v.ne[k] = t->ne[k];
        v.nb[k] = static_cast<int64_t>(t->nb[k]);
    }
    return v;
}

// an operand that may be absent
struct optional_view {
    op_tensor tensor = {};
    bool      present;
    explicit optional_view(const ggml_tensor * t) : present(t != nullptr) {
        if (t) {
            tensor = view(t);
        }
    }
    const op_tensor * get() const { return present ? &tensor : nullptr; }
};

float param_f32(const ggml_tensor * t, int i) {
    float f;
    memcpy(&f, t->op_params + i, sizeof(f));
    return f;
}

// ---- one node: parameters ----

bool get_unary(const ggml_tensor * node, unary_op * op) {
    switch (node->op) {
        case GGML_OP_SQR:   *op = unary_op::SQR; return true;
        case GGML_OP_SQRT:  *op = unary_op::SQRT; return true;
        case GGML_OP_LOG:   *op = unary_op::LOG; return true;
        case GGML_OP_SIN:   *op = unary_op::SIN; return true;
        case GGML_OP_COS:   *op = unary_op::COS; return true;
        case GGML_OP_SCALE: *op = unary_op::SCALE; return true;
        case GGML_OP_CLAMP: *op = unary_op::CLAMP; return true;
        case GGML_OP_UNARY: break;
        default:            return false;
    }
    switch (ggml_get_unary_op(node)) {
        case GGML_UNARY_OP_ABS:         *op = unary_op::ABS; return true;
        case GGML_UNARY_OP_SGN:         *op = unary_op::SGN; return true;
        case GGML_UNARY_OP_NEG:         *op = unary_op::NEG; return true;
        case GGML_UNARY_OP_STEP:        *op = unary_op::STEP; return true;
        case GGML_UNARY_OP_TANH:        *op = unary_op::TANH; return true;
        case GGML_UNARY_OP_ELU:         *op = unary_op::ELU; return true;
        case GGML_UNARY_OP_RELU:        *op = unary_op::RELU; return true;
        case GGML_UNARY_OP_SIGMOID:     *op = unary_op::SIGMOID; return true;
        case GGML_UNARY_OP_GELU:        *op = unary_op::GELU; return true;
        case GGML_UNARY_OP_GELU_QUICK:  *op = unary_op::GELU_QUICK; return true;
        case GGML_UNARY_OP_SILU:        *op = unary_op::SILU; return true;
        case GGML_UNARY_OP_HARDSWISH:   *op = unary_op::HARDSWISH; return true;
        case GGML_UNARY_OP_HARDSIGMOID: *op = unary_op::HARDSIGMOID; return true;
        case GGML_UNARY_OP_EXP:         *op = unary_op::EXP; return true;
        case GGML_UNARY_OP_EXPM1:       *op = unary_op::EXPM1; return true;
        case GGML_UNARY_OP_SOFTPLUS:    *op = unary_op::SOFTPLUS; return true;
        case GGML_UNARY_OP_GELU_ERF:    *op = unary_op::GELU_ERF; return true;
        case GGML_UNARY_OP_FLOOR:       *op = unary_op::FLOOR; return true;
        case GGML_UNARY_OP_CEIL:        *op = unary_op::CEIL; return true;
        case GGML_UNARY_OP_ROUND:       *op = unary_op::ROUND; return true;
        case GGML_UNARY_OP_TRUNC:       *op = unary_op::TRUNC; return true;
        default:                        return false;
    }
}

bool get_binary(const ggml_tensor * node, binary_op * op) {
    switch (node->op) {
        case GGML_OP_ADD: *op = binary_op::ADD; return true;
        case GGML_OP_SUB: *op = binary_op::SUB; return true;
        case GGML_OP_MUL: *op = binary_op::MUL; return true;
        case GGML_OP_DIV: *op = binary_op::DIV; return true;
        default:          return false;
    }
}

bool get_glu(const ggml_tensor * node, glu_params * p) {
    p->swapped = ggml_get_op_params_i32(node, 1) != 0;
    p->alpha   = param_f32(node, 2);
    p->limit   = param_f32(node, 3);
    switch (ggml_get_glu_op(node)) {
        case GGML_GLU_OP_REGLU:       p->op = glu_op::REGLU; return true;
        case GGML_GLU_OP_GEGLU:       p->op = glu_op::GEGLU; return true;
        case GGML_GLU_OP_SWIGLU:      p->op = glu_op::SWIGLU; return true;
        case GGML_GLU_OP_SWIGLU_OAI:  p->op = glu_op::SWIGLU_OAI; return true;
        case GGML_GLU_OP_GEGLU_ERF:   p->op = glu_op::GEGLU_ERF; return true;
        case GGML_GLU_OP_GEGLU_QUICK: p->op = glu_op::GEGLU_QUICK; return true;
        default:                      return false;
    }
}

rope_params get_rope(const ggml_tensor * node) {
    rope_params p = {};
    p.n_dims      = node->op_params[1];
    p.mode        = node->op_params[2];
    p.n_ctx_orig  = node->op_params[4];
    p.freq_base   = param_f32(node, 5);
    p.freq_scale  = param_f32(node, 6);
    p.ext_factor  = param_f32(node, 7);
    p.attn_factor = param_f32(node, 8);
    p.beta_fast   = param_f32(node, 9);
    p.beta_slow   = param_f32(node, 10);
    memcpy(p.sections, node->op_params + 11, sizeof(p.sections));
    p.offset = node->op_params[15];
    return p;
}

attention_params get_attention(const ggml_tensor * node, const optional_view & mask, const optional_view & sinks) {
    attention_params p = {};
    p.q                = view(node->src[0]);
    p.k                = view(node->src[1]);
    p.v                = view(node->src[2]);
    p.dst              = view(node);
    p.mask             = mask.get();
    p.sinks            = sinks.get();
    p.scale            = param_f32(node, 0);
    p.max_bias         = param_f32(node, 1);
    p.softcap          = param_f32(node, 2);
    return p;
}

bool computes(const ggml_tensor * node) {
    return !is_no_op(node) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) && !ggml_is_empty(node);
}

bool is_weight(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->buffer &&
           ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

char * scratch_of(const ggml_tensor * node) {
    return static_cast<char *>(node->data) + GGML_PAD(ggml_nbytes(node), 256);
}

// ---- sparse products ----

bool sparse_product_supported(const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    // what a graph can ask of a weight; the weight itself is whole by construction
    return !w->view_src && x->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
           op->nb[0] == sizeof(float) && x->nb[1] % sizeof(float) == 0 && w->ne[0] == x->ne[0];
}

// one column's worth of parameters; more columns are set by the callers
cuda_sparse_mul_mat_params sparse_params(const op_context & ctx, const stored_matrix & w, const float * x, float * y,
                                         int64_t ldx, int64_t ldy, int64_t n) {
    cuda_sparse_mul_mat_params p = {};
    p.n_matrices                 = 1;
    p.w[0]                       = &w.matrix;
    p.y[0]                       = y;
    p.ldy[0]                     = ldy;
    p.row_begin[0]               = 0;
    p.row_end[0]                 = w.rows_per_matrix;
    p.x                          = x;
    p.ldx                        = ldx;
    p.n                          = n;
    p.x16                        = ctx.panels ? ctx.panels->x16 : nullptr;
    p.programmatic               = ctx.overlap;
    return p;
}

const float * f32_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<const float *>(static_cast<const char *>(t->data) + i1 * static_cast<int64_t>(t->nb[1]) +
                                           i2 * static_cast<int64_t>(t->nb[2]) + i3 * static_cast<int64_t>(t->nb[3]));
}
float * f32_at(ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return const_cast<float *>(f32_at(static_cast<const ggml_tensor *>(t), i1, i2, i3));
}

int64_t panel_ld(const stored_matrix & w) { return GGML_PAD(w.matrix.cols, 8); }
int64_t panel_rows(const op_context & ctx, const stored_matrix & w) {
    return op_mul_mat_panel_rows(w.rows_per_matrix, w.matrix.cols, static_cast<int64_t>(ctx.panels->nbytes));
}

// are n columns better served by unpacking the matrix and a dense product? float32 values always go through the exact
// kernel
bool unpacks(const op_context & ctx, const stored_matrix & w, int64_t n, bool experts) {
    return ctx.panels && n > cuda_sparse_mul_mat_max_n(w.matrix, experts) && w.matrix.type != GGML_MACKO_TYPE_F32 &&
           panel_rows(ctx, w) * panel_ld(w) * 2 <= static_cast<int64_t>(ctx.panels->nbytes);
}

// Are experts? One of them made dense and multiplied costs as much as about six of its sparse products of one column.
bool unpacks_experts(const op_context & ctx, const ggml_tensor * node) {
    constexpr int64_t   MIN_COLUMNS = 6; // per expert, on average
    const ggml_tensor * ids         = node->src[2];
    return unpacks(ctx, *stored(node->src[0]), ids->ne[1], true) &&
           ids->ne[0] * ids->ne[1] >= MIN_COLUMNS * node->src[0]->ne[2] &&
           op_mul_mat_id_supported(view(node->src[0]), view(node->src[1]), view(ids), view(node));
}

bool unpacks(const op_context & ctx, const ggml_tensor * node) {
    if ((node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) || !stored(node->src[0])) {
        return false;
    }
    return node->op == GGML_OP_MUL_MAT ? unpacks(ctx, *stored(node->src[0]), node->src[1]->ne[1], false)
                                       : unpacks_experts(ctx, node);
}

// first row of the stored matrix that batch (i2, i3) of a product multiplies
int64_t first_row(const ggml_tensor * node, int64_t i2, int64_t i3) {
    const ggml_tensor * w = node->src[0];
    const ggml_tensor * x = node->src[1];
    return (i3 / (x->ne[3] / w->ne[3]) * w->ne[2] + i2 / (x->ne[2] / w->ne[2])) * stored(w)->rows_per_matrix;
}

template <typename F> cudaError_t each_batch(const ggml_tensor * node, F && f) {
    for (int64_t i3 = 0; i3 < node->src[1]->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < node->src[1]->ne[2]; i2++) {
            const cudaError_t error = f(i2, i3);
            if (error != cudaSuccess) {
                return error;
            }
        }
    }
    return cudaSuccess;
}

// f(first expert, experts, first row, rows): several whole experts at a time, or some rows of one
template <typename F> cudaError_t each_panel_of_experts(const op_context & ctx, const stored_matrix & w, F && f) {
    const int64_t n_experts = w.matrix.rows / w.rows_per_matrix, rows = panel_rows(ctx, w);
    const int64_t together =
        std::max<int64_t>(1, static_cast<int64_t>(ctx.panels->nbytes) / (w.rows_per_matrix * panel_ld(w) * 2));
    for (int64_t first = 0; first < n_experts; first += together) {
        for (int64_t row = 0; row < w.rows_per_matrix; row += rows) {
            CUDA_TRY(f(first, std::min(together, n_experts - first), row, std::min(rows, w.rows_per_matrix - row)));
        }
    }
    return cudaSuccess;
}

// State of one walk over a graph.
// Panels: those that its sparse products will multiply, in their order. Two are made ahead on panel_buffers' stream.
// x16: products that follow each other and share x share its 16-bit copy, which is in the scratch memory of the first
// of them. That one's
// result is read behind the last of them at the earliest, so the memory is its until then.
class graph_walk {
public:
    const op_context & ctx;

    graph_walk(const op_context & c, const ggml_cgraph * graph);

    cudaError_t queue_unpacked(ggml_tensor * node);
    cudaError_t queue_unpacked_experts(ggml_tensor * node);
    cudaError_t queue_dense(ggml_tensor * node);
    void        left_products() { x16_of_ = nullptr; } // any other node

private:
    struct panel {
        const stored_matrix * w;
        int64_t               row_begin, row_end;
    };
    std::vector<panel>  panels_;
    size_t              n_made_ = 0, n_used_ = 0;
    const ggml_tensor * x16_of_   = nullptr; // product that has x16
    tensor_type         x16_type_ = TYPE_F16;

    tensor_type panel_type(const stored_matrix & w) const {
        return op_mul_mat_16_type(ctx, static_cast<tensor_type>(w.matrix.type));
    }
    cudaError_t                       make_panels();
    template <typename F> cudaError_t use_panel(F && multiply);
    cudaError_t                       queue_panels(ggml_tensor * node, int64_t i2, int64_t i3, const char * x16);
    char *                            shared_x16(ggml_tensor * node, tensor_type type, bool * made);
};

graph_walk::graph_walk(const op_context & c, const ggml_cgraph * graph) : ctx(c) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (computes(node) && unpacks(ctx, node)) {
            const stored_matrix & w    = *stored(node->src[0]);
            const int64_t         rows = panel_rows(ctx, w);
            if (node->op == GGML_OP_MUL_MAT_ID) {
                each_panel_of_experts(ctx, w, [&](int64_t first, int64_t n, int64_t row, int64_t some) {
                    panels_.push_back(
                        { &w, first * w.rows_per_matrix + row, (first + n - 1) * w.rows_per_matrix + row + some });
                    return cudaSuccess;
                });
                continue;
            }
            each_batch(node, [&](int64_t i2, int64_t i3) {
                const int64_t first = first_row(node, i2, i3);
                for (int64_t row = 0; row < w.rows_per_matrix; row += rows) {
                    panels_.push_back({ &w, first + row, first + std::min(row + rows, w.rows_per_matrix) });
                }
                return cudaSuccess;
            });
        }
    }
}

cudaError_t graph_walk::make_panels() {
    const panel_buffers & b = *ctx.panels;
    if (n_made_ == 0) { // whoever used the buffers before us has done so on our stream
        CUDA_TRY(cudaEventRecord(b.begin, ctx.stream));
        CUDA_TRY(cudaStreamWaitEvent(b.stream, b.begin));
    }
    for (; n_made_ < panels_.size() && n_made_ < n_used_ + panel_buffers::N; n_made_++) {
        const panel & p  = panels_[n_made_];
        const size_t  at = n_made_ % panel_buffers::N;
        if (n_made_ >= panel_buffers::N) {
            CUDA_TRY(cudaStreamWaitEvent(b.stream, b.used[at]));
        }
        CUDA_TRY(cuda_sparse_densify(p.w->matrix, p.row_begin, p.row_end, panel_type(*p.w), b.memory[at],
                                     panel_ld(*p.w), b.stream));
        CUDA_TRY(cudaEventRecord(b.made[at], b.stream));
    }
    return cudaSuccess;
}

// multiply(memory of the next panel), when it is there
template <typename F> cudaError_t graph_walk::use_panel(F && multiply) {
    const panel_buffers & b = *ctx.panels;
    CUDA_TRY(make_panels());
    const size_t at = n_used_ % panel_buffers::N;
    CUDA_TRY(cudaStreamWaitEvent(ctx.stream, b.made[at]));
    CUDA_TRY(multiply(b.memory[at]));
    n_used_++;
    return cudaEventRecord(b.used[at], ctx.stream);
}

cudaError_t graph_walk::queue_panels(ggml_tensor * node, int64_t i2, int64_t i3, const char * x16) {
    const stored_matrix & w    = *stored(node->src[0]);
    const int64_t         rows = panel_rows(ctx, w);
    op_tensor             x = view(node->src[1]), y = view(node);
    x.data += i2 * x.nb[2] + i3 * x.nb[3];
    y.data += i2 * y.nb[2] + i3 * y.nb[3];
    x.ne[2] = x.ne[3] = y.ne[2] = y.ne[3] = 1;
    for (int64_t row = 0; row < w.rows_per_matrix; row += rows) {
        CUDA_TRY(use_panel([&](char * panel) {
            return op_mul_mat_16(ctx, panel_type(w), panel, panel_ld(w), std::min(rows, w.rows_per_matrix - row), x,
                                 x16, y, row);
        }));
    }
    return cudaSuccess;
}

cudaError_t graph_walk::queue_unpacked_experts(ggml_tensor * node) {
    const stored_matrix & w    = *stored(node->src[0]);
    const tensor_type     type = panel_type(w);
    const int64_t         ld = panel_ld(w), n_experts = node->src[0]->ne[2];
    left_products();
    CUDA_TRY(op_mul_mat_id_sort(ctx, n_experts, view(node->src[2]), scratch_of(node)));
    return each_panel_of_experts(ctx, w, [&](int64_t first, int64_t n, int64_t row, int64_t rows) {
        return use_panel([&](char * panel) {
            const op_tensor dense = {
                panel, type, { w.matrix.cols, rows, n, 1 }, { 2, ld * 2, rows * ld * 2, n * rows * ld * 2 }
            };
            return op_mul_mat_id_16(ctx, dense, first, n_experts, view(node->src[1]), view(node->src[2]), view(node),
                                    row, scratch_of(node));
        });
    });
}

// where node's x is, or is to be made, in 16 bits
char * graph_walk::shared_x16(ggml_tensor * node, tensor_type type, bool * made) {
    *made = x16_of_ && x16_type_ == type && x16_of_->src[1] == node->src[1];
    if (!*made) {
        x16_of_   = node;
        x16_type_ = type;
    }
    return scratch_of(x16_of_);
}

cudaError_t graph_walk::queue_unpacked(ggml_tensor * node) {
    const tensor_type type = panel_type(*stored(node->src[0]));
    if (node->src[1]->ne[2] * node->src[1]->ne[3] == 1) {
        bool   made;
        char * x16 = shared_x16(node, type, &made);
        if (!made) {
            CUDA_TRY(op_mul_mat_x16(ctx, type, view(node->src[1]), x16));
        }
        return queue_panels(node, 0, 0, x16);
    }
    left_products();
    return each_batch(node, [&](int64_t i2, int64_t i3) {
        op_tensor x = view(node->src[1]);
        x.data += i2 * x.nb[2] + i3 * x.nb[3];
        x.ne[2] = x.ne[3]       = 1;
        const cudaError_t error = op_mul_mat_x16(ctx, type, x, scratch_of(node));
        return error != cudaSuccess ? error : queue_panels(node, i2, i3, scratch_of(node));
    });
}

cudaError_t graph_walk::queue_dense(ggml_tensor * node) {
    const op_tensor w = view(node->src[0]), x = view(node->src[1]);
    if (!op_mul_mat_wants_x16(ctx, w, x)) {
        left_products();
        return op_mul_mat(ctx, w, x, view(node), scratch_of(node), nullptr, is_weight(node->src[0]));
    }
    const tensor_type type = op_mul_mat_16_type(ctx, w.type);
    bool              made;
    char *            x16 = shared_x16(node, type, &made);
    if (!made) {
        CUDA_TRY(op_mul_mat_x16(ctx, type, x, x16));
    }
    return op_mul_mat(ctx, w, x, view(node), scratch_of(node), x16);
}

cudaError_t queue_sparse_mul_mat(const op_context & ctx, ggml_tensor * node) {
    const stored_matrix & w = *stored(node->src[0]);
    const ggml_tensor *   x = node->src[1];
    return each_batch(node, [&](int64_t i2, int64_t i3) {
        cuda_sparse_mul_mat_params p =
            sparse_params(ctx, w, f32_at(x, 0, i2, i3), f32_at(node, 0, i2, i3), static_cast<int64_t>(x->nb[1]) / 4,
                          static_cast<int64_t>(node->nb[1]) / 4, x->ne[1]);
        p.row_begin[0] = first_row(node, i2, i3);
        p.row_end[0]   = p.row_begin[0] + w.rows_per_matrix;
        return cuda_sparse_mul_mat(p, ctx.stream);
    });
}

// columns are (used, token): one launch per used slot for all tokens, or per token for all slots, whichever are fewer
cudaError_t queue_sparse_mul_mat_id(const op_context & ctx, ggml_tensor * node) {
    const stored_matrix & w      = *stored(node->src[0]);
    const ggml_tensor *   x      = node->src[1];
    const ggml_tensor *   ids    = node->src[2];
    const int64_t         n_used = ids->ne[0], n_tokens = ids->ne[1];
    const bool            by_token = n_tokens < n_used;
    for (int64_t i = 0; i < (by_token ? n_tokens : n_used); i++) {
        const int64_t used = by_token ? 0 : i, token = by_token ? i : 0;
        const int64_t ldx =
            by_token ? (x->ne[1] == 1 ? 0 : static_cast<int64_t>(x->nb[1]) / 4) : static_cast<int64_t>(x->nb[2]) / 4;
        cuda_sparse_mul_mat_params p =
            sparse_params(ctx, w, f32_at(x, used % x->ne[1], token, 0), f32_at(node, used, token, 0), ldx,
                          static_cast<int64_t>(by_token ? node->nb[1] : node->nb[2]) / 4, by_token ? n_used : n_tokens);
        p.expert_ids            = reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) +
                                                                    used * static_cast<int64_t>(ids->nb[0]) +
                                                                    token * static_cast<int64_t>(ids->nb[1]));
        p.expert_ids_stride     = static_cast<int64_t>(by_token ? ids->nb[0] : ids->nb[1]) / 4;
        p.expert_rows           = w.rows_per_matrix;
        const cudaError_t error = cuda_sparse_mul_mat(p, ctx.stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

// ---- one node ----

cudaError_t queue_node(graph_walk & walk, ggml_tensor * node) {
    const op_context &  ctx = walk.ctx;
    const ggml_tensor * a   = node->src[0];
    const ggml_tensor * b   = node->src[1];
    const ggml_tensor * c   = node->src[2];
    const op_tensor     dst = view(node);
    binary_op           binary;
    unary_op            unary;
    glu_params          glu;
    if (node->op == GGML_OP_MUL_MAT && !stored(a)) {
        return walk.queue_dense(node);
    }
    if (unpacks(ctx, node)) {
        return node->op == GGML_OP_MUL_MAT ? walk.queue_unpacked(node) : walk.queue_unpacked_experts(node);
    }
    walk.left_products();
    if (get_binary(node, &binary)) {
        return op_binary(ctx, binary, view(a), view(b), dst);
    }
    if (get_unary(node, &unary)) {
        return op_unary(ctx, unary, param_f32(node, 0), param_f32(node, 1), view(a), dst);
    }
    switch (node->op) {
        case GGML_OP_GLU:
            return get_glu(node, &glu) ? op_glu(ctx, glu, view(a), optional_view(b).get(), dst) : cudaErrorInvalidValue;
        case GGML_OP_ADD_ID:   return op_add_id(ctx, view(a), view(b), view(c), dst);
        case GGML_OP_CPY:
        case GGML_OP_CONT:
        case GGML_OP_DUP:      return op_copy(ctx, view(a), dst);
        case GGML_OP_GET_ROWS: return op_get_rows(ctx, view(a), view(b), dst);
        case GGML_OP_SET_ROWS: return op_set_rows(ctx, view(a), view(b), dst);
        case GGML_OP_RMS_NORM: {
            rms_norm_params p = {};
            p.x               = view(a);
            p.dst             = dst;
            p.eps             = param_f32(node, 0);
            return op_rms_norm(ctx, p);
        }
        case GGML_OP_SOFT_MAX:
            return op_soft_max(ctx, param_f32(node, 0), param_f32(node, 1), view(a), optional_view(b).get(),
                               optional_view(c).get(), dst);
        case GGML_OP_SUM_ROWS: return op_sum_rows(ctx, view(a), dst);
        case GGML_OP_ARGSORT:
            return op_argsort(ctx, ggml_get_op_params_i32(node, 0) == GGML_SORT_ORDER_DESC, view(a), dst);
        case GGML_OP_ROPE:    return op_rope(ctx, get_rope(node), view(a), view(b), optional_view(c).get(), dst);
        case GGML_OP_MUL_MAT: return queue_sparse_mul_mat(ctx, node);
        case GGML_OP_MUL_MAT_ID:
            return stored(a) ? queue_sparse_mul_mat_id(ctx, node)
                             : op_mul_mat_id(ctx, view(a), view(b), view(c), dst, scratch_of(node));
        case GGML_OP_FLASH_ATTN_EXT: {
            const optional_view mask(node->src[3]), sinks(node->src[4]);
            return op_attention(ctx, get_attention(node, mask, sinks), scratch_of(node));
        }
        default: return cudaErrorInvalidValue;
    }
}

// ---- fusion ----

// Nodes that one launch computes. Results of members but the last ones are not stored, so each must have no use
// outside.
struct fused_group {
    enum kind_t { NONE, SPARSE_PRODUCTS, RMS_NORM, ROPE_CACHE, ROPE_ATTENTION } kind = NONE;
    int last                                                                         = -1; // index of the last node
    // SPARSE_PRODUCTS
    const ggml_tensor * norm                             = nullptr; // RMS_NORM and MUL in front, or null
    const ggml_tensor * norm_weight                      = nullptr;
    const ggml_tensor * x                                = nullptr;
    int                 n                                = 0;
    ggml_tensor *       product[CUDA_SPARSE_MAX_GROUPED] = {};
    // node that gets the sum: the product itself, or the last ADD
    ggml_tensor *       result[CUDA_SPARSE_MAX_GROUPED]   = {};
    const ggml_tensor * bias[CUDA_SPARSE_MAX_GROUPED]     = {};
    const ggml_tensor * residual[CUDA_SPARSE_MAX_GROUPED] = {};
    ggml_tensor *       glu                               = nullptr;
    // RMS_NORM: [ADD], RMS_NORM, [MUL]
    const ggml_tensor * add = nullptr;
    ggml_tensor *       mul = nullptr; // or the norm itself
    // ROPE_CACHE: [ROPE,] ROPE, SET_ROWS, SET_ROWS
    ggml_tensor * rope_q = nullptr;
    ggml_tensor * rope_k = nullptr;
    ggml_tensor * set_k  = nullptr;
    ggml_tensor * set_v  = nullptr;
    // ROPE_ATTENTION: those, and
    ggml_tensor * attention = nullptr;
};

int next_node(const ggml_cgraph * graph, int i) {
    do {
        i++;
    } while (i < graph->n_nodes && !computes(graph->nodes[i]));
    return i;
}

// used by n nodes and by nobody else, so that it need not be stored
bool has_uses(const ggml_cgraph * graph, int i, int n) { return ggml_node_has_n_uses(graph, i, n); }

bool is_row_vector(const ggml_tensor * t, int64_t n) {
    return t->type == GGML_TYPE_F32 && t->ne[0] == n && ggml_nrows(t) == 1 && t->nb[0] == sizeof(float);
}
bool is_f32_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->nb[1] % sizeof(float) == 0;
}

// Rows chosen from one: it is that one. llama.cpp chooses so, in its last layer, which tokens give outputs.
bool is_only_row(const ggml_tensor * t) {
    return t->op == GGML_OP_GET_ROWS && t->src[0]->type == GGML_TYPE_F32 && t->src[0]->nb[0] == sizeof(float) &&
           ggml_nrows(t->src[0]) == 1 && ggml_are_same_shape(t, t->src[0]);
}

bool can_group(const op_context & ctx, const ggml_tensor * node, const ggml_tensor * x) {
    if (node->op != GGML_OP_MUL_MAT || node->src[1] != x || !stored(node->src[0]) || x->ne[2] * x->ne[3] != 1 ||
        node->src[0]->ne[2] * node->src[0]->ne[3] != 1) {
        return false;
    }
    return !unpacks(ctx, *stored(node->src[0]), x->ne[1], false);
}

bool same_kind(const ggml_tensor * a, const ggml_tensor * b) {
    return cuda_sparse_same_kernel(stored(a->src[0])->matrix, stored(b->src[0])->matrix);
}

// the kernels of a part in another layout have no norm and no product of gate and up
bool has_part(const ggml_tensor * product) { return stored(product->src[0])->matrix.part; }

bool match_sparse_products(const op_context & ctx, const ggml_cgraph * graph, int i, fused_group * group) {
    ggml_tensor * first = graph->nodes[i];
    fused_group   f;
    int           at     = i; // first product
    int           shared = -1;
    if (first->op == GGML_OP_RMS_NORM) {
        const int mul = next_node(graph, i);
        if (mul >= graph->n_nodes || graph->nodes[mul]->op != GGML_OP_MUL || graph->nodes[mul]->src[0] != first ||
            !has_uses(graph, i, 1) || !is_row_vector(graph->nodes[mul]->src[1], first->ne[0]) ||
            // the kernel reads the weight before earlier ones end
            graph->nodes[mul]->src[1]->op != GGML_OP_NONE || !is_f32_rows(first->src[0])) {
            return false;
        }
        f.norm        = first;
        f.norm_weight = graph->nodes[mul]->src[1];
        f.x           = first->src[0];
        shared        = mul;
        at            = next_node(graph, mul);
    }
    const ggml_tensor * input = shared >= 0 ? graph->nodes[shared] : first->src[1];
    int                 index[CUDA_SPARSE_MAX_GROUPED];
    int                 last = i;
    for (int k = at; k < graph->n_nodes && f.n < CUDA_SPARSE_MAX_GROUPED && can_group(ctx, graph->nodes[k], input);
         k     = next_node(graph, k)) {
        if (shared >= 0 && has_part(graph->nodes[k])) {
            return false;
        }
        index[f.n]     = k;
        f.product[f.n] = f.result[f.n] = graph->nodes[k];
        f.n++;
        last = k;
    }
    if (f.n == 0 || (shared >= 0 && !has_uses(graph, shared, f.n))) {
        return false;
    }
    if (shared < 0) {
        f.x = input;
    }
    // sums that follow: bias, residual; in a last layer behind choices of their terms' only row
    const ggml_tensor * chosen[2];
    int                 n_chosen = 0;
    for (int k = next_node(graph, last); k < graph->n_nodes; k = next_node(graph, k)) {
        ggml_tensor * sum = graph->nodes[k];
        if (n_chosen < 2 && is_only_row(sum) && has_uses(graph, k, 1)) {
            chosen[n_chosen++] = sum;
            continue;
        }
        if (sum->op != GGML_OP_ADD) {
            break;
        }
        const ggml_tensor * terms[2] = { sum->src[0], sum->src[1] };
        for (const ggml_tensor *& t : terms) {
            if (std::find(chosen, chosen + n_chosen, t) != chosen + n_chosen) {
                t = t->src[0];
            }
        }
        const bool uses_chosen = (terms[0] != sum->src[0]) + (terms[1] != sum->src[1]) == n_chosen;
        int        which       = -1;
        for (int j = 0; j < f.n; j++) {
            if (terms[0] == f.result[j] || terms[1] == f.result[j]) {
                which = j;
            }
        }
        if (which < 0 || !uses_chosen || terms[0] == terms[1] || !has_uses(graph, index[which], 1)) {
            break;
        }
        const ggml_tensor * other = terms[0] == f.result[which] ? terms[1] : terms[0];
        bool                own   = false; // a sum of two members
        for (int j = 0; j < f.n; j++) {
            own |= other == f.result[j] || other == f.product[j];
        }
        if (!own && is_row_vector(other, sum->ne[0]) && terms[0] == f.result[which] && ggml_is_contiguous(sum) &&
            !f.bias[which] && !f.residual[which]) {
            f.bias[which] = other;
        } else if (!own && ggml_are_same_shape(other, sum) && is_f32_rows(other) && is_f32_rows(sum) &&
                   other->nb[1] == sum->nb[1] && !f.residual[which]) {
            f.residual[which] = other;
        } else {
            break;
        }
        f.result[which] = sum;
        index[which]    = k;
        last            = k;
        n_chosen        = 0;
    }
    const int next = next_node(graph, last);
    if (f.n == 2 && same_kind(f.product[0], f.product[1]) && !has_part(f.product[0]) && !has_part(f.product[1]) &&
        !f.bias[0] && !f.bias[1] && !f.residual[0] && !f.residual[1] && next < graph->n_nodes &&
        graph->nodes[next]->op == GGML_OP_GLU && has_uses(graph, index[0], 1) && has_uses(graph, index[1], 1)) {
        ggml_tensor * glu = graph->nodes[next];
        if (ggml_get_glu_op(glu) == GGML_GLU_OP_SWIGLU && glu->src[1] && is_f32_rows(glu) &&
            ggml_are_same_shape(f.product[0], f.product[1])) {
            if (glu->src[0] == f.product[1] && glu->src[1] == f.product[0]) {
                std::swap(f.product[0], f.product[1]); // the gate first
            }
            if (glu->src[0] == f.product[0] && glu->src[1] == f.product[1]) {
                f.glu = glu;
                last  = next;
            }
        }
    }
    f.kind = fused_group::SPARSE_PRODUCTS;
    f.last = last;
    *group = f;
    return f.norm || f.n > 1 || f.glu || last != i;
}

bool match_rms_norm(const ggml_cgraph * graph, int i, fused_group * group) {
    fused_group f;
    int         at = i;
    if (graph->nodes[i]->op == GGML_OP_ADD) {
        const ggml_tensor * add = graph->nodes[i];
        at                      = next_node(graph, i);
        if (at >= graph->n_nodes || graph->nodes[at]->op != GGML_OP_RMS_NORM || graph->nodes[at]->src[0] != add ||
            !ggml_are_same_shape(add->src[0], add) || !ggml_are_same_shape(add->src[1], add)) {
            return false;
        }
        f.add = add;
    }
    ggml_tensor * norm = graph->nodes[at];
    if (norm->op != GGML_OP_RMS_NORM) {
        return false;
    }
    f.norm         = norm;
    f.mul          = norm;
    f.last         = at;
    const int next = next_node(graph, at);
    if (next < graph->n_nodes && graph->nodes[next]->op == GGML_OP_MUL && graph->nodes[next]->src[0] == norm &&
        graph->nodes[next]->src[1] != norm && graph->nodes[next]->src[1]->ne[0] == norm->ne[0] &&
        has_uses(graph, at, 1)) {
        f.mul         = graph->nodes[next];
        f.norm_weight = f.mul->src[1];
        f.last        = next;
    }
    f.kind = fused_group::RMS_NORM;
    *group = f;
    return f.last != i;
}

rms_norm_params norm_params(const fused_group & f, op_tensor * scale, op_tensor * add, op_tensor * sum) {
    rms_norm_params p = {};
    p.x               = view(f.add ? f.add->src[0] : f.norm->src[0]);
    p.dst             = view(f.mul);
    p.eps             = param_f32(f.norm, 0);
    if (f.norm_weight) {
        *scale  = view(f.norm_weight);
        p.scale = scale;
    }
    if (f.add) {
        *add  = view(f.add->src[1]);
        *sum  = view(f.add);
        p.add = add;
        p.sum = sum;
    }
    return p;
}

// the computing node behind a chain of views that only this chain uses
const ggml_tensor * single_source(const ggml_tensor * t) {
    while (is_no_op(t) && t->src[0]) {
        t = t->src[0];
    }
    return t;
}

bool same_rope(const ggml_tensor * a, const ggml_tensor * b) {
    return !memcmp(a->op_params, b->op_params, sizeof(a->op_params)) && a->src[1] == b->src[1] &&
           a->src[2] == b->src[2];
}

rope_cache_params cache_params(const fused_group & f) {
    rope_cache_params p = {};
    p.k                 = view(f.rope_k->src[0]);
    p.k_cache           = view(f.set_k);
    p.v                 = view(f.set_v->src[0]);
    p.v_cache           = view(f.set_v);
    p.k_ids             = static_cast<const int64_t *>(f.set_k->src[1]->data);
    p.v_ids             = static_cast<const int64_t *>(f.set_v->src[1]->data);
    p.q                 = f.rope_q ? view(f.rope_q->src[0]) : p.k;
    p.q_dst             = f.rope_q ? view(f.rope_q) : p.q;
    if (!f.rope_q) {
        p.q.ne[1] = p.q_dst.ne[1] = 0; // no heads
    }
    return p;
}

// is node the attention of one token that alone reads f's rotated query?
bool is_attention_of(const ggml_cgraph * graph, int rope_q, const fused_group & f, const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || !f.rope_q || single_source(node->src[0]) != f.rope_q ||
        !has_uses(graph, rope_q, 1) || f.rope_k->src[1]->op != GGML_OP_NONE ||
        (f.rope_k->src[2] && f.rope_k->src[2]->op != GGML_OP_NONE)) {
        return false;
    }
    for (const ggml_tensor * t = node->src[0]; t != f.rope_q; t = t->src[0]) { // its views
        const auto *end = graph->nodes + graph->n_nodes,
                   *at  = std::find(graph->nodes + rope_q, graph->nodes + graph->n_nodes, t);
        if (at == end || ggml_node_get_use_count(graph, static_cast<int>(at - graph->nodes)) != 1) {
            return false;
        }
    }
    if ((node->src[3] && node->src[3]->op != GGML_OP_NONE) || f.set_k->src[1]->op != GGML_OP_NONE ||
        f.set_v->src[1]->op != GGML_OP_NONE) {
        return false; // the kernel reads the mask and the rows' numbers before earlier ones end
    }
    const optional_view mask(node->src[3]), sinks(node->src[4]);
    return op_rope_attention_supported(get_rope(f.rope_k), view(f.rope_k->src[1]),
                                       optional_view(f.rope_k->src[2]).get(), cache_params(f),
                                       get_attention(node, mask, sinks));
}

bool match_rope_cache(const ggml_cgraph * graph, int i, fused_group * group) {
    fused_group f;
    int         k = i;
    if (graph->nodes[i]->op != GGML_OP_ROPE) {
        return false;
    }
    const int second = next_node(graph, i);
    if (second < graph->n_nodes && graph->nodes[second]->op == GGML_OP_ROPE &&
        same_rope(graph->nodes[i], graph->nodes[second])) {
        f.rope_q = graph->nodes[i];
        k        = second;
    }
    const int set_k = next_node(graph, k), set_v = next_node(graph, set_k);
    if (set_v >= graph->n_nodes || graph->nodes[set_k]->op != GGML_OP_SET_ROWS ||
        graph->nodes[set_v]->op != GGML_OP_SET_ROWS || !has_uses(graph, k, 1)) {
        return false;
    }
    f.rope_k = graph->nodes[k];
    f.set_k  = graph->nodes[set_k];
    f.set_v  = graph->nodes[set_v];
    // the rotated keys go nowhere but into the cache, whole rows
    const ggml_tensor * rows = f.set_k->src[0];
    for (int j = k + 1; j < set_k; j++) {
        if (graph->nodes[j] == rows && ggml_node_get_use_count(graph, j) != 1) {
            return false;
        }
    }
    if (single_source(rows) != f.rope_k || !ggml_is_contiguous(rows) || !ggml_is_contiguous(f.rope_k) ||
        rows->ne[0] != f.rope_k->ne[0] * f.rope_k->ne[1] || rows->ne[1] != f.rope_k->ne[2] ||
        ggml_nelements(rows) != ggml_nelements(f.rope_k) || rows->view_offs != f.rope_k->view_offs) {
        return false;
    }
    if (single_source(f.set_v->src[0]) == f.rope_k || f.set_k->src[1]->type != GGML_TYPE_I64 ||
        f.set_v->src[1]->type != GGML_TYPE_I64 || !ggml_is_contiguous(f.set_k->src[1]) ||
        !ggml_is_contiguous(f.set_v->src[1]) || ggml_nelements(f.set_v->src[1]) != rows->ne[1]) {
        return false;
    }
    if (!op_rope_cache_supported(get_rope(f.rope_k), view(f.rope_k->src[1]), optional_view(f.rope_k->src[2]).get(),
                                 cache_params(f))) {
        return false;
    }
    f.kind              = fused_group::ROPE_CACHE;
    f.last              = set_v;
    const int attention = next_node(graph, set_v);
    if (attention < graph->n_nodes && is_attention_of(graph, i, f, graph->nodes[attention])) {
        f.kind      = fused_group::ROPE_ATTENTION;
        f.last      = attention;
        f.attention = graph->nodes[attention];
    }
    *group = f;
    return true;
}

bool match(const op_context & ctx, const ggml_cgraph * graph, int i, fused_group * group) {
    return match_sparse_products(ctx, graph, i, group) || match_rms_norm(graph, i, group) ||
           match_rope_cache(graph, i, group);
}

// Memory that a launch reads and writes as a whole. The allocator placed results as if nodes ran one by one, so a
// result may lie where a
// member's operand was; graph_optimize asks to keep those, and this check stands for graphs that did not go through it.
bool overlaps(const ggml_tensor * a, const ggml_tensor * b) {
    const char * pa = static_cast<const char *>(a->data);
    const char * pb = static_cast<const char *>(b->data);
    return pa < pb + ggml_nbytes(b) && pb < pa + ggml_nbytes(a);
}
bool is_same(const ggml_tensor * a, const ggml_tensor * b) { return a->data == b->data && ggml_are_same_stride(a, b); }

// can the group be one launch?
bool is_safe(const fused_group & f) {
    switch (f.kind) {
        case fused_group::SPARSE_PRODUCTS:
            for (int j = 0; j < f.n; j++) {
                const ggml_tensor * y = f.glu ? f.glu : f.result[j];
                if (overlaps(y, f.x)) {
                    return false;
                }
                for (int k = 0; k < f.n; k++) {
                    if ((k != j && !f.glu && overlaps(y, f.result[k])) ||
                        (f.residual[k] && overlaps(y, f.residual[k]) && !(k == j && is_same(y, f.residual[k])))) {
                        return false;
                    }
                }
            }
            return true;
        case fused_group::RMS_NORM: {
            op_tensor scale, add, sum;
            if (!op_rms_norm_supported(norm_params(f, &scale, &add, &sum))) {
                return false;
            }
            const ggml_tensor * inputs[] = { f.add ? f.add->src[0] : f.norm->src[0], f.add ? f.add->src[1] : nullptr };
            for (const ggml_tensor * in : inputs) {
                if (in && ((overlaps(in, f.mul) && !is_same(in, f.mul)) ||
                           (f.add && overlaps(in, f.add) && !is_same(in, f.add)))) {
                    return false;
                }
            }
            return !(f.add && overlaps(f.add, f.mul)) &&
                   !(f.norm_weight && overlaps(f.norm_weight, f.mul) && !is_same(f.norm_weight, f.mul));
        }
        case fused_group::ROPE_ATTENTION:
            return !overlaps(f.attention, f.rope_q->src[0]) && !overlaps(f.attention, f.rope_k->src[0]) &&
                   !overlaps(f.attention, f.set_v->src[0]);
        default: {
            const ggml_tensor * q = f.rope_q;
            return !q || (!overlaps(q, f.rope_k->src[0]) && !overlaps(q, f.set_v->src[0]) &&
                          (!overlaps(q, q->src[0]) || is_same(q, q->src[0])));
        }
    }
}

cudaError_t queue_group(const op_context & ctx, const fused_group & f) {
    switch (f.kind) {
        case fused_group::SPARSE_PRODUCTS: {
            bool queued[CUDA_SPARSE_MAX_GROUPED] = {};
            for (int first = 0; first < f.n; first++) { // one launch per kind
                if (queued[first]) {
                    continue;
                }
                cuda_sparse_mul_mat_params p =
                    sparse_params(ctx, *stored(f.product[first]->src[0]), static_cast<const float *>(f.x->data),
                                  nullptr, static_cast<int64_t>(f.x->nb[1]) / 4, 0, f.x->ne[1]);
                p.n_matrices = 0;
                for (int j = first; j < f.n; j++) {
                    if (!same_kind(f.product[first], f.product[j])) {
                        continue;
                    }
                    const stored_matrix & w = *stored(f.product[j]->src[0]);
                    ggml_tensor *         y = f.glu ? f.glu : f.result[j];
                    const int             i = p.n_matrices++;
                    p.w[i]                  = &w.matrix;
                    p.y[i]                  = static_cast<float *>(y->data);
                    p.ldy[i]                = static_cast<int64_t>(y->nb[1]) / 4;
                    p.row_begin[i]          = 0;
                    p.row_end[i]            = w.rows_per_matrix;
                    p.bias[i]               = f.bias[j] ? static_cast<const float *>(f.bias[j]->data) : nullptr;
                    p.residual[i]           = f.residual[j] ? static_cast<const float *>(f.residual[j]->data) : nullptr;
                    queued[j]               = true;
                }
                if (f.norm) {
                    p.norm_weight = static_cast<const float *>(f.norm_weight->data);
                    p.norm_eps    = param_f32(f.norm, 0);
                }
                p.silu_mul = f.glu != nullptr;
                CUDA_TRY(cuda_sparse_mul_mat(p, ctx.stream));
            }
            return cudaSuccess;
        }
        case fused_group::RMS_NORM: {
            op_tensor scale, add, sum;
            return op_rms_norm(ctx, norm_params(f, &scale, &add, &sum));
        }
        case fused_group::ROPE_ATTENTION: {
            const optional_view mask(f.attention->src[3]), sinks(f.attention->src[4]);
            return op_rope_attention(ctx, get_rope(f.rope_k), view(f.rope_k->src[1]),
                                     optional_view(f.rope_k->src[2]).get(), cache_params(f),
                                     get_attention(f.attention, mask, sinks), scratch_of(f.attention));
        }
        default:
            return op_rope_cache(ctx, get_rope(f.rope_k), view(f.rope_k->src[1]), optional_view(f.rope_k->src[2]).get(),
                                 cache_params(f));
    }
}

} // namespace

bool is_no_op(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

bool graph_supports_op(const ggml_tensor * op, bool sparse) {
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    const ggml_tensor * c = op->src[2];
    if (is_no_op(op)) {
        return true;
    }
    if (sparse) {
        return op->op == GGML_OP_MUL_MAT
                   ? sparse_product_supported(op)
                   : op->op == GGML_OP_MUL_MAT_ID && sparse_product_supported(op) && c->type == GGML_TYPE_I32;
    }
    const op_tensor dst = view(op);
    binary_op       binary;
    unary_op        unary;
    glu_params      glu;
    if (get_binary(op, &binary)) {
        return op_binary_supported(binary, view(a), view(b), dst);
    }
    if (get_unary(op, &unary)) {
        return op_unary_supported(unary, view(a), dst);
    }
    switch (op->op) {
        case GGML_OP_GLU:      return get_glu(op, &glu) && op_glu_supported(view(a), optional_view(b).get(), dst);
        case GGML_OP_ADD_ID:   return op_add_id_supported(view(a), view(b), view(c), dst);
        case GGML_OP_CPY:
        case GGML_OP_CONT:
        case GGML_OP_DUP:      return op_copy_supported(view(a), dst);
        case GGML_OP_GET_ROWS: return op_get_rows_supported(view(a), view(b), dst);
        case GGML_OP_SET_ROWS: return op_set_rows_supported(view(a), view(b), dst);
        case GGML_OP_RMS_NORM: {
            rms_norm_params p = {};
            p.x               = view(a);
            p.dst             = dst;
            return op_rms_norm_supported(p);
        }
        case GGML_OP_SOFT_MAX:
            return op_soft_max_supported(view(a), optional_view(b).get(), optional_view(c).get(), dst);
        case GGML_OP_SUM_ROWS:       return op_sum_rows_supported(view(a), dst);
        case GGML_OP_ARGSORT:        return op_argsort_supported(view(a), dst);
        case GGML_OP_ROPE:           return op_rope_supported(get_rope(op), view(a), view(b), optional_view(c).get(), dst);
        case GGML_OP_MUL_MAT:        return op_mul_mat_supported(view(a), view(b), dst);
        case GGML_OP_MUL_MAT_ID:     return op_mul_mat_id_supported(view(a), view(b), view(c), dst);
        case GGML_OP_FLASH_ATTN_EXT: {
            const optional_view mask(op->src[3]), sinks(op->src[4]);
            return op_attention_supported(get_attention(op, mask, sinks));
        }
        default: return false;
    }
}

size_t graph_scratch_nbytes(const ggml_tensor * op, bool sparse) {
    switch (op->op) {
        case GGML_OP_MUL_MAT:
            return sparse ? op_mul_mat_x16_nbytes(view(op->src[1]))
                          : op_mul_mat_scratch_nbytes(view(op->src[0]), view(op->src[1]));
        case GGML_OP_MUL_MAT_ID:
            return op_mul_mat_id_scratch_nbytes(view(op->src[0]), view(op->src[1]), view(op->src[2]));
        case GGML_OP_FLASH_ATTN_EXT: {
            const optional_view mask(op->src[3]), sinks(op->src[4]);
            return op_attention_scratch_nbytes(get_attention(op, mask, sinks));
        }
        default: return 0;
    }
}

void graph_optimize(const op_context & ctx, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    constexpr int REACH      = 24; // nodes between products of one input: rope, norms and views of three projections
    const auto    is_product = [](const ggml_tensor * node, const ggml_tensor * x) {
        return node->op == GGML_OP_MUL_MAT && node->src[1] == x && is_weight(node->src[0]) && x->ne[2] * x->ne[3] == 1;
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * first = graph->nodes[i];
        if (first->op != GGML_OP_MUL_MAT || !is_product(first, first->src[1])) {
            continue;
        }
        int end = i + 1; // products that moved up stand here
        for (int k = end; k < std::min(graph->n_nodes, i + REACH) && end - i < CUDA_SPARSE_MAX_GROUPED; k++) {
            ggml_tensor * node = graph->nodes[k];
            // its operands are there already
            if (is_product(node, first->src[1]) && !stored(node->src[0]) == !stored(first->src[0])) {
                std::rotate(graph->nodes + end, graph->nodes + k, graph->nodes + k + 1);
                end++;
            }
        }
        const int n    = end - i;
        int       sums = end;
        for (int k = end; n > 1 && k < std::min(graph->n_nodes, i + REACH); k++) { // their biases behind them
            ggml_tensor * node   = graph->nodes[k];
            const bool    wanted = node->op == GGML_OP_ADD && node->src[1]->op == GGML_OP_NONE &&
                                is_row_vector(node->src[1], node->ne[0]) &&
                                std::find(graph->nodes + i, graph->nodes + end, node->src[0]) != graph->nodes + end;
            if (wanted) {
                std::rotate(graph->nodes + sums, graph->nodes + k, graph->nodes + k + 1);
                sums++;
            }
        }
        i = sums - 1;
    }
    if (!params || !params->add_alloc_dep) {
        return;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        fused_group f;
        if (!computes(graph->nodes[i]) || !match(ctx, graph, i, &f)) {
            continue;
        }
        ggml_tensor * last = graph->nodes[f.last];
        for (int k = i; k < f.last; k++) { // operands of all members live as long as the group
            for (ggml_tensor * src : graph->nodes[k]->src) {
                if (src && src->op != GGML_OP_NONE) {
                    params->add_alloc_dep(params->user_data, src->view_src ? src->view_src : src, last);
                }
            }
        }
        i = f.last;
    }
}

cudaError_t graph_queue(const op_context & ctx, const ggml_cgraph * graph, bool fuse, const ggml_tensor ** failed) {
    graph_walk walk(ctx, graph);
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        if (!computes(node)) {
            continue;
        }
        fused_group f;
        cudaError_t error;
        if (fuse && match(ctx, graph, i, &f) && is_safe(f)) {
            walk.left_products();
            error = queue_group(ctx, f);
            i     = f.last;
        } else {
            error = queue_node(walk, node);
        }
        if (error != cudaSuccess) {
            *failed = node;
            return error;
        }
    }
    return cudaSuccess;
}

} // namespace macko::cuda
