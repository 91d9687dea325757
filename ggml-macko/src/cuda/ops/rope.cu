// Rotary position embedding, alone and fused with the write to the KV cache. A thread has one rotated pair of one token
// and loops over the heads, so an angle is computed once for several heads.
#include "cuda/ops/rope.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

constexpr int MAX_PAIRS = 256; // threads along a row; a thread of a longer row loops
constexpr int HEAD_ROWS = 4;   // heads of a block

// Positions of the two elements of a pair.
__device__ __forceinline__ void pair_place(const rope_params & p, int pair, int * first, int * second) {
    if (p.mode == 0) {
        *first  = p.offset + 2 * pair;
        *second = *first + 1;
    } else if (p.mode == MODE_VISION) {
        *first  = pair;
        *second = pair + p.n_dims;
    } else {
        *first  = p.offset + pair;
        *second = *first + p.n_dims / 2;
    }
}

// Rotates heads h0, h0 + step, ... of one token; x(head) and y(head) return the rows.
template <typename T, typename D, typename X, typename Y>
__device__ __forceinline__ void rotate_heads(const rope_args & a, int64_t ne0, int64_t t, int64_t h0, int64_t n_heads,
                                             int64_t step, X && x_row, Y && y_row) {
    const int n_pairs = a.p.mode == MODE_VISION ? a.p.n_dims : a.p.n_dims / 2;
    for (int pair = static_cast<int>(threadIdx.x); pair < n_pairs; pair += static_cast<int>(blockDim.x)) {
        const rotation r = rotation_of(a, pair, t);
        int            first, second;
        pair_place(a.p, pair, &first, &second);
        for (int64_t h = h0; h < n_heads; h += step) {
            const typename T::block * x  = x_row(h);
            typename D::block *       y  = y_row(h);
            const float               x0 = T::to_float(x[first]), x1 = T::to_float(x[second]);
            y[first]  = D::from_float(x0 * r.cosine - x1 * r.sine);
            y[second] = D::from_float(x0 * r.sine + x1 * r.cosine);
        }
    }
    // copy the elements that are not rotated
    const int rotated = 2 * n_pairs;
    for (int64_t k = threadIdx.x; k < ne0 - rotated; k += blockDim.x) {
        const int64_t i = k < a.p.offset ? k : k + rotated;
        for (int64_t h = h0; h < n_heads; h += step) {
            y_row(h)[i] = D::from_float(T::to_float(x_row(h)[i]));
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(MAX_PAIRS * HEAD_ROWS) rope_kernel(rope_args a, op_tensor x, op_tensor dst) {
    wait_for_previous();
    using value     = typename T::block;
    const int64_t t = blockIdx.x % dst.ne[2], i3 = blockIdx.x / dst.ne[2];
    const char *  xt = x.data + t * x.nb[2] + i3 * x.nb[3];
    char *        yt = dst.data + t * dst.nb[2] + i3 * dst.nb[3];
    rotate_heads<T, T>(
        a, dst.ne[0], t, blockIdx.y * blockDim.y + threadIdx.y, dst.ne[1], static_cast<int64_t>(gridDim.y) * blockDim.y,
        [&](int64_t h) { return reinterpret_cast<const value *>(xt + h * x.nb[1]); },
        [&](int64_t h) { return reinterpret_cast<value *>(yt + h * dst.nb[1]); });
}

__device__ __forceinline__ __half * cache_row(const op_tensor & cache, int64_t id) {
    return reinterpret_cast<__half *>(cache.data + existing_row(id, cache.ne[1]) * cache.nb[1]);
}

// Rotates q into dst, rotates k into its row of the cache, and copies v to its row. Blocks along y: first the heads of
// q, then those of k, then those of v.
__global__ void __launch_bounds__(MAX_PAIRS * HEAD_ROWS)
    rope_cache_kernel(rope_args a, rope_cache_params p, int q_blocks, int k_blocks) {
    wait_for_previous();
    using f32       = value_type<TYPE_F32>;
    using f16       = value_type<TYPE_F16>;
    const int64_t t = blockIdx.x;
    const int     y = static_cast<int>(blockIdx.y);
    if (y < q_blocks) {
        rotate_heads<f32, f32>(
            a, p.q.ne[0], t, y * HEAD_ROWS + threadIdx.y, p.q.ne[1], static_cast<int64_t>(q_blocks) * HEAD_ROWS,
            [&](int64_t h) { return reinterpret_cast<const float *>(p.q.data + t * p.q.nb[2] + h * p.q.nb[1]); },
            [&](int64_t h) { return reinterpret_cast<float *>(p.q_dst.data + t * p.q_dst.nb[2] + h * p.q_dst.nb[1]); });
        return;
    }
    if (y < q_blocks + k_blocks) {
        __half * row = cache_row(p.k_cache, p.k_ids[t]);
        rotate_heads<f32, f16>(
            a, p.k.ne[0], t, (y - q_blocks) * HEAD_ROWS + threadIdx.y, p.k.ne[1],
            static_cast<int64_t>(k_blocks) * HEAD_ROWS,
            [&](int64_t h) { return reinterpret_cast<const float *>(p.k.data + t * p.k.nb[2] + h * p.k.nb[1]); },
            [&](int64_t h) { return row + h * p.k.ne[0]; });
        return;
    }
    __half *      row      = cache_row(p.v_cache, p.v_ids[t]);
    const float * v        = reinterpret_cast<const float *>(p.v.data + t * p.v.nb[1]);
    const int     v_blocks = static_cast<int>(gridDim.y) - q_blocks - k_blocks;
    const int64_t first =
        (static_cast<int64_t>(y - q_blocks - k_blocks) * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < p.v.ne[0]; i += static_cast<int64_t>(v_blocks) * blockDim.x * blockDim.y) {
        row[i] = __float2half_rn(v[i]);
    }
}

dim3 block_of(const rope_params & p) {
    const int pairs = p.mode == MODE_VISION ? p.n_dims : p.n_dims / 2;
    return dim3(static_cast<unsigned>(row_threads(std::max(pairs, 1), MAX_PAIRS)), HEAD_ROWS);
}

// Number of blocks along the heads. Many tokens fill the GPU; then the heads of a token share its angles.
int head_blocks(int64_t n_heads, int64_t n_tokens) {
    return n_tokens >= 64 ? 1 : static_cast<int>((n_heads + HEAD_ROWS - 1) / HEAD_ROWS);
}

} // namespace

bool op_rope_supported(const rope_params & p, const op_tensor & x, const op_tensor & pos, const op_tensor * factors,
                       const op_tensor & dst) {
    const bool types_ok  = (x.type == TYPE_F32 || x.type == TYPE_F16) && dst.type == x.type && pos.type == TYPE_I32;
    const bool shapes_ok = same_shape(x, dst) && is_contiguous_rows(x) && is_contiguous_rows(dst);
    const bool is_mode =
        p.mode == 0 || p.mode == MODE_NEOX || p.mode == MODE_MROPE || p.mode == MODE_VISION || p.mode == MODE_IMROPE;
    if (!types_ok || !shapes_ok || !is_mode) {
        return false;
    }
    const bool vision_fits = p.offset == 0 && 2 * p.n_dims == x.ne[0];
    const bool dims_fit    = p.mode == MODE_VISION ? vision_fits : p.offset + p.n_dims <= x.ne[0];
    if (p.n_dims < 0 || p.n_dims % 2 != 0 || p.offset < 0 || !dims_fit) {
        return false;
    }
    const bool multi = (p.mode & MODE_MROPE) != 0; // four positions per token
    if (multi && p.sections[0] + p.sections[1] + p.sections[2] + p.sections[3] <= 0) {
        return false;
    }
    if (factors && (factors->type != TYPE_F32 || factors->ne[0] < p.n_dims / 2 || !is_contiguous_rows(*factors))) {
        return false;
    }
    return pos.ne[0] >= (multi ? 4 : 1) * x.ne[2] && fits_grid(x.ne[2] * x.ne[3]);
}

cudaError_t op_rope(const op_context & ctx, const rope_params & p, const op_tensor & x, const op_tensor & pos,
                    const op_tensor * factors, const op_tensor & dst) {
    const rope_args a = make_rope_args(p, pos, factors, x.ne[2]);
    const dim3      grid(static_cast<unsigned>(x.ne[2] * x.ne[3]),
                         static_cast<unsigned>(head_blocks(x.ne[1], x.ne[2] * x.ne[3])));
    return x.type == TYPE_F16 ? launch(ctx, rope_kernel<value_type<TYPE_F16>>, grid, block_of(p), 0, a, x, dst)
                              : launch(ctx, rope_kernel<value_type<TYPE_F32>>, grid, block_of(p), 0, a, x, dst);
}

bool op_rope_cache_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                             const rope_cache_params & p) {
    const auto is_cache = [](const op_tensor & c, int64_t width) {
        return c.type == TYPE_F16 && c.ne[0] == width && c.ne[2] == 1 && c.ne[3] == 1 && is_contiguous_rows(c);
    };
    const bool ropes_ok =
        op_rope_supported(r, p.q, pos, factors, p.q_dst) && op_rope_supported(r, p.k, pos, factors, p.k);
    const bool types_ok    = p.q.type == TYPE_F32 && p.k.type == TYPE_F32 && p.v.type == TYPE_F32;
    const bool same_tokens = p.k.ne[2] == p.q.ne[2] && p.v.ne[1] == p.q.ne[2];
    const bool one_stream  = p.q.ne[3] == 1 && p.k.ne[3] == 1 && p.v.ne[2] == 1 && p.v.ne[3] == 1;
    const bool caches_ok   = is_cache(p.k_cache, p.k.ne[0] * p.k.ne[1]) && is_cache(p.v_cache, p.v.ne[0]);
    return ropes_ok && types_ok && same_tokens && one_stream && is_contiguous_rows(p.v) && caches_ok;
}

cudaError_t op_rope_cache(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                          const op_tensor * factors, const rope_cache_params & p) {
    const rope_args a        = make_rope_args(r, pos, factors, p.q.ne[2]);
    const int       q_blocks = head_blocks(p.q.ne[1], p.q.ne[2]), k_blocks = head_blocks(p.k.ne[1], p.q.ne[2]);
    const dim3      block = block_of(r);
    const int       v_blocks =
        p.q.ne[2] >= 64 ? 1 : static_cast<int>((p.v.ne[0] + block.x * block.y - 1) / (block.x * block.y));
    return launch(ctx, rope_cache_kernel,
                  dim3(static_cast<unsigned>(p.q.ne[2]), static_cast<unsigned>(q_blocks + k_blocks + v_blocks)), block,
                  0, a, p, q_blocks, k_blocks);
}

} // namespace macko::cuda
