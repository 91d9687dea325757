#include "cuda/sparse/layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace macko::cuda {

const char * cuda_sparse_layout_name(int32_t layout) {
    static const char * const NAMES[] = { "file", "fused", "coded", "quantized" };
    return NAMES[layout];
}

// A base takes 16 bits per run and row: long rows have the bytes to spare, short ones would leave too few entries for
// each of 32 lanes. Where rows are few, two rows per warp have more bytes in flight (measured, see the lab notes of the
// GPU kernels). BF16 values are FUSED only where CODED does not suit them, so fewer kernels are built for them.
int32_t cuda_sparse_lanes(const macko_desc & desc, int64_t n_padded, int32_t layout) {
    constexpr int64_t FEW_ROWS = 4224; // 16 warps with two rows each on each of 132 multiprocessors
    const bool        wide     = desc.cols >= CUDA_SPARSE_WIDE;
    if (layout == CUDA_SPARSE_LAYOUT_CODED) {
        return CODED_LANES;
    }
    if (!wide && desc.delta_bits < 8) {
        return FUSED_ASCENDING_LANES;
    }
    if (desc.type == GGML_MACKO_TYPE_BF16) {
        return 16;
    }
    const int64_t per_row = n_padded / desc.rows;
    const int32_t lanes   = per_row >= (desc.rows <= FEW_ROWS ? 7000 : 2048) ? 32 : per_row >= 768 ? 16 : 8;
    // a wide matrix with so narrow deltas has long rows
    return wide && desc.delta_bits <= 2 ? std::max(lanes, 16) : lanes;
}

// Groups of so many entries each in the whole matrix, where zeros are at random places
static double expected_groups(const macko_desc & desc, int64_t entries, int32_t delta_bits) {
    const double zeros = 1 - static_cast<double>(desc.nnz) / static_cast<double>(desc.rows * desc.cols);
    return desc.nnz
               ? static_cast<double>(desc.nnz) / static_cast<double>(entries) / (1 - std::pow(zeros, 1 << delta_bits))
               : 0;
}

// Of a row the same with those of outliers, and with the last one, which is half full
static double expected_groups_of_row(const macko_desc & desc, int64_t entries, int32_t delta_bits, double outliers) {
    const auto   rows     = static_cast<double>(desc.rows);
    const double of_a_row = outliers / rows;
    return expected_groups(desc, entries, delta_bits) / rows + 0.5 + of_a_row / OUTLIERS_OF_GROUP +
           std::min(of_a_row, 0.5);
}

bool cuda_sparse_whole_lines(const macko_desc & desc, int32_t layout) {
    constexpr int64_t LONG_ROW = 256; // entries
    return desc.cols >= CUDA_SPARSE_WIDE &&
           (layout == CUDA_SPARSE_LAYOUT_CODED || desc.delta_bits < 8 || desc.nnz >= LONG_ROW * desc.rows);
}
// Groups of a row with those that its last line leaves unused: rows end anywhere in a line, or, if pruned to equal
// lengths, all at about the same place.
static double with_unused_groups(double groups) {
    return std::max(groups + (CUDA_SPARSE_LINE - 1) / 2.0,
                    std::ceil((groups + 1) / CUDA_SPARSE_LINE) * CUDA_SPARSE_LINE);
}

constexpr double MARGIN = 1.02; // what is reserved beside what is expected

