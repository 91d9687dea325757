// Packed matrices with quantized values on the GPU: the layout in host memory, then the kernels against float64 of the
// decoded weights, element by element, over random shapes, densities, structures, value types, index codings and
// batches. Without a GPU: the layout only, and exit code 77.
#include "cuda/sparse/mul-mat.cuh"
#include "rounded-products.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

using namespace macko;
using namespace macko::cuda;

enum structure { UNIFORM, UNEVEN, HALF_EMPTY, STRIPES, N_STRUCTURES };

static double density_at(structure s, double density, double row_density, int64_t c, int64_t cols) {
    switch (s) {
        case HALF_EMPTY: return c > cols / 4 && c < cols * 3 / 4 ? 0 : density; // gaps that no delta spans
        case STRIPES:    return c % 32 < 3 ? density : density / 50;
        case UNEVEN:     return row_density;
        default:         return density;
    }
}

// A matrix, dense and packed.
struct test_matrix {
    static constexpr int INTEGERS = 32767;

    packed_matrix       packed;
    packed_view         view;
    std::vector<double> weights; // d * q
    void *              memory = nullptr;
    cuda_memory         outgrown;
    gpu_layout          device = {};
    quantized_layout    made   = {}; // device, or an image in host memory

    int64_t rows() const { return packed.desc.dense.rows; }
    int64_t cols() const { return packed.desc.dense.cols; }

    test_matrix(rng & random, int64_t rows, int64_t cols, int type, int value_type, int index_bits, double density,
                structure s) {
        std::vector<float> dense(static_cast<size_t>(rows * cols), 0.0f);
        for (int64_t r = 0; r < rows; r++) {
            const double row_density = random.unit() < 0.3 ? 0 : random.unit() < 0.1 ? 1 : density * random.unit() * 2;
            for (int64_t c = 0; c < cols; c++) {
                if (random.unit() < density_at(s, density, row_density, c, cols)) {
                    dense[static_cast<size_t>(r * cols + c)] =
                        static_cast<float>(std::exp2(random.unit() * 6 - 6) * (random.unit() < 0.5 ? -1 : 1));
                }
            }
        }
        if (type == GGML_MACKO_TYPE_F32) {
            STATUS_CHECK(pack(dense.data(), { { rows, cols, type, 4, 0 }, value_type, index_bits }, 2, &packed));
        } else {
            std::vector<uint16_t> bits(dense.size());
            std::transform(dense.begin(), dense.end(), bits.begin(), [&](float f) {
                return type == GGML_MACKO_TYPE_F16 ? f16_of_float(f) : static_cast<uint16_t>(bits_of_float(f) >> 16);
            });
            STATUS_CHECK(pack(bits.data(), { { rows, cols, type, 4, 0 }, value_type, index_bits }, 2, &packed));
        }
        STATUS_CHECK(check_packed(packed.arrays(), 2, &view));
        weights.assign(dense.size(), 0.0);
        for (int64_t r = 0; r < rows; r++) {
            int64_t k = packed.row_ptr[static_cast<size_t>(r)];
            view.for_each_column(r, [&](int64_t c) {
                const uint8_t * block = packed.values.data() + k / QUANT_BLOCK * quant_block_nbytes(value_type);
                weights[static_cast<size_t>(r * cols + c)] =
                    static_cast<double>(float_of_f16(quant_scale_bits(block))) *
                    quant_at(block, value_type, k % QUANT_BLOCK);
                k++;
            });
        }
    }
    ~test_matrix() { cudaFree(memory); }
    test_matrix(const test_matrix &) = delete;

    gpu_matrix matrix() const { return { packed.desc.dense, 0, packed.desc.value_type }; }

