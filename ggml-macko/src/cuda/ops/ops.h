// The operations of a ggml graph on the GPU, as plain functions of strided tensors. A host header without ggml and
// device code.
//
// Every function queues its work on the context's stream and returns the CUDA status of the launches. It allocates
// nothing and does not synchronize, so a CUDA graph can capture it. The *_supported predicate of a function tells which
// operands it accepts; it is pure and depends only on types and shapes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace macko::cuda {

// ggml's type ids
enum tensor_type : int32_t {
    TYPE_F32    = 0,
    TYPE_F16    = 1,
    TYPE_Q4_0   = 2,
    TYPE_Q4_1   = 3,
    TYPE_Q5_0   = 6,
    TYPE_Q5_1   = 7,
    TYPE_Q8_0   = 8,
    TYPE_Q2_K   = 10,
    TYPE_Q3_K   = 11,
    TYPE_Q4_K   = 12,
    TYPE_Q5_K   = 13,
    TYPE_Q6_K   = 14,
    TYPE_IQ4_NL = 20,
    TYPE_I32    = 26,
    TYPE_I64    = 27,
    TYPE_BF16   = 30,
    TYPE_MXFP4  = 39,
};

// A tensor like ggml's: ne[0] is the row length, nb are strides in bytes. data may be null in the *_supported
// predicates.
struct op_tensor {
    char *      data;
    tensor_type type;
    int64_t     ne[4];
    int64_t     nb[4];

    int64_t n_rows() const { return ne[1] * ne[2] * ne[3]; }
    int64_t n_elements() const { return ne[0] * n_rows(); }
};

struct cublas_library; // cuda/lib/cublas.h

constexpr int N_COUNTERS = 1 << 14;

struct op_context {
    cudaStream_t     stream        = nullptr;
    int              cc            = 0; // op_compute_capability()
    int              n_sm          = 0;
    int              shared_nbytes = 0;       // maximum for one block
    unsigned *       counters      = nullptr; // N_COUNTERS zeros on the GPU; kernels leave zeros behind
    bool             overlap       = false;   // programmatic dependent launch (cc >= 90): see ops/common.cuh
    cublas_library * cublas        = nullptr; // null if cuBLAS is not installed
    // CUBLAS_WORKSPACE_NBYTES bytes; cuBLAS's own workspace cannot be captured
    void * cublas_workspace = nullptr;
    // see cuda/graph/graph.h; null: sparse weights are never made dense, for any number of columns
    const struct panel_buffers * panels = nullptr;
    // shared by all nodes, one after the other; null: each node has its own after its result
    char * scratch = nullptr;
};

// Compute capability * 10 of the code for the current device (90 = Hopper). It is less than the device's if the code
// comes from PTX of an older architecture.
cudaError_t op_compute_capability(int * cc);

int64_t type_block_size(tensor_type type); // elements per block: 1, 32 or 256
int64_t type_block_nbytes(tensor_type type);
bool    type_is_weight(tensor_type type); // matrix products, get_rows and copies can read it
bool    type_can_store(tensor_type type); // a KV cache can have it: copies write it, and attention reads it

inline bool is_contiguous_rows(const op_tensor & t) { return t.nb[0] == type_block_nbytes(t.type); }
bool        is_contiguous(const op_tensor & t);
inline bool same_shape(const op_tensor & a, const op_tensor & b) {
    return a.ne[0] == b.ne[0] && a.ne[1] == b.ne[1] && a.ne[2] == b.ne[2] && a.ne[3] == b.ne[3];
}

// ---- small writes from host memory (writes.cu) ----

// Copies the inputs of a token to the GPU in one launch, whose parameters contain the bytes.
struct small_writes {
    static constexpr int    MAX        = 16;
    static constexpr size_t MAX_NBYTES = 3584; // of all writes; every GPU accepts 4 KiB of parameters
    struct write {
        char *   dst;
        uint32_t at, nbytes;
    };
    write    writes[MAX];
    uint32_t n = 0, nbytes = 0;
    uint32_t data[MAX_NBYTES / 4];

