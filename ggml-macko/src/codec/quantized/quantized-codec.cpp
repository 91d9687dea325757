// The registry entry of the quantized format (FORMAT.md section 9).
#include "codec/macko/encode.h"
#include "codec/quantized/quantized.h"

namespace macko {

namespace {

macko_desc desc_of(const ggml_macko_matrix & m) { return { m.rows, m.cols, m.type, RECODED_BITS, m.nnz }; }

quantized_arrays arrays_of(const ggml_macko_matrix & m) {
    const auto at = [&](quantized_component c) { return static_cast<const uint8_t *>(m.arrays[c].data); };
    return { desc_of(m),
             code_bits(m.value_type),
             window_of(m),
             at(QUANTIZED_CODES),
             at(QUANTIZED_BITMAP),
             at(QUANTIZED_SCALES),
             static_cast<const uint16_t *>(m.arrays[QUANTIZED_FACTORS].data),
             static_cast<const int32_t *>(m.arrays[QUANTIZED_ROW_PTR].data),
             static_cast<const int8_t *>(m.arrays[QUANTIZED_LEVELS].data) };
}

class encoded_quantized : public encoded_matrix {
public:
    quantized_matrix quantized;

    ggml_macko_matrix matrix() const override {
        const quantized_matrix & q  = quantized;
        ggml_macko_matrix        m  = describe(q.dense, type_of_code_bits(q.bits), 0, 6);
        m.arrays[QUANTIZED_CODES]   = whole(q.codes, GGML_MACKO_TYPE_I8);
        m.arrays[QUANTIZED_BITMAP]  = whole(q.bitmap, GGML_MACKO_TYPE_I8);
        m.arrays[QUANTIZED_SCALES]  = whole(q.scales, GGML_MACKO_TYPE_I8);
        m.arrays[QUANTIZED_FACTORS] = whole(q.factors, GGML_MACKO_TYPE_BF16);
        m.arrays[QUANTIZED_ROW_PTR] = whole(q.row_ptr, GGML_MACKO_TYPE_I32);
        m.arrays[QUANTIZED_LEVELS]  = whole(q.levels, GGML_MACKO_TYPE_I8);
        return m;
    }
};

class quantized_format final : public codec {
public:
    quantized_format()
        : codec({ "quantized",
                  { ".codes", ".bitmap", ".wscales", ".factors", ".row_ptr", ".levels" },
                  { { "value_type", GGML_MACKO_TYPE_Q4 } },
                  false }) {}

    int check_desc(const ggml_macko_matrix & m) const override {
        TRY(macko::check_desc(desc_of(m)));
        return m.index_bits == 0
                   ? static_cast<int>(GGML_MACKO_STATUS_OK)
                   : fail(GGML_MACKO_STATUS_BAD_FORMAT, "index_bits %d of quantized is not 0", m.index_bits);
    }

    // b follows from the number of levels. If no b has so many, the type is that of 4 bits, which component_rules()
    // refuses then.
    int32_t value_type_of(const ggml_macko_matrix & m) const override {
        for (const int32_t bits : { 3, 5, 8 }) {
            if (array_length(m.arrays[QUANTIZED_LEVELS]) == 1 << bits) {
                return type_of_code_bits(bits);
            }
        }
        return GGML_MACKO_TYPE_Q4;
    }

    // The exact length of the codes follows from row_ptr.
    void component_rules(const ggml_macko_matrix & m, component_rule * rules) const override {
        const int32_t bits       = code_bits(m.value_type);
        const int64_t most       = std::min(m.nnz, (m.nnz + (CODE_GROUP - 1) * m.rows) / CODE_GROUP); // groups
        const int64_t window     = window_of(m) ? window_of(m) : MIN_WINDOW;
        rules[QUANTIZED_CODES]   = { GGML_MACKO_TYPE_I8, codes_nbytes(most, bits), 4 };
        rules[QUANTIZED_BITMAP]  = { GGML_MACKO_TYPE_I8, bitmap_nbytes(m.rows, m.cols), 0 };
        rules[QUANTIZED_SCALES]  = { GGML_MACKO_TYPE_I8, m.rows * windows_of_row(m.cols, window), 0 };
        rules[QUANTIZED_FACTORS] = { GGML_MACKO_TYPE_BF16, m.rows, 0 };
        rules[QUANTIZED_ROW_PTR] = { GGML_MACKO_TYPE_I32, m.rows + 1, 0 };
        rules[QUANTIZED_LEVELS]  = { GGML_MACKO_TYPE_I8, int64_t(1) << bits, 0 };
    }

