// The row-split kernel for layout INLINE_DELTA with deltas of 4 bits, in the order of banks, and of 6: seven or six
// values share 16 bytes with them.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

cudaError_t launch_inline_delta_d4_d6(row_split_launch & p, const row_split_shape & s, int nx, int grid_y,
                                      cudaStream_t stream) {
    return s.delta_bits == 4 ? launch_inline_delta_bits<4, true>(p, s.lanes, nx, grid_y, stream)
                             : launch_inline_delta_bits<6, false>(p, s.lanes, nx, grid_y, stream);
}

} // namespace macko::cuda
