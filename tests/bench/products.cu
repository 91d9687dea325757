// Sparse products of random matrices, checked against float64: alone, as a layer, and with every layout and kernel that
// the plugin can choose.
#include "bench.h"

#include "codec/macko/encode.h"
#include "codec/registry.h"
#include "cuda/lib/common.cuh"
#include "cuda/lib/cublas.h"
#include "cuda/ops/ops.h"
#include "cuda/sparse/mul-mat.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cublas_v2.h>
#include <memory>

namespace macko::cuda {

namespace {

constexpr int N_THREADS = 16;

int64_t shared_nbytes() {
    cuda_device_info device = {};
    CHECKED(cuda_current_device(&device));
    return device.shared_nbytes;
}

// ---- random matrices ----

struct shape {
    int64_t rows, cols;
};

shape parse_shape(const std::string & text) {
    long long rows = 0, cols = 0;
    if (sscanf(text.c_str(), "%lldx%lld", &rows, &cols) != 2 || rows < 1 || cols < 1) {
        fprintf(stderr, "bench-gpu: '%s' is not a shape ROWSxCOLS\n", text.c_str());
        exit(2);
    }
    return { rows, cols };
}

struct value_kind {
    const char * name;
    const char * format;
    int32_t      type;       // of the dense matrix
    int32_t      value_type; // of format quantized; 0: another format
    bool         pruned;     // pruned by magnitude
    int          significant_bits;
};
const value_kind VALUE_KINDS[] = {
    { "f16", "macko", GGML_MACKO_TYPE_F16, 0, false, 11 },
    { "f16-8", "macko", GGML_MACKO_TYPE_F16, 0, false, 8 },
    { "pruned", "macko", GGML_MACKO_TYPE_F16, 0, true, 11 },
    { "pruned-8", "macko", GGML_MACKO_TYPE_F16, 0, true, 8 },
    { "f32", "macko", GGML_MACKO_TYPE_F32, 0, false, 11 },
    { "ec-csr", "ec-csr", GGML_MACKO_TYPE_F32, 0, false, 11 },
    { "q3", "quantized", GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_Q3, true, 11 },
    { "q4", "quantized", GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_Q4, true, 11 },
    { "q5", "quantized", GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_Q5, true, 11 },
    { "q8", "quantized", GGML_MACKO_TYPE_F16, GGML_MACKO_TYPE_Q8, true, 11 },
};

const value_kind & find_kind(const std::string & name) {
    for (const value_kind & kind : VALUE_KINDS) {
        if (name == kind.name) {
            return kind;
        }
    }
    fprintf(stderr, "bench-gpu: '%s' are no values; see --help\n", name.c_str());
    exit(2);
}

uint64_t xorshift(uint64_t & s) {
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return s;
}

// Bits of a normal random number with deviation 1/64, like weights, with a minimum magnitude and a number of
// significant bits; never 0.
uint16_t normal_f16(uint64_t & random, double least, int significant_bits) {
    const int dropped = 11 - significant_bits;
    for (;;) {
        const uint64_t r    = xorshift(random);
        const double   u    = (static_cast<double>(r >> 32) + 0.5) * 0x1p-32,
                     v      = static_cast<double>(r & 0xffffffffu) * 0x1p-32,
                     w      = std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v) / 64;
        const uint16_t bits = static_cast<uint16_t>(f16_of_float(static_cast<float>(w)) >> dropped << dropped);
        if (std::fabs(w) >= least && (bits & 0x7fff)) {
            return bits;
        }
    }
}

// The magnitude that a given share of normal numbers with deviation 1/64 exceeds.
double magnitude_of(double share) {
    double low = 0, high = 1;
    for (int i = 0; i < 60; i++) {
        const double middle                                            = (low + high) / 2;
        (std::erfc(middle * 64 / std::sqrt(2.0)) > share ? low : high) = middle;
    }
    return low;
}

float element(const void * dense, int32_t type, int64_t i) {
    return type == GGML_MACKO_TYPE_F16 ? float_of_f16(static_cast<const uint16_t *>(dense)[i])
                                       : static_cast<const float *>(dense)[i];
}

// A requested layout, and its lanes per row.
struct layout_choice {
    std::string layout;
    int32_t     lanes;
};

// A matrix in the device's layout.
struct device_matrix {
    gpu_layout     w = {};
    layout_verdict verdict;
    cuda_memory    memory, outgrown;

