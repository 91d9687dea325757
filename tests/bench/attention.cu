// Attention of few tokens over deep caches, of several sequences, and of prompts, per layer. Measures attention alone,
// and for one token also all operations between the projections and the product of its result: rotary embedding, cache
// writes and, with a quantized cache, products with Hadamard matrices, as in llama.cpp. Bytes are those of the visible
// rows of K and V; the percentage compares attention alone with the bandwidth of a kernel that only reads.
#include "bench.h"

#include "cuda/lib/common.cuh"
#include "cuda/ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace macko::cuda {

namespace {

op_context ctx;

// Memory with small finite values in every type.
char * allocate(size_t nbytes) {
    void * p = nullptr;
    CHECKED(cudaMalloc(&p, nbytes));
    CHECKED(cudaMemsetAsync(p, 0x11, nbytes, ctx.stream));
    return static_cast<char *>(p);
}

op_tensor tensor(char * data, tensor_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1, int64_t ne3 = 1) {
    op_tensor t = {};
    t.data = data, t.type = type;
    t.ne[0] = ne0, t.ne[1] = ne1, t.ne[2] = ne2, t.ne[3] = ne3;
    t.nb[0] = type_block_nbytes(type), t.nb[1] = ne0 / type_block_size(type) * t.nb[0], t.nb[2] = t.nb[1] * ne1,
    t.nb[3] = t.nb[2] * ne2;
    return t;
}

struct shape {
    tensor_type type;
    int64_t     head_dim, heads, kv_heads, n_kv, tokens;
    int64_t     sequences; // each with a cache of its own
    int64_t     visible;   // last positions
};

struct layer {
    const shape &    s;
    op_tensor        q, q_dst, k, v, k_cache, v_cache, mask, ids, pos, out;
    attention_params a       = {};
    rope_params      r       = {};
    char *           scratch = nullptr;

    layer(const shape & of, char * cache, char * inputs) : s(of) {
        const int64_t width = s.head_dim * s.kv_heads;
        const auto    next  = [&inputs](tensor_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1, int64_t ne3 = 1) {
            const op_tensor t = tensor(inputs, type, ne0, ne1, ne2, ne3);
            inputs += (t.nb[3] * ne3 + 255) / 256 * 256;
            return t;
        };
        q     = next(TYPE_F32, s.head_dim, s.heads, s.tokens);
        q_dst = next(TYPE_F32, s.head_dim, s.heads, s.tokens, s.sequences);
        k = next(TYPE_F32, s.head_dim, s.kv_heads, s.tokens), v = next(TYPE_F32, width, s.tokens);
        mask = next(TYPE_F16, s.n_kv, s.tokens, 1, s.sequences);
        out  = next(TYPE_F32, s.head_dim, s.heads, s.tokens, s.sequences);
        ids = next(TYPE_I64, 64, 1), pos = next(TYPE_I32, 64, 1);
        std::vector<uint16_t> hidden(static_cast<size_t>(mask.n_elements()));
        for (size_t i = 0; i < hidden.size(); i++) {
            hidden[i] = static_cast<int64_t>(i) % s.n_kv < s.n_kv - s.visible ? 0xfc00 : 0;
        }
        CHECKED(cudaMemcpyAsync(mask.data, hidden.data(), 2 * hidden.size(), cudaMemcpyHostToDevice, ctx.stream));
        CHECKED(cudaMemsetAsync(pos.data, 0, 256, ctx.stream));
        CHECKED(cudaMemsetAsync(ids.data, 0, 512, ctx.stream));
        const int64_t last = s.n_kv - 1;
        CHECKED(cudaMemcpyAsync(ids.data, &last, 8, cudaMemcpyHostToDevice, ctx.stream));
        CHECKED(cudaStreamSynchronize(ctx.stream));
        ids.ne[0] = pos.ne[0] = 1;
        k_cache               = tensor(cache, s.type, width, s.n_kv * s.sequences);
        v_cache               = tensor(cache + k_cache.nb[2], s.type, width, s.n_kv * s.sequences);
        a.q                   = q_dst;
        std::swap(a.q.ne[1], a.q.ne[2]), std::swap(a.q.nb[1], a.q.nb[2]);
        a.k = heads_of(k_cache), a.v = heads_of(v_cache), a.dst = out, a.mask = &mask;
        a.scale  = 1 / std::sqrt(static_cast<float>(s.head_dim));
        r.n_dims = static_cast<int>(s.head_dim), r.freq_base = 10000, r.freq_scale = 1, r.attn_factor = 1,
        r.n_ctx_orig = 4096, r.beta_fast = 32, r.beta_slow = 1;
        scratch = inputs;
    }
    static size_t inputs_nbytes(const shape & s) {
        return static_cast<size_t>(
            (s.head_dim * (3 * s.heads + 2 * s.kv_heads) * 4 + s.n_kv * 2) * s.tokens * s.sequences + 8192);
    }
    op_tensor heads_of(const op_tensor & cache) const {
        op_tensor t = cache;
        t.ne[0] = s.head_dim, t.ne[1] = s.n_kv, t.ne[2] = s.kv_heads;
        t.nb[2] = s.head_dim / type_block_size(s.type) * t.nb[0];
        t.ne[3] = s.sequences, t.nb[3] = s.n_kv * t.nb[1];
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
        c.v = k, c.v.data = v.data;    // stored by heads
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
    const size_t        cache  = static_cast<size_t>(2 * s.n_kv * s.sequences * s.head_dim * s.kv_heads /
                                                     type_block_size(s.type) * type_block_nbytes(s.type));
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
        l.a.mask  = &l.mask; // the vector has moved the elements
        l.scratch = scratch;
    }
    const auto time_of_each = [&](void (layer::*enqueue)()) {
        return time_us(ctx.stream, n, [&](int i) { (layers[static_cast<size_t>(i)].*enqueue)(); });
    };
    const layer_times times = { time_of_each(&layer::enqueue_attention),
                                s.tokens * s.sequences == 1 ? time_of_each(&layer::enqueue_all) : NAN };
    for (char * p : memory) {
        CHECKED(cudaFree(p));
    }
    return times;
}

// A product of rows with the Hadamard matrix of size n, and the transform that replaces it.
void time_hadamard(const std::string & name, int64_t n, int64_t rows) {
    const op_tensor h      = tensor(allocate(static_cast<size_t>(n * n * 4)), TYPE_F32, n, n),
                    x      = tensor(allocate(static_cast<size_t>(n * rows * 4)), TYPE_F32, n, rows),
                    y      = tensor(allocate(static_cast<size_t>(n * rows * 4)), TYPE_F32, n, rows);
    char *       scratch   = allocate(op_mul_mat_scratch_nbytes(h, x) + 256);
    const double product   = time_us(ctx.stream, 1, [&](int) { CHECKED(op_mul_mat(ctx, h, x, y, scratch)); });
    const double transform = time_us(ctx.stream, 1, [&](int) { CHECKED(op_hadamard(ctx, x, y)); });
    printf("%s: product %.2f us, transform %.2f us\n", name.c_str(), product, transform);
    for (char * p : { h.data, x.data, y.data, scratch }) {
        CHECKED(cudaFree(p));
    }
}

} // namespace

