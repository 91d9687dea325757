// The MACKO codec against FORMAT.md: literal bytes, a slow independent encoder, round trips by bit pattern, every
// refusal. `test-codec --bench` prints speeds instead (GB of dense F16 per second).
#include "capi/struct-size.h"
#include "codec/macko/macko.h"
#include "ggml-macko.h"
#include "test.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

static int64_t type_size(int32_t type) { return type == GGML_MACKO_TYPE_F32 ? 4 : 2; }

struct encoded {
    std::vector<uint8_t> values;
    std::vector<uint8_t> deltas;
    std::vector<int32_t> row_ptr;
    macko::macko_desc    m        = {};
    int64_t              n_stored = 0; // non-zeros and fillers
    ggml_macko_matrix    matrix() const {
        ggml_macko_matrix out = { sizeof(out), "macko", m.rows, m.cols, m.type, m.type, m.delta_bits, m.nnz, 3, {} };
        out.arrays[0]         = { values.data(), ggml_macko_n_padded(n_stored) * type_size(m.type), m.type };
        out.arrays[1]         = { deltas.data(), (int64_t)deltas.size(), GGML_MACKO_TYPE_I8 };
        out.arrays[2]         = { row_ptr.data(), 4 * (int64_t)row_ptr.size(), GGML_MACKO_TYPE_I32 };
        return out;
    }
    int validate(int n_threads = 2) const {
        const ggml_macko_matrix all = matrix();
        return ggml_macko_validate(&all, threads(n_threads));
    }
    int decode(void * dense, int n_threads = 2) const {
        const ggml_macko_matrix all = matrix();
        return ggml_macko_decode(&all, dense, threads(n_threads));
    }
};

static int bits_index(int bits) { return bits == 1 ? 0 : bits == 2 ? 1 : bits == 4 ? 2 : 3; }

static encoded encode(const void * dense, int32_t type, int64_t rows, int64_t cols, int bits, int n_threads) {
    const ggml_macko_option option = { "index_bits", bits };
    ggml_macko_encoded *    out    = nullptr;
    auto                    m      = macko::sized<ggml_macko_matrix>();
    CHECK(ggml_macko_encode("macko", dense, type, rows, cols, &option, 1, threads(n_threads), &out) == 0 &&
              ggml_macko_encoded_matrix(out, &m) == 0,
          "%s", ggml_macko_last_error());
    CHECK(!strcmp(m.format, "macko") && m.rows == rows && m.cols == cols && m.type == type && m.value_type == type &&
              m.index_bits == bits && m.n_arrays == 3,
          "the description of an encoded matrix");
    const auto * values  = static_cast<const uint8_t *>(m.arrays[0].data);
    const auto * deltas  = static_cast<const uint8_t *>(m.arrays[1].data);
    const auto * row_ptr = static_cast<const int32_t *>(m.arrays[2].data);
    encoded      e       = { { values, values + m.arrays[0].nbytes },
                             { deltas, deltas + m.arrays[1].nbytes },
                             { row_ptr, row_ptr + m.arrays[2].nbytes / 4 },
                             { rows, cols, type, bits, m.nnz },
                             0 };
    e.n_stored           = e.row_ptr.back();
    for (int i = 0; i < 3; i++) {
        CHECK(m.arrays[i].type == e.matrix().arrays[i].type && m.arrays[i].nbytes == e.matrix().arrays[i].nbytes,
              "component %d", i);
    }
    ggml_macko_encoded_free(out);
    ggml_macko_count count;
    CHECK(ggml_macko_count_dense(dense, type, rows, cols, threads(n_threads), &count) == 0, "%s",
          ggml_macko_last_error());
    CHECK(count.nnz == e.m.nnz && count.n_stored[bits_index(bits)] == e.n_stored, "counts");
    return e;
}

