// The RUNS kernel for F16 values that share 16 bits with their codes (layout COMPACT).
#include "cuda/sparse-runs.cuh"

namespace macko {

cudaError_t launch_runs_compact(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].delta_bits == 2 ? launch_runs_lanes<compact_f16, 2, true>(p, lanes, nx, grid_y, stream) : launch_runs_lanes<compact_f16, 3, true>(p, lanes, nx, grid_y, stream);
}

} // namespace macko
