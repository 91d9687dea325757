// Reductions along rows: RMS norm with the sum before it and the scale after it, soft-max, sums, sorting. One row per
// block. Sums have a fixed order.
#include "cuda/ops/common.cuh"

#include <cfloat>
#include <cmath>

namespace macko::cuda {

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int MAX_SORT    = 8192; // entries of a row: argsort keeps them in shared memory

struct rms_norm_args {
    op_tensor x, dst, scale, add, sum;
    float     eps;
};

// V: float, or float4 if everything is aligned and ne[0] % 4 == 0.
template <bool HAS_SCALE, bool HAS_ADD, typename V>
__global__ void __launch_bounds__(MAX_THREADS) rms_norm_kernel(rms_norm_args p) {
    wait_for_previous();
    __shared__ float partial[WARP];
    constexpr int    N       = sizeof(V) / sizeof(float);
    const row_index  row     = split_row(blockIdx.x, p.dst.ne[1], p.dst.ne[2]);
    const int        n       = static_cast<int>(p.dst.ne[0]) / N;
    const V *        x       = reinterpret_cast<const V *>(row_of(p.x, row));
    const V *        add     = HAS_ADD ? reinterpret_cast<const V *>(row_of(p.add, row)) : nullptr;
    V *              sum     = HAS_ADD ? reinterpret_cast<V *>(row_of(p.sum, row)) : nullptr;
    float            squares = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        V       v = x[i];
        float * f = reinterpret_cast<float *>(&v);
        if constexpr (HAS_ADD) {
            const V w = add[i];
#pragma unroll
            for (int k = 0; k < N; k++) {
                f[k] += reinterpret_cast<const float *>(&w)[k];
            }
            sum[i] = v;
        }
#pragma unroll
        for (int k = 0; k < N; k++) {
            squares += f[k] * f[k];
        }
    }
    squares            = block_reduce(squares, partial, warp_sum<>, 0);
    const float factor = 1 / sqrtf(squares / static_cast<float>(p.dst.ne[0]) + p.eps);
    const V *   in     = HAS_ADD ? sum : x; // each thread reads its own writes
    const V *   s      = HAS_SCALE ? reinterpret_cast<const V *>(broadcast_row(p.scale, row)) : nullptr;
    V *         dst    = reinterpret_cast<V *>(row_of(p.dst, row));
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        V       v = in[i];
        float * f = reinterpret_cast<float *>(&v);
        V       w = {};
        if constexpr (HAS_SCALE) {
            w = s[i];
        }
#pragma unroll
        for (int k = 0; k < N; k++) {
            f[k] *= factor;
            if constexpr (HAS_SCALE) {
                f[k] *= reinterpret_cast<const float *>(&w)[k];
            }
        }
        dst[i] = v;
    }
}

// V as above. The row is read again for each sum: it is in L1.
template <row_norm KIND, typename V>
__global__ void __launch_bounds__(MAX_THREADS) row_norm_kernel(op_tensor x, op_tensor dst, float eps) {
    wait_for_previous();
    __shared__ float partial[WARP];
    constexpr int    N    = sizeof(V) / sizeof(float);
    const row_index  row  = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const int        n    = static_cast<int>(dst.ne[0]) / N;
    const V *        from = reinterpret_cast<const V *>(row_of(x, row));
    V *              to   = reinterpret_cast<V *>(row_of(dst, row));
    const auto       sum  = [&](auto && term) {
        float all = 0;
        for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
            const V v = from[i];
#pragma unroll
            for (int k = 0; k < N; k++) {
                all += term(reinterpret_cast<const float *>(&v)[k]);
            }
        }
        return block_reduce(all, partial, warp_sum<>, 0);
    };
    float mean = 0, factor;
    if constexpr (KIND == row_norm::LAYER) {
        mean   = sum([](float v) { return v; }) / static_cast<float>(dst.ne[0]);
        factor = 1 / sqrtf(sum([=](float v) { return (v - mean) * (v - mean); }) / static_cast<float>(dst.ne[0]) + eps);
    } else {
        factor = 1 / fmaxf(sqrtf(sum([](float v) { return v * v; })), eps);
    }
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        V v = from[i];
#pragma unroll
        for (int k = 0; k < N; k++) {
            float & f = reinterpret_cast<float *>(&v)[k];
            f         = (f - mean) * factor;
        }
        to[i] = v;
    }
}