// FORMAT.md section 3, one element at a time; shares no code with the library.
template <typename T>
static encoded encode_slow(const std::vector<T> & dense, int32_t type, int64_t rows, int64_t cols, int bits) {
    std::vector<T>   values;
    std::vector<int> codes;
    encoded          e;
    const int64_t    max_code = (1 << bits) - 1;
    int64_t          nnz      = 0;
    for (int64_t r = 0; r < rows; r++) {
        e.row_ptr.push_back((int32_t)values.size());
        int64_t last = -1;
        for (int64_t c = 0; c < cols; c++) {
            if (dense[(size_t)(r * cols + c)] == 0) {
                continue;
            }
            while (c - last - 1 > max_code) {
                values.push_back(0);
                codes.push_back((int)max_code);
                last += max_code + 1;
            }
            values.push_back(dense[(size_t)(r * cols + c)]);
            codes.push_back((int)(c - last - 1));
            last = c;
            nnz++;
        }
    }
    e.row_ptr.push_back((int32_t)values.size());
    e.m        = { rows, cols, type, bits, nnz };
    e.n_stored = (int64_t)values.size();
    while (values.size() % 8 || values.empty()) {
        values.push_back(0);
        codes.push_back(0);
    }
    e.values.resize(values.size() * sizeof(T));
    memcpy(e.values.data(), values.data(), e.values.size());
    e.deltas.resize((codes.size() * (size_t)bits / 8 + 3) / 4 * 4);
    for (size_t k = 0; k < codes.size(); k++) {
        e.deltas[k * (size_t)bits / 8] = (uint8_t)(e.deltas[k * (size_t)bits / 8] | codes[k] << (k * (size_t)bits % 8));
    }
    return e;
}

// Finite random bits, including subnormals, -0.0, and the largest and smallest values.
template <typename T> static T random_value(rng & r, int32_t type) {
    const int kind = (int)r.range(0, 19);
    const T   sign = (T)((T)r.range(0, 1) << (8 * sizeof(T) - 1));
    if (kind == 0) {
        return (T)((T)1 << (8 * sizeof(T) - 1)); // -0.0
    }
    if (kind == 1) {
        return (T)(sign | (T)r.range(1, 100)); // subnormal
    }
    const uint32_t inf = type == GGML_MACKO_TYPE_F32 ? 0x7f800000u : type == GGML_MACKO_TYPE_F16 ? 0x7c00u : 0x7f80u;
    if (kind == 2) {
        return (T)(sign | (T)(inf - 1)); // largest finite
    }
    const T v = (T)(sign | (T)r.range(1, (int64_t)inf - 1));
    return v;
}

template <typename T>
static std::vector<T> random_dense(rng & r, int32_t type, int64_t rows, int64_t cols, double density) {
    std::vector<T> dense((size_t)(rows * cols), 0);
    for (int64_t i = 0; i < rows; i++) {
        const double d = r.range(0, 9) == 0 ? 0 : density; // a tenth of the rows is empty
        for (int64_t c = 0; c < cols; c++) {
            if (r.unit() < d) {
                dense[(size_t)(i * cols + c)] = random_value<T>(r, type);
            }
        }
    }
    return dense;
}

template <typename T>
static void check_matrix(const std::vector<T> & dense, int32_t type, int64_t rows, int64_t cols, const char * what) {
    for (const int bits : { 1, 2, 4, 8 }) {
        const encoded want = encode_slow(dense, type, rows, cols, bits);
        for (const int n_threads : { 1, 3 }) {
            const encoded e = encode(dense.data(), type, rows, cols, bits, n_threads);
            CHECK(e.m.nnz == want.m.nnz && e.n_stored == want.n_stored, "%s %lldx%lld b=%d counts", what,
                  (long long)rows, (long long)cols, bits);
            CHECK(e.values == want.values && e.deltas == want.deltas && e.row_ptr == want.row_ptr,
                  "%s %lldx%lld type %d b=%d bytes", what, (long long)rows, (long long)cols, type, bits);
            CHECK(e.validate(n_threads) == 0, "%s: %s", what, ggml_macko_last_error());
            std::vector<T> back((size_t)(rows * cols), (T)0x5A5A);
            CHECK(e.decode(back.data(), n_threads) == 0, "%s: %s", what, ggml_macko_last_error());
            CHECK(back == dense, "%s %lldx%lld type %d b=%d round trip", what, (long long)rows, (long long)cols, type,
                  bits);
        }
    }
}

