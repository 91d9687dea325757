// BUNDLES (layouts.h): F16 and BF16 non-zeros in the order in which the kernels of AVX2 and arm64 multiply them. They
// need more memory than a bitmap, and far fewer instructions.
//
// A piece is the part of a row in 128 adjacent columns. A bundle contains 16 pieces of the same columns, from any of
// 128 rows. The non-zeros of a bundle are distributed over steps, which have one slot for each piece: all non-zeros of
// a step lie in a window of 16 columns, and one register holds the x of the window, from which pshufb or tbl picks
// them. Empty slots have the value 0. Two steps, with three pieces:
//
//              window of step 0                  window of step 1
//   columns    0 . . . . . . . . . . . . . . 15  3 . . . . . . . . . . . . . . 18
//   piece 0    a . . b . . . . . . . . . . . .   b . . . . . . . . . . . . . . .       step 0, slots 0 1 2 ...: a c -
//   piece 1    . . . c . . . . . d . . . . . .   . . . . . . d . . . . . . . . .       step 1, slots 0 1 2 ...: b d e
//   piece 2    . . . . . . . . . . . . . . . .   . . . . . . . . . . . . . . . e
//
// Bytes of a bundle:
//
//   header     bundle_header; for each piece its row within the group (a byte)
//   vectors    n_vectors times two steps:
//                2 bytes    for each step, the columns from the previous step's window to its own
//                16 bytes   places in the windows: slots 0 ... 15 of the first step in the low nibbles, of the second
//                           step in the high nibbles
//                64 bytes   values: slots 0 ... 7 of the first and the second step, then slots 8 ... 15
#pragma once

#include "codec/packed/packed.h"

namespace macko::cpu {

constexpr int64_t BUNDLE_ROWS = 128;   // rows of a group; all rows of a bundle belong to one group
constexpr int     STEP_SLOTS  = 16;    // also the pieces of a bundle
constexpr int     WINDOW      = 16;    // columns
constexpr int64_t BUNDLE_COLS = 65536; // maximum columns
constexpr int     BUNDLE_SPAN = 128;   // columns of a piece

struct bundle_header {
    uint16_t first; // the column where the window of the first step begins
    uint8_t  n_vectors;
    uint8_t  unused;
};
static_assert(sizeof(bundle_header) == 4, "no padding");

// Whether there are bundles of values of this dense type.
constexpr bool has_bundles(int32_t type) { return type == GGML_MACKO_TYPE_F16 || type == GGML_MACKO_TYPE_BF16; }

constexpr int64_t BUNDLE_HEADER_NBYTES = int64_t(sizeof(bundle_header)) + STEP_SLOTS;
constexpr int64_t BUNDLE_VALUES_AT     = 2 + STEP_SLOTS; // offset in a vector
constexpr int64_t BUNDLE_VECTOR_NBYTES = BUNDLE_VALUES_AT + 2 * STEP_SLOTS * int64_t(sizeof(uint16_t));
constexpr int64_t n_bundle_groups(int64_t rows) { return (rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS; }

// Position of a step's slot among the values of a vector.
constexpr int bundle_value_at(int step, int slot) { return slot / 8 * 16 + step * 8 + slot % 8; }

// Maximum bytes of the bundles; 0 if the matrix must be a bitmap.
int64_t bundles_nbytes(const macko_desc & desc);

// Calls f(row, first column, values of BUNDLE_SPAN columns) for all pieces of a group, and with zeros for those that a
// bundle lacks. Has no branch for each non-zero.
template <typename F> void for_each_piece(const uint8_t * at, const uint8_t * end, F && f) {
    while (at < end) {
        bundle_header header;
        memcpy(&header, at, sizeof(header));
        const uint8_t * rows = at + sizeof(header);
        at += BUNDLE_HEADER_NBYTES;
        uint16_t values[STEP_SLOTS][BUNDLE_SPAN + WINDOW] = {}; // the last window may begin at the last column
        int64_t  window                                   = 0;
        for (int v = 0; v < header.n_vectors; v++, at += BUNDLE_VECTOR_NBYTES) {
            for (int step = 0; step < 2; step++) {
                window += at[step];
                for (int slot = 0; slot < STEP_SLOTS; slot++) {
                    uint16_t value;
                    memcpy(&value, at + BUNDLE_VALUES_AT + 2 * bundle_value_at(step, slot), sizeof(value));
                    values[slot][window + (at[2 + slot] >> 4 * step & 15)] |= value; // 0 in an empty slot
                }
            }
        }
        for (int slot = 0; slot < STEP_SLOTS; slot++) {
            f(rows[slot], header.first, values[slot]);
        }
    }
}

} // namespace macko::cpu
