// Attention over the KV cache: softmax(scale * K q + mask) V per head, in one pass with online softmax (as in
// FlashAttention); only the result is written. This file chooses the kernel and divides the work:
//
//   attention-decode.cu   few tokens, heads of 64 or 128 elements, most caches: tensor cores
//   attention-vec-*.cu    few tokens, any other cache: float32 arithmetic
//   attention-tile.cu     many tokens, F16 or quantized cache: tensor cores
//
// With few tokens, the positions of a KV head are divided into splits, one block each. The last block of a head to
// finish combines the splits in order, so the result does not depend on timing.
#include "cuda/ops/attention.cuh"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

namespace {

constexpr int MAX_HEAD_DIM  = 256;
constexpr int VEC_BLOCKS    = 512; // enough for any GPU; a constant, so that results do not depend on the GPU's size
constexpr int DECODE_BLOCKS = 128; // for attention_decode_kernel: an SM has room for one

// Query heads of a block, which share the rows of K and V that it reads. Short contexts and few rows of q are limited
// by latency, so they use more blocks.
int heads_per_block(const attention_params & p) {
    const int64_t group = p.q.ne[2] / p.k.ne[2];
    return p.k.ne[1] <= 1024 && p.q.n_rows() <= 256 ? 1 : group >= 3 ? 4 : group == 2 ? 2 : 1;
}

// Blocks per KV head and split.
int chunk_count(const attention_params & p) {
    const int64_t group = p.q.ne[2] / p.k.ne[2], g = heads_per_block(p);
    return static_cast<int>((group + g - 1) / g);
}

// Blocks of one split.
int64_t block_count(const attention_params & p) { return p.k.ne[2] * chunk_count(p) * p.q.ne[1] * p.q.ne[3]; }

// Blocks of a cluster, which share the positions of a short context. Without a cluster, one block, which fills an SM,
// reads all of a head's K and V, and that takes most of the time. A GPU of 132 SMs has room for 66 clusters of two.
// Longer contexts keep all SMs busy without clusters.
int cluster_size(const op_context & ctx, const attention_params & p) {
    return ctx.cc >= 90 && p.k.type == TYPE_F16 && attention_decode_supported(p) && heads_per_block(p) == 1 &&
                   block_count(p) <= DECODE_BLOCKS / 2 && p.k.ne[1] * p.k.ne[0] <= 2 * DECODE_ROUND * 128
               ? 2
               : 1;
}

// Many short sequences: a block that fills an SM would leave it idle while it waits for its first rows and for its
// slowest warp. Small blocks wait at different times. Of a new sequence's positions, which llama.cpp pads to 256, they
// also read few more than the visible ones.
bool has_small_blocks(const attention_params & p) {
    return p.k.type == TYPE_F16 && attention_decode_supported(p) && p.q.ne[1] * p.q.ne[3] > 1 &&
           block_count(p) >= 2 * DECODE_BLOCKS;
}

// Positions of a split of attention_decode_kernel or attention_vec_kernel.
int split_size(const attention_params & p, bool decode) {
    const int64_t n_kv = p.k.ne[1], blocks = block_count(p);
    // two rounds of short rows cost less than combining splits
    if (blocks > N_COUNTERS || blocks == 0 || (decode && n_kv * p.k.ne[0] <= 512 * 64)) {
        return static_cast<int>(n_kv);
    }
    const int64_t room = has_small_blocks(p) ? DECODE_BLOCKS * DECODE_WARPS / SMALL_WARPS : DECODE_BLOCKS,
                  wanted =
                      std::clamp<int64_t>(decode ? room / blocks : (VEC_BLOCKS + blocks - 1) / blocks, 1, MAX_SPLITS),
                  rounds = (n_kv + DECODE_ROUND - 1) / DECODE_ROUND;
    return static_cast<int>((rounds + wanted - 1) / wanted * DECODE_ROUND);
}

int split_count(const attention_params & p, int size) { return static_cast<int>((p.k.ne[1] + size - 1) / size); }

size_t partial_nbytes(const attention_params & p, int n_splits) {
    return n_splits == 1 ? 0
                         : static_cast<size_t>(p.q.n_rows()) * static_cast<size_t>(n_splits) *
                               static_cast<size_t>(p.v.ne[0] + 2) * sizeof(float);
}

op_tensor as_f16(const op_tensor & t, char * data) { // in cache order: the heads of a position are adjacent
    op_tensor f16 = t;
    f16.data = data, f16.type = TYPE_F16;
    f16.nb[0] = 2, f16.nb[2] = t.ne[0] * 2, f16.nb[1] = f16.nb[2] * t.ne[2], f16.nb[3] = f16.nb[1] * t.ne[1];
    return f16;
}

// Scratch memory of attention_tile_kernel, in bytes from its start: sums of splits, K and V of a quantized cache in
// F16, classes of the mask's tiles.
struct tile_scratch {
    size_t k, v, classes, nbytes;
};
tile_scratch tile_scratch_of(const attention_params & p) {
    if (!attention_tile_supported(p) || p.k.ne[1] == 0) {
        return {};
    }
    const bool   quantized = type_block_size(p.k.type) > 1;
    const size_t partial   = partial_nbytes(p, split_count(p, attention_tile_split_size(p)));
    tile_scratch s         = {};
    s.k                    = (partial + 15) / 16 * 16;
    s.v                    = s.k + (quantized ? static_cast<size_t>(p.k.n_elements()) * 2 : 0);
    s.classes              = s.v + (quantized ? static_cast<size_t>(p.v.n_elements()) * 2 : 0);
    s.nbytes               = s.classes + mask_classes_nbytes(p);
    return s;
}

} // namespace

