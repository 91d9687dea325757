// EC-CSR: extraction, arrays, refusals (FORMAT.md section 6), and mutated arrays. A mutant must either be refused, or
// an independent decoder must decode it to the same matrix, which must give the same bytes when it is encoded again.
//
//     test-ec-csr [mutants = 60000] [seed = 1]
//     test-ec-csr --bench ROWS COLS [bits = 4] [threads = 2]   times and memory of one matrix of density .3
#include "codec/ec-csr/extract.h"
#include "codec/macko/encode.h"
#include "system.h"
#include "test.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <set>

using namespace macko;
using bytes = std::vector<uint8_t>;

// ---- data ----

struct dense_matrix {
    int64_t rows, cols;
    int32_t type;
    bytes   data;
    int64_t nbytes() const { return value_nbytes(type); }
    void    set(int64_t r, int64_t c, uint32_t bits) {
        memcpy(data.data() + (r * cols + c) * nbytes(), &bits, static_cast<size_t>(nbytes()));
    }
    uint32_t at(int64_t r, int64_t c) const {
        uint32_t bits = 0;
        memcpy(&bits, data.data() + (r * cols + c) * nbytes(), static_cast<size_t>(nbytes()));
        return bits;
    }
    int64_t nnz() const {
        int64_t n = 0;
        for (int64_t i = 0; i < rows * cols; i++) {
            n += at(0, i) != 0;
        }
        return n;
    }
};

static dense_matrix zeros(int64_t rows, int64_t cols, int32_t type) {
    return { rows, cols, type, bytes(static_cast<size_t>(rows * cols * value_nbytes(type)), 0) };
}

// any finite non-zero bit pattern: signs, -0.0, subnormals, the largest
static uint32_t random_value(rng & r, int32_t type) {
    for (;;) {
        const uint32_t bits = static_cast<uint32_t>(r.bits()) & (type == GGML_MACKO_TYPE_F32 ? 0xffffffffu : 0xffffu);
        const uint32_t e = type == GGML_MACKO_TYPE_F32 ? 0x7f800000u : type == GGML_MACKO_TYPE_F16 ? 0x7c00u : 0x7f80u;
        if (r.range(0, 19) == 0) {
            return type == GGML_MACKO_TYPE_F32 ? 0x80000000u : 0x8000u;
        }
        if (bits != 0 && (bits & e) != e) {
            return bits;
        }
    }
}

