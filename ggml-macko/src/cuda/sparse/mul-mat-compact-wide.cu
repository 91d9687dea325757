// The RUNS kernel for groups of seven or six F16 values that share 16 bytes with codes of 4 or 6 bits (layout COMPACT).
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_compact_wide(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 4:  return launch_runs<compact_f16, 4, CUDA_SPARSE_LAYOUT_COMPACT>(p, lanes, nx, grid_y, stream);
        default: return launch_runs<compact_f16, 6, CUDA_SPARSE_LAYOUT_COMPACT>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
