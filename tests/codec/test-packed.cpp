// The packed codec: encoded arrays against a slow decoder written only from FORMAT.md sections 7 and 8, every refusal,
// and mutated arrays, which must be refused or decode to the result of the slow decoder.
#include "codec/macko/encode.h"
#include "codec/packed/packed.h"
#include "test.h"
#include "values.h"

#include <cstring>
#include <iterator>
#include <string>

using namespace macko;

static const int32_t all_types[]      = { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 };
static const int32_t all_index_bits[] = { 0, 2, 4, 8 };
constexpr int32_t    CODED            = GGML_MACKO_TYPE_CODED;

static uint32_t random_value(rng & r, int32_t type) {
    const uint32_t sign = r.bits() & 1 ? (type == GGML_MACKO_TYPE_F32 ? 0x80000000u : 0x8000u) : 0;
    switch (r.range(0, 40)) {
        case 0: return sign | 1; // smallest subnormal
        case 1:
            return type == GGML_MACKO_TYPE_F32 ? 0x80000000u : 0x8000u; // -0.0
        // about 65504
        case 2:
            return sign | (type == GGML_MACKO_TYPE_F16    ? 0x7bffu
                           : type == GGML_MACKO_TYPE_BF16 ? 0x477fu
                                                          : 0x477fe000u);
        default: break;
    }
    if (type == GGML_MACKO_TYPE_F16) {
        return sign | static_cast<uint32_t>(r.range(8, 14) << 10 | r.range(0, 1023));
    }
    const uint32_t u = static_cast<uint32_t>(r.range(118, 127) << 23 | r.range(0, 0x7fffff));
    return type == GGML_MACKO_TYPE_BF16 ? sign | u >> 16 : sign | u;
}

struct dense_matrix {
    macko_desc            desc;
    std::vector<uint32_t> bits;
    std::vector<uint8_t>  bytes;
};

static dense_matrix random_dense(rng & r, int32_t type, int64_t rows, int64_t cols, double density) {
    dense_matrix  m    = { { rows, cols, type, 4, 0 }, {}, {} };
    const int64_t size = value_nbytes(type);
    for (int64_t i = 0; i < rows * cols; i++) {
        const bool empty_row = rows > 2 && i / cols == 1;
        m.bits.push_back(!empty_row && r.unit() < density ? random_value(r, type) : 0);
        m.bytes.insert(m.bytes.end(), reinterpret_cast<const uint8_t *>(&m.bits.back()),
                       reinterpret_cast<const uint8_t *>(&m.bits.back()) + size);
        m.desc.nnz += m.bits.back() != 0;
    }
    return m;
}

// ---- the slow decoder ----

struct slow_entry {
    int64_t  row, col;
    uint32_t bits; // of the value
};

// Decodes the positions of a bitmap or of gap codes; returns false if they contradict row_ptr.
static bool slow_places(const packed_arrays & a, std::vector<slow_entry> * out) {
    const macko_desc & d   = a.desc.dense;
    const auto         bit = [&](int64_t i) { return (a.index[i / 8] >> (i % 8)) & 1; };
    int64_t            at  = 0;
    for (int64_t r = 0; r < d.rows; r++) {
        int64_t n = 0;
        if (a.desc.index_bits == 0) {
            const int64_t stride = (d.cols + 7) / 8 * 8;
            for (int64_t c = 0; c < stride; c++) {
                if (bit(r * stride + c)) {
                    if (c >= d.cols) {
                        return false;
                    }
                    out->push_back({ r, c, 0 });
                    n++;
                }
            }
            at = (r + 1) * stride;
        } else {
            int64_t col = -1;
            while (n < a.row_ptr[r + 1] - a.row_ptr[r]) {
                int64_t code = 0;
                for (int b = 0; b < a.desc.index_bits; b++, at++) {
                    if (at >= a.n_index * 8) {
                        return false;
                    }
                    code |= bit(at) << b;
                }
                const int64_t escape = (1 << a.desc.index_bits) - 1;
                col += code == escape ? escape : code + 1;
                if (col >= d.cols) {
                    return false;
                }
                if (code != escape) {
                    out->push_back({ r, col, 0 });
                    n++;
                }
            }
        }
        if (n != a.row_ptr[r + 1] - a.row_ptr[r]) {
            return false;
        }
    }
    for (; at < a.n_index * 8; at++) {
        if (bit(at)) {
            return false;
        }
    }
    return true;
}

