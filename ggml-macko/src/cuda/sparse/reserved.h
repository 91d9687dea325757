// The bytes of a GPU's memory that are reserved for a sparse matrix, as the header of its file decides, and the formats
// that a GPU keeps in a layout of their own. Buffers are sized by it, and `macko plan` tells it beforehand, so it is
// compiled where there is no CUDA. No ggml.
#pragma once

#include "load/model-file.h"

namespace macko::cuda {

// shared_nbytes: shared memory that a block may use on the device

// Whether the device keeps a matrix of this header in a layout of its format's own, which upload-registry.h makes.
bool cuda_keeps_own_layout(const sparse_tensor_info & matrix, int64_t shared_nbytes);
// Bytes to reserve for that layout; 0: those of MACKO rows.
int64_t cuda_own_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes);
// Bytes to reserve for MACKO rows.
int64_t cuda_rows_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes);
// Either of them, aligned.
int64_t cuda_reserved_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes);

} // namespace macko::cuda
