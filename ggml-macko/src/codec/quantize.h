// Values to quantized blocks (FORMAT.md section 7). Plain C++17: no ggml.
#pragma once

#include "codec/quants.h"

namespace macko {

// Quantizes n values of value_type (F32, F16 or BF16). blocks has space for packed_n_values(n) values; the values
// after n become padding. weights: the weights of the squared errors, not negative; nullptr: all weights are equal.
// Only the search for Q4_NL's scales uses them. NOT_FINITE if a value is too large for an F16 scale. The bytes do not
// depend on the number of threads.
[[nodiscard]] int quantize(const void * values, int32_t value_type, const float * weights, int64_t n, int32_t type,
                           int n_threads, uint8_t * blocks);

// Replaces each q of ggml's blocks by the one nearest to its value, and keeps the scales. ggml's search for scales
// leaves each q as it was before the last step of the search. n is a multiple of QUANT_BLOCK. NOT_FINITE if a scale is
// Inf or NaN.
[[nodiscard]] int round_to_scales(const void * values, int32_t value_type, int64_t n, int32_t type, int n_threads,
                                  uint8_t * blocks);

} // namespace macko
