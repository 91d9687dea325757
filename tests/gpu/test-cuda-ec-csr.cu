// The EC-CSR blocks of the GPU against float64, element by element, for random shapes, densities, structures,
// granularities and batches; and the layout of blocks in GPU memory, which needs no GPU. Exit code 77 (skipped) without
// a GPU, after the layout tests.
#include "codec/ec-csr/extract.h"
#include "codec/macko/encode.h"
#include "cuda/sparse/mul-mat.cuh"
#include "test-cuda.h"

#include <algorithm>
#include <string>

// ---- a matrix, dense and as EC-CSR ----

struct test_matrix {
    int64_t              rows, cols;
    int32_t              type;
    std::vector<uint8_t> dense;
    std::vector<double>  weights;
    ec_csr_matrix        coded;
    ec_csr_view          view;

    // n_patterns: each row follows one of n_patterns masks (0: none), with some positions changed; some rows are empty,
    // and some have few entries
    test_matrix(rng & random, int64_t rows, int64_t cols, int32_t type, int32_t delta_bits, double density,
                int64_t n_patterns, const extract_options & options)
        : rows(rows), cols(cols), type(type) {
        const int64_t size = value_nbytes(type);
        dense.assign(static_cast<size_t>(rows * cols * size), 0);
        weights.assign(static_cast<size_t>(rows * cols), 0.0);
        std::vector<std::vector<bool>> patterns(static_cast<size_t>(n_patterns),
                                                std::vector<bool>(static_cast<size_t>(cols)));
        for (auto & p : patterns) {
            std::generate(p.begin(), p.end(), [&] { return random.unit() < density; });
        }
        macko_desc desc = { rows, cols, type, delta_bits, 0 };
        for (int64_t r = 0; r < rows; r++) {
            const double what = random.unit(), share = what < 0.1 ? 0 : what < 0.2 ? 0.2 : 1;
            const auto & mask  = patterns[static_cast<size_t>(n_patterns ? random.range(0, n_patterns - 1) : 0)];
            const double noise = random.range(0, 1) ? 0.02 : 0.3;
            for (int64_t c = 0; c < cols; c++) {
                const bool free = n_patterns == 0 || random.unit() < noise;
                if ((free ? random.unit() < density : static_cast<bool>(mask[static_cast<size_t>(c)])) &&
                    random.unit() < share) {
                    // some -0
                    const uint32_t bits = random.unit() < 0.001 ? (type == GGML_MACKO_TYPE_F32 ? 0x80000000u : 0x8000u)
                                                                : random_bits(random, type);
                    memcpy(&dense[static_cast<size_t>((r * cols + c) * size)], &bits, static_cast<size_t>(size));
                    weights[static_cast<size_t>(r * cols + c)] = to_double(bits, type);
                    desc.nnz++;
                }
            }
        }
        ec_csr_blocks blocks;
        STATUS_CHECK(extract_blocks(desc, dense.data(), options, 2, &blocks));
        STATUS_CHECK(assemble(desc, dense.data(), blocks, 2, &coded));
        STATUS_CHECK(check_ec_csr(coded.arrays(), &view));
        STATUS_CHECK(view.check_rows(2));
    }
};

static std::string name_of(uint64_t seed, const test_matrix & w) {
    char text[160];
    snprintf(text, sizeof(text), "seed %llu: %lldx%lld type %d delta_bits %d, %zu sets, largest of %d rows",
             static_cast<unsigned long long>(seed), static_cast<long long>(w.rows), static_cast<long long>(w.cols),
             w.type, w.coded.desc.delta_bits, w.coded.sets.size(), w.coded.sets[0].granularity);
    return text;
}

