#include "cuda/sparse/layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

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

// GGML_MACKO_CODED=0 leaves CODED out, so that layouts can be compared
bool cuda_coded_allowed() {
    const char * wish = getenv("GGML_MACKO_CODED");
    return !wish || strcmp(wish, "0") != 0;
}

// CODED: bytes of tails, bases and row_ptr, and what the last line may take beyond its groups
static int64_t coded_nbytes_of_rows(const macko_desc & desc) {
    return cuda_sparse_aligned(2 * desc.rows) + cuda_sparse_aligned(2 * desc.rows * CODED_LANES) +
           cuda_sparse_aligned(4 * (desc.rows + 1)) + CUDA_SPARSE_ALIGNMENT;
}

int64_t cuda_coded_room(const macko_desc & desc, int64_t reserved) {
    const int64_t room = reserved - coded_nbytes_of_rows(desc);
    return std::max<int64_t>(0, room & ~(CUDA_SPARSE_ALIGNMENT - 1));
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
                                    void * memory, int64_t reserved) {
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
        parts.take(&m.values, cuda_coded_room(desc, reserved) + CUDA_SPARSE_ALIGNMENT); // the last line is whole
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

// CODED: groups of a row on average where zeros are at random places, with those that its last line leaves unused
static double expected_coded_groups(const macko_desc & desc, int32_t delta_bits, int64_t outliers) {
    const auto   rows     = static_cast<double>(desc.rows);
    const double of_a_row = static_cast<double>(outliers) / rows;
    const double groups   = expected_nbytes(desc, 1, static_cast<double>(CODED_GROUP), delta_bits) / rows + 0.5 +
                          of_a_row / OUTLIERS_OF_GROUP + std::min(of_a_row, 0.5);
    // rows end anywhere in a line, or, if pruned to equal lengths, all at about the same place
    const double equal = std::ceil((groups + 1) / CUDA_SPARSE_LINE) * CUDA_SPARSE_LINE;
    return std::max(groups + (CUDA_SPARSE_LINE - 1) / 2.0, equal);
}

int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded, int64_t outliers, int64_t shared_nbytes) {
    constexpr double MARGIN = 1.02;
    const int64_t    any    = cuda_sparse_nbytes(desc, n_padded);
    const int64_t    x      = 32 * bank_width_of(desc.cols) + CODED_GROUP;
    if (desc.type == GGML_MACKO_TYPE_F32 || desc.cols < CUDA_SPARSE_WIDE || !cuda_coded_allowed() ||
        x + x / 4 > cuda_sparse_room_of_x(shared_nbytes)) { // a quarter: overshoot
        return any;
    }
    const int32_t bits = cuda_coded_delta_bits(desc);
    const auto    groups =
        static_cast<int64_t>(MARGIN * static_cast<double>(desc.rows) * expected_coded_groups(desc, bits, outliers));
    const int64_t coded = groups * coded_group_nbytes(bits);
    return cuda_coded_pays(desc, n_padded, coded)
               ? std::min(any, cuda_sparse_aligned(coded) + coded_nbytes_of_rows(desc))
               : any;
}

} // namespace macko::cuda
