// Graphs like llama.cpp's with invented addresses, for tests of cuda/graph on a machine without a GPU.
#pragma once

#include "cuda/stored-matrix.h"
#include "fake-cuda-ops.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

// Builds one graph. No tensor has memory; place() gives each of them addresses of its own.
class graph_builder {
public:
    explicit graph_builder(size_t max_nodes = 512) {
        ggml_init_params params = {};
        params.mem_size         = max_nodes * 4 * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes, false);
        params.no_alloc         = true;
        ctx                     = ggml_init(params);
        graph                   = ggml_new_graph_custom(ctx, max_nodes, false);
        weights.usage           = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        activations.usage       = GGML_BACKEND_BUFFER_USAGE_COMPUTE;
    }
    ~graph_builder() { ggml_free(ctx); }
    graph_builder(const graph_builder &) = delete;

    ggml_context * ctx;
    ggml_cgraph *  graph;

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1, int64_t ne3 = 1) {
        ggml_tensor * t = ggml_new_tensor_4d(ctx, type, ne0, ne1, ne2, ne3);
        t->buffer       = &activations;
        return t;
    }
    ggml_tensor * dense_weight(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        ggml_tensor * t = input(type, ne0, ne1, ne2);
        t->buffer       = &weights;
        return t;
    }
    // kind: matrices of different kinds cannot share a launch
    ggml_tensor * sparse_weight(const char * name, int64_t ne0, int64_t ne1, int64_t ne2 = 1, int kind = 0,
                                int32_t type = GGML_MACKO_TYPE_F16) {
        auto                      m    = std::make_unique<macko::cuda::stored_matrix>();
        macko::cuda::macko_layout rows = {};
        rows.rows                      = ne1 * ne2;
        rows.cols                      = ne0;
        rows.type                      = type;
        rows.delta_bits                = kind;
        m->matrix                      = rows;
        m->rows_per_matrix             = ne1;
        ggml_tensor * t                = dense_weight(static_cast<ggml_type>(type), ne0, ne1, ne2);
        t->extra                       = m.get();
        fake::matrix_names[&m->matrix] = name;
        matrices.push_back(std::move(m));
        return t;
    }
    void expand(ggml_tensor * t) { ggml_build_forward_expand(graph, t); }

    // Gives every tensor memory that overlaps no other tensor; a view gets memory of its source.
    void place() {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            if (!t->view_src) {
                t->data = reinterpret_cast<void *>(next_address);
                next_address += GGML_PAD(ggml_nbytes(t), 256) + (size_t(1) << 20); // space between the tensors
            }
            t->buffer = t->buffer ? t->buffer : &activations;
        }
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            if (t->view_src) {
                t->data = static_cast<char *>(t->view_src->data) + t->view_offs;
            }
        }
    }

private:
    ggml_backend_buffer                                      weights = {}, activations = {};
    std::vector<std::unique_ptr<macko::cuda::stored_matrix>> matrices;
    size_t                                                   next_address = size_t(1) << 32;
};

// Keeps a sparse weight in blocks of rows, whose products have no norm.
inline void keep_in_blocks(ggml_tensor * weight) {
    macko::cuda::gpu_layout &      m = const_cast<macko::cuda::stored_matrix *>(macko::cuda::stored(weight))->matrix;
    macko::cuda::row_blocks_layout blocks           = {};
    static_cast<macko::cuda::layout_base &>(blocks) = macko::cuda::base_of(m);
    m                                               = blocks;
}

// ---- parts of a model ----

struct model_shape {
    int64_t   n_embd = 256, n_ff = 512, head_dim = 64, n_head = 4, n_head_kv = 2, n_tokens = 1, n_ctx = 256;
    ggml_type cache = GGML_TYPE_F16; // if quantized: Hadamard matrices multiply q, k and v; the one for v has 64 rows
    bool      norms = false;         // of each head of q and k
};

inline ggml_tensor * norm(graph_builder & b, ggml_tensor * x) {
    return ggml_mul(b.ctx, ggml_rms_norm(b.ctx, x, 1e-5f), b.dense_weight(GGML_TYPE_F32, x->ne[0]));
}