static void slow_values(const packed_arrays & a, std::vector<slow_entry> * entries) {
    const auto *                bytes = static_cast<const uint8_t *>(a.values);
    const std::vector<uint32_t> coded =
        a.desc.value_type == CODED ? decode_coded(bytes, entries->size(), a.desc.dense.type) : std::vector<uint32_t>();
    const auto size = static_cast<size_t>(value_nbytes(a.desc.dense.type));
    for (size_t k = 0; k < entries->size(); k++) {
        if (a.desc.value_type == CODED) {
            (*entries)[k].bits = coded[k];
        } else {
            memcpy(&(*entries)[k].bits, bytes + k * size, size);
        }
    }
}

// Compares the fast decoder's rows with the slow entries.
static void check_decoded(const packed_view & view) {
    const packed_arrays &   a = view.arrays();
    const macko_desc &      d = a.desc.dense;
    std::vector<slow_entry> entries;
    CHECK(slow_places(a, &entries) && static_cast<int64_t>(entries.size()) == d.nnz,
          "accepted, but the slow decoder finds %zu places, not %ld", entries.size(), (long)d.nnz);
    slow_values(a, &entries);
    std::vector<uint8_t> row(static_cast<size_t>(d.cols * value_nbytes(d.type)));
    size_t               next = 0;
    for (int64_t r = 0; r < d.rows; r++) {
        memset(row.data(), 0xee, row.size());
        view.decode_row(r, row.data());
        for (int64_t c = 0; c < d.cols; c++) {
            uint32_t bits = 0;
            memcpy(&bits, row.data() + c * value_nbytes(d.type), static_cast<size_t>(value_nbytes(d.type)));
            const bool     stored = next < entries.size() && entries[next].row == r && entries[next].col == c;
            const uint32_t want   = stored ? entries[next++].bits : 0;
            CHECK(bits == want, "type %d values %d bits %d row %ld column %ld: %#x, not %#x", d.type, a.desc.value_type,
                  a.desc.index_bits, (long)r, (long)c, bits, want);
        }
    }
}

// ---- tests ----

// A device that makes MACKO rows from the arrays gets the bitmap and the row_ptr of the decoded and encoded ones.
static void check_made_rows(const packed_view & view, const macko_matrix & m) {
    std::vector<uint8_t>  made;
    std::vector<int32_t>  row_ptr;
    const uint8_t * const bits = view.bitmap(threads(2), &made);
    CHECK(view.count_entries(bits, threads(2), &row_ptr) == 0 && row_ptr == m.row_ptr, "other entries");
    for (int64_t r = 0; r < m.desc.rows; r++) {
        std::vector<uint8_t> row(static_cast<size_t>(bitmap_row_nbytes(m.desc.cols)), 0);
        view.for_each_column(
            r, [&](int64_t col) { row[static_cast<size_t>(col / 8)] |= static_cast<uint8_t>(1 << col % 8); });
        CHECK(std::equal(row.begin(), row.end(), bits + r * static_cast<int64_t>(row.size())), "row %ld", (long)r);
    }
}

