// Rows of a bitmap of non-zeros (FORMAT.md sections 7 and 9). Plain C++17.
#pragma once

#include <cstdint>
#include <cstring>

namespace macko {

constexpr int64_t bitmap_row_nbytes(int64_t cols) { return (cols + 7) / 8; }

// Byte i: the bits that are set in byte i, of the first 8 of n bytes. A release is compiled without the popcnt
// instruction.
inline uint64_t bits_of_bytes(const uint8_t * bytes, int64_t n) {
    uint64_t word = 0;
    memcpy(&word, bytes, static_cast<size_t>(n < 8 ? n : 8));
    word -= word >> 1 & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
    return (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
}

// Number of bits that are set in n bytes.
inline int64_t set_bits(const uint8_t * bytes, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 8) {
        count += static_cast<int64_t>(bits_of_bytes(bytes + i, n - i) * 0x0101010101010101u >> 56);
    }
    return count;
}

// Whether a row has a bit past its last column.
inline bool has_bit_past_cols(const uint8_t * row, int64_t cols) { return cols % 8 && row[cols / 8] >> (cols % 8); }

} // namespace macko
