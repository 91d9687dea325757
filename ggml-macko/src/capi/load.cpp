// The C API over loads, and what the plugin was built for. Checks arguments and keeps exceptions inside; the load
// itself is host/load-session.h.
#include "cpu/kernels.h"
#include "host/load-session.h"

#include <cstring>

using namespace macko;

struct ggml_macko_load {
    std::unique_ptr<load_session> session;
};

int ggml_macko_load_begin(const char * path, int32_t flags, ggml_macko_load ** out, FILE ** stream) {
    return c_boundary([&]() -> int {
        constexpr int32_t known =
            GGML_MACKO_LOAD_COMPRESS | GGML_MACKO_LOAD_NO_ALLOC | GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS;
        if (!path || !out || !stream || flags & ~known) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer, or an unknown flag");
        }
        if (load_session::current()) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s: another load is running on this thread", path);
        }
        auto              l   = std::make_unique<ggml_macko_load>();
        const compression how = !(flags & GGML_MACKO_LOAD_COMPRESS)           ? compression::off
                                : flags & GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS ? compression::bit_exact
                                                                              : compression::on;
        if (const int status = load_session::open(path, how, flags & GGML_MACKO_LOAD_NO_ALLOC, &l->session)) {
            return status;
        }
        const char * kernels = nullptr; // after opening: a wrong GGML_MACKO_FORCE must not affect dense models
        if (const int status = cpu::select_kernels(&kernels)) {
            return status;
        }
        if (const int status = l->session->begin(stream)) {
            return status;
        }
        *out = l.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_load_end(ggml_macko_load * l, bool model_loaded, bool with_weights) {
    return c_boundary([&]() -> int {
        if (!l || load_session::current() != l->session.get()) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "load_end on a load that is not running on this thread");
        }
        const std::unique_ptr<ggml_macko_load> owner(l);
        return owner->session->end(model_loaded, with_weights);
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
