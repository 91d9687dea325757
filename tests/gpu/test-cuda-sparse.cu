// The sparse kernels of the GPU against float64, element by element, for random shapes, densities, structures, layouts
// and batches. Exit code 77 (skipped) without a GPU.
#include "codec/macko/encode.h"
#include "codec/macko/matrix-view.h"
#include "codec/packed/packed.h"
#include "cuda/lib/common.cuh"
#include "cuda/sparse/mul-mat.cuh"
#include "cuda/sparse/row-split-groups.cuh"
#include "gpu-layout/survey.h"
#include "test-cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

// ---- a matrix, dense and on the device ----

enum structure { UNIFORM, BANDED, UNEVEN, STRIPES, N_STRUCTURES, EQUAL_ROWS = N_STRUCTURES };

struct test_matrix {
    int64_t              rows, cols;
    int                  type, delta_bits;
    std::vector<uint8_t> dense;   // elements of type
    std::vector<double>  weights; // the same in double
    std::vector<uint8_t> values, deltas;
    std::vector<int32_t> row_ptr;
    int64_t              nnz    = 0;
    void *               memory = nullptr;
    int64_t              nbytes = 0;
    cuda_memory          outgrown;
    gpu_plan             plan;
    layout_verdict       verdict;
    gpu_layout           device = {};

    static constexpr int64_t BEHIND = 4096; // bytes that must not be written

    std::string layout() const { return layout_name(device); }
    int32_t     device_bits() const { return layout_numbers(device).delta_bits; }

    uint32_t bits(int64_t i) const {
        if (type == GGML_MACKO_TYPE_F32) {
            uint32_t b;
            memcpy(&b, &dense[static_cast<size_t>(i) * 4], 4);
            return b;
        }
        uint16_t b;
        memcpy(&b, &dense[static_cast<size_t>(i) * 2], 2);
        return b;
    }

    // values: almost all from 2^lowest on, within `binades` powers of two; cut: to 8 significant bits, like BF16
    test_matrix(rng & random, int64_t rows, int64_t cols, int type, int delta_bits, double density, structure s,
                double binades = 12, double lowest = -8, bool cut = false)
        : rows(rows), cols(cols), type(type), delta_bits(delta_bits) {
        const int64_t size = value_nbytes(type);
        dense.assign(static_cast<size_t>(rows * cols * size), 0);
        weights.assign(static_cast<size_t>(rows * cols), 0.0);
        for (int64_t r = 0; r < rows; r++) {
            double d = density;
            if (s == UNEVEN) {
                d = random.unit() < 0.3 ? 0 : random.unit() < 0.1 ? 1 : density * random.unit() * 2;
            }
            int64_t left = std::llround(density * static_cast<double>(cols)); // EQUAL_ROWS: remaining entries
            for (int64_t c = 0; c < cols; c++) {
                if (s == EQUAL_ROWS) {
                    d = static_cast<double>(left) / static_cast<double>(cols - c);
                }
                const bool in_band = s == BANDED ? (c / 97) % 3 == 0 : s == STRIPES ? c % 32 < 3 : true;
                if (random.unit() < (in_band ? d : d / 50)) {
                    // some -0
                    const uint32_t b = random.unit() < 0.001 ? (type == GGML_MACKO_TYPE_F32 ? 0x80000000u : 0x8000u)
                                       : cut && type == GGML_MACKO_TYPE_F16
                                           ? random_bits(random, type, lowest, binades) & 0xfff8u
                                           : random_bits(random, type, lowest, binades);
                    left--;
                    memcpy(&dense[static_cast<size_t>((r * cols + c) * size)], &b, static_cast<size_t>(size));
                    weights[static_cast<size_t>(r * cols + c)] = to_double(b, type);
                }
            }
        }
        ggml_macko_count       count;
        std::vector<row_count> of_rows(static_cast<size_t>(rows));
        STATUS_CHECK(count_dense(dense.data(), type, rows, cols, 2, &count, of_rows.data()));
        nnz = count.nnz;
        macko_matrix m;
        STATUS_CHECK(encode(dense.data(), desc(), of_rows, 2, &m));
        row_ptr         = m.row_ptr;
        const int64_t n = n_padded(row_ptr.back());
        values.assign(m.values.data(), m.values.data() + n * size);
        deltas.assign(m.deltas.data(), m.deltas.data() + deltas_nbytes(n, delta_bits));
    }
    ~test_matrix() { cudaFree(memory); }
    test_matrix(const test_matrix &) = delete;

    macko_desc desc() const { return { rows, cols, type, delta_bits, nnz }; }

    // Uploads ranges of rows in shuffled order, from two threads, from memory that ends where the range ends. Returns
    // false if the requested layout does not fit. max_outliers: the number of values that EXP_CODED cannot represent,
    // from the header, or -1. packed: the same matrix, which is uploaded instead, as a whole.
    bool upload(rng & random, cuda_sparse_uploader & uploader, const std::string & layout = "", int32_t lanes = 0,
                int64_t max_outliers = -1, const packed_view * packed = nullptr) {
        cuda_device_info info;
        CUDA_CHECK(cuda_current_device(&info));
        const int64_t    n   = packed ? max_recoded(desc()) : row_ptr.back();
        const gpu_matrix m   = { desc(), n_padded(n), type, max_outliers };
        const gpu_device gpu = { info.shared_nbytes };
        plan                 = layout.empty() ? choose(m, gpu) : choose_only(m, gpu, layout, lanes);
        if (plan.candidates.empty()) {
            return false;
        }
        if (plan.nbytes + BEHIND > nbytes) {
            CUDA_CHECK(cudaFree(memory));
            nbytes = plan.nbytes + BEHIND;
            CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(nbytes)));
        }
        CUDA_CHECK(cudaMemset(memory, 0xa5, static_cast<size_t>(nbytes)));
        CUDA_CHECK(cudaDeviceSynchronize()); // the following copies use another stream
        outgrown.reset();
        STATUS_CHECK(uploader.begin(plan, memory));
        if (packed) {
            CHECK(uploader.takes(packed->format()), "not as a whole");
            STATUS_CHECK(uploader.whole(*packed, 3));
        } else {
            upload_rows(random, uploader);
        }
        const int status = uploader.finish(&device, &verdict, &outgrown);
        if (!layout.empty() && status != GGML_MACKO_STATUS_OK) {
            return false;
        }
        CHECK(status == GGML_MACKO_STATUS_OK, "finish: %s", ggml_macko_last_error());
        std::vector<uint8_t> behind(static_cast<size_t>(nbytes - plan.nbytes));
        CUDA_CHECK(cudaMemcpy(behind.data(), static_cast<uint8_t *>(memory) + plan.nbytes, behind.size(),
                              cudaMemcpyDeviceToHost));
        CHECK(std::all_of(behind.begin(), behind.end(), [](uint8_t b) { return b == 0xa5; }),
              "%s: bytes behind the reserved ones were written", layout_name(device));
        CHECK(base_of(device).nbytes <= verdict.nbytes && !outgrown == (verdict.nbytes <= plan.nbytes),
              "%s takes %lld bytes of %lld", layout_name(device), static_cast<long long>(base_of(device).nbytes),
              static_cast<long long>(verdict.nbytes));
        return true;
    }

