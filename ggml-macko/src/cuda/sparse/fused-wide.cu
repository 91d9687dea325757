// The interleaved kernel for layout FUSED with deltas of 4 or 6 bits: seven or six F16 values share 16 bytes with them.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_fused_wide(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 4:  return launch_interleaved<fused_f16, 4, CUDA_SPARSE_LAYOUT_FUSED>(p, lanes, nx, grid_y, stream);
        default: return launch_interleaved<fused_f16, 6, CUDA_SPARSE_LAYOUT_FUSED>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
