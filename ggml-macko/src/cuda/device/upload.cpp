#include "cuda/device/upload.h"

#include "cuda/sparse/ec-csr/upload.h"

#include <omp.h>

namespace macko::cuda {

namespace {

// Gives each encoding of a payload to the uploader's function for it.
struct upload_consumer : payload_consumer {
    cuda_sparse_uploader & uploader;
    const sparse_matrix &  matrix;
    const ggml_tensor *    tensor;
    stored_matrix &        stored;
    const quantized_shape  shape;
    bool                   finished = false; // the matrix came as a whole

    upload_consumer(cuda_sparse_uploader & u, const sparse_matrix & m, const ggml_tensor * t, stored_matrix & out,
                    const quantized_shape & s)
        : uploader(u), matrix(m), tensor(t), stored(out), shape(s) {}

    int consume(const macko_view & rows, int64_t) override { return uploader.rows(rows); }

    bool takes_blocks() const override { return true; }
    int  consume_blocks(const ec_csr_view & view) override {
        finished = true;
        // blocks of rows would lie across the experts of a stacked weight
        const bool          one_matrix = tensor->ne[1] == matrix.desc.rows;
        const ec_csr_choice choice     = one_matrix ? ec_csr_choice_of_environment() : ec_csr_choice::ROWS;
        const int64_t       room       = cuda_sparse_nbytes(matrix.desc, matrix.n_padded);
        return cuda_ec_csr_upload(uploader, view, choice, omp_get_max_threads(), tensor->data, room, &stored.matrix,
                                   &stored.part);
    }

    bool takes_packed() const override { return shape.lanes != 0; }
    int  consume_packed(const packed_view & view) override {
        finished = true;
        return uploader.packed(view, shape, tensor->data, omp_get_max_threads(), &stored.matrix, &stored.outgrown);
    }
};

// the staging memory of a load, shared by the buffers of a device and freed with the load
cuda_sparse_uploader * uploader_of(load & current, gpu & device) {
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

quantized_shape blocks_shape_of(const gpu & device, const sparse_matrix & matrix) {
    return matrix.format == &FORMAT_PACKED ? cuda_quantized_shape(matrix.packed(), device.shared_nbytes)
                                           : quantized_shape{ 0, 0 };
}

std::unique_ptr<stored_matrix> upload_matrix(gpu & device, load & current, const sparse_matrix & matrix,
                                             ggml_tensor * tensor, const void * data, size_t size) {
    cuda_sparse_uploader * uploader = device.select() ? uploader_of(current, device) : nullptr;
    if (!uploader) {
        return nullptr;
    }
    auto m             = std::make_unique<stored_matrix>();
    m->rows_per_matrix = tensor->ne[1];
    upload_consumer consumer(*uploader, matrix, tensor, *m, blocks_shape_of(device, matrix));
    const auto      ok = [&](int status) {
        if (status != GGML_MACKO_STATUS_OK) {
            current.keep_error(status);
        }
        return status == GGML_MACKO_STATUS_OK;
    };
    if (!consumer.takes_packed() && !ok(uploader->begin(matrix.desc, matrix.n_padded, tensor->data))) {
        return nullptr;
    }
    if (current.receive(tensor, data, size, consumer) != GGML_MACKO_STATUS_OK) { // it keeps the error itself
        return nullptr;
    }
    if (!consumer.finished && !ok(uploader->finish(&m->matrix))) {
        return nullptr;
    }
    return m;
}

} // namespace macko::cuda
