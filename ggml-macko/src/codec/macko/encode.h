// Encodes a dense matrix, or a matrix of any other format, as canonical MACKO arrays. The caller has checked the
// arguments. Plain C++17: no ggml, no CUDA.
#pragma once

#include "codec/codec.h"

#include <iterator>
#include <memory>
#include <vector>

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
// Makes row_ptr from 0 and the entries of each row; LIMIT if there are too many.
[[nodiscard]] int sum_row_ptr(std::vector<int32_t> * row_ptr);
// Counts the entries of a dense matrix for all four widths in one pass. each_row: counts for each row, or nullptr.
[[nodiscard]] int count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                              ggml_macko_count * count, row_count * each_row = nullptr);
// Counts nnz and the entries of each row for a matrix without Inf and NaN; NOT_FINITE if the matrix contains some.
[[nodiscard]] int count_finite(const void * dense, const macko_desc & shape, int n_threads, ggml_macko_count * count,
                               row_count * each_row = nullptr);

// Encodes the rows of a matrix with a known row_ptr. dense points at the first row; values and deltas are zeroed and
// begin at rows.base. FILE_CHANGED if the number of entries in a row differs from row_ptr.
[[nodiscard]] int encode(const void * dense, const macko_rows & rows, void * values, uint8_t * deltas);

// Bytes that a constructor leaves uninitialized.
struct raw_allocator : std::allocator<uint8_t> {
    template <typename T> struct rebind {
        using other = raw_allocator;
    };
    void construct(uint8_t *) {}
};
using raw_bytes = std::vector<uint8_t, raw_allocator>;

// Arrays with their memory.
struct macko_matrix {
    macko_desc           desc;
    std::vector<int32_t> row_ptr;
    raw_bytes            values; // both values and deltas end with zeros that vector loads may read
    raw_bytes            deltas;
};
// desc.nnz and the row counts match dense. LIMIT if there are too many entries.
[[nodiscard]] int encode(const void * dense, const macko_desc & desc, const std::vector<row_count> & rows,
                         int n_threads, macko_matrix * m);
// Converts a matrix to MACKO rows, with the delta_bits of view.desc() or with other delta_bits, for devices without a
// layout for its format. Runs the checks of view.check_rows(). Quantized values are dequantized; values that become
// zero are dropped, so m->desc.nnz may be lower than the view's.
[[nodiscard]] int recode(const codec_view & view, int n_threads, macko_matrix * m);
[[nodiscard]] int recode(const codec_view & view, int32_t delta_bits, int n_threads, macko_matrix * m);
// The number of entries that recode would make with each delta_bits.
[[nodiscard]] int count_rows(const codec_view & view, int n_threads, ggml_macko_count * count);

} // namespace macko