private:
    void upload_rows(rng & random, cuda_sparse_uploader & uploader) const {
        std::vector<std::pair<int64_t, int64_t>> blocks;
        for (int64_t r = 0; r < rows;) {
            const int64_t end = std::min(rows, r + random.range(1, std::max<int64_t>(1, rows / 3)));
            blocks.push_back({ r, end });
            r = end;
        }
        std::shuffle(blocks.begin(), blocks.end(), random.engine);
        int        failed = 0;
        const auto work   = [&](size_t first) {
            for (size_t i = first; i < blocks.size(); i += 2) {
                const int64_t size = value_nbytes(type);
                const int64_t base = row_ptr[static_cast<size_t>(blocks[i].first)] & ~7,
                              end  = row_ptr[static_cast<size_t>(blocks[i].second)];
                const std::vector<uint8_t> v(values.begin() + base * size, values.begin() + end * size);
                const std::vector<uint8_t> d(deltas.begin() + base * delta_bits / 8,
                                               deltas.begin() + (end * delta_bits + 7) / 8);
                const macko_rows           block = { desc(), blocks[i].first, blocks[i].second, row_ptr.data(),
                                                     base,   v.data(),        d.data() };
                macko_view                 view;
                if (validate(block, &view) != GGML_MACKO_STATUS_OK || uploader.rows(view) != GGML_MACKO_STATUS_OK) {
                    fprintf(stderr, "block %zu: %s\n", i, ggml_macko_last_error());
                    failed = 1;
                }
            }
        };
        std::thread other(work, 1);
        work(0);
        other.join();
        CHECK(!failed, "upload");
    }
};

// y of rows [begin, end) for n columns in float64, with the sum of magnitudes for its error bound. rounds: x is rounded
// to the type of the weights after its norm. If the last bits of the norm decide the direction of rounding, both
// results are right, and the bound grows by the difference.
static void reference(const test_matrix & w, int64_t begin, int64_t end, const std::vector<float> & x, int64_t ldx,
                      int64_t n, const std::vector<float> & norm, float eps, bool rounds, std::vector<double> & y,
                      std::vector<double> & magnitude) {
    y.assign(static_cast<size_t>((end - begin) * n), 0.0);
    magnitude = y;
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < n; j++) {
        std::vector<double> column(static_cast<size_t>(w.cols)), slack(static_cast<size_t>(w.cols));
        double              squares = 0;
        for (int64_t c = 0; c < w.cols; c++) {
            const double v = static_cast<double>(x[static_cast<size_t>(j * ldx + c)]);
            squares += v * v;
            column[static_cast<size_t>(c)] = norm.empty() ? v : v * static_cast<double>(norm[static_cast<size_t>(c)]);
        }
        const double scale =
            norm.empty() ? 1 : 1 / std::sqrt(squares / static_cast<double>(w.cols) + static_cast<double>(eps));
        for (size_t c = 0; c < column.size(); c++) {
            const double v = column[c] * scale;
            column[c]      = rounds ? round_to(v, w.type) : v;
            slack[c]       = 0;
            if (rounds && !norm.empty()) {
                const double above = round_to(v * (1 + 1e-6), w.type), below = round_to(v * (1 - 1e-6), w.type);
                slack[c] = std::fabs(above - below) / MAX_ERROR;
            }
        }
        for (int64_t r = begin; r < end; r++) {
            double sum = 0, m = 0;
            for (int64_t c = 0; c < w.cols; c++) {
                const double weight  = w.weights[static_cast<size_t>(r * w.cols + c)],
                             product = weight * column[static_cast<size_t>(c)];
                sum += product;
                m += std::fabs(product) + std::fabs(weight) * slack[static_cast<size_t>(c)];
            }
            y[static_cast<size_t>(j * (end - begin) + r - begin)]         = sum;
            magnitude[static_cast<size_t>(j * (end - begin) + r - begin)] = m;
        }
    }
}

// One product of one to three matrices with the same x, checked element by element. Half of the products may use memory
// for x in 16 bits.
static void check_product(rng & random, const std::vector<const test_matrix *> & w, int64_t n, const options & o,
                          const std::string & name) {
    const bool         x16  = random.unit() < 0.5;
    const int64_t      cols = w[0]->cols, ldx = x16 ? cols + 4 * random.range(0, 1) : cols + random.range(0, 3);
    std::vector<float> x(static_cast<size_t>(ldx * n));
    for (float & v : x) {
        v = static_cast<float>((random.unit() - 0.5) * (random.unit() < 0.01 ? 40 : 2));
    }
    product_inputs             in(random, x, cols, o);
    cuda_sparse_mul_mat_params p = in.params(ldx, n, o);
    p.x16                        = x16 ? x16_memory() : nullptr;
    std::vector<const gpu_layout *> devices;
    for (const test_matrix * m : w) {
        devices.push_back(&m->device);
    }
    outputs out(random, devices, o, p);
    using arrays   = std::vector<std::vector<double>>;
    arrays refs[2] = { arrays(w.size()), arrays(w.size()) }, magnitudes[2] = { arrays(w.size()), arrays(w.size()) };
    for (size_t i = 0; i < w.size(); i++) {
        for (const bool rounds : { true, false }) {
            reference(*w[i], p.row_begin[i], p.row_end[i], x, ldx, n, in.norm, p.norm_eps, rounds, refs[rounds][i],
                      magnitudes[rounds][i]);
        }
    }
    CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
    out.get(name);
    for (size_t i = 0; i < out.count(); i++) {
        const int64_t m = out.rows(i);
        for (int64_t j = 0; j < n; j++) {
            // a kernel for several columns may round all elements of a column of x; the kernel for a single column, and
            // the kernels for F32 values, may not
            double  worst[2]    = {};
            int64_t worst_at[2] = {};
            for (int64_t r = 0; r < m; r++) {
                const size_t k = static_cast<size_t>(j * m + r);
                for (const int rounds : { 0, 1 }) {
                    const arrays &ref = refs[rounds], &magnitude = magnitudes[rounds];
                    double        want = ref[i][k], bound = magnitude[i][k];
                    if (o.silu) {
                        const double gate = ref[0][k], up = ref[1][k], s = 1 / (1 + std::exp(-gate));
                        want = gate * s * up;
                        // exp(-gate) overflows
                        bound = std::fabs(s * up) * (1 + std::fabs(gate)) * magnitude[0][k] +
                                std::fabs(gate * s) * magnitude[1][k] + 1e-25;
                    }
                    const double error = std::fabs(static_cast<double>(out.at(i, r, j)) - want - out.added(i, r, j)) /
                                         (bound + o.bias + o.residual + 1e-30);
                    if (!(error <= worst[rounds])) { // also if NaN
                        worst[rounds]    = error;
                        worst_at[rounds] = r;
                    }
                }
            }
            const bool rounded = n > 1 && w[i]->type != GGML_MACKO_TYPE_F32 && !(worst[0] <= MAX_ERROR);
            CHECK(worst[rounded] <= MAX_ERROR,
                  "%s: matrix %zu, column %lld, row %lld: relative error %.3g (limit %.1g)", name.c_str(), i,
                  static_cast<long long>(j), static_cast<long long>(worst_at[rounded]), worst[rounded], MAX_ERROR);
        }
    }
}

static void check_densify(const test_matrix & w, const std::string & name) {
    check_densified(w.device, name,
                    [&](int64_t r) { return &w.dense[static_cast<size_t>(r * w.cols * value_nbytes(w.type))]; });
}

static std::string name_of(uint64_t seed, const test_matrix & w, int64_t n) {
    char text[160];
    snprintf(text, sizeof(text), "seed %llu: %lldx%lld type %d delta_bits %d %s lanes %d n %lld",
             static_cast<unsigned long long>(seed), static_cast<long long>(w.rows), static_cast<long long>(w.cols),
             w.type, w.delta_bits, layout_name(w.device), layout_numbers(w.device).lanes, static_cast<long long>(n));
    return text;
}

