// Attention of many tokens (prefill) on tensor cores, in tiles of 64 tokens x 64 positions.
//
//   scores   Q (64 tokens x head_dim) times K (64 positions x head_dim) transposed, both in F16
//   sums     probabilities in F16 times V, in float32, rescaled when a tile raises the maximum (online softmax)
//
// A warp has 16 tokens. Tiles that the mask hides completely are skipped, so causal prefill costs half. Blocks of many
// tokens read the same K and V, so those of a quantized cache are made F16 once, before.
#include "cuda/ops/attention.cuh"

namespace macko::cuda {

namespace {

constexpr int TILE_MIN_TOKENS = 9; // of fewer, a tile would be mostly empty

constexpr int TILE         = 64;  // tokens, and positions
constexpr int TILE_THREADS = 128; // 4 warps, 16 tokens each

constexpr int CONVERT_THREADS = 256;

// row stride in shared memory: ldmatrix without bank conflicts
template <int HEAD_DIM> constexpr int tile_ld() { return HEAD_DIM + 8; }

// Copies rows of K or V to shared memory; complete after wait_for_copies() and a barrier. Rows behind the last position
// are zeros.
template <int HEAD_DIM>
__device__ __forceinline__ void load_tile(__half * tile, const char * base, int64_t nb1, int first, int n) {
    for (int i = static_cast<int>(threadIdx.x); i < TILE * HEAD_DIM / 8; i += TILE_THREADS) {
        const int    row = i / (HEAD_DIM / 8), e = i % (HEAD_DIM / 8) * 8;
        __half *     place  = tile + row * tile_ld<HEAD_DIM>() + e;
        const char * source = base + (first + row) * nb1;
        if (first + row >= n) {
            *reinterpret_cast<uint4 *>(place) = make_uint4(0, 0, 0, 0);
        } else {
            copy_16(place, source + e * 2);
        }
    }
}

// Does a warp keep its part of Q in registers? Then Q passes through the memory of the first tile.
template <int HEAD_DIM> constexpr bool keeps_q() { return HEAD_DIM <= 128; }
template <int HEAD_DIM> constexpr int  tile_shared_nbytes(int stages) {
    return ((keeps_q<HEAD_DIM>() ? 0 : 1) + 2 * stages) * TILE * tile_ld<HEAD_DIM>() * 2;
}

// The mask of a tile, as the pairs of positions of a lane: rows g, g + 8, columns 2t, 2t + 1 of each 8.
struct tile_mask {
    __half2 bias[TILE / 8][2];

    __device__ __forceinline__ static uint32_t bits(const __half2 & pair) {
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    // does this lane see a position?
    __device__ __forceinline__ bool sees() const {
        bool any = false;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            any |= bits(bias[j][0]) != 0xfc00fc00u || bits(bias[j][1]) != 0xfc00fc00u;
        }
        return any;
    }
    // does the warp see all positions, and adds nothing to their scores?
    __device__ __forceinline__ bool is_empty() const {
        uint32_t all = 0;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            all |= bits(bias[j][0]) | bits(bias[j][1]);
        }
        return !__any_sync(FULL_WARP, all != 0);
    }
};

// STAGES 2: the next tile is loaded while this one is multiplied; 1 where shared memory is short
template <int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__(TILE_THREADS) attention_tile_kernel(attention_args p) {
    wait_for_previous();
    extern __shared__ __align__(16) __half shared_tiles[];
    constexpr bool                         KEEPS_Q   = keeps_q<HEAD_DIM>();
    constexpr int                          LD        = tile_ld<HEAD_DIM>();
    __half *                               q_tile    = shared_tiles;
    __half *                               kv_tiles  = KEEPS_Q ? shared_tiles : shared_tiles + TILE * LD;
    const auto                             k_tile_of = [&](int stage) { return kv_tiles + 2 * stage * TILE * LD; };
    const auto v_tile_of = [&](int stage) { return kv_tiles + (2 * stage + 1) * TILE * LD; };

    const int n_tokens = static_cast<int>(p.q.ne[1]), n_heads = static_cast<int>(p.q.ne[2]),
              n_kv = static_cast<int>(p.k.ne[1]);
    // the last tokens see the most positions: start them first
    const int    token0 = (static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x)) * TILE;
    const int    head = static_cast<int>(blockIdx.y), stream = static_cast<int>(blockIdx.z);
    const int    warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP;
    const int    g = lane / 4, t = lane % 4;
    const char * k_base = p.k.data + head / p.group * p.k.nb[2] + stream / p.k_streams * p.k.nb[3];
    const char * v_base = p.v.data + head / p.group * p.v.nb[2] + stream / p.v_streams * p.v.nb[3];
    const char * q_base = p.q.data + head * p.q.nb[2] + stream * p.q.nb[3];
    const float  slope  = slope_of(p, head);

