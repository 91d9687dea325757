// Makes a matrix by columns from its rows, and multiplies by it (columns.cuh).
#include "cuda/sparse/columns.cuh"

#include "cuda/lib/common.cuh"
#include "cuda/sparse/mul-mat-params.cuh"

#include <algorithm>
#include <vector>

namespace macko::cuda {

// ---- from rows to columns ----

namespace {

constexpr int64_t STRIP = cuda_columns::STRIP;

// Dense rows of some strips of one matrix. Both kernels below have a thread for each column of a strip.
struct dense_strips {
    const uint16_t * rows;
    int64_t          ld; // elements
    int64_t          n_rows, cols;
    int64_t          first; // the first of these strips among all
};

constexpr int MAKE_THREADS = 256;

__device__ __forceinline__ int64_t column_of_thread() {
    return static_cast<int64_t>(blockIdx.x) * MAKE_THREADS + threadIdx.x;
}

// the masks, and in place of the first values their numbers
__global__ void __launch_bounds__(MAKE_THREADS) mark_columns(dense_strips d, column_place * places) {
    const int64_t column = column_of_thread(), first_row = blockIdx.y * STRIP;
    if (column >= d.cols) {
        return;
    }
    uint32_t mask = 0;
    for (int64_t r = 0; r < STRIP && first_row + r < d.n_rows; r++) {
        mask |= static_cast<uint32_t>((d.rows[(first_row + r) * d.ld + column] & 0x7fff) != 0) << r;
    }
    places[(d.first + blockIdx.y) * d.cols + column] = { mask, static_cast<uint32_t>(__popc(mask)) };
}

__global__ void __launch_bounds__(MAKE_THREADS)
    fill_columns(dense_strips d, const column_place * places, uint16_t * values) {
    const int64_t column = column_of_thread();
    if (column >= d.cols) {
        return;
    }
    const column_place place = places[(d.first + blockIdx.y) * d.cols + column];
    uint16_t *         to    = values + place.first;
    for (uint32_t mask = place.mask; mask != 0; mask &= mask - 1) {
        *to++ = d.rows[(blockIdx.y * STRIP + (__ffs(static_cast<int>(mask)) - 1)) * d.ld + column];
    }
}

// f(dense_strips, grid) for all strips of all matrices, some at a time
template <typename F>
cudaError_t for_each_strips(const cuda_sparse_matrix & w, const cuda_columns & c, uint16_t * dense, int64_t ld,
                            int64_t strips_at_once, cudaStream_t stream, F && f) {
    for (int64_t matrix = 0; matrix < c.n_matrices; matrix++) {
        for (int64_t strip = 0; strip < c.n_strips(); strip += strips_at_once) {
            const int64_t n         = std::min(strips_at_once, c.n_strips() - strip);
            const int64_t n_rows    = std::min(n * STRIP, c.rows - strip * STRIP);
            const int64_t first_row = matrix * c.rows + strip * STRIP;
            CUDA_TRY(cuda_sparse_densify(w, first_row, first_row + n_rows, dense, ld, stream));
            f(dense_strips{ dense, ld, n_rows, c.cols, matrix * c.n_strips() + strip },
              dim3(static_cast<unsigned>((c.cols + MAKE_THREADS - 1) / MAKE_THREADS), static_cast<unsigned>(n)));
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
    void *            dense      = nullptr;
    CUDA_OK(cudaMalloc(&dense, static_cast<size_t>(strips * STRIP * ld * 2)));
    const cuda_memory owner(dense);
    const auto        each = [&](auto && f) {
        return for_each_strips(w, c, static_cast<uint16_t *>(dense), ld, strips, stream, f);
    };

    CUDA_OK(
        each([&](const dense_strips & d, dim3 grid) { mark_columns<<<grid, MAKE_THREADS, 0, stream>>>(d, c.places); }));
    std::vector<column_place> places(static_cast<size_t>(c.n_places()));
    const size_t              places_nbytes = places.size() * sizeof(column_place);
    CUDA_OK(cudaMemcpyAsync(places.data(), c.places, places_nbytes, cudaMemcpyDeviceToHost, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    int64_t nnz = 0;
    for (column_place & place : places) {
        const uint32_t count = place.first;
        place.first          = static_cast<uint32_t>(nnz);
        nnz += count;
    }
    if (nnz > desc.nnz) {
        return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%lld non-zeros by columns, %lld by rows",
                    static_cast<long long>(nnz), static_cast<long long>(desc.nnz));
    }
    CUDA_OK(cudaMemcpyAsync(c.places, places.data(), places_nbytes, cudaMemcpyHostToDevice, stream));
    CUDA_OK(cudaMemsetAsync(c.values, 0, static_cast<size_t>((desc.nnz + 1) * 2), stream));
    CUDA_OK(each([&](const dense_strips & d, dim3 grid) {
        fill_columns<<<grid, MAKE_THREADS, 0, stream>>>(d, c.places, c.values);
    }));
    CUDA_OK(cudaStreamSynchronize(stream));
    c.skips = true;
    *out    = c;
    return GGML_MACKO_STATUS_OK;
}

// ---- products ----

namespace {

constexpr int WARPS = 32; // of a block, which has a strip
constexpr int ROUND = 32; // columns
constexpr int AHEAD = 4;  // rounds whose x are fetched at once
constexpr int CHUNK = 32; // columns whose places are fetched at once
constexpr int BATCH = 8;  // columns whose values are fetched at once

struct columns_launch {
    const column_place * places;
    const uint16_t *     values;
    const float *        x;
    float *              y;
    const float *        residual;
    const float *        bias;
    const int32_t *      expert_ids;
    int64_t              ldx, ldy, expert_ids_stride;
    int32_t              matrix, n_matrices; // matrix: unless there are expert_ids
    int32_t              rows, cols, n_strips;
    bool                 skips, square_relu;
};

// a column that a warp adds, as shared memory holds it: mask and first value of its place, the bits of x
using active_column = uint4;

// What `n` columns, rounded up to whole batches, add to the sum of a lane's row. Columns without a mask add nothing. A
// value is fetched whether the row has one there or not, so that no fetch waits for a decision.
template <typename T>
__device__ __forceinline__ float add_columns(float sum, const active_column * columns, int n, const T * values,
                                             unsigned lane) {
    const unsigned rows_before = (1u << lane) - 1;
    for (int k = 0; k < n; k += BATCH) {
        T     value[BATCH];
        float x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const active_column c = columns[k + i];
            value[i]              = values[c.y + static_cast<uint32_t>(__popc(c.x & rows_before))];
            x[i]                  = c.x >> lane & 1 ? __uint_as_float(c.z) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            sum = fmaf(to_f32(value[i]), x[i], sum);
        }
    }
    return sum;
}

// A warp has every WARPS-th round of columns. It lists those that count, fetches their places, one for each lane, and
// adds one column after the other; a lane has a row. So the order of a row's terms does not depend on which columns are
// left out, and adding the product with a zero changes no bit of a sum.
template <typename T>
__global__ void __launch_bounds__(WARPS * 32, 1) columns_kernel(const __grid_constant__ columns_launch p) {
    __shared__ uint16_t      lists[WARPS][AHEAD * ROUND + CHUNK];
    __shared__ active_column chunks[WARPS][CHUNK];
    __shared__ float         sums[WARPS][STRIP];
    const unsigned           lane = threadIdx.x % 32, lanes_before = (1u << lane) - 1;
    const int                warp  = static_cast<int>(threadIdx.x) / 32;
    const int                strip = static_cast<int>(blockIdx.x), column = static_cast<int>(blockIdx.y);
    cuda_wait_for_previous();
    cuda_allow_next();
    const int  matrix   = p.expert_ids ? p.expert_ids[column * p.expert_ids_stride] : p.matrix;
    const bool is_there = matrix >= 0 && matrix < p.n_matrices;
    const int  cols     = is_there ? p.cols : 0;

    const column_place * places =
        p.places + (static_cast<int64_t>(is_there ? matrix : 0) * p.n_strips + strip) * p.cols;
    const float *   x         = p.x + column * p.ldx;
    uint16_t *      list      = lists[warp];
    active_column * chunk     = chunks[warp];
    const auto      value_at  = [&](int at) { return p.square_relu ? fmaxf(x[at], 0.0f) * fmaxf(x[at], 0.0f) : x[at]; };
    const auto      column_of = [&](int round) { return round * ROUND + static_cast<int>(lane); };
    const auto      fetch     = [&](int i, int end) { // the lane's of the columns from i on in the list
        active_column c = {};
        if (i + static_cast<int>(lane) < end) {
            const int   at    = list[i + static_cast<int>(lane)];
            const uint2 place = __ldg(reinterpret_cast<const uint2 *>(places + at));
            c                 = make_uint4(place.x, place.y, __float_as_uint(value_at(at)), 0);
        }
        return c;
    };
    float      sum = 0;
    int        n   = 0; // columns in the list
    float      next[AHEAD];
    const auto fetch_x = [&](int round) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = column_of(round + i * WARPS);
            next[i]      = at < cols ? value_at(at) : 0.0f;
        }
    };
    fetch_x(warp);
    for (int round = warp; round * ROUND < cols; round += AHEAD * WARPS) {
        bool counts[AHEAD]; // NaN counts
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            counts[i] = next[i] != 0 || (!p.skips && column_of(round + i * WARPS) < cols);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const unsigned found = __ballot_sync(FULL_WARP, counts[i]);
            if (counts[i]) {
                list[n + __popc(found & lanes_before)] = static_cast<uint16_t>(column_of(round + i * WARPS));
            }
            n += __popc(found);
        }
        fetch_x(round + AHEAD * WARPS);
        __syncwarp();
        const bool    is_last = (round + AHEAD * WARPS) * ROUND >= cols;
        const int     end     = is_last ? n : n / CHUNK * CHUNK; // the others wait for more
        active_column mine    = fetch(0, end);
        for (int i = 0; i < end; i += CHUNK) {
            chunk[lane] = mine;
            mine        = fetch(i + CHUNK, end);
            __syncwarp();
            sum = add_columns(sum, chunk, min(CHUNK, end - i), reinterpret_cast<const T *>(p.values), lane);
            __syncwarp();
        }
        n -= end;
        const uint16_t waiting = static_cast<int>(lane) < n ? list[end + static_cast<int>(lane)] : uint16_t(0);
        __syncwarp();
        list[lane] = waiting;
        __syncwarp();
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
    p.places = c.places, p.values = c.values;
    p.x = a.x, p.ldx = a.ldx;
    p.y = a.y[0], p.ldy = a.ldy[0];
    p.residual = a.residual[0], p.bias = a.bias[0];
    p.expert_ids = a.expert_ids, p.expert_ids_stride = a.expert_ids_stride;
    p.matrix     = static_cast<int32_t>(a.row_begin[0] / c.rows);
    p.n_matrices = static_cast<int32_t>(c.n_matrices);
    p.rows = static_cast<int32_t>(c.rows), p.cols = static_cast<int32_t>(c.cols);
    p.n_strips = static_cast<int32_t>(c.n_strips());
    p.skips = c.skips, p.square_relu = a.square_relu;
    const dim3 grid(static_cast<unsigned>(c.n_strips()), static_cast<unsigned>(a.n));
    return c.type == GGML_MACKO_TYPE_F16
               ? launch_kernel(columns_kernel<__half>, p, grid, WARPS * 32, 0, a.programmatic, stream)
               : launch_kernel(columns_kernel<__nv_bfloat16>, p, grid, WARPS * 32, 0, a.programmatic, stream);
}

} // namespace macko::cuda