struct soft_max_args {
    op_tensor     x, mask, dst;
    const float * sinks;
    bool          has_mask, mask_f16;
    float         scale, max_bias;
    float         m0, m1;
    uint32_t      n_head_log2;
};

__device__ float alibi_slope(float max_bias, uint32_t head, uint32_t n_head_log2, float m0, float m1) {
    if (max_bias <= 0) {
        return 1;
    }
    return head < n_head_log2 ? powf(m0, static_cast<float>(head + 1))
                              : powf(m1, static_cast<float>(2 * (head - n_head_log2) + 1));
}

__global__ void __launch_bounds__(MAX_THREADS) soft_max_kernel(soft_max_args p) {
    wait_for_previous();
    __shared__ float partial[WARP];
    const row_index  row   = split_row(blockIdx.x, p.dst.ne[1], p.dst.ne[2]);
    const float *    x     = reinterpret_cast<const float *>(row_of(p.x, row));
    float *          dst   = reinterpret_cast<float *>(row_of(p.dst, row));
    const char *     mask  = p.has_mask ? p.mask.data + row.i1 * p.mask.nb[1] + row.i2 % p.mask.ne[2] * p.mask.nb[2] +
                                         row.i3 % p.mask.ne[3] * p.mask.nb[3]
                                        : nullptr;
    const float      slope = alibi_slope(p.max_bias, static_cast<uint32_t>(row.i2), p.n_head_log2, p.m0, p.m1);
    const int64_t    n     = p.dst.ne[0];
    const auto       value = [&](int64_t i) {
        const float v = x[i] * p.scale;
        if (!mask) {
            return v;
        }
        return v + slope * (p.mask_f16 ? __half2float(reinterpret_cast<const __half *>(mask)[i])
                                             : reinterpret_cast<const float *>(mask)[i]);
    };
    float max = p.sinks ? p.sinks[row.i2] : -INFINITY;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        max = fmaxf(max, value(i));
    }
    max       = block_reduce(max, partial, warp_max, -INFINITY);
    float sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const float e = max == -INFINITY ? 0.0f : expf(value(i) - max);
        dst[i]        = e; // x may be dst: the last read of element i is above
        sum += e;
    }
    sum = block_reduce(sum, partial, warp_sum<>, 0);
    if (p.sinks) {
        sum += expf(p.sinks[row.i2] - max);
    }
    const float factor = sum > 0 ? 1 / sum : 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        dst[i] *= factor;
    }
}

__global__ void __launch_bounds__(MAX_THREADS) sum_rows_kernel(op_tensor x, op_tensor dst, float divisor) {
    wait_for_previous();
    __shared__ float partial[WARP];
    const row_index  row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const float *    v   = reinterpret_cast<const float *>(row_of(x, row));
    float            sum = 0;
    for (int64_t i = threadIdx.x; i < x.ne[0]; i += blockDim.x) {
        sum += v[i];
    }
    sum = block_reduce(sum, partial, warp_sum<>, 0);
    if (threadIdx.x == 0) {
        *reinterpret_cast<float *>(row_of(dst, row)) = sum / divisor;
    }
}

// Bitonic sorting network over n (a power of two) indices in shared memory. Padding entries sort after all others, and
// equal values keep their order.
__global__ void __launch_bounds__(MAX_THREADS) argsort_kernel(op_tensor x, op_tensor dst, int n, bool descending) {
    wait_for_previous();
    extern __shared__ int index[];
    const row_index       row    = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const float *         v      = reinterpret_cast<const float *>(row_of(x, row));
    const int             ne0    = static_cast<int>(x.ne[0]);
    const auto            before = [&](int a, int b) { // whether a precedes b
        if (a >= ne0 || b >= ne0) {
            return a < b;
        }
        return v[a] == v[b] ? a < b : (v[a] < v[b]) != descending;
    };
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        index[i] = i;
    }
    for (int size = 2; size <= n; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
                const int j = i ^ step;
                if (j > i) {
                    const int  a = index[i], b = index[j];
                    const bool ascending = (i & size) == 0;
                    if (before(b, a) == ascending) {
                        index[i] = b;
                        index[j] = a;
                    }
                }
            }
        }
    }
    __syncthreads();
    int32_t * d = reinterpret_cast<int32_t *>(row_of(dst, row));
    for (int i = static_cast<int>(threadIdx.x); i < ne0; i += static_cast<int>(blockDim.x)) {
        d[i] = index[i];
    }
}

