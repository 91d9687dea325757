// y = W x with W in the layout FRAGMENTS (gpu-layout/fragments.h), on tensor cores that multiply bytes.
//
// A warp decodes a tile to the A operands of 16 x 8 x 32 products. x is rounded to integers: up to 4 columns to 16
// bits, q = 256 high + low with signed bytes high and low, with a scale for each chunk of a column, and more columns to
// 8 bits, with a scale for each two steps. Each block rounds a single column (a kernel of its own, if shared memory
// does not hold the column); a kernel of its own rounds several. B's 8 columns are, for up to 4 columns of x, their
// bytes (step, column, high or low) of 4, 2 or 1 steps, of which a product uses one (the others are zero), so that the
// sums of these steps remain apart; else 8 columns of x. A block has all columns of W for its rows: it adds up the sums
// of parts of a row in their order, so there are no float atomics.
//
// Experts of several tokens: the kernel that rounds the columns puts those of the same expert side by side, in groups
// of up to NX. Each group is a product of its own.
//
// With codes of 4 bits, the instruction PRMT looks up magnitudes: it takes selectors of 4 bits, and bit 3 asks for the
// sign of a byte, which is 0 in a table of magnitudes. The same codes thus give the positive levels (and 0), and with
// bit 3 flipped the negative ones, which are a second A operand. PRMT also spreads the values to columns.
#include "cuda/lib/copies.cuh"
#include "cuda/lib/mma.cuh"
#include "cuda/sparse/fragments.cuh"
#include "cuda/sparse/product.cuh"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace macko::cuda {

namespace {

constexpr int ROUND_THREADS = 1024;  // of round_x_kernel
constexpr int X_OWN_COLS    = 16384; // up to so many columns of a single x, each block rounds it
constexpr int X_LOADED      = 4;     // vectors of x that a thread loads at a time
// The largest integer of x among nx columns: 127, or 256 high + low.
constexpr float x_integers(int nx) { return has_bytes(nx) ? 127.0f : 32639.0f; }
// 1.5 * 2^23, as a float and as bits. Its sum with an integer of up to 22 bits is that of the bits.
constexpr float FLOAT_INTEGERS      = 12582912.0f;
constexpr int   FLOAT_INTEGERS_BITS = 0x4b400000;

struct fragments_operand : result_operand {
    const uint8_t *  tiles;
    const uint32_t * starts;
    const float *    factors;
    uint4            magnitudes; // of positive, then of negative levels
    int32_t          n_groups;   // of 16 rows
};
// A block of the grid has `units` stripes, or pairs of them with silu_mul; the first `more` blocks have one more.
struct fragments_launch : product_launch<fragments_operand> {
    fragments_division by;
    int32_t            units, more;
    // Turns with round_stripes stripes, and the stripes of the turns after them: of a block with one more unit, and of
    // another.
    int32_t full_turns[2], rest_stripes[2];
    int32_t segments, tile_chunks, chunks; // segments and chunks of a row
    int32_t window_bits;                   // log2 of the steps of a window
    // Of round_x_kernel. null: the kernel rounds its one column, which is_aligned().
    const uint8_t * rounded;
    int64_t         apart;  // bytes to the columns of the next group, or to the column of the next expert
    const int32_t * groups; // or null: see group_list
    // with experts: see cuda_sparse_mul_mat_params; slots is INT32_MAX if the columns are those of one token
    int64_t token_stride;
    int32_t slots;
    bool    shares_x;
};

// The groups of the columns of all experts, in device memory, each with NX columns. A group has 1 + NX numbers: its
// expert, which is n_experts for invalid ids and -1 if there is no such group, and its columns, then -1.
struct group_list {
    int32_t *       groups;
    const int32_t * ids;
    int64_t         id_stride, token_stride;
    int32_t         n_columns, slots, n_experts, most; // most: groups of the list
    int32_t         block_columns;                     // that a block rounds
    bool            shares_x;                          // columns of a token have the same x
};

// ---- x ----

struct x_source {
    const float * x;
    const float * norm_weight; // or null
    float         norm_eps;
    int           cols;
};

// Elements c ... c + 3 of a vector; zeros behind the last one. ALIGNED: they can be read at once
template <bool ALIGNED> __device__ __forceinline__ float4 load_four(const float * v, int c, int cols) {
    if (ALIGNED) {
        return c < cols ? *reinterpret_cast<const float4 *>(v + c) : float4{};
    }
    const auto at = [&](int i) { return c + i < cols ? v[c + i] : 0.0f; };
    return make_float4(at(0), at(1), at(2), at(3));
}

// Fours of a thread of a block, X_LOADED of them, whose loads are under way together. A warp has two of a chunk.
template <bool ALIGNED> struct x_fours {
    float4 v[X_LOADED];

    __device__ __forceinline__ void load(const float * from, int first, int cols) {
#pragma unroll
        for (int i = 0; i < X_LOADED; i++) {
            v[i] = load_four<ALIGNED>(from, first + i / 2 * blockDim.x * 8 + i % 2 * 128, cols);
        }
    }
};
// The first column of a thread of a block.
__device__ __forceinline__ int first_four() { return threadIdx.x / 32 * 256 + threadIdx.x % 32 * 4; }

// Calls use(c, elements c ... c + 3, elements c + 128 ... c + 131), multiplied by the norm's weights, for the fours of
// a thread of a block, with zeros behind the last element. w: the first weights; squares: of the elements, if there is
// a norm. Calls loading() when the first loads are under way.
template <bool ALIGNED, typename L, typename F>
__device__ __forceinline__ void for_each_two_fours(const x_source & s, int n_steps, x_fours<ALIGNED> w, float * squares,
                                                   L && loading, F && use) {
    const int        stride = blockDim.x * 8, end = n_steps * 32;
    int              first = first_four();
    x_fours<ALIGNED> x;
    x.load(s.x, first, s.cols);
    loading();
    const auto weighted = [&](int i) {
        const float4 v = x.v[i];
        if (!s.norm_weight) {
            return v;
        }
        *squares = add_squares(*squares, v);
        return make_float4(v.x * w.v[i].x, v.y * w.v[i].y, v.z * w.v[i].z, v.w * w.v[i].w);
    };
#pragma unroll 1
    while (first < end) {
#pragma unroll
        for (int i = 0; i < X_LOADED; i += 2) {
            const int c = first + i / 2 * stride;
            if (c < end) { // the same for a warp
                const float4 a = weighted(i), b = weighted(i + 1);
                use(c, a, b);
            }
        }
        first += X_LOADED / 2 * stride;
        if (first < end) {
            x.load(s.x, first, s.cols);
            if (s.norm_weight) {
                w.load(s.norm_weight, first, s.cols);
            }
        }
    }
}

// The largest magnitude as bits, which are more than those of INFINITY for a NaN.
__device__ __forceinline__ uint32_t largest_bits(float4 v) {
    const auto magnitude = [](float f) { return __float_as_uint(f) & 0x7fffffffu; };
    return max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
}

// Rounding of numbers up to a magnitude to integers: `inverse` turns numbers into integers, and `scale` integers into
// numbers. NaN and infinities make scale NaN.
struct x_rounding {
    float                      inverse, scale;
    __device__ __forceinline__ x_rounding(uint32_t largest, float integers) {
        const float most = __uint_as_float(largest);
        const bool  zero = most < 0x1p-100f, finite = most < INFINITY; // both false for NaN
        inverse = !zero && finite ? integers * __frcp_rn(most) : 0.0f;
        scale   = zero ? 0.0f : finite ? most * (1.0f / integers) : NAN;
    }
};

// Columns c ... c + 3 of a column of x as integers. integers: of the column, in step 0; apart: bytes to the next step
template <bool BYTES>
__device__ __forceinline__ void store_integers(uint8_t * integers, int apart, int c, float4 v, float inverse) {
    const auto       bits = [&](float f) { return __float_as_uint(fmaf(f, inverse, FLOAT_INTEGERS)); };
    const uint32_t   q0 = bits(v.x), q1 = bits(v.y), q2 = bits(v.z), q3 = bits(v.w);
    uint32_t * const to  = reinterpret_cast<uint32_t *>(integers + c / 32 * apart + c % 32);
    const uint32_t   low = __byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410);
    if (BYTES) {
        to[0] = low;
    } else {
        to[0] = __byte_perm(__byte_perm(q0 + 128, q1 + 128, 0x0051), __byte_perm(q2 + 128, q3 + 128, 0x0051), 0x5410);
        to[8] = low;
    }
}

