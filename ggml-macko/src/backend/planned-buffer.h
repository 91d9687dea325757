// A buffer type for models that are loaded without allocation (params.no_alloc). llama.cpp needs the sizes of the
// weights after the load, when the file that describes the tensors is closed, so each such buffer type stores the sizes
// for one model. No weight is ever allocated in it.
#pragma once

#include "backend/load-session.h"
#include "ggml-backend-impl.h"

namespace macko {

// Bytes of a sparse matrix in a (real) buffer type.
using matrix_nbytes_t = size_t (*)(ggml_backend_buffer_type_t buft, const sparse_tensor_info & matrix);

// The buffer type that represents `real` in a load without allocation. host: llama.cpp counts its weights as host
// memory. Lives as long as the process; models with equal matrices share one.
ggml_backend_buffer_type_t planned_buffer_type(ggml_backend_buffer_type_t real, const load_session & current,
                                               matrix_nbytes_t nbytes, bool host);
// The real buffer type of a planned one; any other buffer type is returned unchanged.
ggml_backend_buffer_type_t real_buffer_type(ggml_backend_buffer_type_t buft);
// Whether buft is a planned buffer type and the tensor is a sparse matrix of its model.
bool is_planned_matrix(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor);

} // namespace macko
