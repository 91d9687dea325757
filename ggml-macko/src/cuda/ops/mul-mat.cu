// Matrix products with dense matrices: weights of any type, and the strided F16 views of the KV cache when flash
// attention is off.
//
//   columns <= 8   mul_mat_vec_kernel: one or four warps per row of w, or a warp for two rows; float32 throughout. Most
//                  quantized weights use tensor cores instead, which are as exact (mul-mat-quantized.cuh);
//                  mul_mat_vec_kernel handles the other cases: other types, several matrices, cc 7.5. With cuBLAS, a
//                  single F16 or BF16 matrix is multiplied by 3 or more columns like by many columns
//   more columns   tensor cores in 16 bits: x is rounded to F16 for F16 weights, else to BF16; sums in float32. Uses
//                  cuBLAS if it is installed, on panels of w in 16 bits that stay in the L2 cache; otherwise
//                  gemm_kernel, which converts tiles of w itself. Tensor cores of cc 7.5 support only F16; there,
//                  BF16 products scale the rows into the range of F16 (scale_rows_kernel)
//   F32 weights    mul_mat_vec_kernel for any number of columns: these are routers and other small matrices, for which
//                  ggml's CPU backend is exact, too
//
// The same two kernels compute MUL_MAT_ID: the first reads the id of the expert, the second a list of tokens per
// expert.
#include "cuda/lib/cublas.h"
#include "cuda/lib/mma.cuh"

#include <algorithm>
#include <type_traits>

namespace macko::cuda {

namespace {

// ---------------------------------------------------------------------------------------------- few columns

constexpr int VEC_WARPS    = 4;
constexpr int VEC_MAX_COLS = 8;

struct mul_mat_args {
    const char * w;
    const char * x;
    char *       y;
    int64_t      w_nb1, w_nb2, w_nb3; // bytes
    int64_t      x_nb1, x_nb2, x_nb3;
    int64_t      y_nb1, y_nb2, y_nb3;
    int          m, n, k;
    int          ne2;            // of x and y: batches are z = i3 * ne2 + i2
    int          ratio2, ratio3; // consecutive batches of x with the same w
    // experts: w_nb2 is the distance between two experts
    const char * ids;
    int64_t      ids_nb0, ids_nb1;
    int          n_used, n_experts;
    int          x_ne1; // rows of x per token: 1 or n_used
    // gemm_kernel with experts: the lists made by sort_experts_kernel
    const int * expert_begin;   // n_experts + 1
    const int * expert_entries; // token * n_used + u
};

template <typename T,     // value_type of w
          int  COLS,      // columns of x
          int  ROW_WARPS, // warps that share a row of w: 1 or 4
          int  OWN,       // rows of w of one warp: 1, or 2, which halves the loads of x and has more weights in flight
          bool VECTOR,    // rows of w and x allow loads of 8 elements, and k is a multiple of 8
          bool EXPERTS>   // MUL_MAT_ID: the weight is that of an expert, and there is one column
__global__ void __launch_bounds__(VEC_WARPS * WARP)
    mul_mat_vec_kernel(const __grid_constant__ mul_mat_args p) { // operands, strides and shapes
    // How a block of 4 warps divides its work:
    //
    //   grid                      x: rows of w; y: columns, COLS at a time; z: batches, or pairs (token, expert)
    //
    //   ROW_WARPS = 1, OWN = 1    | row 0: warp 0 | row 1: warp 1 | row 2: warp 2 | row 3: warp 3 |
    //   ROW_WARPS = 1, OWN = 2    | rows 0, 1: warp 0 | rows 2, 3: warp 1 | rows 4, 5: warp 2 | rows 6, 7: warp 3 |
    //   ROW_WARPS = 4, OWN = 1    | row 0: all warps |
    //
    //   lane i of a row           elements 8 i ... 8 i + 7 of each 256 * ROW_WARPS (without VECTOR: element i of
    //                             each 32 * ROW_WARPS)
    //
    // Phases: find the operands; multiply and add; reduce over the lanes, then over the warps of a row; write y.
    constexpr int ROWS = VEC_WARPS / ROW_WARPS * OWN; // per block
    const int     lane = static_cast<int>(threadIdx.x) % (ROW_WARPS * WARP);
    const int     row  = static_cast<int>(blockIdx.x) * ROWS + static_cast<int>(threadIdx.x) / (ROW_WARPS * WARP) * OWN;
    wait_for_previous();
    const int    col0 = static_cast<int>(blockIdx.y) * COLS;
    const int    z    = static_cast<int>(blockIdx.z);
    const char * w    = p.w;
    const char * x    = p.x;
    char *       y    = p.y;
    if constexpr (EXPERTS) { // z = token * n_used + u, one column
        const int token = z / p.n_used, u = z % p.n_used;
        const int id = *reinterpret_cast<const int *>(p.ids + u * p.ids_nb0 + token * p.ids_nb1);
        w += min(max(id, 0), p.n_experts - 1) * p.w_nb2;
        x += token * p.x_nb2 + u % p.x_ne1 * p.x_nb1;
        y += token * p.y_nb2 + u * p.y_nb1;
    } else {
        const int i2 = z % p.ne2, i3 = z / p.ne2;
        w += i2 / p.ratio2 * p.w_nb2 + i3 / p.ratio3 * p.w_nb3;
        x += i2 * p.x_nb2 + i3 * p.x_nb3;
        y += i2 * p.y_nb2 + i3 * p.y_nb3;
    }
    const char * w_row[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        w_row[r] = w + min(row + r, p.m - 1) * p.w_nb1;
    }
    // multiply a chunk of each row of w by the same chunk of each column of x, and add
    float sum[OWN][COLS] = {};
    if constexpr (VECTOR) {
        const int step = ROW_WARPS * WARP * 8;
#pragma unroll(COLS == 1 ? 4 / OWN : 4)
        for (int k = lane * 8; k < p.k; k += step) {
            float a[OWN][8];
#pragma unroll
            for (int r = 0; r < OWN; r++) {
                T::load8(w_row[r], k, a[r]);
            }
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                if (COLS == 1 || col0 + c < p.n) {
                    float b[8];
                    value_type<TYPE_F32>::load8(x + (col0 + c) * p.x_nb1, k, b);
#pragma unroll
                    for (int r = 0; r < OWN; r++) {
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            sum[r][c] += a[r][i] * b[i];
                        }
                    }
                }
            }
        }
    } else {
        for (int k = lane; k < p.k; k += ROW_WARPS * WARP) {
            if constexpr (T::IS_PLAIN) {
                const float a = T::to_float(reinterpret_cast<const typename T::block *>(w_row[0])[k]);
                for (int c = 0; c < COLS && col0 + c < p.n; c++) {
                    sum[0][c] += a * reinterpret_cast<const float *>(x + (col0 + c) * p.x_nb1)[k];
                }
            }
        }
    }
    // reduce over the lanes of a warp
#pragma unroll
    for (int r = 0; r < OWN; r++) {
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            sum[r][c] = warp_sum(sum[r][c]);
        }
    }
    // reduce over the warps of a row, in order
    if constexpr (ROW_WARPS > 1) {
        __shared__ float partial[VEC_WARPS][COLS];
        const int        warp = static_cast<int>(threadIdx.x) / WARP;
        if (lane % WARP == 0) {
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                partial[warp][c] = sum[0][c];
            }
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            sum[0][c] = 0;
            for (int i = 0; i < ROW_WARPS; i++) {
                sum[0][c] += partial[warp / ROW_WARPS * ROW_WARPS + i][c];
            }
        }
    }
    // write y