// Rounds one of nx columns of x on all threads of a block. x: of all columns; scratch: [warp]. The factor is complete
// after another barrier.
template <bool ALIGNED, bool BYTES, typename L>
__device__ __forceinline__ void round_column(const x_source & s, int n_steps, uint8_t * x, int nx, int column,
                                             float * scratch, const x_fours<ALIGNED> & w, L && loading) {
    float * const   factor   = reinterpret_cast<float *>(x) + column;
    float * const   scales   = reinterpret_cast<float *>(x + x_factors_nbytes(nx)) + column;
    uint8_t * const integers = x + x_integers_at(n_steps, nx) + column * x_column_nbytes(nx);
    float           squares  = 0.0f;
    const int       apart    = x_step_nbytes(nx);
    const auto      store    = [&](int c, float4 v, const x_rounding & r) {
        store_integers<BYTES>(integers, apart, c, v, r.inverse);
    };
    for_each_two_fours<ALIGNED>(s, n_steps, w, &squares, loading, [&](int c, float4 a, float4 b) {
        if (BYTES) { // 16 lanes share a scale
            uint32_t of_a = largest_bits(a), of_b = largest_bits(b);
#pragma unroll
            for (int offset = 1; offset < 16; offset *= 2) {
                of_a = max(of_a, __shfl_xor_sync(FULL_WARP, of_a, offset));
                of_b = max(of_b, __shfl_xor_sync(FULL_WARP, of_b, offset));
            }
            const x_rounding ra(of_a, x_integers(8)), rb(of_b, x_integers(8));
            if (threadIdx.x % 16 == 0) {
                scales[c / 64 * nx]       = ra.scale;
                scales[(c / 64 + 2) * nx] = rb.scale;
            }
            store(c, a, ra);
            store(c + 128, b, rb);
        } else {
            const x_rounding r(warp_max_bits(max(largest_bits(a), largest_bits(b))), x_integers(1));
            if (threadIdx.x % 32 == 0) {
                scales[c / 256 * x_scale_columns(1)] = r.scale;
            }
            store(c, a, r);
            store(c + 128, b, r);
        }
    });
    squares = s.norm_weight ? warp_sum(squares) : 0.0f;
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    if (threadIdx.x < 32 && s.norm_weight) {
        squares = warp_sum(threadIdx.x < blockDim.x / 32 ? scratch[threadIdx.x] : 0.0f);
    }
    if (threadIdx.x == 0) {
        *factor = s.norm_weight ? rsqrtf(squares / static_cast<float>(s.cols) + s.norm_eps) : 1.0f;
    }
}

// Where a column is: in which group, and in which of its places.
struct group_place {
    int group, place;
};

