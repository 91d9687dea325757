// Sparse weights on their way from the file into a buffer of the GPU.
#pragma once

#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"
#include "host/load-session.h"

namespace macko::cuda {

// Bytes that the matrix takes in a buffer of this GPU, from its header alone.
size_t matrix_nbytes(const gpu & device, const sparse_tensor_info & matrix);

// Reads the payload of `matrix` and puts it at tensor->data. data: what llama.cpp read for the tensor (see
// load_session::receive). Null if it failed; the session has kept the error.
std::unique_ptr<stored_matrix> upload_matrix(gpu & device, load_session & current, const sparse_tensor_info & matrix,
                                             ggml_tensor * tensor, const void * data, size_t size);

} // namespace macko::cuda
