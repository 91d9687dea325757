// Uploads sparse weights from the file to a buffer of the GPU.
#pragma once

#include "backend/load-session.h"
#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"

#include <functional>

namespace macko::cuda {

// The layout of a matrix on this GPU, from its header alone; plan.nbytes is its size in a buffer.
gpu_plan plan_of(const gpu & device, const sparse_tensor_info & matrix);

// Passes the payload of a matrix to a consumer, and returns a ggml_macko_status.
using payload_reader = std::function<int(payload_consumer &)>;

// Writes a matrix to dst, plan.nbytes of memory of this GPU, and ensures that contexts have memory to make it dense.
[[nodiscard]] int upload_matrix(gpu & device, cuda_sparse_uploader & uploader, const sparse_tensor_info & matrix,
                                void * dst, const payload_reader & read, std::unique_ptr<stored_matrix> * out);

// Like the function above during a load, with dst = tensor->data. data: the bytes that llama.cpp read for the tensor
// (see load_session::receive). Returns null on failure; the session keeps the error.
std::unique_ptr<stored_matrix> upload_matrix(gpu & device, load_session & current, const sparse_tensor_info & matrix,
                                             ggml_tensor * tensor, const void * data, size_t size);

} // namespace macko::cuda