    void upload(cuda_sparse_uploader & uploader, int64_t shared_nbytes) {
        const gpu_plan plan = choose(matrix(), { shared_nbytes });
        layout_verdict verdict;
        const size_t   n = static_cast<size_t>(plan.nbytes);
        CUDA_CHECK(cudaMalloc(&memory, n));
        CUDA_CHECK(cudaMemset(memory, 0xa5, n));
        CUDA_CHECK(cudaDeviceSynchronize()); // the copies that follow use another stream
        STATUS_CHECK(uploader.begin(plan, memory));
        STATUS_CHECK(uploader.whole(view, 2));
        STATUS_CHECK(uploader.finish(&device, &verdict, &outgrown));
        made = std::get<quantized_layout>(device);
    }
    std::string name(uint64_t seed, int64_t n) const {
        char                text[200];
        const packed_desc & d = packed.desc;
        snprintf(text, sizeof(text),
                 "seed %llu: %lldx%lld type %d values %d index %d, deltas of %d bits, %d lanes, n %lld",
                 static_cast<unsigned long long>(seed), static_cast<long long>(rows()), static_cast<long long>(cols()),
                 d.dense.type, d.value_type, d.index_bits, made.delta_bits, made.lanes, static_cast<long long>(n));
        return text;
    }
};

static const int TYPES[]  = { GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_BF16, GGML_MACKO_TYPE_F32 };
static const int VALUES[] = { GGML_MACKO_TYPE_Q8_0, GGML_MACKO_TYPE_Q4_0, GGML_MACKO_TYPE_Q5_0, GGML_MACKO_TYPE_Q4_NL };
static const int INDEX[]  = { 0, 2, 4, 8 };

static std::unique_ptr<test_matrix> random_matrix(rng & random) {
    const int64_t   widths[] = { 1,    2,    31,   32,   33,   63,   97,   300,   512,
                                 1000, 2048, 2049, 3000, 4096, 4100, 5120, 11008, 12288 };
    const int64_t   cols     = widths[random.range(0, 17)];
    const int64_t   rows     = random.range(1, cols > 4100 ? 60 : cols > 1000 ? 200 : 400);
    const double    density  = random.unit() < 0.05   ? 0.0
                               : random.unit() < 0.05 ? 1.0
                               : random.unit() < 0.3  ? random.unit() * 0.1
                                                      : random.unit() * 0.9;
    const structure s     = random.unit() < 0.6 ? UNIFORM : static_cast<structure>(random.range(0, N_STRUCTURES - 1));
    const int       index = s == UNIFORM || s == UNEVEN ? INDEX[random.range(0, 3)] : INDEX[random.range(0, 1) * 2];
    return std::make_unique<test_matrix>(random, rows, cols, TYPES[random.range(0, 2)],
                                         VALUES[random.range(0, std::size(VALUES) - 1)], index, density, s);
}

// ---- the layout, read by the words of gpu-layout/quantized.h ----

static const uint8_t * image_tile(const quantized_layout & m, int64_t group) {
    return m.groups + group / 32 * 32 * (4 * (quantized_value_words(m.value_type) + m.delta_bits) + 2);
}

// base: of the tile's values or deltas
static uint32_t plane_word(const uint8_t * base, int n_words, int64_t group, int word) {
    for (int first = 0;;) {
        const int width = n_words - first >= 4 ? 4 : n_words - first >= 2 ? 2 : 1;
        if (word < first + width) {
            uint32_t w;
            memcpy(&w, base + (first * 32 + width * (group % 32) + word - first) * 4, 4);
            return w;
        }
        first += width;
    }
}

static int image_code(const quantized_layout & m, int64_t group, int k) {
    const int       quad = k / 4, shift = k % 4 * 8;
    const uint8_t * deltas = image_tile(m, group) + 32 * 4 * quantized_value_words(m.value_type);
    const auto      word   = [&](int i) { return plane_word(deltas, m.delta_bits, group, i) >> shift & 0xff; };
    if (m.delta_bits == 8) {
        return static_cast<int>(word(quad));
    }
    const uint32_t field =
        m.delta_bits == 3 && quad / 2 == 3 ? word(0) >> 6 | word(1) >> 6 << 2 | word(2) >> 6 << 4 : word(quad / 2);
    return static_cast<int>(field >> quad % 2 * m.delta_bits & ((1u << m.delta_bits) - 1));
}