// Adds the columns first ... last - 1 to the list of groups, and calls use(column, its place) for each. The block with
// the first column also marks the groups that there are not. All threads of a block call it; use() has a barrier.
// counts: [2][n_experts + 1]; scratch: [2][warp]
template <typename F>
__device__ __forceinline__ void join_groups(const group_list & l, int nx, int first, int last, int * counts,
                                            int * scratch, F && use) {
    const int   lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int * const before    = counts + l.n_experts + 1; // columns of each expert before the next one
    const auto  expert_of = [&](int j) {
        const int id = l.ids[j % l.slots * l.id_stride + j / l.slots * l.token_stride];
        return id >= 0 && id < l.n_experts ? id : l.n_experts;
    };
    const auto sum = [](int x) { return __shfl_sync(FULL_WARP, warp_prefix_sum(x), 31); };
    for (int e = threadIdx.x; e < 2 * (l.n_experts + 1); e += blockDim.x) {
        counts[e] = 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < l.n_columns; j += blockDim.x) {
        const int e = expert_of(j);
        atomicAdd(&counts[e], 1);
        if (j < first) {
            atomicAdd(&before[e], 1);
        }
    }
    __syncthreads();
    for (int column = first; column < last; column++) {
        const int expert = expert_of(column);
        int       v[2]   = {}; // groups of the experts before it; all groups
        for (int e = threadIdx.x; e <= l.n_experts; e += blockDim.x) {
            const int n = (counts[e] + nx - 1) / nx;
            v[0] += e < expert ? n : 0;
            v[1] += n;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            v[i] = sum(v[i]);
            if (lane == 0) {
                scratch[i * warps + warp] = v[i];
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            v[i] = sum(lane < warps ? scratch[i * warps + lane] : 0);
        }
        const int         rank  = before[expert];
        const group_place at    = { v[0] + rank / nx, rank % nx };
        int32_t * const   group = l.groups + at.group * (1 + nx);
        if (threadIdx.x == 0) {
            group[0]            = expert; // all columns of the group store the same
            group[1 + at.place] = column;
        }
        if (rank + 1 == counts[expert] && at.place + 1 + threadIdx.x < nx) {
            group[1 + at.place + 1 + threadIdx.x] = -1;
        }
        for (int g = v[1] + threadIdx.x; column == 0 && g < l.most; g += blockDim.x) {
            l.groups[g * (1 + nx)] = -1;
        }
        use(column, at);
        if (threadIdx.x == 0) {
            before[expert]++;
        }
    }
}

// Columns of x, a block for each or, with groups, for several. A product's nx columns are side by side.
struct round_params {
    x_source   source; // the first column
    int64_t    ldx;
    int32_t    n_steps, nx;
    uint8_t *  to;
    int64_t    apart; // bytes from the columns of one product to those of the next
    group_list list;  // without groups: column j is column j % nx of product j / nx
};

// GROUPED: columns join groups. BYTES: has_bytes(nx)
template <bool ALIGNED, bool GROUPED, bool BYTES>
__global__ void __launch_bounds__(ROUND_THREADS) round_x_kernel(const __grid_constant__ round_params p) {
    __shared__ float  scratch[3][ROUND_THREADS / 32];
    extern __shared__ __align__(16) int counts[];
    x_fours<ALIGNED>                    w;
    if (p.source.norm_weight) {
        w.load(p.source.norm_weight, first_four(), p.source.cols);
    }
    cuda_allow_next();
    cuda_wait_for_previous();
    const auto round = [&](int from, group_place at) {
        x_source s = p.source;
        s.x += from * p.ldx;
        round_column<ALIGNED, BYTES>(s, p.n_steps, p.to + at.group * p.apart, p.nx, at.place, scratch[0], w, [] {});
    };
    if (GROUPED) {
        const int first = blockIdx.x * p.list.block_columns, last = min(first + p.list.block_columns, p.list.n_columns);
        join_groups(p.list, p.nx, first, last, counts, reinterpret_cast<int *>(scratch[1]),
                    [&](int j, group_place at) { round(p.list.shares_x ? j / p.list.slots : j, at); });
    } else {
        const int j = blockIdx.x;
        round(j, { j / p.nx, j % p.nx });
    }
}

template <bool GROUPED> auto round_kernel_of(bool aligned, int nx) {
    return has_bytes(nx) ? aligned ? round_x_kernel<true, GROUPED, true> : round_x_kernel<false, GROUPED, true>
           : aligned ? round_x_kernel<true, GROUPED, false>
                         : round_x_kernel<false, GROUPED, false>;
}

// ---- a tile ----

template <int NX> struct tile_sums {
    static constexpr int TILES = NX / 8, N = NX < 8 ? 2 : 4 * TILES;
    // row g, then row g + 8; with 8 columns and more: columns 2t and 2t + 1 of row g, then of g + 8, of each 8 columns
    float v[N];
};

// Steps whose sums remain apart, and steps whose sums are scaled at once.
constexpr int slots_of(int nx) { return nx < 4 ? 4 / nx : 1; }
constexpr int scaled_steps(int nx) { return nx < 4 ? slots_of(nx) : 2; }

// Where a lane finds the table, its columns of x (bytes 8 t ... 8 t + 7 of B) and their scales. Addresses, of the first
// step.
template <int NX> struct lane_places {
    uint32_t copy, x, x_scales;
    uint32_t mask[scaled_steps(NX)]; // 1 for the step of a slot, else 0

    __device__ __forceinline__ lane_places(uint32_t table, int table_copies, uint32_t integers, uint32_t scales) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, slot = NX < 8 ? g / (2 * NX) : 0;
        copy     = table + (lane & (table_copies - 1)) * 8;
        x        = integers + (NX < 8 ? slot * 2 * NX + g % (2 * NX) : g) * 32 + t * 8;
        x_scales = scales + (has_bytes(NX) ? t * 8 : t % NX * 4);
#pragma unroll
        for (int s = 0; s < scaled_steps(NX); s++) {
            mask[s] = slot == s;
            asm volatile("" : "+r"(mask[s])); // a factor, not a predicate
        }
    }
};

