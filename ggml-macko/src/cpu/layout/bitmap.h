// A sparse matrix in CPU memory: for each row, a bit mask of its columns, and its packed non-zeros. It is made from
// validated data when a model is loaded; no file contains it. Does not use ggml.
//
//   columns   0 1 2 3 4 5 6 7 ...
//   row       a . . b c . d .          masks   1 0 0 1 1 0 1 0 ...      values   a b c d ...
//
//   masks     rows * mask_words(cols) uint64: bit c % 64 of word c / 64 of a row is column c; bits from cols on are 0
//   row_off   rows + 1 uint32: index of the row's first value
//   row_sums  rows floats, only with quantized values: the sum of d * q over the row
//   values    nnz elements of the value type, groups of quantized values, or the bytes of coded values; then
//             VALUES_SLACK zero bytes
//
// A group of quantized values combines two blocks of FORMAT.md section 7: 64 values, in an order that vector
// instructions can unpack with few operations. It starts with the two scales d as floats. Then
//
//   Q8_0      64 int8
//   Q4_0      32 bytes: q + 8 of the first block in the low nibbles, of the second block in the high nibbles
//   Q4_NL     32 bytes in the same order: the indices of the levels. The lowest bit of each scale is the index of the
//             block's table of levels (a float made from an F16 does not use this bit).
//   Q5_0      32 bytes in the same order: the low four bits of q + 16; then 64 bits with the fifth bits
//
// Quantized, F16 and BF16 matrices may have a different layout in the same memory, bundles (bundles.h), without masks
// and values.
//
// Coded values (FORMAT.md section 8, with m = 7 and e = 2) stay coded if choose_cpu_layout() decides so. The masks
// exclude outliers, so all values have one form: the upper 16 bits of a float. The low eight of these bits are in
// `values`. The others are a bit of `signs`, followed by the number `high`, to which a bit of `highs` is added. Each
// row begins at a multiple of eight values, so threads that pack different rows share no byte. Outliers are listed by
// rows.
#pragma once

#include "codec/packed/packed.h"
#include "cpu/layout/bundles.h"

namespace macko::cpu {

constexpr int64_t BITMAP_ALIGNMENT = 64; // bytes; alignment of the memory and of each of its parts
// Kernels read up to 64 values past the end of a row and multiply them by zero.
constexpr int64_t VALUES_SLACK = 256;

constexpr int64_t QUANT_GROUP         = 2 * QUANT_BLOCK; // values
constexpr int64_t GROUP_SCALES_NBYTES = 8;
constexpr int64_t quant_group_nbytes(int32_t type) {
    return GROUP_SCALES_NBYTES + (type == GGML_MACKO_TYPE_Q8_0 ? 64 : type == GGML_MACKO_TYPE_Q5_0 ? 40 : 32);
}

constexpr int64_t CODED_ROW_ALIGNMENT = 8; // values

// The parts that exist only with coded values.
struct coded_parts {
    uint32_t * high;        // one number
    uint8_t *  signs;       // bit k % 8 of byte k / 8 belongs to value k
    uint8_t *  highs;       // the same layout
    uint32_t * outlier_off; // rows + 1
    float *    outliers;
    uint16_t * outlier_cols; // ascending in a row
};

// The memory layout of a matrix, as chosen by choose_cpu_layout().
struct bitmap_form {
    int32_t value_type;
    bool    bundles      = false; // values can become bundles
    int64_t coded_nbytes = 0;     // bytes of coded values in the file
};

struct bitmap_matrix {
    int64_t     rows;
    int64_t     cols;
    int32_t     type;       // type of the values; may be quantized or GGML_MACKO_TYPE_CODED
    int32_t     dense_type; // the type to which x may be rounded
    uint64_t *  masks;
    uint32_t *  row_off;
    float *     row_sums; // nullptr if the values are not quantized
    uint8_t *   values;
    coded_parts coded; // null pointers if the values are not coded
    // Offsets of each group of rows, and the end of the last group; nullptr if the matrix was bound without bundles.
    // The end is 0 if the matrix turned out to be a bitmap.
    uint64_t * group_off;
    uint8_t *  bundles;
    int64_t    bundles_nbytes; // reserved bytes
};

// Whether a packed matrix is in bundles.
inline bool in_bundles(const bitmap_matrix & m) { return m.group_off && m.group_off[n_bundle_groups(m.rows)] != 0; }

constexpr int64_t mask_words(int64_t cols) { return (cols + 63) / 64; }
// Whether a bitmap can hold a matrix whose coded values have coded_nbytes bytes in a file. If so, m = 7 and e = 2.
bool bitmap_takes_coded(const macko_desc & desc, int64_t coded_nbytes);
// Bytes of memory, known before the data is read.
int64_t bitmap_nbytes(const macko_desc & desc, const bitmap_form & form);
// Binds pointers into bitmap_nbytes() bytes of memory, aligned to BITMAP_ALIGNMENT. Writes nothing.
bitmap_matrix bitmap_bind(const macko_desc & desc, const bitmap_form & form, void * memory);
// Writes the view's rows as a bitmap. first_value: number of non-zeros in all rows before view.rows().row_begin. Views
// of one matrix may be packed in any order and at the same time; the view with the last rows also writes row_off[rows]
// and the slack.
void bitmap_pack(const macko_view & view, int64_t first_value, const bitmap_matrix & dst);
// Writes all rows; as bundles if dst was bound with them.
void bitmap_pack(const packed_view & view, int n_threads, const bitmap_matrix & dst);
// Writes rows row_begin ... row_end - 1 as dense elements of dense_type, which is m.dense_type unless values are
// quantized.
void bitmap_densify(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end, void * dense);

// Writes `cols` dense elements of a row of F16 or BF16 values from its masks and values. Kernel sets may have their
// own.
using expand_row_fn = void (*)(const uint64_t * masks, const uint8_t * values, int64_t cols, uint16_t * dense);
// bitmap_densify() with a given expand_row, or null.
void bitmap_densify_with(expand_row_fn expand_row, const bitmap_matrix & m, int32_t dense_type, int64_t row_begin,
                         int64_t row_end, void * dense);
// The function of the kernel set in use (kernels.h), or null.
expand_row_fn expand_row_in_use();

} // namespace macko::cpu
