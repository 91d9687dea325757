// The nodes of a ggml graph that the GPU must, or must not, compute with one launch: cuda/graph with fake kernels, so
// no GPU is needed. A case builds a few nodes like llama.cpp and names the expected launches.
#include "abi/op-numbers.h"
#include "cuda-graphs.h"
#include "cuda/graph/adapters.h"
#include "cuda/graph/fuse-rope-cache.h"
#include "test.h"

#include <algorithm>

using namespace macko::cuda;

namespace {

using names = std::vector<std::string>;

panel_buffers panels;

op_context make_context() {
    op_context ctx;
    panels.nbytes = size_t(1) << 20;
    ctx.panels    = &panels;
    return ctx;
}
op_context ctx = make_context();

std::string joined(const names & list) {
    std::string text;
    for (const std::string & name : list) {
        text += (text.empty() ? "" : ", ") + name;
    }
    return text;
}

void check_launches(const char * what, const ggml_cgraph * graph, const names & expected) {
    const ggml_tensor * failed = nullptr;
    fake::log.clear();
    const cudaError_t error = graph_enqueue(ctx, graph, true, &failed);
    names             got;
    for (const fake::launch & launch : fake::log) {
        got.push_back(launch.name);
    }
    CHECK(error == cudaSuccess, "%s: node %s failed", what, failed ? failed->name : "?");
    CHECK(got == expected, "%s: launches are [%s], not [%s]", what, joined(got).c_str(), joined(expected).c_str());
}

// Every node must be computed, in its own memory.
void finish(graph_builder & b, ggml_tensor * result) {
    b.expand(result);
    for (int i = 0; i < b.graph->n_nodes; i++) {
        b.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    b.place();
}

// Places b at the address of a.
void share_memory(const ggml_tensor * a, ggml_tensor * b) { b->data = a->data; }

// ---- sparse products ----

struct projections {
    ggml_tensor *x, *h, *q, *k, *v;
    explicit projections(graph_builder & b, int64_t n_tokens = 1, int kind_v = 0)
        : x(b.input(GGML_TYPE_F32, 256, n_tokens)), h(norm(b, x)) {
        q = ggml_mul_mat(b.ctx, b.sparse_weight("q", 256, 256), h);
        k = ggml_mul_mat(b.ctx, b.sparse_weight("k", 256, 128), h);
        v = ggml_mul_mat(b.ctx, b.sparse_weight("v", 256, 128, 1, kind_v), h);
        b.expand(q);
        b.expand(k);
        b.expand(v);
    }
};

TEST(products_of_one_norm_are_one_launch) {
    graph_builder b;
    projections   p(b);
    finish(b, p.v);
    check_launches("norm and three products", b.graph, { "sparse q+k+v norm" });
}

TEST(kinds_of_matrices_get_launches_of_their_own) {
    graph_builder b;
    projections   p(b, 1, 1);
    finish(b, p.v);
    check_launches("v of another kind", b.graph, { "sparse q+k norm", "sparse v norm" });
}

TEST(a_norm_with_another_use_is_stored) {
    graph_builder b;
    projections   p(b);
    finish(b, ggml_silu(b.ctx, p.h));
    check_launches("norm used elsewhere", b.graph, { "rms_norm+mul", "sparse q+k+v", "unary" });
}

TEST(an_output_is_stored) {
    graph_builder b;
    projections   p(b);
    p.h->flags |= GGML_TENSOR_FLAG_OUTPUT;
    finish(b, p.v);
    check_launches("norm is an output", b.graph, { "rms_norm+mul", "sparse q+k+v" });
}

TEST(a_computed_norm_weight_is_not_read_early) {
    graph_builder b;
    ggml_tensor * weight = ggml_scale(b.ctx, b.input(GGML_TYPE_F32, 256), 2.0f);
    ggml_tensor * x      = b.input(GGML_TYPE_F32, 256);
    b.expand(weight);
    ggml_tensor * h = ggml_mul(b.ctx, ggml_rms_norm(b.ctx, x, 1e-5f), weight);
    finish(b, ggml_mul_mat(b.ctx, b.sparse_weight("q", 256, 256), h));
    check_launches("computed norm weight", b.graph, { "unary", "rms_norm+mul", "sparse q" });
}

TEST(a_matrix_in_blocks_takes_no_norm) {
    graph_builder b;
    projections   p(b);
    keep_in_blocks(p.k->src[0]);
    finish(b, p.v);
    check_launches("a matrix in blocks", b.graph, { "rms_norm+mul", "sparse q+v", "sparse k" });
}

TEST(many_columns_are_densified_and_share_x16) {
    graph_builder b;
    projections   p(b, fake::sparse_max_n + 1);
    finish(b, p.v);
    check_launches("more columns than the sparse kernels are for", b.graph,
                   { "rms_norm+mul", "x16",                                                       //
                     "record",       "wait",       "densify q", "record", "densify k",  "record", //
                     "wait",         "mul_mat_16", "record",    "wait",   "densify v",  "record", //
                     "wait",         "mul_mat_16", "record",    "wait",   "mul_mat_16", "record" });
}

TEST(bias_and_residual_join_their_product) {
    graph_builder b;
    ggml_tensor * x    = b.input(GGML_TYPE_F32, 256, 2);
    ggml_tensor * r    = b.input(GGML_TYPE_F32, 256, 2);
    ggml_tensor * y    = ggml_mul_mat(b.ctx, b.sparse_weight("o", 256, 256), x);
    ggml_tensor * bias = ggml_add(b.ctx, y, b.dense_weight(GGML_TYPE_F32, 256));
    finish(b, ggml_add(b.ctx, bias, r));
    check_launches("bias and residual", b.graph, { "sparse o bias residual" });
}

TEST(a_product_with_another_use_takes_no_residual) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256);
    ggml_tensor * y = ggml_mul_mat(b.ctx, b.sparse_weight("o", 256, 256), x);
    ggml_tensor * z = ggml_add(b.ctx, y, b.input(GGML_TYPE_F32, 256, 1));
    b.expand(z);
    finish(b, ggml_silu(b.ctx, y));
    check_launches("product used elsewhere", b.graph, { "sparse o", "add", "unary" });
}

