#include "cuda/graph/panels.h"

#include "cuda/graph/adapters.h"
#include "cuda/graph/sparse-products.h"
#include "cuda/lib/common.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

// Elements from one row of a panel to the next: rows begin at multiples of 16 bytes.
int64_t panel_ld(const ggml_tensor * w) { return GGML_PAD(w->ne[0], 8); }
int64_t panel_row_nbytes(const ggml_tensor * w) { return panel_ld(w) * 2; }

tensor_type panel_type(const ggml_tensor * w) { return op_mul_mat_16_type(static_cast<tensor_type>(w->type)); }

int64_t panel_nbytes(const op_context & ctx) { return static_cast<int64_t>(ctx.panels->nbytes); }

// Number of rows in one panel of w.
int64_t panel_rows(const op_context & ctx, const ggml_tensor * w) {
    return op_mul_mat_panel_rows(w->ne[1], w->ne[0], panel_nbytes(ctx));
}

// Whether rows of w fit panels of nbytes bytes.
bool fits_panels(const ggml_tensor * w, int64_t nbytes) {
    return w->type != GGML_TYPE_F32 &&
           op_mul_mat_panel_rows(w->ne[1], w->ne[0], nbytes) * panel_row_nbytes(w) <= nbytes;
}

// Whether w is made dense for n columns. A weight in host memory always is.
bool densifies(const op_context & ctx, const ggml_tensor * w, int64_t n, bool experts) {
    return ctx.panels && (!stored(w) || n > cuda_sparse_mul_mat_max_n(stored(w)->matrix, experts)) &&
           fits_panels(w, panel_nbytes(ctx));
}

// Whether the GPU has kernels for products of experts with rows in 16 bits.
bool has_expert_products(const op_context & ctx, const ggml_tensor * node) {
    return op_mul_mat_has_units(ctx, panel_type(node->src[0])) &&
           op_mul_mat_id_supported(operand(node->src[0]), operand(node->src[1]), operand(node->src[2]), operand(node));
}

// Making an expert dense and multiplying it costs as much as about six sparse products with one column.
bool densifies_experts(const op_context & ctx, const ggml_tensor * node) {
    constexpr int64_t   MIN_COLUMNS = 6; // per expert, on average
    const ggml_tensor * w           = node->src[0];
    const ggml_tensor * ids         = node->src[2];
    const int64_t       n_columns   = ids->ne[0] * ids->ne[1];
    return !groups_experts(node) && densifies(ctx, w, ids->ne[1], true) &&
           (!stored(w) || n_columns >= MIN_COLUMNS * w->ne[2]) && has_expert_products(ctx, node);
}

// Whether w has dense rows in 16 bits that can be multiplied in place, like a panel.
bool is_dense_panel(const ggml_tensor * w) {
    const bool has_16_bits = static_cast<tensor_type>(w->type) == panel_type(w);
    return !is_sparse(w) && has_16_bits && w->nb[0] == 2 && w->nb[1] % 16 == 0;
}

// Whether an expert is large enough for a launch of its own, and there are enough tokens for several per expert.
bool is_large_experts(const ggml_tensor * node) {
    const ggml_tensor * w   = node->src[0];
    const ggml_tensor * ids = node->src[2];
    return w->ne[0] * w->ne[1] >= CUDA_SPARSE_LARGE_EXPERT && ids->ne[1] > 1 && ids->ne[0] * ids->ne[1] >= 2 * w->ne[2];
}

// Offsets in the scratch memory of a product by expert: lists of tokens, rows of x, results.
struct expert_places {
    size_t x, y, nbytes;
};
expert_places expert_memory(const ggml_tensor * node) {
    const int64_t n_rows = node->src[2]->ne[0] * node->src[2]->ne[1];
    expert_places at     = {};
    at.x      = op_mul_mat_id_scratch_nbytes(operand(node->src[0]), operand(node->src[1]), operand(node->src[2]));
    at.y      = at.x + GGML_PAD(static_cast<size_t>(n_rows * op_expert_rows_ld(node->src[1]->ne[0]) * 4), 256);
    at.nbytes = at.y + static_cast<size_t>(n_rows * node->ne[0] * 4);
    return at;
}

