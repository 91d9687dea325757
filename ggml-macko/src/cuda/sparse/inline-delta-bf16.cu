// The row-split kernel for layout INLINE_DELTA, BF16 values, several columns of x.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

template cudaError_t launch_inline_delta_bf16<2, false>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_inline_delta_bf16<2, true>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_inline_delta_bf16<3, true>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_inline_delta_bf16<4, false>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_inline_delta_bf16<4, true>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_inline_delta_bf16<6, false>(row_split_launch &, int, int, cudaStream_t);

} // namespace macko::cuda