// Adds a tile times x to sums. first_step: of the tile among those of x
template <int BITS, int NX>
__device__ __forceinline__ void multiply_tile(const fragments_launch & p, const uint4 & magnitudes, uint32_t tile,
                                              int chunks, int words_at, const lane_places<NX> & places, int first_step,
                                              tile_sums<NX> & sums) {
    constexpr int  SLOTS = slots_of(NX), STEPS = scaled_steps(NX), OPERANDS = step_operands<BITS, NX>::N;
    constexpr int  PLANES = NX < 8 ? 1 : NX / 8; // B operands of a step
    const int      lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t words = tile + words_at + lane * 4, bitmaps = tile + words_at - chunks * 512 + lane * 16,
                   scales = tile + static_cast<uint32_t>(FRAGMENT_TAIL_ENDS) + g, entry = p.by.table_copies * 8;
    const uint32_t pick[4]  = { entry, entry << 8, entry << 16, entry << 24 };
    const uint32_t x        = places.x + first_step * x_step_nbytes(NX),
                   x_scales = places.x_scales + x_scales_nbytes(first_step, NX);
    uint32_t at             = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        uint32_t bits[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(bitmaps + chunk * 512));
        float of_chunk[2] = {}; // without bytes: sums of the chunk
#pragma unroll
        for (int part = 0; part < 8 / STEPS; part++) {
            int   c[OPERANDS][PLANES][4] = {};
            uint2 own                    = {};
            if (SLOTS > 1) {
                own = load_words(x + (chunk * 8 + part * STEPS) * x_step_nbytes(NX));
            }
            if (has_bytes(NX)) {
#pragma unroll
                for (int plane = 0; plane < PLANES; plane++) {
                    c[0][plane][0] = c[0][plane][1] = c[0][plane][2] = c[0][plane][3] = FLOAT_INTEGERS_BITS;
                }
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int      step             = part * STEPS + s;
                const uint32_t word             = bits[step / 2];
                const uint2    of_g             = load_words(__dp4a(word, pick[step % 2 * 2], places.copy)),
                            of_g8               = load_words(__dp4a(word, pick[step % 2 * 2 + 1], places.copy));
                const step_operands<BITS, NX> d = decode_step<BITS, NX>(magnitudes, of_g, of_g8, words, &at);
#pragma unroll
                for (int plane = 0; plane < PLANES; plane++) { // 8 columns of B
                    uint2 b;
                    if (SLOTS > 1) {
                        b = make_uint2(own.x * places.mask[s], own.y * places.mask[s]);
                    } else {
                        b = load_words(x + (chunk * 8 + step) * x_step_nbytes(NX) + plane * 256);
                    }
#pragma unroll
                    for (int o = 0; o < OPERANDS; o++) {
                        multiply_add_bytes(c[o][plane], d.a[o], b.x, b.y);
                    }
                }
            }
            // scales of rows g and g + 8 for the window of the lane's step
            const int      first    = chunk * 8 + part * STEPS + (SLOTS > 1 ? t / NX : 0);
            const uint32_t code     = scales + (first >> p.window_bits) * 16;
            const float    scale[2] = { fragment_scale(load_byte(code)), fragment_scale(load_byte(code + 8)) };
            const auto     total    = [&](int plane, int i) {
                return OPERANDS == 2 ? c[0][plane][i] - c[OPERANDS - 1][plane][i] : c[0][plane][i];
            };
            if (has_bytes(NX)) {
#pragma unroll
                for (int plane = 0; plane < PLANES; plane++) {
                    const uint2 two    = load_words(x_scales + x_scales_nbytes(first, NX) + plane * 32);
                    const float own[2] = { __uint_as_float(two.x), __uint_as_float(two.y) };
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float v         = __int_as_float(total(plane, i)) - FLOAT_INTEGERS;
                        sums.v[plane * 4 + i] = fmaf(scale[i / 2] * own[i % 2], v, sums.v[plane * 4 + i]);
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int v = total(0, i * 2) * 256 + total(0, i * 2 + 1);
                    of_chunk[i] = fmaf(scale[i], static_cast<float>(v), of_chunk[i]);
                }
            }
        }
        if (!has_bytes(NX)) {
            const float own = __uint_as_float(load_word(x_scales + x_scales_nbytes(chunk * 8, NX)));
            sums.v[0]       = fmaf(own, of_chunk[0], sums.v[0]);
            sums.v[1]       = fmaf(own, of_chunk[1], sums.v[1]);
        }
    }
}

