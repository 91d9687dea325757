// The C API over GGUF files. Checks arguments, calls one function, and keeps exceptions inside.
#include "capi/struct-size.h"
#include "codec/team.h"
#include "load/compress.h"
#include "load/payload.h"

using namespace macko;

int ggml_macko_weight_use_of(const char * name, int32_t n_dims) {
    return name ? weight_use(name, n_dims) : GGML_MACKO_WEIGHT_OTHER;
}

struct ggml_macko_file {
    std::unique_ptr<model_file> model;
};

int ggml_macko_file_open(const char * path, bool require_model, ggml_macko_file ** out) {
    return c_boundary([&]() -> int {
        if (!path || !out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        auto file = std::make_unique<ggml_macko_file>();
        TRY(model_file_open(path, require_model, &file->model));
        *out = file.release();
        return GGML_MACKO_STATUS_OK;
    });
}

void ggml_macko_file_close(ggml_macko_file * file) { delete file; }

bool ggml_macko_file_is_sparse(const ggml_macko_file * file) { return file->model->is_sparse; }

int64_t ggml_macko_file_size(const ggml_macko_file * file) { return file->model->header.file_size; }

int64_t ggml_macko_file_alignment(const ggml_macko_file * file) { return file->model->header.alignment; }

int64_t ggml_macko_file_n_tensors(const ggml_macko_file * file) {
    return static_cast<int64_t>(file->model->header.tensors.size());
}

int64_t ggml_macko_file_n_sparse(const ggml_macko_file * file) {
    return static_cast<int64_t>(file->model->sparse.size());
}

int ggml_macko_file_tensor(const ggml_macko_file * file, int64_t i, ggml_macko_tensor_info * info) {
    TRY(check_size(info));
    if (!file || i < 0 || i >= ggml_macko_file_n_tensors(file)) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no tensor %lld", static_cast<long long>(i));
    }
    const gguf_tensor & t = file->model->header.tensors[static_cast<size_t>(i)];
    *info                 = { sizeof(*info),
                              t.name.c_str(),
                              t.type,
                              t.n_dims,
                              { t.ne[0], t.ne[1], t.ne[2], t.ne[3] },
                              t.offset,
                              t.nbytes,
                              file->model->tensor_sparse_index[static_cast<size_t>(i)] };
    return GGML_MACKO_STATUS_OK;
}

int ggml_macko_file_sparse(const ggml_macko_file * file, int64_t i, ggml_macko_sparse_info * info) {
    TRY(check_size(info));
    if (!file || i < 0 || i >= ggml_macko_file_n_sparse(file)) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no sparse matrix %lld", static_cast<long long>(i));
    }
    const sparse_tensor_info & s      = file->model->sparse[static_cast<size_t>(i)];
    int64_t                    nbytes = 0;
    for (size_t c = 0; c < s.n_tensors; c++) {
        nbytes += file->model->header.tensors[s.first + c].nbytes;
    }
    *info = { sizeof(*info),
              s.name.c_str(),
              s.format->name(),
              s.desc.type,
              s.value_type,
              s.index_bits,
              s.n_dims,
              { s.ne[0], s.ne[1], s.ne[2], s.ne[3] },
              s.desc.nnz,
              nbytes,
              s.nbytes_dense,
              static_cast<int64_t>(s.first),
              static_cast<int64_t>(s.n_tensors) };
    return GGML_MACKO_STATUS_OK;
}

int ggml_macko_file_check_payload(const ggml_macko_file * file, int64_t i, int n_threads) {
    struct discard : payload_consumer {
        int  consume(const macko_view &, int64_t) override { return GGML_MACKO_STATUS_OK; }
        bool takes(const codec &) const override { return true; }
    };
    return c_boundary([&]() -> int {
        if (!file || i < 0 || i >= ggml_macko_file_n_sparse(file)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no sparse matrix %lld", static_cast<long long>(i));
        }
        discard                    consumer;
        const sparse_tensor_info & m = file->model->sparse[static_cast<size_t>(i)];
        TRY(read_payload(*file->model, m, threads_for(n_threads, m.desc.rows * m.desc.cols), consumer));
        return file->model->check_unchanged();
    });
}