    for (int i = static_cast<int>(threadIdx.x); i < TILE * HEAD_DIM / 8; i += TILE_THREADS) {
        const int row = i / (HEAD_DIM / 8), e = i % (HEAD_DIM / 8) * 8;
        float     f[8] = {};
        if (token0 + row < n_tokens) {
            value_type<TYPE_F32>::load8(q_base + (token0 + row) * p.q.nb[1], e, f);
        }
        *reinterpret_cast<uint4 *>(q_tile + row * LD + e) = pack8<__half>(f);
    }
    const auto load_q = [&](uint32_t * a, int e) {
        load_matrices(a, q_tile + (warp * 16 + lane % 16) * LD + e + lane / 16 * 8);
    };
    uint32_t kept_q[KEEPS_Q ? HEAD_DIM / 16 : 1][4];
    if constexpr (KEEPS_Q) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < HEAD_DIM; e += 16) {
            load_q(kept_q[e / 16], e);
        }
        __syncthreads();
    }

    // this lane's two tokens: rows g and g + 8 of the warp's 16
    const __half * mask_row[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (p.has_mask) {
            const int token = min(token0 + warp * 16 + g + h * 8, n_tokens - 1);
            mask_row[h]     = reinterpret_cast<const __half *>(p.mask.data + token * p.mask.nb[1] + head * p.mask_nb2 +
                                                               stream * p.mask_nb3);
        }
    }
    float out[HEAD_DIM / 8][4] = {};
    float max[2] = { -INFINITY, -INFINITY }, weight[2] = {};

    const bool pairs =
        p.has_mask && n_kv % 2 == 0 && p.mask.nb[1] % 4 == 0 && p.mask_nb2 % 4 == 0 && p.mask_nb3 % 4 == 0;
    const auto request = [&](tile_mask & m, int first) {
        const __half hidden = __ushort_as_half(0xfc00), zero = __ushort_as_half(0);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            const int pos = first + j * 8 + 2 * t;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (pairs) {
                    m.bias[j][h] = pos < n_kv ? *reinterpret_cast<const __half2 *>(mask_row[h] + pos)
                                              : __halves2half2(hidden, hidden);
                } else {
                    m.bias[j][h] = __halves2half2(pos < n_kv ? (p.has_mask ? mask_row[h][pos] : zero) : hidden,
                                                  pos + 1 < n_kv ? (p.has_mask ? mask_row[h][pos + 1] : zero) : hidden);
                }
            }
        }
    };
    // The first tile from `first` on that any token sees, whose mask is in m then; m has been requested for `first`.
    // Contains a barrier in any case.
    const auto next_tile = [&](tile_mask & m, int first) {
        while (!__syncthreads_or(first < n_kv && m.sees()) && first < n_kv) {
            first += TILE;
            request(m, first);
        }
        return first;
    };
    const auto start_tile = [&](int first, int stage) {
        load_tile<HEAD_DIM>(k_tile_of(stage), k_base, p.k.nb[1], first, n_kv);
        load_tile<HEAD_DIM>(v_tile_of(stage), v_base, p.v.nb[1], first, n_kv);
    };

    // The masks of this tile and of the one that may be next are in registers: that one is requested while this one's
    // values are multiplied, and is known when the barrier in front of the next product has to be.
    tile_mask mask, next_mask;
    request(next_mask, 0);
    int current = next_tile(next_mask, 0);
    if (current < n_kv) {
        start_tile(current, 0);
    }
    mask = next_mask;
    request(next_mask, current + TILE);
    for (int stage = 0; current < n_kv;) {
        const __half * k_tile = k_tile_of(stage);
        const __half * v_tile = v_tile_of(stage);
        wait_for_copies();
        int next = current;
        if constexpr (STAGES == 2) { // all warps are past the barrier: the other buffer is free
            next = next_tile(next_mask, current + TILE);
            if (next < n_kv) {
                start_tile(next, stage ^ 1);
            }
            stage ^= 1;
        } else {
            __syncthreads();
        }

        float s[TILE / 8][4] = {}; // products, then scores, then weights
#pragma unroll
        for (int e = 0; e < HEAD_DIM; e += 16) {
            uint32_t a[4];
            if constexpr (!KEEPS_Q) {
                load_q(a, e);
            }
            const uint32_t * q = KEEPS_Q ? kept_q[KEEPS_Q ? e / 16 : 0] : a;
#pragma unroll
            for (int j = 0; j < TILE / 8; j += 2) {
                uint32_t b[4];
                load_matrices(b, k_tile + (j * 8 + lane % 8 + lane / 16 * 8) * LD + e + lane / 8 % 2 * 8);
                multiply_add<__half>(s[j], q, b[0], b[1]);
                multiply_add<__half>(s[j + 1], q, b[2], b[3]);
            }
        }
        float scale      = 1; // of s, into the exponent of 2
        float new_max[2] = { -INFINITY, -INFINITY };
        if (p.softcap == 0 && p.scale > 0 && mask.is_empty()) {
            scale = p.scale;
        } else {
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float bias = i % 2 ? __high2float(mask.bias[j][i / 2]) : __low2float(mask.bias[j][i / 2]);
                    s[j][i]          = bias == -INFINITY ? -INFINITY : score_of(p, s[j][i]) + slope * bias;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                new_max[i / 2] = fmaxf(new_max[i / 2], s[j][i]);
            }
        }
        float old[2], base[2];
