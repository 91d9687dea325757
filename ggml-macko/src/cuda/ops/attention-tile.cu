// Attention of many tokens (prefill) on tensor cores, in tiles of 128 tokens (64 where heads have 256 elements) and 64
// positions.
//
//   classes  effect of the mask on each tile, computed once for all heads: hides it, does nothing, or something between
//   scores   Q times K transposed, both in F16
//   sums     probabilities in F16 times V, in float32, rescaled when a tile raises the maximum (online softmax)
//
// A block has one tile of tokens and two groups of four warps. The groups process alternate tiles of positions, each
// with its own buffers and sums; in the end the sums of the second group are added to those of the first. So one warp
// multiplies while another one waits, even if there are no more blocks than multiprocessors. A warp has 32 tokens (16),
// so that each read of K and V from shared memory, the bottleneck, serves twice as many tokens. Hidden tiles are
// skipped, so causal prefill costs half. With few tokens, blocks share the positions (splits), and the last block
// combines their sums.
//
// Blocks of many tokens read the same K and V, so those of a quantized cache are converted to F16 once, beforehand.
#include "cuda/ops/attention.cuh"

#include <algorithm>
#include <type_traits>

namespace macko::cuda {

namespace {

constexpr int TILE          = 64;  // positions
constexpr int GROUP_THREADS = 128; // 4 warps
constexpr int TILE_BLOCKS   = 128; // with fewer, positions are split; a constant, so that results are the same anywhere
constexpr int CLASS_THREADS = 256;
constexpr int CLASS_POSITIONS = 256; // of a block; 8 per lane
constexpr int CONVERT_THREADS = 256;

// With fewer tokens, a tile is mostly empty. If each query head has its own K and V, the kernel for few tokens reads
// them again for every pair of tokens; then tiles are faster for even fewer tokens, if there are many positions
// (measured on an H100).
bool fills_tiles(const attention_params & p) {
    constexpr int64_t MIN_TOKENS = 9, FEW_TOKENS = 3, DEEP = 4096;
    const int64_t     tokens = p.q.ne[1], positions = p.k.ne[1];
    const bool        own_heads = p.q.ne[2] == p.k.ne[2] && p.k.type == TYPE_F16;
    return tokens >= MIN_TOKENS || (own_heads && tokens >= FEW_TOKENS && positions * (tokens - FEW_TOKENS + 1) >= DEEP);
}

enum tile_class : unsigned char {
    TILE_HIDDEN, // no position is visible to any token
    TILE_PLAIN,  // every position is visible to every token, and nothing is added to the scores
    TILE_MIXED,
};

template <int HEAD_DIM> struct tile_config {
    static constexpr int M      = HEAD_DIM <= 128 ? 2 : 1; // a warp has 16 M tokens
    static constexpr int TOKENS = GROUP_THREADS / WARP * 16 * M;
    static constexpr int CHUNKS = HEAD_DIM / 8; // 16-byte chunks in a row
    // Layout of rows in shared memory: eight chunks in a column lie in different banks. Either the chunks are permuted
    // within groups of eight (exclusive or with the row number), or a row has an odd number of chunks.
    static constexpr bool SWIZZLED = CHUNKS % 8 == 0;
    static constexpr int  STRIDE   = (SWIZZLED ? CHUNKS : CHUNKS | 1) * 8;
    static constexpr bool KEEPS_Q  = HEAD_DIM <= 80; // registers hold Q

    __device__ __forceinline__ static int place(int row, int chunk) {
        return row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 8;
    }
    // Computes the address of a place in two steps, chunk = even + odd: a part that depends on the lane, and a
    // constant.
    __device__ __forceinline__ static uint32_t lane_address(const __half * tile, int row, int odd) {
        return shared_address(tile + place(row, odd));
    }
    __device__ __forceinline__ static uint32_t chunk_address(uint32_t of_lane, int even) {
        return SWIZZLED ? (of_lane ^ (even & 6) * 16) + (even & ~7) * 16 : of_lane + even * 16;
    }
    static constexpr int shared_nbytes(int groups) { return (TOKENS + groups * 2 * TILE) * STRIDE * 2; }
};

__device__ __forceinline__ void sync_group(int group) { // barrier 0 is __syncthreads()
    if (group == 0) {
        asm volatile("bar.sync 1, %0;" ::"n"(GROUP_THREADS) : "memory");
    } else {
        asm volatile("bar.sync 2, %0;" ::"n"(GROUP_THREADS) : "memory");
    }
}

// A group of threads copies rows of K or V to shared memory; each thread copies one chunk of every ROWS-th row.
// Complete after a wait for copies and a barrier. Rows after the last position are zeros.
template <int HEAD_DIM>
__device__ __forceinline__ void load_tile(__half * tile, const char * base, int64_t nb1, int first, int n) {
    using config         = tile_config<HEAD_DIM>;
    constexpr int ROWS   = GROUP_THREADS / config::CHUNKS; // at a time
    const int     thread = static_cast<int>(threadIdx.x % GROUP_THREADS);
    const int     row = thread / config::CHUNKS, chunk = thread % config::CHUNKS;
    const char *  source = base + (first + row) * nb1 + chunk * 16;
    if (ROWS * config::CHUNKS < GROUP_THREADS && row >= ROWS) {
        return;
    }
#pragma unroll
    for (int i = 0; i < TILE; i += ROWS, source += ROWS * nb1) {
        if (TILE % ROWS && row + i >= TILE) {
            break;
        }
        __half * place = tile + config::place(row + i, chunk);
        if (first + row + i < n) {
            copy_16(place, source);
        } else {
            *reinterpret_cast<uint4 *>(place) = make_uint4(0, 0, 0, 0);
        }
    }
}

// Writes classes[mask][tile of tokens][tile of positions].
__global__ void __launch_bounds__(CLASS_THREADS)
    mask_classes_kernel(const __grid_constant__ op_tensor mask, unsigned char * classes, int tile_tokens, int n_tokens,
                        int n_kv) {
    wait_for_previous();
    constexpr int       WARPS = CLASS_THREADS / WARP, TILES = CLASS_POSITIONS / TILE;
    __shared__ unsigned found[WARPS][TILES];
    const int           warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP;
    const int           pos    = static_cast<int>(blockIdx.x) * CLASS_POSITIONS + lane * 8;
    const int           token0 = static_cast<int>(blockIdx.y) * tile_tokens;
    const int           i2     = static_cast<int>(blockIdx.z % static_cast<unsigned>(mask.ne[2]));
    const int           i3     = static_cast<int>(blockIdx.z / static_cast<unsigned>(mask.ne[2]));
    const char *        base   = mask.data + i2 * mask.nb[2] + i3 * mask.nb[3];
    const bool          whole  = pos + 8 <= n_kv && (reinterpret_cast<uintptr_t>(base) | mask.nb[1]) % 16 == 0;
    constexpr unsigned  HIDDEN = 0xfc00; // -INFINITY
    unsigned            bits   = 0;      // OR of all values
    bool                sees   = false;
#pragma unroll 4
    for (int token = token0 + warp; token < min(token0 + tile_tokens, n_tokens); token += WARPS) {
        const char * row = base + token * mask.nb[1];
        if (whole) {
            const uint4        v    = *reinterpret_cast<const uint4 *>(row + pos * 2);
            constexpr unsigned PAIR = HIDDEN << 16 | HIDDEN;
            bits |= v.x | v.y | v.z | v.w;
            sees |= v.x != PAIR || v.y != PAIR || v.z != PAIR || v.w != PAIR;
        } else {
            for (int i = pos; i < pos + 8; i++) {
                const unsigned v = i < n_kv ? reinterpret_cast<const unsigned short *>(row)[i] : HIDDEN;
                bits |= v;
                sees |= v != HIDDEN;
            }
        }
    }
    unsigned mine = (bits != 0 ? 1u : 0u) | (sees ? 2u : 0u);
#pragma unroll
    for (int offset = 1; offset < TILE / 8; offset *= 2) {
        mine |= __shfl_xor_sync(FULL_WARP, mine, offset);
    }
    if (lane % (TILE / 8) == 0) {
        found[warp][lane / (TILE / 8)] = mine;
    }
    __syncthreads();
    const int n_tiles = (n_kv + TILE - 1) / TILE, tile = static_cast<int>(blockIdx.x) * TILES + lane;
    if (warp == 0 && lane < TILES && tile < n_tiles) {
        unsigned all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            all |= found[w][lane];
        }
        classes[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * n_tiles + tile] =
            (all & 2) == 0   ? TILE_HIDDEN
            : (all & 1) == 0 ? TILE_PLAIN
                             : TILE_MIXED;
    }
}

// Combines the splits of a block's rows in order, in the block that finishes last. is_last: in shared memory of the
// caller; a declaration here would not fit in addition to the tiles if a block has 64 KB.
template <int HEAD_DIM, int THREADS>
__device__ __forceinline__ void combine_tile_splits(const attention_args & p, int token0, int n_rows, int head,
                                                    int64_t first_row, unsigned * counter, bool * is_last) {
    if (!is_last_split(counter, p.n_splits, is_last)) {
        return;
    }
    constexpr int LD   = HEAD_DIM + 2;
    const float   sink = p.sinks ? p.sinks[head] * LOG2_E : -INFINITY;
    for (int r = static_cast<int>(threadIdx.x) / WARP; r < n_rows; r += THREADS / WARP) {
        const int64_t row  = first_row + static_cast<int64_t>(token0 + r) * p.q.ne[2];
        const float * part = p.partial + row * p.n_splits * LD;
        float         max  = sink;
        for (int j = 0; j < p.n_splits; j++) {
            max = fmaxf(max, __ldcg(part + j * LD + HEAD_DIM));
        }
        for (int e = static_cast<int>(threadIdx.x) % WARP; e < HEAD_DIM; e += WARP) {
            float sum = 0, weight = p.sinks ? exp2f(sink - max) : 0.0f;
#pragma unroll 4
            for (int j = 0; j < p.n_splits; j++) {
                const float f = rescale(__ldcg(part + j * LD + HEAD_DIM), max);
                sum += f * __ldcg(part + j * LD + e);
                weight += f * __ldcg(part + j * LD + HEAD_DIM + 1);
            }
            reinterpret_cast<float *>(p.dst.data)[row * HEAD_DIM + e] = weight > 0 ? __fdividef(sum, weight) : 0;
        }
    }
}

template <int HEAD_DIM, // elements of a head
          int GROUPS>   // groups of four warps: 2, or 1 if there is too little shared memory
__global__ void __launch_bounds__(GROUPS * GROUP_THREADS)
    attention_tile_kernel(const __grid_constant__ attention_args p) { // operands, shapes, classes and results
    // How the block divides its work (lane = 4 g + t):
    //
    //   grid            x: tiles of tokens; y: query heads; z: streams and splits
    //
    //                   tiles of 64 positions
    //                   | group 0 | group 1 | group 0 | group 1 | ...        hidden tiles are skipped
    //   16 M tokens       warp 0    warp 0    warp 0    warp 0
    //   16 M tokens       warp 1    warp 1    warp 1    warp 1               lane: tokens g and g + 8 of each 16
    //   16 M tokens       warp 2    warp 2    warp 2    warp 2
    //   16 M tokens       warp 3    warp 3    warp 3    warp 3
    //
    // Phases: load Q and the first K; for each tile load V, multiply Q by K, load the next K, compute weights, multiply
    // them by V; reduce over the groups; write the result and combine the splits.
    wait_for_previous();
    using config        = tile_config<HEAD_DIM>;
    constexpr int     M = config::M, TOKENS = config::TOKENS;
    extern __shared__ __align__(128) __half shared_tiles[];
    const int group = static_cast<int>(threadIdx.x / GROUP_THREADS), warp = static_cast<int>(threadIdx.x / WARP % 4);
    const int lane = static_cast<int>(threadIdx.x % WARP), g = static_cast<int>(threadIdx.x / 4 % 8),
              t       = static_cast<int>(threadIdx.x % 4);
    __half * q_tile   = shared_tiles;
    __half * kv_tiles = shared_tiles + TOKENS * config::STRIDE; // K and V of each group; sums in the end
    __half * k_tile   = kv_tiles + group * 2 * TILE * config::STRIDE;
    __half * v_tile   = k_tile + TILE * config::STRIDE;

    const int n_tokens = static_cast<int>(p.q.ne[1]), n_heads = static_cast<int>(p.q.ne[2]),
              n_kv = static_cast<int>(p.k.ne[1]);
    // the last tokens see the most positions, so start them first
    const int    token_tile = static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x);
    const int    token0 = token_tile * TOKENS, head = static_cast<int>(blockIdx.y);
    const int    stream = static_cast<int>(blockIdx.z) / p.n_splits, split = static_cast<int>(blockIdx.z) % p.n_splits;
    const char * k_base = p.k.data + head / p.group * p.k.nb[2] + stream / p.k_streams * p.k.nb[3];
    const char * v_base = p.v.data + head / p.group * p.v.nb[2] + stream / p.v_streams * p.v.nb[3];
    const char * q_base = p.q.data + head * p.q.nb[2] + stream * p.q.nb[3];

