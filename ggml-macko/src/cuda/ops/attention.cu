// Attention over the KV cache: softmax(scale * K q + mask) V per head, one pass, online softmax (FlashAttention's),
// nothing but the result
// is written.
//   attention_decode_kernel few tokens (decode), F16 cache, rows of 64 or 128 elements: tensor cores. In
//   ops-attention-decode.cu.
//   attention_vec_kernel    few tokens (decode), any other: float32 arithmetic. A block of either takes a piece
//   ("split") of the positions of
//                           one KV head, for some query heads that share it; the last block of a head to finish
//                           combines the splits in
//                           their order, so the result does not depend on which one that is. With ROPE they also rotate
//                           the query and the
//                           new key of one token, and write the new key and value to the cache: no kernel of its own
//                           for that.
//   attention_tile_kernel   many tokens (prefill): tensor cores, tiles of 64 tokens x 64 positions; K, V and the
//   probabilities in f16, sums
//                           in float32. Tiles that the mask hides completely are skipped: causal prefill costs half.
#include "cuda/ops/attention.cuh"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

namespace {

// ---------------------------------------------------------------------------------------------- few tokens

template <int LANES> constexpr int vec_warps() { return LANES == 32 ? 8 : 16; }
constexpr int                      VEC_ROWS = 4; // positions that a lane group has in flight
// The code of this kernel runs once per launch, cold: on an H200 its time at short contexts is that of fetching
// instructions (8 rows
// unrolled instead of 4: 16 us instead of 9). So: short loops, no 64-bit divisions, no library tanh.

// elements e0 ... e0+7 of a head, which the lanes of a group hold in turn, rotated by `angle` of each pair
template <int LANES>
__device__ __forceinline__ void rotate_row(const rope_params & p, const rotation * angle, int e0, float x[8]) {
    if (p.mode == 0) { // pairs of neighbours
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const rotation r = angle[min(e0, p.n_dims - 8) / 2 + i / 2];
            const float    a = x[i], b = x[i + 1];
            x[i]     = a * r.cosine - b * r.sine;
            x[i + 1] = a * r.sine + b * r.cosine;
        }
        return;
    }
    const int  half = p.n_dims / 2, lane = static_cast<int>(threadIdx.x) % LANES;
    const bool low  = e0 < half;
    const int  with = static_cast<int>(threadIdx.x) % WARP - lane + (low ? lane + half / 8 : lane - half / 8) % LANES;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float    other = __shfl_sync(FULL_WARP, x[i], with);
        const rotation r     = angle[(e0 + i) % half];
        x[i]                 = e0 >= p.n_dims ? 0 : x[i] * r.cosine + (low ? -other : other) * r.sine;
    }
}

