// The interleaved kernel for layout FUSED with deltas of 2 or 3 bits: each F16 value shares 16 bits with its delta.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_fused_narrow(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 2:  return launch_interleaved<fused_f16, 2, CUDA_SPARSE_LAYOUT_FUSED>(p, lanes, nx, grid_y, stream);
        default: return launch_interleaved<fused_f16, 3, CUDA_SPARSE_LAYOUT_FUSED>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
