// y = W x with W in the layout FRAGMENTS (gpu-layout/fragments.h), on tensor cores that multiply bytes.
//
// A warp decodes a tile to the A operands of 16 x 8 x 32 products. x is rounded to 16-bit integers with one scale per
// column, q = 256 high + low with signed bytes high and low: by each block if there is one column, else by a kernel of
// its own. B's 8 columns are the bytes of x: for up to 4 columns of x, (step, column, high or low) of 4, 2 or 1 steps,
// of which a product uses one (the others are zero), so that the sums of these steps remain apart; for each 8 columns
// of x, two B operands. A block has all columns of W for its rows: it adds up the sums of parts of a row in their
// order, so there are no atomics.
//
// With codes of 4 bits, the instruction PRMT looks up magnitudes: it takes selectors of 4 bits, and bit 3 asks for the
// sign of a byte, which is 0 in a table of magnitudes. The same codes thus give the positive levels (and 0), and with
// bit 3 flipped the negative ones, which are a second A operand. PRMT also spreads the values to columns.
#include "cuda/lib/copies.cuh"
#include "cuda/lib/mma.cuh"
#include "cuda/sparse/fragments.cuh"
#include "cuda/sparse/product.cuh"

#include <algorithm>
#include <cstring>

namespace macko::cuda {

namespace {

constexpr int   MAX_WARPS       = 16;
constexpr int   X_KEPT          = 4;        // vectors of x per thread that remain in registers
constexpr int   X_SCALES_NBYTES = 128;      // of up to 32 columns of x, in front of their integers
constexpr float X_INTEGERS      = 32639.0f; // the largest 256 high + low

struct fragments_operand : result_operand {
    const uint8_t *  tiles;
    const uint32_t * starts;
    const float *    factors;
    uint4            magnitudes; // of positive, then of negative levels
    int32_t          n_groups;   // of 16 rows
    int32_t          all_rows;   // of the matrix
};
// In shared memory: a table of lut_copies copies of 256 entries; scales of x, and some columns of its integers; sums
// of tiles; two buffers per warp.
struct fragments_launch : product_launch<fragments_operand> {
    int32_t segments, tile_chunks, chunks; // segments and chunks of a row
    int32_t window, window_bits;           // columns; log2 of its steps
    int32_t lut_copies;
    int32_t x_at, sums_at, scratch_at, buffers_at, buffer_nbytes;
    int32_t phase_segments; // segments of which x is in shared memory at a time
    int32_t round_stripes;  // stripes (16 rows of one matrix) whose sums are in shared memory at a time
    int32_t parts;          // of a stripe in a phase; a warp adds up the tiles of a part
    // Of round_x_kernel: scales of the columns of x, and integers as bytes [step][column][high, low][32]. null: the
    // kernel rounds its one column, which it can read in vectors if it is aligned.
    const uint8_t * rounded;
    int64_t         apart; // bytes to the column of the next expert
    bool            aligned;
};

// ---- x ----

struct x_source {
    const float * x;
    const float * norm_weight; // or null
    float         norm_eps;
    int           cols;
};

// Elements c ... c + 3 of a column, multiplied by the norm's weights; zeros behind the last one. ALIGNED: they can be
// read in vectors
template <bool ALIGNED> __device__ __forceinline__ float4 load_x(const x_source & s, int c, float * squares) {
    float4 v = {}, w = make_float4(1, 1, 1, 1);
    if (ALIGNED) {
        if (c < s.cols) {
            v = *reinterpret_cast<const float4 *>(s.x + c);
            w = s.norm_weight ? *reinterpret_cast<const float4 *>(s.norm_weight + c) : w;
        }
    } else {
        const auto at     = [&](int i) { return c + i < s.cols ? s.x[c + i] : 0.0f; };
        const auto weight = [&](int i) { return s.norm_weight && c + i < s.cols ? s.norm_weight[c + i] : 1.0f; };
        v                 = make_float4(at(0), at(1), at(2), at(3));
        w                 = make_float4(weight(0), weight(1), weight(2), weight(3));
    }
    *squares = add_squares(*squares, v);
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
}

// Four integers as bytes.
__device__ __forceinline__ void store_integers(float4 v, float inverse, uint8_t * high, uint8_t * low) {
    // 1.5 * 2^23: the low bits of the sum are those of the integer
    const auto     bits = [&](float f) { return __float_as_uint(fmaf(f, inverse, 12582912.0f)); };
    const uint32_t q0 = bits(v.x), q1 = bits(v.y), q2 = bits(v.z), q3 = bits(v.w);
    *reinterpret_cast<uint32_t *>(low) = __byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410);
    *reinterpret_cast<uint32_t *>(high) =
        __byte_perm(__byte_perm(q0 + 128, q1 + 128, 0x0051), __byte_perm(q2 + 128, q3 + 128, 0x0051), 0x5410);
}

// The largest magnitude of a column as bits (more than those of INFINITY: a NaN), and its sum of squares.
struct column_measure {
    uint32_t largest;
    float    squares;
};

// Rounds a column on all threads of a block, as bytes [step][high, low][32] in a stride of `apart` bytes, with zeros
// behind the last column of the last step. scratch: of each warp; *scale (written by one thread): turns sums into
// results. X_KEPT vectors of a thread remain in registers between the two passes.
template <bool ALIGNED>
__device__ __forceinline__ void round_column(const x_source & s, int n_steps, int apart, uint8_t * to,
                                             column_measure * scratch, float * scale) {
    const int      lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, stride = blockDim.x * 4;
    const int      kept_columns = X_KEPT * stride, first = threadIdx.x * 4;
    float4         kept[X_KEPT];
    column_measure m       = { 0, 0.0f };
    const auto     measure = [&](float4 v) {
        const auto magnitude = [](float f) { return __float_as_uint(f) & 0x7fffffffu; };
        m.largest = max(max(m.largest, max(magnitude(v.x), magnitude(v.y))), max(magnitude(v.z), magnitude(v.w)));
    };
#pragma unroll
    for (int i = 0; i < X_KEPT; i++) {
        kept[i] = load_x<ALIGNED>(s, i * stride + first, &m.squares);
    }
#pragma unroll
    for (int i = 0; i < X_KEPT; i++) {
        measure(kept[i]);
    }
#pragma unroll 1
    for (int c = kept_columns + first; c < s.cols; c += stride) {
        measure(load_x<ALIGNED>(s, c, &m.squares));
    }
    m.largest = warp_max_bits(m.largest);
    m.squares = s.norm_weight ? warp_sum(m.squares) : 0.0f;
    if (lane == 0) {
        scratch[warp] = m;
    }
    __syncthreads();
    m                = lane < warps ? scratch[lane] : column_measure{ 0, 0.0f };
    const float most = __uint_as_float(warp_max_bits(m.largest));
    const bool  zero = most < 0x1p-100f, finite = most < INFINITY; // both false for NaN
    const float inverse = !zero && finite ? X_INTEGERS * __frcp_rn(most) : 0.0f;
    if (warp == 0) {
        const float norm = s.norm_weight ? rsqrtf(warp_sum(m.squares) / static_cast<float>(s.cols) + s.norm_eps) : 1.0f;
        if (lane == 0) {
            *scale = zero ? 0.0f : finite ? most * (1.0f / X_INTEGERS) * norm : NAN;
        }
    }
    const auto store = [&](int c, float4 v) {
        if (c < n_steps * 32) {
            uint8_t * const high = to + c / 32 * apart + c % 32;
            store_integers(v, inverse, high, high + 32);
        }
    };
#pragma unroll
    for (int i = 0; i < X_KEPT; i++) {
        store(i * stride + first, kept[i]);
    }
#pragma unroll 1
    for (int c = kept_columns + first; c < n_steps * 32; c += stride) {
        float squares = 0.0f;
        store(c, load_x<ALIGNED>(s, c, &squares));
    }
}

// Columns of x, a block for each. A product's nx columns are side by side, behind their scales.
struct round_params {
    x_source  source; // the first column
    int64_t   ldx;
    int32_t   n_steps, nx;
    uint8_t * to;
    int64_t   apart; // bytes from the columns of one product to those of the next
};

constexpr int ROUND_THREADS = 1024;

template <bool ALIGNED>
__global__ void __launch_bounds__(ROUND_THREADS) round_x_kernel(const __grid_constant__ round_params p) {
    __shared__ column_measure scratch[ROUND_THREADS / 32];
    const int                 column = blockIdx.x % p.nx;
    uint8_t * const           to     = p.to + blockIdx.x / p.nx * p.apart;
    x_source                  s      = p.source;
    s.x += blockIdx.x * p.ldx;
    cuda_allow_next();
    cuda_wait_for_previous();
    round_column<ALIGNED>(s, p.n_steps, 64 * p.nx, to + X_SCALES_NBYTES + column * 64, scratch,
                          reinterpret_cast<float *>(to) + column);
}

// ---- a tile ----

template <int NX> struct tile_sums {
    static constexpr int TILES = NX / 8, N = NX < 8 ? 2 : 4 * TILES;
    // row g, then row g + 8; with 8 columns and more: columns 2t and 2t + 1 of row g, then of g + 8, of each 8 columns
    float v[N];
};

// Adds a tile times x to sums. table, x: addresses of the table, and of x for the tile's first step
template <int BITS, int NX>
__device__ __forceinline__ void multiply_tile(const fragments_launch & p, const uint4 & magnitudes,
                                              const uint8_t * tile, int chunks, uint32_t table, uint32_t x,
                                              tile_sums<NX> & sums) {
    // steps whose sums remain apart; steps whose sums are scaled at once; B operands of a step
    constexpr int  SLOTS = NX < 4 ? 4 / NX : 1, STEPS = SLOTS < 2 ? 2 : SLOTS, PLANES = NX < 8 ? 1 : NX / 4;
    constexpr int  OPERANDS = step_operands<BITS, NX>::N;
    const int      lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, words_at = words_at_of(chunks, p.window_bits);
    const uint32_t at_tile = shared_address(tile), words = at_tile + words_at + lane * 4,
                   bitmaps = at_tile + words_at - chunks * 512 + lane * 16,
                   scales  = at_tile + static_cast<uint32_t>(FRAGMENT_TAIL_ENDS) + g;
    const uint32_t copy = table + lane % p.lut_copies * 8, entry = p.lut_copies * 8;
    const uint32_t pick[4] = { entry, entry << 8, entry << 16, entry << 24 };
    // of B: the lane's column and bytes 8 t ... 8 t + 7
    const int slot = NX < 8 ? g / (2 * NX) : 0;
    x += (slot * 2 * NX + (NX < 8 ? g % (2 * NX) : g * 2)) * 32 + t * 8;
    uint32_t mask[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        mask[s] = slot == s;
        asm volatile("" : "+r"(mask[s])); // a factor, not a predicate
    }
    uint32_t at = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        uint32_t bits[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(bitmaps + chunk * 512));
#pragma unroll
        for (int part = 0; part < 8 / STEPS; part++) {
            int   c[OPERANDS][PLANES][4] = {};
            uint2 own                    = {};
            if (SLOTS > 1) {
                own = load_words(x + (chunk * 8 + part * STEPS) * 64 * NX);
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int      step             = part * STEPS + s;
                const uint32_t word             = bits[step / 2];
                const uint2    of_g             = load_words(__dp4a(word, pick[step % 2 * 2], copy)),
                            of_g8               = load_words(__dp4a(word, pick[step % 2 * 2 + 1], copy));
                const step_operands<BITS, NX> d = decode_step<BITS, NX>(magnitudes, of_g, of_g8, words, &at);
#pragma unroll
                for (int plane = 0; plane < PLANES; plane++) { // high and low of 8 columns, then of the next 8
                    uint2 b;
                    if (SLOTS > 1) {
                        b = make_uint2(own.x * mask[s], own.y * mask[s]);
                    } else {
                        b = load_words(x + (chunk * 8 + step) * 64 * NX + plane / 2 * 512 + plane % 2 * 32);
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
#pragma unroll
            for (int i = 0; i < tile_sums<NX>::N; i++) {
                const int row = NX < 8 ? i : i % 4 / 2;
                const int v   = NX < 8 ? total(0, i * 2) * 256 + total(0, i * 2 + 1)
                                       : total(i / 4 * 2, i % 4) * 256 + total(i / 4 * 2 + 1, i % 4);
                sums.v[i]     = fmaf(scale[row], static_cast<float>(v), sums.v[i]);
            }
        }
    }
}

// Stores sums multiplied by the factors of rows g and g + 8, or adds them: [column][row].
template <int NX>
__device__ __forceinline__ void store_sums(float * to, tile_sums<NX> s, const float (&factor)[2], bool adds) {
    const auto put  = [&](int i, float v) { to[i] = adds ? to[i] + v : v; };
    const int  lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (NX >= 8) {
#pragma unroll
        for (int i = 0; i < tile_sums<NX>::N; i++) {
            const int row = i % 4 / 2;
            put((i / 4 * 8 + 2 * t + i % 2) * 16 + g + row * 8, s.v[i] * factor[row]);
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
            put(t * 16 + g, s.v[0] * factor[0]);
            put(t * 16 + g + 8, s.v[1] * factor[1]);
        }
    }
}

// ---- the kernel ----

// Goes through the tiles of a warp. A block has n_stripes stripes; in a round it has some of them, and in a phase of a
// round some segments of these, in parts of adjacent segments. A warp has every `warps`-th part.
struct tile_cursor {
    int round, phase, stripe, part; // stripe, part: in the round, in the phase
    int segment, end;               // of the part, counted from the phase's first one
    int here, stripes;              // segments of the phase, stripes of the round
};
// A tile: its bytes, and what its stripe needs.
struct tile_work {
    uint32_t begin, end; // in units of FRAGMENT_UNIT; equal: a tile past the last row
    int      matrix, slot, chunks, first_step;
    float    factor[2];  // of rows g and g + 8
    bool     last, adds; // of its part; to the sums of the phase before
    int      turn;       // round * phases + phase
};

constexpr int max_warps(int nx) { return nx > 16 ? 8 : nx > 8 ? 12 : MAX_WARPS; } // more sums take more registers

template <int BITS, int NX>
__global__ void __launch_bounds__(max_warps(NX) * 32, 1) fragments_kernel(const __grid_constant__ fragments_launch p) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int                               lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int                               column = blockIdx.y * NX;

    float * const    x_scale = reinterpret_cast<float *>(shared + p.x_at);
    uint8_t * const  x       = shared + p.x_at + X_SCALES_NBYTES;
    float * const    sums    = reinterpret_cast<float *>(shared + p.sums_at);
    column_measure * scratch = reinterpret_cast<column_measure *>(shared + p.scratch_at);
    uint8_t *        buffer  = shared + p.buffers_at + warp * 2 * p.buffer_nbytes;
    uint8_t *        other   = buffer + p.buffer_nbytes;

    if (p.expert_ids) {
        fill_table<BITS>(shared, p.lut_copies); // while the kernel before ends
    }
    const int row_offset = p.expert_ids ? expert_row(p, column) : 0;

    const int matrices = p.silu_mul ? 2 : 1;
    const int n_units_of_block =
        (p.n_warp_rows - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    const int n_stripes   = row_offset < 0 ? 0 : n_units_of_block * matrices;
    const int phases      = (p.segments + p.phase_segments - 1) / p.phase_segments,
              rounds      = (n_stripes + p.round_stripes - 1) / p.round_stripes;
    const auto stripes_of = [&](int round) { return min(p.round_stripes, n_stripes - round * p.round_stripes); };
    // stripe k of the block; its row counts from row_begin
    const auto task_of = [&](int k) {
        const int unit      = p.silu_mul ? k / 2 : k;
        const int warp_rows = blockIdx.x + unit * gridDim.x, turn = p.silu_mul ? k % 2 : 0;
        return p.n_matrices > 1 ? task_at<true>(p, static_cast<int>(FRAGMENT_ROWS), warp_rows, 0, 0, turn)
                                : task_at<false>(p, static_cast<int>(FRAGMENT_ROWS), warp_rows, 0, 0, turn);
    };

    // ---- the warp's tiles ----
    // Moves to the first part at or behind the cursor; false: there is none.
    const auto settle = [&](tile_cursor & c) {
        for (;;) {
            while (c.part >= p.parts) {
                c.part -= p.parts;
                c.stripe++;
            }
            if (c.stripe < c.stripes) {
                const int length = (c.here + p.parts - 1) / p.parts;
                c.segment        = c.part * length;
                c.end            = min(c.here, c.segment + length);
                if (c.segment < c.end) {
                    return true;
                }
                c.part += warps; // a phase with fewer segments than parts
                continue;
            }
            c.stripe = 0;
            c.part   = warp;
            c.round += c.phase + 1 == phases;
            c.phase = c.phase + 1 == phases ? 0 : c.phase + 1;
            if (c.round >= rounds) {
                return false;
            }
            c.here    = min(p.phase_segments, p.segments - c.phase * p.phase_segments);
            c.stripes = stripes_of(c.round);
        }
    };
    const auto advance = [&](tile_cursor & c) {
        if (++c.segment < c.end) {
            return true;
        }
        c.part += warps;
        return settle(c);
    };
    const auto work_at = [&](const tile_cursor & c) {
        const sparse_task         t     = task_of(c.round * p.round_stripes + c.stripe);
        const fragments_operand & m     = p.m[t.matrix];
        const int                 group = (m.row_begin + row_offset) / 16 + t.row / 16,
                  segment = c.phase * p.phase_segments + c.segment, row = group * 16 + lane / 4;
        const int64_t tile = static_cast<int64_t>(group) * p.segments + segment;
        tile_work     w    = {};
        if (group < m.n_groups) {
            w.begin     = __ldg(m.starts + tile);
            w.end       = __ldg(m.starts + tile + 1);
            w.factor[0] = row < m.all_rows ? __ldg(m.factors + row) : 0.0f;
            w.factor[1] = row + 8 < m.all_rows ? __ldg(m.factors + row + 8) : 0.0f;
        }
        w.matrix     = t.matrix;
        w.slot       = c.stripe * p.parts + c.part;
        w.chunks     = min(p.tile_chunks, p.chunks - segment * p.tile_chunks);
        w.first_step = c.segment * p.tile_chunks * 8;
        w.last       = c.segment + 1 == c.end;
        w.adds       = c.phase > 0;
        w.turn       = c.round * phases + c.phase;
        return w;
    };
    const auto tile_of = [&](const tile_work & w) {
        return p.m[w.matrix].tiles + static_cast<uint64_t>(w.begin) * FRAGMENT_UNIT;
    };
    const auto nbytes_of = [](const tile_work & w) {
        return static_cast<int>(w.end - w.begin) * static_cast<int>(FRAGMENT_UNIT);
    };
    const auto request = [&](const tile_work & w, uint8_t * to) {
        const int             mine = nbytes_of(w) - lane * 16; // from the lane's first 16 bytes on
        uint8_t * const       into = to + lane * 16;
        const uint8_t * const from = tile_of(w) + lane * 16;
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

    // the tile in `buffer`, the next one, and a cursor at the next one
    tile_cursor ahead = { 0, 0, 0, warp, 0, 0, p.phase_segments, stripes_of(0) };
    tile_work   tile = {}, next = {};
    bool        live = settle(ahead), more = false;
    if (live) {
        tile = work_at(ahead);
        request(tile, buffer);
        more = advance(ahead);
        if (more) {
            next = work_at(ahead);
        }
    }
    commit_copies();
    if (!p.expert_ids) {
        fill_table<BITS>(shared, p.lut_copies);
    }
    cuda_allow_next();
    if (!p.expert_ids) {
        cuda_wait_for_previous();
    }
    // x of a phase to shared memory
    const auto fill_x = [&](int phase) {
        const int first = phase * p.phase_segments * p.tile_chunks,
                  n     = min(p.phase_segments * p.tile_chunks, p.chunks - first) * 8; // steps
        if (NX == 1 && !p.rounded) {                                                   // one phase
            const x_source s = { p.x + column * p.ldx, p.norm_weight, p.norm_eps, p.cols };
            if (p.aligned) {
                round_column<true>(s, n, 64, x, scratch, x_scale);
            } else {
                round_column<false>(s, n, 64, x, scratch, x_scale);
            }
        } else {
            const uint8_t * from = p.rounded + blockIdx.y * p.apart;
            if (static_cast<int>(threadIdx.x) < X_SCALES_NBYTES / 16) {
                copy_16(shared + p.x_at + threadIdx.x * 16, from + threadIdx.x * 16);
            }
            from += X_SCALES_NBYTES + static_cast<int64_t>(first) * 512 * NX;
#pragma unroll 4
            for (int i = threadIdx.x * 16; i < n * 64 * NX; i += blockDim.x * 16) {
                copy_16(x + i, from + i);
            }
            wait_for_copies();
        }
        __syncthreads();
    };

    tile_sums<NX> part = {};
    for (int round = 0; round < max(rounds, 1); round++) {
        for (int phase = 0; phase < phases; phase++) {
            const int turn = round * phases + phase;
            if (turn == 0 || phases > 1) {
                if (turn > 0) {
                    __syncthreads();
                }
                fill_x(phase);
            }
            while (live && tile.turn == turn) {
                if (more) {
                    request(next, other);
                }
                commit_copies();
                const bool follows = more;
                tile_work  after   = {};
                if (more) {
                    more = advance(ahead);
                    if (more) {
                        after = work_at(ahead);
                    }
                }
                wait_for_committed_copies<1>();
                __syncwarp();
                if (tile.end > tile.begin) {
                    place_tails(buffer, tile_of(tile), nbytes_of(tile), words_at_of(tile.chunks, p.window_bits));
                    multiply_tile<BITS, NX>(p, p.m[tile.matrix].magnitudes, buffer, tile.chunks, shared_address(shared),
                                            shared_address(x) + tile.first_step * 64 * NX, part);
                }
                if (tile.last) {
                    store_sums<NX>(sums + tile.slot * 16 * NX, part, tile.factor, tile.adds);
                    part = {};
                }
                __syncwarp();
                uint8_t * const free = buffer;
                buffer               = other;
                other                = free;
                tile                 = next;
                next                 = after;
                live                 = follows;
            }
        }
        __syncthreads();
        // ---- the results of the round ----
        const int first = round * p.round_stripes / matrices;
        // an invalid expert has zeros for results, but as many
        const int  n_units = row_offset < 0 ? n_units_of_block : stripes_of(round) / matrices;
        const auto sum_of  = [&](int stripe, int n, int row) {
            const float * from = sums + stripe * p.parts * 16 * NX + n * 16 + row;
            float         v    = 0.0f;
            for (int i = 0; i < p.parts; i++) {
                v += from[i * 16 * NX];
            }
            return v;
        };
        for (int i = threadIdx.x; i < n_units * 16 * NX; i += blockDim.x) {
            const int   unit = i / (16 * NX), n = i / 16 % NX, r = i % 16;
            sparse_task t = task_of((first + unit) * matrices);
            t.row += r - (max(row_offset, 0) + p.m[t.matrix].row_begin) % 16;
            if (t.row < 0 || t.row >= p.m[t.matrix].n_rows || column + n >= p.n_columns) {
                continue;
            }
            float y = 0.0f, gate = 0.0f;
            if (row_offset >= 0) {
                y = sum_of(unit * matrices, n, r) * x_scale[n];
                if (p.silu_mul) {
                    gate = y;
                    y    = sum_of(unit * 2 + 1, n, r) * x_scale[n];
                }
            }
            store_result<true>(p, t, column + n, y, gate);
        }
        if (round + 1 < rounds) {
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

// Divides shared memory and the work, and returns the number of warps; 0: nothing fits. stripes: of a block
int divide(fragments_launch & p, int nx, int most_words, int stripes, int room) {
    const int matrices = p.silu_mul ? 2 : 1, scratch = MAX_WARPS * static_cast<int>(sizeof(column_measure)),
              sums  = 16 * nx * 4; // of a part
    p.lut_copies    = room >= 104 * 1024 && nx < 8 ? 16 : 8;
    p.x_at          = p.lut_copies * 256 * 8;
    p.buffer_nbytes = fragments_buffer_nbytes(p.tile_chunks, p.window, most_words);
    int best = 0, best_time = INT32_MAX, best_phases = p.segments;
    // a kernel that rounds its column has the whole column in shared memory
    for (int phases = 1; phases <= std::min(p.rounded ? p.segments : 1, best_phases + 3); phases++) {
        const int segments = (p.segments + phases - 1) / phases,
                  sums_at  = p.x_at + X_SCALES_NBYTES + segments * p.tile_chunks * 8 * 64 * nx;
        for (int warps = max_warps(nx); warps >= (best ? max_warps(nx) / 2 : 1); warps--) {
            const int left = room - sums_at - scratch - warps * 2 * p.buffer_nbytes;
            for (int wanted = 1; wanted <= segments && wanted <= MAX_WARPS; wanted++) {
                const int length   = (segments + wanted - 1) / wanted,
                          parts    = (segments + length - 1) / length; // none is empty
                const int in_round = std::min(stripes, left / (parts * sums) / matrices * matrices);
                if (in_round < matrices) {
                    break;
                }
                // The number of tiles of the warp with the most, times 8 + warps, which is about proportional to the
                // time of a tile (measured). A barrier and a copy of x take about as long as 1 or 2 tiles.
                const auto time_of = [&](int n) { return (n * parts + warps - 1) / warps * length * (8 + warps); };
                const int  rounds = stripes / in_round, rest = stripes % in_round;
                const int  time =
                    ((rounds * time_of(in_round) + time_of(rest)) + 24 * (rounds + (rest > 0))) * phases + parts;
                if (time < best_time) {
                    best             = warps;
                    best_time        = time;
                    best_phases      = phases;
                    p.phase_segments = segments;
                    p.round_stripes  = in_round;
                    p.parts          = parts;
                    p.sums_at        = sums_at;
                    p.scratch_at     = sums_at + in_round * parts * sums;
                    p.buffers_at     = p.scratch_at + scratch;
                }
            }
        }
    }
    return best;
}

// The words of the longest stream of all matrices.
int most_words_of(const cuda_sparse_mul_mat_params & a) {
    int most = 0;
    for (int i = 0; i < a.n_matrices; i++) {
        most = std::max(most, std::get<fragments_layout>(*a.w[i]).most_words);
    }
    return most;
}

// A launch with all that divide() reads.
fragments_launch sized_launch(const fragments_layout & w, const cuda_sparse_mul_mat_params & a,
                              const uint8_t * rounded) {
    fragments_launch p = {};
    p.silu_mul         = a.silu_mul;
    p.tile_chunks      = w.tile_chunks;
    p.segments         = static_cast<int32_t>(fragments_segments(w.cols, w.tile_chunks));
    p.chunks           = static_cast<int32_t>(fragments_all_chunks(w.cols));
    p.window           = w.window;
    p.window_bits      = fragments_window_bits(w.window);
    p.rounded          = rounded;
    return p;
}

// Whether a product of nx columns fits shared memory.
bool fits(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, int nx, const uint8_t * rounded) {
    cuda_device_info device;
    fragments_launch p = sized_launch(w, a, rounded);
    return cuda_current_device(&device) == cudaSuccess &&
           divide(p, nx, most_words_of(a), a.silu_mul ? 2 : 1, device.shared_nbytes) > 0;
}

// A product of up to nx columns, or of experts, one column each.
cudaError_t multiply_columns(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, int nx,
                             const uint8_t * rounded, int64_t apart, cudaStream_t stream) {
    fragments_launch p = sized_launch(w, a, rounded);
    set_product(p, a, static_cast<int>(FRAGMENT_ROWS), [&](const gpu_layout & layout, fragments_operand & m) {
        const fragments_layout & l = std::get<fragments_layout>(layout);
        m.tiles                    = l.tiles;
        m.starts                   = l.starts;
        m.factors                  = l.factors;
        m.n_groups                 = static_cast<int32_t>(fragments_groups(l.rows));
        m.all_rows                 = static_cast<int32_t>(l.rows);
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
    p.apart   = apart;
    p.aligned = is_aligned(a);
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int blocks  = std::min(device.multiprocessors, p.n_warp_rows); // one per multiprocessor
    const int stripes = (p.n_warp_rows + blocks - 1) / blocks * (a.silu_mul ? 2 : 1);
    const int warps   = divide(p, nx, most_words_of(a), stripes, device.shared_nbytes);
    if (warps == 0) {
        return cudaErrorNotSupported;
    }
    return with_constant<1, 2, 4, 8, 16, 32>(nx, cudaErrorNotSupported, [&](auto n) {
        constexpr int NX     = decltype(n)::value;
        const auto    kernel = w.code_bits == 4 ? fragments_kernel<4, NX> : fragments_kernel<8, NX>;
        return launch_sparse(kernel, p, warps * 32, p.buffers_at + warps * 2 * p.buffer_nbytes, blocks, grid_columns(a),
                             stream);
    });
}

} // namespace

cudaError_t multiply_all(const fragments_layout & w, const cuda_sparse_mul_mat_params & a, cudaStream_t stream) {
    const bool    each = a.n == 1 || a.expert_ids;       // one column at a time
    const int64_t kept = X_KEPT * max_warps(1) * 32 * 4; // of a column: a block has them in registers
    if (!a.x16 || (each && w.cols <= kept && is_aligned(a) && fits(w, a, 1, nullptr))) {
        const int64_t most = a.expert_ids ? a.n : 1;
        for (int64_t j = 0; j < a.n; j += most) {
            CUDA_TRY(multiply_columns(w, a.columns(j, most), 1, nullptr, 0, stream));
        }
        return cudaSuccess;
    }
    int nx = each ? 1 : a.n > 16 ? 32 : a.n > 8 ? 16 : a.n > 4 ? 8 : a.n > 2 ? 4 : 2;
    if (w.window < 2 * FRAGMENT_STEP) {
        nx = std::min(nx, 2); // more columns add two steps before they scale the sum
    }
    const int64_t   steps    = fragments_all_chunks(w.cols) * 8;
    const auto      apart    = [&] { return X_SCALES_NBYTES + steps * 64 * nx; };
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
        const round_params r = { { a.x + j * a.ldx, a.norm_weight, a.norm_eps, static_cast<int>(w.cols) },
                                 a.ldx,
                                 static_cast<int32_t>(steps),
                                 nx,
                                 integers,
                                 apart() };
        CUDA_TRY(launch_kernel(is_aligned(a) ? round_x_kernel<true> : round_x_kernel<false>, r,
                               dim3(static_cast<unsigned>(n)), ROUND_THREADS, 0, a.programmatic, stream));
        if (a.expert_ids) {
            CUDA_TRY(multiply_columns(w, a.columns(j, n), 1, integers, apart(), stream));
            continue;
        }
        for (int64_t i = 0; i < n; i += nx) {
            CUDA_TRY(multiply_columns(w, a.columns(j + i, std::min<int64_t>(nx, n - i)), nx,
                                      integers + i / nx * apart(), 0, stream));
        }
    }
    return cudaSuccess;
}

} // namespace macko::cuda
