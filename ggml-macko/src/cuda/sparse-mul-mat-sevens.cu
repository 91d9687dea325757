// The RUNS kernel for groups of seven F16 values and codes of 4 bits (layout COMPACT).
#include "cuda/sparse-runs.cuh"

namespace macko {

cudaError_t launch_runs_compact_sevens(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) { return launch_runs_lanes<compact_f16, 4, true>(p, lanes, nx, grid_y, stream); }

} // namespace macko
