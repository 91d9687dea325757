// Stages x for products by tiles (tiles.cuh), and selects these products.
#include "cuda/lib/mma.cuh"
#include "cuda/sparse/tiles.cuh"

namespace macko::cuda {

constexpr int STAGE_THREADS = 256;

// Blocks along y: two columns of x, 8 apart, that share operands; along x: some of their elements. Missing columns
// become zeros.
template <typename H> // type of the matrix: __half or __nv_bfloat16
__global__ void __launch_bounds__(STAGE_THREADS)
    stage_x_kernel(const __grid_constant__ row_split_launch p, uint4 * x16) {
    __shared__ float2 partial[STAGE_THREADS / 32];
    const int         set = blockIdx.y / 8, column = set * 16 + blockIdx.y % 8, thread = threadIdx.x,
              i = blockIdx.x * STAGE_THREADS + thread, n = p.cols / 4;
    cuda_allow_next();
    cuda_wait_for_previous();
    const auto column_of_x = [&](int j) {
        return reinterpret_cast<const float4 *>(p.x + min(j, p.n_columns - 1) * p.ldx);
    };
    const float4 *x0 = column_of_x(column), *x1 = column_of_x(column + 8),
                 *weights = reinterpret_cast<const float4 *>(p.norm_weight);
    const float4 v0 = x0[min(i, n - 1)], v1 = x1[min(i, n - 1)];
    float4       w0    = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    float2       scale = make_float2(column < p.n_columns ? 1.0f : 0.0f, column + 8 < p.n_columns ? 1.0f : 0.0f);
    if (weights) { // the norm of a column needs all of its elements
        w0             = weights[min(i, n - 1)];
        float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int k = thread; k < n; k += STAGE_THREADS) {
            squares = make_float2(add_squares(squares.x, x0[k]), add_squares(squares.y, x1[k]));
        }
        squares = make_float2(warp_sum(squares.x), warp_sum(squares.y));
        if (thread % 32 == 0) {
            partial[thread / 32] = squares;
        }
        __syncthreads();
        squares = thread % 32 < STAGE_THREADS / 32 ? partial[thread % 32] : make_float2(0.0f, 0.0f);
        scale.x *= rsqrtf(warp_sum(squares.x) / static_cast<float>(p.cols) + p.norm_eps);
        scale.y *= rsqrtf(warp_sum(squares.y) / static_cast<float>(p.cols) + p.norm_eps);
    }
    if (i < n) { // four columns of W: half of a thread's share of an operand
        x16[((i / 8 * (gridDim.y / 8) + set) * 2 + i % 2) * 32 + blockIdx.y % 8 * 4 + i % 8 / 2] =
            make_uint4(pack_pair(H(), v0.x * scale.x * w0.x, v0.y * scale.x * w0.y),
                       pack_pair(H(), v1.x * scale.y * w0.x, v1.y * scale.y * w0.y),
                       pack_pair(H(), v0.z * scale.x * w0.z, v0.w * scale.x * w0.w),
                       pack_pair(H(), v1.z * scale.y * w0.z, v1.w * scale.y * w0.w));
    }
}

template <typename M> static bool fits_tiles(const M & w, bool coded) {
    cuda_device_info device;
    return (w.bank_width || w.delta_bits == 6) && tiles_built(coded, w.delta_bits, w.lanes) && w.cols % 32 == 0 &&
           w.cols <= CUDA_SPARSE_X16_COLS && cuda_current_device(&device) == cudaSuccess &&
           (w.type == GGML_MACKO_TYPE_F16 || device.cc >= 80) &&
           max_tile_blocks(static_cast<int>(x_words_of(w)), device.shared_nbytes) > 0;
}
bool takes_tiles(const inline_delta_layout & w) {
    constexpr int MAX_EXPONENT = 15; // 2^exponent is an F16
    return w.type == GGML_MACKO_TYPE_F16 && w.exponent <= MAX_EXPONENT && fits_tiles(w, false);
}
bool takes_tiles(const exp_coded_layout & w) { return fits_tiles(w, true); }

template <typename T, typename M>
static cudaError_t multiply_tiles(const M & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    const row_split_launch p = row_split_product(w, a, 32 / w.lanes);
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    tiles_launch q = { p, static_cast<const uint4 *>(a.x16), 0, 0 };
    const dim3   blocks((p.cols / 4 + STAGE_THREADS - 1) / STAGE_THREADS,
                      p.n_columns <= 16 ? 8 : CUDA_SPARSE_X16_COLUMNS / 2);
    CUDA_TRY(cuda_launch(stage_x_kernel<value16<T>>, blocks, dim3(STAGE_THREADS), 0, p.programmatic && device.cc >= 90,
                         stream, p, static_cast<uint4 *>(a.x16)));
    return launch_tiles<T>(q, w.delta_bits, w.lanes, device, stream);
}
cudaError_t multiply_by_tiles(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a,
                              cudaStream_t stream) {
    return multiply_tiles<inline_delta<__half>>(w, a, stream);
}
cudaError_t multiply_by_tiles(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    return w.type == GGML_MACKO_TYPE_F16 ? multiply_tiles<exp_coded<__half>>(w, a, stream)
                                         : multiply_tiles<exp_coded<__nv_bfloat16>>(w, a, stream);
}

} // namespace macko::cuda
