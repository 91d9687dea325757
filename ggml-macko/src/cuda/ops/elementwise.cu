// Elementwise operations: two tensors with broadcasting, one tensor, gated units, bias by expert, hyper-connections. A
// block has one row of dst (blockIdx.x), or one chunk of a long row (blockIdx.y). No __restrict__, because dst is often
// one of the sources.
#include "cuda/ops/common.cuh"

namespace macko::cuda {

namespace {

constexpr int THREADS = 256;
constexpr int CHUNK   = 4 * THREADS; // elements of a row per block

dim3 grid_of(const op_tensor & t) {
    return dim3(static_cast<unsigned>(t.n_rows()), static_cast<unsigned>((t.ne[0] + CHUNK - 1) / CHUNK));
}

// Calls f(i, row) for the block's elements of a row of dst.
template <typename F> __device__ __forceinline__ void for_row_elements(int64_t ne0, F && f) {
    const int64_t end = min(ne0, static_cast<int64_t>(blockIdx.y + 1) * CHUNK);
    for (int64_t i = static_cast<int64_t>(blockIdx.y) * CHUNK + threadIdx.x; i < end; i += blockDim.x) {
        f(i);
    }
}

__device__ __forceinline__ float apply(binary_op op, float a, float b) {
    switch (op) {
        case binary_op::ADD: return a + b;
        case binary_op::SUB: return a - b;
        case binary_op::MUL: return a * b;
        default:             return a / b;
    }
}

__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1 + tanhf(0.79788456080286535587989211986876f * x * (1 + 0.044715f * x * x)));
}
__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * (1 + erff(x * 0.70710678118654752440f)); }
__device__ __forceinline__ float gelu_quick(float x) { return x / (1 + expf(-1.702f * x)); }
__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }

__device__ float apply(const unary_params & params, float x) {
    const float * p = params.p;
    switch (params.op) {
        case unary_op::ABS:         return fabsf(x);
        case unary_op::SGN:         return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f;
        case unary_op::NEG:         return -x;
        case unary_op::STEP:        return x > 0 ? 1.0f : 0.0f;
        case unary_op::TANH:        return tanhf(x);
        case unary_op::ELU:         return x > 0 ? x : expm1f(x);
        case unary_op::RELU:        return fmaxf(x, 0);
        case unary_op::SIGMOID:     return 1 / (1 + expf(-x));
        case unary_op::GELU:        return gelu(x);
        case unary_op::GELU_QUICK:  return gelu_quick(x);
        case unary_op::SILU:        return silu(x);
        case unary_op::HARDSWISH:   return x * fminf(1.0f, fmaxf(0.0f, (x + 3) / 6));
        case unary_op::HARDSIGMOID: return fminf(1.0f, fmaxf(0.0f, (x + 3) / 6));
        case unary_op::EXP:         return expf(x);
        case unary_op::EXPM1:       return expm1f(x);
        case unary_op::SOFTPLUS:    return softplus(x);
        case unary_op::GELU_ERF:    return gelu_erf(x);
        case unary_op::XIELU:       return (x > 0 ? p[1] * x * x : p[0] * (expm1f(fminf(x, p[3])) - x)) + p[2] * x;
        case unary_op::FLOOR:       return floorf(x);
        case unary_op::CEIL:        return ceilf(x);
        case unary_op::ROUND:       return roundf(x);
        case unary_op::TRUNC:       return truncf(x);
        case unary_op::SQR:         return x * x;
        case unary_op::SQRT:        return sqrtf(x);
        case unary_op::LOG:         return logf(x);
        case unary_op::SIN:         return sinf(x);
        case unary_op::COS:         return cosf(x);
        case unary_op::SCALE:       return x * p[0] + p[1];
        case unary_op::CLAMP:       return x < p[0] ? p[0] : x > p[1] ? p[1] : x; // NaN passes
        case unary_op::FILL:        return p[0];
        default:                    return x;
    }
}

