// The MACKO codec: encode, validate, decode (FORMAT.md section 3; MACKO paper, section 4). Plain C++17: no ggml, no
// CUDA.
// All functions work on a range of rows, so that a caller can stream a matrix in blocks that fit the cache.
#pragma once

#include "codec/limits.h"
#include "codec/status.h"

namespace macko {

// A matrix as described by the header of a file, before any payload is read.
struct macko_desc {
    int64_t rows;
    int64_t cols;
    int32_t type;       // enum ggml_macko_type
    int32_t delta_bits; // 1, 2, 4, 8
    int64_t nnz;
};

constexpr bool is_value_type(int32_t type) {
    return type == GGML_MACKO_TYPE_F32 || type == GGML_MACKO_TYPE_F16 || type == GGML_MACKO_TYPE_BF16;
}
constexpr int64_t value_nbytes(int32_t type) { return type == GGML_MACKO_TYPE_F32 ? 4 : 2; }
// Exponent bits of a value of T = uint16_t or uint32_t: all set means Inf or NaN.
template <typename T> constexpr T exponent_mask(int32_t type) {
    return static_cast<T>(sizeof(T) == 4 ? 0x7f800000u : type == GGML_MACKO_TYPE_F16 ? 0x7c00u : 0x7f80u);
}
constexpr bool    is_delta_bits(int32_t bits) { return bits == 1 || bits == 2 || bits == 4 || bits == 8; }
constexpr int64_t n_padded(int64_t n_stored) { return n_stored <= 8 ? 8 : (n_stored + 7) & ~int64_t(7); }
constexpr int64_t deltas_nbytes(int64_t n_padded, int32_t bits) { return (n_padded * bits / 8 + 3) & ~int64_t(3); }

// Checks the limits of FORMAT.md section 4 on the shape, the type and delta_bits.
[[nodiscard]] int check_desc(const macko_desc & desc);
// Checks row_ptr (rows + 1 elements): starts with 0, never decreases, and its last element is n_stored with
// n_padded(n_stored) = n_values.
[[nodiscard]] int check_row_ptr(const macko_desc & desc, const int32_t * row_ptr, int64_t n_values);
// Checks that the padding entries after n_stored and the last bytes of deltas are zero. values and deltas start at
// entry `base` (a multiple of 8); n_values and n_deltas are the matrix's component lengths.
[[nodiscard]] int check_padding(const macko_desc & desc, int64_t n_stored, const void * values, const uint8_t * deltas,
                                int64_t base, int64_t n_values, int64_t n_deltas);

// Rows row_begin ... row_end-1 of an untrusted matrix whose row_ptr passed check_row_ptr.
struct macko_rows {
    macko_desc      desc;
    int64_t         row_begin;
    int64_t         row_end;
    const int32_t * row_ptr; // of the whole matrix
    // the entry of values[0] and bit 0 of deltas: a multiple of 8, <= row_ptr[row_begin]
    int64_t         base;
    const void *    values;
    const uint8_t * deltas;
};

// Rows that passed validation. Decoders and kernels accept only this class.
class macko_view {
public:
    const macko_rows & rows() const { return rows_; }
    int64_t            nnz() const { return nnz_; } // non-zeros in these rows
private:
    friend int validate(const macko_rows & rows, macko_view * view);
    macko_rows rows_ = {}; // no rows until validate() fills it
    int64_t    nnz_  = 0;
};

// Checks that columns are in range and that rows are canonical and finite. On success *view is these rows. The caller
// compares the sum of nnz with desc.nnz.
[[nodiscard]] int validate(const macko_rows & rows, macko_view * view);

// Writes (row_end - row_begin) * cols elements to dense, which points at row_begin.
void decode(const macko_view & view, void * dense);

// The code of entry k, counted from bit 0 of deltas.
inline uint32_t delta_code(const uint8_t * deltas, int64_t k, int32_t bits) {
    const int64_t bit = k * bits;
    return (static_cast<uint32_t>(deltas[bit >> 3]) >> (bit & 7)) & ((1u << bits) - 1);
}

} // namespace macko
