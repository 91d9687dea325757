// The GPU benchmarks: options, and the functions declared in bench.h.
#include "bench.h"

#include "codec/registry.h"
#include "cuda/lib/common.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace macko::cuda {

void check(cudaError_t error, const char * what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "bench-gpu: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

void check_status(int status) {
    if (status != GGML_MACKO_STATUS_OK) {
        fprintf(stderr, "bench-gpu: %s\n", ggml_macko_last_error());
        exit(1);
    }
}

bool bench_options::wants(const std::string & name) const {
    return std::all_of(filter.begin(), filter.end(),
                       [&](const std::string & word) { return name.find(word) != std::string::npos; });
}

double time_us(cudaStream_t stream, int n, const std::function<void(int)> & run) {
    constexpr int   REPEATS = 11;
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    cudaEvent_t     begin, end;
    const int       calls = std::max(n, 8);
    CHECKED(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < calls; i++) {
        run(i % n);
    }
    CHECKED(cudaStreamEndCapture(stream, &graph));
    CHECKED(cudaGraphInstantiate(&exec, graph, 0));
    CHECKED(cudaEventCreate(&begin));
    CHECKED(cudaEventCreate(&end));
    float times[REPEATS];
    for (int i = -3; i < REPEATS; i++) { // the first ones let clocks rise
        CHECKED(cudaEventRecord(begin, stream));
        CHECKED(cudaGraphLaunch(exec, stream));
        CHECKED(cudaEventRecord(end, stream));
        CHECKED(cudaEventSynchronize(end));
        CHECKED(cudaEventElapsedTime(&times[std::max(i, 0)], begin, end));
    }
    CHECKED(cudaEventDestroy(begin));
    CHECKED(cudaEventDestroy(end));
    CHECKED(cudaGraphExecDestroy(exec));
    CHECKED(cudaGraphDestroy(graph));
    std::sort(times, times + REPEATS);
    return static_cast<double>(times[REPEATS / 2]) * 1e3 / calls;
}

int n_copies(int64_t nbytes) {
    constexpr int64_t COLD_NBYTES = 400'000'000; // several times any L2
    return std::max(2, static_cast<int>((COLD_NBYTES + nbytes - 1) / nbytes) + 1);
}

static __global__ void fill_kernel(uint32_t * p, int64_t n) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
        h ^= h >> 15;
        p[i] = (h & 0x83ff83ffu) | 0x38003800u;
    }
}

void fill(cudaStream_t stream, void * memory, int64_t n) {
    fill_kernel<<<4096, 256, 0, stream>>>(static_cast<uint32_t *>(memory), n);
    CHECKED(cudaGetLastError());
}

