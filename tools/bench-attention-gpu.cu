// Times the attention of few tokens over deep caches, per layer: attention alone, and for one token with everything
// between the projections and the product of its result: rotary embedding, cache writes and, where the cache is
// quantized, the products with Hadamard matrices that llama.cpp adds.
//
//   bench-attention-gpu [--types f16,q8_0,q5_0,q4_0] [--tokens 1,2,4,8] [--depths 256,512,4096,16384]
//                       [--prompts 512,512@4096] [--heads 32x128x32,32x64x8]
//
// 512@4096: 512 tokens over 4096 positions, of which the mask hides none. 32x64x8: 32 heads of 64 elements on 8 of K
// and V. A time is the median over replays of a graph of several layers with a cache of their own each, too many for
// L2. Bytes are those of the used rows of K and V; the percentage is that of the bandwidth of a kernel that only reads,
// for attention alone. The first lines are for products with Hadamard matrices.
#include "cuda/lib/common.cuh"
#include "cuda/ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace macko::cuda {

namespace {

void check(cudaError_t error, const char * what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "bench-attention-gpu: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}
#define CHECKED(call) check((call), #call)

op_context ctx;

__global__ void read_kernel(const uint4 * p, size_t n, uint32_t * out) {
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint4 v = load_streaming(p + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) {
        *out = sum;
    }
}

// microseconds of one replay of what `enqueue` puts on the stream: the median
double time_of(const std::function<void()> & enqueue) {
    cudaGraph_t     graph = nullptr;
    cudaGraphExec_t exec  = nullptr;
    CHECKED(cudaStreamBeginCapture(ctx.stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    CHECKED(cudaStreamEndCapture(ctx.stream, &graph));
    CHECKED(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECKED(cudaEventCreate(&begin));
    CHECKED(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 18; i++) {
        CHECKED(cudaEventRecord(begin, ctx.stream));
        CHECKED(cudaGraphLaunch(exec, ctx.stream));
        CHECKED(cudaEventRecord(end, ctx.stream));
        CHECKED(cudaEventSynchronize(end));
        float ms = 0;
        CHECKED(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) {
            times.push_back(ms);
        }
    }
    std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2), times.end());
    CHECKED(cudaEventDestroy(begin));
    CHECKED(cudaEventDestroy(end));
    CHECKED(cudaGraphExecDestroy(exec));
    CHECKED(cudaGraphDestroy(graph));
    return 1000.0 * static_cast<double>(times[times.size() / 2]);
}

// memory of small finite values in every type
char * allocate(size_t nbytes) {
    void * p = nullptr;
    CHECKED(cudaMalloc(&p, nbytes));
    CHECKED(cudaMemsetAsync(p, 0x11, nbytes, ctx.stream));
    return static_cast<char *>(p);
}

op_tensor tensor(char * data, tensor_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1) {
    op_tensor t = {};
    t.data = data, t.type = type;
    t.ne[0] = ne0, t.ne[1] = ne1, t.ne[2] = ne2, t.ne[3] = 1;
    t.nb[0] = type_block_nbytes(type), t.nb[1] = ne0 / type_block_size(type) * t.nb[0], t.nb[2] = t.nb[1] * ne1,
    t.nb[3] = t.nb[2] * ne2;
    return t;
}

struct shape {
    tensor_type type;
    int64_t     head_dim, heads, kv_heads, n_kv, tokens;
};

struct layer {
    const shape &    s;
    op_tensor        q, q_dst, k, v, k_cache, v_cache, mask, ids, pos, out;
    attention_params a       = {};
    rope_params      r       = {};
    char *           scratch = nullptr;

    layer(const shape & of, char * cache, char * inputs) : s(of) {
        const int64_t width = s.head_dim * s.kv_heads;
        const auto    next  = [&inputs](tensor_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1) {
            const op_tensor t = tensor(inputs, type, ne0, ne1, ne2);
            inputs += (t.nb[3] + 255) / 256 * 256;
            return t;
        };
        q = next(TYPE_F32, s.head_dim, s.heads, s.tokens), q_dst = next(TYPE_F32, s.head_dim, s.heads, s.tokens);
        k = next(TYPE_F32, s.head_dim, s.kv_heads, s.tokens), v = next(TYPE_F32, width, s.tokens);
        mask = next(TYPE_F16, s.n_kv, s.tokens), out = next(TYPE_F32, s.head_dim, s.heads, s.tokens);
        ids = next(TYPE_I64, 64, 1), pos = next(TYPE_I32, 64, 1);
        CHECKED(cudaMemsetAsync(mask.data, 0, static_cast<size_t>(mask.nb[3]), ctx.stream));
        CHECKED(cudaMemsetAsync(pos.data, 0, 256, ctx.stream));
        CHECKED(cudaMemsetAsync(ids.data, 0, 512, ctx.stream));
        const int64_t last = s.n_kv - 1;
        CHECKED(cudaMemcpyAsync(ids.data, &last, 8, cudaMemcpyHostToDevice, ctx.stream));
        CHECKED(cudaStreamSynchronize(ctx.stream));
        ids.ne[0] = pos.ne[0] = 1;
        k_cache = tensor(cache, s.type, width, s.n_kv), v_cache = tensor(cache + k_cache.nb[2], s.type, width, s.n_kv);
        a.q = q_dst;
        std::swap(a.q.ne[1], a.q.ne[2]), std::swap(a.q.nb[1], a.q.nb[2]);
        a.k = heads_of(k_cache), a.v = heads_of(v_cache), a.dst = out, a.mask = &mask;
        a.scale  = 1 / std::sqrt(static_cast<float>(s.head_dim));
        r.n_dims = static_cast<int>(s.head_dim), r.freq_base = 10000, r.freq_scale = 1, r.attn_factor = 1,
        r.n_ctx_orig = 4096, r.beta_fast = 32, r.beta_slow = 1;
        scratch = inputs;
    }
    static size_t inputs_nbytes(const shape & s) {
        return static_cast<size_t>(s.head_dim * (3 * s.heads + 2 * s.kv_heads) * s.tokens * 4 + s.n_kv * s.tokens * 2 +
                                   8192);
    }
    op_tensor heads_of(const op_tensor & cache) const {
        op_tensor t = cache;
        t.ne[0] = s.head_dim, t.ne[1] = s.n_kv, t.ne[2] = s.kv_heads;
        t.nb[2] = s.head_dim / type_block_size(s.type) * t.nb[0];
        return t;
    }
    void enqueue_attention() { CHECKED(op_attention(ctx, a, scratch)); }
    void enqueue_all() {
        const auto *      id = reinterpret_cast<const int64_t *>(ids.data);
        rope_cache_params c  = { q, q_dst, k, k_cache, v, v_cache, id, id };
        if (s.type == TYPE_F16) {
            CHECKED(op_rope_attention(ctx, r, pos, nullptr, c, a, scratch));
            return;
        }
        c.v = k, c.v.data = v.data;    // by heads
        constexpr int64_t V_SIZE = 64; // of the matrix for values
        CHECKED(op_rope_hadamard_cache(ctx, r, pos, nullptr, c, V_SIZE));
        enqueue_attention();
        const op_tensor result = tensor(out.data, TYPE_F32, V_SIZE, out.n_elements() / V_SIZE);
        CHECKED(op_hadamard(ctx, result, result));
    }
};

struct layer_times {
    double attention, all; // microseconds per layer
};

layer_times time_of_layers(const shape & s) {
    const size_t cache =
        static_cast<size_t>(2 * s.n_kv * s.head_dim * s.kv_heads / type_block_size(s.type) * type_block_nbytes(s.type));
    const int           n      = static_cast<int>(std::clamp<size_t>((size_t(600) << 20) / cache, 4, 64));
    const size_t        inputs = layer::inputs_nbytes(s);
    std::vector<layer>  layers;
    char *              caches = allocate(cache * static_cast<size_t>(n) + 4096);
    std::vector<char *> memory = { caches };
    for (int i = 0; i < n; i++) {
        char * at = allocate(inputs);
        memory.push_back(at);
        layers.emplace_back(s, caches + cache * static_cast<size_t>(i), at);
    }
    char * scratch = allocate(op_attention_scratch_nbytes(layers[0].a) + 256);
    memory.push_back(scratch);
    for (layer & l : layers) {
        l.a.mask  = &l.mask; // the vector has moved them
        l.scratch = scratch;
    }
    const auto time_of_each = [&](void (layer::*enqueue)()) {
        return time_of([&] {
                   for (layer & l : layers) {
                       (l.*enqueue)();
                   }
               }) /
               n;
    };
    const layer_times times = { time_of_each(&layer::enqueue_attention),
                                s.tokens == 1 ? time_of_each(&layer::enqueue_all) : NAN };
    for (char * p : memory) {
        CHECKED(cudaFree(p));
    }
    return times;
}

// microseconds of a product of rows with the Hadamard matrix of n, and of the transform that replaces it
void time_hadamard(int64_t n, int64_t rows) {
    constexpr int   REPEATS = 20;
    const op_tensor h       = tensor(allocate(static_cast<size_t>(n * n * 4)), TYPE_F32, n, n),
                    x       = tensor(allocate(static_cast<size_t>(n * rows * 4)), TYPE_F32, n, rows),
                    y       = tensor(allocate(static_cast<size_t>(n * rows * 4)), TYPE_F32, n, rows);
    char *       scratch    = allocate(op_mul_mat_scratch_nbytes(h, x) + 256);
    const double product    = time_of([&] {
        for (int i = 0; i < REPEATS; i++) {
            CHECKED(op_mul_mat(ctx, h, x, y, scratch));
        }
    });
    const double transform  = time_of([&] {
        for (int i = 0; i < REPEATS; i++) {
            CHECKED(op_hadamard(ctx, x, y));
        }
    });
    printf("hadamard of %d, %d rows: product %.2f us, transform %.2f us\n", static_cast<int>(n), static_cast<int>(rows),
           product / REPEATS, transform / REPEATS);
    for (char * p : { h.data, x.data, y.data, scratch }) {
        CHECKED(cudaFree(p));
    }
}

std::vector<std::string> split_list(const std::string & text) {
    std::vector<std::string> list;
    std::stringstream        in(text);
    for (std::string part; std::getline(in, part, ',');) {
        list.push_back(part);
    }
    return list;
}

} // namespace

} // namespace macko::cuda

int main(int argc, char ** argv) {
    using namespace macko::cuda;
    std::string types = "f16,q8_0,q5_0,q4_0", tokens = "1,2,4,8", depths = "256,512,4096,16384", prompts = "512",
                heads = "32x128x32,32x64x8";
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option          = argv[i];
        (option == "--types"    ? types
         : option == "--tokens" ? tokens
         : option == "--depths" ? depths
         : option == "--heads"  ? heads
                                : prompts) = argv[i + 1];
    }
    cudaDeviceProp prop;
    CHECKED(cudaGetDeviceProperties(&prop, 0));
    CHECKED(cudaStreamCreateWithFlags(&ctx.stream, cudaStreamNonBlocking));
    CHECKED(cudaMalloc(&ctx.counters, N_COUNTERS * sizeof(unsigned)));
    CHECKED(cudaMemset(ctx.counters, 0, N_COUNTERS * sizeof(unsigned)));
    CHECKED(op_compute_capability(&ctx.cc));
    ctx.n_sm = prop.multiProcessorCount, ctx.shared_nbytes = static_cast<int>(prop.sharedMemPerBlockOptin);
    ctx.overlap         = ctx.cc >= 90;
    const size_t nbytes = size_t(2) << 30;
    char *       big    = allocate(nbytes);
    const double read   = time_of([&] {
        read_kernel<<<static_cast<unsigned>(8 * ctx.n_sm), 512, 0, ctx.stream>>>(
            reinterpret_cast<const uint4 *>(big), nbytes / 16, reinterpret_cast<uint32_t *>(ctx.counters));
        CHECKED(cudaGetLastError());
    });
    CHECKED(cudaFree(big));
    const double bandwidth = static_cast<double>(nbytes) / read; // bytes per us
    printf("%s, read bandwidth %.0f GB/s\n%-6s %-14s %7s %7s %10s %6s %10s %10s\n", prop.name, bandwidth / 1000,
           "cache", "heads", "tokens", "n_kv", "attention", "%", "all", "MB");
    const auto row = [&](const std::string & type_name, const shape & s) {
        const layer_times us    = time_of_layers(s);
        const double      moved = static_cast<double>(2 * s.n_kv * s.head_dim * s.kv_heads / type_block_size(s.type) *
                                                      type_block_nbytes(s.type));
        printf("%-6s %2dx%-3d on %-4d %7d %7d %10.2f %6.1f %10.2f %10.2f\n", type_name.c_str(),
               static_cast<int>(s.heads), static_cast<int>(s.head_dim), static_cast<int>(s.kv_heads),
               static_cast<int>(s.tokens), static_cast<int>(s.n_kv), us.attention,
               100 * moved / us.attention / bandwidth, us.all, moved / 1e6);
        fflush(stdout);
    };
    for (const int64_t rows : { 32, 256, 32 * 512 }) {
        time_hadamard(128, rows), time_hadamard(64, 2 * rows);
    }
    for (const std::string & name : split_list(types)) {
        const tensor_type type = name == "f16"    ? TYPE_F16
                                 : name == "q8_0" ? TYPE_Q8_0
                                 : name == "q5_0" ? TYPE_Q5_0
                                                  : TYPE_Q4_0;
        for (const std::string & of_heads : split_list(heads)) {
            int n_heads = 0, dim = 0, kv_heads = 0;
            if (sscanf(of_heads.c_str(), "%dx%dx%d", &n_heads, &dim, &kv_heads) != 3 || kv_heads < 1 || dim < 1) {
                fprintf(stderr, "bench-attention-gpu: --heads %s: expected HEADSxELEMENTSxHEADS_OF_K\n",
                        of_heads.c_str());
                return 1;
            }
            const shape s = { type, dim, n_heads, kv_heads, 0, 1 };
            for (const std::string & t : split_list(tokens)) {
                for (const std::string & d : split_list(depths)) {
                    shape of  = s;
                    of.tokens = atoi(t.c_str()), of.n_kv = atoi(d.c_str());
                    row(name, of);
                }
            }
            for (const std::string & n : split_list(prompts)) {
                shape        of = s;
                const size_t at = n.find('@');
                of.tokens       = atoi(n.c_str());
                of.n_kv         = at == std::string::npos ? of.tokens : atoi(n.c_str() + at + 1);
                row(name, of);
            }
        }
    }
    return 0;
}