#pragma unroll
    for (int r = 0; r < OWN; r++) {
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            if (lane == 0 && row + r < p.m && col0 + c < p.n) {
                reinterpret_cast<float *>(y + (col0 + c) * p.y_nb1)[row + r] = sum[r][c];
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- many columns

constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 32;
constexpr int GEMM_THREADS = 256;         // 8 warps: 4 along m (32 rows each) x 2 along n (64 columns each)
constexpr int TILE_LD      = BLOCK_K + 8; // 80-byte rows: the 8 rows of an ldmatrix fall into different banks
// chunks of 8 elements per thread and tile (m and n tiles are equal)
constexpr int CHUNKS = BLOCK_M * BLOCK_K / 8 / GEMM_THREADS;
static_assert(BLOCK_M == BLOCK_N && CHUNKS == 2, "one loading scheme for both tiles");

// Loads 8 of the k elements of a row, i < k; zeros beyond its end.
template <typename T, bool VECTOR>
__device__ __forceinline__ void load_floats(const char * row, int i, int k, float v[8]) {
    if constexpr (VECTOR) {
        T::load8(row, i, v);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = 0;
            if constexpr (T::IS_PLAIN) {
                v[j] = i + j < k ? T::to_float(reinterpret_cast<const typename T::block *>(row)[i + j]) : 0.0f;
            }
        }
    }
}

// The same as 16-bit values, for any i and for missing rows.
template <typename T, typename H, bool VECTOR>
__device__ __forceinline__ uint4 load_chunk(const char * row, int i, int k) {
    if (!row || i >= k) {
        return make_uint4(0, 0, 0, 0);
    }
    if constexpr (VECTOR && T::IS_PLAIN && std::is_same_v<typename T::block, H>) {
        return reinterpret_cast<const uint4 *>(row)[i / 8];
    }
    float v[8];
    load_floats<T, VECTOR>(row, i, k, v);
    return pack8<H>(v);
}

template <typename T,                        // value_type of w
          typename H,                        // 16-bit type of the product: __half or __nv_bfloat16
          bool VECTOR,                       // rows of w and x allow loads of 8 elements
          bool EXPERTS,                      // MUL_MAT_ID: blockIdx.z is an expert, whose columns are in expert_entries
          typename X = value_type<TYPE_F32>> // value_type of x
__global__ void __launch_bounds__(GEMM_THREADS) gemm_kernel(mul_mat_args p) { // operands, strides and shapes
    // A block computes 128 rows x 128 columns of y:
    //
    //   grid            x: rows of w; y: columns of x, 128 at a time; z: batches, or experts
    //   shared memory   | w: 128 rows x 32 elements | x: 128 columns x 32 elements |, as H
    //   warp            rows 32 (warp % 4) ... + 31, columns 64 (warp / 4) ... + 63: 2 x 8 products of 16 x 8
    //   thread          | next chunks of w and x: 2 x 8 elements each | 2 x 8 x 4 sums |, in registers
    //
    // Phases: find the operands; for each 32 elements of k store the tiles, fetch the next chunks, multiply; write y.
    wait_for_previous();
    __shared__ __align__(16) H w_tile[BLOCK_M * TILE_LD];
    __shared__ __align__(16) H x_tile[BLOCK_N * TILE_LD];
    const int                  z     = static_cast<int>(blockIdx.z);
    const int                  m0    = static_cast<int>(blockIdx.x) * BLOCK_M;
    const int                  n0    = static_cast<int>(blockIdx.y) * BLOCK_N;
    const char *               w     = p.w;
    const char *               x     = p.x;
    char *                     y     = p.y;
    int                        n     = p.n;
    int                        entry = 0; // first list entry of this expert
    if constexpr (EXPERTS) {
        entry = p.expert_begin[z];
        n     = p.expert_begin[z + 1] - entry;
        w += z * p.w_nb2;
        if (n0 >= n) {
            return;
        }
    } else {
        const int i2 = z % p.ne2, i3 = z / p.ne2;
        w += i2 / p.ratio2 * p.w_nb2 + i3 / p.ratio3 * p.w_nb3;
        x += i2 * p.x_nb2 + i3 * p.x_nb3;
        y += i2 * p.y_nb2 + i3 * p.y_nb3;
    }
    const auto x_row = [&](int col) -> const char * {
        if (col >= n) {
            return nullptr;
        }
        if constexpr (EXPERTS) {
            const int e = p.expert_entries[entry + col];
            return x + e / p.n_used * p.x_nb2 + e % p.n_used % p.x_ne1 * p.x_nb1;
        } else {
            return x + col * p.x_nb1;
        }
    };
    // this thread's chunks: rows r and r + 64 of both tiles, elements 8 * (threadIdx.x % 4) ... + 7
    const int    r = static_cast<int>(threadIdx.x) / 4, c = static_cast<int>(threadIdx.x) % 4 * 8;
    const char * w_rows[CHUNKS];
    const char * x_rows[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int m = m0 + r + i * 64;
        w_rows[i]   = m < p.m ? w + m * p.w_nb1 : nullptr;
        x_rows[i]   = x_row(n0 + r + i * 64);
    }
    uint4      w_next[CHUNKS], x_next[CHUNKS];
    const auto fetch = [&](int k0) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            w_next[i] = load_chunk<T, H, VECTOR>(w_rows[i], k0 + c, p.k);
            x_next[i] = load_chunk<X, H, VECTOR>(x_rows[i], k0 + c, p.k);
        }
    };
    const int warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP;
    const int wm = warp % 4 * 32, wn = warp / 4 * 64;
    float     acc[2][8][4] = {}; // 32 x 64 per warp
    fetch(0);
    for (int k0 = 0; k0 < p.k; k0 += BLOCK_K) {
        // store the tiles, then fetch the next chunks
        __syncthreads();
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            *reinterpret_cast<uint4 *>(w_tile + (r + i * 64) * TILE_LD + c) = w_next[i];
            *reinterpret_cast<uint4 *>(x_tile + (r + i * 64) * TILE_LD + c) = x_next[i];
        }
        __syncthreads();
        if (k0 + BLOCK_K < p.k) {
            fetch(k0 + BLOCK_K);
        }
        // multiply
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                load_matrices(a[i], shared_address(w_tile + (wm + i * 16 + lane % 16) * TILE_LD + k + lane / 16 * 8));
            }
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                uint32_t b[4];
                load_matrices(b, shared_address(x_tile + (wn + j * 8 + lane % 8 + lane / 16 * 8) * TILE_LD + k +
                                                lane / 8 % 2 * 8));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    multiply_add<H>(acc[i][j], a[i], b[0], b[1]);
                    multiply_add<H>(acc[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
    // write y
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int col = n0 + wn + j * 8 + 2 * t + half;
            if (col >= n) {
                continue;
            }
            char * y_row;
            if constexpr (EXPERTS) {
                const int e = p.expert_entries[entry + col];
                y_row       = y + e / p.n_used * p.y_nb2 + e % p.n_used * p.y_nb1;
            } else {
                y_row = y + col * p.y_nb1;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const int row = m0 + wm + i * 16 + part * 8 + g;
                    if (row < p.m) {
                        reinterpret_cast<float *>(y_row)[row] = acc[i][j][part * 2 + half];
                    }
                }
            }
        }
    }
}

