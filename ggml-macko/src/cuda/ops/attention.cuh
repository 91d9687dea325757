// Shared by the attention kernels: arguments, the score of a position, and the final division of sums by weights.
#pragma once

#include "cuda/lib/mma.cuh"
#include "cuda/ops/rope.cuh"

#include <type_traits>

namespace macko::cuda {

constexpr float LOG2_E     = 1.4426950408889634f;
constexpr int   MAX_HEADS  = 4; // query heads that use the same rows of K and V in a block
constexpr int   MAX_SPLITS = 64;
// Warps of a block of attention_decode_kernel, which fills an SM, or of one of many blocks, which share it. A warp
// processes 16 positions in a round. Splits are whole rounds of the former: combining shorter ones would cost more than
// it saves.
constexpr int DECODE_WARPS = 16, SMALL_WARPS = 4, DECODE_ROUND = DECODE_WARPS * 16;

struct attention_args {
    const float * sinks;
    bool          has_mask;
    float         scale;   // factor of K q, into the exponent of 2 (or into softcap's argument)
    float         softcap; // softcap * log2(e); 0: none
    float         alibi;   // base-2 logarithm of the first slope: -max_bias / n_head_log2; 0: none
    uint32_t      n_head_log2;
    int           group; // query heads per KV head
    // query heads of a block; blocks per KV head
    int     heads_per_block, chunks;
    int     k_streams, v_streams; // consecutive streams of q with the same K, V
    int64_t mask_nb2, mask_nb3;   // 0 if the mask is shared
    // blocks of a cluster that share the positions of the only split (attention_decode_kernel); else 1
    int     ranks;
    bool    small_blocks;         // of attention_decode_kernel
    int     n_splits, split_size; // positions
    float * partial;              // [token, head][split][head_dim_v + 2]: sums, then maximum and sum of weights
    // attention_tile_kernel: effect of the mask on [mask][tile of tokens][tile of positions]
    const unsigned char * classes;
    unsigned *            counters;
    op_tensor             dst, q, k, v, mask;
};

// The operands of a rotation: q, k and v of one token before rotation, and the cache rows for k and v.
struct new_row_args {
    rope_args      rope;
    const char *   q, *k, *v;    // f32
    int64_t        q_nb1, k_nb1; // from head to head
    const int64_t *k_id, *v_id;  // on the GPU
    int64_t        k_rows, v_rows;
};

static __device__ __forceinline__ int new_k_row(const new_row_args & n) {
    return static_cast<int>(existing_row(*n.k_id, n.k_rows));
}
static __device__ __forceinline__ int new_v_row(const new_row_args & n) {
    return static_cast<int>(existing_row(*n.v_id, n.v_rows));
}

// ALiBi: the mask values are multiplied by powers of one number; from head n_head_log2 on by odd powers of its root.
static __device__ __forceinline__ float slope_of(const attention_args & p, int head) {
    const int h = head - static_cast<int>(p.n_head_log2);
    return LOG2_E * exp2f(p.alibi * (h < 0 ? static_cast<float>(head + 1) : static_cast<float>(h) + 0.5f));
}

// Softcap of a product that contains p.scale; only called if there is a softcap.
static __device__ __forceinline__ float capped(const attention_args & p, float s) {
    return p.softcap * (1 - __fdividef(2, exp2f(2 * LOG2_E * s) + 1)); // tanh, to 2e-7 absolute
}
static __device__ __forceinline__ float score_of(const attention_args & p, float product) {
    return p.softcap != 0 ? capped(p, p.scale * product) : p.scale * product;
}

// 0 below 2^-126 and for -INFINITY.
static __device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Factor for sums relative to an older maximum; 0 if nothing was summed yet.
static __device__ __forceinline__ float rescale(float old_max, float new_max) {
    return old_max == -INFINITY ? 0.0f : exp2f(old_max - new_max);
}

static __device__ __forceinline__ void prefetch_row(const char * row, int nbytes) {
    for (int i = 0; i < nbytes; i += 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
    }
}

// Divides sums of a head over all positions, relative to the maximum `max`, by the sum of the weights. sink: of the
// head, or null.
static __device__ __forceinline__ float divided(float sum, float max, float weight, const float * sink) {
    if (sink) {
        const float s = *sink * LOG2_E, with_sink = fmaxf(max, s), f = rescale(max, with_sink);
        sum *= f;
        weight = weight * f + exp2f(s - with_sink);
    }
    return weight > 0 ? __fdividef(sum, weight) : 0;
}

// Destinations of put_sum.
struct sum_places {
    float *       dst, *partial; // see attention_args
    const float * sinks;
    int           n_splits;
};
static __host__ __device__ __forceinline__ sum_places places_of(const attention_args & p) {
    return { reinterpret_cast<float *>(p.dst.data), p.partial, p.sinks, p.n_splits };
}

// Stores element e of the sums over a split's positions, relative to the maximum `max`, with the sum of the weights.
// row: of dst and of partial.
static __device__ __forceinline__ void put_sum(const sum_places & p, int head_dim, int64_t row, int head, int split,
                                               int e, float sum, float max, float weight) {
    if (p.n_splits > 1) {
        float * out = p.partial + (row * p.n_splits + split) * (head_dim + 2);
        out[e]      = sum;
        if (e == 0) {
            out[head_dim]     = max;
            out[head_dim + 1] = weight;
        }
        return;
    }
    p.dst[row * head_dim + e] = divided(sum, max, weight, p.sinks ? p.sinks + head : nullptr);
}

// Called by all threads of a block that has written its split of some rows. Returns whether it is the last of n_splits;
// that block then reads the results of the others. counter: 0 before the first and after the last; is_last: in shared
// memory.
static __device__ __forceinline__ bool is_last_split(unsigned * counter, int n_splits, bool * is_last) {
    __syncthreads();
    if (threadIdx.x == 0) { // with the barriers, it releases and acquires the writes of the other blocks
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        *is_last = before == static_cast<unsigned>(n_splits - 1);
        if (*is_last) {
            *counter = 0;
        }
    }
    __syncthreads();
    return *is_last;
}

// Called by all threads of a block after put_sum. The last block of these rows combines their splits in order, so the
// result does not depend on which block is last.
static __device__ __forceinline__ void combine_splits(const attention_args & p, int64_t row0, int head0, int n_rows) {
    __shared__ bool  is_last;
    __shared__ float part_max[MAX_HEADS * MAX_SPLITS], part_weight[MAX_HEADS * MAX_SPLITS];
    if (p.n_splits == 1) {
        return;
    }
    if (!is_last_split(p.counters + blockIdx.z * gridDim.y + blockIdx.y, p.n_splits, &is_last)) {
        return;
    }
    const int head_dim = static_cast<int>(p.dst.ne[0]), ld = head_dim + 2, n = p.n_splits;
    for (int i = static_cast<int>(threadIdx.x); i < n_rows * n; i += static_cast<int>(blockDim.x)) {
        const float * part = p.partial + (row0 * n + i) * ld + head_dim;
        part_max[i]        = __ldcg(part);
        part_weight[i]     = __ldcg(part + 1);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < n_rows * head_dim; i += static_cast<int>(blockDim.x)) {
        const int     r = i / head_dim, e = i % head_dim;
        const float * part = p.partial + (row0 + r) * n * ld + e;
        const float   sink = p.sinks ? p.sinks[head0 + r] * LOG2_E : -INFINITY;
        float         max  = sink;
        for (int j = 0; j < n; j++) {
            max = fmaxf(max, part_max[r * n + j]);
        }
        float sum = 0, weight = p.sinks ? exp2f(sink - max) : 0.0f;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            const float f = rescale(part_max[r * n + j], max);
            sum += f * __ldcg(part + j * ld);
            weight += f * part_weight[r * n + j];
        }
        reinterpret_cast<float *>(p.dst.data)[(row0 + r) * head_dim + e] = weight > 0 ? __fdividef(sum, weight) : 0;
    }
}