TEST(the_only_row_is_chosen_for_free) {
    graph_builder b;
    ggml_tensor * x    = b.input(GGML_TYPE_F32, 256, 1);
    ggml_tensor * r    = b.input(GGML_TYPE_F32, 256, 1);
    ggml_tensor * ids  = b.input(GGML_TYPE_I32, 1);
    ggml_tensor * y    = ggml_mul_mat(b.ctx, b.sparse_weight("o", 256, 256), x);
    ggml_tensor * rows = ggml_get_rows(b.ctx, y, ids);
    finish(b, ggml_add(b.ctx, rows, ggml_get_rows(b.ctx, r, ids)));
    check_launches("last layer, one token", b.graph, { "sparse o bias" }); // a residual of one row
}

TEST(chosen_rows_of_several_are_computed) {
    graph_builder b;
    ggml_tensor * x    = b.input(GGML_TYPE_F32, 256, 2);
    ggml_tensor * r    = b.input(GGML_TYPE_F32, 256, 2);
    ggml_tensor * ids  = b.input(GGML_TYPE_I32, 1);
    ggml_tensor * y    = ggml_mul_mat(b.ctx, b.sparse_weight("o", 256, 256), x);
    ggml_tensor * rows = ggml_get_rows(b.ctx, y, ids);
    finish(b, ggml_add(b.ctx, rows, ggml_get_rows(b.ctx, r, ids)));
    check_launches("last layer, two tokens", b.graph, { "sparse o", "get_rows", "get_rows", "add" });
}

TEST(gate_and_up_are_one_launch) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256);
    finish(b, swiglu(b, {}, norm(b, x)));
    check_launches("feed forward", b.graph, { "sparse gate+up norm silu", "sparse down" });
}

TEST(gate_and_up_of_two_kinds_keep_their_glu) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256);
    finish(b, swiglu(b, {}, x, 1));
    check_launches("up of another kind", b.graph, { "sparse gate", "sparse up", "glu", "sparse down" });
}

TEST(results_must_not_overlap_operands) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256);
    ggml_tensor * y = swiglu(b, {}, x);
    finish(b, y);
    share_memory(x, y->src[1]); // the GLU, whose launch reads all of x
    check_launches("GLU where x was", b.graph, { "sparse gate", "sparse up", "glu", "sparse down" });
}

TEST(a_residual_may_be_added_in_place) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256, 2);
    ggml_tensor * r = b.input(GGML_TYPE_F32, 256, 2);
    ggml_tensor * y = ggml_add(b.ctx, ggml_mul_mat(b.ctx, b.sparse_weight("o", 256, 256), x), r);
    finish(b, y);
    share_memory(r, y);
    check_launches("residual in place", b.graph, { "sparse o residual" });
}

// ---- norms ----

TEST(sum_and_norm_are_one_launch) {
    graph_builder b;
    ggml_tensor * x   = b.input(GGML_TYPE_F32, 256, 4);
    ggml_tensor * sum = ggml_add(b.ctx, x, b.input(GGML_TYPE_F32, 256, 4));
    ggml_tensor * y   = norm(b, sum);
    finish(b, ggml_mul(b.ctx, y, sum)); // the sum is also stored
    check_launches("sum, norm, scale", b.graph, { "add+rms_norm+mul", "mul" });
}

TEST(a_norm_of_another_sum_is_alone) {
    graph_builder b;
    ggml_tensor * x   = b.input(GGML_TYPE_F32, 256, 4);
    ggml_tensor * sum = ggml_add(b.ctx, x, b.input(GGML_TYPE_F32, 256, 1)); // the shapes differ
    finish(b, norm(b, sum));
    check_launches("sum of a repeated row", b.graph, { "add", "rms_norm+mul" });
}

TEST(a_norm_used_twice_keeps_its_scale_apart) {
    graph_builder b;
    ggml_tensor * n = ggml_rms_norm(b.ctx, b.input(GGML_TYPE_F32, 256, 4), 1e-5f);
    ggml_tensor * y = ggml_mul(b.ctx, n, b.dense_weight(GGML_TYPE_F32, 256));
    b.expand(y);
    finish(b, ggml_silu(b.ctx, n));
    check_launches("norm used twice", b.graph, { "rms_norm", "mul", "unary" });
}

// ---- mixtures of experts ----

// A router and the sum of its experts' results, as llama.cpp builds them.
struct mixture {
    static constexpr int64_t WIDTH = 64, EXPERTS = 16, USED = 4, TOKENS = 3;

    bool  soft_max = false, sigmoid = false, bias = false, weights_soft_max = false, norm = false;
    float scale = 0;

    ggml_tensor *logits = nullptr, *probs = nullptr, *ids = nullptr, *weights = nullptr, *experts = nullptr,
                *sum = nullptr;

