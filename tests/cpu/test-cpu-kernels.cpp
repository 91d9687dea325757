// Compares the CPU kernels with float64, element by element: each kernel set that this CPU supports, each value type
// and layout of x, with odd shapes and extreme values. All memory ends at a page without access, so a kernel that reads
// or writes past its arrays crashes. `test-cpu-kernels --bench` prints speeds instead, beside those of a dense F16
// kernel, and `--bench-columns` those of rows and columns for x with zeros.
#include "codec/macko/encode.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/layout/matrix-packer.h"
#include "guarded.h"
#include "test.h"
#include "values.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <omp.h>
#include <string>
#include <vector>

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized" // GCC bug 105593: undefined vectors inside AVX-512 intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

using namespace macko;
using namespace macko::cpu;

static const int32_t all_types[] = { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 };

// ---- choice of the kernel set ----

// "status name-or-message"
static std::string selection_with(const char * forced) {
    const kernel_set * set    = nullptr;
    const int          status = find_kernel_set(forced, &set);
    return std::to_string(status) + " " + (status ? ggml_macko_last_error() : set->name);
}

TEST(forced_kernel_set_is_the_one_in_use) {
    const std::string best = supported_kernel_set(0)->name;
    std::string       got  = selection_with("");
    CHECK(got == "0 " + best, "%s", got.c_str());
    for (const char * name :
         { "portable", "avx2", "avx2-vnni", "avx512", "avx512-vbmi2", "neon", "neon-dotprod", "neon-fhm" }) {
        bool supported = false;
        for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
            supported |= strcmp(set->name, name) == 0;
        }
        got = selection_with(name);
        const std::string want =
            supported ? std::string("0 ") + name
                      : std::to_string(GGML_MACKO_STATUS_BAD_ARGUMENT) + " GGML_MACKO_CPU_KERNELS=" + name;
        CHECK(supported ? got == want : got.compare(0, want.size(), want) == 0, "%s", got.c_str());
    }
    const std::string long_name(200, 'x');
    for (const char * name : { "avx", "AVX2", "portable ", "\x1b[31m", long_name.c_str() }) {
        got = selection_with(name);
        CHECK(got.compare(0, 2, "1 ") == 0 &&
                  got.find("no such kernel set; valid names: portable") != std::string::npos &&
                  got.find(best) != std::string::npos && got.find('\x1b') == std::string::npos,
              "%s", got.c_str());
    }
}

// ---- numbers, computed without the library ----

// the nearest value of the type, ties to even
static double rounded(double v, int32_t type) {
    if (type == GGML_MACKO_TYPE_F32 || v == 0) {
        return v;
    }
    const int    digits = type == GGML_MACKO_TYPE_F16 ? 10 : 7;
    const int    lowest = type == GGML_MACKO_TYPE_F16 ? -14 : -126;
    const double ulp    = std::ldexp(1.0, std::max(std::ilogb(v), lowest) - digits);
    const double r      = std::nearbyint(v / ulp) * ulp;
    return type == GGML_MACKO_TYPE_F16 && std::fabs(r) >= 65520 ? std::copysign(INFINITY, v) : r;
}

// The bits of a random finite value other than +0.0: mostly ordinary, sometimes the largest, a subnormal, or -0.0.
static uint32_t random_value(rng & random, int32_t type) {
    const uint32_t sign = type == GGML_MACKO_TYPE_F32 ? 0x80000000u : 0x8000u;
    const uint32_t s    = random.bits() & 1 ? sign : 0;
    switch (random.range(0, 60)) {
        case 0: return sign; // -0.0
        case 1:
            return s | 1; // smallest subnormal
        // 65504; 65536
        case 2:  return s | (type == GGML_MACKO_TYPE_F16 ? 0x7bff : type == GGML_MACKO_TYPE_BF16 ? 0x4780 : 0x477fe000);
        case 3:  return s | (type == GGML_MACKO_TYPE_F16 ? 0x03ff : type == GGML_MACKO_TYPE_BF16 ? 0x007f : 0x007fffff);
        default: break;
    }
    if (type == GGML_MACKO_TYPE_F16) {
        return s | static_cast<uint32_t>(random.range(5, 18) << 10 | random.range(0, 1023));
    }
    const uint32_t u = static_cast<uint32_t>(random.range(110, 130) << 23 | random.range(0, 0x7fffff));
    return type == GGML_MACKO_TYPE_BF16 ? s | u >> 16 : s | u;
}

// ---- matrices ----

struct matrix {
    macko_desc            desc = {};
    std::vector<uint32_t> bits;  // dense, row-major
    std::vector<uint8_t>  dense; // the same in the value type

    matrix(int32_t type, int64_t rows, int64_t cols) : bits(static_cast<size_t>(rows * cols)) {
        desc = { rows, cols, type, 4, 0 };
    }
    void finish() {
        const size_t size = static_cast<size_t>(value_nbytes(desc.type));
        dense.resize(bits.size() * size);
        for (size_t i = 0; i < bits.size(); i++) {
            memcpy(&dense[i * size], &bits[i], size); // little-endian
        }
        desc.nnz = static_cast<int64_t>(bits.size()) - std::count(bits.begin(), bits.end(), 0u);
    }
    uint32_t & at(int64_t r, int64_t c) { return bits[static_cast<size_t>(r * desc.cols + c)]; }
};

constexpr double ONE_ELEMENT = -1; // a density: one non-zero, in the last column

static matrix random_matrix(rng & random, int32_t type, int64_t rows, int64_t cols, double density) {
    matrix m(type, rows, cols);
    if (density == ONE_ELEMENT) {
        m.at(random.range(0, rows - 1), cols - 1) = random_value(random, type);
    } else {
        for (uint32_t & b : m.bits) {
            b = random.unit() < density ? random_value(random, type) : 0;
        }
        if (rows > 2 && density < 1) { // an empty row, and one with only the last column
            const int64_t r = random.range(0, rows - 2);
            for (int64_t c = 0; c < cols; c++) {
                m.at(r, c) = m.at(r + 1, c) = 0;
            }
            m.at(r + 1, cols - 1) = random_value(random, type);
        }
    }
    m.finish();
    return m;
}

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double fastest_pack = INFINITY; // seconds, for the benchmark

struct encoded : macko_matrix {
    encoded(const matrix & m, int delta_bits) {
        macko_desc shape = m.desc;
        shape.delta_bits = delta_bits;
        ggml_macko_count       count;
        std::vector<row_count> rows(static_cast<size_t>(shape.rows));
        CHECK(count_finite(m.dense.data(), shape, 1, &count, rows.data()) == 0 && count.nnz == shape.nnz, "nnz %ld",
              (long)count.nnz);
        CHECK(encode(m.dense.data(), shape, rows, 1, this) == 0, "%s", ggml_macko_last_error());
        const int64_t n = n_padded(row_ptr.back()); // nothing may read the slack behind the arrays
        values          = raw_bytes(values.data(), values.data() + n * value_nbytes(shape.type));
        deltas          = raw_bytes(deltas.data(), deltas.data() + deltas_nbytes(n, delta_bits));
    }
    macko_view rows(int64_t begin, int64_t end) const {
        const int64_t base = row_ptr[static_cast<size_t>(begin)] & ~7;
        macko_view    view;
        CHECK(validate({ desc, begin, end, row_ptr.data(), base, values.data() + base * value_nbytes(desc.type),
                         deltas.data() + base * desc.delta_bits / 8 },
                       &view) == 0,
              "%s", ggml_macko_last_error());
        return view;
    }
};

static cpu_plan plan_of(const macko_desc & desc, bool bundles = false) {
    return plan_with(desc, shape_with(desc, bundles));
}

static bool is_coded(const cpu_matrix & w) { return std::holds_alternative<coded_bitmap_layout>(w); }

// Packs m in blocks of rows, the last block first, because threads of a load process blocks in any order.
static cpu_matrix pack(const matrix & m, int delta_bits, int64_t block_rows, const guarded & memory,
                       bool bundles = false) {
    const encoded           e(m, delta_bits);
    matrix_packer           packer(plan_of(e.desc, bundles), span_ops_in_use(), memory.data);
    std::vector<macko_view> views;
    std::vector<int64_t>    first_value = { 0 };
    if (packer.makes_bundles()) {
        block_rows = (block_rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS * BUNDLE_ROWS;
    }
    for (int64_t r = 0; r < e.desc.rows; r += block_rows) {
        views.push_back(e.rows(r, std::min(r + block_rows, e.desc.rows)));
        first_value.push_back(first_value.back() + views.back().nnz());
    }
    const double start = seconds();
    do {
        for (size_t i = views.size(); i-- > 0;) {
            packer.pack(views[i], first_value[i]);
        }
    } while (!packer.finish());
    fastest_pack = std::min(fastest_pack, seconds() - start);
    return packer.matrix();
}

TEST(packed_rows_turn_back_into_the_same_bytes) {
    rng random(1);
    for (const int32_t type : all_types) {
        for (const int delta_bits : { 1, 2, 4, 8 }) {
            for (const int64_t cols : { 1, 2, 63, 64, 65, 127, 128, 129, 300, 4097 }) {
                for (const double density : { 0.0, ONE_ELEMENT, 0.01, 0.1, 0.5, 1.0 }) {
                    const bool       bundles = has_bundles(type) && random.bits() & 1;
                    const int64_t    rows    = random.range(1, bundles ? 300 : 40);
                    const matrix     m       = random_matrix(random, type, rows, cols, density);
                    const guarded    memory(plan_of(m.desc, bundles).nbytes);
                    const cpu_matrix w          = pack(m, delta_bits, random.range(1, rows), memory, bundles);
                    const int64_t    begin      = random.range(0, rows - 1);
                    const int64_t    end        = random.range(begin, rows);
                    const int64_t    row_nbytes = cols * value_nbytes(type);
                    const guarded    all(rows * row_nbytes);
                    const guarded    some((end - begin) * row_nbytes);
                    densify(w, 0, rows, all.data);
                    densify(w, begin, end, some.data);
                    CHECK(memcmp(all.data, m.dense.data(), m.dense.size()) == 0 && all.intact() && memory.intact(),
                          "type %d bits %d %ldx%ld density %g", type, delta_bits, (long)rows, (long)cols, density);
                    CHECK(memcmp(some.data, m.dense.data() + begin * row_nbytes,
                                 static_cast<size_t>((end - begin) * row_nbytes)) == 0 &&
                              some.intact(),
                          "rows %ld-%ld", (long)begin, (long)end);
                    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
                        const guarded made((end - begin) * row_nbytes);
                        densify(w, begin, end, made.data, set->expand);
                        CHECK(made.intact() &&
                                  memcmp(made.data, some.data, static_cast<size_t>((end - begin) * row_nbytes)) == 0,
                              "%s: type %d, rows %ld-%ld of %ld columns", set->name, type, (long)begin, (long)end,
                              (long)cols);
                    }
                    const uint32_t * row_off = base_of(w).row_off;
                    CHECK(row_off[0] == 0 && row_off[rows] == m.desc.nnz, "row_off %u", row_off[rows]);
                }
            }
        }
    }
}

