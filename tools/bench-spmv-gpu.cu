// Times the sparse products of the GPU over random matrices, against dense F16 products of cuBLAS and CSR products of
// cuSPARSE (both are opened if they are installed, never linked), with bytes read, fraction of the measured read
// bandwidth, and speedup. Every result is checked against float64; the x of these checks have eight bits, so that
// rounding them to 16-bit types changes nothing. Quantized values: the same matrices, packed (FORMAT.md section 7).
//
//   [--shapes paper|acceptance|ROWSxCOLS,...] [--densities .5,.3,.1] [--columns 1,4] [--values f16,pruned,...] [--csr]
//   [--unpack] [--layer] [--tune] [--json FILE]
// Values are normal numbers: f16, q8_0 and q4_0 at random places, as in the MACKO paper; pruned are F16 ones of which
// magnitude pruning left the largest; f16-8 and pruned-8 are the same with 8 significant bits, as in models trained in
// BF16.
//
//   --tune [--shapes ...] [--densities ...] [--columns ...] [--values ...] [--json FILE]: see bench-tune-gpu.cuh
//
// A time is the median over replays of a graph that runs the product once per copy of the matrix; there are enough
// copies that none is in the L2 cache when its turn comes. "chained": each launch may start before the one ahead of it
// has ended (programmatic dependent launch), as in the device's token graph.
//
// Linked into the plugin, which has the kernels already. `macko bench --gpu` calls it in a child process, because it
// prints and ends the process at the first error; so does `python -m ggml_macko.benchmark.bench_gpu OPTIONS`.
#include "codec/macko/encode.h"
#include "cuda/lib/common.cuh"
#include "cuda/lib/cublas.h"
#include "cuda/ops/ops.h"
#include "cuda/sparse/mul-mat.cuh"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace macko::cuda {

namespace {

void check(cudaError_t error, const char * what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "bench-spmv-gpu: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}
void check_status(int status) {
    if (status != GGML_MACKO_STATUS_OK) {
        fprintf(stderr, "bench-spmv-gpu: %s\n", ggml_macko_last_error());
        exit(1);
    }
}
#define CHECKED(call) check((call), #call)

struct shape {
    int64_t rows, cols;
};

struct value_type {
    const char * name;
    int32_t      type;
    bool         pruned; // by magnitude
    int          significant_bits;
};
const value_type VALUE_TYPES[] = {
    { "f16", GGML_MACKO_TYPE_F16, false, 11 },   { "f16-8", GGML_MACKO_TYPE_F16, false, 8 },
    { "pruned", GGML_MACKO_TYPE_F16, true, 11 }, { "pruned-8", GGML_MACKO_TYPE_F16, true, 8 },
    { "q8_0", GGML_MACKO_TYPE_Q8_0, false, 11 }, { "q4_0", GGML_MACKO_TYPE_Q4_0, false, 11 }
};

// MACKO paper, appendix H
const shape PAPER[] = {
    { 4096, 4096 },   { 8192, 8192 },  { 8192, 29568 }, { 32000, 5120 },  { 32000, 8192 },  { 28672, 8192 },
    { 5120, 5120 },   { 5120, 13824 }, { 3584, 20480 }, { 4096, 11008 },  { 13824, 5120 },  { 18944, 3584 },
    { 14336, 4096 },  { 4096, 14336 }, { 8192, 28672 }, { 11008, 4096 },  { 32000, 4096 },  { 20480, 3584 },
    { 3584, 18944 },  { 21504, 7168 }, { 7168, 7168 },  { 28672, 7168 },  { 7168, 28672 },  { 27648, 9216 },
    { 9216, 9216 },   { 36864, 9216 }, { 9216, 36864 }, { 36864, 12288 }, { 12288, 12288 }, { 49152, 12288 },
    { 12288, 49152 },
};
const shape ACCEPTANCE[] = { { 36864, 12288 }, { 8192, 28672 }, { 11008, 4096 }, { 4096, 11008 }, { 4096, 4096 } };

// ---- random matrices in the file's encoding ----

struct random_matrix {
    macko_desc            desc;
    int64_t               padded;
    std::vector<uint16_t> values;
    std::vector<uint8_t>  deltas;
    std::vector<int32_t>  row_ptr;
    int64_t file_nbytes() const { return padded * 2 + deltas_nbytes(padded, desc.delta_bits) + 4 * (desc.rows + 1); }
};

uint64_t xorshift(uint64_t & s) {
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return s;
}

// the width of deltas that makes the file smallest (MACKO paper, section 4.1)
int best_delta_bits(double density) {
    int    best     = 1;
    double smallest = 1e300;
    for (const int bits : { 1, 2, 4, 8 }) {
        const double nbits = (16 + bits) / (1 - std::pow(1 - density, 1 << bits));
        if (nbits < smallest) {
            smallest = nbits;
            best     = bits;
        }
    }
    return best;
}

// Bits of a normal number of deviation 1/64, as weights are, of at least that magnitude and with so many significant
// bits; never 0.
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

// the magnitude that this share of normal numbers of deviation 1/64 exceeds
double magnitude_of(double share) {
    double low = 0, high = 1;
    for (int i = 0; i < 60; i++) {
        const double middle                                            = (low + high) / 2;
        (std::erfc(middle * 64 / std::sqrt(2.0)) > share ? low : high) = middle;
    }
    return low;
}

random_matrix make_random(int64_t rows, int64_t cols, double density, const value_type & type) {
    random_matrix        m;
    const int            bits = best_delta_bits(density), reach = 1 << bits;
    const uint64_t       threshold = static_cast<uint64_t>(density * 4294967296.0);
    const double         least     = type.pruned ? magnitude_of(density) : 0;
    std::vector<int64_t> nnz(static_cast<size_t>(rows));
    m.desc = { rows, cols, GGML_MACKO_TYPE_F16, bits, 0 };
    m.row_ptr.assign(static_cast<size_t>(rows + 1), 0);
    const auto seed_of = [&](int64_t r) {
        uint64_t s = static_cast<uint64_t>(r + 1) * 0x9e3779b97f4a7c15ull ^
                     static_cast<uint64_t>(cols + 7) * 0xbf58476d1ce4e5b9ull;
        xorshift(s), xorshift(s), xorshift(s);
        return s;
    };
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        uint64_t s    = seed_of(r);
        int64_t  last = -1, n = 0;
        for (int64_t c = 0; c < cols; c++) {
            if (xorshift(s) >> 32 < threshold) {
                n += 1 + (c - last - 1) / reach;
                last = c;
                nnz[static_cast<size_t>(r)]++;
            }
        }
        m.row_ptr[static_cast<size_t>(r + 1)] = static_cast<int32_t>(n);
    }
    for (int64_t r = 0; r < rows; r++) {
        m.row_ptr[static_cast<size_t>(r + 1)] += m.row_ptr[static_cast<size_t>(r)];
        m.desc.nnz += nnz[static_cast<size_t>(r)];
    }
    m.padded = n_padded(m.row_ptr[static_cast<size_t>(rows)]);
    m.values.assign(static_cast<size_t>(m.padded), 0);
    m.deltas.assign(static_cast<size_t>(deltas_nbytes(m.padded, bits)), 0);
    std::vector<uint8_t> deltas(static_cast<size_t>(m.padded), 0);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        uint64_t s = seed_of(r), t = s * 77 + 5;
        int64_t  last = -1;
        size_t   k    = static_cast<size_t>(m.row_ptr[static_cast<size_t>(r)]);
        for (int64_t c = 0; c < cols; c++) {
            if (xorshift(s) >> 32 < threshold) {
                int64_t gap = c - last - 1;
                for (; gap >= reach; gap -= reach) {
                    deltas[k++] = static_cast<uint8_t>(reach - 1);
                }
                deltas[k]     = static_cast<uint8_t>(gap);
                m.values[k++] = normal_f16(t, least, type.significant_bits);
                last          = c;
            }
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < m.padded / 8; i++) { // 8 deltas fill whole bytes
        for (int64_t k = i * 8; k < i * 8 + 8; k++) {
            m.deltas[static_cast<size_t>(k * bits / 8)] |=
                static_cast<uint8_t>(deltas[static_cast<size_t>(k)] << (k * bits % 8));
        }
    }
    return m;
}

double f16_to_double(uint16_t bits) {
    __half_raw raw;
    raw.x = bits;
    return static_cast<double>(__half2float(__half(raw)));
}

// A product in float64, with what each element of the GPU's may be off: sums in float32, in any order.
struct reference {
    std::vector<double> y, bound;

