// A second copy of a sparse matrix in the memory of the CPU, by columns: y = W x is also the sum of x_c times column c
// over those columns whose x_c is not zero, and only those are read then. Made from the packed rows when a model is
// loaded; it is in no file. It is a bitmap (bitmap.h) whose rows are the columns of W; where a tensor has several
// matrices (experts), those of each follow those of the one before it. No ggml here.
#pragma once

#include "cpu/layout/bitmap.h"

namespace macko::cpu {

// Whether such a copy can be made of matrices that have so many rows each, and whose values have this type on file: not
// of quantized ones, nor of so few rows that the masks would take several times the memory of those of the rows.
bool columns_can_hold(int64_t rows_per_matrix, int32_t value_type);
// What bitmap_nbytes() and bitmap_bind() are to be asked for, with the values' type in memory, desc.type. desc: of the
// tensor, whose rows are those of all matrices.
macko_desc columns_desc(const macko_desc & desc, int64_t rows_per_matrix);
// Writes all of dst from w, which has been packed, with up to n_threads threads; dst.cols is the number of rows of a
// matrix. Throws bad_alloc: each thread makes BUNDLE_ROWS rows dense at a time.
void columns_pack(const bitmap_matrix & w, int n_threads, const bitmap_matrix & dst);
// Writes the Euclidean norm of each column, with up to n_threads threads.
void columns_norms(const bitmap_matrix & columns, int n_threads, float * norms);
// Copies n elements of x, with +0 for those whose magnitude is less than a threshold, or if there are norms, whose
// magnitude times the norm of their column is.
void columns_skip_below(float threshold, const float * norms, const float * x, int64_t n, float * out);
// Those of one matrix, which has n_cols of them. Without masks if `all` has none.
bitmap_matrix columns_of_matrix(const bitmap_matrix & all, int64_t matrix, int64_t n_cols);

} // namespace macko::cpu
