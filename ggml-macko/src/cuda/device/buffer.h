// The buffer types of a GPU: its own memory, with dense tensors and sparse weights, and pinned host memory.
#pragma once

#include "cuda/device/gpu.h"
#include "cuda/stored-matrix.h"
#include "load/model-file.h"

#include <vector>

namespace macko::cuda {

struct buffer_context {
    gpu &                                       device;
    void *                                      base = nullptr;
    std::vector<std::unique_ptr<stored_matrix>> matrices; // what the extras of its tensors point to
};

inline buffer_context & context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<buffer_context *>(buffer->context);
}
inline gpu & gpu_of(ggml_backend_buffer_t buffer) { return context_of(buffer).device; }

extern const ggml_backend_buffer_type_i buffer_type_iface, host_buffer_type_iface;

bool is_gpu_buffer(ggml_backend_buffer_t buffer);         // of any GPU of this plugin; buffer may be null
bool is_gpu_buffer_type(ggml_backend_buffer_type_t buft); // the same, not host memory

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size);

// Reads dense elements [offset, offset + size) bytes of a sparse weight, for whoever saves or inspects the model.
bool read_sparse(gpu & device, const stored_matrix & m, char * data, size_t offset, size_t size);

// the matrix that a tensor of the load on this thread stands for, or null
const sparse_tensor_info * sparse_of_load(const ggml_tensor * tensor);
// Is w, or what it is a view of, a sparse matrix in this buffer type, or will it be one? w may be null.
bool is_sparse_weight(ggml_backend_buffer_type_t buft, const ggml_tensor * w);
// bytes of a matrix in this buffer type, known from the file's header
size_t matrix_nbytes(ggml_backend_buffer_type_t buft, const sparse_tensor_info & matrix);

} // namespace macko::cuda