static int image_value(const quantized_layout & m, int64_t group, int k) {
    const int quad = k / 4;
    if (m.value_type == GGML_MACKO_TYPE_Q8_0) {
        return static_cast<int8_t>(plane_word(image_tile(m, group), 8, group, quad) >> k % 4 * 8);
    }
    const uint32_t nibble = plane_word(image_tile(m, group), 4, group, quad / 2) >> (k % 4 * 8 + quad % 2 * 4) & 15;
    return static_cast<int>(nibble ^ 8) - 8;
}

static double image_scale(const quantized_layout & m, int64_t group) {
    uint16_t bits;
    memcpy(&bits,
           image_tile(m, group) + 32 * 4 * (quantized_value_words(m.value_type) + m.delta_bits) + 2 * (group % 32), 2);
    return static_cast<double>(float_of_f16(bits));
}

// The column of x in each word of shared memory; -1 for a word without a column.
static std::vector<int64_t> columns_of_words(const quantized_layout & m, int64_t words) {
    std::vector<int64_t> column_of(static_cast<size_t>(words), -1);
    for (int64_t place = 0; place < words; place++) {
        column_of[static_cast<size_t>(quantized_word(place, m.width))] = place % (m.lanes * m.width);
    }
    return column_of;
}

// The index of the last group in use, plus 1.
static int64_t groups_end(const std::vector<int> & uses) {
    int64_t group = static_cast<int64_t>(uses.size());
    while (group > 0 && uses[static_cast<size_t>(group - 1)] == 0) {
        group--;
    }
    return group;
}

