// Sparse weights on their way from the file into a buffer of the GPU.
#pragma once

#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"
#include "host/load-session.h"

namespace macko::cuda {

// How this GPU keeps a packed matrix with quantized values. lanes 0: it does not, and takes the matrix recoded to
// MACKO.
quantized_shape blocks_shape_of(const gpu & device, const sparse_matrix & matrix);

// Reads the payload of `matrix` and puts it at tensor->data. data: what llama.cpp read for the tensor (see
// load::receive). Null if it failed; the load has kept the error.
std::unique_ptr<stored_matrix> upload_matrix(gpu & device, load & current, const sparse_matrix & matrix,
                                             ggml_tensor * tensor, const void * data, size_t size);

} // namespace macko::cuda