// Sorts tokens by expert: writes expert_begin (n_experts + 1) and expert_entries, in token order. One block. An entry
// with an invalid expert id is in no list.
constexpr int   SORT_THREADS = 1024;
__global__ void __launch_bounds__(SORT_THREADS)
    sort_experts_kernel(mul_mat_args p, int n_tokens, int * expert_begin, int * expert_entries) {
    wait_for_previous();
    const int  n     = n_tokens * p.n_used;
    const auto id_of = [&](int e) {
        return *reinterpret_cast<const int *>(p.ids + e % p.n_used * p.ids_nb0 + e / p.n_used * p.ids_nb1);
    };
    // each warp counts, then lists, the entries of its own experts: no atomics, and a fixed order
    const int warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP,
              n_warps = SORT_THREADS / WARP;
    for (int expert = warp; expert < p.n_experts; expert += n_warps) {
        int count = 0;
        for (int e0 = 0; e0 < n; e0 += WARP) {
            count += __popc(__ballot_sync(FULL_WARP, e0 + lane < n && id_of(e0 + lane) == expert));
        }
        if (lane == 0) {
            expert_begin[expert + 1] = count;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        expert_begin[0] = 0;
        for (int expert = 0; expert < p.n_experts; expert++) {
            expert_begin[expert + 1] += expert_begin[expert];
        }
    }
    __syncthreads();
    for (int expert = warp; expert < p.n_experts; expert += n_warps) {
        int at = expert_begin[expert];
        for (int e0 = 0; e0 < n; e0 += WARP) {
            const bool     mine = e0 + lane < n && id_of(e0 + lane) == expert;
            const unsigned all  = __ballot_sync(FULL_WARP, mine);
            if (mine) {
                expert_entries[at + __popc(all & ((1u << lane) - 1))] = e0 + lane;
            }
            at += __popc(all);
        }
    }
}

// Converts rows from T to H, for cuBLAS: one row per block along x.
template <typename T, typename H, bool VECTOR>
__global__ void convert_rows_kernel(const char * src, int64_t src_nb1, H * dst, int64_t dst_ld, int k) {
    wait_for_previous();
    const char * row = src + blockIdx.x * src_nb1;
    for (int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * 8; i < k;
         i += static_cast<int>(gridDim.y * blockDim.x) * 8) {
        *reinterpret_cast<uint4 *>(dst + blockIdx.x * dst_ld + i) = load_chunk<T, H, VECTOR>(row, i, k);
    }
}

// ---------------------------------------------------------------------------------------------- scaled rows
//
// BF16 products without tensor cores for BF16: y[i][j] = (w[i] 2^-a[i]) . (x[j] 2^-b[j]) 2^(a[i] + b[j]), where the
// powers of two move the largest finite value of each row of w and x close to the largest F16. Values that are then too
// small for F16 are below 2^-39 of that value. Infinities and NaN are unchanged.

constexpr int SCALE_THREADS = 256;

// Writes dst and the exponents of all rows of src, one block per row. dst may be src if its values have 16 bits.
template <typename T, bool VECTOR>
__global__ void __launch_bounds__(SCALE_THREADS)
    scale_rows_kernel(const char * src, int64_t src_nb1, __half * dst, int64_t dst_ld, int k, int * exponents) {
    wait_for_previous();
    __shared__ float partial[WARP];
    const char *     row   = src + blockIdx.x * src_nb1;
    const int        first = static_cast<int>(threadIdx.x) * 8, step = SCALE_THREADS * 8;
    float            largest = 0, v[8];
    for (int i = first; i < k; i += step) {
        load_floats<T, VECTOR>(row, i, k, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            largest = isfinite(v[j]) ? fmaxf(largest, fabsf(v[j])) : largest;
        }
    }
    largest            = block_reduce(largest, partial, [](float a) { return warp_max(a); }, 0.0f);
    const int exponent = largest > 0 ? ilogbf(largest) - 14 : 0;
    if (threadIdx.x == 0) {
        exponents[blockIdx.x] = exponent;
    }
    for (int i = first; i < k; i += step) {
        load_floats<T, VECTOR>(row, i, k, v);
        __half2 h[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { // no saturation: infinities stay infinite
            h[j] = __floats2half2_rn(scalbnf(v[2 * j], -exponent), scalbnf(v[2 * j + 1], -exponent));
        }
        *reinterpret_cast<uint4 *>(dst + blockIdx.x * dst_ld + i) = *reinterpret_cast<const uint4 *>(h);
    }
}

// Multiplies y by 2^(a[i] + b[j]); blocks along x: columns.
__global__ void __launch_bounds__(SCALE_THREADS)
    unscale_kernel(float * y, int64_t y_ld, int m, const int * w_exponents, const int * x_exponents) {
    wait_for_previous();
    const int row = static_cast<int>(blockIdx.y * SCALE_THREADS + threadIdx.x);
    if (row < m) {
        float & v = y[blockIdx.x * y_ld + row];
        v         = scalbnf(v, w_exponents[row] + x_exponents[blockIdx.x]);
    }
}

// ---------------------------------------------------------------------------------------------- choice

// Size of a panel of w that is converted to 16 bits and multiplied at a time. Small panels stay in the L2 cache, but
// panels of few rows leave multiprocessors idle: 4096 rows and 512 columns are one wave of 128 x 128 tiles on an H200.
constexpr int64_t PANEL_NBYTES = int64_t(48) << 20;
constexpr int     GEMM_MIN_N   = VEC_MAX_COLS + 1;
// From this many columns on, cuBLAS multiplies weights in 16 bits, which need no conversion: mul_mat_vec_kernel is
// limited by its instructions there. The first number is for matrices of at least LARGE_MATRIX elements, the second for
// at least MIDDLE_MATRIX. For smaller matrices, cuBLAS has more overhead before and after the product than it saves
// (lab/device-gpu.md).
constexpr int CUBLAS_MIN_N_16 = 3, CUBLAS_MIN_N_MIDDLE = 5;

constexpr int64_t LARGE_MATRIX = int64_t(1) << 24, MIDDLE_MATRIX = int64_t(1) << 22;

int64_t align_up(int64_t n, int64_t a) { return (n + a - 1) / a * a; }

mul_mat_args make_args(const op_tensor & w, const op_tensor & x, const op_tensor & dst) {
    mul_mat_args p = {};
    p.w            = w.data;
    p.x            = x.data;
    p.y            = dst.data;
    p.w_nb1 = w.nb[1], p.w_nb2 = w.nb[2], p.w_nb3 = w.nb[3];
    p.x_nb1 = x.nb[1], p.x_nb2 = x.nb[2], p.x_nb3 = x.nb[3];
    p.y_nb1 = dst.nb[1], p.y_nb2 = dst.nb[2], p.y_nb3 = dst.nb[3];
    p.m      = static_cast<int>(w.ne[1]);
    p.n      = static_cast<int>(x.ne[1]);
    p.k      = static_cast<int>(w.ne[0]);
    p.ne2    = static_cast<int>(x.ne[2]);
    p.ratio2 = static_cast<int>(x.ne[2] / w.ne[2]);
    p.ratio3 = static_cast<int>(x.ne[3] / w.ne[3]);
    return p;
}

// Whether the kernels can read 8 elements at once.
bool is_vector(const op_tensor & w, const op_tensor & x) {
    return w.ne[0] % 8 == 0 && is_aligned(x, 16) && (type_block_size(w.type) > 1 || is_aligned(w, 16));
}

// Returns f(true or false as a constant): whether kernels read 8 elements at once. Quantized rows allow nothing else.
template <typename T, typename F> cudaError_t with_vector(bool vector, F && f) {
    if constexpr (T::IS_PLAIN) {
        if (!vector) {
            return f(std::false_type());
        }
    }
    return vector ? f(std::true_type()) : cudaErrorInvalidValue;
}

template <typename T, int COLS, int ROW_WARPS, int OWN, bool VECTOR, bool EXPERTS>
cudaError_t launch_vec_rows(const op_context & ctx, const mul_mat_args & p, int n_batches) {
    constexpr int ROWS = VEC_WARPS / ROW_WARPS * OWN;
    const dim3    grid(static_cast<unsigned>((p.m + ROWS - 1) / ROWS), static_cast<unsigned>((p.n + COLS - 1) / COLS),
                       static_cast<unsigned>(n_batches));
    return launch(ctx, mul_mat_vec_kernel<T, COLS, ROW_WARPS, OWN, VECTOR, EXPERTS>, grid, VEC_WARPS * WARP, 0, p);
}

template <typename T, int COLS, bool EXPERTS>
cudaError_t launch_vec(const op_context & ctx, const mul_mat_args & p, bool vector, int n_batches) {
    return with_vector<T>(vector, [&](auto v) {
        if constexpr (decltype(v)::value) {
            const int64_t rows = static_cast<int64_t>(p.m) * n_batches;
            if (rows < 8 * ctx.n_sm && p.k >= 1024) {
                return launch_vec_rows<T, COLS, VEC_WARPS, 1, true, EXPERTS>(ctx, p, n_batches);
            }
            // two rows per warp: for the output matrix of a model, and if more of x than of w is read
            if constexpr (COLS < VEC_MAX_COLS && !EXPERTS) {
                if (rows < 128 * ctx.n_sm) {
                    return launch_vec_rows<T, COLS, 1, 1, true, EXPERTS>(ctx, p, n_batches);
                }
            }
            return launch_vec_rows<T, COLS, 1, EXPERTS ? 1 : 2, true, EXPERTS>(ctx, p, n_batches);
        } else {
            return launch_vec_rows<T, COLS, 1, 1, false, EXPERTS>(ctx, p, n_batches);
        }
    });
}

template <typename T>
cudaError_t mul_mat_vec(const op_context & ctx, const mul_mat_args & p, bool vector, int n_batches) {
    return p.n == 1   ? launch_vec<T, 1, false>(ctx, p, vector, n_batches)
           : p.n == 2 ? launch_vec<T, 2, false>(ctx, p, vector, n_batches)
           : p.n <= 4 ? launch_vec<T, 4, false>(ctx, p, vector, n_batches)
                      : launch_vec<T, VEC_MAX_COLS, false>(ctx, p, vector, n_batches);
}

// The 16-bit type for products with weights of type T. Weights other than F16 use BF16, for the range of x.
template <typename T>
using half_of = std::conditional_t<std::is_same_v<typename T::block, __half>, __half, __nv_bfloat16>;
template <typename H> constexpr tensor_type type_of_half = std::is_same_v<H, __half> ? TYPE_F16 : TYPE_BF16;
template <typename T> bool                  has_units(const op_context & ctx) {
    return op_mul_mat_has_units(ctx, type_of_half<half_of<T>>);
}

dim3 gemm_grid(int64_t m, int64_t n, int64_t n_batches) {
    return dim3(static_cast<unsigned>((m + BLOCK_M - 1) / BLOCK_M), static_cast<unsigned>((n + BLOCK_N - 1) / BLOCK_N),
                static_cast<unsigned>(n_batches));
}

template <typename T, bool EXPERTS>
cudaError_t launch_gemm(const op_context & ctx, const mul_mat_args & p, bool vector, dim3 grid) {
    return with_vector<T>(vector, [&](auto v) {
        return launch(ctx, gemm_kernel<T, half_of<T>, decltype(v)::value, EXPERTS>, grid, GEMM_THREADS, 0, p);
    });
}

template <typename T, typename H>
cudaError_t convert_rows(const op_context & ctx, const char * src, int64_t src_nb1, int64_t rows, int64_t k,
                         bool vector, H * dst, int64_t ld) {
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(align_up(k, 8 * 256) / (8 * 256)));
    return with_vector<T>(vector, [&](auto v) {
        return launch(ctx, convert_rows_kernel<T, H, decltype(v)::value>, grid, 256, 0, src, src_nb1, dst, ld,
                      static_cast<int>(k));
    });
}

template <typename T>
cudaError_t scale_rows(const op_context & ctx, const char * src, int64_t src_nb1, int64_t rows, int64_t k, bool vector,
                       char * dst, int64_t ld, int * exponents) {
    return launch(ctx, vector ? scale_rows_kernel<T, true> : scale_rows_kernel<T, false>, static_cast<unsigned>(rows),
                  SCALE_THREADS, 0, src, src_nb1, reinterpret_cast<__half *>(dst), ld, static_cast<int>(k), exponents);
}

// x in 16 bits; without tensor cores for the type, the exponents of its rows follow.
int64_t x16_ld(const op_tensor & x) { return align_up(x.ne[0], 8); }
int *   x_exponents(const op_tensor & x, char * x16) { return reinterpret_cast<int *>(x16 + x.ne[1] * x16_ld(x) * 2); }

template <typename H> cudaError_t convert_x(const op_context & ctx, const op_tensor & x, char * x16) {
    const bool vector = is_aligned(x, 16) && x.ne[0] % 8 == 0;
    if (!op_mul_mat_has_units(ctx, type_of_half<H>)) {
        return scale_rows<value_type<TYPE_F32>>(ctx, x.data, x.nb[1], x.ne[1], x.ne[0], vector, x16, x16_ld(x),
                                                x_exponents(x, x16));
    }
    return convert_rows<value_type<TYPE_F32>, H>(ctx, x.data, x.nb[1], x.ne[1], x.ne[0], vector,
                                                 reinterpret_cast<H *>(x16), x16_ld(x));
}

// Multiplies m rows of w in 16 bits, ldw elements apart.
template <typename H>
cudaError_t mul_mat_16(const op_context & ctx, const void * w, int64_t ldw, int64_t m, const op_tensor & x,
                       const char * x16, const op_tensor & dst, int64_t first_row) {
    constexpr tensor_type type = type_of_half<H>;
    float *               y    = reinterpret_cast<float *>(dst.data) + first_row;
    if (ctx.cublas) {
        return ctx.cublas->mul_mat(ctx.stream, ctx.cublas_workspace, type, m, x.ne[1], x.ne[0], w, ldw, x16, x16_ld(x),
                                   y, dst.nb[1] / 4);
    }
    op_tensor rows = {
        static_cast<char *>(const_cast<void *>(w)), type, { x.ne[0], m, 1, 1 }, { 2, ldw * 2, ldw * 2 * m, ldw * 2 * m }
    };
    op_tensor part          = dst;
    part.data               = reinterpret_cast<char *>(y);
    const mul_mat_args p    = make_args(rows, x, part);
    const dim3         grid = gemm_grid(p.m, p.n, 1);
    if (x.type == type) {
        return launch(ctx, gemm_kernel<value_type<type>, H, true, false, value_type<type>>, grid, GEMM_THREADS, 0, p);
    }
    return launch_gemm<value_type<type>, false>(ctx, p, is_vector(rows, x), grid);
}

// Multiplies rows of w in BF16 without tensor cores for BF16: they are converted to F16 in place, and x16 is scaled
// F16. exponents: output, one per row.
cudaError_t mul_mat_scaled(const op_context & ctx, char * w, int64_t ldw, int64_t m, const op_tensor & x,
                           const char * x16, const op_tensor & dst, int64_t first_row, int * exponents) {
    CUDA_TRY(scale_rows<value_type<TYPE_BF16>>(ctx, w, ldw * 2, m, x.ne[0], ldw % 8 == 0 && x.ne[0] % 8 == 0, w, ldw,
                                               exponents));
    op_tensor x_half = x;
    x_half.data = const_cast<char *>(x16), x_half.type = TYPE_F16;
    x_half.nb[0] = 2, x_half.nb[1] = x16_ld(x) * 2, x_half.nb[2] = x_half.nb[3] = x.ne[1] * x_half.nb[1];
    CUDA_TRY(mul_mat_16<__half>(ctx, w, ldw, m, x_half, x16, dst, first_row));
    const dim3 grid(static_cast<unsigned>(x.ne[1]), static_cast<unsigned>((m + SCALE_THREADS - 1) / SCALE_THREADS));
    return launch(ctx, unscale_kernel, grid, SCALE_THREADS, 0, reinterpret_cast<float *>(dst.data) + first_row,
                  dst.nb[1] / 4, static_cast<int>(m), exponents, x_exponents(x, const_cast<char *>(x16)));
}

// Address at which op_mul_mat_16 leaves the exponents of rows of w.
int * w_exponents(const op_tensor & x, char * scratch) {
    return reinterpret_cast<int *>(scratch + op_mul_mat_x16_nbytes(x));
}

// Converts w to H, one panel at a time, after x16 in scratch.
template <typename T, typename H>
cudaError_t mul_mat_panels(const op_context & ctx, const op_tensor & w, const op_tensor & x, const char * x16,
                           const op_tensor & dst, bool vector, char * scratch) {
    const int64_t ld = x16_ld(x), rows = op_mul_mat_panel_rows(w.ne[1], w.ne[0], PANEL_NBYTES);
    char *        panel = scratch + op_mul_mat_16_scratch_nbytes(w, x);
    for (int64_t row = 0; row < w.ne[1]; row += rows) {
        const int64_t some = std::min(rows, w.ne[1] - row);
        CUDA_TRY((convert_rows<T, H>(ctx, w.data + row * w.nb[1], w.nb[1], some, w.ne[0], vector,
                                     reinterpret_cast<H *>(panel), ld)));
        CUDA_TRY(op_mul_mat_16(ctx, type_of_half<H>, panel, ld, some, x, x16, dst, row, scratch));
    }
    return cudaSuccess;
}

// Multiplies one matrix in 16 bits.
template <typename T, typename H>
cudaError_t mul_mat_converted(const op_context & ctx, const op_tensor & w, const op_tensor & x, const char * x16,
                              const op_tensor & dst, bool vector, char * scratch) {
    if (!x16) {
        CUDA_TRY(op_mul_mat_x16(ctx, type_of_half<H>, x, scratch));
        x16 = scratch;
    }
    if constexpr (std::is_same_v<typename T::block, H> && T::IS_PLAIN) {
        if (vector && has_units<T>(ctx)) { // no conversion
            return mul_mat_16<H>(ctx, w.data, w.nb[1] / 2, w.ne[1], x, x16, dst, 0);
        }
    }
    return mul_mat_panels<T, H>(ctx, w, x, x16, dst, vector, scratch);
}

// Whether the product has fewer columns than GEMM_MIN_N and cuBLAS supports its type and shape.
bool is_narrow_16(const op_tensor & w, const op_tensor & x) {
    const int64_t size = w.ne[0] * w.ne[1], least = size >= LARGE_MATRIX ? CUBLAS_MIN_N_16 : CUBLAS_MIN_N_MIDDLE;
    return (w.type == TYPE_F16 || w.type == TYPE_BF16) && size >= MIDDLE_MATRIX && x.ne[1] >= least &&
           x.ne[1] < GEMM_MIN_N;
}

// Whether cuBLAS is faster: only for a product of one large matrix, and for few columns only if w needs no conversion.
bool use_cublas(const op_context & ctx, const op_tensor & w, const op_tensor & x) {
    const bool columns_ok =
        x.ne[1] >= GEMM_MIN_N || (is_narrow_16(w, x) && is_vector(w, x) && op_mul_mat_has_units(ctx, w.type));
    return ctx.cublas && columns_ok && x.ne[2] * x.ne[3] == 1 && w.ne[0] >= 256 && w.ne[1] >= 256;
}

bool is_shape(const op_tensor & w, const op_tensor & x) {
    constexpr int64_t MAX_SIZE = 1 << 30;

    const bool types_ok = w.type != TYPE_I32 && type_is_weight(w.type) && x.type == TYPE_F32;
    const bool sizes_ok =
        w.ne[0] == x.ne[0] && w.ne[0] > 0 && w.ne[0] <= MAX_SIZE && w.ne[1] <= MAX_SIZE && x.ne[1] <= MAX_SIZE;
    return types_ok && sizes_ok && is_contiguous_rows(w) && is_contiguous_rows(x) &&
           w.ne[0] % type_block_size(w.type) == 0;
}

} // namespace