// Stores sums, or adds them: [column][row].
template <int NX> __device__ __forceinline__ void store_sums(float * to, tile_sums<NX> s, bool adds) {
    const auto put  = [&](int i, float v) { to[i] = adds ? to[i] + v : v; };
    const int  lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (NX >= 8) {
#pragma unroll
        for (int i = 0; i < tile_sums<NX>::N; i++) {
            put((i / 4 * 8 + 2 * t + i % 2) * 16 + g + i % 4 / 2 * 8, s.v[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int offset = NX; offset < 4; offset *= 2) { // lane t has column t % NX of step t / NX
                s.v[i] += __shfl_xor_sync(FULL_WARP, s.v[i], offset);
            }
        }
        if (t < NX) {
            put(t * 16 + g, s.v[0]);
            put(t * 16 + g + 8, s.v[1]);
        }
    }
}

// ---- the kernel ----

// Where a result goes (column -1: nowhere), and what it needs from global memory.
struct result_inputs {
    int   matrix, row, column;
    float added, factor, factor_of_up;
};

// Goes through the tiles of a warp.
struct tile_cursor {
    int turn, part, segment; // part: of all stripes of the turn; segment: of the part
    int at, end;             // the tile among all listed ones, and the end of the list of the turn
};

template <int BITS, int NX>
__global__ void __launch_bounds__(max_warps(NX) * 32, 1) fragments_kernel(const __grid_constant__ fragments_launch p) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int                               lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int                               column = blockIdx.y * NX;

    uint8_t * const x        = shared + p.by.x_at;
    uint8_t * const x_scales = x + x_factors_nbytes(NX);
    uint8_t * const integers = x + x_integers_at(p.by.phase_segments * p.tile_chunks * 8, NX);
    float * const   sums     = reinterpret_cast<float *>(shared + p.by.sums_at);
    float * const   scratch  = reinterpret_cast<float *>(shared + p.by.scratch_at);
    uint8_t * const buffers  = shared + p.by.buffers_at + warp * 2 * p.by.buffer_nbytes;
    // with bulk copies: of the bytes that arrive in buffer 0; the next one is of buffer 1
    uint64_t * const arrivals  = reinterpret_cast<uint64_t *>(scratch + MAX_WARPS) + warp * 2;
    const auto       buffer_of = [&](int i) { return buffers + i * p.by.buffer_nbytes; };
    const auto       copies_of = [&](int i) { return bulk_copies{ shared_address(arrivals + i) }; };

    if (p.expert_ids) {
        fill_table<BITS>(shared, p.by.table_copies); // while the kernel before ends
        cuda_wait_for_previous();                    // which writes ids or groups
    }
    const int32_t * const group = p.groups ? p.groups + blockIdx.y * (1 + NX) : nullptr;
    if (group && group[0] < 0) {
        return;
    }
    const int  token  = p.expert_ids ? column / p.slots : 0;
    const auto own_id = [&] {
        return p.expert_ids[(column - token * p.slots) * p.expert_ids_stride + token * p.token_stride];
    };
    const int row_offset = !p.expert_ids ? 0 : row_of_expert(p, group ? group[0] : own_id());
    // column n of the product among all columns; -1: there is none
    const auto column_of = [&](int n) { return group ? group[1 + n] : column + n < p.n_columns ? column + n : -1; };

    const int matrices         = p.silu_mul ? 2 : 1;
    const int n_units_of_block = p.units + (static_cast<int>(blockIdx.x) < p.more);
    // stripes of a turn; 0: the block has no such turn. An invalid expert has none
    const int full_turns  = row_offset < 0 ? 0 : p.full_turns[blockIdx.x >= p.more],
              rest        = row_offset < 0 ? 0 : p.rest_stripes[blockIdx.x >= p.more];
    const auto stripes_of = [&](int turn) {
        return turn < full_turns ? p.by.round_stripes : turn < full_turns + p.by.phases ? rest : 0;
    };
    // stripe k of the block; its row counts from row_begin
    const auto task_of = [&](int k) {
        const int unit      = p.silu_mul ? k / 2 : k;
        const int warp_rows = blockIdx.x + unit * gridDim.x, turn = p.silu_mul ? k % 2 : 0;
        return p.n_matrices > 1 ? task_at<true>(p, static_cast<int>(FRAGMENT_ROWS), warp_rows, 0, 0, turn)
                                : task_at<false>(p, static_cast<int>(FRAGMENT_ROWS), warp_rows, 0, 0, turn);
    };

    // ---- the tiles ----
    listed_tile * const lists = reinterpret_cast<listed_tile *>(shared + p.by.lists_at);
    const auto list_of = [&](int turn) { return lists + turn % LISTS * p.by.round_stripes * p.by.stripe_places; };
    const auto listed  = [&](int turn) { return stripes_of(turn) * p.by.stripe_places; };
    const auto tile_at = [&](int turn, int place) {
        const int round = p.by.phases == 1 ? turn : turn / p.by.phases, phase = turn - round * p.by.phases,
                  stripe    = static_cast<int>(static_cast<uint32_t>(place * p.by.inverse_places) >> 20),
                  of_stripe = place - stripe * p.by.stripe_places, segment = phase * p.by.phase_segments + of_stripe;
        const sparse_task         t     = task_of(round * p.by.round_stripes + stripe);
        const fragments_operand & m     = p.m[t.matrix];
        const int                 group = (m.row_begin + row_offset) / 16 + t.row / 16;
        listed_tile               e     = {};
        e.matrix                        = static_cast<uint8_t>(t.matrix);
        e.first_step                    = static_cast<uint16_t>(of_stripe * p.tile_chunks * 8);
        e.chunks                        = static_cast<uint8_t>(min(p.tile_chunks, p.chunks - segment * p.tile_chunks));
        if (group < m.n_groups && of_stripe == 0) {
            prefetch_to_l2(m.factors + group * FRAGMENT_ROWS); // for the results
        }
        if (group < m.n_groups && of_stripe < min(p.by.phase_segments, p.segments - phase * p.by.phase_segments)) {
            const uint32_t * starts = m.starts + (static_cast<int64_t>(group) * p.segments + segment);
            const uint32_t   begin  = __ldg(starts);
            e.tile                  = m.tiles + static_cast<uint64_t>(begin) * FRAGMENT_UNIT;
            e.nbytes                = static_cast<int>(__ldg(starts + 1) - begin) * static_cast<int>(FRAGMENT_UNIT);
        }
        return e;
    };
    const auto list_tiles = [&](int turn, int first) {
        for (int place = first; place < listed(turn); place += blockDim.x) {
            list_of(turn)[place] = tile_at(turn, place);
        }
    };
    // To the warp's first part of a turn. false: neither this turn nor a later one has a tile for the warp
    const auto begin_turn = [&](tile_cursor & c, int turn) {
        for (;; turn++) {
            const int n = listed(turn), begin = static_cast<int>(list_of(turn) - lists);
            c = { turn, warp, 0, begin + warp * p.by.part_segments, begin + n };
            if (n == 0) {
                return false;
            }
            if (c.at < c.end) {
                return true;
            }
        }
    };
    // false: there is no further tile
    const auto advance = [&](tile_cursor & c) {
        c.at++;
        if (++c.segment < p.by.part_segments) {
            return true;
        }
        c.segment = 0;
        c.part += warps;
        c.at += (warps - 1) * p.by.part_segments;
        return c.at < c.end || begin_turn(c, c.turn + 1);
    };
    const auto request = [&](const tile_cursor & c, int buffer) {
        const listed_tile e  = lists[c.at];
        uint8_t * const   to = buffer_of(buffer);
        if (bulk_copies::KNOWN) {
            bulk_copies::end_of_own_accesses();
            __syncwarp();
            if (lane == 0) {
                copies_of(buffer).expect(e.nbytes);
                if (e.nbytes > 0) {
                    copies_of(buffer).copy(to, e.tile, e.nbytes);
                }
            }
            return;
        }
        const int             mine = e.nbytes - lane * 16; // from the lane's first 16 bytes on
        uint8_t * const       into = to + lane * 16;
        const uint8_t * const from = e.tile + lane * 16;
#pragma unroll
        for (int i = 0; i < 6; i++) {
            if (i * 512 < mine) {
                copy_16(into + i * 512, from + i * 512);
            }
        }
#pragma unroll 1
        for (int i = 6 * 512; i < mine; i += 512) {
            copy_16(into + i, from + i);
        }
    };

    const bool  lists_one = static_cast<int>(threadIdx.x) < listed(0);
    listed_tile first     = {};
    if (lists_one) {
        first = tile_at(0, threadIdx.x);
    }
    // NX == 1 without p.rounded: this block rounds x
    const x_source source = { p.x + (p.shares_x ? token : column) * p.ldx, p.norm_weight, p.norm_eps, p.cols };
    x_fours<true>  weights;
    if (NX == 1 && !p.rounded && p.norm_weight) {
        weights.load(p.norm_weight, first_four(), p.cols);
    }
    if (!p.expert_ids) {
        fill_table<BITS>(shared, p.by.table_copies); // while the place of the tile and the weights arrive
    }
    if (lists_one) {
        list_of(0)[threadIdx.x] = first;
    }
    list_tiles(0, threadIdx.x + blockDim.x);
#pragma unroll 1
    for (int turn = 1; turn < LISTS; turn++) {
        list_tiles(turn, threadIdx.x);
    }
    if (bulk_copies::KNOWN && lane < 2) {
        copies_of(lane).init();
    }
    __syncthreads();
    // the tile of the warp that is multiplied next, and the first one without a buffer
    tile_cursor here;
    bool        live = begin_turn(here, 0), more = live;
    tile_cursor ahead        = here;
    const auto  request_next = [&](int buffer) {
        if (more) {
            request(ahead, buffer);
            more = advance(ahead);
        }
        if (!bulk_copies::KNOWN) {
            commit_copies();
        }
    };
    request_next(0);
    cuda_allow_next();
    if (!p.expert_ids) {
        cuda_wait_for_previous();
    }
    // x of a phase to shared memory; the second tile is requested behind it
    const auto fill_x = [&](int turn, int phase) {
        const int steps = p.by.phase_segments * p.tile_chunks * 8, first = phase * steps,
                  n = min(steps, p.chunks * 8 - first);
        if (NX == 1 && !p.rounded) { // one phase
            round_column<true, false>(source, steps, x, 1, 0, scratch, weights, [&] { request_next(1); });
            return;
        }
        const auto copy_to = [&](uint8_t * to, const uint8_t * from, int nbytes) {
#pragma unroll 4
            for (int i = threadIdx.x * 16; i < nbytes; i += blockDim.x * 16) {
                copy_16(to + i, from + i);
            }
        };
        const uint8_t * from = p.rounded + blockIdx.y * p.apart;
        copy_to(x, from, x_factors_nbytes(NX));
        copy_to(x_scales, from + x_factors_nbytes(NX) + x_scales_nbytes(first, NX), x_scales_nbytes(n, NX));
        from += x_integers_at(p.chunks * 8, NX) + static_cast<int64_t>(first) * x_step_nbytes(NX);
        copy_to(integers, from, n * x_step_nbytes(NX));
        commit_copies();
        if (turn == 0) {
            request_next(1);
        }
        if (turn == 0 && !bulk_copies::KNOWN) {
            wait_for_committed_copies<1>();
        } else {
            wait_for_committed_copies<0>();
        }
        __syncthreads();
    };

    const lane_places<NX> places(shared_address(shared), p.by.table_copies, shared_address(integers),
                                 shared_address(x_scales));
    tile_sums<NX>         part   = {};
    int                   buffer = 0, arrived = 0; // of `here`; how often its bytes have arrived, modulo 2
    for (int turn = 0, round = 0, phase = 0;; turn++) {
        if (turn == 0 || p.by.phases > 1) {
            fill_x(turn, phase);
        }
        while (live && here.turn == turn) {
            const listed_tile e = lists[here.at];
            if (bulk_copies::KNOWN) {
                copies_of(buffer).wait(arrived);
            } else {
                wait_for_committed_copies<1>();
                __syncwarp();
            }
            if (e.nbytes > 0) {
                uint8_t * const tile     = buffer_of(buffer);
                const int       words_at = words_at_of(e.chunks, p.window_bits);
                place_tails(tile, e.tile, e.nbytes, words_at);
                multiply_tile<BITS, NX>(p, p.m[e.matrix].magnitudes, shared_address(tile), e.chunks, words_at, places,
                                        e.first_step, part);
            }
            if (here.segment + 1 == p.by.part_segments) {
                store_sums<NX>(sums + here.part * 16 * NX, part, phase > 0);
                part = {};
            }
            if (!bulk_copies::KNOWN) {
                __syncwarp();
            }
            request_next(buffer);
            arrived ^= buffer;
            buffer ^= 1;
            live = advance(here);
        }
        // ---- the results of the round ----
        // an invalid expert has zeros for results, but as many
        const int n_units   = row_offset < 0 ? n_units_of_block : stripes_of(turn) / matrices,
                  n_results = n_units * 16 * NX;
        const auto sum_of   = [&](int stripe, int n, int row) {
            const float * from = sums + stripe * p.by.parts * 16 * NX + n * 16 + row;
            float         v    = 0.0f;
#pragma unroll 4
            for (int i = 0; i < p.by.parts; i++) {
                v += from[i * 16 * NX];
            }
            return v * reinterpret_cast<const float *>(x)[n];
        };
        // what result i needs from global memory
        const auto inputs_of = [&](int i) {
            sparse_task t = task_of(round * p.by.round_stripes + i / (16 * NX) * matrices);
            t.row += i % 16 - ((max(row_offset, 0) + p.m[t.matrix].row_begin) & 15);
            result_inputs in = { t.matrix, t.row, column_of(i / 16 % NX) };
            if (t.row < 0 || t.row >= p.m[t.matrix].n_rows) {
                in.column = -1;
            }
            if (in.column >= 0) {
                in.added             = added_to_result(p, p.m[t.matrix], in.column, t.row);
                const auto factor_of = [&](int matrix) {
                    return __ldg(p.m[matrix].factors + p.m[matrix].row_begin + row_offset + t.row);
                };
                if (row_offset >= 0) {
                    in.factor       = factor_of(t.matrix);
                    in.factor_of_up = p.silu_mul ? factor_of(1) : 0.0f;
                }
            }
            return in;
        };
        const bool    ends_round = phase + 1 == p.by.phases;
        result_inputs in         = {};
        if (ends_round && static_cast<int>(threadIdx.x) < n_results) {
            in = inputs_of(threadIdx.x); // while other warps still multiply
        }
        __syncthreads();
        list_tiles(turn + LISTS, threadIdx.x);
        if (!ends_round) {
            phase++;
            continue;
        }
        for (int i = threadIdx.x; i < n_results;) {
            if (in.column >= 0) {
                const int unit = i / (16 * NX), n = i / 16 % NX, r = i % 16;
                float     y = 0.0f;
                if (row_offset >= 0) {
                    y = sum_of(unit * matrices, n, r) * in.factor;
                    if (p.silu_mul) {
                        y = silu(y) * sum_of(unit * 2 + 1, n, r) * in.factor_of_up;
                    }
                }
                *result_at(p.m[in.matrix], in.column, in.row) = y + in.added;
            }
            i += blockDim.x;
            if (i < n_results) {
                in = inputs_of(i);
            }
        }
        if (stripes_of(turn + 1) == 0) {
            break;
        }
        phase = 0;
        round++;
        if (p.by.phases == 1) { // else fill_x() has a barrier
            __syncthreads();
        }
    }
    wait_for_copies();
}

