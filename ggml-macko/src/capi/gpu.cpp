// The C API over what a GPU would do with a matrix. Checks arguments, calls one function, and keeps exceptions inside.
// Needs neither CUDA nor a GPU.
#include "codec/registry.h"
#include "codec/team.h"
#include "cuda/sparse/reserved.h"

using namespace macko;

int ggml_macko_gpu_nbytes(const ggml_macko_matrix * m, int64_t shared_nbytes, int64_t * nbytes) {
    return c_boundary([&]() -> int {
        if (!m || !m->format || !nbytes) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (shared_nbytes < 0 || shared_nbytes > INT32_MAX) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%lld bytes of shared memory",
                        static_cast<long long>(shared_nbytes));
        }
        const codec * format = find_codec(m->format);
        if (!format) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "format '%s' is not known to this build",
                        printable(m->format).text);
        }
        if (const int status = check_header(*format, *m)) {
            return status;
        }
        component_rule rules[GGML_MACKO_MAX_ARRAYS] = {};
        format->component_rules(*m, rules);
        if (array_length(m->arrays[0]) > rules[0].length) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has more elements than the matrix can have",
                        format->components()[0] + 1);
        }
        sparse_tensor_info info = {};
        info.format             = format;
        info.desc               = rows_desc(*format, *m);
        info.value_type         = m->value_type;
        info.bits               = m->bits;
        info.n_padded           = format->max_entries(*m);
        info.nbytes_values      = m->arrays[0].nbytes;
        *nbytes                 = cuda::cuda_reserved_nbytes(info, shared_nbytes);
        return GGML_MACKO_STATUS_OK;
    });
}
