// Tiles of the layout EXP_CODED, BF16 matrices.
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

template cudaError_t launch_tiles<exp_coded<__nv_bfloat16>>(tiles_launch &, int, int, const cuda_device_info &,
                                                            cudaStream_t);

} // namespace macko::cuda