    explicit reference(int64_t rows) : y(static_cast<size_t>(rows)), bound(y) {}
    // magnitude: sum of |w x|; more: what x in 16 bits adds
    void set(int64_t row, double sum, double magnitude, double more) {
        y[static_cast<size_t>(row)]     = sum;
        bound[static_cast<size_t>(row)] = 3e-6 * magnitude + more;
    }
    // ends the program with the first row of the product on the GPU that is off by more than its bound, times `slack`
    void compare(const float * device_y, const char * what, double slack = 1) const {
        std::vector<float> got(y.size());
        CHECKED(cudaMemcpy(got.data(), device_y, got.size() * 4, cudaMemcpyDeviceToHost));
        for (size_t r = 0; r < y.size(); r++) {
            if (!(std::fabs(static_cast<double>(got[r]) - y[r]) <= slack * bound[r])) {
                fprintf(stderr, "bench-spmv-gpu: %s: row %zu is %.9g, should be %.9g, at most %.3g off\n", what, r,
                        static_cast<double>(got[r]), y[r], slack * bound[r]);
                exit(1);
            }
        }
    }
};

reference reference_of(const random_matrix & m, const float * x) {
    reference want(m.desc.rows);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < m.desc.rows; r++) {
        int64_t c   = -1;
        double  sum = 0, magnitude = 0;
        for (int64_t k = m.row_ptr[static_cast<size_t>(r)]; k < m.row_ptr[static_cast<size_t>(r + 1)]; k++) {
            c += delta_code(m.deltas.data(), k, m.desc.delta_bits) + 1;
            const double product = f16_to_double(m.values[static_cast<size_t>(k)]) * static_cast<double>(x[c]);
            sum += product;
            magnitude += std::fabs(product);
        }
        want.set(r, sum, magnitude, 0);
    }
    return want;
}

// ---- a matrix as the file has it, and as the device gets it ----

// a product with n columns of x, all of them side by side, of a matrix that w[0] is set to
cuda_sparse_mul_mat_params product_of(int64_t rows, int64_t cols, int64_t n, const float * x, float * y) {
    cuda_sparse_mul_mat_params p = {};
    p.n_matrices                 = 1;
    p.y[0]                       = y;
    p.ldy[0]                     = rows;
    p.row_end[0]                 = rows;
    p.x                          = x;
    p.ldx                        = cols;
    p.n                          = n;
    return p;
}

// a layout that is asked for (enum cuda_sparse_layout), and runs per row
struct layout_choice {
    int32_t layout, lanes;
};

struct file_matrix {
    random_matrix   m;
    int32_t         value_type;
    packed_matrix   packed; // of quantized values, as what follows
    packed_view     view;
    quantized_shape shape = {};