// Checks each weight at its place in a kernel: by the words of x, not by columns. Returns the number of segments.
static int64_t check_image(const test_matrix & t, const quantized_image & image, const std::string & name) {
    const quantized_layout &   m     = image.matrix;
    const int64_t              words = 32 * m.width - 1, overshoot = m.overshoot;
    const std::vector<int64_t> column_of = columns_of_words(m, words);
    bool                       inside = true, same = true;
    int64_t                    n_outliers = 0, segments = 0; // of the rows so far
    const int64_t              end = m.groups_end - m.groups,
                  tile_nbytes      = quantized_tile_nbytes(quantized_value_words(m.value_type), m.delta_bits);
    std::vector<int> uses(static_cast<size_t>(end / tile_nbytes * CUDA_QUANTIZED_TILE), 0); // of groups of the image
    for (int64_t r = 0; r < m.rows; r++) {
        std::vector<double> row(static_cast<size_t>(m.cols), 0.0);
        const auto          add = [&](int64_t word, double value) {
            const int64_t c = word >= 0 && word < words + overshoot ? column_of[static_cast<size_t>(word % words)] : -1;
            inside = inside && (value == 0 || (c >= 0 && c < m.cols)) && word < words + overshoot;
            if (value != 0 && inside) {
                row[static_cast<size_t>(c)] += value;
            }
        };
        cuda_quantized_row head;
        memcpy(&head, quantized_row(m, r), sizeof(head));
        const int64_t groups = head.n_groups, rest = quantized_segments(head, m.lanes), segment = head.rest >> 8;
        CHECK(head.first_outlier == n_outliers && (rest == 0 || segment == segments), "%s: row %lld begins elsewhere",
              name.c_str(), static_cast<long long>(r));
        CHECK(rest <= m.lanes, "%s: row %lld has %lld segments", name.c_str(), static_cast<long long>(r),
              static_cast<long long>(rest));
        n_outliers += head.n_outliers;
        segments += rest;
        for (int64_t l = 0; l < m.lanes; l++) {
            const int64_t skip = l * groups / m.lanes, own = (l + 1) * groups / m.lanes - skip, full = groups / m.lanes,
                          longer = skip - l * full;
            uint16_t base;
            memcpy(&base, quantized_row(m, r) + sizeof(head) + 2 * l, sizeof(base));
            int64_t at = base;
            for (int64_t s = 0; s < own; s++) {
                const int64_t slot =
                    quantized_group(head, m.lanes, static_cast<int>(s),
                                    static_cast<int>(own > full ? longer : groups % m.lanes + l - longer));
                inside = inside && slot >= 0 && slot < static_cast<int64_t>(uses.size()) &&
                         uses[static_cast<size_t>(slot)]++ == 0;
                if (!inside) {
                    continue;
                }
                CHECK(s >= quantized_steps(head) || slot % 32 / m.lanes == r % (32 / m.lanes),
                      "%s: row %lld is at another place of the tile of its warp_rows", name.c_str(),
                      static_cast<long long>(r));
                for (int k = 0; k < 32; k++) {
                    at += 32 * image_code(m, slot, k);
                    at -= m.delta_bits == 8 && at >= words ? words : 0;
                    add(at, image_scale(m, slot) * image_value(m, slot, k));
                    at += 32;
                    at -= m.delta_bits < 8 && k % CUDA_QUANTIZED_SEGMENT == 7 && at >= words ? words : 0;
                }
            }
        }
        for (int64_t i = 0; i < rest; i++) {
            cuda_quantized_segment s;
            memcpy(&s, m.groups_end - (segment + i + 1) * static_cast<int64_t>(sizeof(s)), sizeof(s));
            int64_t at = s.word;
            for (int k = 0; k < 8; k++) {
                at += 32 * (s.deltas[k % 4] >> k / 4 * m.delta_bits & ((1 << m.delta_bits) - 1));
                add(at, static_cast<double>(float_of_f16(s.scale)) * s.values[k] /
                            (m.value_type == GGML_MACKO_TYPE_Q4_0 ? 16 : 1));
                at += 32;
            }
        }
        for (int32_t e = head.first_outlier; e < head.first_outlier + head.n_outliers; e++) {
            add(m.outliers[e].word, static_cast<double>(m.outliers[e].value));
        }
        same =
            same && memcmp(row.data(), &t.weights[static_cast<size_t>(r * m.cols)], row.size() * sizeof(double)) == 0;
    }
    CHECK(inside, "%s: a word outside of x, or a group of nobody or of two rows", name.c_str());
    CHECK(same, "%s: the layout holds another matrix", name.c_str());
    CHECK((groups_end(uses) + 31) / 32 * tile_nbytes +
                  segments * static_cast<int64_t>(sizeof(cuda_quantized_segment)) <=
              end,
          "%s: groups and segments overlap", name.c_str());
    return segments;
}

constexpr int64_t SHARED_NBYTES = 232448;

TEST(layout_holds_the_matrix) {
    const int n_cases = random_cases(300);
    int       used[9] = {}, n_outliers = 0, rests = 0;
    for (int i = 0; i < n_cases; i++) {
        rng  random(static_cast<uint64_t>(i));
        auto t = random_matrix(random);
        for (double & w : t->weights) {
            w += 0.0; // no -0: sums have none
        }
        quantized_shape shape = quantized_shape_of(t->matrix(), { SHARED_NBYTES });
        CHECK(shape.lanes, "no layout for %lld columns", static_cast<long long>(t->cols()));
        quantized_image image;
        make_quantized(t->view, shape, 2, &image);
        if (image.n_outliers > shape.max_outliers) {
            shape = { 8, shape.lanes, t->packed.desc.dense.nnz };
            make_quantized(t->view, shape, 2, &image);
        }
        used[shape.bits]++;
        n_outliers += image.n_outliers > 0;
        t->made = image.matrix;
        rests += check_image(*t, image, t->name(static_cast<uint64_t>(i), 0)) > 0;
    }
    CHECK(n_cases < 100 || (used[3] > n_cases / 20 && used[4] > n_cases / 20 && used[8] > n_cases / 20 &&
                            n_outliers > n_cases / 20 && rests > n_cases / 20),
          "deltas of 3, 4, 8 bits in %d, %d, %d cases, %d with outliers, %d with segments", used[3], used[4], used[8],
          n_outliers, rests);
}