__device__ __forceinline__ float apply(const glu_params & p, float gate, float up) {
    switch (p.op) {
        case glu_op::REGLU:       return fmaxf(gate, 0) * up;
        case glu_op::GEGLU:       return gelu(gate) * up;
        case glu_op::SWIGLU:      return silu(gate) * up;
        case glu_op::GEGLU_ERF:   return gelu_erf(gate) * up;
        case glu_op::GEGLU_QUICK: return gelu_quick(gate) * up;
        default:                  { // SWIGLU_OAI, SWIGLU_CLAMP
            const float x = fminf(gate, p.limit);
            const float y = fmaxf(fminf(up, p.limit), -p.limit);
            return p.op == glu_op::SWIGLU_CLAMP ? silu(x) * y : x / (1 + expf(-p.alpha * x)) * (y + 1);
        }
    }
}

template <typename T> __global__ void binary_kernel(binary_op op, op_tensor a, op_tensor b, op_tensor dst) {
    wait_for_previous();
    using value           = typename T::block;
    const row_index row   = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const char *    a_row = row_of(a, row);
    const char *    b_row = broadcast_row(b, row);
    char *          d_row = row_of(dst, row);
    const int64_t   b_ne0 = b.ne[0];
    for_row_elements(dst.ne[0], [&](int64_t i) {
        const int64_t ib = b_ne0 == dst.ne[0] ? i : b_ne0 == 1 ? 0 : i % b_ne0;
        const float   x  = T::to_float(*reinterpret_cast<const value *>(a_row + i * a.nb[0]));
        const float   y  = T::to_float(*reinterpret_cast<const value *>(b_row + ib * b.nb[0]));
        *reinterpret_cast<value *>(d_row + i * dst.nb[0]) = T::from_float(apply(op, x, y));
    });
}

template <typename T> __global__ void unary_kernel(unary_params p, op_tensor x, op_tensor dst) {
    wait_for_previous();
    using value           = typename T::block;
    const row_index row   = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const char *    x_row = row_of(x, row);
    char *          d_row = row_of(dst, row);
    for_row_elements(dst.ne[0], [&](int64_t i) {
        const float v = T::to_float(*reinterpret_cast<const value *>(x_row + i * x.nb[0]));
        *reinterpret_cast<value *>(d_row + i * dst.nb[0]) = T::from_float(apply(p, v));
    });
}

template <typename T> __global__ void glu_kernel(glu_params p, op_tensor gate, op_tensor up, op_tensor dst) {
    wait_for_previous();
    using value         = typename T::block;
    const row_index row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const value *   g   = reinterpret_cast<const value *>(row_of(gate, row));
    const value *   u   = reinterpret_cast<const value *>(row_of(up, row));
    value *         d   = reinterpret_cast<value *>(row_of(dst, row));
    for_row_elements(dst.ne[0],
                     [&](int64_t i) { d[i] = T::from_float(apply(p, T::to_float(g[i]), T::to_float(u[i]))); });
}

__global__ void arange_kernel(float start, float step, op_tensor dst) {
    wait_for_previous();
    float * d = reinterpret_cast<float *>(dst.data);
    for_row_elements(dst.ne[0], [&](int64_t i) { d[i] = start + static_cast<float>(i) * step; });
}

__global__ void add_id_kernel(op_tensor x, op_tensor bias, op_tensor ids, op_tensor dst) {
    wait_for_previous();
    const row_index row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const int64_t   id  = existing_row(
        *reinterpret_cast<const int32_t *>(ids.data + row.i1 * ids.nb[0] + row.i2 * ids.nb[1]), bias.ne[1]);
    const float * a = reinterpret_cast<const float *>(row_of(x, row));
    const float * b = reinterpret_cast<const float *>(bias.data + id * bias.nb[1]);
    float *       d = reinterpret_cast<float *>(row_of(dst, row));
    for_row_elements(dst.ne[0], [&](int64_t i) { d[i] = a[i] + b[i]; });
}

constexpr int STREAMS = 4; // of op_hc_comb