// LANES lanes hold a row of K or V, 8 elements each; G query heads
template <typename TK, typename TV, int LANES, int G, bool ROPE>
__global__ void __launch_bounds__(vec_warps<LANES>() * WARP)
    attention_vec_kernel(const __grid_constant__ attention_args p, const __grid_constant__ new_row_args n) {
    constexpr int       WARPS = vec_warps<LANES>(), THREADS = WARPS * WARP;
    constexpr int       GROUPS = THREADS / LANES; // lane groups of the block: each takes every GROUPS-th position
    __shared__ float    shared_sums[WARPS * G * LANES * 8];
    __shared__ float    shared_max[WARPS][G], shared_weight[WARPS][G];
    __shared__ rotation angle[ROPE ? LANES * 4 : 1];

    const int n_tokens = static_cast<int>(p.q.ne[1]), n_heads = static_cast<int>(p.q.ne[2]),
              n_kv      = static_cast<int>(p.k.ne[1]);
    const int  head_dim = static_cast<int>(p.q.ne[0]), head_dim_v = static_cast<int>(p.v.ne[0]);
    const int  split   = static_cast<int>(blockIdx.x);
    const int  kv_head = static_cast<int>(blockIdx.y) / p.chunks;
    const int  head0   = kv_head * p.group + static_cast<int>(blockIdx.y) % p.chunks * G; // first query head
    const int  n_mine  = min(G, (kv_head + 1) * p.group - head0);
    const int  token = static_cast<int>(blockIdx.z) % n_tokens, stream = static_cast<int>(blockIdx.z) / n_tokens;
    const int  group = static_cast<int>(threadIdx.x) / LANES, lane = static_cast<int>(threadIdx.x) % LANES;
    const int  e0    = lane * 8;
    const bool has_k = e0 < head_dim, has_v = e0 < head_dim_v;

    const char * k_base = p.k.data + kv_head * p.k.nb[2] + stream / p.k_streams * p.k.nb[3];
    const char * v_base = p.v.data + kv_head * p.v.nb[2] + stream / p.v_streams * p.v.nb[3];
    const int    end    = min(n_kv, (split + 1) * p.split_size);
    // F16 rows of one head: those of the next round are on their way while this one is multiplied. For more heads the
    // registers do not suffice.
    constexpr bool RAW   = std::is_same_v<TK, value_type<TYPE_F16>> && std::is_same_v<TV, value_type<TYPE_F16>>;
    constexpr bool AHEAD = RAW && G == 1;
    constexpr int  ROUND = GROUPS * VEC_ROWS; // positions
    // most of the cache was written long ago: bring it to L2 while the kernel before runs out
    if (!AHEAD || end > split * p.split_size + 2 * ROUND) {
        for (int pos = split * p.split_size + static_cast<int>(threadIdx.x); pos < end; pos += THREADS) {
            prefetch_row(k_base + pos * p.k.nb[1],
                         static_cast<int>(p.k.ne[0] / TK::BLOCK * static_cast<int>(sizeof(typename TK::block))));
            prefetch_row(v_base + pos * p.v.nb[1],
                         static_cast<int>(p.v.ne[0] / TV::BLOCK * static_cast<int>(sizeof(typename TV::block))));
        }
    }
    // With ROPE, where the kernel before is a matrix product, the rows of the first round are fetched before it ends
    uint4      k_raw[RAW ? VEC_ROWS : 1], v_raw[RAW ? VEC_ROWS : 1];
    const auto fetch = [&](int first) {
#pragma unroll
        for (int r = 0; r < (RAW ? VEC_ROWS : 0); r++) {
            const int pos = max(0, min(first + r * GROUPS + group, end - 1));
            k_raw[r] = v_raw[r] = make_uint4(0, 0, 0, 0);
            if (has_k) {
                k_raw[r] = load_once(reinterpret_cast<const uint4 *>(k_base + pos * p.k.nb[1]) + lane);
            }
            if (has_v) {
                v_raw[r] = load_once(reinterpret_cast<const uint4 *>(v_base + pos * p.v.nb[1]) + lane);
            }
        }
    };
    // the mask of a round of positions, and what its rows are hidden or shifted by
    const __half * mask[G] = {};
    float          slope[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        const int head = head0 + min(g, n_mine - 1);
        slope[g]       = slope_of(p, head);
        if (p.has_mask) {
            mask[g] = reinterpret_cast<const __half *>(p.mask.data + token * p.mask.nb[1] + head * p.mask_nb2 +
                                                       stream * p.mask_nb3);
        }
    }
    struct round_mask {
        __half m[VEC_ROWS][G];
    };
    const auto mask_of = [&](int first) {
        round_mask r;
#pragma unroll
        for (int i = 0; i < VEC_ROWS; i++) {
            const int pos = first + i * GROUPS + group;
#pragma unroll
            for (int g = 0; g < G; g++) {
                r.m[i][g] = pos >= end ? __ushort_as_half(0xfc00) : p.has_mask ? mask[g][pos] : __ushort_as_half(0);
            }
        }
        return r;
    };
    const auto is_seen = [&](const round_mask & r) { // by anybody in the warp
        bool any = false;
#pragma unroll
        for (int i = 0; i < VEC_ROWS; i++) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                any |= __half_as_ushort(r.m[i][g]) != 0xfc00;
            }
        }
        return __any_sync(FULL_WARP, any) != 0;
    };
    round_mask now_mask, next_mask;
    if constexpr (ROPE) { // the mask is an input of the graph: no kernel writes it
        fetch(split * p.split_size);
        now_mask  = mask_of(split * p.split_size);
        next_mask = mask_of(split * p.split_size + ROUND);
    }
    wait_for_previous();
    if constexpr (RAW && !ROPE) {
        fetch(split * p.split_size);
    }
    if constexpr (!ROPE) {
        now_mask  = mask_of(split * p.split_size);
        next_mask = mask_of(split * p.split_size + ROUND);
    }

    float q[G][8], sums[G][8] = {}, max[G], weight[G] = {};
