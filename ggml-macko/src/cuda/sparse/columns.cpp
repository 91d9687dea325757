#include "cuda/sparse/columns.h"

namespace macko::cuda {

static cuda_columns bind(const macko_desc & desc, int64_t rows_per_matrix, void * memory, int64_t * nbytes) {
    cuda_columns c = {};
    c.rows         = rows_per_matrix;
    c.cols         = desc.cols;
    c.n_matrices   = desc.rows / rows_per_matrix;
    c.type         = desc.type;
    cuda_sparse_parts parts(memory);
    parts.take(&c.places, c.n_places());
    parts.take(&c.values, desc.nnz + 1);
    *nbytes = parts.nbytes();
    return c;
}

bool cuda_columns_supported(const macko_desc & desc, int32_t value_type) {
    const bool has_16_bits = desc.type == GGML_MACKO_TYPE_F16 || desc.type == GGML_MACKO_TYPE_BF16;
    return has_16_bits && (value_type == desc.type || value_type == GGML_MACKO_TYPE_CODED) && desc.nnz < UINT32_MAX &&
           desc.cols <= cuda_columns::MAX_COLS;
}

int64_t cuda_columns_nbytes(const macko_desc & desc, int64_t rows_per_matrix) {
    int64_t nbytes;
    bind(desc, rows_per_matrix, nullptr, &nbytes);
    return nbytes;
}

cuda_columns cuda_columns_bind(const macko_desc & desc, int64_t rows_per_matrix, void * memory) {
    int64_t nbytes;
    return bind(desc, rows_per_matrix, memory, &nbytes);
}

} // namespace macko::cuda