    void route(graph_builder & b, ggml_tensor * x = nullptr) {
        ggml_context * c = b.ctx;
        logits           = x ? x : b.input(GGML_TYPE_F32, EXPERTS, TOKENS);
        probs            = soft_max ? ggml_soft_max(c, logits) : sigmoid ? ggml_sigmoid(c, logits) : logits;
        ids     = ggml_argsort_top_k(c, bias ? ggml_add(c, probs, b.dense_weight(GGML_TYPE_F32, EXPERTS)) : probs,
                                     static_cast<int>(USED));
        weights = ggml_get_rows(c, ggml_reshape_3d(c, probs, 1, EXPERTS, TOKENS), ids);
        if (weights_soft_max) {
            weights = as_experts(c, ggml_soft_max(c, as_rows(c, weights)));
        }
        if (norm) {
            weights           = as_rows(c, weights);
            ggml_tensor * all = ggml_clamp(c, ggml_sum_rows(c, weights), 6.103515625e-5f, INFINITY);
            weights           = as_experts(c, ggml_div(c, weights, all));
        }
        weights = scale != 0 ? ggml_scale(c, weights, scale) : weights;
        b.expand(weights);
    }
    void add_up(graph_builder & b, ggml_tensor * w, ggml_tensor * x = nullptr) {
        experts = ggml_mul(b.ctx, x ? x : b.input(GGML_TYPE_F32, WIDTH, USED, TOKENS), w);
        b.expand(experts);
        ggml_tensor * of[USED];
        for (int64_t i = 0; i < USED; i++) {
            of[i] =
                ggml_view_2d(b.ctx, experts, WIDTH, TOKENS, experts->nb[2], static_cast<size_t>(i) * experts->nb[1]);
            b.expand(of[i]);
        }
        sum = of[0];
        for (int64_t i = 1; i < USED; i++) {
            sum = ggml_add(b.ctx, sum, of[i]);
        }
    }

private:
    static ggml_tensor * as_rows(ggml_context * c, ggml_tensor * w) { return ggml_reshape_2d(c, w, USED, TOKENS); }
    static ggml_tensor * as_experts(ggml_context * c, ggml_tensor * w) {
        return ggml_reshape_3d(c, w, 1, USED, TOKENS);
    }
};

// A mixture whose soft-max is normalized, like most.
mixture normalized(graph_builder & b) {
    mixture m;
    m.soft_max = m.norm = true;
    m.route(b);
    return m;
}

const names UNFUSED_CHOICE = { "soft_max", "argsort", "get_rows", "sum_rows", "unary", "div" };

TEST(a_choice_of_experts_is_one_launch) {
    for (int kind = 0; kind < 5; kind++) {
        graph_builder b;
        mixture       m;
        const char *  launches[] = { "router soft_max norm", "router soft_max scale", "router weights",
                                     "router sigmoid bias norm scale", "router soft_max" };
        m.soft_max               = kind == 0 || kind == 1 || kind == 4;
        m.sigmoid = m.bias = kind == 3;
        m.weights_soft_max = kind == 2;
        m.norm             = kind == 0 || kind == 3;
        m.scale            = kind == 1 || kind == 3 ? 2.5f : 0;
        m.route(b);
        finish(b, ggml_silu(b.ctx, m.weights));
        check_launches("router", b.graph, { launches[kind], "unary" });
        const std::string params = fake::text_of(operand(m.logits)) + fake::text_of(operand(m.ids));
        CHECK(fake::log[0].params.find(params) == 0, "other operands: %s", fake::log[0].params.c_str());
    }
}

TEST(results_of_a_choice_with_another_use_are_stored) {
    graph_builder b;
    mixture       m = normalized(b);
    finish(b, ggml_silu(b.ctx, m.probs));
    check_launches("probabilities used again", b.graph, { "soft_max", "router norm", "unary" });

    graph_builder c;
    m = normalized(c);
    finish(c, ggml_view_1d(c.ctx, m.ids->src[0], mixture::EXPERTS, 0));
    check_launches("all places used", c.graph, UNFUSED_CHOICE);

    graph_builder d;
    m              = normalized(d);
    m.probs->flags = GGML_TENSOR_FLAG_OUTPUT;
    finish(d, m.weights);
    check_launches("probabilities are an output", d.graph, { "soft_max", "router norm" });
}

TEST(other_choices_are_not_fused) {
    graph_builder b;
    mixture       m = normalized(b);
    finish(b, m.weights);
    ggml_set_op_params_f32(m.probs, 0, 0.5f);
    check_launches("soft-max with a scale", b.graph, { "soft_max", "router norm" });

    graph_builder c;
    m = normalized(c);
    finish(c, m.weights);
    ggml_set_op_params_i32(m.ids->src[0], 0, GGML_SORT_ORDER_ASC);
    check_launches("the smallest", c.graph, UNFUSED_CHOICE);

    graph_builder d;
    m = normalized(d);
    finish(d, m.weights);
    m.ids->view_offs += sizeof(int32_t);
    check_launches("not the first", d.graph, UNFUSED_CHOICE);

    graph_builder e; // the probabilities of other experts than those that are sorted
    ggml_tensor * order   = ggml_argsort_top_k(e.ctx, e.input(GGML_TYPE_F32, 16, 3), 4);
    ggml_tensor * weights = ggml_get_rows(e.ctx, e.input(GGML_TYPE_F32, 1, 16, 3), order);
    finish(e, weights);
    check_launches("two sources", e.graph, { "argsort", "get_rows" });
}

TEST(a_choice_must_not_overwrite_its_operand) {
    graph_builder b;
    mixture       m = normalized(b);
    finish(b, m.weights);
    share_memory(m.logits, m.ids);
    check_launches("ids over logits", b.graph, { "soft_max", "router norm" });
    share_memory(m.probs, m.ids);
    share_memory(m.probs, m.weights->src[0]);
    check_launches("ids and weights in one place", b.graph, UNFUSED_CHOICE);

    graph_builder c;
    m = normalized(c);
    finish(c, m.weights);
    share_memory(m.logits, m.weights->src[0]);
    check_launches("weights over logits", c.graph, { "soft_max", "router norm" });
}

const names UNFUSED_SUM = { "mul", "add", "add", "add" };

TEST(the_sum_of_experts_is_one_launch) {
    graph_builder b;
    mixture       m;
    m.add_up(b, b.input(GGML_TYPE_F32, 1, mixture::USED, mixture::TOKENS));
    finish(b, m.sum);
    check_launches("sum", b.graph, { "expert_sum" });

    graph_builder c;
    m.add_up(c, c.input(GGML_TYPE_F32, 1, mixture::USED, mixture::TOKENS));
    ggml_tensor * residual = c.input(GGML_TYPE_F32, mixture::WIDTH, mixture::TOKENS);
    ggml_tensor * y        = ggml_add(c.ctx, m.sum, residual);
    finish(c, y);
    share_memory(residual, y);
    check_launches("with a residual in place", c.graph, { "expert_sum residual" });
    y->data = static_cast<char *>(residual->data) + 256;
    check_launches("over its residual", c.graph, { "mul", "add", "add", "add", "add" });
    y->data = m.experts->src[0]->data;
    check_launches("over an operand", c.graph, { "mul", "add", "add", "add", "add" });
}

