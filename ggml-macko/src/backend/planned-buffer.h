// A buffer type for models that are loaded without allocation (params.no_alloc). llama.cpp's memory fit asks for the
// sizes of their weights after the load, when no file tells any more what a tensor is; so each such buffer type knows
// the sizes of one model. No weight is ever allocated in it.
#pragma once

#include "backend/load-session.h"
#include "ggml-backend-impl.h"

namespace macko {

// bytes of a sparse matrix in a (real) buffer type
using matrix_nbytes_t = size_t (*)(ggml_backend_buffer_type_t buft, const sparse_tensor_info & matrix);

// The buffer type that stands for `real` in a load without allocation. host: llama.cpp counts its weights as host
// memory. Lives as long as the process; models with equal matrices share one.
ggml_backend_buffer_type_t planned_buffer_type(ggml_backend_buffer_type_t real, const load_session & current,
                                               matrix_nbytes_t nbytes, bool host);
// the buffer type that a planned one stands for; any other buffer type itself
ggml_backend_buffer_type_t real_buffer_type(ggml_backend_buffer_type_t buft);
// whether buft is a planned one and the tensor a sparse matrix of its model
bool is_planned_matrix(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor);

} // namespace macko
