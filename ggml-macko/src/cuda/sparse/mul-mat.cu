// Chooses the launches of a product: which matrices share one, and how many columns it has.
#include "cuda/sparse/product.cuh"

#include <algorithm>

namespace macko::cuda {

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

// Measured on an H200 at densities 0.1 to 0.5: up to this number of columns, tiles or two passes of eight columns are
// faster than a dense product with densified rows; with deltas of 6 bits (few entries: dense rows are mostly zeros),
// three passes are. For wide matrices, fewer columns at a time fit shared memory.
int64_t cuda_sparse_mul_mat_max_n(const gpu_layout & layout, bool experts) {
    return std::visit(
        [&](const auto & w) -> int64_t {
            if constexpr (std::is_same_v<std::decay_t<decltype(w)>, fragments_layout>) {
                return experts ? 16 : CUDA_FRAGMENTS_COLUMNS;
            } else if constexpr (!std::is_base_of_v<row_split_layout, std::decay_t<decltype(w)>>) {
                return 8;
            } else if (takes_tiles(w) && !experts) {
                return CUDA_SPARSE_X16_COLUMNS;
            } else {
                return w.cols > 12288 ? (w.delta_bits == 6 ? 16 : 12) : w.delta_bits == 6 ? 24 : 16;
            }
        },
        layout);
}

// The smallest number of columns for which tiles are faster; with few entries, two passes of up to eight columns are
// faster (measured). INT64_MAX: the product does not support tiles.
template <typename W> static int64_t tiles_from(const W & w, const cuda_sparse_mul_mat_params & a) {
    if constexpr (std::is_base_of_v<row_split_layout, W>) {
        const int64_t least     = w.delta_bits == 6 ? 13 : 9;
        const auto    addresses = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.norm_weight);
        bool          tiles     = a.n >= least && a.x16 && a.ldx % 4 == 0 && addresses % 16 == 0;
        for (int i = 0; i < a.n_matrices; i++) {
            tiles = tiles && takes_tiles(std::get<W>(*a.w[i]));
        }
        return tiles ? least : INT64_MAX;
    }
    return INT64_MAX;
}

static cudaError_t mul_mat(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    const int64_t most = a.expert_ids ? MAX_GRID_YZ : a.n;
    for (int64_t j = 0; j < a.n; j += most) {
        CUDA_TRY(multiply_all(w, a.columns(j, std::min(most, a.n - j)), stream));
    }
    return cudaSuccess;
}

// Multiplies matrices that share a kernel.
template <typename W>
static cudaError_t mul_mat(const W & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    if (a.slots) {
        return cudaErrorNotSupported;
    }
    if (a.expert_ids) {
        for (int64_t j = 0; j < a.n; j += MAX_GRID_YZ) {
            CUDA_TRY(multiply(w, a.columns(j, std::min<int64_t>(MAX_GRID_YZ, a.n - j)), 1, stream));
        }
        return cudaSuccess;
    }
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int64_t least = tiles_from(w, a), fits = columns_at_once(w, a, device);
    for (int64_t j = 0; j < a.n;) {
        const int64_t left = a.n - j;
        if constexpr (std::is_base_of_v<row_split_layout, W>) {
            if (left >= least) {
                const int64_t n = std::min(CUDA_SPARSE_X16_COLUMNS, left);
                CUDA_TRY(multiply_by_tiles(w, a.columns(j, n), stream));
                j += n;
                continue;
            }
        }
        const int64_t nx = std::min<int64_t>(fits, left == 1 ? 1 : left == 2 ? 2 : left <= 4 ? 4 : 8);
        const int64_t n  = std::min(nx, left);
        CUDA_TRY(multiply(w, a.columns(j, n), static_cast<int>(nx), stream));
        j += n;
    }
    return cudaSuccess;
}

cudaError_t cuda_sparse_mul_mat(const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    if (a.n_matrices < 1 || a.n_matrices > CUDA_SPARSE_MAX_BATCH || (a.silu_mul && a.n_matrices != 2)) {
        return cudaErrorInvalidValue;
    }
    bool alike = true, fuses = true;
    for (int i = 0; i < a.n_matrices; i++) {
        alike = alike && (i == 0 || have_same_kernel(*a.w[0], *a.w[i]));
        fuses = fuses && has_fused_products(*a.w[i]);
    }
    if ((!alike && a.silu_mul) || (!fuses && (a.norm_weight || a.silu_mul || a.expert_ids))) {
        return cudaErrorNotSupported;
    }
    if (!alike) { // one launch each
        for (int i = 0; i < a.n_matrices; i++) {
            CUDA_TRY(cuda_sparse_mul_mat(a.matrix(i), stream));
        }
        return cudaSuccess;
    }
    return std::visit([&](const auto & w) { return mul_mat(w, a, stream); }, *a.w[0]);
}

} // namespace macko::cuda