// ---- launch ----

// Whether columns of x and the norm's weights can be read in vectors of 16 bytes.
bool is_aligned(const cuda_sparse_mul_mat_params & a) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.norm_weight) |
                                static_cast<uintptr_t>(a.ldx * 4);
    return base_of(*a.w[0]).cols % 4 == 0 && addresses % 16 == 0;
}

// The words of the longest stream of all matrices.
int most_words_of(const cuda_sparse_mul_mat_params & a) {
    int most = 0;
    for (int i = 0; i < a.n_matrices; i++) {
        most = std::max(most, std::get<fragments_layout>(*a.w[i]).most_words);
    }
    return most;
}

// Divides a product of nx columns on blocks with so many stripes each.
cudaError_t divide(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, int nx, const uint8_t * rounded,
                   int stripes, fragments_division * by) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    *by = divide_fragments({ nx, stripes, a.silu_mul ? 2 : 1,
                             static_cast<int32_t>(fragments_segments(w.cols, w.tile_chunks)), !rounded, w.tile_chunks,
                             w.window, most_words_of(a), device.shared_nbytes });
    return by->warps ? cudaSuccess : cudaErrorNotSupported;
}

int steps_of(int64_t cols) { return static_cast<int>(fragments_all_chunks(cols) * 8); }
// Bytes of nx columns that round_x_kernel has rounded.
int64_t rounded_nbytes(int64_t cols, int nx) { return x_nbytes(steps_of(cols), nx); }