static test_matrix make_random(rng & random, int32_t type) {
    static const int64_t  WIDTHS[] = { 1, 40, 127, 128, 257, 600, 1000, 2048, 4100, 11008 };
    const int64_t         cols = WIDTHS[random.range(0, 9)], rows = random.range(1, cols > 4000 ? 50 : 150);
    static const int32_t  GRANULARITIES[] = { 1, 2, 4, 8, 16, 64 };
    const extract_options o               = { GRANULARITIES[random.range(0, 5)], random.range(0, 3) ? 128 : 256,
                                              random.range(0, 1) == 1, static_cast<uint64_t>(random.range(0, 99)) };
    const double density = random.unit() < 0.05 ? 0.0 : random.unit() < 0.2 ? random.unit() * 0.1 : random.unit() * 0.8;
    return test_matrix(random, rows, cols, type, random.range(0, 1) ? 4 : 8, density,
                       random.range(0, 2) ? random.range(1, 4) : 0, o);
}

// ---- memory ----

// Reads the result of fill_row_blocks() according to gpu-layout/row-blocks.h: each element must occur once. Also checks
// the slots of each row.
static void check_layout(const test_matrix & w, const std::string & name) {
    std::vector<uint8_t>    memory(static_cast<size_t>(bind_row_blocks(w.view, nullptr).nbytes_arrays), 0);
    const row_blocks_layout b = bind_row_blocks(w.view, memory.data());
    fill_row_blocks(w.view, 2, b);
    std::vector<uint32_t> dense(w.dense.size() / 4, 0), want(w.dense.size() / 4);
    memcpy(want.data(), w.dense.data(), w.dense.size());
    std::vector<int> used(static_cast<size_t>(b.n_slots), 0);
    int64_t          n_twice = 0, n_slots_wrong = 0;
    for (int32_t s = 0; s < b.n_sets; s++) {
        const row_blocks_set & set = b.sets[s];
        for (int64_t p = 0; p < set.n_segments; p++) {
            for (int64_t r = 0; r < set.granularity; r++) {
                const int32_t row = set.rows[p * set.granularity + r], slot = set.slots[p * set.granularity + r];
                n_slots_wrong +=
                    slot < b.slot_ptr[row] || slot >= b.slot_ptr[row + 1] || used[static_cast<size_t>(slot)]++;
            }
            for (int64_t lane = 0; lane < 32; lane++) {
                int64_t column = set.bases[p * 32 + lane];
                for (int64_t k = 0; k < (set.chunk_ptr[p + 1] - set.chunk_ptr[p]) * 4; k++) {
                    const int64_t chunk = set.chunk_ptr[p] + k / 4;
                    column += delta_code(set.deltas, (chunk * 32 + lane) * 4 + k % 4, b.delta_bits);
                    for (int64_t r = 0; r < set.granularity; r++) {
                        const int64_t i = k % 4 * set.granularity + r; // in this lane's values of the chunk
                        uint32_t      bits;
                        memcpy(&bits, set.values + ((chunk * set.granularity + i / 4) * 32 + lane) * 4 + i % 4, 4);
                        uint32_t & to = dense[static_cast<size_t>(set.rows[p * set.granularity + r] * w.cols + column)];
                        n_twice += to && bits;
                        to |= bits;
                    }
                }
            }
        }
    }
    CHECK(n_slots_wrong == 0 && b.slot_ptr[b.rows] == b.n_slots, "%s: %lld slots are wrong", name.c_str(),
          static_cast<long long>(n_slots_wrong));
    CHECK(n_twice == 0, "%s: %lld values occur twice", name.c_str(), static_cast<long long>(n_twice));
    CHECK(dense == want, "%s: values in blocks differ", name.c_str());
}

TEST(blocks_keep_their_elements) {
    for (uint64_t seed = 1; seed <= 60; seed++) {
        rng               random(seed);
        const test_matrix w = make_random(random, GGML_MACKO_TYPE_F32);
        check_layout(w, name_of(seed, w));
    }
}

TEST(matrices_in_blocks) {
    const auto in_blocks = [](int32_t type, int64_t cols, int64_t shared_nbytes) {
        return has_row_blocks({ 8, cols, type, 4, 8 }, { shared_nbytes });
    };
    CHECK(in_blocks(GGML_MACKO_TYPE_F32, 4096, 16384), "F32");
    CHECK(!in_blocks(GGML_MACKO_TYPE_F16, 4096, 16384) && !in_blocks(GGML_MACKO_TYPE_BF16, 4096, 16384), "16 bits");
    CHECK(!in_blocks(GGML_MACKO_TYPE_F32, 4097, 16384), "x does not fit shared memory");
    CHECK(in_blocks(GGML_MACKO_TYPE_F32, 65536, 1 << 20) && !in_blocks(GGML_MACKO_TYPE_F32, 65537, 1 << 20),
          "bases of 32 bits");
}

