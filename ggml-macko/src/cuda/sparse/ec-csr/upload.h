// Brings an EC-CSR matrix to a GPU, in its blocks or as MACKO rows. No ggml.
#pragma once

#include "cuda/sparse/ec-csr/mul-mat.cuh"

#include <memory>

namespace macko::cuda {

// view has passed the checks of decode_rows. in_blocks: cuda_ec_csr_in_blocks(), or false for MACKO rows. dst: `room`
// bytes of device memory, enough for the matrix recoded with its own delta_bits, aligned to CUDA_SPARSE_ALIGNMENT;
// blocks that need more become MACKO rows, too. *part: the owner of out->part, an ec_csr_part, or null. Returns a
// ggml_macko_status.
[[nodiscard]] int cuda_ec_csr_upload(cuda_sparse_uploader & uploader, const ec_csr_view & view, bool in_blocks,
                                     int n_threads, void * dst, int64_t room, cuda_sparse_matrix * out,
                                     std::unique_ptr<matrix_part> * part);

} // namespace macko::cuda
