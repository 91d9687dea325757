// The registry entry of the packed format (FORMAT.md sections 7 and 8).
#include "codec/macko/encode.h"
#include "codec/packed/packed.h"

namespace macko {

namespace {

packed_desc desc_of(const ggml_macko_matrix & m) {
    return { { m.rows, m.cols, m.type, RECODED_BITS, m.nnz }, m.value_type, m.index_bits };
}

class encoded_packed : public encoded_matrix {
public:
    packed_matrix packed;

    ggml_macko_matrix matrix() const override {
        ggml_macko_matrix m        = describe(packed.desc.dense, packed.desc.value_type, packed.desc.index_bits, 3);
        component_rule    rules[3] = {};
        packed_codec().component_rules(m, rules);
        m.arrays[PACKED_VALUES]  = whole(packed.values, rules[PACKED_VALUES].type);
        m.arrays[PACKED_INDEX]   = whole(packed.index, rules[PACKED_INDEX].type);
        m.arrays[PACKED_ROW_PTR] = whole(packed.row_ptr, rules[PACKED_ROW_PTR].type);
        return m;
    }
};

class packed_format final : public codec {
public:
    packed_format()
        : codec({ "packed",
                  { ".values", ".index", ".row_ptr" },
                  { { "value_type", DENSE_TYPE },
                    { "index_bits", SMALLEST },
                    { "mantissa_bits", SMALLEST },
                    { "exponent_bits", SMALLEST } },
                  false }) {}

    int check_desc(const ggml_macko_matrix & m) const override { return check_packed_desc(desc_of(m)); }

    // ggml has no type for coded values: a file stores them as words
    int32_t value_type_of(const ggml_macko_matrix & m) const override {
        return m.arrays[PACKED_VALUES].type == GGML_MACKO_TYPE_I32 ? GGML_MACKO_TYPE_CODED : m.type;
    }

    // the exact lengths of gap codes and coded values follow from their data
    void component_rules(const ggml_macko_matrix & m, component_rule * rules) const override {
        rules[PACKED_VALUES]  = m.value_type == GGML_MACKO_TYPE_CODED
                                    ? component_rule{ GGML_MACKO_TYPE_I32, max_coded_words(m.nnz, m.type), 1 }
                                    : component_rule{ m.value_type, packed_n_values(m.nnz), 0 };
        rules[PACKED_INDEX]   = { GGML_MACKO_TYPE_I8, max_index_nbytes(desc_of(m)),
                                m.index_bits == INDEX_BITMAP ? 0 : 4 };
        rules[PACKED_ROW_PTR] = { GGML_MACKO_TYPE_I32, m.rows + 1, 0 };
    }

    int32_t recoded_bits(int32_t) const override { return RECODED_BITS; }

    int open(const ggml_macko_matrix & m, int n_threads, std::unique_ptr<codec_view> * view) const override {
        const packed_arrays arrays = { desc_of(m),
                                       m.arrays[PACKED_VALUES].data,
                                       array_length(m.arrays[PACKED_VALUES]),
                                       static_cast<const uint8_t *>(m.arrays[PACKED_INDEX].data),
                                       m.arrays[PACKED_INDEX].nbytes,
                                       static_cast<const int32_t *>(m.arrays[PACKED_ROW_PTR].data),
                                       array_length(m.arrays[PACKED_ROW_PTR]) };
        auto                v      = std::make_unique<packed_view>();
        TRY(check_packed(arrays, n_threads, v.get()));
        *view = std::move(v);
        return GGML_MACKO_STATUS_OK;
    }

    int encode(const void * dense, const macko_desc & shape, const int64_t * options, int n_threads,
               std::unique_ptr<encoded_matrix> * out) const override {
        const int32_t     value_type = options[0] == DENSE_TYPE ? shape.type : int32_option(options[0]);
        const packed_desc desc       = { { shape.rows, shape.cols, shape.type, RECODED_BITS, 0 },
                                         value_type,
                                         int32_option(options[1]) };
        TRY(check_packed_desc({ desc.dense, value_type, options[1] == SMALLEST ? INDEX_BITMAP : desc.index_bits }));
        ggml_macko_count count = {};
        TRY(count_finite(dense, shape, n_threads, &count));
        auto result = std::make_unique<encoded_packed>();
        TRY(pack(dense, desc, n_threads, &result->packed, int32_option(options[2]), int32_option(options[3])));
        *out = std::move(result);
        return GGML_MACKO_STATUS_OK;
    }

private:
    static constexpr int64_t DENSE_TYPE = -1; // option value_type
    static constexpr int64_t SMALLEST   = -1; // options with a number of bits: the width with the fewest bytes
};

} // namespace

const codec & packed_codec() {
    static const packed_format format;
    return format;
}

} // namespace macko
