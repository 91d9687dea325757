// The row-split kernel for layout INLINE_DELTA with deltas of 4 bits, in the order of banks, and of 6: seven or six
// values share 16 bytes with them.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

template cudaError_t launch_inline_delta<4, true>(row_split_launch &, int, int, int, cudaStream_t);
template cudaError_t launch_inline_delta<6, false>(row_split_launch &, int, int, int, cudaStream_t);

} // namespace macko::cuda
