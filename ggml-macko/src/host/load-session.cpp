#include "host/load-session.h"
#include "cpu/kernels.h"
#include "host/log.h"

#include <cstdarg>
#include <cstring>
#include <omp.h>

struct ggml_macko_load : macko::load_session {};

namespace macko {

static thread_local load_session * current_load = nullptr;

load_session * load_session::current() { return current_load; }

const sparse_tensor_info * load_session::find(const ggml_tensor * tensor) const {
    const auto it = by_name_.find(tensor->name);
    if (it == by_name_.end()) {
        return nullptr;
    }
    const sparse_tensor_info & m = *it->second;
    const bool same = tensor->type == m.desc.type && !tensor->view_src && !memcmp(tensor->ne, m.ne, sizeof(m.ne));
    return same ? &m : nullptr;
}

int load_session::receive(const ggml_tensor * tensor, const void * data, size_t size, payload_consumer & consumer) {
    const int status = c_boundary([&]() -> int {
        const sparse_tensor_info * matrix = find(tensor);
        const int64_t              index  = dense_->match_placeholder(data, size);
        if (!matrix || index != matrix - file_->sparse.data()) {
            return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%s: data did not come from this load's file",
                        printable(tensor->name).text);
        }
        if (const int bad = read_payload(*file_, file_->header, *matrix, omp_get_max_threads(), consumer)) {
            return bad;
        }
        loaded_[static_cast<size_t>(index)] = true;
        return GGML_MACKO_STATUS_OK;
    });
    if (status) {
        keep_error(status);
    }
    return status;
}

void load_session::keep_error(int status) {
    if (!status_) {
        status_ = status;
        error_  = ggml_macko_last_error();
    }
}

void load_session::keep_out_of_memory(const char * format, ...) {
    char    text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    log_error("%s\n", text);
    if (current_load) {
        current_load->keep_error(fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s", text));
    }
}

} // namespace macko

using namespace macko;

static void log_compressed(const model_file & file) {
    int64_t dense = 0, sparse = 0;
    for (const sparse_tensor_info & m : file.sparse) {
        dense += m.nbytes_dense;
        sparse += m.n_padded * value_nbytes(m.desc.type) + deltas_nbytes(m.n_padded, m.desc.delta_bits) +
                  4 * (m.desc.rows + 1);
    }
    log_info("ggml-macko: %s: compressing %zu of %zu tensors while loading: %.1f MiB -> %.1f MiB\n", file.path.c_str(),
             file.sparse.size(), file.header.tensors.size(), static_cast<double>(dense) / 1048576,
             static_cast<double>(sparse) / 1048576);
}

int ggml_macko_load_begin(const char * path, int32_t flags, ggml_macko_load ** out, FILE ** stream) {
    return c_boundary([&]() -> int {
        if (!path || !out || !stream || flags & ~(GGML_MACKO_LOAD_COMPRESS | GGML_MACKO_LOAD_NO_ALLOC)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer, or an unknown flag");
        }
        const bool compress = flags & GGML_MACKO_LOAD_COMPRESS;
        if (load_session::current()) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s: another load is running on this thread", path);
        }
        auto l       = std::make_unique<ggml_macko_load>();
        l->no_alloc_ = flags & GGML_MACKO_LOAD_NO_ALLOC;
        if (const int status = model_file_open_sparse(path, compress, &l->file_)) {
            if (compress && status == GGML_MACKO_STATUS_NOT_SPARSE && !l->no_alloc_) {
                log_warn("ggml-macko: not compressed: %s\n", ggml_macko_last_error());
            }
            return status;
        }
        if (l->file_->sparse[0].format == &FORMAT_DENSE && !l->no_alloc_) {
            log_compressed(*l->file_);
        }
        const char * kernels = nullptr; // only now: a wrong GGML_MACKO_FORCE is no concern of dense models
        if (const int status = cpu::cpu_kernels_select(&kernels)) {
            return status;
        }
        if (const int status = dense_stream::create(*l->file_, &l->dense_)) {
            return status;
        }
        l->loaded_.assign(l->file_->sparse.size(), false);
        for (const sparse_tensor_info & m : l->file_->sparse) {
            l->by_name_.emplace(m.name, &m);
        }
        l->stream_ = l->dense_->open_stream();
        if (!l->stream_) {
            prefix_error(path);
            return GGML_MACKO_STATUS_IO;
        }
        *stream             = l->stream_;
        macko::current_load = l.get();
        *out                = l.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_load_end(ggml_macko_load * l, bool model_loaded, bool with_weights) {
    return c_boundary([&]() -> int {
        if (!l || load_session::current() != l) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "load_end on a load that is not running on this thread");
        }
        const std::unique_ptr<ggml_macko_load> owner(l);
        macko::current_load = nullptr;
        fclose(l->stream_); // before exit handlers could run its hooks
        const std::string & path = l->file_->path;
        if (l->status_) {
            return fail(l->status_, "%s: %s", path.c_str(), l->error_.c_str());
        }
        if (const int status = l->dense_->status()) {
            return status;
        }
        if (const int status = l->file_->check_unchanged()) {
            return status;
        }
        if (!model_loaded) {
            return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%s: llama.cpp could not load the model; its log says why",
                        path.c_str());
        }
        for (size_t i = 0; with_weights && i < l->loaded_.size(); i++) {
            // llama.cpp put it where we do not compute, or did not ask for it: weights would be wrong
            if (!l->loaded_[i]) {
                return fail(GGML_MACKO_STATUS_LOAD_FAILED,
                            "%s: %s: sparse, but llama.cpp did not place it on a device of this plugin "
                            "(beside another GPU backend choose ours: -dev MACKO0, or -ngl 0)",
                            path.c_str(), l->file_->sparse[i].name.c_str());
            }
        }
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_check_ggml(const char * ggml_version) {
    if (!ggml_version || strcmp(ggml_version, GGML_MACKO_GGML_VERSION) != 0) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH,
                    "ggml-macko %s was built for ggml %s (llama-cpp-python %s), but ggml %s is running",
                    ggml_macko_version(), GGML_MACKO_GGML_VERSION, GGML_MACKO_LLAMA_CPP_PYTHON_VERSION,
                    ggml_version ? printable(ggml_version).text : "(none)");
    }
    return GGML_MACKO_STATUS_OK;
}

const char * ggml_macko_built_for_llama_cpp_python(void) { return GGML_MACKO_LLAMA_CPP_PYTHON_VERSION; }

const char * ggml_macko_built_for_ggml(void) { return GGML_MACKO_GGML_VERSION; }
