// The rows of up that the CPU device computes under a ReLU gate (cpu/device/graph-plan.h): the result must have the
// same bits, and rows may be skipped only if no other node reads them. The weights are dense, so a row of up is zero
// only if it was not computed. Also tests inputs that count as zero because they are below a threshold, and lookups of
// rows of a weight.
#include "abi/op-numbers.h"
#include "codec/macko/encode.h"
#include "codec/registry.h"
#include "cpu/device/graph-plan.h"
#include "cpu/device/weight.h"
#include "guarded.h"
#include "test.h"
#include "values.h"

#include "ggml-impl.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using namespace macko;
using namespace macko::cpu;

namespace {

constexpr int64_t COLS = 70, ROWS = 301, EXPERTS = 4, USED = 2;

// ---- a graph on memory of the CPU ----

struct graph_builder {
    ggml_context *                        ctx   = ggml_init({ 16 << 20, nullptr, false });
    ggml_cgraph *                         graph = ggml_new_graph(ctx);
    std::vector<std::unique_ptr<guarded>> memory;
    rng                                   random;

    explicit graph_builder(uint64_t seed) : random(seed) {}
    ~graph_builder() { ggml_free(ctx); }

    float number() { return static_cast<float>(random.unit() * 2 - 1); }

    // F32, of n_matrices matrices, without a zero, and such that most products are negative: a BITMAP
    // (cpu/layout/layouts.h) after its header
    ggml_tensor * weights(int64_t n_matrices) {
        const int64_t    rows = ROWS * n_matrices;
        const macko_desc desc = { rows, COLS, GGML_MACKO_TYPE_F32, 4, rows * COLS };
        return weights(n_matrices, { WEIGHT_MAGIC, plan_with(desc, bitmap_shape{}), false, ROWS });
    }
    // one matrix that is also kept by columns
    ggml_tensor * weights_by_columns(float threshold, bool of_norm) {
        const macko_desc desc    = { ROWS, COLS, GGML_MACKO_TYPE_F32, 4, ROWS * COLS };
        const int64_t    columns = columns_nbytes(desc, ROWS);
        const int64_t    norms   = of_norm ? mask_words(COLS) * 256 : 0;
        const cpu_plan   plan    = plan_with(desc, bitmap_shape{});
        ggml_tensor *    t       = weights(1, { WEIGHT_MAGIC, plan, false, ROWS, columns, threshold, norms });
        const weight *   w       = weight_of(t);
        columns_pack(w->matrix(), 1, w->columns());
        if (of_norm) {
            columns_norms(w->columns(), 2, w->norms());
        }
        return t;
    }
    ggml_tensor * weights(int64_t n_matrices, const weight & header) {
        const int64_t rows = header.desc().rows;
        memory.push_back(std::make_unique<guarded>(static_cast<int64_t>(sizeof(weight)) + header.norms_nbytes +
                                                   header.columns_nbytes + header.plan.nbytes));
        auto * w     = reinterpret_cast<weight *>(memory.back()->data);
        *w           = header;
        const auto m = std::get<bitmap_layout>(w->matrix());
        for (int64_t r = 0; r <= rows; r++) {
            m.row_off[r] = static_cast<uint32_t>(r * COLS);
        }
        for (int64_t r = 0; r < rows; r++) {
            m.masks[r * mask_words(COLS)]     = ~uint64_t(0);
            m.masks[r * mask_words(COLS) + 1] = (uint64_t(1) << (COLS - 64)) - 1;
        }
        for (int64_t i = 0; i < rows * COLS; i++) {
            const float value = std::copysign(1.0f + std::fabs(number()), number() - 0.12f);
            memcpy(m.values + i * 4, &value, 4);
        }
        memset(m.values + rows * COLS * 4, 0, VALUES_SLACK);
        ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, COLS, ROWS, n_matrices);
        t->data         = w;
        return t;
    }
    ggml_tensor * inputs(int64_t n) {
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, COLS, n);
        for (int64_t i = 0; i < n * COLS; i++) {
            static_cast<float *>(x->data)[i] = number() + 1;
        }
        return x;
    }
    ggml_tensor * experts() {
        ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, USED, 1);
        memcpy(ids->data, std::array<int32_t, USED>{ 3, 1 }.data(), sizeof(int32_t) * USED);
        return ids;
    }
    ggml_tensor * product(ggml_tensor * x) { return ggml_mul_mat(ctx, weights(1), x); }
    void          add(ggml_tensor * node) { ggml_build_forward_expand(graph, node); }
};

