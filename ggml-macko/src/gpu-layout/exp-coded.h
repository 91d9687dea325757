// Layout EXP_CODED, for wide F16 and BF16 matrices: values with 8 significant bits and one of three exponents, coded as
// in FORMAT.md section 8. Runs of a row are as in row-split.h.
//
// A group has 16 entries: 16 bytes of lower bits of codes and of mantissas, a word of signs and upper bits of codes,
// and 1, 2 or 3 words of deltas of 2, 4 or 6 bits (6: columns ascend). 8 groups are a line: first the bytes of all,
// then the words of all (4 bits: all deltas, then all signs and codes). Other values are outliers, in groups of four:
// floats replace the bytes, columns replace the deltas.
#pragma once

#include "gpu-layout/row-split.h"

namespace macko::cuda {

struct exp_coded_shape : row_split_shape {};
struct exp_coded_layout : row_split_layout {};

constexpr int64_t EXP_CODED_ENTRIES   = 16; // of a group
constexpr int     EXP_CODED_PART      = 8;  // entries after which a position in x is reduced
constexpr int     EXP_CODED_EXPONENTS = 3;  // exponents of a value, coded in two bits
constexpr int32_t EXP_CODED_LANES     = 16;
// Words of deltas, signs and codes of a group.
constexpr int64_t exp_coded_words(int delta_bits) { return 1 + delta_bits / 2; }
constexpr int64_t exp_coded_group_nbytes(int delta_bits) { return EXP_CODED_ENTRIES + 4 * exp_coded_words(delta_bits); }

constexpr lanes_range exp_coded_built_lanes(int32_t type, int32_t delta_bits, bool banked) {
    const bool f16 = type == GGML_MACKO_TYPE_F16, bf16 = type == GGML_MACKO_TYPE_BF16;
    return { EXP_CODED_LANES, (f16 || bf16) && (banked || delta_bits == 6) ? EXP_CODED_LANES : 0 };
}
// The width of deltas that takes the fewest bytes.
int32_t exp_coded_delta_bits(const macko_desc & desc);
// Bytes of memory except for groups; the maximum bytes of groups that fit `nbytes` of memory; whether this layout with
// `nbytes` bytes of groups would be smaller than every other.
int64_t exp_coded_nbytes_of_rows(const macko_desc & desc);
int64_t exp_coded_room(const macko_desc & desc, int64_t nbytes);
bool    exp_coded_pays(const macko_desc & desc, int64_t n_padded, int64_t nbytes);
// Expected bytes of memory, with a margin, for at most `outliers` outliers and zeros at random places. *of_groups: the
// expected bytes of the groups alone.
int64_t exp_coded_expected_nbytes(const macko_desc & desc, int64_t outliers, int64_t * of_groups);
// Binds the layout to all of `nbytes`.
exp_coded_layout bind_exp_coded(const macko_desc & desc, const exp_coded_shape & shape, int64_t nbytes, void * memory);

constexpr bool    has_whole_lines(const exp_coded_layout & m, const macko_desc &) { return m.cols >= WIDE_COLS; }
constexpr int64_t x_words_of(const exp_coded_layout & m) {
    return m.bank_width ? 32 * m.bank_width - 1 : m.cols + EXP_CODED_ENTRIES;
}
constexpr int entries_of_group(const exp_coded_layout &) { return static_cast<int>(EXP_CODED_ENTRIES); }
constexpr int entries_of_part(const exp_coded_layout &) { return EXP_CODED_PART; }

// ---- values ----

// The stored form of the float f: its sign, two bits of code and seven bits of mantissa. -1: f is an outlier, as is -0.
constexpr int held_as(const exp_coded_layout & m, uint32_t f) {
    const int code = static_cast<int>(f >> 23 & 255) - m.exponent;
    if (f == 0) {
        return 0;
    }
    return (f & 0xffff) == 0 && code >= 1 && code <= EXP_CODED_EXPONENTS
               ? static_cast<int>(f >> 31 << 9 | static_cast<uint32_t>(code) << 7 | (f >> 16 & 127))
               : -1;
}
// The exponents with which a group can hold |f|.
constexpr exponent_range exponents_of(const exp_coded_layout &, uint32_t f) {
    const int e = static_cast<int>(f >> 23);
    return f != 0 && f % 0x10000 == 0 ? exponent_range{ e - EXP_CODED_EXPONENTS, e } : exponent_range{ 0, 0 };
}
constexpr int  end_of_exponents(const exp_coded_layout &) { return N_EXPONENTS; }
constexpr bool outlier_fits(const exp_coded_layout &, uint32_t) { return true; }

} // namespace macko::cuda
