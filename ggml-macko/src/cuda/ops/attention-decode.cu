// Attention of few tokens over an F16 or quantized cache, on tensor cores. A block processes one split of the positions
// of one KV head, one token, and up to 4 query heads that share the KV head. A warp processes 16 positions at a time,
// so a short context is one round of the 16 warps of a block.
//
//   scores   K (16 positions x head_dim) times q, whose F16 parts (q = high + low, 22 bits) are two of 8 columns per
//            head
//   sums     V transposed (head_dim x 16 positions) times the weights, again with high and low parts in two columns
//
// The order of the dimensions inside a product does not matter, so both operands are read in 16-byte pieces in their
// memory order.
//
// The code runs once per launch, with cold caches: at short contexts its time is that of fetching instructions and of
// dependent memory accesses. Loads of an SM return in order, so the operands of the scores are requested first: the
// mask and K before the previous kernel ends (with ROPE, where that kernel writes nothing to the cache), then q, then
// V. With ROPE, q is loaded by bulk copies on GPUs that have them, because these do not queue behind K.
//
// Short contexts (RANKS = 2): a cluster of two blocks on two SMs shares the positions of a head. Each warp sends the
// first half of its sums to one block and the second half to the other.
//
// attention-quantized.cuh reads the quantized types.
#include "cuda/ops/attention-quantized.cuh"
#include "cuda/ops/attention.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

constexpr float WEIGHT_BITS = 15; // weights are in 0 ... 2^15, so that low parts of small ones are not subnormal

// The arguments that the kernel reads first are adjacent.
struct decode_args {
    const char *   k, *v;
    const char *   mask;         // or null
    int64_t        k_nb2, v_nb2; // from head to head
    uint32_t       k_nb1, v_nb1;
    int            n_kv, block_size;               // positions in all, and per block
    int            group, heads, chunks, n_tokens; // heads: heads_per_block
    int64_t        mask_nb1, mask_nb2;
    sum_places     sums;
    float          scale, softcap, alibi;
    attention_args rest;
};

// Word i of a vector; i must be a constant.
__device__ __forceinline__ uint32_t word(const uint4 & v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Forces the compiler to compute x here, before a wait, and not at its first use.
__device__ __forceinline__ void compute_now(int & x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void compute_now(const float *& x) { asm volatile("" : "+l"(x)); }

// Clusters (cc 9.0). The receiver's mbarrier counts the bytes that another block sends, like those of bulk copies. So
// the kernel needs no barrier of all threads of the cluster, whose release is a fence of the whole GPU, and no other
// fence.

// The same address in the shared memory of block `rank` of the cluster. Volatile, so that it is computed here.
__device__ __forceinline__ uint32_t seen_from_cluster(uint32_t address, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}
// Sends x to a block of the cluster; both addresses are results of seen_from_cluster().
__device__ __forceinline__ void send(uint32_t to, uint32_t arrived, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
        "r"(arrived), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
        : "memory");
#endif
}
__device__ __forceinline__ void send(uint32_t to, uint32_t arrived, float2 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to),
                 "r"(arrived), "f"(x.x), "f"(x.y)
                 : "memory");
#endif
}
__device__ __forceinline__ void start_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
// Waits until all blocks of the cluster have started; the writes of their threads before start_cluster() are visible
// then.
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define IN_CLUSTERS_OF(n) __cluster_dims__(n, 1, 1)
#else
#define IN_CLUSTERS_OF(n)
#endif

// DEEP is for more than two rounds, where only bandwidth matters: the scores free the registers of K for the next
// round's K, and the sums free those of V, so each warp always has one of them in flight, 64 KB in all. That exceeds
// the 35 KB that an SM's share of the memory bandwidth transfers in a latency of 1 us. Packed rows are always DEEP.
// They are copied to a ring of STAGES rounds in shared memory; each warp has its own ring.
template <typename ROWS, // rows of the cache: f16_rows, or packed_rows of a quantized type
          int  HEAD_DIM, // elements of a row: 64 or 128
          bool ROPE,     // first rotate q and the new k, and write the new rows of K and V to the cache
          int  RANKS,    // blocks of a cluster that share the positions: 1 or 2
          bool DEEP,     // more than two rounds: request the next round while this one is multiplied
          int  WARPS>     // of a block; an SM has room for 16