    // returns false if the write does not fit
    bool add(void * dst, const void * src, size_t size);
};
// If writes overlap, later ones win.
cudaError_t op_small_writes(const small_writes & w, cudaStream_t stream);

// ---- elementwise (elementwise.cu); dst may be one of the sources ----

// Lists of ops: X(NAME) for each. cuda/graph/adapters.cpp adds the prefix of ggml's name.
#define MACKO_ENUMERATOR(NAME) NAME,

#define MACKO_BINARY_OPS(X) X(ADD) X(SUB) X(MUL) X(DIV)
enum class binary_op : int { MACKO_BINARY_OPS(MACKO_ENUMERATOR) };
bool op_binary_supported(binary_op op, const op_tensor & a, const op_tensor & b, const op_tensor & dst);
// a op b, with b repeated to the shape of a.
cudaError_t op_binary(const op_context & ctx, binary_op op, const op_tensor & a, const op_tensor & b,
                      const op_tensor & dst);

// clang-format off
#define MACKO_UNARY_OPS(X) \
    X(ABS) X(SGN) X(NEG) X(STEP) X(TANH) X(ELU) X(RELU) X(SIGMOID) X(GELU) X(GELU_QUICK) X(SILU) X(HARDSWISH) \
    X(HARDSIGMOID) X(EXP) X(EXPM1) X(SOFTPLUS) X(GELU_ERF) X(XIELU) X(FLOOR) X(CEIL) X(ROUND) X(TRUNC)
// clang-format on
#define MACKO_ONE_SOURCE_OPS(X) X(SQR) X(SQRT) X(LOG) X(SIN) X(COS) X(SCALE) X(CLAMP) X(FILL)
enum class unary_op : int { MACKO_UNARY_OPS(MACKO_ENUMERATOR) MACKO_ONE_SOURCE_OPS(MACKO_ENUMERATOR) };
struct unary_params {
    unary_op op;
    float    p[4]; // SCALE: x * p[0] + p[1]; CLAMP: to p[0] ... p[1]; FILL: p[0]; XIELU: alpha_n, alpha_p, beta, eps
};
bool        op_unary_supported(const op_tensor & x, const op_tensor & dst);
cudaError_t op_unary(const op_context & ctx, const unary_params & p, const op_tensor & x, const op_tensor & dst);
// dst[i] = start + i * step
bool        op_arange_supported(const op_tensor & dst);
cudaError_t op_arange(const op_context & ctx, float start, float step, const op_tensor & dst);

#define MACKO_GLU_OPS(X) X(REGLU) X(GEGLU) X(SWIGLU) X(SWIGLU_OAI) X(GEGLU_ERF) X(GEGLU_QUICK) X(SWIGLU_CLAMP)
enum class glu_op : int { MACKO_GLU_OPS(MACKO_ENUMERATOR) };
struct glu_params {
    glu_op op;
    bool   swapped; // without up: the gate is the second half of the row
    float  alpha;   // SWIGLU_OAI
    float  limit;   // SWIGLU_OAI, SWIGLU_CLAMP
};
// up == nullptr: gate and up are the halves of x's rows.
bool        op_glu_supported(const op_tensor & x, const op_tensor * up, const op_tensor & dst);
cudaError_t op_glu(const op_context & ctx, const glu_params & p, const op_tensor & x, const op_tensor * up,
                   const op_tensor & dst);

// dst[:, i1, i2] = x[:, i1, i2] + bias[:, ids[i1, i2]]
bool op_add_id_supported(const op_tensor & x, const op_tensor & bias, const op_tensor & ids, const op_tensor & dst);
cudaError_t op_add_id(const op_context & ctx, const op_tensor & x, const op_tensor & bias, const op_tensor & ids,
                      const op_tensor & dst);