TEST(every_set_makes_the_same_bundles) {
    rng random(21);
    for (const int32_t type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
        for (const int delta_bits : { 1, 2, 4, 8 }) {
            for (const int64_t cols : { 1, 127, 128, 129, 1023, 1024, 1025, 5000 }) {
                for (const double density : { 0.0, ONE_ELEMENT, 0.004, 0.03, 0.3, 0.7, 1.0 }) {
                    const matrix  m = random_matrix(random, type, random.range(1, 2 * BUNDLE_ROWS), cols, density);
                    const encoded e(m, delta_bits);
                    const int64_t begin = m.desc.rows > BUNDLE_ROWS ? BUNDLE_ROWS : 0;
                    const guarded deltas(static_cast<int64_t>(e.deltas.size()));
                    memcpy(deltas.data, e.deltas.data(), e.deltas.size()); // before a page without access
                    const macko_view whole = e.rows(0, m.desc.rows);
                    macko_rows       rows  = whole.rows();
                    rows.deltas            = deltas.data;
                    macko_view view;
                    CHECK(validate(rows, &view) == 0, "%s", ggml_macko_last_error());
                    group_bytes           plain;
                    std::vector<uint32_t> nnz(BUNDLE_ROWS), want(BUNDLE_ROWS);
                    span_packer(plain_span_ops).pack(view, begin, want.data(), &plain);
                    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
                        group_bytes made;
                        span_packer(*set->spans).pack(view, begin, nnz.data(), &made);
                        CHECK(nnz == want && made.size() == plain.size() &&
                                  (plain.size() == 0 || memcmp(made.data(), plain.data(), plain.size()) == 0),
                              "%s: type %d bits %d %ldx%ld density %g", set->name, type, delta_bits, (long)m.desc.rows,
                              (long)cols, density);
                    }
                }
            }
        }
    }
}

// ---- multiplication ----

struct problem {
    const matrix &      m;
    cpu_matrix          w;
    int64_t             row_begin, row_end, n;
    bool                round_x;
    guarded             x;           // [n][cols]
    std::vector<double> want, bound; // [n][rows]
    std::vector<double> of_blocks;   // quantized matrices: the sum over blocks of columns of sum |w| * max |x|

    // zeros: share of zeros in x, of either sign
    problem(rng & random, const matrix & m, const cpu_matrix & w, int64_t row_begin, int64_t row_end, int64_t n,
            bool round_x, double zeros = 0)
        : m(m), w(w), row_begin(row_begin), row_end(row_end), n(n), round_x(round_x), x(n * m.desc.cols * 4) {
        const int64_t                   cols = m.desc.cols;
        const int64_t                   rows = row_end - row_begin;
        std::normal_distribution<float> normal;
        std::vector<double>             rx(static_cast<size_t>(n * cols)); // [col][n]
        for (int64_t i = 0; i < n; i++) {
            for (int64_t c = 0; c < cols; c++) {
                float v = normal(random.engine);
                switch (random.range(0, 80)) {
                    case 0:  v = 65504.0f * std::copysign(1.0f, v); break;
                    case 1:  v *= 1e-6f; break; // subnormal in F16
                    case 2:  v = -0.0f; break;
                    case 3:  v = std::ldexp(std::nearbyint(v * 1024) * 2 + 1, -12); break; // a tie of F16 values
                    default: break;
                }
                if (random.unit() < zeros) {
                    v = std::copysign(0.0f, v);
                }
                x.floats()[i * cols + c]           = v;
                rx[static_cast<size_t>(c * n + i)] = round_x ? rounded(v, m.desc.type) : v;
            }
        }
        // |y - y64| <= 2 gamma sum |w x| with gamma = cols 2^-24, for float FMAs in any order, plus the loss of results
        // below 2^-126.
        want.resize(static_cast<size_t>(rows * n));
        bound.assign(want.size(), static_cast<double>(cols) * 0x1p-149);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < cols; c++) {
                const uint32_t b = m.bits[static_cast<size_t>((row_begin + r) * cols + c)];
                if (b == 0) {
                    continue;
                }
                const double wv = value_of(b, m.desc.type);
                for (int64_t i = 0; i < n; i++) {
                    const double product = wv * rx[static_cast<size_t>(c * n + i)];
                    want[static_cast<size_t>(r * n + i)] += product;
                    bound[static_cast<size_t>(r * n + i)] +=
                        2 * static_cast<double>(cols) * 0x1p-24 * std::fabs(product);
                }
            }
        }
        if (const auto * quantized = std::get_if<quantized_layout>(&w)) {
            sum_blocks(quantized->window < 64 ? 32 : 64);
        }
    }

    void sum_blocks(int64_t block) {
        const int64_t cols = m.desc.cols, rows = row_end - row_begin;
        of_blocks.resize(static_cast<size_t>(rows * n));
        for (int64_t first = 0; first < cols; first += block) {
            const int64_t       last = std::min(first + block, cols);
            std::vector<double> largest(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; i++) {
                for (int64_t c = first; c < last; c++) {
                    largest[static_cast<size_t>(i)] =
                        std::max(largest[static_cast<size_t>(i)], std::fabs(double(x.floats()[i * cols + c])));
                }
            }
            for (int64_t r = 0; r < rows; r++) {
                double magnitude = 0;
                for (int64_t c = first; c < last; c++) {
                    magnitude +=
                        std::fabs(value_of(m.bits[static_cast<size_t>((row_begin + r) * cols + c)], m.desc.type));
                }
                for (int64_t i = 0; i < n; i++) {
                    of_blocks[static_cast<size_t>(r * n + i)] += magnitude * largest[static_cast<size_t>(i)];
                }
            }
        }
    }
};

// |y - y64| if x is rounded to integers of 8, 16 or 23 bits (sign included) with a scale for each block: half a unit of
// them, and the rounding of the scales.
static std::vector<double> block_bound(const kernel_set & set, const problem & p) {
    const bool bytes =
        strstr(set.name, "vbmi2") || strstr(set.name, "vnni") || strstr(set.name, "dotprod") || strstr(set.name, "fhm");
    const double        step = 8 * 0x1p-24 + (!p.round_x ? 1.0 / (127 * 32768) : bytes ? 0.5 / 127 : 0.5 / (127 * 256));
    std::vector<double> bound = p.bound;
    for (size_t k = 0; k < bound.size(); k++) {
        bound[k] += p.of_blocks[k] * step;
    }
    return bound;
}

// n rows of y, filled with NaN, with canaries before and after each.
struct output {
    static constexpr int64_t GAP = 16;
    int64_t                  n, rows;
    guarded                  memory;
    std::vector<float *>     y;

    output(int64_t n, int64_t rows) : n(n), rows(rows), memory(n * (rows + GAP) * 4) {
        for (int64_t i = 0; i < n; i++) {
            y.push_back(memory.floats() + i * (rows + GAP) + GAP);
            memset(y.back() - GAP, guarded::CANARY, GAP * 4);
        }
    }
    bool intact() const {
        bool ok = memory.intact();
        for (const float * row : y) {
            const uint8_t * gap = reinterpret_cast<const uint8_t *>(row - GAP);
            ok &= std::all_of(gap, gap + GAP * 4, [](uint8_t b) { return b == guarded::CANARY; });
        }
        return ok;
    }
    bool same(const output & other) const {
        for (int64_t i = 0; i < n; i++) {
            if (memcmp(y[static_cast<size_t>(i)], other.y[static_cast<size_t>(i)], static_cast<size_t>(rows) * 4) !=
                0) {
                return false;
            }
        }
        return true;
    }
};

enum class how { dispatched, rows16, rows, panels, planes, blocks };

