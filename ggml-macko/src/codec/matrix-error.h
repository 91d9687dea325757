// How far an encoded matrix is from the dense one that it was made from.
#pragma once

#include "codec/codec.h"

namespace macko {

// Compares view with rows x cols dense elements of its type. weights: n_weights rows of cols numbers, which say how
// much the square of an error counts; each is that of an equal share of the matrix's rows, one below the other. nullptr
// weighs all alike. Same result for any number of threads. Makes the checks of view.check_rows().
[[nodiscard]] int measure_error(const codec_view & view, const void * dense, const float * weights, int64_t n_weights,
                                int n_threads, ggml_macko_error * out);

} // namespace macko