// Hyper-connections mix `streams` copies of the residual: x, residual: [width, streams, tokens].
//   comb   a matrix [streams, streams] for each token, whose rows and columns sum to about 1 after n_iter steps, from
//          the softmax of mixes[2 * streams ...] * scale[2] + base[2 * streams ...]; four streams
//   pre    dst[i, t] = factor * sum of x[i, h, t] weights[h, t] over h; gated: of x sigmoid(weights), with x's shape
//   post   dst[i, h, t] = x[i, t] post[h, t] + sum of residual[i, k, t] comb[h, k, t] over k; without comb, residual
bool        op_hc_comb_supported(const op_tensor & mixes, const op_tensor & scale, const op_tensor & base,
                                 const op_tensor & dst);
cudaError_t op_hc_comb(const op_context & ctx, float eps, int n_iter, const op_tensor & mixes, const op_tensor & scale,
                       const op_tensor & base, const op_tensor & dst);
bool        op_hc_pre_supported(bool gated, const op_tensor & x, const op_tensor & weights, const op_tensor & dst);
cudaError_t op_hc_pre(const op_context & ctx, bool gated, float factor, const op_tensor & x, const op_tensor & weights,
                      const op_tensor & dst);
bool        op_hc_post_supported(const op_tensor & x, const op_tensor & residual, const op_tensor & post,
                                 const op_tensor * comb, const op_tensor & dst);
cudaError_t op_hc_post(const op_context & ctx, const op_tensor & x, const op_tensor & residual, const op_tensor & post,
                       const op_tensor * comb, const op_tensor & dst);

// ---- rows of tables, copies and casts (rows.cu) ----

// Equal number of elements, any strides; one type, or f32 to or from a type that a KV cache can have.
bool        op_copy_supported(const op_tensor & src, const op_tensor & dst);
cudaError_t op_copy(const op_context & ctx, const op_tensor & src, const op_tensor & dst);
// a, then b along dimension dim
bool        op_concat_supported(int dim, const op_tensor & a, const op_tensor & b, const op_tensor & dst);
cudaError_t op_concat(const op_context & ctx, int dim, const op_tensor & a, const op_tensor & b, const op_tensor & dst);
// dst[i] = src[i % src.ne] in each dimension
bool        op_repeat_supported(const op_tensor & src, const op_tensor & dst);
cudaError_t op_repeat(const op_context & ctx, const op_tensor & src, const op_tensor & dst);
bool        op_get_rows_supported(const op_tensor & src, const op_tensor & ids, const op_tensor & dst);
cudaError_t op_get_rows(const op_context & ctx, const op_tensor & src, const op_tensor & ids, const op_tensor & dst);
bool        op_set_rows_supported(const op_tensor & src, const op_tensor & ids, const op_tensor & dst);
cudaError_t op_set_rows(const op_context & ctx, const op_tensor & src, const op_tensor & ids, const op_tensor & dst);

// ---- reductions along rows (norm.cu) ----

// dst = x / sqrt(mean(x^2) + eps) * scale; scale (null: 1) is repeated as in op_binary. With add, x is x + add, and the
// sum is also stored to `sum`.
struct rms_norm_params {
    op_tensor         x;
    op_tensor         dst;
    const op_tensor * scale = nullptr;
    const op_tensor * add   = nullptr; // same shape as x, contiguous
    const op_tensor * sum   = nullptr;
    float             eps   = 0;
};
bool        op_rms_norm_supported(const rms_norm_params & p);
cudaError_t op_rms_norm(const op_context & ctx, const rms_norm_params & p);
// dst = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps), or x / max(|x|, eps)
enum class row_norm : int { LAYER, L2 };
bool        op_row_norm_supported(row_norm kind, const op_tensor & x, const op_tensor & dst);
cudaError_t op_row_norm(const op_context & ctx, row_norm kind, float eps, const op_tensor & x, const op_tensor & dst);
bool op_soft_max_supported(const op_tensor & x, const op_tensor * mask, const op_tensor * sinks, const op_tensor & dst);
cudaError_t op_soft_max(const op_context & ctx, float scale, float max_bias, const op_tensor & x,
                        const op_tensor * mask, const op_tensor * sinks, const op_tensor & dst);
