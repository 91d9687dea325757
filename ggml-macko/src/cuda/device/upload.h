// Uploads sparse weights from the file to a buffer of the GPU.
#pragma once

#include "backend/load-session.h"
#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"

namespace macko::cuda {

// The layout of a matrix on this GPU, from its header alone; plan.nbytes is its size in a buffer.
gpu_plan plan_of(const gpu & device, const sparse_tensor_info & matrix);

// Writes a matrix to dst, plan.nbytes of memory of this GPU, and ensures that contexts have memory to make it dense.
[[nodiscard]] int upload_matrix(gpu & device, cuda_sparse_uploader & uploader, const sparse_tensor_info & matrix,
                                void * dst, const payload_source & read, std::unique_ptr<stored_matrix> * out);

// The same on a thread of a load, with dst = tensor->data. The uploader stays with the thread.
[[nodiscard]] int upload_matrix(gpu & device, load_thread & thread, const sparse_tensor_info & matrix,
                                const ggml_tensor * tensor, const payload_source & read,
                                std::unique_ptr<stored_matrix> * out);

} // namespace macko::cuda
