// Matrices with scales for windows of columns on the GPU, in the layout FRAGMENTS: the tiles as read by the words of
// gpu-layout/fragments.h, then the kernels against float64 of the decoded weights, element by element, over random
// shapes, densities, structures, value types and batches. Without a GPU: exit code 77.
#include "test-cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

enum structure { UNIFORM, UNEVEN, HALF_EMPTY, STRIPES, N_STRUCTURES };

static double density_at(structure s, double density, double row_density, int64_t c, int64_t cols) {
    switch (s) {
        case HALF_EMPTY: return c > cols / 4 && c < cols * 3 / 4 ? 0 : density;
        case STRIPES:    return c % 32 < 3 ? density : density / 50; // a few lanes have most of the codes
        case UNEVEN:     return row_density;
        default:         return density;
    }
}

// The largest of the integers that kernels round x to, of products with up to n columns, and the columns of W whose x
// share a scale.
static int     integers(int64_t n) { return n > 4 ? 127 : 32639; }
static int64_t shared_columns(int integers) { return integers > 127 ? 256 : 64; }

struct test_matrix {
    quantized_matrix    file;
    quantized_view      view;
    std::vector<double> weights;
    void *              memory = nullptr;
    cuda_memory         outgrown;
    gpu_layout          device = {};

    int64_t rows() const { return file.dense.rows; }
    int64_t cols() const { return file.dense.cols; }

    test_matrix(rng & random, int64_t rows, int64_t cols, int type, int bits, double density, structure s) {
        macko_desc         shape = { rows, cols, type, 4, 0 };
        std::vector<float> dense(static_cast<size_t>(rows * cols), 0.0f);
        for (int64_t r = 0; r < rows; r++) {
            const double row_density = random.unit() < 0.3 ? 0 : random.unit() < 0.1 ? 1 : density * random.unit() * 2;
            for (int64_t c = 0; c < cols; c++) {
                if (random.unit() < density_at(s, density, row_density, c, cols)) {
                    dense[static_cast<size_t>(r * cols + c)] =
                        static_cast<float>(std::exp2(random.unit() * 6 - 6) * (random.unit() < 0.5 ? -1 : 1));
                    shape.nnz++;
                }
            }
        }
        std::vector<uint16_t> bits_of(dense.size());
        std::transform(dense.begin(), dense.end(), bits_of.begin(), [&](float f) {
            return type == GGML_MACKO_TYPE_F16 ? f16_of_float(f) : static_cast<uint16_t>(bits_of_float(f) >> 16);
        });
        const void * source = type == GGML_MACKO_TYPE_F32 ? static_cast<const void *>(dense.data()) : bits_of.data();
        STATUS_CHECK(quantize(source, shape, bits, nullptr, 0, nullptr, 2, &file));
        STATUS_CHECK(check_quantized(file.arrays(), static_cast<int64_t>(file.codes.size()), 2, &view));
        weights.assign(dense.size(), 0.0);
        const quantized_arrays a = file.arrays();
        for (int64_t r = 0; r < rows; r++) {
            int64_t k = 0;
            for_each_code(a, r, 0, cols, &k, [&](int64_t c, uint32_t code) {
                weights[static_cast<size_t>(r * cols + c)] =
                    static_cast<double>(window_scale(a, r, c / a.window)) * a.levels[code];
            });
        }
    }
    ~test_matrix() { cudaFree(memory); }
    test_matrix(const test_matrix &) = delete;

    gpu_matrix matrix() const {
        gpu_matrix m = { file.dense, 0, type_of_code_bits(file.bits) };
        m.window     = file.window;
        return m;
    }
    void upload(cuda_sparse_uploader & uploader, const gpu_device & gpu) {
        const gpu_plan plan = choose(matrix(), gpu);
        layout_verdict verdict;
        const size_t   n = static_cast<size_t>(plan.nbytes);
        CUDA_CHECK(cudaMalloc(&memory, n));
        CUDA_CHECK(cudaMemset(memory, 0xa5, n));
        CUDA_CHECK(cudaDeviceSynchronize()); // the copies that follow use another stream
        STATUS_CHECK(uploader.begin(plan, memory));
        STATUS_CHECK(uploader.whole(view, 2));
        STATUS_CHECK(uploader.finish(&device, &verdict, &outgrown));
    }
    std::string name(uint64_t seed, int64_t n) const {
        char text[200];
        snprintf(text, sizeof(text), "seed %llu: %lldx%lld type %d, %d bits, windows of %lld, n %lld",
                 static_cast<unsigned long long>(seed), static_cast<long long>(rows()), static_cast<long long>(cols()),
                 file.dense.type, file.bits, static_cast<long long>(file.window), static_cast<long long>(n));
        return text;
    }
};

