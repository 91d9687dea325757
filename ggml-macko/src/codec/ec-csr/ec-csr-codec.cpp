// The registry entry of EC-CSR (FORMAT.md section 6).
#include "codec/ec-csr/ec-csr.h"
#include "codec/ec-csr/extract.h"
#include "codec/macko/encode.h"

namespace macko {

namespace {

// order of the encoder's options
enum option : size_t { DELTA_BITS, MAX_GRANULARITY, MIN_COLUMNS, CLIP, SEED };

constexpr int64_t NUMBERS_PER_SET = 4; // of X.sets

class encoded_ec_csr : public encoded_matrix {
public:
    ec_csr_matrix blocks;

    ggml_macko_matrix matrix() const override {
        ggml_macko_matrix m = describe(blocks.desc, blocks.desc.type, blocks.desc.delta_bits, 6);
        component_rule    rules[6];
        ec_csr_codec().component_rules(m, rules);
        const auto set = [&](ec_csr_component c, const auto & v) { m.arrays[c] = whole(v, rules[c].type); };
        set(EC_VALUES, blocks.values);
        set(EC_DELTAS, blocks.deltas);
        set(EC_BASES, blocks.bases);
        set(EC_BLK_PTR, blocks.blk_ptr);
        set(EC_ROWS, blocks.rows);
        set(EC_SETS, blocks.sets);
        return m;
    }
};

class ec_csr_format final : public codec {
public:
    ec_csr_format()
        : codec(
              { "ec-csr",
                { ".values", ".deltas", ".bases", ".blk_ptr", ".rows", ".sets" },
                { { "index_bits", 8 }, { "max_granularity", 16 }, { "min_columns", 0 }, { "clip", 1 }, { "seed", 0 } },
                false }) {}

    int check_desc(const ggml_macko_matrix & m) const override { return check_ec_csr_desc(rows_desc(*this, m)); }

    // lengths that do not depend on the sets, because the sets are payload
    void component_rules(const ggml_macko_matrix & m, component_rule * rules) const override {
        const int32_t base_type = ec_base_nbytes(m.cols) == 2 ? GGML_MACKO_TYPE_I16 : GGML_MACKO_TYPE_I32;
        rules[EC_VALUES]        = { m.type, MAX_STORED, 1 };
        rules[EC_DELTAS]        = { GGML_MACKO_TYPE_I8, MAX_STORED, 1 };
        rules[EC_BASES]         = { base_type, MAX_STORED, 1 };
        rules[EC_BLK_PTR]       = { GGML_MACKO_TYPE_I32, MAX_STORED, 1 };
        rules[EC_ROWS]          = { GGML_MACKO_TYPE_I32, MAX_STORED, 1 };
        rules[EC_SETS]          = { GGML_MACKO_TYPE_I32, NUMBERS_PER_SET * EC_MAX_SETS, NUMBERS_PER_SET };
    }

    int check_nnz(const ggml_macko_matrix & m) const override {
        return check_room(m, array_length(m.arrays[EC_VALUES]), "values");
    }

    int open(const ggml_macko_matrix & m, int, std::unique_ptr<codec_view> * view) const override {
        const auto n   = [&](ec_csr_component c) { return array_length(m.arrays[c]); };
        const auto i32 = [&](ec_csr_component c) { return static_cast<const int32_t *>(m.arrays[c].data); };
        if (n(EC_SETS) % NUMBERS_PER_SET) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "sets has %lld elements, not a multiple of %lld",
                        static_cast<long long>(n(EC_SETS)), static_cast<long long>(NUMBERS_PER_SET));
        }
        const ec_csr_arrays arrays = { rows_desc(*this, m),
                                       static_cast<const ec_csr_set *>(m.arrays[EC_SETS].data),
                                       n(EC_SETS) / NUMBERS_PER_SET,
                                       i32(EC_ROWS),
                                       n(EC_ROWS),
                                       i32(EC_BLK_PTR),
                                       n(EC_BLK_PTR),
                                       m.arrays[EC_BASES].data,
                                       n(EC_BASES),
                                       static_cast<const uint8_t *>(m.arrays[EC_DELTAS].data),
                                       n(EC_DELTAS),
                                       m.arrays[EC_VALUES].data,
                                       n(EC_VALUES) };
        auto                v      = std::make_unique<ec_csr_view>();
        TRY(check_ec_csr(arrays, v.get()));
        *view = std::move(v);
        return GGML_MACKO_STATUS_OK;
    }

    int encode(const void * dense, const macko_desc & shape, const int64_t * options, int n_threads,
               std::unique_ptr<encoded_matrix> * out) const override {
        macko_desc desc = { shape.rows, shape.cols, shape.type, int32_option(options[DELTA_BITS]), 0 };
        TRY(check_ec_csr_desc(desc));
        const bool            pays    = options[MIN_COLUMNS] == 0;
        const extract_options extract = { int32_option(options[MAX_GRANULARITY]),
                                          pays ? paying_columns(desc.delta_bits) : int32_option(options[MIN_COLUMNS]),
                                          options[CLIP] != 0, static_cast<uint64_t>(options[SEED]) };
        ggml_macko_count      count   = {};
        TRY(count_finite(dense, desc, n_threads, &count));
        desc.nnz = count.nnz;
        TRY(check_ec_csr_desc(desc)); // check again, with nnz
        auto result = std::make_unique<encoded_ec_csr>();
        TRY(encode_blocks(desc, dense, extract, n_threads, &result->blocks));
        // Fillers that blocks leave in their rows may cost more than the blocks save, so compare the whole matrix with
        // and without extraction.
        if (pays && result->blocks.sets[0].granularity > 1) {
            ec_csr_matrix plain;
            TRY(encode_blocks(desc, dense, { 1, extract.min_columns, extract.clip, 0 }, n_threads, &plain));
            if (plain.nbytes() < result->blocks.nbytes()) {
                result->blocks = std::move(plain);
            }
        }
        *out = std::move(result);
        return GGML_MACKO_STATUS_OK;
    }

private:
    // Columns of the smallest extracted block that needs fewer bytes than its elements in one-row blocks: it saves half
    // of the deltas and adds its bases.
    static int32_t paying_columns(int32_t delta_bits) { return delta_bits == 8 ? 128 : 256; }

    static int encode_blocks(const macko_desc & desc, const void * dense, const extract_options & options,
                             int n_threads, ec_csr_matrix * out) {
        ec_csr_blocks blocks;
        const int     status = extract_blocks(desc, dense, options, n_threads, &blocks);
        return status ? status : assemble(desc, dense, blocks, n_threads, out);
    }
};

} // namespace

const codec & ec_csr_codec() {
    static const ec_csr_format format;
    return format;
}

} // namespace macko