// n_patterns = 0: independent positions; otherwise each row follows one of n_patterns patterns, some only in part.
static dense_matrix random_matrix(rng & r, int64_t rows, int64_t cols, int32_t type, double density,
                                  int64_t n_patterns) {
    dense_matrix                   m = zeros(rows, cols, type);
    std::vector<std::vector<bool>> patterns(static_cast<size_t>(n_patterns),
                                            std::vector<bool>(static_cast<size_t>(cols)));
    for (auto & p : patterns) {
        for (size_t c = 0; c < p.size(); c++) {
            p[c] = r.unit() < density;
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        const double noise = r.range(0, 3) ? 0.02 : 0.3;
        const bool   empty = r.range(0, 9) == 0;
        const size_t p     = n_patterns ? static_cast<size_t>(r.range(0, n_patterns - 1)) : 0;
        for (int64_t c = 0; c < cols && !empty; c++) {
            const bool free = n_patterns == 0 || r.unit() < noise;
            if (free ? r.unit() < density : static_cast<bool>(patterns[p][static_cast<size_t>(c)])) {
                m.set(row, c, random_value(r, type));
            }
        }
    }
    return m;
}

// ---- the library ----

static int encode(const dense_matrix & d, int32_t bits, const extract_options & o, int n_threads, ec_csr_matrix * out) {
    const macko_desc desc = { d.rows, d.cols, d.type, bits, d.nnz() };
    ec_csr_blocks    blocks;
    if (const int status = extract_blocks(desc, d.data.data(), o, n_threads, &blocks)) {
        return status;
    }
    return assemble(desc, d.data.data(), blocks, n_threads, out);
}

static int decode(const ec_csr_matrix & m, int n_threads, bytes * dense) {
    ec_csr_view view;
    if (const int status = check_ec_csr(m.arrays(), &view)) {
        return status;
    }
    dense->assign(static_cast<size_t>(m.desc.rows * m.desc.cols * value_nbytes(m.desc.type)), 0xee);
    return view.decode(dense->data(), n_threads);
}

static bool same_arrays(const ec_csr_matrix & a, const ec_csr_matrix & b) {
    return a.sets.size() == b.sets.size() &&
           !memcmp(a.sets.data(), b.sets.data(), a.sets.size() * sizeof(ec_csr_set)) && a.rows == b.rows &&
           a.blk_ptr == b.blk_ptr && a.bases == b.bases && a.deltas == b.deltas && a.values == b.values;
}

// ---- the other decoder: FORMAT.md section 6 word for word ----

// Decodes to dense elements, and to the blocks as rows and columns of non-zeros. Relies on the library's checks.
static bytes take_apart(const ec_csr_matrix & m, ec_csr_blocks * blocks) {
    const int64_t nb = value_nbytes(m.desc.type);
    bytes         dense(static_cast<size_t>(m.desc.rows * m.desc.cols * nb), 0);
    size_t        row = 0, ptr = 0, block = 0, col0 = 0, value0 = 0;
    for (const ec_csr_set & s : m.sets) {
        const size_t g = static_cast<size_t>(s.granularity), v = static_cast<size_t>(s.vector_size);
        for (int32_t b = 0; b < s.n_blocks; b++, block++, row += g) {
            const size_t n = static_cast<size_t>(m.blk_ptr[ptr + 1 + static_cast<size_t>(b)] -
                                                 m.blk_ptr[ptr + static_cast<size_t>(b)]);
            std::vector<std::pair<int64_t, size_t>> columns(n); // in the list: column, position in the arrays
            for (size_t chunk = 0; chunk < n / (32 * v); chunk++) {
                for (size_t lane = 0; lane < 32; lane++) {
                    for (size_t j = 0; j < v; j++) {
                        columns[lane * (n / 32) + chunk * v + j].second = (chunk * 32 + lane) * v + j;
                    }
                }
            }
            ec_csr_block out = { s.granularity,
                                 s.vector_size,
                                 static_cast<int64_t>(blocks->rows.size()),
                                 static_cast<int64_t>(blocks->cols.size()),
                                 0,
                                 static_cast<int64_t>(n) };
            blocks->rows.insert(blocks->rows.end(), m.rows.begin() + static_cast<int64_t>(row),
                                m.rows.begin() + static_cast<int64_t>(row + g));
            for (size_t i = 0; i < n; i++) {
                const size_t at = (col0 + columns[i].second) * static_cast<size_t>(m.desc.delta_bits);
                if (i % (n / 32) == 0) {
                    uint16_t base16;
                    int32_t  base32;
                    memcpy(&base16,
                           m.bases.data() +
                               (block * 32 + i / (n / 32)) * static_cast<size_t>(ec_base_nbytes(m.desc.cols)),
                           2);
                    memcpy(&base32,
                           m.bases.data() +
                               (block * 32 + i / (n / 32)) * static_cast<size_t>(ec_base_nbytes(m.desc.cols)),
                           ec_base_nbytes(m.desc.cols) == 2 ? 2 : 4);
                    columns[i].first = ec_base_nbytes(m.desc.cols) == 2 ? base16 : base32;
                } else {
                    columns[i].first =
                        columns[i - 1].first + ((m.deltas[at / 8] >> (at % 8)) & ((1 << m.desc.delta_bits) - 1));
                }
                bool any = false;
                for (size_t k = 0; k < g; k++) {
                    const uint8_t * value =
                        m.values.data() + (value0 + columns[i].second * g + k) * static_cast<size_t>(nb);
                    if (std::any_of(value, value + nb, [](uint8_t x) { return x != 0; })) {
                        memcpy(dense.data() +
                                   (static_cast<int64_t>(m.rows[row + k]) * m.desc.cols + columns[i].first) * nb,
                               value, static_cast<size_t>(nb));
                        any = true;
                    }
                }
                if (any) {
                    blocks->cols.push_back(static_cast<int32_t>(columns[i].first));
                    out.n_cols++;
                }
            }
            blocks->blocks.push_back(out);
            col0 += n;
            value0 += n * g;
        }
        ptr += static_cast<size_t>(s.n_blocks) + 1;
    }
    return dense;
}

static void check_accepted(const ec_csr_matrix & m, const bytes & decoded, const char * what) {
    ec_csr_blocks blocks;
    CHECK(take_apart(m, &blocks) == decoded, "%s: decoded differently", what);
    ec_csr_matrix again;
    CHECK(assemble(m.desc, decoded.data(), blocks, 1, &again) == 0 && same_arrays(m, again),
          "%s: accepted, but not canonical", what);
}

// ---- tests ----

constexpr extract_options DEFAULTS = { 16, 128, true, 0 };

TEST(example_of_the_specification) {
    dense_matrix d = zeros(1, 64, GGML_MACKO_TYPE_F16);
    d.set(0, 3, 0x3c00);
    d.set(0, 5, 0xbc00);
    d.set(0, 40, 0x4000);
    ec_csr_matrix m;
    CHECK(encode(d, 4, DEFAULTS, 1, &m) == 0, "%s", ggml_macko_last_error());
    std::vector<uint16_t> bases(32, 40), values(32, 0);
    const uint16_t        first[] = { 3, 5, 20, 35 };
    std::copy(first, first + 4, bases.begin());
    values[0] = 0x3c00;
    values[1] = 0xbc00;
    values[4] = 0x4000;
    CHECK(m.sets.size() == 1 && m.sets[0].granularity == 1 && m.sets[0].vector_size == 1 && m.sets[0].n_blocks == 1 &&
              m.sets[0].n_cols == 32,
          "sets");
    CHECK(m.rows == std::vector<int32_t>{ 0 } && m.blk_ptr == (std::vector<int32_t>{ 0, 32 }) &&
              m.deltas == bytes(16, 0),
          "rows, blk_ptr or deltas");
    CHECK(!memcmp(m.bases.data(), bases.data(), 64) && m.bases.size() == 64 &&
              !memcmp(m.values.data(), values.data(), 64) && m.values.size() == 64,
          "bases or values");
}

// A block with two rows and 256 columns: the position of each delta and value.
TEST(order_in_memory) {
    dense_matrix d = zeros(3, 600, GGML_MACKO_TYPE_F16);
    for (int64_t c = 0; c < 256; c++) {
        d.set(0, 2 * c, static_cast<uint32_t>(1 + c));
        d.set(2, 2 * c, static_cast<uint32_t>(1001 + c));
    }
    ec_csr_matrix m;
    CHECK(encode(d, 8, DEFAULTS, 1, &m) == 0, "%s", ggml_macko_last_error());
    CHECK(m.sets.size() == 1 && m.sets[0].granularity == 2 && m.sets[0].n_blocks == 1 &&
              m.rows == (std::vector<int32_t>{ 0, 2 }),
          "%zu sets", m.sets.size());
    const auto * bases  = reinterpret_cast<const uint16_t *>(m.bases.data());
    const auto * values = reinterpret_cast<const uint16_t *>(m.values.data());
    for (int64_t c = 0; c < 256; c++) { // 8 columns per lane: two chunks of 4
        const int64_t lane = c / 8, k = c % 8, place = k / 4 * 128 + lane * 4 + k % 4;
        CHECK(m.deltas[static_cast<size_t>(place)] == (k ? 2 : 0) && bases[lane] == 16 * lane,
              "delta or base of column %d", static_cast<int>(c));
        CHECK(values[2 * place] == 1 + c && values[2 * place + 1] == 1001 + c, "values of column %d",
              static_cast<int>(c));
    }
}

TEST(round_trips) {
    rng                           r(5);
    std::set<std::pair<int, int>> kinds; // g, v of the sets that came up
    const int64_t                 shapes[][2] = { { 1, 1 },    { 1, 128 },  { 2, 127 },  { 3, 129 }, { 5, 33 },
                                                  { 7, 1000 }, { 40, 300 }, { 64, 513 }, { 33, 700 } };
    for (const auto & shape : shapes) {
        for (const double density : { 0.0, 0.004, 0.1, 0.3, 0.6, 1.0 }) {
            for (const int32_t type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 }) {
                const int64_t      patterns = shape[0] > 30 ? 3 : 0;
                const dense_matrix d        = random_matrix(r, shape[0], shape[1], type, density, patterns);
                for (const int32_t bits : { 4, 8 }) {
                    for (const extract_options o :
                         { DEFAULTS, extract_options{ 1, 128, false, 0 }, extract_options{ 64, 256, false, 9 } }) {
                        char what[96];
                        snprintf(what, sizeof(what), "%dx%d at %g, type %d, %d bits, g %d", static_cast<int>(d.rows),
                                 static_cast<int>(d.cols), density, type, bits, o.max_granularity);
                        ec_csr_matrix one, three;
                        CHECK(encode(d, bits, o, 1, &one) == 0 && encode(d, bits, o, 3, &three) == 0, "%s: %s", what,
                              ggml_macko_last_error());
                        CHECK(same_arrays(one, three), "%s: depends on the number of threads", what);
                        bytes back;
                        CHECK(decode(one, 3, &back) == 0, "%s: %s", what, ggml_macko_last_error());
                        CHECK(back == d.data, "%s: decoded to something else", what);
                        check_accepted(one, back, what);
                        for (const ec_csr_set & s : one.sets) {
                            kinds.emplace(s.granularity, s.vector_size);
                            CHECK(s.granularity <= o.max_granularity, "%s: a block with %d rows", what, s.granularity);
                        }
                    }
                }
            }
        }
    }
    for (const auto & kind : { std::make_pair(1, 1), { 1, 4 }, { 2, 4 }, { 4, 4 }, { 8, 4 }, { 16, 4 } }) {
        CHECK(kinds.count(kind), "no test matrix had blocks with %d rows and vectors of %d", kind.first, kind.second);
    }
}