#pragma unroll
    for (int g = 0; g < G; g++) {
        const int head = head0 + min(g, n_mine - 1);
        max[g]         = -INFINITY;
        if (has_k) {
            value_type<TYPE_F32>::load8(ROPE ? n.q + head * n.q_nb1
                                             : p.q.data + token * p.q.nb[1] + head * p.q.nb[2] + stream * p.q.nb[3],
                                        e0, q[g]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                q[g][i] = 0;
            }
        }
    }
    float new_k[8] = {}, new_v[8] = {}; // as the cache will have them
    int   k_row = -1, v_row = -1;
    if constexpr (ROPE) {
        k_row = static_cast<int>(*n.k_id);
        v_row = static_cast<int>(*n.v_id);
        if (has_k) {
            value_type<TYPE_F32>::load8(n.k + kv_head * n.k_nb1, e0, new_k);
            value_type<TYPE_F32>::load8(n.v + kv_head * head_dim * static_cast<int64_t>(sizeof(float)), e0, new_v);
        }
        if (static_cast<int>(threadIdx.x) < head_dim / 2) { // while all that is on its way
            angle[threadIdx.x] = rotation_of(n.rope, static_cast<int>(threadIdx.x), 0);
        }
        __syncthreads();
#pragma unroll
        for (int g = 0; g < G; g++) {
            rotate_row<LANES>(n.rope.p, angle, e0, q[g]);
        }
        rotate_row<LANES>(n.rope.p, angle, e0, new_k);
        const uint4 k16 = pack8<__half>(new_k), v16 = pack8<__half>(new_v);
        if (has_k && group == 0 && split == 0 && static_cast<int>(blockIdx.y) % p.chunks == 0) {
            *reinterpret_cast<uint4 *>(const_cast<char *>(k_base) + k_row * p.k.nb[1] + e0 * 2) = k16;
            *reinterpret_cast<uint4 *>(const_cast<char *>(v_base) + v_row * p.v.nb[1] + e0 * 2) = v16;
        }
        value_type<TYPE_F16>::unpack8(k16, new_k);
        value_type<TYPE_F16>::unpack8(v16, new_v);
    }

    bool seen = is_seen(now_mask);
    for (int first = split * p.split_size; first < end; first += ROUND) { // the same trip count in all lanes of a warp
        if (!AHEAD && first != split * p.split_size) { // the first round's rows do not wait for the mask
            now_mask = mask_of(first);
            seen     = is_seen(now_mask);
            if (seen) {
                fetch(first);
            }
        }
        const bool here = seen;
        uint4      k_now[RAW ? VEC_ROWS : 1], v_now[RAW ? VEC_ROWS : 1];
#pragma unroll
        for (int r = 0; r < (RAW ? VEC_ROWS : 0); r++) {
            k_now[r] = k_raw[r];
            v_now[r] = v_raw[r];
        }
        float bias[VEC_ROWS][G], score[VEC_ROWS][G];
#pragma unroll
        for (int r = 0; r < VEC_ROWS; r++) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                const float m = __half2float(now_mask.m[r][g]);
                bias[r][g]    = m == -INFINITY ? m : slope[g] * m;
            }
        }
        if (AHEAD) {
            seen      = is_seen(next_mask);
            now_mask  = next_mask;
            next_mask = mask_of(first + 2 * ROUND);
            if (seen) {
                fetch(first + ROUND);
            }
        }
        if (!here) {
            continue;
        }
        float v[VEC_ROWS][8];
#pragma unroll
        for (int r = 0; r < VEC_ROWS; r++) {
            const int pos  = min(first + r * GROUPS + group, end - 1);
            float     k[8] = {};
            if constexpr (RAW) {
                TK::unpack8(k_now[r], k);
                TV::unpack8(v_now[r], v[r]);
            } else {
                if (has_k) {
                    TK::load8(k_base + pos * p.k.nb[1], e0, k);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    v[r][i] = 0;
                }
                if (has_v) {
                    TV::load8(v_base + pos * p.v.nb[1], e0, v[r]);
                }
            }
            if constexpr (ROPE) { // another block may be about to write them
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    k[i]    = pos == k_row ? new_k[i] : k[i];
                    v[r][i] = pos == v_row ? new_v[i] : v[r][i];
                }
            }
#pragma unroll
            for (int g = 0; g < G; g++) {
                float s = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    s += q[g][i] * k[i];
                }
                score[r][g] = s;
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
            float new_max = max[g];
#pragma unroll
            for (int r = 0; r < VEC_ROWS; r++) {
                const float s = warp_sum<LANES>(score[r][g]); // by all lanes, wanted or not
                score[r][g]   = bias[r][g] == -INFINITY ? -INFINITY : score_of(p, s) + bias[r][g];
                new_max       = fmaxf(new_max, score[r][g]);
            }
            const float old = rescale(max[g], new_max);
            max[g]          = new_max;
            weight[g] *= old;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sums[g][i] *= old;
            }
#pragma unroll
            for (int r = 0; r < VEC_ROWS; r++) {
                const float w = score[r][g] == -INFINITY ? 0.0f : exp2f(score[r][g] - new_max);
                weight[g] += w;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sums[g][i] += w * v[r][i];
                }
            }
        }
    }

    // the lane groups of a warp, then the warps, in order
