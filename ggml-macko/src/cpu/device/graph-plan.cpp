// Splits the nodes of a graph into products and row operations, and runs them (graph-plan.h).
#include "cpu/device/graph-plan.h"
#include "abi/op-numbers.h"
#include "backend/log.h"
#include "codec/floats.h"
#include "cpu/device/weight.h"
#include "cpu/kernels/rope.h"
#include "cpu/kernels/row-ops.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace macko::cpu {

namespace {

constexpr int64_t MAX_ROPE_DIMS = 1024;

const float * row_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    const char * data = static_cast<const char *>(t->data);
    return reinterpret_cast<const float *>(data + i1 * static_cast<int64_t>(t->nb[1]) +
                                           i2 * static_cast<int64_t>(t->nb[2]) + i3 * static_cast<int64_t>(t->nb[3]));
}

float * y_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return const_cast<float *>(row_at(t, i1, i2, i3));
}

// Row i1, i2, i3 of a tensor that is repeated to the shape of the other operand.
const float * repeated_row_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return row_at(t, i1 % t->ne[1], i2 % t->ne[2], i3 % t->ne[3]);
}

// Computes columns begin ... begin + n - 1 of one row. The destination may be an operand.
void row_op(const row_ops & ops, const ggml_tensor * dst, const float * a, const float * b, float * y, int64_t begin,
            int64_t n) {
    switch (op_of(dst)) {
        case GGML_OP_ADD: ops.add(a + begin, b + begin, y + begin, n); break;
        case GGML_OP_MUL: ops.mul(a + begin, b + begin, y + begin, n); break;
        case GGML_OP_GLU:
            (ggml_get_glu_op(dst) == GGML_GLU_OP_REGLU ? ops.relu_mul : ops.silu_mul)(a + begin, b + begin, y + begin,
                                                                                      n);
            break;
        case GGML_OP_UNARY: ops.relu(a + begin, y + begin, n); break;
        case GGML_OP_SQR:   ops.sqr(a + begin, y + begin, n); break;
        default:            { // RMS_NORM, always of a whole row
            float eps;
            memcpy(&eps, dst->op_params, sizeof(eps));
            ops.rms_norm(a, y, n, eps);
        }
    }
}

// The parameters of a ROPE, from the places where ggml stores them.
rope_params rope_params_of(const ggml_tensor * op) {
    const ggml_tensor * factors = op->src[2];
    rope_params         p       = {};
    p.n_dims                    = ggml_get_op_params_i32(op, 1);
    p.halves                    = ggml_get_op_params_i32(op, 2) == GGML_ROPE_TYPE_NEOX;
    p.freq_base                 = ggml_get_op_params_f32(op, 5);
    p.freq_scale                = ggml_get_op_params_f32(op, 6);
    p.magnitude                 = ggml_get_op_params_f32(op, 8);
    p.freq_factors              = factors ? static_cast<const float *>(factors->data) : nullptr;
    return p;
}

// Rotates all heads of thread ith's share of the tokens.
void rope_thread(const ggml_tensor * dst, int ith, int nth) {
    const rope_params p         = rope_params_of(dst);
    const auto *      positions = static_cast<const int32_t *>(dst->src[1]->data);
    float             angles[MAX_ROPE_DIMS];
    for (int64_t i2 = dst->ne[2] * ith / nth; i2 < dst->ne[2] * (ith + 1) / nth; i2++) {
        rope_angles(p, positions[i2], angles);
        for (int64_t i1 = 0; i1 < dst->ne[1]; i1++) {
            rope_row(p, angles, row_at(dst->src[0], i1, i2, 0), y_at(dst, i1, i2, 0), dst->ne[0]);
        }
    }
}

// Copies thread ith's share of the rows.
void get_rows_thread(const ggml_tensor * dst, int ith, int nth) {
    const auto * ids = static_cast<const int32_t *>(dst->src[1]->data);
    for (int64_t r = dst->ne[1] * ith / nth; r < dst->ne[1] * (ith + 1) / nth; r++) {
        std::copy_n(row_at(dst->src[0], ids[r], 0, 0), dst->ne[0], y_at(dst, r, 0, 0));
    }
}