// Calls f(first expert, experts, first row, rows) for each panel: several whole experts, or some rows of one.
template <typename F> cudaError_t for_each_expert_panel(const op_context & ctx, const ggml_tensor * w, F && f) {
    const int64_t n_experts = w->ne[2], rows = panel_rows(ctx, w);
    const int64_t per_panel = std::max<int64_t>(1, panel_nbytes(ctx) / (w->ne[1] * panel_row_nbytes(w)));
    for (int64_t first = 0; first < n_experts; first += per_panel) {
        for (int64_t row = 0; row < w->ne[1]; row += rows) {
            CUDA_TRY(f(first, std::min(per_panel, n_experts - first), row, std::min(rows, w->ne[1] - row)));
        }
    }
    return cudaSuccess;
}

// Batch (i2, i3) of a tensor.
op_tensor batch_operand(const ggml_tensor * t, int64_t i2, int64_t i3) {
    op_tensor result = operand(t);
    result.data += i2 * result.nb[2] + i3 * result.nb[3];
    result.ne[2] = result.ne[3] = 1;
    return result;
}

} // namespace

bool densifies(const op_context & ctx, const ggml_tensor * node) {
    if (!is_product(node) || !is_sparse(node->src[0])) {
        return false;
    }
    return op_of(node) == GGML_OP_MUL_MAT ? densifies(ctx, node->src[0], node->src[1]->ne[1], false)
                                          : densifies_experts(ctx, node);
}

bool multiplies_by_expert(const op_context & ctx, const ggml_tensor * node) {
    if (op_of(node) != GGML_OP_MUL_MAT_ID || !is_large_experts(node) || !has_expert_products(ctx, node)) {
        return false;
    }
    const ggml_tensor * w = node->src[0];
    return is_sparse(w) ? ctx.panels && fits_panels(w, panel_nbytes(ctx)) && !groups_experts(node) : is_dense_panel(w);
}

size_t by_expert_scratch_nbytes(const ggml_tensor * node) {
    return is_large_experts(node) ? expert_memory(node).nbytes : 0;
}

bool graph_multiplies_by_expert(const op_context & ctx, const ggml_cgraph * graph) {
    return std::any_of(graph->nodes, graph->nodes + graph->n_nodes,
                       [&](const ggml_tensor * node) { return computes(node) && multiplies_by_expert(ctx, node); });
}

bool graph_supports_host_weight(const ggml_tensor * op, size_t panel_nbytes, int cc) {
    op_context ctx;
    ctx.cc = cc;
    return is_product(op) && graph_supports_op(op, true) &&
           fits_panels(op->src[0], static_cast<int64_t>(panel_nbytes)) &&
           panel_row_nbytes(op->src[0]) <= host_staging::SLOT_NBYTES &&
           (op_of(op) == GGML_OP_MUL_MAT || has_expert_products(ctx, op));
}

bool graph_has_host_weights(const ggml_cgraph * graph) {
    for (int i = 0; largest_host_weight() > 0 && i < graph->n_nodes; i++) {
        if (is_product(graph->nodes[i]) && host_weights_of(graph->nodes[i]->src[0])) {
            return true;
        }
    }
    return false;
}

panel_pipeline::panel_pipeline(const op_context & c, const ggml_cgraph * graph) : ctx(c) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (!computes(node)) {
            continue;
        }
        if (multiplies_by_expert(ctx, node)) {
            if (is_sparse(node->src[0])) {
                panels_.push_back({ nullptr, 0, 0 });
            }
        } else if (densifies(ctx, node)) {
            op_of(node) == GGML_OP_MUL_MAT_ID ? add_panels_of_experts(node) : add_panels(node);
        }
    }
}