template <typename T> static void check_round_trips(int32_t type, uint64_t seed) {
    rng r(seed);
    for (const int64_t rows : { 1, 2, 3, 17 }) {
        for (const int64_t cols : { 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1030, 4096 }) {
            for (const double density : { 0.0, 0.02, 0.1, 0.3, 0.5, 0.9, 1.0 }) {
                check_matrix(random_dense<T>(r, type, rows, cols, density), type, rows, cols, "random");
            }
            for (const int64_t col : { (int64_t)0, cols / 2, cols - 1 }) { // one non-zero, also in the last column
                std::vector<T> dense((size_t)(rows * cols), 0);
                dense[(size_t)((rows - 1) * cols + col)] = 1;
                check_matrix(dense, type, rows, cols, "single");
            }
        }
    }
    // gaps around the largest gap of a code
    for (const int64_t gap : { 1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513, 5000 }) {
        std::vector<T> dense((size_t)(2 * gap + 3), 0);
        dense[(size_t)gap] = dense[(size_t)(2 * gap + 1)] = 7;
        check_matrix(dense, type, 1, (int64_t)dense.size(), "gap");
    }
}

TEST(round_trips) {
    check_round_trips<uint16_t>(GGML_MACKO_TYPE_F16, 1);
    check_round_trips<uint16_t>(GGML_MACKO_TYPE_BF16, 2);
    check_round_trips<uint32_t>(GGML_MACKO_TYPE_F32, 3);
}

TEST(paper_example) {
    // paper, figure 2, with 0-based columns 1, 4, 11, 12
    std::vector<uint16_t> dense(16, 0);
    dense[1] = 0x3c00, dense[4] = 0x4000, dense[11] = 0x4200, dense[12] = 0x4400;
    const encoded              e      = encode(dense.data(), GGML_MACKO_TYPE_F16, 1, 16, 2, 1);
    const std::vector<uint8_t> values = { 0, 0x3c, 0, 0x40, 0, 0, 0, 0x42, 0, 0x44, 0, 0, 0, 0, 0, 0 };
    const std::vector<uint8_t> deltas = { 0xB9, 0x00, 0, 0 }; // codes 1 2 3 2 | 0, low bits first
    CHECK(e.values == values && e.deltas == deltas && e.row_ptr == std::vector<int32_t>({ 0, 5 }),
          "bytes of the paper's example");
}

// 3 x 600 values: rows 0 and 2 have five values each, with wide gaps; row 2 has one more; row 1 has none. n_stored is
// not a multiple of 8 for any delta_bits, so there is padding to change.
static std::vector<uint16_t> matrix_with_padding() {
    std::vector<uint16_t> dense(3 * 600, 0);
    for (const int64_t c : { 3, 19, 36, 90, 599 }) {
        dense[(size_t)c]          = 0x3c00;
        dense[(size_t)(1200 + c)] = 0x3c01;
    }
    dense[1200] = 0x4000;
    return dense;
}

// Changes one thing in a valid matrix; validate and decode must both return the exact status.
struct faults {
    encoded good;
    int     bits, n_threads;

    template <typename F> void refused(const char * what, int status, F && edit) const {
        encoded bad = good;
        edit(bad);
        const int got = bad.validate(n_threads);
        CHECK(got == status, "b=%d %s: %s, wanted %s (%s)", bits, what, ggml_macko_status_name(got),
              ggml_macko_status_name(status), ggml_macko_last_error());
        std::vector<uint16_t> out(3 * 600, 0x1234);
        CHECK(bad.decode(out.data(), n_threads) == status, "b=%d %s: decode accepts what validate refuses", bits, what);
    }
};

static void set_value(encoded & e, int64_t k, uint16_t bits16) { memcpy(e.values.data() + 2 * k, &bits16, 2); }

static void set_code(encoded & e, int64_t k, int c) {
    const int bits  = e.m.delta_bits;
    uint8_t & byte  = e.deltas[(size_t)(k * bits / 8)];
    const int shift = (int)(k * bits % 8), mask = (1 << bits) - 1;
    byte = (uint8_t)((byte & ~(mask << shift)) | c << shift);
}