__global__ void IN_CLUSTERS_OF(RANKS) __launch_bounds__(WARPS * WARP, WARPS < DECODE_WARPS ? DECODE_WARPS / WARPS : 0)
    attention_decode_kernel(const __grid_constant__ decode_args  p,   // cache, mask, shapes and results
                            const __grid_constant__ new_row_args n) { // ROPE: q, k and v of the new token
    // How the block divides its work (lane = 4 g + t):
    //
    //   grid        x: splits of the positions, or ranks of a cluster; y: KV heads and chunks of their query heads;
    //               z: streams and tokens
    //
    //   positions   begin                                          end
    //   round 0     | warp 0 | warp 1 |  ...  | warp 15 |               16 positions each
    //   round 1     | warp 0 | warp 1 |  ...  | warp 15 |
    //
    //   scores      K, 16 positions x HEAD_DIM, times q, HEAD_DIM x 8 columns: high and low parts for each head
    //               lane: rows g and g + 8 of K, 16-byte pieces t, t + 4 ...; gets their scores for my_head
    //   sums        V, HEAD_DIM x 16 positions, times the weights, 16 x 8 columns: high and low parts for each head
    //               lane: rows 2t, 2t + 1, 2t + 8, 2t + 9 of V, pieces g, g + 8 ...; gets dimensions 8 (g + 8c) ... + 7
    //
    // Phases: request mask, K, q and V; rotate and store q; for each round multiply K, compute weights, multiply V;
    // store or send the sums of each warp; reduce them over the warps; write the result and combine the splits.
    constexpr bool PACKED = ROWS::PACKED;
    static_assert(!PACKED || (DEEP && !ROPE && RANKS == 1));
    constexpr int THREADS = WARPS * WARP, ROUND = WARPS * 16; // positions of a round
    // each block reduces DIMS dimensions of the sums of all warps of the cluster
    constexpr int DIMS = HEAD_DIM / RANKS, SOURCES = RANKS * WARPS;
    constexpr int HALF = HEAD_DIM / 2, J = HEAD_DIM / 32, C = HEAD_DIM / 64;
    constexpr int Q_LD = HEAD_DIM + 32;                                // columns are 64 bytes apart in the banks
    __shared__ __align__(16) __half shared_q[2 * MAX_HEADS][Q_LD];     // high and low parts of each head
    __shared__ __align__(16) __half shared_new[2][HEAD_DIM];           // the new rows of K and V
    constexpr bool                  BULK = ROPE && bulk_copies::KNOWN; // loads of q do not wait for K
    __shared__ __align__(16) float raw[MAX_HEADS + 2][HEAD_DIM];
    __shared__ float2              shared_max[MAX_HEADS][SOURCES]; // maximum, and sum of the weights
    __shared__ uint64_t            barriers[2];
    // [SOURCES][heads * DIMS + 4], so that lanes of consecutive sources have no bank conflicts; packed rows use it
    // first
    extern __shared__ __align__(16) float shared_sums[];

    const bulk_copies rows_in = { shared_address(&barriers[0]) }, sums_in = { shared_address(&barriers[1]) };
    if constexpr (BULK || RANKS > 1) {
        if (threadIdx.x == 0) {
            rows_in.init(), sums_in.init();
        }
        start_cluster();
    }
    const int tid = static_cast<int>(threadIdx.x), lane = static_cast<int>(threadIdx.x % WARP),
              warp = static_cast<int>(threadIdx.x / WARP), g = lane >> 2, t = lane & 3;
    const int y = static_cast<int>(blockIdx.y), z = static_cast<int>(blockIdx.z);
    const int rank = RANKS > 1 ? static_cast<int>(blockIdx.x) : 0, split = RANKS > 1 ? 0 : static_cast<int>(blockIdx.x);
    const int kv_head = p.chunks == 1 ? y : y / p.chunks, chunk = y - kv_head * p.chunks;
    const int stream = ROPE ? 0 : p.n_tokens == 1 ? z : z / p.n_tokens, token = ROPE ? 0 : z - stream * p.n_tokens;
    // heads: a power of two; n_mine: number of heads that exist
    const int heads = RANKS > 1 ? 1 : p.heads, n_mine = RANKS > 1 ? 1 : min(heads, p.group - chunk * heads);
    const int head0 = kv_head * p.group + chunk * heads;
    const int begin = static_cast<int>(blockIdx.x) * p.block_size, end = min(p.n_kv, begin + p.block_size);
    int       first = begin + warp * 16; // first position of this warp
    // the head of the block whose scores and sums this lane computes
    const int log_heads = heads >> 1, my_head = t << log_heads >> 2;

    if constexpr (BULK || RANKS > 1) {
        wait_for_cluster(); // before the loads, because it would wait for all of them
    }
    // ---- request the mask, K, q and V ----
    int position = 0, k_row = 0, v_row = 0;
    if constexpr (ROPE) {
        position = *n.rope.pos, k_row = new_k_row(n), v_row = new_v_row(n);
    }
    __half         bias[2]; // mask values of rows g and g + 8
    const __half * mask = reinterpret_cast<const __half *>(p.mask + (head0 + min(my_head, n_mine - 1)) * p.mask_nb2 +
                                                           (ROPE ? 0 : token * p.mask_nb1 + stream * p.rest.mask_nb3));
    const auto     fetch_bias_of = [&](__half * to, int from) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int pos = from + g + 8 * i;
            to[i]         = pos >= end ? __ushort_as_half(0xfc00) : p.mask ? mask[pos] : __ushort_as_half(0);
        }
    };
    const auto   fetch_bias = [&] { fetch_bias_of(bias, first); };
    const char * k_base     = p.k + kv_head * p.k_nb2 + (ROPE ? 0 : stream / p.rest.k_streams * p.rest.k.nb[3]);
    const char * v_base     = p.v + kv_head * p.v_nb2 + (ROPE ? 0 : stream / p.rest.v_streams * p.rest.v.nb[3]);
    const auto k_row_of = [&](int pos) { return k_base + static_cast<uint64_t>(static_cast<uint32_t>(pos)) * p.k_nb1; };
    const auto v_row_of = [&](int pos) { return v_base + static_cast<uint64_t>(static_cast<uint32_t>(pos)) * p.v_nb1; };
    uint4      k[J][2], v[C][4]; // K rows g, g + 8; V rows 2t, 2t + 1, 2t + 8, 2t + 9
    const auto fetch_k = [&] {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto row = reinterpret_cast<const uint4 *>(k_row_of(min(first + g + 8 * i, end - 1))) + t;
#pragma unroll
            for (int j = 0; j < J; j++) {
                k[j][i] = load_once(row + 4 * j);
            }
        }
    };
    const auto v_pos   = [&](int i) { return first + i / 2 * 8 + 2 * t + i % 2; };
    const auto fetch_v = [&] {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const auto row = reinterpret_cast<const uint4 *>(v_row_of(min(v_pos(i), end - 1))) + g;
#pragma unroll
            for (int c = 0; c < C; c++) {
                v[c][i] = load_once(row + 8 * c);
            }
        }
    };

    // PACKED: copies rows g and g + 8 of a round to a stage, K before V
    char *     ring       = reinterpret_cast<char *>(shared_sums);
    const auto ring_stage = [&](int stage) {
        if constexpr (PACKED) {
            return ring + (warp * ROWS::STAGES + stage) * ROWS::STAGE_NBYTES;
        }
        return ring;
    };
    const auto copy_rows = [&](int stage, int from) {
        if constexpr (PACKED) {
            char * to = ring_stage(stage);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = g + 8 * i, pos = min(from + row, end - 1);
                ROWS::copy(to + row * ROWS::PITCH, k_row_of(pos), t);
                ROWS::copy(to + (16 + row) * ROWS::PITCH, v_row_of(pos), t);
            }
        }
    };

    // Each thread has two elements of a row that are rotated together. The rows are those of the query heads, then the
    // new rows of K and V. The last warps come first, because a short context has no positions for them. Blocks with
    // few threads have several roles each.
    constexpr int ROLES = THREADS / HALF, TURNS = ROPE ? 1 : (MAX_HEADS + ROLES - 1) / ROLES;
    static_assert(!ROPE || ROLES >= MAX_HEADS + 2);
    const int role = (THREADS - 1 - tid) / HALF, pair = (THREADS - 1 - tid) % HALF, n_roles = ROPE ? heads + 2 : heads;
    rotation  angle = { 1, 0 };
    if constexpr (ROPE) {
        fetch_bias();
        if (role <= heads) {
            angle = rotation_at(n.rope, static_cast<float>(position), pair, pair);
        }
    }
    const auto sees_with = [&](const __half * of) { // for any lane of the warp
        bool any = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            any |= __half_as_ushort(of[i]) != 0xfc00;
        }
        return __any_sync(FULL_WARP, any) != 0;
    };
    const auto sees   = [&] { return sees_with(bias); };
    bool       wanted = first < end;
    if constexpr (ROPE) {
        wanted = wanted && (warp < WARPS / 2 || sees()); // the mask arrives before the rows of the first half
        if (wanted) {
            fetch_k();
        }
    }
    if constexpr (!DEEP) { // longer caches do not fit in L2
#pragma unroll 1
        for (int pos = begin + ROUND + tid; pos < end; pos += THREADS) { // most rows were written long ago
            prefetch_row(k_row_of(pos), HEAD_DIM * 2);
            prefetch_row(v_row_of(pos), HEAD_DIM * 2);
        }
    }
    const auto raw_row = [&](int i) { // row of a role
        const int    head = head0 + min(i, n_mine - 1);
        const char * row  = nullptr;
        if constexpr (ROPE) {
            row = i < heads    ? n.q + head * n.q_nb1
                  : i == heads ? n.k + kv_head * n.k_nb1
                               : n.v + kv_head * static_cast<int64_t>(HEAD_DIM * sizeof(float));
        } else {
            row = p.rest.q.data + token * p.rest.q.nb[1] + head * p.rest.q.nb[2] + stream * p.rest.q.nb[3];
        }
        return reinterpret_cast<const float *>(row);
    };
    // this warp has no other work if the context is short
    const bool    copies = BULK && warp == WARPS / 2 && lane < n_roles;
    const float * copied = nullptr;
    if (copies) {
        copied = raw_row(lane);
        compute_now(copied);
        if (lane == 0) {
            rows_in.expect(n_roles * HEAD_DIM * 4);
        }
    }
    wait_for_previous();
    const bool neighbours = ROPE && n.rope.p.mode == 0;
    const int  i0 = neighbours ? 2 * pair : pair, i1 = neighbours ? i0 + 1 : pair + HALF;
    if constexpr (BULK) {
        if (copies) {
            rows_in.copy(raw[lane], copied, HEAD_DIM * 4);
        }
    } else {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int of = role + i * ROLES;
            if (of < n_roles) {
                const float * row = raw_row(of);
                copy_float(&raw[of][i0], row + i0);
                copy_float(&raw[of][i1], row + i1);
            }
        }
    }
    if constexpr (!BULK) {
        commit_copies(); // committed here, because loads return in order
    }
    if constexpr (!ROPE) {
        fetch_bias();
        __syncwarp(); // keeps the order of the loads
        if (!PACKED && wanted) {
            fetch_k();
        }
    }
    if (!PACKED && wanted) {
        fetch_v();
    }
    const float   slope = p.alibi != 0 ? slope_of(p.rest, head0 + min(my_head, n_mine - 1)) : LOG2_E;
    const int64_t row0 =
        (static_cast<int64_t>(stream) * p.n_tokens + token) * static_cast<int>(p.rest.dst.ne[1]) + head0;
    if constexpr (!BULK) {
        wait_for_committed_copies();
    }
    if (RANKS > 1 && tid == THREADS / 2) { // each warp with positions sends its part, even if all are hidden
        int n_warps = 0;
        for (int i = 0; i < RANKS; i++) {
            n_warps += min(WARPS, (max(0, min(p.n_kv - i * p.block_size, p.block_size)) + 15) / 16);
        }
        sums_in.expect(n_warps * static_cast<int>(DIMS * sizeof(float) + sizeof(float2)));
    }
    // The products leave the sums of a head in 4 / heads lanes (t); all copies are equal.
    const bool puts = (t & (4 >> log_heads) - 1) == 0, sends = first < end;
    const int  ld     = heads * DIMS + 4;
    const int  source = rank * WARPS + warp;
    const auto place  = [&](int c) {
        return shared_sums + source * ld + my_head * DIMS + (PACKED ? 64 * c + 4 * g : 8 * (g + 8 * c) % DIMS);
    };
    uint32_t to[C], to_arrived[C], max_to = 0, max_arrived = 0; // addresses in the blocks of the cluster
    if constexpr (RANKS > 1) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            const int of  = 8 * (g + 8 * c) / DIMS;
            to[c]         = seen_from_cluster(shared_address(place(c)), of),
            to_arrived[c] = seen_from_cluster(sums_in.arrived, of);
        }
        max_to      = seen_from_cluster(shared_address(&shared_max[my_head][source]), g % RANKS),
        max_arrived = seen_from_cluster(sums_in.arrived, g % RANKS);
    }
    // ---- rotate q and the new row of K; split and store them in shared memory ----
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int of = role + i * ROLES;
        if (of >= n_roles) {
            break;
        }
        if constexpr (BULK) {
            rows_in.wait(0);
        }
        const float2 x       = make_float2(raw[of][i0], raw[of][i1]);
        const bool   rotates = ROPE && of <= heads;
        const float  x0      = saturate_f16(rotates ? x.x * angle.cosine - x.y * angle.sine : x.x),
                    x1       = saturate_f16(rotates ? x.x * angle.sine + x.y * angle.cosine : x.y);
        const __half2 a = split_f16(x0), b = split_f16(x1);
        if (of < heads) {
            const int p0 = ROWS::place_of(i0), p1 = ROWS::place_of(i1);
            shared_q[2 * of][p0] = __low2half(a), shared_q[2 * of + 1][p0] = __high2half(a);
            shared_q[2 * of][p1] = __low2half(b), shared_q[2 * of + 1][p1] = __high2half(b);
        } else {
            shared_new[of - heads][i0] = __low2half(a);
            shared_new[of - heads][i1] = __low2half(b);
        }
    }
    __syncthreads();
    // write the new rows of K and V to the cache
    if (ROPE && warp == WARPS - 1 && blockIdx.x == 0 && chunk == 0) {
        for (int i = lane; i < HEAD_DIM / 4; i += WARP) { // 16 bytes per lane
            const int is_v = i / (HEAD_DIM / 8), e = i % (HEAD_DIM / 8) * 8;
            *reinterpret_cast<uint4 *>(const_cast<char *>(is_v ? v_row_of(v_row) : k_row_of(k_row)) + e * 2) =
                *reinterpret_cast<const uint4 *>(&shared_new[is_v][e]);
        }
    }

    // sums of dimensions 8 (g + 8c) on; PACKED: of the places 64c + 4g and 64c + 32 + 4g on
    float          max = -INFINITY, weight = 0, sum[C][8] = {};
    const __half * my_q = &shared_q[(g << log_heads >> 3) * 2 + (g & 1)][8 * t];
    // DEEP: rows that a round's mask hides are not read, so the mask is requested one round before the rows
    constexpr int STAGES = ROWS::STAGES;
    int           stage  = 0; // stage of this round
    __half        next_bias[STAGES][2];
    bool          sees_next    = false;
    const auto    request_bias = [&] { fetch_bias_of(next_bias[STAGES - 1], first + STAGES * ROUND); };
    const auto    request_k    = [&] { // requests the next round's K after the last use of this round's
        sees_next = sees_with(next_bias[0]);
        first += ROUND;
        if (sees_next) {
            fetch_k();
        }
    };
    const auto request_v = [&] {
        if (sees_next) {
            fetch_v();
        }
    };
    const auto request_rows = [&] { // requests the rows of the round with the latest mask, into the stage of this round
        __syncwarp();               // all lanes have read the stage
        if (sees_with(next_bias[STAGES - 1])) {
            copy_rows(stage, first + STAGES * ROUND);
        }
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        first += ROUND;
    };
    if constexpr (PACKED) { // as if earlier rounds had requested them
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            fetch_bias_of(next_bias[i], first + (i + 1) * ROUND);
        }
        if (wanted) {
            copy_rows(0, first);
        }
        commit_copies();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (sees_with(next_bias[i])) {
                copy_rows(i + 1, first + (i + 1) * ROUND);
            }
            commit_copies();
        }
    }
    if constexpr (DEEP) {
        request_bias();
    }
    // ---- for each round: multiply K, compute weights, multiply V ----
    while (true) { // the same trip count in all warps
        if (sees()) {
            if (ROPE && static_cast<unsigned>(k_row - first) < 16u) { // another block may not have written this row yet
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int j = 0; j < J; j++) {
                        if (first + g + 8 * i == k_row) {
                            k[j][i] = *reinterpret_cast<const uint4 *>(&shared_new[0][32 * j + 8 * t]);
                        }
                    }
                }
            }
            if (ROPE && static_cast<unsigned>(v_row - first) < 16u) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int c = 0; c < C; c++) {
                        if (v_pos(i) == v_row) {
                            v[c][i] = *reinterpret_cast<const uint4 *>(&shared_new[1][8 * (g + 8 * c)]);
                        }
                    }
                }
            }
            // multiply K by q
            float        score[2], new_max = max;
            const char * values[4];     // PACKED: V rows 2t, 2t + 1, 2t + 8, 2t + 9
            float        v_scale[2][J]; // PACKED: scales of rows g, g + 8
            if constexpr (PACKED) {
                wait_for_committed_copies<STAGES - 1>();
                __syncwarp(); // wait for the copies of all lanes
                const auto packed_row = [&](int i, const char * row) {
                    return ring_stage(stage) + i * ROWS::PITCH + ROWS::offset_in_piece(row);
                };
                const char * keys[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int pos = min(first + g + 8 * i, end - 1);
                    keys[i]       = packed_row(g + 8 * i, k_row_of(pos));
                    ROWS::load_scales(v_scale[i], packed_row(16 + g + 8 * i, v_row_of(pos)));
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    values[i] = packed_row(16 + v_pos(i) - first, v_row_of(min(v_pos(i), end - 1)));
                }
                ROWS::multiply_keys(score, keys, my_q, t);
                score[0] *= p.scale, score[1] *= p.scale;
            } else {
                float dot[2][4] = {};
#pragma unroll
                for (int j = 0; j < J; j++) {
                    const uint4    b     = *reinterpret_cast<const uint4 *>(my_q + 32 * j);
                    const uint32_t a0[4] = { k[j][0].x, k[j][1].x, k[j][0].y, k[j][1].y },
                                   a1[4] = { k[j][0].z, k[j][1].z, k[j][0].w, k[j][1].w };
                    multiply_add<__half>(dot[0], a0, b.x, b.y);
                    multiply_add<__half>(dot[1], a1, b.z, b.w);
                }
                if constexpr (DEEP) {
                    request_k();
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    score[i] = p.scale * ((dot[0][2 * i] + dot[1][2 * i]) + (dot[0][2 * i + 1] + dot[1][2 * i + 1]));
                }
            }
            // apply softcap, mask and slope; find the new maximum
            if (p.softcap != 0) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    score[i] = capped(p.rest, score[i]);
                }
            }
            unsigned seen[2], all = FULL_WARP;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float m = __half2float(bias[i]);
                score[i]      = m == -INFINITY ? m : score[i] + slope * m; // even if the product is NaN
                seen[i]       = __ballot_sync(FULL_WARP, m != -INFINITY);
                all &= seen[i];
                if constexpr (PACKED) { // weights are multiplied by scales; fmaxf() ignores -INFINITY + NaN
                    float largest = 0x1p-24f;
#pragma unroll
                    for (int j = 0; j < J; j++) {
                        largest = fmaxf(largest, fabsf(v_scale[i][j]));
                    }
                    new_max = fmaxf(new_max, score[i] + __log2f(largest) - WEIGHT_BITS);
                } else {
                    new_max = fmaxf(new_max, score[i] - WEIGHT_BITS);
                }
            }
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2) {
                new_max = fmaxf(new_max, __shfl_xor_sync(FULL_WARP, new_max, offset));
            }
            if (!PACKED && all != FULL_WARP) { // a weight of 0 times a hidden row may be NaN
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const bool hidden = (seen[i / 2] >> (8 * t + 4 * (i % 2)) & 15) == 0;
#pragma unroll
                    for (int c = 0; c < C; c++) {
                        v[c][i] = hidden ? make_uint4(0, 0, 0, 0) : v[c][i];
                    }
                }
            }
            // rescale the old sums; compute weights and multiply V by them
            const float old = rescale(max, new_max), base = new_max == -INFINITY ? 0 : new_max;
            float       out[C * 4][4] = {}, weights[4] = {};
            max = new_max;
            if constexpr (PACKED) {
                const float w[2] = { fast_exp2(score[0] - base), fast_exp2(score[1] - base) };
                weight           = weight * old + (w[0] + w[1]);
                ROWS::multiply_values(out, values, w, v_scale, g);
#pragma unroll
                for (int c = 0; c < C; c++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const float * o = &out[4 * c + i / 2][i % 2 * 2];
                        sum[c][i]       = sum[c][i] * old + (o[0] + o[1]);
                    }
                }
            } else {
                const uint32_t b0 = transposed(split_f16(fast_exp2(score[0] - base))),
                               b1 = transposed(split_f16(fast_exp2(score[1] - base)));
#pragma unroll
                for (int c = 0; c < C; c++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) { // dimensions 8 (g + 8c) + i and 8 (g + 8c) + 4 + i
                        const int  which   = i % 2 ? 0x7632 : 0x5410;
                        const auto pair_of = [&](int r, int w) {
                            return __byte_perm(word(v[c][r], w), word(v[c][r + 1], w), which);
                        };
                        const uint32_t a[4] = { pair_of(0, i / 2), pair_of(0, 2 + i / 2), pair_of(2, i / 2),
                                                pair_of(2, 2 + i / 2) };
                        multiply_add<__half>(out[c * 4 + i], a, b0, b1);
                    }
                }
                const uint32_t ones[4] = { 0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00 };
                multiply_add<__half>(weights, ones, b0, b1);
                weight = weight * old + (weights[0] + weights[1]);
