// The RUNS kernel for F16 values.
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_runs_f16(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 1:  return launch_runs<__half, 1, CUDA_SPARSE_LAYOUT_RUNS>(p, lanes, nx, grid_y, stream);
        case 2:  return launch_runs<__half, 2, CUDA_SPARSE_LAYOUT_RUNS>(p, lanes, nx, grid_y, stream);
        case 4:  return launch_runs<__half, 4, CUDA_SPARSE_LAYOUT_RUNS>(p, lanes, nx, grid_y, stream);
        default: return launch_runs<__half, 8, CUDA_SPARSE_LAYOUT_RUNS>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
