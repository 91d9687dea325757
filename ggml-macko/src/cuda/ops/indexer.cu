// The choice of keys for sparse attention: scores of a lightning indexer, the largest elements of a row, and pooled
// scores.
#include "cuda/ops/common.cuh"

#include <cfloat>

namespace macko::cuda {

namespace {

constexpr int THREADS = 256;

// ---- scores ----

constexpr int KEYS = 64, HEADS = 64, DIMS = 32; // of a step of a block
constexpr int PER_THREAD = 4;                   // keys, and heads, of a thread
constexpr int HEAD_LANES = HEADS / PER_THREAD;
static_assert(KEYS * DIMS == 8 * THREADS && KEYS == HEADS && KEYS / PER_THREAD * HEAD_LANES == THREADS, "a step");

// Elements of rows [0, n) of `rows`, from element `dim` on, transposed; 0 outside of it. A thread has 8 elements.
template <typename T>
__device__ __forceinline__ void load_step(float (&to)[DIMS][KEYS], const char * rows, int64_t stride, int64_t n,
                                          int64_t n_dims, int64_t dim) {
    const int row   = static_cast<int>(threadIdx.x) % KEYS;
    const int first = static_cast<int>(threadIdx.x) / KEYS * 8;
    float     x[8]  = {};
    if (row < n && dim + first < n_dims) {
        read_chunk<T, 8>(rows + row * stride, dim + first, sizeof(typename T::block), x);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        to[first + k][row] = x[k];
    }
}

// A block has KEYS keys (blockIdx.x) and a token (blockIdx.y) of a stream (blockIdx.z).
template <typename T>
__global__ void __launch_bounds__(THREADS)
    indexer_scores_kernel(op_tensor q, op_tensor k, op_tensor weights, op_tensor mask, op_tensor dst) {
    wait_for_previous();
    __shared__ __align__(16) float keys[DIMS][KEYS], heads[DIMS][HEADS];
    const int64_t token = blockIdx.y, stream = blockIdx.z, first_key = static_cast<int64_t>(blockIdx.x) * KEYS;
    const int     my_head = static_cast<int>(threadIdx.x) % HEAD_LANES * PER_THREAD;
    const int     my_key  = static_cast<int>(threadIdx.x) / HEAD_LANES * PER_THREAD;
    const char *  k_rows  = k.data + first_key * k.nb[2] + stream * k.nb[3];
    const float * w = reinterpret_cast<const float *>(weights.data + token * weights.nb[1] + stream * weights.nb[3]);
    float         score[PER_THREAD] = {};
    for (int64_t head = 0; head < q.ne[1]; head += HEADS) {
        const char * q_rows                          = q.data + head * q.nb[1] + token * q.nb[2] + stream * q.nb[3];
        float        product[PER_THREAD][PER_THREAD] = {}; // key, head
        for (int64_t dim = 0; dim < q.ne[0]; dim += DIMS) {
            __syncthreads(); // of the previous step
            load_step<T>(keys, k_rows, k.nb[2], k.ne[2] - first_key, q.ne[0], dim);
            load_step<value_type<TYPE_F32>>(heads, q_rows, q.nb[1], q.ne[1] - head, q.ne[0], dim);
            __syncthreads();
#pragma unroll
            for (int d = 0; d < DIMS; d++) {
                const float4 a4            = *reinterpret_cast<const float4 *>(&keys[d][my_key]);
                const float4 b4            = *reinterpret_cast<const float4 *>(&heads[d][my_head]);
                const float  a[PER_THREAD] = { a4.x, a4.y, a4.z, a4.w }, b[PER_THREAD] = { b4.x, b4.y, b4.z, b4.w };
#pragma unroll
                for (int i = 0; i < PER_THREAD * PER_THREAD; i++) {
                    product[i / PER_THREAD][i % PER_THREAD] += a[i / PER_THREAD] * b[i % PER_THREAD];
                }
            }
        }
#pragma unroll
        for (int h = 0; h < PER_THREAD; h++) {
            const float weight = head + my_head + h < q.ne[1] ? w[head + my_head + h] : 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                score[i] += fmaxf(product[i][h], 0) * weight;
            }
        }
    }
    const __half * m =
        reinterpret_cast<const __half *>(mask.data + token * mask.nb[1] + stream % mask.ne[3] * mask.nb[3]);
    float * d = reinterpret_cast<float *>(dst.data + token * dst.nb[1] + stream * dst.nb[3]);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const float   sum = warp_sum<HEAD_LANES>(score[i]);
        const int64_t key = first_key + my_key + i;
        if (my_head == 0 && key < dst.ne[0]) {
            d[key] = sum + __half2float(m[key]);
        }
    }
}

