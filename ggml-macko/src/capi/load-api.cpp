// The C API over loads and supported versions. Checks arguments and keeps exceptions inside; backend/load-session.h
// does the loading.
#include "abi/ggml-abi.h"
#include "backend/load-session.h"
#include "capi/struct-size.h"
#include "cpu/kernels/kernels.h"
#include "platform/environment.h"
#include "rpc/client.h"

#include <cstring>
#include <new>

using namespace macko;

// llama_model_params of any version. A function of llama.cpp that gets this struct by value reads only the bytes of its
// own version.
struct any_params {
    static constexpr int32_t MAX_NBYTES = 256;
    alignas(8) char bytes[MAX_NBYTES];
};

using progress_callback = bool (*)(float progress, void * user_data); // llama_progress_callback

// The functions of libllama with their real types.
struct llama_functions {
    llama_model * (*load_from_file)(const char * path, any_params params);
    llama_model * (*load_from_file_ptr)(FILE * stream, any_params params);
    void (*model_free)(llama_model * model);

    explicit llama_functions(const ggml_macko_llama & l)
        : load_from_file(reinterpret_cast<decltype(load_from_file)>(l.load_from_file)),
          load_from_file_ptr(reinterpret_cast<decltype(load_from_file_ptr)>(l.load_from_file_ptr)),
          model_free(reinterpret_cast<decltype(model_free)>(l.model_free)) {}
};

// A copy of the caller's parameters, with access to members at the caller's offsets.
class model_params {
public:
    model_params(const void * params, const ggml_macko_params_layout & layout) : layout_(layout) {
        memcpy(value_.bytes, params, static_cast<size_t>(layout.nbytes));
    }
    static bool is_valid(const ggml_macko_params_layout & l) {
        const auto is_inside = [&](int32_t at, size_t size) {
            return at >= -1 && at <= l.nbytes - static_cast<int32_t>(size);
        };
        const bool has_mode = l.load_mode >= 0 || (l.use_mmap >= 0 && l.use_direct_io >= 0 && l.use_mlock >= 0);
        return l.nbytes > 0 && l.nbytes <= any_params::MAX_NBYTES && l.progress_callback >= 0 &&
               l.progress_callback_user_data >= 0 && l.vocab_only >= 0 && l.check_tensors >= 0 && l.no_alloc >= 0 &&
               l.split_mode >= 0 && has_mode && is_inside(l.progress_callback, sizeof(void *)) &&
               is_inside(l.progress_callback_user_data, sizeof(void *)) && is_inside(l.vocab_only, 1) &&
               is_inside(l.check_tensors, 1) && is_inside(l.no_alloc, 1) && is_inside(l.split_mode, sizeof(int32_t)) &&
               is_inside(l.load_mode, sizeof(int32_t)) && is_inside(l.use_mmap, 1) && is_inside(l.use_direct_io, 1) &&
               is_inside(l.use_mlock, 1);
    }

    const any_params & value() const { return value_; }
    bool               vocab_only() const { return value_.bytes[layout_.vocab_only]; }
    bool               no_alloc() const { return value_.bytes[layout_.no_alloc]; }
    int32_t            split_mode() const { return get<int32_t>(layout_.split_mode); }
    progress_callback  callback() const { return get<progress_callback>(layout_.progress_callback); }
    void *             user_data() const { return get<void *>(layout_.progress_callback_user_data); }

    void set_progress(progress_callback callback, void * user_data) {
        set(layout_.progress_callback, callback);
        set(layout_.progress_callback_user_data, user_data);
    }
    // The stream has no file descriptor to map. llama.cpp would lock only the dense weights, and would check
    // placeholders instead of values. The plugin checks the values of every sparse tensor.
    void read_plainly() {
        if (layout_.load_mode >= 0) {
            set(layout_.load_mode, int32_t(0)); // LLAMA_LOAD_MODE_NONE
        } else {
            set(layout_.use_mmap, false);
            set(layout_.use_direct_io, false);
            set(layout_.use_mlock, false);
        }
        set(layout_.check_tensors, false);
    }

private:
    template <typename T> T get(int32_t at) const {
        T member;
        memcpy(&member, value_.bytes + at, sizeof(member));
        return member;
    }
    template <typename T> void set(int32_t at, T member) { memcpy(value_.bytes + at, &member, sizeof(member)); }

    ggml_macko_params_layout layout_;
    any_params               value_ = {};
};

// The caller's progress callback, which may load and run other models. No load is current while it runs.
struct caller_progress {
    progress_callback callback;
    void *            user_data;

    static bool call(float progress, void * self) {
        const load_session::none_current guard;
        const auto *                     p = static_cast<const caller_progress *>(self);
        return p->callback(progress, p->user_data);
    }
};

static constexpr int32_t SPLIT_MODE_TENSOR = 3; // LLAMA_SPLIT_MODE_TENSOR