// Writes one row of a weight as floats, and allocates nothing: 16-bit elements first fill the second half of the row.
void write_row(const weight & m, int64_t row, float * y) {
    const int64_t cols = m.desc().cols;
    if (m.desc().type == GGML_MACKO_TYPE_F32) {
        return weight_densify_rows(m, row, row + 1, y);
    }
    auto * bits = reinterpret_cast<uint8_t *>(y) + cols * 2;
    weight_densify_rows(m, row, row + 1, bits);
    for (int64_t i = 0; i < cols; i++) {
        uint16_t value;
        memcpy(&value, bits + i * 2, sizeof(value));
        y[i] = float_of_value(value, m.desc().type);
    }
}

// Writes thread ith's share of the looked up rows of a weight.
void lookup_thread(const weight & m, const ggml_tensor * dst, int ith, int nth) {
    const auto * ids = static_cast<const int32_t *>(dst->src[1]->data);
    for (int64_t r = dst->ne[1] * ith / nth; r < dst->ne[1] * (ith + 1) / nth; r++) {
        write_row(m, ids[r], y_at(dst, r, 0, 0));
    }
}

// Computes thread ith's share of the tensor: whole rows, or some columns of each row if there are fewer rows than
// threads.
void row_op_thread(const ggml_tensor * dst, int ith, int nth) {
    if (op_of(dst) == GGML_OP_ROPE) {
        return rope_thread(dst, ith, nth);
    }
    if (op_of(dst) == GGML_OP_GET_ROWS) {
        return get_rows_thread(dst, ith, nth);
    }
    const ggml_tensor * b     = dst->src[1];
    const row_ops &     ops   = row_ops_in_use();
    const int64_t       cols  = dst->ne[0];
    const int64_t       rows  = ggml_nrows(dst);
    const bool          share = rows < nth && op_of(dst) != GGML_OP_RMS_NORM;
    const int64_t       step  = share ? (cols + nth - 1) / nth : cols;
    const int64_t       begin = share ? std::min(step * ith, cols) : 0;
    for (int64_t r = share ? 0 : rows * ith / nth; r < (share ? rows : rows * (ith + 1) / nth); r++) {
        const int64_t i1 = r % dst->ne[1], i2 = r / dst->ne[1] % dst->ne[2], i3 = r / (dst->ne[1] * dst->ne[2]);
        row_op(ops, dst, row_at(dst->src[0], i1, i2, i3), b ? repeated_row_at(b, i1, i2, i3) : nullptr,
               y_at(dst, i1, i2, i3), begin, std::min(step, cols - begin));
    }
}

bool has_plain_rows(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }

// Whether a ROPE has one position for each token, no YaRN, and pairs from the first element on.
bool is_plain_rope(const ggml_tensor * op) {
    const ggml_tensor * x         = op->src[0];
    const ggml_tensor * positions = op->src[1];
    const ggml_tensor * factors   = op->src[2];
    const int32_t       n_dims = ggml_get_op_params_i32(op, 1), mode = ggml_get_op_params_i32(op, 2);
    const int32_t       first_dim = ggml_get_op_params_i32(op, 15);
    return x && positions && has_plain_rows(op) && has_plain_rows(x) && ggml_are_same_shape(x, op) && op->ne[3] == 1 &&
           positions->type == GGML_TYPE_I32 && positions->nb[0] == sizeof(int32_t) && positions->ne[0] == op->ne[2] &&
           (!factors || (has_plain_rows(factors) && factors->ne[0] >= n_dims / 2)) &&
           (mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX) && first_dim == 0 && n_dims > 0 &&
           n_dims % 2 == 0 && n_dims <= std::min(op->ne[0], MAX_ROPE_DIMS) && ggml_get_op_params_f32(op, 7) == 0;
}

bool is_relu(const ggml_tensor * node) {
    return op_of(node) == GGML_OP_UNARY && ggml_get_unary_op(node) == GGML_UNARY_OP_RELU;
}

// Whether x contains the neurons of a feed-forward part: the result of a gate or a ReLU, which may be squared.
bool is_neurons(const ggml_tensor * x) {
    return op_of(x) == GGML_OP_GLU || is_relu(x) || (op_of(x) == GGML_OP_SQR && is_relu(x->src[0]));
}

// Whether node i of a graph is relu(gate) * up, and no other node uses up.
bool is_relu_gated(const ggml_cgraph * graph, int i) {
    const ggml_tensor * node = graph->nodes[i];
    if (op_of(node) != GGML_OP_GLU || ggml_get_glu_op(node) != GGML_GLU_OP_REGLU) {
        return false;
    }
    for (int k = i - 1; k >= 0; k--) {
        if (graph->nodes[k] == node->src[1]) {
            return ggml_node_has_n_uses(graph, k, 1);
        }
    }
    return false;
}

} // namespace

