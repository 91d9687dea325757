#include "codec/codec.h"
#include "codec/team.h"

#include <algorithm>
#include <cstring>

namespace macko {

// Bytes of an element; 0 if no component has the type.
static int64_t unit_nbytes(int32_t type) {
    switch (type) {
        case GGML_MACKO_TYPE_I8:  return 1;
        case GGML_MACKO_TYPE_I16: return 2;
        case GGML_MACKO_TYPE_I32: return 4;
        default:                  return is_value_type(type) ? value_nbytes(type) : 0;
    }
}

int64_t array_length(const ggml_macko_array & array) {
    const int64_t unit = unit_nbytes(array.type);
    return unit == 0 ? 0 : array.nbytes / unit;
}

void for_each_decoded_row(const macko_desc & desc, int n_threads, const std::function<void(int64_t, void *)> & decode,
                          const std::function<void(int64_t, const void *)> & f) {
    const auto                        nbytes = static_cast<size_t>(desc.cols * value_nbytes(desc.type));
    std::vector<std::vector<uint8_t>> buffers(static_cast<size_t>(n_threads), std::vector<uint8_t>(nbytes));
    parallel_parts(n_threads, desc.rows, 16, [&](int64_t begin, int64_t end, int thread) {
        uint8_t * row = buffers[static_cast<size_t>(thread)].data();
        for (int64_t r = begin; r < end; r++) {
            decode(r, row);
            f(r, row);
        }
    });
}

int codec_view::decode(void * dense, int n_threads) const {
    const int64_t nbytes = desc().cols * value_nbytes(desc().type);
    return for_each_row(n_threads, [&](int64_t row, const void * elements) {
        memcpy(static_cast<uint8_t *>(dense) + row * nbytes, elements, static_cast<size_t>(nbytes));
    });
}

int codec::check_room(const ggml_macko_matrix & m, int64_t n, const char * elements) {
    return m.nnz <= n ? static_cast<int>(GGML_MACKO_STATUS_OK)
                      : fail(GGML_MACKO_STATUS_BAD_NNZ, "nnz (%lld vs %lld %s)", static_cast<long long>(m.nnz),
                             static_cast<long long>(n), elements);
}

int64_t codec::max_entries(const ggml_macko_matrix & m) const { return n_padded(max_recoded(rows_desc(*this, m))); }

int encode_matrix(const codec & format, const void * dense, const macko_desc & desc, const ggml_macko_option * options,
                  int n_options, int n_threads, std::unique_ptr<encoded_matrix> * out) {
    const std::vector<ggml_macko_option> & known = format.options();
    std::vector<int64_t>                   values;
    for (const ggml_macko_option & o : known) {
        values.push_back(o.value);
    }
    for (int i = 0; i < n_options; i++) {
        const auto it = std::find_if(known.begin(), known.end(), [&](const ggml_macko_option & o) {
            return options[i].name && !strcmp(o.name, options[i].name);
        });
        if (it == known.end()) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "format '%s' has no option '%s'", format.name(),
                        options[i].name ? printable(options[i].name).text : "(null)");
        }
        values[static_cast<size_t>(it - known.begin())] = options[i].value;
    }
    return format.encode(dense, desc, values.data(), n_threads, out);
}

int check_header(const codec & format, const ggml_macko_matrix & m) {
    const size_t n = format.components().size();
    if (m.n_arrays != static_cast<int32_t>(n)) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%d arrays, but format '%s' has %zu", m.n_arrays, format.name(), n);
    }
    TRY(format.check_desc(m));
    component_rule rules[GGML_MACKO_MAX_ARRAYS] = {};
    format.component_rules(m, rules);
    for (size_t i = 0; i < n; i++) {
        const ggml_macko_array & a    = m.arrays[i];
        const char *             name = format.components()[i] + 1; // without its dot
        if (a.nbytes < 0) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s: negative size", name);
        }
        if (a.type != rules[i].type) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong type (%d vs %d)", name, a.type,
                        rules[i].type);
        }
        if (a.nbytes % unit_nbytes(a.type) != 0) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s: %lld bytes are not whole elements of type %d", name,
                        static_cast<long long>(a.nbytes), a.type);
        }
    }
    if (m.value_type != format.value_type_of(m)) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "value type %d does not fit type %d in format '%s'", m.value_type,
                    m.type, format.name());
    }
    return GGML_MACKO_STATUS_OK;
}

int open_matrix(const codec & format, const ggml_macko_matrix & m, int n_threads, std::unique_ptr<codec_view> * view) {
    TRY(check_header(format, m));
    for (size_t i = 0; i < format.components().size(); i++) {
        if (!m.arrays[i].data) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s: null pointer", format.components()[i] + 1);
        }
    }
    return format.open(m, n_threads, view);
}

} // namespace macko
