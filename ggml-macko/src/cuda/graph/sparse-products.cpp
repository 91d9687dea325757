#include "cuda/graph/sparse-products.h"

#include "cuda/graph/graph.h"
#include "cuda/lib/common.cuh"

namespace macko::cuda {

namespace {

char * element(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<char *>(t->data) + i1 * static_cast<int64_t>(t->nb[1]) + i2 * static_cast<int64_t>(t->nb[2]) +
           i3 * static_cast<int64_t>(t->nb[3]);
}
float * f32_row(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<float *>(element(t, i1, i2, i3));
}

// Stride k of an f32 (or i32) tensor, in elements.
int64_t stride(const ggml_tensor * t, int k) { return static_cast<int64_t>(t->nb[k]) / 4; }

} // namespace

bool sparse_mul_mat_supported(const ggml_tensor * op) {
    const ggml_tensor * w        = op->src[0];
    const ggml_tensor * x        = op->src[1];
    const bool          f32      = x->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32;
    const bool          has_rows = x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
    return !w->view_src && f32 && has_rows && x->nb[1] % sizeof(float) == 0 && w->ne[0] == x->ne[0];
}

cuda_sparse_mul_mat_params sparse_mul_mat_params(const op_context & ctx, const stored_matrix & w, const float * x,
                                                 float * y, int64_t ldx, int64_t ldy, int64_t n) {
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

int64_t first_row_of_batch(const ggml_tensor * node, int64_t i2, int64_t i3) {
    const ggml_tensor * w = node->src[0];
    const ggml_tensor * x = node->src[1];
    return (i3 / (x->ne[3] / w->ne[3]) * w->ne[2] + i2 / (x->ne[2] / w->ne[2])) * w->ne[1];
}

cudaError_t enqueue_sparse_mul_mat(const op_context & ctx, ggml_tensor * node) {
    const stored_matrix & w = *stored(node->src[0]);
    const ggml_tensor *   x = node->src[1];
    return for_each_batch(node, [&](int64_t i2, int64_t i3) {
        cuda_sparse_mul_mat_params p = sparse_mul_mat_params(ctx, w, f32_row(x, 0, i2, i3), f32_row(node, 0, i2, i3),
                                                             stride(x, 1), stride(node, 1), x->ne[1]);
        p.row_begin[0]               = first_row_of_batch(node, i2, i3);
        p.row_end[0]                 = p.row_begin[0] + w.rows_per_matrix;
        return cuda_sparse_mul_mat(p, ctx.stream);
    });
}

bool groups_experts(const ggml_tensor * node) {
    const ggml_tensor *   x   = node->src[1];
    const ggml_tensor *   ids = node->src[2];
    const stored_matrix * w   = stored(node->src[0]);
    // columns of x and of the result have one stride
    const bool one_stride = (x->ne[1] == 1 || x->ne[1] == ids->ne[0]) && x->nb[2] == x->nb[1] * size_t(x->ne[1]) &&
                            node->nb[2] == node->nb[1] * size_t(node->ne[1]);
    return w && one_stride && cuda_sparse_groups_experts(w->matrix, ids->ne[0] * ids->ne[1], node->src[0]->ne[2]);
}

size_t grouped_scratch_nbytes(const ggml_tensor * node) {
    const ggml_tensor * w   = node->src[0];
    const ggml_tensor * ids = node->src[2];
    if (stored(w) && !cuda_sparse_groups_experts(stored(w)->matrix, 1, w->ne[2])) {
        return 0; // its layout has no groups
    }
    return static_cast<size_t>(cuda_sparse_groups_nbytes(w->ne[0], ids->ne[0] * ids->ne[1], w->ne[2]));
}

cuda_sparse_mul_mat_params grouped_experts_params(const op_context & ctx, const ggml_tensor * node) {
    const stored_matrix &      w   = *stored(node->src[0]);
    const ggml_tensor *        x   = node->src[1];
    const ggml_tensor *        ids = node->src[2];
    cuda_sparse_mul_mat_params p   = sparse_mul_mat_params(ctx, w, f32_row(x, 0, 0, 0), f32_row(node, 0, 0, 0),
                                                           stride(x, 1), stride(node, 1), ids->ne[0] * ids->ne[1]);
    p.expert_ids                   = static_cast<const int32_t *>(ids->data);
    p.expert_ids_stride            = stride(ids, 0);
    p.expert_rows                  = w.rows_per_matrix;
    p.slots                        = ids->ne[0];
    p.token_stride                 = stride(ids, 1);
    p.shares_x                     = x->ne[1] == 1;
    p.groups                       = scratch_of(ctx, node);
    return p;
}

cudaError_t enqueue_grouped_experts(const op_context & ctx, ggml_tensor * node) {
    return cuda_sparse_mul_mat(grouped_experts_params(ctx, node), ctx.stream);
}

// The columns of the result are pairs (slot, token); slot numbers the experts that a token uses. Uses one launch per
// slot for all tokens, or one per token for all slots, whichever needs fewer launches.
cudaError_t enqueue_sparse_mul_mat_id(const op_context & ctx, ggml_tensor * node) {
    const stored_matrix & w       = *stored(node->src[0]);
    const ggml_tensor *   x       = node->src[1];
    const ggml_tensor *   ids     = node->src[2];
    const int64_t         n_slots = ids->ne[0], n_tokens = ids->ne[1];
    const bool            by_token  = n_tokens < n_slots;
    const int             dim       = by_token ? 1 : 2; // dimension of node along which the columns of a launch lie
    const int64_t         n_columns = by_token ? n_slots : n_tokens, n_launches = by_token ? n_tokens : n_slots;
    const bool            shares_x = by_token && x->ne[1] == 1; // all slots of a token read one column
    for (int64_t i = 0; i < n_launches; i++) {
        const int64_t              slot = by_token ? 0 : i, token = by_token ? i : 0;
        cuda_sparse_mul_mat_params p =
            sparse_mul_mat_params(ctx, w, f32_row(x, slot % x->ne[1], token, 0), f32_row(node, slot, token, 0),
                                  shares_x ? 0 : stride(x, dim), stride(node, dim), n_columns);
        const char * id = static_cast<const char *>(ids->data) + slot * static_cast<int64_t>(ids->nb[0]) +
                          token * static_cast<int64_t>(ids->nb[1]);
        p.expert_ids        = reinterpret_cast<const int32_t *>(id);
        p.expert_ids_stride = stride(ids, dim - 1);
        p.expert_rows       = w.rows_per_matrix;
        CUDA_TRY(cuda_sparse_mul_mat(p, ctx.stream));
    }
    return cudaSuccess;
}

} // namespace macko::cuda
