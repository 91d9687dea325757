// A llama.cpp context's side of a GPU: computes graphs.
#pragma once

#include "ggml-backend-impl.h"

namespace macko::cuda {

// null if the GPU is dead or has no memory for it; the reason is in the log
ggml_backend_t make_backend(ggml_backend_dev_t dev);

} // namespace macko::cuda
