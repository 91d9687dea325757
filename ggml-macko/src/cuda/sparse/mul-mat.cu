// Chooses and launches the kernels of a product, and has the one for layout FILE, which takes any matrix of any type
// and width.
#include "cuda/sparse/groups.cuh"
#include "cuda/sparse/mul-mat-params.cuh"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

// ---- layout FILE ----

// eight values from an aligned place on
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
// the deltas of eight entries, of which the first one's bits come first
__device__ __forceinline__ uint64_t load_eight_deltas(const uint8_t * deltas, int64_t k, int delta_bits) {
    const uint8_t * from = deltas + k / 8 * delta_bits;
    switch (delta_bits) {
        case 1:  return *from;
        case 2:  return *reinterpret_cast<const uint16_t *>(from);
        case 4:  return *reinterpret_cast<const uint32_t *>(from);
        default: return *reinterpret_cast<const uint64_t *>(from);
    }
}

// A warp per row. A lane has 8 consecutive entries, whose columns it finds by a prefix sum over the lanes. x stays in
// global memory.
template <typename T, int NX>
__global__ void __launch_bounds__(256) file_kernel(const __grid_constant__ sparse_launch p) {
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
        const sparse_task      t   = task_at<true, 1>(p, first, stride, 0, j);
        const sparse_operand & m   = p.m[t.matrix];
        const int              row = m.row_begin + row_offset + t.row;
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

template <typename T> static cudaError_t launch_file(const sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int64_t blocks = std::min<int64_t>((p.n_warp_rows + 7) / 8, 8 * device.multiprocessors);
    return nx == 4 ? launch_sparse(file_kernel<T, 4>, p, 256, 0, blocks, grid_y, stream)
                   : launch_sparse(file_kernel<T, 1>, p, 256, 0, blocks, grid_y, stream);
}

// ---- dispatch ----

static cudaError_t launch_any(sparse_launch & p, const cuda_sparse_matrix & w, int nx, int grid_y,
                              cudaStream_t stream) {
    if (w.layout == CUDA_SPARSE_LAYOUT_FILE) {
        switch (w.type) {
            case GGML_MACKO_TYPE_F16:  return launch_file<__half>(p, nx, grid_y, stream);
            case GGML_MACKO_TYPE_BF16: return launch_file<__nv_bfloat16>(p, nx, grid_y, stream);
            default:                   return launch_file<float>(p, nx, grid_y, stream);
        }
    }
    if (w.layout == CUDA_SPARSE_LAYOUT_QUANTIZED) {
        return w.value_type == GGML_MACKO_TYPE_Q8_0 ? launch_quantized_q8_0(p, nx, grid_y, stream)
                                                    : launch_quantized_q4_0(p, nx, grid_y, stream);
    }
    if (w.layout == CUDA_SPARSE_LAYOUT_CODED) {
        return launch_coded(p, nx, grid_y, stream);
    }
    const bool banked = w.bank_width != 0;
    if (p.m[0].bf16 && nx > 1) {
        return launch_fused_bf16(p, banked, nx, grid_y, stream);
    }
    return !banked && w.delta_bits < 6 ? launch_fused_ascending(p, nx, grid_y, stream)
           : w.delta_bits < 4          ? launch_fused_narrow(p, nx, grid_y, stream)
                                       : launch_fused_wide(p, nx, grid_y, stream);
}

// One launch of nx columns (more than 8: by tiles; experts: all of a's columns, one each).
static cudaError_t launch_columns(const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    const cuda_sparse_matrix & w                 = *a.w[0];
    const int                  rows_of_warp_rows = w.layout == CUDA_SPARSE_LAYOUT_FILE ? 1 : 32 / w.lanes;
    sparse_launch              p                 = {};
    for (int i = 0; i < CUDA_SPARSE_MAX_GROUPED; i++) {
        sparse_operand & m = p.m[i];
        if (i >= a.n_matrices) {
            m.first_warp_rows = INT32_MAX;
            continue;
        }
        m.values          = a.w[i]->values;
        m.deltas          = a.w[i]->deltas;
        m.bases           = a.w[i]->bases;
        m.row_ptr         = a.w[i]->row_ptr;
        m.tails           = a.w[i]->tails;
        m.power           = std::ldexp(1.0f, a.w[i]->exponent);
        m.inverse         = std::ldexp(1.0f, -a.w[i]->exponent);
        m.bf16            = a.w[i]->type == GGML_MACKO_TYPE_BF16;
        m.outliers        = reinterpret_cast<const uint2 *>(a.w[i]->outliers);
        m.y               = a.y[i];
        m.residual        = a.residual[i];
        m.bias            = a.bias[i];
        p.adds            = p.adds || m.residual || m.bias;
        m.ldy             = a.ldy[i];
        m.row_begin       = static_cast<int32_t>(a.row_begin[i]);
        m.n_rows          = static_cast<int32_t>(a.row_end[i] - a.row_begin[i]);
        m.delta_bits      = a.w[i]->delta_bits;
        m.first_warp_rows = p.n_warp_rows;
        if (i == 0 || !a.silu_mul) {
            p.n_warp_rows += (m.n_rows + rows_of_warp_rows - 1) / rows_of_warp_rows;
        }
        p.overshoot = std::max(p.overshoot, a.w[i]->overshoot);
    }
    p.x                 = a.x;
    p.ldx               = a.ldx;
    p.norm_weight       = a.norm_weight;
    p.norm_eps          = a.norm_eps;
    p.expert_ids        = a.expert_ids;
    p.expert_ids_stride = a.expert_ids_stride;
    p.expert_rows       = a.expert_rows;
    p.n_experts         = a.expert_ids ? static_cast<int32_t>(w.rows / a.expert_rows) : 0;
    p.n_matrices        = a.n_matrices;
    p.n_columns         = static_cast<int32_t>(a.n);
    p.cols              = static_cast<int32_t>(w.cols);
    p.modulus           = static_cast<int32_t>(cuda_sparse_words(w));
    p.lanes             = w.lanes;
    p.silu_mul          = a.silu_mul;
    p.programmatic      = a.programmatic;
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    if (nx > 8) {
        return launch_tiles(p, w, a.x16, stream);
    }
    return launch_any(p, w, nx, a.expert_ids ? static_cast<int>(a.n) : 1, stream);
}

cuda_sparse_mul_mat_params cuda_sparse_mul_mat_params::matrix(int i) const {
    cuda_sparse_mul_mat_params one = *this;
    one.n_matrices                 = 1;
    one.w[0]                       = w[i];
    one.y[0]                       = y[i];
    one.ldy[0]                     = ldy[i];
    one.residual[0]                = residual[i];
    one.bias[0]                    = bias[i];
    one.row_begin[0]               = row_begin[i];
    one.row_end[0]                 = row_end[i];
    return one;
}

cuda_sparse_mul_mat_params cuda_sparse_mul_mat_params::columns(int64_t j, int64_t n_columns) const {
    cuda_sparse_mul_mat_params part = *this;
    part.n                          = n_columns;
    part.x                          = x + j * ldx;
    for (int i = 0; i < n_matrices; i++) {
        part.y[i]        = y[i] + j * ldy[i];
        part.residual[i] = residual[i] ? residual[i] + j * ldy[i] : nullptr;
    }
    part.expert_ids = expert_ids ? expert_ids + j * expert_ids_stride : nullptr;
    return part;
}

// Measured on an H200 at densities .1 ... .5: up to so many columns, tiles or two passes of eight columns take less
// than writing the rows dense and a dense product; with deltas of 6 or 8 bits (few entries: dense rows are mostly
// zeros) three passes do. In wide matrices fewer columns at a time fit shared memory.
int64_t cuda_sparse_mul_mat_max_n(const cuda_sparse_matrix & w, bool experts) {
    if (w.layout == CUDA_SPARSE_LAYOUT_FILE || w.layout == CUDA_SPARSE_LAYOUT_QUANTIZED || w.part) {
        return 8;
    }
    if (takes_tiles(w) && !experts) {
        return CUDA_SPARSE_X16_COLUMNS;
    }
    return w.cols > 12288 ? (w.delta_bits >= 6 ? 16 : 12) : w.delta_bits >= 6 ? 24 : 16;
}

// matrices of which at least one has a part in another layout: one after the other
static cudaError_t mul_mat_with_parts(const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    if (a.norm_weight || a.silu_mul || a.expert_ids) {
        return cudaErrorNotSupported;
    }
    for (int i = 0; i < a.n_matrices; i++) {
        const matrix_part * part = a.w[i]->part;
        CUDA_TRY(part ? part->mul_mat(a.matrix(i), stream) : cuda_sparse_mul_mat(a.matrix(i), stream));
    }
    return cudaSuccess;
}

cudaError_t cuda_sparse_mul_mat(const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    if (a.n_matrices < 1 || a.n_matrices > CUDA_SPARSE_MAX_GROUPED || (a.silu_mul && a.n_matrices != 2)) {
        return cudaErrorInvalidValue;
    }
    const cuda_sparse_matrix & w     = *a.w[0];
    bool                       alike = true, parts = w.part;
    for (int i = 1; i < a.n_matrices; i++) {
        alike = alike && cuda_sparse_same_kernel(w, *a.w[i]);
        parts = parts || a.w[i]->part;
    }
    if (parts) {
        return mul_mat_with_parts(a, stream);
    }
    if (!alike && a.silu_mul) {
        return cudaErrorNotSupported;
    }
    if (!alike) { // one launch each
        for (int i = 0; i < a.n_matrices; i++) {
            CUDA_TRY(cuda_sparse_mul_mat(a.matrix(i), stream));
        }
        return cudaSuccess;
    }
    constexpr int64_t MAX_GRID_Y = 65535;
    if (a.expert_ids) {
        for (int64_t j = 0; j < a.n; j += MAX_GRID_Y) {
            CUDA_TRY(launch_columns(a.columns(j, std::min(MAX_GRID_Y, a.n - j)), 1, stream));
        }
        return cudaSuccess;
    }
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    sparse_launch p = {};
    p.modulus       = static_cast<int32_t>(cuda_sparse_words(w));
    for (int i = 0; i < a.n_matrices; i++) {
        p.overshoot = std::max(p.overshoot, a.w[i]->overshoot);
    }
    p.lanes         = w.lanes;
    const bool rows = w.layout == CUDA_SPARSE_LAYOUT_FILE, blocks = w.layout == CUDA_SPARSE_LAYOUT_QUANTIZED;
    int        fits = rows || blocks ? 4 : 8; // columns of x in shared memory
    while (!rows && fits > 1 &&
           (blocks ? quantized_shared_nbytes(p, fits) : interleaved_shared_nbytes(p, fits)) > device.shared_nbytes) {
        fits /= 2;
    }
    // columns from which on tiles pay; with few entries two passes of up to eight columns take less (measured)
    const int64_t tiles_from = w.delta_bits == 6 ? 13 : 9;
    bool          tiles      = a.n >= tiles_from && a.x16 && a.ldx % 4 == 0 &&
                 (reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.norm_weight)) % 16 == 0;
    for (int i = 0; i < a.n_matrices; i++) {
        tiles = tiles && takes_tiles(*a.w[i]);
    }
    for (int64_t j = 0; j < a.n;) {
        const int64_t left = a.n - j;
        const int     nx   = tiles && left >= tiles_from ? CUDA_SPARSE_X16_COLUMNS
                             : left == 1                 ? 1
                             : rows                      ? 4
                                                         : std::min(fits, left == 2   ? 2
                                                                          : left <= 4 ? 4
                                                                                      : 8);
        const int64_t n    = std::min<int64_t>(nx, left);
        CUDA_TRY(launch_columns(a.columns(j, n), nx, stream));
        j += n;
    }
    return cudaSuccess;
}

} // namespace macko::cuda