void bench_attention(const bench_options & options, cudaStream_t stream) {
    static const std::pair<const char *, tensor_type> TYPES[] = {
        { "f16", TYPE_F16 }, { "q8_0", TYPE_Q8_0 }, { "q5_0", TYPE_Q5_0 }, { "q4_0", TYPE_Q4_0 }
    };
    // heads of Q, their elements, heads of K and V
    static const int64_t HEADS[][3] = { { 32, 128, 32 }, { 32, 128, 8 }, { 32, 64, 8 } };
    struct tokens_and_cache {
        int64_t tokens, n_kv, sequences, visible;
    };
    std::vector<tokens_and_cache> cases;
    for (const int64_t tokens : { 1, 2, 4, 8 }) {
        for (const int64_t n_kv : { 256, 512, 4096, 16384 }) {
            cases.push_back({ tokens, n_kv, 1, n_kv });
        }
    }
    cases.push_back({ 512, 512, 1, 512 }), cases.push_back({ 512, 4096, 1, 4096 });
    for (const int64_t sequences : { 4, 8, 16, 32, 64 }) {
        for (const auto & [n_kv, visible] :
             std::vector<std::pair<int64_t, int64_t>>{ { 256, 32 }, { 256, 256 }, { 1024, 1024 }, { 4096, 4096 } }) {
            cases.push_back({ 1, n_kv, sequences, visible });
        }
    }

    cuda_device_info device = {};
    CHECKED(cuda_current_device(&device));
    ctx.stream = stream;
    CHECKED(cudaMalloc(&ctx.counters, N_COUNTERS * sizeof(unsigned)));
    CHECKED(cudaMemset(ctx.counters, 0, N_COUNTERS * sizeof(unsigned)));
    CHECKED(op_compute_capability(&ctx.cc));
    ctx.n_sm = device.multiprocessors, ctx.shared_nbytes = static_cast<int>(device.shared_nbytes);
    ctx.overlap = ctx.cc >= 90;
    for (const int64_t rows : { 32, 256, 32 * 512 }) {
        for (const int64_t n : { 128, 64 }) {
            const std::string name = "hadamard of " + std::to_string(n) + ", " + std::to_string(rows) + " rows";
            if (options.wants(name)) {
                time_hadamard(name, n, rows);
            }
        }
    }
    for (const auto & [type_name, type] : TYPES) {
        for (const auto & heads : HEADS) {
            for (const auto & [tokens, n_kv, sequences, visible] : cases) {
                const shape       s    = { type, heads[1], heads[0], heads[2], n_kv, tokens, sequences, visible };
                const std::string name = std::string("attention ") + type_name + " " + std::to_string(heads[0]) + "x" +
                                         std::to_string(heads[1]) + "x" + std::to_string(heads[2]) + " tokens " +
                                         std::to_string(tokens) + " sequences " + std::to_string(sequences) + " n_kv " +
                                         std::to_string(n_kv) + " visible " + std::to_string(visible);
                if (!options.wants(name)) {
                    continue;
                }
                const layer_times us    = time_of_layers(s);
                const double      moved = static_cast<double>(2 * visible * sequences * heads[1] * heads[2] /
                                                              type_block_size(type) * type_block_nbytes(type));
                printf("%-75s %8.2f MB: %8.2f us, %4.1f %%, all %8.2f\n", name.c_str(), moved / 1e6, us.attention,
                       100 * moved / us.attention / options.bandwidth, us.all);
                fflush(stdout);
            }
        }
    }
}

} // namespace macko::cuda
