// Negative zeros. Pruning by W * mask leaves -0.0 where a negative weight was; to a format they are values like any
// other (FORMAT.md section 2), so writers turn them into zeros unless every bit is to be kept.
#pragma once

#include <cstdint>

namespace macko {

// Sets each -0.0 of n values (F32, F16 or BF16) to +0.0; returns how many there were.
int64_t drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads);

} // namespace macko