bool op_mul_mat_supported(const op_tensor & w, const op_tensor & x, const op_tensor & dst) {
    const bool repeats = w.ne[2] != 0 && w.ne[3] != 0 && x.ne[2] % w.ne[2] == 0 && x.ne[3] % w.ne[3] == 0;
    if (!is_shape(w, x) || !repeats || dst.type != TYPE_F32 || !is_contiguous_rows(dst)) {
        return false;
    }
    // quantized rows are read 8 elements at a time, so rows of x must be aligned; data pointers always are
    const bool aligned = x.nb[1] % 16 == 0 && x.nb[2] % 16 == 0 && x.nb[3] % 16 == 0;
    if (type_block_size(w.type) > 1 && !aligned) {
        return false;
    }
    return x.ne[2] * x.ne[3] <= MAX_GRID_YZ && (x.ne[1] + VEC_MAX_COLS - 1) / VEC_MAX_COLS <= MAX_GRID_YZ;
}

bool op_mul_mat_has_units(const op_context & ctx, tensor_type type) { return type == TYPE_F16 || ctx.cc >= 80; }

size_t op_mul_mat_x16_nbytes(const op_tensor & x) {
    return static_cast<size_t>(align_up(x.ne[1] * (x16_ld(x) * 2 + 4), 256)); // values, exponents
}