bool        op_sum_rows_supported(const op_tensor & x, const op_tensor & dst);
cudaError_t op_sum_rows(const op_context & ctx, const op_tensor & x, const op_tensor & dst);
cudaError_t op_mean_rows(const op_context & ctx, const op_tensor & x, const op_tensor & dst); // like op_sum_rows
bool        op_argsort_supported(const op_tensor & x, const op_tensor & dst);
cudaError_t op_argsort(const op_context & ctx, bool descending, const op_tensor & x, const op_tensor & dst);

// ---- mixtures of experts (experts.cu), f32 ----

// The choice of a router. p = x, or its soft-max or sigmoid; ids: of the largest p + bias, in descending order, equal
// ones in ascending order; w: p of these. Then, if asked for, w = soft-max of w, and w = w / clamp(sum of w). weights =
// w * scale[0] + scale[1]. Same bits as the single ops; the order of NaN is another.
enum class router_gate : int { NONE, SOFT_MAX, SIGMOID };
struct router_params {
    op_tensor     x;       // [experts, tokens]
    op_tensor     ids;     // [used, tokens], rows may have gaps
    op_tensor     weights; // used * tokens elements without gaps
    const float * bias = nullptr;
    router_gate   gate;
    bool          soft_max, norm;
    float         clamp[2];
    float         scale[2] = { 1, -0.0f }; // changes nothing, not even the sign of zero
};
bool        op_router_supported(const router_params & p);
cudaError_t op_router(const op_context & ctx, const router_params & p);
// dst[:, t] = x[:, 0, t] weights[0, 0, t] + x[:, 1, t] weights[0, 1, t] + ..., each product and sum rounded, and then
// + residual[:, t], which may be dst, or null
bool        op_expert_sum_supported(const op_tensor & x, const op_tensor & weights, const op_tensor * residual,
                                    const op_tensor & dst);
cudaError_t op_expert_sum(const op_context & ctx, const op_tensor & x, const op_tensor & weights,
                          const op_tensor * residual, const op_tensor & dst);

// ---- recurrent layers (recurrent.cu), f32 ----

// dst[r, t, s] = sum of x[t + k, r, s] weights[k, r] over k
bool        op_ssm_conv_supported(const op_tensor & x, const op_tensor & weights, const op_tensor & dst);
cudaError_t op_ssm_conv(const op_context & ctx, const op_tensor & x, const op_tensor & weights, const op_tensor & dst);
// Mamba. In each row of a head, for each token, with the row of ids[sequence] as the first state:
//     state = state exp(softplus(dt) a) + b x softplus(dt),  y = state . c
// state: [size, dim, heads, states]; x: [dim, heads, tokens, sequences]; dt: [heads, tokens, sequences]; a: [1 or size,
// heads]; b, c: [size, groups, tokens, sequences]. dst has y, like x, and then snapshots of all states: after the last
// token, after the one before, and so on.
bool op_ssm_scan_supported(const op_tensor & state, const op_tensor & x, const op_tensor & dt, const op_tensor & a,
                           const op_tensor & b, const op_tensor & c, const op_tensor & ids, const op_tensor & dst);
cudaError_t op_ssm_scan(const op_context & ctx, const op_tensor & state, const op_tensor & x, const op_tensor & dt,
                        const op_tensor & a, const op_tensor & b, const op_tensor & c, const op_tensor & ids,
                        const op_tensor & dst);
// A gated delta network. In each head, for each token, with matrices S of size x size, stored transposed:
//     S = diag(exp(g)) S,  S = S + k ((v - S^T k) beta)^T,  y = S^T q / sqrt(size)
// q, k: [size, heads or a divisor, tokens, sequences or a divisor]; v: [size, heads, tokens, sequences]; g: [1 or size,
// heads, tokens, sequences]; beta: [1, heads, tokens, sequences]. dst as in op_ssm_scan.
bool op_gated_delta_net_supported(const op_tensor & q, const op_tensor & k, const op_tensor & v, const op_tensor & g,
                                  const op_tensor & beta, const op_tensor & state, const op_tensor & dst);
cudaError_t op_gated_delta_net(const op_context & ctx, const op_tensor & q, const op_tensor & k, const op_tensor & v,
                               const op_tensor & g, const op_tensor & beta, const op_tensor & state,
                               const op_tensor & dst);