// ---- few tokens, rows of K and V of 64 or 128 elements in F16, Q8_0, Q4_0, Q5_0 or IQ4_NL (attention-decode.cu) ----
bool attention_decode_supported(const attention_params & p);
bool attention_decode_fits(const op_context & ctx, const attention_params & p); // on this GPU
// n: null, or the rows to rotate and write to the cache first
cudaError_t launch_attention_decode(const op_context & ctx, const attention_args & a, const new_row_args * n);

// ---- few tokens, other types and sizes (attention-vec-*.cu) ----
cudaError_t launch_attention_vec_plain(const op_context & ctx, const attention_args & a);
cudaError_t launch_attention_vec_quantized(const op_context & ctx, const attention_args & a);
cudaError_t launch_attention_vec_rope(const op_context & ctx, const attention_args & a, const new_row_args & n);

// ---- many tokens (attention-tile.cu) ----
bool attention_tile_supported(const attention_params & p); // on a GPU whose shared memory suffices
// groups of warps that fit in shared memory, at most 2; 0: not a case for this kernel
int attention_tile_groups(const op_context & ctx, const attention_params & p);
int attention_tile_split_size(const attention_params & p); // positions
// K and V in F16; with a mask, a.classes must be computed
cudaError_t launch_attention_tile(const op_context & ctx, const attention_args & a, int groups);

size_t      mask_classes_nbytes(const attention_params & p); // 0 without a mask
cudaError_t launch_mask_classes(const op_context & ctx, const attention_params & p, unsigned char * classes);

struct cache_pair {
    op_tensor k, v;
};
// Converts a quantized cache to F16.
cudaError_t launch_cache_to_f16(const op_context & ctx, const cache_pair & from, const cache_pair & to);

} // namespace macko::cuda