#pragma unroll
    for (int offset = LANES; offset < WARP; offset *= 2) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            const float new_max = fmaxf(max[g], __shfl_xor_sync(FULL_WARP, max[g], offset)),
                        f       = rescale(max[g], new_max);
            max[g]              = new_max;
            weight[g] *= f;
            weight[g] += __shfl_xor_sync(FULL_WARP, weight[g], offset);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sums[g][i] *= f;
                sums[g][i] += __shfl_xor_sync(FULL_WARP, sums[g][i], offset);
            }
        }
    }
    const int warp = static_cast<int>(threadIdx.x) / WARP;
    if (static_cast<int>(threadIdx.x) % WARP < LANES) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            if (lane == 0) {
                shared_max[warp][g]    = max[g];
                shared_weight[warp][g] = weight[g];
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                shared_sums[((warp * G + g) * LANES + lane) * 8 + i] = sums[g][i];
            }
        }
    }
    __syncthreads();
    const int64_t row0 = (static_cast<int64_t>(stream) * n_tokens + token) * n_heads + head0; // of dst, and of partial
    for (int i = static_cast<int>(threadIdx.x); i < n_mine * head_dim_v; i += THREADS) {
        const int g = i / head_dim_v, e = i % head_dim_v;
        float     m = -INFINITY;
        for (int j = 0; j < WARPS; j++) {
            m = fmaxf(m, shared_max[j][g]);
        }
        float sum = 0, w = 0;
        for (int j = 0; j < WARPS; j++) {
            const float f = rescale(shared_max[j][g], m);
            sum += f * shared_sums[(j * G + g) * LANES * 8 + e];
            w += f * shared_weight[j][g];
        }
        put_sum(places_of(p), static_cast<int>(p.dst.ne[0]), row0 + g, head0 + g, split, e, sum, m, w);
    }
    combine_splits(p, row0, head0, n_mine);
}

// ---------------------------------------------------------------------------------------------- many tokens

constexpr int TILE         = 64;  // tokens, and positions
constexpr int TILE_THREADS = 128; // 4 warps, 16 tokens each

// row stride in shared memory: ldmatrix without bank conflicts
template <int HEAD_DIM> constexpr int tile_ld() { return HEAD_DIM + 8; }
template <int HEAD_DIM> constexpr int tile_shared_nbytes(int stages) {
    return (1 + 2 * stages) * TILE * tile_ld<HEAD_DIM>() * 2;
}

// rows of K or V into shared memory as f16, complete after wait_for_copies() and a barrier; zeros behind the last
// position
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_tile(__half * tile, const char * base, int64_t nb1, int first, int n) {
    for (int i = static_cast<int>(threadIdx.x); i < TILE * HEAD_DIM / 8; i += TILE_THREADS) {
        const int    row = i / (HEAD_DIM / 8), e = i % (HEAD_DIM / 8) * 8;
        __half *     place  = tile + row * tile_ld<HEAD_DIM>() + e;
        const char * source = base + (first + row) * nb1;
        if (first + row >= n) {
            *reinterpret_cast<uint4 *>(place) = make_uint4(0, 0, 0, 0);
        } else if constexpr (std::is_same_v<T, value_type<TYPE_F16>>) {
            copy_16(place, source + e * 2);
        } else {
            float f[8];
            T::load8(source, e, f);
            *reinterpret_cast<uint4 *>(place) = pack8<__half>(f);
        }
    }
}

