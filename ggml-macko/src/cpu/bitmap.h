// The CPU's private layout of a sparse matrix: per row a bitmask of its columns, and its non-zeros one behind the
// other.
// Made from a validated view at load time; never on file. No ggml here.
//
//   masks    rows * mask_words(cols) uint64, bit c%64 of word c/64 of a row = column c; bits past cols are zero
//   row_off  rows + 1 uint32: index of the row's first value
//   row_sums rows floats, of quantized values only: sum of d * q of a row
//   values   nnz elements of the value type, or groups of quantized ones, then VALUES_SLACK zero bytes
//
// A group is two blocks of FORMAT.md section 7: 64 values that vectors take apart with few operations. Two float scales
// d, then
//   Q8_0: 64 int8;
//   Q4_0: 32 bytes: q + 8 of the first block's values in the low, of the second one's in the high nibbles;
//   Q4_NL: 32 bytes likewise, of the levels' numbers; the tables are the lowest bits of the scales' floats, which F16
//   leaves zero;
//   Q5_0: 32 bytes likewise, of q + 16; then 64 bits, its fifth bits.
#pragma once

#include "codec/packed/packed.h"

namespace macko::cpu {

constexpr int64_t BITMAP_ALIGNMENT = 64; // of the memory, and of each part in it
// kernels load up to 64 values at a time, and multiply those past a row's end by zero
constexpr int64_t VALUES_SLACK = 256;

constexpr int64_t QUANT_GROUP         = 2 * QUANT_BLOCK; // values
constexpr int64_t GROUP_SCALES_NBYTES = 8;
constexpr int64_t quant_group_nbytes(int32_t type) {
    return GROUP_SCALES_NBYTES + (type == GGML_MACKO_TYPE_Q8_0 ? 64 : type == GGML_MACKO_TYPE_Q5_0 ? 40 : 32);
}

struct bitmap_matrix {
    int64_t    rows;
    int64_t    cols;
    int32_t    type; // of values; may be quantized
    uint64_t * masks;
    uint32_t * row_off;
    float *    row_sums; // nullptr if the values are not quantized
    uint8_t *  values;
};

constexpr int64_t mask_words(int64_t cols) { return (cols + 63) / 64; }
// bytes of the layout, known from the header alone
int64_t bitmap_nbytes(const macko_desc & desc, int32_t value_type);
// the parts inside bitmap_nbytes(desc, value_type) bytes at memory (aligned to BITMAP_ALIGNMENT)
bitmap_matrix bitmap_bind(const macko_desc & desc, int32_t value_type, void * memory);
// writes the view's rows. first_value = non-zeros in all rows before view.rows().row_begin. Blocks may be packed in any
// order and at
// the same time; whoever packs the last rows also writes row_off[rows] and the slack.
void bitmap_pack(const macko_view & view, int64_t first_value, const bitmap_matrix & dst);
// writes all rows
void bitmap_pack(const packed_view & view, int n_threads, const bitmap_matrix & dst);
// rows row_begin ... row_end-1 back to dense elements of dense_type, which is m.type unless that is quantized
void bitmap_densify(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end, void * dense);

} // namespace macko::cpu