// Operands shared by the layers of a graph.
struct attention_inputs {
    ggml_tensor *pos, *ids, *mask;
    attention_inputs(graph_builder & b, const model_shape & s)
        : pos(b.input(GGML_TYPE_I32, s.n_tokens)),
          ids(b.input(GGML_TYPE_I64, s.n_tokens)),
          mask(b.input(GGML_TYPE_F16, s.n_ctx, s.n_tokens)) {}
};

inline ggml_tensor * rope(graph_builder & b, const model_shape & s, ggml_tensor * x, int64_t n_head,
                          const attention_inputs & in) {
    ggml_tensor * heads = ggml_reshape_3d(b.ctx, x, s.head_dim, n_head, s.n_tokens);
    heads               = s.norms ? norm(b, heads) : heads;
    return ggml_rope_ext(b.ctx, heads, in.pos, nullptr, static_cast<int>(s.head_dim), 0, 4096, 10000.0f, 1.0f, 0.0f,
                         1.0f, 32.0f, 1.0f);
}

// x times a Hadamard matrix, as in llama.cpp's graphs.
inline ggml_tensor * turned(graph_builder & b, ggml_tensor * x, ggml_tensor * matrix) {
    const int64_t n = matrix->ne[0];
    ggml_tensor * y = ggml_mul_mat(b.ctx, matrix, ggml_reshape_2d(b.ctx, x, n, ggml_nelements(x) / n));
    ggml_set_op_params_i32(y, 1, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_4d(b.ctx, y, x->ne[0], x->ne[1], x->ne[2], x->ne[3]);
}

// Writes the cache's rows, then runs attention on the cache. q, k, v: results of the projections.
inline ggml_tensor * attention(graph_builder & b, const model_shape & s, ggml_tensor * q, ggml_tensor * k,
                               ggml_tensor * v, const attention_inputs & in) {
    const int64_t width   = s.head_dim * s.n_head_kv;
    ggml_tensor * k_cache = b.dense_weight(s.cache, width, s.n_ctx);
    ggml_tensor * v_cache = b.dense_weight(s.cache, width, s.n_ctx);
    ggml_tensor * q_rot   = rope(b, s, q, s.n_head, in);
    ggml_tensor * k_rot   = rope(b, s, k, s.n_head_kv, in);
    if (ggml_is_quantized(s.cache)) {
        ggml_tensor * matrix = b.input(GGML_TYPE_F32, s.head_dim, s.head_dim);
        q_rot = turned(b, q_rot, matrix), k_rot = turned(b, k_rot, matrix);
        v = turned(b, v, b.input(GGML_TYPE_F32, 64, 64));
    }
    b.expand(q_rot);
    b.expand(v);
    b.expand(k_rot);
    ggml_tensor * k_rows = ggml_view_2d(b.ctx, k_rot, width, s.n_tokens, k_rot->nb[2], 0);
    b.expand(ggml_set_rows(b.ctx, k_cache, k_rows, in.ids));
    b.expand(ggml_set_rows(b.ctx, v_cache, v, in.ids));
    const auto heads_of = [&](ggml_tensor * cache) {
        ggml_tensor * heads = ggml_view_3d(b.ctx, cache, s.head_dim, s.n_head_kv, s.n_ctx,
                                           ggml_row_size(s.cache, s.head_dim), cache->nb[1], 0);
        return ggml_permute(b.ctx, heads, 0, 2, 1, 3);
    };
    ggml_tensor * result =
        ggml_flash_attn_ext(b.ctx, ggml_permute(b.ctx, q_rot, 0, 2, 1, 3), heads_of(k_cache), heads_of(v_cache),
                            in.mask, 1.0f / std::sqrt(static_cast<float>(s.head_dim)), 0.0f, 0.0f);
    return ggml_reshape_2d(b.ctx, result, s.head_dim * s.n_head, s.n_tokens);
}

inline ggml_tensor * swiglu(graph_builder & b, const model_shape & s, ggml_tensor * x, int kind_up = 0) {
    ggml_tensor * gate = ggml_mul_mat(b.ctx, b.sparse_weight("gate", s.n_embd, s.n_ff), x);
    b.expand(gate);
    ggml_tensor * up = ggml_mul_mat(b.ctx, b.sparse_weight("up", s.n_embd, s.n_ff, 1, kind_up), x);
    b.expand(up);
    return ggml_mul_mat(b.ctx, b.sparse_weight("down", s.n_ff, s.n_embd), ggml_swiglu_split(b.ctx, gate, up));
}
