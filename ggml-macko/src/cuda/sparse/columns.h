// A sparse matrix by columns, beside its rows: for products with one x of which most elements are zero, as behind a
// ReLU. Only the values that meet no zero are read.
//
//   strip     32 rows, one for each lane of a warp
//   places    for each column of a strip its mask, bit r for row r of the strip, and the number of its first value
//   values    16 bits each, strip by strip, in each column by column, in each by rows; then one 0
//
// Experts follow each other. Plain C++: sizes and addresses only. No ggml.
#pragma once

#include "cuda/sparse/layout.h"

namespace macko::cuda {

struct column_place {
    uint32_t mask;
    uint32_t first;
};

struct cuda_columns {
    int64_t        rows, cols, n_matrices; // rows and columns of each matrix
    int32_t        type;                   // F16 or BF16
    bool           skips;                  // whether values that meet a zero are left out: the result is the same
    column_place * places;
    uint16_t *     values;

    static constexpr int64_t STRIP = 32, MAX_COLS = 65536;
    constexpr int64_t        n_strips() const { return (rows + STRIP - 1) / STRIP; }
    // of all strips of all matrices
    constexpr int64_t n_places() const { return n_matrices * n_strips() * cols; }
};

// Whether a matrix can be kept so: 16-bit values that are not quantized, fewer than 2^32 of them, and at most MAX_COLS
// columns.
bool cuda_columns_supported(const macko_desc & desc, int32_t value_type);
// Bytes for the columns of desc.rows / rows_per_matrix matrices, known from the header; of device memory that is
// aligned to CUDA_SPARSE_ALIGNMENT.
int64_t cuda_columns_nbytes(const macko_desc & desc, int64_t rows_per_matrix);

// The parts of such columns in memory; null: offsets
cuda_columns cuda_columns_bind(const macko_desc & desc, int64_t rows_per_matrix, void * memory);

} // namespace macko::cuda
