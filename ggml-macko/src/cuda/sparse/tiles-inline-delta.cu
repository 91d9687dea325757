// Tiles of the layout INLINE_DELTA, F16 matrices.
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

template cudaError_t launch_tiles<inline_delta<__half>>(tiles_launch &, int, int, const cuda_device_info &,
                                                        cudaStream_t);

} // namespace macko::cuda