static void multiply(const kernel_set & set, const problem & p, how with, int n_threads, output & out,
                     const float * gate = nullptr, const bitmap_layout & columns = {}, bool skip_zeros = true) {
    const guarded              scratch(mul_mat_scratch_nbytes(p.m.desc.cols, p.n));
    std::vector<const float *> x;
    for (int64_t i = 0; i < p.n; i++) {
        x.push_back(p.x.floats() + i * p.m.desc.cols);
    }
    const mul_mat_params params = { p.w,       p.row_begin,  p.row_end, p.n,  x.data(), out.y.data(),
                                    p.round_x, scratch.data, nullptr,   gate, columns,  skip_zeros };
    if (with == how::dispatched) {
#pragma omp parallel num_threads(n_threads)
        mul_mat_thread_with(set, params, omp_get_thread_num(), omp_get_num_threads());
    } else {
        const x_layout layout = with == how::rows16   ? x_layout::rows16
                                : with == how::rows   ? is_coded(p.w) ? x_layout::coded : x_layout::rows
                                : with == how::planes ? x_layout::planes
                                : with == how::blocks ? x_layout::blocks
                                                      : x_layout::panels;
        for (int i = 0; i < n_threads; i++) {
            prepare_with(set, params, layout, i, n_threads);
        }
        multiply_with(set, params, layout, p.row_begin, p.row_end);
    }
    CHECK(out.intact() && scratch.intact() && p.x.intact(), "%s wrote outside of y or scratch", set.name);
}

static void check_result(const kernel_set & set, const problem & p, const char * what, const output & out,
                         const std::vector<double> & bound) {
    double  worst = -1;
    int64_t at    = 0;
    for (int64_t k = 0; k < static_cast<int64_t>(p.want.size()); k++) {
        const double got   = out.y[static_cast<size_t>(k % p.n)][k / p.n];
        const double error = std::fabs(got - p.want[static_cast<size_t>(k)]);
        const double over  = error <= bound[static_cast<size_t>(k)] ? 0
                             : std::isnan(error)                    ? INFINITY
                                                                    : error - bound[static_cast<size_t>(k)];
        if (over > worst) {
            worst = over;
            at    = k;
        }
    }
    CHECK(worst <= 0,
          "%s %s type %d %ldx%ld nnz %ld rows %ld-%ld n %ld round %d: y[%ld][%ld] = %g, float64 %g, bound %g", set.name,
          what, base_of(p.w).dense_type, (long)p.m.desc.rows, (long)p.m.desc.cols, (long)p.m.desc.nnz,
          (long)p.row_begin, (long)p.row_end, (long)p.n, p.round_x, (long)(at % p.n), (long)(at / p.n),
          out.y[static_cast<size_t>(at % p.n)][at / p.n], p.want[static_cast<size_t>(at)],
          bound[static_cast<size_t>(at)]);
}

static void check_result(const kernel_set & set, const problem & p, const char * what, const output & out) {
    check_result(set, p, what, out, p.bound);
}

// Rows with an open gate must equal those of the product without gates, bit for bit. If at least 60 % of the gates are
// closed, those rows must not be computed, except rows that share a group of bundles with an open one; otherwise all
// rows are computed.
static void check_gate(const kernel_set & set, const problem & p, const output & whole) {
    const int64_t rows = p.row_end - p.row_begin;
    rng           random(static_cast<uint64_t>(rows * p.m.desc.cols));
    for (const double open : { 0.0, 0.1, 0.4, 0.9, 1.0 }) {
        std::vector<float> gate(static_cast<size_t>(rows));
        int64_t            closed = 0;
        for (float & g : gate) {
            g = random.unit() < open ? 1e-45f : random.bits() & 1 ? -1.0f : random.bits() & 1 ? 0.0f : NAN;
            closed += !(g > 0);
        }
        const bool all = closed * 5 < rows * 3;
        for (int n_threads = 1; n_threads <= 2; n_threads++) {
            output out(1, rows);
            multiply(set, p, how::dispatched, n_threads, out, gate.data());
            for (int64_t r = 0; r < rows; r++) {
                const bool is_open = gate[static_cast<size_t>(r)] > 0;
                const bool same    = memcmp(out.y[0] + r, whole.y[0] + r, 4) == 0;
                const bool zero    = out.y[0][r] == 0 && !std::signbit(out.y[0][r]);
                CHECK(all || is_open ? same : zero || (in_bundles(p.w) && same && closed < rows),
                      "%s: row %ld, gate %g, is %g, without gates %g", set.name, (long)r,
                      static_cast<double>(gate[static_cast<size_t>(r)]), static_cast<double>(out.y[0][r]),
                      static_cast<double>(whole.y[0][r]));
            }
        }
    }
}

static void check_all_sets(const problem & p, bool threads) {
    const bool bundled = in_bundles(p.w);
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        if (!multiplies_with(*set, p.w)) {
            continue;
        }
        const int64_t rows = p.row_end - p.row_begin;
        output        one(p.n, rows), other(p.n, rows);
        const bool    quantized = is_quantized(p.w);
        multiply(*set, p, how::dispatched, 1, one);
        multiply(*set, p, quantized ? how::blocks : how::panels, 3, other);
        quantized ? check_result(*set, p, "blocks", other, block_bound(*set, p))
                  : check_result(*set, p, "panels", other);
        bool same = one.same(other);
        if (!bundled && !quantized) {
            output with_rows(p.n, rows);
            multiply(*set, p, how::rows, 3, with_rows);
            check_result(*set, p, "rows", with_rows);
            same |= one.same(with_rows);
        } else if (bundled && p.n <= MAX_PLANES && p.round_x) {
            output with_planes(p.n, rows);
            multiply(*set, p, how::planes, 3, with_planes);
            check_result(*set, p, "planes", with_planes);
            same |= one.same(with_planes);
        }
        if (!bundled && !quantized && !is_coded(p.w) && p.n == 1 && p.round_x && has_rows16(*set, p.m.desc.type)) {
            output with_rows16(p.n, rows);
            multiply(*set, p, how::rows16, 3, with_rows16);
            check_result(*set, p, "rows16", with_rows16);
            same |= one.same(with_rows16);
        }
        CHECK(same, "%s: one thread gives no layout's result", set->name);
        if (p.n == 1) {
            check_gate(*set, p, one);
        }
        for (int n_threads = 2; threads && n_threads <= 3; n_threads++) {
            output more(p.n, rows);
            multiply(*set, p, how::dispatched, n_threads, more);
            CHECK(one.same(more), "%s: %d threads give other bits than one (%ldx%ld n %ld)", set->name, n_threads,
                  (long)rows, (long)p.m.desc.cols, (long)p.n);
        }
    }
}

TEST(every_set_is_within_the_error_bound) {
    rng           random(2);
    const int64_t all_n[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 65, 80, 97, 100, 112, 127, 128, 129, 200 };
    const int64_t dims[]  = { 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 257, 1000, 4096 };
    size_t        next_n  = 0;
    for (const int32_t type : all_types) {
        for (const double density : { 0.0, ONE_ELEMENT, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0 }) {
            for (const int64_t cols : dims) {
                const int64_t    rows = dims[random.range(0, cols > 300 ? 11 : 15)];
                const matrix     m    = random_matrix(random, type, rows, cols, density);
                const guarded    memory(plan_of(m.desc).nbytes);
                const cpu_matrix w = pack(m, 4, rows, memory);
                for (int k = 0; k < (cols > 300 ? 3 : 6); k++) {
                    const int64_t n = k == 1 ? 1 : all_n[next_n++ % std::size(all_n)];
                    check_all_sets(problem(random, m, w, 0, rows, n, k == 1 || random.bits() & 1), k < 2);
                }
            }
        }
    }
}

static cpu_matrix pack_whole(const packed_view & view, int n_threads, const cpu_plan & plan, const guarded & memory) {
    matrix_packer packer(plan, span_ops_in_use(), memory.data);
    packer.pack_whole(view, n_threads);
    return packer.matrix();
}

// Bundles of rows in several groups, with non-zeros that are far from evenly spread: they may need more memory than is
// reserved; then the matrix is a bitmap.
TEST(bundles_are_within_the_error_bound) {
    rng           random(16);
    const int64_t all_n[] = { 2, 5, 6, 8, 9, 17, 33, 65, 130, 270 };
    const int64_t dims[]  = { 1, 15, 33, 64, 129, 300, 2113 };
    size_t        next_n  = 0;
    int           bundled = 0, too_large = 0, all = 0;
    for (const double density : { 0.0, ONE_ELEMENT, 0.015, 0.04, 0.06, 0.1, 0.3, 0.5, 0.9, 1.0 }) {
        for (const int64_t cols : dims) {
            for (const int32_t type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
                matrix m = random_matrix(random, type, random.range(1, cols > 300 ? 150 : 300), cols, density);
                if (random.range(0, 4) == 0) { // a row has all that others have together
                    std::fill_n(m.bits.begin() + cols * random.range(0, m.desc.rows - 1), cols, 0x4000);
                    m.finish();
                }
                const guarded    memory(plan_of(m.desc, true).nbytes);
                const cpu_matrix w    = pack(m, 4, m.desc.rows, memory, true);
                const int64_t    rows = m.desc.rows, begin = random.range(0, rows - 1),
                              n = all_n[next_n++ % std::size(all_n)];
                CHECK(memory.intact(), "packing wrote outside");
                bundled += in_bundles(w);
                too_large += bundles_nbytes(m.desc) > 0 && !in_bundles(w);
                all++;
                check_all_sets(problem(random, m, w, 0, rows, 1, true), true);
                check_all_sets(problem(random, m, w, begin, rows, 1, false), false);
                check_all_sets(problem(random, m, w, begin, rows, n, true), true);
            }
        }
    }
    CHECK(bundled > all / 3 && too_large > 0, "%d of %d matrices are in bundles, %d did not fit", bundled, all,
          too_large);
}

// ---- quantized matrices ----

static const int32_t all_bits[] = { 4, 3, 5, 8 }; // of a code

// A matrix of random codes, and in `exact` its weights scale * factor * level, which F32 holds exactly.
struct quantized_matrix_of {
    quantized_matrix         q = {};
    matrix                   exact;
    std::unique_ptr<guarded> memory;
    cpu_matrix               w = {};

