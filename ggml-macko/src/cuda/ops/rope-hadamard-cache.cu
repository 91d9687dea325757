// All operations between the projections and attention for a quantized cache, in one launch: q and k are rotated; q, k
// and v are multiplied by Hadamard matrices; q is stored; k and v are quantized into their rows of the caches.
//
// A row of a head is in the registers of 16 or 32 lanes (hadamard.cuh), which load it together with the elements for
// its rotation.
#include "cuda/ops/hadamard.cuh"
#include "cuda/ops/rope.cuh"

namespace macko::cuda {

namespace {

constexpr int THREADS = 256;

// Angles for a lane's elements of a row. All heads of a token have the same angles.
template <int N> struct lane_rotation {
    using hadamard = hadamard_row<N>;

    rotation by[hadamard::VECTORS][4];      // element * cosine + partner * sine
    int      partner[hadamard::VECTORS][4]; // < 0: the element is not rotated

    __device__ __forceinline__ void find(const rope_args & a, int64_t token, int lane) {
#pragma unroll
        for (int k = 0; k < hadamard::VECTORS; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int  place = hadamard::element(k, lane) + i - a.p.offset, half = a.p.n_dims / 2;
                const bool neighbours = a.p.mode == 0, second = neighbours ? place & 1 : place >= half;
                partner[k][i] = -1;
                if (place >= 0 && place < a.p.n_dims) {
                    by[k][i] = rotation_of(a, neighbours ? place / 2 : second ? place - half : place, token);
                    by[k][i].sine *= second ? 1.0f : -1.0f;
                    partner[k][i] = a.p.offset + (neighbours ? place ^ 1 : second ? place - half : place + half);
                }
            }
        }
    }

    __device__ __forceinline__ void apply(hadamard & r, const float * row) const {
#pragma unroll
        for (int k = 0; k < hadamard::VECTORS; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (partner[k][i] >= 0) {
                    r.v[k][i] = r.v[k][i] * by[k][i].cosine + row[partner[k][i]] * by[k][i].sine;
                }
            }
        }
    }
};

// Stores four elements of a block in a row of a cache.
__device__ __forceinline__ void store_in_cache(tensor_type type, char * row, int64_t element, const float * x) {
    const block_lanes lanes;
    const auto        store = [&](auto t) {
        using T = decltype(t);
        T::store(reinterpret_cast<typename T::block *>(row) + element / T::BLOCK, x, lanes);
    };
    switch (type) {
        case TYPE_Q4_0:   return store(value_type<TYPE_Q4_0>());
        case TYPE_Q4_1:   return store(value_type<TYPE_Q4_1>());
        case TYPE_Q5_0:   return store(value_type<TYPE_Q5_0>());
        case TYPE_Q5_1:   return store(value_type<TYPE_Q5_1>());
        case TYPE_IQ4_NL: return store(value_type<TYPE_IQ4_NL>());
        default:          return store(value_type<TYPE_Q8_0>());
    }
}

