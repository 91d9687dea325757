// The packed codec: non-zeros without fillers (plain or coded), and a bitmap or gap codes with their
// positions (FORMAT.md sections 7 and 8). Plain C++17: no ggml, no CUDA.
#pragma once

#include "codec/bitmap-rows.h"
#include "codec/codec.h"
#include "codec/packed/coded.h"

#include <algorithm>

namespace macko {

// the components, in the order of the tensor table
enum packed_component : size_t { PACKED_VALUES, PACKED_INDEX, PACKED_ROW_PTR };

const codec & packed_codec();

constexpr int32_t INDEX_BITMAP = 0; // index_bits of a bitmap; other values are the bits of a gap code
// gap codes of 1 bit do not exist: they would equal a bitmap
constexpr bool    is_index_bits(int32_t bits) { return bits == INDEX_BITMAP || (bits > 1 && is_delta_bits(bits)); }
constexpr int64_t packed_n_values(int64_t nnz) {
    return nnz <= CODED_BLOCK ? CODED_BLOCK : (nnz + CODED_BLOCK - 1) / CODED_BLOCK * CODED_BLOCK;
}
constexpr int64_t index_nbytes_of_bits(int64_t bits) { return bits <= 32 ? 4 : ((bits + 7) / 8 + 3) & ~int64_t(3); }

struct packed_desc {
    macko_desc dense;      // delta_bits: for the MACKO rows that recode() makes
    int32_t    value_type; // dense.type or GGML_MACKO_TYPE_CODED
    int32_t    index_bits;
};
// Checks the limits of section 4, value_type and index_bits.
[[nodiscard]] int check_packed_desc(const packed_desc & desc);
// Bytes of the index: exact for a bitmap, an upper bound for gap codes.
int64_t max_index_nbytes(const packed_desc & desc);

// An unchecked matrix from a file.
struct packed_arrays {
    packed_desc     desc;
    const void *    values;
    int64_t         n_values; // for coded values: their words
    const uint8_t * index;
    int64_t         n_index; // bytes
    const int32_t * row_ptr;
    int64_t         n_row_ptr;
};

// Arrays that passed all checks; they must outlive this object.
class packed_view : public codec_view {
public:
    packed_view() : codec_view(packed_codec()) {}
    const macko_desc & desc() const override { return arrays_.desc.dense; }
    int                for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const override;
    int                decode(void * dense, int n_threads) const override;

    const packed_arrays & arrays() const { return arrays_; }
    int64_t               row_bit(int64_t row) const {
        return arrays_.desc.index_bits == INDEX_BITMAP ? row * bitmap_row_nbytes(arrays_.desc.dense.cols) * 8
                                                                     : row_bits_[static_cast<size_t>(row)];
    }
    // calls f(column) for the non-zeros of a row, columns ascending
    template <typename F> void for_each_column(int64_t row, F && f) const;
    // writes one row as cols dense elements
    void decode_row(int64_t row, void * dense) const;
    // writes values k ... k + n - 1 as bits of the dense type
    void copy_values(int64_t k, int64_t n, void * out) const;
    // only for coded values
    const coded_view & coded() const { return coded_; }
    // The bitmap of all rows; with gap codes it is made in `memory`.
    const uint8_t * bitmap(int n_threads, std::vector<uint8_t> * memory) const;
    // Makes the row_ptr of the MACKO rows that recode() makes. LIMIT if there are too many entries.
    [[nodiscard]] int count_entries(const uint8_t * bitmap, int n_threads, std::vector<int32_t> * row_ptr) const;

private:
    friend int           check_packed(const packed_arrays & arrays, int n_threads, packed_view * view);
    packed_arrays        arrays_ = {};
    std::vector<int64_t> row_bits_; // gap codes: first bit of each row
    coded_view           coded_;
};
[[nodiscard]] int check_packed(const packed_arrays & arrays, int n_threads, packed_view * view);

// Arrays with their memory.
struct packed_matrix {
    packed_desc          desc;
    std::vector<uint8_t> values; // bytes
    std::vector<uint8_t> index;
    std::vector<int32_t> row_ptr;

    packed_arrays arrays() const;
};
// Packs a dense matrix of finite values and counts its non-zeros (desc.dense.nnz is ignored). index_bits -1: the
// smallest index. mantissa_bits, exponent_bits: widths of coded values; -1: the widths with the fewest bytes. LIMIT if
// there are too many non-zeros.
[[nodiscard]] int pack(const void * dense, packed_desc desc, int n_threads, packed_matrix * out,
                       int32_t mantissa_bits = -1, int32_t exponent_bits = -1);

template <typename F> void packed_view::for_each_column(int64_t row, F && f) const {
    const int64_t n = arrays_.row_ptr[row + 1] - arrays_.row_ptr[row];
    if (arrays_.desc.index_bits == INDEX_BITMAP) {
        const int64_t   nbytes = bitmap_row_nbytes(arrays_.desc.dense.cols);
        const uint8_t * bytes  = arrays_.index + row * nbytes;
        for (int64_t i = 0; i < nbytes; i += 8) { // the end of each loop over bits is mispredicted
            uint64_t bits = 0;
            if (nbytes - i >= 8) {
                memcpy(&bits, bytes + i, 8);
            } else {
                memcpy(&bits, bytes + i, static_cast<size_t>(nbytes - i));
            }
            for (; bits; bits &= bits - 1) {
                f(i * 8 + __builtin_ctzll(bits));
            }
        }
        return;
    }
    const int32_t  b      = arrays_.desc.index_bits;
    const uint32_t escape = (1u << b) - 1;
    int64_t        code = row_bit(row) / b, col = -1;
    // Collect columns first, without a branch on escapes, because escape codes cannot be predicted.
    constexpr int64_t MOST = 256;
    int64_t           cols[MOST];
    for (int64_t k = 0; k < n; k += MOST) {
        const int64_t wanted = std::min(n - k, MOST);
        for (int64_t found = 0; found < wanted;) {
            const uint32_t c      = delta_code(arrays_.index, code++, b);
            const int64_t  stored = c != escape;
            col += c + stored;
            cols[found] = col;
            found += stored;
        }
        for (int64_t i = 0; i < wanted; i++) {
            f(cols[i]);
        }
    }
}

} // namespace macko
