// Access to sparse weights in host memory for the GPU device. The GPU device requests dense rows and does not depend on
// the CPU device's layouts.
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

namespace macko {

// The rows of a weight are the rows of all its ne[2] * ne[3] matrices, one after the other.
struct host_weights {
    ggml_backend_buffer_type_t buft; // the buffer type of these weights
    // whether the weight has been read from its file
    bool (*is_loaded)(const ggml_tensor * w);
    // Dense rows are produced fastest in groups of this many rows that begin at a multiple of it.
    int64_t (*row_step)(const ggml_tensor * w);
    // Writes rows [row_begin, row_end) as elements of w's type, without gaps between rows. Several threads may call it.
    void (*densify)(const ggml_tensor * w, int64_t row_begin, int64_t row_end, void * dense);
};

// The CPU device calls this once, before any model is loaded. *weights lives as long as the process.
void set_host_weights(const host_weights * weights);
// The access functions if w is a sparse weight in host memory, else null; w may be null.
const host_weights * host_weights_of(const ggml_tensor * w);
// Whether buft is the buffer type of such weights.
bool is_host_weights_buffer_type(ggml_backend_buffer_type_t buft);

// Called when the CPU device has read a weight. largest_host_weight() is the maximum over these weights of the bytes of
// a matrix in 16 bits per element, each row padded to a multiple of 16 bytes. Matrices below 32 MiB count as all those
// of their weight, up to 32 MiB: threads and launches for each small expert would take longer than to send it. F32
// weights do not count, because GPUs do not accept them.
void   note_host_weight(const ggml_tensor * w);
size_t largest_host_weight(); // maximum over all weights so far; 0: none

} // namespace macko