    file_matrix(int64_t rows, int64_t cols, double density, const macko::cuda::value_type & values,
                int64_t shared_nbytes)
        : m(make_random(rows, cols, density, values)), value_type(values.type) {
        if (!is_quant_type(value_type)) {
            return;
        }
        std::vector<uint16_t> dense(static_cast<size_t>(rows * cols), 0);
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            int64_t c = r * cols - 1;
            for (int64_t k = m.row_ptr[static_cast<size_t>(r)]; k < m.row_ptr[static_cast<size_t>(r + 1)]; k++) {
                c += delta_code(m.deltas.data(), k, m.desc.delta_bits) + 1;
                dense[static_cast<size_t>(c)] = m.values[static_cast<size_t>(k)];
            }
        }
        check_status(pack(dense.data(), { m.desc, value_type, -1 }, N_THREADS, &packed));
        check_status(check_packed(packed.arrays(), N_THREADS, &view));
        shape = cuda_quantized_shape(packed.desc, shared_nbytes);
    }
    file_matrix(const file_matrix &) = delete;

    bool    quantized() const { return !packed.values.empty(); }
    int64_t file_nbytes() const {
        return quantized()
                   ? static_cast<int64_t>(packed.values.size() + packed.index.size() + packed.row_ptr.size() * 4)
                   : m.file_nbytes();
    }
    // Bytes that upload() takes. choice: more lanes than a matrix would get by itself take more.
    int64_t nbytes(const layout_choice * choice = nullptr) const {
        if (quantized()) {
            return cuda_quantized_bind(packed.desc, shape, cuda_quantized_max_outliers(packed.desc, shape), nullptr)
                .nbytes;
        }
        const int64_t any = cuda_sparse_nbytes(m.desc, m.padded);
        return choice ? std::max(any, cuda_sparse_bind(m.desc, m.padded, choice->layout, choice->lanes, nullptr).nbytes)
                      : any;
    }

    // Makes the matrix in dst, in the layout that the plugin chooses or in another (choice; not of quantized values).
    // false: the matrix cannot have that choice. ms: milliseconds on the host, and until the matrix is complete.
    bool upload(cuda_sparse_uploader & uploader, void * dst, cuda_sparse_matrix * out, double ms[2],
                const layout_choice * choice = nullptr) const {
        const auto now = [] {
            return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
                .count();
        };
        const double t0 = now();
        double       t1 = t0;
        if (quantized()) {
            cuda_memory outgrown;
            check_status(uploader.packed(view, shape, dst, N_THREADS, out, &outgrown));
            if (outgrown) {
                fprintf(stderr, "bench-spmv-gpu: a random matrix outgrew its memory\n");
                exit(1);
            }
        } else {
            const macko_rows all = { m.desc, 0, m.desc.rows, m.row_ptr.data(), 0, m.values.data(), m.deltas.data() };
            macko_view       checked;
            check_status(validate(all, &checked));
            check_status(uploader.begin(m.desc, m.padded, dst));
            check_status(uploader.rows(checked));
            t1               = now();
            const int status = choice ? uploader.finish(out, choice->layout, choice->lanes) : uploader.finish(out);
            if (choice && status == GGML_MACKO_STATUS_BAD_ARGUMENT) {
                return false;
            }
            check_status(status);
        }
        ms[0] = t1 - t0;
        ms[1] = now() - t1;
        return true;
    }

    reference product(const float * x) const {
        if (!quantized()) {
            return reference_of(m, x);
        }
        const double rounding = static_cast<double>(*std::max_element(
                                    x, x + m.desc.cols, [](float u, float v) { return std::fabs(u) < std::fabs(v); })) /
                                65534 * 1.0001;
        reference want(m.desc.rows);
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < m.desc.rows; r++) {
            int64_t k   = packed.row_ptr[static_cast<size_t>(r)];
            double  sum = 0, magnitude = 0, weights = 0;
            view.for_each_column(r, [&](int64_t c) {
                const uint8_t * block = packed.values.data() + k / QUANT_BLOCK * quant_block_nbytes(value_type);
                const double    w     = static_cast<double>(float_of_f16(quant_scale_bits(block))) *
                                 quant_at(block, value_type, k++ % QUANT_BLOCK),
                             product = w * static_cast<double>(x[c]);
                sum += product;
                magnitude += std::fabs(product);
                weights += std::fabs(w);
            });
            want.set(r, sum, magnitude, weights * std::fabs(rounding));
        }
        return want;
    }

private:
    static constexpr int N_THREADS = 16;
};

// bytes that a product reads: of the groups that are there, not of those reserved
double read_nbytes(const cuda_sparse_matrix & w) {
    if (w.layout == CUDA_SPARSE_LAYOUT_QUANTIZED) {
        std::vector<uint8_t> records(static_cast<size_t>(w.rows * quantized_row_nbytes(w.lanes)));
        CHECKED(cudaMemcpy(records.data(), w.row_ptr, records.size(), cudaMemcpyDeviceToHost));
        int64_t groups = 0, segments = 0, n_outliers = 0;
        for (int64_t r = 0; r < w.rows; r++) {
            cuda_quantized_row head;
            memcpy(&head, records.data() + r * quantized_row_nbytes(w.lanes), sizeof(head));
            groups += head.n_groups;
            segments += quantized_segments(head, w.lanes);
            n_outliers += head.n_outliers;
        }
        return static_cast<double>(groups * (4 * (quantized_value_words(w.value_type) + w.delta_bits) + 2) +
                                   segments * static_cast<int64_t>(sizeof(cuda_quantized_segment)) +
                                   w.rows * quantized_row_nbytes(w.lanes) +
                                   n_outliers * static_cast<int64_t>(sizeof(cuda_sparse_outlier)));
    }
    int32_t end = 0;
    CHECKED(cudaMemcpy(&end, w.row_ptr + w.rows, 4, cudaMemcpyDeviceToHost));
    double of_rows = static_cast<double>(w.rows) * (w.lanes * 2 + 4);
    if (w.tails) {
        std::vector<uint16_t> tails(static_cast<size_t>(w.rows));
        CHECKED(cudaMemcpy(tails.data(), w.tails, tails.size() * 2, cudaMemcpyDeviceToHost));
        for (const uint16_t tail : tails) {
            end -= tail_unused(tail);
        }
        const int64_t group = w.layout == CUDA_SPARSE_LAYOUT_CODED ? coded_group_nbytes(w.delta_bits) : 16;
        return static_cast<double>(end * group) + of_rows + static_cast<double>(w.rows) * 2;
    }
    return end * (static_cast<double>(value_nbytes(w.type)) + w.delta_bits / 8.0) + of_rows;
}

// the same matrix, copied as it is to another place
template <typename T> static void move(T *& pointer, int64_t nbytes) {
    pointer = pointer ? reinterpret_cast<T *>(reinterpret_cast<uint8_t *>(pointer) + nbytes) : nullptr;
}
cuda_sparse_matrix moved(cuda_sparse_matrix w, int64_t nbytes) {
    move(w.values, nbytes), move(w.deltas, nbytes), move(w.bases, nbytes), move(w.tails, nbytes),
        move(w.row_ptr, nbytes), move(w.outliers, nbytes);
    return w;
}

// ---- timing ----

constexpr double COLD_NBYTES = 4e8; // copies of a matrix together: several times any L2

int n_copies(double nbytes) { return std::max(2, static_cast<int>(std::ceil(COLD_NBYTES / nbytes)) + 1); }

