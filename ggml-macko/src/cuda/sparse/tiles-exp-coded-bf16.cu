// Tiles of the layout EXP_CODED, BF16 matrices.
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

cudaError_t launch_exp_coded_tiles_bf16(tiles_launch & q, const row_split_shape & s, const cuda_device_info & device,
                                        cudaStream_t stream) {
    switch (s.delta_bits) {
        case 2:  return launch_tiles_bits<exp_coded<__nv_bfloat16>, 2>(q, s.lanes, device, stream);
        case 4:  return launch_tiles_bits<exp_coded<__nv_bfloat16>, 4>(q, s.lanes, device, stream);
        default: return launch_tiles_bits<exp_coded<__nv_bfloat16>, 6>(q, s.lanes, device, stream);
    }
}

} // namespace macko::cuda
