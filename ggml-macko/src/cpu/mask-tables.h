// For each byte of a mask, the byte permutations between packed 16-bit numbers and the lanes of their columns: pshufb's
// controls, which are also the indices of arm64's tbl. Internal linkage, as kernels-impl.h asks of everything that
// several kernel sets include.
#pragma once

#include <cstdint>

namespace macko::cpu {
namespace {

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