// ---- products against float64 ----

// exact: x are integers of up to `exact`, which a kernel keeps: the largest one is in each step
static std::vector<float> random_x(rng & random, int64_t ldx, int64_t n, int exact) {
    std::vector<float> x(static_cast<size_t>(ldx * n));
    for (float & v : x) {
        v = static_cast<float>((random.unit() - 0.5) * (random.unit() < 0.01 ? 40 : 2));
        v = exact ? static_cast<float>(random.range(-exact, exact)) : v;
    }
    for (int64_t i = 0; i < ldx * n && exact; i++) {
        if (i % ldx % FRAGMENT_STEP == 0) {
            x[static_cast<size_t>(i)] = static_cast<float>(random.unit() < 0.5 ? exact : -exact);
        }
    }
    return x;
}

// Rows of W x in float64, and their error bound: float32 sums, and x rounded to multiples of max |x| / most. most: see
// integers(); 0: x are exact
static void reference(const test_matrix & w, int64_t row0, int64_t rows, const float * x,
                      const std::vector<float> & norm, float eps, int most, std::vector<double> & y,
                      std::vector<double> & bound) {
    const size_t        shared = static_cast<size_t>(shared_columns(most));
    std::vector<double> column(static_cast<size_t>(w.cols())), largest(column.size() / shared + 1, 0.0);
    double              squares = 0;
    for (size_t c = 0; c < column.size(); c++) {
        const double v = static_cast<double>(x[c]);
        squares += v * v;
        column[c]           = norm.empty() ? v : v * static_cast<double>(norm[c]);
        largest[c / shared] = std::max(largest[c / shared], std::fabs(column[c]));
    }
    const double scale =
        norm.empty() ? 1 : 1 / std::sqrt(squares / static_cast<double>(column.size()) + static_cast<double>(eps));
    y.assign(static_cast<size_t>(rows), 0.0);
    bound = y;
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0, magnitude = 0, rounded = 0;
        for (size_t c = 0; c < column.size(); c++) {
            const double weight = w.weights[static_cast<size_t>((row0 + r) * w.cols()) + c];
            sum += weight * column[c];
            magnitude += std::fabs(weight * column[c]);
            rounded += std::fabs(weight) * largest[c / shared];
        }
        y[static_cast<size_t>(r)] = sum * scale;
        bound[static_cast<size_t>(r)] =
            (MAX_ERROR * magnitude + (most ? rounded / (2 * most) * 1.0001 : 0)) * scale + 1e-30;
    }
}

struct bounded {
    double value, error;
};
// silu(gate) * up, and its error bound.
static double silu_times(const bounded & gate, const bounded & up, double * bound) { // |silu'| <= 1.1
    const double s = gate.value / (1 + std::exp(-gate.value)), y = s * up.value;
    *bound = 1.1 * gate.error * std::fabs(up.value) + up.error * (std::fabs(s) + 1.1 * gate.error) +
             MAX_ERROR * std::fabs(y) + 1e-25;
    return y;
}

