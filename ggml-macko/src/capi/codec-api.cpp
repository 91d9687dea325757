// The C API over the codecs, and the version of the library. Checks arguments, calls one function of a codec, and keeps
// exceptions inside.
#include "capi/struct-size.h"
#include "codec/macko/encode.h"
#include "codec/matrix-error.h"
#include "codec/negative-zeros.h"
#include "codec/quantized/quantized.h"
#include "codec/registry.h"
#include "codec/team.h"

using namespace macko;

struct ggml_macko_encoded {
    const codec *                   format;
    std::unique_ptr<encoded_matrix> arrays;
};

static int null_pointer() { return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer"); }

// Finds the format of m and makes a view, which points into m's arrays.
static int open_checked(const ggml_macko_matrix * m, int n_threads, std::unique_ptr<codec_view> * view) {
    const codec * format = nullptr;
    TRY(check_size(m));
    TRY(find_format(m->format, &format));
    return open_matrix(*format, *m, threads_for(n_threads, n_elements(*m)), view);
}

int32_t ggml_macko_api_version(void) { return GGML_MACKO_API_VERSION; }

const char * ggml_macko_version(void) { return GGML_MACKO_VERSION; }

int32_t ggml_macko_codec_count(void) { return static_cast<int32_t>(all_codecs().size()); }

int ggml_macko_codec_at(int32_t i, ggml_macko_codec_info * info) {
    TRY(check_size(info));
    if (i < 0 || i >= ggml_macko_codec_count()) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no codec %d", i);
    }
    const codec & c = *all_codecs()[static_cast<size_t>(i)];
    *info           = sized<ggml_macko_codec_info>();
    info->name      = c.name();
    info->n_arrays  = static_cast<int32_t>(c.components().size());
    info->n_options = static_cast<int32_t>(c.options().size());
    std::copy(c.components().begin(), c.components().end(), info->suffixes);
    std::copy(c.options().begin(), c.options().end(), info->options);
    return GGML_MACKO_STATUS_OK;
}

int ggml_macko_encode(const char * format, const void * dense, int32_t type, int64_t rows, int64_t cols,
                      const ggml_macko_option * options, int32_t n_options, int n_threads, ggml_macko_encoded ** out) {
    return c_boundary([&]() -> int {
        const codec * c = nullptr;
        if (!dense || !out || (n_options > 0 && !options)) {
            return null_pointer();
        }
        TRY(find_format(format, &c));
        TRY(check_desc({ rows, cols, type, 4, 0 }));
        auto e = std::make_unique<ggml_macko_encoded>(ggml_macko_encoded{ c, nullptr });
        TRY(encode_matrix(*c, dense, { rows, cols, type, 4, 0 }, options, n_options,
                          threads_for(n_threads, rows * cols), &e->arrays));
        *out = e.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_encoded_matrix(const ggml_macko_encoded * e, ggml_macko_matrix * m) {
    if (!e) {
        return null_pointer();
    }
    TRY(check_size(m));
    *m             = e->arrays->matrix();
    m->struct_size = sizeof(*m);
    m->format      = e->format->name();
    return GGML_MACKO_STATUS_OK;
}

void ggml_macko_encoded_free(ggml_macko_encoded * e) { delete e; }

int ggml_macko_validate(const ggml_macko_matrix * m, int n_threads) {
    return c_boundary([&]() -> int {
        std::unique_ptr<codec_view> view;
        const int                   status = open_checked(m, n_threads, &view);
        return status ? status : view->check_rows(threads_for(n_threads, m->rows * m->cols));
    });
}

int ggml_macko_decode(const ggml_macko_matrix * m, void * dense, int n_threads) {
    return c_boundary([&]() -> int {
        std::unique_ptr<codec_view> view;
        if (!dense) {
            return null_pointer();
        }
        const int status = open_checked(m, n_threads, &view);
        return status ? status : view->decode(dense, threads_for(n_threads, m->rows * m->cols));
    });
}

int ggml_macko_standard_levels(int32_t value_type, int32_t table, int8_t * levels) {
    if (!levels || code_bits(value_type) == 0 || (table != 0 && table != 1)) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer, or no table %d of value type %d", table, value_type);
    }
    const std::vector<int8_t> found = standard_levels(code_bits(value_type), table);
    std::copy(found.begin(), found.end(), levels);
    return GGML_MACKO_STATUS_OK;
}

// Checks that a matrix of `rows` rows is a stack of n_weights matrices of equal size.
static int check_weights(const float * weights, int64_t n_weights, int64_t rows) {
    return weights && (n_weights < 1 || rows % n_weights)
               ? fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%lld rows cannot be split into %lld matrices of equal size",
                      static_cast<long long>(rows), static_cast<long long>(n_weights))
               : static_cast<int>(GGML_MACKO_STATUS_OK);
}

int ggml_macko_encode_quantized(const void * dense, int32_t type, int64_t rows, int64_t cols, int32_t value_type,
                                const float * weights, int64_t n_weights, const ggml_macko_matrix * lattice,
                                int n_threads, ggml_macko_encoded ** out) {
    return c_boundary([&]() -> int {
        if (!dense || !out) {
            return null_pointer();
        }
        if (lattice) {
            TRY(check_size(lattice));
        }
        TRY(check_desc({ rows, cols, type, 4, 0 }));
        TRY(check_weights(weights, n_weights, rows));
        auto e = std::make_unique<ggml_macko_encoded>(ggml_macko_encoded{ &quantized_codec(), nullptr });
        TRY(encode_quantized(dense, { rows, cols, type, 4, 0 }, value_type, weights, n_weights, lattice,
                             threads_for(n_threads, rows * cols), &e->arrays));
        *out = e.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_measure_error(const ggml_macko_matrix * m, const void * dense, const float * weights, int64_t n_weights,
                             int n_threads, ggml_macko_error * out) {
    return c_boundary([&]() -> int {
        std::unique_ptr<codec_view> view;
        if (!dense) {
            return null_pointer();
        }
        TRY(check_size(out));
        TRY(open_checked(m, n_threads, &view));
        TRY(check_weights(weights, n_weights, m->rows));
        ggml_macko_error error = {};
        const int        n     = threads_for(n_threads, m->rows * m->cols);
        if (const int status = measure_error(*view, dense, weights, n_weights, n, &error)) {
            return status;
        }
        *out             = error;
        out->struct_size = sizeof(*out);
        return GGML_MACKO_STATUS_OK;
    });
}

int64_t ggml_macko_n_padded(int64_t n_stored) { return n_padded(n_stored); }

int64_t ggml_macko_deltas_nbytes(int64_t n_stored, int32_t delta_bits) {
    return deltas_nbytes(n_padded(n_stored), delta_bits);
}

int ggml_macko_count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                           ggml_macko_count * count) {
    return c_boundary([&]() -> int {
        if (!dense || !count) {
            return null_pointer();
        }
        TRY(check_desc({ rows, cols, type, 4, 0 }));
        return count_dense(dense, type, rows, cols, threads_for(n_threads, rows * cols), count);
    });
}

int ggml_macko_drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads, int64_t * count) {
    return c_boundary([&]() -> int {
        if (!values || !count || n < 0 || !is_value_type(type)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer, %lld values, or type %d, which has no -0.0",
                        static_cast<long long>(n), type);
        }
        *count = drop_negative_zeros(values, type, n, threads_for(n_threads, n));
        return GGML_MACKO_STATUS_OK;
    });
}