#pragma unroll
                for (int c = 0; c < C; c++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const float * o = &out[4 * c + i % 4][i / 4 * 2];
                        sum[c][i]       = sum[c][i] * old + (o[0] + o[1]);
                    }
                }
                if constexpr (DEEP) {
                    request_v();
                }
            }
        } else if constexpr (DEEP && !PACKED) {
            request_k();
            request_v();
        }
        if constexpr (PACKED) {
            request_rows();
        } else if constexpr (!DEEP) {
            first += ROUND;
        }
        if (first - warp * 16 >= end) {
            break;
        }
        // move on to the next round's mask and rows
        if constexpr (DEEP) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                bias[i] = next_bias[0][i];
#pragma unroll
                for (int j = 0; j + 1 < STAGES; j++) {
                    next_bias[j][i] = next_bias[j + 1][i];
                }
            }
            request_bias();
        } else {
            fetch_bias();
            fetch_k();
            fetch_v();
        }
    }
    // the sums replace the rows
    if constexpr (PACKED) { // the sums go where the rows were
        weight += __shfl_xor_sync(FULL_WARP, weight, 4);
        weight += __shfl_xor_sync(FULL_WARP, weight, 8);
        weight += __shfl_xor_sync(FULL_WARP, weight, 16);
        wait_for_committed_copies();
        __syncthreads();
    }
    if (puts && (RANKS == 1 || sends)) {
#pragma unroll
        for (int c = 0; c < C; c++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 x = make_float4(sum[c][4 * i], sum[c][4 * i + 1], sum[c][4 * i + 2], sum[c][4 * i + 3]);
                if constexpr (RANKS > 1) {
                    send(to[c] + 16 * i, to_arrived[c], x);
                } else {
                    reinterpret_cast<float4 *>(place(c))[PACKED ? 8 * i : i] = x;
                }
            }
        }
        if (g < RANKS) { // one lane per block
            if constexpr (RANKS > 1) {
                send(max_to, max_arrived, make_float2(max, weight));
            } else {
                shared_max[my_head][source] = make_float2(max, weight);
            }
        }
    }
    // ---- reduce over the warps ----
    //
    // Each lane has the sums of 4 dimensions of one source. After the shuffles, the first 4 lanes have one dimension
    // each. Whole warps take part.
    constexpr int PIECES = DIMS / 4, HEADS_AT_ONCE = THREADS / SOURCES / PIECES;
    const int     from = tid % SOURCES, piece = tid / SOURCES, e = piece % PIECES * 4, from_pos = from % WARPS * 16;
    int           sent = RANKS == 1 || (from_pos < p.block_size && from / WARPS * p.block_size + from_pos < p.n_kv);
    // at: index in the head's row
    int top_at = piece / PIECES * SOURCES + from, sum_at = from * ld + piece / PIECES * DIMS + e,
        at = rank * DIMS + e + from;
    compute_now(sent), compute_now(top_at), compute_now(sum_at), compute_now(at);
    if constexpr (RANKS > 1) {
        sums_in.wait(0);
    } else {
        __syncthreads();
    }