TEST(other_sums_of_experts_are_not_fused) {
    graph_builder b;
    mixture       m;
    m.add_up(b, b.input(GGML_TYPE_F32, 1, mixture::USED, mixture::TOKENS));
    b.expand(m.sum);
    finish(b, ggml_silu(b.ctx, m.experts));
    names launches = UNFUSED_SUM;
    launches.push_back("unary");
    check_launches("products used again", b.graph, launches);

    graph_builder c;
    m.add_up(c, c.input(GGML_TYPE_F32, 1, mixture::USED, mixture::TOKENS));
    finish(c, m.sum);
    std::swap(m.sum->src[0]->src[1]->view_offs, m.sum->src[1]->view_offs);
    check_launches("in another order", c.graph, UNFUSED_SUM);

    graph_builder d; // the sum alone is used again
    m.add_up(d, d.input(GGML_TYPE_F32, 1, mixture::USED, mixture::TOKENS));
    ggml_tensor * y = ggml_add(d.ctx, m.sum, d.input(GGML_TYPE_F32, mixture::WIDTH, mixture::TOKENS));
    d.expand(y);
    finish(d, ggml_silu(d.ctx, m.sum));
    check_launches("sum used again", d.graph, { "expert_sum", "add", "unary" });
}

TEST(a_mixture_takes_six_launches_and_its_norm) {
    fake::groups_experts = true;
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, mixture::WIDTH, mixture::TOKENS);
    ggml_tensor * h = norm(b, x);
    mixture       m;
    m.soft_max = m.norm = true;
    m.route(b, ggml_mul_mat(b.ctx, b.dense_weight(GGML_TYPE_F32, mixture::WIDTH, mixture::EXPERTS), h));
    h                     = ggml_reshape_3d(b.ctx, h, mixture::WIDTH, 1, mixture::TOKENS);
    const auto experts_of = [&](const char * name, int64_t cols, int64_t rows, ggml_tensor * y) {
        return ggml_mul_mat_id(b.ctx, b.sparse_weight(name, cols, rows, mixture::EXPERTS), y, m.ids);
    };
    ggml_tensor * up   = experts_of("up", mixture::WIDTH, 128, h);
    ggml_tensor * gate = experts_of("gate", mixture::WIDTH, 128, h);
    b.expand(up);
    m.add_up(b, m.weights, experts_of("down", 128, mixture::WIDTH, ggml_swiglu_split(b.ctx, gate, up)));
    ggml_tensor * y = norm(b, ggml_add(b.ctx, m.sum, x)); // of the next block
    finish(b, ggml_mul_mat(b.ctx, b.sparse_weight("q", mixture::WIDTH, 256), y));
    check_launches("mixture", b.graph,
                   { "rms_norm+mul", "mul_mat", "router soft_max norm", "sparse gate+up silu", "sparse down",
                     "expert_sum residual", "sparse q norm" });
    fake::groups_experts = false;
}

// ---- rotary embedding, cache, attention ----

struct layer {
    model_shape      s;
    attention_inputs in;
    ggml_tensor *    result;
    layer(graph_builder & b, const model_shape & shape) : s(shape), in(b, s) {
        const int64_t width = s.head_dim * s.n_head_kv;
        ggml_tensor * q     = b.input(GGML_TYPE_F32, s.head_dim * s.n_head, s.n_tokens);
        ggml_tensor * k     = b.input(GGML_TYPE_F32, width, s.n_tokens);
        ggml_tensor * v     = b.input(GGML_TYPE_F32, width, s.n_tokens);
        result              = attention(b, s, q, k, v, in);
    }
};

ggml_tensor * find(const ggml_cgraph * graph, ggml_op op, int nth = 0) {
    for (int i = 0; i < graph->n_nodes; i++) {
        if (graph->nodes[i]->op == op && nth-- == 0) {
            return graph->nodes[i];
        }
    }
    return nullptr;
}

TEST(attention_of_one_token_is_one_launch) {
    graph_builder b;
    layer         l(b, {});
    finish(b, l.result);
    check_launches("one token", b.graph, { "rope_attention" });
}

TEST(attention_of_several_tokens_is_apart) {
    graph_builder b;
    model_shape   s;
    s.n_tokens = 2;
    layer l(b, s);
    finish(b, l.result);
    check_launches("two tokens", b.graph, { "rope_cache", "attention" });
}

TEST(a_rotated_query_with_another_use_is_stored) {
    graph_builder b;
    layer         l(b, {});
    b.expand(l.result);
    finish(b, ggml_silu(b.ctx, find(b.graph, GGML_OP_ROPE)));
    check_launches("query used elsewhere", b.graph, { "rope_cache", "attention", "unary" });
}

TEST(rotated_keys_with_another_use_are_stored) {
    graph_builder b;
    layer         l(b, {});
    b.expand(l.result);
    finish(b, ggml_silu(b.ctx, find(b.graph, GGML_OP_ROPE, 1)));
    check_launches("keys used elsewhere", b.graph, { "rope", "rope", "set_rows", "set_rows", "attention", "unary" });
}

TEST(norms_of_keys_do_not_part_rotations) {
    graph_builder b;
    model_shape   s;
    s.norms = true;
    layer l(b, s);
    finish(b, l.result);
    check_launches("as built", b.graph, { "rms_norm+mul", "rope", "rms_norm+mul", "rope_cache k", "attention" });
    graph_optimize(ctx, b.graph, nullptr);
    check_launches("as optimized", b.graph, { "rms_norm+mul", "rms_norm+mul", "rope_attention" });
}

model_shape quantized_cache_shape(int64_t n_tokens) {
    model_shape s;
    s.cache    = GGML_TYPE_Q8_0;
    s.n_tokens = n_tokens;
    return s;
}

