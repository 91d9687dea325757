// Attention of few tokens in float32 arithmetic, for every type and head size that attention-decode.cu does not
// support.
//
// A block processes a split of the positions of one KV head, for up to MAX_HEADS query heads that share it. LANES lanes
// hold a row of K or V, 8 elements each; the lane groups of the block process positions in turn. The last block of a
// head to finish combines the splits in order. With ROPE the kernel also rotates the query and the new key of one
// token, and writes the new key and value to the cache.
//
// The code of this kernel runs once per launch, with cold caches. On an H200 its time at short contexts is that of
// fetching instructions: 16 us with 8 rows unrolled, 9 us with 4. So loops are short, and there is neither a 64-bit
// division nor the library's tanh.
//
// Only attention-vec-*.cu include this file; they divide the types among translation units.
#pragma once

#include "cuda/ops/attention.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

template <int LANES> constexpr int vec_warps() { return LANES == 32 ? 8 : 16; }
constexpr int                      VEC_ROWS = 4; // positions that a lane group loads at a time

// Rotates elements e0 ... e0 + 7 of a head, which is distributed over the lanes of a group, by `angle` of each pair.
template <int LANES>
__device__ __forceinline__ void rotate_row(const rope_params & p, const rotation * angle, int e0, float x[8]) {
    if (p.mode == 0) { // pairs of neighbors
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

template <typename TK, // value_type of K
          typename TV, // value_type of V
          int  LANES,  // lanes that hold a row of K or V, 8 elements each
          int  G,      // query heads of the block
          bool ROPE>   // first rotate q and the new k, and write the new rows of K and V to the cache
__global__ void __launch_bounds__(vec_warps<LANES>() * WARP)
    attention_vec_kernel(const __grid_constant__ attention_args p, // cache, mask, shapes and results
                         const __grid_constant__ new_row_args   n) { // ROPE: q, k and v of the new token
    // How the block divides its work:
    //
    //   grid            x: splits of the positions; y: KV heads and chunks of their query heads; z: streams and tokens
    //
    //   positions       0  1  2  ...                     of the split
    //   lane group 0    0, GROUPS, 2 GROUPS ...          VEC_ROWS positions per round
    //   lane group 1    1, GROUPS + 1, ...
    //   lane i          elements 8 i ... 8 i + 7 of q, K and V
    //
    // Phases: request mask, K and V; load and rotate q; for each round multiply q by K, reduce over the lane group,
    // update the maximum, add weight * V; reduce over the groups and warps; write the result and combine the splits.
    constexpr int       WARPS = vec_warps<LANES>(), THREADS = WARPS * WARP;
    constexpr int       GROUPS = THREADS / LANES; // lane groups of the block; each processes every GROUPS-th position
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
    // F16 rows of one head: the rows of the next round are loaded while this round is multiplied. With more heads there
    // are too few registers.
    constexpr bool RAW   = std::is_same_v<TK, value_type<TYPE_F16>> && std::is_same_v<TV, value_type<TYPE_F16>>;
    constexpr bool AHEAD = RAW && G == 1;
    constexpr int  ROUND = GROUPS * VEC_ROWS; // positions
    // most of the cache was written long ago: prefetch it to L2 while the previous kernel ends
    if (!AHEAD || end > split * p.split_size + 2 * ROUND) {
        for (int pos = split * p.split_size + static_cast<int>(threadIdx.x); pos < end; pos += THREADS) {
            prefetch_row(k_base + pos * p.k.nb[1],
                         static_cast<int>(p.k.ne[0] / TK::BLOCK * static_cast<int>(sizeof(typename TK::block))));
            prefetch_row(v_base + pos * p.v.nb[1],
                         static_cast<int>(p.v.ne[0] / TV::BLOCK * static_cast<int>(sizeof(typename TV::block))));
        }
    }
    // With ROPE the previous kernel is a matrix product, so the rows of the first round are loaded before it ends.
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
    // the mask of a round of positions, and its slope
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
    const auto is_seen = [&](const round_mask & r) { // for any lane of the warp
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

    // ---- load q; rotate it and the new key, and write the new rows to the cache ----
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
    float new_k[8] = {}, new_v[8] = {}; // rounded like the cache
    int   k_row = -1, v_row = -1;
    if constexpr (ROPE) {
        k_row = new_k_row(n);
        v_row = new_v_row(n);
        if (has_k) {
            value_type<TYPE_F32>::load8(n.k + kv_head * n.k_nb1, e0, new_k);
            value_type<TYPE_F32>::load8(n.v + kv_head * head_dim * static_cast<int64_t>(sizeof(float)), e0, new_v);
        }
        if (static_cast<int>(threadIdx.x) < head_dim / 2) { // while the loads are in flight
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

    // ---- for each round: load, multiply, update the maximum, add ----
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
        // multiply q by K
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
            if constexpr (ROPE) { // another block may not have written these rows yet
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
            bool is_hidden = true; // hidden from all heads: a weight of 0 times such a row may be NaN
#pragma unroll
            for (int g = 0; g < G; g++) {
                is_hidden = is_hidden && bias[r][g] == -INFINITY;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[r][i] = is_hidden ? 0 : v[r][i];
            }
        }
        // reduce over the lane group, update the maximum, and add weight * V
#pragma unroll
        for (int g = 0; g < G; g++) {
            float new_max = max[g];
#pragma unroll
            for (int r = 0; r < VEC_ROWS; r++) {
                const float s = warp_sum<LANES>(score[r][g]); // by all lanes, even for hidden positions
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

    // ---- reduce over the lane groups of a warp, then over the warps, in order ----
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
    const int64_t row0 =
        (static_cast<int64_t>(stream) * n_tokens + token) * n_heads + head0; // row of dst and of partial
    // write the result, or the partial sums of this split
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

} // namespace

} // namespace macko::cuda