bool op_attention_supported(const attention_params & p) {
    const op_tensor &q = p.q, &k = p.k, &v = p.v;
    const auto       is_rows = [](const op_tensor & t) { // rows that can be read 8 elements at a time
        const bool is_plain = type_block_size(t.type) == 1;
        const bool aligned  = t.nb[1] % 16 == 0 && t.nb[2] % 16 == 0 && t.nb[3] % 16 == 0;
        return is_contiguous_rows(t) && t.ne[0] % std::max<int64_t>(8, type_block_size(t.type)) == 0 &&
               t.ne[0] <= MAX_HEAD_DIM && (!is_plain || aligned);
    };
    const bool types_ok = q.type == TYPE_F32 && p.dst.type == TYPE_F32 && type_can_store(k.type) && k.type == v.type;
    if (!types_ok || !is_rows(q) || !is_rows(k) || !is_rows(v) || !is_contiguous(p.dst)) {
        return false;
    }
    const bool dst_ok =
        p.dst.ne[0] == v.ne[0] && p.dst.ne[1] == q.ne[2] && p.dst.ne[2] == q.ne[1] && p.dst.ne[3] == q.ne[3];
    const bool positions_ok = k.ne[0] == q.ne[0] && k.ne[1] == v.ne[1] && k.ne[1] != 0;
    const bool heads_ok     = k.ne[2] != 0 && q.ne[2] % k.ne[2] == 0 && v.ne[2] == k.ne[2];
    const bool streams_ok   = k.ne[3] != 0 && q.ne[3] % k.ne[3] == 0 && v.ne[3] == k.ne[3];
    if (!dst_ok || !positions_ok || !heads_ok || !streams_ok) {
        return false;
    }
    const auto is_mask = [&](const op_tensor & m) {
        const bool is_shared_or_own = (m.ne[2] == 1 || m.ne[2] == q.ne[2]) && (m.ne[3] == 1 || m.ne[3] == q.ne[3]);
        return m.type == TYPE_F16 && is_contiguous_rows(m) && m.ne[0] >= k.ne[1] && m.ne[1] >= q.ne[1] &&
               is_shared_or_own;
    };
    const auto is_sinks = [&](const op_tensor & s) {
        return s.type == TYPE_F32 && s.ne[0] == q.ne[2] && is_contiguous(s);
    };
    if ((p.mask && !is_mask(*p.mask)) || (p.sinks && !is_sinks(*p.sinks))) {
        return false;
    }
    return q.ne[1] * q.ne[3] <= MAX_GRID_YZ && q.ne[2] <= MAX_GRID_YZ && k.ne[1] <= (1 << 28);
}

size_t op_attention_scratch_nbytes(const attention_params & p) {
    if (p.q.n_elements() == 0 || p.k.ne[1] == 0) {
        return 0;
    }
    const bool decode   = attention_decode_supported(p);
    const int  n_splits = decode && p.k.type != TYPE_F16 // the kernel may not fit the GPU
                              ? std::max(split_count(p, split_size(p, true)), split_count(p, split_size(p, false)))
                              : split_count(p, split_size(p, decode));
    return std::max(partial_nbytes(p, n_splits), tile_scratch_of(p).nbytes);
}