// Appends the panels of one matrix of w, whose first row is `first`.
void panel_pipeline::append_panels(std::vector<panel> & panels, const ggml_tensor * w, int64_t first, int64_t rows) {
    for (int64_t row = 0; row < w->ne[1]; row += rows) {
        panels.push_back({ w, first + row, first + std::min(row + rows, w->ne[1]) });
    }
}

void panel_pipeline::add_panels(const ggml_tensor * node) {
    const ggml_tensor * w    = node->src[0];
    const int64_t       rows = panel_rows(ctx, w);
    for_each_batch(node, [&](int64_t i2, int64_t i3) {
        append_panels(panels_, w, first_row_of_batch(node, i2, i3), rows);
        return cudaSuccess;
    });
}

void panel_pipeline::add_panels_of_experts(const ggml_tensor * node) {
    const ggml_tensor * w = node->src[0];
    for_each_expert_panel(ctx, w, [&](int64_t first, int64_t n, int64_t row, int64_t rows) {
        const int64_t last = first + n - 1;
        panels_.push_back({ w, first * w->ne[1] + row, last * w->ne[1] + row + rows });
        return cudaSuccess;
    });
}

// Queues the filling of a panel in `memory`. The rows of a weight in host memory are made dense before this function
// returns, while the GPU multiplies the previous panel.
cudaError_t panel_pipeline::make_panel(const panel & p, char * memory) {
    const panel_buffers & b  = *ctx.panels;
    const int64_t         ld = panel_ld(p.w);
    if (stored(p.w)) {
        return cuda_sparse_densify(stored(p.w)->matrix, p.row_begin, p.row_end, memory, ld, b.stream);
    }
    const host_weights & from = *host_weights_of(p.w);
    if (!from.is_loaded(p.w)) {
        return cudaErrorInvalidValue;
    }
    const int64_t     step = from.row_step(p.w);
    const staged_rows to   = { memory, p.w->ne[0] * 2, ld * 2, p.row_end - p.row_begin, step };
    return b.staging->copy(to, b.n_threads, b.stream, [&](int64_t begin, int64_t end, void * dense) {
        from.densify(p.w, p.row_begin + begin, p.row_begin + end, dense);
    });
}

// Queues the filling of panels until both buffers are in use.
cudaError_t panel_pipeline::make_panels() {
    const panel_buffers & b = *ctx.panels;
    if (n_made_ == 0) { // earlier users of the buffers were queued on ctx.stream
        CUDA_TRY(cudaEventRecord(b.begin, ctx.stream));
        CUDA_TRY(cudaStreamWaitEvent(b.stream, b.begin));
    }
    for (; n_made_ < panels_.size() && panels_[n_made_].w && n_made_ < n_used_ + panel_buffers::N; n_made_++) {
        const panel & p  = panels_[n_made_];
        const size_t  at = n_made_ % panel_buffers::N;
        if (n_made_ >= panel_buffers::N) {
            CUDA_TRY(cudaStreamWaitEvent(b.stream, b.used[at]));
        }
        CUDA_TRY(make_panel(p, b.memory[at]));
        CUDA_TRY(cudaEventRecord(b.made[at], b.stream));
    }
    return cudaSuccess;
}

// Calls multiply(memory of the next panel) after the event that marks the panel as complete.
template <typename F> cudaError_t panel_pipeline::use_panel(F && multiply) {
    const panel_buffers & b = *ctx.panels;
    CUDA_TRY(make_panels());
    const size_t at = n_used_ % panel_buffers::N;
    CUDA_TRY(cudaStreamWaitEvent(ctx.stream, b.made[at]));
    CUDA_TRY(multiply(b.memory[at]));
    n_used_++;
    return cudaEventRecord(b.used[at], ctx.stream);
}

// y = W x for one matrix of w, whose panels come next.
cudaError_t panel_pipeline::enqueue_panels(const ggml_tensor * w, const op_tensor & x, const char * x16,
                                           const op_tensor & y, char * scratch) {
    const int64_t rows = panel_rows(ctx, w);
    for (int64_t row = 0; row < w->ne[1]; row += rows) {
        CUDA_TRY(use_panel([&](char * panel) {
            const int64_t n = std::min(rows, w->ne[1] - row);
            return op_mul_mat_16(ctx, panel_type(w), panel, panel_ld(w), n, x, x16, y, row, scratch);
        }));
    }
    return cudaSuccess;
}