TEST(rows_of_a_quantized_cache_are_one_launch) {
    for (const int64_t head_dim : { 64, 128 }) {
        const int64_t n_tokens = head_dim == 64 ? 1 : 3;
        graph_builder b;
        model_shape   s = quantized_cache_shape(n_tokens);
        s.head_dim      = head_dim;
        layer l(b, s);
        finish(b, l.result);
        check_launches("quantized cache", b.graph, { "rope_hadamard_cache", "attention" });

        graph_builder c;
        s.norms = true;
        layer with_norms(c, s);
        finish(c, with_norms.result);
        graph_optimize(ctx, c.graph, nullptr);
        check_launches("quantized cache, norms", c.graph,
                       { "rms_norm+mul", "rms_norm+mul", "rope_hadamard_cache", "attention" });
    }
}

// The same nodes, but one of the results has an additional use.
TEST(results_with_another_use_are_stored) {
    const names   apart = { "rope",     "hadamard", "hadamard",  "rope", "hadamard",
                            "set_rows", "set_rows", "attention", "unary" };
    const ggml_op ops[] = { GGML_OP_ROPE, GGML_OP_ROPE, GGML_OP_MUL_MAT, GGML_OP_MUL_MAT };
    const int     nth[] = { 0, 1, 1, 2 }; // rotated q and k; v and k times the matrix
    for (int k = 0; k < 4; k++) {
        graph_builder b;
        layer         l(b, quantized_cache_shape(1));
        b.expand(l.result);
        finish(b, ggml_silu(b.ctx, find(b.graph, ops[k], nth[k])));
        check_launches("used elsewhere", b.graph, apart);
    }
    graph_builder b;
    layer         l(b, quantized_cache_shape(1));
    b.expand(l.result);
    finish(b, ggml_silu(b.ctx, find(b.graph, GGML_OP_MUL_MAT))); // q, whose value is stored
    check_launches("turned query used elsewhere", b.graph, { "rope_hadamard_cache", "attention", "unary" });
}

TEST(turned_queries_must_not_overlap_raw_keys) {
    graph_builder b;
    layer         l(b, quantized_cache_shape(1));
    finish(b, l.result);
    share_memory(find(b.graph, GGML_OP_ROPE, 1)->src[0], find(b.graph, GGML_OP_MUL_MAT));
    check_launches("query where k was", b.graph,
                   { "rope", "hadamard", "hadamard", "rope", "hadamard", "set_rows", "set_rows", "attention" });
}

TEST(positions_that_are_computed_are_not_read_early) {
    graph_builder b;
    layer         l(b, quantized_cache_shape(1));
    b.expand(l.result);
    ggml_tensor * pos = ggml_scale(b.ctx, b.input(GGML_TYPE_I32, 1), 1.0f);
    for (int k = 0; k < 2; k++) {
        find(b.graph, GGML_OP_ROPE, k)->src[1] = pos;
    }
    finish(b, l.result);
    check_launches("computed positions", b.graph,
                   { "rope", "hadamard", "hadamard", "rope", "hadamard", "set_rows", "set_rows", "attention" });
}

TEST(a_computed_mask_is_not_read_early) {
    graph_builder b;
    layer         l(b, {});
    ggml_tensor * mask = ggml_scale(b.ctx, b.input(GGML_TYPE_F16, 256, 1), 1.0f);
    b.expand(l.result);
    find(b.graph, GGML_OP_FLASH_ATTN_EXT)->src[3] = mask;
    finish(b, l.result);
    check_launches("computed mask", b.graph, { "rope_cache", "attention" });
}

TEST(attention_must_not_overlap_raw_keys) {
    graph_builder b;
    layer         l(b, {});
    finish(b, l.result);
    share_memory(find(b.graph, GGML_OP_ROPE, 1)->src[0], find(b.graph, GGML_OP_FLASH_ATTN_EXT));
    check_launches("attention where k was", b.graph, { "rope", "rope_cache k", "attention" });
}

TEST(unsupported_shapes_are_not_fused) {
    graph_builder b;
    layer         l(b, {});
    finish(b, l.result);
    fake::supports = false;
    check_launches("no kernel", b.graph, { "rope", "rope", "set_rows", "set_rows", "attention" });
    fake::supports = true;
}

// ---- order, experts, the op table ----

TEST(products_of_one_input_are_brought_together) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256);
    ggml_tensor * q = ggml_mul_mat(b.ctx, b.sparse_weight("q", 256, 256), x);
    ggml_tensor * y = ggml_silu(b.ctx, q);
    b.expand(y);
    finish(b, ggml_add(b.ctx, ggml_mul_mat(b.ctx, b.sparse_weight("k", 256, 256), x), y));
    check_launches("as built", b.graph, { "sparse q", "unary", "sparse k bias" });
    graph_optimize(ctx, b.graph, nullptr);
    check_launches("as optimized", b.graph, { "sparse q+k", "unary", "add" });
}

// A layer as built by llama.cpp.
ggml_tensor * decoder_layer(graph_builder & b, const model_shape & s, const attention_inputs & in, ggml_tensor * x) {
    const int64_t width   = s.head_dim * s.n_head_kv;
    ggml_tensor * h       = norm(b, x);
    const auto    project = [&](const char * name, int64_t rows) {
        return ggml_mul_mat(b.ctx, b.sparse_weight(name, s.n_embd, rows), h);
    };
    ggml_tensor * q      = project("q", s.head_dim * s.n_head);
    ggml_tensor * k      = project("k", width);
    ggml_tensor * result = attention(b, s, q, k, project("v", width), in);
    x = ggml_add(b.ctx, ggml_mul_mat(b.ctx, b.sparse_weight("o", s.head_dim * s.n_head, s.n_embd), result), x);
    return ggml_add(b.ctx, swiglu(b, s, norm(b, x)), x);
}

