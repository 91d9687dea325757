// To add an op, add its functions below and a row in OP_TABLE. The kernels are in cuda/ops.
#include "cuda/graph/op-table.h"

#include "cuda/graph/adapters.h"
#include "cuda/graph/sparse-products.h"
#include "cuda/lib/common.cuh"

#include <algorithm>
#include <array>
#include <tuple>

namespace macko::cuda {

namespace {

// ---- ops with few parameters ----

// src[0] ... src[N - 1] and the result
template <size_t N> std::array<op_tensor, N + 1> operands(const ggml_tensor * op) {
    std::array<op_tensor, N + 1> all;
    std::transform(op->src, op->src + N, all.begin(), operand);
    all[N] = operand(op);
    return all;
}
template <auto SUPPORTED, size_t N> bool supports(const ggml_tensor * op) {
    return std::apply(SUPPORTED, operands<N>(op));
}
template <auto OP, size_t N> cudaError_t enqueue(panel_pipeline & panels, ggml_tensor * node) {
    return std::apply([&](const auto &... t) { return OP(panels.ctx, t...); }, operands<N>(node));
}

constexpr auto add_id_supported     = supports<op_add_id_supported, 3>;
constexpr auto enqueue_add_id       = enqueue<op_add_id, 3>;
constexpr auto copy_supported       = supports<op_copy_supported, 1>;
constexpr auto enqueue_copy         = enqueue<op_copy, 1>;
constexpr auto get_rows_supported   = supports<op_get_rows_supported, 2>;
constexpr auto enqueue_get_rows     = enqueue<op_get_rows, 2>;
constexpr auto set_rows_supported   = supports<op_set_rows_supported, 2>;
constexpr auto enqueue_set_rows     = enqueue<op_set_rows, 2>;
constexpr auto sum_rows_supported   = supports<op_sum_rows_supported, 1>;
constexpr auto enqueue_sum_rows     = enqueue<op_sum_rows, 1>;
constexpr auto enqueue_mean         = enqueue<op_mean_rows, 1>;
constexpr auto repeat_supported     = supports<op_repeat_supported, 1>;
constexpr auto enqueue_repeat       = enqueue<op_repeat, 1>;
constexpr auto ssm_conv_supported   = supports<op_ssm_conv_supported, 2>;
constexpr auto enqueue_ssm_conv     = enqueue<op_ssm_conv, 2>;
constexpr auto ssm_scan_supported   = supports<op_ssm_scan_supported, 7>;
constexpr auto enqueue_ssm_scan     = enqueue<op_ssm_scan, 7>;
constexpr auto delta_net_supported  = supports<op_gated_delta_net_supported, 6>;
constexpr auto enqueue_delta_net    = enqueue<op_gated_delta_net, 6>;
constexpr auto enqueue_rwkv6        = enqueue<op_rwkv6, 6>;
constexpr auto rwkv7_supported      = supports<op_rwkv7_supported, 7>;
constexpr auto enqueue_rwkv7        = enqueue<op_rwkv7, 7>;
constexpr auto linear_att_supported = supports<op_gated_linear_attention_supported, 5>;
constexpr auto argsort_supported    = supports<op_argsort_supported, 1>;
constexpr auto mul_mat_supported    = supports<op_mul_mat_supported, 2>;
constexpr auto mul_mat_id_supported = supports<op_mul_mat_id_supported, 3>;

bool concat_supported(const ggml_tensor * op) {
    return op_concat_supported(ggml_get_op_params_i32(op, 0), operand(op->src[0]), operand(op->src[1]), operand(op));
}
cudaError_t enqueue_concat(panel_pipeline & panels, ggml_tensor * node) {
    return op_concat(panels.ctx, ggml_get_op_params_i32(node, 0), operand(node->src[0]), operand(node->src[1]),
                     operand(node));
}

cudaError_t enqueue_linear_att(panel_pipeline & panels, ggml_tensor * node) {
    const float scale = ggml_get_op_params_f32(node, 0);
    return std::apply([&](const auto &... t) { return op_gated_linear_attention(panels.ctx, scale, t...); },
                      operands<5>(node));
}

bool set_supported(const ggml_tensor * op) {
    const ggml_tensor *x = op->src[0], *y = op->src[1];
    const set_params   p = set_params_of(op);
    const auto size = static_cast<int64_t>(ggml_type_size(op->type)), all = static_cast<int64_t>(ggml_nbytes(op));
    if (ggml_blck_size(op->type) != 1 || x->type != op->type || y->type != op->type || !ggml_are_same_shape(x, op) ||
        !ggml_is_contiguous(op) || p.offset < 0 || p.offset % size != 0 || p.part.ne[0] > all / size) {
        return false;
    }
    int64_t end = p.offset + p.part.ne[0] * size;
    for (int k = 1; k < 4; k++) {
        const int64_t steps = p.part.ne[k] - 1, nb = p.part.nb[k];
        if (nb < 0 || nb % size != 0 || (steps > 0 && nb > all / steps)) {
            return false;
        }
        end += steps * nb;
    }
    return end <= all && op_copy_supported(operand(x), operand(op)) && op_copy_supported(operand(y), p.part);
}
cudaError_t enqueue_set(panel_pipeline & panels, ggml_tensor * node) {
    set_params p = set_params_of(node);
    if (!p.in_place) {
        CUDA_TRY(op_copy(panels.ctx, operand(node->src[0]), operand(node)));
    }
    p.part.data += p.offset;
    return op_copy(panels.ctx, operand(node->src[1]), p.part);
}

// ---- elementwise ----

bool binary_supported(const ggml_tensor * op) {
    return op_binary_supported(*binary_op_of(op), operand(op->src[0]), operand(op->src[1]), operand(op));
}
cudaError_t enqueue_binary(panel_pipeline & panels, ggml_tensor * node) {
    return op_binary(panels.ctx, *binary_op_of(node), operand(node->src[0]), operand(node->src[1]), operand(node));
}

bool unary_supported(const ggml_tensor * op) {
    return unary_params_of(op) && op_unary_supported(operand(op->src[0]), operand(op));
}
cudaError_t enqueue_unary(panel_pipeline & panels, ggml_tensor * node) {
    const std::optional<unary_params> p = unary_params_of(node);
    return p ? op_unary(panels.ctx, *p, operand(node->src[0]), operand(node)) : cudaErrorInvalidValue;
}

constexpr auto arange_supported = supports<op_arange_supported, 0>;
cudaError_t    enqueue_arange(panel_pipeline & panels, ggml_tensor * node) {
    return op_arange(panels.ctx, ggml_get_op_params_f32(node, 0), ggml_get_op_params_f32(node, 2), operand(node));
}

bool glu_supported(const ggml_tensor * op) {
    return glu_params_of(op) && op_glu_supported(operand(op->src[0]), optional_operand(op->src[1]).get(), operand(op));
}
cudaError_t enqueue_glu(panel_pipeline & panels, ggml_tensor * node) {
    const std::optional<glu_params> p = glu_params_of(node);
    if (!p) {
        return cudaErrorInvalidValue;
    }
    return op_glu(panels.ctx, *p, operand(node->src[0]), optional_operand(node->src[1]).get(), operand(node));
}

// ---- hyper-connections ----

bool hc_comb_supported(const ggml_tensor * op) {
    constexpr int MAX_STEPS = 1000; // a client may ask for any number
    return ggml_get_op_params_i32(op, 1) <= MAX_STEPS && supports<op_hc_comb_supported, 3>(op);
}
cudaError_t enqueue_hc_comb(panel_pipeline & panels, ggml_tensor * node) {
    return op_hc_comb(panels.ctx, ggml_get_op_params_f32(node, 0), ggml_get_op_params_i32(node, 1),
                      operand(node->src[0]), operand(node->src[1]), operand(node->src[2]), operand(node));
}

bool is_gated(const ggml_tensor * pre) { return ggml_get_op_params_i32(pre, 1) != 0; }
bool hc_pre_supported(const ggml_tensor * op) {
    return op_hc_pre_supported(is_gated(op), operand(op->src[0]), operand(op->src[1]), operand(op));
}
cudaError_t enqueue_hc_pre(panel_pipeline & panels, ggml_tensor * node) {
    return op_hc_pre(panels.ctx, is_gated(node), ggml_get_op_params_f32(node, 0), operand(node->src[0]),
                     operand(node->src[1]), operand(node));
}

bool hc_post_supported(const ggml_tensor * op) {
    const optional_operand comb(op->src[3]);
    return op_hc_post_supported(operand(op->src[0]), operand(op->src[1]), operand(op->src[2]), comb.get(), operand(op));
}
cudaError_t enqueue_hc_post(panel_pipeline & panels, ggml_tensor * node) {
    const optional_operand comb(node->src[3]);
    return op_hc_post(panels.ctx, operand(node->src[0]), operand(node->src[1]), operand(node->src[2]), comb.get(),
                      operand(node));
}

// ---- sparse attention ----

constexpr auto indexer_supported = supports<op_indexer_scores_supported, 4>;
constexpr auto enqueue_indexer   = enqueue<op_indexer_scores, 4>;
constexpr auto top_k_supported   = supports<op_top_k_supported, 1>;
constexpr auto enqueue_top_k     = enqueue<op_top_k, 1>;

bool pool_supported(const ggml_tensor * op) {
    const std::optional<pool_params> p = pool_params_of(op);
    return p && op_pool_supported(*p, operand(op->src[0]), operand(op));
}
cudaError_t enqueue_pool(panel_pipeline & panels, ggml_tensor * node) {
    const std::optional<pool_params> p = pool_params_of(node);
    return p ? op_pool(panels.ctx, *p, operand(node->src[0]), operand(node)) : cudaErrorInvalidValue;
}

// ---- reductions along rows ----

bool        rms_norm_supported(const ggml_tensor * op) { return op_rms_norm_supported(rms_norm_operands(op).params()); }
cudaError_t enqueue_rms_norm(panel_pipeline & panels, ggml_tensor * node) {
    return op_rms_norm(panels.ctx, rms_norm_operands(node).params());
}

template <row_norm KIND> bool row_norm_supported(const ggml_tensor * op) {
    return op_row_norm_supported(KIND, operand(op->src[0]), operand(op));
}
template <row_norm KIND> cudaError_t enqueue_row_norm(panel_pipeline & panels, ggml_tensor * node) {
    return op_row_norm(panels.ctx, KIND, ggml_get_op_params_f32(node, 0), operand(node->src[0]), operand(node));
}
constexpr auto norm_supported    = row_norm_supported<row_norm::LAYER>,
               l2_norm_supported = row_norm_supported<row_norm::L2>;
constexpr auto enqueue_norm = enqueue_row_norm<row_norm::LAYER>, enqueue_l2_norm = enqueue_row_norm<row_norm::L2>;

bool soft_max_supported(const ggml_tensor * op) {
    const optional_operand mask(op->src[1]), sinks(op->src[2]);
    return op_soft_max_supported(operand(op->src[0]), mask.get(), sinks.get(), operand(op));
}
cudaError_t enqueue_soft_max(panel_pipeline & panels, ggml_tensor * node) {
    const optional_operand mask(node->src[1]), sinks(node->src[2]);
    const float            scale = ggml_get_op_params_f32(node, 0), max_bias = ggml_get_op_params_f32(node, 1);
    return op_soft_max(panels.ctx, scale, max_bias, operand(node->src[0]), mask.get(), sinks.get(), operand(node));
}

cudaError_t enqueue_argsort(panel_pipeline & panels, ggml_tensor * node) {
    const bool descending = ggml_get_op_params_i32(node, 0) == GGML_SORT_ORDER_DESC;
    return op_argsort(panels.ctx, descending, operand(node->src[0]), operand(node));
}

// ---- rotary embedding and attention ----

bool rope_supported(const ggml_tensor * op) {
    const optional_operand factors(op->src[2]);
    return op_rope_supported(rope_params_of(op), operand(op->src[0]), operand(op->src[1]), factors.get(), operand(op));
}
cudaError_t enqueue_rope(panel_pipeline & panels, ggml_tensor * node) {
    const optional_operand factors(node->src[2]);
    return op_rope(panels.ctx, rope_params_of(node), operand(node->src[0]), operand(node->src[1]), factors.get(),
                   operand(node));
}

bool   attention_supported(const ggml_tensor * op) { return op_attention_supported(attention_operands(op).params()); }
size_t attention_scratch_nbytes(const ggml_tensor * op) {
    return op_attention_scratch_nbytes(attention_operands(op).params());
}
cudaError_t enqueue_attention(panel_pipeline & panels, ggml_tensor * node) {
    return op_attention(panels.ctx, attention_operands(node).params(), scratch_of(panels.ctx, node));
}

// When a model is loaded, llama.cpp asks with this number of heads, elements and tokens whether the GPU can have
// time_mix_first. No graph has them.
bool rwkv6_supported(const ggml_tensor * op) {
    constexpr int64_t   PLACEHOLDER = 123;
    const ggml_tensor * k           = op->src[0];
    return (k->ne[0] == PLACEHOLDER && k->ne[1] == PLACEHOLDER && k->ne[2] == PLACEHOLDER) ||
           supports<op_rwkv6_supported, 6>(op);
}

// ---- matrix products ----

size_t mul_mat_scratch_nbytes(const ggml_tensor * op) {
    return op_mul_mat_scratch_nbytes(operand(op->src[0]), operand(op->src[1]));
}
cudaError_t enqueue_mul_mat(panel_pipeline & panels, ggml_tensor * node) {
    if (is_hadamard_product(node)) {
        panels.forget_x16();
        return op_hadamard(panels.ctx, operand(node->src[1]), operand(node));
    }
    return panels.enqueue_dense(node);
}

size_t mul_mat_id_scratch_nbytes(const ggml_tensor * op) {
    return std::max(op_mul_mat_id_scratch_nbytes(operand(op->src[0]), operand(op->src[1]), operand(op->src[2])),
                    by_expert_scratch_nbytes(op));
}
cudaError_t enqueue_mul_mat_id(panel_pipeline & panels, ggml_tensor * node) {
    if (multiplies_by_expert(panels.ctx, node)) {
        return panels.enqueue_by_expert(node);
    }
    return op_mul_mat_id(panels.ctx, operand(node->src[0]), operand(node->src[1]), operand(node->src[2]), operand(node),
                         scratch_of(panels.ctx, node));
}

size_t sparse_scratch_nbytes(const ggml_tensor * op) {
    return op_mul_mat_16_scratch_nbytes(operand(op->src[0]), operand(op->src[1]));
}
cudaError_t enqueue_sparse(panel_pipeline & panels, ggml_tensor * node) {
    if (densifies(panels.ctx, node)) {
        return panels.enqueue_densified(node);
    }
    if (!stored(node->src[0])) {
        return cudaErrorMemoryAllocation; // a weight in host memory without panels
    }
    panels.forget_x16();
    return enqueue_sparse_mul_mat(panels.ctx, node);
}

bool sparse_id_supported(const ggml_tensor * op) {
    return sparse_mul_mat_supported(op) && op->src[2]->type == GGML_TYPE_I32;
}
size_t sparse_id_scratch_nbytes(const ggml_tensor * op) {
    return std::max(mul_mat_id_scratch_nbytes(op), grouped_scratch_nbytes(op));
}
cudaError_t enqueue_sparse_id(panel_pipeline & panels, ggml_tensor * node) {
    if (groups_experts(node)) {
        return enqueue_grouped_experts(panels.ctx, node);
    }
    if (multiplies_by_expert(panels.ctx, node)) {
        return panels.enqueue_by_expert(node);
    }
    if (densifies(panels.ctx, node)) {
        return panels.enqueue_densified_experts(node);
    }
    return stored(node->src[0]) ? enqueue_sparse_mul_mat_id(panels.ctx, node) : cudaErrorMemoryAllocation;
}

constexpr bool DENSE = false, SPARSE = true;

// clang-format off
const op_row OP_TABLE[] = {
    // op, weight, operands,              supported,                scratch_nbytes,            enqueue
    { GGML_OP_ADD,            DENSE,  2,  binary_supported,         nullptr,                   enqueue_binary    },
    { GGML_OP_SUB,            DENSE,  2,  binary_supported,         nullptr,                   enqueue_binary    },
    { GGML_OP_MUL,            DENSE,  2,  binary_supported,         nullptr,                   enqueue_binary    },
    { GGML_OP_DIV,            DENSE,  2,  binary_supported,         nullptr,                   enqueue_binary    },
    { GGML_OP_SQR,            DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_SQRT,           DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_LOG,            DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_SIN,            DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_COS,            DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_SCALE,          DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_CLAMP,          DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_FILL,           DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_ARANGE,         DENSE,  0,  arange_supported,         nullptr,                   enqueue_arange    },
    { GGML_OP_UNARY,          DENSE,  1,  unary_supported,          nullptr,                   enqueue_unary     },
    { GGML_OP_GLU,            DENSE,  1,  glu_supported,            nullptr,                   enqueue_glu       },
    { GGML_OP_ADD_ID,         DENSE,  3,  add_id_supported,         nullptr,                   enqueue_add_id    },
    { GGML_OP_CPY,            DENSE,  1,  copy_supported,           nullptr,                   enqueue_copy      },
    { GGML_OP_CONT,           DENSE,  1,  copy_supported,           nullptr,                   enqueue_copy      },
    { GGML_OP_DUP,            DENSE,  1,  copy_supported,           nullptr,                   enqueue_copy      },
    { GGML_OP_SET,            DENSE,  2,  set_supported,            nullptr,                   enqueue_set       },
    { GGML_OP_CONCAT,         DENSE,  2,  concat_supported,         nullptr,                   enqueue_concat    },
    { GGML_OP_REPEAT,         DENSE,  1,  repeat_supported,         nullptr,                   enqueue_repeat    },
    { GGML_OP_GET_ROWS,       DENSE,  2,  get_rows_supported,       nullptr,                   enqueue_get_rows  },
    { GGML_OP_SET_ROWS,       DENSE,  2,  set_rows_supported,       nullptr,                   enqueue_set_rows  },
    { GGML_OP_RMS_NORM,       DENSE,  1,  rms_norm_supported,       nullptr,                   enqueue_rms_norm  },
    { GGML_OP_NORM,           DENSE,  1,  norm_supported,           nullptr,                   enqueue_norm      },
    { GGML_OP_L2_NORM,        DENSE,  1,  l2_norm_supported,        nullptr,                   enqueue_l2_norm   },
    { GGML_OP_SOFT_MAX,       DENSE,  1,  soft_max_supported,       nullptr,                   enqueue_soft_max  },
    { GGML_OP_SUM_ROWS,       DENSE,  1,  sum_rows_supported,       nullptr,                   enqueue_sum_rows  },
    { GGML_OP_MEAN,           DENSE,  1,  sum_rows_supported,       nullptr,                   enqueue_mean      },
    { GGML_OP_SSM_CONV,       DENSE,  2,  ssm_conv_supported,       nullptr,                   enqueue_ssm_conv  },
    { GGML_OP_SSM_SCAN,       DENSE,  7,  ssm_scan_supported,       nullptr,                   enqueue_ssm_scan  },
    { GGML_OP_GATED_DELTA_NET, DENSE, 6,  delta_net_supported,      nullptr,                   enqueue_delta_net },
    { GGML_OP_RWKV_WKV6,      DENSE,  6,  rwkv6_supported,          nullptr,                   enqueue_rwkv6     },
    { GGML_OP_RWKV_WKV7,      DENSE,  7,  rwkv7_supported,          nullptr,                   enqueue_rwkv7     },
    { GGML_OP_GATED_LINEAR_ATTN, DENSE, 5, linear_att_supported,    nullptr,                   enqueue_linear_att},
    { GGML_OP_ARGSORT,        DENSE,  1,  argsort_supported,        nullptr,                   enqueue_argsort   },
    { GGML_OP_TOP_K,          DENSE,  1,  top_k_supported,          nullptr,                   enqueue_top_k     },
    { GGML_OP_POOL_2D,        DENSE,  1,  pool_supported,           nullptr,                   enqueue_pool      },
    { GGML_OP_LIGHTNING_INDEXER, DENSE, 4, indexer_supported,       nullptr,                   enqueue_indexer   },
    { GGML_OP_DSV4_HC_COMB,   DENSE,  3,  hc_comb_supported,        nullptr,                   enqueue_hc_comb   },
    { GGML_OP_DSV4_HC_PRE,    DENSE,  2,  hc_pre_supported,         nullptr,                   enqueue_hc_pre    },
    { GGML_OP_DSV4_HC_POST,   DENSE,  3,  hc_post_supported,        nullptr,                   enqueue_hc_post   },
    { GGML_OP_ROPE,           DENSE,  2,  rope_supported,           nullptr,                   enqueue_rope      },
    { GGML_OP_ROPE_BACK,      DENSE,  2,  rope_supported,           nullptr,                   enqueue_rope      },
    { GGML_OP_FLASH_ATTN_EXT, DENSE,  3,  attention_supported,      attention_scratch_nbytes,  enqueue_attention },
    { GGML_OP_MUL_MAT,        DENSE,  2,  mul_mat_supported,        mul_mat_scratch_nbytes,    enqueue_mul_mat   },
    { GGML_OP_MUL_MAT,        SPARSE, 2,  sparse_mul_mat_supported, sparse_scratch_nbytes,     enqueue_sparse    },
    { GGML_OP_MUL_MAT_ID,     DENSE,  3,  mul_mat_id_supported,     mul_mat_id_scratch_nbytes, enqueue_mul_mat_id},
    { GGML_OP_MUL_MAT_ID,     SPARSE, 3,  sparse_id_supported,      sparse_id_scratch_nbytes,  enqueue_sparse_id },
};
// clang-format on

} // namespace

const op_row * find_op(ggml_op op, bool sparse) {
    using index_t              = std::array<const op_row *, 2 * (GGML_OP_COUNT + 1)>;
    static const index_t index = [] {
        index_t rows = {};
        for (const op_row & row : OP_TABLE) {
            rows[2 * static_cast<size_t>(row.op) + row.sparse] = &row;
        }
        return rows;
    }();
    return index[2 * static_cast<size_t>(op) + sparse];
}

bool graph_supports_op(const ggml_tensor * op, bool sparse) {
    if (ggml_op_is_empty(op_of(op))) {
        return true;
    }
    // The result of SET_ROWS, or of an op in place, is the memory of another tensor. The scheduler does not check its
    // place: if the CPU computes that tensor, the GPU would write there, and later use an older copy.
    const ggml_tensor * owner = op->view_src;
    if (owner && !graph_supports_op(owner, false) && !graph_supports_op(owner, true)) {
        return false;
    }
    return graph_has_kernel(op, sparse);
}

bool graph_has_kernel(const ggml_tensor * op, bool sparse) {
    const op_row * row = find_op(op_of(op), sparse);
    return row && std::all_of(op->src, op->src + row->n_src, [](const ggml_tensor * src) { return src != nullptr; }) &&
           row->supported(op);
}

size_t graph_scratch_nbytes(const ggml_tensor * op, bool sparse) {
    const op_row * row = find_op(op_of(op), sparse);
    return row && row->scratch_nbytes ? row->scratch_nbytes(op) : 0;
}

} // namespace macko::cuda