template <bool HAS_SCALE, bool HAS_ADD>
cudaError_t launch_rms_norm(const op_context & ctx, const rms_norm_args & args, bool vector) {
    const dim3 grid(static_cast<unsigned>(args.dst.n_rows()));
    if (vector) {
        return launch(ctx, rms_norm_kernel<HAS_SCALE, HAS_ADD, float4>, grid,
                      row_threads(args.dst.ne[0] / 4, MAX_THREADS), 0, args);
    }
    return launch(ctx, rms_norm_kernel<HAS_SCALE, HAS_ADD, float>, grid, row_threads(args.dst.ne[0], MAX_THREADS), 0,
                  args);
}

template <row_norm KIND>
cudaError_t launch_row_norm(const op_context & ctx, float eps, const op_tensor & x, const op_tensor & dst) {
    const dim3 grid(static_cast<unsigned>(dst.n_rows()));
    if (dst.ne[0] % 4 == 0 && is_aligned(x, 16) && is_aligned(dst, 16)) {
        return launch(ctx, row_norm_kernel<KIND, float4>, grid, row_threads(dst.ne[0] / 4, MAX_THREADS), 0, x, dst,
                      eps);
    }
    return launch(ctx, row_norm_kernel<KIND, float>, grid, row_threads(dst.ne[0], MAX_THREADS), 0, x, dst, eps);
}

cudaError_t launch_sum_rows(const op_context & ctx, float divisor, const op_tensor & x, const op_tensor & dst) {
    return launch(ctx, sum_rows_kernel, static_cast<unsigned>(dst.n_rows()), row_threads(x.ne[0], MAX_THREADS), 0, x,
                  dst, divisor);
}

} // namespace

bool op_rms_norm_supported(const rms_norm_params & p) {
    if (!is_f32_rows(p.x) || !is_f32_rows(p.dst) || !same_shape(p.x, p.dst) || !fits_grid(p.dst.n_rows()) ||
        p.dst.ne[0] > INT32_MAX) {
        return false;
    }
    if (p.scale && (!is_f32_rows(*p.scale) || p.scale->ne[0] != p.dst.ne[0] || !can_repeat(*p.scale, p.dst))) {
        return false;
    }
    return !p.add || (is_f32_rows(*p.add) && is_f32_rows(*p.sum) && same_shape(*p.add, p.x) && same_shape(*p.sum, p.x));
}

cudaError_t op_rms_norm(const op_context & ctx, const rms_norm_params & p) {
    const rms_norm_args args = {
        p.x, p.dst, p.scale ? *p.scale : p.x, p.add ? *p.add : p.x, p.add ? *p.sum : p.x, p.eps
    };
    const bool vector = p.dst.ne[0] % 4 == 0 && is_aligned(args.x, 16) && is_aligned(args.dst, 16) &&
                        is_aligned(args.scale, 16) && is_aligned(args.add, 16) && is_aligned(args.sum, 16);
    if (p.add) {
        return p.scale ? launch_rms_norm<true, true>(ctx, args, vector)
                       : launch_rms_norm<false, true>(ctx, args, vector);
    }
    return p.scale ? launch_rms_norm<true, false>(ctx, args, vector) : launch_rms_norm<false, false>(ctx, args, vector);
}

bool op_row_norm_supported(row_norm, const op_tensor & x, const op_tensor & dst) {
    return is_f32_rows(x) && is_f32_rows(dst) && same_shape(x, dst) && fits_grid(dst.n_rows()) &&
           dst.ne[0] <= INT32_MAX;
}

