// Negative zeros. Pruning by W * mask turns negative weights into -0.0. A format stores -0.0 like any other value
// (FORMAT.md section 2), so writers turn it into zero unless every bit must be kept.
#pragma once

#include <cstdint>

namespace macko {

// Replaces each -0.0 among n values (F32, F16 or BF16) by +0.0; returns the number of replaced values.
int64_t drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads);

} // namespace macko