static void check_product(rng & random, const std::vector<const test_matrix *> & w, int64_t n, const options & o,
                          const std::string & name) {
    const bool                 exact = !o.norm && random.unit() < 0.5;
    const int                  most  = exact ? 0 : integers(n);
    const int64_t              cols = w[0]->cols(), ldx = cols + random.range(0, 3);
    const std::vector<float>   x = random_x(random, ldx, n, exact ? integers(n) : 0);
    product_inputs             in(random, x, cols, o);
    cuda_sparse_mul_mat_params p = in.params(ldx, n, o);
    p.x16                        = x16_memory();
    std::vector<const gpu_layout *> devices;
    for (const test_matrix * m : w) {
        devices.push_back(&m->device);
    }
    outputs out(random, devices, o, p);
    CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
    out.get(name);
    for (size_t i = 0; i < out.count(); i++) {
        const int64_t m         = out.rows(i);
        double        worst     = 0;
        int64_t       worst_row = 0, worst_column = 0;
        for (int64_t j = 0; j < n; j++) {
            std::vector<double> want, bound, up, up_bound;
            const float * const column = &x[static_cast<size_t>(j * ldx)];
            reference(*w[i], p.row_begin[i], m, column, in.norm, p.norm_eps, most, want, bound);
            if (o.silu) {
                reference(*w[1], 0, m, column, in.norm, p.norm_eps, most, up, up_bound);
            }
            for (int64_t r = 0; r < m; r++) {
                const size_t k        = static_cast<size_t>(r);
                double       expected = want[k], limit = bound[k];
                if (o.silu) {
                    expected = silu_times({ want[k], bound[k] }, { up[k], up_bound[k] }, &limit);
                }
                limit += MAX_ERROR * (o.bias + o.residual);
                const double error =
                    std::fabs(static_cast<double>(out.at(i, r, j)) - expected - out.added(i, r, j)) / limit;
                if (!(error <= worst)) { // NaN lands here too
                    worst = error, worst_row = r, worst_column = j;
                }
            }
        }
        CHECK(worst <= 1, "%s: matrix %zu, column %lld, row %lld: %.3g times the bound%s", name.c_str(), i,
              static_cast<long long>(worst_column), static_cast<long long>(worst_row), worst,
              exact ? " (exact x)" : "");
    }
}

// Checks experts of `rows` rows each, with ids in device memory, including ids out of range.
static void check_experts(rng & random, const test_matrix & w, int64_t rows, int64_t ldx, uint64_t seed) {
    const int64_t            cols   = w.cols();
    const std::vector<float> values = random_x(random, cols, N_EXPERT_COLUMNS, integers(1));
    guarded                  x(cols * N_EXPERT_COLUMNS), y(rows * N_EXPERT_COLUMNS);
    std::copy(values.begin(), values.end(), &x.at(0));
    x.put();
    multiply_experts(w.device, x, ldx, y, x16_memory());
    for (int64_t j = 0; j < N_EXPERT_COLUMNS; j++) {
        std::vector<double> want(static_cast<size_t>(rows), 0.0), bound(static_cast<size_t>(rows), 1e-30);
        if (expert_row(j, rows) >= 0) {
            reference(w, expert_row(j, rows), rows, &values[static_cast<size_t>(j * ldx)], {}, 0, 0, want, bound);
        }
        for (int64_t r = 0; r < rows; r++) {
            const double error = std::fabs(static_cast<double>(y.at(j * rows + r)) - want[static_cast<size_t>(r)]);
            CHECK(error <= bound[static_cast<size_t>(r)], "experts, seed %llu, column %lld, row %lld: off by %.3g",
                  static_cast<unsigned long long>(seed), static_cast<long long>(j), static_cast<long long>(r), error);
        }
    }
}