TEST(no_order_brings_a_node_in_front_of_its_operands) {
    for (int k = 0; k < 8; k++) {
        graph_builder b(2048);
        model_shape   s;
        s.norms = k & 1, s.cache = k & 2 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16, s.n_tokens = k & 4 ? 3 : 1;
        const attention_inputs in(b, s);
        ggml_tensor *          x = b.input(GGML_TYPE_F32, s.n_embd, s.n_tokens);
        for (int i = 0; i < 3; i++) {
            x = decoder_layer(b, s, in, x);
        }
        finish(b, x);
        ggml_tensor **const begin = b.graph->nodes, **const end = begin + b.graph->n_nodes;
        const std::vector<ggml_tensor *> built(begin, end);
        graph_optimize(ctx, b.graph, nullptr);
        CHECK(!std::equal(begin, end, built.begin()) && std::is_permutation(begin, end, built.begin()),
              "the nodes are not the same in another order");
        bool ok = true;
        for (ggml_tensor ** node = begin; node < end; node++) {
            const auto comes_later = [&](const ggml_tensor * t) { return t && std::find(node, end, t) != end; };
            ok                     = ok && !comes_later((*node)->view_src) &&
                 std::none_of(std::begin((*node)->src), std::end((*node)->src), comes_later);
        }
        CHECK(ok, "a node comes before its operands (case %d)", k);
    }
}

struct kept_operand {
    const ggml_tensor *operand, *last;
};

// The operands that graph_optimize() asks the allocator to keep.
std::vector<kept_operand> kept_operands(graph_builder & b, ggml_tensor * result) {
    b.expand(result);
    for (int i = 0; i < b.graph->n_nodes; i++) {
        b.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    std::vector<kept_operand>          kept;
    ggml_backend_graph_optimize_params params = {};
    params.user_data                          = &kept;
    params.add_alloc_dep                      = [](void * user_data, ggml_tensor * operand, ggml_tensor * last) {
        static_cast<std::vector<kept_operand> *>(user_data)->push_back({ operand, last });
    };
    graph_optimize(ctx, b.graph, &params);
    return kept;
}

TEST(operands_of_a_launch_live_until_its_last_node) {
    graph_builder       b;
    ggml_tensor *       x    = ggml_silu(b.ctx, b.input(GGML_TYPE_F32, 256));
    ggml_tensor *       y    = swiglu(b, {}, x);
    const auto          kept = kept_operands(b, y);
    const ggml_tensor * glu  = y->src[1];
    CHECK(
        std::any_of(kept.begin(), kept.end(), [&](const kept_operand & k) { return k.operand == x && k.last == glu; }),
        "x is freed before the GLU (%zu operands kept)", kept.size());
}

TEST(the_sum_of_experts_keeps_their_weights_only) {
    graph_builder b;
    mixture       m;
    ggml_tensor * w = ggml_silu(b.ctx, b.input(GGML_TYPE_F32, 1, mixture::USED, mixture::TOKENS));
    m.add_up(b, w, ggml_silu(b.ctx, b.input(GGML_TYPE_F32, mixture::WIDTH, mixture::USED, mixture::TOKENS)));
    ggml_tensor * y    = ggml_add(b.ctx, m.sum, b.input(GGML_TYPE_F32, mixture::WIDTH, mixture::TOKENS));
    const auto    kept = kept_operands(b, y);
    CHECK(kept.size() == 1 && kept[0].operand == w && kept[0].last == y, "%zu operands are kept", kept.size());
}

TEST(experts_are_one_launch_per_slot_or_token) {
    graph_builder b;
    ggml_tensor * w    = b.sparse_weight("experts", 256, 128, 4);
    ggml_tensor * many = ggml_mul_mat_id(b.ctx, w, b.input(GGML_TYPE_F32, 256, 1, 5), b.input(GGML_TYPE_I32, 2, 5));
    finish(b, many);
    check_launches("two slots, five tokens", b.graph, { "sparse experts", "sparse experts" });

    graph_builder c;
    ggml_tensor * v   = c.sparse_weight("experts", 256, 128, 4);
    ggml_tensor * one = ggml_mul_mat_id(c.ctx, v, c.input(GGML_TYPE_F32, 256, 1, 1), c.input(GGML_TYPE_I32, 2, 1));
    finish(c, one);
    check_launches("two slots, one token", c.graph, { "sparse experts" });
}

// With a layout that groups columns by expert, the experts of all tokens are one product, also large ones.
TEST(experts_of_several_tokens_are_grouped) {
    fake::groups_experts = true;
    graph_builder b;
    ggml_tensor * w = b.sparse_weight("experts", 2048, 2048, 4);
    finish(b, ggml_mul_mat_id(b.ctx, w, b.input(GGML_TYPE_F32, 2048, 1, 40), b.input(GGML_TYPE_I32, 2, 40)));
    check_launches("two slots, 40 tokens", b.graph, { "sparse experts" });

    graph_builder c;
    ggml_tensor * x = c.input(GGML_TYPE_F32, 256, 1, 3), *ids = c.input(GGML_TYPE_I32, 2, 3);
    ggml_tensor * up   = ggml_mul_mat_id(c.ctx, c.sparse_weight("up", 256, 128, 4), x, ids),
                *gate  = ggml_mul_mat_id(c.ctx, c.sparse_weight("gate", 256, 128, 4), x, ids),
                *other = ggml_mul_mat_id(c.ctx, c.sparse_weight("other", 256, 128, 4), x, c.input(GGML_TYPE_I32, 2, 3));
    finish(c, ggml_add(c.ctx, ggml_swiglu_split(c.ctx, gate, up), other));
    check_launches("gate and up of the same experts", c.graph, { "sparse gate+up silu", "sparse other", "add" });
    fake::groups_experts = false;
}

// One of four large experts has no token, one has few, and two have too many for the sparse kernels. The host waits for
// these numbers once, and fills no later panel before that.
TEST(large_experts_are_products_of_their_own) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 2048, 1, 40), *ids = b.input(GGML_TYPE_I32, 2, 40);
    ggml_tensor * gate = ggml_mul_mat_id(b.ctx, b.sparse_weight("gate", 2048, 2048, 4), x, ids),
                *up    = ggml_mul_mat_id(b.ctx, b.sparse_weight("up", 2048, 2048, 4), x, ids);
    ggml_tensor * sum  = ggml_add(b.ctx, gate, up);
    finish(b, ggml_mul_mat(b.ctx, b.sparse_weight("o", 2048, 256), ggml_reshape_2d(b.ctx, sum, 2048, 80)));
    panels.nbytes      = size_t(8) << 20; // one expert
    fake::expert_begin = { 0, 0, 5, 45, 80 };
    check_launches("experts with several tokens", b.graph,
                   { "mul_mat_id_sort",
                     "read",
                     "synchronize",
                     "gather_expert_rows",
                     "sparse gate", //
                     "record",
                     "wait",
                     "densify gate",
                     "record",
                     "densify gate",
                     "record", //
                     "wait",
                     "mul_mat_16",
                     "record", //
                     "wait",
                     "mul_mat_16",
                     "record",
                     "scatter_expert_rows", //
                     "mul_mat_id_sort",
                     "gather_expert_rows",
                     "sparse up", //
                     "wait",
                     "densify up",
                     "record",
                     "wait",
                     "densify up",
                     "record", //
                     "wait",
                     "mul_mat_16",
                     "record", //
                     "wait",
                     "densify o",
                     "record", //
                     "wait",
                     "mul_mat_16",
                     "record",
                     "scatter_expert_rows",
                     "add", //
                     "x16",
                     "wait",
                     "mul_mat_16",
                     "record" });
    const auto row_of = [](size_t i) { return fake::log[i].params; };
    CHECK(row_of(7).rfind(" 4096 6144", 0) == 0 && row_of(9).rfind(" 6144 8192", 0) == 0,
          "rows of experts 2 and 3 differ: %s, %s", row_of(7).c_str(), row_of(9).c_str());
    panels.nbytes = size_t(1) << 20;
}

