// The RUNS kernel for F16 values in 14 bits (layout COMPACT).
#include "cuda/sparse-runs.cuh"

namespace macko {

cudaError_t launch_runs_compact(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    return launch_runs_lanes<compact_f16, 2, true>(p, lanes, nx, grid_y, stream);
}

} // namespace macko
