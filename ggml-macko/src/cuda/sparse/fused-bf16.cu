// The interleaved kernel for layout FUSED, BF16 values, several columns of x.
#include "cuda/sparse/interleaved.cuh"

namespace macko::cuda {

cudaError_t launch_fused_bf16(sparse_launch & p, bool banked, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 2:
            return banked ? launch_fused_bf16_shape<2, true>(p, nx, grid_y, stream)
                          : launch_fused_bf16_shape<2, false>(p, nx, grid_y, stream);
        case 3: return launch_fused_bf16_shape<3, true>(p, nx, grid_y, stream);
        case 4:
            return banked ? launch_fused_bf16_shape<4, true>(p, nx, grid_y, stream)
                          : launch_fused_bf16_shape<4, false>(p, nx, grid_y, stream);
        default: return launch_fused_bf16_shape<6, false>(p, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
