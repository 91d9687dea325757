// Layout MACKO: the arrays of the file without changes (FORMAT.md section 3). The slowest layout; it suits a matrix of
// any type, width and structure.
#pragma once

#include "codec/macko/macko.h"
#include "gpu-layout/memory.h"

namespace macko::cuda {

struct macko_shape {};

struct macko_layout : layout_base {
    int32_t   delta_bits; // 1, 2, 4 or 8
    uint8_t * values;     // n_padded
    uint8_t * deltas;
    int32_t * row_ptr; // rows + 1: the first entry of a row
};

inline macko_layout bind_macko(const macko_desc & desc, int64_t n_padded, void * memory) {
    macko_layout m = {};
    memory_parts parts(memory);
    parts.take(&m.values, n_padded * value_nbytes(desc.type));
    parts.take(&m.deltas, deltas_nbytes(n_padded, desc.delta_bits));
    parts.take(&m.row_ptr, desc.rows + 1);
    static_cast<layout_base &>(m) = { desc.rows, desc.cols, desc.type, parts.nbytes() };
    m.delta_bits                  = desc.delta_bits;
    return m;
}

// The delta of entry k.
constexpr int macko_delta(const uint8_t * deltas, int64_t k, int delta_bits) {
    const int64_t bit = k * delta_bits;
    return static_cast<int>(deltas[bit >> 3] >> (bit & 7) & ((1u << delta_bits) - 1));
}

} // namespace macko::cuda
