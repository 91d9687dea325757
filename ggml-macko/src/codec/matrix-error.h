// Measures the difference between an encoded matrix and its dense original.
#pragma once

#include "codec/codec.h"

namespace macko {

// Compares view with rows x cols dense elements of its type. weights: n_weights rows of cols numbers, the weights of
// the squared errors; the matrix is a stack of n_weights equal parts with one row of weights each. nullptr: all weights
// are equal. The result does not depend on the number of threads. Runs the checks of view.check_rows().
[[nodiscard]] int measure_error(const codec_view & view, const void * dense, const float * weights, int64_t n_weights,
                                int n_threads, ggml_macko_error * out);

} // namespace macko
