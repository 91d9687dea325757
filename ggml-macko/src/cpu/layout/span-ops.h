// The time-critical functions that convert F16 and BF16 values to bundles (bundles.h). Kernel sets may have their own
// versions, which write the same bytes.
#pragma once

#include "cpu/layout/bundles.h"

namespace macko::cpu {

struct span_vector {
    uint8_t  delta[2], place[STEP_SLOTS];
    uint16_t value[2 * STEP_SLOTS];
};
static_assert(sizeof(span_vector) == BUNDLE_VECTOR_NBYTES, "no padding");

// An entry is a non-zero: its column, relative to the start of a chunk of columns, times 65536, plus its value.
constexpr int32_t NO_ENTRY = INT32_MAX; // after the last entry of a row

// Position up to which a row of a MACKO matrix has been read.
struct macko_row {
    const uint16_t * values;
    const uint8_t *  deltas;
    int64_t          k, end; // k: the next entry of the row
    int64_t          col;    // column before that entry
};

struct span_ops {
    // Appends the entries of a row up to column `limit` to n existing ones. end: for each span, the number of entries
    // in it and before it, up to the last span with entries. Returns the new number of entries. entries has space for
    // one per column.
    int (*read_row)(int32_t delta_bits, macko_row * row, int64_t begin, int64_t limit, int n, int32_t * entries,
                    uint16_t * end);
    // Writes the vectors of a bundle. first: index of the first entry of each piece; end: the column after the span.
    // Returns the number of vectors.
    int (*write_vectors)(const int32_t * entries, const int32_t * first, int32_t end, span_vector * out);
};

// The functions for any CPU.
extern const span_ops plain_span_ops;

} // namespace macko::cpu