static void check_malformed_row_ptr_is_refused(const faults & f) {
    const int64_t n = f.good.n_stored;
    f.refused("row_ptr[0] not 0", GGML_MACKO_STATUS_BAD_ROW_PTR, [&](encoded & e) { e.row_ptr[0] = 1; });
    f.refused("row_ptr decreases", GGML_MACKO_STATUS_BAD_ROW_PTR, [&](encoded & e) { e.row_ptr[1] = (int32_t)n + 1; });
    f.refused("row_ptr negative", GGML_MACKO_STATUS_BAD_ROW_PTR, [&](encoded & e) { e.row_ptr[1] = -4; });
    f.refused("row_ptr ends past the values", GGML_MACKO_STATUS_BAD_ROW_PTR,
              [&](encoded & e) { e.row_ptr[3] = (int32_t)n + 16; });
    f.refused("row_ptr ends early", GGML_MACKO_STATUS_BAD_ROW_PTR, [&](encoded & e) {
        e.row_ptr[2] = e.row_ptr[1] = 0;
        e.row_ptr[3]                = 1;
    });
}

static void check_non_finite_value_is_refused(const faults & f) {
    const int64_t n_row0 = f.good.row_ptr[1], n = f.good.n_stored;
    f.refused("NaN", GGML_MACKO_STATUS_NOT_FINITE, [&](encoded & e) { set_value(e, n_row0 - 1, 0x7e00); });
    f.refused("-Inf", GGML_MACKO_STATUS_NOT_FINITE, [&](encoded & e) { set_value(e, n - 1, 0xfc00); });
}

static void check_payload_that_is_not_canonical_is_refused(const faults & f) {
    const int64_t n_row0 = f.good.row_ptr[1], n = f.good.n_stored;
    f.refused("last entry of a row is a filler", GGML_MACKO_STATUS_NOT_CANONICAL, [&](encoded & e) {
        e.row_ptr[1] = e.row_ptr[2] = (int32_t)n_row0 - 1; // row 0 now ends with the filler before column 599
    });
    f.refused("value behind the last entry", GGML_MACKO_STATUS_NOT_CANONICAL, [&](encoded & e) { set_value(e, n, 1); });
    f.refused("zero value with a small code", GGML_MACKO_STATUS_NOT_CANONICAL, [&](encoded & e) {
        set_value(e, n_row0, 0); // row 2's first entry, column 0: code 0
    });
    f.refused("code behind the last entry", GGML_MACKO_STATUS_NOT_CANONICAL, [&](encoded & e) { set_code(e, n, 1); });
    f.refused("bits in the last byte of deltas", GGML_MACKO_STATUS_NOT_CANONICAL,
              [&](encoded & e) { e.deltas.back() |= 0x80; });
}

static void check_column_past_the_last_is_refused(const faults & f) {
    const int64_t n_row0 = f.good.row_ptr[1], n = f.good.n_stored, max_code = (1 << f.bits) - 1;
    f.refused("walks past the last column", GGML_MACKO_STATUS_BAD_COLUMN, [&](encoded & e) {
        for (int64_t k = n_row0; k < n; k++) {
            if (((e.deltas[(size_t)(k * f.bits / 8)] >> (k * f.bits % 8)) & max_code) < max_code) {
                set_code(e, k, (int)max_code);
            }
        }
    });
}

static void check_malformed_description_is_refused(const faults & f) {
    f.refused("nnz too small", GGML_MACKO_STATUS_BAD_NNZ, [&](encoded & e) { e.m.nnz--; });
    f.refused("nnz more than the matrix has", GGML_MACKO_STATUS_BAD_NNZ, [&](encoded & e) { e.m.nnz = 3 * 600 + 1; });
    f.refused("rows 0", GGML_MACKO_STATUS_BAD_SHAPE, [&](encoded & e) { e.m.rows = 0; });
    f.refused("cols over the limit", GGML_MACKO_STATUS_LIMIT, [&](encoded & e) { e.m.cols = (1 << 24) + 1; });
    f.refused("unknown type", GGML_MACKO_STATUS_BAD_FORMAT, [&](encoded & e) { e.m.type = 8; });
    f.refused("delta_bits 3", GGML_MACKO_STATUS_BAD_FORMAT, [&](encoded & e) { e.m.delta_bits = 3; });
    f.refused("deltas too long", GGML_MACKO_STATUS_BAD_COMPONENT,
              [&](encoded & e) { e.deltas.resize(e.deltas.size() + 4); });
    f.refused("row_ptr too short", GGML_MACKO_STATUS_BAD_COMPONENT, [&](encoded & e) { e.row_ptr.pop_back(); });
    f.refused("null", GGML_MACKO_STATUS_BAD_ARGUMENT, [&](encoded & e) { e.values = std::vector<uint8_t>(); });
}