// The bytes that the device reserves compared with the bytes of the file, for values that keep their type, in matrices
// so large that uniform masks never exceed the reserved bytes.
TEST(reserved_memory_stays_near_the_file) {
    for (const int value_type : { GGML_MACKO_TYPE_Q8_0, GGML_MACKO_TYPE_Q4_0 }) {
        for (const int64_t cols : { 4096, 11008 }) {
            for (const double density : { 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7 }) {
                rng                   random(static_cast<uint64_t>(cols + value_type));
                test_matrix           t(random, 96, cols, GGML_MACKO_TYPE_F16, value_type, -1, density, UNIFORM);
                const quantized_shape shape = quantized_shape_of(t.matrix(), { SHARED_NBYTES });
                const int64_t         room  = shape.max_outliers;
                quantized_image       image;
                make_quantized(t.view, shape, 2, &image);
                const double file =
                    static_cast<double>(t.packed.values.size() + t.packed.index.size() + t.packed.row_ptr.size() * 4);
                const double ratio = static_cast<double>(image.matrix.nbytes) / file;
                printf("memory: values %d, %lld columns, density %.1f: deltas of %d bits, %d lanes, %.3f of the file's "
                       "bytes\n",
                       value_type, static_cast<long long>(cols), density, shape.bits, shape.lanes, ratio);
                CHECK(image.n_outliers <= room, "%lld n_outliers, room for %lld",
                      static_cast<long long>(image.n_outliers), static_cast<long long>(room));
                CHECK(ratio <= (density < 0.25 ? 1.5 : 1.35), "density %.1f: %.3f of the file's bytes", density, ratio);
            }
        }
    }
}

// ---- products ----

static void check_densify(const test_matrix & t, const std::string & name) {
    std::vector<uint8_t> row(static_cast<size_t>(t.cols() * value_nbytes(t.packed.desc.dense.type)));
    check_densified(t.device, name, [&](int64_t r) {
        t.view.decode_row(r, row.data());
        return row.data();
    });
}

static int64_t shared_memory() {
    cuda_device_info device;
    CUDA_CHECK(cuda_current_device(&device));
    return device.shared_nbytes;
}

GPU_TEST(random_products) {
    const int64_t shared_nbytes = shared_memory();
    const int     n_cases       = random_cases(300);
    const int64_t batches[]     = { 1, 1, 1, 2, 3, 4, 5, 8, 9, 17, 40 };
    int           outgrown      = 0;
    for (int i = 0; i < n_cases; i++) {
        const uint64_t seed = 1000 + static_cast<uint64_t>(i);
        rng            random(seed);
        auto           t = random_matrix(random);
        t->upload(uploader, shared_nbytes);
        outgrown += t->outgrown != nullptr;
        int64_t n = batches[random.range(0, 10)];
        while (n > 1 && n * t->rows() * t->cols() > 20000000) {
            n /= 2;
        }
        const std::string name = t->name(seed, n);
        check_densify(*t, name);
        check_product<test_matrix>(random, { t.get() }, n, random_options(random), name);
    }
    CHECK(n_cases < 100 || outgrown > 0, "no matrix outgrew its memory");
}

GPU_TEST(matrices_that_share_x) {
    const int64_t  shared_nbytes = shared_memory();
    const uint64_t n_seeds       = few_cases() ? 4 : 24;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        rng           random(seed);
        const int64_t cols = seed % 3 == 0 ? 300 : seed % 3 == 1 ? 2048 : 11008, rows = random.range(50, 150);
        const double  density    = seed % 4 == 0 ? 0.1 : seed % 4 == 1 ? 0.3 : 0.5;
        const int     value_type = VALUES[seed % std::size(VALUES)];
        test_matrix   a(random, rows, cols, GGML_MACKO_TYPE_F16, value_type, 0, density, UNIFORM),
            b(random, rows, cols, GGML_MACKO_TYPE_F16, value_type, 2, density, UNIFORM);
        test_matrix c(random, 33, cols, GGML_MACKO_TYPE_F16, value_type, -1, density, UNIFORM);
        for (test_matrix * t : { &a, &b, &c }) {
            t->upload(uploader, shared_nbytes);
        }
        for (const int64_t n : { 1, 2, 4, 7 }) {
            options o;
            o.norm     = seed % 2;
            o.residual = o.in_place = seed % 5 == 0;
            check_product<test_matrix>(random, { &a, &b, &c }, n, o, "three matrices, " + a.name(seed, n));
            o.silu = true;
            if (a.made.delta_bits == b.made.delta_bits) {
                check_product<test_matrix>(random, { &a, &b }, n, o, "gate and up, " + a.name(seed, n));
            }
        }
    }
}

