// An EC-CSR matrix that is kept in its blocks.
#pragma once

#include "cuda/sparse/ec-csr/layout.h"
#include "cuda/sparse/mul-mat.cuh"

namespace macko::cuda {

class ec_csr_part final : public matrix_part {
public:
    const cuda_ec_csr_blocks blocks;

    explicit ec_csr_part(const cuda_ec_csr_blocks & b) : blocks(b) {}
    cudaError_t mul_mat(const cuda_sparse_mul_mat_params & params, cudaStream_t stream) const override;
    cudaError_t densify(int64_t row_begin, int64_t row_end, void * dst, int64_t ld, cudaStream_t stream) const override;
};

} // namespace macko::cuda
