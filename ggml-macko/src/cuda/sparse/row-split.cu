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

static row_split_shape shape_of(const row_split_layout & w) { return { w.delta_bits, w.lanes, w.bank_width != 0 }; }

cudaError_t multiply(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    row_split_launch      p = row_split_product(w, a, 32 / w.lanes);
    const row_split_shape s = shape_of(w);
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    if (w.type == GGML_MACKO_TYPE_BF16 && nx > 1) {
        return launch_inline_delta_bf16(p, s, nx, grid_columns(a), stream);
    }
    return !s.banked && s.delta_bits < 6 ? launch_inline_delta_ascending(p, s, nx, grid_columns(a), stream)
           : s.delta_bits < 4            ? launch_inline_delta_d2_d3(p, s, nx, grid_columns(a), stream)
                                         : launch_inline_delta_d4_d6(p, s, nx, grid_columns(a), stream);
}

cudaError_t multiply(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    row_split_launch p = row_split_product(w, a, 32 / w.lanes);
    return p.n_warp_rows ? launch_exp_coded(p, shape_of(w), nx, grid_columns(a), stream) : cudaSuccess;
}

} // namespace macko::cuda
