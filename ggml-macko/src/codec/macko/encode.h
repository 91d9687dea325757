// To MACKO: a dense matrix, or one of any other format, to the canonical arrays. Arguments were checked by the caller.
// Plain C++17: no ggml, no CUDA.
#pragma once

#include "codec/codec.h"

#include <iterator>

namespace macko {

inline void add(ggml_macko_count & sum, const ggml_macko_count & c) {
    sum.nnz += c.nnz;
    sum.n_nonfinite += c.n_nonfinite;
    for (size_t i = 0; i < std::size(c.n_stored); i++) {
        sum.n_stored[i] += c.n_stored[i];
    }
}

struct row_count {
    int32_t n_stored[4]; // for delta_bits 1, 2, 4, 8
};
// Counts what a dense matrix needs, for all four widths in one pass. each_row: rows of them, or nullptr
[[nodiscard]] int count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                              ggml_macko_count * count, row_count * each_row = nullptr);
// nnz and the entries of each row for a matrix without Inf and NaN; NOT_FINITE if it has some
[[nodiscard]] int count_finite(const void * dense, const macko_desc & shape, int n_threads, ggml_macko_count * count,
                               row_count * each_row = nullptr);

// the arrays of a matrix in the caller's memory
struct macko_arrays {
    int64_t         rows;
    int64_t         cols;
    int32_t         type;       // enum ggml_macko_type
    int32_t         delta_bits; // 1, 2, 4 or 8
    int64_t         nnz;
    int64_t         n_stored; // non-zeros and fillers
    const void *    values;   // n_padded elements
    const uint8_t * deltas;   // deltas_nbytes()
    const int32_t * row_ptr;  // rows + 1
};
// Fills m's arrays, whose sizes follow from its counts; BAD_ARGUMENT if the counts are not those of dense.
[[nodiscard]] int encode(const void * dense, const macko_arrays & m, int n_threads);
// Encodes the rows of a matrix whose row_ptr is known: dense points at the first of them, values and deltas are zeroed
// and begin where rows says. FILE_CHANGED if a row does not have as many entries as row_ptr says.
[[nodiscard]] int encode(const void * dense, const macko_rows & rows, void * values, uint8_t * deltas);

// arrays with their memory
struct macko_matrix {
    macko_desc           desc;
    std::vector<int32_t> row_ptr;
    std::vector<uint8_t> values; // bytes; zeros that vector loads may touch follow the values, and the deltas
    std::vector<uint8_t> deltas;
};
// desc.nnz and the row counts are those of dense. LIMIT if there are too many entries.
[[nodiscard]] int encode(const void * dense, const macko_desc & desc, const std::vector<row_count> & rows,
                         int n_threads, macko_matrix * m);
// What devices without anything of their own for a format get: the same matrix as MACKO rows, with the delta_bits of
// view.desc() or with others. Makes the checks of view.check_rows(). Quantized values are dequantized; those that
// become zero are dropped, so that m->desc.nnz may be lower than the view's.
[[nodiscard]] int recode(const codec_view & view, int n_threads, macko_matrix * m);
[[nodiscard]] int recode(const codec_view & view, int32_t delta_bits, int n_threads, macko_matrix * m);
// the entries that recode would make with each delta_bits
[[nodiscard]] int count_rows(const codec_view & view, int n_threads, ggml_macko_count * count);

} // namespace macko