std::vector<float> contents(const ggml_tensor * t) {
    const auto * data = static_cast<const float *>(t->data);
    return { data, data + ggml_nelements(t) };
}

// Computes a graph like the device, on memory full of NaN.
void compute(const ggml_cgraph * graph, bool skips, int n_threads) {
    graph_plan plan;
    plan.n_threads = n_threads;
    plan.skips     = skips;
    for (int i = 0; i < graph->n_nodes; i++) {
        memset(graph->nodes[i]->data, 0xff, ggml_nbytes(graph->nodes[i]));
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        plan.skip_closed_rows(graph, i);
        CHECK(is_product(node) ? plan.add_product(node, weight_of(node->src[0])) : plan.add_row_op(node), "node %d", i);
    }
    plan.run();
}

// Checks that exactly the rows of up with a closed gate are skipped, and that every node except up is the same.
bool skips(const char * what, const graph_builder & b, const ggml_tensor * gate, const ggml_tensor * up) {
    compute(b.graph, false, 1);
    std::vector<std::vector<float>> want;
    for (int i = 0; i < b.graph->n_nodes; i++) {
        want.push_back(contents(b.graph->nodes[i]));
    }
    const std::vector<float> whole   = contents(up);
    bool                     same_up = true;
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        compute(b.graph, true, n_threads);
        for (int i = 0; i < b.graph->n_nodes; i++) {
            const std::vector<float> got = contents(b.graph->nodes[i]);
            CHECK(b.graph->nodes[i] == up ||
                      memcmp(got.data(), want[static_cast<size_t>(i)].data(), got.size() * 4) == 0,
                  "%s: node %d differs with %d threads", what, i, n_threads);
        }
        const std::vector<float> gates = contents(gate), got = contents(up);
        int64_t                  n_open = 0;
        same_up                         = memcmp(got.data(), whole.data(), got.size() * 4) == 0;
        for (size_t r = 0; r < got.size(); r++) {
            n_open += gates[r] > 0;
            CHECK(memcmp(&got[r], &whole[r], 4) == 0 || (got[r] == 0 && !(gates[r] > 0)),
                  "%s: row %zu of up is %g, not %g", what, r, static_cast<double>(got[r]),
                  static_cast<double>(whole[r]));
            CHECK(same_up || got[r] == 0 || gates[r] > 0, "%s: row %zu was computed for nothing", what, r);
        }
        CHECK(n_open > 0 && n_open < static_cast<int64_t>(got.size()), "%s: %ld open gates", what, (long)n_open);
    }
    return !same_up;
}

// ---- tests ----

using change = std::function<void(graph_builder &, ggml_tensor *, ggml_tensor *)>;

// up_first: the order of the products. n: inputs. before, after: change the graph before and after the gated node is
// added.
void check(const char * what, bool expected, bool up_first, int64_t n, bool same_x, const change & before = {},
           const change & after = {}) {
    graph_builder b(static_cast<uint64_t>(n) + up_first);
    ggml_tensor * x    = b.inputs(n);
    ggml_tensor * gate = b.product(x);
    ggml_tensor * up   = b.product(same_x ? x : b.inputs(n));
    b.add(up_first ? up : gate);
    b.add(up_first ? gate : up);
    if (before) {
        before(b, gate, up);
    }
    b.add(ggml_reglu_split(b.ctx, gate, up));
    if (after) {
        after(b, gate, up);
    }
    CHECK(skips(what, b, gate, up) == expected, "%s: rows are %sleft out", what, expected ? "not " : "");
}

TEST(closed_rows_are_left_out) {
    check("gate, up", true, false, 1, true);
    check("up, gate", true, true, 1, true);
    check("gate, up, of other inputs", true, false, 1, false);
}

TEST(rows_that_somebody_needs_are_computed) {
    check("two tokens", false, false, 2, true);
    check("two tokens, up first", false, true, 2, true);
    check("the input of up may be gone", false, true, 1, false);
    check("up is used twice", false, false, 1, true, {},
          [](graph_builder & b, ggml_tensor * gate, ggml_tensor * up) { b.add(ggml_add(b.ctx, gate, up)); });
    check("up is a result", false, true, 1, true,
          [](graph_builder &, ggml_tensor *, ggml_tensor * up) { ggml_set_output(up); });
    check("another node in between", false, false, 1, true,
          [](graph_builder & b, ggml_tensor * gate, ggml_tensor *) { b.add(ggml_mul(b.ctx, gate, gate)); });
    check("another product in between", false, false, 1, true,
          [](graph_builder & b, ggml_tensor * gate, ggml_tensor *) {
              b.add(ggml_mul_mat(b.ctx, b.weights(1), gate->src[1]));
          });
}