    const int row0 = warp * 16 * M; // first token of the warp
    // this lane's tokens: rows g and g + 8 of each 16
    const auto mask_row = [&](int m, int h) {
        const int token = min(token0 + row0 + m * 16 + g + h * 8, n_tokens - 1);
        return reinterpret_cast<const __half *>(p.mask.data + token * p.mask.nb[1] + head * p.mask_nb2 +
                                                stream * p.mask_nb3);
    };
    // mask values of positions pos (even) and pos + 1, if there is a mask
    const auto bias_of = [&](const __half * row, int pos) {
        if (p.has_mask && pos < n_kv) {
            return __half22float2(*reinterpret_cast<const __half2 *>(row + pos));
        }
        return make_float2(pos < n_kv ? 0 : -INFINITY, pos + 1 < n_kv ? 0 : -INFINITY);
    };

    // Tiles of positions of this block; each group processes every GROUPS-th tile.
    const int n_tiles = (n_kv + TILE - 1) / TILE, begin = split * (p.split_size / TILE),
              end                 = min(n_tiles, begin + p.split_size / TILE);
    const unsigned char * classes = nullptr;
    if (p.has_mask) {
        const int64_t of_mask = (p.mask.ne[3] == 1 ? 0 : stream) * p.mask.ne[2] + (p.mask.ne[2] == 1 ? 0 : head);
        classes               = p.classes + (of_mask * gridDim.x + token_tile) * n_tiles;
    }
    // the group's first tile from `first` on that is not hidden, and its class; `end` or more if there is none
    const auto next_tile = [&](int first, int & tile_class) {
        for (; first < end; first += GROUPS * WARP) {
            const int      tile = first + GROUPS * lane;
            const int      mine = tile >= end          ? TILE_HIDDEN
                                  : classes            ? classes[tile]
                                  : tile < n_kv / TILE ? TILE_PLAIN
                                                       : TILE_MIXED;
            const unsigned seen = __ballot_sync(FULL_WARP, mine != TILE_HIDDEN);
            if (seen != 0) {
                const int nearest = __ffs(static_cast<int>(seen)) - 1;
                tile_class        = __shfl_sync(FULL_WARP, mine, nearest);
                return first + GROUPS * nearest;
            }
        }
        return end;
    };