// Divides rows (STEP 1) or columns (STEP 4) of a matrix by eps and their sum.
template <int STEP> __device__ __forceinline__ void normalize(float (&m)[STREAMS * STREAMS], float eps) {
#pragma unroll
    for (int i = 0; i < STREAMS; i++) {
        constexpr int NEXT = STREAMS * STREAMS / (STEP * STREAMS); // from one row or column to the next
        float         sum  = eps;
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            sum += m[i * NEXT + k * STEP];
        }
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            m[i * NEXT + k * STEP] /= sum;
        }
    }
}

// A thread has the matrix of a token.
__global__ void __launch_bounds__(THREADS)
    hc_comb_kernel(float eps, int n_iter, op_tensor mixes, op_tensor scale, op_tensor base, op_tensor dst) {
    wait_for_previous();
    const int64_t token = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (token >= dst.ne[2]) {
        return;
    }
    const float * x      = reinterpret_cast<const float *>(mixes.data + token * mixes.nb[1]) + 2 * STREAMS;
    const float * b      = reinterpret_cast<const float *>(base.data) + 2 * STREAMS;
    const float   factor = reinterpret_cast<const float *>(scale.data)[2];
    float         m[STREAMS * STREAMS];
#pragma unroll
    for (int row = 0; row < STREAMS; row++) {
        float largest = -INFINITY, sum = 0;
#pragma unroll
        for (int i = row * STREAMS; i < (row + 1) * STREAMS; i++) {
            m[i]    = x[i] * factor + b[i];
            largest = fmaxf(largest, m[i]);
        }
#pragma unroll
        for (int i = row * STREAMS; i < (row + 1) * STREAMS; i++) {
            m[i] = expf(m[i] - largest);
            sum += m[i];
        }
#pragma unroll
        for (int i = row * STREAMS; i < (row + 1) * STREAMS; i++) {
            m[i] = m[i] / sum + eps;
        }
    }
    normalize<STREAMS>(m, eps);
    for (int k = 1; k < n_iter; k++) {
        normalize<1>(m, eps);
        normalize<STREAMS>(m, eps);
    }
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; i++) {
        char * row                                  = dst.data + i / STREAMS * dst.nb[1] + token * dst.nb[2];
        reinterpret_cast<float *>(row)[i % STREAMS] = m[i];
    }
}

__global__ void hc_pre_kernel(bool gated, float factor, op_tensor x, op_tensor weights, op_tensor dst) {
    wait_for_previous();
    const int64_t token = blockIdx.x, streams = x.ne[1];
    const char *  in = x.data + token * x.nb[2];
    const char *  w  = weights.data + token * weights.nb[gated ? 2 : 1];
    float *       d  = reinterpret_cast<float *>(dst.data + token * dst.nb[1]);
    for_row_elements(dst.ne[0], [&](int64_t i) {
        float sum = 0;
        for (int64_t h = 0; h < streams; h++) {
            const float v = reinterpret_cast<const float *>(in + h * x.nb[1])[i];
            sum += gated ? v / (1 + expf(-reinterpret_cast<const float *>(w + h * weights.nb[1])[i]))
                         : v * reinterpret_cast<const float *>(w)[h];
        }
        d[i] = factor * sum;
    });
}

__global__ void hc_post_kernel(op_tensor x, op_tensor residual, op_tensor post, op_tensor comb, bool has_comb,
                               op_tensor dst) {
    wait_for_previous();
    const row_index row     = split_row(blockIdx.x, dst.ne[1], dst.ne[2]); // stream i1 of token i2
    const float *   in      = reinterpret_cast<const float *>(x.data + row.i2 * x.nb[1]);
    const float     p       = reinterpret_cast<const float *>(post.data + row.i2 * post.nb[1])[row.i1];
    const char *    r       = residual.data + row.i2 * residual.nb[2];
    const char *    c       = comb.data + row.i2 * comb.nb[2];
    const int64_t   streams = has_comb ? residual.ne[1] : 0;
    float *         d       = reinterpret_cast<float *>(row_of(dst, row));
    for_row_elements(dst.ne[0], [&](int64_t i) {
        const float own = reinterpret_cast<const float *>(r + row.i1 * residual.nb[1])[i];
        float       sum = in[i] * p + (has_comb ? 0 : own);
        for (int64_t h = 0; h < streams; h++) {
            sum += reinterpret_cast<const float *>(r + h * residual.nb[1])[i] *
                   reinterpret_cast<const float *>(c + h * comb.nb[1])[row.i1];
        }
        d[i] = sum;
    });
}

