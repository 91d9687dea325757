// Writes the elements of EC-CSR blocks into dense rows.
#include "cuda/sparse/ec-csr/mul-mat.cuh"
#include "cuda/sparse/groups.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

// A warp per piece; no two pieces have an element in common. Zeros are padding: what is there stays.
template <typename U>
__global__ void __launch_bounds__(256) densify_pieces_kernel(const cuda_ec_csr_set set, int delta_bits,
                                                             int64_t row_begin, int64_t row_end, U * dst, int64_t ld) {
    const int lane = threadIdx.x % 32, g = set.granularity, n_vectors = 4 * g * static_cast<int>(sizeof(U)) / 16;
    cuda_wait_for_previous();
    cuda_allow_next();
    for (int64_t i = blockIdx.x * int64_t(8) + threadIdx.x / 32; i < set.n_pieces; i += gridDim.x * int64_t(8)) {
        int64_t column = set.bases[i * 32 + lane];
        for (int64_t chunk = set.chunk_ptr[i]; chunk < set.chunk_ptr[i + 1]; chunk++) {
            for (int k = 0; k < 4; k++) {
                column += file_delta(set.deltas, (chunk * 32 + lane) * 4 + k, delta_bits);
                for (int r = 0; r < g; r++) {
                    const int byte = (k * g + r) * static_cast<int>(sizeof(U));
                    const U   bits = *reinterpret_cast<const U *>(
                        set.values + ((chunk * n_vectors + byte / 16) * 32 + lane) * 16 + byte % 16);
                    const int64_t row = set.rows[i * g + r];
                    if (row >= row_begin && row < row_end && bits != 0) {
                        dst[(row - row_begin) * ld + column] = bits;
                    }
                }
            }
        }
    }
}

} // namespace

cudaError_t ec_csr_part::densify(int64_t row_begin, int64_t row_end, void * dst, int64_t ld,
                                 cudaStream_t stream) const {
    const cuda_ec_csr_blocks & b = blocks;
    for (int32_t s = 0; s < b.n_sets; s++) {
        const auto run = [&](auto * to) {
            const unsigned blocks = static_cast<unsigned>(std::min(1 << 16, (b.sets[s].n_pieces + 7) / 8));
            densify_pieces_kernel<<<blocks, 256, 0, stream>>>(b.sets[s], b.delta_bits, row_begin, row_end, to, ld);
            return cudaGetLastError();
        };
        CUDA_TRY(b.type == GGML_MACKO_TYPE_F32 ? run(static_cast<uint32_t *>(dst)) : run(static_cast<uint16_t *>(dst)));
    }
    return cudaSuccess;
}

} // namespace macko::cuda