#pragma unroll
        for (int h = 0; h < 2; h++) { // a row lies in four neighbouring lanes
            new_max[h] = fmaxf(new_max[h], __shfl_xor_sync(FULL_WARP, new_max[h], 1));
            new_max[h] = fmaxf(new_max[h], __shfl_xor_sync(FULL_WARP, new_max[h], 2));
            new_max[h] = fmaxf(max[h], scale * new_max[h]);
            old[h]     = rescale(max[h], new_max[h]);
            max[h]     = new_max[h];
            base[h]    = new_max[h] == -INFINITY ? 0 : new_max[h];
            weight[h] *= old[h];
        }
        if (__any_sync(FULL_WARP, old[0] != 1 || old[1] != 1)) {
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    out[j][i] *= old[i / 2];
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = fast_exp2(fmaf(s[j][i], scale, -base[i / 2]));
                weight[i / 2] += s[j][i];
            }
        }
        if constexpr (STAGES == 2) {
            mask = next_mask;
            request(next_mask, next + TILE);
        }
        const auto pair_of = [](float low, float high) { // weights are at most 1
            const __half2 h = __floats2half2_rn(low, high);
            return *reinterpret_cast<const uint32_t *>(&h);
        };
#pragma unroll
        for (int j = 0; j < TILE / 8; j += 2) { // 16 positions
            const uint32_t a[4] = { pair_of(s[j][0], s[j][1]), pair_of(s[j][2], s[j][3]),
                                    pair_of(s[j + 1][0], s[j + 1][1]), pair_of(s[j + 1][2], s[j + 1][3]) };
#pragma unroll
            for (int e = 0; e < HEAD_DIM / 8; e += 2) {
                uint32_t b[4];
                load_matrices_transposed(b,
                                         v_tile + (j * 8 + lane % 8 + lane / 8 % 2 * 8) * LD + e * 8 + lane / 16 * 8);
                multiply_add<__half>(out[e], a, b[0], b[1]);
                multiply_add<__half>(out[e + 1], a, b[2], b[3]);
            }
        }
        if constexpr (STAGES == 1) {
            next = next_tile(next_mask, current + TILE); // all warps are done with the tile
            if (next < n_kv) {
                start_tile(next, 0);
            }
            mask = next_mask;
            request(next_mask, next + TILE);
        }
        current = next;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        weight[h] += __shfl_xor_sync(FULL_WARP, weight[h], 1);
        weight[h] += __shfl_xor_sync(FULL_WARP, weight[h], 2);
        float factor = 1;
        if (p.sinks) {
            const float sink = p.sinks[head] * LOG2_E, with_sink = fmaxf(max[h], sink);
            factor    = rescale(max[h], with_sink);
            weight[h] = weight[h] * factor + exp2f(sink - with_sink);
        }
        factor          = weight[h] > 0 ? factor / weight[h] : 0;
        const int token = token0 + warp * 16 + g + h * 8;
        if (token < n_tokens) {
            float * row = reinterpret_cast<float *>(p.dst.data) +
                          ((static_cast<int64_t>(stream) * n_tokens + token) * n_heads + head) * HEAD_DIM;
#pragma unroll
            for (int e = 0; e < HEAD_DIM / 8; e++) {
                *reinterpret_cast<float2 *>(row + e * 8 + 2 * t) =
                    make_float2(out[e][2 * h] * factor, out[e][2 * h + 1] * factor);
            }
        }
    }
}

