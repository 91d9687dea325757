// Products of accepted matrices with finite x, through every kernel set of this CPU, each layout of x, and one or
// several x. All are compared with float64, element by element, even if another x contains NaN or infinity.
#include "codec/macko/encode.h"
#include "codec/registry.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/layout/aligned-memory.h"
#include "cpu/layout/matrix-packer.h"
#include "matrix-input.h"

#include <cfloat>
#include <cmath>

using namespace fuzz;
using namespace macko;
using namespace macko::cpu;

namespace {

template <typename T> struct aligned { // memory of exactly the requested size, aligned to 64 bytes
    aligned_memory memory;
    T *            data;
    explicit aligned(int64_t nbytes) : memory(allocate_aligned(nbytes)), data(static_cast<T *>(memory.get())) {
        memset(data, 0xff, static_cast<size_t>(nbytes)); // NaN
    }
};

// A product in float64, and the terms of its error bound.
struct reference {
    double sum;
    double magnitude; // of the summands
    double largest;   // sum |w| max |x|
};

struct problem {
    cpu_matrix             w;
    int64_t                n;
    bool                   round_x;
    int64_t                poisoned; // an x that is not finite, whose products are unspecified, or -1
    std::vector<float>     x;        // [n][cols]
    std::vector<reference> want;     // [n][rows]
};

// Values with few bits, which rounding to F16 or BF16 does not change; so round_x must not change the product either.
float x_of(uint64_t bits) {
    static constexpr float ODD[] = { 0.0f, -0.0f, 1.0f, -1.0f, 0x1p-14f, -0x1p-14f, 0x1p14f, 60928.0f };
    if (bits % 16 == 0) {
        return ODD[bits / 16 % std::size(ODD)];
    }
    const float m = 1.0f + static_cast<float>(bits >> 8 & 127) / 128.0f;
    return std::ldexp(bits & 128 ? -m : m, static_cast<int>(bits >> 16 & 7) - 4);
}

bool pack(const ggml_macko_matrix & m, const cpu_plan & plan, const aligned<uint8_t> & memory, cpu_matrix * w) {
    std::unique_ptr<codec_view> view;
    const codec &               format = *find_codec(m.format);
    if (open_matrix(format, m, 1, &view) || view->check_rows(1)) {
        return false;
    }
    matrix_packer packer(plan, span_ops_in_use(), memory.data);
    if (matrix_packer::takes(format)) {
        packer.pack_whole(*view, 1);
        *w = packer.matrix();
        return true;
    }
    macko_matrix rows;
    macko_view   all;
    FUZZ_CHECK(recode(*view, 1, &rows) == 0 && validate({ rows.desc, 0, rows.desc.rows, rows.row_ptr.data(), 0,
                                                          rows.values.data(), rows.deltas.data() },
                                                        &all) == 0,
               "%s", ggml_macko_last_error());
    do {
        packer.pack(all, 0);
    } while (!packer.finish());
    *w = packer.matrix();
    return true;
}

void compute_reference(const std::vector<double> & weights, problem * p) {
    const auto rows = static_cast<size_t>(base_of(p->w).rows), cols = static_cast<size_t>(base_of(p->w).cols);
    for (size_t j = 0; j < static_cast<size_t>(p->n); j++) {
        const float * x       = &p->x[j * cols];
        double        largest = 0;
        for (size_t c = 0; c < cols; c++) {
            largest = std::max(largest, std::fabs(static_cast<double>(x[c])));
        }
        for (size_t r = 0; r < rows; r++) {
            reference want = {};
            for (size_t c = 0; c < cols; c++) {
                const double w = weights[r * cols + c];
                want.sum += w * static_cast<double>(x[c]);
                want.magnitude += std::fabs(w * static_cast<double>(x[c]));
                want.largest += std::fabs(w) * largest;
            }
            p->want.push_back(want);
        }
    }
}

void check(const kernel_set & set, const problem & p, x_layout layout) {
    const int64_t              rows = base_of(p.w).rows, cols = base_of(p.w).cols;
    const aligned<uint8_t>     scratch(mul_mat_scratch_nbytes(cols, p.n));
    const aligned<float>       y(p.n * rows * 4);
    std::vector<const float *> xs;
    std::vector<float *>       ys;
    for (int64_t j = 0; j < p.n; j++) {
        xs.push_back(&p.x[static_cast<size_t>(j * cols)]);
        ys.push_back(y.data + j * rows);
    }
    const mul_mat_params params = { p.w, 0, rows, p.n, xs.data(), ys.data(), p.round_x, scratch.data };
    prepare_with(set, params, layout, 0, 1);
    multiply_with(set, params, layout, 0, rows);
    // with integers, x has an error of half a unit
    const double n_cols = static_cast<double>(cols),
                 step   = layout == x_layout::blocks ? (p.round_x ? 0.5 / 127 : 1.0 / (127 * 32768)) + 8 * 0x1p-24 : 0;
    for (int64_t i = 0; i < p.n * rows; i++) {
        const reference & want = p.want[static_cast<size_t>(i)];
        if (i / rows == p.poisoned || want.magnitude + want.largest > static_cast<double>(FLT_MAX) / 4) {
            continue; // unspecified, or it may overflow in some order of summation
        }
        const double bound = 2 * n_cols * 0x1p-24 * want.magnitude + want.largest * step + n_cols * 0x1p-149;
        FUZZ_CHECK(std::fabs(static_cast<double>(y.data[i]) - want.sum) <= bound, // false for NaN
                   "%s, layout %d, type %d, %lld x %lld, n %lld: y[%lld][%lld] = %g, float64 %g, bound %g", set.name,
                   static_cast<int>(layout), base_of(p.w).dense_type, static_cast<long long>(rows),
                   static_cast<long long>(cols), static_cast<long long>(p.n), static_cast<long long>(i / rows),
                   static_cast<long long>(i % rows), static_cast<double>(y.data[i]), want.sum, bound);
    }
}

void check_layouts(const problem & p) {
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        if (!multiplies_with(*set, p.w)) {
            continue;
        }
        if (is_quantized(p.w)) {
            check(*set, p, x_layout::blocks);
            continue;
        }
        check(*set, p, x_layout::panels);
        if (in_bundles(p.w)) {
            if (p.n <= MAX_PLANES && p.round_x) {
                check(*set, p, x_layout::planes);
            }
            continue;
        }
        const bool coded = std::holds_alternative<coded_bitmap_layout>(p.w);
        check(*set, p, coded ? x_layout::coded : x_layout::rows);
        if (p.n == 1 && p.round_x && !coded && has_rows16(*set, base_of(p.w).dense_type)) {
            check(*set, p, x_layout::rows16);
        }
    }
}