// ---- the largest elements ----

constexpr int MAX_THREADS = 1024;

// Sum of v over the threads before this one, and *all over the block. totals: 32 numbers of shared memory.
__device__ __forceinline__ uint32_t block_prefix(uint32_t v, uint32_t * totals, uint32_t * all) {
    const int      lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
    const int      n_warps = static_cast<int>(blockDim.x) / WARP;
    const uint32_t sum     = warp_prefix_sum(v);
    __syncthreads(); // other threads may still read totals
    if (lane == WARP - 1) {
        totals[warp] = sum;
    }
    __syncthreads();
    const uint32_t sums   = warp_prefix_sum(lane < n_warps ? totals[lane] : 0);
    *all                  = __shfl_sync(FULL_WARP, sums, WARP - 1);
    const uint32_t before = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
    return (warp ? before : 0) + sum - v;
}

// A block finds the key of the last element that belongs to the largest, 8 bits at a time from the highest, and then
// collects the elements with greater keys, and as many equal ones as are missing.
__global__ void __launch_bounds__(MAX_THREADS) top_k_kernel(op_tensor x, op_tensor dst) {
    wait_for_previous();
    constexpr int       BINS = 256, BINS_PER_LANE = BINS / WARP;
    __shared__ uint32_t counts[BINS], totals[WARP], chosen, missing;
    const row_index     row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const float *       v   = reinterpret_cast<const float *>(row_of(x, row));
    const int64_t       n   = x.ne[0];
    uint32_t            key = 0, need = static_cast<uint32_t>(dst.ne[0]);
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = static_cast<int>(threadIdx.x); i < BINS; i += static_cast<int>(blockDim.x)) {
            counts[i] = 0;
        }
        __syncthreads();
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const uint32_t own = sort_key(v[i]);
            if (shift == 24 || own >> (shift + 8) == key >> (shift + 8)) {
                atomicAdd(&counts[own >> shift & (BINS - 1)], 1u); // an integer: the order does not matter
            }
        }
        __syncthreads();
        if (threadIdx.x < WARP) { // lane 0 has the highest bins
            const int first = BINS - 1 - static_cast<int>(threadIdx.x) * BINS_PER_LANE;
            uint32_t  sum   = 0;
            for (int i = 0; i < BINS_PER_LANE; i++) {
                sum += counts[first - i];
            }
            uint32_t before = warp_prefix_sum(sum) - sum;
            if (before < need && before + sum >= need) {
                int bin = first;
                while (before + counts[bin] < need) {
                    before += counts[bin--];
                }
                chosen  = static_cast<uint32_t>(bin);
                missing = need - before;
            }
        }
        __syncthreads();
        key |= chosen << shift;
        need = missing;
    }
    int32_t * d       = reinterpret_cast<int32_t *>(row_of(dst, row));
    uint32_t  greater = 0, equal = 0, equal_at = static_cast<uint32_t>(dst.ne[0]) - need;
    for (int64_t first = 0; first < n; first += blockDim.x) {
        const int64_t  i          = first + threadIdx.x;
        const uint32_t own        = i < n ? sort_key(v[i]) : 0;
        const bool     is_greater = i < n && own > key, is_equal = i < n && own == key;
        uint32_t       all;
        const uint32_t before = block_prefix((is_greater ? 1u : 0u) | (is_equal ? 1u << 16 : 0u), totals, &all);
        if (is_greater) {
            d[greater + (before & 0xffff)] = static_cast<int32_t>(i);
        }
        if (is_equal && equal + (before >> 16) < need) {
            d[equal_at + equal + (before >> 16)] = static_cast<int32_t>(i);
        }
        greater += all & 0xffff;
        equal += all >> 16;
    }
}

// ---- pooling ----

