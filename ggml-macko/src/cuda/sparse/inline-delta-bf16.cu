// The row-split kernel for layout INLINE_DELTA, BF16 values, several columns of x.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

cudaError_t launch_inline_delta_bf16(row_split_launch & p, const row_split_shape & s, int nx, int grid_y,
                                     cudaStream_t stream) {
    switch (s.delta_bits) {
        case 2:
            return s.banked ? launch_inline_delta_bf16_shape<2, true>(p, nx, grid_y, stream)
                            : launch_inline_delta_bf16_shape<2, false>(p, nx, grid_y, stream);
        case 3: return launch_inline_delta_bf16_shape<3, true>(p, nx, grid_y, stream);
        case 4:
            return s.banked ? launch_inline_delta_bf16_shape<4, true>(p, nx, grid_y, stream)
                            : launch_inline_delta_bf16_shape<4, false>(p, nx, grid_y, stream);
        default: return launch_inline_delta_bf16_shape<6, false>(p, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
