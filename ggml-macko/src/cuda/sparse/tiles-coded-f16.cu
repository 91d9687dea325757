// Tiles of the layout CODED, F16 matrices.
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

cudaError_t launch_coded_tiles_f16(tiles_launch & q, const cuda_device_info & device, cudaStream_t stream) {
    switch (q.p.m[0].delta_bits) {
        case 2:  return launch_tiles_bits<coded<__half>, 2>(q, device, stream);
        case 4:  return launch_tiles_bits<coded<__half>, 4>(q, device, stream);
        default: return launch_tiles_bits<coded<__half>, 6>(q, device, stream);
    }
}

} // namespace macko::cuda
