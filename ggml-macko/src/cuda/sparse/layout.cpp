#include "cuda/sparse/layout.h"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

const char * cuda_sparse_layout_name(int32_t layout) {
    static const char * const NAMES[] = { "file", "interleaved", "banked", "quantized", "fused", "coded" };
    return NAMES[layout];
}

// A base takes 16 bits per run and row: long rows have the bytes to spare, short ones would leave too few entries for
// each of 32 lanes. Where rows are few, two rows per warp have more bytes in flight (measured, see the lab notes of the
// GPU kernels).
int32_t cuda_sparse_lanes(const macko_desc & desc, int64_t n_padded, int32_t layout) {
    constexpr int64_t FEW_ROWS = 4224; // 16 warps with two rows each on each of 132 multiprocessors
    if (layout == CUDA_SPARSE_LAYOUT_INTERLEAVED && desc.delta_bits < 8) {
        return 8; // the only kernels there are: for narrow matrices and unusual structure
    }
    const int64_t per_row = n_padded / desc.rows;
    if (layout == CUDA_SPARSE_LAYOUT_CODED) {
        return CODED_LANES;
    }
    const int32_t lanes = per_row >= (desc.rows <= FEW_ROWS ? 7000 : 2048) ? 32 : per_row >= 768 ? 16 : 8;
    if (layout == CUDA_SPARSE_LAYOUT_INTERLEAVED && desc.type == GGML_MACKO_TYPE_F16) {
        return std::min(lanes, 16);
    }
    // a wide matrix with so narrow deltas has long rows
    const bool long_rows = desc.cols >= CUDA_SPARSE_WIDE && desc.delta_bits <= 2;
    return long_rows ? std::max(lanes, 16) : lanes;
}

static int64_t max_groups(const macko_desc & desc, int64_t n_padded) {
    // The last group of a row is half full on average. Ordering by banks moves fillers about, and each of 31 borders
    // between banks may take one more: the room covers random masks. Matrices that are emptier in some banks than that
    // become INTERLEAVED or FILE.
    const int64_t groups = (n_padded + n_padded / 400) / CUDA_SPARSE_GROUP + desc.rows * 9 / 16 + 64;
    // Rows pruned to equal lengths (nnz is a multiple of rows) all waste the same part of their last group, unless
    // fillers, which are rare among deltas of 8 bits, make their lengths differ.
    if (desc.delta_bits == 8 && desc.nnz % desc.rows == 0) {
        const int64_t per_row = (desc.nnz / desc.rows + CUDA_SPARSE_GROUP - 1) / CUDA_SPARSE_GROUP;
        return std::max(
            groups, std::min(desc.rows * per_row + n_padded - desc.nnz, n_padded / CUDA_SPARSE_GROUP + desc.rows + 64));
    }
    return groups;
}

int64_t cuda_sparse_max_groups(const macko_desc & desc, int64_t n_padded, int32_t layout) {
    const int64_t groups = max_groups(desc, n_padded);
    if (layout != CUDA_SPARSE_LAYOUT_FUSED) {
        return groups;
    }
    // the memory that separate values and deltas would take: what the deltas took is for outliers
    return (groups * (2 * CUDA_SPARSE_GROUP + desc.delta_bits) - cuda_sparse_aligned(2 * desc.rows)) /
           (2 * CUDA_SPARSE_GROUP);
}

// Bytes of groups, of so many bytes and entries each, where the zeros are at random places
static double expected_nbytes(const macko_desc & desc, double group_nbytes, double entries, int32_t delta_bits) {
    const double zeros = 1 - static_cast<double>(desc.nnz) / static_cast<double>(desc.rows * desc.cols);
    return static_cast<double>(desc.nnz) * group_nbytes / entries / (1 - std::pow(zeros, 1 << delta_bits));
}