    int current_class = TILE_HIDDEN, current = next_tile(begin + group, current_class);
    // ---- load the first K, and Q as F16 ----
    if (current < end) {
        load_tile<HEAD_DIM>(k_tile, k_base, p.k.nb[1], current * TILE, n_kv);
    }
    commit_copies();

    // several rows at a time; missing tokens repeat the last row, which is not used
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < TOKENS * config::CHUNKS; i += GROUPS * GROUP_THREADS) {
        const int row = i / config::CHUNKS, chunk = i % config::CHUNKS;
        float     f[8];
        value_type<TYPE_F32>::load8(q_base + min(token0 + row, n_tokens - 1) * p.q.nb[1], chunk * 8, f);
        *reinterpret_cast<uint4 *>(q_tile + config::place(row, chunk)) = pack8<__half>(f);
    }
    __syncthreads();
    const uint32_t q_at   = config::lane_address(q_tile, row0 + lane % 16, lane / 16);
    const uint32_t k_at   = config::lane_address(k_tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_at   = config::lane_address(v_tile, lane % 16, lane / 16);
    const auto     load_q = [&](uint32_t * a, int m, int e) {
        load_matrices(a, config::chunk_address(q_at, e / 8) + m * 16 * config::STRIDE * 2);
    };
    uint32_t kept_q[config::KEEPS_Q ? HEAD_DIM / 16 : 1][M][4];
    if constexpr (config::KEEPS_Q) {
#pragma unroll
        for (int e = 0; e < HEAD_DIM; e += 16) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                load_q(kept_q[e / 16][m], m, e);
            }
        }
    }

    float      out[M][HEAD_DIM / 8][4] = {};
    float      max[M][2], weight[M][2] = {};
    const bool has_tokens = token0 + row0 < n_tokens;
