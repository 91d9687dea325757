// Sparse weights on their way from the file into a buffer of the GPU.
#pragma once

#include "backend/load-session.h"
#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"

#include <functional>

namespace macko::cuda {

// How this GPU keeps a matrix, from its header alone; plan.nbytes is what it takes in a buffer.
gpu_plan plan_of(const gpu & device, const sparse_tensor_info & matrix);

// Gives the payload of a matrix to a consumer, and returns a ggml_macko_status.
using payload_reader = std::function<int(payload_consumer &)>;

// Puts a matrix at dst, plan.nbytes of memory of this GPU, and sees to it that contexts have memory in which they
// make it dense.
[[nodiscard]] int upload_matrix(gpu & device, cuda_sparse_uploader & uploader, const sparse_tensor_info & matrix,
                                void * dst, const payload_reader & read, std::unique_ptr<stored_matrix> * out);

// The same during a load, with dst tensor->data. data: what llama.cpp read for the tensor (see load_session::receive).
// Null if it failed; the session has kept the error.
std::unique_ptr<stored_matrix> upload_matrix(gpu & device, load_session & current, const sparse_tensor_info & matrix,
                                             ggml_tensor * tensor, const void * data, size_t size);

} // namespace macko::cuda