    quantized_matrix_of(rng & random, int32_t type, int32_t bits, int64_t window, int64_t rows, int64_t cols,
                        double density)
        : exact(GGML_MACKO_TYPE_F32, rows, cols) {
        const matrix  places     = random_matrix(random, GGML_MACKO_TYPE_F16, rows, cols, density);
        const int64_t row_nbytes = (cols + 7) / 8, windows = (cols + window - 1) / window;
        const int     n_levels = 1 << bits;
        q.dense                = places.desc;
        q.dense.type           = type;
        q.bits                 = bits;
        q.window               = window;
        q.row_ptr              = { 0 };
        q.bitmap.resize(static_cast<size_t>((rows * row_nbytes + 3) & -4));
        q.scales.resize(static_cast<size_t>(rows * windows));
        for (int i = 0; i < n_levels; i++) { // the first half rises from 1, the second half to -1
            const int half = n_levels / 2, k = i % half, step = (127 - k) / half;
            q.levels.push_back(static_cast<int8_t>(bits == 8 ? i : i < half ? 1 + k * step : -127 + k * step));
        }
        for (int64_t r = 0; r < rows; r++) {
            std::vector<uint32_t> codes;
            // 2^-90 ... 2^90, but no value may exceed F16
            const int exponent =
                random.range(0, 3) == 0 && type != GGML_MACKO_TYPE_F16 ? static_cast<int>(random.range(-90, 20)) : -9;
            const auto factor = static_cast<uint16_t>((127 + exponent) << 7 |
                                                      (exponent > -90 && exponent < 20 ? random.bits() & 127 : 0));
            for (int64_t c = 0; c < cols; c++) {
                uint8_t & scale = q.scales[static_cast<size_t>(r * windows + c / window)];
                if (places.bits[static_cast<size_t>(r * cols + c)] != 0) {
                    scale           = c % window == 0 || scale == 0 ? static_cast<uint8_t>(random.bits() | 1) : scale;
                    const auto code = static_cast<uint32_t>(random.range(0, bits == 8 ? 127 : n_levels - 1));
                    q.bitmap[static_cast<size_t>(r * row_nbytes + c / 8)] |= static_cast<uint8_t>(1 << c % 8);
                    codes.push_back(bits == 8 && code > 0 && random.bits() & 1 ? 256 - code : code);
                    const double d = std::ldexp(1 + (scale & 15) / 16.0, (scale >> 4 & 7) - 7) * (scale & 128 ? -1 : 1);
                    const auto   v =
                        static_cast<float>(d * value_of(factor, GGML_MACKO_TYPE_BF16) * q.levels[codes.back()]);
                    memcpy(&exact.at(r, c), &v, 4);
                }
            }
            q.factors.push_back(codes.empty() ? uint16_t(0) : factor);
            const size_t at = q.codes.size();
            q.row_ptr.push_back(q.row_ptr.back() + static_cast<int32_t>((codes.size() + 7) / 8));
            q.codes.resize(static_cast<size_t>(q.row_ptr.back()) * static_cast<size_t>(bits));
            for (size_t k = 0; k < codes.size() * static_cast<size_t>(bits); k++) {
                q.codes[at + k / 8] |= static_cast<uint8_t>(
                    (codes[k / static_cast<size_t>(bits)] >> k % static_cast<size_t>(bits) & 1) << k % 8);
            }
        }
        q.codes.resize(std::max<size_t>((q.codes.size() + 3) / 4 * 4, 4));
        exact.finish();
        quantized_view view;
        CHECK(check_quantized(q.arrays(), static_cast<int64_t>(q.codes.size()), 1, &view) == 0, "%s",
              ggml_macko_last_error());
        const cpu_plan plan = plan_with(q.dense, quantized_shape{ bits, window, static_cast<int64_t>(q.codes.size()) });
        memory              = std::make_unique<guarded>(plan.nbytes);
        matrix_packer packer(plan, span_ops_in_use(), memory->data);
        packer.pack_whole(view, 2);
        w = packer.matrix();
        CHECK(memory->intact(), "packing wrote outside");
    }
};

TEST(quantized_matrices_are_within_the_error_bound) {
    rng           random(31);
    const int64_t all_n[] = { 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 49, 64, 65, 80, 130 };
    const int64_t dims[]  = { 1, 7, 31, 33, 64, 127, 257, 511, 1024, 1089, 2113 };
    size_t        next_n = 0, next_window = 0, next_bits = 0;
    for (int round = 0; round < 2; round++) {
        for (const double density : { 0.0, ONE_ELEMENT, 0.05, 0.4, 1.0 }) {
            for (const int64_t cols : dims) {
                const int32_t bits = all_bits[next_bits++ % 4];
                const int64_t rows = random.range(1, cols > 300 ? 12 : 70), window = 32 << next_window++ % 5;
                const quantized_matrix_of q(random, all_types[random.range(0, 2)], bits, window, rows, cols, density);
                const int64_t             begin = random.range(0, rows - 1);
                check_all_sets(problem(random, q.exact, q.w, 0, rows, 1, true), true);
                check_all_sets(problem(random, q.exact, q.w, begin, rows, all_n[next_n++ % std::size(all_n)], true),
                               true);
                check_all_sets(problem(random, q.exact, q.w, begin, rows,
                                       cols % 2 ? 1 : all_n[next_n++ % std::size(all_n)], false),
                               false);
            }
        }
    }
    const quantized_matrix_of q(random, GGML_MACKO_TYPE_F16, 4, 64, 70, 1100, 0.5); // more than one group of tokens
    check_all_sets(problem(random, q.exact, q.w, 3, 70, 600, true), true);
}

TEST(quantized_matrices_of_all_bits_share_x) {
    rng                       random(35);
    const quantized_matrix_of first(random, GGML_MACKO_TYPE_F16, 4, 64, 20, 300, 0.4);
    for (const int32_t bits : all_bits) {
        for (const int64_t n : { 1, 5 }) {
            const quantized_matrix_of  q(random, GGML_MACKO_TYPE_F16, bits, 128, 20, 300, 0.4);
            const problem              p(random, q.exact, q.w, 0, 20, n, true);
            const guarded              scratch(mul_mat_scratch_nbytes(300, n));
            output                     own(n, 20), shared(n, 20);
            std::vector<const float *> x;
            for (int64_t i = 0; i < n; i++) {
                x.push_back(p.x.floats() + i * 300);
            }
            const mul_mat_params of_first  = { first.w, 0, 20, n, x.data(), own.y.data(), true, scratch.data };
            const mul_mat_params with_own  = { q.w, 0, 20, n, x.data(), own.y.data(), true, scratch.data };
            const mul_mat_params with_that = { q.w, 0, 20, n, x.data(), shared.y.data(), true, scratch.data };
            CHECK(same_prepared_x(of_first, with_that), "%d bits", bits);
            mul_mat_prepare(of_first, 0, 1);
            mul_mat_multiply(with_that, 1, 0, 1);
            mul_mat_prepare(with_own, 0, 1);
            mul_mat_multiply(with_own, 0, 0, 1);
            CHECK(shared.same(own) && scratch.intact(), "%d bits, n %ld", bits, (long)n);
        }
    }
}

TEST(quantized_rows_turn_into_rounded_values) {
    rng random(32);
    for (const int32_t type : all_types) {
        for (const int32_t bits : all_bits) {
            for (const int64_t cols : { 1, 8, 65, 300, 1089, 2113 }) {
                const quantized_matrix_of q(random, type, bits, 32 << random.range(0, 4), 9, cols, 0.4);
                const int64_t             nbytes = 7 * cols * value_nbytes(type);
                const guarded             dense(nbytes);
                densify(q.w, 2, 9, dense.data);
                for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
                    const guarded made(nbytes);
                    densify(q.w, 2, 9, made.data, set->expand);
                    CHECK((set->expand.quantized || set == &kernels_portable) && made.intact() &&
                              memcmp(made.data, dense.data, static_cast<size_t>(nbytes)) == 0,
                          "%s: type %d, %d bits, %ld columns", set->name, type, bits, (long)cols);
                }
                for (int64_t i = 0; i < 7 * cols; i++) {
                    uint32_t got = 0;
                    memcpy(&got, dense.data + i * value_nbytes(type), static_cast<size_t>(value_nbytes(type)));
                    const double v    = value_of(q.exact.bits[static_cast<size_t>(2 * cols + i)], GGML_MACKO_TYPE_F32);
                    const double want = std::isinf(rounded(v, type)) ? std::copysign(65504.0, v) : rounded(v, type);
                    CHECK(value_of(got, type) == want && !(got >> (8 * value_nbytes(type) - 1) && want == 0),
                          "type %d bits %d: %g is %g", type, bits, v, value_of(got, type));
                }
            }
        }
    }
}

// ---- coded values ----

// Mostly values of three exponents with 7 bits of mantissa; outliers are any values.
static matrix short_matrix(rng & random, int32_t type, int64_t rows, int64_t cols, double density, double outliers) {
    matrix         m    = random_matrix(random, type, rows, cols, density);
    const int      bits = type == GGML_MACKO_TYPE_F32 ? 23 : type == GGML_MACKO_TYPE_F16 ? 10 : 7;
    const uint32_t first =
        static_cast<uint32_t>(type == GGML_MACKO_TYPE_F16 ? random.range(1, 27) : random.range(90, 140));
    for (uint32_t & b : m.bits) {
        if (b != 0 && random.unit() >= outliers) {
            const auto sign = static_cast<uint32_t>(random.bits() & 1) << (type == GGML_MACKO_TYPE_F32 ? 31 : 15);
            b               = sign | (first + static_cast<uint32_t>(random.range(0, 2))) << bits |
                static_cast<uint32_t>(random.range(0, 127)) << (bits - 7);
        }
    }
    m.finish();
    return m;
}