TEST(operands_that_are_no_two_products_are_computed) {
    graph_builder b(5);
    ggml_tensor * x    = b.inputs(1);
    ggml_tensor * gate = b.product(x);
    ggml_tensor * up   = b.product(x);
    ggml_tensor * sum  = ggml_add(b.ctx, up, gate);
    b.add(ggml_reglu_split(b.ctx, gate, sum));
    CHECK(!skips("sum", b, gate, sum), "rows of a sum are left out");

    graph_builder c(6);
    x    = c.inputs(1);
    gate = c.product(x);
    up   = c.product(x);
    c.add(ggml_swiglu_split(c.ctx, gate, up));
    CHECK(!skips("SwiGLU", c, gate, up), "rows are left out where no element is zero");
}

// With a closed gate, ggml also computes +0 for infinities and NaN, where 0 * up would be NaN.
TEST(inputs_that_are_not_finite_give_the_same) {
    for (const bool up_first : { false, true }) {
        graph_builder b(7);
        ggml_tensor * x                   = b.inputs(1);
        static_cast<float *>(x->data)[3]  = INFINITY;
        static_cast<float *>(x->data)[65] = INFINITY;
        ggml_tensor * gate                = b.product(x);
        ggml_tensor * up                  = b.product(x);
        ggml_tensor * gated               = ggml_reglu_split(b.ctx, gate, up);
        b.add(up_first ? up : gate);
        b.add(gated);
        CHECK(skips("infinities", b, gate, up), "rows are not left out");
        const std::vector<float> gates = contents(gate), found = contents(gated);
        compute(b.graph, false, 1);
        const std::vector<float> ups   = contents(up);
        int64_t                  n_nan = 0;
        for (size_t r = 0; r < found.size(); r++) {
            const float want = gates[r] > 0 ? gates[r] * ups[r] : 0.0f;
            n_nan += std::isnan(gates[r]) || std::isnan(ups[r]);
            CHECK(std::isnan(want) ? std::isnan(found[r]) : memcmp(&found[r], &want, 4) == 0,
                  "row %zu: relu(%g) * %g is %g", r, static_cast<double>(gates[r]), static_cast<double>(ups[r]),
                  static_cast<double>(found[r]));
        }
        CHECK(n_nan > 0, "no NaN");
    }
}

TEST(experts_are_products_of_their_own) {
    for (const bool up_first : { false, true }) {
        graph_builder b(up_first);
        ggml_tensor * x    = b.inputs(1);
        ggml_tensor * ids  = b.experts();
        ggml_tensor * gate = ggml_mul_mat_id(b.ctx, b.weights(EXPERTS), x, ids);
        ggml_tensor * up   = ggml_mul_mat_id(b.ctx, b.weights(EXPERTS), x, ids);
        b.add(up_first ? up : gate);
        b.add(ggml_reglu_split(b.ctx, gate, up));
        CHECK(skips("experts", b, gate, up), "rows are not left out");
    }
}

// Up, ReLU, its square and down, as in Arcee and Nemotron.
TEST(squared_relu_is_computed_between_products) {
    graph_builder b(9);
    ggml_tensor * up   = b.product(b.inputs(2));
    ggml_tensor * relu = ggml_relu(b.ctx, up);
    ggml_tensor * sqr  = ggml_sqr(b.ctx, relu);
    b.add(sqr);
    CHECK(is_row_op(relu) && is_row_op(sqr) && !is_row_op(ggml_gelu(b.ctx, up)), "row operations");
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        compute(b.graph, true, n_threads);
        const std::vector<float> x = contents(up), found = contents(sqr);
        for (size_t i = 0; i < x.size(); i++) {
            CHECK(found[i] == (x[i] > 0 ? x[i] * x[i] : 0), "element %zu", i);
        }
    }
}

// ---- thresholds ----

enum class neurons { swiglu, relu, squared, others };

// The input of down, computed by the plan.
ggml_tensor * add_neurons(graph_builder & b, neurons kind, int64_t n) {
    ggml_tensor * up = b.inputs(n);
    for (int64_t i = 0; i < n * COLS; i++) {
        static_cast<float *>(up->data)[i] = b.number();
    }
    switch (kind) {
        case neurons::swiglu:  return ggml_swiglu_split(b.ctx, b.inputs(n), up);
        case neurons::relu:    return ggml_relu(b.ctx, up);
        case neurons::squared: return ggml_sqr(b.ctx, ggml_relu(b.ctx, up));
        default:               return ggml_mul(b.ctx, up, b.inputs(n));
    }
}