#pragma unroll
    for (int m = 0; m < M; m++) {
        max[m][0] = max[m][1] = -INFINITY;
    }
    // ---- for each tile: load V, multiply Q by K, compute weights, multiply by V ----
    while (current < end) {
        wait_for_committed_copies<0>();
        sync_group(group); // K has arrived, and V of the previous tile is free
        load_tile<HEAD_DIM>(v_tile, v_base, p.v.nb[1], current * TILE, n_kv);
        commit_copies();
        int       next_class = TILE_HIDDEN;
        const int next       = next_tile(current + GROUPS, next_class);

        float s[M][TILE / 8][4] = {}; // products, then scores, then weights
        // multiply Q by K
        if (has_tokens) {
#pragma unroll
            for (int e = 0; e < HEAD_DIM; e += 16) {
                uint32_t a[M][4];
                if constexpr (!config::KEEPS_Q) {
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        load_q(a[m], m, e);
                    }
                }
#pragma unroll
                for (int j = 0; j < TILE / 8; j += 2) {
                    uint32_t b[4];
                    load_matrices(b, config::chunk_address(k_at, e / 8) + j * 8 * config::STRIDE * 2);
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        const uint32_t * q = config::KEEPS_Q ? kept_q[config::KEEPS_Q ? e / 16 : 0][m] : a[m];
                        multiply_add<__half>(s[m][j], q, b[0], b[1]);
                        multiply_add<__half>(s[m][j + 1], q, b[2], b[3]);
                    }
                }
            }
        }
        sync_group(group); // K is free
        if (next < end) {
            load_tile<HEAD_DIM>(k_tile, k_base, p.k.nb[1], next * TILE, n_kv);
        }
        commit_copies();

        // compute scores: scale, softcap and mask
        if (has_tokens) {
            float scale = 1; // factor of s, into the exponent of 2
            if (current_class == TILE_PLAIN && p.softcap == 0 && p.scale > 0) {
                scale = p.scale;
            } else {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < TILE / 2; i++) {
                        s[m][i / 4][i % 4] = score_of(p, s[m][i / 4][i % 4]);
                    }
                }
            }
            if (current_class == TILE_MIXED) {
                const float slope = slope_of(p, head);
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const __half * row = mask_row(m, h);
#pragma unroll
                        for (int j = 0; j < TILE / 8; j++) {
                            const float2 bias = bias_of(row, current * TILE + j * 8 + 2 * t);
                            float *      pair = s[m][j] + 2 * h;
                            pair[0]           = bias.x == -INFINITY ? -INFINITY : pair[0] + slope * bias.x;
                            pair[1]           = bias.y == -INFINITY ? -INFINITY : pair[1] + slope * bias.y;
                        }
                        __syncwarp(); // otherwise the compiler requests all of the mask at once, which needs registers
                    }
                }
            }
            // Find the new maximum, rescale the sums, and compute the weights. All rows are processed together, with
            // several sums and maxima each, so that instructions do not wait for each other.
            float part[M][4], old[M][2], base[M][2];
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
                for (int i = 0; i < M * 4; i++) {
                    part[i / 4][i % 4] = j ? fmaxf(part[i / 4][i % 4], s[i / 4][j][i % 4]) : s[i / 4][0][i % 4];
                }
            }
            bool same = true;
