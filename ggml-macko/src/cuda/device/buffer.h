// The buffer types of a GPU: GPU memory with dense tensors and sparse weights, and pinned host memory.
#pragma once

#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"
#include "load/model-file.h"

#include <deque>

namespace macko::cuda {

struct buffer_context {
    gpu &                                      device;
    void *                                     base = nullptr;
    std::deque<std::unique_ptr<stored_matrix>> matrices; // the `extra` of its tensors points to these
};

inline buffer_context & context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<buffer_context *>(buffer->context);
}
inline gpu & gpu_of(ggml_backend_buffer_t buffer) { return context_of(buffer).device; }

extern const buffer_type_functions gpu_buffer_functions, host_buffer_functions;

bool is_gpu_buffer(ggml_backend_buffer_t buffer);         // on any GPU of this plugin; buffer may be null
bool is_gpu_buffer_type(ggml_backend_buffer_type_t buft); // on any GPU of this plugin; false for host memory

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size);

// Reads bytes [offset, offset + size) of a sparse weight's dense elements, for programs that save or inspect the model.
bool read_sparse(gpu & device, const stored_matrix & m, char * data, size_t offset, size_t size);

// The matrix that a tensor represents in the current load of this thread, or null.
const sparse_tensor_info * sparse_of_load(const ggml_tensor * tensor);
// Whether w, or the tensor that it is a view of, is or will be a sparse matrix in this buffer type. w may be null.
bool is_sparse_weight(ggml_backend_buffer_type_t buft, const ggml_tensor * w);
// Bytes of a matrix in this buffer type, from the file's header.
size_t matrix_nbytes(ggml_backend_buffer_type_t buft, const sparse_tensor_info & matrix);

} // namespace macko::cuda