static const int TYPES[] = { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 };
static const int BITS[]  = { 1, 2, 4, 8 };

static const std::string MACKO = "MACKO", INLINE_DELTA = "INLINE_DELTA", EXP_CODED = "EXP_CODED";

// One of the numbers of runs per row for which there are kernels of INLINE_DELTA or EXP_CODED.
static int32_t random_lanes(rng & random, const std::string & layout, const test_matrix & w) {
    const bool    coded = layout == EXP_CODED, banked = w.cols >= WIDE_COLS;
    const int32_t bits  = coded || w.delta_bits == 8 ? 6 : std::max(w.delta_bits, 2);
    const auto    built = coded ? exp_coded_built_lanes(w.type, bits, banked && bits < 6)
                                : inline_delta_built_lanes(w.type, bits, banked && bits < 6);
    int32_t       lanes = 0;
    while (!built.has(lanes)) {
        lanes = 8 << random.range(0, 2);
    }
    return lanes;
}

// Every layout, type, width of deltas and batch size, over shapes that do not divide evenly.
GPU_TEST(random_shapes_and_layouts) {
    const int     n_cases   = random_cases(400);
    const int64_t widths[]  = { 1,   2,   7,    8,    31,   32,   33,   63,   64,   97,    128,  255,
                                300, 512, 1000, 2048, 2049, 3000, 4096, 4100, 5120, 11008, 12288 };
    const int64_t batches[] = { 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 100, 257, 600 };
    int           used[2]   = {}; // MACKO, INLINE_DELTA
    for (int i = 0; i < n_cases; i++) {
        const uint64_t  seed = 1000 + static_cast<uint64_t>(i);
        rng             random(seed);
        const int64_t   cols    = widths[random.range(0, 22)];
        const int64_t   rows    = random.range(1, cols > 4100 ? 60 : cols > 1000 ? 200 : 400);
        const double    density = random.unit() < 0.05   ? 0.0
                                  : random.unit() < 0.05 ? 1.0
                                  : random.unit() < 0.3  ? random.unit() * 0.1
                                                         : random.unit() * 0.9;
        const structure s = random.unit() < 0.7 ? UNIFORM : static_cast<structure>(random.range(0, N_STRUCTURES - 1));
        const int       type = random.unit() < 0.2 ? GGML_MACKO_TYPE_F32 : TYPES[random.range(0, 1)];
        test_matrix w(random, rows, cols, type, BITS[random.range(0, 3)], density, s, random.unit() < 0.7 ? 7.1 : 12);
        w.upload(random, uploader);
        if (type != GGML_MACKO_TYPE_F32 && random.unit() < 0.5) { // another number of lanes than usual, if that fits
            if (!w.upload(random, uploader, INLINE_DELTA, random_lanes(random, INLINE_DELTA, w))) {
                w.upload(random, uploader);
            }
        }
        if (w.layout() != EXP_CODED) {
            used[w.layout() == INLINE_DELTA]++;
        }
        int64_t n = batches[random.range(0, 14)];
        while (n > 1 && n * rows * cols > 40000000) {
            n /= 2;
        }
        const std::string name = name_of(seed, w, n);
        check_densify(w, name);
        check_product(random, { &w }, n, random_options(random), name);
    }
    CHECK(std::min(used[0], used[1]) > n_cases / 5 || n_cases < 100, "MACKO was used in %d cases, INLINE_DELTA in %d",
          used[0], used[1]);
}

// The result of the upload in an INLINE_DELTA group, and its interpretation by the kernels and by the count of
// positions.
template <int BITS> static void check_fused_group(rng & random) {
    group_bits<inline_delta<__half>, BITS> group   = {};
    uint32_t * const                       words   = &group.v.x;
    constexpr int                          ENTRIES = group_bits<inline_delta<__half>, BITS>::ENTRIES;
    uint32_t                               values[ENTRIES], deltas[ENTRIES];
    for (int k = 0; k < ENTRIES; k++) {
        values[k] = static_cast<uint32_t>(random.range(0, inline_delta_exponents(BITS))) << 10 |
                    static_cast<uint32_t>(random.range(0, 1023)) | static_cast<uint32_t>(random.range(0, 1)) << 15;
        deltas[k] = random.unit() < 0.2 ? (1u << BITS) - 1 : static_cast<uint32_t>(random.range(0, (1 << BITS) - 1));
        set_inline_delta_entry(k, values[k], deltas[k], BITS, [&](int word, uint32_t bits) { words[word] |= bits; });
    }
    constexpr uint32_t step = BITS == 6 ? 4 : 128, begin = 1000;
    uint32_t           weight[8], sum                    = begin;
    set_inline_delta_weights(weight, BITS, step);
    const uint4    kept      = group.words();
    const uint32_t halves[4] = { kept.x, kept.y, kept.z, kept.w };
    const uint32_t last      = group.template walk<0>(begin, weight, [&](auto entry, uint32_t to) {
        const int k = decltype(entry)::value;
        sum += deltas[k] * step;
        CHECK(to == sum, "deltas of %d bits: entry %d is at %u, not %u", BITS, k, to, sum);
        CHECK((halves[k / 2] >> 16 * (k % 2) & 0xffff) == values[k], "deltas of %d bits: value %d is %x, not %x", BITS,
                   k, halves[k / 2], values[k]);
        CHECK(inline_delta_of(words, k, BITS) == static_cast<int>(deltas[k]), "deltas of %d bits: delta %d", BITS, k);
    });
    CHECK(last == sum, "deltas of %d bits: the next group begins at %u, not %u", BITS, last, sum);
}
TEST(values_and_deltas_share_the_bits_of_a_fused_group) {
    rng random(99);
    for (int i = 0; i < 500; i++) {
        check_fused_group<2>(random), check_fused_group<3>(random), check_fused_group<4>(random),
            check_fused_group<6>(random);
    }
}

// The same for EXP_CODED. Dense copies of matrices reveal how kernels interpret values.
template <int BITS> static void check_coded_group(rng & random) {
    group_bits<exp_coded<__half>, BITS> group   = {};
    constexpr int                       ENTRIES = group_bits<exp_coded<__half>, BITS>::ENTRIES;
    uint32_t                            values[ENTRIES], deltas[ENTRIES], taken[8] = {};
    const auto word = [&](int i) -> uint32_t & { return i < 4 ? (&group.v.x)[i] : group.w[i - 4]; };
    for (int k = 0; k < ENTRIES; k++) {
        values[k] = static_cast<uint32_t>(random.range(0, 1023));
        deltas[k] = random.unit() < 0.2 ? (1u << BITS) - 1 : static_cast<uint32_t>(random.range(0, (1 << BITS) - 1));
        set_exp_coded_entry(k, values[k], deltas[k], BITS, [&](int i, uint32_t bits) { word(i) |= bits; });
        set_exp_coded_entry(k, 1023, (1u << BITS) - 1, BITS, [&](int i, uint32_t bits) {
            CHECK((taken[i] & bits) == 0, "deltas of %d bits: entry %d has bits of another", BITS, k);
            taken[i] |= bits;
        });
    }
    constexpr uint32_t step = BITS == 6 ? 4 : 128, begin = 1000;
    uint32_t           weight[16], sum                   = begin;
    set_exp_coded_weights(weight, BITS, step);
    const auto check = [&](auto entry, uint32_t to) {
        const int k = decltype(entry)::value;
        sum += deltas[k] * step;
        CHECK(to == sum, "deltas of %d bits: entry %d is at %u, not %u", BITS, k, to, sum);
        CHECK(exp_coded_delta_of(k, BITS, word) == static_cast<int>(deltas[k]), "deltas of %d bits: delta %d", BITS, k);
    };
    const uint32_t half = group.template walk<0>(begin, weight, check),
                   last = group.template walk<1>(half, weight, check);
    CHECK(last == sum, "deltas of %d bits: the next group begins at %u, not %u", BITS, last, sum);
    std::vector<bool> used(static_cast<size_t>(LINE_GROUPS * exp_coded_group_nbytes(BITS)));
    for (int64_t slot = 8; slot < 16; slot++) {
        for (int i = 0; i < 4 + exp_coded_words(BITS); i++) {
            const size_t at = static_cast<size_t>(exp_coded_word(slot, i, BITS)) - used.size() / 4;
            CHECK(at < used.size() / 4 && !used[at], "deltas of %d bits: word %d", BITS, i);
            used[at] = true;
        }
    }
}
TEST(values_and_deltas_of_a_coded_group) {
    rng random(98);
    for (int i = 0; i < 500; i++) {
        check_coded_group<2>(random), check_coded_group<4>(random), check_coded_group<6>(random);
    }
}

