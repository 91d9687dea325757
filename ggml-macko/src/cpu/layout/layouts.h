// The layouts in which the CPU keeps a sparse matrix, as one variant. A matrix gets its layout when it is loaded; no
// file contains it. Does not use ggml.
//
// BITMAP has a bit mask of the columns of each row, and the packed non-zeros:
//
//   columns   0 1 2 3 4 5 6 7 ...
//   row       a . . b c . d .          masks   1 0 0 1 1 0 1 0 ...      values   a b c d ...
//
// CODED_BITMAP has coded values (FORMAT.md section 8, with m = 7 and e = 2). The masks exclude outliers, so all values
// have one form: the upper 16 bits of a float. The low eight of these bits are in `values`. The others are a bit of
// `signs`, followed by the number `high`, to which a bit of `highs` is added. Each row begins at a multiple of eight
// values, so threads that pack different rows share no byte. Outliers are listed by rows.
//
// BUNDLES have neither masks nor values (bundles.h).
//
// QUANTIZED has the arrays of FORMAT.md section 9 as they are.
#pragma once

#include "codec/packed/packed.h"
#include "codec/quantized/quantized.h"
#include "cpu/layout/bundles.h"

#include <variant>

namespace macko::cpu {

constexpr int64_t LAYOUT_ALIGNMENT = 64; // bytes; alignment of the memory and of each of its parts
// Kernels read up to 64 values past the end of a row and multiply them by zero.
constexpr int64_t VALUES_SLACK = 256;

constexpr int64_t CODED_ROW_ALIGNMENT = 8;  // values
constexpr int64_t CODED_BITS_SLACK    = 16; // bytes that kernels read past the last bit

// bytes that kernels read past the end: 64 codes and a vector, a word, and some scales
constexpr int64_t CODES_SLACK = 128, BITMAP_SLACK = 8, SCALES_SLACK = 16;

constexpr int64_t mask_words(int64_t cols) { return (cols + 63) / 64; }

struct layout_base {
    int64_t    rows, cols;
    int32_t    dense_type; // the type to which x may be rounded
    uint32_t * row_off;    // rows + 1: index of each row's first value
};
struct masked_layout : layout_base {
    uint64_t *
              masks; // rows * mask_words(cols): bit c % 64 of word c / 64 of a row is column c; bits from cols on are 0
    uint8_t * values; // then VALUES_SLACK zero bytes
};

struct bitmap_layout : masked_layout {}; // values of the dense type
struct coded_bitmap_layout : masked_layout {
    uint8_t *  signs;       // bit k % 8 of byte k / 8 belongs to value k
    uint8_t *  highs;       // the same order
    uint32_t * high;        // one number
    uint32_t * outlier_off; // rows + 1
    float *    outliers;
    uint16_t * outlier_cols; // ascending in a row
};
struct bundles_layout : layout_base {
    uint64_t * group_off; // offset of each group of rows, and the end of the last group
    uint8_t *  bundles;
    int64_t    bundles_nbytes; // reserved
};
struct quantized_layout : layout_base { // row_off: row_ptr, the groups of codes before each row
    int32_t    bits;                    // of a code
    int64_t    window;                  // columns that share a scale
    uint8_t *  codes;                   // then CODES_SLACK bytes
    uint8_t *  bitmap;                  // then BITMAP_SLACK bytes
    uint8_t *  scales;                  // then SCALES_SLACK bytes
    uint16_t * factors;                 // BF16
    int8_t *   levels;                  // 2^bits
};
using cpu_matrix = std::variant<bitmap_layout, coded_bitmap_layout, bundles_layout, quantized_layout>;

inline const layout_base & base_of(const cpu_matrix & m) {
    return std::visit([](const auto & layout) -> const layout_base & { return layout; }, m);
}
inline bool is_quantized(const cpu_matrix & m) { return std::holds_alternative<quantized_layout>(m); }
inline bool in_bundles(const cpu_matrix & m) { return std::holds_alternative<bundles_layout>(m); }

// The numbers that a layout is made with; the alternatives are those of cpu_matrix, in the same order.
struct bitmap_shape {};
struct coded_bitmap_shape {
    int64_t max_outliers;
};
struct bundles_shape {};
struct quantized_shape {
    int32_t bits;
    int64_t window;
    int64_t codes_nbytes;
};
using cpu_shape = std::variant<bitmap_shape, coded_bitmap_shape, bundles_shape, quantized_shape>;

const char * layout_name(const cpu_shape & shape);
// Bytes of memory, known before the data is read.
int64_t layout_nbytes(const macko_desc & desc, const cpu_shape & shape);
// Binds pointers into layout_nbytes() bytes of memory, aligned to LAYOUT_ALIGNMENT. Writes nothing.
cpu_matrix       bind_layout(const macko_desc & desc, const cpu_shape & shape, void * memory);
quantized_arrays arrays_of(const quantized_layout & m);
// Whether CODED_BITMAP can hold a matrix with this many outliers (-1: its values do not have m = 7 and e = 2).
bool can_stay_coded(const macko_desc & desc, int64_t max_outliers);

// Functions of a kernel set that write dense F16 or BF16 elements faster than bit by bit; null if it has none.
struct expanders {
    // `cols` elements of a row, from its masks and values
    void (*row)(const uint64_t * masks, const uint8_t * values, int64_t cols, uint16_t * dense) = nullptr;
    // rows row_begin ... row_end - 1
    void (*quantized)(const quantized_layout & m, int64_t row_begin, int64_t row_end, uint16_t * dense) = nullptr;
};
// Writes rows row_begin ... row_end - 1 as elements of the dense type.
void densify(const cpu_matrix & m, int64_t row_begin, int64_t row_end, void * dense, const expanders & expand = {});

} // namespace macko::cpu