x_source source_of(const fragments_layout & w, const cuda_sparse_mul_mat_params & a) {
    return { a.x, a.norm_weight, a.norm_eps, static_cast<int>(w.cols) };
}

// Whether a product of nx columns fits shared memory.
bool fits(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, int nx, const uint8_t * rounded) {
    fragments_division by;
    return divide(w, a, nx, rounded, a.silu_mul ? 2 : 1, &by) == cudaSuccess;
}

// The products of a launch: one of up to nx columns, or, with experts, one for each column or for each group.
struct product_batch {
    int             n      = 1;
    int             busy   = 1; // about as many have columns
    int64_t         apart  = 0; // bytes from the rounded columns of one to those of the next
    const int32_t * groups = nullptr;
};

cudaError_t multiply_columns(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, int nx,
                             const uint8_t * rounded, const product_batch & batch, cudaStream_t stream) {
    fragments_launch p = {};
    p.silu_mul         = a.silu_mul;
    p.tile_chunks      = w.tile_chunks;
    p.segments         = static_cast<int32_t>(fragments_segments(w.cols, w.tile_chunks));
    p.chunks           = static_cast<int32_t>(fragments_all_chunks(w.cols));
    p.window_bits      = fragments_window_bits(w.window);
    p.rounded          = rounded;
    set_product(p, a, static_cast<int>(FRAGMENT_ROWS), [&](const gpu_layout & layout, fragments_operand & m) {
        const fragments_layout & l = std::get<fragments_layout>(layout);
        m.tiles                    = l.tiles;
        m.starts                   = l.starts;
        m.factors                  = l.factors;
        m.n_groups                 = static_cast<int32_t>(fragments_groups(l.rows));
        memcpy(&m.magnitudes, l.magnitudes, sizeof(m.magnitudes));
    });
    // rows that do not begin at a multiple of 16 reach into one more stripe
    const bool shifted = a.expert_ids && a.expert_rows % FRAGMENT_ROWS;
    p.n_warp_rows      = 0;
    for (int i = 0; i < a.n_matrices; i++) {
        fragments_operand & m = p.m[i];
        m.first_warp_rows     = p.n_warp_rows;
        if (i == 0 || !a.silu_mul) {
            p.n_warp_rows += (m.n_rows + (shifted ? 15 : m.row_begin % 16) + 15) / 16;
        }
    }
    if (p.n_warp_rows == 0) {
        return cudaSuccess;
    }
    if (a.silu_mul && a.row_begin[0] % FRAGMENT_ROWS != a.row_begin[1] % FRAGMENT_ROWS) {
        return cudaErrorNotSupported;
    }
    p.apart        = batch.apart;
    p.groups       = batch.groups;
    p.slots        = a.slots ? static_cast<int32_t>(a.slots) : INT32_MAX;
    p.token_stride = a.token_stride;
    p.shares_x     = a.shares_x;
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    // Of a product; in total, one per multiprocessor. If there are more groups than multiprocessors, about six each,
    // so that the last ones take a small part of the time.
    const int all     = batch.groups && batch.busy > device.multiprocessors ? 6 * device.multiprocessors
                                                                            : device.multiprocessors,
              blocks  = std::min(std::max(all / batch.busy, 1), p.n_warp_rows);
    const int stripes = (p.n_warp_rows + blocks - 1) / blocks * (a.silu_mul ? 2 : 1);
    CUDA_TRY(divide(w, a, nx, rounded, stripes, &p.by));
    p.units = p.n_warp_rows / blocks;
    p.more  = p.n_warp_rows % blocks;
    for (int i = 0; i < 2; i++) {
        const int n       = (p.units + 1 - i) * (a.silu_mul ? 2 : 1);
        p.full_turns[i]   = n / p.by.round_stripes * p.by.phases;
        p.rest_stripes[i] = n % p.by.round_stripes;
    }
    return with_constant<1, 2, 4, 8, 16, 32, 64>(nx, cudaErrorNotSupported, [&](auto n) {
        constexpr int NX     = decltype(n)::value;
        const auto    kernel = w.code_bits == 4 ? fragments_kernel<4, NX> : fragments_kernel<8, NX>;
        return launch_sparse(kernel, p, p.by.warps * 32, p.by.nbytes(), blocks, batch.n, stream);
    });
}

// Whether the kernel of one column rounds it.
bool rounds_own_x(const fragments_layout & w, const cuda_sparse_mul_mat_params & a) {
    return w.cols <= X_OWN_COLS && is_aligned(a) && fits(w, a, 1, nullptr);
}

// ---- groups of experts ----

// Times that a product may decode an expert, on average. Experts that fill the GPU alone become dense earlier, like
// other matrices.
constexpr int64_t MAX_DECODED = 8, MAX_DECODED_LARGE = 1;
constexpr int64_t MAX_EXPERTS = 4096; // whose columns a block counts in shared memory

// Columns of a group: few experts need two groups, which decode the expert twice. 64 take as long as twice 32.
int grouped_columns(int64_t n, int64_t n_experts) {
    return n > 8 * n_experts ? 32 : n > 4 * n_experts ? 16 : n > 2 * n_experts ? 8 : n > n_experts / 2 ? 4 : 2;
}
int64_t most_groups(int64_t n, int64_t n_experts, int nx) { return std::min(n, n_experts + 1 + n / nx); }
int64_t group_list_nbytes(int64_t most, int nx) { return (most * (1 + nx) * 4 + 15) / 16 * 16; }