// Checks the columns of several tokens, grouped by expert. Half of the columns have the same expert, some no valid id.
static void check_groups(rng & random, const test_matrix & w, int64_t n_experts, int64_t slots, int64_t tokens,
                         bool shares_x, bool silu, const std::string & name) {
    const int64_t rows = w.rows() / n_experts, cols = w.cols(), n = slots * tokens, n_x = shares_x ? tokens : n,
                  ldx = cols + random.range(0, 3), token_stride = slots + 3;
    const int grouped = n > 2 * n_experts ? integers(8) : integers(4); // an expert has n / n_experts columns on average
    const bool               exact  = random.unit() < 0.5;
    const std::vector<float> values = random_x(random, ldx, n_x, exact ? grouped : 0);
    std::vector<int32_t>     ids(static_cast<size_t>(tokens * token_stride));
    for (int32_t & id : ids) {
        id = random.unit() < 0.5 ? 1 : static_cast<int32_t>(random.range(-1, n_experts));
    }
    guarded x(ldx * n_x), y(rows * n);
    std::copy(values.begin(), values.end(), &x.at(0));
    x.put();
    const size_t nbytes = static_cast<size_t>(cuda_sparse_groups_nbytes(cols, n, n_experts)), guard = 256;
    int32_t *    ids_on_gpu;
    uint8_t *    groups;
    CUDA_CHECK(cudaMalloc(&ids_on_gpu, ids.size() * 4));
    CUDA_CHECK(cudaMemcpy(ids_on_gpu, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMalloc(&groups, nbytes + guard));
    CUDA_CHECK(cudaMemset(groups, 0x7f, nbytes + guard));
    cuda_sparse_mul_mat_params p = plain_product(w.device, x, y, n);
    p.expert_rows = p.ldy[0] = p.row_end[0] = rows;
    p.ldx                                   = ldx;
    p.expert_ids                            = ids_on_gpu;
    p.expert_ids_stride                     = 1;
    p.slots                                 = slots;
    p.token_stride                          = token_stride;
    p.shares_x                              = shares_x;
    p.groups                                = groups;
    if (silu) {
        p.n_matrices = 2, p.silu_mul = true;
        p.w[1] = p.w[0], p.row_end[1] = rows;
    }
    CHECK(cuda_sparse_groups_experts(w.device, n, n_experts), "%s: not grouped", name.c_str());
    CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
    y.get();
    CHECK(y.guards_intact(), "%s: wrote outside of y", name.c_str());
    std::vector<uint8_t> behind(guard);
    CUDA_CHECK(cudaMemcpy(behind.data(), groups + nbytes, guard, cudaMemcpyDeviceToHost));
    CHECK(std::all_of(behind.begin(), behind.end(), [](uint8_t b) { return b == 0x7f; }), "%s: wrote behind the groups",
          name.c_str());
    for (int64_t j = 0; j < n; j++) {
        std::vector<double> want(static_cast<size_t>(rows), 0.0), bound(static_cast<size_t>(rows), 1e-30);
        const int32_t       id = ids[static_cast<size_t>(j / slots * token_stride + j % slots)];
        if (id >= 0 && id < n_experts) {
            reference(w, id * rows, rows, &values[static_cast<size_t>((shares_x ? j / slots : j) * ldx)], {}, 0,
                      exact ? 0 : grouped, want, bound);
        }
        for (size_t r = 0; silu && r < want.size(); r++) {
            const bounded product = { want[r], bound[r] };
            want[r]               = silu_times(product, product, &bound[r]);
        }
        for (int64_t r = 0; r < rows; r++) {
            const double error = std::fabs(static_cast<double>(y.at(j * rows + r)) - want[static_cast<size_t>(r)]);
            CHECK(error <= bound[static_cast<size_t>(r)], "%s, column %lld, row %lld: off by %.3g", name.c_str(),
                  static_cast<long long>(j), static_cast<long long>(r), error);
        }
    }
    CUDA_CHECK(cudaFree(groups));
    CUDA_CHECK(cudaFree(ids_on_gpu));
}

// Checks that NaN and infinities in the last of n columns do not become finite, and that zeros and tiny x do not become
// NaN.
static void check_odd_x(rng & random, const test_matrix & w, int64_t n) {
    const int64_t rows = w.rows(), cols = w.cols();
    for (const float odd : { NAN, INFINITY, 0.0f, 0x1p-120f, 0x1p-90f, 0x1p100f }) {
        guarded x(cols * n), y(rows * n);
        for (int64_t i = 0; i < cols * n; i++) {
            x.at(i) = std::isfinite(odd) ? odd : static_cast<float>(random.unit());
        }
        x.at(cols * n - cols / 2) = odd; // in the last column
        x.put();
        cuda_sparse_mul_mat_params p = plain_product(w.device, x, y, n);
        p.x16                        = x16_memory();
        CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
        y.get();
        for (int64_t r = 0; r < rows; r++) {
            const float got  = y.at((n - 1) * rows + r);
            double      want = 0;
            for (int64_t c = 0; c < cols; c++) {
                want += w.weights[static_cast<size_t>(r * cols + c)] * static_cast<double>(odd);
            }
            CHECK(std::isfinite(odd)
                      ? std::fabs(static_cast<double>(got) - want) <= 1e-2 * static_cast<double>(odd) + 0x1p-100
                      : !std::isfinite(got),
                  "x of %g, n %lld, row %lld: %g", static_cast<double>(odd), static_cast<long long>(n),
                  static_cast<long long>(r), static_cast<double>(got));
        }
    }
}

// ---- tests ----

static const int TYPES[] = { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 };
static const int BITS[]  = { 4, 5, 3, 8 };

static std::unique_ptr<test_matrix> random_matrix(rng & random) {
    const int64_t   widths[] = { 1,    2,    31,   32,   33,   63,   97,   300,   512,
                                 1000, 2048, 2049, 3000, 4096, 4100, 5120, 11008, 12288 };
    const int64_t   cols     = widths[random.range(0, 17)];
    const int64_t   rows     = random.range(1, cols > 4100 ? 60 : cols > 1000 ? 200 : 400);
    const double    density  = random.unit() < 0.05   ? 0.0
                               : random.unit() < 0.05 ? 1.0
                               : random.unit() < 0.3  ? random.unit() * 0.1
                                                      : random.unit() * 0.9;
    const structure s = random.unit() < 0.6 ? UNIFORM : static_cast<structure>(random.range(0, N_STRUCTURES - 1));
    return std::make_unique<test_matrix>(random, rows, cols, TYPES[random.range(0, 2)], BITS[random.range(0, 3)],
                                         density, s);
}

static gpu_device gpu_of_tests() {
    cuda_device_info device;
    CUDA_CHECK(cuda_current_device(&device));
    return { device.shared_nbytes };
}

static void check_densify(const test_matrix & t, const std::string & name) {
    std::vector<uint8_t> dense(static_cast<size_t>(t.rows() * t.cols() * value_nbytes(t.file.dense.type)));
    STATUS_CHECK(t.view.decode(dense.data(), 2));
    check_densified(t.device, name,
                    [&](int64_t r) { return dense.data() + r * t.cols() * value_nbytes(t.file.dense.type); });
}

GPU_TEST(random_products) {
    const gpu_device gpu       = gpu_of_tests();
    const int        n_cases   = random_cases(300);
    const int64_t    batches[] = { 1, 1, 1, 2, 3, 4, 5, 8, 9, 17, 40, 70 };
    for (int i = 0; i < n_cases; i++) {
        const uint64_t seed = 1000 + static_cast<uint64_t>(i);
        rng            random(seed);
        auto           t = random_matrix(random);
        t->upload(uploader, gpu);
        int64_t n = batches[random.range(0, 11)];
        while (n > 1 && n * t->rows() * t->cols() > 20000000) {
            n /= 2;
        }
        const std::string name = t->name(seed, n);
        check_densify(*t, name);
        check_product(random, { t.get() }, n, random_options(random), name);
    }
}

// The memory that is reserved from the header holds matrices of any structure, and is near the bytes of the file.
GPU_TEST(reserved_memory_holds_any_structure) {
    const gpu_device gpu = gpu_of_tests();
    for (const int bits : BITS) {
        for (const int64_t cols : { 4096, 11008 }) {
            for (const double density : { 0.3, 0.5 }) {
                for (const structure s : { UNIFORM, UNEVEN, HALF_EMPTY, STRIPES }) {
                    rng         random(static_cast<uint64_t>(cols + bits));
                    test_matrix t(random, 512, cols, GGML_MACKO_TYPE_F16, bits, density, s);
                    t.upload(uploader, gpu);
                    const double file   = static_cast<double>(t.file.codes.size() + t.file.bitmap.size() +
                                                              t.file.scales.size() + t.file.row_ptr.size() * 6),
                                 ratio  = static_cast<double>(base_of(t.device).nbytes) / file;
                    const bool   little = has_little_shared_memory(gpu.shared_nbytes);
                    const double most   = s == STRIPES ? 1.4
                                          : bits == 3  ? (little ? 1.3 : 1.25)
                                          : bits == 5  ? 1.5
                                          : little     ? 1.12
                                                       : 1.07;
                    CHECK(!t.outgrown, "%s: more than reserved", t.name(0, 0).c_str());
                    CHECK(ratio <= most, "%s: %.3f times the file's bytes", t.name(0, 0).c_str(), ratio);
                }
            }
        }
    }
}

GPU_TEST(matrices_that_share_x) {
    const gpu_device gpu     = gpu_of_tests();
    const uint64_t   n_seeds = few_cases() ? 4 : 24;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        rng           random(seed);
        const int64_t cols = seed % 3 == 0 ? 300 : seed % 3 == 1 ? 2048 : 11008, rows = random.range(50, 150);
        const double  density = seed % 4 == 0 ? 0.1 : seed % 4 == 1 ? 0.3 : 0.5;
        const int     bits    = BITS[seed % std::size(BITS)];
        test_matrix   a(random, rows, cols, GGML_MACKO_TYPE_F16, bits, density, UNIFORM),
            b(random, rows, cols, GGML_MACKO_TYPE_F16, bits, density, UNIFORM);
        test_matrix c(random, 33, cols, GGML_MACKO_TYPE_F16, bits, density, UNIFORM);
        for (test_matrix * t : { &a, &b, &c }) {
            t->upload(uploader, gpu);
        }
        for (const int64_t n : { 1, 2, 4, 7, 33 }) {
            options o;
            o.norm     = seed % 2;
            o.residual = o.in_place = seed % 5 == 0;
            check_product(random, { &a, &b, &c }, n, o, "three matrices, " + a.name(seed, n));
            o.silu = true;
            check_product(random, { &a, &b }, n, o, "gate and up, " + a.name(seed, n));
        }
    }
}