// As many bytes as values of 16 bits and deltas apart from them would take in groups of 8: what the deltas would take
// is for outliers. Deltas of 8 bits become narrower and take more fillers, for which there is more, unless these are
// very many.
int64_t cuda_fused_max_groups(const macko_desc & desc, int64_t n_padded) {
    constexpr int64_t ENTRIES = 8;
    // the last group of a row is half full on average
    const int64_t groups = (n_padded + n_padded / 400) / ENTRIES + desc.rows * 9 / 16 + 64;
    const int64_t most =
        (groups * (2 * ENTRIES + desc.delta_bits) - cuda_sparse_aligned(2 * desc.rows)) / FUSED_GROUP_NBYTES;
    if (desc.delta_bits != 8) {
        return most;
    }
    constexpr double OUTLIERS = 0.02;
    double     of_a_row = expected_groups_of_row(desc, fused_entries(6), 6, OUTLIERS * static_cast<double>(desc.nnz));
    const bool lines = cuda_sparse_whole_lines(desc, CUDA_SPARSE_LAYOUT_FUSED), equal = desc.nnz % desc.rows == 0;
    if (equal) { // rows pruned to equal lengths all waste the same part of their last group or line
        of_a_row = lines ? with_unused_groups(of_a_row) : std::ceil(of_a_row);
    } else if (lines) {
        of_a_row += (CUDA_SPARSE_LINE - 1) / 2.0;
    }
    const auto expected = static_cast<int64_t>(MARGIN * of_a_row * static_cast<double>(desc.rows));
    return expected <= most + most / 4 ? std::max(most, expected) : most;
}

int32_t cuda_coded_delta_bits(const macko_desc & desc) {
    const auto nbytes = [&](int32_t bits) {
        return expected_groups(desc, CODED_GROUP, bits) * static_cast<double>(coded_group_nbytes(bits));
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
    const double  separate = static_cast<double>(n_padded) * (2 + desc.delta_bits / 8.0);
    const int32_t bits     = desc.delta_bits == 8 ? 6 : std::max(desc.delta_bits, 2),
                  other    = desc.delta_bits < 8 && desc.cols >= CUDA_SPARSE_WIDE ? 3 : bits;
    const auto fused       = [&](int32_t delta_bits) {
        return expected_groups(desc, fused_entries(delta_bits), delta_bits) * static_cast<double>(FUSED_GROUP_NBYTES);
    };
    return static_cast<double>(nbytes) < std::min({ separate, fused(bits), fused(other) });
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
    const bool by_banks  = layout == CUDA_SPARSE_LAYOUT_FUSED || layout == CUDA_SPARSE_LAYOUT_CODED;
    m.bank_width = by_banks && desc.cols >= CUDA_SPARSE_WIDE ? static_cast<int32_t>(bank_width_of(desc.cols)) : 0;
    cuda_sparse_parts parts(memory);
    if (layout == CUDA_SPARSE_LAYOUT_FILE) {
        parts.take(&m.values, n_padded * value_nbytes(desc.type));
        parts.take(&m.deltas, deltas_nbytes(n_padded, desc.delta_bits));
    } else {
        m.lanes = lanes;
        parts.take(&m.values, layout == CUDA_SPARSE_LAYOUT_CODED
                                  ? cuda_coded_room(desc, reserved) + CUDA_SPARSE_ALIGNMENT // the last line is whole
                                  : std::max<int64_t>(0, cuda_fused_max_groups(desc, n_padded)) * FUSED_GROUP_NBYTES);
        parts.take(&m.tails, desc.rows);
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
    const int32_t lanes = cuda_sparse_lanes(desc, n_padded, CUDA_SPARSE_LAYOUT_FUSED);
    return std::max(rows, cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_FUSED, lanes, nullptr).nbytes);
}

int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded, int64_t outliers, int64_t shared_nbytes) {
    const int64_t any = cuda_sparse_nbytes(desc, n_padded), x = 32 * bank_width_of(desc.cols) + CODED_GROUP;
    if (desc.type == GGML_MACKO_TYPE_F32 || desc.cols < CUDA_SPARSE_WIDE || !cuda_coded_allowed() ||
        x + x / 4 > cuda_sparse_room_of_x(shared_nbytes)) { // a quarter: overshoot
        return any;
    }
    const int32_t bits = cuda_coded_delta_bits(desc);
    const auto    rows = static_cast<double>(desc.rows), group = static_cast<double>(coded_group_nbytes(bits));
    const double  groups = expected_groups_of_row(desc, CODED_GROUP, bits, static_cast<double>(outliers));
    const auto    coded  = static_cast<int64_t>(MARGIN * rows * with_unused_groups(groups) * group);
    return cuda_coded_pays(desc, n_padded, static_cast<int64_t>(rows * groups * group))
               ? std::min(any, cuda_sparse_aligned(coded) + coded_nbytes_of_rows(desc))
               : any;
}

} // namespace macko::cuda