// The rows of an expert, with ids in device memory, including ids out of range.
GPU_TEST(experts_and_ids_out_of_range) {
    const int64_t shared_nbytes = shared_memory();
    for (uint64_t seed = 1; seed <= 6; seed++) {
        rng           random(seed);
        const int64_t rows = random.range(3, 70), cols = seed % 2 ? 2100 : 200, ldx = seed % 3 ? cols : 0;
        test_matrix   w(random, N_EXPERTS * rows, cols, GGML_MACKO_TYPE_BF16, VALUES[seed % std::size(VALUES)], -1, 0.3,
                        UNIFORM);
        w.upload(uploader, shared_nbytes);
        check_experts(random, w, rows, ldx, seed);
    }
}

// NaN and infinities must not become finite, and zeros and tiny x must not become NaN.
GPU_TEST(nan_and_infinite_x_do_not_become_numbers) {
    const int64_t shared_nbytes = shared_memory();
    rng           random(3);
    test_matrix   w(random, 40, 1000, GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_Q8_0, -1, 0.5, UNIFORM);
    w.upload(uploader, shared_nbytes);
    for (const int64_t n : { 1, 2, 4 }) {
        check_odd_x(random, w, n);
    }
}

// Results must have the same bits every time: launched alone, as a dependent launch, and from a graph.
GPU_TEST(repeats_are_bit_identical) {
    const int64_t shared_nbytes = shared_memory();
    const int     n_repeats     = few_cases() ? 3 : 60;
    for (const double density : { 0.5, 0.3, 0.1 }) {
        rng         random(9);
        test_matrix w(random, 500, 4096, GGML_MACKO_TYPE_F16, VALUES[density < 0.4], -1, density, UNIFORM);
        w.upload(uploader, shared_nbytes);
        for (const int64_t n : { 1, 4 }) {
            guarded x(4096 * n), y(500 * n);
            for (int64_t i = 0; i < 4096 * n; i++) {
                x.at(i) = static_cast<float>(random.unit() - 0.5);
            }
            x.put();
            check_repeats(plain_product(w.device, x, y, n), y, n_repeats, w.name(9, n));
        }
    }
}

// Each kernel once or twice, for sanitizers that take seconds per product.
GPU_TEST(small_products) {
    const int64_t shared_nbytes = shared_memory();
    for (const int value_type : { GGML_MACKO_TYPE_Q8_0, GGML_MACKO_TYPE_Q4_0 }) {
        for (const double density : { 0.5, 0.3, 0.1 }) { // deltas of 3, 4, 8 bits
            rng         random(static_cast<uint64_t>(value_type + 100 * density));
            test_matrix w(random, 12, 300, GGML_MACKO_TYPE_F16, value_type, -1, density, UNIFORM);
            w.upload(uploader, shared_nbytes);
            for (const int64_t n : { 1, 2, 4 }) {
                options o;
                o.norm     = n != 2;
                o.residual = n != 1;
                check_product<test_matrix>(random, { &w }, n, o, w.name(0, n));
                fprintf(stderr, "%s: done\n", w.name(0, n).c_str()); // how far a sanitizer came
            }
        }
    }
}

// test-cuda-packed [CASES | small]: fewer cases under memcheck, small under racecheck
int main(int argc, char ** argv) { return gpu_test_main("test-cuda-packed", argc, argv); }