int tile_shared_nbytes_of(int64_t head_dim, int stages) {
    switch (head_dim) {
        case 64:  return tile_shared_nbytes<64>(stages);
        case 80:  return tile_shared_nbytes<80>(stages);
        case 96:  return tile_shared_nbytes<96>(stages);
        case 112: return tile_shared_nbytes<112>(stages);
        case 128: return tile_shared_nbytes<128>(stages);
        case 256: return tile_shared_nbytes<256>(stages);
        default:  return 0;
    }
}

template <int HEAD_DIM, int STAGES> cudaError_t launch_tiles(const op_context & ctx, const attention_args & a) {
    constexpr int nbytes = tile_shared_nbytes<HEAD_DIM>(STAGES);
    CUDA_TRY((cudaFuncSetAttribute(attention_tile_kernel<HEAD_DIM, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   nbytes)));
    const dim3 grid(static_cast<unsigned>((a.q.ne[1] + TILE - 1) / TILE), static_cast<unsigned>(a.q.ne[2]),
                    static_cast<unsigned>(a.q.ne[3]));
    return launch(ctx, attention_tile_kernel<HEAD_DIM, STAGES>, grid, TILE_THREADS, nbytes, a);
}

template <int STAGES> cudaError_t launch_tiles(const op_context & ctx, const attention_args & a) {
    switch (a.k.ne[0]) {
        case 64:  return launch_tiles<64, STAGES>(ctx, a);
        case 80:  return launch_tiles<80, STAGES>(ctx, a);
        case 96:  return launch_tiles<96, STAGES>(ctx, a);
        case 112: return launch_tiles<112, STAGES>(ctx, a);
        case 128: return launch_tiles<128, STAGES>(ctx, a);
        default:  return launch_tiles<256, STAGES>(ctx, a);
    }
}

// to = from, n elements each of K (blockIdx.y = 0) and V; a thread has 8
template <typename T>
__global__ void __launch_bounds__(CONVERT_THREADS)
    cache_to_f16_kernel(const __grid_constant__ cache_pair from, const __grid_constant__ cache_pair to, int64_t n) {
    wait_for_previous();
    const op_tensor & s = blockIdx.y == 0 ? from.k : from.v;
    const op_tensor & d = blockIdx.y == 0 ? to.k : to.v;
    const int64_t     e = (static_cast<int64_t>(blockIdx.x) * CONVERT_THREADS + threadIdx.x) * 8;
    if (e >= n) {
        return;
    }
    const row_index in_memory = split_row(e / s.ne[0], s.ne[2], s.ne[1]); // head, position, stream
    const row_index row       = { in_memory.i2, in_memory.i1, in_memory.i3 };
    const int64_t   i0        = e % s.ne[0];
    float           f[8];
    T::load8(row_of(s, row), i0, f);
    *reinterpret_cast<uint4 *>(row_of(d, row) + i0 * 2) = pack8<__half>(f);
}

} // namespace

bool attention_tile_supported(const attention_params & p) {
    const bool type_ok = p.k.type == TYPE_F16 || type_block_size(p.k.type) > 1;
    return p.q.ne[1] >= TILE_MIN_TOKENS && type_ok && p.k.type == p.v.type && p.k.ne[0] == p.v.ne[0] &&
           tile_shared_nbytes_of(p.k.ne[0], 1) != 0;
}

int attention_tile_stages(const op_context & ctx, const attention_params & p) {
    if (!attention_tile_supported(p)) {
        return 0;
    }
    return tile_shared_nbytes_of(p.k.ne[0], 2) <= ctx.shared_nbytes   ? 2
           : tile_shared_nbytes_of(p.k.ne[0], 1) <= ctx.shared_nbytes ? 1
                                                                      : 0;
}

cudaError_t launch_attention_tile(const op_context & ctx, const attention_args & a, int stages) {
    return stages == 2 ? launch_tiles<2>(ctx, a) : launch_tiles<1>(ctx, a);
}

cudaError_t launch_cache_to_f16(const op_context & ctx, const cache_pair & from, const cache_pair & to) {
    const int64_t n = from.k.n_elements(); // V has as many: heads of one size
    const dim3    grid(static_cast<unsigned>((n / 8 + CONVERT_THREADS - 1) / CONVERT_THREADS), 2);
    return with_type(from.k.type, [&](auto t) {
        using T = decltype(t);
        if constexpr (!T::IS_PLAIN && T::CAN_STORE) {
            return launch(ctx, cache_to_f16_kernel<T>, grid, CONVERT_THREADS, 0, from, to, n);
        } else {
            return cudaErrorInvalidValue;
        }
    });
}

} // namespace macko::cuda
