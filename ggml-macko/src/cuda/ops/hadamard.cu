// Products with a Hadamard matrix (Sylvester's, divided by the root of its size) as fast Walsh-Hadamard transforms: n
// log n additions a row, and the matrix is not read. llama.cpp turns q, k, v and the result of attention this way where
// the cache is quantized.
#include "cuda/ops/common.cuh"

namespace macko::cuda {

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ void add_and_subtract(float & a, float & b) {
    const float sum = a + b;
    b               = a - b;
    a               = sum;
}

// N elements in LANES lanes: element 4 (k * LANES + lane) + i is v[k][i] of a lane
template <int N> __global__ void __launch_bounds__(THREADS) hadamard_kernel(op_tensor x, op_tensor dst) {
    wait_for_previous();
    constexpr int LANES = N / 4 < WARP ? N / 4 : WARP, PIECES = N / 4 / LANES;
    const int     lane   = static_cast<int>(threadIdx.x) % LANES;
    const int64_t i_row  = static_cast<int64_t>(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES,
                  n_rows = dst.ne[1] * dst.ne[2] * dst.ne[3];
    const row_index row  = split_row(i_row < n_rows ? i_row : n_rows - 1, dst.ne[1], dst.ne[2]);
    const float4 *  from = reinterpret_cast<const float4 *>(row_of(x, row)) + lane;
    float           v[PIECES][4];
#pragma unroll
    for (int k = 0; k < PIECES; k++) {
        const float4 four = from[k * LANES];
        v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
        add_and_subtract(v[k][0], v[k][1]), add_and_subtract(v[k][2], v[k][3]);
        add_and_subtract(v[k][0], v[k][2]), add_and_subtract(v[k][1], v[k][3]);
#pragma unroll
        for (int bit = 1; bit < LANES; bit *= 2) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float other = __shfl_xor_sync(FULL_WARP, v[k][i], bit);
                v[k][i]           = lane & bit ? other - v[k][i] : v[k][i] + other;
            }
        }
    }
#pragma unroll
    for (int bit = 1; bit < PIECES; bit *= 2) {
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!(k & bit)) {
                    add_and_subtract(v[k][i], v[k | bit][i]);
                }
            }
        }
    }
    if (i_row >= n_rows) {
        return;
    }
    const float scale = rsqrtf(static_cast<float>(N));
    float4 *    to    = reinterpret_cast<float4 *>(row_of(dst, row)) + lane;
#pragma unroll
    for (int k = 0; k < PIECES; k++) {
        to[k * LANES] = make_float4(scale * v[k][0], scale * v[k][1], scale * v[k][2], scale * v[k][3]);
    }
}

template <int N> cudaError_t launch_hadamard(const op_context & ctx, const op_tensor & x, const op_tensor & dst) {
    constexpr int ROWS = THREADS / (N / 4 < WARP ? N / 4 : WARP);
    return launch(ctx, hadamard_kernel<N>, static_cast<unsigned>((dst.n_rows() + ROWS - 1) / ROWS), THREADS, 0, x, dst);
}

} // namespace

bool op_hadamard_supported(const op_tensor & x, const op_tensor & dst) {
    const bool size_ok = x.ne[0] == 64 || x.ne[0] == 128 || x.ne[0] == 256 || x.ne[0] == 512;
    return size_ok && x.type == TYPE_F32 && dst.type == TYPE_F32 && same_shape(x, dst) && is_contiguous_rows(x) &&
           is_contiguous_rows(dst) && is_aligned(x, 16) && is_aligned(dst, 16) && fits_grid(dst.n_rows());
}

cudaError_t op_hadamard(const op_context & ctx, const op_tensor & x, const op_tensor & dst) {
    switch (x.ne[0]) {
        case 64:  return launch_hadamard<64>(ctx, x, dst);
        case 128: return launch_hadamard<128>(ctx, x, dst);
        case 256: return launch_hadamard<256>(ctx, x, dst);
        default:  return launch_hadamard<512>(ctx, x, dst);
    }
}

} // namespace macko::cuda
