#include "matrix-input.h"

namespace fuzz {

void owned_matrix::set(int i, const void * data, int64_t nbytes, int32_t type) {
    const auto n = static_cast<size_t>(nbytes);
    memory[i].reset(new uint8_t[n]);
    if (n > 0) {
        memcpy(memory[i].get(), data, n);
    }
    matrix.arrays[i] = { memory[i].get(), nbytes, type };
}

// Start of an input, in the order of the bytes.
struct description {
    uint8_t  format, type, rows, patches;
    uint16_t cols;
    uint8_t  options[6]; // indices of choices
};
static_assert(sizeof(description) == 12, "without padding");

static int64_t choice(uint8_t byte, std::initializer_list<int64_t> values) {
    return values.begin()[byte % values.size()];
}

// the options of an encoder; unknown formats get none
static std::vector<ggml_macko_option> options_of(const std::string & format, const description & d) {
    if (format == "macko") {
        return { { "index_bits", choice(d.options[0], { 0, 1, 2, 4, 8 }) } };
    }
    if (format == "packed") {
        return { { "value_type", choice(d.options[0], { -1, GGML_MACKO_TYPE_CODED }) },
                 { "index_bits", choice(d.options[1], { -1, 0, 2, 4, 8 }) },
                 { "mantissa_bits", d.type % 3 == 1 ? 7 : choice(d.options[2], { -1, 7, 10 }) },
                 { "exponent_bits", choice(d.options[3], { -1, 2, 3 }) } };
    }
    if (format == "quantized") {
        return { { "value_type", choice(d.options[0], { GGML_MACKO_TYPE_Q4, GGML_MACKO_TYPE_Q3, GGML_MACKO_TYPE_Q5,
                                                        GGML_MACKO_TYPE_Q8 }) } };
    }
    if (format == "ec-csr") {
        return { { "index_bits", choice(d.options[0], { 4, 8 }) },
                 { "max_granularity", choice(d.options[1], { 16, 1, 2, 4, 64 }) },
                 { "min_columns", choice(d.options[2], { 0, 128, 256 }) },
                 { "clip", d.options[3] & 1 },
                 { "seed", d.options[4] } };
    }
    return {};
}

bool encode_input(input in, int32_t plain_type, int64_t max_elements, encoded_input * out) {
    const auto d    = in.take<description>();
    auto       info = macko::sized<ggml_macko_codec_info>();
    FUZZ_CHECK(ggml_macko_codec_at(d.format % ggml_macko_codec_count(), &info) == 0, "%s", ggml_macko_last_error());
    static constexpr int32_t TYPES[] = { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 };

    struct patch {
        uint8_t  array, nbytes;
        uint16_t at;
        uint32_t value;
    } patches[8];
    const int n_patches = d.patches % 9;
    for (int i = 0; i < n_patches; i++) {
        patches[i] = { in.take<uint8_t>(), in.take<uint8_t>(), in.take<uint16_t>(), in.take<uint32_t>() };
    }
    out->type    = plain_type >= 0 ? plain_type : TYPES[d.type % 3];
    out->cols    = 1 + d.cols % 1024;
    out->rows    = std::min<int64_t>(1 + d.rows, max_elements / out->cols);
    out->patched = n_patches > 0;
    out->dense.assign(in.data, in.data + in.size);
    out->dense.resize(static_cast<size_t>(out->rows * out->cols * (out->type == GGML_MACKO_TYPE_F32 ? 4 : 2)));

    const auto           options = options_of(info.name, d);
    ggml_macko_encoded * e       = nullptr;
    const int status = ggml_macko_encode(info.name, out->dense.data(), out->type, out->rows, out->cols, options.data(),
                                         static_cast<int32_t>(options.size()), 1, &e);
    check_status(status);
    if (status != GGML_MACKO_STATUS_OK) {
        FUZZ_CHECK(status == GGML_MACKO_STATUS_NOT_FINITE, "refused: %s", ggml_macko_last_error());
        return false;
    }
    auto m = macko::sized<ggml_macko_matrix>();
    FUZZ_CHECK(ggml_macko_encoded_matrix(e, &m) == 0, "%s", ggml_macko_last_error());
    out->encoded.matrix = m;
    for (int i = 0; i < m.n_arrays; i++) {
        out->encoded.set(i, m.arrays[i].data, m.arrays[i].nbytes, m.arrays[i].type);
    }
    ggml_macko_encoded_free(e);
    for (int i = 0; i < n_patches; i++) {
        const int    a = patches[i].array % m.n_arrays;
        const size_t n = static_cast<size_t>(m.arrays[a].nbytes), width = size_t(1) << patches[i].nbytes % 3;
        if (n >= width) {
            memcpy(&out->encoded.memory[a][patches[i].at % (n - width + 1) / width * width], &patches[i].value, width);
        }
    }
    return true;
}

std::vector<bytes> encode_seeds() {
    std::vector<bytes> all;
    std::mt19937_64    random(11);
    for (uint8_t format = 0; format < ggml_macko_codec_count(); format++) {
        for (uint8_t type = 0; type < 3; type++) {
            for (uint8_t option = 0; option < SEED_OPTIONS; option++) {
                const description d = { format,
                                        type,
                                        static_cast<uint8_t>(3 + option * 5),
                                        static_cast<uint8_t>(option == 4 ? 1 : 0),
                                        static_cast<uint16_t>(option == 2 ? 299 : 40 + 8 * option),
                                        { option, static_cast<uint8_t>(option + type), 0, 1, 0, option } };
                bytes             b(reinterpret_cast<const uint8_t *>(&d), reinterpret_cast<const uint8_t *>(&d + 1));
                b.resize(b.size() + 8u * (option == 4));
                const uint32_t types[] = { builder::TYPE_F16, builder::TYPE_BF16, builder::TYPE_F32 };
                const bytes    dense = builder::random_data(random, types[type], 400, 1u + d.cols, 0.1 + 0.15 * option);
                b.insert(b.end(), dense.begin(), dense.end());
                all.push_back(b);
            }
        }
    }
    return all;
}

} // namespace fuzz