#pragma unroll
            for (int i = 0; i < M * 2; i++) { // four neighboring lanes share a row
                const int m = i / 2, h = i % 2;
                float     new_max = fmaxf(part[m][2 * h], part[m][2 * h + 1]);
                new_max           = fmaxf(new_max, __shfl_xor_sync(FULL_WARP, new_max, 1));
                new_max           = fmaxf(new_max, __shfl_xor_sync(FULL_WARP, new_max, 2));
                new_max           = fmaxf(max[m][h], scale * new_max);
                old[m][h]         = max[m][h] == -INFINITY ? 0 : fast_exp2(max[m][h] - new_max);
                base[m][h]        = new_max == -INFINITY ? 0 : new_max;
                max[m][h]         = new_max;
                same              = same && old[m][h] == 1;
                weight[m][h] *= old[m][h];
            }
            if (!__all_sync(FULL_WARP, same)) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < HEAD_DIM / 2; i++) {
                        out[m][i / 4][i % 4] *= old[m][i % 4 / 2];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
                for (int i = 0; i < M * 4; i++) {
                    float & score      = s[i / 4][j][i % 4];
                    score              = fast_exp2(fmaf(score, scale, -base[i / 4][i % 4 / 2]));
                    part[i / 4][i % 4] = j ? part[i / 4][i % 4] + score : score;
                }
            }
