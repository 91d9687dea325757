// Shared by the kernels of all layouts: the destinations of results, and the arguments of a launch. Internal to
// cuda/sparse.
#pragma once

#include "cuda/lib/common.cuh"
#include "cuda/sparse/mul-mat.cuh"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

// The destination of the results of one matrix, and the numbers added to them.
struct result_operand {
    float *       y;
    const float * residual;
    const float * bias;
    int64_t       ldy;
    int32_t       row_begin;
    int32_t       n_rows;
    int32_t       first_warp_rows; // warp_rows: the rows that a warp processes at a time
};

// The arguments of a kernel. OPERAND: a result_operand with the arrays of one matrix in its layout
template <typename OPERAND> struct product_launch {
    OPERAND         m[CUDA_SPARSE_MAX_BATCH];
    const float *   x;
    const float *   norm_weight;
    const int32_t * expert_ids;
    int64_t         ldx;
    int64_t         expert_ids_stride;
    int64_t         expert_rows;
    int32_t         n_experts;
    int32_t         n_warp_rows;
    int32_t         n_matrices;
    bool            silu_mul;
    bool            programmatic;
    int32_t         n_columns;
    int32_t         cols;
    bool            adds; // some matrix has a residual or a bias
    float           norm_eps;
};

struct macko_operand : result_operand {
    const uint8_t * values;
    const uint8_t * deltas;
    const int32_t * row_ptr;
    int32_t         delta_bits;
};
using macko_launch = product_launch<macko_operand>;

struct row_split_operand : result_operand {
    const uint8_t *  groups;
    const uint16_t * bases;
    const int32_t *  row_ptr;
    const uint16_t * trailing;
    float            power, inverse; // 2^exponent, 2^-exponent
    bool             bf16;           // the type of the values
};
struct row_split_launch : product_launch<row_split_operand> {
    int32_t  modulus;   // words of x in shared memory before it repeats (bank order), or all words
    int32_t  overshoot; // words that repeat
    uint32_t x_period;  // distance after which x repeats, in units of an address; set together with weight
    bool     aligned;   // x and the norm's weights can be read in vectors of 16 bytes
    // dp4a weights of the entries of a group; dp4a reads them from constant memory without a register
    uint32_t weight[16];
};

// Fills the members of p that do not depend on the layout. operand(matrix, its operand) fills in the arrays.
// rows_of_warp_rows: rows that a warp processes at a time
template <typename P, typename F>
void set_product(P & p, const cuda_sparse_mul_mat_params & a, int rows_of_warp_rows, F && operand) {
    for (int i = 0; i < CUDA_SPARSE_MAX_BATCH; i++) {
        auto & m = p.m[i];
        if (i >= a.n_matrices) {
            m.first_warp_rows = INT32_MAX;
            continue;
        }
        operand(*a.w[i], m);
        m.y               = a.y[i];
        m.residual        = a.residual[i];
        m.bias            = a.bias[i];
        p.adds            = p.adds || m.residual || m.bias;
        m.ldy             = a.ldy[i];
        m.row_begin       = static_cast<int32_t>(a.row_begin[i]);
        m.n_rows          = static_cast<int32_t>(a.row_end[i] - a.row_begin[i]);
        m.first_warp_rows = p.n_warp_rows;
        if (i == 0 || !a.silu_mul) {
            p.n_warp_rows += (m.n_rows + rows_of_warp_rows - 1) / rows_of_warp_rows;
        }
    }
    const layout_base & w = base_of(*a.w[0]);
    p.x                   = a.x;
    p.ldx                 = a.ldx;
    p.norm_weight         = a.norm_weight;
    p.norm_eps            = a.norm_eps;
    p.expert_ids          = a.expert_ids;
    p.expert_ids_stride   = a.expert_ids_stride;
    p.expert_rows         = a.expert_rows;
    p.n_experts           = a.expert_ids ? static_cast<int32_t>(w.rows / a.expert_rows) : 0;
    p.n_matrices          = a.n_matrices;
    p.n_columns           = static_cast<int32_t>(a.n);
    p.cols                = static_cast<int32_t>(w.cols);
    p.silu_mul            = a.silu_mul;
    p.programmatic        = a.programmatic;
}
// Columns of a grid: one per expert, unless they are grouped.
inline int grid_columns(const cuda_sparse_mul_mat_params & a) { return a.expert_ids ? static_cast<int>(a.n) : 1; }