size_t op_mul_mat_16_scratch_nbytes(const op_tensor & w, const op_tensor & x) {
    return op_mul_mat_x16_nbytes(x) + static_cast<size_t>(align_up(w.ne[1] * 4, 256)); // exponents of w
}

size_t op_mul_mat_scratch_nbytes(const op_tensor & w, const op_tensor & x) {
    if (x.ne[1] < GEMM_MIN_N) {
        return is_narrow_16(w, x) && x.ne[2] * x.ne[3] == 1 ? op_mul_mat_x16_nbytes(x) : 0;
    }
    const int64_t rows = op_mul_mat_panel_rows(w.ne[1], w.ne[0], PANEL_NBYTES);
    return op_mul_mat_16_scratch_nbytes(w, x) + static_cast<size_t>(align_up(rows * x16_ld(x) * 2, 256));
}

tensor_type op_mul_mat_16_type(tensor_type weights) { return weights == TYPE_F16 ? TYPE_F16 : TYPE_BF16; }

cudaError_t op_mul_mat_x16(const op_context & ctx, tensor_type type, const op_tensor & x, char * x16) {
    if (!ctx.cublas && op_mul_mat_has_units(ctx, type)) {
        return cudaSuccess; // gemm_kernel reads x itself
    }
    return type == TYPE_F16 ? convert_x<__half>(ctx, x, x16) : convert_x<__nv_bfloat16>(ctx, x, x16);
}

