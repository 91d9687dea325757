// The interleaved kernel for layout BANKED, BF16 values.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_banked_bf16(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 1:  return launch_interleaved<__nv_bfloat16, 1, CUDA_SPARSE_LAYOUT_BANKED>(p, lanes, nx, grid_y, stream);
        case 2:  return launch_interleaved<__nv_bfloat16, 2, CUDA_SPARSE_LAYOUT_BANKED>(p, lanes, nx, grid_y, stream);
        default: return launch_interleaved<__nv_bfloat16, 4, CUDA_SPARSE_LAYOUT_BANKED>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
