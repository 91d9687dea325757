// The quantized format: codes of 3, 4, 5 or 8 bits, with scales for windows of columns (FORMAT.md section 9). Plain
// C++17: no ggml, no CUDA.
#pragma once

#include "codec/macko/macko.h"
#include "codec/quants.h"

namespace macko {

// the components, in the order of the tensor table
enum quantized_component : size_t {
    QUANTIZED_CODES,
    QUANTIZED_BITMAP,
    QUANTIZED_SCALES,
    QUANTIZED_FACTORS,
    QUANTIZED_ROW_PTR,
    QUANTIZED_LEVELS
};

constexpr int64_t MIN_WINDOW = 32, MAX_WINDOW = 512; // columns that share a scale
constexpr int64_t CODE_GROUP = 8;                    // codes; a group of b-bit codes has b bytes

constexpr bool    is_code_bits(int32_t bits) { return bits == 3 || bits == 4 || bits == 5 || bits == 8; }
constexpr int64_t windows_of_row(int64_t cols, int64_t window) { return (cols + window - 1) / window; }

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
    const uint8_t * row_bitmap(int64_t row) const { return bitmap + row * ((dense.cols + 7) / 8); }
    const uint8_t * row_scales(int64_t row) const { return scales + row * windows(); }
};

// (-1)^s * (1 + m / 16) * 2^(e - 7) of a scale code.
inline float scale_of_code(uint8_t code) {
    return float_of_bits((code & 0x80u) << 24 | ((code & 0x7fu) << 19) + (120u << 23));
}
// The scale of a window of a row, with which its levels are multiplied.
inline float window_scale(const quantized_arrays & a, int64_t row, int64_t window) {
    return scale_of_code(a.row_scales(row)[window]) * float_of_value(a.factors[row], GGML_MACKO_TYPE_BF16);
}

} // namespace macko