cudaError_t panel_pipeline::enqueue_densified_experts(ggml_tensor * node) {
    const ggml_tensor * w    = node->src[0];
    const tensor_type   type = panel_type(w);
    const op_tensor     x = operand(node->src[1]), ids = operand(node->src[2]), y = operand(node);
    const int64_t       row_nbytes = panel_row_nbytes(w), n_experts = w->ne[2];
    forget_x16();
    CUDA_TRY(op_mul_mat_id_sort(ctx, n_experts, ids, scratch_of(ctx, node)));
    return for_each_expert_panel(ctx, w, [&](int64_t first, int64_t n, int64_t row, int64_t rows) {
        return use_panel([&](char * panel) {
            const op_tensor dense = {
                panel, type, { w->ne[0], rows, n, 1 }, { 2, row_nbytes, rows * row_nbytes, n * rows * row_nbytes }
            };
            return op_mul_mat_id_16(ctx, dense, first, n_experts, x, ids, y, row, scratch_of(ctx, node));
        });
    });
}

// Reads the number of tokens of each expert from the lists that op_mul_mat_id_sort has queued. Products with the same
// experts share the result.
cudaError_t panel_pipeline::read_expert_begin(const ggml_tensor * ids, int64_t n_experts, const char * lists) {
    if (expert_ids_ == ids) {
        return cudaSuccess;
    }
    expert_ids_ = nullptr;
    expert_begin_.resize(static_cast<size_t>(n_experts + 1));
    CUDA_TRY(cudaMemcpyAsync(expert_begin_.data(), lists, expert_begin_.size() * sizeof(int), cudaMemcpyDeviceToHost,
                             ctx.stream));
    CUDA_TRY(cudaStreamSynchronize(ctx.stream));
    expert_ids_ = ids;
    return cudaSuccess;
}

// Replaces the panel that represents a product by expert with the panels of the experts with more than max_sparse
// tokens.
void panel_pipeline::set_panels_by_expert(const ggml_tensor * node, int max_sparse) {
    const ggml_tensor * w    = node->src[0];
    const int64_t       rows = panel_rows(ctx, w);
    std::vector<panel>  made;
    for (int64_t expert = 0; expert < w->ne[2]; expert++) {
        const auto i = static_cast<size_t>(expert);
        if (expert_begin_[i + 1] - expert_begin_[i] > max_sparse) {
            append_panels(made, w, expert * w->ne[1], rows);
        }
    }
    const auto at = panels_.begin() + static_cast<std::ptrdiff_t>(n_used_);
    panels_.insert(panels_.erase(at), made.begin(), made.end());
}