TEST(round_trip) {
    rng r(1);
    for (const int32_t type : all_types) {
        for (const int32_t value_type : { type, CODED }) {
            for (const int32_t bits : all_index_bits) {
                for (const double density : { 0.0, 0.02, 0.1, 0.3, 0.9, 1.0 }) {
                    for (const int64_t cols : { 1, 7, 8, 9, 31, 64, 65, 300 }) {
                        const dense_matrix m = random_dense(r, type, r.range(1, 20), cols, density);
                        packed_matrix      out;
                        const int          status = pack(m.bytes.data(), { m.desc, value_type, bits },
                                                         threads(static_cast<int>(r.range(1, 4))), &out);
                        CHECK(status == 0, "%s", ggml_macko_last_error());
                        packed_view view;
                        CHECK(check_packed(out.arrays(), threads(2), &view) == 0,
                              "type %d values %d bits %d cols %ld: %s", type, value_type, bits, (long)cols,
                              ggml_macko_last_error());
                        check_decoded(view);
                        std::vector<slow_entry> entries;
                        CHECK(slow_places(out.arrays(), &entries), "places");
                        slow_values(out.arrays(), &entries);
                        size_t k = 0;
                        for (size_t i = 0; i < m.bits.size(); i++) {
                            if (m.bits[i] == 0) {
                                continue;
                            }
                            CHECK(k < entries.size() &&
                                      entries[k].row * cols + entries[k].col == static_cast<int64_t>(i),
                                  "non-zero %zu is in another place", k);
                            CHECK(entries[k].bits == m.bits[i], "type %d values %d: %#x became %#x", type, value_type,
                                  m.bits[i], entries[k].bits);
                            k++;
                        }
                        packed_matrix again;
                        CHECK(pack(m.bytes.data(), { m.desc, value_type, bits }, threads(3), &again) == 0 &&
                                  again.values == out.values && again.index == out.index &&
                                  again.row_ptr == out.row_ptr,
                              "the number of threads shows");
                        macko_matrix recoded;
                        CHECK(recode(view, threads(2), &recoded) == 0 && recoded.desc.nnz == m.desc.nnz, "%s",
                              ggml_macko_last_error());
                        check_made_rows(view, recoded);
                    }
                }
            }
        }
    }
}

TEST(smallest_index_is_chosen) {
    rng r(2);
    for (const double density : { 0.0, 0.01, 0.05, 0.2, 0.3, 0.6 }) {
        const dense_matrix m = random_dense(r, GGML_MACKO_TYPE_F16, 40, 512, density);
        packed_matrix      best;
        CHECK(pack(m.bytes.data(), { m.desc, GGML_MACKO_TYPE_F16, -1 }, 1, &best) == 0, "%s", ggml_macko_last_error());
        for (const int32_t bits : all_index_bits) {
            packed_matrix other;
            CHECK(pack(m.bytes.data(), { m.desc, GGML_MACKO_TYPE_F16, bits }, 1, &other) == 0 &&
                      best.index.size() <= other.index.size(),
                  "density %g: %d bits are smaller", density, bits);
        }
    }
}

using P = packed_matrix;
using A = packed_arrays;

// Changes one part of a valid matrix of 9 x 61 F16 values; check_packed must return the status.
static void fault(const char * what, int want, int32_t value_type, int32_t index_bits, void (*change)(P &, A &)) {
    static const dense_matrix m = [] {
        rng          r(3);
        dense_matrix with_padding = random_dense(r, GGML_MACKO_TYPE_F16, 9, 61, 0.4);
        while (with_padding.desc.nnz % 32 == 0) {
            with_padding = random_dense(r, GGML_MACKO_TYPE_F16, 9, 61, 0.4);
        }
        return with_padding;
    }();
    packed_matrix p;
    CHECK(pack(m.bytes.data(), { m.desc, value_type, index_bits }, 1, &p) == 0, "%s", ggml_macko_last_error());
    packed_arrays a = p.arrays();
    change(p, a);
    packed_view view;
    const int   got = check_packed(a, threads(2), &view);
    CHECK(got == want, "%s: %s, not %s", what, ggml_macko_status_name(got), ggml_macko_status_name(want));
}

