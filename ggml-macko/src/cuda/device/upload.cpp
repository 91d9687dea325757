#include "cuda/device/upload.h"

#include "codec/team.h"

#include "cuda/sparse/reserved.h"
#include "cuda/sparse/upload-registry.h"

#include <algorithm>

namespace macko::cuda {

namespace {

// Gives each encoding of a payload to the uploader's function for it.
struct upload_consumer : payload_consumer {
    cuda_sparse_uploader &     uploader;
    const gpu &                device;
    const sparse_tensor_info & matrix;
    void *                     dst;
    stored_matrix &            stored;
    bool                       finished = false; // the matrix came as a whole

    upload_consumer(cuda_sparse_uploader & u, const gpu & d, const sparse_tensor_info & m, void * to,
                    stored_matrix & out)
        : uploader(u), device(d), matrix(m), dst(to), stored(out) {}

    int  consume(const macko_view & rows, int64_t) override { return uploader.rows(rows); }
    bool takes(const codec &) const override { return cuda_keeps_own_layout(matrix, device.shared_nbytes); }
    int  consume_matrix(const codec_view & view) override {
        finished = true;
        whole_upload to{ uploader };
        to.shared_nbytes = device.shared_nbytes;
        to.stacked       = matrix.ne[1] != matrix.desc.rows;
        to.n_threads     = threads_for(0, matrix.desc.rows * matrix.desc.cols);
        to.dst           = dst;
        to.room          = cuda_sparse_nbytes(matrix.desc, matrix.n_padded);
        to.out           = &stored.matrix;
        to.part          = &stored.part;
        to.outgrown      = &stored.outgrown;
        return find_upload(matrix.format->name())->upload(view, to);
    }
};

// the staging memory of a load, shared by the buffers of a device and freed with the load
cuda_sparse_uploader * uploader_of(load_session & current, gpu & device) {
    std::shared_ptr<void> & slot = current.staging[&device];
    if (!slot) {
        std::unique_ptr<cuda_sparse_uploader> made;
        if (const int status = cuda_sparse_uploader::create(device.id, &made)) {
            current.keep_error(status);
            return nullptr;
        }
        slot = std::shared_ptr<cuda_sparse_uploader>(std::move(made));
    }
    return static_cast<cuda_sparse_uploader *>(slot.get());
}

} // namespace

size_t matrix_nbytes(const gpu & device, const sparse_tensor_info & matrix) {
    return static_cast<size_t>(cuda_reserved_nbytes(matrix, device.shared_nbytes));
}

int upload_matrix(gpu & device, cuda_sparse_uploader & uploader, const sparse_tensor_info & matrix, void * dst,
                  const payload_reader & read, std::unique_ptr<stored_matrix> * out) {
    auto m             = std::make_unique<stored_matrix>();
    m->rows_per_matrix = matrix.ne[1];
    upload_consumer consumer(uploader, device, matrix, dst, *m);
    if (cuda_own_nbytes(matrix, device.shared_nbytes) == 0) {
        if (const int status =
                uploader.begin(matrix.desc, matrix.n_padded, dst, cuda_rows_nbytes(matrix, device.shared_nbytes))) {
            return status;
        }
    }
    if (const int status = read(consumer)) {
        return status;
    }
    if (!consumer.finished) {
        if (const int status = uploader.finish(&m->matrix, &m->outgrown)) {
            return status;
        }
    }
    const size_t dense  = static_cast<size_t>(m->rows_per_matrix * GGML_PAD(m->matrix.cols, 8) * 2);
    device.panel_nbytes = std::max<size_t>(device.panel_nbytes, std::min(dense, device.max_panel_nbytes));
    *out                = std::move(m);
    return GGML_MACKO_STATUS_OK;
}

std::unique_ptr<stored_matrix> upload_matrix(gpu & device, load_session & current, const sparse_tensor_info & matrix,
                                             ggml_tensor * tensor, const void * data, size_t size) {
    cuda_sparse_uploader * uploader = device.select() ? uploader_of(current, device) : nullptr;
    if (!uploader) {
        return nullptr;
    }
    std::unique_ptr<stored_matrix> m;
    const auto read = [&](payload_consumer & consumer) { return current.receive(tensor, data, size, consumer); };
    if (const int status = upload_matrix(device, *uploader, matrix, tensor->data, read, &m)) {
        current.keep_error(status); // the first one that is kept stays
    }
    return m;
}

} // namespace macko::cuda
