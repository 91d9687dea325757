// The C API over loads, and what the plugin was built for. Checks arguments and keeps exceptions inside; the load
// itself is host/load-session.h.
#include "cpu/kernels.h"
#include "host/load-session.h"
#include "llama.h"

#include <cstring>

using namespace macko;

// The functions of libllama in their own types.
struct llama_functions {
    decltype(&llama_model_load_from_file)     load_from_file;
    decltype(&llama_model_load_from_file_ptr) load_from_file_ptr;
    decltype(&llama_model_free)               model_free;

    explicit llama_functions(const ggml_macko_llama & l)
        : load_from_file(reinterpret_cast<decltype(load_from_file)>(l.load_from_file)),
          load_from_file_ptr(reinterpret_cast<decltype(load_from_file_ptr)>(l.load_from_file_ptr)),
          model_free(reinterpret_cast<decltype(model_free)>(l.model_free)) {}
};

// The caller's progress callback, which may load and run other models: no load is current while it runs.
struct caller_progress {
    llama_progress_callback callback;
    void *                  user_data;

    static bool call(float progress, void * self) {
        const load_session::none_current guard;
        const auto *                     p = static_cast<const caller_progress *>(self);
        return p->callback(progress, p->user_data);
    }
};

// Serves a vetted file to llama.cpp. The session is current only inside this call, whatever happens to the caller.
static int load_sparse(load_session & session, llama_model_params params, bool sparse_only,
                       const llama_functions & llama, llama_model ** model) {
    const char * kernels = nullptr; // after opening: a wrong GGML_MACKO_FORCE must not affect dense models
    if (const int status = cpu::select_kernels(&kernels)) {
        return status;
    }
    FILE * stream = nullptr;
    if (const int status = session.begin(sparse_only, &stream)) {
        return status;
    }
    params.load_mode = LLAMA_LOAD_MODE_NONE; // the stream has no file descriptor that could be mapped
    // llama.cpp would check placeholders instead of values; the plugin checks the values of every sparse tensor
    params.check_tensors     = false;
    caller_progress progress = { params.progress_callback, params.progress_callback_user_data };
    if (progress.callback) {
        params.progress_callback           = caller_progress::call;
        params.progress_callback_user_data = &progress;
    }
    llama_model * loaded = llama.load_from_file_ptr(stream, params);
    const int     status = session.end(loaded != nullptr, !params.vocab_only && !params.no_alloc);
    if (status && loaded) {
        llama.model_free(loaded);
        return status;
    }
    *model = loaded;
    return status;
}

int ggml_macko_load_model(const char * path, const llama_model_params * params, int32_t flags,
                          const ggml_macko_llama * llama, llama_model ** model) {
    return c_boundary([&]() -> int {
        if (!path || !params || !llama || !llama->load_from_file || !llama->load_from_file_ptr || !llama->model_free ||
            !model) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (flags & ~(GGML_MACKO_LOAD_COMPRESS | GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS | GGML_MACKO_LOAD_SPARSE_ONLY)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "unknown flags %d", flags);
        }
        const compression     how = !(flags & GGML_MACKO_LOAD_COMPRESS)           ? compression::off
                                    : flags & GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS ? compression::bit_exact
                                                                                  : compression::on;
        const llama_functions functions(*llama);
        *model = nullptr;
        std::unique_ptr<load_session> session;
        const int                     status = load_session::open(path, how, params->no_alloc, &session);
        if (status == GGML_MACKO_STATUS_NOT_SPARSE) {
            *model = functions.load_from_file(path, *params);
            return GGML_MACKO_STATUS_OK;
        }
        const bool sparse_only = flags & GGML_MACKO_LOAD_SPARSE_ONLY;
        return status ? status : load_sparse(*session, *params, sparse_only, functions, model);
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