// A matrix whose values stay coded in memory.
struct coded_matrix {
    matrix                   m;
    packed_matrix            packed;
    std::unique_ptr<guarded> memory;
    cpu_matrix               w    = {};
    bool                     kept = false; // there are not too many outliers for that

    explicit coded_matrix(const matrix & source, int32_t index_bits, int n_threads) : m(source) {
        CHECK(macko::pack(m.dense.data(), { m.desc, GGML_MACKO_TYPE_CODED, index_bits }, 1, &packed, 7, 2) == 0, "%s",
              ggml_macko_last_error());
        const macko_desc & desc = packed.desc.dense;
        const int64_t      most = max_short_outliers(desc.nnz, desc.type, static_cast<int64_t>(packed.values.size()));
        kept                    = can_stay_coded(desc, most);
        if (!kept) {
            return;
        }
        packed_view view;
        CHECK(check_packed(packed.arrays(), 1, &view) == 0, "%s", ggml_macko_last_error());
        const cpu_plan plan = plan_with(desc, coded_bitmap_shape{ most });
        memory              = std::make_unique<guarded>(plan.nbytes);
        w                   = pack_whole(view, n_threads, plan, *memory);
        CHECK(memory->intact(), "packing wrote outside");
    }
};

static const double densities[] = { 0.0, ONE_ELEMENT, 0.05, 0.3, 0.5, 0.9, 1.0 };

TEST(coded_rows_turn_back_into_the_same_bytes) {
    rng           random(16);
    const int32_t index_bits[] = { -1, 0, 2, 4, 8 };
    int           n_kept = 0, n_outliers = 0;
    for (const int32_t type : all_types) {
        for (const double density : densities) {
            for (const int64_t cols : { 1, 7, 63, 64, 65, 129, 300, 4097 }) {
                const int64_t      rows     = random.range(1, 40);
                const double       outliers = random.bits() & 1 ? 0.0 : 0.02;
                const coded_matrix c(short_matrix(random, type, rows, cols, density, outliers),
                                     index_bits[random.range(0, 4)], static_cast<int>(random.range(1, 3)));
                if (!c.kept) {
                    continue;
                }
                const int64_t begin = random.range(0, rows - 1);
                const guarded dense((rows - begin) * cols * value_nbytes(type));
                densify(c.w, begin, rows, dense.data);
                CHECK(memcmp(dense.data, c.m.dense.data() + begin * cols * value_nbytes(type),
                             static_cast<size_t>((rows - begin) * cols * value_nbytes(type))) == 0 &&
                          dense.intact() && c.memory->intact(),
                      "type %d %ldx%ld density %g", type, (long)rows, (long)cols, density);
                n_kept++;
                n_outliers += static_cast<int>(std::get<coded_bitmap_layout>(c.w).outlier_off[rows]);
            }
        }
    }
    CHECK(n_kept > 100 && n_outliers > 1000, "%d matrices, %d outliers", n_kept, n_outliers);
}

TEST(coded_weights_are_within_the_error_bound) {
    rng           random(17);
    const int64_t all_n[] = { 2, 3, 4, 5, 7, 8, 9, 17, 33, 128, 130 };
    const int64_t dims[]  = { 1, 2, 7, 31, 63, 64, 65, 127, 257, 1000, 2113, 4096, 9001 };
    size_t        next_n  = 0;
    for (const int32_t type : all_types) {
        for (const double density : densities) {
            for (const int64_t cols : dims) {
                const int64_t      rows = random.range(1, cols > 300 ? 9 : 70);
                const coded_matrix c(short_matrix(random, type, rows, cols, density, 0.015), -1, 2);
                if (!c.kept) {
                    continue;
                }
                const int64_t begin = random.range(0, rows - 1);
                check_all_sets(problem(random, c.m, c.w, 0, rows, 1, type != GGML_MACKO_TYPE_F32), true);
                check_all_sets(problem(random, c.m, c.w, begin, rows, 1, false), false);
                check_all_sets(
                    problem(random, c.m, c.w, begin, rows, all_n[next_n++ % std::size(all_n)], random.bits() & 1),
                    true);
            }
        }
    }
}

TEST(sets_ask_for_layouts_that_they_multiply_with) {
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        const bool            vbmi2   = strcmp(set->name, "avx512-vbmi2") == 0;
        const bool            bundles = strncmp(set->name, "avx", 3) == 0 || strncmp(set->name, "neon-", 5) == 0;
        const layout_traits & t       = set->layouts;
        CHECK((set->multiply.bundles != nullptr) == bundles && (t.bundles_below > 0) == bundles, "%s", set->name);
        CHECK((set->multiply.coded_bitmap != nullptr) == vbmi2 && t.coded == vbmi2, "%s", set->name);
        CHECK(t.short_bundles_below >= t.bundles_below, "%s", set->name);
    }
}

// Rows longer than the number of elements that any kernel compresses or decodes at a time.
TEST(rows_of_several_segments_are_within_the_error_bound) {
    rng random(15);
    for (const double density : { 0.04, 0.3, 0.95 }) {
        for (const int32_t type : all_types) {
            const matrix m = random_matrix(random, type, 7, 9001, density);
            for (const bool bundles : { false, true }) {
                const guarded    memory(plan_of(m.desc, bundles).nbytes);
                const cpu_matrix w = pack(m, 4, 7, memory, bundles);
                check_all_sets(problem(random, m, w, 0, 7, 1, true), true);
                check_all_sets(problem(random, m, w, 1, 7, 3, true), true);
            }
        }
        for (const int32_t bits : all_bits) {
            const quantized_matrix_of q(random, GGML_MACKO_TYPE_F16, bits, 64, 7, 9001, density);
            check_all_sets(problem(random, q.exact, q.w, 0, 7, 1, true), true);
            check_all_sets(problem(random, q.exact, q.w, 1, 7, 3, true), true);
        }
    }
}

// An x of zeros, and an x of only the largest magnitude and zeros: the extremes of the integers.
TEST(extreme_x_is_within_the_error_bound_of_integers) {
    rng random(13);
    for (const int32_t bits : all_bits) {
        const quantized_matrix_of q(random, GGML_MACKO_TYPE_F16, bits, 64, 40, 300, 0.4);
        for (const float scale : { 0.0f, 1e-28f, 1.0f, 1e30f }) {
            for (const int64_t n : { 1, 5 }) {
                problem p(random, q.exact, q.w, 0, 40, n, true);
                for (int64_t i = 0; i < n * 300; i++) {
                    p.x.floats()[i] = scale * static_cast<float>(random.range(-1, 1));
                }
                p.of_blocks.clear();
                p.sum_blocks(64);
                for (int64_t k = 0; k < 40 * n; k++) {
                    double sum = 0, magnitude = 0;
                    for (int64_t c = 0; c < 300; c++) {
                        const double product =
                            value_of(q.exact.bits[static_cast<size_t>(k / n * 300 + c)], GGML_MACKO_TYPE_F32) *
                            static_cast<double>(p.x.floats()[k % n * 300 + c]);
                        sum += product;
                        magnitude += std::fabs(product);
                    }
                    p.want[static_cast<size_t>(k)]  = sum;
                    p.bound[static_cast<size_t>(k)] = magnitude * 300 * 0x1p-23 + 300 * 0x1p-149;
                }
                check_all_sets(p, true);
            }
        }
    }
}

// More rows than a block of any kernel, and columns that end inside a chunk.
TEST(rows_of_all_blocks_are_computed) {
    rng random(3);
    for (const int32_t type : all_types) {
        const matrix m = random_matrix(random, type, 1037, 333, 0.4);
        for (const bool bundles : { false, true }) {
            const guarded    memory(plan_of(m.desc, bundles).nbytes);
            const cpu_matrix w = pack(m, 4, 100, memory, bundles);
            CHECK(in_bundles(w) == (bundles && has_bundles(type)), "type %d", type);
            for (const int64_t n : { 1, 8, 20, 130 }) {
                check_all_sets(problem(random, m, w, 0, 1037, n, true), true);
            }
        }
    }
}

TEST(row_range_of_any_length_is_computed) {
    rng random(4);
    for (const bool bundles : { false, true }) {
        const int64_t    all = bundles ? 300 : 96; // several groups of bundles
        const matrix     m   = random_matrix(random, GGML_MACKO_TYPE_F16, all, 200, 0.3);
        const guarded    memory(plan_of(m.desc, bundles).nbytes);
        const cpu_matrix w = pack(m, 4, all, memory, bundles);
        CHECK(in_bundles(w) == bundles, "bundles");
        for (int64_t begin = 0; begin < all; begin += 13) {
            for (const int64_t rows : { 0, 1, 2, 5, 12, 140 }) {
                check_all_sets(problem(random, m, w, begin, std::min<int64_t>(begin + rows, all), 1 + begin % 18, true),
                               true);
            }
        }
    }
}