// Makes a random matrix INLINE_DELTA, if it fits; returns the bits of its deltas, or 0. NARROW: 2-bit deltas in the
// file and values of seven exponents; MIXED: 1, 2 or 4 bits and three or seven exponents; WIDE_DELTAS: deltas of 4 or 8
// bits.
enum fused_case { NARROW, MIXED, WIDE_DELTAS };
static int check_fused(cuda_sparse_uploader & uploader, uint64_t seed, fused_case which) {
    const int64_t   widths[]  = { 31, 64, 300, 1000, 2048, 2049, 4096, 5120, 11008 };
    const int64_t   batches[] = { 1, 1, 2, 3, 5, 8, 17, 40 };
    rng             random(seed);
    const int64_t   cols = widths[random.range(0, 8)], rows = random.range(1, 150);
    const structure s    = random.unit() < 0.7 ? UNIFORM : static_cast<structure>(random.range(0, N_STRUCTURES - 1));
    const int       type = random.unit() < 0.3 ? GGML_MACKO_TYPE_BF16 : GGML_MACKO_TYPE_F16;
    const double    lowest =
        static_cast<double>(type == GGML_MACKO_TYPE_BF16 ? random.range(-14, 16) : random.range(-20, 2));
    const double binades = which == MIXED && random.unit() < 0.5 ? 3.1 : 7.1;
    const double density = 0.2 + random.unit() * 0.6;
    test_matrix  w(random, rows, cols, type,
                  which == MIXED         ? BITS[random.range(0, 2)]
                   : which == WIDE_DELTAS ? BITS[random.range(2, 3)]
                                          : 2,
                   density, s, binades, lowest);
    if (!w.upload(random, uploader, INLINE_DELTA, random_lanes(random, INLINE_DELTA, w))) {
        w.upload(random, uploader);
    }
    const int64_t     n    = batches[random.range(0, 7)];
    const std::string name = name_of(seed, w, n);
    check_densify(w, name);
    check_product(random, { &w }, n, random_options(random), name);
    return w.layout() == INLINE_DELTA ? w.device_bits() : 0;
}

// Values of 14 bits, and of 13 and 14 bits from files with deltas of any width: both types, narrow and wide matrices,
// every number of lanes, batches, matrices with small values (including F16 subnormals) and large values, rows with
// many outliers.
GPU_TEST(fused_products_of_any_values) {
    const int n_cases = random_cases(400) / 2;
    int       fused = 0, used[7] = {}, wide[7] = {}; // used, wide: by bits of a delta
    for (int i = 0; i < n_cases; i++) {
        const uint64_t seed = 5000 + static_cast<uint64_t>(i);
        fused += check_fused(uploader, seed, NARROW) != 0;
        used[check_fused(uploader, seed, MIXED)]++;
        wide[check_fused(uploader, seed, WIDE_DELTAS)]++;
    }
    CHECK(fused > n_cases / 2 || n_cases < 50, "the layout was INLINE_DELTA in %d of %d cases only", fused, n_cases);
    CHECK(std::min(used[2], used[3]) > n_cases / 6 || n_cases < 50, "of %d cases values had 14 bits in %d, 13 in %d",
          n_cases, used[2], used[3]);
    CHECK(std::min(wide[4], wide[6]) > n_cases / 6 || n_cases < 50, "of %d cases deltas had 4 bits in %d, 6 in %d",
          n_cases, wide[4], wide[6]);
}

// Values of three exponents and some others, as EXP_CODED: both types, all widths of deltas, batches, small and large
// values, rows with many outliers, narrow matrices.
GPU_TEST(coded_products_of_any_values) {
    const int     n_cases   = random_cases(400);
    const int64_t widths[]  = { 64, 1000, 2048, 2049, 3000, 4096, 4100, 5120, 11008 };
    const int64_t batches[] = { 1, 1, 1, 2, 3, 5, 8, 17, 40 };
    int           used[7]   = {};
    for (int i = 0; i < n_cases; i++) {
        const uint64_t  seed = 15000 + static_cast<uint64_t>(i);
        rng             random(seed);
        const int64_t   cols = widths[random.range(0, 8)], rows = random.range(1, 150);
        const int       type = TYPES[random.range(0, 1)];
        const structure s = random.unit() < 0.7 ? UNIFORM : static_cast<structure>(random.range(0, N_STRUCTURES - 1));
        const double    lowest  = random.range(type == GGML_MACKO_TYPE_F16 ? -20 : -60, 0);
        const double    density = random.unit() < 0.4 ? 0.02 + random.unit() * 0.2 : 0.2 + random.unit() * 0.7;
        test_matrix w(random, rows, cols, type, BITS[random.range(0, 3)], density, s, random.unit() < 0.7 ? 2.9 : 3.4,
                      lowest, random.unit() < 0.9);
        if (!w.upload(random, uploader, EXP_CODED, EXP_CODED_LANES)) {
            w.upload(random, uploader);
        }
        used[w.layout() == EXP_CODED ? w.device_bits() : 0]++;
        const int64_t     n    = batches[random.range(0, 8)];
        const std::string name = name_of(seed, w, n);
        check_densify(w, name);
        check_product(random, { &w }, n, random_options(random), name);
    }
    CHECK(std::min({ used[2], used[4], used[6] }) > n_cases / 12 || n_cases < 100,
          "of %d cases deltas had 2 bits in %d, 4 in %d, 6 in %d", n_cases, used[2], used[4], used[6]);
}