// 32-bit bases
TEST(wide_matrix) {
    rng r(6);
    for (const int64_t cols : { 65536, 65537, 70000 }) {
        dense_matrix d = random_matrix(r, 4, cols, GGML_MACKO_TYPE_F16, 0.02, 1);
        d.set(1, cols - 1, 0x3c00);
        for (const int32_t bits : { 4, 8 }) {
            ec_csr_matrix m;
            bytes         back;
            CHECK(encode(d, bits, DEFAULTS, 2, &m) == 0 && decode(m, 2, &back) == 0, "%s", ggml_macko_last_error());
            CHECK(back == d.data, "%d columns", static_cast<int>(cols));
            size_t n_blocks = 0;
            for (const ec_csr_set & set : m.sets) {
                n_blocks += static_cast<size_t>(set.n_blocks);
            }
            CHECK(m.bases.size() == 32 * n_blocks * (cols > 65536 ? 4 : 2), "%d columns: %zu bytes of bases",
                  static_cast<int>(cols), m.bases.size());
            check_accepted(m, back, "wide");
        }
    }
}

// Gaps around the largest delta, with cuts and padding near them.
TEST(gaps) {
    for (const int32_t bits : { 4, 8 }) {
        for (const int64_t n_before : { 0, 1, 31, 32, 95, 96, 126, 127, 128, 129, 255 }) {
            for (const int64_t gap : { 14, 15, 16, 17, 30, 31, 46, 254, 255, 256, 510, 511, 40000 }) {
                dense_matrix d = zeros(1, n_before + gap + 140, GGML_MACKO_TYPE_F16);
                for (int64_t c = 0; c < n_before; c++) {
                    d.set(0, c, 0x3c00);
                }
                for (int64_t c = 0; c < 139; c += 3) {
                    d.set(0, n_before + gap + c, 0x8000);
                }
                ec_csr_matrix m;
                bytes         back;
                CHECK(encode(d, bits, DEFAULTS, 1, &m) == 0 && decode(m, 1, &back) == 0, "%d + %d, %d bits: %s",
                      static_cast<int>(n_before), static_cast<int>(gap), bits, ggml_macko_last_error());
                CHECK(back == d.data, "%d + %d, %d bits", static_cast<int>(n_before), static_cast<int>(gap), bits);
                check_accepted(m, back, "gap");
            }
        }
    }
}

