// The row-split kernel for layout INLINE_DELTA with deltas of 2 or 3 bits, in the order of banks: each value shares 16
// bits with its delta.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

cudaError_t launch_inline_delta_d2_d3(row_split_launch & p, const row_split_shape & s, int nx, int grid_y,
                                      cudaStream_t stream) {
    return s.delta_bits == 2 ? launch_inline_delta_bits<2, true>(p, s.lanes, nx, grid_y, stream)
                             : launch_inline_delta_bits<3, true>(p, s.lanes, nx, grid_y, stream);
}

} // namespace macko::cuda