// As many columns of a group as fit shared memory; 1: none
int grouped_columns(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, int64_t n_experts) {
    int nx = w.window < 2 * FRAGMENT_STEP ? 2 : grouped_columns(a.n, n_experts);
    while (nx > 1 && !fits(w, a, nx, w.tiles)) {
        nx /= 2;
    }
    return nx;
}

// Whether few columns have the same expert, so that a product for each column is faster: it rounds its x itself.
bool is_one_by_one(const fragments_layout & w, const cuda_sparse_mul_mat_params & a) {
    return a.n <= std::max(a.slots, w.rows / a.expert_rows / 2) && rounds_own_x(w, a);
}

cudaError_t multiply_groups(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    const int64_t n_experts = w.rows / a.expert_rows;
    const int     nx        = grouped_columns(w, a, n_experts);
    if (nx == 1) {
        return cudaErrorNotSupported;
    }
    const int64_t most = most_groups(a.n, n_experts, nx);
    product_batch batch;
    batch.n      = static_cast<int>(most);
    batch.apart  = rounded_nbytes(w.cols, nx);
    batch.groups = static_cast<const int32_t *>(a.groups);
    // with columns of random experts, about so many groups have some
    const double all = static_cast<double>(n_experts), each = static_cast<double>(a.n) / all,
                 of_each = each > nx / 2 ? each / nx + 0.5 : 1 - std::exp(-each);
    batch.busy           = std::max(static_cast<int>(all * of_each), 1);
    // each block counts the columns of all experts, so there are no more blocks than fill the GPU
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const auto         share = [](int64_t x, int64_t parts) { return static_cast<int32_t>((x + parts - 1) / parts); };
    const int32_t      by_block = share(a.n, 2 * device.multiprocessors);
    const group_list   list     = { static_cast<int32_t *>(a.groups),
                                    a.expert_ids,
                                    a.expert_ids_stride,
                                    a.token_stride,
                                    static_cast<int32_t>(a.n),
                                    static_cast<int32_t>(a.slots),
                                    static_cast<int32_t>(n_experts),
                                    batch.n,
                                    by_block,
                                    a.shares_x };
    uint8_t * const    integers = static_cast<uint8_t *>(a.groups) + group_list_nbytes(most, nx);
    const round_params r        = { source_of(w, a), a.ldx, steps_of(w.cols), nx, integers, batch.apart, list };
    CUDA_TRY(launch_kernel(round_kernel_of<true>(is_aligned(a), nx), r, dim3(share(a.n, by_block)), ROUND_THREADS,
                           2 * (n_experts + 1) * 4, a.programmatic, stream));
    return multiply_columns(w, a, nx, integers, batch, stream);
}

} // namespace

bool cuda_sparse_groups_experts(const gpu_layout & layout, int64_t n, int64_t n_experts) {
    const auto * w = std::get_if<fragments_layout>(&layout);
    if (!w || n > MAX_GRID_YZ || n_experts >= MAX_EXPERTS) {
        return false;
    }
    cuda_sparse_mul_mat_params a = {};
    a.n_matrices = 2, a.w[0] = a.w[1] = &layout, a.n = n, a.silu_mul = true; // needs the most memory
    const int     nx      = grouped_columns(*w, a, n_experts);
    const int64_t decoded = w->rows / n_experts * w->cols < CUDA_SPARSE_LARGE_EXPERT ? MAX_DECODED : MAX_DECODED_LARGE;
    return nx > 1 && n <= decoded * nx * n_experts;
}

int64_t cuda_sparse_groups_nbytes(int64_t cols, int64_t n, int64_t n_experts) {
    int64_t nbytes = 0;
    for (int nx = 2; nx <= grouped_columns(n, n_experts); nx *= 2) {
        const int64_t columns = std::min(n, MAX_DECODED * nx * n_experts), most = most_groups(columns, n_experts, nx);
        nbytes = std::max(nbytes, group_list_nbytes(most, nx) + most * rounded_nbytes(cols, nx));
    }
    return nbytes;
}

cudaError_t multiply_all(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    if (a.slots && !is_one_by_one(w, a)) {
        return multiply_groups(w, a, stream);
    }
    const bool    each = a.n == 1 || a.expert_ids; // one column at a time
    product_batch columns;
    columns.n = columns.busy = grid_columns(a);
    if (each && rounds_own_x(w, a)) {
        return multiply_columns(w, a, 1, nullptr, columns, stream);
    }
    if (!a.x16) {
        return cudaErrorNotSupported;
    }
    int nx = each ? 1 : a.n > 32 ? 64 : a.n > 16 ? 32 : a.n > 8 ? 16 : a.n > 4 ? 8 : a.n > 2 ? 4 : 2;
    if (w.window < 2 * FRAGMENT_STEP) {
        nx = std::min(nx, 2); // more columns add two steps before they scale the sum
    }
    const auto      apart    = [&] { return rounded_nbytes(w.cols, nx); };
    uint8_t * const integers = static_cast<uint8_t *>(a.x16);
    while (nx > 1 && (apart() > CUDA_SPARSE_X16_NBYTES || !fits(w, a, nx, integers))) {
        nx /= 2;
    }
    const int64_t most = CUDA_SPARSE_X16_NBYTES / apart() * nx; // columns that are rounded at a time
    if (most == 0) {
        return cudaErrorNotSupported;
    }
    for (int64_t j = 0; j < a.n; j += most) {
        const int64_t      n = std::min(most, a.n - j);
        const round_params r = { source_of(w, a.columns(j, n)), a.ldx, steps_of(w.cols), nx, integers, apart(), {} };
        CUDA_TRY(launch_kernel(round_kernel_of<false>(is_aligned(a), nx), r, dim3(static_cast<unsigned>(n)),
                               ROUND_THREADS, 0, a.programmatic, stream));
        if (a.expert_ids) {
            columns.n = columns.busy = static_cast<int>(n);
            columns.apart            = apart();
            CUDA_TRY(multiply_columns(w, a.columns(j, n), 1, integers, columns, stream));
            continue;
        }
        for (int64_t i = 0; i < n; i += nx) {
            CUDA_TRY(multiply_columns(w, a.columns(j + i, std::min<int64_t>(nx, n - i)), nx,
                                      integers + i / nx * apart(), {}, stream));
        }
    }
    return cudaSuccess;
}

} // namespace macko::cuda