TEST(options) {
    rng                r(8);
    const dense_matrix d = random_matrix(r, 60, 900, GGML_MACKO_TYPE_F16, 0.5, 0);
    for (const extract_options bad : { extract_options{ 0, 128, true, 0 },
                                       { 3, 128, true, 0 },
                                       { 128, 128, true, 0 },
                                       { 4, 0, true, 0 },
                                       { 4, 64, true, 0 },
                                       { 4, 129, true, 0 } }) {
        ec_csr_matrix m;
        CHECK(encode(d, 8, bad, 1, &m) == GGML_MACKO_STATUS_BAD_ARGUMENT, "g %d, min %d", bad.max_granularity,
              bad.min_columns);
    }
    // a seed changes only the blocks
    ec_csr_matrix a, b, c;
    CHECK(encode(d, 8, { 16, 128, true, 1 }, 2, &a) == 0 && encode(d, 8, { 16, 128, true, 2 }, 2, &b) == 0 &&
              encode(d, 8, { 16, 128, true, 1 }, 1, &c) == 0,
          "%s", ggml_macko_last_error());
    CHECK(!same_arrays(a, b) && same_arrays(a, c), "seeds");
    // clipping: one long row among short ones
    dense_matrix uneven = random_matrix(r, 40, 4000, GGML_MACKO_TYPE_F16, 0.05, 0);
    for (int64_t col = 0; col < 4000; col++) {
        uneven.set(7, col, 0x3c00);
    }
    for (const int32_t g : { 1, 2 }) {
        ec_csr_matrix clipped, whole;
        CHECK(encode(uneven, 8, { g, 128, true, 0 }, 1, &clipped) == 0 &&
                  encode(uneven, 8, { g, 128, false, 0 }, 1, &whole) == 0,
              "%s", ggml_macko_last_error());
        int64_t n_nonempty = 0;
        for (int64_t row = 0; row < uneven.rows; row++) {
            bool any = false;
            for (int64_t col = 0; col < uneven.cols; col++) {
                any = any || uneven.at(row, col);
            }
            n_nonempty += any;
        }
        const int64_t      limit       = (2 * uneven.nnz() / n_nonempty + 127) / 128 * 128;
        const ec_csr_set & rows_of_one = clipped.sets[g == 1 ? 0 : 1]; // long blocks, the longest first
        CHECK(rows_of_one.granularity == 1 && rows_of_one.vector_size == 4, "g %d: no long blocks", g);
        const int32_t n = clipped.blk_ptr[static_cast<size_t>(g == 1 ? 1 : clipped.sets[0].n_blocks + 2)];
        CHECK(n == limit, "g %d: %d columns in the longest block, limit %d", g, n, static_cast<int>(limit));
        CHECK(g == 2 || whole.blk_ptr[1] > 3000, "%d columns in the longest block without clipping", whole.blk_ptr[1]);
    }
}

TEST(recoded_to_macko) {
    rng r(9);
    for (const int32_t type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_F32 }) {
        for (const int32_t bits : { 4, 8 }) {
            const dense_matrix d = random_matrix(r, 50, 500, type, 0.1, 4);
            ec_csr_matrix      m;
            macko_matrix       recoded, made;
            ec_csr_view        view;
            CHECK(encode(d, bits, DEFAULTS, 2, &m) == 0 && check_ec_csr(m.arrays(), &view) == 0 &&
                      recode(view, 3, &recoded) == 0,
                  "%s", ggml_macko_last_error());
            ggml_macko_count       count = {};
            std::vector<row_count> rows(static_cast<size_t>(d.rows));
            CHECK(count_dense(d.data.data(), type, d.rows, d.cols, 1, &count, rows.data()) == 0 &&
                      encode(d.data.data(), { d.rows, d.cols, type, bits, count.nnz }, rows, 1, &made) == 0,
                  "encode");
            CHECK(recoded.row_ptr == made.row_ptr && recoded.values == made.values && recoded.deltas == made.deltas,
                  "type %d, %d bits: not what the MACKO encoder makes", type, bits);
            CHECK(made.row_ptr.back() <= max_recoded(m.desc), "%d entries, bound %d", made.row_ptr.back(),
                  static_cast<int>(max_recoded(m.desc)));
        }
    }
}

// ---- faults: each changes one thing in a valid matrix, and must get its own status ----

