// Stand-ins for cuda/ops, cuda/sparse and the CUDA runtime, so that cuda/graph runs without a GPU. Each call is logged,
// and nothing is computed. A test includes this file once.
#pragma once

#include "cuda/graph/graph.h"
#include "cuda/sparse/mul-mat.cuh"

#include <cstdarg>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace fake {

struct launch {
    std::string name;   // text that tests compare, such as "sparse q+k norm"
    std::string params; // all arguments of the call
};
inline std::vector<launch>                                    log;
inline std::map<const macko::cuda::gpu_layout *, std::string> matrix_names;
inline bool                                                   groups_experts = false;
inline int64_t                                                sparse_max_n   = 8;    // columns
inline bool                                                   supports       = true; // all predicates
inline std::vector<int>                                       expert_begin;          // result of op_mul_mat_id_sort

__attribute__((format(printf, 1, 2))) inline std::string text(const char * format, ...) {
    char    buffer[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    return buffer;
}

inline std::string text_of(const macko::cuda::op_tensor & t) {
    return text(" {%p t%d %lld,%lld,%lld,%lld %lld,%lld,%lld,%lld}", static_cast<void *>(t.data),
                static_cast<int>(t.type), static_cast<long long>(t.ne[0]), static_cast<long long>(t.ne[1]),
                static_cast<long long>(t.ne[2]), static_cast<long long>(t.ne[3]), static_cast<long long>(t.nb[0]),
                static_cast<long long>(t.nb[1]), static_cast<long long>(t.nb[2]), static_cast<long long>(t.nb[3]));
}
inline std::string text_of(const macko::cuda::op_tensor * t) { return t ? text_of(*t) : " -"; }
inline std::string text_of(const void * p) { return text(" %p", p); }
inline std::string text_of(int64_t v) { return text(" %lld", static_cast<long long>(v)); }
inline std::string text_of(int v) { return text(" %d", v); }
inline std::string text_of(bool v) { return text(" %d", static_cast<int>(v)); }
inline std::string text_of(float v) { return text(" %a", static_cast<double>(v)); }
inline std::string text_of(macko::cuda::tensor_type v) { return text(" t%d", static_cast<int>(v)); }
inline std::string text_of(const macko::cuda::rope_params & p) {
    return text(" rope %d %d %d,%d,%d,%d %d %a %a %a %a %a %a %d", p.n_dims, p.mode, p.sections[0], p.sections[1],
                p.sections[2], p.sections[3], p.n_ctx_orig, static_cast<double>(p.freq_base),
                static_cast<double>(p.freq_scale), static_cast<double>(p.ext_factor),
                static_cast<double>(p.attn_factor), static_cast<double>(p.beta_fast), static_cast<double>(p.beta_slow),
                p.offset) +
           text_of(p.inverse);
}
inline std::string text_of(const macko::cuda::rope_cache_params & p) {
    return text_of(p.q) + text_of(p.q_dst) + text_of(p.k) + text_of(p.k_cache) + text_of(p.v) + text_of(p.v_cache) +
           text_of(static_cast<const void *>(p.k_ids)) + text_of(static_cast<const void *>(p.v_ids));
}
inline std::string text_of(const macko::cuda::attention_params & p) {
    return text_of(p.q) + text_of(p.k) + text_of(p.v) + text_of(p.dst) + text_of(p.mask) + text_of(p.sinks) +
           text_of(p.scale) + text_of(p.max_bias) + text_of(p.softcap);
}

template <typename... ARGS> cudaError_t add(std::string name, const ARGS &... args) {
    log.push_back({ std::move(name), (std::string() + ... + text_of(args)) });
    return cudaSuccess;
}

inline const void * address(const char * p) { return p; }

} // namespace fake

// ---- the CUDA runtime ----

extern "C" {
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return fake::add("record", static_cast<const void *>(event), static_cast<const void *>(stream));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return fake::add("wait", static_cast<const void *>(event), static_cast<const void *>(stream));
}
cudaError_t cudaFree(void *) { return cudaSuccess; }
// The plugin copies only the numbers of tokens per expert.
cudaError_t cudaMemcpyAsync(void * to, const void *, size_t nbytes, cudaMemcpyKind, cudaStream_t) {
    memcpy(to, fake::expert_begin.data(), nbytes);
    return fake::add("read", static_cast<int64_t>(nbytes));
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return fake::add("synchronize"); }
}