constexpr int32_t F16 = GGML_MACKO_TYPE_F16;

TEST(wrong_type_or_length_is_refused) {
    fault("unchanged", 0, F16, 0, [](P &, A &) {});
    fault("value type", GGML_MACKO_STATUS_BAD_FORMAT, F16, 0, [](P &, A & a) { a.desc.value_type = 8; });
    fault("I8 as value type", GGML_MACKO_STATUS_BAD_FORMAT, F16, 0, [](P &, A & a) { a.desc.value_type = 24; });
    fault("a type of quantized", GGML_MACKO_STATUS_BAD_FORMAT, F16, 0,
          [](P &, A & a) { a.desc.value_type = GGML_MACKO_TYPE_Q4; });
    fault("another dense type", GGML_MACKO_STATUS_BAD_FORMAT, F16, 0,
          [](P &, A & a) { a.desc.value_type = GGML_MACKO_TYPE_BF16; });
    fault("index bits", GGML_MACKO_STATUS_BAD_FORMAT, F16, 0, [](P &, A & a) { a.desc.index_bits = 1; });
    fault("nnz", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 0, [](P &, A & a) { a.desc.dense.nnz += 32; });
    fault("nnz, same length", GGML_MACKO_STATUS_BAD_ROW_PTR, F16, 0, [](P &, A & a) { a.desc.dense.nnz -= 1; });
    fault("values", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 0, [](P &, A & a) { a.n_values += 32; });
    fault("row_ptr length", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 0, [](P &, A & a) { a.n_row_ptr -= 1; });
    fault("bitmap length", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 0, [](P &, A & a) { a.n_index -= 4; });
    fault("codes cut", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 4, [](P &, A & a) { a.n_index -= 4; });
    fault("codes odd length", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 4, [](P &, A & a) { a.n_index -= 1; });
    fault("codes too long", GGML_MACKO_STATUS_BAD_COMPONENT, F16, 4, [](P & p, A & a) {
        p.index.resize(p.index.size() + 4);
        a = p.arrays();
    });
}

TEST(malformed_row_ptr_or_index_is_refused) {
    fault("rows decrease", GGML_MACKO_STATUS_BAD_ROW_PTR, F16, 0, [](P & p, A &) { p.row_ptr[3] = -1; });
    fault("rows from 1", GGML_MACKO_STATUS_BAD_ROW_PTR, F16, 0, [](P & p, A &) { p.row_ptr[0] = 1; });
    fault("a bit more", GGML_MACKO_STATUS_BAD_ROW_PTR, F16, 0, [](P & p, A &) { p.index[8] ^= 1; });
    fault("a bit past cols", GGML_MACKO_STATUS_BAD_COLUMN, F16, 0, [](P & p, A &) { p.index[7] |= 0x80; });
    fault("behind the rows", GGML_MACKO_STATUS_NOT_CANONICAL, F16, 8, [](P & p, A &) { p.index.back() |= 1; });
    fault("past the last column", GGML_MACKO_STATUS_BAD_COLUMN, F16, 4, [](P & p, A &) {
        for (size_t i = 0; i < 4; i++) {
            p.index[i] = 0xff;
        }
    });
}

TEST(non_finite_or_non_canonical_value_is_refused) {
    fault("padding F16", GGML_MACKO_STATUS_NOT_CANONICAL, F16, 0, [](P & p, A &) { p.values.back() = 0x80; });
    fault("a zero", GGML_MACKO_STATUS_NOT_CANONICAL, F16, 0, [](P & p, A & a) {
        const size_t nnz      = static_cast<size_t>(a.desc.dense.nnz);
        p.values[2 * nnz - 2] = p.values[2 * nnz - 1] = 0;
    });
    fault("NaN", GGML_MACKO_STATUS_NOT_FINITE, F16, 0, [](P & p, A &) { p.values[1] = 0x7e; });
}

// ---- coded values ----

