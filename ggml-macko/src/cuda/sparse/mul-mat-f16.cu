// The RUNS kernel for F16 values.
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_runs_f16(sparse_launch & p, int lanes, bool striped, int nx, int grid_y, cudaStream_t stream) {
    return launch_runs<__half>(p, lanes, striped, nx, grid_y, stream);
}

} // namespace macko::cuda