// ---- products ----

struct on_device {
    uint8_t *   memory = nullptr;
    gpu_layout  matrix = {};
    cuda_memory outgrown;

    // roomy: more memory than a device reserves, because blocks of small matrices may need more
    on_device(cuda_sparse_uploader & uploader, const test_matrix & w, bool in_blocks, bool roomy) {
        const macko_desc & desc = w.coded.desc;
        cuda_device_info   info;
        CUDA_CHECK(cuda_current_device(&info));
        gpu_plan plan = choose({ desc, n_padded(max_recoded(desc)), desc.type, -1, true }, { info.shared_nbytes });
        if (!in_blocks && std::holds_alternative<row_blocks_shape>(plan.candidates[0].shape)) {
            plan.candidates.erase(plan.candidates.begin());
        }
        const int64_t room = roomy ? 8 * plan.nbytes + (1 << 20) : plan.nbytes;
        for (layout_candidate & c : plan.candidates) {
            c.nbytes = room;
        }
        plan.nbytes = room;
        CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(room) + 2 * GPU_ALIGNMENT));
        CUDA_CHECK(cudaMemset(memory, 0xa5, static_cast<size_t>(room) + 2 * GPU_ALIGNMENT));
        CUDA_CHECK(cudaDeviceSynchronize()); // the copies that follow use another stream
        layout_verdict verdict;
        STATUS_CHECK(uploader.begin(plan, memory + GPU_ALIGNMENT));
        STATUS_CHECK(uploader.whole(w.view, 2));
        STATUS_CHECK(uploader.finish(&matrix, &verdict, &outgrown));
        std::vector<uint8_t> around(2 * GPU_ALIGNMENT);
        CUDA_CHECK(cudaMemcpy(around.data(), memory, GPU_ALIGNMENT, cudaMemcpyDeviceToHost));
        CUDA_CHECK(
            cudaMemcpy(&around[GPU_ALIGNMENT], memory + GPU_ALIGNMENT + room, GPU_ALIGNMENT, cudaMemcpyDeviceToHost));
        CHECK(std::all_of(around.begin(), around.end(), [](uint8_t b) { return b == 0xa5; }),
              "wrote outside of the reserved memory");
    }
    ~on_device() { cudaFree(memory); }
    bool in_blocks() const { return std::holds_alternative<row_blocks_layout>(matrix); }
    on_device(const on_device &) = delete;
};

static void check_product(rng & random, const test_matrix & w, const on_device & d, int64_t n,
                          const std::string & name) {
    const int64_t ldx    = w.cols + random.range(0, 3);
    const bool    rounds = n > 1 && w.type != GGML_MACKO_TYPE_F32;
    guarded       x(ldx * n);
    for (int64_t i = 0; i < ldx * n; i++) {
        x.at(i) = static_cast<float>((random.unit() - 0.5) * (random.unit() < 0.01 ? 40 : 2));
    }
    x.put();
    options o                    = random_options(random);
    o.norm                       = false;
    cuda_sparse_mul_mat_params p = {};
    p.x                          = x.data();
    p.ldx                        = ldx;
    p.n                          = n;
    p.programmatic               = random.range(0, 1) && has_programmatic_launch();
    outputs out(random, { &d.matrix }, o, p);
    CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
    out.get(name);
    for (int64_t j = 0; j < n; j++) {
        double worst[2] = {}; // for x unchanged, and for rounded x: the kernel for a last single column does not round
        for (int64_t r = 0; r < out.rows(0); r++) {
            double sum[2] = {}, bound = 1e-30;
            for (int64_t c = 0; c < w.cols; c++) {
                const double weight = w.weights[static_cast<size_t>((r + p.row_begin[0]) * w.cols + c)],
                             v      = static_cast<double>(x.at(j * ldx + c));
                sum[0] += weight * v;
                sum[1] += weight * round_to(v, w.type);
                bound += std::fabs(weight * v);
            }
            for (int i = 0; i < 2; i++) {
                const double error = std::fabs(static_cast<double>(out.at(0, r, j)) - sum[i] - out.added(0, r, j)) /
                                     (bound + o.residual + o.bias);
                worst[i] = error <= worst[i] ? worst[i] : error; // NaN stays
            }
        }
        CHECK(worst[0] <= MAX_ERROR || (rounds && worst[1] <= MAX_ERROR),
              "%s, column %lld of %lld: errors %.3g and, x rounded, %.3g", name.c_str(), static_cast<long long>(j),
              static_cast<long long>(n), worst[0], worst[1]);
    }
}

