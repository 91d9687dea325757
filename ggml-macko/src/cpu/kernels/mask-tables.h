// Lookup tables of the kernel sets for a few bits of a mask. Everything has internal linkage, as kernels-impl.h
// requires.
#pragma once

#include <cstdint>

namespace macko::cpu {
namespace {

// The argument of expand() for STEP bits of a mask word: the bits themselves. AVX2 uses a table offset instead.
struct plain_mask_bits {
    static constexpr bool               has_bundles = false; // for sets without kernels for bundles
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

} // namespace
} // namespace macko::cpu
