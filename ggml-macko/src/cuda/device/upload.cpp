#include "cuda/device/upload.h"

#include "backend/log.h"
#include "codec/team.h"

#include <algorithm>

namespace macko::cuda {

namespace {

// Passes a payload to the uploader.
struct upload_consumer : payload_consumer {
    cuda_sparse_uploader & uploader;
    const gpu_plan &       plan;

    upload_consumer(cuda_sparse_uploader & u, const gpu_plan & p) : uploader(u), plan(p) {}

    int  consume(const macko_view & rows, int64_t) override { return uploader.rows(rows); }
    bool takes(const codec & format) const override { return uploader.takes(format); }
    int  consume_matrix(const codec_view & view) override {
        return uploader.whole(view, threads_for(0, plan.matrix.desc.rows * plan.matrix.desc.cols));
    }
};

} // namespace

gpu_plan plan_of(const gpu & device, const sparse_tensor_info & matrix) {
    gpu_matrix m = gpu_matrix_of(*matrix.format, matrix.desc, matrix.n_padded, matrix.value_type, matrix.nbytes_values,
                                 matrix.window);
    m.in_blocks  = m.in_blocks && matrix.ne[1] == matrix.desc.rows; // blocks of stacked matrices span all of them
    return choose(m, gpu_device_of(device.shared_nbytes));
}

int upload_matrix(gpu & device, cuda_sparse_uploader & uploader, const sparse_tensor_info & matrix, void * dst,
                  const payload_source & read, std::unique_ptr<stored_matrix> * out) {
    auto m             = std::make_unique<stored_matrix>();
    m->rows_per_matrix = matrix.ne[1];
    m->plan            = plan_of(device, matrix);
    upload_consumer consumer(uploader, m->plan);
    TRY(uploader.begin(m->plan, dst));
    TRY(read(consumer));
    TRY(uploader.finish(&m->matrix, &m->verdict, &m->outgrown));
    log_debug("%s: %s: %s, %lld bytes reserved%s (%s)\n", device.name.c_str(), matrix.name.c_str(),
              text_of(m->verdict.shape).c_str(), static_cast<long long>(m->plan.nbytes),
              m->outgrown ? ", memory of its own" : "", m->verdict.reason.c_str());
    const size_t dense = static_cast<size_t>(m->rows_per_matrix * GGML_PAD(matrix.desc.cols, 8) * 2);
    const size_t panel = std::min(dense, device.max_panel_nbytes);
    for (size_t most = device.panel_nbytes; most < panel && !device.panel_nbytes.compare_exchange_weak(most, panel);) {
    }
    *out = std::move(m);
    return GGML_MACKO_STATUS_OK;
}

int upload_matrix(gpu & device, load_thread & thread, const sparse_tensor_info & matrix, const ggml_tensor * tensor,
                  const payload_source & read, std::unique_ptr<stored_matrix> * out) {
    if (!device.select()) {
        return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s cannot be used", device.name.c_str());
    }
    std::shared_ptr<void> & slot = thread.staging[&device]; // shared by the buffers of a device
    if (!slot) {
        std::unique_ptr<cuda_sparse_uploader> made;
        TRY(cuda_sparse_uploader::create(device.id, &made));
        slot = std::shared_ptr<cuda_sparse_uploader>(std::move(made));
    }
    return upload_matrix(device, *static_cast<cuda_sparse_uploader *>(slot.get()), matrix, tensor->data, read, out);
}

} // namespace macko::cuda
