// Layout INLINE_DELTA: F16 and BF16 values that store their deltas in unused bits of the values. Runs of a row are as
// in row-split.h.
//
// The weights of a matrix have few exponents. A value has its sign, 10 bits of mantissa and 3 (or 2) of exponent: an
// F16 that is 2^exponent times too small. The remaining 2 (or 3) bits below the sign are for its delta. A group is 16
// bytes:
//   deltas of 2, 3 bits   8 entries, each delta in the free bits of its own value
//   deltas of 4 bits      7 entries; the deltas of entries 0-3 are the last half word, those of 4-6 are in the free
//                         bits of both values of words 0-2
//   deltas of 6 bits      6 entries; the deltas of 0-3 are the last word, those of 4 and 5 in free bits
// Deltas of 1 or 2 bits in the file become 2 or, in wide matrices, 3 bits; 4 bits become 4 or 3, whichever takes fewer
// groups; 8 bits become 6. Values that these bits cannot represent exactly are outliers (1.7 % of normal random values
// with 3 bits of exponent, 25 % with 2; none to 5 % after magnitude pruning), in groups of four pairs (column, value)
// of 16 bits each. Lossless.
#pragma once

#include "gpu-layout/row-split.h"

namespace macko::cuda {

struct inline_delta_shape : row_split_shape {};
struct inline_delta_layout : row_split_layout {};

constexpr int64_t INLINE_DELTA_GROUP_NBYTES    = 16;
constexpr int32_t INLINE_DELTA_ASCENDING_LANES = 8; // if columns ascend, except for deltas of 6 bits
constexpr int64_t inline_delta_entries(int delta_bits) { return delta_bits == 6 ? 6 : delta_bits == 4 ? 7 : 8; }

// type: GGML_MACKO_TYPE_F16 or _BF16
constexpr lanes_range inline_delta_built_lanes(int32_t type, int32_t delta_bits, bool banked) {
    constexpr int32_t ASCENDING = INLINE_DELTA_ASCENDING_LANES;
    const bool        f16 = type == GGML_MACKO_TYPE_F16, bf16 = type == GGML_MACKO_TYPE_BF16;
    return !banked && delta_bits < 6 ? lanes_range{ ASCENDING, (f16 || bf16) && delta_bits != 3 ? ASCENDING : 0 }
           : bf16                    ? lanes_range{ 16, 16 }
                                     : lanes_range{ delta_bits <= 2 ? 16 : 8, f16 ? 32 : 0 };
}
// The best number of runs per row for a matrix.
int32_t inline_delta_lanes(const macko_desc & desc, int64_t n_padded);
// The maximum number of groups that fit the reserved bytes.
int64_t inline_delta_max_groups(const macko_desc & desc, int64_t n_padded);
// Whether each row begins at a line, with unused groups before it: in wide matrices, unless the unused groups are a
// large part of short rows. desc: of the file
bool                has_whole_lines(const inline_delta_layout & m, const macko_desc & desc);
inline_delta_layout bind_inline_delta(const macko_desc & desc, int64_t n_padded, const inline_delta_shape & shape,
                                      void * memory);

// Words of x in shared memory before it repeats (bank order), or all words that a group may access.
constexpr int64_t x_words_of(const inline_delta_layout & m) {
    return m.bank_width ? 32 * m.bank_width - 1 : m.cols + inline_delta_entries(m.delta_bits);
}
constexpr int entries_of_group(const inline_delta_layout & m) {
    return static_cast<int>(inline_delta_entries(m.delta_bits));
}
// The number of entries after which a position is reduced.
constexpr int entries_of_part(const inline_delta_layout & m) { return entries_of_group(m); }

// ---- values ----

// The number of exponents of a value with a delta of delta_bits.
constexpr int inline_delta_exponents(int delta_bits) { return delta_bits == 3 ? 3 : 7; }
constexpr int INLINE_DELTA_BIAS         = 127 - 15; // between the exponents of float and F16
constexpr int INLINE_DELTA_MAX_EXPONENT = 32;

// The stored form of the float f, an F16 or BF16 number: the F16 number f times 2^-exponent, with free bits between
// sign and exponent for the delta. -1: f is an outlier.
constexpr int held_as(const inline_delta_layout & m, uint32_t f) {
    const int sign     = static_cast<int>(f >> 16 & 0x8000),
              code     = static_cast<int>(f >> 23 & 255) - INLINE_DELTA_BIAS - m.exponent,
              mantissa = static_cast<int>(f >> 13 & 0x3ff);
    if ((f & 0x7fffffff) == 0 || (code >= 1 && code <= inline_delta_exponents(m.delta_bits))) {
        return (f & 0x7fffffff) == 0 ? sign : sign | code << 10 | mantissa;
    }
    // below the smallest exponent: an F16 subnormal
    const int full = 0x400 | mantissa, shift = 1 - code;
    return shift > 0 && shift < 11 && full % (1 << shift) == 0 ? sign | full >> shift : -1;
}
// The exponents with which a group can hold |f|.
constexpr exponent_range exponents_of(const inline_delta_layout & m, uint32_t f) {
    const int e = static_cast<int>(f >> 23);
    if (f == 0 || e >= 255) {
        return { 0, 0 };
    }
    const int full = 0x400 | static_cast<int>(f >> 13 & 0x3ff), lowest = full & -full, moved = e - INLINE_DELTA_BIAS;
    const int zeros = (lowest & 0x2aa ? 1 : 0) + (lowest & 0x4cc ? 2 : 0) + (lowest & 0xf0 ? 4 : 0) +
                      (lowest & 0x700 ? 8 : 0); // after the last bit
    return { moved - inline_delta_exponents(m.delta_bits), moved + zeros };
}
constexpr int end_of_exponents(const inline_delta_layout &) { return INLINE_DELTA_MAX_EXPONENT + 1; }
// Whether an outlier multiplied by 2^-exponent in float32 keeps its bits. All F16 numbers do.
constexpr bool outlier_fits(const inline_delta_layout &, uint32_t f) {
    const int exponent = static_cast<int>(f >> 23 & 255) - 127;
    return -90 <= exponent && exponent <= 90;
}

} // namespace macko::cuda
