#include "cuda/sparse/layout.h"

#include <algorithm>

namespace macko::cuda {

const char * cuda_sparse_layout_name(int32_t layout) {
    static const char * const NAMES[] = { "rows", "runs", "striped", "blocks", "compact" };
    return NAMES[layout];
}

// 16 bits per run and row: wide rows have the bytes to spare, narrow ones also leave too few entries for 32 lanes.
// Where rows are few, two per warp have more
// of themselves in flight (measured, notes).
int32_t cuda_sparse_lanes(const macko_desc & desc, int64_t n_padded, int32_t layout) {
    constexpr int64_t FEW_ROWS = 4224; // 16 units of two for each of 132 multiprocessors
    if (layout == CUDA_SPARSE_LAYOUT_RUNS && desc.delta_bits < 8) {
        return 8; // the only kernel there is: for narrow matrices and unusual structure
    }
    const int64_t per_row = n_padded / desc.rows;
    const int32_t lanes   = per_row >= (desc.rows <= FEW_ROWS ? 7000 : 2048) ? 32 : per_row >= 768 ? 16 : 8;
    if (layout == CUDA_SPARSE_LAYOUT_RUNS && desc.type == GGML_MACKO_TYPE_F16) {
        return std::min(lanes, 16);
    }
    const bool wide = desc.cols >= CUDA_SPARSE_WIDE;
    return wide && desc.delta_bits <= 2 ? std::max(lanes, 16) : lanes; // so wide and so dense a matrix has long rows
}

static int64_t max_groups(const macko_desc & desc, int64_t n_padded) {
    // The last group of a row is half full on average. Ordering by position moves fillers about, and each of 31 stripes
    // may end in an
    // empty place: this covers random masks; what is emptier in its stripes than that becomes RUNS or ROWS.
    const int64_t groups = (n_padded + n_padded / 400) / CUDA_SPARSE_GROUP + desc.rows * 9 / 16 + 64;
    // Rows pruned to equal lengths (a header tells: entries divide by rows) all waste the same part of their last
    // group, unless fillers,
    // which are rare among codes of 8 bits, vary them.
    if (desc.delta_bits == 8 && desc.nnz % desc.rows == 0) {
        const int64_t per_row = (desc.nnz / desc.rows + CUDA_SPARSE_GROUP - 1) / CUDA_SPARSE_GROUP;
        return std::max(
            groups, std::min(desc.rows * per_row + n_padded - desc.nnz, n_padded / CUDA_SPARSE_GROUP + desc.rows + 64));
    }
    return groups;
}

int64_t cuda_sparse_max_groups(const macko_desc & desc, int64_t n_padded, int32_t layout) {
    const int64_t groups = max_groups(desc, n_padded);
    if (layout != CUDA_SPARSE_LAYOUT_COMPACT) {
        return groups;
    }
    // the memory that STRIPED takes for values and codes: what codes took is for spilled values
    return (groups * (2 * CUDA_SPARSE_GROUP + desc.delta_bits) - cuda_sparse_aligned(2 * desc.rows)) /
           (2 * CUDA_SPARSE_GROUP);
}

cuda_sparse_matrix cuda_sparse_bind(const macko_desc & desc, int64_t n_padded, int32_t layout, int32_t lanes,
                                    void * memory) {
    cuda_sparse_matrix m = {};
    m.rows               = desc.rows;
    m.cols               = desc.cols;
    m.type               = desc.type;
    m.value_type         = desc.type;
    m.delta_bits         = desc.delta_bits;
    m.layout             = layout;
    m.stripe             = layout == CUDA_SPARSE_LAYOUT_STRIPED || layout == CUDA_SPARSE_LAYOUT_COMPACT
                               ? static_cast<int32_t>(stripe_width(desc.cols))
                               : 0;
    cuda_sparse_parts parts(memory);
    if (layout == CUDA_SPARSE_LAYOUT_ROWS) {
        parts.take(&m.values, n_padded * value_nbytes(desc.type));
        parts.take(&m.codes, deltas_nbytes(n_padded, desc.delta_bits));
    } else {
        const int64_t groups = std::max<int64_t>(0, cuda_sparse_max_groups(desc, n_padded, layout));
        m.lanes              = lanes;
        parts.take(&m.values, groups * CUDA_SPARSE_GROUP * value_nbytes(desc.type));
        if (layout == CUDA_SPARSE_LAYOUT_COMPACT) {
            parts.take(&m.tails, desc.rows);
        } else {
            parts.take(&m.codes, groups * desc.delta_bits);
        }
        parts.take(&m.bases, desc.rows * lanes);
    }
    parts.take(&m.row_ptr, desc.rows + 1);
    m.nbytes = parts.nbytes();
    return m;
}

int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded) {
    const int64_t rows = cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_ROWS, 0, nullptr).nbytes;
    if (desc.type == GGML_MACKO_TYPE_F32) {
        return rows; // the only layout that it has
    }
    const int32_t lanes = cuda_sparse_lanes(desc, n_padded, CUDA_SPARSE_LAYOUT_STRIPED); // at least those of RUNS
    const int64_t runs  = cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_STRIPED, lanes, nullptr).nbytes;
    return std::max(rows, runs);
}

} // namespace macko::cuda
