// y = W x, with W in the layout MACKO (gpu-layout/macko.h), of any type and width.
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>

namespace macko::cuda {

// Loads eight values from index k on, a multiple of 8.
template <typename T> __device__ __forceinline__ void load_eight(float (&v)[8], const uint8_t * values, int64_t k) {
    const uint4 *  from = reinterpret_cast<const uint4 *>(values + k * static_cast<int64_t>(sizeof(T)));
    const uint4    a    = load_streaming(from);
    const uint32_t w[4] = { a.x, a.y, a.z, a.w };
    if constexpr (sizeof(T) == 4) {
        const uint4    b    = load_streaming(from + 1);
        const uint32_t u[4] = { b.x, b.y, b.z, b.w };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i]     = __uint_as_float(w[i]);
            v[i + 4] = __uint_as_float(u[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i]     = half_word<false>(T(), w[i]);
            v[2 * i + 1] = half_word<true>(T(), w[i]);
        }
    }
}
// Loads the deltas of eight entries; the first delta is in the lowest bits.
__device__ __forceinline__ uint64_t load_eight_deltas(const uint8_t * deltas, int64_t k, int delta_bits) {
    const uint8_t * from = deltas + k / 8 * delta_bits;
    switch (delta_bits) {
        case 1:  return *from;
        case 2:  return *reinterpret_cast<const uint16_t *>(from);
        case 4:  return *reinterpret_cast<const uint32_t *>(from);
        default: return *reinterpret_cast<const uint64_t *>(from);
    }
}

template <typename T, // type of the values
          int NX>     // columns of x: 1 or 4
__global__ void __launch_bounds__(256) macko_kernel(const __grid_constant__ macko_launch p) {
    // One warp per row; x stays in global memory:
    //
    //   entries of a row   | lane 0: 8 entries | lane 1: 8 entries | ... | lane 31 | lane 0: the next 8 | ...
    //   column of entry k  the column of the last entry before + steps of the lanes below + own steps up to k
    //
    // Phases: compute the scale of the norm; for each row load values and deltas, add up the steps over the lanes,
    // gather x and multiply, sum over the warp; store the result.
    __shared__ float partial[NX][8];
    const int        lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int        column     = blockIdx.y * NX;
    const int        stride     = gridDim.x * 8;
    const int        first      = blockIdx.x + gridDim.x * warp;
    const int        row_offset = p.expert_ids ? expert_row(p, column) : 0;
    if (!p.expert_ids) {
        cuda_wait_for_previous();
    }
    cuda_allow_next();
    const float * x = p.x + column * p.ldx;
    float         scale[NX];
#pragma unroll
    for (int c = 0; c < NX; c++) {
        scale[c] = 1.0f;
    }
    if (p.norm_weight) {
#pragma unroll
        for (int c = 0; c < NX; c++) {
            float squares = 0.0f;
            for (int i = threadIdx.x; i < p.cols && column + c < p.n_columns; i += 256) {
                squares = fmaf(x[c * p.ldx + i], x[c * p.ldx + i], squares);
            }
            squares = warp_sum(squares);
            if (lane == 0) {
                partial[c][warp] = squares;
            }
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < NX; c++) {
            scale[c] = rsqrtf(warp_sum(lane < 8 ? partial[c][lane] : 0.0f) / static_cast<float>(p.cols) + p.norm_eps);
        }
    }

    float gate[NX] = {};
    for (int j = 0; first + (p.silu_mul ? j / 2 : j) * stride < p.n_warp_rows; j++) {
        const sparse_task     t   = task_at<true, 1>(p, first, stride, 0, j);
        const macko_operand & m   = p.m[t.matrix];
        const int             row = m.row_begin + row_offset + t.row;
        const int begin = row_offset >= 0 ? m.row_ptr[row] : 0, end = row_offset >= 0 ? m.row_ptr[row + 1] : 0;
        float     sum[NX] = {};
        int       before  = -1; // column of the last entry so far
        for (int e = begin & ~7; e < end; e += 256) {
            const int k0        = e + lane * 8;
            float     values[8] = {};
            uint64_t  deltas    = 0;
            if (k0 < end) { // the arrays are padded to multiples of eight entries
                load_eight<T>(values, m.values, k0);
                deltas = load_eight_deltas(m.deltas, k0, m.delta_bits);
            }
            int step[8], total = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const bool here = k0 + k >= begin && k0 + k < end;
                step[k] = here ? 1 + static_cast<int>(deltas >> k * m.delta_bits & ((1u << m.delta_bits) - 1)) : 0;
                total += step[k];
            }
            const int through = warp_prefix_sum(total);
            int       at      = before + through - total;
            before += __shfl_sync(FULL_WARP, through, 31);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                at += step[k];
                if (step[k]) {
                    const float weight = p.norm_weight ? p.norm_weight[at] : 1.0f;
#pragma unroll
                    for (int c = 0; c < NX; c++) {
                        if (NX == 1 || column + c < p.n_columns) {
                            const float v = x[c * p.ldx + at] * scale[c] * weight;
                            sum[c]        = fmaf(values[k], NX > 1 ? rounded_to<T>(v) : v, sum[c]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int c = 0; c < NX; c++) {
            const float y = warp_sum(sum[c]);
            if (p.silu_mul && t.matrix == 0) {
                gate[c] = y;
            } else if (lane == 0 && column + c < p.n_columns) {
                store_result<true>(p, t, column + c, y, gate[c]);
            }
        }
    }
}

template <typename T> static cudaError_t launch_macko(const macko_launch & p, int nx, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int64_t blocks = std::min<int64_t>((p.n_warp_rows + 7) / 8, 8 * device.multiprocessors);
    return nx > 1 ? launch_sparse(macko_kernel<T, 4>, p, 256, 0, blocks, grid_y, stream)
                  : launch_sparse(macko_kernel<T, 1>, p, 256, 0, blocks, grid_y, stream);
}

int columns_at_once(const macko_layout &, const cuda_sparse_mul_mat_params &, const cuda_device_info &) { return 4; }

cudaError_t multiply(const macko_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    macko_launch p = {};
    set_product(p, a, 1, [](const gpu_layout & layout, macko_operand & m) {
        const macko_layout & l = std::get<macko_layout>(layout);
        m.values               = l.values;
        m.deltas               = l.deltas;
        m.row_ptr              = l.row_ptr;
        m.delta_bits           = l.delta_bits;
    });
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    switch (w.type) {
        case GGML_MACKO_TYPE_F16:  return launch_macko<__half>(p, nx, grid_columns(a), stream);
        case GGML_MACKO_TYPE_BF16: return launch_macko<__nv_bfloat16>(p, nx, grid_columns(a), stream);
        default:                   return launch_macko<float>(p, nx, grid_columns(a), stream);
    }
}

} // namespace macko::cuda