// RWKV and gated linear attention. Inputs are [size, heads, tokens of all sequences], first is [size, heads], and dst
// has y and then the states: a matrix S of size x size for each head and sequence, stored transposed in RWKV 7.
//     RWKV 6                    y = r^T (S + diag(first) k v^T),  S = diag(decay) S + k v^T
//     gated linear attention    S = diag(gate) S + k v^T,  y = scale q^T S
//     RWKV 7                    S = diag(decay) S + k v^T + b (a^T S),  y = r^T S
bool        op_rwkv6_supported(const op_tensor & k, const op_tensor & v, const op_tensor & r, const op_tensor & first,
                               const op_tensor & decay, const op_tensor & state, const op_tensor & dst);
cudaError_t op_rwkv6(const op_context & ctx, const op_tensor & k, const op_tensor & v, const op_tensor & r,
                     const op_tensor & first, const op_tensor & decay, const op_tensor & state, const op_tensor & dst);
bool        op_gated_linear_attention_supported(const op_tensor & k, const op_tensor & v, const op_tensor & q,
                                                const op_tensor & gate, const op_tensor & state, const op_tensor & dst);
cudaError_t op_gated_linear_attention(const op_context & ctx, float scale, const op_tensor & k, const op_tensor & v,
                                      const op_tensor & q, const op_tensor & gate, const op_tensor & state,
                                      const op_tensor & dst);

bool op_rwkv7_supported(const op_tensor & r, const op_tensor & decay, const op_tensor & k, const op_tensor & v,
                        const op_tensor & a, const op_tensor & b, const op_tensor & state, const op_tensor & dst);

cudaError_t op_rwkv7(const op_context & ctx, const op_tensor & r, const op_tensor & decay, const op_tensor & k,
                     const op_tensor & v, const op_tensor & a, const op_tensor & b, const op_tensor & state,
                     const op_tensor & dst);

// ---- the choice of keys for sparse attention (indexer.cu) ----

// dst[i, t, 0, s] = sum of max(0, q[:, h, t, s] . k[:, 0, i, s]) weights[h, t, 0, s] over h, plus the f16 mask[i, t]
bool        op_indexer_scores_supported(const op_tensor & q, const op_tensor & k, const op_tensor & weights,
                                        const op_tensor & mask, const op_tensor & dst);
cudaError_t op_indexer_scores(const op_context & ctx, const op_tensor & q, const op_tensor & k,
                              const op_tensor & weights, const op_tensor & mask, const op_tensor & dst);
// dst: the positions of the dst.ne[0] largest elements of each row. Equal elements are taken from the left. The order
// in dst has no meaning.
bool        op_top_k_supported(const op_tensor & x, const op_tensor & dst);
cudaError_t op_top_k(const op_context & ctx, const op_tensor & x, const op_tensor & dst);
// The maximum, or the sum divided by the size, of windows in dimensions 0 and 1; elements outside x do not count.
struct pool_params {
    bool maximum;
    int  size[2], stride[2], padding[2];
};
bool        op_pool_supported(const pool_params & p, const op_tensor & x, const op_tensor & dst);
cudaError_t op_pool(const op_context & ctx, const pool_params & p, const op_tensor & x, const op_tensor & dst);

// ---- rotary embedding (rope.cu) ----

struct rope_params {
    int   n_dims;
    int   mode; // like ggml: 0 neighbors are a pair, 2 halves (NEOX), 8 MROPE, 40 IMROPE, 24 VISION
    int   sections[4];
    int   n_ctx_orig;
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    int   offset;  // of the first rotated element in a row
    bool  inverse; // rotates back
};
bool op_rope_supported(const rope_params & p, const op_tensor & x, const op_tensor & pos, const op_tensor * factors,
                       const op_tensor & dst);
cudaError_t op_rope(const op_context & ctx, const rope_params & p, const op_tensor & x, const op_tensor & pos,
                    const op_tensor * factors, const op_tensor & dst);

