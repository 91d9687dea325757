// Quantized non-zeros in the order in which AVX2 multiplies them: the second form that a bitmap_matrix may have. Made
// when a model is loaded; it is in no file. It takes more memory than bitmap and values, and far fewer instructions.
//
// A piece is what one row has of one block of 32 values. Four pieces whose columns are near each other, of any of 128
// rows, are a bundle. Its non-zeros are dealt out to steps: in a step each piece may have four non-zeros, all of them
// in a window of 16 columns, whose x are one register that pshufb takes them from. Slots that stay empty have q = 0.
//
//                  window of step 0                  window of step 1
//   columns    0 . . . . . . . . . . . . . . 15      18 ...
//   piece 0    a . . b . . c . . . . d . . . .        e . ...          step 0, slots  0 -  3: a b c d
//   piece 1    . . . f . . . . . g . . . . . .        . h ...                  slots  4 -  7: f g - -
//
// Bytes of a bundle:
//
//   header     bundle_header
//   vectors    n_vectors times two steps:
//                2 bytes    columns from the window of the step before to that of each step
//                16 bytes   places in the windows: of slots 0 ... 15 of the first step in the low nibbles, of the
//                           second in the high nibbles
//                Q4_0: 16 bytes, the q + 8 in the same order; other types: 32 bytes, the q of the first and the second
//                step
//
// Zeros among the q are left out. Q4_NL has its levels as q.
#pragma once

#include "codec/packed/packed.h"

namespace macko::cpu {

struct bitmap_matrix;

constexpr int64_t BUNDLE_ROWS   = 128; // rows of a group; a bundle has rows of one group only
constexpr int     BUNDLE_PIECES = 4;
constexpr int     STEP_SLOTS    = 16;
constexpr int     WINDOW        = 16; // columns
constexpr int BUNDLE_BLOCK = 4; // bundles: their pieces, in the order of their first columns, are sorted by their last
constexpr int64_t BUNDLE_COLS = 65536; // the most columns

struct bundle_header {
    uint16_t scale[BUNDLE_PIECES]; // F16
    uint8_t  row[BUNDLE_PIECES];   // within the group
    uint16_t first;                // the column where the window of the first step begins
    uint8_t  n_vectors;
    uint8_t  unused;
};
static_assert(sizeof(bundle_header) == 16, "no padding");

constexpr int64_t bundle_q_nbytes(int32_t type) { return type == GGML_MACKO_TYPE_Q4_0 ? 16 : 32; }
constexpr int64_t bundle_vector_nbytes(int32_t type) { return 2 + 16 + bundle_q_nbytes(type); }
constexpr int64_t n_bundle_groups(int64_t rows) { return (rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS; }

// The most bytes that bundles may take; 0 if the matrix has to be a bitmap.
int64_t bundles_nbytes(const macko_desc & desc, int32_t value_type);
// Writes w.bundles and w.group_off. false, and neither is written, if that takes more than bundles_nbytes().
bool bundles_pack(const packed_view & view, int n_threads, const bitmap_matrix & w);
// Calls f(row, column, scale, q) for all non-zeros of a group, those of a row by ascending columns.
template <typename F> void for_each_in_group(const uint8_t * at, const uint8_t * end, int32_t type, F && f) {
    const bool nibbles = type == GGML_MACKO_TYPE_Q4_0;
    while (at < end) {
        bundle_header header;
        memcpy(&header, at, sizeof(header));
        at += sizeof(header);
        int64_t column = header.first;
        for (int v = 0; v < header.n_vectors; v++, at += bundle_vector_nbytes(type)) {
            for (int i = 0; i < 2 * STEP_SLOTS; i++) {
                const int step = i / STEP_SLOTS, shift = 4 * step;
                column += i % STEP_SLOTS == 0 ? at[step] : 0;
                const int place = at[2 + i % STEP_SLOTS] >> shift & 15;
                const int q = nibbles ? (at[18 + i % STEP_SLOTS] >> shift & 15) - 8 : static_cast<int8_t>(at[18 + i]);
                if (q != 0) {
                    const int k = i % STEP_SLOTS / 4;
                    f(header.row[k], column + place, float_of_f16(header.scale[k]), q);
                }
            }
        }
    }
}

} // namespace macko::cpu