bool is_product(const ggml_tensor * op) { return op_of(op) == GGML_OP_MUL_MAT || op_of(op) == GGML_OP_MUL_MAT_ID; }

bool is_lookup(const ggml_tensor * op) {
    const ggml_tensor * x   = op->src[0];
    const ggml_tensor * ids = op->src[1];
    return op_of(op) == GGML_OP_GET_ROWS && x && ids && has_plain_rows(op) && ids->type == GGML_TYPE_I32 &&
           ids->nb[0] == sizeof(int32_t) && ggml_nrows(ids) == 1 && ggml_nrows(x) == x->ne[1] &&
           ggml_nrows(op) == op->ne[1] && op->ne[0] == x->ne[0] && op->ne[1] == ids->ne[0];
}

bool is_no_op(const ggml_tensor * op) {
    const ggml_op number = op_of(op);
    return number == GGML_OP_NONE || number == GGML_OP_VIEW || number == GGML_OP_RESHAPE || number == GGML_OP_PERMUTE ||
           number == GGML_OP_TRANSPOSE;
}

bool is_row_op(const ggml_tensor * op) {
    const ggml_op number = op_of(op);
    if (number == GGML_OP_ROPE) {
        return is_plain_rope(op);
    }
    if (number == GGML_OP_GET_ROWS) {
        return is_lookup(op) && has_plain_rows(op->src[0]);
    }
    const bool has_one_operand = number == GGML_OP_RMS_NORM || number == GGML_OP_SQR || is_relu(op);
    if (!has_one_operand && number != GGML_OP_ADD && number != GGML_OP_MUL && number != GGML_OP_GLU) {
        return false;
    }
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    if (!a || !has_plain_rows(op) || !has_plain_rows(a) || !ggml_are_same_shape(a, op)) {
        return false;
    }
    if (has_one_operand) {
        return true;
    }
    return b && has_plain_rows(b) && b->ne[0] == a->ne[0] && ggml_can_repeat(b, a) &&
           (op_of(op) != GGML_OP_GLU || ggml_get_glu_op(op) == GGML_GLU_OP_SWIGLU ||
            ggml_get_glu_op(op) == GGML_GLU_OP_REGLU);
}

graph_plan::step & graph_plan::next_step(const ggml_tensor * row_op, const weight * m, int64_t matrix) {
    if (n_steps == steps.size()) {
        steps.emplace_back();
    }
    step & s      = steps[n_steps++];
    s.row_op      = row_op;
    s.m           = m;
    s.matrix      = matrix;
    s.gate        = nullptr;
    s.skips_small = false;
    s.x.clear();
    s.y.clear();
    return s;
}

// dst[rows, n1, n2, n3] = w[cols, rows, m2, m3] * x[cols, n1, n2, n3], where m2 divides n2 and m3 divides n3: each
// matrix is multiplied by n2 / m2 * n3 / m3 matrices of x (broadcast).
void graph_plan::add_mul_mat(const weight * m, const ggml_tensor * dst) {
    const ggml_tensor * w  = dst->src[0];
    const ggml_tensor * x  = dst->src[1];
    const int64_t       r2 = x->ne[2] / w->ne[2];
    const int64_t       r3 = x->ne[3] / w->ne[3];
    for (int64_t m3 = 0; m3 < w->ne[3]; m3++) {
        for (int64_t m2 = 0; m2 < w->ne[2]; m2++) {
            step & s = next_step(nullptr, m, m3 * w->ne[2] + m2);
            for (int64_t i3 = m3 * r3; i3 < (m3 + 1) * r3; i3++) {
                for (int64_t i2 = m2 * r2; i2 < (m2 + 1) * r2; i2++) {
                    for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                        s.x.push_back(row_at(x, i1, i2, i3));
                        s.y.push_back(y_at(dst, i1, i2, i3));
                    }
                }
            }
            s.skips_small = m->threshold > 0 && s.x.size() == 1 && is_neurons(x);
        }
    }
}

