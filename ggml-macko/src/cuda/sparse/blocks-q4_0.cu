// The BLOCKS kernel for Q4_0 values.
#include "cuda/sparse/blocks.cuh"

namespace macko::cuda {

cudaError_t launch_blocks_q4_0(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    return launch_blocks<q4_0_values>(p, nx, grid_y, stream);
}

} // namespace macko::cuda