// Each x is multiplied only by 1.0, so y is the rounded x, bit for bit.
TEST(rounding_of_x_is_exact) {
    rng           random(5);
    const int64_t cols = 32;
    for (const int32_t type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
        matrix m(type, cols, cols);
        for (int64_t c = 0; c < cols; c++) {
            m.at(c, c) = type == GGML_MACKO_TYPE_F16 ? 0x3c00 : 0x3f80;
        }
        m.finish();
        const guarded    memory(plan_of(m.desc).nbytes), bundles(plan_of(m.desc, true).nbytes);
        const cpu_matrix w = pack(m, 4, cols, memory), in = pack(m, 4, cols, bundles, true);
        CHECK(in_bundles(in), "type %d", type);
        for (int k = 0; k < 100; k++) {
            problem p(random, m, w, 0, cols, 2, true);
            for (int64_t c = 0; c < 2 * cols; c++) { // any exponent that does not become Inf, ties included
                const int e = static_cast<int>(
                    random.range(type == GGML_MACKO_TYPE_F16 ? -28 : -126, type == GGML_MACKO_TYPE_F16 ? 15 : 126));
                const float v =
                    std::ldexp(static_cast<float>(random.range(0x400, 0x7ff) * 2 + (random.bits() & 1)) / 4096, e);
                p.x.floats()[c] = std::fabs(v) > 65504 ? 65504.0f : random.bits() & 1 ? v : -v;
            }
            for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
                for (const how with : { how::rows, how::panels, how::planes }) {
                    p.w = with == how::planes ? in : w;
                    if (!multiplies_with(*set, p.w)) {
                        continue;
                    }
                    output out(2, cols);
                    multiply(*set, p, with, 1, out);
                    for (int64_t c = 0; c < 2 * cols; c++) {
                        const double want = rounded(p.x.floats()[c], type);
                        CHECK(out.y[static_cast<size_t>(c / cols)][c % cols] == want,
                              "%s type %d: x %a gives %a, not %a", set->name, type, p.x.floats()[c],
                              out.y[static_cast<size_t>(c / cols)][c % cols], want);
                    }
                }
            }
        }
    }
}

// 65520 is the smallest float that F16 rounds to infinity. One row and column, because 0 * infinity gives NaN, even in
// an empty slot of a bundle.
TEST(x_beyond_f16_rounds_to_infinity) {
    rng    random(8);
    matrix m(GGML_MACKO_TYPE_F16, 1, 1);
    m.at(0, 0) = 0x3c00;
    m.finish();
    const guarded    memory(plan_of(m.desc).nbytes), more(plan_of(m.desc, true).nbytes);
    const cpu_matrix w = pack(m, 4, 1, memory), in = pack(m, 4, 1, more, true);
    problem          p(random, m, w, 0, 1, 1, true);
    CHECK(in_bundles(in), "one element");
    const struct {
        float x, want;
    } cases[] = { { 65519.0f, 65504.0f }, { 65520.0f, INFINITY }, { -65535.0f, -INFINITY },
                  { 1e30f, INFINITY },    { 0x1p-25f, 0 },        { 0x1.8p-24f, 0x1p-23f } };
    for (const auto & c : cases) {
        p.x.floats()[0] = c.x;
        for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
            for (const how with : { how::rows, how::planes }) {
                p.w = with == how::planes ? in : w;
                if (!multiplies_with(*set, p.w)) {
                    continue;
                }
                output out(1, 1);
                multiply(*set, p, with, 1, out);
                const bool hidden = with == how::planes && std::isinf(c.want) && std::isnan(out.y[0][0]);
                CHECK(out.y[0][0] == c.want || hidden, "%s: %a rounds to %a, not %a", set->name, c.x, out.y[0][0],
                      c.want);
            }
        }
    }
}

// The product with a non-finite x is unspecified, because a kernel may skip zeros that would give NaN. It must not
// crash or change the products with other x.
TEST(finite_x_beside_nonfinite_x_is_right) {
    rng random(6);
    for (const int32_t type : all_types) {
        const matrix m = random_matrix(random, type, 33, 129, 0.5);
        for (const how with : { how::rows, how::panels, how::planes }) {
            const bool       bundles = with == how::planes;
            const int64_t    n       = bundles ? MAX_PLANES : 17;
            const guarded    memory(plan_of(m.desc, bundles).nbytes);
            const cpu_matrix w = pack(m, 4, 33, memory, bundles);
            problem          p(random, m, w, 0, 33, n, true);
            for (int64_t c = 0; c < 129; c++) {
                p.x.floats()[c]       = INFINITY;
                p.x.floats()[129 + c] = NAN;
                p.x.floats()[258 + c] = 1e30f; // Inf in F16
            }
            for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
                if (bundles && !(in_bundles(w) && multiplies_with(*set, w))) {
                    continue;
                }
                output out(n, 33);
                multiply(*set, p, with, 1, out);
                for (int64_t r = 0; r < 33; r++) { // the finite x
                    for (int64_t j = 3; j < n; j++) {
                        const size_t k = static_cast<size_t>(r * n + j);
                        CHECK(std::fabs(out.y[static_cast<size_t>(j)][r] - p.want[k]) <= p.bound[k],
                              "%s: row %ld of x %ld", set->name, (long)r, (long)j);
                    }
                }
            }
        }
    }
}

// ---- columns ----

// The matrices of w, with a given number of rows each, by columns.
struct columns_of {
    int64_t       rows, cols; // of a matrix
    guarded       memory;
    bitmap_layout all;

    columns_of(const macko_desc & desc, const cpu_matrix & w, int64_t rows, int n_threads = 2)
        : rows(rows), cols(desc.cols), memory(columns_nbytes(desc, rows)), all(columns_bind(desc, rows, memory.data)) {
        columns_pack(w, n_threads, all);
        CHECK(memory.intact(), "packing wrote outside");
    }
    bitmap_layout of(int64_t matrix) const { return columns_of_matrix(all, matrix, cols); }
};

static void check_columns(const matrix & m, const cpu_matrix & w, int64_t rows) {
    const columns_of one(m.desc, w, rows, 1), c(m.desc, w, rows, 3);
    const int64_t    cols = m.desc.cols, size = value_nbytes(m.desc.type);
    const guarded    dense(m.desc.rows * cols * size);
    densify(c.all, 0, c.all.rows, dense.data);
    for (int64_t row = 0; row < m.desc.rows; row++) {
        for (int64_t col = 0; col < cols; col++) {
            const int64_t at = (row / rows * cols + col) * rows + row % rows;
            CHECK(memcmp(dense.data + at * size, &m.dense[static_cast<size_t>((row * cols + col) * size)],
                         static_cast<size_t>(size)) == 0,
                  "row %ld, column %ld", (long)row, (long)col);
        }
    }
    const uint8_t * end = c.all.values + m.desc.nnz * size;
    CHECK(c.all.row_off[c.all.rows] == m.desc.nnz &&
              std::all_of(end, end + VALUES_SLACK, [](uint8_t b) { return b == 0; }),
          "zeros behind the values");
    CHECK(memcmp(one.all.row_off, c.all.row_off, static_cast<size_t>(c.all.rows + 1) * 4) == 0 &&
              memcmp(one.all.masks, c.all.masks, static_cast<size_t>(c.all.rows * mask_words(rows) * 8)) == 0 &&
              memcmp(one.all.values, c.all.values, static_cast<size_t>(m.desc.nnz * size)) == 0,
          "the number of threads makes a difference");
}

TEST(columns_have_the_values_of_the_rows) {
    rng random(31);
    int n_coded = 0;
    for (const int32_t type : all_types) {
        for (const int64_t rows : { 64, 65, 127, 128, 300, 1025 }) {
            for (const int64_t cols : { 1, 63, 64, 65, 200 }) {
                for (const double density : { 0.0, ONE_ELEMENT, 0.05, 0.5, 1.0 }) {
                    const int64_t n_matrices = random.range(1, 3);
                    const bool    bundles    = has_bundles(type) && random.bits() & 1;
                    const matrix  m          = random_matrix(random, type, rows * n_matrices, cols, density);
                    const guarded memory(plan_of(m.desc, bundles).nbytes);
                    check_columns(m, pack(m, 4, m.desc.rows, memory, bundles), rows);
                    const coded_matrix coded(short_matrix(random, type, rows, cols, density, 0.02), -1, 2);
                    if (coded.kept) {
                        check_columns(coded.m, coded.w, rows);
                        n_coded++;
                    }
                }
            }
        }
    }
    CHECK(n_coded > 20, "%d coded matrices", n_coded);
}

// The set, with columns used from a given share of zeros on.
static kernel_set with_columns_from(const kernel_set & set, float zeros) {
    kernel_set changed         = set;
    changed.costs.columns_from = zeros;
    return changed;
}

// Compares columns with float64, for matrix `number` of the tensor. The bits must not depend on the number of threads,
// and the values must not change if no column is skipped.
static void check_columns_product(rng & random, const matrix & m, const cpu_matrix & w, const columns_of & columns,
                                  int64_t number, double zeros) {
    const int64_t begin = number * columns.rows, end = begin + columns.rows;
    const problem p(random, m, w, begin, end, 1, random.bits() & 1, zeros);
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        const kernel_set always = with_columns_from(*set, 0);
        output           one(1, columns.rows);
        multiply(always, p, how::dispatched, 1, one, nullptr, columns.of(number));
        check_result(*set, p, "columns", one);
        for (int n_threads = 2; n_threads <= 5; n_threads++) {
            output more(1, columns.rows);
            multiply(always, p, how::dispatched, n_threads, more, nullptr, columns.of(number));
            CHECK(one.same(more), "%s: %d threads give other bits than one (%ldx%ld)", set->name, n_threads,
                  (long)columns.rows, (long)m.desc.cols);
        }
        output all(1, columns.rows);
        multiply(always, p, how::dispatched, 2, all, nullptr, columns.of(number), false);
        CHECK(std::equal(all.y[0], all.y[0] + columns.rows, one.y[0]), "%s: zeros make a difference (%ldx%ld)",
              set->name, (long)columns.rows, (long)m.desc.cols);
    }
}