cudaError_t panel_pipeline::enqueue_by_expert(ggml_tensor * node) {
    const ggml_tensor * w    = node->src[0];
    const tensor_type   type = panel_type(w);
    const op_tensor     x = operand(node->src[1]), ids = operand(node->src[2]), y = operand(node);
    const expert_places at    = expert_memory(node);
    char * const        lists = scratch_of(ctx, node);
    const int64_t       ld    = op_expert_rows_ld(w->ne[0]);
    const int max_sparse      = stored(w) ? static_cast<int>(cuda_sparse_mul_mat_max_n(stored(w)->matrix, false)) : 0;
    forget_x16();
    CUDA_TRY(op_mul_mat_id_sort(ctx, w->ne[2], ids, lists));
    CUDA_TRY(read_expert_begin(node->src[2], w->ne[2], lists));
    if (is_sparse(w)) {
        set_panels_by_expert(node, max_sparse);
    }
    CUDA_TRY(op_gather_expert_rows(ctx, type, x, ids, w->ne[2], lists, max_sparse, lists + at.x));
    for (int64_t expert = 0; expert < w->ne[2]; expert++) {
        const int64_t begin  = expert_begin_[static_cast<size_t>(expert)],
                      n      = expert_begin_[static_cast<size_t>(expert) + 1] - begin;
        char * const  x_rows = lists + at.x + begin * ld * 4;
        float * const y_rows = reinterpret_cast<float *>(lists + at.y) + begin * w->ne[1];
        if (n == 0) {
            continue;
        }
        if (n <= max_sparse) {
            cuda_sparse_mul_mat_params p =
                sparse_mul_mat_params(ctx, *stored(w), reinterpret_cast<float *>(x_rows), y_rows, ld, w->ne[1], n);
            p.row_begin[0] = expert * w->ne[1];
            p.row_end[0]   = p.row_begin[0] + w->ne[1];
            CUDA_TRY(cuda_sparse_mul_mat(p, ctx.stream));
            continue;
        }
        const op_tensor x16 = { x_rows, type, { w->ne[0], n, 1, 1 }, { 2, ld * 2, n * ld * 2, n * ld * 2 } };
        const op_tensor out = { reinterpret_cast<char *>(y_rows),
                                TYPE_F32,
                                { w->ne[1], n, 1, 1 },
                                { 4, w->ne[1] * 4, n * w->ne[1] * 4, n * w->ne[1] * 4 } };
        if (is_sparse(w)) {
            CUDA_TRY(enqueue_panels(w, x16, x_rows, out, lists));
        } else {
            char * const rows = static_cast<char *>(w->data) + expert * static_cast<int64_t>(w->nb[2]);
            CUDA_TRY(op_mul_mat_16(ctx, type, rows, static_cast<int64_t>(w->nb[1]) / 2, w->ne[1], x16, x_rows, out, 0,
                                   lists));
        }
    }
    return op_scatter_expert_rows(ctx, lists + at.y, ids, w->ne[2], lists, y);
}

// Finds the 16-bit copy of node's x that an earlier product has made, or makes it.
cudaError_t panel_pipeline::share_x16(ggml_tensor * node, tensor_type type, char ** x16) {
    const bool is_made = x16_of_ && x16_type_ == type && x16_of_->src[1] == node->src[1];
    if (!is_made) {
        x16_of_   = node;
        x16_type_ = type;
    }
    *x16 = scratch_of(ctx, x16_of_);
    return is_made ? cudaSuccess : op_mul_mat_x16(ctx, type, operand(node->src[1]), *x16);
}

cudaError_t panel_pipeline::enqueue_densified(ggml_tensor * node) {
    const tensor_type   type = panel_type(node->src[0]);
    const ggml_tensor * x    = node->src[1];
    if (x->ne[2] * x->ne[3] == 1) {
        char * x16;
        CUDA_TRY(share_x16(node, type, &x16));
        return enqueue_panels(node->src[0], operand(x), x16, operand(node), scratch_of(ctx, node));
    }
    forget_x16();
    return for_each_batch(node, [&](int64_t i2, int64_t i3) {
        const op_tensor batch = batch_operand(x, i2, i3);
        char * const    x16   = scratch_of(ctx, node);
        CUDA_TRY(op_mul_mat_x16(ctx, type, batch, x16));
        return enqueue_panels(node->src[0], batch, x16, batch_operand(node, i2, i3), x16);
    });
}

cudaError_t panel_pipeline::enqueue_dense(ggml_tensor * node) {
    const op_tensor w = operand(node->src[0]), x = operand(node->src[1]);
    if (!op_mul_mat_wants_x16(ctx, w, x)) {
        forget_x16();
        return op_mul_mat(ctx, w, x, operand(node), scratch_of(ctx, node), nullptr, is_weight(node->src[0]));
    }
    char * x16;
    CUDA_TRY(share_x16(node, op_mul_mat_16_type(w.type), &x16));
    return op_mul_mat(ctx, w, x, operand(node), scratch_of(ctx, node), x16);
}

} // namespace macko::cuda