// The arguments for a row-split layout M.
template <typename M>
row_split_launch row_split_product(const M & w, const cuda_sparse_mul_mat_params & a, int rows_of_warp_rows) {
    row_split_launch p = {};
    set_product(p, a, rows_of_warp_rows, [&](const gpu_layout & layout, row_split_operand & m) {
        const M & l = std::get<M>(layout);
        m.groups    = l.groups;
        m.bases     = l.bases;
        m.row_ptr   = l.row_ptr;
        m.trailing  = l.trailing;
        m.power     = std::ldexp(1.0f, l.exponent);
        m.inverse   = std::ldexp(1.0f, -l.exponent);
        m.bf16      = l.type == GGML_MACKO_TYPE_BF16;
        p.overshoot = std::max(p.overshoot, l.overshoot);
    });
    p.modulus = static_cast<int32_t>(x_words_of(w));
    return p;
}

// The row that a thread processes in one turn.
struct sparse_task {
    int  matrix;
    int  row; // from row_begin
    bool valid;
};

// The task of a thread in turn j. rows: rows of a warp_rows; first: the first warp_rows of the warp; stride: the
// distance to its next; sub: the thread's row in a warp_rows
template <bool BATCHED, typename P>
__device__ __forceinline__ sparse_task task_at(const P & p, int rows, int first, int stride, int sub, int j) {
    sparse_task t         = { 0, 0, false };
    const int   warp_rows = first + (BATCHED && p.silu_mul ? j / 2 : j) * stride;
    int         before    = 0; // warp_rows of the preceding matrices
    if (BATCHED && p.silu_mul) {
        t.matrix = j % 2;
    } else if (BATCHED) {
#pragma unroll
        for (int i = 1; i < CUDA_SPARSE_MAX_BATCH; i++) {
            const bool behind = warp_rows >= p.m[i].first_warp_rows;
            t.matrix          = behind ? i : t.matrix;
            before            = behind ? p.m[i].first_warp_rows : before;
        }
    }
    t.row   = (warp_rows - before) * rows + sub;
    t.valid = warp_rows < p.n_warp_rows && (rows == 1 || t.row < p.m[t.matrix].n_rows);
    return t;
}
template <bool BATCHED, int ROWS, typename P>
__device__ __forceinline__ sparse_task task_at(const P & p, int first, int stride, int sub, int j) {
    return task_at<BATCHED>(p, ROWS, first, stride, sub, j);
}

// First row of an expert; -1 for an invalid id.
template <typename P> __device__ __forceinline__ int row_of_expert(const P & p, int id) {
    return id >= 0 && id < p.n_experts ? static_cast<int>(id * p.expert_rows) : -1;
}
// First row of the expert of a column; -1 for an invalid id. Waits for the previous kernel.
template <typename P> __device__ __forceinline__ int expert_row(const P & p, int column) {
    cuda_wait_for_previous();
    return row_of_expert(p, p.expert_ids[column * p.expert_ids_stride]);
}

// Subtracts period from `at` if it has reached limit. Two instructions; C++ code compiles to three.
__device__ __forceinline__ void reduce_once(uint32_t & at, uint32_t limit, uint32_t period) {
    asm("{\n.reg .pred again;\nsetp.ge.u32 again, %0, %1;\n@again sub.u32 %0, %0, %2;\n}"
        : "+r"(at)
        : "r"(limit), "r"(period));
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// The destination of an element of W x, and the number added to it. m: with silu_mul, the first matrix
__device__ __forceinline__ float * result_at(const result_operand & m, int column, int row) {
    return m.y + (column * m.ldy + row);
}
__device__ __forceinline__ float residual_at(const result_operand & m, int column, int row) {
    return m.residual ? m.residual[column * m.ldy + row] : 0.0f;
}
template <typename P>
__device__ __forceinline__ float added_to_result(const P & p, const result_operand & m, int column, int row) {
    return p.adds ? residual_at(m, column, row) + (m.bias ? m.bias[row] : 0.0f) : 0.0f;
}

// The epilogue of one element of W x. gate: with silu_mul, the result of the first matrix
template <bool BATCHED, typename P>
__device__ __forceinline__ void store_result(const P & p, const sparse_task & t, int column, float y, float gate) {
    const result_operand & m        = p.m[BATCHED && p.silu_mul ? 0 : t.matrix];
    const float            residual = residual_at(m, column, t.row);
    if (BATCHED && p.silu_mul) {
        y *= silu(gate);
    }
    if (m.bias) {
        y += m.bias[t.row];
    }
    if (m.residual) {
        y += residual;
    }
    *result_at(m, column, t.row) = y;
}

// Warps per block, from `least` to `most`. Chooses fewer warps if fewer of them are then idle in the last round over
// the warp_rows of a block (39 take two rounds of 32 warps or of 20), and this saves more than the 4 % that fewer bytes
// in flight cost.
inline int warps_for(int warp_rows, int least, int most) {
    int best = most;
    for (int w = most; w >= least; w--) {
        if ((warp_rows + w - 1) / w * w * 25 < (warp_rows + best - 1) / best * best * (best == most ? 24 : 25)) {
            best = w;
        }
    }
    return best;
}

// Launches a kernel. programmatic: as a programmatic dependent launch, if the GPU supports it
template <typename P>
cudaError_t launch_kernel(void (*kernel)(P), const P & p, dim3 grid, int threads, int64_t shared_nbytes,
                          bool programmatic, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    if (shared_nbytes > 48 * 1024) {
        CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_nbytes));
    }
    return cuda_launch(kernel, grid, dim3(static_cast<unsigned>(threads)), static_cast<size_t>(shared_nbytes),
                       programmatic && device.cc >= 90, stream, p);
}
template <typename P>
cudaError_t launch_sparse(void (*kernel)(P), const P & p, int threads, int64_t shared_nbytes, int64_t blocks,
                          int grid_y, cudaStream_t stream) {
    return launch_kernel(kernel, p, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(grid_y)), threads,
                         shared_nbytes, p.programmatic, stream);
}

