// The quantized format: codes of 3, 4, 5 or 8 bits, with scales for windows of columns (FORMAT.md section 9). Plain
// C++17: no ggml, no CUDA.
#pragma once

#include "codec/bitmap-rows.h"
#include "codec/codec.h"
#include "codec/floats.h"

#include <vector>

namespace macko {

const codec & quantized_codec();
// The smallest W for which a row of m has its number of scales; 0 if there is none.
int64_t window_of(const ggml_macko_matrix & m);

// the components, in the order of the tensor table
enum quantized_component : size_t {
    QUANTIZED_CODES,
    QUANTIZED_BITMAP,
    QUANTIZED_SCALES,
    QUANTIZED_FACTORS,
    QUANTIZED_ROW_PTR,
    QUANTIZED_LEVELS
};

constexpr int64_t  MIN_WINDOW = 32, MAX_WINDOW = 512;        // columns that share a scale
constexpr int64_t  CODE_GROUP = 8;                           // codes; a group of b-bit codes has b bytes
constexpr uint16_t MIN_FACTOR = 0x1280, MAX_FACTOR = 0x6c80; // 2^-90, 2^90

constexpr bool is_code_bits(int64_t bits) { return bits == 3 || bits == 4 || bits == 5 || bits == 8; }
// b of a value type; 0 for other types.
constexpr int32_t code_bits(int32_t value_type) {
    const int32_t bits = value_type - (GGML_MACKO_TYPE_Q8 - 8);
    return is_code_bits(bits) ? bits : 0;
}
constexpr int32_t type_of_code_bits(int32_t bits) { return GGML_MACKO_TYPE_Q8 - 8 + bits; }
constexpr int64_t windows_of_row(int64_t cols, int64_t window) { return (cols + window - 1) / window; }
constexpr int64_t code_groups(int64_t nnz) { return (nnz + CODE_GROUP - 1) / CODE_GROUP; }
constexpr int64_t codes_nbytes(int64_t groups, int32_t bits) {
    return groups > 0 ? (groups * bits + 3) & ~int64_t(3) : 4;
}
constexpr int64_t bitmap_nbytes(int64_t rows, int64_t cols) {
    return (rows * bitmap_row_nbytes(cols) + 3) & ~int64_t(3);
}

// A matrix of nnz codes. The arrays have the lengths of FORMAT.md section 9.
struct quantized_arrays {
    macko_desc       dense;  // delta_bits: for the MACKO rows that recode() makes
    int32_t          bits;   // of a code
    int64_t          window; // columns that share a scale
    const uint8_t *  codes;
    const uint8_t *  bitmap;
    const uint8_t *  scales;
    const uint16_t * factors; // BF16
    const int32_t *  row_ptr; // groups of codes before each row
    const int8_t *   levels;  // 2^bits

