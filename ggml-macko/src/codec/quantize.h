// Values to quantized blocks (FORMAT.md section 7). Plain C++17: no ggml.
#pragma once

#include "codec/quants.h"

namespace macko {

// n values as blocks; blocks has room for packed_n_values(n), of which what is behind n becomes padding. weights: how
// much the square of an error
// counts, not negative; nullptr: all alike. Only the search for Q4_NL's scales has a use for them. Same bytes for any
// number of threads.
[[nodiscard]] int quantize(const float * values, const float * weights, int64_t n, int32_t type, int n_threads,
                           uint8_t * blocks);

} // namespace macko