// More rows than the sums of one round, and x of more columns than shared memory holds.
GPU_TEST(several_rounds_and_phases) {
    const gpu_device gpu = gpu_of_tests();
    for (const int bits : { 4, 8 }) {
        rng         random(7);
        test_matrix tall(random, 40000, 300, GGML_MACKO_TYPE_F16, bits, 0.3, UNIFORM),
            wide(random, 40, 60000, GGML_MACKO_TYPE_F16, bits, 0.3, UNIFORM);
        for (test_matrix * t : { &tall, &wide }) {
            t->upload(uploader, gpu);
            for (const int64_t n : { 1, 2, 4, 8, 16, 32, 64 }) {
                check_product(random, { t }, n, {}, t->name(7, n));
            }
        }
    }
}

// The rows of an expert, with ids in device memory, including ids out of range.
GPU_TEST(experts_and_ids_out_of_range) {
    const gpu_device gpu = gpu_of_tests();
    for (uint64_t seed = 1; seed <= 8; seed++) {
        rng           random(seed);
        const int64_t rows = seed % 4 == 0 ? 64 : random.range(3, 70), cols = seed % 2 ? 2100 : 200,
                      ldx = seed % 3 ? cols : 0;
        test_matrix w(random, N_EXPERTS * rows, cols, GGML_MACKO_TYPE_BF16, BITS[seed % std::size(BITS)], 0.3, UNIFORM);
        w.upload(uploader, gpu);
        check_experts(random, w, rows, ldx, seed);
    }
}

