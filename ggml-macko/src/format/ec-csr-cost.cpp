#include "format/ec-csr-cost.h"

#include "format/encode.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace macko {

namespace {

// Least squares of relative errors over bench-spmv-gpu --ec-csr, better of alone and chained, H200, driver 580, CUDA 13.0, 2026-11-21
// (docs/notes-ec-csr.md, "Which one is faster"). Microseconds: of a launch or more; per MB (10^6 bytes); per 1000 rows or pieces.
struct cost { double us, row_mb, block_mb, kilorows, kilopieces; };
constexpr cost ROWS       = { 3.24, 0.217, 0, 0, 0 };
constexpr cost BLOCKS     = { 5.22, 0.256, 0.257, 0, 0.306 }; // three launches; beside rows
constexpr cost F32_ROWS   = { 1.06, 0.501, 0, 1.03, 0 };      // for which MACKO has no fast layout
constexpr cost F32_BLOCKS = { 3.56, 0, 0.272, 0, 0.146 };     // two launches; nothing beside them

} // namespace

double gpu_us(const gpu_work & w) {
    const bool   f32 = w.type == GGML_MACKO_TYPE_F32;
    const cost & c   = w.block_nbytes > 0 ? (f32 ? F32_BLOCKS : BLOCKS) : f32 ? F32_ROWS : ROWS;
    const auto   d   = [](int64_t n) { return static_cast<double>(n); };
    return c.us + 1e-6 * (c.row_mb * d(w.row_nbytes) + c.block_mb * d(w.block_nbytes)) + 1e-3 * (c.kilorows * d(w.rows) + c.kilopieces * d(w.n_pieces));
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