// Matrices of 2048 columns and more are EXP_CODED if that is smaller than other layouts.
GPU_TEST(values_of_few_exponents_are_coded) {
    const auto layout_of = [&](int type, double binades, double lowest, double density, bool cut = true) {
        rng         random(6);
        test_matrix w(random, 300, 4096, type,
                      density < 0.15  ? 8
                      : density < 0.4 ? 4
                                      : 2,
                      density, UNIFORM, binades, lowest, cut);
        w.upload(random, uploader);
        return std::pair<std::string, int32_t>(w.layout(), w.device_bits());
    };
    const auto coded = [](int32_t bits) { return std::pair<std::string, int32_t>(EXP_CODED, bits); };
    for (const int type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
        CHECK(layout_of(type, 3, -8, 0.5) == coded(2), "type %d, density .5", type);
        CHECK(layout_of(type, 3, -8, 0.3) == coded(4), "type %d, density .3", type);
        CHECK(layout_of(type, 3, -8, 0.1) == coded(6), "type %d, density .1", type);
        CHECK(layout_of(type, 7, -8, 0.5).first != EXP_CODED, "type %d, seven powers of two", type);
    }
    CHECK(layout_of(GGML_MACKO_TYPE_F16, 3, -8, 0.5, false).first == INLINE_DELTA, "values of 11 bits");
    CHECK(layout_of(GGML_MACKO_TYPE_BF16, 3, -126, 0.5) == coded(2), "tiny values");
    CHECK(layout_of(GGML_MACKO_TYPE_BF16, 3, 1, 0.5) == coded(2), "the largest that a power of 2^127 reaches");
    CHECK(layout_of(GGML_MACKO_TYPE_BF16, 3, 20, 0.5).first != EXP_CODED, "values that are too large");
}

// A header with the number of outliers saves memory. A matrix that needs more bytes because of its structure, or that
// has more outliers, gets a separate allocation.
GPU_TEST(coded_matrices_stay_within_what_their_headers_reserve) {
    for (const int type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
        for (const double density : { 0.5, 0.3, 0.1 }) {
            for (const structure s : { UNIFORM, EQUAL_ROWS, BANDED }) {
                for (const bool cut : { true, false }) {
                    rng               random(static_cast<uint64_t>(type * 100 + s));
                    test_matrix       w(random, 300, 4096, type, density < 0.2 ? 8 : 4, density, s, 2.9, -8, cut);
                    const std::string label = "type " + std::to_string(type) + ", density " + std::to_string(density) +
                                              ", structure " + std::to_string(s);
                    // one value in a hundred is larger, one in a thousand a -0
                    w.upload(random, uploader, "", 0, w.nnz / 64);
                    const bool is_short = cut || type == GGML_MACKO_TYPE_BF16;
                    if (s != BANDED) {
                        CHECK(!w.outgrown == is_short, "%s: fits %d", label.c_str(), !w.outgrown);
                        CHECK(!is_short || w.layout() == EXP_CODED, "%s: %s", label.c_str(), layout_name(w.device));
                    }
                    check_product(random, { &w }, 1, {}, label);
                    check_densify(w, label);
                }
            }
        }
    }
    // very few entries: the bytes per row of EXP_CODED exceed the reserved bytes
    for (const int delta_bits : { 4, 8 }) {
        rng         random(5);
        test_matrix w(random, 3000, 2048, GGML_MACKO_TYPE_F16, delta_bits, 0.0005, UNIFORM, 2.9, -8, true);
        w.upload(random, uploader); // also checks the bytes after these
        check_densify(w, "hardly any entries");
    }
}

// An x that is infinite, NaN, tiny or huge, with an EXP_CODED matrix. Zero times infinity is NaN in a dense product as
// well, so rows without a weight in that column may have any result.
GPU_TEST(coded_products_of_odd_x) {
    constexpr int64_t ROWS = 40, COLS = 2050;
    for (const int type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
        rng         random(static_cast<uint64_t>(type + 3));
        test_matrix w(random, ROWS, COLS, type, 2, 0.5, UNIFORM, 2.9, -8, true);
        CHECK(w.upload(random, uploader, EXP_CODED, EXP_CODED_LANES), "type %d: the layout does not fit", type);
        for (const int64_t n : { 1, 2, 8 }) {
            for (const float scale : { 0x1p-100f, 0x1p-40f, 1.0f, 0x1p100f, INFINITY, NAN }) {
                const bool finite = std::isfinite(scale);
                // several columns are stored in 16 bits, and an infinity becomes the largest F16 number
                if (n > 1 && scale != 1.0f && (finite || (type == GGML_MACKO_TYPE_F16 && std::isinf(scale)))) {
                    continue;
                }
                guarded x(COLS * n), y(ROWS * n);
                for (int64_t i = 0; i < COLS * n; i++) {
                    x.at(i) = static_cast<float>(random.range(1, 64)) / 64 * (finite ? scale : 1.0f);
                }
                if (!finite) {
                    x.at(COLS * n - 7) = scale; // in the last column of x
                }
                x.put();
                CUDA_CHECK(cuda_sparse_mul_mat(plain_product(w.device, x, y, n), nullptr));
                y.get();
                for (int64_t r = 0; r < ROWS; r++) {
                    const float got  = y.at((n - 1) * ROWS + r);
                    double      want = 0, bound = 0;
                    for (int64_t c = 0; c < COLS && finite; c++) {
                        const double product = w.weights[static_cast<size_t>(r * COLS + c)] *
                                               static_cast<double>(x.at((n - 1) * COLS + c));
                        want += product;
                        bound += std::fabs(product);
                    }
                    const bool hit = (w.bits(r * COLS + COLS - 7) & 0x7fff) != 0;
                    CHECK(finite ? std::fabs(static_cast<double>(got) - want) <= MAX_ERROR * bound
                                 : !hit || !std::isfinite(got),
                          "type %d, x of %g, n %lld, row %lld: %g, not %g", type, static_cast<double>(scale),
                          static_cast<long long>(n), static_cast<long long>(r), static_cast<double>(got), want);
                }
            }
        }
    }
}

// Matrices are INLINE_DELTA if that fits in their memory; matrices with many outliers keep the layout of the file.
GPU_TEST(matrices_are_fused_where_that_fits) {
    using layout_and_bits = std::pair<std::string, int32_t>;
    const auto layout_of  = [&](double binades, int lines, int delta_bits = 2, double density = 0.5) {
        rng         random(static_cast<uint64_t>(lines + 5));
        test_matrix w(random, 300, 4096, GGML_MACKO_TYPE_F16, delta_bits, density, UNIFORM, binades, -10);
        int         left = lines; // outliers for the last row
        for (int64_t k = w.row_ptr[299]; k < w.row_ptr[300] && left > 0; k++) {
            uint16_t v;
            memcpy(&v, &w.values[static_cast<size_t>(k) * 2], 2);
            if ((v & 0x7fff) != 0) {
                v = 0x0801;
                memcpy(&w.values[static_cast<size_t>(k) * 2], &v, 2);
                left--;
            }
        }
        w.upload(random, uploader);
        return layout_and_bits(w.layout(), w.device_bits());
    };
    const auto fused = [](int32_t bits) { return layout_and_bits(INLINE_DELTA, bits); };
    const auto file  = [](int32_t bits) { return layout_and_bits(MACKO, bits); };
    CHECK(layout_of(7.1, 0) == fused(2), "narrow values");
    CHECK(layout_of(12, 0) == file(2), "wide values");
    CHECK(layout_of(7.1, 60) == fused(2), "a row with many outliers");
    CHECK(layout_of(7.1, 2000) == fused(2), "a row of which nearly all values are outliers");
    CHECK(layout_of(3, 0) == fused(3), "values of three powers of two");
    CHECK(layout_of(3, 0, 4, 0.3) == fused(3), "the same, with deltas of 4 bits in the file");
    CHECK(layout_of(7.1, 0, 4, 0.3) == fused(4), "seven powers of two, with deltas of 4 bits in the file");
    CHECK(layout_of(7.1, 0, 8, 0.1) == fused(6), "the same, with deltas of 8 bits");
    CHECK(layout_of(12, 0, 4, 0.3) == file(4), "wide values, with deltas of 4 bits in the file");
    CHECK(layout_of(7.1, 0, 1, 0.7) == fused(2), "seven powers of two, with deltas of 1 bits in the file");
    for (const int type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16 }) {
        for (const int64_t cols : { 100, 500, 896, 2047, 2048, 4100 }) {
            for (const int delta_bits : { 1, 2, 4, 8 }) {
                rng          random(static_cast<uint64_t>(cols));
                const double density = delta_bits == 8 ? 0.1 : delta_bits == 4 ? 0.3 : delta_bits == 2 ? 0.5 : 0.8;
                test_matrix  w(random, 300, cols, type, delta_bits, density, UNIFORM, 7.1, -10);
                w.upload(random, uploader);
                CHECK(w.layout() == INLINE_DELTA &&
                          (layout_numbers(w.device).bank_width != 0) == (cols >= WIDE_COLS && delta_bits < 8),
                      "type %d, %lld columns, deltas of %d bits: %s, bank width %d", type, static_cast<long long>(cols),
                      delta_bits, layout_name(w.device), layout_numbers(w.device).bank_width);
            }
        }
        // rows of all densities: groups of fillers pass through more columns than exist
        rng         random(3);
        test_matrix w(random, 300, 2048, type, 4, 0.25, UNEVEN, 7.1, -10);
        w.upload(random, uploader);
        CHECK(w.layout() == INLINE_DELTA && layout_numbers(w.device).bank_width == 0, "type %d, uneven rows: %s", type,
              layout_name(w.device));
        check_product(random, { &w }, 1, {}, "uneven rows");
        check_product(random, { &w }, 5, {}, "uneven rows");
        check_densify(w, "uneven rows");
    }
}

