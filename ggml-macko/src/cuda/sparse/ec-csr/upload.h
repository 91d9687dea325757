// Brings an EC-CSR matrix to a GPU: in blocks, or recoded to MACKO rows, whichever its cost model says is faster. No
// ggml.
#pragma once

#include "cuda/sparse/ec-csr/mul-mat.cuh"

#include <memory>

namespace macko::cuda {

enum class ec_csr_choice { FASTER, BLOCKS, ROWS }; // BLOCKS: where it has kernels and fits

// What GGML_MACKO_EC_CSR asks for (blocks or rows; anything else, or nothing: FASTER), to compare.
ec_csr_choice ec_csr_choice_of_environment();

// view has passed the checks of decode_rows. dst: `room` bytes of device memory, enough for the matrix recoded with its
// own delta_bits, aligned to CUDA_SPARSE_ALIGNMENT. choice ROWS: the caller cannot take blocks (experts). *part: what
// out->part points to, an ec_csr_part, or null. Returns a ggml_macko_status.
[[nodiscard]] int cuda_ec_csr_upload(cuda_sparse_uploader & uploader, const ec_csr_view & view, ec_csr_choice choice,
                                     int n_threads, void * dst, int64_t room, cuda_sparse_matrix * out,
                                     std::unique_ptr<matrix_part> * part);

} // namespace macko::cuda
