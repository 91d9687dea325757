// The QUANTIZED kernel for Q4_0 values.
#include "cuda/sparse/quantized.cuh"

namespace macko::cuda {

cudaError_t launch_quantized_q4_0(quantized_launch & p, int delta_bits, int nx, int grid_y, cudaStream_t stream) {
    return launch_quantized<q4_0_values>(p, delta_bits, nx, grid_y, stream);
}

} // namespace macko::cuda
