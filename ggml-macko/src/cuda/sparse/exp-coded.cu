// The row-split kernel for layout EXP_CODED. With one column of x, matrices of F16 and of BF16 values share kernels.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

template <typename X>
static cudaError_t launch_exp_coded_bits(row_split_launch & p, int delta_bits, int nx, int grid_y,
                                         cudaStream_t stream) {
    switch (delta_bits) {
        case 2:  return launch_exp_coded_shape<X, 2>(p, nx, grid_y, stream);
        case 4:  return launch_exp_coded_shape<X, 4>(p, nx, grid_y, stream);
        default: return launch_exp_coded_shape<X, 6>(p, nx, grid_y, stream);
    }
}

cudaError_t launch_exp_coded(row_split_launch & p, const row_split_shape & s, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].bf16 ? launch_exp_coded_bits<__nv_bfloat16>(p, s.delta_bits, nx, grid_y, stream)
                       : launch_exp_coded_bits<__half>(p, s.delta_bits, nx, grid_y, stream);
}

} // namespace macko::cuda
