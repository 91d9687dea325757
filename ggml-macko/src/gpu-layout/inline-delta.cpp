#include "gpu-layout/inline-delta.h"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

// A base takes 16 bits per run and row, which matters only for short rows; short rows also have too few entries for 32
// lanes. With few rows, two rows per warp have more bytes in flight (measured, see lab/kernels-gpu.md). BF16 values use
// INLINE_DELTA only if EXP_CODED does not suit them, so fewer kernels are built for them.
int32_t inline_delta_lanes(const macko_desc & desc, int64_t n_padded) {
    constexpr int64_t FEW_ROWS = 4224; // 16 warps with two rows each on each of 132 multiprocessors
    const bool        wide     = desc.cols >= WIDE_COLS;
    if (!wide && desc.delta_bits < 8) {
        return INLINE_DELTA_ASCENDING_LANES;
    }
    if (desc.type == GGML_MACKO_TYPE_BF16) {
        return 16;
    }
    const int64_t per_row = n_padded / desc.rows;
    const int32_t lanes   = per_row >= (desc.rows <= FEW_ROWS ? 7000 : 2048) ? 32 : per_row >= 768 ? 16 : 8;
    // a wide matrix with such narrow deltas has long rows
    return wide && desc.delta_bits <= 2 ? std::max(lanes, 16) : lanes;
}

static bool begin_at_lines(const macko_desc & desc) {
    constexpr int64_t LONG_ROW = 256; // entries
    return desc.cols >= WIDE_COLS && (desc.delta_bits < 8 || desc.nnz >= LONG_ROW * desc.rows);
}
bool has_whole_lines(const inline_delta_layout &, const macko_desc & desc) { return begin_at_lines(desc); }

// Reserves the bytes of 16-bit values and separate deltas in groups of 8: the bytes of the deltas are for outliers.
// Deltas of 8 bits become narrower and need more fillers, for which more is reserved, unless there are very many.
int64_t inline_delta_max_groups(const macko_desc & desc, int64_t n_padded) {
    constexpr int64_t ENTRIES = 8;
    // the last group of a row is half full on average
    const int64_t groups = (n_padded + n_padded / 400) / ENTRIES + desc.rows * 9 / 16 + 64;
    const int64_t most =
        (groups * (2 * ENTRIES + desc.delta_bits) - gpu_aligned(2 * desc.rows)) / INLINE_DELTA_GROUP_NBYTES;
    if (desc.delta_bits != 8) {
        return most;
    }
    constexpr double OUTLIERS = 0.02;
    double           of_a_row =
        expected_groups_of_row(desc, inline_delta_entries(6), 6, OUTLIERS * static_cast<double>(desc.nnz));
    const bool lines = begin_at_lines(desc), equal = desc.nnz % desc.rows == 0;
    if (equal) { // rows pruned to equal lengths all leave the same part of their last group or line unused
        of_a_row = lines ? with_unused_groups(of_a_row) : std::ceil(of_a_row);
    } else if (lines) {
        of_a_row += (LINE_GROUPS - 1) / 2.0;
    }
    const auto expected = static_cast<int64_t>(GROUPS_MARGIN * of_a_row * static_cast<double>(desc.rows));
    return expected <= most + most / 4 ? std::max(most, expected) : most;
}

inline_delta_layout bind_inline_delta(const macko_desc & desc, int64_t n_padded, const inline_delta_shape & shape,
                                      void * memory) {
    inline_delta_layout m      = {};
    const int64_t       groups = std::max<int64_t>(0, inline_delta_max_groups(desc, n_padded));
    bind_row_split(desc, shape, groups * INLINE_DELTA_GROUP_NBYTES, memory, &m);
    return m;
}

} // namespace macko::cuda