TEST(columns_are_within_the_error_bound) {
    rng random(32);
    for (const int32_t type : all_types) {
        for (const auto & shape : { std::pair<int64_t, int64_t>{ 64, 1 },
                                    { 65, 7 },
                                    { 127, 64 },
                                    { 200, 65 },
                                    { 256, 333 },
                                    { 777, 130 },
                                    { 2500, 600 },
                                    { 4300, 60 }, // too many rows for sums beside x
                                    { 100, 4500 } }) {
            for (const double density : { 0.0, ONE_ELEMENT, 0.05, 0.5, 1.0 }) {
                const int64_t    n_matrices = random.range(1, 2);
                const matrix     m = random_matrix(random, type, shape.first * n_matrices, shape.second, density);
                const guarded    memory(plan_of(m.desc).nbytes);
                const cpu_matrix w = pack(m, 4, m.desc.rows, memory);
                const columns_of columns(m.desc, w, shape.first);
                for (const double zeros : { 0.0, 0.6, 0.97, 1.0 }) {
                    check_columns_product(random, m, w, columns, random.range(0, n_matrices - 1), zeros);
                }
            }
        }
    }
}

// The given columns belong to a different matrix, so the result reveals whether they were read.
TEST(columns_are_read_where_enough_of_x_is_zero) {
    rng          random(33);
    const matrix m = random_matrix(random, GGML_MACKO_TYPE_F16, 128, 200, 0.5);
    const matrix other(GGML_MACKO_TYPE_F16, 128, 200);
    matrix       zeros = other;
    zeros.finish();
    const guarded    memory(plan_of(m.desc).nbytes), none(plan_of(zeros.desc).nbytes);
    const cpu_matrix w = pack(m, 4, 128, memory);
    const columns_of columns(zeros.desc, pack(zeros, 4, 128, none), 128);
    for (const int64_t n : { 1, 2 }) {
        problem p(random, m, w, 0, 128, n, true);
        for (int64_t n_zeros = 0; n_zeros <= 200; n_zeros++) {
            for (int64_t k = 0; k < n; k++) {
                std::fill_n(p.x.floats() + k * 200, n_zeros, 0.0f);
            }
            for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
                output out(n, 128), rows(n, 128);
                multiply(*set, p, how::dispatched, 1, out, nullptr, columns.all);
                multiply(*set, p, how::dispatched, 1, rows);
                const auto found    = std::count(p.x.floats(), p.x.floats() + 200, 0.0f);
                const bool expected = n == 1 && static_cast<float>(found) >= 200 * set->costs.columns_from;
                const bool read     = std::all_of(out.y[0], out.y[0] + 128, [](float y) { return y == 0; });
                const bool nothing  = std::all_of(p.x.floats(), p.x.floats() + 200, [](float v) { return v == 0; });
                CHECK(read == (expected || nothing), "%s: %ld of 200 zeros, n %ld", set->name, (long)n_zeros, (long)n);
                CHECK(expected || out.same(rows), "%s: rows with columns beside them", set->name);
            }
        }
    }
}

TEST(nan_in_x_reaches_every_row_that_meets_it) {
    rng              random(34);
    const matrix     m = random_matrix(random, GGML_MACKO_TYPE_BF16, 300, 100, 0.5);
    const guarded    memory(plan_of(m.desc).nbytes);
    const cpu_matrix w = pack(m, 4, 300, memory);
    const columns_of columns(m.desc, w, 300);
    const problem    p(random, m, w, 0, 300, 1, true, 0.9);
    for (int64_t c = 0; c < 100; c++) {
        const float kept = p.x.floats()[c];
        p.x.floats()[c]  = NAN;
        for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
            output out(1, 300);
            multiply(with_columns_from(*set, 0), p, how::dispatched, 1, out, nullptr, columns.all);
            for (int64_t r = 0; r < 300; r++) {
                CHECK(m.bits[static_cast<size_t>(r * 100 + c)] == 0 || std::isnan(out.y[0][r]), "%s: row %ld",
                      set->name, (long)r);
            }
        }
        p.x.floats()[c] = kept;
    }
}

TEST(mul_mat_thread_runs_the_selected_set) {
    rng          random(7);
    const char * name;
    CHECK(select_kernels(&name) == 0, "%s", ggml_macko_last_error());
    const matrix  m = random_matrix(random, GGML_MACKO_TYPE_F16, 64, 777, 0.5);
    const guarded memory(plan_of(m.desc).nbytes);
    const problem p(random, m, pack(m, 4, 64, memory), 0, 64, 3, true);
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        if (strcmp(set->name, name) == 0) {
            output with_set(3, 64), selected(3, 64);
            multiply(*set, p, how::dispatched, 2, with_set);
            const guarded        scratch(mul_mat_scratch_nbytes(777, 3));
            const float *        x[3]   = { p.x.floats(), p.x.floats() + 777, p.x.floats() + 2 * 777 };
            const mul_mat_params params = { p.w, 0, 64, 3, x, selected.y.data(), true, scratch.data };
#pragma omp parallel num_threads(2)
            mul_mat_thread(params, omp_get_thread_num(), omp_get_num_threads());
            CHECK(selected.same(with_set), "mul_mat_thread is not %s", name);
            check_result(*set, p, "selected", selected);
        }
    }
}

// ---- speed ----

#if defined(__x86_64__)
// The dense kernel for comparison: F16 rows, float x, AVX-512, 4 rows times NX x in registers.
template <int NX>
__attribute__((target("avx512f,fma,f16c"))) static void dense_tile(const uint16_t * w, int64_t cols, const float * x,
                                                                   float * const * y, int64_t row) {
    __m512 acc[4][NX] = {};
    for (int64_t c = 0; c < cols; c += 16) {
        __m512 wv[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            wv[r] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + (row + r) * cols + c)));
        }
#pragma GCC unroll 6
        for (int i = 0; i < NX; i++) {
            const __m512 xv = _mm512_loadu_ps(x + i * cols + c);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                acc[r][i] = _mm512_fmadd_ps(wv[r], xv, acc[r][i]);
            }
        }
    }
    for (int i = 0; i < NX; i++) {
        for (int r = 0; r < 4; r++) {
            y[i][row + r] = _mm512_reduce_add_ps(acc[r][i]);
        }
    }
}

static void dense_mul_mat(const uint16_t * w, int64_t rows, int64_t cols, int64_t n, const float * x, float * const * y,
                          int ith, int nth) {
    for (int64_t row = rows / 4 * ith / nth * 4; row < rows / 4 * (ith + 1) / nth * 4; row += 4) {
        int64_t i = 0;
        for (; i + 6 <= n; i += 6) {
            dense_tile<6>(w, cols, x + i * cols, y + i, row);
        }
        for (; i + 3 <= n; i += 3) {
            dense_tile<3>(w, cols, x + i * cols, y + i, row);
        }
        for (; i < n; i++) {
            dense_tile<1>(w, cols, x + i * cols, y + i, row);
        }
    }
}
#endif

// Seconds of f(matrix): the best of several rounds for each matrix, because other programs can only slow it down, and
// the mean over the matrices.
template <typename F> static double timed(int n_matrices, F && f) {
    std::vector<double> best(static_cast<size_t>(n_matrices), INFINITY);
    const double        start = seconds();
    for (int pass = 0; pass < 3 || (seconds() - start < 0.7 && pass < 50); pass++) {
        for (int i = 0; i < n_matrices; i++) {
            const double t = seconds();
            f(i);
            best[static_cast<size_t>(i)] = std::min(best[static_cast<size_t>(i)], seconds() - t);
        }
    }
    double sum = 0;
    for (const double t : best) {
        sum += t;
    }
    return sum / n_matrices;
}

// Prints, for several shares of zeros in one x, the times with rows and with columns, and the speedup of columns.
static void bench_columns_of(const kernel_set & set, int64_t rows, int64_t cols, double density, int32_t type,
                             int n_threads, int copies) {
    struct copy {
        std::unique_ptr<guarded>      memory;
        std::unique_ptr<coded_matrix> coded;
        cpu_matrix                    w;
        std::unique_ptr<columns_of>   columns;
    };
    rng               random(77);
    const bool        coded = type == GGML_MACKO_TYPE_CODED;
    const matrix      m     = coded ? short_matrix(random, GGML_MACKO_TYPE_F16, rows, cols, density, 0)
                                    : random_matrix(random, type, rows, cols, density);
    std::vector<copy> all(static_cast<size_t>(copies));
    for (copy & c : all) {
        if (coded) {
            c.coded = std::make_unique<coded_matrix>(m, -1, 1);
            c.w     = c.coded->w;
        } else {
            const cpu_plan plan = choose_cpu_layout(set.layouts, m.desc, type, 0, 0);
            c.memory            = std::make_unique<guarded>(plan.nbytes);
            c.w                 = pack(m, 4, rows, *c.memory, std::holds_alternative<bundles_shape>(plan.shape));
        }
        const double start = seconds();
        c.columns          = std::make_unique<columns_of>(m.desc, c.w, rows, n_threads);
        fastest_pack       = std::min(fastest_pack, seconds() - start);
    }
    const guarded    scratch(mul_mat_scratch_nbytes(cols, 1));
    const kernel_set always = with_columns_from(set, 0);
    for (const int percent : { 0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95 }) {
        std::vector<float> x(static_cast<size_t>(cols)), y(static_cast<size_t>(rows));
        for (float & v : x) {
            v = random.unit() * 100 < percent ? 0 : static_cast<float>(random.unit() - 0.5);
        }
        double time[2];
        for (int pass = 0; pass < 2; pass++) { // the first pass warms up
            std::vector<double> best[2];
            best[0].assign(all.size(), INFINITY);
            best[1].assign(all.size(), INFINITY);
            for (int round = 0; round < (pass == 0 ? 1 : 15); round++) {
                for (int with = 0; with < 2; with++) {
                    for (size_t i = 0; i < all.size(); i++) {
                        const float *  px     = x.data();
                        float *        py     = y.data();
                        mul_mat_params params = { all[i].w, 0, rows, 1, &px, &py, true, scratch.data };
                        params.columns        = with ? all[i].columns->all : bitmap_layout{};
                        const double start    = seconds();
#pragma omp parallel num_threads(n_threads)
                        mul_mat_thread_with(always, params, omp_get_thread_num(), omp_get_num_threads());
                        best[with][i] = std::min(best[with][i], seconds() - start);
                    }
                }
            }
            for (int with = 0; with < 2; with++) {
                std::sort(best[with].begin(), best[with].end());
                time[with] = best[with][all.size() / 2];
            }
        }
        printf("%-13s %5.2f %5ldx%-5ld %d threads %3d %% zeros | rows %8.1f us | columns %8.1f us | %5.2f\n", set.name,
               density, (long)rows, (long)cols, n_threads, percent, time[0] * 1e6, time[1] * 1e6, time[0] / time[1]);
        fflush(stdout);
    }
}

