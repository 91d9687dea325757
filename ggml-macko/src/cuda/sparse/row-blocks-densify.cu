// Makes rows of the layout ROW_BLOCKS dense.
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

// One warp per segment; no two segments have an element in common. Zeros are padding and are not written.
__global__ void __launch_bounds__(256)
    densify_segments_kernel(const row_blocks_set set, int delta_bits, int64_t row_begin, int64_t row_end,
                            uint32_t * dst, int64_t ld) {
    const int  lane = threadIdx.x % 32, g = set.granularity;
    const auto values = reinterpret_cast<const uint32_t *>(set.values);
    cuda_wait_for_previous();
    cuda_allow_next();
    for (int64_t i = blockIdx.x * int64_t(8) + threadIdx.x / 32; i < set.n_segments; i += gridDim.x * int64_t(8)) {
        int64_t column = set.bases[i * 32 + lane];
        for (int64_t chunk = set.chunk_ptr[i]; chunk < set.chunk_ptr[i + 1]; chunk++) {
            for (int k = 0; k < 4; k++) {
                column += macko_delta(set.deltas, (chunk * 32 + lane) * 4 + k, delta_bits);
                for (int r = 0; r < g; r++) {
                    const int      at   = k * g + r; // in this lane's values of the chunk
                    const uint32_t bits = values[((chunk * g + at / 4) * 32 + lane) * 4 + at % 4];
                    const int64_t  row  = set.rows[i * g + r];
                    if (row >= row_begin && row < row_end && bits != 0) {
                        dst[(row - row_begin) * ld + column] = bits;
                    }
                }
            }
        }
    }
}

} // namespace

cudaError_t densify(const row_blocks_layout & w, const dense_rows & to) {
    CUDA_TRY(cudaMemset2DAsync(to.dst, static_cast<size_t>(to.ld) * 4, 0, static_cast<size_t>(w.cols) * 4,
                               static_cast<size_t>(to.row_end - to.row_begin), to.stream));
    for (int32_t s = 0; s < w.n_sets; s++) {
        const unsigned n = static_cast<unsigned>(std::min(1 << 16, (w.sets[s].n_segments + 7) / 8));
        densify_segments_kernel<<<n, 256, 0, to.stream>>>(w.sets[s], w.delta_bits, to.row_begin, to.row_end,
                                                          static_cast<uint32_t *>(to.dst), to.ld);
        CUDA_TRY(cudaGetLastError());
    }
    return cudaSuccess;
}

} // namespace macko::cuda