cudaError_t op_mul_mat_16(const op_context & ctx, tensor_type type, char * w, int64_t ldw, int64_t rows,
                          const op_tensor & x, const char * x16, const op_tensor & dst, int64_t first_row,
                          char * scratch) {
    if (!op_mul_mat_has_units(ctx, type)) {
        return mul_mat_scaled(ctx, w, ldw, rows, x, x16, dst, first_row, w_exponents(x, scratch));
    }
    return type == TYPE_F16 ? mul_mat_16<__half>(ctx, w, ldw, rows, x, x16, dst, first_row)
                            : mul_mat_16<__nv_bfloat16>(ctx, w, ldw, rows, x, x16, dst, first_row);
}

int64_t op_mul_mat_panel_rows(int64_t rows, int64_t cols, int64_t panel_nbytes) {
    const int64_t fits = panel_nbytes / (align_up(cols, 8) * 2), whole_blocks = fits / BLOCK_M * BLOCK_M;
    if (rows <= fits) {
        return rows;
    }
    const int64_t panels = whole_blocks ? (rows + whole_blocks - 1) / whole_blocks : 1;
    return whole_blocks ? align_up((rows + panels - 1) / panels, BLOCK_M) : BLOCK_M;
}

bool op_mul_mat_wants_x16(const op_context & ctx, const op_tensor & w, const op_tensor & x) {
    return w.type != TYPE_F32 && use_cublas(ctx, w, x);
}

