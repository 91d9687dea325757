// Lookup tables of the kernel sets for a few bits of a mask. Everything has internal linkage, as kernels-impl.h
// requires.
#pragma once

#include "cpu/kernels/dispatch.h"

#include <cstdint>

namespace macko::cpu {
namespace {

// The argument of expand() for STEP bits of a mask word: the bits themselves. AVX2 uses a table offset instead.
struct plain_mask_bits {
    static constexpr bool               has_bundles = false; // for sets without kernels for bundles
    static constexpr bool               has_basis   = false;
    static constexpr const kernel_set * basis = nullptr; // the set with the same kernels for F32, panels and bundles
    static uint64_t                     table_bits(uint64_t word) { return word; }
    template <int STEP> static uint32_t table_part(uint64_t bits, int s) {
        return static_cast<uint32_t>(bits >> (s * STEP)) & static_cast<uint32_t>((uint64_t(1) << STEP) - 1);
    }
};

// For each byte of a mask, the byte permutations between packed 16-bit numbers and the lanes of their columns: controls
// of pshufb, which are also the indices of arm64's tbl.
struct mask_tables {
    // packed -> columns: lane i gets the value whose index is the number of set bits below bit i, or zero if bit i is
    // clear
    alignas(64) uint8_t spread[256][16];
    // columns -> packed: the numbers at the set bits, lowest first; the rest is unspecified
    alignas(64) uint8_t pack[256][16];
};
constexpr mask_tables make_mask_tables() {
    mask_tables t = {};
    for (int m = 0; m < 256; m++) {
        int k = 0;
        for (int i = 0; i < 8; i++) {
            const bool set         = (m >> i) & 1;
            t.spread[m][2 * i]     = set ? static_cast<uint8_t>(2 * k) : 0x80; // this index gives zero
            t.spread[m][2 * i + 1] = set ? static_cast<uint8_t>(2 * k + 1) : 0x80;
            if (set) {
                t.pack[m][2 * k]     = static_cast<uint8_t>(2 * i);
                t.pack[m][2 * k + 1] = static_cast<uint8_t>(2 * i + 1);
                k++;
            }
        }
    }
    return t;
}
constexpr mask_tables tables_of_masks = make_mask_tables();

// The byte permutations between 16 packed bytes and the columns of two bytes of a mask: the sum of an element of
// `first` and an element of `second`, which are the indices in the packed bytes, or at least 128 for zero.
struct byte_mask_tables {
    alignas(64) uint8_t first[256][16];  // the second half: the number of set bits
    alignas(64) uint8_t second[256][16]; // the first half: zeros
};
constexpr byte_mask_tables make_byte_mask_tables() {
    byte_mask_tables t = {};
    for (int m = 0; m < 256; m++) {
        uint8_t k = 0;
        for (int i = 0; i < 8; i++) {
            t.first[m][i] = t.second[m][8 + i] = (m >> i) & 1 ? k++ : 0x80;
        }
        for (int i = 8; i < 16; i++) {
            t.first[m][i] = k;
        }
    }
    return t;
}
constexpr byte_mask_tables byte_tables = make_byte_mask_tables();

// For the codes of two groups (FORMAT.md section 9), each in 16 bits: their bytes, the bits before the code, and the
// number by which a multiplication moves the code to the highest bits.
struct code_words {
    alignas(16) uint8_t bytes[2][16];
    alignas(16) uint16_t multiplier[8];
    alignas(16) int16_t bits_before[8];
};
template <int BITS> constexpr code_words make_code_words() {
    code_words w = {};
    for (int i = 0; i < 8; i++) {
        const int at = i * BITS;
        for (int k = 0; k < 4; k++) {
            w.bytes[k / 2][2 * i + k % 2] = static_cast<uint8_t>(k / 2 * BITS + at / 8 + k % 2);
        }
        w.multiplier[i]  = static_cast<uint16_t>(1 << (16 - BITS - at % 8));
        w.bits_before[i] = static_cast<int16_t>(at % 8);
    }
    return w;
}
template <int BITS> constexpr code_words words_of_codes = make_code_words<BITS>();

} // namespace
} // namespace macko::cpu
