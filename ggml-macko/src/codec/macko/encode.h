// Dense matrix, EC-CSR or packed, to the canonical MACKO arrays. Arguments were checked by the caller (capi.cpp).
#pragma once

#include "codec/ec-csr/ec-csr.h"
#include "codec/packed/packed.h"

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
// each_row: rows of them, or nullptr
[[nodiscard]] int count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                              ggml_macko_count * count, row_count * each_row = nullptr);
// m's arrays have the sizes that follow from its counts; BAD_ARGUMENT if the counts are not those of dense
[[nodiscard]] int encode(const void * dense, const ggml_macko_matrix & m, int n_threads);
// Some rows of a matrix whose row_ptr is known. dense points at the first; values and deltas (zeroed) are where rows
// says.
// FILE_CHANGED if a row does not have as many entries as row_ptr says
[[nodiscard]] int encode(const void * dense, const macko_rows & rows, void * values, uint8_t * deltas);

// arrays with their memory
struct macko_matrix {
    macko_desc           desc;
    std::vector<int32_t> row_ptr;
    std::vector<uint8_t> values; // bytes; here and in deltas, zeros follow that vector loads may touch
    std::vector<uint8_t> deltas;
};
// What devices without kernels for blocks get: the same matrix as MACKO with the same delta_bits. Checks the blocks'
// columns and values.
[[nodiscard]] int recode(const ec_csr_view & view, int n_threads, macko_matrix * m);
[[nodiscard]] int recode(const ec_csr_view & view, int32_t delta_bits, int n_threads, macko_matrix * m);
// what recode would make with each delta_bits
[[nodiscard]] int count_rows(const ec_csr_view & view, int n_threads, ggml_macko_count * count);
// Quantized values are dequantized; those that become zero are dropped, so m->desc.nnz may be lower.
[[nodiscard]] int recode(const packed_view & view, int n_threads, macko_matrix * m);
// entries that recode may need for a matrix, as far as its description tells
constexpr int64_t max_recoded(const macko_desc & desc) {
    const int64_t n = desc.nnz + (desc.rows * desc.cols - desc.nnz) / (int64_t(1) << desc.delta_bits);
    return n < MAX_STORED ? n : MAX_STORED;
}

} // namespace macko