#pragma unroll
            for (int i = 0; i < M * 2; i++) {
                weight[i / 2][i % 2] += part[i / 2][i % 2 * 2] + part[i / 2][i % 2 * 2 + 1];
            }
        }
        wait_for_committed_copies<1>();
        sync_group(group); // V has arrived
        // multiply the weights by V
        if (has_tokens) {
            const auto pair_of = [](float low, float high) { // weights are at most 1
                const __half2 h = __floats2half2_rn(low, high);
                return *reinterpret_cast<const uint32_t *>(&h);
            };
#pragma unroll
            for (int j = 0; j < TILE / 8; j += 2) { // 16 positions
                uint32_t a[M][4];
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float * pair = s[m][j + i / 2] + i % 2 * 2;
                        a[m][i]            = pair_of(pair[0], pair[1]);
                    }
                }
#pragma unroll
                for (int e = 0; e < HEAD_DIM / 8; e += 2) {
                    uint32_t b[4];
                    load_matrices_transposed(b, config::chunk_address(v_at, e) + j * 8 * config::STRIDE * 2);
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        multiply_add<__half>(out[m][e], a[m], b[0], b[1]);
                        multiply_add<__half>(out[m][e + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        current = next, current_class = next_class;
    }
    // ---- reduce over the lanes of a row, then over the groups ----
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            weight[m][h] += __shfl_xor_sync(FULL_WARP, weight[m][h], 1);
            weight[m][h] += __shfl_xor_sync(FULL_WARP, weight[m][h], 2);
        }
    }
    if constexpr (GROUPS == 2) { // the second group passes its sums through the memory of the tiles
        float4 *  sums   = reinterpret_cast<float4 *>(kv_tiles);
        float4 *  rows   = reinterpret_cast<float4 *>(q_tile);
        const int thread = static_cast<int>(threadIdx.x) % GROUP_THREADS;
        __syncthreads();
        if (group == 1) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                rows[m * GROUP_THREADS + thread] = make_float4(max[m][0], max[m][1], weight[m][0], weight[m][1]);
#pragma unroll
                for (int e = 0; e < HEAD_DIM / 8; e++) {
                    sums[(m * HEAD_DIM / 8 + e) * GROUP_THREADS + thread] =
                        make_float4(out[m][e][0], out[m][e][1], out[m][e][2], out[m][e][3]);
                }
            }
        }
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float4 other        = rows[m * GROUP_THREADS + thread];
                const float  other_max[2] = { other.x, other.y }, other_weight[2] = { other.z, other.w };
                float        mine[2], theirs[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float both = fmaxf(max[m][h], other_max[h]);
                    mine[h] = rescale(max[m][h], both), theirs[h] = rescale(other_max[h], both);
                    max[m][h]    = both;
                    weight[m][h] = weight[m][h] * mine[h] + other_weight[h] * theirs[h];
                }
