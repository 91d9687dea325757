// y = W x, W in the layout QUANTIZED (gpu-layout/quantized.h): which kernel.
#include "cuda/sparse/product.cuh"

#include <algorithm>

namespace macko::cuda {

static int32_t words_of_x(const quantized_layout & w) { return 32 * w.width - 1; }

int columns_at_once(const quantized_layout & w, const cuda_sparse_mul_mat_params & a, const cuda_device_info & device) {
    int32_t overshoot = 0;
    for (int i = 0; i < a.n_matrices; i++) {
        overshoot = std::max(overshoot, std::get<quantized_layout>(*a.w[i]).overshoot);
    }
    int fits = 4;
    while (fits > 1 && quantized_shared_nbytes(w.width, w.lanes, overshoot, fits) > device.shared_nbytes) {
        fits /= 2;
    }
    return fits;
}

cudaError_t multiply(const quantized_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    quantized_launch p = {};
    set_product(p, a, 32 / w.lanes, [&](const gpu_layout & layout, quantized_operand & m) {
        const quantized_layout & l = std::get<quantized_layout>(layout);
        m.groups                   = l.groups;
        m.groups_end               = l.groups_end;
        m.row_heads                = l.row_heads;
        m.outliers                 = reinterpret_cast<const uint2 *>(l.outliers);
        p.overshoot                = std::max(p.overshoot, l.overshoot);
    });
    p.modulus = words_of_x(w);
    p.lanes   = w.lanes;
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    return w.value_type == GGML_MACKO_TYPE_Q8_0 ? launch_quantized_q8_0(p, w.delta_bits, nx, grid_columns(a), stream)
                                                : launch_quantized_q4_0(p, w.delta_bits, nx, grid_columns(a), stream);
}

} // namespace macko::cuda