bool run(const uint8_t * data, size_t size) {
    input         in = { data, size };
    const uint8_t n = in.take<uint8_t>(), how = in.take<uint8_t>();
    const auto    seed = in.take<uint32_t>();
    encoded_input e;
    // the kernels multiply by quantized values that F32 represents exactly
    if (!encode_input(in, how & 1 ? -1 : static_cast<int32_t>(GGML_MACKO_TYPE_F32), 1536, &e)) {
        return false;
    }
    const ggml_macko_matrix & m = e.encoded.matrix;
    bytes                     dense(e.dense.size());
    const int32_t             bits = code_bits(m.value_type);
    if ((bits && m.type != GGML_MACKO_TYPE_F32) || ggml_macko_decode(&m, dense.data(), 1) != 0) {
        return false;
    }
    // expanded, as a bitmap and in bundles, and coded where possible
    const macko_desc desc  = { m.rows, m.cols, m.type, 4, m.nnz };
    const bool       coded = m.value_type == GGML_MACKO_TYPE_CODED;
    const cpu_plan   plan  = plan_with(desc, bits ? cpu_shape(quantized_shape{ bits, window_of(m), m.arrays[0].nbytes })
                                                  : shape_with(desc, (how & 128) != 0));
    const aligned<uint8_t> memory(plan.nbytes);
    problem                p;
    FUZZ_CHECK(pack(m, plan, memory, &p.w), "decoded, but not packed: %s", ggml_macko_last_error());
    static constexpr int64_t COUNTS[] = { 1, 1, 1, 2, 3, 5, 8, 9, 17 };
    p.n                               = COUNTS[n % std::size(COUNTS)];
    p.round_x                         = how & 2;
    p.poisoned                        = how & 4 && p.n > 1 ? (how >> 3) % p.n : -1;
    rng random(seed);
    p.x.resize(static_cast<size_t>(p.n * m.cols));
    for (float & v : p.x) {
        v = x_of(random.bits());
    }
    if (p.poisoned >= 0) {
        for (int64_t c = 0; c < m.cols; c++) {
            p.x[static_cast<size_t>(p.poisoned * m.cols + c)] = seed & 1 ? NAN : INFINITY;
        }
    }
    std::vector<double> weights;
    for (int64_t i = 0; i < m.rows * m.cols; i++) {
        uint32_t b = 0;
        memcpy(&b, &dense[static_cast<size_t>(i * value_nbytes(m.type))], static_cast<size_t>(value_nbytes(m.type)));
        weights.push_back(static_cast<double>(
            m.type == GGML_MACKO_TYPE_F32 ? float_of_bits(b) : float_of_value(static_cast<uint16_t>(b), m.type)));
    }
    compute_reference(weights, &p);
    bytes again(dense.size());
    densify(p.w, 0, m.rows, again.data());
    FUZZ_CHECK(bits || again == dense, "values of type %d change in the copy", m.type);
    check_layouts(p);
    const int64_t most = coded ? max_short_outliers(m.nnz, m.type, m.arrays[0].nbytes) : -1;
    if (can_stay_coded(desc, most)) {
        const cpu_plan         as_stored = plan_with(desc, coded_bitmap_shape{ most });
        const aligned<uint8_t> coded_memory(as_stored.nbytes);
        FUZZ_CHECK(pack(m, as_stored, coded_memory, &p.w), "not packed: %s", ggml_macko_last_error());
        densify(p.w, 0, m.rows, again.data());
        FUZZ_CHECK(again == dense, "coded values of type %d change in the copy", m.type);
        check_layouts(p);
    }
    return true;
}

std::vector<bytes> seeds() {
    std::vector<bytes> all;
    uint8_t            n = 0;
    for (const bytes & matrix : encode_seeds()) {
        // values that are not quantized, the first option of most encoders, keep their type
        const bool plain = n % SEED_OPTIONS == 0 && strcmp(all_codecs()[matrix[0]]->name(), "quantized") != 0;
        bytes      b     = { static_cast<uint8_t>(n % 3 ? n : 0),
                             static_cast<uint8_t>(plain ? 3 : n / SEED_OPTIONS * 4 + n % 2 * 2),
                             n,
                             0,
                             0,
                             0 };
        b.insert(b.end(), matrix.begin(), matrix.end());
        all.push_back(b);
        n++;
    }
    return all;
}

} // namespace

const target fuzz::TARGET = { "products", 2048, 4 << 20, 1, run, seeds, nullptr };
