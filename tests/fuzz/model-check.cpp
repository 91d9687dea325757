#include "model-check.h"
#include "codec/ec-csr/ec-csr.h"
#include "codec/packed/packed.h"
#include "codec/quantized/quantized.h"
#include "codec/registry.h"
#include "gguf/model-keys.h"
#include "load/dense-stream.h"
#include "load/payload.h"

#include <memory>

namespace fuzz {

using macko::sparse_tensor_info;

int vet_header(const macko::byte_source & source, macko::model_file * file) {
    if (const int status = macko::read_gguf_header(source, &file->header)) {
        return status;
    }
    if (const int status = macko::check_sparse_tensors(file)) {
        return status;
    }
    if (const int status = macko::check_model_keys(file->header, false)) {
        return status;
    }
    file->has_rules = macko::has_model_rules(file->header, &file->arch);
    return macko::check_model_tensors(macko::dense_tensors(*file), file->has_rules);
}

void check_dense_header(const macko::model_file & file) {
    std::unique_ptr<macko::dense_stream> stream;
    if (!file.is_sparse || macko::dense_stream::create(file, &stream) != GGML_MACKO_STATUS_OK) {
        return;
    }
    const std::vector<macko::gguf_tensor> expected = macko::dense_tensors(file);
    // The input has no file descriptor: everything after the header reads as zeros.
    struct header_source : macko::byte_source {
        const macko::dense_stream & stream;
        int64_t                     header_size;
        header_source(const macko::dense_stream & s, int64_t n) : stream(s), header_size(n) {}
        int64_t size() const override { return stream.size(); }
        int     read(int64_t offset, void * dst, int64_t n) const override {
            const int64_t have = std::clamp<int64_t>(header_size - offset, 0, n);
            memset(static_cast<uint8_t *>(dst) + have, 0, static_cast<size_t>(n - have));
            return have > 0 ? stream.read_at(offset, dst, have) : static_cast<int>(GGML_MACKO_STATUS_OK);
        }
    };
    int64_t data_size = 0;
    for (const macko::gguf_tensor & t : expected) {
        data_size = (data_size + t.nbytes + file.header.alignment - 1) & ~(file.header.alignment - 1);
    }
    macko::gguf_header dense;
    FUZZ_CHECK(macko::read_gguf_header(header_source(*stream, stream->size() - data_size), &dense) ==
                   GGML_MACKO_STATUS_OK,
               "the dense header: %s", ggml_macko_last_error());
    FUZZ_CHECK(dense.tensors.size() == expected.size(), "%zu tensors vs %zu", dense.tensors.size(), expected.size());
    for (size_t i = 0; i < expected.size(); i++) {
        FUZZ_CHECK(dense.tensors[i].name == expected[i].name && dense.tensors[i].type == expected[i].type &&
                       std::equal(expected[i].ne, expected[i].ne + 4, dense.tensors[i].ne),
                   "tensor %zu of the dense header", i);
    }
    for (const macko::gguf_key & key : dense.keys) {
        FUZZ_CHECK(key.name.compare(0, 13, "macko.tensor.") != 0 && key.name != "macko.version", "key %s",
                   key.name.c_str());
    }
}

// ---- payload ----

namespace {

struct discard : macko::payload_consumer {
    int consume(const macko::macko_view &, int64_t) override { return GGML_MACKO_STATUS_OK; }
};

struct decoder : macko::payload_consumer {
    bytes   dense;
    int64_t row_nbytes;
    explicit decoder(const sparse_tensor_info & m)
        : dense(static_cast<size_t>(m.nbytes_dense), 0xee), row_nbytes(m.nbytes_dense / m.desc.rows) {}
    int consume(const macko::macko_view & view, int64_t) override {
        macko::decode(view, dense.data() + view.rows().row_begin * row_nbytes);
        return GGML_MACKO_STATUS_OK;
    }
};

using components = std::vector<bytes>;

// Decodes the index of a packed matrix, a bitmap or gap codes, bit by bit.
bytes decode_packed(const components & c, const sparse_tensor_info & m) {
    const bytes &values = c[macko::PACKED_VALUES], &index = c[macko::PACKED_INDEX];
    const size_t nb = static_cast<size_t>(macko::value_nbytes(m.desc.type));
    bytes        dense(static_cast<size_t>(m.nbytes_dense), 0);
    size_t       k = 0;

    const std::vector<uint32_t> coded = m.value_type == GGML_MACKO_TYPE_CODED
                                            ? decode_coded(values.data(), static_cast<size_t>(m.desc.nnz), m.desc.type)
                                            : std::vector<uint32_t>();
    const auto                  store = [&](int64_t element) {
        uint8_t * out = &dense[static_cast<size_t>(element) * nb];
        if (m.value_type == GGML_MACKO_TYPE_CODED) {
            memcpy(out, &coded[k], nb);
        } else {
            memcpy(out, &values[k * nb], nb);
        }
        k++;
    };
    if (m.index_bits == 0) {
        const int64_t stride = (m.desc.cols + 7) / 8 * 8;
        for (int64_t i = 0; i < m.desc.rows * stride; i++) {
            if (index[static_cast<size_t>(i / 8)] >> (i % 8) & 1) {
                store(i / stride * m.desc.cols + i % stride);
            }
        }
        return dense;
    }
    size_t bit = 0;
    for (int64_t r = 0; r < m.desc.rows; r++) {
        int32_t ptr[2];
        memcpy(ptr, &c[macko::PACKED_ROW_PTR][static_cast<size_t>(r) * 4], sizeof(ptr));
        for (int64_t n = 0, col = -1; n < ptr[1] - ptr[0];) {
            int64_t code = 0;
            for (int32_t b = 0; b < m.index_bits; b++, bit++) {
                code |= (index[bit / 8] >> (bit % 8) & 1) << b;
            }
            const bool escape = code == (1 << m.index_bits) - 1;
            col += escape ? code : code + 1;
            if (!escape) {
                store(r * m.desc.cols + col);
                n++;
            }
        }
    }
    return dense;
}

// Decodes codes bit by bit.
bytes decode_quantized(const components & c, const sparse_tensor_info & m) {
    const size_t nb = static_cast<size_t>(macko::value_nbytes(m.desc.type)), row_nbytes = size_t(m.desc.cols + 7) / 8;
    bytes        dense(static_cast<size_t>(m.nbytes_dense), 0);
    const size_t n_levels = c[macko::QUANTIZED_LEVELS].size(), bits = n_levels == 256 ? 8 : n_levels / 16 + 3;
    const size_t per_row = c[macko::QUANTIZED_SCALES].size() / static_cast<size_t>(m.desc.rows);
    size_t       window  = 32;
    while ((static_cast<size_t>(m.desc.cols) + window - 1) / window != per_row) {
        window *= 2;
    }
    for (size_t r = 0; r < static_cast<size_t>(m.desc.rows); r++) {
        int32_t  group;
        uint16_t factor;
        memcpy(&group, &c[macko::QUANTIZED_ROW_PTR][4 * r], sizeof(group));
        memcpy(&factor, &c[macko::QUANTIZED_FACTORS][2 * r], sizeof(factor));
        size_t bit = static_cast<size_t>(group) * 8 * bits;
        for (size_t col = 0; col < static_cast<size_t>(m.desc.cols); col++) {
            if (!(c[macko::QUANTIZED_BITMAP][r * row_nbytes + col / 8] >> (col % 8) & 1)) {
                continue;
            }
            size_t code = 0;
            for (size_t b = 0; b < bits; b++, bit++) {
                code |= size_t(c[macko::QUANTIZED_CODES][bit / 8] >> (bit % 8) & 1) << b;
            }
            const uint8_t s   = c[macko::QUANTIZED_SCALES][r * per_row + col / window];
            const float scale = std::ldexp((s & 128 ? -1.0f : 1.0f) * static_cast<float>(16 + s % 16), s / 16 % 8 - 11);
            const float d     = scale * macko::float_of_value(factor, GGML_MACKO_TYPE_BF16);
            const int   level = static_cast<int8_t>(c[macko::QUANTIZED_LEVELS][code]);
            const uint32_t v  = nb == 4 ? macko::dense_of_quant<uint32_t>(d, level, m.desc.type)
                                        : macko::dense_of_quant<uint16_t>(d, level, m.desc.type);
            memcpy(&dense[(r * static_cast<size_t>(m.desc.cols) + col) * nb], &v, nb);
        }
    }
    return dense;
}

bytes decode_macko(const components & c, const sparse_tensor_info & m) {
    const auto nb = static_cast<uint64_t>(macko::value_nbytes(m.desc.type)), rows = static_cast<uint64_t>(m.desc.rows),
               cols = static_cast<uint64_t>(m.desc.cols);
    const auto bits = static_cast<uint32_t>(m.index_bits);
    bytes      slow = builder::decode(c[0], c[1], c[2], nb, rows, cols, bits);
    // an accepted matrix must have the only arrays that represent its elements
    const builder::components e =
        builder::encode({ m.name, { cols, rows }, static_cast<uint32_t>(m.desc.type), slow }, bits);
    FUZZ_CHECK(e.values == c[0] && e.deltas == c[1] && e.row_ptr == c[2] && static_cast<int64_t>(e.nnz) == m.desc.nnz,
               "%s: accepted, but not canonical", m.name.c_str());
    return slow;
}

// The slow decoder supports only short blocks of one row; returns an empty result for other matrices.
bytes decode_ec_csr(const components & c, const sparse_tensor_info & m) {
    macko::ec_csr_set set;
    memcpy(&set, c[macko::EC_SETS].data(), sizeof(set));
    if (c[macko::EC_SETS].size() != sizeof(set) || set.granularity != 1 || set.vector_size != 1 ||
        m.desc.cols > 65536) {
        return {};
    }
    return builder::decode_ec({ c[macko::EC_VALUES],
                                c[macko::EC_DELTAS],
                                c[macko::EC_BASES],
                                c[macko::EC_BLK_PTR],
                                c[macko::EC_ROWS],
                                {},
                                0 },
                              static_cast<uint64_t>(macko::value_nbytes(m.desc.type)),
                              static_cast<uint64_t>(m.desc.rows), static_cast<uint64_t>(m.desc.cols),
                              static_cast<uint32_t>(m.index_bits));
}

// The slow decoder of a format, without code of the library; empty if it does not support the matrix.
using slow_decoder = bytes (*)(const components & c, const sparse_tensor_info & m);
slow_decoder find_slow_decoder(const macko::codec & format) {
    static const std::pair<const macko::codec *, slow_decoder> TABLE[] = {
        { &macko::rows_codec(), decode_macko },
        { &macko::packed_codec(), decode_packed },
        { &macko::quantized_codec(), decode_quantized },
        { &macko::ec_csr_codec(), decode_ec_csr },
    };
    for (const auto & [codec, decode] : TABLE) {
        if (codec == &format) {
            return decode;
        }
    }
    return nullptr;
}

// The result of the format's own view, without the loader.
bytes decode_by_codec(const components & c, const macko::gguf_tensor * tensors, const sparse_tensor_info & m) {
    ggml_macko_matrix matrix = m.matrix(tensors);
    for (size_t i = 0; i < c.size(); i++) {
        matrix.arrays[i].data = c[i].data();
    }
    std::unique_ptr<macko::codec_view> view;
    bytes                              dense(static_cast<size_t>(m.nbytes_dense), 0xdd);
    FUZZ_CHECK(macko::open_matrix(*m.format, matrix, 1, &view) == GGML_MACKO_STATUS_OK &&
                   view->decode(dense.data(), 1) == GGML_MACKO_STATUS_OK,
               "%s: accepted by the loader only: %s", m.name.c_str(), ggml_macko_last_error());
    return dense;
}

} // namespace

bytes read_dense(const macko::byte_source & source, const macko::model_file & file, const sparse_tensor_info & m) {
    decoder dense(m);
    FUZZ_CHECK(macko::read_payload(source, file.header, m, 1, dense) == GGML_MACKO_STATUS_OK,
               "accepted once, then refused: %s", ggml_macko_last_error());
    return dense.dense;
}

bool check_matrix(const macko::byte_source & source, const macko::model_file & file, const sparse_tensor_info & m) {
    discard   consumer;
    const int status = macko::read_payload(source, file.header, m, 1, consumer);
    check_status(status);
    if (status != GGML_MACKO_STATUS_OK) {
        return false;
    }
    const macko::gguf_tensor * tensors = &file.header.tensors[m.first];
    components                 c(m.n_tensors);
    for (size_t i = 0; i < m.n_tensors; i++) {
        c[i].resize(static_cast<size_t>(tensors[i].nbytes));
        FUZZ_CHECK(source.read(tensors[i].offset, c[i].data(), tensors[i].nbytes) == GGML_MACKO_STATUS_OK, "%s",
                   ggml_macko_last_error());
    }
    const bytes        dense = read_dense(source, file, m);
    const slow_decoder slow  = find_slow_decoder(*m.format);
    const bytes        want  = slow ? slow(c, m) : bytes();
    FUZZ_CHECK(dense == (want.empty() ? decode_by_codec(c, tensors, m) : want), "%s: decoded differently",
               m.name.c_str());
    return true;
}

} // namespace fuzz