// all widths against the slow encoder; ranges of values from any place
TEST(coded_values_are_those_of_the_slow_encoder) {
    rng r(5);
    for (const int32_t type : all_types) {
        for (const double density : { 0.0, 0.02, 0.4, 1.0 }) {
            const dense_matrix    m = random_dense(r, type, 20, 150, density);
            std::vector<uint32_t> values;
            std::copy_if(m.bits.begin(), m.bits.end(), std::back_inserter(values), [](uint32_t v) { return v != 0; });
            for (const int mantissa_bits : { 7, 10 }) {
                for (const int exponent_bits : { 2, 3 }) {
                    if (mantissa_bits == 10 && type == GGML_MACKO_TYPE_BF16) {
                        continue;
                    }
                    packed_matrix out;
                    CHECK(pack(m.bytes.data(), { m.desc, CODED, 0 }, threads(2), &out, mantissa_bits, exponent_bits) ==
                              0,
                          "%s", ggml_macko_last_error());
                    CHECK(out.values == encode_coded(values, type, mantissa_bits, exponent_bits), "type %d, %d and %d",
                          type, mantissa_bits, exponent_bits);
                    packed_view view;
                    CHECK(check_packed(out.arrays(), threads(2), &view) == 0, "%s", ggml_macko_last_error());
                    for (int i = 0; i < 20; i++) {
                        const int64_t        all = m.desc.nnz, k = r.range(0, all), n = r.range(0, all - k);
                        const auto           size = static_cast<size_t>(value_nbytes(type));
                        std::vector<uint8_t> got(static_cast<size_t>(n) * size + 1, 0xee);
                        view.copy_values(k, n, got.data());
                        for (int64_t j = 0; j < n; j++) {
                            CHECK(
                                !memcmp(&got[static_cast<size_t>(j) * size], &values[static_cast<size_t>(k + j)], size),
                                "value %ld of %ld from %ld", (long)j, (long)n, (long)k);
                        }
                        CHECK(got.back() == 0xee, "more than %ld values were written", (long)n);
                    }
                }
            }
        }
    }
}

TEST(smallest_widths_are_chosen) {
    rng r(6);
    for (const int32_t type : all_types) {
        for (const uint32_t dropped : { 0u, 7u, 0xffffu }) { // mantissa bits that no value has
            dense_matrix m = random_dense(r, type, 20, 150, 0.4);
            for (size_t i = 0; i < m.bits.size(); i++) {
                m.bits[i] = m.bits[i] & ~dropped ? m.bits[i] & ~dropped : m.bits[i];
                memcpy(&m.bytes[i * static_cast<size_t>(value_nbytes(type))], &m.bits[i],
                       static_cast<size_t>(value_nbytes(type)));
            }
            packed_matrix best;
            CHECK(pack(m.bytes.data(), { m.desc, CODED, 0 }, 1, &best) == 0, "%s", ggml_macko_last_error());
            for (const int mantissa_bits : { 7, 10 }) {
                for (const int exponent_bits : { 2, 3 }) {
                    packed_matrix other;
                    if (pack(m.bytes.data(), { m.desc, CODED, 0 }, 1, &other, mantissa_bits, exponent_bits) == 0) {
                        CHECK(best.values.size() <= other.values.size(), "type %d: %d and %d bits are smaller", type,
                              mantissa_bits, exponent_bits);
                    }
                }
            }
        }
    }
    packed_matrix      out;
    const dense_matrix m          = random_dense(r, GGML_MACKO_TYPE_BF16, 2, 20, 0.4);
    const int          wrong[][2] = { { 10, 2 }, { 8, 2 }, { 7, 1 }, { 7, 4 }, { INT32_MIN, -1 } };
    for (const auto & w : wrong) {
        CHECK(pack(m.bytes.data(), { m.desc, CODED, 0 }, 1, &out, w[0], w[1]) == GGML_MACKO_STATUS_BAD_FORMAT,
              "BF16 with %d and %d bits", w[0], w[1]);
    }
}