GPU_TEST(experts_of_several_tokens_are_grouped) {
    const gpu_device gpu = gpu_of_tests();
    for (uint64_t seed = 1; seed <= 12; seed++) {
        rng           random(seed);
        const int64_t n_experts = seed % 3 ? 5 : 40, rows = seed % 4 == 0 ? 64 : random.range(3, 70),
                      cols = seed % 2 ? 2100 : 200, slots = random.range(1, 4);
        test_matrix w(random, n_experts * rows, cols, GGML_MACKO_TYPE_BF16, BITS[seed % std::size(BITS)], 0.3, UNIFORM);
        w.upload(uploader, gpu);
        for (const int64_t per_expert : { 1, 2, 4, 16, 40 }) {
            const int64_t tokens = per_expert == 1 ? static_cast<int64_t>(seed % 3) : per_expert * n_experts / slots;
            if (tokens == 0) {
                continue;
            }
            for (const bool silu : { false, true }) {
                check_groups(random, w, n_experts, slots, tokens, seed % 5 < 2, silu,
                             "grouped, " + w.name(seed, tokens));
            }
        }
    }
}

// Prompts stay sparse until their experts would be decoded often: small ones more than 8 times, large ones twice.
GPU_TEST(experts_that_would_be_decoded_often_are_not_grouped) {
    const gpu_device gpu = gpu_of_tests();
    rng              random(1);
    for (const auto & [rows, decoded] : { std::pair<int64_t, int64_t>{ 16, 8 }, { 4096, 1 } }) {
        constexpr int64_t COLUMNS = 32; // of a group
        test_matrix       w(random, 2 * rows, 1024, GGML_MACKO_TYPE_BF16, 4, 0.3, UNIFORM);
        w.upload(uploader, gpu);
        const int64_t most = 2 * decoded * COLUMNS;
        CHECK(cuda_sparse_groups_experts(w.device, most, 2), "%lld rows", static_cast<long long>(rows));
        CHECK(!cuda_sparse_groups_experts(w.device, most + 1, 2), "%lld rows", static_cast<long long>(rows));
    }
}

