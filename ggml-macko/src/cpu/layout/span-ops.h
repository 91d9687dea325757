// What takes the time when F16 and BF16 values become bundles (bundles.h). Kernel sets may have functions of their own
// for it, which write the same bytes.
#pragma once

#include "cpu/layout/bundles.h"

namespace macko::cpu {

constexpr int SPAN_PIECES = bundle_pieces(GGML_MACKO_TYPE_F16);

struct span_vector {
    uint8_t  delta[2], place[STEP_SLOTS];
    uint16_t value[2 * STEP_SLOTS];
};
static_assert(sizeof(span_vector) == bundle_vector_nbytes(GGML_MACKO_TYPE_F16), "no padding");

// A non-zero is an entry: its column, counted from where a chunk of columns begins, times 65536, plus its value.
constexpr int32_t NO_ENTRY = INT32_MAX; // behind the last of a row

// How far a row of a MACKO matrix has been read.
struct macko_row {
    const uint16_t * values;
    const uint8_t *  deltas;
    int64_t          k, end; // of the row; k is the next
    int64_t          col;    // before that
};

struct span_ops {
    // Appends the entries of a row, up to column `limit`, to n of them; end: how many are in each span and in front of
    // it, as far as a span has any. Returns their number. entries has
    // room for one of each column.
    int (*read_row)(int32_t delta_bits, macko_row * row, int64_t begin, int64_t limit, int n, int32_t * entries,
                    uint16_t * end);
    // Writes the vectors of a bundle. first: of the entries of each piece; end: the column behind the span. Returns
    // the number of vectors.
    int (*write_vectors)(const int32_t * entries, const int32_t * first, int32_t end, span_vector * out);
};

// for any CPU
extern const span_ops plain_span_ops;
// of the kernel set in use (kernels.h)
const span_ops & span_ops_in_use();

} // namespace macko::cpu