// Blocks along x: tokens; along y: groups of heads (of q, then k, then v), by turns. v_size: size of v's matrix.
template <int N>
__global__ void __launch_bounds__(THREADS) rope_hadamard_cache_kernel(rope_args a, rope_cache_params p, int v_size) {
    using hadamard       = hadamard_row<N>;
    constexpr int GROUPS = THREADS / hadamard::LANES;
    const int     lane = static_cast<int>(threadIdx.x) % hadamard::LANES, group = threadIdx.x / hadamard::LANES;
    const int     n_q = static_cast<int>(p.q.ne[1]), n_rotated = n_q + static_cast<int>(p.k.ne[1]),
              n_rows       = n_rotated + static_cast<int>(p.v.ne[1]);
    const int64_t    t     = blockIdx.x;
    const int        begin = static_cast<int>(blockIdx.y) * GROUPS;
    lane_rotation<N> angles;
    if (begin + group < n_rotated) {
        angles.find(a, t, lane);
    }
    wait_for_previous();
    for (int first = begin; first < n_rows; first += static_cast<int>(gridDim.y) * GROUPS) {
        const int         i    = min(first + group, n_rows - 1);
        const op_tensor & x    = i < n_q ? p.q : i < n_rotated ? p.k : p.v;
        const int         head = i < n_q ? i : i < n_rotated ? i - n_q : i - n_rotated;
        const float *     row  = reinterpret_cast<const float *>(x.data + head * x.nb[1] + t * x.nb[2]);
        hadamard          r;
        r.load(row, lane);
        if (i < n_rotated) {
            angles.apply(r, row);
        }
        r.transform(lane, i < n_rotated ? N : v_size);
        if (first + group >= n_rows) {
            continue;
        }
        if (i < n_q) {
            r.store(reinterpret_cast<float *>(p.q_dst.data + head * p.q_dst.nb[1] + t * p.q_dst.nb[2]), lane);
            continue;
        }
        const op_tensor & cache = i < n_rotated ? p.k_cache : p.v_cache;
        const int64_t     id    = existing_row((i < n_rotated ? p.k_ids : p.v_ids)[t], cache.ne[1]);
#pragma unroll
        for (int k = 0; k < hadamard::VECTORS; k++) {
            store_in_cache(cache.type, cache.data + id * cache.nb[1], head * N + hadamard::element(k, lane), r.v[k]);
        }
    }
}

} // namespace

bool op_rope_hadamard_cache_supported(const rope_params & r, const op_tensor & pos, const op_tensor * factors,
                                      const rope_cache_params & p, int64_t v_size) {
    const int64_t n        = p.k.ne[0];
    const auto    is_cache = [](const op_tensor & c, const op_tensor & x) {
        return type_can_store(c.type) && type_block_size(c.type) > 1 && c.ne[0] == x.ne[0] * x.ne[1] && c.ne[2] == 1 &&
               c.ne[3] == 1 && is_contiguous_rows(c);
    };
    const auto is_input = [&](const op_tensor & x) {
        return x.type == TYPE_F32 && x.ne[0] == n && x.ne[2] == p.q.ne[2] && x.ne[3] == 1 && is_contiguous_rows(x) &&
               is_aligned(x, 16);
    };
    const auto is_size  = [](int64_t size) { return with_hadamard_size(size, false, [](auto) { return true; }); };
    const bool sizes_ok = is_size(n) && is_size(v_size) && v_size <= n;
    const bool ropes_ok = r.mode != MODE_VISION && op_rope_supported(r, p.q, pos, factors, p.q_dst) &&
                          op_rope_supported(r, p.k, pos, factors, p.k);
    return sizes_ok && ropes_ok && is_input(p.q) && is_input(p.k) && is_input(p.v) && is_aligned(p.q_dst, 16) &&
           is_cache(p.k_cache, p.k) && is_cache(p.v_cache, p.v);
}

cudaError_t op_rope_hadamard_cache(const op_context & ctx, const rope_params & r, const op_tensor & pos,
                                   const op_tensor * factors, const rope_cache_params & p, int64_t v_size) {
    const rope_args a        = make_rope_args(r, pos, factors, p.q.ne[2]);
    const int64_t   n_tokens = p.q.ne[2], n_rows = p.q.ne[1] + p.k.ne[1] + p.v.ne[1];
    return with_hadamard_size(p.k.ne[0], cudaErrorInvalidValue, [&](auto size) {
        constexpr int N = decltype(size)::value, GROUPS = THREADS / hadamard_row<N>::LANES;
        // many tokens fill the GPU; then the heads of a token share its angles
        const int64_t blocks = n_tokens >= 64 ? 1 : (n_rows + GROUPS - 1) / GROUPS;
        return launch(ctx, rope_hadamard_cache_kernel<N>,
                      dim3(static_cast<unsigned>(n_tokens), static_cast<unsigned>(blocks)), THREADS, 0, a, p,
                      static_cast<int>(v_size));
    });
}

} // namespace macko::cuda
