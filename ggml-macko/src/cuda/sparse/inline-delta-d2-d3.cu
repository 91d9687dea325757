// The row-split kernel for layout INLINE_DELTA with deltas of 2 or 3 bits, in the order of banks: each value shares 16
// bits with its delta.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

template cudaError_t launch_inline_delta<2, true>(row_split_launch &, int, int, int, cudaStream_t);
template cudaError_t launch_inline_delta<3, true>(row_split_launch &, int, int, int, cudaStream_t);

} // namespace macko::cuda
