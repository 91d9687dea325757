// Matrices whose numbers all come from the input: description, sizes of arrays, and arrays.
#include "codec/limits.h"
#include "matrix-input.h"

using namespace fuzz;

// Start of an input: rows and cols shifted left, for limits; sizes of arrays follow (two bytes each, shifted).
struct description {
    uint8_t  format, type, value_type, bits;
    uint16_t rows, cols;
    uint8_t  rows_shift, cols_shift, nnz_shift, reserved;
    uint32_t nnz;
};
static_assert(sizeof(description) == 16, "without padding");

constexpr int32_t TYPES[] = { GGML_MACKO_TYPE_F16,
                              GGML_MACKO_TYPE_BF16,
                              GGML_MACKO_TYPE_F32,
                              GGML_MACKO_TYPE_CODED,
                              GGML_MACKO_TYPE_I8,
                              GGML_MACKO_TYPE_I16,
                              GGML_MACKO_TYPE_I32,
                              -1,
                              12345,
                              GGML_MACKO_TYPE_Q3,
                              GGML_MACKO_TYPE_Q4,
                              GGML_MACKO_TYPE_Q5,
                              GGML_MACKO_TYPE_Q8 };

static int32_t type_at(uint8_t i) { return TYPES[i % std::size(TYPES)]; }

// EC-CSR needs no bytes for some rows, but every row takes time. A small file must not have that many rows
// (SECURITY.md).
constexpr int64_t MAX_ROWS = 1 << 16;

static bool run(const uint8_t * data, size_t size) {
    input      in   = { data, size };
    const auto d    = in.take<description>();
    auto       info = macko::sized<ggml_macko_codec_info>();
    FUZZ_CHECK(ggml_macko_codec_at(d.format % ggml_macko_codec_count(), &info) == 0, "%s", ggml_macko_last_error());
    owned_matrix        owned;
    ggml_macko_matrix & m = owned.matrix;
    m.format              = info.name;
    m.rows                = static_cast<int64_t>(uint64_t(d.rows) << d.rows_shift % 64);
    m.cols                = static_cast<int64_t>(uint64_t(d.cols) << d.cols_shift % 64);
    if (m.rows > MAX_ROWS && m.rows <= macko::MAX_DIM) {
        return false;
    }
    m.nnz        = static_cast<int64_t>(uint64_t(d.nnz) << d.nnz_shift % 64);
    m.type       = type_at(d.type);
    m.value_type = type_at(d.value_type);
    m.index_bits = d.bits;
    m.n_arrays   = info.n_arrays;
    uint16_t nbytes[GGML_MACKO_MAX_ARRAYS];
    uint8_t  types[GGML_MACKO_MAX_ARRAYS];
    for (int i = 0; i < m.n_arrays; i++) {
        nbytes[i] = in.take<uint16_t>();
        types[i]  = in.take<uint8_t>();
    }
    for (int i = 0; i < m.n_arrays; i++) {
        const bytes b = in.take_bytes(nbytes[i]);
        owned.set(i, b.data(), static_cast<int64_t>(b.size()), type_at(types[i]));
    }
    const int status = ggml_macko_validate(&m, 1);
    FUZZ_CHECK(strcmp(ggml_macko_status_name(status), "unknown") != 0, "status %d", status);
    int64_t n = 0; // number of elements, if it is small
    if (m.rows < 1 || m.cols < 1 || __builtin_mul_overflow(m.rows, m.cols, &n) || n > 8192) {
        return status == GGML_MACKO_STATUS_OK;
    }
    bytes     dense(static_cast<size_t>(n) * 4, 0xee);
    const int decoded = ggml_macko_decode(&m, dense.data(), 1);
    FUZZ_CHECK(decoded == status, "validate says %d, decode %d", status, decoded);
    ggml_macko_cpu_matrix * cpu    = nullptr;
    const int               loaded = ggml_macko_cpu_matrix_init(&m, 1, &cpu);
    FUZZ_CHECK((loaded == GGML_MACKO_STATUS_OK) == (status == GGML_MACKO_STATUS_OK), "validate says %d, init %d",
               status, loaded);
    if (status != GGML_MACKO_STATUS_OK) {
        return false;
    }
    const std::vector<float> x(static_cast<size_t>(m.cols), 1.0f);
    std::vector<float>       y(static_cast<size_t>(m.rows));
    FUZZ_CHECK(ggml_macko_cpu_mul_mat(cpu, x.data(), y.data(), 1, 1) == 0, "%s", ggml_macko_last_error());
    ggml_macko_cpu_matrix_free(cpu);
    return true;
}

// Converts the inputs of fuzz-encode to inputs of this target.
static std::vector<bytes> seeds() {
    std::vector<bytes> all;
    for (const bytes & seed : encode_seeds()) {
        encoded_input in;
        if (!encode_input({ seed.data(), seed.size() }, -1, 4096, &in)) {
            continue;
        }
        const ggml_macko_matrix & m     = in.encoded.matrix;
        const auto                index = [](int32_t type) {
            return static_cast<uint8_t>(std::find(std::begin(TYPES), std::end(TYPES), type) - std::begin(TYPES));
        };
        description d = {};
        for (auto info = macko::sized<ggml_macko_codec_info>();
             ggml_macko_codec_at(d.format, &info) == 0 && strcmp(info.name, m.format);) {
            d.format++;
        }
        d.type       = index(m.type);
        d.value_type = index(m.value_type);
        d.bits       = static_cast<uint8_t>(m.index_bits);
        d.rows       = static_cast<uint16_t>(m.rows);
        d.cols       = static_cast<uint16_t>(m.cols);
        d.nnz        = static_cast<uint32_t>(m.nnz);
        bytes b(reinterpret_cast<const uint8_t *>(&d), reinterpret_cast<const uint8_t *>(&d + 1));
        for (int i = 0; i < m.n_arrays; i++) {
            builder::put<uint16_t>(&b, static_cast<uint16_t>(m.arrays[i].nbytes));
            builder::put<uint8_t>(&b, index(m.arrays[i].type));
        }
        for (int i = 0; i < m.n_arrays; i++) {
            b.insert(b.end(), in.encoded.memory[i].get(), in.encoded.memory[i].get() + m.arrays[i].nbytes);
        }
        all.push_back(b);
    }
    return all;
}

const target fuzz::TARGET = { "payload", 4096, MAX_ROWS * 64, 1, run, seeds, nullptr };
