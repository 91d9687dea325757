// Products and unpacking of matrices that have blocks (ec-csr-layout.h). cuda_sparse_mul_mat and cuda_sparse_unpack
// come here by themselves.
#pragma once

#include "cuda/sparse/ec-csr/layout.h"
#include "cuda/sparse/mul-mat.cuh"

namespace macko::cuda {

// cuda_sparse_mul_mat for matrices of which at least one has blocks: one after the other. NotSupported: a norm,
// silu_mul or experts with them
cudaError_t cuda_ec_csr_mul_mat(const cuda_sparse_mul_mat_params & params, cudaStream_t stream);

// the elements of the blocks in rows row_begin ... row_end-1 into dense rows that have everything else
// (cuda_sparse_unpack)
cudaError_t cuda_ec_csr_unpack(const cuda_ec_csr_blocks & b, int64_t row_begin, int64_t row_end, int32_t type,
                               void * dst, int64_t ld, cudaStream_t stream);

} // namespace macko::cuda
