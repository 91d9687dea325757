// attention-vec.cuh for caches in F32, F16 and BF16, and with the rotary embedding of one new token for F16.
#include "cuda/ops/attention-vec.cuh"

namespace macko::cuda {

cudaError_t launch_attention_vec_plain(const op_context & ctx, const attention_args & a) {
    switch (a.k.type) {
        case TYPE_F32:  return launch_vec<value_type<TYPE_F32>, value_type<TYPE_F32>, false>(ctx, a, {});
        case TYPE_F16:  return launch_vec<value_type<TYPE_F16>, value_type<TYPE_F16>, false>(ctx, a, {});
        case TYPE_BF16: return launch_vec<value_type<TYPE_BF16>, value_type<TYPE_BF16>, false>(ctx, a, {});
        default:        return cudaErrorInvalidValue;
    }
}

cudaError_t launch_attention_vec_rope(const op_context & ctx, const attention_args & a, const new_row_args & n) {
    return launch_vec<value_type<TYPE_F16>, value_type<TYPE_F16>, true>(ctx, a, n);
}

} // namespace macko::cuda
