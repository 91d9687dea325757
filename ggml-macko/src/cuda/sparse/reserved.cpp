#include "cuda/sparse/reserved.h"

#include "codec/packed/packed.h"
#include "cuda/sparse/quantized.h"

#include <cstring>

namespace macko::cuda {

namespace {

// ---- packed: quantized values; others arrive as MACKO rows ----

packed_desc packed_header(const sparse_tensor_info & matrix) { return { matrix.desc, matrix.value_type, matrix.bits }; }

bool packed_takes(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    return cuda_quantized_shape(packed_header(matrix), shared_nbytes).lanes != 0;
}

int64_t packed_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    const packed_desc     m     = packed_header(matrix);
    const quantized_shape shape = cuda_quantized_shape(m, shared_nbytes);
    return cuda_quantized_bind(m, shape, cuda_quantized_max_outliers(m, shape), nullptr).nbytes;
}

// ---- ec-csr: in blocks or recoded to MACKO rows, in the memory of the latter ----

bool ec_csr_takes(const sparse_tensor_info &, int64_t) { return true; }

int64_t ec_csr_nbytes(const sparse_tensor_info &, int64_t) { return 0; }

struct own_layout {
    const char * format; // codec::name()
    bool (*takes)(const sparse_tensor_info & matrix, int64_t shared_nbytes);
    int64_t (*nbytes)(const sparse_tensor_info & matrix, int64_t shared_nbytes); // of a matrix that it takes
};

// the row of the matrix's format, if the device keeps it in a layout of its own; else nullptr
const own_layout * find_own_layout(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    static constexpr own_layout ROWS[] = {
        { "packed", packed_takes, packed_nbytes },
        { "ec-csr", ec_csr_takes, ec_csr_nbytes },
    };
    for (const own_layout & row : ROWS) {
        if (!strcmp(row.format, matrix.format->name())) {
            return row.takes(matrix, shared_nbytes) ? &row : nullptr;
        }
    }
    return nullptr;
}

} // namespace

bool cuda_keeps_own_layout(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    return find_own_layout(matrix, shared_nbytes) != nullptr;
}

int64_t cuda_own_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    const own_layout * row = find_own_layout(matrix, shared_nbytes);
    return row ? row->nbytes(matrix, shared_nbytes) : 0;
}

int64_t cuda_rows_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    const int64_t outliers = matrix.value_type == GGML_MACKO_TYPE_CODED
                                 ? max_short_outliers(matrix.desc.nnz, matrix.desc.type, matrix.nbytes_values)
                                 : -1;
    return outliers >= 0 ? cuda_sparse_nbytes(matrix.desc, matrix.n_padded, outliers, shared_nbytes)
                         : cuda_sparse_nbytes(matrix.desc, matrix.n_padded);
}

int64_t cuda_reserved_nbytes(const sparse_tensor_info & matrix, int64_t shared_nbytes) {
    const int64_t own = cuda_own_nbytes(matrix, shared_nbytes);
    return cuda_sparse_aligned(own ? own : cuda_rows_nbytes(matrix, shared_nbytes));
}

} // namespace macko::cuda