static __global__ void read_kernel(const uint4 * p, int64_t n, uint32_t * out) {
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

double read_bandwidth(cudaStream_t stream) {
    constexpr int64_t NBYTES = int64_t(2) << 30;
    uint32_t *        p;
    CHECKED(cudaMalloc(&p, static_cast<size_t>(NBYTES + 16)));
    fill(stream, p, NBYTES / 4);
    cuda_device_info device = {};
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

namespace {

constexpr char HELP[] =
    R"(usage: bench-gpu MODE [WORD ...] [--shapes ROWSxCOLS,...|paper] [--densities D,...] [--columns N,...]
                 [--values V,...]

Times kernels of the GPU. A case runs if its name, with which its line begins, contains all WORDs. A time is in
microseconds, the median over replays of a CUDA graph; weights and caches come from memory, not from the L2 cache.

  products   random sparse matrices times N columns, beside the best of cuBLAS's dense products; checked against float64
  densify    to write their rows as dense rows
  layer      the products of a decoder layer of a Llama2-7B, fused as the device fuses them
  tune       what the plugin chooses (*) beside the alternatives: layouts and lanes per row for one column; tiles,
             passes of 8 columns and dense rows for several; ends with a line for each kind of choice
  attention  attention over caches, of one token also with what stands between the projections and the output's product

Values V: f16 (normal numbers at random places), pruned (the largest normal numbers), f16-8 and pruned-8 (the same with
8 significant bits, as models have that were trained in BF16), f32, ec-csr (f32 values, stored so), and quantized ones
of the largest normal numbers: q3, q4, q5, q8.
)";

const char * const PAPER = // MACKO paper, appendix H
    "4096x4096,8192x8192,8192x29568,32000x5120,32000x8192,28672x8192,5120x5120,5120x13824,3584x20480,4096x11008,"
    "13824x5120,18944x3584,14336x4096,4096x14336,8192x28672,11008x4096,32000x4096,20480x3584,3584x18944,21504x7168,"
    "7168x7168,28672x7168,7168x28672,27648x9216,9216x9216,36864x9216,9216x36864,36864x12288,12288x12288,49152x12288,"
    "12288x49152";

struct bench_mode {
    const char * name;
    void (*run)(const bench_options & options, cudaStream_t stream);
    const char *shapes, *densities, *columns, *values; // defaults of the options
};
const bench_mode MODES[] = {
    { "products", bench_products, "36864x12288,8192x28672,11008x4096,4096x11008,4096x4096", ".5,.3,.1", "1", "f16" },
    { "densify", bench_densify, "11008x4096,4096x11008,4096x4096", ".5,.3,.1", "1", "f16,pruned-8,q4" },
    { "layer", bench_layer, "", ".5,.3,.1", "1", "f16,pruned-8,q4" },
    { "tune", bench_tune, "4096x4096,11008x4096,4096x11008,4096x14336,32000x4096", ".5,.3", "4,8,16,32,64",
      "f16,pruned-8" },
    { "attention", bench_attention, "", "", "", "" },
};

std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> parts;
    std::stringstream        in(text);
    for (std::string part; std::getline(in, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

// Returns false if the arguments after the mode do not match HELP.
bool parse(int argc, char ** argv, const bench_mode & mode, bench_options * o) {
    o->shapes = split(mode.shapes), o->densities = split(mode.densities);
    o->columns = split(mode.columns), o->values = split(mode.values);
    for (int i = 2; i < argc; i++) {
        const std::string          arg  = argv[i];
        std::vector<std::string> * list = arg == "--shapes"      ? &o->shapes
                                          : arg == "--densities" ? &o->densities
                                          : arg == "--columns"   ? &o->columns
                                          : arg == "--values"    ? &o->values
                                                                 : nullptr;
        if (!list && arg[0] != '-') {
            o->filter.push_back(arg);
        } else if (!list || ++i == argc) {
            return false;
        } else {
            *list = split(strcmp(argv[i], "paper") ? argv[i] : PAPER);
        }
    }
    return true;
}

} // namespace

} // namespace macko::cuda

int main(int argc, char ** argv) {
    using namespace macko::cuda;
    const auto         is_help    = [](const char * arg) { return !strcmp(arg, "--help") || !strcmp(arg, "-h"); };
    const auto         is_mode    = [&](const bench_mode & m) { return argc > 1 && !strcmp(m.name, argv[1]); };
    const bool         wants_help = std::any_of(argv + 1, argv + argc, is_help);
    const auto * const mode       = std::find_if(std::begin(MODES), std::end(MODES), is_mode);
    bench_options      options;
    if (wants_help || mode == std::end(MODES) || !parse(argc, argv, *mode, &options)) {
        fputs(HELP, wants_help ? stdout : stderr);
        return wants_help ? 0 : 2;
    }
    cudaDeviceProp device;
    cudaStream_t   stream;
    int            driver = 0, runtime = 0;
    CHECKED(cudaGetDeviceProperties(&device, 0));
    CHECKED(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECKED(cudaDriverGetVersion(&driver));
    CHECKED(cudaRuntimeGetVersion(&runtime));
    options.bandwidth = read_bandwidth(stream);
    printf("%s, compute capability %d.%d, %d multiprocessors, driver %d.%d, runtime %d.%d, read bandwidth %.2f TB/s\n",
           device.name, device.major, device.minor, device.multiProcessorCount, driver / 1000, driver % 100 / 10,
           runtime / 1000, runtime % 100 / 10, options.bandwidth * 1e-6);
    mode->run(options, stream);
}