#pragma unroll 1
    for (int r = piece / PIECES; r < n_mine;
         r += HEADS_AT_ONCE, top_at += HEADS_AT_ONCE * SOURCES, sum_at += HEADS_AT_ONCE * DIMS) {
        const float2 top     = sent ? shared_max[0][top_at] : make_float2(-INFINITY, 0);
        const float4 x       = sent ? *reinterpret_cast<const float4 *>(shared_sums + sum_at) : make_float4(0, 0, 0, 0);
        float        all_max = top.x;
#pragma unroll
        for (int offset = SOURCES / 2; offset > 0; offset /= 2) {
            all_max = fmaxf(all_max, __shfl_xor_sync(FULL_WARP, all_max, offset));
        }
        const float factor         = all_max == -INFINITY ? 0 : fast_exp2(top.x - all_max),
                    sum_of_weights = warp_sum<SOURCES>(factor * top.y);
        const bool  upper = from & 2, odd = from & 1;
        const float a   = (upper ? x.z : x.x) * factor + __shfl_xor_sync(FULL_WARP, (upper ? x.x : x.z) * factor, 2);
        const float b   = (upper ? x.w : x.y) * factor + __shfl_xor_sync(FULL_WARP, (upper ? x.y : x.w) * factor, 2);
        float       sum = (odd ? b : a) + __shfl_xor_sync(FULL_WARP, odd ? a : b, 1);
#pragma unroll
        for (int offset = 4; offset < SOURCES; offset *= 2) {
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        }
        // write the result, or the partial sums of this split
        if (from < 4) {
            put_sum(p.sums, HEAD_DIM, row0 + r, head0 + r, split, ROWS::element_at(at), sum, all_max, sum_of_weights);
        }
    }
    // ---- combine the splits ----
    if constexpr (RANKS == 1) {
        combine_splits(p.rest, row0, head0, n_mine);
    }
}

