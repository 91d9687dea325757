// The backend of a llama.cpp context on a GPU: computes graphs.
#pragma once

#include "ggml-backend-impl.h"

namespace macko::cuda {

// Returns null and logs the reason if the GPU is dead or has too little memory.
ggml_backend_t make_backend(ggml_backend_dev_t dev);

// Sets the number of host threads that send weights in host memory to the GPU. Returns false for a backend that is not
// on a GPU of this plugin.
bool set_n_threads(ggml_backend_t backend, int n_threads);

// For the backend of a server, which exists before any weight arrives and computes graphs that a client has laid out.
// Kernels then use at least scratch_nbytes of the backend's own scratch memory, and products of many columns use memory
// for the largest weight so far. If it returns false, it has logged the reason, and no graph may be computed.
bool backend_prepare(ggml_backend_t backend, size_t scratch_nbytes);

} // namespace macko::cuda