    int64_t         windows() const { return windows_of_row(dense.cols, window); }
    const uint8_t * row_codes(int64_t row) const { return codes + int64_t(row_ptr[row]) * bits; }
    const uint8_t * row_bitmap(int64_t row) const { return bitmap + row * bitmap_row_nbytes(dense.cols); }
    const uint8_t * row_scales(int64_t row) const { return scales + row * windows(); }
};

// (-1)^s * (1 + m / 16) * 2^(e - 7) of a scale code.
inline __attribute__((always_inline)) float scale_of_code(uint8_t code) { // kernels define no symbol
    return float_of_bits((code & 0x80u) << 24 | (((code & 0x7fu) << 19) + (120u << 23)));
}
// The scale of a window of a row, with which its levels are multiplied.
inline float window_scale(const quantized_arrays & a, int64_t row, int64_t window) {
    return scale_of_code(a.row_scales(row)[window]) * float_of_value(a.factors[row], GGML_MACKO_TYPE_BF16);
}

// Code i of a group.
inline uint32_t code_at(const uint8_t * group, int32_t bits, int64_t i) {
    uint64_t word = 0;
    memcpy(&word, group, static_cast<size_t>(bits));
    return static_cast<uint32_t>(word >> (i * bits)) & ((1u << bits) - 1);
}

// Calls f(column, code) for the non-zeros of a row in columns begin ... end - 1, columns ascending. *k: the number of
// non-zeros of the row before begin, and then before end. begin is a multiple of 8.
template <typename F>
void for_each_code(const quantized_arrays & a, int64_t row, int64_t begin, int64_t end, int64_t * k, F && f) {
    const uint8_t * bitmap = a.row_bitmap(row);
    const uint8_t * codes  = a.row_codes(row);
    for (int64_t at = begin; at < end; at += 8) {
        for (uint32_t bits = bitmap[at / 8]; bits; bits &= bits - 1, ++*k) {
            f(at + __builtin_ctz(bits), code_at(codes + *k / CODE_GROUP * a.bits, a.bits, *k % CODE_GROUP));
        }
    }
}

// Writes the non-zeros of a row to its dense elements, which are zero.
template <typename T> void put_values(const quantized_arrays & a, int64_t row, T * dense) {
    int64_t k = 0;
    for (int64_t w = 0; w < a.windows(); w++) {
        const float   d   = window_scale(a, row, w);
        const int64_t end = (w + 1) * a.window < a.dense.cols ? (w + 1) * a.window : a.dense.cols;
        for_each_code(a, row, w * a.window, end, &k, [&](int64_t col, uint32_t code) {
            dense[col] = dense_of_quant<T>(d, a.levels[code], a.dense.type);
        });
    }
}

// Arrays that passed all checks; they must outlive this object.
class quantized_view : public codec_view {
public:
    quantized_view() : codec_view(quantized_codec()) {}
    const macko_desc & desc() const override { return arrays_.dense; }
    int                for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const override;
    void               error_bounds(int64_t row, const int32_t * columns, int64_t k, int64_t n, const float * source,
                                    double * bounds) const override;

    const quantized_arrays & arrays() const { return arrays_; }

private:
    friend int check_quantized(const quantized_arrays & arrays, int64_t codes, int n_threads, quantized_view * view);
    quantized_arrays arrays_ = {};
};
// Checks the levels of a matrix, and nothing else.
[[nodiscard]] int check_levels(const quantized_arrays & arrays);
// Checks arrays of the lengths that their description implies. codes: bytes of the codes, which row_ptr implies.
[[nodiscard]] int check_quantized(const quantized_arrays & arrays, int64_t codes, int n_threads, quantized_view * view);

// Arrays with their memory.
struct quantized_matrix {
    macko_desc            dense;
    int32_t               bits;
    int64_t               window;
    std::vector<uint8_t>  codes, bitmap, scales;
    std::vector<uint16_t> factors;
    std::vector<int32_t>  row_ptr;
    std::vector<int8_t>   levels;

    quantized_arrays arrays() const {
        return { dense,         bits,           window,         codes.data(), bitmap.data(),
                 scales.data(), factors.data(), row_ptr.data(), levels.data() };
    }
};
// The levels of values that a tool fits to a lattice: one of two tables; with 8 bits, all levels.
std::vector<int8_t> standard_levels(int32_t bits, int table);
// Sets the levels, factors and scales of m if its dense elements are exactly values with standard levels. m has its
// description, window, and room for factors and scales.
bool find_exact(const void * dense, int n_threads, quantized_matrix * m);

// Quantizes a dense matrix of shape.nnz finite non-zeros. weights: n_weights rows of cols numbers, not negative, the
// weights of the squared errors; the matrix is a stack of n_weights equal parts with one row of weights each. nullptr:
// all weights are equal. lattice: nullptr, or a matrix of the same shape and bits whose levels, windows, scales and
// factors are used; its codes and bitmap are not. Without scales, only its levels are used. NOT_FINITE if a value is
// too large for a scale. The bytes do not depend on the number of threads.
[[nodiscard]] int quantize(const void * dense, const macko_desc & shape, int32_t bits, const float * weights,
                           int64_t n_weights, const quantized_arrays * lattice, int n_threads, quantized_matrix * out);

// The same as an encoded matrix of the format. lattice: nullptr, or an unchecked matrix of the format. NOT_FINITE also
// if a value is Inf or NaN.
[[nodiscard]] int encode_quantized(const void * dense, const macko_desc & shape, int32_t value_type,
                                   const float * weights, int64_t n_weights, const ggml_macko_matrix * lattice,
                                   int n_threads, std::unique_ptr<encoded_matrix> * out);

} // namespace macko