namespace macko::cuda {

using fake::add;
using fake::address;

// ---- copies from the host ----

cudaError_t host_staging::copy(const staged_rows & rows, int n_threads, cudaStream_t stream,
                               const std::function<void(int64_t begin, int64_t end, void * memory)> & fill) {
    std::vector<char> memory(static_cast<size_t>(rows.n * rows.row_nbytes));
    fill(0, rows.n, memory.data());
    return add("stage", rows.dst, rows.row_nbytes, rows.row_pitch, rows.n, rows.step, n_threads,
               static_cast<const void *>(stream));
}

// ---- sparse products ----

int64_t cuda_sparse_mul_mat_max_n(const gpu_layout &, bool experts) {
    return experts ? 2 * fake::sparse_max_n : fake::sparse_max_n;
}

bool    cuda_sparse_groups_experts(const gpu_layout &, int64_t, int64_t) { return fake::groups_experts; }
int64_t cuda_sparse_groups_nbytes(int64_t, int64_t, int64_t) { return 0; }

cudaError_t cuda_sparse_mul_mat(const cuda_sparse_mul_mat_params & p, cudaStream_t stream) {
    std::string name = "sparse ", params;
    for (int i = 0; i < p.n_matrices; i++) {
        name += (i ? "+" : "") + fake::matrix_names[p.w[i]] + (p.bias[i] ? " bias" : "") +
                (p.residual[i] ? " residual" : "");
        params += fake::text_of(static_cast<const void *>(p.y[i])) + fake::text_of(p.ldy[i]) +
                  fake::text_of(static_cast<const void *>(p.bias[i])) +
                  fake::text_of(static_cast<const void *>(p.residual[i])) + fake::text_of(p.row_begin[i]) +
                  fake::text_of(p.row_end[i]);
    }
    name += (p.norm_weight ? " norm" : "") + std::string(p.silu_mul ? " silu" : "");
    cudaError_t error =
        add(std::move(name), static_cast<const void *>(p.x), p.ldx, p.n, static_cast<const void *>(p.x16),
            static_cast<const void *>(p.norm_weight), p.norm_eps, static_cast<const void *>(p.expert_ids),
            p.expert_ids_stride, p.expert_rows, p.programmatic, static_cast<const void *>(stream));
    fake::log.back().params += params;
    return error;
}

cudaError_t cuda_sparse_densify(const gpu_layout & w, int64_t row_begin, int64_t row_end, void * dst, int64_t ld,
                                cudaStream_t stream) {
    return add("densify " + fake::matrix_names[&w], row_begin, row_end, static_cast<const void *>(dst), ld,
               static_cast<const void *>(stream));
}

// ---- predicates ----

bool op_binary_supported(binary_op, const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_unary_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_glu_supported(const op_tensor &, const op_tensor *, const op_tensor &) { return fake::supports; }
bool op_add_id_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_copy_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_get_rows_supported(const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_set_rows_supported(const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_rms_norm_supported(const rms_norm_params &) { return fake::supports; }
bool op_soft_max_supported(const op_tensor &, const op_tensor *, const op_tensor *, const op_tensor &) {
    return fake::supports;
}
bool op_sum_rows_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_router_supported(const router_params &) { return fake::supports; }
bool op_expert_sum_supported(const op_tensor &, const op_tensor &, const op_tensor *, const op_tensor &) {
    return fake::supports;
}
bool op_row_norm_supported(row_norm, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_concat_supported(int, const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_repeat_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_ssm_conv_supported(const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_ssm_scan_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &,
                           const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_gated_delta_net_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &,
                                  const op_tensor &, const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_rwkv6_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &,
                        const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_rwkv7_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &,
                        const op_tensor &, const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_gated_linear_attention_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &,
                                         const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_arange_supported(const op_tensor &) { return fake::supports; }
bool op_hc_comb_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_hc_pre_supported(bool, const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_hc_post_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor *,
                          const op_tensor &) {
    return fake::supports;
}
bool op_indexer_scores_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &,
                                 const op_tensor &) {
    return fake::supports;
}
bool op_top_k_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_pool_supported(const pool_params &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_argsort_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_rope_supported(const rope_params &, const op_tensor &, const op_tensor &, const op_tensor *,
                       const op_tensor &) {
    return fake::supports;
}
bool op_rope_cache_supported(const rope_params &, const op_tensor &, const op_tensor *, const rope_cache_params &) {
    return fake::supports;
}
bool op_rope_hadamard_cache_supported(const rope_params &, const op_tensor &, const op_tensor *,
                                      const rope_cache_params &, int64_t) {
    return fake::supports;
}
bool op_hadamard_supported(const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_mul_mat_supported(const op_tensor &, const op_tensor &, const op_tensor &) { return fake::supports; }
bool op_mul_mat_id_supported(const op_tensor &, const op_tensor &, const op_tensor &, const op_tensor &) {
    return fake::supports;
}
bool op_attention_supported(const attention_params &) { return fake::supports; }
// Requires one token, like the real function.
bool op_rope_attention_supported(const rope_params &, const op_tensor &, const op_tensor *, const rope_cache_params &,
                                 const attention_params & p) {
    return fake::supports && p.q.ne[1] * p.q.ne[3] == 1;
}

// ---- sizes and choices ----

size_t  op_mul_mat_scratch_nbytes(const op_tensor &, const op_tensor &) { return 1; }
size_t  op_mul_mat_16_scratch_nbytes(const op_tensor &, const op_tensor &) { return 2; }
bool    op_mul_mat_has_units(const op_context &, tensor_type) { return true; }
size_t  op_mul_mat_id_scratch_nbytes(const op_tensor &, const op_tensor &, const op_tensor &) { return 3; }
size_t  op_attention_scratch_nbytes(const attention_params &) { return 4; }
int64_t op_mul_mat_panel_rows(int64_t rows, int64_t cols, int64_t panel_nbytes) {
    const int64_t most = panel_nbytes / (cols * 2);
    return rows < most ? rows : most > 0 ? most : rows;
}
tensor_type op_mul_mat_16_type(tensor_type weights) { return weights == TYPE_F16 ? TYPE_F16 : TYPE_BF16; }
bool        op_mul_mat_wants_x16(const op_context &, const op_tensor & w, const op_tensor & x) {
    return w.type != TYPE_F32 && x.ne[1] >= 16 && x.ne[2] * x.ne[3] == 1;
}

// ---- launches ----

cudaError_t op_binary(const op_context &, binary_op op, const op_tensor & a, const op_tensor & b,
                      const op_tensor & dst) {
    const char * names[] = { "add", "sub", "mul", "div" };
    return add(names[static_cast<int>(op)], a, b, dst);
}
cudaError_t op_unary(const op_context &, const unary_params & p, const op_tensor & x, const op_tensor & dst) {
    return add("unary", static_cast<int>(p.op), p.p[0], p.p[1], p.p[2], p.p[3], x, dst);
}
cudaError_t op_arange(const op_context &, float start, float step, const op_tensor & dst) {
    return add("arange", start, step, dst);
}
cudaError_t op_glu(const op_context &, const glu_params & p, const op_tensor & x, const op_tensor * up,
                   const op_tensor & dst) {
    return add("glu", static_cast<int>(p.op), p.swapped, p.alpha, p.limit, x, up, dst);
}
cudaError_t op_add_id(const op_context &, const op_tensor & x, const op_tensor & bias, const op_tensor & ids,
                      const op_tensor & dst) {
    return add("add_id", x, bias, ids, dst);
}
cudaError_t op_copy(const op_context &, const op_tensor & src, const op_tensor & dst) { return add("copy", src, dst); }
cudaError_t op_get_rows(const op_context &, const op_tensor & src, const op_tensor & ids, const op_tensor & dst) {
    return add("get_rows", src, ids, dst);
}
cudaError_t op_set_rows(const op_context &, const op_tensor & src, const op_tensor & ids, const op_tensor & dst) {
    return add("set_rows", src, ids, dst);
}
cudaError_t op_rms_norm(const op_context &, const rms_norm_params & p) {
    return add(std::string(p.add ? "add+" : "") + "rms_norm" + (p.scale ? "+mul" : ""), p.x, p.dst, p.scale, p.add,
               p.sum, p.eps);
}
cudaError_t op_soft_max(const op_context &, float scale, float max_bias, const op_tensor & x, const op_tensor * mask,
                        const op_tensor * sinks, const op_tensor & dst) {
    return add("soft_max", scale, max_bias, x, mask, sinks, dst);
}
cudaError_t op_sum_rows(const op_context &, const op_tensor & x, const op_tensor & dst) {
    return add("sum_rows", x, dst);
}
cudaError_t op_mean_rows(const op_context &, const op_tensor & x, const op_tensor & dst) { return add("mean", x, dst); }
cudaError_t op_router(const op_context &, const router_params & p) {
    const char * gates[] = { "router", "router soft_max", "router sigmoid" };
    return add(std::string(gates[static_cast<int>(p.gate)]) + (p.bias ? " bias" : "") + (p.soft_max ? " weights" : "") +
                   (p.norm ? " norm" : "") + (p.scale[0] != 1 ? " scale" : ""),
               p.x, p.ids, p.weights, p.clamp[0], p.clamp[1], p.scale[0], p.scale[1]);
}
cudaError_t op_expert_sum(const op_context &, const op_tensor & x, const op_tensor & weights,
                          const op_tensor * residual, const op_tensor & dst) {
    return add(residual ? "expert_sum residual" : "expert_sum", x, weights, residual, dst);
}
cudaError_t op_row_norm(const op_context &, row_norm kind, float eps, const op_tensor & x, const op_tensor & dst) {
    return add("row_norm", static_cast<int>(kind), eps, x, dst);
}
cudaError_t op_concat(const op_context &, int dim, const op_tensor & a, const op_tensor & b, const op_tensor & dst) {
    return add("concat", dim, a, b, dst);
}
cudaError_t op_repeat(const op_context &, const op_tensor & src, const op_tensor & dst) {
    return add("repeat", src, dst);
}
cudaError_t op_ssm_conv(const op_context &, const op_tensor & x, const op_tensor & weights, const op_tensor & dst) {
    return add("ssm_conv", x, weights, dst);
}
cudaError_t op_ssm_scan(const op_context &, const op_tensor & state, const op_tensor & x, const op_tensor & dt,
                        const op_tensor & a, const op_tensor & b, const op_tensor & c, const op_tensor & ids,
                        const op_tensor & dst) {
    return add("ssm_scan", state, x, dt, a, b, c, ids, dst);
}
cudaError_t op_gated_delta_net(const op_context &, const op_tensor & q, const op_tensor & k, const op_tensor & v,
                               const op_tensor & g, const op_tensor & beta, const op_tensor & state,
                               const op_tensor & dst) {
    return add("gated_delta_net", q, k, v, g, beta, state, dst);
}
cudaError_t op_rwkv6(const op_context &, const op_tensor & k, const op_tensor & v, const op_tensor & r,
                     const op_tensor & first, const op_tensor & decay, const op_tensor & state, const op_tensor & dst) {
    return add("rwkv6", k, v, r, first, decay, state, dst);
}
cudaError_t op_rwkv7(const op_context &, const op_tensor & r, const op_tensor & decay, const op_tensor & k,
                     const op_tensor & v, const op_tensor & a, const op_tensor & b, const op_tensor & state,
                     const op_tensor & dst) {
    return add("rwkv7", r, decay, k, v, a, b, state, dst);
}
cudaError_t op_gated_linear_attention(const op_context &, float scale, const op_tensor & k, const op_tensor & v,
                                      const op_tensor & q, const op_tensor & gate, const op_tensor & state,
                                      const op_tensor & dst) {
    return add("gated_linear_attention", scale, k, v, q, gate, state, dst);
}
cudaError_t op_hc_comb(const op_context &, float eps, int n_iter, const op_tensor & mixes, const op_tensor & scale,
                       const op_tensor & base, const op_tensor & dst) {
    return add("hc_comb", eps, n_iter, mixes, scale, base, dst);
}
cudaError_t op_hc_pre(const op_context &, bool gated, float factor, const op_tensor & x, const op_tensor & weights,
                      const op_tensor & dst) {
    return add("hc_pre", gated, factor, x, weights, dst);
}
cudaError_t op_hc_post(const op_context &, const op_tensor & x, const op_tensor & residual, const op_tensor & post,
                       const op_tensor * comb, const op_tensor & dst) {
    return add("hc_post", x, residual, post, comb, dst);
}
cudaError_t op_indexer_scores(const op_context &, const op_tensor & q, const op_tensor & k, const op_tensor & weights,
                              const op_tensor & mask, const op_tensor & dst) {
    return add("indexer_scores", q, k, weights, mask, dst);
}
cudaError_t op_top_k(const op_context &, const op_tensor & x, const op_tensor & dst) { return add("top_k", x, dst); }
cudaError_t op_pool(const op_context &, const pool_params & p, const op_tensor & x, const op_tensor & dst) {
    return add("pool", p.maximum, p.size[0], p.size[1], p.stride[0], p.stride[1], p.padding[0], p.padding[1], x, dst);
}
cudaError_t op_argsort(const op_context &, bool descending, const op_tensor & x, const op_tensor & dst) {
    return add("argsort", descending, x, dst);
}
cudaError_t op_rope(const op_context &, const rope_params & p, const op_tensor & x, const op_tensor & pos,
                    const op_tensor * factors, const op_tensor & dst) {
    return add("rope", p, x, pos, factors, dst);
}
cudaError_t op_rope_cache(const op_context &, const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                          const rope_cache_params & p) {
    return add(p.q.ne[1] ? "rope_cache" : "rope_cache k", r, pos, factors, p);
}
cudaError_t op_rope_hadamard_cache(const op_context &, const rope_params & r, const op_tensor & pos,
                                   const op_tensor * factors, const rope_cache_params & p, int64_t v_size) {
    return add("rope_hadamard_cache", r, pos, factors, p, v_size);
}
cudaError_t op_attention(const op_context &, const attention_params & p, char * scratch) {
    return add("attention", p, address(scratch));
}
cudaError_t op_rope_attention(const op_context &, const rope_params & r, const op_tensor & pos,
                              const op_tensor * factors, const rope_cache_params & c, const attention_params & p,
                              char * scratch) {
    return add("rope_attention", r, pos, factors, c, p, address(scratch));
}
cudaError_t op_hadamard(const op_context &, const op_tensor & x, const op_tensor & dst) {
    return add("hadamard", x, dst);
}
cudaError_t op_mul_mat(const op_context &, const op_tensor & w, const op_tensor & x, const op_tensor & dst,
                       char * scratch, const char * x16, bool constant) {
    return add("mul_mat", w, x, dst, address(scratch), address(x16), constant);
}
cudaError_t op_mul_mat_x16(const op_context &, tensor_type type, const op_tensor & x, char * x16) {
    return add("x16", type, x, address(x16));
}
cudaError_t op_mul_mat_16(const op_context &, tensor_type type, char * w, int64_t ldw, int64_t rows,
                          const op_tensor & x, const char * x16, const op_tensor & dst, int64_t first_row,
                          char * scratch) {
    return add("mul_mat_16", type, w, ldw, rows, x, address(x16), dst, first_row, address(scratch));
}
cudaError_t op_mul_mat_id(const op_context &, const op_tensor & w, const op_tensor & x, const op_tensor & ids,
                          const op_tensor & dst, char * scratch) {
    return add("mul_mat_id", w, x, ids, dst, address(scratch));
}
cudaError_t op_mul_mat_id_sort(const op_context &, int64_t n_experts, const op_tensor & ids, char * scratch) {
    return add("mul_mat_id_sort", n_experts, ids, address(scratch));
}
int64_t     op_expert_rows_ld(int64_t width) { return width; }
cudaError_t op_gather_expert_rows(const op_context &, tensor_type, const op_tensor & x, const op_tensor & ids,
                                  int64_t n_experts, const char * lists, int64_t max_f32, char * rows) {
    return add("gather_expert_rows", x, ids, n_experts, address(lists), max_f32, address(rows));
}
cudaError_t op_scatter_expert_rows(const op_context &, const char * rows, const op_tensor & ids, int64_t n_experts,
                                   const char * lists, const op_tensor & dst) {
    return add("scatter_expert_rows", address(rows), ids, n_experts, address(lists), dst);
}
cudaError_t op_mul_mat_id_16(const op_context &, const op_tensor & w, int64_t first_expert, int64_t n_experts,
                             const op_tensor & x, const op_tensor & ids, const op_tensor & dst, int64_t first_row,
                             const char * scratch) {
    return add("mul_mat_id_16", w, first_expert, n_experts, x, ids, dst, first_row, address(scratch));
}

} // namespace macko::cuda
