// Rows of a bitmap of non-zeros (FORMAT.md sections 7 and 9). Plain C++17.
#pragma once

#include <cstdint>
#include <cstring>

namespace macko {

constexpr int64_t bitmap_row_nbytes(int64_t cols) { return (cols + 7) / 8; }

// Number of bits that are set in n bytes.
inline int64_t set_bits(const uint8_t * bytes, int64_t n) {
    int64_t count = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        count += __builtin_popcountll(word);
    }
    for (; i < n; i++) {
        count += __builtin_popcount(bytes[i]);
    }
    return count;
}

// Whether a row has a bit past its last column.
inline bool has_bit_past_cols(const uint8_t * row, int64_t cols) { return cols % 8 && row[cols / 8] >> (cols % 8); }

} // namespace macko