// STAGES 2: the next tile is on its way while this one is multiplied; 1 where shared memory is short
template <typename T, int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__(TILE_THREADS) attention_tile_kernel(attention_args p) {
    wait_for_previous();
    extern __shared__ __align__(16) __half shared_tiles[];
    constexpr int                          LD        = tile_ld<HEAD_DIM>();
    __half *                               q_tile    = shared_tiles;
    const auto                             k_tile_of = [&](int stage) { return q_tile + (1 + 2 * stage) * TILE * LD; };
    const auto                             v_tile_of = [&](int stage) { return q_tile + (2 + 2 * stage) * TILE * LD; };

    const int n_tokens = static_cast<int>(p.q.ne[1]), n_heads = static_cast<int>(p.q.ne[2]),
              n_kv = static_cast<int>(p.k.ne[1]);
    // the last tokens see most: start them first
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

    // mask of a tile as this lane's pairs of positions: rows g, g + 8, columns 2t, 2t + 1 of each 8
    const bool pairs =
        p.has_mask && n_kv % 2 == 0 && p.mask.nb[1] % 4 == 0 && p.mask_nb2 % 4 == 0 && p.mask_nb3 % 4 == 0;
    __half2    bias[TILE / 8][2];
    const auto load_bias = [&](int first) {
        const __half hidden = __ushort_as_half(0xfc00), zero = __ushort_as_half(0);
        bool         any = false;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            const int pos = first + j * 8 + 2 * t;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (pairs) {
                    bias[j][h] = pos < n_kv ? *reinterpret_cast<const __half2 *>(mask_row[h] + pos)
                                            : __halves2half2(hidden, hidden);
                } else {
                    bias[j][h] = __halves2half2(pos < n_kv ? (p.has_mask ? mask_row[h][pos] : zero) : hidden,
                                                pos + 1 < n_kv ? (p.has_mask ? mask_row[h][pos + 1] : zero) : hidden);
                }
                any |= *reinterpret_cast<const uint32_t *>(&bias[j][h]) != 0xfc00fc00u;
            }
        }
        return any;
    };
    // next tile from `first` on that somebody sees, with its mask in bias; a barrier in any case
    const auto next_tile = [&](int first) {
        while (first < n_kv && !__syncthreads_or(load_bias(first))) {
            first += TILE;
        }
        return first;
    };
    const auto start_tile = [&](int first, int stage) {
        load_tile<T, HEAD_DIM>(k_tile_of(stage), k_base, p.k.nb[1], first, n_kv);
        load_tile<T, HEAD_DIM>(v_tile_of(stage), v_base, p.v.nb[1], first, n_kv);
    };

    int current = next_tile(0);
    if (current < n_kv) {
        start_tile(current, 0);
    }
    for (int stage = 0; current < n_kv;) {
        const __half * k_tile = k_tile_of(stage);
        const __half * v_tile = v_tile_of(stage);
        float          s[TILE / 8][4]; // scores, before that the mask
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 b  = __half22float2(bias[j][h]);
                s[j][2 * h]     = slope * b.x;
                s[j][2 * h + 1] = slope * b.y;
            }
        }
        wait_for_copies();
        __syncthreads();
        int next = current;
        if constexpr (STAGES == 2) { // everybody is past the barrier: the other buffer is free
            next = next_tile(current + TILE);
            if (next < n_kv) {
                start_tile(next, stage ^ 1);
            }
            stage ^= 1;
        }

        float dot[TILE / 8][4] = {};
