// Coded values: lossless, with short exponents, short mantissas and outliers (FORMAT.md section 8). Plain C++17: no
// ggml, no CUDA.
#pragma once

#include "codec/floats.h"

#include <vector>

namespace macko {

constexpr int64_t CODED_HEADER_WORDS = 2;
constexpr int64_t CODED_BLOCK        = 32; // values of a block
constexpr int64_t CODED_RANK_BLOCKS  = 8;  // blocks between two entries of outliers_before()

constexpr int coded_dense_mantissa_bits(int32_t type) {
    return type == GGML_MACKO_TYPE_F32 ? 23 : type == GGML_MACKO_TYPE_F16 ? 10 : 7;
}

// Field widths shared by all values of a matrix. A value has bits() bits.
struct coded_widths {
    int32_t mantissa_bits; // 7 or 10
    int32_t exponent_bits; // 2 or 3
    int32_t base;          // exponent code 1 means exponent base + 1

    constexpr int bits() const { return mantissa_bits + exponent_bits + 1; }
    constexpr int n_codes() const { return (1 << exponent_bits) - 1; }
    // words of the blocks of n values, a multiple of CODED_BLOCK
    constexpr int64_t blocks_words(int64_t n) const { return n / CODED_BLOCK * bits(); }
};
constexpr bool is_coded_mantissa_bits(int32_t bits, int32_t type) {
    return bits == 7 || (bits == 10 && type != GGML_MACKO_TYPE_BF16);
}
constexpr bool is_coded_exponent_bits(int32_t bits) { return bits == 2 || bits == 3; }

// The parts of one block. Bit i of a mask belongs to value i.
struct coded_block_view {
    const uint8_t * bytes;
    uint32_t        sign;
    uint32_t        code[3];     // bit j of the codes
    uint32_t        mantissa[3]; // bits 2, 1, 0 of a mantissa of 10 bits

    // values that have a code; the others are outliers or padding
    uint32_t has_code() const { return code[0] | code[1] | code[2]; }
};

// Maximum words of nnz values of a type.
int64_t max_coded_words(int64_t nnz, int32_t type);
// Maximum number of outliers among nnz values with m = 7 and e = 2 that occupy nbytes bytes, as a header declares; -1
// if such values cannot occupy that many bytes.
int64_t max_short_outliers(int64_t nnz, int32_t type, int64_t nbytes);

// Coded values that passed the checks of open_coded(). The words must outlive it.
class coded_view {
public:
    const coded_widths & widths() const { return widths_; }
    int64_t              n_outliers() const { return n_outliers_; }
    // the outliers before every CODED_RANK_BLOCKS-th block
    const std::vector<int64_t> & outliers_before() const { return outliers_before_; }
    coded_block_view             block(int64_t i) const; // values i * CODED_BLOCK ...
    // Writes values k ... k + n - 1 as bits of the dense type.
    void expand(int64_t k, int64_t n, void * out) const;

private:
    friend int           open_coded(const uint32_t * words, int64_t n_words, int32_t type, int64_t nnz, int n_threads,
                                    coded_view * out);
    int32_t              type_       = 0;
    coded_widths         widths_     = {};
    int64_t              n_outliers_ = 0;
    const uint32_t *     blocks_     = nullptr;
    const uint8_t *      outliers_   = nullptr;
    std::vector<int64_t> outliers_before_;
};

// Runs all checks of section 8 on n_words untrusted words: nnz values of a dense type.
[[nodiscard]] int open_coded(const uint32_t * words, int64_t n_words, int32_t type, int64_t nnz, int n_threads,
                             coded_view * out);

// Codes n values, given as bits of a dense type; no value is zero, and all are finite. A width of -1 is chosen for the
// fewest bytes. The words do not depend on n_threads. BAD_FORMAT for unsupported widths.
[[nodiscard]] int encode_coded(const void * values, int32_t type, int64_t n, int32_t mantissa_bits,
                               int32_t exponent_bits, int n_threads, std::vector<uint8_t> * out);

} // namespace macko
