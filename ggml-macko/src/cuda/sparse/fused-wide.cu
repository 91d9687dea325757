// The interleaved kernel for layout FUSED with deltas of 4 bits, in the order of banks, and of 6: seven or six values
// share 16 bytes with them.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_fused_wide(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].delta_bits == 4 ? launch_fused_bits<4, true>(p, nx, grid_y, stream)
                                  : launch_fused_bits<6, false>(p, nx, grid_y, stream);
}

} // namespace macko::cuda