// Three operations of a decoder layer in one launch, for F16 caches: rotates q into q_dst, rotates k into row k_ids[t]
// of k_cache, and copies v to row v_ids[t] of v_cache. The heads of k fill a row of the cache without gaps.
struct rope_cache_params {
    op_tensor       q, q_dst; // [head_dim, heads, tokens]
    op_tensor       k, k_cache;
    op_tensor       v, v_cache; // v: [width, tokens]
    const int64_t * k_ids;      // on the GPU
    const int64_t * v_ids;
};
bool        op_rope_cache_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                                    const rope_cache_params & p);
cudaError_t op_rope_cache(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                          const op_tensor * factors, const rope_cache_params & p);
// The same for quantized caches, with Hadamard products (op_hadamard) of each rotated head of q and k, and of each
// v_size elements of v. q is stored; k and v are quantized. v: [head_dim, heads, tokens], with heads as large as k's.
// No kernel on the stream may write pos or factors.
bool        op_rope_hadamard_cache_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                                             const rope_cache_params & p, int64_t v_size);
cudaError_t op_rope_hadamard_cache(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                                   const op_tensor * factors, const rope_cache_params & p, int64_t v_size);

// ---- products with a Hadamard matrix (hadamard.cu) ----

// dst[:, r] = H x[:, r], where H is Sylvester's Hadamard matrix divided by the square root of its size.
bool        op_hadamard_supported(const op_tensor & x, const op_tensor & dst);
cudaError_t op_hadamard(const op_context & ctx, const op_tensor & x, const op_tensor & dst);

// ---- matrix products with dense weights (mul-mat.cu) ----

// dst[n, m] = w[m, :] . x[n, :], w broadcast over dimensions 2 and 3
bool op_mul_mat_supported(const op_tensor & w, const op_tensor & x, const op_tensor & dst);
// x16: the result of op_mul_mat_x16; null: made in scratch if the product needs it. constant: no earlier kernel on the
// stream writes w, so w may be read while these kernels run.
cudaError_t op_mul_mat(const op_context & ctx, const op_tensor & w, const op_tensor & x, const op_tensor & dst,
                       char * scratch, const char * x16 = nullptr, bool constant = false);
size_t      op_mul_mat_scratch_nbytes(const op_tensor & w, const op_tensor & x);
// Up to 8 columns with quantized weights (mul-mat-quantized.cu), for op_mul_mat. The operands meet
// op_mul_mat_supported.
bool        op_mul_mat_quantized_supported(const op_context & ctx, const op_tensor & w, const op_tensor & x);
cudaError_t op_mul_mat_quantized(const op_context & ctx, const op_tensor & w, const op_tensor & x,
                                 const op_tensor & dst, bool constant);
// Products in two steps, for several matrices with one x, and for matrices that are made dense panel by panel:
//   op_mul_mat_16_type   the 16-bit type for products of many columns with such weights
//   op_mul_mat_x16       converts x to it (op_mul_mat_x16_nbytes)
//   op_mul_mat_16        computes rows [first_row, first_row + rows) of dst from rows of w in that type, ldw elements
//                        apart. scratch: op_mul_mat_16_scratch_nbytes; x16 may be its first part. Without tensor cores
//                        for that type it overwrites w.
tensor_type op_mul_mat_16_type(tensor_type weights);
size_t      op_mul_mat_x16_nbytes(const op_tensor & x);
size_t      op_mul_mat_16_scratch_nbytes(const op_tensor & w, const op_tensor & x);
cudaError_t op_mul_mat_x16(const op_context & ctx, tensor_type type, const op_tensor & x, char * x16);
cudaError_t op_mul_mat_16(const op_context & ctx, tensor_type type, char * w, int64_t ldw, int64_t rows,
                          const op_tensor & x, const char * x16, const op_tensor & dst, int64_t first_row,
                          char * scratch);