    int check_nnz(const ggml_macko_matrix & m) const override {
        return check_room(m, m.arrays[QUANTIZED_CODES].nbytes * 8 / code_bits(m.value_type), "codes");
    }

    int64_t window(const ggml_macko_matrix & m) const override { return window_of(m); }
    int32_t recoded_bits(int32_t) const override { return RECODED_BITS; }

    int open(const ggml_macko_matrix & m, int n_threads, std::unique_ptr<codec_view> * view) const override {
        auto v = std::make_unique<quantized_view>();
        TRY(check_lengths(m, QUANTIZED_BITMAP));
        TRY(check_quantized(arrays_of(m), m.arrays[QUANTIZED_CODES].nbytes, n_threads, v.get()));
        *view = std::move(v);
        return GGML_MACKO_STATUS_OK;
    }

    // Checks the lengths of the components from `first` on.
    int check_lengths(const ggml_macko_matrix & m, size_t first) const {
        component_rule rules[GGML_MACKO_MAX_ARRAYS];
        component_rules(m, rules);
        for (size_t i = first; i <= QUANTIZED_LEVELS; i++) {
            if (array_length(m.arrays[i]) != rules[i].length) {
                return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong length (%lld vs %lld)",
                            components()[i] + 1, static_cast<long long>(array_length(m.arrays[i])),
                            static_cast<long long>(rules[i].length));
            }
        }
        return GGML_MACKO_STATUS_OK;
    }

    int encode(const void * dense, const macko_desc & shape, const int64_t * options, int n_threads,
               std::unique_ptr<encoded_matrix> * out) const override {
        return encode_quantized(dense, shape, int32_option(options[0]), nullptr, 0, nullptr, n_threads, out);
    }
};

const quantized_format & format() {
    static const quantized_format found;
    return found;
}

// Checks the parts of a lattice that are read.
int open_lattice(const ggml_macko_matrix & m, const macko_desc & shape, int32_t value_type, quantized_arrays * out) {
    TRY(check_header(format(), m));
    TRY(format().check_lengths(m, QUANTIZED_BITMAP));
    *out = arrays_of(m);
    if (m.rows != shape.rows || m.cols != shape.cols || m.value_type != value_type || !out->scales != !out->factors ||
        !out->levels) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "a lattice of another shape or type, or without levels");
    }
    return check_levels(*out);
}

} // namespace

int64_t window_of(const ggml_macko_matrix & m) {
    for (int64_t window = MIN_WINDOW; window <= MAX_WINDOW; window *= 2) {
        if (array_length(m.arrays[QUANTIZED_SCALES]) == m.rows * windows_of_row(m.cols, window)) {
            return window;
        }
    }
    return 0;
}

const codec & quantized_codec() { return format(); }

int encode_quantized(const void * dense, const macko_desc & shape, int32_t value_type, const float * weights,
                     int64_t n_weights, const ggml_macko_matrix * lattice, int n_threads,
                     std::unique_ptr<encoded_matrix> * out) {
    macko_desc desc = { shape.rows, shape.cols, shape.type, RECODED_BITS, 0 };
    TRY(check_desc(desc));
    if (code_bits(value_type) == 0) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "value type %d is not Q3 (%d), Q4 (%d), Q5 (%d) or Q8 (%d)",
                    value_type, GGML_MACKO_TYPE_Q3, GGML_MACKO_TYPE_Q4, GGML_MACKO_TYPE_Q5, GGML_MACKO_TYPE_Q8);
    }
    quantized_arrays given = {};
    if (lattice) {
        TRY(open_lattice(*lattice, shape, value_type, &given));
    }
    ggml_macko_count count = {};
    TRY(count_finite(dense, desc, n_threads, &count));
    desc.nnz    = count.nnz;
    auto result = std::make_unique<encoded_quantized>();
    TRY(quantize(dense, desc, code_bits(value_type), weights, n_weights, lattice ? &given : nullptr, n_threads,
                 &result->quantized));
    *out = std::move(result);
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
