#include "format/ec-csr-cost.h"

#include "format/encode.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace macko {

namespace {

// Fitted to bench-spmv-gpu --ec-csr, chained launches on an H200 (docs/notes-ec-csr.md, "Which one is faster"): microseconds, and microseconds per MB
// (10^6 bytes), per 1000 pieces and per 1000 sums.
constexpr double ROWS_US = 2.0, ROWS_MB_US = 0.24, F32_ROWS_MB_US = 0.6;
constexpr double BLOCKS_US = 3.0, BLOCKS_MB_US = 0.26, PIECES_US = 0.1, SUMS_US = 0.01;

} // namespace

double gpu_us(const gpu_work & w) {
    const auto mb = [](int64_t nbytes) { return 1e-6 * static_cast<double>(nbytes); };
    double us = 0;
    if (w.row_nbytes > 0) {
        us += ROWS_US + (w.type == GGML_MACKO_TYPE_F32 ? F32_ROWS_MB_US : ROWS_MB_US) * mb(w.row_nbytes);
    }
    if (w.block_nbytes > 0) {
        us += BLOCKS_US + BLOCKS_MB_US * mb(w.block_nbytes) + 1e-3 * (PIECES_US * static_cast<double>(w.n_pieces) + SUMS_US * static_cast<double>(w.n_sums));
    }
    return us;
}

gpu_work gpu_rows_work(const macko_desc & desc, const ggml_macko_count & count) {
    static const int BITS[] = { 1, 2, 4, 8 };
    int64_t nbits = INT64_MAX;
    for (size_t k = 0; k < std::size(BITS); k++) {
        nbits = std::min(nbits, count.n_stored[k] * (8 * value_nbytes(desc.type) + BITS[k]));
    }
    constexpr int64_t ROW_NBYTES = 68; // a pointer, and at most 32 places where runs start
    return { desc.type, desc.rows, nbits / 8 + ROW_NBYTES * desc.rows, 0, 0, 0 };
}

gpu_work gpu_blocks_work(const ec_csr_view & view, const ggml_macko_count & rest) {
    const macko_desc & desc = view.arrays().desc;
    const bool no_rows = !gpu_keeps_rows_of_one(desc.type) || view.sets().back().granularity > 1;
    gpu_work w = { desc.type, desc.rows, no_rows ? 0 : gpu_rows_work(desc, rest).row_nbytes, 0, 0, 0 };
    for (const ec_csr_range & s : view.sets()) {
        if (s.granularity > 1 || !gpu_keeps_rows_of_one(desc.type)) {
            const int64_t g = gpu_piece_rows(s.granularity, desc.type), cuts = s.granularity / g;
            const int64_t n_cols = s.vector_size == 1 ? s.n_blocks * EC_UNIT : s.n_cols; // short blocks are filled up
            w.n_pieces     += s.n_blocks * cuts;
            w.n_sums       += s.n_blocks * cuts * g;
            w.block_nbytes += s.n_blocks * cuts * (2 * EC_LANES + 4 + 4 * g) + cuts * n_cols * (8 * value_nbytes(desc.type) * g + desc.delta_bits) / 8;
        }
    }
    return w;
}

int gpu_times_of(const ec_csr_view & view, int n_threads, gpu_times * out) {
    const macko_desc & desc = view.arrays().desc;
    ggml_macko_count whole = {}, rest = {};
    if (const int status = count_rows(view, n_threads, &whole)) {
        return status;
    }
    const ec_csr_arrays one = rows_of_one(view);
    if (one.n_sets > 0 && gpu_keeps_rows_of_one(desc.type)) {
        ec_csr_view rows;
        if (const int status = check_ec_csr(one, &rows)) {
            return status;
        }
        if (const int status = count_rows(rows, n_threads, &rest)) {
            return status;
        }
    }
    const gpu_work blocks = gpu_blocks_work(view, rest);
    // what a GPU reserves knowing the header alone has to be enough; four floats per sum are scratch memory
    const int64_t entries   = n_padded(max_recoded(desc)), nbytes = blocks.row_nbytes + blocks.block_nbytes + 16 * blocks.n_sums;
    const bool    in_blocks = blocks.block_nbytes > 0 && nbytes <= entries * (8 * value_nbytes(desc.type) + desc.delta_bits) / 8 + 4 * desc.rows;
    *out = { gpu_us(gpu_rows_work(desc, whole)), in_blocks ? gpu_us(blocks) : std::numeric_limits<double>::infinity() };
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
