// Shared by the tests of the sparse GPU kernels: checked calls, values of each type, device arrays with guard zones,
// products with their prologues and epilogues, experts.
#pragma once

#include "cuda/lib/common.cuh"
#include "cuda/ops/ops.h"
#include "cuda/sparse/mul-mat.cuh"
#include "test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace macko;
using namespace macko::cuda;

#define CUDA_CHECK(call)                                                                              \
    do {                                                                                              \
        const cudaError_t error = (call);                                                             \
        if (error != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define STATUS_CHECK(call)                                                                          \
    do {                                                                                            \
        const int status = (call);                                                                  \
        if (status != GGML_MACKO_STATUS_OK) {                                                       \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, ggml_macko_last_error()); \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

// Prints the compute capability of the running code; tools/checks/check_gpu_architectures.py reads it.
inline void print_code_path(const char * name) {
    int cc = 0;
    CUDA_CHECK(op_compute_capability(&cc));
    printf("%s: code for compute capability %d\n", name, cc);
}
// A test on the GPU; `uploader` is the uploader of device 0.
inline cuda_sparse_uploader * uploader_of_tests = nullptr;

#define GPU_TEST(name)                                                               \
    static void                        test_##name(cuda_sparse_uploader & uploader); \
    [[maybe_unused]] static const bool name##_is_listed =                            \
        list_test(#name, [] { test_##name(*uploader_of_tests); }, true);             \
    static void test_##name([[maybe_unused]] cuda_sparse_uploader & uploader)

inline int gpu_test_main(const char * program, int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    int                                   n_devices = 0;
    const bool                            has_gpu   = cudaGetDeviceCount(&n_devices) == cudaSuccess && n_devices > 0;
    std::unique_ptr<cuda_sparse_uploader> uploader;
    if (has_gpu) {
        print_code_path(program);
        STATUS_CHECK(cuda_sparse_uploader::create(0, &uploader));
        uploader_of_tests = uploader.get();
    }
    run_tests(has_gpu);
    return test_summary(program);
}

// Programmatic dependent launches need kernels with a wait instruction; code for older GPUs has none.
inline bool has_programmatic_launch() {
    int cc = 0;
    CUDA_CHECK(op_compute_capability(&cc));
    return cc >= 90;
}

// Maximum error of float32 sums in any order, relative to the sum of magnitudes: a few units in the last place, growing
// slowly with the length.
static constexpr double  MAX_ERROR = 3e-6;
static constexpr float   POISON    = -1.2345e30f;
static constexpr int64_t GUARD     = 64; // floats before and after each output

// Parameters of a layout that tests check; 0 if the layout has no such parameter.
struct layout_numbers {
    std::string layout;
    int32_t     delta_bits = 0, lanes = 0, bank_width = 0;

    explicit layout_numbers(const gpu_layout & l) : layout(layout_name(l)) {
        std::visit([&](const auto & m) { read(m); }, l);
    }

private:
    void read(const row_split_layout & m) { delta_bits = m.delta_bits, lanes = m.lanes, bank_width = m.bank_width; }
    void read(const macko_layout & m) { delta_bits = m.delta_bits; }
    void read(const row_blocks_layout & m) { delta_bits = m.delta_bits; }
    void read(const fragments_layout &) {}
};

// ---- values ----

inline double to_double(uint32_t bits, int type) {
    if (type == GGML_MACKO_TYPE_F16) {
        __half_raw raw;
        raw.x = static_cast<unsigned short>(bits);
        return static_cast<double>(__half2float(__half(raw)));
    }
    if (type == GGML_MACKO_TYPE_BF16) {
        bits <<= 16;
    }
    float f;
    memcpy(&f, &bits, sizeof(f));
    return static_cast<double>(f);
}

inline double round_to(double v, int type) {
    const float f = static_cast<float>(v);
    return type == GGML_MACKO_TYPE_F16    ? static_cast<double>(__half2float(__float2half(f)))
           : type == GGML_MACKO_TYPE_BF16 ? static_cast<double>(__bfloat162float(__float2bfloat16(f)))
                                          : v;
}

// A random value of either sign with magnitude 2^lowest to 2^(lowest + binades); one in a hundred is 30 times larger.
inline uint32_t random_bits(rng & random, int type, double lowest = -8, double binades = 12) {
    const float magnitude =
        static_cast<float>(std::exp2(random.unit() * binades + lowest) * (random.unit() < 0.01 ? 30 : 1));
    const float f = random.unit() < 0.5 ? -magnitude : magnitude;
    uint32_t    bits;
    memcpy(&bits, &f, sizeof(bits));
    if (type == GGML_MACKO_TYPE_F16) {
        return static_cast<__half_raw>(__float2half(f)).x;
    }
    return type == GGML_MACKO_TYPE_BF16 ? bits >> 16 : bits;
}

// ---- device arrays with guard zones ----

struct guarded {
    std::vector<float> host;
    float *            memory = nullptr;
    explicit guarded(int64_t n) : host(static_cast<size_t>(n + 2 * GUARD), POISON) {
        CUDA_CHECK(cudaMalloc(&memory, host.size() * 4));
        put();
    }
    ~guarded() { cudaFree(memory); }
    guarded(const guarded &) = delete;
    float * data() { return memory + GUARD; }
    float & at(int64_t i) { return host[static_cast<size_t>(i + GUARD)]; }
    void    put() { CUDA_CHECK(cudaMemcpy(memory, host.data(), host.size() * 4, cudaMemcpyHostToDevice)); }
    void    get() { CUDA_CHECK(cudaMemcpy(host.data(), memory, host.size() * 4, cudaMemcpyDeviceToHost)); }
    bool    guards_intact() const {
        for (int64_t i = 0; i < GUARD; i++) {
            if (host[static_cast<size_t>(i)] != POISON || host[host.size() - 1 - static_cast<size_t>(i)] != POISON) {
                return false;
            }
        }
        return true;
    }
};

// ---- products ----

struct options {
    bool residual = false, bias = false, norm = false, silu = false, in_place = false;
};

inline options random_options(rng & random) {
    options o;
    o.residual = random.unit() < 0.3;
    o.in_place = random.unit() < 0.5;
    o.bias     = random.unit() < 0.3;
    o.norm     = random.unit() < 0.3;
    return o;
}

// Parameters of the product of all rows of W with n columns, which are adjacent in x and in y.
inline cuda_sparse_mul_mat_params plain_product(const gpu_layout & w, guarded & x, guarded & y, int64_t n) {
    cuda_sparse_mul_mat_params p = {};
    p.n_matrices                 = 1;
    p.w[0]                       = &w;
    p.y[0]                       = y.data();
    p.ldy[0]                     = base_of(w).rows;
    p.row_end[0]                 = base_of(w).rows;
    p.x                          = x.data();
    p.ldx                        = base_of(w).cols;
    p.n                          = n;
    return p;
}

// Memory for x in 16 bits, filled with NaN before its first use.
inline void * x16_memory() {
    static void * memory = nullptr;
    if (!memory) {
        CUDA_CHECK(cudaMalloc(&memory, CUDA_SPARSE_X16_NBYTES));
        CUDA_CHECK(cudaMemset(memory, 0xff, CUDA_SPARSE_X16_NBYTES));
    }
    return memory;
}

// x and the weights of a norm, on the device.
struct product_inputs {
    std::vector<float> norm; // empty: no norm
    guarded            dx, dnorm;

    product_inputs(rng & random, const std::vector<float> & x, int64_t cols, const options & o)
        : norm(static_cast<size_t>(o.norm ? cols : 0)),
          dx(static_cast<int64_t>(x.size())),
          dnorm(std::max<int64_t>(1, o.norm ? cols : 1)) {
        for (float & v : norm) {
            v = static_cast<float>(random.unit() + 0.5);
        }
        std::copy(x.begin(), x.end(), &dx.at(0));
        std::copy(norm.begin(), norm.end(), &dnorm.at(0));
        dx.put();
        dnorm.put();
    }

    // Parameters without matrices, rows and outputs.
    cuda_sparse_mul_mat_params params(int64_t ldx, int64_t n, const options & o) {
        cuda_sparse_mul_mat_params p = {};
        p.x                          = dx.data();
        p.ldx                        = ldx;
        p.n                          = n;
        p.norm_weight                = o.norm ? dnorm.data() : nullptr;
        p.norm_eps                   = 1e-5f;
        p.silu_mul                   = o.silu;
        return p;
    }
};

// Outputs, residuals and biases of the products of matrices with the same x. The constructor fills in the matrices,
// rows (starting at one of the first three) and outputs of p.
struct outputs {
    const options &                       o;
    const cuda_sparse_mul_mat_params &    p;
    std::vector<std::unique_ptr<guarded>> y, residual, bias;

    outputs(rng & random, const std::vector<const gpu_layout *> & w, const options & o, cuda_sparse_mul_mat_params & p)
        : o(o), p(p) {
        p.n_matrices = static_cast<int32_t>(w.size());
        for (size_t i = 0; i < w.size(); i++) {
            const int64_t rows  = base_of(*w[i]).rows,
                          begin = o.silu ? 0 : random.range(0, std::min<int64_t>(2, rows - 1)), m = rows - begin;
            p.w[i]         = w[i];
            p.row_begin[i] = begin;
            p.row_end[i]   = rows;
            p.ldy[i]       = m + random.range(0, 5);
            y.push_back(std::make_unique<guarded>(p.ldy[i] * p.n));
            residual.push_back(std::make_unique<guarded>(p.ldy[i] * p.n));
            bias.push_back(std::make_unique<guarded>(m));
            for (int64_t k = 0; k < p.ldy[i] * p.n; k++) {
                residual[i]->at(k) = static_cast<float>(random.unit() - 0.5);
            }
            for (int64_t k = 0; k < m; k++) {
                bias[i]->at(k) = static_cast<float>(random.unit() - 0.5);
            }
            if (o.residual && o.in_place) {
                y[i]->host = residual[i]->host;
            }
            y[i]->put(), residual[i]->put(), bias[i]->put();
            p.y[i]        = y[i]->data();
            p.residual[i] = !o.residual ? nullptr : o.in_place ? y[i]->data() : residual[i]->data();
            p.bias[i]     = o.bias ? bias[i]->data() : nullptr;
        }
    }
    outputs(const outputs &) = delete;

    size_t  count() const { return o.silu ? 1 : y.size(); } // number of written outputs
    int64_t rows(size_t i) const { return p.row_end[i] - p.row_begin[i]; }
    float   at(size_t i, int64_t row, int64_t column) const { return y[i]->at(column * p.ldy[i] + row); }
    double  added(size_t i, int64_t row, int64_t column) const {
        return (o.bias ? static_cast<double>(bias[i]->at(row)) : 0.0) +
               (o.residual ? static_cast<double>(residual[i]->at(column * p.ldy[i] + row)) : 0.0);
    }
    // Called after the product: copies the outputs to the host. The memory around them and between their columns must
    // be unchanged.
    void get(const std::string & name) {
        CUDA_CHECK(cudaDeviceSynchronize());
        for (size_t i = 0; i < count(); i++) {
            y[i]->get();
            CHECK(y[i]->guards_intact(), "%s: wrote outside of y", name.c_str());
            for (int64_t j = 0; j < p.n; j++) {
                for (int64_t r = rows(i); r < p.ldy[i]; r++) {
                    CHECK(at(i, r, j) == (o.residual && o.in_place ? residual[i]->at(j * p.ldy[i] + r) : POISON),
                          "%s: wrote between columns", name.c_str());
                }
            }
        }
    }
};

// Checks that results have the same bits every time: as an ordinary launch, as a dependent launch, and from a CUDA
// graph of two such products. y: the only output of p.
inline void check_repeats(cuda_sparse_mul_mat_params p, guarded & y, int n_repeats, const std::string & name) {
    cudaStream_t    stream;
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const bool programmatic = has_programmatic_launch();
    p.programmatic          = programmatic;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA_CHECK(cuda_sparse_mul_mat(p, stream));
    CUDA_CHECK(cuda_sparse_mul_mat(p, stream));
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> first;
    for (int i = 0; i < n_repeats; i++) {
        CUDA_CHECK(cudaMemsetAsync(y.data(), 0xff, static_cast<size_t>(p.ldy[0] * p.n * 4), stream));
        p.programmatic = programmatic && i % 3 == 1;
        CUDA_CHECK(i % 3 == 2 ? cudaGraphLaunch(exec, stream) : cuda_sparse_mul_mat(p, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        y.get();
        first = i ? first : y.host;
        CHECK(memcmp(first.data(), y.host.data(), first.size() * 4) == 0, "%s, n %lld: repeat %d differs", name.c_str(),
              static_cast<long long>(p.n), i);
    }
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));
}

// Checks the last two thirds of the rows of W as dense rows, ld elements apart. row(r) points to the expected bytes of
// row r. No bytes between rows may be written.
template <typename ROW> void check_densified(const gpu_layout & w, int64_t ld, const std::string & name, ROW && row) {
    const int64_t rows = base_of(w).rows, begin = rows / 3, size = value_nbytes(base_of(w).type),
                  width = base_of(w).cols * size;
    std::vector<uint8_t> host(static_cast<size_t>((rows - begin) * ld * size), 0x7b);
    uint8_t *            dst;
    CUDA_CHECK(cudaMalloc(&dst, host.size()));
    CUDA_CHECK(cudaMemset(dst, 0x7b, host.size()));
    CUDA_CHECK(cuda_sparse_densify(w, begin, rows, dst, ld, nullptr));
    CUDA_CHECK(cudaMemcpy(host.data(), dst, host.size(), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(dst));
    bool same = true, kept = true;
    for (int64_t r = begin; r < rows; r++) {
        const uint8_t * got = &host[static_cast<size_t>((r - begin) * ld * size)];
        same                = same && memcmp(got, row(r), static_cast<size_t>(width)) == 0;
        kept                = kept && std::all_of(got + width, got + ld * size, [](uint8_t b) { return b == 0x7b; });
    }
    CHECK(same, "%s: dense bits differ", name.c_str());
    CHECK(kept, "%s: something was written between rows", name.c_str());
}
// Checks rows at unaligned addresses, and aligned rows.
template <typename ROW> void check_densified(const gpu_layout & w, const std::string & name, ROW && row) {
    check_densified(w, base_of(w).cols + 2, name, row);
    check_densified(w, (base_of(w).cols + 15) & ~int64_t(7), name + ", aligned rows", row);
}

// Experts: seven columns, each multiplied by the rows of the expert whose id is on the device. Ids are 2 elements
// apart, and two of them are not ids of experts.
constexpr int64_t N_EXPERTS = 5, N_EXPERT_COLUMNS = 7;
constexpr int32_t EXPERT_IDS[2 * N_EXPERT_COLUMNS] = { 4, -7, 0, -7, 2, -7, 5, -7, 1, -7, -1, -7, 3, -7 };
// The first row of column j's expert, or -1.
constexpr int64_t expert_row(int64_t j, int64_t rows) {
    return EXPERT_IDS[2 * j] >= 0 && EXPERT_IDS[2 * j] < N_EXPERTS ? EXPERT_IDS[2 * j] * rows : -1;
}
// y has rows / N_EXPERTS rows per column.
inline void multiply_experts(const gpu_layout & w, guarded & x, int64_t ldx, guarded & y, void * x16 = nullptr) {
    int32_t * ids;
    CUDA_CHECK(cudaMalloc(&ids, sizeof(EXPERT_IDS)));
    CUDA_CHECK(cudaMemcpy(ids, EXPERT_IDS, sizeof(EXPERT_IDS), cudaMemcpyHostToDevice));
    cuda_sparse_mul_mat_params p = plain_product(w, x, y, N_EXPERT_COLUMNS);
    p.expert_rows = p.ldy[0] = p.row_end[0] = base_of(w).rows / N_EXPERTS;
    p.ldx                                   = ldx;
    p.expert_ids                            = ids;
    p.expert_ids_stride                     = 2;
    p.x16                                   = x16;
    CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
    y.get();
    CHECK(y.guards_intact(), "experts: wrote outside of y");
    CUDA_CHECK(cudaFree(ids));
}
