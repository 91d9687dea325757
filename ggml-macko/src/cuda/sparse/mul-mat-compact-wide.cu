// The RUNS kernel for groups of seven or six F16 values that share 16 bytes with codes of 4 or 6 bits (layout COMPACT).
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_runs_compact_wide(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    return p.m[0].delta_bits == 4 ? launch_runs_lanes<compact_f16, 4, true>(p, lanes, nx, grid_y, stream)
                                  : launch_runs_lanes<compact_f16, 6, false>(p, lanes, nx, grid_y, stream);
}

} // namespace macko::cuda