dim3 grid_of(const attention_args & a) {
    return { static_cast<unsigned>(a.n_splits * a.ranks), static_cast<unsigned>(a.k.ne[2] * a.chunks),
             static_cast<unsigned>(a.q.ne[1] * a.q.ne[3]) };
}

template <int HEAD_DIM, int RANKS, int WARPS> constexpr size_t sums_nbytes(int heads) {
    return sizeof(float) * RANKS * WARPS * static_cast<size_t>(heads * (HEAD_DIM / RANKS) + 4);
}

template <int HEAD_DIM, bool ROPE, int RANKS, bool DEEP, int WARPS>
cudaError_t launch_rows(const op_context & ctx, const decode_args & d, const new_row_args & n) {
    return launch(ctx, attention_decode_kernel<f16_rows, HEAD_DIM, ROPE, RANKS, DEEP, WARPS>, grid_of(d.rest),
                  WARPS * WARP, sums_nbytes<HEAD_DIM, RANKS, WARPS>(d.heads), d, n);
}

template <int HEAD_DIM, int RANKS, bool DEEP>
cudaError_t launch_rows(const op_context & ctx, const decode_args & d, const new_row_args * n) {
    return n ? launch_rows<HEAD_DIM, true, RANKS, DEEP, DECODE_WARPS>(ctx, d, *n)
             : launch_rows<HEAD_DIM, false, RANKS, DEEP, DECODE_WARPS>(ctx, d, {});
}