// median microseconds of one call of run(i); i goes through 0 ... n-1
double time_us(cudaStream_t stream, int n, const std::function<void(int)> & run) {
    constexpr int   REPEATS = 11;
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    const int       calls = std::max(n, 8);
    CHECKED(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < calls; i++) {
        run(i % n);
    }
    CHECKED(cudaStreamEndCapture(stream, &graph));
    CHECKED(cudaGraphInstantiate(&exec, graph, 0));
    CHECKED(cudaGraphLaunch(exec, stream));
    cudaEvent_t begin, end;
    CHECKED(cudaEventCreate(&begin));
    CHECKED(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < REPEATS; i++) {
        CHECKED(cudaEventRecord(begin, stream));
        CHECKED(cudaGraphLaunch(exec, stream));
        CHECKED(cudaEventRecord(end, stream));
        CHECKED(cudaEventSynchronize(end));
        float ms = 0;
        CHECKED(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms);
    }
    CHECKED(cudaEventDestroy(begin));
    CHECKED(cudaEventDestroy(end));
    CHECKED(cudaGraphExecDestroy(exec));
    CHECKED(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[REPEATS / 2]) * 1e3 / calls;
}

__global__ void read_kernel(const uint4 * p, int64_t n, uint32_t * out) {
    uint32_t      sum    = 0;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] = load_streaming(p + i + k * stride);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
        }
    }
    if (sum == 0x12345678) {
        *out = sum;
    }
}

// pairs of F16 values of both signs, magnitudes 1/2 ... 1: zeros would flatter the dense products
__global__ void fill_kernel(uint32_t * p, int64_t n) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
        h ^= h >> 15;
        p[i] = (h & 0x83ff83ffu) | 0x38003800u;
    }
}

double read_bandwidth(cudaStream_t stream) { // bytes per microsecond
    constexpr int64_t NBYTES = int64_t(2) << 30;
    uint32_t *        p;
    CHECKED(cudaMalloc(&p, static_cast<size_t>(NBYTES + 16)));
    fill_kernel<<<4096, 256, 0, stream>>>(p, NBYTES / 4);
    cuda_device_info device;
    CHECKED(cuda_current_device(&device));
    double best = 0;
    for (const int blocks : { 2, 4, 8 }) {
        for (const int threads : { 512, 1024 }) {
            const double t = time_us(stream, 1, [&](int) {
                read_kernel<<<static_cast<unsigned>(blocks * device.multiprocessors), static_cast<unsigned>(threads), 0,
                              stream>>>(reinterpret_cast<uint4 *>(p), NBYTES / 16, p + NBYTES / 4);
            });
            best           = std::max(best, static_cast<double>(NBYTES) / t);
        }
    }
    CHECKED(cudaFree(p));
    return best;
}

// ---- the dense and the CSR product: libraries are opened, not linked ----

void * open_library(const std::vector<const char *> & names) {
    for (const char * name : names) {
        if (void * library = dlopen(name, RTLD_NOW | RTLD_GLOBAL)) {
            return library;
        }
    }
    return nullptr;
}

struct dense_product {
    void * library   = open_library({ "libcublas.so.13", "libcublas.so.12", "libcublas.so" });
    void * handle    = nullptr;
    void * workspace = nullptr;

    template <typename F> F * get(const char * name) { return reinterpret_cast<F *>(dlsym(library, name)); }

    // best of gemm both ways and gemv: y = W x for n columns, F16 or F32, in microseconds; 0 without cuBLAS
    double time(cudaStream_t stream, int64_t rows, int64_t cols, int64_t n, bool f32 = false) {
        using gemm_type = int(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int,
                              int, const void *, void *, int, int, int, int);
        using gemv_type = int(void *, int, int, int, const float *, const void *, int, long long, const void *, int,
                              long long, const float *, void *, int, long long, int);
        using sgemv_type =
            int(void *, int, int, int, const float *, const void *, int, const void *, int, const float *, void *, int);
        constexpr int COMPUTE_F32 = 68, NO_TRANSPOSE = 0, TRANSPOSE = 1, DEFAULT_ALGORITHM = -1;
        const int     type = f32 ? 0 : 2; // CUDA_R_32F, CUDA_R_16F
        const int64_t size = f32 ? 4 : 2;
        if (!library) {
            return 0;
        }
        if (!handle) {
            get<int(void **)>("cublasCreate_v2")(&handle);
            CHECKED(cudaMalloc(&workspace, 64 << 20));
        }
        get<int(void *, cudaStream_t)>("cublasSetStream_v2")(handle, stream);
        get<int(void *, void *, size_t)>("cublasSetWorkspace_v2")(handle, workspace, 64 << 20);
        const auto gemm   = get<gemm_type>("cublasGemmEx");
        const auto gemv   = get<gemv_type>("cublasHSHgemvStridedBatched");
        const int  copies = n_copies(static_cast<double>(rows * cols * size)), r = static_cast<int>(rows),
                  c = static_cast<int>(cols), k = static_cast<int>(n);
        uint8_t *w, *x, *y;
        CHECKED(cudaMalloc(&w, static_cast<size_t>(rows * cols * size * copies)));
        CHECKED(cudaMalloc(&x, static_cast<size_t>(cols * n * size + 64)));
        CHECKED(cudaMalloc(&y, static_cast<size_t>(rows * n * 4)));
        fill_kernel<<<4096, 256, 0, stream>>>(reinterpret_cast<uint32_t *>(w), rows * cols * copies * size / 4);
        fill_kernel<<<64, 256, 0, stream>>>(reinterpret_cast<uint32_t *>(x), cols * n * size / 4);
        const float one = 1, zero = 0;
        int         failed = 0;
        const auto  copy   = [&](int i) { return w + rows * cols * size * i; };
        double      best   = time_us(stream, copies, [&](int i) {
            failed |= gemm(handle, TRANSPOSE, NO_TRANSPOSE, r, k, c, &one, copy(i), type, c, x, type, c, &zero, y, type,
                                  r, COMPUTE_F32, DEFAULT_ALGORITHM);
        });
        best               = std::min(best, time_us(stream, copies, [&](int i) {
                            failed |= gemm(handle, TRANSPOSE, NO_TRANSPOSE, k, r, c, &one, x, type, c, copy(i), type, c,
                                                         &zero, y, type, k, COMPUTE_F32, DEFAULT_ALGORITHM);
                        }));
        if (n == 1 && f32) {
            const auto sgemv = get<sgemv_type>("cublasSgemv_v2");
            best             = std::min(best, time_us(stream, copies, [&](int i) {
                                failed |= sgemv(handle, TRANSPOSE, c, r, &one, copy(i), c, x, 1, &zero, y, 1);
                            }));
        } else if (n == 1 && gemv) {
            best = std::min(best, time_us(stream, copies, [&](int i) {
                                failed |=
                                    gemv(handle, TRANSPOSE, c, r, &one, copy(i), c, 0, x, 1, 0, &zero, y, 1, 0, 1);
                            }));
        }
        CHECKED(cudaFree(w));
        CHECKED(cudaFree(x));
        CHECKED(cudaFree(y));
        return failed ? 0 : best;
    }
};

