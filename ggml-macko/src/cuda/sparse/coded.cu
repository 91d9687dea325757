// The interleaved kernel for layout CODED. With one column of x, matrices of F16 and of BF16 values share kernels.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

template <typename X> static cudaError_t launch_coded_bits(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 2:  return launch_coded_shape<X, 2>(p, nx, grid_y, stream);
        case 4:  return launch_coded_shape<X, 4>(p, nx, grid_y, stream);
        default: return launch_coded_shape<X, 6>(p, nx, grid_y, stream);
    }
}

cudaError_t launch_coded(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].bf16 ? launch_coded_bits<__nv_bfloat16>(p, nx, grid_y, stream)
                       : launch_coded_bits<__half>(p, nx, grid_y, stream);
}

} // namespace macko::cuda
