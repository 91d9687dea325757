// A second copy of a sparse matrix in CPU memory, by columns: y = W x equals the sum of x_c times column c over the
// columns with a non-zero x_c, and only these columns are read. The copy is made from the packed rows when a model is
// loaded; no file contains it. It is a bitmap (bitmap.h) whose rows are the columns of W. If a tensor has several
// matrices (experts), their columns are stored one matrix after the other. Does not use ggml.
#pragma once

#include "cpu/layout/bitmap.h"

namespace macko::cpu {

// Whether such a copy is possible for matrices with rows_per_matrix rows each and this value type in the file. Not for
// quantized values, nor for so few rows that the masks would need several times the memory of the row masks.
bool columns_can_hold(int64_t rows_per_matrix, int32_t value_type);
// The arguments of bitmap_nbytes() and bitmap_bind(); desc.type is the type of the values in memory. desc: the tensor,
// with the rows of all matrices.
macko_desc columns_desc(const macko_desc & desc, int64_t rows_per_matrix);
// Writes all of dst from the packed matrix w, with up to n_threads threads; dst.cols is the number of rows of one
// matrix. Throws bad_alloc: each thread makes BUNDLE_ROWS rows dense at a time.
void columns_pack(const bitmap_matrix & w, int n_threads, const bitmap_matrix & dst);
// Writes the Euclidean norm of each column, with up to n_threads threads.
void columns_norms(const bitmap_matrix & columns, int n_threads, float * norms);
// Copies n elements of x. An element becomes +0 if its magnitude, or with norms its magnitude times the norm of its
// column, is less than the threshold.
void columns_skip_below(float threshold, const float * norms, const float * x, int64_t n, float * out);
// The columns of one matrix, which has n_cols columns. Without masks if `all` has none.
bitmap_matrix columns_of_matrix(const bitmap_matrix & all, int64_t matrix, int64_t n_cols);

} // namespace macko::cpu