struct csr_product {
    void * library = open_library({ "libcusparse.so.12", "libcusparse.so.13", "libcusparse.so" });
    void * handle  = nullptr;

    template <typename F> F * get(const char * name) { return reinterpret_cast<F *>(dlsym(library, name)); }

    // F16 or F32 values, 32-bit columns; 0 without cuSPARSE
    double time(cudaStream_t stream, const random_matrix & m, bool f32 = false) {
        constexpr int F32 = 0, INDEX_32 = 2, BASE_ZERO = 0, NO_TRANSPOSE = 0, DEFAULT_ALGORITHM = 0;
        const int     type = f32 ? F32 : 2; // CUDA_R_16F
        const size_t  size = f32 ? 4 : 2;
        if (!library) {
            return 0;
        }
        if (!handle) {
            get<int(void **)>("cusparseCreate")(&handle);
        }
        get<int(void *, cudaStream_t)>("cusparseSetStream")(handle, stream);
        const auto create_csr =
            get<int(void **, int64_t, int64_t, int64_t, void *, void *, void *, int, int, int, int)>(
                "cusparseCreateCsr");
        const auto create_vec = get<int(void **, int64_t, void *, int)>("cusparseCreateDnVec");
        const auto buffer =
            get<int(void *, int, const void *, const void *, const void *, const void *, void *, int, int, size_t *)>(
                "cusparseSpMV_bufferSize");
        const auto spmv =
            get<int(void *, int, const void *, const void *, const void *, const void *, void *, int, int, void *)>(
                "cusparseSpMV");
        std::vector<int32_t> row_ptr(1, 0), columns;
        std::vector<uint8_t> values;
        for (int64_t r = 0; r < m.desc.rows; r++) {
            int32_t c = -1;
            for (int64_t k = m.row_ptr[static_cast<size_t>(r)]; k < m.row_ptr[static_cast<size_t>(r + 1)]; k++) {
                c += static_cast<int32_t>(delta_code(m.deltas.data(), k, m.desc.delta_bits)) + 1;
                if (m.values[static_cast<size_t>(k)]) {
                    columns.push_back(c);
                    // some value: only its time counts
                    const uint32_t bits =
                        f32 ? 0x3f000000u | m.values[static_cast<size_t>(k)] : m.values[static_cast<size_t>(k)];
                    values.insert(values.end(), reinterpret_cast<const uint8_t *>(&bits),
                                  reinterpret_cast<const uint8_t *>(&bits) + size);
                }
            }
            row_ptr.push_back(static_cast<int32_t>(columns.size()));
        }
        const size_t nbytes_values  = (values.size() + 255) & ~size_t(255),
                     nbytes_columns = (columns.size() * 4 + 255) & ~size_t(255);
        const size_t nbytes         = nbytes_values + nbytes_columns + ((row_ptr.size() * 4 + 255) & ~size_t(255));
        const int    copies         = n_copies(static_cast<double>(nbytes));
        uint8_t *    memory, *x, *y, *scratch = nullptr;
        CHECKED(cudaMalloc(&memory, nbytes * static_cast<size_t>(copies)));
        CHECKED(cudaMalloc(&x, static_cast<size_t>(m.desc.cols * 4 + 64)));
        CHECKED(cudaMalloc(&y, static_cast<size_t>(m.desc.rows * 4)));
        fill_kernel<<<64, 256, 0, stream>>>(reinterpret_cast<uint32_t *>(x), m.desc.cols);
        std::vector<void *> matrices(static_cast<size_t>(copies));
        void *              vec_x, *vec_y;
        int failed = create_vec(&vec_x, m.desc.cols, x, type) | create_vec(&vec_y, m.desc.rows, y, type);
        for (int i = 0; i < copies; i++) {
            uint8_t * at = memory + nbytes * static_cast<size_t>(i);
            CHECKED(cudaMemcpy(at, values.data(), values.size(), cudaMemcpyHostToDevice));
            CHECKED(cudaMemcpy(at + nbytes_values, columns.data(), columns.size() * 4, cudaMemcpyHostToDevice));
            CHECKED(cudaMemcpy(at + nbytes_values + nbytes_columns, row_ptr.data(), row_ptr.size() * 4,
                               cudaMemcpyHostToDevice));
            failed |= create_csr(&matrices[static_cast<size_t>(i)], m.desc.rows, m.desc.cols,
                                 static_cast<int64_t>(columns.size()), at + nbytes_values + nbytes_columns,
                                 at + nbytes_values, at, INDEX_32, INDEX_32, BASE_ZERO, type);
        }
        const float one = 1, zero = 0;
        size_t      scratch_nbytes = 0;
        failed |= buffer(handle, NO_TRANSPOSE, &one, matrices[0], vec_x, &zero, vec_y, F32, DEFAULT_ALGORITHM,
                         &scratch_nbytes);
        CHECKED(cudaMalloc(&scratch, scratch_nbytes + 256));
        const double t = failed ? 0 : time_us(stream, copies, [&](int i) {
            failed |= spmv(handle, NO_TRANSPOSE, &one, matrices[static_cast<size_t>(i)], vec_x, &zero, vec_y, F32,
                           DEFAULT_ALGORITHM, scratch);
        });
        for (void * matrix : matrices) {
            get<int(void *)>("cusparseDestroySpMat")(matrix);
        }
        get<int(void *)>("cusparseDestroyDnVec")(vec_x);
        get<int(void *)>("cusparseDestroyDnVec")(vec_y);
        CHECKED(cudaFree(memory));
        CHECKED(cudaFree(x));
        CHECKED(cudaFree(y));
        CHECKED(cudaFree(scratch));
        return failed ? 0 : t;
    }
};

// ---- the products of one decoder layer, fused as the device fuses them ----

