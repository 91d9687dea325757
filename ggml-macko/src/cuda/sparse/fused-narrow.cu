// The interleaved kernel for layout FUSED with deltas of 2 or 3 bits, in the order of banks: each value shares 16 bits
// with its delta.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_fused_narrow(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].delta_bits == 2 ? launch_fused_bits<2, true>(p, nx, grid_y, stream)
                                  : launch_fused_bits<3, true>(p, nx, grid_y, stream);
}

} // namespace macko::cuda