// Outliers are multiplied by 2^-exponent in float32. A matrix with an outlier so small or large that it could lose bits
// keeps the layout of the file.
GPU_TEST(fused_outliers_keep_their_bits) {
    const auto layout_with = [&](uint16_t outlier) {
        rng         random(17);
        test_matrix w(random, 40, 4096, GGML_MACKO_TYPE_BF16, 2, 0.5, UNIFORM, 7.1, -10);
        for (int64_t k = w.row_ptr[7]; k < w.row_ptr[8]; k++) {
            uint16_t v;
            memcpy(&v, &w.values[static_cast<size_t>(k) * 2], 2);
            if ((v & 0x7fff) != 0) {
                memcpy(&w.values[static_cast<size_t>(k) * 2], &outlier, 2);
                break;
            }
        }
        w.upload(random, uploader);
        return w.layout();
    };
    for (const uint16_t fits : { 0x3f80, 0x1280, 0x6cff }) { // 1, 2^-90, almost 2^91
        CHECK(layout_with(fits) == INLINE_DELTA, "%x", fits);
    }
    for (const uint16_t unfit : { 0x0001, 0x127f, 0x6d00, 0xff7f }) { // the least number, below 2^-90, 2^91, the least
        CHECK(layout_with(unfit) == MACKO, "%x", unfit);
    }
}

// More rows than are resident on the GPU at a time: rows reuse the memory of earlier rows.
// The arrays of a packed matrix become the rows that the host would make, bit for bit.
GPU_TEST(packed_matrices_become_their_rows) {
    uint64_t seed = 1;
    for (const int type : { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 }) {
        for (const int value_type : { type, static_cast<int>(GGML_MACKO_TYPE_CODED) }) {
            for (const int index_bits : { INDEX_BITMAP, 2, 4, 8 }) {
                for (const double density : { 0.004, 0.1, 0.5, 0.9 }) {
                    rng           random(seed++);
                    const auto    s = static_cast<structure>(seed % N_STRUCTURES);
                    test_matrix   w(random, random.range(1, 40), random.range(1, 1500), type, RECODED_BITS, density, s,
                                  seed % 2 ? 2 : 12, -8, seed % 3 != 0);
                    packed_matrix out;
                    STATUS_CHECK(pack(w.dense.data(), { w.desc(), value_type, index_bits }, 2, &out));
                    packed_view view;
                    STATUS_CHECK(check_packed(out.arrays(), 2, &view));
                    CHECK(w.upload(random, uploader, MACKO, 0, -1, &view), "layout");
                    const auto &         m = std::get<macko_layout>(w.device);
                    const auto           n = static_cast<size_t>(w.row_ptr.back());
                    std::vector<uint8_t> values(n * static_cast<size_t>(value_nbytes(type))), deltas((n + 1) / 2);
                    std::vector<int32_t> row_ptr(w.row_ptr.size());
                    CUDA_CHECK(cudaMemcpy(values.data(), m.values, values.size(), cudaMemcpyDeviceToHost));
                    CUDA_CHECK(cudaMemcpy(deltas.data(), m.deltas, deltas.size(), cudaMemcpyDeviceToHost));
                    CUDA_CHECK(cudaMemcpy(row_ptr.data(), m.row_ptr, row_ptr.size() * 4, cudaMemcpyDeviceToHost));
                    CHECK(row_ptr == w.row_ptr && std::equal(values.begin(), values.end(), w.values.begin()) &&
                              std::equal(deltas.begin(), deltas.end(), w.deltas.begin()),
                          "type %d, values %d, index %d, density %g, %lld x %lld", type, value_type, index_bits,
                          density, static_cast<long long>(w.rows), static_cast<long long>(w.cols));
                    CHECK(w.upload(random, uploader, "", 0, -1, &view), "any layout");
                    check_densify(w, "packed, seed " + std::to_string(seed));
                }
            }
        }
    }
}

GPU_TEST(densify_of_more_rows_than_resident_blocks) {
    rng random(77);
    for (const int delta_bits : { 1, 2, 4, 8 }) {
        for (const structure s : { UNIFORM, UNEVEN, BANDED }) {
            const double density = delta_bits == 8 ? 0.08 : delta_bits == 4 ? 0.3 : 0.5;
            test_matrix  w(random, 16001, random.range(2, 40) * 8, GGML_MACKO_TYPE_F16, delta_bits, density, s,
                          delta_bits == 4 ? 3.1 : 7.1, -8, s == UNEVEN);
            if (s == UNEVEN && w.upload(random, uploader, EXP_CODED, EXP_CODED_LANES)) {
                check_densify(w, "many rows, coded, " + std::to_string(delta_bits) + " bits");
            }
            w.upload(random, uploader, s == BANDED ? MACKO : "");
            check_densify(w, "many rows, " + std::to_string(delta_bits) + " bits");
        }
    }
}

// An x that does not fit in shared memory: layout MACKO.
GPU_TEST(x_that_does_not_fit_shared_memory) {
    if (few_cases()) {
        return;
    }
    for (const int64_t cols : { int64_t(28672), int64_t(70001), int64_t(1) << 20 }) {
        rng         random(static_cast<uint64_t>(cols));
        test_matrix w(random, 9, cols, GGML_MACKO_TYPE_F16, 4, 0.2, UNIFORM);
        w.upload(random, uploader);
        CHECK(cols < 50000 || w.layout() == MACKO, "%s", layout_name(w.device));
        for (const int64_t n : { 1, 4 }) {
            check_product(random, { &w }, n, {}, name_of(static_cast<uint64_t>(cols), w, n));
        }
        check_densify(w, "very wide");
    }
}