#pragma unroll
                for (int e = 0; e < HEAD_DIM / 8; e++) {
                    const float4 v      = sums[(m * HEAD_DIM / 8 + e) * GROUP_THREADS + thread];
                    const float  sum[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        out[m][e][i] = out[m][e][i] * mine[i / 2] + sum[i] * theirs[i / 2];
                    }
                }
            }
        }
    }
    const int64_t first_row = static_cast<int64_t>(stream) * n_tokens * n_heads + head; // row of dst of token 0
    // ---- write the result, or the partial sums of this split ----
    if (group == 0) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int token = token0 + row0 + m * 16 + g + h * 8;
                if (token >= n_tokens) {
                    continue;
                }
                const int64_t row    = first_row + static_cast<int64_t>(token) * n_heads;
                float *       to     = reinterpret_cast<float *>(p.dst.data) + row * HEAD_DIM;
                float         factor = 1;
                if (p.n_splits > 1) {
                    to = p.partial + (row * p.n_splits + split) * (HEAD_DIM + 2);
                    if (t == 0) {
                        to[HEAD_DIM]     = max[m][h];
                        to[HEAD_DIM + 1] = weight[m][h];
                    }
                } else {
                    if (p.sinks) {
                        const float sink = p.sinks[head] * LOG2_E, with_sink = fmaxf(max[m][h], sink);
                        factor       = rescale(max[m][h], with_sink);
                        weight[m][h] = weight[m][h] * factor + exp2f(sink - with_sink);
                    }
                    factor = weight[m][h] > 0 ? factor / weight[m][h] : 0;
                }
#pragma unroll
                for (int e = 0; e < HEAD_DIM / 8; e++) {
                    *reinterpret_cast<float2 *>(to + e * 8 + 2 * t) =
                        make_float2(out[m][e][2 * h] * factor, out[m][e][2 * h + 1] * factor);
                }
            }
        }
    }
    // ---- combine the splits ----
    if (p.n_splits > 1) {
        unsigned * counter =
            p.counters + (static_cast<unsigned>(stream) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        combine_tile_splits<HEAD_DIM, GROUPS * GROUP_THREADS>(p, token0, min(TOKENS, n_tokens - token0), head,
                                                              first_row, counter, reinterpret_cast<bool *>(q_tile));
    }
}

// Calls f with the configuration of this head size, if there is one.
template <typename F, typename R> R with_tile_config(int64_t head_dim, F && f, R otherwise) {
    switch (head_dim) {
        case 64:  return f(std::integral_constant<int, 64>());
        case 80:  return f(std::integral_constant<int, 80>());
        case 96:  return f(std::integral_constant<int, 96>());
        case 112: return f(std::integral_constant<int, 112>());
        case 128: return f(std::integral_constant<int, 128>());
        case 256: return f(std::integral_constant<int, 256>());
        default:  return otherwise;
    }
}

// Tokens of a tile; 0: no kernel supports this head size.
int tile_tokens(int64_t head_dim) {
    return with_tile_config(head_dim, [](auto dim) { return tile_config<dim.value>::TOKENS; }, 0);
}