// Dense experts are multiplied in place; experts without tokens are skipped.
TEST(large_dense_experts_need_no_panels) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 2048, 1, 40), *ids = b.input(GGML_TYPE_I32, 2, 40);
    finish(b, ggml_mul_mat_id(b.ctx, b.dense_weight(GGML_TYPE_F16, 2048, 2048, 4), x, ids));
    fake::expert_begin = { 0, 0, 5, 45, 80 };
    check_launches("dense experts with several tokens", b.graph,
                   { "mul_mat_id_sort", "read", "synchronize", "gather_expert_rows", "mul_mat_16", "mul_mat_16",
                     "mul_mat_16", "scatter_expert_rows" });
}

// llama.cpp marks products with a Hadamard matrix.
TEST(a_hint_makes_a_product_a_transform) {
    for (const bool marked : { false, true }) {
        graph_builder b;
        ggml_tensor * y = ggml_mul_mat(b.ctx, b.input(GGML_TYPE_F32, 128, 128), b.input(GGML_TYPE_F32, 128, 32));
        ggml_set_op_params_i32(y, 1, marked ? GGML_HINT_SRC0_IS_HADAMARD : GGML_HINT_NONE);
        finish(b, y);
        check_launches("a product that may be marked", b.graph, { marked ? "hadamard" : "mul_mat" });
    }
}

// A callback on the host: no device has a kernel for it.
ggml_tensor * op_without_kernel(ggml_context * ctx, ggml_tensor * x) {
    return ggml_map_custom1(ctx, x, [](ggml_tensor *, const ggml_tensor *, int, int, void *) {}, 1, nullptr);
}

TEST(a_sparse_weight_is_for_products_only) {
    graph_builder b;
    ggml_tensor * w    = b.sparse_weight("w", 256, 256);
    ggml_tensor * x    = b.input(GGML_TYPE_F32, 256);
    ggml_tensor * y    = ggml_mul_mat(b.ctx, w, x);
    ggml_tensor * rows = ggml_get_rows(b.ctx, w, b.input(GGML_TYPE_I32, 1));
    CHECK(graph_supports_op(y, true) && graph_supports_op(y, false), "a product is not supported");
    CHECK(!graph_supports_op(rows, true), "rows of a sparse weight are supported");
    CHECK(graph_supports_op(rows, false), "rows of a dense weight are not supported");
    CHECK(graph_supports_op(ggml_reshape_1d(b.ctx, x, 256), false), "a view is not supported");
    CHECK(!graph_supports_op(op_without_kernel(b.ctx, x), false), "an op without kernel is supported");
    CHECK(graph_scratch_nbytes(rows, false) == 0, "rows need scratch memory");
    CHECK(graph_scratch_nbytes(y, true) != graph_scratch_nbytes(y, false), "sparse and dense products share a row");
}

// llama.cpp's sparse attention and its groups of experts write rows to a result of GGML_OP_FILL.
TEST(no_op_writes_into_memory_of_another_device) {
    graph_builder b;
    ggml_tensor * x    = b.input(GGML_TYPE_F32, 1, 256);
    ggml_tensor * rows = b.input(GGML_TYPE_F32, 1, 4);
    ggml_tensor * ids  = b.input(GGML_TYPE_I32, 4);
    ggml_tensor * here = ggml_fill(b.ctx, x, -INFINITY);
    ggml_tensor * away = op_without_kernel(b.ctx, x);
    CHECK(graph_supports_op(here, false), "FILL is not supported");
    CHECK(graph_supports_op(ggml_set_rows(b.ctx, here, rows, ids), false), "rows of a result are not supported");
    CHECK(graph_supports_op(ggml_set_rows(b.ctx, x, rows, ids), false), "rows of a cache are not supported");
    ggml_tensor * part = ggml_view_2d(b.ctx, away, 1, 128, 4, 0);
    CHECK(!graph_supports_op(ggml_set_rows(b.ctx, away, rows, ids), false), "rows of the CPU's memory are supported");
    CHECK(!graph_supports_op(ggml_set_rows(b.ctx, part, rows, ids), false), "rows of a part of it are supported");
    CHECK(!graph_supports_op(ggml_scale_inplace(b.ctx, away, 2), false), "the CPU's memory is scaled in place");
    CHECK(graph_supports_op(ggml_scale(b.ctx, away, 2), false), "a result of the CPU is not read");
}

