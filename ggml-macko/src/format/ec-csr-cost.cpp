#include "format/ec-csr-cost.h"

#include "format/encode.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace macko {

namespace {

// Least squares of relative errors over bench-spmv-gpu --ec-csr, better of alone and chained, H200, driver 580, CUDA 13.0, 2026-11-21
// (docs/notes-ec-csr.md, "Which one is faster"; the measurements: tests/ec-csr-times.inc). Microseconds: of a launch or more; per MB (10^6 bytes);
// per 1000 rows or pieces; of blocks of several rows; and what the longest row takes a warp that has it alone: to begin, and per 256 entries.
struct cost { double us, row_mb, block_mb, kilorows, kilopieces, shared, chain_us, chain; };
constexpr cost ROWS       = { 2.589, 0.237, 0, 0, 0, 0, 2.220, 0.266 };
constexpr cost BLOCKS     = { 4.803, 0.273, 0.273, 0, 0.351, 0, 5.213, 0.293 }; // three launches; beside rows
constexpr cost F32_ROWS   = { 1.109, 0.547, 0, 0.905, 0, 0, 4.059, 1.778 };     // for which MACKO has no fast layout
constexpr cost F32_BLOCKS = { 3.446, 0, 0.249, 0, 0.180, 1.994, 3.208, 0.318 }; // two launches; nothing beside them

} // namespace

double gpu_us(const gpu_work & w) {
    const bool   f32 = w.type == GGML_MACKO_TYPE_F32;
    const cost & c   = w.block_nbytes > 0 ? (f32 ? F32_BLOCKS : BLOCKS) : f32 ? F32_ROWS : ROWS;
    const auto   d   = [](int64_t n) { return static_cast<double>(n); };
    const double all = c.us + 1e-6 * (c.row_mb * d(w.row_nbytes) + c.block_mb * d(w.block_nbytes)) + 1e-3 * (c.kilorows * d(w.rows) + c.kilopieces * d(w.n_pieces));
    return std::max(all, c.chain_us + c.chain * d(w.longest) / 256) + (w.shared ? c.shared : 0);
}

int64_t longest_row(const ec_csr_view & view) {
    int64_t longest = 0;
    for (int64_t r = 0; r < view.arrays().desc.rows; r++) {
        int64_t n = 0;
        for (const ec_csr_view::block_row * b = view.row_begin(r); b < view.row_end(r); b++) {
            const int32_t * ptr = view.arrays().blk_ptr + view.sets()[b->set].blk_ptr + b->block;
            n += ptr[1] - ptr[0];
        }
        longest = std::max(longest, n);
    }
    return longest;
}

gpu_work gpu_rows_work(const macko_desc & desc, const ggml_macko_count & count, int64_t longest_row) {
    static const int BITS[] = { 1, 2, 4, 8 };
    int64_t nbits = INT64_MAX;
    for (size_t k = 0; k < std::size(BITS); k++) {
        nbits = std::min(nbits, count.n_stored[k] * (8 * value_nbytes(desc.type) + BITS[k]));
    }
    constexpr int64_t ROW_NBYTES = 68; // a pointer, and at most 32 places where runs start
    return { desc.type, desc.rows, nbits / 8 + ROW_NBYTES * desc.rows, 0, 0, 0, longest_row, false };
}

gpu_work gpu_blocks_work(const ec_csr_view & view, const ggml_macko_count & rest) {
    const macko_desc & desc = view.arrays().desc;
    const bool f32     = !gpu_keeps_rows_of_one(desc.type);
    const bool no_rows = f32 || view.sets().back().granularity > 1;
    gpu_work w = { desc.type, desc.rows, no_rows ? 0 : gpu_rows_work(desc, rest, 0).row_nbytes, 0, 0, 0, f32 ? 0 : longest_row(view), view.sets()[0].granularity > 1 };
    for (const ec_csr_range & s : view.sets()) {
        if (s.granularity > 1 || f32) {
            const int64_t g = gpu_piece_rows(s.granularity, desc.type), cuts = s.granularity / g;
            const int64_t n_cols = s.vector_size == 1 ? s.n_blocks * EC_UNIT : s.n_cols; // short blocks are filled up
            w.n_pieces     += s.n_blocks * cuts;
            w.n_sums       += s.n_blocks * cuts * g;
            for (const int32_t * ptr = view.arrays().blk_ptr + s.blk_ptr; f32 && ptr < view.arrays().blk_ptr + s.blk_ptr + s.n_blocks; ptr++) {
                w.longest = std::max<int64_t>(w.longest, ptr[1] - ptr[0]);
            }
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
    *out = { gpu_us(gpu_rows_work(desc, whole, longest_row(view))), in_blocks ? gpu_us(blocks) : std::numeric_limits<double>::infinity() };
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