// Passes a checked file to llama.cpp. The session is current only during this call, even if the caller fails.
static int load_sparse(const char * path, load_session & session, model_params params, int32_t flags,
                       const llama_functions & llama, llama_model ** model) {
    const char * kernels = nullptr; // read after opening: a wrong environment must not affect dense models
    TRY(check_running_ggml());
    if (params.split_mode() == SPLIT_MODE_TENSOR) { // llama.cpp would abort when it uses the model
        return fail(GGML_MACKO_STATUS_LOAD_FAILED,
                    "%s: split_mode tensor (-sm tensor) works with dense weights only: use layer (-sm layer)", path);
    }
    TRY(ggml_macko_check_environment() ?: cpu::select_kernels(&kernels));
    // The bytes in memory depend on the kernels, on some CPUs, and on the handling of negative zeros.
    const std::string cache_for =
        std::string("kernels ") + kernels + cpu::cpu_with_own_layouts() + ", flags " +
        std::to_string(flags & (GGML_MACKO_LOAD_COMPRESS | GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS));
    FILE * stream = nullptr;
    TRY(session.begin(flags & GGML_MACKO_LOAD_SPARSE_ONLY, flags & GGML_MACKO_LOAD_CACHE ? cache_for.c_str() : nullptr,
                      &stream));
    rpc_watch_devices();
    params.read_plainly();
    caller_progress progress = { params.callback(), params.user_data() };
    if (progress.callback) {
        params.set_progress(caller_progress::call, &progress);
    }
    llama_model * loaded = llama.load_from_file_ptr(stream, params.value());
    const int     status = session.end(loaded != nullptr, !params.vocab_only() && !params.no_alloc());
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
        TRY(check_size(llama));
        if (!path || !params || !llama->load_from_file || !llama->load_from_file_ptr || !llama->model_free || !model) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (flags & ~(GGML_MACKO_LOAD_COMPRESS | GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS | GGML_MACKO_LOAD_SPARSE_ONLY |
                      GGML_MACKO_LOAD_STRICT | GGML_MACKO_LOAD_CACHE | GGML_MACKO_LOAD_ACT_THRESHOLDS)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "unknown flags %d", flags);
        }
        const std::string error = environment::find_error(environment::LOAD);
        if (!error.empty()) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s", error.c_str());
        }
        flags |= static_cast<int32_t>(environment::words_of(environment::LOAD));
        if (!model_params::is_valid(llama->params)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "impossible layout of llama_model_params");
        }
        const model_params    copy(params, llama->params);
        const llama_functions functions(*llama);
        *model = nullptr;
        std::unique_ptr<load_session> session;
        const int                     status = load_session::open(path, flags, copy.no_alloc(), &session);
        if (status == GGML_MACKO_STATUS_NOT_SPARSE) {
            *model = functions.load_from_file(path, copy.value());
            return GGML_MACKO_STATUS_OK;
        }
        return status ? status : load_sparse(path, *session, copy, flags, functions, model);
    });
}

// nbytes, progress_callback and its user_data, vocab_only, check_tensors, no_alloc, split_mode, load_mode, use_mmap,
// use_direct_io, use_mlock
static constexpr ggml_macko_params_layout KNOWN_LAYOUTS[] = {
    { 72, 40, 48, 64, 68, 71, 20, -1, 65, 66, 67 }, // before load_mode
    { 72, 40, 48, 64, 65, 68, 20, 24, -1, -1, -1 }, // with load_mode
    { 80, 48, 56, 72, 73, 76, 20, 24, -1, -1, -1 }, // and with lazy_mode
};

// Like any_params, but with a deleted copy constructor, so that a function returns it through an address from the
// caller.
struct returned_params {
    alignas(8) char bytes[any_params::MAX_NBYTES];
    returned_params(const returned_params &) = delete;
};

// Size of the struct that a function returns. The function writes all members to the address that it gets. The last
// member is a bool, which never equals the fill byte.
static int32_t nbytes_written(void (*default_params)(void)) {
    constexpr char                filling = 0x5a;
    alignas(returned_params) char memory[sizeof(returned_params)];
    memset(memory, filling, sizeof(memory));
    asm volatile("" : : "r"(memory) : "memory"); // otherwise the compiler may drop the fill, which no code reads
    const auto * params = new (memory) returned_params(reinterpret_cast<returned_params (*)()>(default_params)());
    int32_t      n      = sizeof(memory);
    while (n > 0 && params->bytes[n - 1] == filling) {
        n--;
    }
    return (n + 7) / 8 * 8;
}

int ggml_macko_find_params_layout(void (*default_params)(void), int32_t has_load_mode,
                                  ggml_macko_params_layout * layout) {
    return c_boundary([&]() -> int {
        if (!default_params || !layout) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        const int32_t nbytes = nbytes_written(default_params);
        for (const ggml_macko_params_layout & known : KNOWN_LAYOUTS) {
            if (known.nbytes == nbytes && (known.load_mode >= 0) == (has_load_mode != 0)) {
                *layout = known;
                return GGML_MACKO_STATUS_OK;
            }
        }
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH,
                    "llama_model_params of this llama.cpp has %d bytes, a size that ggml-macko %s does not support",
                    nbytes, ggml_macko_version());
    });
}

int ggml_macko_check_running_ggml(void) { return check_running_ggml(); }

const char * ggml_macko_oldest_llama_cpp_python(void) { return GGML_MACKO_OLDEST_LLAMA_CPP_PYTHON; }

const char * ggml_macko_newest_llama_cpp_python(void) { return GGML_MACKO_NEWEST_LLAMA_CPP_PYTHON; }

const char * ggml_macko_oldest_ggml(void) { return OLDEST_GGML; }

const char * ggml_macko_newest_ggml(void) { return NEWEST_GGML; }

const char * ggml_macko_untested_ggml(void) { return untested_version(); }

const char * ggml_macko_running_ggml(void) { return ggml_version(); }