// Products of many columns by tiles (tiles.cuh) with INLINE_DELTA and EXP_CODED matrices: all widths of deltas, rows of
// all lengths, any number of columns, more rows than one tile per multiprocessor; from narrow matrices to matrices so
// wide that 8 rows leave no space for the sums in shared memory.
GPU_TEST(products_by_tiles) {
    const int     n_cases  = random_cases(400) / 2;
    const int64_t widths[] = { 64, 2048, 4096, 5120, 8192, 11008, 12288, 13824, 14336 };
    int           tiles[2] = {}; // INLINE_DELTA, EXP_CODED
    for (int i = 0; i < 2 * n_cases; i++) {
        const bool     coded = i % 2;
        const uint64_t seed  = 8000 + static_cast<uint64_t>(i);
        rng            random(seed);
        const bool     many_wide = i / 2 % 16 == 7, many = many_wide || i / 2 % 16 == 8;
        const int64_t  cols  = many_wide ? 14336
                               : many    ? 2048
                                         : widths[random.range(0, 8)],
                      rows   = many_wide ? 1100
                               : many    ? 6700
                                         : random.range(1, 200);
        const int64_t   n    = many ? 9 : random.unit() < 0.2 ? random.range(33, 70) : random.range(9, 32);
        const int       type = coded ? TYPES[random.range(0, 1)] : GGML_MACKO_TYPE_F16;
        const structure s = random.unit() < 0.5 ? UNIFORM : static_cast<structure>(random.range(0, N_STRUCTURES - 1));
        test_matrix     w(random, rows, cols, type, BITS[random.range(1, 3)], 0.1 + random.unit() * 0.7, s,
                      coded                 ? 2.9
                          : random.unit() < 0.3 ? 3.1
                                                : 7.1,
                          static_cast<double>(random.range(-20, 2)), coded);
        const std::string & layout = coded ? EXP_CODED : INLINE_DELTA;
        if (!w.upload(random, uploader, layout, random_lanes(random, layout, w))) {
            w.upload(random, uploader);
        }
        tiles[coded] += w.layout() == layout && cuda_sparse_mul_mat_max_n(w.device, false) == CUDA_SPARSE_X16_COLUMNS;
        check_product(random, { &w }, n, random_options(random), name_of(seed, w, n));
    }
    CHECK(std::min(tiles[0], tiles[1]) > n_cases / 3 || n_cases < 20,
          "of %d cases, tiles of INLINE_DELTA in %d, of EXP_CODED in %d", 2 * n_cases, tiles[0], tiles[1]);
}

GPU_TEST(matrices_that_share_x) {
    const uint64_t n_seeds = few_cases() ? 4 : 24;
    int            n_fused = 0, n_bf16 = 0, n_coded = 0;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        rng           random(seed);
        const int64_t cols = seed % 3 == 0 ? 300 : seed % 3 == 1 ? 2048 : 4096;
        const int     bits = BITS[random.range(1, 3)];
        const int64_t rows = random.range(50, 150);
        const int     type = seed % 4 == 3 ? GGML_MACKO_TYPE_BF16 : GGML_MACKO_TYPE_F16;
        const bool    cut  = seed % 8 == 5;
        test_matrix   a(random, rows, cols, type, bits, 0.3, UNIFORM, 2.9, -12, cut),
            b(random, rows, cols, type, bits, 0.3, UNEVEN, 2.9, -9, cut);
        test_matrix c(random, 33, cols, type, bits, 0.3, UNIFORM, 2.9, -4, cut);
        const auto  all = [&](const std::string & layout, int32_t lanes) {
            return a.upload(random, uploader, layout, lanes) && b.upload(random, uploader, layout, lanes) &&
                   c.upload(random, uploader, layout, lanes) && have_same_kernel(a.device, b.device) &&
                   have_same_kernel(a.device, c.device);
        };
        if (seed % 4 == 0) {
            all(MACKO, 0);
        } else if ((cut || seed % 8 == 7) && all(EXP_CODED, EXP_CODED_LANES)) {
            n_coded++; // one exponent for each matrix
        } else if (all(INLINE_DELTA, random_lanes(random, INLINE_DELTA, a))) {
            (type == GGML_MACKO_TYPE_F16 ? n_fused : n_bf16)++; // one exponent for each matrix
        }
        for (const int64_t n : { 1, 3, 6, 20 }) {
            options o;
            o.norm     = seed % 2;
            o.residual = o.in_place = seed % 5 == 0;
            check_product(random, { &a, &b, &c }, n, o, "three matrices, " + name_of(seed, a, n));
            o.silu = true;
            check_product(random, { &a, &b }, n, o, "gate and up, " + name_of(seed, a, n));
        }
    }
    CHECK(std::min({ n_fused, n_bf16, n_coded }) > 0 || n_seeds < 24, "%d were fused, %d of BF16, %d coded", n_fused,
          n_bf16, n_coded);
}

// The rows of an expert, with ids in device memory, including ids out of range.
GPU_TEST(experts_and_ids_out_of_range) {
    for (uint64_t seed = 1; seed <= 8; seed++) {
        rng           random(seed);
        const int64_t rows = random.range(3, 70), cols = seed % 2 ? 2100 : 200, ldx = seed % 3 ? cols : 0;
        test_matrix   w(random, N_EXPERTS * rows, cols, GGML_MACKO_TYPE_BF16, 4, 0.3, UNIFORM, seed == 7 ? 2.9 : 7.1);
        w.upload(random, uploader);
        CHECK(w.layout() == (seed == 7 ? EXP_CODED : INLINE_DELTA), "%s", layout_name(w.device));
        if (seed == 3) {
            w.upload(random, uploader, MACKO, 0);
        }
        guarded x(cols * N_EXPERT_COLUMNS), y(rows * N_EXPERT_COLUMNS);
        for (int64_t i = 0; i < cols * N_EXPERT_COLUMNS; i++) {
            x.at(i) = static_cast<float>(random.unit() - 0.5);
        }
        x.put();
        multiply_experts(w.device, x, ldx, y);
        for (int64_t j = 0; j < N_EXPERT_COLUMNS; j++) {
            for (int64_t r = 0; r < rows; r++) {
                double want = 0, bound = 1e-30;
                for (int64_t c = 0; c < cols && expert_row(j, rows) >= 0; c++) {
                    const double product = w.weights[static_cast<size_t>((expert_row(j, rows) + r) * cols + c)] *
                                           static_cast<double>(x.at(j * ldx + c));
                    want += product;
                    bound += std::fabs(product);
                }
                const double error = std::fabs(static_cast<double>(y.at(j * rows + r)) - want) / bound;
                CHECK(error <= MAX_ERROR, "experts, seed %llu, column %lld, row %lld: error %.3g",
                      static_cast<unsigned long long>(seed), static_cast<long long>(j), static_cast<long long>(r),
                      error);
            }
        }
    }
}

// Rows that were pruned to the same number of entries, as some methods do, have equal numbers of groups. They must
// still fit in the reserved memory.
GPU_TEST(rows_of_equal_length_are_fused) {
    rng         random(7);
    test_matrix w(random, 200, 4096, GGML_MACKO_TYPE_F16, 8, 0.1, EQUAL_ROWS, 7.1);
    CHECK(w.nnz == 200 * 410, "%lld entries", static_cast<long long>(w.nnz));
    w.upload(random, uploader);
    CHECK(w.layout() == INLINE_DELTA, "%s", layout_name(w.device));
    check_product(random, { &w }, 1, {}, "equal rows");
    check_densify(w, "equal rows");
}

