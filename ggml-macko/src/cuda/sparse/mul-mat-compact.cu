// The RUNS kernel for F16 values that share 16 bits with codes of 2 or 3 bits (layout COMPACT).
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_compact_narrow(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 2:  return launch_runs<compact_f16, 2, CUDA_SPARSE_LAYOUT_COMPACT>(p, lanes, nx, grid_y, stream);
        default: return launch_runs<compact_f16, 3, CUDA_SPARSE_LAYOUT_COMPACT>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