template <int HEAD_DIM> cudaError_t launch_rows(const op_context & ctx, const decode_args & d, const new_row_args * n) {
    return d.rest.small_blocks                    ? launch_rows<HEAD_DIM, false, 1, true, SMALL_WARPS>(ctx, d, {})
           : d.rest.ranks == 2                    ? launch_rows<HEAD_DIM, 2, false>(ctx, d, n)
           : d.block_size > 2 * DECODE_WARPS * 16 ? launch_rows<HEAD_DIM, 1, true>(ctx, d, n)
                                                  : launch_rows<HEAD_DIM, 1, false>(ctx, d, n);
}

template <typename ROWS, int HEAD_DIM> constexpr size_t packed_nbytes() {
    return std::max<size_t>(DECODE_WARPS * ROWS::STAGES * ROWS::STAGE_NBYTES,
                            sums_nbytes<HEAD_DIM, 1, DECODE_WARPS>(MAX_HEADS));
}

// The result of f(rows, head size), both as values of empty types; `otherwise` for types and sizes without a kernel.
template <typename R, typename F> R with_packed_rows(tensor_type type, int64_t head_dim, R otherwise, F && f) {
    const auto with_dim = [&](auto type_of) {
        constexpr tensor_type TYPE = decltype(type_of)::value;
        return head_dim == 64    ? f(packed_rows<TYPE, 64>(), std::integral_constant<int, 64>())
               : head_dim == 128 ? f(packed_rows<TYPE, 128>(), std::integral_constant<int, 128>())
                                 : otherwise;
    };
    switch (type) {
        case TYPE_Q8_0:   return with_dim(std::integral_constant<tensor_type, TYPE_Q8_0>());
        case TYPE_Q4_0:   return with_dim(std::integral_constant<tensor_type, TYPE_Q4_0>());
        case TYPE_Q5_0:   return with_dim(std::integral_constant<tensor_type, TYPE_Q5_0>());
        case TYPE_IQ4_NL: return with_dim(std::integral_constant<tensor_type, TYPE_IQ4_NL>());
        default:          return otherwise;
    }
}

} // namespace