cudaError_t op_mul_mat(const op_context & ctx, const op_tensor & w, const op_tensor & x, const op_tensor & dst,
                       char * scratch, const char * x16, bool constant) {
    if (op_mul_mat_quantized_supported(ctx, w, x)) {
        return op_mul_mat_quantized(ctx, w, x, dst, constant);
    }
    const mul_mat_args p         = make_args(w, x, dst);
    const bool         vector    = is_vector(w, x);
    const int          n_batches = static_cast<int>(x.ne[2] * x.ne[3]);
    return with_type(w.type, [&](auto t) {
        using T = decltype(t);
        if constexpr (!std::is_same_v<T, value_type<TYPE_F32>>) {
            if (use_cublas(ctx, w, x) || (p.n >= GEMM_MIN_N && n_batches == 1 && !has_units<T>(ctx))) {
                return mul_mat_converted<T, half_of<T>>(ctx, w, x, x16, dst, vector, scratch);
            }
            if (p.n >= GEMM_MIN_N && has_units<T>(ctx)) {
                return launch_gemm<T, false>(ctx, p, vector, gemm_grid(p.m, p.n, n_batches));
            }
        }
        return mul_mat_vec<T>(ctx, p, vector, n_batches);
    });
}

bool op_mul_mat_id_supported(const op_tensor & w, const op_tensor & x, const op_tensor & ids, const op_tensor & dst) {
    const bool x_ok   = w.ne[3] == 1 && x.ne[3] == 1 && x.ne[1] > 0 && ids.ne[0] % x.ne[1] == 0;
    const bool ids_ok = ids.type == TYPE_I32 && ids.ne[1] == x.ne[2] && ids.ne[2] == 1 && ids.ne[3] == 1;
    const bool fits   = ids.ne[0] * ids.ne[1] <= (1 << 24) && w.ne[2] <= MAX_GRID_YZ;
    const bool dst_ok = dst.type == TYPE_F32 && is_contiguous_rows(dst);
    if (!is_shape(w, x) || !x_ok || !ids_ok || !fits || !dst_ok) {
        return false;
    }
    return type_block_size(w.type) == 1 || (x.nb[1] % 16 == 0 && x.nb[2] % 16 == 0); // see op_mul_mat_supported
}

