// Tiles of the layout FUSED, F16 matrices.
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

cudaError_t launch_fused_tiles(tiles_launch & q, const cuda_device_info & device, cudaStream_t stream) {
    switch (q.p.m[0].delta_bits) {
        case 2:  return launch_tiles_bits<fused<__half>, 2>(q, device, stream);
        case 3:  return launch_tiles_bits<fused<__half>, 3>(q, device, stream);
        case 4:  return launch_tiles_bits<fused<__half>, 4>(q, device, stream);
        default: return launch_tiles_bits<fused<__half>, 6>(q, device, stream);
    }
}

} // namespace macko::cuda
