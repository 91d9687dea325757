// attention-vec.cuh for quantized caches.
#include "cuda/ops/attention-vec.cuh"

namespace macko::cuda {

namespace {

template <tensor_type TYPE> cudaError_t launch_vec_of(const op_context & ctx, const attention_args & a) {
    return launch_vec<value_type<TYPE>, value_type<TYPE>, false>(ctx, a, {});
}

} // namespace

cudaError_t launch_attention_vec_quantized(const op_context & ctx, const attention_args & a) {
    switch (a.k.type) {
        case TYPE_Q8_0:   return launch_vec_of<TYPE_Q8_0>(ctx, a);
        case TYPE_Q4_0:   return launch_vec_of<TYPE_Q4_0>(ctx, a);
        case TYPE_Q4_1:   return launch_vec_of<TYPE_Q4_1>(ctx, a);
        case TYPE_Q5_0:   return launch_vec_of<TYPE_Q5_0>(ctx, a);
        case TYPE_Q5_1:   return launch_vec_of<TYPE_Q5_1>(ctx, a);
        case TYPE_IQ4_NL: return launch_vec_of<TYPE_IQ4_NL>(ctx, a);
        default:          return cudaErrorInvalidValue;
    }
}

} // namespace macko::cuda