__global__ void __launch_bounds__(THREADS) pool_kernel(pool_params p, op_tensor x, op_tensor dst) {
    wait_for_previous();
    const row_index row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const int64_t   y0  = row.i1 * p.stride[1] - p.padding[1];
    const char *    in  = x.data + row.i2 * x.nb[2] + row.i3 * x.nb[3];
    float *         d   = reinterpret_cast<float *>(row_of(dst, row));
    for (int64_t i = static_cast<int64_t>(blockIdx.y) * THREADS + threadIdx.x; i < dst.ne[0];
         i += static_cast<int64_t>(gridDim.y) * THREADS) {
        const int64_t x0  = i * p.stride[0] - p.padding[0];
        float         sum = p.maximum ? -FLT_MAX : 0;
        for (int64_t iy = max(y0, int64_t(0)); iy < min(y0 + p.size[1], x.ne[1]); iy++) {
            const float * line = reinterpret_cast<const float *>(in + iy * x.nb[1]);
            for (int64_t ix = max(x0, int64_t(0)); ix < min(x0 + p.size[0], x.ne[0]); ix++) {
                sum = p.maximum ? fmaxf(sum, line[ix]) : sum + line[ix];
            }
        }
        d[i] = p.maximum ? sum : sum / static_cast<float>(p.size[0] * p.size[1]);
    }
}

} // namespace

bool op_indexer_scores_supported(const op_tensor & q, const op_tensor & k, const op_tensor & weights,
                                 const op_tensor & mask, const op_tensor & dst) {
    const int64_t dims = q.ne[0], heads = q.ne[1], tokens = q.ne[2], streams = q.ne[3], keys = k.ne[2];
    const bool    q_ok = is_f32_rows(q) && dims % 8 == 0 && tokens <= MAX_GRID_YZ && streams <= MAX_GRID_YZ;
    const bool    k_ok = type_is_weight(k.type) && is_contiguous_rows(k) && dims % type_block_size(k.type) == 0 &&
                      k.ne[0] == dims && k.ne[1] == 1 && k.ne[3] == streams && fits_grid(keys);
    const bool weights_ok = is_f32_rows(weights) && weights.ne[0] == heads && weights.ne[1] == tokens &&
                            weights.ne[2] == 1 && weights.ne[3] == streams;
    const bool mask_ok = mask.type == TYPE_F16 && is_contiguous_rows(mask) && mask.ne[0] == keys &&
                         mask.ne[1] == tokens && mask.ne[2] == 1 && mask.ne[3] >= 1 && streams % mask.ne[3] == 0;
    return q_ok && k_ok && weights_ok && mask_ok && is_f32_rows(dst) && dst.ne[0] == keys && dst.ne[1] == tokens &&
           dst.ne[2] == 1 && dst.ne[3] == streams;
}

cudaError_t op_indexer_scores(const op_context & ctx, const op_tensor & q, const op_tensor & k,
                              const op_tensor & weights, const op_tensor & mask, const op_tensor & dst) {
    const dim3 grid(static_cast<unsigned>((dst.ne[0] + KEYS - 1) / KEYS), static_cast<unsigned>(dst.ne[1]),
                    static_cast<unsigned>(dst.ne[3]));
    return with_type(k.type, [&](auto t) {
        return launch(ctx, indexer_scores_kernel<decltype(t)>, grid, THREADS, 0, q, k, weights, mask, dst);
    });
}

bool op_top_k_supported(const op_tensor & x, const op_tensor & dst) {
    return is_f32_rows(x) && dst.type == TYPE_I32 && is_contiguous_rows(dst) && dst.ne[0] <= x.ne[0] &&
           x.ne[0] <= INT32_MAX && dst.ne[1] == x.ne[1] && dst.ne[2] == x.ne[2] && dst.ne[3] == x.ne[3] &&
           fits_grid(dst.n_rows());
}

cudaError_t op_top_k(const op_context & ctx, const op_tensor & x, const op_tensor & dst) {
    return launch(ctx, top_k_kernel, static_cast<unsigned>(dst.n_rows()), row_threads(x.ne[0], MAX_THREADS), 0, x, dst);
}

bool op_pool_supported(const pool_params & p, const op_tensor & x, const op_tensor & dst) {
    const auto fits = [&](int k) { return p.size[k] >= 1 && p.stride[k] >= 1 && p.padding[k] >= 0; };
    return fits(0) && fits(1) && int64_t(p.size[0]) * p.size[1] <= INT32_MAX && is_f32_rows(x) && is_f32_rows(dst) &&
           dst.ne[2] == x.ne[2] && dst.ne[3] == x.ne[3] && fits_grid(dst.n_rows());
}

cudaError_t op_pool(const op_context & ctx, const pool_params & p, const op_tensor & x, const op_tensor & dst) {
    const int64_t blocks = (dst.ne[0] + THREADS - 1) / THREADS;
    const dim3    grid(static_cast<unsigned>(dst.n_rows()),
                       static_cast<unsigned>(blocks < MAX_GRID_YZ ? blocks : MAX_GRID_YZ));
    return launch(ctx, pool_kernel, grid, THREADS, 0, p, x, dst);
}

} // namespace macko::cuda