// dst[rows, used, tokens] = w[cols, rows, experts] * x[cols, used or 1, tokens]; ids[used, tokens] are the experts.
// Returns false if an id is out of range.
bool graph_plan::add_mul_mat_id(const weight * m, const ggml_tensor * dst) {
    const ggml_tensor * w     = dst->src[0];
    const ggml_tensor * x     = dst->src[1];
    const ggml_tensor * ids   = dst->src[2];
    const size_t        first = n_steps;
    for (int64_t e = 0; e < w->ne[2]; e++) {
        next_step(nullptr, m, e);
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t used = 0; used < ids->ne[0]; used++) {
            const char * at = static_cast<const char *>(ids->data) + token * static_cast<int64_t>(ids->nb[1]) +
                              used * static_cast<int64_t>(ids->nb[0]);
            int32_t e;
            memcpy(&e, at, sizeof(e));
            if (e < 0 || e >= w->ne[2]) {
                log_error("%s: %s: expert %d of %d\n", __func__, dst->name, e, static_cast<int>(w->ne[2]));
                return false;
            }
            step & s = steps[first + static_cast<size_t>(e)];
            s.x.push_back(row_at(x, used % x->ne[1], token, 0));
            s.y.push_back(y_at(dst, used, token, 0));
        }
    }
    return true;
}

static bool has_all_rows(const ggml_tensor * node) {
    const auto * ids = static_cast<const int32_t *>(node->src[1]->data);
    for (int64_t i = 0; i < node->ne[1]; i++) {
        if (ids[i] < 0 || ids[i] >= node->src[0]->ne[1]) {
            log_error("%s: row %d of %d\n", node->name, ids[i], static_cast<int>(node->src[0]->ne[1]));
            return false;
        }
    }
    return true;
}

static bool is_loaded(const ggml_tensor * node, const weight * m) {
    if (!m) {
        log_error("%s: the weight %s was not loaded\n", node->name, node->src[0]->name);
    }
    return m;
}

bool graph_plan::add_row_op(const ggml_tensor * node) {
    if (op_of(node) == GGML_OP_GET_ROWS && !has_all_rows(node)) {
        return false;
    }
    next_step(node, nullptr, 0);
    return true;
}

bool graph_plan::add_lookup(const ggml_tensor * node, const weight * m) {
    if (!is_loaded(node, m) || !has_all_rows(node)) {
        return false;
    }
    next_step(node, m, 0);
    return true;
}

bool graph_plan::add_product(const ggml_tensor * node, const weight * m) {
    if (!is_loaded(node, m)) {
        return false;
    }
    const size_t first = n_steps;
    if (op_of(node) == GGML_OP_MUL_MAT) {
        add_mul_mat(m, node);
    } else if (!add_mul_mat_id(m, node)) {
        return false;
    }
    last_products[0] = last_products[1];
    last_products[1] = { node, first, n_steps };
    return true;
}

void graph_plan::skip_closed_rows(const ggml_cgraph * graph, int i) {
    if (!skips || !is_relu_gated(graph, i)) {
        return;
    }
    const ggml_tensor *   gate = graph->nodes[i]->src[0];
    const ggml_tensor *   up   = graph->nodes[i]->src[1];
    const product_steps & a    = last_products[0];
    const product_steps & b    = last_products[1];
    if (a.end != b.begin || b.end != n_steps || !ggml_are_same_shape(gate, up) || !ggml_is_contiguous(gate) ||
        !ggml_is_contiguous(up)) {
        return;
    }
    size_t first = b.begin; // first step of up
    if (a.node == up && b.node == gate && up->src[1] == gate->src[1]) {
        // x is alive until its last use, so up can also be computed there
        const auto begin = steps.begin() + static_cast<std::ptrdiff_t>(a.begin);
        std::rotate(begin, begin + static_cast<std::ptrdiff_t>(a.end - a.begin),
                    begin + static_cast<std::ptrdiff_t>(b.end - a.begin));
        first = a.begin + (b.end - b.begin);
    } else if (a.node != gate || b.node != up) {
        return;
    }
    for (size_t k = first; k < n_steps; k++) {
        step & s = steps[k];
        if (s.y.size() == 1) {
            s.gate = static_cast<const float *>(gate->data) + (s.y[0] - static_cast<const float *>(up->data));
        }
    }
    last_products[0] = last_products[1] = {}; // their order has changed
}