// The bytes of FORMAT.md section 8, for F16 values of 1, -1.5, 2 + 2^-9, 4 and 2^-24.
TEST(coded_bytes) {
    const uint16_t       f16[] = { 0x3c00, 0xbe00, 0x4001, 0x4400, 0x0001 };
    std::vector<uint8_t> want(8 + 4 * 10 + 4, 0);
    want[0]  = 7;    // bits of mantissa
    want[1]  = 2;    // of exponent
    want[2]  = 14;   // base: exponents 15, 16 and 17 have a code
    want[4]  = 2;    // outliers: a tenth bit of mantissa, and a subnormal number
    want[8]  = 0x80; // code 1
    want[9]  = 0xc0; // code 1, mantissa .1
    want[11] = 0x80; // code 3
    want[40] = 2;    // sign
    want[44] = 8;    // high bit of the codes
    memcpy(&want[48], &f16[2], 2);
    memcpy(&want[50], &f16[4], 2);
    packed_matrix out;
    CHECK(pack(f16, { { 1, 5, GGML_MACKO_TYPE_F16, 4, 5 }, CODED, 0 }, 1, &out, 7, 2) == 0 && out.values == want,
          "7, 2");
    want.insert(want.begin() + 48, 12, 0);
    want[0] = 10;
    want[4] = 1;
    want[44] |= 4; // 2 + 2^-9 has code 2
    want[56] = 4;  // and the lowest bit of mantissa
    want[60] = 1;
    want[61] = 0;
    want[62] = want[63] = 0;
    CHECK(pack(f16, { { 1, 5, GGML_MACKO_TYPE_F16, 4, 5 }, CODED, 0 }, 1, &out, 10, 2) == 0 && out.values == want,
          "10, 2");

    // the lowest base that codes most
    CHECK(pack(f16, { { 1, 1, GGML_MACKO_TYPE_F16, 4, 1 }, CODED, 0 }, 1, &out, 7, 2) == 0 && out.values[2] == 12 &&
              out.values[8] == 0x80 && out.values[44] == 1,
          "1 as code 3");
    packed_view view;
    out.values[2] = 13;
    out.values[8] = 0; // code 2: still 1
    CHECK(check_packed(out.arrays(), 1, &view) == GGML_MACKO_STATUS_NOT_CANONICAL, "base 13 is as good");
}

// Where a block begins, counted from the end of the last block.
static size_t coded_block(const P & p, int64_t i) {
    const int64_t n_blocks = packed_n_values(p.desc.dense.nnz) / 32;
    return static_cast<size_t>(8 + (n_blocks + i) * 4 * (p.values[0] + p.values[1] + 1));
}