bool is_f32_or_f16(tensor_type type) { return type == TYPE_F32 || type == TYPE_F16; }

} // namespace

bool op_binary_supported(binary_op, const op_tensor & a, const op_tensor & b, const op_tensor & dst) {
    return is_f32_or_f16(dst.type) && a.type == dst.type && b.type == dst.type && same_shape(a, dst) &&
           can_repeat(b, dst) && fits_grid(dst.n_rows());
}

cudaError_t op_binary(const op_context & ctx, binary_op op, const op_tensor & a, const op_tensor & b,
                      const op_tensor & dst) {
    return with_type_of<TYPE_F32, TYPE_F16>(dst.type, [&](auto t) {
        return launch(ctx, binary_kernel<decltype(t)>, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, op, a, b, dst);
    });
}

bool op_unary_supported(const op_tensor & x, const op_tensor & dst) {
    return is_f32_or_f16(dst.type) && x.type == dst.type && same_shape(x, dst) && fits_grid(dst.n_rows());
}

cudaError_t op_unary(const op_context & ctx, const unary_params & p, const op_tensor & x, const op_tensor & dst) {
    return with_type_of<TYPE_F32, TYPE_F16>(dst.type, [&](auto t) {
        return launch(ctx, unary_kernel<decltype(t)>, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, p, x, dst);
    });
}

bool op_arange_supported(const op_tensor & dst) { return is_f32_rows(dst) && dst.n_rows() == 1; }

cudaError_t op_arange(const op_context & ctx, float start, float step, const op_tensor & dst) {
    return launch(ctx, arange_kernel, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, start, step, dst);
}

bool op_glu_supported(const op_tensor & x, const op_tensor * up, const op_tensor & dst) {
    const bool types_ok = is_f32_or_f16(dst.type) && x.type == dst.type;
    const bool shape_ok = x.ne[0] == (up ? 1 : 2) * dst.ne[0] && x.n_rows() == dst.n_rows() && x.ne[1] == dst.ne[1] &&
                          x.ne[2] == dst.ne[2];
    const bool rows_ok = is_contiguous_rows(x) && is_contiguous_rows(dst) && fits_grid(dst.n_rows());
    const bool up_ok   = !up || (up->type == x.type && same_shape(*up, x) && is_contiguous_rows(*up));
    return types_ok && shape_ok && rows_ok && up_ok;
}

cudaError_t op_glu(const op_context & ctx, const glu_params & p, const op_tensor & x, const op_tensor * up,
                   const op_tensor & dst) {
    op_tensor gate = x, other = up ? *up : x;
    if (!up) {
        (p.swapped ? gate : other).data += dst.ne[0] * x.nb[0];
    }
    return with_type_of<TYPE_F32, TYPE_F16>(dst.type, [&](auto t) {
        return launch(ctx, glu_kernel<decltype(t)>, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, p, gate, other,
                      dst);
    });
}

bool op_add_id_supported(const op_tensor & x, const op_tensor & bias, const op_tensor & ids, const op_tensor & dst) {
    const bool rows_ok  = is_f32_rows(x) && is_f32_rows(bias) && is_f32_rows(dst) && fits_grid(dst.n_rows());
    const bool shape_ok = same_shape(x, dst) && x.ne[3] == 1;
    const bool bias_ok  = bias.ne[0] == x.ne[0] && bias.ne[2] == 1 && bias.ne[3] == 1;
    const bool ids_ok   = ids.type == TYPE_I32 && ids.ne[0] == x.ne[1] && ids.ne[1] == x.ne[2];
    return rows_ok && shape_ok && bias_ok && ids_ok;
}