// Llama2-7B shape: norm + q, k, v; o + residual; norm + gate, up + SiLU; down + residual. Prints microseconds of each
// and of the layer.
void time_layer(cudaStream_t stream, cuda_sparse_uploader & uploader, double density, const value_type & values,
                int64_t shared_nbytes) {
    constexpr int64_t EMBD = 4096, FF = 11008;
    struct product {
        const char * name;
        int          n_matrices;
        int64_t      rows, cols;
        bool         norm, residual, silu;
    };
    static const product products[] = { { "qkv", 3, EMBD, EMBD, true, false, false },
                                        { "o", 1, EMBD, EMBD, false, true, false },
                                        { "gate, up", 2, FF, EMBD, true, false, true },
                                        { "down", 1, EMBD, FF, false, true, false } };
    constexpr int        LAYERS     = 8;
    float *              x, *y, *norm;
    CHECKED(cudaMalloc(&x, FF * 4));
    CHECKED(cudaMalloc(&y, 3 * FF * 4));
    CHECKED(cudaMalloc(&norm, FF * 4));
    CHECKED(cudaMemset(x, 0, FF * 4));
    CHECKED(cudaMemset(norm, 0, FF * 4));
    std::vector<uint8_t *>                  memory;
    std::vector<cuda_sparse_mul_mat_params> calls;
    std::vector<cuda_sparse_matrix>         matrices;
    matrices.reserve(LAYERS * 7);
    std::vector<std::unique_ptr<file_matrix>> files;
    for (const product & f : products) {
        files.push_back(std::make_unique<file_matrix>(f.rows, f.cols, density, values, shared_nbytes));
    }
    for (int l = 0; l < LAYERS; l++) {
        for (const product & f : products) {
            const file_matrix &        file = *files[static_cast<size_t>(&f - products)];
            cuda_sparse_mul_mat_params p    = {};
            p.n_matrices                    = f.n_matrices;
            for (int i = 0; i < f.n_matrices; i++) {
                uint8_t * dst;
                CHECKED(cudaMalloc(&dst, static_cast<size_t>(file.nbytes())));
                memory.push_back(dst);
                matrices.emplace_back();
                double ms[2];
                file.upload(uploader, dst, &matrices.back(), ms);
                p.w[i]        = &matrices.back();
                p.y[i]        = y + i * FF;
                p.ldy[i]      = f.rows;
                p.row_end[i]  = f.rows;
                p.residual[i] = f.residual ? y + i * FF : nullptr;
            }
            p.x            = x;
            p.ldx          = f.cols;
            p.n            = 1;
            p.norm_weight  = f.norm ? norm : nullptr;
            p.norm_eps     = 1e-5f;
            p.silu_mul     = f.silu;
            p.programmatic = true;
            calls.push_back(p);
        }
    }
    constexpr int N = 4;
    printf("layer, %s, density %.2f:", values.name, density);
    for (int f = 0; f < N; f++) {
        const double t = time_us(stream, LAYERS, [&](int i) {
            CHECKED(cuda_sparse_mul_mat(calls[static_cast<size_t>(i * N + f)], stream));
        });
        printf(" %s %.2f us,", products[f].name, t);
    }
    printf(" all in turn %.2f us\n", N * time_us(stream, LAYERS * N, [&](int i) {
                                         CHECKED(cuda_sparse_mul_mat(calls[static_cast<size_t>(i)], stream));
                                     }));
    for (uint8_t * m : memory) {
        CHECKED(cudaFree(m));
    }
    CHECKED(cudaFree(x));
    CHECKED(cudaFree(y));
    CHECKED(cudaFree(norm));
}

// ---- options ----

std::vector<std::string> split(const char * text) {
    std::vector<std::string> parts(1);
    for (; *text; text++) {
        if (*text == ',') {
            parts.emplace_back();
        } else {
            parts.back() += *text;
        }
    }
    return parts;
}

struct bench_options {
    std::vector<shape>      shapes    = { std::begin(ACCEPTANCE), std::end(ACCEPTANCE) };
    std::vector<double>     densities = { 0.5, 0.3, 0.1 };
    std::vector<int64_t>    columns   = { 1 };
    std::vector<value_type> types     = { VALUE_TYPES[0] };
    bool                    csr = false, densify = false, layer = false, tune = false;
    FILE *                  json = nullptr;

    void set_shapes(const std::string & which) {
        if (which == "paper") {
            shapes.assign(std::begin(PAPER), std::end(PAPER));
        } else if (which != "acceptance") {
            shapes.clear();
            for (const std::string & s : split(which.c_str())) {
                const size_t x = s.find('x');
                shapes.push_back({ atoll(s.c_str()), x == std::string::npos ? 0 : atoll(s.c_str() + x + 1) });
            }
        }
    }
    void set_types(const char * names) {
        types.clear();
        for (const std::string & name : split(names)) {
            for (const value_type & t : VALUE_TYPES) {
                if (name == t.name) {
                    types.push_back(t);
                }
            }
        }
    }
    // an option that takes a value; false: there is none of this name
    bool set(const char * name, const char * value) {
        const auto is = [&](const char * option) { return !strcmp(name, option); };
        if (is("--shapes")) {
            set_shapes(value);
        } else if (is("--densities")) {
            densities.clear();
            for (const std::string & s : split(value)) {
                densities.push_back(atof(s.c_str()));
            }
        } else if (is("--columns")) {
            columns.clear();
            for (const std::string & s : split(value)) {
                columns.push_back(atoll(s.c_str()));
            }
        } else if (is("--values")) {
            set_types(value);
        } else if (is("--json")) {
            json = fopen(value, "w");
        } else {
            return false;
        }
        return true;
    }
    bool parse(int argc, char ** argv) {
        for (int i = 1; i < argc; i++) {
            if (!strcmp(argv[i], "--csr")) {
                csr = true;
            } else if (!strcmp(argv[i], "--layer")) {
                layer = true;
            } else if (!strcmp(argv[i], "--unpack")) {
                densify = true;
            } else if (!strcmp(argv[i], "--tune")) {
                tune = true;
            } else if (i + 1 < argc && set(argv[i], argv[i + 1])) {
                i++;
            } else {
                return false;
            }
        }
        return true;
    }
};

// ---- one matrix ----

