#include "codec/ec-csr/cost.h"
#include "codec/macko/encode.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace macko {

namespace {

// Least squares of relative errors over the times of `bench-spmv-gpu --ec-csr` (the better of alone and chained; H200,
// driver 580, CUDA 13.0, 2026-11-21; tests/ec-csr-times.inc has them). us: of a launch or more; per MB (10^6 bytes) of
// rows and of blocks; per 1000 rows or pieces; of blocks of several rows; and per step of the warp with the longest
// row. From that fit on, the constants of F16 were searched for the lowest cost of wrong choices; single times are then
// off by 11 % instead of 10 % (rms).
struct cost {
    double us, row_mb, block_mb, kilorows, kilopieces, shared, step;
};
constexpr cost ROWS       = { 1.824, 0.217, 0, 0, 0, 0, 0.114 };
constexpr cost BLOCKS     = { 5.555, 0.254, 0.323, 0, 0.158, 0, 0.099 }; // three launches; beside rows
constexpr cost F32_ROWS   = { 0.883, 0.224, 0, 1.359, 0, 0, 1.590 };     // MACKO has no fast layout for them
constexpr cost F32_BLOCKS = { 2.495, 0, 0.205, 0, 0.306, 1.600, 0.245 }; // two launches; nothing beside them

} // namespace

double gpu_us(const gpu_work & w) {
    const bool   f32 = w.type == GGML_MACKO_TYPE_F32;
    const cost & c   = w.block_nbytes > 0 ? (f32 ? F32_BLOCKS : BLOCKS) : f32 ? F32_ROWS : ROWS;
    const auto   d   = [](int64_t n) { return static_cast<double>(n); };
    return c.us + 1e-6 * (c.row_mb * d(w.row_nbytes) + c.block_mb * d(w.block_nbytes)) +
           1e-3 * (c.kilorows * d(w.rows) + c.kilopieces * d(w.n_pieces)) + (w.shared ? c.shared : 0) +
           c.step * w.n_steps;
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
    int64_t          nbits = INT64_MAX, n_stored = 0;
    for (size_t k = 0; k < std::size(BITS); k++) {
        const int64_t n = count.n_stored[k] * (8 * value_nbytes(desc.type) + BITS[k]);
        n_stored        = n < nbits ? count.n_stored[k] : n_stored;
        nbits           = std::min(n, nbits);
    }
    constexpr int64_t ROW_NBYTES = 68; // a pointer, and at most 32 positions where lanes start
    const int64_t     per_step   = desc.type == GGML_MACKO_TYPE_F32 ? 256 : 8 * gpu_row_lanes(n_stored / desc.rows);
    return { desc.type,
             desc.rows,
             nbits / 8 + ROW_NBYTES * desc.rows,
             0,
             0,
             0,
             static_cast<double>(longest_row) / static_cast<double>(per_step),
             false };
}

int gpu_rest_of(const ec_csr_view & view, int n_threads, gpu_rest * out) {
    *out                     = {};
    const ec_csr_arrays rows = rows_of_one(view);
    if (rows.n_sets == 0 || !gpu_keeps_rows_of_one(rows.desc.type)) {
        return GGML_MACKO_STATUS_OK;
    }
    if (const int status = check_ec_csr(rows, &out->view)) {
        return status;
    }
    out->longest = longest_row(out->view);
    return count_rows(out->view, n_threads, &out->count);
}

gpu_work gpu_blocks_work(const ec_csr_view & view, const gpu_rest & rest) {
    const macko_desc & desc = view.arrays().desc;
    const bool         f32  = !gpu_keeps_rows_of_one(desc.type);
    gpu_work           w    = gpu_rows_work(desc, rest.count, rest.longest);
    w.shared                = view.sets()[0].granularity > 1;
    if (f32 || view.sets().back().granularity > 1) { // no rows beside the blocks
        w.row_nbytes = 0;
    }
    int64_t longest = 0;
    for (const ec_csr_range & s : view.sets()) {
        if (s.granularity > 1 || f32) {
            const int64_t g = gpu_piece_rows(s.granularity, desc.type), cuts = s.granularity / g;
            const int64_t n_cols = s.vector_size == 1 ? s.n_blocks * EC_UNIT : s.n_cols; // short blocks are filled up
            w.n_pieces += s.n_blocks * cuts;
            w.n_sums += s.n_blocks * cuts * g;
            w.block_nbytes += s.n_blocks * cuts * (2 * EC_LANES + 4 + 4 * g) +
                              cuts * n_cols * (8 * value_nbytes(desc.type) * g + desc.delta_bits) / 8;
            for (int64_t b = 0; b < s.n_blocks; b++) {
                const int32_t * ptr = view.arrays().blk_ptr + s.blk_ptr + b;
                longest             = std::max<int64_t>(longest, ptr[1] - ptr[0]);
            }
        }
    }
    w.n_steps = f32 ? static_cast<double>(longest) / 256 : w.n_steps;
    return w;
}

int gpu_times_of(const ec_csr_view & view, int n_threads, gpu_times * out) {
    const macko_desc & desc  = view.arrays().desc;
    ggml_macko_count   whole = {};
    gpu_rest           rest;
    if (const int status = count_rows(view, n_threads, &whole)) {
        return status;
    }
    if (const int status = gpu_rest_of(view, n_threads, &rest)) {
        return status;
    }
    const gpu_work rows = gpu_rows_work(desc, whole, longest_row(view)), blocks = gpu_blocks_work(view, rest);
    // A GPU reserves memory knowing the header alone, and that has to suffice; each sum has four floats of scratch.
    const int64_t entries = n_padded(max_recoded(desc)),
                  nbytes  = blocks.row_nbytes + blocks.block_nbytes + 16 * blocks.n_sums;
    const bool in_blocks  = blocks.block_nbytes > 0 &&
                           nbytes <= entries * (8 * value_nbytes(desc.type) + desc.delta_bits) / 8 + 4 * desc.rows;
    *out = { rows, blocks, gpu_us(rows), in_blocks ? gpu_us(blocks) : std::numeric_limits<double>::infinity() };
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