constexpr int BLOCK = GGML_MACKO_STATUS_BAD_BLOCK, COMPONENT = GGML_MACKO_STATUS_BAD_COMPONENT,
              CANONICAL = GGML_MACKO_STATUS_NOT_CANONICAL;

// 40 x 700 values in four sets: blocks of four rows, of two rows, long ones of one row, short ones of one row
static const ec_csr_matrix & matrix_of_four_sets() {
    static const ec_csr_matrix matrix = [] {
        rng                r(10);
        const dense_matrix d = random_matrix(r, 40, 700, GGML_MACKO_TYPE_F16, 0.5, 3);
        ec_csr_matrix      m;
        CHECK(encode(d, 8, { 4, 128, false, 0 }, 1, &m) == 0, "%s", ggml_macko_last_error());
        CHECK(m.sets.size() == 4 && m.sets[0].granularity == 4 && m.sets[1].granularity == 2 &&
                  m.sets[2].vector_size == 4 && m.sets[3].vector_size == 1 && m.sets[0].n_blocks > 2,
              "the test needs a matrix with four sets");
        return m;
    }();
    return matrix;
}

template <typename F> static void fault(const ec_csr_matrix & valid, const char * what, int status, F && change) {
    ec_csr_matrix m = valid;
    change(m);
    bytes     back;
    const int found = decode(m, 2, &back);
    CHECK(found == status, "%s: %s, not %s (%s)", what, ggml_macko_status_name(found), ggml_macko_status_name(status),
          ggml_macko_last_error());
}

template <typename F> static void fault(const char * what, int status, F && change) {
    fault(matrix_of_four_sets(), what, status, change);
}

// The first element of a set in each array of matrix_of_four_sets(): blk_ptr, rows, deltas, bases, values.
template <typename F> static size_t sum_before(size_t set, F && n) {
    const ec_csr_matrix & m  = matrix_of_four_sets();
    size_t                at = 0;
    for (size_t i = 0; i < set; i++) {
        at += static_cast<size_t>(n(m.sets[i]));
    }
    return at;
}
static size_t ptr_of(size_t set) {
    return sum_before(set, [](const auto & s) { return static_cast<int64_t>(s.n_blocks) + 1; });
}
static size_t row_of(size_t set) {
    return sum_before(set, [](const auto & s) { return s.n_blocks * s.granularity; });
}
static size_t col_of(size_t set) {
    return sum_before(set, [](const auto & s) { return s.n_cols; });
}
static size_t base_of(size_t set) {
    return sum_before(set, [](const auto & s) { return 32 * static_cast<int64_t>(s.n_blocks); });
}
static size_t value_of(size_t set) {
    return sum_before(set, [](const auto & s) { return s.n_cols * s.granularity; });
}

static void set_base(ec_csr_matrix & m, size_t i, uint16_t v) { memcpy(m.bases.data() + 2 * i, &v, 2); }
static void set_value(ec_csr_matrix & m, size_t i, uint16_t v) { memcpy(m.values.data() + 2 * i, &v, 2); }

TEST(malformed_set_table_is_refused) {
    fault("nothing", GGML_MACKO_STATUS_OK, [](ec_csr_matrix &) {});
    fault("no sets", BLOCK, [](ec_csr_matrix & m) { m.sets.clear(); });
    fault("nine sets", BLOCK, [](ec_csr_matrix & m) { m.sets.resize(9, m.sets[0]); });
    for (const int g : { 0, -1, 3, 128, INT32_MIN }) {
        fault("granularity", BLOCK, [&](ec_csr_matrix & m) { m.sets[0].granularity = g; });
    }
    fault("vector size", BLOCK, [](ec_csr_matrix & m) { m.sets[2].vector_size = 2; });
    fault("short block of two rows", BLOCK, [](ec_csr_matrix & m) { m.sets[1].vector_size = 1; });
    fault("set order", BLOCK, [](ec_csr_matrix & m) { std::swap(m.sets[0], m.sets[1]); });
    fault("a set twice", BLOCK, [](ec_csr_matrix & m) { m.sets[1].granularity = 4; });
    fault("short before long", BLOCK, [](ec_csr_matrix & m) { std::swap(m.sets[2], m.sets[3]); });
    fault("no blocks", BLOCK, [](ec_csr_matrix & m) { m.sets[0].n_blocks = 0; });
    fault("negative blocks", BLOCK, [](ec_csr_matrix & m) { m.sets[0].n_blocks = -1; });
    fault("no columns", BLOCK, [](ec_csr_matrix & m) { m.sets[0].n_cols = 0; });
    fault("2^31 - 1 blocks", GGML_MACKO_STATUS_LIMIT, [](ec_csr_matrix & m) { m.sets[0].n_blocks = INT32_MAX; });
    fault("2^31 - 1 columns", GGML_MACKO_STATUS_LIMIT, [](ec_csr_matrix & m) { m.sets[0].n_cols = INT32_MAX; });
}