struct spmv_bench {
    const bench_options &                 options;
    cudaStream_t                          stream        = nullptr;
    cudaDeviceProp                        device        = {};
    int64_t                               shared_nbytes = 0;
    double                                bandwidth     = 0; // bytes per microsecond
    char                                  date[32]      = {};
    std::string                           driver, runtime; // versions of CUDA
    std::unique_ptr<cuda_sparse_uploader> uploader;
    dense_product                         dense;
    csr_product                           sparse;
    std::vector<double>                   log_speedup; // sums over the shapes, per density, type and number of columns

    explicit spmv_bench(const bench_options & o)
        : options(o), log_speedup(o.types.size() * o.densities.size() * o.columns.size(), 0.0) {
        CHECKED(cudaStreamCreate(&stream));
        CHECKED(cudaGetDeviceProperties(&device, 0));
        shared_nbytes = static_cast<int64_t>(device.sharedMemPerBlockOptin);
        int version   = 0;
        CHECKED(cudaDriverGetVersion(&version));
        driver = cuda_version(version);
        CHECKED(cudaRuntimeGetVersion(&version));
        runtime          = cuda_version(version);
        bandwidth        = read_bandwidth(stream);
        const time_t now = time(nullptr);
        strftime(date, sizeof(date), "%Y-%m-%d", gmtime(&now));
        printf("%s, driver %s, toolkit %s, %s, read bandwidth %.2f TB/s\n", device.name, driver.c_str(),
               runtime.c_str(), date, bandwidth * 1e-6);
        if (!options.tune) {
            print_headers();
        }
        check_status(cuda_sparse_uploader::create(0, &uploader));
    }

    static std::string cuda_version(int version) {
        return std::to_string(version / 1000) + "." + std::to_string(version % 100 / 10);
    }
    static void print_headers() {
        printf("%14s %8s %7s %3s %4s %-14s %8s %7s %9s %9s %9s %9s %9s %8s\n", "shape", "values", "density", "n",
               "bits", "layout", "MB", "/ file", "dense us", "csr us", "us", "chained", "speedup", "of bw");
    }

    // Copies of one matrix, enough of them that none is in the L2 cache when its turn comes. None (w is empty) if the
    // matrix cannot have the layout that is asked for.
    struct copies {
        const file_matrix &             file;
        shape                           s;
        const char *                    type;
        double                          density;
        int64_t                         nbytes;
        uint8_t *                       memory = nullptr;
        std::vector<cuda_sparse_matrix> w;
        double                          read = 0, csr_us = 0, upload_ms[2] = {};

        copies(const file_matrix & f, shape s, const char * type, double density, cuda_sparse_uploader & uploader,
               const layout_choice * choice = nullptr)
            : file(f), s(s), type(type), density(density), nbytes(f.nbytes(choice)) {
            const int n = n_copies(static_cast<double>(nbytes));
            CHECKED(cudaMalloc(&memory, static_cast<size_t>(nbytes * n)));
            cuda_sparse_matrix first;
            if (!file.upload(uploader, memory, &first, upload_ms, choice)) {
                return;
            }
            for (int i = 0; i < n; i++) {
                if (i) {
                    CHECKED(
                        cudaMemcpy(memory + nbytes * i, memory, static_cast<size_t>(nbytes), cudaMemcpyDeviceToDevice));
                }
                w.push_back(moved(first, nbytes * i));
            }
            read = read_nbytes(first);
        }
        ~copies() { cudaFree(memory); }
        copies(const copies &) = delete;

        int         count() const { return static_cast<int>(w.size()); }
        std::string shape_name() const { return std::to_string(s.rows) + "x" + std::to_string(s.cols); }
        std::string name() const {
            char text[96];
            snprintf(text, sizeof(text), "%s %s density %.2f", shape_name().c_str(), type, density);
            return text;
        }
    };

    // n columns of x and of y on the device, and what the last column of the product of a matrix is
    struct operands {
        const file_matrix & file;
        int64_t             rows, cols, n;
        float *             x = nullptr, *y = nullptr;
        void *              x16 = nullptr;
        reference           want;

