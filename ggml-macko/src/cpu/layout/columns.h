// A second copy of a sparse matrix in CPU memory, by columns: y = W x equals the sum of x_c times column c over the
// columns with a non-zero x_c, and only these columns are read. The copy is made from the packed rows when a model is
// loaded; no file contains it. It is a BITMAP (layouts.h) whose rows are the columns of W. If a tensor has several
// matrices (experts), their columns are stored one matrix after the other. Does not use ggml.
#pragma once

#include "cpu/layout/layouts.h"

namespace macko::cpu {

// Whether such a copy is possible for matrices with rows_per_matrix rows each and this value type in the file. Not for
// quantized values, nor for so few rows that the masks would need several times the memory of the row masks.
bool columns_can_hold(int64_t rows_per_matrix, int32_t value_type);
// Bytes of the columns of a tensor; desc has the rows of all its matrices.
int64_t columns_nbytes(const macko_desc & desc, int64_t rows_per_matrix);
// Binds pointers to them, like bind_layout().
bitmap_layout columns_bind(const macko_desc & desc, int64_t rows_per_matrix, void * memory);
// Writes all of dst from the packed matrix w, with up to n_threads threads; dst.cols is the number of rows of one
// matrix. expand: see densify(). Throws bad_alloc: each thread makes BUNDLE_ROWS rows dense at a time.
void columns_pack(const cpu_matrix & w, int n_threads, const bitmap_layout & dst, const expanders & expand = {});
// Writes the Euclidean norm of each column, with up to n_threads threads.
void columns_norms(const bitmap_layout & columns, int n_threads, float * norms);
// Copies n elements of x. An element becomes +0 if its magnitude, or with norms its magnitude times the norm of its
// column, is less than the threshold.
void columns_skip_below(float threshold, const float * norms, const float * x, int64_t n, float * out);
// The columns of one matrix, which has n_cols columns. Without masks if `all` has none.
bitmap_layout columns_of_matrix(const bitmap_layout & all, int64_t matrix, int64_t n_cols);

} // namespace macko::cpu