TEST(counts_that_do_not_match_are_refused) {
    fault("one block more", COMPONENT, [](ec_csr_matrix & m) { m.sets[0].n_blocks++; });
    fault("one chunk more", COMPONENT, [](ec_csr_matrix & m) { m.sets[0].n_cols += 128; });
    fault("values short", COMPONENT, [](ec_csr_matrix & m) { m.values.resize(m.values.size() - 2); });
    fault("values long", COMPONENT, [](ec_csr_matrix & m) { m.values.resize(m.values.size() + 2); });
    fault("deltas long", COMPONENT, [](ec_csr_matrix & m) { m.deltas.push_back(0); });
    fault("bases short", COMPONENT, [](ec_csr_matrix & m) { m.bases.resize(m.bases.size() - 2); });
    fault("blk_ptr long", COMPONENT, [](ec_csr_matrix & m) { m.blk_ptr.push_back(0); });
    fault("rows short", COMPONENT, [](ec_csr_matrix & m) { m.rows.pop_back(); });
    fault("nnz", GGML_MACKO_STATUS_BAD_NNZ, [](ec_csr_matrix & m) { m.desc.nnz--; });
    fault("nnz 0", CANONICAL, [](ec_csr_matrix & m) { m.desc.nnz = 0; });
    fault("delta_bits 2", GGML_MACKO_STATUS_BAD_FORMAT, [](ec_csr_matrix & m) { m.desc.delta_bits = 2; });
}

TEST(malformed_blk_ptr_is_refused) {
    fault("blk_ptr[0]", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[0] = 128; });
    fault("blk_ptr of set 2", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[ptr_of(2)] = -128; });
    fault("blk_ptr decreases", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[1] = -128; });
    fault("blk_ptr of no unit", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[1] += 32; });
    fault("blk_ptr past the end", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[1] = INT32_MAX; });
    fault("empty block", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[1] = 0; });
    fault("long short block", BLOCK, [](ec_csr_matrix & m) { m.blk_ptr[ptr_of(3) + 1] = 160; });
}

TEST(malformed_row_of_a_block_is_refused) {
    fault("row past the last", BLOCK, [](ec_csr_matrix & m) { m.rows[3] = 40; });
    fault("negative row", BLOCK, [](ec_csr_matrix & m) { m.rows[0] = -1; });
    fault("row twice in a block", BLOCK, [](ec_csr_matrix & m) { m.rows[1] = m.rows[0]; });
    fault("rows unordered", BLOCK, [](ec_csr_matrix & m) { std::swap(m.rows[0], m.rows[1]); });
    fault("blocks unordered", CANONICAL, [](ec_csr_matrix & m) { // swaps two adjacent blocks of equal length
        const size_t p = ptr_of(3), n = static_cast<size_t>(m.sets[3].n_blocks);
        for (size_t b = 1; b < n; b++) {
            if (m.blk_ptr[p + b + 1] - m.blk_ptr[p + b] == m.blk_ptr[p + b] - m.blk_ptr[p + b - 1]) {
                std::swap(m.rows[row_of(3) + b], m.rows[row_of(3) + b - 1]);
                return;
            }
        }
        CHECK(false, "no two blocks of one length");
    });
}

TEST(malformed_column_is_refused) {
    fault("two blocks over one element", GGML_MACKO_STATUS_OVERLAP, [](ec_csr_matrix & m) {
        ec_csr_blocks blocks;
        const bytes   dense = take_apart(m, &blocks);
        // the last short block once more, with a first column less: another base
        blocks.blocks.push_back(blocks.blocks.back());
        blocks.blocks.back().cols++;
        blocks.blocks.back().n_cols--;
        const macko_desc desc = m.desc;
        CHECK(assemble(desc, dense.data(), blocks, 1, &m) == 0, "%s", ggml_macko_last_error());
    });
    fault("base past the last column", GGML_MACKO_STATUS_BAD_COLUMN, [](ec_csr_matrix & m) { set_base(m, 31, 700); });
    fault("base 65535", GGML_MACKO_STATUS_BAD_COLUMN, [](ec_csr_matrix & m) { set_base(m, 31, 65535); });
    fault("deltas past the last column", GGML_MACKO_STATUS_BAD_COLUMN,
          [](ec_csr_matrix & m) { m.deltas[31 * 4 + 1] = m.deltas[31 * 4 + 2] = m.deltas[31 * 4 + 3] = 255; });
    fault("base of a lane too low", CANONICAL, [](ec_csr_matrix & m) { set_base(m, 1, 0); });
    fault("base of a short block far off", CANONICAL, [](ec_csr_matrix & m) { set_base(m, base_of(3) + 31, 0); });
    fault("first delta of a lane", CANONICAL, [](ec_csr_matrix & m) { m.deltas[0] = 1; });
    fault("first delta of a single lane", CANONICAL, [](ec_csr_matrix & m) { m.deltas[col_of(3)] = 1; });
    fault("delta 0", CANONICAL, [](ec_csr_matrix & m) { m.deltas[1] = 0; });
    fault("delta 0 in a long block", CANONICAL, [](ec_csr_matrix & m) { m.deltas[col_of(2) + 1] = 0; });
}

TEST(zero_or_non_finite_value_is_refused) {
    fault("zero in a block of several rows", CANONICAL, [](ec_csr_matrix & m) { set_value(m, 5, 0); });
    fault("zero that no gap needs", CANONICAL, [](ec_csr_matrix & m) { set_value(m, value_of(2) + 1, 0); });
    fault("zero first", CANONICAL, [](ec_csr_matrix & m) { set_value(m, value_of(2), 0); });
    fault("value in padding", CANONICAL, [](ec_csr_matrix & m) { set_value(m, m.values.size() / 2 - 1, 0x3c00); });
    fault("infinity", GGML_MACKO_STATUS_NOT_FINITE, [](ec_csr_matrix & m) { set_value(m, 0, 0x7c00); });
    fault("NaN in a long block", GGML_MACKO_STATUS_NOT_FINITE,
          [](ec_csr_matrix & m) { set_value(m, value_of(2), 0xfe00); });
}

