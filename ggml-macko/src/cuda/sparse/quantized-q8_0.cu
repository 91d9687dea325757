// The QUANTIZED kernel for Q8_0 values.
#include "cuda/sparse/quantized.cuh"

namespace macko::cuda {

cudaError_t launch_quantized_q8_0(quantized_launch & p, int delta_bits, int nx, int grid_y, cudaStream_t stream) {
    return launch_quantized<q8_0_values>(p, delta_bits, nx, grid_y, stream);
}

} // namespace macko::cuda
