// A llama.cpp context's side of a GPU: computes graphs.
#pragma once

#include "ggml-backend-impl.h"

namespace macko::cuda {

// null if the GPU is dead or has no memory for it; the reason is in the log
ggml_backend_t make_backend(ggml_backend_dev_t dev);

// Threads of the host that send weights in its memory to the GPU. false: not a backend of a GPU of this plugin
bool set_n_threads(ggml_backend_t backend, int n_threads);

// For a backend that a server made before any weight arrived, and whose graphs were laid out by a client: kernels use
// scratch memory of the backend, of at least so many bytes, and products of many columns the memory that suits the
// weights that are there. False, with the reason in the log: no graph may be computed.
bool backend_prepare(ggml_backend_t backend, size_t scratch_nbytes);

} // namespace macko::cuda