void graph_plan::reserve_scratch() {
    int64_t nbytes   = 0;
    size_t  n_floats = 0;
    for (size_t i = 0; i < n_steps; i++) {
        if (steps[i].skips_small) {
            n_floats = std::max(n_floats, static_cast<size_t>(steps[i].m->desc().cols));
        }
        if (!steps[i].row_op) {
            nbytes = std::max(nbytes,
                              mul_mat_scratch_nbytes(steps[i].m->desc().cols, static_cast<int64_t>(steps[i].x.size())));
        }
    }
    if (nbytes > scratch_nbytes) {
        scratch        = allocate_aligned(nbytes);
        scratch_nbytes = nbytes;
    }
    if (n_floats > thresholded.size()) {
        thresholded.resize(n_floats);
        thresholded_x = thresholded.data();
    }
}

// One thread computes all operations on fewer floats than this: a barrier would take longer than the other threads
// save.
constexpr int64_t ALONE_BELOW = 4096;
// The same for a lookup in a weight, which is often a graph of its own, so that threads have to be woken for it.
constexpr int64_t LOOKUP_ALONE_BELOW = 65536;

bool graph_plan::step::is_for_one_thread() const {
    return row_op && ggml_nelements(row_op) < (m ? LOOKUP_ALONE_BELOW : ALONE_BELOW);
}

// Barriers between the steps, only where necessary: none between two steps that thread 0 computes alone.
class step_barrier {
public:
    // All threads call this before each step; returns whether the calling thread has a part in the step.
    bool begin(bool alone, int ith) {
        if (last == done_by::all || (last == done_by::first && !alone)) {
#pragma omp barrier
        }
        last = alone ? done_by::first : done_by::all;
        return !alone || ith == 0;
    }

private:
    enum class done_by { nobody, first, all } last = done_by::nobody;
};

mul_mat_params graph_plan::params_of(const step & s) const {
    const int64_t row = s.matrix * s.m->rows_per_matrix;
    return { s.m->matrix(),
             row,
             row + s.m->rows_per_matrix,
             static_cast<int64_t>(s.x.size()),
             s.skips_small ? &thresholded_x : s.x.data(),
             s.y.data(),
             s.m->desc().type != GGML_MACKO_TYPE_F32,
             scratch.get(),
             nullptr,
             s.gate,
             columns_of_matrix(s.m->columns(), s.matrix, s.m->desc().cols),
             skips };
}

// Consecutive products with the same x, such as query, key and value, are computed together. A gate that selects the
// rows of a later product must be complete before that product.
void graph_plan::run_thread(int ith, int nth) const {
    step_barrier barrier;
    for (size_t i = 0; i < n_steps;) {
        const step & s = steps[i++];
        if (s.row_op) {
            const bool alone = s.is_for_one_thread();
            if (barrier.begin(alone, ith)) {
                const int i_share = alone ? 0 : ith, n_shares = alone ? 1 : nth;
                s.m ? lookup_thread(*s.m, s.row_op, i_share, n_shares) : row_op_thread(s.row_op, i_share, n_shares);
            }
        } else if (!s.x.empty()) {
            if (s.skips_small && barrier.begin(true, ith)) {
                columns_skip_below(s.m->threshold, s.m->norms(), s.x[0], s.m->desc().cols, thresholded_x);
            }
            const mul_mat_params p     = params_of(s);
            const bool           alone = s.m->desc().cols * p.n < ALONE_BELOW;
            if (barrier.begin(alone, ith)) {
                mul_mat_prepare(p, alone ? 0 : ith, alone ? 1 : nth);
            }
            barrier.begin(false, ith);
            mul_mat_multiply(p, 0, ith, nth);
            for (int number = 1; number < MAX_SAME_X && i < n_steps && !steps[i].row_op; number++, i++) {
                const mul_mat_params q = params_of(steps[i]);
                if (!same_prepared_x(p, q)) {
                    break;
                }
                if (q.gate && !steps[i - 1].gate) {
                    barrier.begin(false, ith);
                }
                mul_mat_multiply(q, number, ith, nth);
            }
        }
    }
}

void graph_plan::run() {
    reserve_scratch();
    if (std::all_of(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(n_steps),
                    [](const step & s) { return s.is_for_one_thread(); })) {
        return run_thread(0, 1);
    }
#pragma omp parallel num_threads(n_threads)
    run_thread(omp_get_thread_num(), omp_get_num_threads());
}

} // namespace macko::cpu
