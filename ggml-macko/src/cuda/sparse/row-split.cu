// y = W x, W in a row-split layout (gpu-layout/row-split.h): which kernel.
#include "cuda/sparse/product.cuh"

#include <algorithm>

namespace macko::cuda {

template <typename M>
static int columns_in_shared_memory(const M & w, const cuda_sparse_mul_mat_params & a,
                                    const cuda_device_info & device) {
    row_split_launch p = {};
    p.modulus          = static_cast<int32_t>(x_words_of(w));
    for (int i = 0; i < a.n_matrices; i++) {
        p.overshoot = std::max(p.overshoot, std::get<M>(*a.w[i]).overshoot);
    }
    int fits = 8;
    while (fits > 1 && row_split_shared_nbytes(p, fits) > device.shared_nbytes) {
        fits /= 2;
    }
    return fits;
}
int columns_at_once(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a,
                    const cuda_device_info & device) {
    return columns_in_shared_memory(w, a, device);
}
int columns_at_once(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, const cuda_device_info & device) {
    return columns_in_shared_memory(w, a, device);
}

cudaError_t multiply(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    row_split_launch p = row_split_product(w, a, 32 / w.lanes);
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    return with_constant<2, 3, 4, 6>(w.delta_bits, cudaErrorNotSupported, [&](auto n) {
        constexpr int  BITS     = decltype(n)::value;
        constexpr bool CAN_BANK = BITS < 6, MUST_BANK = BITS == 3; // other kernels are not built
        if (w.type == GGML_MACKO_TYPE_BF16 && nx > 1) {
            return w.bank_width ? launch_inline_delta_bf16<BITS, CAN_BANK>(p, nx, grid_columns(a), stream)
                                : launch_inline_delta_bf16<BITS, MUST_BANK>(p, nx, grid_columns(a), stream);
        }
        return w.bank_width ? launch_inline_delta<BITS, CAN_BANK>(p, w.lanes, nx, grid_columns(a), stream)
                            : launch_inline_delta<BITS, MUST_BANK>(p, w.lanes, nx, grid_columns(a), stream);
    });
}

cudaError_t multiply(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    row_split_launch p = row_split_product(w, a, 32 / w.lanes);
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    return with_constant<2, 4, 6>(w.delta_bits, cudaErrorNotSupported, [&](auto n) {
        constexpr int BITS = decltype(n)::value;
        return w.type == GGML_MACKO_TYPE_BF16 ? launch_exp_coded<__nv_bfloat16, BITS>(p, nx, grid_columns(a), stream)
                                              : launch_exp_coded<__half, BITS>(p, nx, grid_columns(a), stream);
    });
}

} // namespace macko::cuda