// usage: --bench-columns [rows] [cols] [density] [threads] [copies] [type, as in ggml-macko.h]
static void bench_columns(int argc, char ** argv) {
    const auto   number = [&](int i, double fallback) { return argc > i ? strtod(argv[i], nullptr) : fallback; };
    const char * only   = getenv("GGML_MACKO_CPU_KERNELS");
    for (int s = 0; const kernel_set * set = supported_kernel_set(s); s++) {
        const auto type = static_cast<int32_t>(number(7, 1));
        if ((only ? strcmp(only, set->name) == 0 : set != &kernels_portable) &&
            (type != GGML_MACKO_TYPE_CODED || set->layouts.coded)) {
            bench_columns_of(*set, static_cast<int64_t>(number(2, 2048)), static_cast<int64_t>(number(3, 8192)),
                             number(4, 0.5), type, static_cast<int>(number(5, 1)), static_cast<int>(number(6, 6)));
        }
    }
    printf("columns packed in %.1f ms\n", fastest_pack * 1e3);
}

struct bench_options {
    std::vector<double> densities, n;
    int                 n_threads;
    int                 copies;  // matrices that are used in turn, so that weights come from memory at n = 1
    int32_t             type;    // of the values
    bool                bundles; // for the sets that have kernels for them
};

// with memory of its own
static cpu_matrix pack_coded(const matrix & m, std::unique_ptr<guarded> * memory) {
    packed_matrix packed;
    packed_view   view;
    CHECK(macko::pack(m.dense.data(), { m.desc, GGML_MACKO_TYPE_CODED, -1 }, 1, &packed) == 0 &&
              check_packed(packed.arrays(), 1, &view) == 0,
          "%s", ggml_macko_last_error());
    const auto     nbytes = static_cast<int64_t>(packed.values.size());
    const cpu_plan plan = plan_with(m.desc, coded_bitmap_shape{ max_short_outliers(m.desc.nnz, m.desc.type, nbytes) });
    *memory             = std::make_unique<guarded>(plan.nbytes);
    const double     start = seconds();
    const cpu_matrix w     = pack_whole(view, 1, plan, **memory);
    fastest_pack           = std::min(fastest_pack, seconds() - start);
    return w;
}

// The matrices of one shape and density, dense and sparse.
struct bench_matrices {
    int64_t                               rows, cols;
    double                                density;
    std::vector<matrix>                   dense;
    std::vector<std::unique_ptr<guarded>> memory;
    std::vector<cpu_matrix>               w;

    bench_matrices(int64_t rows, int64_t cols, double density, int copies, int32_t type, bool bundles)
        : rows(rows), cols(cols), density(density) {
        for (int i = 0; i < copies; i++) {
            rng        random(static_cast<uint64_t>(i) + 10);
            const bool plain = type <= GGML_MACKO_TYPE_F16 || type == GGML_MACKO_TYPE_BF16;
            dense.emplace_back(plain ? type : static_cast<int32_t>(GGML_MACKO_TYPE_F16), rows, cols);
            for (uint32_t & b : dense.back().bits) {
                const uint64_t u = random.bits();
                b = static_cast<double>(u >> 40) < density * 0x1p24 ? static_cast<uint32_t>(0x2800 | (u & 0x87ff)) : 0;
                b <<= type == GGML_MACKO_TYPE_F32 ? 16 : 0;
                if (type == GGML_MACKO_TYPE_CODED && b != 0) { // BF16-class, and .8 % of the values are outliers
                    b &= u >> 16 & 127 ? 0xfff8 : 0x87f8;
                }
            }
            dense.back().finish();
            std::vector<uint32_t>().swap(dense.back().bits);
            memory.emplace_back();
            if (const int32_t bits = code_bits(type)) { // as the writer chooses it
                const int64_t       window = density > 0.7 ? 32 : density > 0.35 ? 64 : density > 0.18 ? 128 : 256;
                quantized_matrix_of q(random, GGML_MACKO_TYPE_F16, bits, window, rows, cols, density);
                w.push_back(q.w);
                memory.back() = std::move(q.memory);
            } else if (type == GGML_MACKO_TYPE_CODED) {
                w.push_back(pack_coded(dense.back(), &memory.back()));
            } else {
                memory.back() = std::make_unique<guarded>(plan_of(dense.back().desc, bundles).nbytes);
                w.push_back(pack(dense.back(), 4, rows, *memory.back(), bundles));
            }
        }
    }
    // bytes that are read from one matrix
    int64_t nbytes_used() const {
        const auto * bundles = std::get_if<bundles_layout>(&w[0]);
        return bundles ? static_cast<int64_t>(bundles->group_off[n_bundle_groups(rows)])
                       : memory[0]->map + memory[0]->map_size - memory[0]->data;
    }
};

// Prints a line for each kernel set: time, bytes of weights and non-zeros per ns, and the dense kernel.
static void bench_n(const bench_matrices & m, int64_t n, const bench_options & options) {
    const int64_t              rows = m.rows, cols = m.cols;
    const int                  n_threads = options.n_threads, n_matrices = n <= 4 ? options.copies : 1;
    std::vector<float>         xs(static_cast<size_t>(n * cols)), ys(static_cast<size_t>(n * rows));
    std::vector<const float *> x;
    std::vector<float *>       y;
    rng                        random(99);
    for (float & v : xs) {
        v = static_cast<float>(random.unit() - 0.5);
    }
    for (int64_t i = 0; i < n; i++) {
        x.push_back(xs.data() + i * cols);
        y.push_back(ys.data() + i * rows);
    }
    double dense_time = NAN;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        dense_time = timed(n_matrices, [&](int i) {
            const uint16_t * d = reinterpret_cast<const uint16_t *>(m.dense[static_cast<size_t>(i)].dense.data());
#pragma omp parallel num_threads(n_threads)
            dense_mul_mat(d, rows, cols, n, xs.data(), y.data(), omp_get_thread_num(), omp_get_num_threads());
        });
    }
#endif
    const char * only = getenv("GGML_MACKO_CPU_KERNELS");
    for (int s = 0; const kernel_set * set = supported_kernel_set(s); s++) {
        if ((only ? strcmp(only, set->name) != 0 : set == &kernels_portable) || !multiplies_with(*set, m.w[0])) {
            continue;
        }
        const guarded scratch(mul_mat_scratch_nbytes(cols, n));
        const double  time = timed(n_matrices, [&](int i) {
            const mul_mat_params params = {
                m.w[static_cast<size_t>(i)], 0, rows, n, x.data(), y.data(), true, scratch.data
            };
#pragma omp parallel num_threads(n_threads)
            mul_mat_thread_with(*set, params, omp_get_thread_num(), omp_get_num_threads());
        });
        const double nnz = static_cast<double>(m.dense[0].desc.nnz);
        printf("%-13s %6.2f %5ldx%-4ld %5ld | %9.1f %7.2f %9.2f | %9.1f %7.2f | %6.2f\n", set->name, m.density,
               (long)rows, (long)cols, (long)n, time * 1e6, static_cast<double>(m.nbytes_used()) / time * 1e-9,
               nnz * static_cast<double>(n) / time * 1e-9, dense_time * 1e6,
               2 * static_cast<double>(rows * cols) / dense_time * 1e-9, dense_time / time);
        fflush(stdout);
    }
}

// usage: --bench [density,...] [n,...] [threads] [copies] [type, as in ggml-macko.h] [1: in bundles]
static void bench(int argc, char ** argv) {
    const auto list = [&](int i, const char * fallback) {
        std::vector<double> v;
        for (const char * s = argc > i ? argv[i] : fallback; *s; s += *s == ',') {
            char * end;
            v.push_back(strtod(s, &end));
            s = end;
        }
        return v;
    };
    const bench_options options = { list(2, "0.5,0.3,0.1"),
                                    list(3, "1,2,4,8,16,32,128,512"),
                                    static_cast<int>(list(4, "2")[0]),
                                    static_cast<int>(list(5, "12")[0]),
                                    static_cast<int32_t>(list(6, "1")[0]),
                                    list(7, "0")[0] != 0 };
    printf("%-13s %6s %10s %5s | %9s %7s %9s | %9s %7s | %6s\n", "set", "dens", "shape", "n", "us", "GB/s", "nnz/ns",
           "dense us", "GB/s", "ratio");
    for (const auto & shape : { std::pair<int64_t, int64_t>{ 8192, 2048 }, { 2048, 8192 } }) {
        for (const double density : options.densities) {
            fastest_pack = INFINITY;
            const bench_matrices m(shape.first, shape.second, density, options.copies, options.type, options.bundles);
            printf("pack, density %.2f: %.2f GB/s of dense F16 on one core\n", density,
                   2 * static_cast<double>(m.rows * m.cols) / fastest_pack * 1e-9);
            for (const double n : options.n) {
                bench_n(m, static_cast<int64_t>(n), options);
            }
        }
    }
}

int main(int argc, char ** argv) {
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench(argc, argv);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "--bench-columns") == 0) {
        bench_columns(argc, argv);
        return 0;
    }
    return test_main("test-cpu-kernels", argc, argv);
}
