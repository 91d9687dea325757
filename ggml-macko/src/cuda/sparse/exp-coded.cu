// The row-split kernel for layout EXP_CODED.
#include "cuda/sparse/row-split.cuh"

namespace macko::cuda {

template cudaError_t launch_exp_coded<__half, 2>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_exp_coded<__half, 4>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_exp_coded<__half, 6>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_exp_coded<__nv_bfloat16, 2>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_exp_coded<__nv_bfloat16, 4>(row_split_launch &, int, int, cudaStream_t);
template cudaError_t launch_exp_coded<__nv_bfloat16, 6>(row_split_launch &, int, int, cudaStream_t);

} // namespace macko::cuda