size_t op_mul_mat_id_scratch_nbytes(const op_tensor & w, const op_tensor &, const op_tensor & ids) {
    return static_cast<size_t>(align_up((w.ne[2] + 1 + ids.ne[0] * ids.ne[1]) * 4, 256));
}

static void set_ids(mul_mat_args & p, const op_tensor & ids, int64_t n_experts) {
    p.ids       = ids.data;
    p.ids_nb0   = ids.nb[0];
    p.ids_nb1   = ids.nb[1];
    p.n_used    = static_cast<int>(ids.ne[0]);
    p.n_experts = static_cast<int>(n_experts);
}

// w: all n_experts experts, or some of them.
static mul_mat_args make_expert_args(const op_tensor & w, const op_tensor & x, const op_tensor & ids,
                                     const op_tensor & dst, int64_t n_experts) {
    mul_mat_args p = make_args(w, x, dst);
    set_ids(p, ids, n_experts);
    p.x_ne1 = static_cast<int>(x.ne[1]);
    return p;
}

cudaError_t op_mul_mat_id_sort(const op_context & ctx, int64_t n_experts, const op_tensor & ids, char * scratch) {
    mul_mat_args p = {};
    set_ids(p, ids, n_experts);
    int * begin = reinterpret_cast<int *>(scratch);
    return launch(ctx, sort_experts_kernel, 1, SORT_THREADS, 0, p, static_cast<int>(ids.ne[1]), begin,
                  begin + n_experts + 1);
}

// Products of some experts, after op_mul_mat_id_sort.
template <typename T>
static cudaError_t mul_mat_sorted(const op_context & ctx, mul_mat_args p, bool vector, int64_t first_expert,
                                  int64_t some_experts, int64_t n_tokens, const char * scratch) {
    const int * begin = reinterpret_cast<const int *>(scratch);
    p.expert_begin    = begin + first_expert;
    p.expert_entries  = begin + p.n_experts + 1;
    // the number of tokens of an expert is only on the GPU, so blocks without work return
    return launch_gemm<T, true>(ctx, p, vector, gemm_grid(p.m, n_tokens * p.n_used, some_experts));
}

cudaError_t op_mul_mat_id_16(const op_context & ctx, const op_tensor & w, int64_t first_expert, int64_t n_experts,
                             const op_tensor & x, const op_tensor & ids, const op_tensor & dst, int64_t first_row,
                             const char * scratch) {
    op_tensor part = dst;
    part.data += first_row * 4;
    const mul_mat_args p = make_expert_args(w, x, ids, part, n_experts);
    return with_type_of<TYPE_F16, TYPE_BF16>(w.type, [&](auto t) {
        return mul_mat_sorted<decltype(t)>(ctx, p, is_vector(w, x), first_expert, w.ne[2], ids.ne[1], scratch);
    });
}

cudaError_t op_mul_mat_id(const op_context & ctx, const op_tensor & w, const op_tensor & x, const op_tensor & ids,
                          const op_tensor & dst, char * scratch) {
    mul_mat_args p        = make_expert_args(w, x, ids, dst, w.ne[2]);
    const bool   vector   = is_vector(w, x);
    const int    n_tokens = static_cast<int>(ids.ne[1]);
    return with_type(w.type, [&](auto t) {
        using T = decltype(t);
        if constexpr (!std::is_same_v<T, value_type<TYPE_F32>>) {
            if (n_tokens >= GEMM_MIN_N && has_units<T>(ctx)) {
                CUDA_TRY(op_mul_mat_id_sort(ctx, w.ne[2], ids, scratch));
                return mul_mat_sorted<T>(ctx, p, vector, 0, w.ne[2], n_tokens, scratch);
            }
        }
        p.n = 1;
        for (int first = 0; first < n_tokens; first += MAX_GRID_YZ / p.n_used) { // the grid's z
            const int    some = std::min(n_tokens - first, MAX_GRID_YZ / p.n_used);
            mul_mat_args part = p;
            part.ids += first * p.ids_nb1;
            part.x += first * p.x_nb2;
            part.y += first * p.y_nb2;
            CUDA_TRY((launch_vec<T, 1, true>(ctx, part, vector, some * p.n_used)));
        }
        return cudaSuccess;
    });
}

} // namespace macko::cuda