// The norm of each column of a weight, or 1.
std::vector<float> scales(const weight & w, bool of_norm) {
    std::vector<float> dense(ROWS * COLS), out(COLS, 1.0f);
    densify(w.matrix(), 0, ROWS, dense.data());
    for (size_t c = 0; of_norm && c < COLS; c++) {
        double sum = 0;
        for (size_t r = 0; r < ROWS; r++) {
            sum += std::pow(static_cast<double>(dense[r * COLS + c]), 2);
        }
        out[c] = static_cast<float>(std::sqrt(sum));
    }
    return out;
}

// y of the weight and x in float64, and its error bound.
void check_product(const char * what, const weight & w, const float * x, const float * y) {
    std::vector<float> dense(ROWS * COLS);
    densify(w.matrix(), 0, ROWS, dense.data());
    for (size_t r = 0; r < ROWS; r++) {
        double sum = 0, magnitude = 0;
        for (size_t c = 0; c < COLS; c++) {
            const double product = static_cast<double>(dense[r * COLS + c]) * static_cast<double>(x[c]);
            sum += product;
            magnitude += std::fabs(product);
        }
        CHECK(std::fabs(static_cast<double>(y[r]) - sum) <= magnitude * COLS * 0x1p-24, "%s: row %zu is %g, not %g",
              what, r, static_cast<double>(y[r]), sum);
    }
}

// down(x) with a share of x below the threshold. If `expected`, it must have the bits of the product with x zeroed by
// hand, for any number of threads; otherwise those of the product with x.
void check_threshold(const char * what, neurons kind, int64_t n, double share, bool of_norm, bool expected) {
    graph_builder b(static_cast<uint64_t>(share * 100) + of_norm);
    ggml_tensor * x = add_neurons(b, kind, n);
    b.add(x);
    compute(b.graph, true, 1);
    ggml_tensor *            w      = b.weights_by_columns(0, of_norm);
    auto *                   header = static_cast<weight *>(w->data);
    const std::vector<float> scale = scales(*header, of_norm), all = contents(x);
    std::vector<float>       scores(COLS);
    for (size_t c = 0; c < COLS; c++) {
        scores[c] = std::fabs(all[c]) * scale[c];
    }
    std::vector<float> sorted = scores;
    std::sort(sorted.begin(), sorted.end());
    const auto rank = static_cast<size_t>(share * COLS);
    // a score that equals the threshold is not below it
    const float threshold = rank < COLS ? sorted[rank] : 2 * sorted.back();

    ggml_tensor * kept    = b.inputs(n);
    size_t        n_below = 0;
    for (size_t i = 0; i < all.size(); i++) {
        const bool below                    = expected && scores[i % COLS] < threshold;
        static_cast<float *>(kept->data)[i] = below ? 0.0f : all[i];
        n_below += below;
    }
    CHECK(!expected || n_below == (kind == neurons::swiglu ? rank : n_below), "%s: %zu of %zu below", what, n_below,
          rank);
    graph_builder by_hand(1);
    ggml_tensor * want = ggml_mul_mat(by_hand.ctx, w, kept);
    by_hand.add(want);
    compute(by_hand.graph, true, 1);
    const std::vector<float> wanted = contents(want);
    if (n == 1) {
        check_product(what, *header, static_cast<const float *>(kept->data), wanted.data());
    }

    header->threshold  = threshold;
    ggml_tensor * down = ggml_mul_mat(b.ctx, w, x);
    b.add(down);
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        for (const bool skips : { true, false }) {
            compute(b.graph, skips, n_threads);
            CHECK(std::equal(wanted.begin(), wanted.end(), contents(down).begin()),
                  "%s: %g %% below the threshold, %d threads", what, share * 100, n_threads);
            CHECK(contents(x) == all, "%s: others see x as it is", what);
        }
    }
}

TEST(inputs_below_the_threshold_count_as_zero) {
    for (const double share : { 0.0, 0.3, 0.5, 0.7, 1.0 }) {
        for (const bool of_norm : { false, true }) {
            check_threshold("SwiGLU", neurons::swiglu, 1, share, of_norm, true);
            check_threshold("ReLU", neurons::relu, 1, share, of_norm, true);
            check_threshold("squared ReLU", neurons::squared, 1, share, of_norm, true);
        }
    }
}