bool attention_decode_supported(const attention_params & p) {
    const bool one_kind = p.k.type == p.v.type && p.k.ne[0] == p.v.ne[0];
    if (!one_kind || p.k.nb[1] > UINT32_MAX || p.v.nb[1] > UINT32_MAX) {
        return false;
    }
    if (p.k.type == TYPE_F16) {
        return p.k.ne[0] == 64 || p.k.ne[0] == 128;
    }
    return with_packed_rows(p.k.type, p.k.ne[0], false, [&](auto rows, auto) {
        return is_aligned(p.k, decltype(rows)::ALIGNMENT) && is_aligned(p.v, decltype(rows)::ALIGNMENT);
    });
}

bool attention_decode_fits(const op_context & ctx, const attention_params & p) {
    return p.k.type == TYPE_F16 || with_packed_rows(p.k.type, p.k.ne[0], false, [&](auto rows, auto head_dim) {
               constexpr size_t STATIC_NBYTES = 12 * 1024; // at most
               return ctx.cc >= 80 && packed_nbytes<decltype(rows), decltype(head_dim)::value>() + STATIC_NBYTES <=
                                          static_cast<size_t>(ctx.shared_nbytes);
           });
}

cudaError_t launch_attention_decode(const op_context & ctx, const attention_args & a, const new_row_args * n) {
    decode_args d = {};
    d.k = a.k.data, d.v = a.v.data, d.mask = a.has_mask ? a.mask.data : nullptr;
    d.k_nb1 = static_cast<uint32_t>(a.k.nb[1]), d.v_nb1 = static_cast<uint32_t>(a.v.nb[1]), d.k_nb2 = a.k.nb[2],
    d.v_nb2 = a.v.nb[2];
    d.n_kv = static_cast<int>(a.k.ne[1]), d.block_size = (a.split_size + 16 * a.ranks - 1) / (16 * a.ranks) * 16,
    d.n_tokens = static_cast<int>(a.q.ne[1]);
    d.group = a.group, d.heads = a.heads_per_block, d.chunks = a.chunks;
    d.mask_nb1 = a.mask.nb[1], d.mask_nb2 = a.mask_nb2;
    d.sums  = places_of(a);
    d.scale = a.scale, d.softcap = a.softcap, d.alibi = a.alibi;
    d.rest = a;
    if (a.k.type == TYPE_F16) {
        return a.k.ne[0] == 64 ? launch_rows<64>(ctx, d, n) : launch_rows<128>(ctx, d, n);
    }
    return with_packed_rows(a.k.type, a.k.ne[0], cudaErrorInvalidValue, [&](auto rows, auto head_dim) {
        constexpr int    HEAD_DIM = decltype(head_dim)::value;
        constexpr size_t nbytes   = packed_nbytes<decltype(rows), HEAD_DIM>();
        const auto       kernel   = attention_decode_kernel<decltype(rows), HEAD_DIM, false, 1, true, DECODE_WARPS>;
        CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(nbytes)));
        return launch(ctx, kernel, grid_of(a), DECODE_WARPS * WARP, nbytes, d, new_row_args{});
    });
}

} // namespace macko::cuda