    std::string name() const {
        const int32_t lanes = numbers_of(verdict.shape).lanes;
        return layout_name(w) + (lanes ? "/" + std::to_string(lanes) : std::string());
    }
};

// A random matrix in a file's format.
struct file_matrix {
    shape                           s;
    const value_kind &              kind;
    std::string                     name;
    std::vector<uint8_t>            dense; // the decoded values of the file
    std::unique_ptr<encoded_matrix> encoded;
    std::unique_ptr<codec_view>     view;
    gpu_matrix                      header = {};
    macko_matrix                    rows; // the same as MACKO rows

    file_matrix(shape of, const std::string & density, const value_kind & values)
        : s(of), kind(values), name(name_of(of, density, values)) {
        const codec & format = *find_codec(kind.format);
        make_dense(atof(density.c_str()));
        const ggml_macko_option option = { "value_type", kind.value_type };
        check_status(encode_matrix(format, dense.data(), { s.rows, s.cols, kind.type, 0, 0 }, &option,
                                   kind.value_type ? 1 : 0, N_THREADS, &encoded));
        ggml_macko_matrix m = encoded->matrix();
        m.format            = format.name();
        check_status(open_matrix(format, m, N_THREADS, &view));
        check_status(view->decode(dense.data(), N_THREADS));
        check_status(recode(*view, N_THREADS, &rows));
        header = gpu_matrix_of(format, rows_desc(format, m), format.max_entries(m), m.value_type, m.arrays[0].nbytes,
                               format.window(m));
    }
    file_matrix(const file_matrix &) = delete;

    static std::string name_of(shape s, const std::string & density, const value_kind & kind) {
        return std::to_string(s.rows) + "x" + std::to_string(s.cols) + " " + kind.name + " " + density;
    }

    // Makes the matrix on the device, in the plugin's layout or in another one (choice; from MACKO's rows). Returns
    // false if the matrix cannot have that layout.
    bool upload(cuda_sparse_uploader & uploader, device_matrix * out, const layout_choice * choice = nullptr) const {
        const gpu_device gpu = gpu_device_of(shared_nbytes());
        gpu_matrix       m   = header;
        m.in_blocks          = m.in_blocks && !choice;
        const gpu_plan plan  = choice ? choose_only(m, gpu, choice->layout, choice->lanes) : choose(m, gpu);
        if (plan.candidates.empty()) {
            return false;
        }
        void * memory;
        CHECKED(cudaMalloc(&memory, static_cast<size_t>(plan.nbytes)));
        out->memory.reset(memory);
        check_status(uploader.begin(plan, memory));
        if (arrives_whole(plan)) {
            check_status(uploader.whole(*view, N_THREADS));
        } else {
            const macko_rows all = { rows.desc,         0, s.rows, rows.row_ptr.data(), 0, rows.values.data(),
                                     rows.deltas.data() };
            macko_view       checked;
            check_status(validate(all, &checked));
            check_status(uploader.rows(checked));
        }
        const int status = uploader.finish(&out->w, &out->verdict, &out->outgrown);
        if (choice && status == GGML_MACKO_STATUS_BAD_ARGUMENT) {
            return false;
        }
        check_status(status);
        return true;
    }

