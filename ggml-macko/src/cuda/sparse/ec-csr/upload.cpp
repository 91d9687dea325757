#include "cuda/sparse/ec-csr/upload.h"

#include "codec/ec-csr/cost.h"
#include "codec/macko/encode.h"
#include "codec/team.h"
#include "cuda/lib/common.cuh"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

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

// entries of a matrix recoded to MACKO with delta_bits
int64_t entries(const ggml_macko_count & count, int32_t delta_bits) {
    return count.n_stored[delta_bits == 1 ? 0 : delta_bits == 2 ? 1 : delta_bits == 4 ? 2 : 3];
}

// The rows of a matrix as the GPU would keep them, with the width of deltas that takes the least memory: never more
// than with the file's own.
struct rows_plan {
    macko_desc desc   = {};
    int64_t    padded = 0;
    int64_t    nbytes = 0;

    rows_plan(const macko_desc & d, const ggml_macko_count & count) {
        for (const int32_t bits : { d.delta_bits, 1, 2, 4, 8 }) {
            macko_desc with = d;
            with.delta_bits = bits;
            with.nnz        = count.nnz;
            const int64_t n = entries(count, bits);
            if (n > MAX_STORED) {
                continue;
            }
            const int64_t size = cuda_sparse_nbytes(with, n_padded(n));
            if (nbytes == 0 || size < nbytes) {
                desc   = with;
                padded = n_padded(n);
                nbytes = size;
            }
        }
    }
};

} // namespace

ec_csr_choice ec_csr_choice_of_environment() {
    const char * forced = getenv("GGML_MACKO_EC_CSR");
    return !forced                     ? ec_csr_choice::FASTER
           : !strcmp(forced, "blocks") ? ec_csr_choice::BLOCKS
           : !strcmp(forced, "rows")   ? ec_csr_choice::ROWS
                                       : ec_csr_choice::FASTER;
}

int cuda_ec_csr_upload(cuda_sparse_uploader & uploader, const ec_csr_view & view, ec_csr_choice choice, int n_threads,
                       void * dst, int64_t room, cuda_sparse_matrix * out, std::unique_ptr<matrix_part> * part) {
    const macko_desc & desc = view.arrays().desc;
    const bool         all  = !gpu_keeps_rows_of_one(desc.type);
    cuda_device_info   device;
    CUDA_OK(cuda_current_device(&device));
    ggml_macko_count whole = {};
    if (const int status = count_rows(view, n_threads, &whole)) {
        return status;
    }
    const rows_plan plan(desc, whole);
    if (choice != ec_csr_choice::ROWS && cuda_ec_csr_supported(view, all, device.shared_nbytes)) {
        gpu_rest rest;
        if (const int status = gpu_rest_of(view, n_threads, &rest)) {
            return status;
        }
        const rows_plan          rest_plan(desc, rest.count);
        const cuda_ec_csr_blocks b    = cuda_ec_csr_bind(view, all, nullptr);
        const bool               fits = rest_plan.nbytes + b.nbytes <= room;
        const bool faster = gpu_us(gpu_blocks_work(view, rest)) < gpu_us(gpu_rows_work(desc, whole, longest_row(view)));
        if (fits && (faster || choice == ec_csr_choice::BLOCKS)) {
            macko_matrix m;
            if (rest.count.nnz > 0) {
                if (const int status = recode(rest.view, rest_plan.desc.delta_bits, n_threads, &m)) {
                    return status;
                }
            } else { // no entries
                m.desc = rest_plan.desc;
                m.row_ptr.assign(static_cast<size_t>(desc.rows) + 1, 0);
                m.values.assign(64, 0);
                m.deltas.assign(64, 0);
            }
            if (const int status = upload_rows(uploader, m, n_threads, dst, out)) {
                return status;
            }
            uint8_t *            at = static_cast<uint8_t *>(dst) + rest_plan.nbytes;
            std::vector<uint8_t> image(static_cast<size_t>(b.nbytes_arrays), 0);
            cuda_ec_csr_fill(view, all, n_threads, cuda_ec_csr_bind(view, all, image.data()));
            CUDA_OK(cudaMemcpy(at, image.data(), image.size(), cudaMemcpyHostToDevice));
            // cudaMemcpy may return before the data has arrived, and other streams do not wait for the default stream
            CUDA_OK(cudaStreamSynchronize(nullptr));
            *part     = std::make_unique<ec_csr_part>(cuda_ec_csr_bind(view, all, at));
            out->part = part->get();
            return GGML_MACKO_STATUS_OK;
        }
    }
    macko_matrix m;
    const int    status = recode(view, plan.desc.delta_bits, n_threads, &m);
    return status ? status : upload_rows(uploader, m, n_threads, dst, out);
}

} // namespace macko::cuda
