// Makes a matrix by columns, and multiplies by it.
#pragma once

#include "cuda/sparse/columns.h"
#include "cuda/sparse/mul-mat.cuh"

namespace macko::cuda {

// Makes the columns of w in so many bytes of device memory. Synchronizes; needs up to 16 MB more until it returns.
// Returns a ggml_macko_status.
[[nodiscard]] int cuda_columns_make(const cuda_sparse_matrix & w, const macko_desc & desc, int64_t rows_per_matrix,
                                    void * memory, cudaStream_t stream, cuda_columns * out);

// Whether this product, of a matrix with columns, reads those: one x, or one for each expert.
bool        cuda_columns_serve(const cuda_sparse_mul_mat_params & params);
cudaError_t cuda_columns_mul_mat(const cuda_sparse_mul_mat_params & params, cudaStream_t stream);

} // namespace macko::cuda