    // enough copies that none is in the L2 cache when it is used; none if the matrix cannot have that layout
    std::vector<device_matrix> upload_copies(cuda_sparse_uploader & uploader,
                                             const layout_choice *  choice = nullptr) const {
        std::vector<device_matrix> copies(1);
        if (!upload(uploader, &copies[0], choice)) {
            return {};
        }
        copies.resize(static_cast<size_t>(n_copies(std::max<int64_t>(base_of(copies[0].w).nbytes, 1 << 20))));
        for (size_t i = 1; i < copies.size(); i++) {
            upload(uploader, &copies[i], choice);
        }
        return copies;
    }

private:
    void make_dense(double density) {
        const uint64_t threshold = static_cast<uint64_t>(density * 4294967296.0);
        const double   least     = kind.pruned ? magnitude_of(density) : 0;
        dense.assign(static_cast<size_t>(s.rows * s.cols * value_nbytes(kind.type)), 0);
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < s.rows; r++) {
            uint64_t places = static_cast<uint64_t>(r + 1) * 0x9e3779b97f4a7c15ull ^
                              static_cast<uint64_t>(s.cols + 7) * 0xbf58476d1ce4e5b9ull;
            xorshift(places), xorshift(places), xorshift(places);
            uint64_t values = places * 77 + 5;
            for (int64_t i = r * s.cols; i < (r + 1) * s.cols; i++) {
                if (xorshift(places) >> 32 < threshold) {
                    const uint16_t bits = normal_f16(values, least, kind.significant_bits);
                    if (kind.type == GGML_MACKO_TYPE_F16) {
                        reinterpret_cast<uint16_t *>(dense.data())[i] = bits;
                    } else {
                        reinterpret_cast<float *>(dense.data())[i] = float_of_f16(bits);
                    }
                }
            }
        }
    }
};

// ---- products ----

// n columns of x and y on the device, and the expected last column of the product of a matrix.
struct operands {
    const file_matrix & file;
    int64_t             n;
    float *             x = nullptr, *y = nullptr;
    void *              x16 = nullptr;
    std::vector<double> want, bound; // per row: the product, and the error bound of float32 sums in any order