TEST(each_fault_is_refused) {
    const std::vector<uint16_t> dense = matrix_with_padding();
    for (const int bits : { 1, 2, 4, 8 }) {
        for (const int n_threads : { 1, 2 }) {
            const faults f = { encode(dense.data(), GGML_MACKO_TYPE_F16, 3, 600, bits, n_threads), bits, n_threads };
            CHECK(f.good.n_stored % 8 != 0, "b=%d: no padding to change", bits);
            check_malformed_row_ptr_is_refused(f);
            check_non_finite_value_is_refused(f);
            check_payload_that_is_not_canonical_is_refused(f);
            check_column_past_the_last_is_refused(f);
            check_malformed_description_is_refused(f);
        }
    }
}

TEST(count_refuses_bad_arguments) {
    const std::vector<uint16_t> dense = matrix_with_padding();
    ggml_macko_count            count;
    CHECK(ggml_macko_count_dense(dense.data(), GGML_MACKO_TYPE_F16, 1 << 20, 1 << 20, 1, &count) ==
              GGML_MACKO_STATUS_LIMIT,
          "2 TiB matrix");
    CHECK(ggml_macko_count_dense(nullptr, GGML_MACKO_TYPE_F16, 1, 1, 1, &count) == GGML_MACKO_STATUS_BAD_ARGUMENT,
          "null dense");
    std::vector<uint16_t> special = { 0x3c00, 0x7c00, 0xfe01, 0, 0x8000, 0x7bff };
    CHECK(ggml_macko_count_dense(special.data(), GGML_MACKO_TYPE_F16, 2, 3, 1, &count) == 0 && count.n_nonfinite == 2 &&
              count.nnz == 5,
          "non-finite count");
}

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename F> static double median_time(F && f) {
    std::vector<double> t;
    for (int i = 0; i < 7; i++) {
        const double start = seconds();
        f();
        t.push_back(seconds() - start);
    }
    std::sort(t.begin(), t.end());
    return t[3];
}

static void bench() {
    const int64_t rows = 8192, cols = 8192;
    const double  gb = (double)rows * cols * 2e-9;
    printf("codec, %lld x %lld F16, 2 threads, GB of dense per second; validation in ms per GB of payload\n",
           (long long)rows, (long long)cols);
    printf("| density | b | count | encode (count + write) | decode (validates) | validate ms/GB "
           "|\n|---|---|---|---|---|---|\n");
    for (const double d : { 0.1, 0.3, 0.5, 0.7, 1.0 }) {
        rng                   r(7);
        std::vector<uint16_t> dense((size_t)(rows * cols));
        for (auto & v : dense) {
            v = r.unit() < d ? (uint16_t)r.range(0x2000, 0x3fff) : 0;
        }
        for (const int bits : { 1, 2, 4, 8 }) {
            const encoded           e      = encode(dense.data(), GGML_MACKO_TYPE_F16, rows, cols, bits, 2);
            const ggml_macko_option option = { "index_bits", bits };
            ggml_macko_count        count;
            int                     status = 0;
            const double            tc     = median_time(
                [&] { status |= ggml_macko_count_dense(dense.data(), GGML_MACKO_TYPE_F16, rows, cols, 2, &count); });
            const double te      = median_time([&] {
                ggml_macko_encoded * out = nullptr;
                status |=
                    ggml_macko_encode("macko", dense.data(), GGML_MACKO_TYPE_F16, rows, cols, &option, 1, 2, &out);
                ggml_macko_encoded_free(out);
            });
            const double td      = median_time([&] { status |= e.decode(dense.data()); });
            const double tv      = median_time([&] { status |= e.validate(); });
            const double payload = (double)(e.values.size() + e.deltas.size() + 4 * e.row_ptr.size()) * 1e-9;
            printf("| %.1f | %d | %.2f | %.2f | %.2f | %.0f |%s\n", d, bits, gb / tc, gb / te, gb / td,
                   tv * 1e3 / payload, status ? " FAILED" : "");
        }
    }
}

int main(int argc, char ** argv) {
    if (argc > 1 && !strcmp(argv[1], "--bench")) {
        bench();
        return 0;
    }
    return test_main("test-codec", argc, argv);
}