cudaError_t op_row_norm(const op_context & ctx, row_norm kind, float eps, const op_tensor & x, const op_tensor & dst) {
    return kind == row_norm::LAYER ? launch_row_norm<row_norm::LAYER>(ctx, eps, x, dst)
                                   : launch_row_norm<row_norm::L2>(ctx, eps, x, dst);
}

bool op_soft_max_supported(const op_tensor & x, const op_tensor * mask, const op_tensor * sinks,
                           const op_tensor & dst) {
    if (!is_f32_rows(x) || !is_f32_rows(dst) || !same_shape(x, dst) || !fits_grid(dst.n_rows())) {
        return false;
    }
    const auto is_mask = [&](const op_tensor & m) {
        const bool covers_x = m.ne[0] == x.ne[0] && m.ne[1] >= x.ne[1] && m.ne[2] != 0 && m.ne[3] != 0;
        return (m.type == TYPE_F16 || m.type == TYPE_F32) && covers_x && is_contiguous_rows(m);
    };
    const auto is_sinks = [&](const op_tensor & s) {
        return s.type == TYPE_F32 && s.ne[0] == x.ne[2] && is_contiguous(s);
    };
    return (!mask || is_mask(*mask)) && (!sinks || is_sinks(*sinks));
}

cudaError_t op_soft_max(const op_context & ctx, float scale, float max_bias, const op_tensor & x,
                        const op_tensor * mask, const op_tensor * sinks, const op_tensor & dst) {
    soft_max_args args = {};
    args.x             = x;
    args.dst           = dst;
    args.has_mask      = mask != nullptr;
    args.mask          = mask ? *mask : x;
    args.mask_f16      = mask && mask->type == TYPE_F16;
    args.sinks         = sinks ? reinterpret_cast<const float *>(sinks->data) : nullptr;
    args.scale         = scale;
    args.max_bias      = max_bias;
    args.n_head_log2 =
        1u << static_cast<uint32_t>(std::floor(std::log2(static_cast<double>(x.ne[2] > 0 ? x.ne[2] : 1))));
    args.m0 = std::pow(2.0f, -max_bias / static_cast<float>(args.n_head_log2));
    args.m1 = std::pow(2.0f, -max_bias / 2 / static_cast<float>(args.n_head_log2));
    return launch(ctx, soft_max_kernel, static_cast<unsigned>(dst.n_rows()), row_threads(dst.ne[0], MAX_THREADS), 0,
                  args);
}

bool op_sum_rows_supported(const op_tensor & x, const op_tensor & dst) {
    return x.type == TYPE_F32 && dst.type == TYPE_F32 && is_contiguous_rows(x) && dst.ne[0] == 1 &&
           dst.ne[1] == x.ne[1] && dst.ne[2] == x.ne[2] && dst.ne[3] == x.ne[3] && fits_grid(dst.n_rows());
}

cudaError_t op_sum_rows(const op_context & ctx, const op_tensor & x, const op_tensor & dst) {
    return launch_sum_rows(ctx, 1, x, dst);
}
cudaError_t op_mean_rows(const op_context & ctx, const op_tensor & x, const op_tensor & dst) {
    return launch_sum_rows(ctx, static_cast<float>(x.ne[0]), x, dst);
}

bool op_argsort_supported(const op_tensor & x, const op_tensor & dst) {
    return x.type == TYPE_F32 && dst.type == TYPE_I32 && same_shape(x, dst) && is_contiguous_rows(x) &&
           is_contiguous_rows(dst) && x.ne[0] <= MAX_SORT && fits_grid(dst.n_rows());
}

cudaError_t op_argsort(const op_context & ctx, bool descending, const op_tensor & x, const op_tensor & dst) {
    int n = 1;
    while (n < x.ne[0]) {
        n *= 2;
    }
    return launch(ctx, argsort_kernel, static_cast<unsigned>(dst.n_rows()), row_threads(n, MAX_THREADS),
                  static_cast<size_t>(n) * sizeof(int), x, dst, n, descending);
}

} // namespace macko::cuda