TEST(malformed_coded_values_are_refused) {
    constexpr int BAD = GGML_MACKO_STATUS_BAD_FORMAT, LENGTH = GGML_MACKO_STATUS_BAD_COMPONENT,
                  NOT = GGML_MACKO_STATUS_NOT_CANONICAL;
    fault("unchanged", 0, CODED, 0, [](P &, A &) {});
    fault("no header", LENGTH, CODED, 0, [](P &, A & a) { a.n_values = 1; });
    fault("a word less", LENGTH, CODED, 0, [](P &, A & a) { a.n_values -= 1; });
    fault("a word more", LENGTH, CODED, 0, [](P & p, A & a) {
        p.values.resize(p.values.size() + 4);
        a = p.arrays();
    });
    fault("bits of mantissa", BAD, CODED, 0, [](P & p, A &) { p.values[0] = 8; });
    fault("bits of exponent", BAD, CODED, 0, [](P & p, A &) { p.values[1] = 1; });
    fault("base beyond F16", BAD, CODED, 0, [](P & p, A &) { p.values[2] = 29; });
    fault("fourth byte", BAD, CODED, 0, [](P & p, A &) { p.values[3] = 1; });
    fault("more outliers than values", LENGTH, CODED, 0, [](P & p, A &) { p.values[7] = 0x80; });
    fault("an outlier more", LENGTH, CODED, 0, [](P & p, A &) { p.values[4]++; });
    // the last place is padding
    fault("padding with a code", NOT, CODED, 0, [](P & p, A &) { p.values[coded_block(p, -1) + 31] = 0x80; });
    fault("padding with a mantissa", NOT, CODED, 0, [](P & p, A &) { p.values[coded_block(p, -1) + 31] = 1; });
    fault("padding with a sign", NOT, CODED, 0, [](P & p, A &) { p.values[coded_block(p, -1) + 35] |= 0x80; });
    // the outliers of the test matrix are subnormal numbers and -0.0 among others; they follow the last block
    fault("an outlier that fits", NOT, CODED, 0, [](P & p, A &) {
        p.values[coded_block(p, 0)]     = 0;
        p.values[coded_block(p, 0) + 1] = static_cast<uint8_t>((p.values[2] + 1) << 2);
    });
    fault("an outlier of Inf", GGML_MACKO_STATUS_NOT_FINITE, CODED, 0,
          [](P & p, A &) { p.values[coded_block(p, 0) + 1] = 0x7c; });
    fault("an outlier of zero", NOT, CODED, 0,
          [](P & p, A &) { p.values[coded_block(p, 0)] = p.values[coded_block(p, 0) + 1] = 0; });
}

// Random changes of bytes, lengths and numbers: refused, or decoded to the result of the slow decoder.
TEST(mutants_are_refused_or_round_trip) {
    rng     r(static_cast<uint64_t>(4));
    int64_t n_accepted = 0, n_all = 60000;
    for (int64_t i = 0; i < n_all; i++) {
        const int32_t      type = all_types[r.range(0, 2)], bits = all_index_bits[r.range(0, 3)];
        const dense_matrix m = random_dense(r, type, r.range(1, 6), r.range(1, 70), r.unit());
        packed_matrix      p;
        if (pack(m.bytes.data(), { m.desc, r.bits() & 1 ? type : CODED, bits }, 1, &p) != 0) {
            continue;
        }
        packed_arrays a = p.arrays();
        for (int64_t k = r.range(1, 2); k > 0; k--) {
            switch (r.range(0, 7)) {
                case 0: a.desc.dense.nnz += r.range(-2, 2); break;
                case 1: a.n_index = std::max<int64_t>(0, a.n_index + r.range(-1, 0) * 4); break;
                case 2:
                    p.row_ptr[static_cast<size_t>(r.range(0, m.desc.rows))] += static_cast<int32_t>(r.range(-2, 2));
                    break;
                case 3: p.row_ptr[static_cast<size_t>(r.range(0, m.desc.rows))] = static_cast<int32_t>(r.bits()); break;
                case 4:
                    p.index[static_cast<size_t>(r.range(0, static_cast<int64_t>(p.index.size()) - 1))] ^=
                        static_cast<uint8_t>(1 << r.range(0, 7));
                    break;
                case 5: a.desc.dense.cols += r.range(0, 1); break;
                default:
                    p.values[static_cast<size_t>(r.range(0, static_cast<int64_t>(p.values.size()) - 1))] ^=
                        static_cast<uint8_t>(1 << r.range(0, 7));
                    break;
            }
        }
        packed_view view;
        if (check_packed(a, 1, &view) == 0) {
            n_accepted++;
            check_decoded(view);
        }
    }
    const double share = static_cast<double>(n_accepted) / static_cast<double>(n_all);
    printf("%ld mutants, %.1f %% accepted\n", (long)n_all, 100 * share);
    CHECK(share > 0.05 && share < 0.7, "%.3f accepted: one side is hardly tested", share);
}

int main(int argc, char ** argv) { return test_main("test-packed", argc, argv); }