int32_t cuda_coded_delta_bits(const macko_desc & desc) {
    const auto nbytes = [&](int32_t bits) {
        return expected_nbytes(desc, static_cast<double>(coded_group_nbytes(bits)), CODED_GROUP, bits);
    };
    return nbytes(2) <= nbytes(4) ? 2 : nbytes(4) <= nbytes(6) ? 4 : 6;
}

int64_t cuda_coded_room(const macko_desc & desc, int64_t n_padded) {
    // whole lines of what separate values and deltas would take, less the bases that CODED has beyond theirs
    const int64_t separate = max_groups(desc, n_padded) * (2 * CUDA_SPARSE_GROUP + desc.delta_bits);
    const int64_t lanes    = cuda_sparse_lanes(desc, n_padded, CUDA_SPARSE_LAYOUT_BANKED);
    const int64_t bases    = std::max<int64_t>(0, 2 * desc.rows * (CODED_LANES - lanes) + CUDA_SPARSE_ALIGNMENT);
    return std::max<int64_t>(0, separate - cuda_sparse_aligned(2 * desc.rows) - bases - CUDA_SPARSE_ALIGNMENT);
}

bool cuda_coded_pays(const macko_desc & desc, int64_t n_padded, int64_t nbytes) {
    double other = static_cast<double>(n_padded) * (2 + desc.delta_bits / 8.0);
    if (desc.type == GGML_MACKO_TYPE_F16) {
        for (const int32_t bits :
             { desc.delta_bits == 8 ? 6 : 3, desc.delta_bits == 8 ? 6 : std::max(desc.delta_bits, 2) }) {
            other = std::min(
                other, expected_nbytes(desc, 2 * CUDA_SPARSE_GROUP, static_cast<double>(fused_entries(bits)), bits));
        }
    }
    return static_cast<double>(nbytes) < other;
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
    m.bank_width =
        layout == CUDA_SPARSE_LAYOUT_BANKED || layout == CUDA_SPARSE_LAYOUT_FUSED || layout == CUDA_SPARSE_LAYOUT_CODED
            ? static_cast<int32_t>(bank_width_of(desc.cols))
            : 0;
    cuda_sparse_parts parts(memory);
    if (layout == CUDA_SPARSE_LAYOUT_FILE) {
        parts.take(&m.values, n_padded * value_nbytes(desc.type));
        parts.take(&m.deltas, deltas_nbytes(n_padded, desc.delta_bits));
    } else if (layout == CUDA_SPARSE_LAYOUT_CODED) {
        m.lanes = lanes;
        parts.take(&m.values, cuda_coded_room(desc, n_padded) + CUDA_SPARSE_ALIGNMENT); // the last line is whole
        parts.take(&m.tails, desc.rows);
        parts.take(&m.bases, desc.rows * lanes);
    } else {
        const int64_t groups = std::max<int64_t>(0, cuda_sparse_max_groups(desc, n_padded, layout));
        m.lanes              = lanes;
        parts.take(&m.values, groups * CUDA_SPARSE_GROUP * value_nbytes(desc.type));
        if (layout == CUDA_SPARSE_LAYOUT_FUSED) {
            parts.take(&m.tails, desc.rows);
        } else {
            parts.take(&m.deltas, groups * desc.delta_bits);
        }
        parts.take(&m.bases, desc.rows * lanes);
    }
    parts.take(&m.row_ptr, desc.rows + 1);
    m.nbytes = parts.nbytes();
    return m;
}

int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded) {
    const int64_t rows = cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_FILE, 0, nullptr).nbytes;
    if (desc.type == GGML_MACKO_TYPE_F32) {
        return rows; // the only layout that it has
    }
    const int32_t lanes = cuda_sparse_lanes(desc, n_padded, CUDA_SPARSE_LAYOUT_BANKED); // at least those of INTERLEAVED
    const int64_t runs  = cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_BANKED, lanes, nullptr).nbytes;
    return std::max(rows, runs);
}

} // namespace macko::cuda