// 4-byte words of shared memory per position of x in the row-split kernel: one column is float32, more are 16-bit
constexpr int x_words(int nx) { return (nx + 1) / 2; }

// Bytes of shared memory of the row-split kernel with nx columns of x: sums of squares, x, and, if x is copied in
// vectors, the weights of its norm.
inline int64_t row_split_shared_nbytes(const row_split_launch & p, int nx) {
    const int64_t words = static_cast<int64_t>(p.modulus + p.overshoot) * x_words(nx);
    return (nx * 32 + (p.aligned && p.norm_weight ? ((words + 3) & ~int64_t(3)) + p.cols : words)) * 4;
}
// Whether one column of x, and the weights of its norm, can be copied in vectors of 16 bytes and fit shared memory.
inline bool takes_vectors(const row_split_launch & p) {
    cuda_device_info device;
    const uintptr_t  addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.norm_weight) |
                                static_cast<uintptr_t>(p.expert_ids ? p.ldx * 4 : 0);
    row_split_launch vectors = p;
    vectors.aligned          = true;
    return p.cols % 4 == 0 && addresses % 16 == 0 && p.overshoot <= p.cols &&
           cuda_current_device(&device) == cudaSuccess && row_split_shared_nbytes(vectors, 1) <= device.shared_nbytes;
}

// ---- functions of each layout, which mul-mat.cu and densify.cu call ----

// The maximum number of columns of x of one launch, except for tiles.
int columns_at_once(const macko_layout & w, const cuda_sparse_mul_mat_params & a, const cuda_device_info & device);
int columns_at_once(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a,
                    const cuda_device_info & device);
int columns_at_once(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, const cuda_device_info & device);
int columns_at_once(const row_blocks_layout & w, const cuda_sparse_mul_mat_params & a, const cuda_device_info & device);
// One launch of the kernel for nx columns: 1, 2, 4 or 8, and at least a.n. w: a.w[0]; all matrices of a have the same
// kernel. With experts: all columns, one per expert.
cudaError_t multiply(const macko_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream);
cudaError_t multiply(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream);
cudaError_t multiply(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream);
cudaError_t multiply(const row_blocks_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream);
// All columns, in as few launches as possible. With x16, up to 32 columns are one product.
cudaError_t multiply_all(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream);
// One launch of 9 to CUDA_SPARSE_X16_COLUMNS columns by tiles (tiles.cuh), for matrices that support them. x, ldx and
// norm_weight are aligned to 16 bytes.
bool        takes_tiles(const inline_delta_layout & w);
bool        takes_tiles(const exp_coded_layout & w);
cudaError_t multiply_by_tiles(const inline_delta_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream);
cudaError_t multiply_by_tiles(const exp_coded_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream);

// cuda_sparse_densify() of a layout
struct dense_rows {
    int64_t      row_begin, row_end;
    void *       dst;
    int64_t      ld;
    cudaStream_t stream;
};
cudaError_t densify(const macko_layout & w, const dense_rows & to);
cudaError_t densify(const inline_delta_layout & w, const dense_rows & to);
cudaError_t densify(const exp_coded_layout & w, const dense_rows & to);
cudaError_t densify(const row_blocks_layout & w, const dense_rows & to);
cudaError_t densify(const fragments_layout & w, const dense_rows & to);

// ---- launches: row-split.cuh defines them, and several .cu files instantiate them ----

// nx (1, 2, 4 or 8) columns of x in shared memory; experts: grid_y columns, one each. INLINE_DELTA: one column of
// either type or several of F16; several of BF16. EXP_CODED, X: the type of the matrix.
template <int BITS, bool BANK_ORDER>
cudaError_t launch_inline_delta(row_split_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream);
template <int BITS, bool BANK_ORDER>
cudaError_t launch_inline_delta_bf16(row_split_launch & p, int nx, int grid_y, cudaStream_t stream);
template <typename X, int BITS>
cudaError_t launch_exp_coded(row_split_launch & p, int nx, int grid_y, cudaStream_t stream);

} // namespace macko::cuda