TEST(a_set_writes_a_part_of_a_copy_or_of_its_source) {
    graph_builder b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 8, 4);
    ggml_tensor * y = b.input(GGML_TYPE_F32, 3, 2);
    finish(b, ggml_set_2d(b.ctx, x, y, x->nb[1], 84));
    check_launches("set", b.graph, { "copy", "copy" });
    op_tensor part = operand(b.graph->nodes[0]);
    part.data += 84, part.ne[0] = 3, part.ne[1] = 2;
    const std::string expected = fake::text_of(operand(y)) + fake::text_of(part);
    CHECK(fake::log.back().params == expected, "set: %s is not %s", fake::log.back().params.c_str(), expected.c_str());
    CHECK(!graph_supports_op(ggml_set_2d(b.ctx, x, y, x->nb[1], 88), false), "set past the end");
    CHECK(!graph_supports_op(ggml_set_2d(b.ctx, x, y, x->nb[1], 82), false), "set of parts of elements");

    graph_builder in_place;
    ggml_tensor * computed = ggml_scale(in_place.ctx, in_place.input(GGML_TYPE_F32, 8, 4), 2.0f);
    finish(in_place, ggml_set_2d_inplace(in_place.ctx, computed, in_place.input(GGML_TYPE_F32, 3, 2), 32, 0));
    check_launches("set in place", in_place.graph, { "unary", "copy" });
}

TEST(parameters_of_ops_reach_their_kernels) {
    const auto params_of = [](const char * name, ggml_tensor * (*make)(graph_builder &)) {
        graph_builder b;
        finish(b, make(b));
        check_launches(name, b.graph, { name });
        return fake::log.back().params;
    };
    const auto starts_with = [](const std::string & params, const std::string & expected) {
        CHECK(params.rfind(expected, 0) == 0, "%s does not start with %s", params.c_str(), expected.c_str());
    };
    const auto floats = [](const std::vector<float> & values) {
        std::string text;
        for (const float v : values) {
            text += fake::text_of(v);
        }
        return text;
    };
    starts_with(
        params_of("unary",
                  [](graph_builder & b) { return ggml_xielu(b.ctx, b.input(GGML_TYPE_F32, 8), 100, 200, 3, 4); }),
        fake::text_of(static_cast<int>(unary_op::XIELU)) + floats({ 103, 200, 3, 4 }));
    starts_with(params_of("arange", [](graph_builder & b) { return ggml_arange(b.ctx, 2, 9, 3); }), floats({ 2, 3 }));
    starts_with(params_of("pool",
                          [](graph_builder & b) {
                              return ggml_pool_2d(b.ctx, b.input(GGML_TYPE_F32, 64, 64), GGML_OP_POOL_MAX, 5, 6, 3, 4,
                                                  1, 2);
                          }),
                " 1 5 6 3 4 1 2");
    starts_with(params_of("hc_pre",
                          [](graph_builder & b) {
                              ggml_tensor * x = b.input(GGML_TYPE_F32, 8, 4);
                              return ggml_dsv4_hc_pre_gated(b.ctx, x, x, 0.5f);
                          }),
                " 1" + floats({ 0.5f }));
    starts_with(params_of("hc_comb",
                          [](graph_builder & b) {
                              ggml_tensor * x = b.input(GGML_TYPE_F32, 24);
                              return ggml_dsv4_hc_comb(b.ctx, x, x, x, 2, 3);
                          }),
                floats({ 2 }) + " 3");
    graph_builder b;
    ggml_tensor * mixes = b.input(GGML_TYPE_F32, 24);
    CHECK(!graph_supports_op(ggml_dsv4_hc_comb(b.ctx, mixes, mixes, mixes, 2, 1 << 30), false), "steps without end");
    starts_with(params_of("gated_linear_attention",
                          [](graph_builder & b) {
                              ggml_tensor * x = b.input(GGML_TYPE_F32, 8, 2);
                              return ggml_gated_linear_attn(b.ctx, x, x, x, x, b.input(GGML_TYPE_F32, 128), 2);
                          }),
                floats({ 2 }));
}

TEST(unknown_ops_fail_with_their_node) {
    graph_builder b;
    ggml_tensor * y = op_without_kernel(b.ctx, b.input(GGML_TYPE_F32, 256));
    finish(b, y);
    const ggml_tensor * failed = nullptr;
    CHECK(graph_enqueue(ctx, b.graph, true, &failed) == cudaErrorInvalidValue, "an op without kernel ran");
    CHECK(failed == y, "the failed node is not named");
}

// Graphs from a network.

TEST(a_missing_operand_has_no_kernel) {
    graph_builder b;
    ggml_tensor * x   = b.input(GGML_TYPE_F32, 256);
    ggml_tensor * sum = ggml_add(b.ctx, x, x);
    CHECK(graph_has_kernel(sum, false), "ADD has no kernel");
    sum->src[1] = nullptr;
    CHECK(!graph_has_kernel(sum, false), "ADD of one operand has a kernel");
}

TEST(views_in_a_circle_have_an_end) {
    graph_builder b;
    ggml_tensor * x    = b.input(GGML_TYPE_F32, 256);
    ggml_tensor * view = ggml_view_1d(b.ctx, x, 256, 0);
    CHECK(source_of_views(ggml_view_1d(b.ctx, view, 256, 0)) == x, "two views are not followed");
    view->src[0] = view;
    CHECK(source_of_views(view) == view, "a view of itself has a source");
}

} // namespace

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    int last = 0;
    if (macko::find_last_op(&last) || macko::resolve_ops(last)) {
        fprintf(stderr, "%s\n", ggml_macko_last_error());
        return 1;
    }
    run_tests();
    return test_summary("test-graph-fusion");
}
