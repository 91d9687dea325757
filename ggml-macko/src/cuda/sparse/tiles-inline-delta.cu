// Tiles of the layout INLINE_DELTA, F16 matrices.
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

cudaError_t launch_inline_delta_tiles(tiles_launch & q, const row_split_shape & s, const cuda_device_info & device,
                                      cudaStream_t stream) {
    switch (s.delta_bits) {
        case 2:  return launch_tiles_bits<inline_delta<__half>, 2>(q, s.lanes, device, stream);
        case 3:  return launch_tiles_bits<inline_delta<__half>, 3>(q, s.lanes, device, stream);
        case 4:  return launch_tiles_bits<inline_delta<__half>, 4>(q, s.lanes, device, stream);
        default: return launch_tiles_bits<inline_delta<__half>, 6>(q, s.lanes, device, stream);
    }
}

} // namespace macko::cuda
