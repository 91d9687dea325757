// The RUNS kernel for F16 values that share 16 bits with codes of 2 or 3 bits (layout COMPACT).
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_runs_compact(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 2:  return launch_runs_lanes<compact_f16, 2, true>(p, lanes, nx, grid_y, stream);
        case 3:  return launch_runs_lanes<compact_f16, 3, true>(p, lanes, nx, grid_y, stream);
        default: return launch_runs_compact_wide(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
