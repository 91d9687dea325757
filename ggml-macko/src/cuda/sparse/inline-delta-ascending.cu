// The row-split kernel for layout INLINE_DELTA of narrow matrices, whose columns ascend, with deltas of 2 or 4 bits.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

cudaError_t launch_inline_delta_ascending(row_split_launch & p, const row_split_shape & s, int nx, int grid_y,
                                          cudaStream_t stream) {
    return s.delta_bits == 2 ? launch_inline_delta_bits<2, false>(p, s.lanes, nx, grid_y, stream)
                             : launch_inline_delta_bits<4, false>(p, s.lanes, nx, grid_y, stream);
}

} // namespace macko::cuda