// The survey on the GPU during an upload must give the same result as the survey on the CPU.
GPU_TEST(surveys_of_gpu_and_cpu_agree) {
    const int n_cases = random_cases(400) / 2;
    for (int i = 0; i < n_cases; i++) {
        const uint64_t seed = 30000 + static_cast<uint64_t>(i);
        rng            random(seed);
        test_matrix    w(random, random.range(1, 60),
                      random.unit() < 0.3 ? random.range(1, 900) : random.range(2048, 4200), TYPES[random.range(0, 1)],
                         BITS[random.range(0, 3)], 0.02 + random.unit() * 0.7,
                         static_cast<structure>(random.range(0, N_STRUCTURES - 1)), random.unit() < 0.5 ? 2.9 : 7.1, -8,
                         random.unit() < 0.5);
        w.upload(random, uploader);
        ggml_macko_matrix m = { sizeof(m), "macko", w.rows, w.cols, w.type, w.type, w.delta_bits, w.nnz, 3, {} };
        m.arrays[0]         = { w.values.data(), static_cast<int64_t>(w.values.size()), w.type };
        m.arrays[1]         = { w.deltas.data(), static_cast<int64_t>(w.deltas.size()), GGML_MACKO_TYPE_I8 };
        m.arrays[2]         = { w.row_ptr.data(), static_cast<int64_t>(w.row_ptr.size()) * 4, GGML_MACKO_TYPE_I32 };
        std::unique_ptr<codec_view> view;
        STATUS_CHECK(open_matrix(macko_codec(), m, 1, &view));
        layout_survey  found;
        layout_verdict v;
        STATUS_CHECK(survey_on_cpu(&w.plan, *view, 1, &found, &v));
        CHECK(text_of(v.shape) == text_of(w.verdict.shape) && v.nbytes == w.verdict.nbytes &&
                  v.reason == w.verdict.reason,
              "seed %llu: CPU: %s (%s), GPU: %s (%s)", static_cast<unsigned long long>(seed), text_of(v.shape).c_str(),
              v.reason.c_str(), text_of(w.verdict.shape).c_str(), w.verdict.reason.c_str());
        const shape_survey & of = found.of[w.plan.candidates[v.candidate].survey];
        std::visit(
            [&](const auto & l) {
                if constexpr (std::is_base_of_v<row_split_layout, std::decay_t<decltype(l)>>) {
                    CHECK(l.exponent == of.exponent && l.overshoot == of.overshoot,
                          "seed %llu: exponent %d, overshoot %d, on the CPU %d, %d",
                          static_cast<unsigned long long>(seed), l.exponent, l.overshoot, of.exponent, of.overshoot);
                }
            },
            w.device);
    }
}

// Results must have the same bits every time: launched alone, as a dependent launch, and from a graph.
GPU_TEST(repeats_are_bit_identical) {
    const int n_repeats = few_cases() ? 3 : 100;
    for (const int bits : { 1, 2, 4, 8 }) {
        rng         random(static_cast<uint64_t>(bits));
        const bool  coded = bits == 1;
        test_matrix w(random, 500, 4096, GGML_MACKO_TYPE_F16, bits, 0.4, UNIFORM, coded ? 3 : 7.1, -8, coded);
        w.upload(random, uploader);
        CHECK(bits > 2 || w.layout() == (coded ? EXP_CODED : INLINE_DELTA), "%s", layout_name(w.device));
        for (const int64_t n : { 1, 4, 20, 40 }) {
            guarded x(4096 * n), y(500 * n);
            for (int64_t i = 0; i < 4096 * n; i++) {
                x.at(i) = static_cast<float>(random.unit() - 0.5);
            }
            x.put();
            cuda_sparse_mul_mat_params p = plain_product(w.device, x, y, n);
            p.x16                        = n == 20 ? x16_memory() : nullptr;
            check_repeats(p, y, n_repeats, "delta_bits " + std::to_string(bits));
        }
    }
}

static double reserved(const macko_desc & desc, int64_t padded, int64_t outliers = -1) {
    constexpr int64_t SHARED = 99 * 1024;
    return static_cast<double>(choose({ desc, padded, desc.type, outliers }, { SHARED }).nbytes);
}

// The bytes that the device reserves from the header alone must be close to the bytes of the file.
TEST(memory_stays_near_the_file) {
    for (const int64_t cols : { 2048, 4096, 8192, 11008, 12288, 28672 }) {
        for (int percent = 5; percent <= 90; percent += 5) {
            double       smallest = 1e300;
            int          best     = 0;
            const double d        = percent / 100.0;
            for (const int b : BITS) { // paper, section 4.1
                const double stored = d / (1 - std::pow(1 - d, 1 << b)) * static_cast<double>(cols);
                if (stored * (16 + b) < smallest) {
                    smallest = stored * (16 + b);
                    best     = b;
                }
            }
            const int64_t rows     = 4096,
                          padded   = n_padded(static_cast<int64_t>(smallest / (16 + best) * static_cast<double>(rows)));
            const macko_desc desc  = { rows, cols, GGML_MACKO_TYPE_F16, best,
                                       static_cast<int64_t>(d * static_cast<double>(rows * cols)) };
            const double     file  = static_cast<double>(padded * 2 + deltas_nbytes(padded, best) + 4 * (rows + 1));
            const double     ratio = reserved(desc, padded) / file;
            const double per_row = d * static_cast<double>(cols); // in short rows bases and half-full groups weigh more
            const double fillers = best == 8 ? 0.015 : 0; // with deltas of 6 bits, INLINE_DELTA has more of them
            const double limit   = per_row >= 1000  ? 1.02
                                   : per_row >= 400 ? 1.03 + fillers
                                   : per_row >= 200 ? 1.06
                                                    : 1.11;
            CHECK(ratio <= limit, "%lld cols, density %.2f: %.4f of the file's bytes", static_cast<long long>(cols), d,
                  ratio);
        }
    }
}

// The same for values with 8 significant bits, 0.7 % of them outliers, which a file stores as 10 bits each and a
// bitmap. A group has 16 entries and as many deltas of 2, 4 or 6 bits.
TEST(memory_of_coded_values_stays_near_the_file) {
    constexpr int64_t ROWS = 4096;
    for (const int64_t cols : { 2048, 4096, 5120, 8192, 11008, 14336 }) {
        for (int percent = 10; percent <= 70; percent += 5) {
            const double     d    = percent / 100.0;
            const auto       nnz  = static_cast<int64_t>(d * static_cast<double>(ROWS * cols));
            const macko_desc desc = { ROWS, cols, GGML_MACKO_TYPE_BF16, 4, nnz };
            // like the MACKO rows of a packed matrix
            const auto   padded = n_padded(static_cast<int64_t>(static_cast<double>(nnz) / (1 - std::pow(1 - d, 16))));
            const double nbytes = reserved(desc, padded, nnz * 7 / 1000);
            const double file = static_cast<double>(nnz) * (10 + 0.007 * 32) / 8 + static_cast<double>(ROWS * cols) / 8;
            const double most = reserved(desc, padded);
            CHECK(nbytes / file <= (cols >= 4096 ? 1.23 : 1.41) && nbytes < most * 0.95,
                  "%lld cols, density %.2f: %.3f", static_cast<long long>(cols), d, nbytes / file);
        }
    }
    const macko_desc wide = { ROWS, 40000, GGML_MACKO_TYPE_BF16, 4, ROWS * 20000 }; // x does not fit
    CHECK(reserved(wide, n_padded(wide.nnz), 0) == reserved(wide, n_padded(wide.nnz)),
          "a matrix that cannot be EXP_CODED");
}

int main(int argc, char ** argv) { return gpu_test_main("test-cuda-sparse", argc, argv); }