TEST(only_neurons_of_one_token_are_skipped) {
    check_threshold("two tokens", neurons::swiglu, 2, 0.7, false, false);
    check_threshold("two tokens", neurons::squared, 2, 0.7, true, false);
    check_threshold("no neurons", neurons::others, 1, 0.7, false, false);
}

// NaN and infinities are never skipped; a skipped -0 becomes +0.
TEST(inputs_that_are_not_finite_are_kept) {
    const std::array<float, 6> x = { NAN, -INFINITY, -0.0f, 1.0f, -0.5f, 0x1p-149f };
    std::array<float, 6>       out;
    columns_skip_below(0.75f, nullptr, x.data(), 6, out.data());
    CHECK(std::isnan(out[0]) && out[1] == -INFINITY && out[3] == 1, "kept");
    for (const size_t i : { 2, 4, 5 }) {
        CHECK(out[i] == 0 && !std::signbit(out[i]), "element %zu", i);
    }
}

// ---- lookups ----

// A weight in the memory of the CPU device, made of a matrix in one of the formats.
struct looked_up_weight {
    std::vector<float>       want; // its rows, as the codec decodes them
    std::unique_ptr<guarded> memory;

    looked_up_weight(const ggml_macko_matrix & m, const layout_traits & traits) {
        std::unique_ptr<codec_view> view;
        const codec &               format = *find_codec(m.format);
        CHECK(open_matrix(format, m, 1, &view) == 0, "%s: %s", m.format, ggml_macko_last_error());
        const macko_desc     desc = rows_desc(format, m);
        const auto           n = static_cast<size_t>(m.rows * m.cols), size = static_cast<size_t>(value_nbytes(m.type));
        std::vector<uint8_t> dense(n * size);
        CHECK(view->decode(dense.data(), 1) == 0, "%s: %s", m.format, ggml_macko_last_error());
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = 0;
            memcpy(&bits, &dense[i * size], size);
            want.push_back(static_cast<float>(value_of(bits, m.type)));
        }
        const cpu_plan plan = choose_cpu_layout(traits, desc, m.value_type, m.arrays[0].nbytes, format.window(m));
        memory              = std::make_unique<guarded>(static_cast<int64_t>(sizeof(weight)) + plan.nbytes);
        auto * w            = reinterpret_cast<weight *>(memory->data);
        *w                  = { WEIGHT_MAGIC, plan, false, m.rows };
        matrix_packer packer(plan, span_ops_in_use(), w->rows_memory());
        if (matrix_packer::takes(format)) {
            packer.pack_whole(*view, 1);
        } else {
            macko_matrix rows;
            macko_view   all;
            CHECK(recode(*view, 1, &rows) == 0 &&
                      validate({ rows.desc, 0, m.rows, rows.row_ptr.data(), 0, rows.values.data(), rows.deltas.data() },
                               &all) == 0,
                  "%s: %s", m.format, ggml_macko_last_error());
            do {
                packer.pack(all, 0);
            } while (!packer.finish());
        }
        w->overflowed = packer.overflowed();
    }
    ggml_tensor * tensor(ggml_context * ctx, int32_t type, int64_t cols, int64_t rows) const {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, static_cast<ggml_type>(type), cols, rows);
        t->data         = memory->data;
        return t;
    }
};

// Looks up rows with 1 to 3 threads: one row, some, and so many that several threads share them.
void check_lookup(const char * what, const looked_up_weight & w, int32_t type, int64_t cols, int64_t rows) {
    const auto                        last  = static_cast<int32_t>(rows - 1);
    std::vector<std::vector<int32_t>> lists = { { last }, { 0, last, last, 0, 7, 3, 3, last / 2, 0 } };
    lists.emplace_back();
    for (int32_t i = 0; i < 64; i++) {
        lists.back().push_back(i * 7 % static_cast<int32_t>(rows));
    }
    for (const std::vector<int32_t> & list : lists) {
        graph_builder b(1);
        const auto    n   = static_cast<int64_t>(list.size());
        ggml_tensor * ids = ggml_new_tensor_1d(b.ctx, GGML_TYPE_I32, n);
        memcpy(ids->data, list.data(), list.size() * 4);
        ggml_tensor * y = ggml_get_rows(b.ctx, w.tensor(b.ctx, type, cols, rows), ids);
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            const guarded result(n * cols * 4);
            y->data = result.data;
            graph_plan plan;
            plan.n_threads = n_threads;
            CHECK(is_lookup(y) && plan.add_lookup(y, weight_of(y->src[0])), "%s: %ld rows", what, (long)n);
            plan.run();
            for (size_t i = 0; i < list.size(); i++) {
                CHECK(memcmp(result.floats() + i * static_cast<size_t>(cols),
                             &w.want[static_cast<size_t>(list[i] * cols)], static_cast<size_t>(cols * 4)) == 0,
                      "%s, type %d, %ld x %ld: row %d differs with %d threads", what, type, (long)rows, (long)cols,
                      list[i], n_threads);
            }
            CHECK(result.intact() && w.memory->intact(), "%s: written outside", what);
        }
    }
}

