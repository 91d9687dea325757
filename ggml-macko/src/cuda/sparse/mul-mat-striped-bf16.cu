// The RUNS kernel for BF16 values in layout STRIPED.
#include "cuda/sparse/runs.cuh"

namespace macko::cuda {

cudaError_t launch_striped_bf16(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 1:  return launch_runs<__nv_bfloat16, 1, CUDA_SPARSE_LAYOUT_STRIPED>(p, lanes, nx, grid_y, stream);
        case 2:  return launch_runs<__nv_bfloat16, 2, CUDA_SPARSE_LAYOUT_STRIPED>(p, lanes, nx, grid_y, stream);
        default: return launch_runs<__nv_bfloat16, 4, CUDA_SPARSE_LAYOUT_STRIPED>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
