// Sparse weights in host memory, as the device of a GPU sees them: it asks for dense rows, and need not know how the
// CPU device keeps them.
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

namespace macko {

// The rows of a weight are those of all its ne[2] * ne[3] matrices, one after the other.
struct host_weights {
    ggml_backend_buffer_type_t buft; // whose tensors these weights are
    // whether the weight was read from its file
    bool (*is_loaded)(const ggml_tensor * w);
    // Dense rows are made fastest so many at a time, beginning at a multiple of it.
    int64_t (*row_step)(const ggml_tensor * w);
    // Writes rows [row_begin, row_end) as elements of w's type, without gaps between rows. For any number of threads.
    void (*densify)(const ggml_tensor * w, int64_t row_begin, int64_t row_end, void * dense);
};

// Called once, by the CPU device, before any model is loaded. *weights lives as long as the process.
void set_host_weights(const host_weights * weights);
// the functions for w if it is a sparse weight in host memory, else null; w may be null
const host_weights * host_weights_of(const ggml_tensor * w);
// whether buft is where such weights are
bool is_host_weights_buffer_type(ggml_backend_buffer_type_t buft);

// The CPU device has read a weight. Bytes of its ne[1] rows in 16 bits, each a multiple of 16 bytes, are kept for
// largest_host_weight(), unless it is F32, which no GPU takes.
void   note_host_weight(const ggml_tensor * w);
size_t largest_host_weight(); // of all weights that there were; 0: none

} // namespace macko
