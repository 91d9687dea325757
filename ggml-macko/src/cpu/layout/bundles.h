// BUNDLES (layouts.h): quantized, F16 and BF16 non-zeros in the order in which AVX2 and arm64's sdot multiply them.
// They need more memory than a bitmap, and far fewer instructions.
//
// A piece is a part of a row. A bundle contains pieces with nearby columns, from any of 128 rows. The non-zeros of a
// bundle are distributed over steps: all non-zeros of a step lie in a window of 16 columns, and one register holds the
// x of the window, from which pshufb or tbl picks them. Empty slots have the value 0.
//
//                a piece                                       pieces of a bundle   non-zeros of each in a step
//   quantized    non-zeros of a row in a block of 32 values    4                    4
//   F16, BF16    non-zeros of a row in 128 adjacent columns    16                   1
//
// Two steps of quantized values:
//
//                  window of step 0                  window of step 1
//   columns    0 . . . . . . . . . . . . . . 15      18 ...
//   piece 0    a . . b . . c . . . . d . . . .        e . ...          step 0, slots  0 -  3: a b c d
//   piece 1    . . . f . . . . . g . . . . . .        . h ...                  slots  4 -  7: f g - -
//
// Bytes of a bundle:
//
//   header     bundle_header; for each piece its row within the group (a byte); quantized: the scale of each piece, F16
//   vectors    n_vectors times two steps:
//                2 bytes    for each step, the columns from the previous step's window to its own
//                16 bytes   places in the windows: slots 0 ... 15 of the first step in the low nibbles, of the second
//                           step in the high nibbles
//                values     Q4_0: 16 bytes, the q + 8 in the same order
//                           other quantized types: 32 bytes, the q of the first and the second step
//                           F16, BF16: 64 bytes, slots 0 ... 7 of the first and the second step, then slots 8 ... 15
//
// q = 0 is not stored. The q of Q4_NL are its levels.
#pragma once

#include "codec/packed/packed.h"

namespace macko::cpu {

constexpr int64_t BUNDLE_ROWS = 128; // rows of a group; all rows of a bundle belong to one group
constexpr int     STEP_SLOTS  = 16;
constexpr int     WINDOW      = 16;    // columns
constexpr int64_t BUNDLE_COLS = 65536; // maximum columns
constexpr int     BUNDLE_SPAN = 128;   // F16, BF16: columns of a piece
// Quantized: bundles whose pieces are sorted by their last columns, after sorting all by their first columns.
constexpr int BUNDLE_BLOCK = 4;

struct bundle_header {
    uint16_t first; // the column where the window of the first step begins
    uint8_t  n_vectors;
    uint8_t  unused;
};
static_assert(sizeof(bundle_header) == 4, "no padding");

constexpr bool has_bundles(int32_t type) {
    return is_quant_type(type) || type == GGML_MACKO_TYPE_F16 || type == GGML_MACKO_TYPE_BF16;
}
constexpr int     bundle_pieces(int32_t type) { return is_quant_type(type) ? 4 : 16; }
constexpr int64_t bundle_scales_at(int32_t type) {
    return static_cast<int64_t>(sizeof(bundle_header)) + bundle_pieces(type);
}
constexpr int64_t bundle_header_nbytes(int32_t type) {
    return bundle_scales_at(type) + (is_quant_type(type) ? 2 * bundle_pieces(type) : 0);
}
constexpr int64_t BUNDLE_VALUES_AT = 2 + STEP_SLOTS; // offset in a vector
constexpr int64_t bundle_vector_nbytes(int32_t type) {
    return BUNDLE_VALUES_AT + (!is_quant_type(type) ? 64 : type == GGML_MACKO_TYPE_Q4_0 ? 16 : 32);
}
constexpr int64_t n_bundle_groups(int64_t rows) { return (rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS; }

// F16, BF16: position of a step's slot among the values of a vector.
constexpr int bundle_value_at(int step, int slot) { return slot / 8 * 16 + step * 8 + slot % 8; }

// Maximum bytes of the bundles; 0 if the matrix must be a bitmap.
int64_t bundles_nbytes(const macko_desc & desc, int32_t value_type);

// The value of a slot: q, or the bits of an F16 or BF16; 0 in an empty slot.
inline int bundle_value(const uint8_t * vector, int32_t type, int step, int slot) {
    const uint8_t * values = vector + BUNDLE_VALUES_AT;
    if (!is_quant_type(type)) {
        uint16_t bits;
        memcpy(&bits, values + 2 * bundle_value_at(step, slot), sizeof(bits));
        return bits;
    }
    return type == GGML_MACKO_TYPE_Q4_0 ? (values[slot] >> 4 * step & 15) - 8
                                        : static_cast<int8_t>(values[step * STEP_SLOTS + slot]);
}

// Calls f(row, column, scale, value) for all non-zeros of a group, with ascending columns within each row. value: q, or
// the bits of an F16 or BF16, which have no scale.
template <typename F> void for_each_in_group(const uint8_t * at, const uint8_t * end, int32_t type, F && f) {
    const int pieces = bundle_pieces(type);
    while (at < end) {
        bundle_header header;
        float         scales[STEP_SLOTS] = {};
        memcpy(&header, at, sizeof(header));
        const uint8_t * rows = at + sizeof(header);
        for (int i = 0; is_quant_type(type) && i < pieces; i++) {
            uint16_t bits;
            memcpy(&bits, at + bundle_scales_at(type) + 2 * i, sizeof(bits));
            scales[i] = float_of_f16(bits);
        }
        at += bundle_header_nbytes(type);
        int64_t column = header.first;
        for (int v = 0; v < header.n_vectors; v++, at += bundle_vector_nbytes(type)) {
            for (int i = 0; i < 2 * STEP_SLOTS; i++) {
                const int step = i / STEP_SLOTS, slot = i % STEP_SLOTS, piece = slot * pieces / STEP_SLOTS;
                column += slot == 0 ? at[step] : 0;
                if (const int value = bundle_value(at, type, step, slot)) {
                    f(rows[piece], column + (at[2 + slot] >> 4 * step & 15), scales[piece], value);
                }
            }
        }
    }
}

} // namespace macko::cpu