        operands(const file_matrix & f, int64_t n) : file(f), rows(f.m.desc.rows), cols(f.m.desc.cols), n(n), want(0) {
            std::vector<float> host(static_cast<size_t>(cols * n));
            for (size_t i = 0; i < host.size(); i++) {
                const int steps = static_cast<int>((i * 2654435761u & 0xffffffffu) >> 24) - 128;
                host[i]         = static_cast<float>(steps) / 64.0f;
            }
            want = file.product(host.data() + (n - 1) * cols);
            CHECKED(cudaMalloc(&x16, CUDA_SPARSE_X16_NBYTES));
            CHECKED(cudaMalloc(&x, host.size() * 4));
            CHECKED(cudaMalloc(&y, static_cast<size_t>(rows * n * 4)));
            CHECKED(cudaMemcpy(x, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
        }
        ~operands() {
            CHECKED(cudaFree(x));
            CHECKED(cudaFree(y));
            CHECKED(cudaFree(x16));
        }
        operands(const operands &) = delete;

        // of a matrix that params.w[0] is set to
        cuda_sparse_mul_mat_params params() const {
            cuda_sparse_mul_mat_params p = product_of(rows, cols, n, x, y);
            p.x16                        = x16;
            return p;
        }
        // Ends the program if the product that multiply() queues is not right. slack: see reference::compare
        template <typename F>
        void compare(cudaStream_t stream, const copies & m, F && multiply, double slack = 1) const {
            CHECKED(cudaMemset(y, 0xff, static_cast<size_t>(rows * n * 4)));
            multiply();
            CHECKED(cudaStreamSynchronize(stream));
            const std::string what = m.name() + ", column " + std::to_string(n);
            want.compare(y + (n - 1) * rows, what.c_str(), slack);
        }
    };

    int64_t panel_rows(shape s) const {
        const size_t nbytes = op_mul_mat_max_panel_nbytes(device.totalGlobalMem);
        return op_mul_mat_panel_rows(s.rows, s.cols, static_cast<int64_t>(nbytes));
    }

    // the upload, and back to dense, a panel at a time, as for products with many columns
    void time_densify(const copies & m) {
        printf("%s: %.1f ms to copy from one thread, %.1f ms to repack\n", m.name().c_str(), m.upload_ms[0],
               m.upload_ms[1]);
        const int64_t panel = panel_rows(m.s);
        uint16_t *    dst;
        CHECKED(cudaMalloc(&dst, static_cast<size_t>(panel * m.s.cols * 2)));
        const double t = time_us(stream, m.count(), [&](int i) {
            for (int64_t r = 0; r < m.s.rows; r += panel) {
                CHECKED(cuda_sparse_densify(m.w[static_cast<size_t>(i)], r, std::min(m.s.rows, r + panel), dst,
                                            m.s.cols, stream));
            }
        });
        printf("%s: unpack %.1f us, %.0f G elements/s\n", m.name().c_str(), t,
               static_cast<double>(m.s.rows * m.s.cols) / t * 1e-3);
        CHECKED(cudaFree(dst));
    }

    struct product_times {
        double dense_us, alone, chained;
        double best() const { return std::min(alone, chained); }
        double speedup() const { return dense_us / best(); }
    };

    // a line of the table and of the file; the file keeps what was measured before a run is cut off
    void report(const copies & m, int64_t n, const product_times & t) {
        const cuda_sparse_matrix & w      = m.w[0];
        const char *               layout = cuda_sparse_layout_name(w.layout);
        printf("%14s %8s %7.2f %3lld %4d %-11s %2d %8.1f %7.4f %9.2f %9.2f %9.2f %9.2f %8.2fx %7.1f%%\n",
               m.shape_name().c_str(), m.type, m.density, static_cast<long long>(n), w.delta_bits, layout, w.lanes,
               m.read * 1e-6, static_cast<double>(m.nbytes) / static_cast<double>(m.file.file_nbytes()), t.dense_us,
               m.csr_us, t.alone, t.chained, t.speedup(), 100 * m.read / t.best() / bandwidth);
        fflush(stdout);
        if (options.json) {
            fprintf(options.json,
                    "{\"gpu\": \"%s\", \"date\": \"%s\", \"rows\": %lld, \"cols\": %lld, \"values\": \"%s\", "
                    "\"density\": %g, \"n\": %lld, \"delta_bits\": %d, \"layout\": \"%s\", \"lanes\": %d, "
                    "\"nbytes\": %.0f, \"file_nbytes\": %lld, \"dense_us\": %.3f, \"csr_us\": %.3f, \"us\": %.3f, "
                    "\"chained_us\": %.3f, \"speedup\": %.4f, \"bandwidth\": %.4g, \"read_bandwidth\": %.4g}\n",
                    device.name, date, static_cast<long long>(m.s.rows), static_cast<long long>(m.s.cols), m.type,
                    m.density, static_cast<long long>(n), w.delta_bits, layout, w.lanes, m.read,
                    static_cast<long long>(m.file.file_nbytes()), t.dense_us, m.csr_us, t.alone, t.chained, t.speedup(),
                    m.read / t.best() * 1e6, bandwidth * 1e6);
            fflush(options.json);
        }
    }

    // a product with n columns of x, checked and timed
    product_times time_product(const copies & m, int64_t n, double dense_us) {
        const operands             o(m.file, n);
        cuda_sparse_mul_mat_params p   = o.params();
        const auto                 run = [&](int i) {
            p.w[0] = &m.w[static_cast<size_t>(i)];
            CHECKED(cuda_sparse_mul_mat(p, stream));
        };
        o.compare(stream, m, [&] { run(m.count() - 1); });
        product_times t = { dense_us, time_us(stream, m.count(), run), 0 };
        p.programmatic  = true;
        t.chained       = time_us(stream, m.count(), run);
        return t;
    }

    void time_shape(shape s) {
        std::vector<double> dense_us;
        for (const int64_t n : options.columns) {
            dense_us.push_back(dense.time(stream, s.rows, s.cols, n));
        }
        const size_t n_types = options.types.size();
        for (size_t dt = 0; dt < options.densities.size() * n_types; dt++) {
            const double       density = options.densities[dt / n_types];
            const value_type & values  = options.types[dt % n_types];
            const file_matrix  file(s.rows, s.cols, density, values, shared_nbytes);
            copies             m(file, s, values.name, density, *uploader);
            if (options.densify) {
                time_densify(m);
            }
            m.csr_us = options.csr && !file.quantized() ? sparse.time(stream, file.m) : 0;
            for (size_t c = 0; c < options.columns.size(); c++) {
                const product_times t = time_product(m, options.columns[c], dense_us[c]);
                log_speedup[dt * options.columns.size() + c] += std::log(t.speedup() > 0 ? t.speedup() : 1);
                report(m, options.columns[c], t);
            }
        }
    }

    void print_means() const {
        const size_t n_types = options.types.size(), n_columns = options.columns.size();
        for (size_t i = 0; i < log_speedup.size(); i++) {
            const size_t dt = i / n_columns;
            printf("geometric mean of the speedup of %s at density %.2f, n = %lld: %.3f\n",
                   options.types[dt % n_types].name, options.densities[dt / n_types],
                   static_cast<long long>(options.columns[i % n_columns]),
                   std::exp(log_speedup[i] / static_cast<double>(options.shapes.size())));
        }
    }
};

#include "bench-tune-gpu.cuh"

// ---- entry ----

int bench_spmv_gpu(int argc, char ** argv) {
    bench_options options;
    if (!options.parse(argc, argv)) {
        fprintf(stderr, "usage: bench-spmv-gpu [--shapes paper|acceptance|ROWSxCOLS,...] [--densities .5,.3,.1] "
                        "[--columns 1,4] [--values f16,pruned,pruned-8,q8_0,q4_0] [--csr] [--unpack] [--layer] "
                        "[--tune] [--json FILE]\n");
        return 2;
    }

    spmv_bench bench(options);
    if (options.tune) {
        tune_bench(bench).run();
    } else if (options.layer) {
        for (const double d : options.densities) {
            for (const value_type & t : options.types) {
                time_layer(bench.stream, *bench.uploader, d, t, bench.shared_nbytes);
            }
        }
    } else {
        for (const shape s : options.shapes) {
            bench.time_shape(s);
        }
        bench.print_means();
    }
    if (options.json) {
        fclose(options.json);
    }
    return 0;
}

} // namespace

} // namespace macko::cuda

extern "C" __attribute__((visibility("default"))) int ggml_macko_bench_spmv_gpu(int argc, char ** argv) {
    return macko::cuda::bench_spmv_gpu(argc, argv);
}
