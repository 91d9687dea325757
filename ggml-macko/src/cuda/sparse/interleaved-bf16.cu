// The interleaved kernel for layout INTERLEAVED, BF16 values.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_interleaved_bf16(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 1:
            return launch_interleaved<__nv_bfloat16, 1, CUDA_SPARSE_LAYOUT_INTERLEAVED>(p, lanes, nx, grid_y, stream);
        case 2:
            return launch_interleaved<__nv_bfloat16, 2, CUDA_SPARSE_LAYOUT_INTERLEAVED>(p, lanes, nx, grid_y, stream);
        case 4:
            return launch_interleaved<__nv_bfloat16, 4, CUDA_SPARSE_LAYOUT_INTERLEAVED>(p, lanes, nx, grid_y, stream);
        default:
            return launch_interleaved<__nv_bfloat16, 8, CUDA_SPARSE_LAYOUT_INTERLEAVED>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
