// The row-split kernel for layout INLINE_DELTA of narrow matrices, whose columns ascend, with deltas of 2 or 4 bits.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

template cudaError_t launch_inline_delta<2, false>(row_split_launch &, int, int, int, cudaStream_t);
template cudaError_t launch_inline_delta<4, false>(row_split_launch &, int, int, int, cudaStream_t);

} // namespace macko::cuda
