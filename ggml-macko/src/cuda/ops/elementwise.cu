// Elementwise operations: two tensors with broadcasting, one tensor, gated units, bias by expert. A block has one row
// of dst (blockIdx.x), or one chunk of a long row (blockIdx.y). No __restrict__, because dst is often one of the
// sources.
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

} // namespace macko::cuda
