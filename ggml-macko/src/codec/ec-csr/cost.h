// A model of how long a product of one column takes on a GPU with an EC-CSR matrix kept as MACKO rows or in blocks. It
// decides how such a matrix is kept on a GPU, and what `macko convert auto --optimize speed` takes. Plain C++17: no
// CUDA.
#pragma once

#include "codec/ec-csr/ec-csr.h"

namespace macko {

// rows of a block that a warp computes at a time (cuda/sparse/ec-csr/layout.h): as many as fit into four vectors of 16
// bytes per lane and four columns
constexpr int32_t gpu_piece_rows(int32_t granularity, int32_t type) {
    return granularity < 16 / value_nbytes(type) ? granularity : static_cast<int32_t>(16 / value_nbytes(type));
}

struct gpu_work {         // of one product
    int32_t type;         // of the values
    int64_t rows;         // of the matrix
    int64_t row_nbytes;   // of the part that is kept as rows; 0: all of it is in blocks
    int64_t block_nbytes; // of the part that is kept in blocks; 0: none
    int64_t n_pieces;     // parts of blocks that a warp computes at a time
    int64_t n_sums;       // rows of all pieces, each with a partial sum in scratch memory
    // Steps that one warp takes in sequence for the longest row: groups of entries of a lane. F32: 256 entries of that
    // row, or 256 columns of the longest block.
    double n_steps;
    bool   shared; // whether some blocks have several rows
};

// Lanes that share a row of 16-bit values, as they were chosen when the model was fitted. Matrices of few long rows
// have 16 since then, and take up to 6 % less time than the model says.
constexpr int64_t gpu_row_lanes(int64_t entries_per_row) {
    return entries_per_row >= 2048 ? 32 : entries_per_row >= 768 ? 16 : 8;
}

// microseconds on the GPU that the model was fitted on (an H200); meant for comparing two layouts
double gpu_us(const gpu_work & work);

// the work of a matrix kept as rows with deltas of the best width; count: the entries of each width
gpu_work gpu_rows_work(const macko_desc & desc, const ggml_macko_count & count, int64_t longest_row);
int64_t  longest_row(const ec_csr_view & view);

// What a GPU keeps as rows beside the blocks of several rows. Of F32 matrices nothing: they stay in blocks of one row.
struct gpu_rest {
    ec_csr_view      view; // if there are entries
    ggml_macko_count count   = {};
    int64_t          longest = 0; // entries of the longest row
};
[[nodiscard]] int gpu_rest_of(const ec_csr_view & view, int n_threads,
                              gpu_rest * out); // decodes its rows to count them
gpu_work          gpu_blocks_work(const ec_csr_view & view, const gpu_rest & rest);
constexpr bool    gpu_keeps_rows_of_one(int32_t type) { return type != GGML_MACKO_TYPE_F32; }

struct gpu_times {
    gpu_work rows;
    gpu_work blocks;
    double   rows_us;
    double   blocks_us; // infinite: nothing would be kept in blocks, or it would take more memory than a GPU reserves
};
// both for a matrix; decodes its rows to count them
[[nodiscard]] int gpu_times_of(const ec_csr_view & view, int n_threads, gpu_times * out);

} // namespace macko