TEST(superfluous_padding_is_refused) {
    ec_csr_matrix base;
    dense_matrix  nothing = zeros(3, 40, GGML_MACKO_TYPE_F16);
    CHECK(encode(nothing, 4, DEFAULTS, 1, &base) == 0, "%s", ggml_macko_last_error());
    fault(base, "all zero", GGML_MACKO_STATUS_OK, [](ec_csr_matrix &) {});
    fault(base, "all zero in row 1", CANONICAL, [](ec_csr_matrix & m) { m.rows[0] = 1; });
    fault(base, "all zero at column 1", CANONICAL, [](ec_csr_matrix & m) { set_base(m, 0, 1); });
    fault(base, "all zero, last lane at column 1", CANONICAL, [](ec_csr_matrix & m) { set_base(m, 31, 1); });
    fault(base, "nnz 1 of all zero", CANONICAL, [](ec_csr_matrix & m) { m.desc.nnz = 1; });
    nothing.set(1, 7, 0x3c00);
    CHECK(encode(nothing, 4, DEFAULTS, 1, &base) == 0, "%s", ggml_macko_last_error());
    fault(base, "a unit of padding", CANONICAL, [](ec_csr_matrix & m) {
        m.sets[0].n_cols = m.blk_ptr[1] = 64;
        m.deltas.resize(32, 0);
        m.values.resize(128, 0);
    });
    fault(base, "a filler at the end", CANONICAL, [](ec_csr_matrix & m) {
        for (size_t lane = 1; lane < 32; lane++) {
            set_base(m, lane, 22);
        }
    });
}

TEST(block_of_one_row_belongs_to_one_set) {
    for (const int64_t n : { 1, 33, 96, 97, 128 }) {
        dense_matrix d = zeros(1, n, GGML_MACKO_TYPE_F16);
        for (int64_t col = 0; col < n; col++) {
            d.set(0, col, 0x3c00);
        }
        ec_csr_matrix m;
        CHECK(encode(d, 8, DEFAULTS, 1, &m) == 0, "%s", ggml_macko_last_error());
        const bool is_short = n <= 96;
        CHECK(m.sets.size() == 1 && m.sets[0].vector_size == (is_short ? 1 : 4) &&
                  m.sets[0].n_cols == (is_short ? (n + 31) / 32 * 32 : 128),
              "%d entries", static_cast<int>(n));
        fault(m, "the other set", is_short ? CANONICAL : BLOCK, [&](ec_csr_matrix & other) {
            ec_csr_blocks    blocks;
            const bytes      dense       = take_apart(m, &blocks);
            const macko_desc desc        = m.desc;
            blocks.blocks[0].vector_size = is_short ? 4 : 1;
            blocks.blocks[0].n_stored    = 128;
            CHECK(assemble(desc, dense.data(), blocks, 1, &other) == 0, "%s", ggml_macko_last_error());
        });
    }
}

// ---- mutants ----

static void mutate(rng & r, ec_csr_matrix * m) {
    const auto number = [&](int64_t old) -> int64_t {
        static const int64_t odd[] = { 0, 1, -1, 2, 4, 31, 32, 64, 127, 128, 255, 256, 65535, INT32_MAX, INT32_MIN };
        return r.range(0, 1) ? old + r.range(-2, 2) : r.range(0, 1) ? old + 32 * r.range(-4, 4) : odd[r.range(0, 14)];
    };
    const auto   pick = [&](size_t n) { return static_cast<size_t>(r.range(0, static_cast<int64_t>(n) - 1)); };
    const size_t nb   = static_cast<size_t>(value_nbytes(m->desc.type));
    switch (r.range(0, 11)) {
        case 0: {
            int32_t * field = reinterpret_cast<int32_t *>(m->sets.data()) + pick(4 * m->sets.size());
            *field          = static_cast<int32_t>(number(*field));
            break;
        }
        case 1: {
            int32_t & x = m->rows[pick(m->rows.size())];
            x           = static_cast<int32_t>(number(x));
            break;
        }
        case 2: std::swap(m->rows[pick(m->rows.size())], m->rows[pick(m->rows.size())]); break;
        case 3: {
            int32_t & x = m->blk_ptr[pick(m->blk_ptr.size())];
            x           = static_cast<int32_t>(number(x));
            break;
        }
        case 4: {
            const size_t at = 2 * pick(m->bases.size() / 2);
            uint16_t     x;
            memcpy(&x, &m->bases[at], 2);
            x = static_cast<uint16_t>(number(x));
            memcpy(&m->bases[at], &x, 2);
            break;
        }
        case 5: m->deltas[pick(m->deltas.size())] = static_cast<uint8_t>(r.bits()); break;
        case 6: m->deltas[pick(m->deltas.size())] ^= static_cast<uint8_t>(1 << r.range(0, 7)); break;
        case 7: {
            const size_t   at = nb * pick(m->values.size() / nb);
            const uint64_t x  = r.range(0, 2) ? 0 : r.bits();
            memcpy(&m->values[at], &x, nb);
            break;
        }
        case 8: { // lengths
            bytes * array = std::vector<bytes *>{ &m->bases, &m->deltas, &m->values }[pick(3)];
            array->resize(
                static_cast<size_t>(std::max<int64_t>(0, static_cast<int64_t>(array->size()) + 32 * r.range(-1, 1))));
            break;
        }
        case 9:  m->desc.nnz += r.range(-1, 1); break;
        default: { // another value: valid where one was
            const size_t at = nb * pick(m->values.size() / nb);
            if (std::any_of(&m->values[at], &m->values[at] + nb, [](uint8_t x) { return x != 0; })) {
                const uint32_t x = random_value(r, m->desc.type);
                memcpy(&m->values[at], &x, nb);
            }
            break;
        }
    }
}