int64_t token_tile_count(const attention_params & p) {
    const int64_t tokens = tile_tokens(p.k.ne[0]);
    return (p.q.ne[1] + tokens - 1) / tokens;
}
int64_t position_tile_count(const attention_params & p) { return (p.k.ne[1] + TILE - 1) / TILE; }

template <int HEAD_DIM, int GROUPS> cudaError_t launch_tiles(const op_context & ctx, const attention_args & a) {
    using config         = tile_config<HEAD_DIM>;
    constexpr int nbytes = config::shared_nbytes(GROUPS);
    CUDA_TRY((cudaFuncSetAttribute(attention_tile_kernel<HEAD_DIM, GROUPS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   nbytes)));
    const dim3 grid(static_cast<unsigned>((a.q.ne[1] + config::TOKENS - 1) / config::TOKENS),
                    static_cast<unsigned>(a.q.ne[2]), static_cast<unsigned>(a.q.ne[3] * a.n_splits));
    return launch(ctx, attention_tile_kernel<HEAD_DIM, GROUPS>, grid, GROUPS * GROUP_THREADS, nbytes, a);
}

// to = from, for n elements each of K (blockIdx.y = 0) and V; 8 per thread.
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
    // the mask is read in pairs of positions
    const bool mask_ok =
        !p.mask || (p.k.ne[1] % 2 == 0 && is_aligned(*p.mask, 4) && p.mask->ne[2] * p.mask->ne[3] <= MAX_GRID_YZ);
    return fills_tiles(p) && type_ok && p.k.type == p.v.type && p.k.ne[0] == p.v.ne[0] && mask_ok &&
           tile_tokens(p.k.ne[0]) != 0;
}

int attention_tile_groups(const op_context & ctx, const attention_params & p) {
    if (!attention_tile_supported(p)) {
        return 0;
    }
    const auto nbytes = [&](int groups) {
        return with_tile_config(p.k.ne[0], [&](auto dim) { return tile_config<dim.value>::shared_nbytes(groups); }, 0);
    };
    return nbytes(2) <= ctx.shared_nbytes ? 2 : nbytes(1) <= ctx.shared_nbytes ? 1 : 0;
}

int attention_tile_split_size(const attention_params & p) {
    const int64_t blocks = token_tile_count(p) * p.q.ne[2] * p.q.ne[3], n_tiles = position_tile_count(p);
    if (blocks == 0 || blocks > N_COUNTERS) {
        return static_cast<int>(n_tiles * TILE);
    }
    // each of the groups of a block has four tiles or more
    const int64_t wanted = std::clamp<int64_t>(std::min(TILE_BLOCKS / blocks, n_tiles / 8), 1, MAX_SPLITS);
    return static_cast<int>((n_tiles + wanted - 1) / wanted * TILE);
}

size_t mask_classes_nbytes(const attention_params & p) {
    return p.mask && attention_tile_supported(p)
               ? static_cast<size_t>(p.mask->ne[2] * p.mask->ne[3] * token_tile_count(p) * position_tile_count(p))
               : 0;
}

cudaError_t launch_mask_classes(const op_context & ctx, const attention_params & p, unsigned char * classes) {
    const op_tensor & mask = *p.mask;
    const dim3        grid(static_cast<unsigned>((p.k.ne[1] + CLASS_POSITIONS - 1) / CLASS_POSITIONS),
                           static_cast<unsigned>(token_tile_count(p)), static_cast<unsigned>(mask.ne[2] * mask.ne[3]));
    return launch(ctx, mask_classes_kernel, grid, CLASS_THREADS, 0, mask, classes, tile_tokens(p.k.ne[0]),
                  static_cast<int>(p.q.ne[1]), static_cast<int>(p.k.ne[1]));
}

cudaError_t launch_attention_tile(const op_context & ctx, const attention_args & a, int groups) {
    return with_tile_config(
        a.k.ne[0],
        [&](auto dim) { return groups == 2 ? launch_tiles<dim.value, 2>(ctx, a) : launch_tiles<dim.value, 1>(ctx, a); },
        cudaErrorInvalidValue);
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
