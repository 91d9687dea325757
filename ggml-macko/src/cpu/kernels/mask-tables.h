// How kernel sets find what a few bits of a mask stand for. Internal linkage, as kernels-impl.h asks of everything that
// several of them include.
#pragma once

#include <cstdint>

namespace macko::cpu {
namespace {

// How expand() takes STEP bits of a mask word: as a number. AVX2 takes an offset of a table instead.
struct plain_mask_bits {
    static constexpr bool               has_bundles = false; // of the sets that have no kernels for them
    static uint64_t                     table_bits(uint64_t word) { return word; }
    template <int STEP> static uint32_t table_part(uint64_t bits, int s) {
        return static_cast<uint32_t>(bits >> (s * STEP)) & static_cast<uint32_t>((uint64_t(1) << STEP) - 1);
    }
};

// For each byte of a mask, the byte permutations between packed 16-bit numbers and the lanes of their columns: pshufb's
// controls, which are also the indices of arm64's tbl.
struct mask_tables {
    // packed -> columns: lane i gets the value with as many set bits below it, or zero where bit i is clear
    alignas(64) uint8_t spread[256][16];
    // columns -> packed: the numbers at the set bits, lowest first; what follows them is unspecified
    alignas(64) uint8_t pack[256][16];
};
constexpr mask_tables make_mask_tables() {
    mask_tables t = {};
    for (int m = 0; m < 256; m++) {
        int k = 0;
        for (int i = 0; i < 8; i++) {
            const bool set         = (m >> i) & 1;
            t.spread[m][2 * i]     = set ? static_cast<uint8_t>(2 * k) : 0x80; // an index that gives zero
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