static bool uses_decode(const op_context & ctx, const attention_params & p) {
    return attention_decode_supported(p) && attention_decode_fits(ctx, p);
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
    a.small_blocks    = has_small_blocks(p);
    a.split_size      = a.ranks > 1 ? static_cast<int>(p.k.ne[1]) : split_size(p, uses_decode(ctx, p));
    a.n_splits        = split_count(p, a.split_size);
    a.partial         = reinterpret_cast<float *>(scratch);
    a.counters        = ctx.counters;
    return a;
}

cudaError_t op_attention(const op_context & ctx, const attention_params & p, char * scratch) {
    attention_args a = make_attention_args(ctx, p, scratch);
    if (const int groups = attention_tile_groups(ctx, p)) {
        const tile_scratch at = tile_scratch_of(p);
        a.split_size          = attention_tile_split_size(p);
        a.n_splits            = split_count(p, a.split_size);
        if (p.k.type != TYPE_F16) {
            a.k = as_f16(p.k, scratch + at.k), a.v = as_f16(p.v, scratch + at.v);
            CUDA_TRY(launch_cache_to_f16(ctx, { p.k, p.v }, { a.k, a.v }));
        }
        if (p.mask) {
            unsigned char * classes = reinterpret_cast<unsigned char *>(scratch + at.classes);
            CUDA_TRY(launch_mask_classes(ctx, p, classes));
            a.classes = classes;
        }
        return launch_attention_tile(ctx, a, groups);
    }
    if (uses_decode(ctx, p)) {
        return launch_attention_decode(ctx, a, nullptr);
    }
    return type_block_size(p.k.type) == 1 ? launch_attention_vec_plain(ctx, a) : launch_attention_vec_quantized(ctx, a);
}

bool op_rope_attention_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                                 const rope_cache_params & c, const attention_params & p) {
    if (!op_attention_supported(p) || !op_rope_cache_supported(r, pos, factors, c)) {
        return false;
    }
    const int64_t head_dim = p.q.ne[0];
    const auto    is_view  = [&](const op_tensor & t, const op_tensor & cache) { // t has the heads of the cache's rows
        return t.type == TYPE_F16 && t.data == cache.data && t.nb[1] == cache.nb[1] && t.nb[2] == head_dim * 2 &&
               t.ne[0] == head_dim && cache.ne[0] == head_dim * t.ne[2];
    };
    const bool one_token = p.q.ne[1] * p.q.ne[3] == 1;
    const bool reads_q_dst =
        p.q.data == c.q_dst.data && p.q.ne[2] == c.q.ne[1] && (p.q.ne[2] == 1 || p.q.nb[2] == c.q_dst.nb[1]);
    const bool same_dim    = head_dim == c.q.ne[0] && head_dim == c.k.ne[0] && head_dim % 16 == 0;
    const bool aligned     = is_aligned(c.q, 16) && is_aligned(c.k, 16) && is_aligned(c.v, 16);
    const bool rotates_all = (r.mode == 0 || r.mode == MODE_NEOX) && r.offset == 0 && r.n_dims == head_dim;
    return one_token && reads_q_dst && same_dim && is_view(p.k, c.k_cache) && is_view(p.v, c.v_cache) && aligned &&
           rotates_all;
}

cudaError_t op_rope_attention(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                              const op_tensor * factors, const rope_cache_params & c, const attention_params & p,
                              char * scratch) {
    new_row_args n = {};
    n.rope         = make_rope_args(r, pos, factors, 1);
    n.q = c.q.data, n.k = c.k.data, n.v = c.v.data;
    n.q_nb1 = c.q.nb[1], n.k_nb1 = c.k.nb[1];
    n.k_id = c.k_ids, n.v_id = c.v_ids;
    n.k_rows = c.k_cache.ne[1], n.v_rows = c.v_cache.ne[1];
    const attention_args a = make_attention_args(ctx, p, scratch);
    return uses_decode(ctx, p) ? launch_attention_decode(ctx, a, &n) : launch_attention_vec_rope(ctx, a, n);
}

} // namespace macko::cuda