// Whether this GPU multiplies 16-bit values of the type on tensor cores: from cc 8.0 on both types, before only F16.
bool op_mul_mat_has_units(const op_context & ctx, tensor_type type);
// Whether op_mul_mat reads x16.
bool op_mul_mat_wants_x16(const op_context & ctx, const op_tensor & w, const op_tensor & x);
// Maximum bytes of a panel on a GPU with memory_nbytes bytes of memory: whole matrices of common models, so that the
// tiles of their product fill the GPU like those of dense weights; at most 1/512 of the memory.
constexpr size_t op_mul_mat_max_panel_nbytes(size_t memory_nbytes) {
    constexpr size_t MOST = size_t(96) << 20, SHARE = 512;
    return memory_nbytes / SHARE < MOST ? memory_nbytes / SHARE : MOST;
}
// Rows of a panel of at most panel_nbytes; all panels of a matrix have equal size.
int64_t op_mul_mat_panel_rows(int64_t rows, int64_t cols, int64_t panel_nbytes);
// dst[:, u, t] = w[ids[u, t]] x[:, u % x.ne[1], t]
bool op_mul_mat_id_supported(const op_tensor & w, const op_tensor & x, const op_tensor & ids, const op_tensor & dst);
cudaError_t op_mul_mat_id(const op_context & ctx, const op_tensor & w, const op_tensor & x, const op_tensor & ids,
                          const op_tensor & dst, char * scratch);
size_t      op_mul_mat_id_scratch_nbytes(const op_tensor & w, const op_tensor & x, const op_tensor & ids);
// The same in two steps, for experts that are made dense panel by panel. First the list of tokens per expert is written
// to scratch. Then rows of consecutive experts are multiplied: w has the type of op_mul_mat_16_type, which tensor cores
// must support, and holds w.ne[1] rows, from first_row on, of each of w.ne[2] experts, from first_expert on.
cudaError_t op_mul_mat_id_sort(const op_context & ctx, int64_t n_experts, const op_tensor & ids, char * scratch);
cudaError_t op_mul_mat_id_16(const op_context & ctx, const op_tensor & w, int64_t first_expert, int64_t n_experts,
                             const op_tensor & x, const op_tensor & ids, const op_tensor & dst, int64_t first_row,
                             const char * scratch);
// The same for each expert separately (expert-rows.cu), for callers with the number of tokens of each expert: the first
// n_experts + 1 numbers (int) that op_mul_mat_id_sort leaves in scratch, as running sums (`lists`). gather: rows of x,
// grouped by expert, op_expert_rows_ld(width) elements apart; the first row of an expert is 4 bytes per preceding
// element from the start. They stay float32 if an expert has at most max_f32 rows, and otherwise become `type` (F16,
// BF16). scatter: dst from results in the same order, dst.ne[0] floats each.
int64_t     op_expert_rows_ld(int64_t width);
cudaError_t op_gather_expert_rows(const op_context & ctx, tensor_type type, const op_tensor & x, const op_tensor & ids,
                                  int64_t n_experts, const char * lists, int64_t max_f32, char * rows);
cudaError_t op_scatter_expert_rows(const op_context & ctx, const char * rows, const op_tensor & ids, int64_t n_experts,
                                   const char * lists, const op_tensor & dst);

// ---- attention (attention.cu) ----

// dst = softmax(scale * K q + mask) V per head; q, k, v: [head_dim, tokens, heads, streams]
struct attention_params {
    op_tensor         q, k, v, dst;
    const op_tensor * mask  = nullptr; // f16
    const op_tensor * sinks = nullptr; // f32 per head
    float             scale, max_bias, softcap;
};
bool        op_attention_supported(const attention_params & p);
cudaError_t op_attention(const op_context & ctx, const attention_params & p, char * scratch);
size_t      op_attention_scratch_nbytes(const attention_params & p);
// op_rope_cache for one token and the attention that reads its result, in one launch. c.q_dst is not written. No kernel
// on the stream may write pos, factors, the mask or the row numbers. dst must not overlap c.q, c.k or c.v.
bool        op_rope_attention_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                                        const rope_cache_params & c, const attention_params & p);
cudaError_t op_rope_attention(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                              const op_tensor * factors, const rope_cache_params & c, const attention_params & p,
                              char * scratch);

} // namespace macko::cuda