TEST(looked_up_rows_are_those_of_the_decoded_matrix) {
    struct encoding {
        const char *                   format;
        std::vector<ggml_macko_option> options;
    };
    const encoding encodings[] = {
        { "macko", {} },
        { "ec-csr", {} },
        { "packed", {} },
        { "packed", { { "value_type", GGML_MACKO_TYPE_CODED } } },
        { "quantized", { { "value_type", GGML_MACKO_TYPE_Q3 } } },
        { "quantized", { { "value_type", GGML_MACKO_TYPE_Q4 } } },
        { "quantized", { { "value_type", GGML_MACKO_TYPE_Q5 } } },
        { "quantized", { { "value_type", GGML_MACKO_TYPE_Q8 } } },
    };
    layout_traits bundles, coded;
    bundles.bundles_below = bundles.short_bundles_below = 1;
    coded.coded                                         = true;
    coded.coded_from                                    = 0;
    rng random(41);
    for (const int32_t type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 }) {
        for (const int64_t cols : { 1, 33, 64, 1089 }) {
            const int64_t        rows = 43;
            std::vector<uint8_t> dense;
            for (int64_t i = 0; i < rows * cols; i++) {
                // of one exponent in F16, so that values can be coded; the same bits are finite in the other types
                const uint64_t bits  = 0x2c00 | (random.bits() & 0x83ff);
                const uint64_t value = random.unit() < 0.4 ? (type == GGML_MACKO_TYPE_F32 ? bits << 16 : bits) : 0;
                for (int64_t k = 0; k < value_nbytes(type); k++) {
                    dense.push_back(static_cast<uint8_t>(value >> (8 * k)));
                }
            }
            for (const encoding & e : encodings) {
                std::unique_ptr<encoded_matrix> encoded;
                const int status = encode_matrix(*find_codec(e.format), dense.data(), { rows, cols, type, 4, 0 },
                                                 e.options.data(), static_cast<int>(e.options.size()), 1, &encoded);
                CHECK(status == 0, "%s: %s", e.format, ggml_macko_last_error());
                ggml_macko_matrix m = encoded->matrix();
                m.format            = e.format;
                for (const layout_traits & traits : { layout_traits(), bundles, coded }) {
                    check_lookup(e.format, looked_up_weight(m, traits), type, cols, rows);
                }
            }
        }
    }
}

TEST(lookup_of_a_row_that_does_not_exist_is_refused) {
    graph_builder b(2);
    ggml_tensor * w   = b.weights(1);
    ggml_tensor * ids = ggml_new_tensor_1d(b.ctx, GGML_TYPE_I32, 2);
    ggml_tensor * y   = ggml_get_rows(b.ctx, w, ids);
    for (const int32_t bad : { -1, int32_t(ROWS), INT32_MAX, INT32_MIN }) {
        memcpy(ids->data, std::array<int32_t, 2>{ 0, bad }.data(), 8);
        graph_plan plan;
        CHECK(!plan.add_lookup(y, weight_of(w)) && plan.is_empty(), "row %d", bad);
    }
    memset(ids->data, 0, 8);
    graph_plan plan;
    CHECK(!plan.add_lookup(y, nullptr) && plan.is_empty(), "of a weight that was not loaded");
    CHECK(!is_lookup(ggml_get_rows(b.ctx, b.weights(2), ggml_new_tensor_2d(b.ctx, GGML_TYPE_I32, 2, 2))),
          "of several matrices");
}

} // namespace

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    int last = 0;
    CHECK(find_last_op(&last) == GGML_MACKO_STATUS_OK && resolve_ops(last) == GGML_MACKO_STATUS_OK, "%s",
          ggml_macko_last_error());
    run_tests();
    return test_summary("test-graph-plan");
}