// NaN and infinities must not become finite, and zeros and tiny x must not become NaN.
GPU_TEST(nan_and_infinite_x_do_not_become_numbers) {
    const gpu_device gpu = gpu_of_tests();
    rng              random(3);
    for (const int bits : { 4, 8 }) {
        test_matrix w(random, 40, 1000, GGML_MACKO_TYPE_F16, bits, 0.5, UNIFORM);
        w.upload(uploader, gpu);
        for (const int64_t n : { 1, 2, 4, 8, 64 }) {
            check_odd_x(random, w, n);
        }
    }
}

// Results must have the same bits every time: launched alone, as a dependent launch, and from a graph.
GPU_TEST(repeats_are_bit_identical) {
    const gpu_device gpu       = gpu_of_tests();
    const int        n_repeats = few_cases() ? 3 : 60;
    for (const double density : { 0.5, 0.3, 0.1 }) {
        rng         random(9);
        test_matrix w(random, 500, 4096, GGML_MACKO_TYPE_F16, BITS[density < 0.4], density, UNIFORM);
        w.upload(uploader, gpu);
        for (const int64_t n : { 1, 4, 8, 16, 32, 64 }) {
            guarded x(4096 * n), y(500 * n);
            for (int64_t i = 0; i < 4096 * n; i++) {
                x.at(i) = static_cast<float>(random.unit() - 0.5);
            }
            x.put();
            cuda_sparse_mul_mat_params p = plain_product(w.device, x, y, n);
            p.x16                        = x16_memory();
            check_repeats(p, y, n_repeats, w.name(9, n));
        }
    }
}

// Each kernel once or twice, for sanitizers that take seconds per product.
GPU_TEST(small_products) {
    const gpu_device gpu = gpu_of_tests();
    for (const int bits : BITS) {
        for (const double density : { 0.8, 0.4, 0.1 }) { // windows of 32, 64 and 256
            rng         random(static_cast<uint64_t>(bits + 100 * density));
            test_matrix w(random, 20, 600, GGML_MACKO_TYPE_F16, bits, density, density < 0.2 ? STRIPES : UNIFORM);
            w.upload(uploader, gpu);
            for (const int64_t n : { 1, 2, 4, 8, 16, 32, 64 }) {
                options o;
                o.norm     = n != 2;
                o.residual = n != 1;
                check_product(random, { &w }, n, o, w.name(0, n));
                fprintf(stderr, "%s: done\n", w.name(0, n).c_str()); // how far a sanitizer came
            }
        }
    }
}

// test-cuda-fragments [CASES | small]: fewer cases under memcheck, small under racecheck
int main(int argc, char ** argv) { return gpu_test_main("test-cuda-fragments", argc, argv); }
