// The interleaved kernel for layout FUSED of narrow matrices, whose columns ascend, with deltas of 2 or 4 bits.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_fused_ascending(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].delta_bits == 2 ? launch_fused_bits<2, false>(p, nx, grid_y, stream)
                                  : launch_fused_bits<4, false>(p, nx, grid_y, stream);
}

} // namespace macko::cuda