    operands(const file_matrix & f, int64_t n)
        : file(f), n(n), want(static_cast<size_t>(f.s.rows)), bound(static_cast<size_t>(f.s.rows)) {
        std::vector<float> host(static_cast<size_t>(f.s.cols * n));
        for (size_t i = 0; i < host.size(); i++) { // eight bits: rounding to 16-bit types changes nothing
            host[i] = static_cast<float>(static_cast<int>((i * 2654435761u & 0xffffffffu) >> 24) - 128) / 64.0f;
        }
        compute(host.data() + (n - 1) * f.s.cols);
        CHECKED(cudaMalloc(&x16, CUDA_SPARSE_X16_NBYTES));
        CHECKED(cudaMalloc(&x, host.size() * 4));
        CHECKED(cudaMalloc(&y, static_cast<size_t>(f.s.rows * n * 4)));
        CHECKED(cudaMemcpy(x, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    }
    ~operands() { cudaFree(x), cudaFree(y), cudaFree(x16); }
    operands(const operands &) = delete;

    cuda_sparse_mul_mat_params params() const { // of a matrix that w[0] is set to
        cuda_sparse_mul_mat_params p = {};
        p.n_matrices                 = 1;
        p.y[0]                       = y;
        p.ldy[0]                     = file.s.rows;
        p.row_end[0]                 = file.s.rows;
        p.x                          = x;
        p.ldx                        = file.s.cols;
        p.n                          = n;
        p.x16                        = x16;
        return p;
    }
    // Ends the program if the product queued by multiply() has an error above the bound times `slack`.
    template <typename F> void check_product(cudaStream_t stream, F && multiply, double slack = 1) const {
        CHECKED(cudaMemset(y, 0xff, static_cast<size_t>(file.s.rows * n * 4)));
        multiply();
        CHECKED(cudaStreamSynchronize(stream));
        std::vector<float> got(want.size());
        CHECKED(cudaMemcpy(got.data(), y + (n - 1) * file.s.rows, got.size() * 4, cudaMemcpyDeviceToHost));
        for (size_t r = 0; r < got.size(); r++) {
            if (!(std::fabs(static_cast<double>(got[r]) - want[r]) <= slack * bound[r])) {
                fprintf(stderr, "bench-gpu: %s, column %lld: row %zu is %.9g, should be %.9g, at most %.3g off\n",
                        file.name.c_str(), static_cast<long long>(n), r, static_cast<double>(got[r]), want[r],
                        slack * bound[r]);
                exit(1);
            }
        }
    }

private:
    void compute(const float * of_x) {
        const float largest = std::fabs(
            *std::max_element(of_x, of_x + file.s.cols, [](float u, float v) { return std::fabs(u) < std::fabs(v); }));
        const double rounding = static_cast<double>(largest) / 65278 * 1.0001; // x is 16-bit integers
        const bool   rounds   = code_bits(file.header.value_type) != 0;
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < file.s.rows; r++) {
            double sum = 0, magnitude = 0, weights = 0;
            for (int64_t c = 0; c < file.s.cols; c++) {
                const float  w       = element(file.dense.data(), file.kind.type, r * file.s.cols + c);
                const double product = static_cast<double>(w) * static_cast<double>(of_x[c]);
                sum += product;
                magnitude += std::fabs(product);
                weights += static_cast<double>(std::fabs(w));
            }
            want[static_cast<size_t>(r)]  = sum;
            bound[static_cast<size_t>(r)] = 3e-6 * magnitude + (rounds ? weights * rounding : 0);
        }
    }
};

// Tensor cores, which multiply more than eight columns, do not round sums to nearest, and each generation behaves
// differently: this multiple of the error of float32 sums is acceptable. One wrong weight exceeds it.
constexpr double TENSOR_CORES = 8;

// Each launch may start before the previous one has ended, as in the device's token graph, unless `alone`.
double time_product(cudaStream_t stream, const std::vector<device_matrix> & copies, cuda_sparse_mul_mat_params p,
                    bool alone = false) {
    p.programmatic = !alone;
    return time_us(stream, static_cast<int>(copies.size()), [&](int i) {
        p.w[0] = &copies[static_cast<size_t>(i)].w;
        CHECKED(cuda_sparse_mul_mat(p, stream));
    });
}

// Microseconds of cuBLAS's fastest way to multiply n columns by a dense matrix of F16 or F32 values.
double dense_us(cudaStream_t stream, shape s, int64_t n, bool f32) {
    static cublasHandle_t handle = nullptr;
    const cudaDataType    type   = f32 ? CUDA_R_32F : CUDA_R_16F;
    const int64_t         size = f32 ? 4 : 2, nbytes = s.rows * s.cols * size;
    const int             copies = n_copies(nbytes), r = static_cast<int>(s.rows), c = static_cast<int>(s.cols),
              k = static_cast<int>(n);
    void *      workspace, *w, *x, *y;
    const float one = 1, zero = 0;
    int         failed = 0;
    if (!handle) {
        failed |= cublasCreate(&handle);
    }
    CHECKED(cudaMalloc(&workspace, CUBLAS_WORKSPACE_NBYTES));
    CHECKED(cudaMalloc(&w, static_cast<size_t>(nbytes * copies)));
    CHECKED(cudaMalloc(&x, static_cast<size_t>(s.cols * n * size + 64)));
    CHECKED(cudaMalloc(&y, static_cast<size_t>(s.rows * n * 4)));
    fill(stream, w, nbytes * copies / 4);
    fill(stream, x, s.cols * n * size / 4);
    failed |= cublasSetStream(handle, stream) | cublasSetWorkspace(handle, workspace, CUBLAS_WORKSPACE_NBYTES);
    const auto copy       = [&](int i) { return static_cast<uint8_t *>(w) + nbytes * i; };
    double     best       = time_us(stream, copies, [&](int i) {
        failed |= cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, r, k, c, &one, copy(i), type, c, x, type, c, &zero, y,
                                         type, r, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
    const auto transposed = [&](int i) {
        failed |= cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, k, r, c, &one, x, type, c, copy(i), type, c, &zero, y,
                               type, k, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    };
    best = std::min(best, time_us(stream, copies, transposed));
    if (n == 1) {
        best = std::min(
            best, time_us(stream, copies, [&](int i) {
                failed |= f32 ? cublasSgemv(handle, CUBLAS_OP_T, c, r, &one, reinterpret_cast<const float *>(copy(i)),
                                            c, static_cast<const float *>(x), 1, &zero, static_cast<float *>(y), 1)
                              : cublasHSHgemvStridedBatched(
                                    handle, CUBLAS_OP_T, c, r, &one, reinterpret_cast<const __half *>(copy(i)), c, 0,
                                    static_cast<const __half *>(x), 1, 0, &zero, static_cast<__half *>(y), 1, 0, 1);
            }));
    }
    for (void * memory : { workspace, w, x, y }) {
        CHECKED(cudaFree(memory));
    }
    if (failed) {
        fprintf(stderr, "bench-gpu: cuBLAS failed\n");
        exit(1);
    }
    return best;
}

std::unique_ptr<cuda_sparse_uploader> make_uploader() {
    std::unique_ptr<cuda_sparse_uploader> uploader;
    check_status(cuda_sparse_uploader::create(0, &uploader));
    return uploader;
}

// Calls f(matrix) for all requested matrices.
template <typename F> void for_each_matrix(const bench_options & options, F && f) {
    for (const std::string & of : options.shapes) {
        for (const std::string & density : options.densities) {
            for (const std::string & values : options.values) {
                const shape        s    = parse_shape(of);
                const value_kind & kind = find_kind(values);
                if (options.wants(file_matrix::name_of(s, density, kind))) {
                    f(file_matrix(s, density, kind));
                    fflush(stdout);
                }
            }
        }
    }
}

std::vector<int64_t> columns_of(const bench_options & options) {
    std::vector<int64_t> columns;
    for (const std::string & n : options.columns) {
        columns.push_back(std::max(1LL, atoll(n.c_str())));
    }
    return columns;
}

int64_t panel_rows(shape s) {
    cudaDeviceProp device;
    CHECKED(cudaGetDeviceProperties(&device, 0));
    const size_t nbytes = op_mul_mat_max_panel_nbytes(device.totalGlobalMem);
    return op_mul_mat_panel_rows(s.rows, s.cols, static_cast<int64_t>(nbytes));
}

} // namespace

void bench_products(const bench_options & options, cudaStream_t stream) {
    const auto                 uploader = make_uploader();
    const std::vector<int64_t> columns  = columns_of(options);
    std::vector<double>        log_speedup(columns.size());
    int                        n_matrices = 0;
    for_each_matrix(options, [&](const file_matrix & file) {
        const std::vector<device_matrix> copies = file.upload_copies(*uploader);
        const gpu_layout &               w      = copies.back().w;
        n_matrices++;
        for (size_t i = 0; i < columns.size(); i++) {
            const operands             o(file, columns[i]);
            cuda_sparse_mul_mat_params p = o.params();
            p.w[0]                       = &w;
            o.check_product(
                stream, [&] { CHECKED(cuda_sparse_mul_mat(p, stream)); }, columns[i] > 8 ? TENSOR_CORES : 1);
            const double dense   = dense_us(stream, file.s, columns[i], file.kind.type == GGML_MACKO_TYPE_F32);
            const double chained = time_product(stream, copies, p), alone = time_product(stream, copies, p, true);
            const double best = std::min(chained, alone), kept = static_cast<double>(base_of(w).nbytes);
            log_speedup[i] += std::log(dense / best);
            printf("%-28s n %-3lld %-9s %d bits %8.1f MB: %8.2f us, alone %8.2f, dense %8.2f, %5.2fx, %4.1f%% of the "
                   "bandwidth\n",
                   file.name.c_str(), static_cast<long long>(columns[i]), copies.back().name().c_str(),
                   numbers_of(copies.back().verdict.shape).delta_bits, kept * 1e-6, chained, alone, dense, dense / best,
                   100 * kept / best / options.bandwidth);
        }
    });
    for (size_t i = 0; i < columns.size() && n_matrices > 0; i++) {
        printf("n %lld: %.3fx dense, geometric mean\n", static_cast<long long>(columns[i]),
               std::exp(log_speedup[i] / n_matrices));
    }
}

// One panel at a time, as for products with many columns.
void bench_densify(const bench_options & options, cudaStream_t stream) {
    const auto uploader = make_uploader();
    for_each_matrix(options, [&](const file_matrix & file) {
        const std::vector<device_matrix> copies = file.upload_copies(*uploader);
        const int64_t                    panel = panel_rows(file.s), ld = (file.s.cols + 7) / 8 * 8;
        void *                           dst;
        CHECKED(cudaMalloc(&dst, static_cast<size_t>(panel * ld * value_nbytes(file.kind.type))));
        const double t = time_us(stream, static_cast<int>(copies.size()), [&](int i) {
            for (int64_t r = 0; r < file.s.rows; r += panel) {
                CHECKED(cuda_sparse_densify(copies[static_cast<size_t>(i)].w, r, std::min(file.s.rows, r + panel), dst,
                                            ld, stream));
            }
        });
        printf("%-28s %-9s: %8.2f us, %4.0f G elements/s\n", file.name.c_str(), copies[0].name().c_str(), t,
               static_cast<double>(file.s.rows * file.s.cols) / t * 1e-3);
        CHECKED(cudaFree(dst));
    });
}

// norm + q, k, v; o + residual; norm + gate, up + SiLU; down + residual
void bench_layer(const bench_options & options, cudaStream_t stream) {
    constexpr int64_t EMBD = 4096, FF = 11008;
    constexpr int     LAYERS = 8, N = 4;
    struct product {
        const char * name;
        int          n_matrices;
        shape        s;
        bool         norm, residual, silu;
    };
    static const product       products[N] = { { "q, k, v", 3, { EMBD, EMBD }, true, false, false },
                                               { "o", 1, { EMBD, EMBD }, false, true, false },
                                               { "gate, up", 2, { FF, EMBD }, true, false, true },
                                               { "down", 1, { EMBD, FF }, false, true, false } };
    const auto                 uploader    = make_uploader();
    float *                    x, *y, *norm;
    const std::vector<int64_t> columns = columns_of(options);
    const int64_t              most    = *std::max_element(columns.begin(), columns.end());
    CHECKED(cudaMalloc(&x, FF * 4 * most));
    CHECKED(cudaMalloc(&y, 3 * FF * 4 * most));
    CHECKED(cudaMalloc(&norm, FF * 4));
    void * x16 = nullptr;
    CHECKED(cudaMalloc(&x16, CUDA_SPARSE_X16_NBYTES));
    CHECKED(cudaMemset(x, 0, FF * 4 * most));
    CHECKED(cudaMemset(norm, 0, FF * 4));
    for (const std::string & density : options.densities) {
        for (const std::string & values : options.values) {
            const std::string name = "layer " + values + " " + density;
            if (!options.wants(name)) {
                continue;
            }
            std::vector<cuda_sparse_mul_mat_params> calls(LAYERS * N);
            std::vector<device_matrix>              matrices(LAYERS * 7);
            size_t                                  used = 0;
            for (int f = 0; f < N; f++) {
                const product &   of = products[f];
                const file_matrix file(of.s, density, find_kind(values));
                for (int layer = 0; layer < LAYERS; layer++) {
                    cuda_sparse_mul_mat_params & p = calls[static_cast<size_t>(layer * N + f)];
                    p.n_matrices                   = of.n_matrices;
                    for (int i = 0; i < of.n_matrices; i++) {
                        file.upload(*uploader, &matrices[used]);
                        p.w[i]        = &matrices[used++].w;
                        p.y[i]        = y + i * FF * most;
                        p.ldy[i]      = of.s.rows;
                        p.row_end[i]  = of.s.rows;
                        p.residual[i] = of.residual ? p.y[i] : nullptr;
                    }
                    p.x            = x;
                    p.ldx          = of.s.cols;
                    p.norm_weight  = of.norm ? norm : nullptr;
                    p.norm_eps     = 1e-5f;
                    p.silu_mul     = of.silu;
                    p.programmatic = true;
                    p.x16          = x16;
                }
            }
            const auto time = [&](int first, int step) {
                return time_us(stream, LAYERS * N / step, [&](int i) {
                    CHECKED(cuda_sparse_mul_mat(calls[static_cast<size_t>(i * step + first)], stream));
                });
            };
            for (const int64_t n : columns) {
                for (cuda_sparse_mul_mat_params & p : calls) {
                    p.n = n;
                }
                printf("%s, %lld columns:", name.c_str(), static_cast<long long>(n));
                for (int f = 0; f < N; f++) {
                    printf(" %s %.2f us,", products[f].name, time(f, N));
                }
                printf(" all in turn %.2f us\n", N * time(0, 1));
                fflush(stdout);
            }
        }
    }
    for (void * memory : { static_cast<void *>(x), static_cast<void *>(y), static_cast<void *>(norm), x16 }) {
        CHECKED(cudaFree(memory));
    }
}

// ---- the plugin's choice, compared with the alternatives ----

namespace {

struct alternative {
    std::string name;
    double      us;
};

// Quality of the choices of one kind.
struct choice_summary {
    static constexpr double CLOSE = 0.05; // two runs differ by this much

    const char * what;
    int          n = 0, n_close = 0;
    double       worst      = 0;
    std::string  worst_case = {};

    // prints a line; the first alternative is the plugin's choice
    void add(const std::string & name, const std::vector<alternative> & all) {
        const auto   best   = std::min_element(all.begin(), all.end(), [](auto & a, auto & b) { return a.us < b.us; });
        const double behind = all[0].us / best->us - 1;
        printf("%s, %s: *", name.c_str(), what);
        for (const alternative & a : all) {
            printf(" %s %.2f", a.name.c_str(), a.us);
        }
        printf(" us; %.1f %% behind %s\n", 100 * behind, best->name.c_str());
        n++;
        n_close += behind <= CLOSE;
        if (behind > worst) {
            worst      = behind;
            worst_case = name + ": " + all[0].name + " is behind " + best->name;
        }
    }
    void print() const {
        printf("%s: within %.0f %% of the best in %d of %d cases; worst: %.1f %% (%s)\n", what, 100 * CLOSE, n_close, n,
               100 * worst, worst_case.c_str());
    }
};

struct tune_bench {
    cudaStream_t                          stream;
    std::unique_ptr<cuda_sparse_uploader> uploader = make_uploader();
    std::unique_ptr<cublas_library>       cublas   = cublas_open();
    op_context                            ctx;
    choice_summary                        layouts{ "one column" }, several{ "several columns" };

    explicit tune_bench(cudaStream_t s) : stream(s) {
        cuda_device_info info = {};
        CHECKED(cuda_current_device(&info));
        CHECKED(op_compute_capability(&ctx.cc));
        ctx.stream        = stream;
        ctx.n_sm          = info.multiprocessors;
        ctx.shared_nbytes = info.shared_nbytes;
        ctx.cublas        = cublas.get();
        CHECKED(cudaMalloc(&ctx.cublas_workspace, CUBLAS_WORKSPACE_NBYTES));
    }
    ~tune_bench() { cudaFree(ctx.cublas_workspace); }
    tune_bench(const tune_bench &) = delete;

    double time_checked(const std::vector<device_matrix> & copies, const operands & o, bool with_x16) const {
        cuda_sparse_mul_mat_params p = o.params();
        p.w[0]                       = &copies.back().w;
        p.x16                        = with_x16 ? o.x16 : nullptr;
        o.check_product(stream, [&] { CHECKED(cuda_sparse_mul_mat(p, stream)); }, with_x16 ? TENSOR_CORES : 1);
        return time_product(stream, copies, p);
    }

    // converts x to 16 bits, then makes one panel of rows at a time dense and multiplies it; the device fills the next
    // panel at the same time
    double time_dense_rows(const std::vector<device_matrix> & copies, const operands & o) const {
        const int64_t rows = o.file.s.rows, cols = o.file.s.cols, n = o.n, panel = panel_rows(o.file.s),
                      ld  = (cols + 7) & ~int64_t(7);
        const op_tensor w = { nullptr,
                              TYPE_F16,
                              { cols, rows, 1, 1 },
                              { 2, cols * 2, rows * cols * 2, rows * cols * 2 } },
                        x = { reinterpret_cast<char *>(o.x),
                              TYPE_F32,
                              { cols, n, 1, 1 },
                              { 4, cols * 4, n * cols * 4, n * cols * 4 } },
                        y = { reinterpret_cast<char *>(o.y),
                              TYPE_F32,
                              { rows, n, 1, 1 },
                              { 4, rows * 4, n * rows * 4, n * rows * 4 } };
        char *dense, *scratch;
        CHECKED(cudaMalloc(&dense, static_cast<size_t>(panel * ld * 2)));
        CHECKED(cudaMalloc(&scratch, op_mul_mat_16_scratch_nbytes(w, x)));
        const auto run = [&](int i) {
            CHECKED(op_mul_mat_x16(ctx, TYPE_F16, x, scratch));
            for (int64_t r = 0; r < rows; r += panel) {
                const int64_t end = std::min(rows, r + panel);
                CHECKED(cuda_sparse_densify(copies[static_cast<size_t>(i)].w, r, end, dense, ld, stream));
                CHECKED(op_mul_mat_16(ctx, TYPE_F16, dense, ld, end - r, x, scratch, y, r, scratch));
            }
        };
        o.check_product(stream, [&] { run(0); }, TENSOR_CORES);
        const double t = time_us(stream, static_cast<int>(copies.size()), run);
        CHECKED(cudaFree(dense));
        CHECKED(cudaFree(scratch));
        return t;
    }

    void tune_layouts(const file_matrix & file, const std::vector<device_matrix> & copies) {
        const operands           o(file, 1);
        const device_matrix &    chosen = copies[0];
        std::vector<alternative> all    = { { chosen.name(), time_checked(copies, o, false) } };
        for (const char * layout : { "MACKO", "INLINE_DELTA", "EXP_CODED" }) {
            for (const int32_t lanes : { 8, 16, 32 }) {
                const bool          has_lanes = strcmp(layout, "MACKO") != 0;
                const layout_choice choice    = { layout, has_lanes ? lanes : 0 };
                if ((!has_lanes && lanes != 8) || (layout == std::string(layout_name(chosen.w)) &&
                                                   choice.lanes == numbers_of(chosen.verdict.shape).lanes)) {
                    continue;
                }
                const std::vector<device_matrix> others = file.upload_copies(*uploader, &choice);
                if (!others.empty()) {
                    all.push_back({ others[0].name(), time_checked(others, o, false) });
                }
            }
        }
        layouts.add(file.name, all);
    }

    void tune_columns(const file_matrix & file, const std::vector<device_matrix> & copies, int64_t n) {
        const operands           o(file, n);
        const bool               chooses_dense = n > cuda_sparse_mul_mat_max_n(copies[0].w, false);
        std::vector<alternative> all           = { { "sparse", time_checked(copies, o, true) },
                                                   { "dense rows", time_dense_rows(copies, o) },
                                                   { "passes of 8", time_checked(copies, o, false) } };
        std::swap(all[0], all[chooses_dense ? 1 : 0]);
        several.add(file.name + " n " + std::to_string(n), all);
    }
};

} // namespace

void bench_tune(const bench_options & options, cudaStream_t stream) {
    tune_bench bench(stream);
    for_each_matrix(options, [&](const file_matrix & file) {
        if (file.kind.type != GGML_MACKO_TYPE_F16) {
            fprintf(stderr, "bench-gpu: tune is for F16 values\n");
            exit(2);
        }
        const std::vector<device_matrix> copies = file.upload_copies(*bench.uploader);
        for (const int64_t n : columns_of(options)) {
            bench.tune_columns(file, copies, n);
        }
        bench.tune_layouts(file, copies);
    });
    bench.layouts.print();
    bench.several.print();
}

} // namespace macko::cuda