static void check_densify(const test_matrix & w, const on_device & d, const std::string & name) {
    check_densified(d.matrix, name,
                    [&](int64_t r) { return &w.dense[static_cast<size_t>(r * w.cols * value_nbytes(w.type))]; });
}

GPU_TEST(random_shapes) {
    const int            n_cases   = random_cases(200);
    static const int64_t BATCHES[] = { 1, 1, 2, 3, 4, 5, 8, 9, 17 };
    int                  used[2]   = {};
    for (int i = 0; i < n_cases; i++) {
        const uint64_t seed = 500 + static_cast<uint64_t>(i);
        rng            random(seed);
        const int32_t type = i % 3 == 0 ? GGML_MACKO_TYPE_F32 : i % 3 == 1 ? GGML_MACKO_TYPE_F16 : GGML_MACKO_TYPE_BF16;
        const test_matrix w   = make_random(random, type);
        const bool        f32 = type == GGML_MACKO_TYPE_F32;
        for (int kept = 0; kept < (f32 ? 3 : 1); kept++) { // as rows; in blocks with more memory; in blocks if they fit
            const on_device d(uploader, w, kept > 0, kept == 1);
            used[d.in_blocks()]++;
            const std::string name = name_of(seed, w) + (d.in_blocks() ? ", blocks" : ", rows");
            check_product(random, w, d, BATCHES[random.range(0, 8)], name);
            check_densify(w, d, name);
        }
    }
    CHECK(used[1] >= (n_cases + 2) / 3, "only %d matrices were kept in blocks", used[1]);
}

// Every possible number of rows of a segment, in one matrix; and four columns of x that do not fit in shared memory.
GPU_TEST(every_granularity_and_columns_that_do_not_fit) {
    if (few_cases()) {
        return;
    }
    for (const int64_t cols : { 4096, 28672 }) {
        rng               random(static_cast<uint64_t>(cols));
        const test_matrix w(random, 300, cols, GGML_MACKO_TYPE_F32, 8, 0.3, 40, { 16, 128, false, 0 });
        CHECK(w.coded.sets.size() >= 4, "%zu sets", w.coded.sets.size());
        const on_device d(uploader, w, true, true);
        CHECK(d.in_blocks(), "no blocks");
        for (const int64_t n : { 1, 4, 6 }) {
            check_product(random, w, d, n, name_of(static_cast<uint64_t>(cols), w));
        }
        check_densify(w, d, name_of(static_cast<uint64_t>(cols), w));
    }
}

// Results must have the same bits every time: launched alone, as dependent launches, and from a graph.
GPU_TEST(repeats_are_bit_identical) {
    const int         n_repeats = few_cases() ? 3 : 100;
    rng               random(3);
    const test_matrix w(random, 700, 4096, GGML_MACKO_TYPE_F32, 8, 0.3, 60, { 16, 128, true, 0 });
    const on_device   d(uploader, w, true, true);
    CHECK(d.in_blocks(), "no blocks");
    for (const int64_t n : { 1, 4, 7 }) {
        guarded x(w.cols * n), y(w.rows * n);
        for (int64_t i = 0; i < w.cols * n; i++) {
            x.at(i) = static_cast<float>(random.unit() - 0.5);
        }
        x.put();
        check_repeats(plain_product(d.matrix, x, y, n), y, n_repeats, name_of(3, w));
    }
}

int main(int argc, char ** argv) { return gpu_test_main("test-cuda-ec-csr", argc, argv); }
