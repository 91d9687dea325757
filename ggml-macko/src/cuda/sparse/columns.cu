// Makes a matrix by columns from its rows, and multiplies by it (columns.cuh).
#include "cuda/sparse/columns.cuh"

#include "cuda/lib/common.cuh"
#include "cuda/sparse/mul-mat-params.cuh"

#include <algorithm>
#include <vector>

namespace macko::cuda {

// ---- from rows to columns ----

namespace {

constexpr int64_t STRIP = cuda_columns::STRIP, ROUND = cuda_columns::ROUND;

// Dense rows of some strips of one matrix, from which both kernels below are fed: a warp per round.
struct dense_strips {
    const uint16_t * rows;
    int64_t          ld; // elements
    int64_t          n_rows, cols;
    int64_t          first;    // the first of these strips' rounds among all
    int64_t          n_rounds; // of a strip
};

constexpr int MAKE_WARPS = 8; // of a block

__device__ __forceinline__ bool is_nonzero(uint16_t bits) { return (bits & 0x7fff) != 0; }

__device__ __forceinline__ int64_t round_of_warp() {
    return static_cast<int64_t>(blockIdx.x) * MAKE_WARPS + threadIdx.x / 32;
}

// the masks, and in place of begins the number of values of each round
__global__ void __launch_bounds__(MAKE_WARPS * 32) mark_columns(dense_strips d, uint32_t * masks, uint32_t * counts) {
    const int64_t round = round_of_warp(), lane = threadIdx.x % 32, column = round * ROUND + lane;
    if (round >= d.n_rounds) {
        return;
    }
    const int64_t first_row = blockIdx.y * STRIP;
    uint32_t      mask      = 0;
    for (int64_t r = 0; r < STRIP && first_row + r < d.n_rows && column < d.cols; r++) {
        mask |= static_cast<uint32_t>(is_nonzero(d.rows[(first_row + r) * d.ld + column])) << r;
    }
    const int64_t at         = d.first + blockIdx.y * d.n_rounds + round;
    masks[at * ROUND + lane] = mask;
    const int through        = warp_prefix_sum(__popc(mask));
    if (lane == 31) {
        counts[at] = static_cast<uint32_t>(through);
    }
}

__global__ void __launch_bounds__(MAKE_WARPS * 32)
    fill_columns(dense_strips d, const uint32_t * masks, const uint32_t * begins, uint16_t * values) {
    const int64_t round = round_of_warp(), lane = threadIdx.x % 32, column = round * ROUND + lane;
    if (round >= d.n_rounds) {
        return;
    }
    const int64_t at    = d.first + blockIdx.y * d.n_rounds + round;
    uint32_t      mask  = masks[at * ROUND + lane];
    const int     count = __popc(mask);
    uint16_t *    to    = values + begins[at] + static_cast<uint32_t>(warp_prefix_sum(count) - count);
    for (; mask != 0; mask &= mask - 1) {
        *to++ = d.rows[(blockIdx.y * STRIP + (__ffs(static_cast<int>(mask)) - 1)) * d.ld + column];
    }
}

// f(dense_strips, strips) for all strips of all matrices, some at a time
template <typename F>
cudaError_t for_each_strips(const cuda_sparse_matrix & w, const cuda_columns & c, uint16_t * dense, int64_t ld,
                            int64_t strips_at_once, cudaStream_t stream, F && f) {
    for (int64_t matrix = 0; matrix < c.n_matrices; matrix++) {
        for (int64_t strip = 0; strip < c.n_strips(); strip += strips_at_once) {
            const int64_t n         = std::min(strips_at_once, c.n_strips() - strip);
            const int64_t n_rows    = std::min(n * STRIP, c.rows - strip * STRIP);
            const int64_t first_row = matrix * c.rows + strip * STRIP;
            CUDA_TRY(cuda_sparse_densify(w, first_row, first_row + n_rows, dense, ld, stream));
            const int64_t first = (matrix * c.n_strips() + strip) * c.n_rounds();
            f(dense_strips{ dense, ld, n_rows, c.cols, first, c.n_rounds() },
              dim3(static_cast<unsigned>((c.n_rounds() + MAKE_WARPS - 1) / MAKE_WARPS), static_cast<unsigned>(n)));
            CUDA_TRY(cudaGetLastError());
        }
    }
    return cudaSuccess;
}

} // namespace

int cuda_columns_make(const cuda_sparse_matrix & w, const macko_desc & desc, int64_t rows_per_matrix, void * memory,
                      cudaStream_t stream, cuda_columns * out) {
    constexpr int64_t MOST_DENSE = int64_t(16) << 20; // bytes
    cuda_columns      c          = cuda_columns_bind(desc, rows_per_matrix, memory);
    const int64_t     ld         = (c.cols + 7) / 8 * 8;
    const int64_t     strips     = std::clamp<int64_t>(MOST_DENSE / (STRIP * ld * 2), 1, c.n_strips());
    const int64_t     n_rounds   = c.n_matrices * c.n_strips() * c.n_rounds();
    void *            dense      = nullptr;
    CUDA_OK(cudaMalloc(&dense, static_cast<size_t>(strips * STRIP * ld * 2)));
    const cuda_memory owner(dense);
    const auto        each = [&](auto && f) {
        return for_each_strips(w, c, static_cast<uint16_t *>(dense), ld, strips, stream, f);
    };

    CUDA_OK(each([&](const dense_strips & d, dim3 grid) {
        mark_columns<<<grid, MAKE_WARPS * 32, 0, stream>>>(d, c.masks, c.begins);
    }));
    std::vector<uint32_t> begins(static_cast<size_t>(n_rounds));
    const size_t          begins_nbytes = begins.size() * sizeof(uint32_t);
    CUDA_OK(cudaMemcpyAsync(begins.data(), c.begins, begins_nbytes, cudaMemcpyDeviceToHost, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    int64_t nnz = 0;
    for (uint32_t & begin : begins) {
        const uint32_t count = begin;
        begin                = static_cast<uint32_t>(nnz);
        nnz += count;
    }
    if (nnz > desc.nnz) {
        return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%lld non-zeros by columns, %lld by rows",
                    static_cast<long long>(nnz), static_cast<long long>(desc.nnz));
    }
    CUDA_OK(cudaMemcpyAsync(c.begins, begins.data(), begins_nbytes, cudaMemcpyHostToDevice, stream));
    CUDA_OK(each([&](const dense_strips & d, dim3 grid) {
        fill_columns<<<grid, MAKE_WARPS * 32, 0, stream>>>(d, c.masks, c.begins, c.values);
    }));
    CUDA_OK(cudaStreamSynchronize(stream));
    c.skips = true;
    *out    = c;
    return GGML_MACKO_STATUS_OK;
}

// ---- products ----

namespace {

constexpr int WARPS = 32; // of a block, which has a strip
constexpr int AHEAD = 4;  // rounds that are fetched at once
constexpr int BATCH = 16; // columns whose values are fetched at once
constexpr int MOST  = 64; // columns in a warp's list, and BATCH empty ones behind them

struct columns_launch {
    const uint32_t * masks;
    const uint32_t * begins;
    const uint16_t * values;
    const float *    x;
    float *          y;
    const float *    residual;
    const float *    bias;
    const int32_t *  expert_ids;
    int64_t          ldx, ldy, expert_ids_stride;
    int32_t          matrix, n_matrices; // matrix: unless there are expert_ids
    int32_t          rows, cols, n_strips, n_rounds;
    bool             skips, square_relu;
};

// One round of a strip, as a lane has it: a column.
struct lane_column {
    uint32_t mask;
    uint32_t begin; // of the round
    float    x;
};

// A column of a warp's list.
struct __align__(16) listed_column {
    uint32_t mask;
    uint32_t first; // value
    float    x;
    uint32_t unused;
};

// What the columns of a list add to the sum of a lane's row. Behind the last there are empty ones up to a whole batch.
template <typename T>
__device__ __forceinline__ float add_columns(float sum, const listed_column * list, int n, const T * values,
                                             unsigned lane) {
    const unsigned rows_before = (1u << lane) - 1;
    for (int k = 0; k < n; k += BATCH) {
        float value[BATCH], x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const listed_column c  = list[k + i];
            const bool          is = c.mask >> lane & 1;
            // an infinite x meets no value that is not there
            x[i]     = is ? c.x : 0.0f;
            value[i] = is ? to_f32(values[c.first + static_cast<uint32_t>(__popc(c.mask & rows_before))]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            sum = fmaf(value[i], x[i], sum);
        }
    }
    return sum;
}

// A warp takes every WARPS-th round. It lists the columns that count, and goes through them one after the other; a lane
// has a row. So the order of a row's terms does not depend on which columns are left out, and adding the product with a
// zero changes no bit of a sum.
template <typename T>
__global__ void __launch_bounds__(WARPS * 32, 1) columns_kernel(const __grid_constant__ columns_launch p) {
    __shared__ listed_column lists[WARPS][MOST + BATCH];
    __shared__ float         sums[WARPS][STRIP];
    const unsigned           lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes_before = (1u << lane) - 1;
    const int                strip = static_cast<int>(blockIdx.x), column = static_cast<int>(blockIdx.y);
    cuda_wait_for_previous();
    cuda_allow_next();
    const int  matrix   = p.expert_ids ? p.expert_ids[column * p.expert_ids_stride] : p.matrix;
    const bool is_there = matrix >= 0 && matrix < p.n_matrices;
    const int  n_rounds = is_there ? p.n_rounds : 0;

    const int64_t   first = (static_cast<int64_t>(is_there ? matrix : 0) * p.n_strips + strip) * p.n_rounds;
    const float *   x     = p.x + column * p.ldx;
    listed_column * list  = lists[warp];
    const auto      fetch = [&](int round) {
        lane_column c  = {};
        const int   at = round * static_cast<int>(ROUND) + static_cast<int>(lane);
        if (round < n_rounds) {
            c.mask  = load_streaming(p.masks + (first + round) * ROUND + lane);
            c.begin = p.begins[first + round];
            c.x     = at < p.cols ? x[at] : 0.0f;
            c.x     = p.square_relu ? fmaxf(c.x, 0.0f) * fmaxf(c.x, 0.0f) : c.x;
        }
        return c;
    };
    float sum = 0;
    int   n   = 0; // columns in the list
    for (int round = static_cast<int>(warp); round < n_rounds; round += AHEAD * WARPS) {
        lane_column fetched[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            fetched[i] = fetch(round + i * WARPS);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const lane_column c      = fetched[i];
            const int         count  = __popc(c.mask);
            const bool        counts = c.mask != 0 && (c.x != 0 || !p.skips); // NaN counts
            const unsigned    found  = __ballot_sync(FULL_WARP, counts);
            const uint32_t    value  = c.begin + static_cast<uint32_t>(warp_prefix_sum(count) - count);
            if (counts) {
                list[n + __popc(found & lanes_before)] = { c.mask, value, c.x, 0 };
            }
            n += __popc(found);
            if (n > MOST - static_cast<int>(ROUND) || (i == AHEAD - 1 && round + AHEAD * WARPS >= n_rounds)) {
                if (lane < BATCH) {
                    list[n + static_cast<int>(lane)].mask = 0;
                }
                __syncwarp();
                sum = add_columns(sum, list, n, reinterpret_cast<const T *>(p.values), lane);
                n   = 0;
                __syncwarp();
            }
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    const int row = strip * static_cast<int>(STRIP) + static_cast<int>(lane);
    if (warp != 0 || row >= p.rows) {
        return;
    }
    float y = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        y += sums[i][lane];
    }
    const int64_t at = column * p.ldy + row;
    p.y[at]          = y + (p.bias ? p.bias[row] : 0.0f) + (p.residual ? p.residual[at] : 0.0f);
}

} // namespace

bool cuda_columns_serve(const cuda_sparse_mul_mat_params & a) {
    const cuda_columns * c = a.w[0]->columns;
    if (!c || a.n_matrices != 1 || a.norm_weight || a.silu_mul || (a.n != 1 && !a.expert_ids)) {
        return false;
    }
    return a.expert_ids ? a.expert_rows == c->rows
                        : a.row_begin[0] % c->rows == 0 && a.row_end[0] - a.row_begin[0] == c->rows;
}

cudaError_t cuda_columns_mul_mat(const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    const cuda_columns & c = *a.w[0]->columns;
    columns_launch       p = {};
    p.masks = c.masks, p.begins = c.begins, p.values = c.values;
    p.x = a.x, p.ldx = a.ldx;
    p.y = a.y[0], p.ldy = a.ldy[0];
    p.residual = a.residual[0], p.bias = a.bias[0];
    p.expert_ids = a.expert_ids, p.expert_ids_stride = a.expert_ids_stride;
    p.matrix     = static_cast<int32_t>(a.row_begin[0] / c.rows);
    p.n_matrices = static_cast<int32_t>(c.n_matrices);
    p.rows = static_cast<int32_t>(c.rows), p.cols = static_cast<int32_t>(c.cols);
    p.n_strips = static_cast<int32_t>(c.n_strips()), p.n_rounds = static_cast<int32_t>(c.n_rounds());
    p.skips = c.skips, p.square_relu = a.square_relu;
    const dim3 grid(static_cast<unsigned>(c.n_strips()), static_cast<unsigned>(a.n));
    return c.type == GGML_MACKO_TYPE_F16
               ? launch_kernel(columns_kernel<__half>, p, grid, WARPS * 32, 0, a.programmatic, stream)
               : launch_kernel(columns_kernel<__nv_bfloat16>, p, grid, WARPS * 32, 0, a.programmatic, stream);
}

} // namespace macko::cuda