TEST(mutants_are_refused_or_round_trip) {
    const int                  n_mutants = random_cases(60000);
    const uint64_t             seed      = seed_given;
    rng                        r(seed);
    std::map<int, int64_t>     statuses;
    std::vector<ec_csr_matrix> bases;
    for (int i = 0; i < 12; i++) {
        const dense_matrix d =
            random_matrix(r, r.range(1, 14), r.range(1, 700), i % 3 == 2 ? GGML_MACKO_TYPE_F32 : GGML_MACKO_TYPE_F16,
                          r.unit() * 0.6, i % 2 ? 2 : 0);
        bases.emplace_back();
        CHECK(encode(d, i % 4 < 2 ? 4 : 8, { 8, 128, i % 5 != 0, seed }, 1, &bases.back()) == 0, "%s",
              ggml_macko_last_error());
    }
    for (int64_t i = 0; i < n_mutants; i++) {
        ec_csr_matrix m = bases[static_cast<size_t>(i) % bases.size()];
        for (int64_t n = r.range(1, 2); n > 0; n--) {
            mutate(r, &m);
            if (m.values.empty() || m.deltas.empty() || m.bases.empty()) {
                break;
            }
        }
        bytes     back;
        const int status = decode(m, 1, &back);
        statuses[status]++;
        CHECK(strcmp(ggml_macko_status_name(status), "unknown") != 0 && status != GGML_MACKO_STATUS_BAD_ARGUMENT,
              "mutant %lld: status %d", static_cast<long long>(i), status);
        if (status == 0) {
            check_accepted(m, back, "mutant");
        }
    }
    for (const auto & [status, n] : statuses) {
        printf("%10lld  %s\n", static_cast<long long>(n), ggml_macko_status_name(status));
    }
    CHECK(n_mutants < 1000 || (statuses[0] > n_mutants / 20 && statuses[0] < n_mutants / 2),
          "%lld accepted: one side is hardly tested", static_cast<long long>(statuses[0]));
}

// ---- growth ----

static void bench(int64_t rows, int64_t cols, int32_t bits, int n_threads) {
    rng          r(1);
    dense_matrix d = zeros(rows, cols, GGML_MACKO_TYPE_F16);
    for (int64_t i = 0; i < rows * cols; i++) {
        if (r.unit() < 0.3) {
            d.set(0, i, 0x3c00 + (static_cast<uint32_t>(r.bits()) & 0x3ff));
        }
    }
    const auto       now     = [] { return std::chrono::steady_clock::now(); };
    const auto       seconds = [](auto a, auto b) { return std::chrono::duration<double>(b - a).count(); };
    const macko_desc desc    = { rows, cols, d.type, bits, d.nnz() };
    ec_csr_blocks    blocks;
    ec_csr_matrix    m;
    ec_csr_view      view;
    const auto       t0 = now();
    CHECK(extract_blocks(desc, d.data.data(), DEFAULTS, n_threads, &blocks) == 0, "%s", ggml_macko_last_error());
    const auto t1 = now();
    CHECK(assemble(desc, d.data.data(), blocks, n_threads, &m) == 0, "%s", ggml_macko_last_error());
    const auto t2 = now();
    CHECK(check_ec_csr(m.arrays(), &view) == 0 && view.check_rows(n_threads) == 0, "%s", ggml_macko_last_error());
    const auto t3 = now();
    printf("| shape | bits | extract s | assemble s | check s | check ms/GB | peak MiB above dense |\n"
           "|---|---|---|---|---|---|---|\n| %lldx%lld | %d | %.2f | %.2f | %.3f | %.0f | %.0f |\n",
           static_cast<long long>(rows), static_cast<long long>(cols), bits, seconds(t0, t1), seconds(t1, t2),
           seconds(t2, t3), seconds(t2, t3) * 1e12 / static_cast<double>(m.nbytes()),
           (test_system::peak_memory() - static_cast<double>(d.data.size())) / 1048576);
}

int main(int argc, char ** argv) {
    if (argc > 3 && !strcmp(argv[1], "--bench")) {
        bench(atoll(argv[2]), atoll(argv[3]), argc > 4 ? atoi(argv[4]) : 4, argc > 5 ? atoi(argv[5]) : 2);
        return n_failed > 0;
    }
    return test_main("test-ec-csr", argc, argv);
}