#pragma unroll
        for (int e = 0; e < HEAD_DIM; e += 16) {
            uint32_t a[4];
            load_matrices(a, q_tile + (warp * 16 + lane % 16) * LD + e + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < TILE / 8; j += 2) {
                uint32_t b[4];
                load_matrices(b, k_tile + (j * 8 + lane % 8 + lane / 16 * 8) * LD + e + lane / 8 % 2 * 8);
                multiply_add<__half>(dot[j], a, b[0], b[1]);
                multiply_add<__half>(dot[j + 1], a, b[2], b[3]);
            }
        }
        float new_max[2] = { max[0], max[1] };
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i]        = s[j][i] == -INFINITY ? -INFINITY : score_of(p, dot[j][i]) + s[j][i];
                new_max[i / 2] = fmaxf(new_max[i / 2], s[j][i]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) { // a row lies in four neighbouring lanes
            new_max[h]      = fmaxf(new_max[h], __shfl_xor_sync(FULL_WARP, new_max[h], 1));
            new_max[h]      = fmaxf(new_max[h], __shfl_xor_sync(FULL_WARP, new_max[h], 2));
            const float old = rescale(max[h], new_max[h]);
            max[h]          = new_max[h];
            weight[h] *= old;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++) {
                out[j][2 * h] *= old;
                out[j][2 * h + 1] *= old;
            }
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = s[j][i] == -INFINITY ? 0.0f : exp2f(s[j][i] - max[i / 2]);
                weight[i / 2] += s[j][i];
            }
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j += 2) { // 16 positions
            const uint32_t a[4] = { pack_pair(__half(), s[j][0], s[j][1]), pack_pair(__half(), s[j][2], s[j][3]),
                                    pack_pair(__half(), s[j + 1][0], s[j + 1][1]),
                                    pack_pair(__half(), s[j + 1][2], s[j + 1][3]) };
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
            __syncthreads(); // everybody is done with the tile
            next = next_tile(current + TILE);
            if (next < n_kv) {
                start_tile(next, 0);
            }
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

// ---------------------------------------------------------------------------------------------- choice

constexpr int MAX_HEAD_DIM    = 256;
constexpr int TILE_MIN_TOKENS = 9;
constexpr int VEC_BLOCKS      = 512; // enough for any GPU; a constant, so that results do not depend on the GPU's size
constexpr int DECODE_BLOCKS   = 128; // of attention_decode_kernel: an SM has room for one

// Query heads that share what is read of K and V. Short contexts and few rows of q (heads of all tokens) are a matter
// of latency: then more blocks.
int heads_per_block(const attention_params & p) {
    const int64_t group = p.q.ne[2] / p.k.ne[2];
    return p.k.ne[1] <= 1024 && p.q.n_rows() <= 256 ? 1 : group >= 3 ? 4 : group == 2 ? 2 : 1;
}

int chunk_count(const attention_params & p) { // blocks per KV head, for one split
    const int64_t group = p.q.ne[2] / p.k.ne[2], g = heads_per_block(p);
    return static_cast<int>((group + g - 1) / g);
}

// for one split
int64_t block_count(const attention_params & p) { return p.k.ne[2] * chunk_count(p) * p.q.ne[1] * p.q.ne[3]; }

// Blocks of a cluster, which share the positions of a short context. A block fills an SM, so that all of a head's K and
// V come to one SM otherwise, and
// their way there is most of the time; a GPU of 132 SMs has room for 66 clusters of two. Longer contexts keep all SMs
// busy without.
int cluster_size(const op_context & ctx, const attention_params & p) {
    return ctx.cc >= 90 && attention_decode_supported(p) && heads_per_block(p) == 1 &&
                   block_count(p) <= DECODE_BLOCKS / 2 && p.k.ne[1] * p.k.ne[0] <= 2 * DECODE_ROUND * 128
               ? 2
               : 1;
}

// positions of a split
int split_size(const attention_params & p) {
    const int64_t n_kv = p.k.ne[1], blocks = block_count(p);
    const bool    decode = attention_decode_supported(p);
    // two rounds of short rows cost less than a combination
    if (blocks > N_COUNTERS || blocks == 0 || (decode && n_kv * p.k.ne[0] <= 512 * 64)) {
        return static_cast<int>(n_kv);
    }
    const int64_t wanted = std::clamp<int64_t>(decode ? DECODE_BLOCKS / blocks : (VEC_BLOCKS + blocks - 1) / blocks, 1,
                                               MAX_SPLITS),
                  rounds = (n_kv + DECODE_ROUND - 1) / DECODE_ROUND;
    return static_cast<int>((rounds + wanted - 1) / wanted * DECODE_ROUND);
}

int split_count(const attention_params & p) {
    const int size = split_size(p);
    return static_cast<int>((p.k.ne[1] + size - 1) / size);
}

bool can_read(tensor_type type) {
    return type == TYPE_F32 || type == TYPE_F16 || type == TYPE_BF16 || type == TYPE_Q8_0 || type == TYPE_Q4_0 ||
           type == TYPE_Q4_1 || type == TYPE_Q5_0 || type == TYPE_Q5_1 || type == TYPE_IQ4_NL;
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

// buffers for tiles that fit; 0: not a case for attention_tile_kernel
int tile_stages(const op_context & ctx, const attention_params & p) {
    if (p.q.ne[1] < TILE_MIN_TOKENS || p.k.type != p.v.type || (p.k.type != TYPE_F16 && p.k.type != TYPE_Q8_0) ||
        p.k.ne[0] != p.v.ne[0] || tile_shared_nbytes_of(p.k.ne[0], 1) == 0) {
        return 0;
    }
    return tile_shared_nbytes_of(p.k.ne[0], 2) <= ctx.shared_nbytes   ? 2
           : tile_shared_nbytes_of(p.k.ne[0], 1) <= ctx.shared_nbytes ? 1
                                                                      : 0;
}

template <typename T, int HEAD_DIM, int STAGES>
cudaError_t launch_tiles(const op_context & ctx, const attention_args & a) {
    constexpr int nbytes = tile_shared_nbytes<HEAD_DIM>(STAGES);
    CUDA_TRY((cudaFuncSetAttribute(attention_tile_kernel<T, HEAD_DIM, STAGES>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes)));
    const dim3 grid(static_cast<unsigned>((a.q.ne[1] + TILE - 1) / TILE), static_cast<unsigned>(a.q.ne[2]),
                    static_cast<unsigned>(a.q.ne[3]));
    return launch(ctx, attention_tile_kernel<T, HEAD_DIM, STAGES>, grid, TILE_THREADS, nbytes, a);
}

template <typename T, int STAGES> cudaError_t launch_tiles(const op_context & ctx, const attention_args & a) {
    switch (a.k.ne[0]) {
        case 64:  return launch_tiles<T, 64, STAGES>(ctx, a);
        case 80:  return launch_tiles<T, 80, STAGES>(ctx, a);
        case 96:  return launch_tiles<T, 96, STAGES>(ctx, a);
        case 112: return launch_tiles<T, 112, STAGES>(ctx, a);
        case 128: return launch_tiles<T, 128, STAGES>(ctx, a);
        default:  return launch_tiles<T, 256, STAGES>(ctx, a);
    }
}

template <typename T> cudaError_t launch_tiles(const op_context & ctx, const attention_args & a, int stages) {
    return stages == 2 ? launch_tiles<T, 2>(ctx, a) : launch_tiles<T, 1>(ctx, a);
}

template <typename TK, typename TV, int LANES, bool ROPE>
cudaError_t launch_vec(const op_context & ctx, const attention_args & a, const new_row_args & n) {
    const dim3 grid(static_cast<unsigned>(a.n_splits), static_cast<unsigned>(a.k.ne[2] * a.chunks),
                    static_cast<unsigned>(a.q.ne[1] * a.q.ne[3]));
    switch (a.heads_per_block) {
        case 1:
            return launch(ctx, attention_vec_kernel<TK, TV, LANES, 1, ROPE>, grid, vec_warps<LANES>() * WARP, 0, a, n);
        case 2:
            return launch(ctx, attention_vec_kernel<TK, TV, LANES, 2, ROPE>, grid, vec_warps<LANES>() * WARP, 0, a, n);
        default:
            return launch(ctx, attention_vec_kernel<TK, TV, LANES, 4, ROPE>, grid, vec_warps<LANES>() * WARP, 0, a, n);
    }
}

template <typename TK, typename TV, bool ROPE>
cudaError_t launch_vec(const op_context & ctx, const attention_args & a, const new_row_args & n) {
    const int64_t head_dim = std::max(a.k.ne[0], a.v.ne[0]);
    return head_dim <= 64    ? launch_vec<TK, TV, 8, ROPE>(ctx, a, n)
           : head_dim <= 128 ? launch_vec<TK, TV, 16, ROPE>(ctx, a, n)
                             : launch_vec<TK, TV, 32, ROPE>(ctx, a, n);
}

template <tensor_type TYPE> cudaError_t launch_vec_same(const op_context & ctx, const attention_args & a) {
    return launch_vec<value_type<TYPE>, value_type<TYPE>, false>(ctx, a, {});
}

} // namespace

bool op_attention_supported(const attention_params & p) {
    const op_tensor &q = p.q, &k = p.k, &v = p.v;
    const auto       is_rows = [](const op_tensor & t) { // 8 elements at a time: aligned rows
        return is_contiguous_rows(t) && t.ne[0] % std::max<int64_t>(8, type_block_size(t.type)) == 0 &&
               t.ne[0] <= MAX_HEAD_DIM &&
               (type_block_size(t.type) > 1 || (t.nb[1] % 16 == 0 && t.nb[2] % 16 == 0 && t.nb[3] % 16 == 0));
    };
    if (q.type != TYPE_F32 || p.dst.type != TYPE_F32 || !can_read(k.type) || k.type != v.type || !is_rows(q) ||
        !is_rows(k) || !is_rows(v) || !is_contiguous(p.dst)) {
        return false;
    }
    if (k.ne[0] != q.ne[0] || p.dst.ne[0] != v.ne[0] || p.dst.ne[1] != q.ne[2] || p.dst.ne[2] != q.ne[1] ||
        p.dst.ne[3] != q.ne[3] || k.ne[1] != v.ne[1] || k.ne[1] == 0) {
        return false;
    }
    if (k.ne[2] == 0 || q.ne[2] % k.ne[2] != 0 || v.ne[2] != k.ne[2] || k.ne[3] == 0 || q.ne[3] % k.ne[3] != 0 ||
        v.ne[3] != k.ne[3]) {
        return false;
    }
    if (p.mask && (p.mask->type != TYPE_F16 || !is_contiguous_rows(*p.mask) || p.mask->ne[0] < k.ne[1] ||
                   p.mask->ne[1] < q.ne[1])) {
        return false;
    }
    if (p.mask &&
        ((p.mask->ne[2] != 1 && p.mask->ne[2] != q.ne[2]) || (p.mask->ne[3] != 1 && p.mask->ne[3] != q.ne[3]))) {
        return false;
    }
    if (p.sinks && (p.sinks->type != TYPE_F32 || p.sinks->ne[0] != q.ne[2] || !is_contiguous(*p.sinks))) {
        return false;
    }
    return q.ne[1] * q.ne[3] <= 65535 && q.ne[2] <= 65535 && k.ne[1] <= (1 << 28);
}

size_t op_attention_scratch_nbytes(const attention_params & p) {
    const int n_splits = p.q.n_elements() > 0 && p.k.ne[1] > 0 ? split_count(p) : 1;
    return n_splits == 1 ? 0
                         : static_cast<size_t>(p.q.n_rows()) * static_cast<size_t>(n_splits) *
                               static_cast<size_t>(p.v.ne[0] + 2) * sizeof(float);
}

static attention_args make_attention_args(const op_context & ctx, const attention_params & p, char * scratch) {
    attention_args a = {};
    a.q = p.q, a.k = p.k, a.v = p.v, a.dst = p.dst;
    a.has_mask        = p.mask != nullptr;
    a.mask            = p.mask ? *p.mask : p.k;
    a.sinks           = p.sinks ? reinterpret_cast<const float *>(p.sinks->data) : nullptr;
    a.scale           = p.softcap != 0 ? p.scale / p.softcap : p.scale * LOG2_E;
    a.softcap         = p.softcap * LOG2_E;
    a.n_head_log2     = 1u << static_cast<uint32_t>(std::floor(std::log2(static_cast<double>(p.q.ne[2]))));
    a.alibi           = -p.max_bias / static_cast<float>(a.n_head_log2);
    a.group           = static_cast<int>(p.q.ne[2] / p.k.ne[2]);
    a.heads_per_block = heads_per_block(p);
    a.chunks          = chunk_count(p);
    a.k_streams       = static_cast<int>(p.q.ne[3] / p.k.ne[3]);
    a.v_streams       = static_cast<int>(p.q.ne[3] / p.v.ne[3]);
    a.mask_nb2        = a.mask.ne[2] == 1 ? 0 : a.mask.nb[2];
    a.mask_nb3        = a.mask.ne[3] == 1 ? 0 : a.mask.nb[3];
    a.ranks           = cluster_size(ctx, p);
    a.n_splits        = a.ranks > 1 ? 1 : split_count(p);
    a.split_size      = a.ranks > 1 ? static_cast<int>(p.k.ne[1]) : split_size(p);
    a.partial         = reinterpret_cast<float *>(scratch);
    a.counters        = ctx.counters;
    return a;
}

cudaError_t op_attention(const op_context & ctx, const attention_params & p, char * scratch) {
    const attention_args a = make_attention_args(ctx, p, scratch);
    if (const int stages = tile_stages(ctx, p)) {
        return p.k.type == TYPE_F16 ? launch_tiles<value_type<TYPE_F16>>(ctx, a, stages)
                                    : launch_tiles<value_type<TYPE_Q8_0>>(ctx, a, stages);
    }
    if (attention_decode_supported(p)) {
        return launch_attention_decode(ctx, a, nullptr);
    }
    switch (p.k.type) {
        case TYPE_F32:    return launch_vec_same<TYPE_F32>(ctx, a);
        case TYPE_F16:    return launch_vec_same<TYPE_F16>(ctx, a);
        case TYPE_BF16:   return launch_vec_same<TYPE_BF16>(ctx, a);
        case TYPE_Q8_0:   return launch_vec_same<TYPE_Q8_0>(ctx, a);
        case TYPE_Q4_0:   return launch_vec_same<TYPE_Q4_0>(ctx, a);
        case TYPE_Q4_1:   return launch_vec_same<TYPE_Q4_1>(ctx, a);
        case TYPE_Q5_0:   return launch_vec_same<TYPE_Q5_0>(ctx, a);
        case TYPE_Q5_1:   return launch_vec_same<TYPE_Q5_1>(ctx, a);
        case TYPE_IQ4_NL: return launch_vec_same<TYPE_IQ4_NL>(ctx, a);
        default:          return cudaErrorInvalidValue;
    }
}

bool op_rope_attention_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                                 const rope_cache_params & c, const attention_params & p) {
    const int64_t head_dim = p.q.ne[0];
    const auto    is_view  = [&](const op_tensor & t, const op_tensor & cache) { // heads of the cache's rows
        return t.type == TYPE_F16 && t.data == cache.data && t.nb[1] == cache.nb[1] && t.nb[2] == head_dim * 2 &&
               t.ne[0] == head_dim && cache.ne[0] == head_dim * t.ne[2];
    };
    return op_attention_supported(p) && op_rope_cache_supported(r, pos, factors, c) && p.q.ne[1] * p.q.ne[3] == 1 &&
           p.q.data == c.q_dst.data && p.q.ne[2] == c.q.ne[1] && head_dim == c.q.ne[0] && head_dim == c.k.ne[0] &&
           (p.q.ne[2] == 1 || p.q.nb[2] == c.q_dst.nb[1]) && is_view(p.k, c.k_cache) && is_view(p.v, c.v_cache) &&
           is_aligned(c.q, 16) && is_aligned(c.k, 16) && is_aligned(c.v, 16) && (r.mode == 0 || r.mode == MODE_NEOX) &&
           r.offset == 0 && r.n_dims == head_dim && head_dim % 16 == 0;
}

cudaError_t op_rope_attention(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                              const op_tensor * factors, const rope_cache_params & c, const attention_params & p,
                              char * scratch) {
    new_row_args n = {};
    n.rope         = make_rope_args(r, pos, factors, 1);
    n.q = c.q.data, n.k = c.k.data, n.v = c.v.data;
    n.q_nb1 = c.q.nb[1], n.k_nb1 = c.k.nb[1];
    n.k_id = c.k_ids, n.v_id = c.v_ids;
    const attention_args a = make_attention_args(ctx, p, scratch);
    return attention_decode_supported(p) ? launch_attention_decode(ctx, a, &n)
                                         : launch_vec<value_type<TYPE_F16>, value_type<TYPE_F16>, true>(ctx, a, n);
}

} // namespace macko::cuda
