// How long a product of one column takes on a GPU with an EC-CSR matrix kept as rows (MACKO's) or in blocks: the one
// place for the model that decides how
// such a matrix is kept there, and what `macko convert auto --optimize speed` takes. Plain C++.
#pragma once

#include "codec/ec-csr/ec-csr.h"

namespace macko {

// rows of a block that a warp has at a time (cuda/ec-csr-layout.h): as many as four vectors of 16 bytes per lane and
// four columns have room for
constexpr int32_t gpu_piece_rows(int32_t granularity, int32_t type) {
    return granularity < 16 / value_nbytes(type) ? granularity : static_cast<int32_t>(16 / value_nbytes(type));
}

struct gpu_work {         // of one product
    int32_t type;         // of the values
    int64_t rows;         // of the matrix
    int64_t row_nbytes;   // of the part that is kept as rows; 0: all of it is in blocks
    int64_t block_nbytes; // of the part that is kept in blocks; 0: none
    int64_t n_pieces;     // of blocks
    int64_t n_sums;       // rows of all pieces: their scratch memory
    // that a warp takes one after the other: groups of a lane in the longest row; F32: 256 entries of it, in blocks 256
    // columns of the longest
    double n_steps;
    bool   shared; // some blocks have several rows
};

// lanes that share a row of 16-bit values, as cuda_sparse_lanes() had it when the model was fitted (few long rows have
// 16 now, and take up to 6 % less)
constexpr int64_t gpu_row_lanes(int64_t entries_per_row) {
    return entries_per_row >= 2048 ? 32 : entries_per_row >= 768 ? 16 : 8;
}

// microseconds on the GPU that the model was fitted on. What matters is which of two layouts is faster
double gpu_us(const gpu_work & work);

// a matrix as rows, with codes of the best width. count: what is stored with each width
gpu_work gpu_rows_work(const macko_desc & desc, const ggml_macko_count & count, int64_t longest_row);
int64_t  longest_row(const ec_csr_view & view);

// what a GPU keeps as rows beside the blocks of several rows. Of F32 values nothing: they stay in blocks of one row
struct gpu_rest {
    ec_csr_view      view; // if there are entries
    ggml_macko_count count   = {};
    int64_t          longest = 0; // row
};
[[nodiscard]] int gpu_rest_of(const ec_csr_view & view, int n_threads, gpu_rest * out); // counts its rows
gpu_work          gpu_blocks_work(const ec_csr_view & view, const gpu_rest & rest);
constexpr bool    gpu_keeps_rows_of_one(int32_t type) { return type != GGML_MACKO_TYPE_F32; }

struct gpu_times {
    gpu_work rows;
    gpu_work blocks;
    double   rows_us;
    double   blocks_us; // infinite: nothing would be kept in blocks, or it would take more memory than a GPU reserves
};
// both for a checked matrix; counts its rows
[[nodiscard]] int gpu_times_of(const ec_csr_view & view, int n_threads, gpu_times * out);

} // namespace macko