cudaError_t op_add_id(const op_context & ctx, const op_tensor & x, const op_tensor & bias, const op_tensor & ids,
                      const op_tensor & dst) {
    return launch(ctx, add_id_kernel, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, x, bias, ids, dst);
}

bool op_hc_comb_supported(const op_tensor & mixes, const op_tensor & scale, const op_tensor & base,
                          const op_tensor & dst) {
    const int64_t n       = (2 + STREAMS) * STREAMS;
    const bool    rows_ok = is_f32_rows(mixes) && is_f32_rows(scale) && is_f32_rows(base) && is_f32_rows(dst);
    return rows_ok && mixes.ne[0] == n && mixes.n_rows() == mixes.ne[1] && scale.ne[0] >= 3 && base.ne[0] == n &&
           dst.ne[0] == STREAMS && dst.ne[1] == STREAMS && dst.ne[2] == mixes.ne[1] && dst.ne[3] == 1 &&
           fits_grid(dst.ne[2]);
}

cudaError_t op_hc_comb(const op_context & ctx, float eps, int n_iter, const op_tensor & mixes, const op_tensor & scale,
                       const op_tensor & base, const op_tensor & dst) {
    const auto blocks = static_cast<unsigned>((dst.ne[2] + THREADS - 1) / THREADS);
    return launch(ctx, hc_comb_kernel, blocks, THREADS, 0, eps, n_iter, mixes, scale, base, dst);
}

bool op_hc_pre_supported(bool gated, const op_tensor & x, const op_tensor & weights, const op_tensor & dst) {
    const int64_t width = x.ne[0], streams = x.ne[1], tokens = x.ne[2];
    const bool    weights_ok =
        gated ? same_shape(weights, x)
                 : weights.ne[0] == streams && weights.ne[1] == tokens && weights.ne[2] == 1 && weights.ne[3] == 1;
    return is_f32_rows(x) && is_f32_rows(weights) && is_f32_rows(dst) && weights_ok && x.ne[3] == 1 &&
           dst.ne[0] == width && dst.ne[1] == tokens && dst.ne[2] == 1 && dst.ne[3] == 1 && fits_grid(tokens);
}

cudaError_t op_hc_pre(const op_context & ctx, bool gated, float factor, const op_tensor & x, const op_tensor & weights,
                      const op_tensor & dst) {
    return launch(ctx, hc_pre_kernel, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, gated, factor, x, weights, dst);
}

bool op_hc_post_supported(const op_tensor & x, const op_tensor & residual, const op_tensor & post,
                          const op_tensor * comb, const op_tensor & dst) {
    const int64_t streams = residual.ne[1], tokens = residual.ne[2];
    const auto    is = [](const op_tensor & t, int64_t ne0, int64_t ne1, int64_t ne2) {
        return is_f32_rows(t) && t.ne[0] == ne0 && t.ne[1] == ne1 && t.ne[2] == ne2 && t.ne[3] == 1;
    };
    return is_f32_rows(residual) && is(dst, residual.ne[0], streams, tokens) && same_shape(residual, dst) &&
           is(x, residual.ne[0], tokens, 1) && is(post, streams, tokens, 1) &&
           (!comb || is(*comb, streams, streams, tokens)) && fits_grid(dst.n_rows());
}

cudaError_t op_hc_post(const op_context & ctx, const op_tensor & x, const op_tensor & residual, const op_tensor & post,
                       const op_tensor * comb, const op_tensor & dst) {
    return launch(ctx, hc_post_kernel, grid_of(dst), row_threads(dst.ne[0], THREADS), 0, x, residual, post,
                  comb ? *comb : residual, comb != nullptr, dst);
}

} // namespace macko::cuda
