#include "cuda/sparse/ec-csr/upload.h"

#include "codec/macko/encode.h"
#include "codec/team.h"
#include "cuda/lib/common.cuh"

#include <atomic>
#include <vector>

namespace macko::cuda {

namespace {

// brings the arrays of a matrix that was recoded to MACKO to the GPU, from several threads
int upload_rows(cuda_sparse_uploader & uploader, const macko_matrix & m, int n_threads, void * dst,
                cuda_sparse_matrix * out) {
    if (const int status = uploader.begin(m.desc, n_padded(m.row_ptr.back()), dst)) {
        return status;
    }
    constexpr int64_t ROWS = 256; // at a time
    std::atomic<int>  failed{ GGML_MACKO_STATUS_OK };
    parallel_parts(n_threads, m.desc.rows, ROWS, [&](int64_t begin, int64_t end, int) {
        macko_view view;
        int        status = failed.load();
        if (!status) {
            status = validate({ m.desc, begin, end, m.row_ptr.data(), 0, m.values.data(), m.deltas.data() }, &view);
            status = status ? status : uploader.rows(view);
        }
        if (status) {
            failed = status;
        }
    });
    return failed ? fail(failed, "a matrix could not be copied to the GPU") : uploader.finish(out);
}

// The deltas with which the matrix as MACKO rows takes the least memory: never more than with the file's own.
macko_desc smallest_rows(const macko_desc & desc, const ggml_macko_count & count) {
    macko_desc best   = desc;
    int64_t    nbytes = 0;
    for (const int32_t bits : { desc.delta_bits, 1, 2, 4, 8 }) {
        macko_desc with = desc;
        with.delta_bits = bits;
        const int64_t n = count.n_stored[bits == 1 ? 0 : bits == 2 ? 1 : bits == 4 ? 2 : 3];
        if (n > MAX_STORED) {
            continue;
        }
        const int64_t size = cuda_sparse_nbytes(with, n_padded(n));
        if (nbytes == 0 || size < nbytes) {
            best   = with;
            nbytes = size;
        }
    }
    return best;
}

int upload_blocks(const ec_csr_view & view, int n_threads, const cuda_ec_csr_blocks & b, void * dst,
                  cuda_sparse_matrix * out, std::unique_ptr<matrix_part> * part) {
    std::vector<uint8_t> image(static_cast<size_t>(b.nbytes_arrays), 0);
    cuda_ec_csr_fill(view, n_threads, cuda_ec_csr_bind(view, image.data()));
    CUDA_OK(cudaMemcpy(dst, image.data(), image.size(), cudaMemcpyHostToDevice));
    // cudaMemcpy may return before the data has arrived, and other streams do not wait for the default stream
    CUDA_OK(cudaStreamSynchronize(nullptr));
    const macko_desc & desc = view.arrays().desc;
    *part                   = std::make_unique<ec_csr_part>(cuda_ec_csr_bind(view, dst));
    *out                    = {};
    out->rows               = desc.rows;
    out->cols               = desc.cols;
    out->type               = desc.type;
    out->value_type         = desc.type;
    out->delta_bits         = desc.delta_bits;
    out->layout             = CUDA_SPARSE_LAYOUT_FILE;
    out->nbytes             = b.nbytes;
    out->part               = part->get();
    return GGML_MACKO_STATUS_OK;
}

} // namespace

int cuda_ec_csr_upload(cuda_sparse_uploader & uploader, const ec_csr_view & view, bool in_blocks, int n_threads,
                       void * dst, int64_t room, cuda_sparse_matrix * out, std::unique_ptr<matrix_part> * part) {
    const macko_desc & desc = view.arrays().desc;
    if (in_blocks) {
        const cuda_ec_csr_blocks b = cuda_ec_csr_bind(view, nullptr);
        if (b.nbytes <= room) {
            return upload_blocks(view, n_threads, b, dst, out, part);
        }
    }
    ggml_macko_count count = {};
    if (const int status = count_rows(view, n_threads, &count)) {
        return status;
    }
    macko_matrix m;
    const int    status = recode(view, smallest_rows(desc, count).delta_bits, n_threads, &m);
    return status ? status : upload_rows(uploader, m, n_threads, dst, out);
}

} // namespace macko::cuda
