// Products of up to 8 columns with quantized weights, on tensor cores (cc 8.0) and without rounding x. The quants of a block are integers that bf16 holds
// exactly, and a float32 of x is the sum of three bf16 values of 8 bits each. So an MMA of 16 rows of w with three columns for each column of x makes exact
// products and float32 sums; scales are applied to the sums over the 16 or 32 weights that share one. The vector kernel, whose work is an operation per weight
// and column, cannot keep up with memory at less than a byte per weight.
//   A block owns TILE_ROWS rows, its warps take chunks of CHUNK weights of all of them by turns. Blocks of most types are aligned to 2 bytes only: a warp
//   copies the 16-byte units that its chunks lie in to shared memory (STAGES chunks, on their way at once, the first ones before the wait for the kernel
//   ahead), and reads words at even addresses there. Then the warps' sums are added up, in their order.
#pragma once

#include "cuda/ops-mma.cuh"

namespace macko {

struct quantized_args {
    const char * w;
    const char * x;
    char       * y;
    int64_t      x_nb1, y_nb1; // bytes
    uint32_t     w_nb1;
    int          m, n, k;
    int          row_nbytes;
};

constexpr int CHUNK     = 256; // weights of a row that a warp takes at a time: a super-block, or 8 blocks
constexpr int X_PARTS   = 3;
constexpr int X_STRIDE  = CHUNK * 2 + 32; // bytes from column to column: four columns are read at once, from different banks

// ---- reading quants: a row's chunk at any even address of shared memory, for one lane of the four that share the row ----

// ALIGNED: chunks begin at multiples of 4
template <bool ALIGNED> struct chunk_words {
    const char * at;

    __device__ __forceinline__ uint32_t u16(int i) const { return *reinterpret_cast<const uint16_t *>(at + i); }
    __device__ __forceinline__ float    half(int i) const { return __half2float(*reinterpret_cast<const __half *>(at + i)); }
    // 4 bytes; i: even, a constant but for multiples of 4
    __device__ __forceinline__ uint32_t u32(int i) const {
        if constexpr (ALIGNED) {
            return *reinterpret_cast<const uint32_t *>(at + i);
        } else {
            const uintptr_t  a = reinterpret_cast<uintptr_t>(at) + i % 4;
            const uint32_t * w = reinterpret_cast<const uint32_t *>(at + i % 4 - (a & 2)) + i / 4;
            return __funnelshift_r(w[0], w[1], static_cast<uint32_t>(a & 2) * 8);
        }
    }
};

// bytes as floats: 0x4b000000 is 2^23, and its last bit counts 1
static __device__ __forceinline__ float byte_of(uint32_t word, int i) { return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + i)) - 8388608.0f; }
static __device__ __forceinline__ float signed_byte_of(uint32_t word, int i) { return __uint_as_float(__byte_perm(word ^ 0x80808080, 0x4b000000, 0x7440 + i)) - 8388736.0f; }

static __device__ __forceinline__ uint32_t subtract_bf16(uint32_t a, uint32_t b) {
    const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&d);
}

// Four bytes 0 ... 127, less OFFSET, as bf16: bytes 0 and 2, 1 and 3. 0x4300 is 128, and its last bit counts 1.
template <int OFFSET> static __device__ __forceinline__ uint2 to_bf16(uint32_t q) {
    constexpr uint32_t ZERO = 0x43004300 + OFFSET * 0x00010001;
    return make_uint2(subtract_bf16(__byte_perm(q, 0x43434343, 0x4240), ZERO), subtract_bf16(__byte_perm(q, 0x43434343, 0x4341), ZERO));
}

// Of each type: GROUP weights share a scale. quad(step): the four quants from 16 * step + 4 * t on, as bf16. scales(t, s, m): of the CHUNK / GROUP / 4 groups
// from there times t on; a weight is s * quant - m, where there are minima. For lane t of the four that share the row, whose own bytes are at mine.
template <tensor_type TYPE> struct chunk_reader;

template <> struct chunk_reader<TYPE_Q4_0> {
    static constexpr int  GROUP = 32;
    static constexpr bool ALIGNED = false, HAS_MINIMUM = false;
    chunk_words<ALIGNED> row, mine;
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(step / 2 * 18 + 2);
        return to_bf16<8>((step % 2 ? q >> 4 : q) & 0x0f0f0f0f);
    }
    __device__ __forceinline__ void scales(int t, float * s, float *) const { s[0] = row.half(t * 36), s[1] = row.half(t * 36 + 18); }
};

// the four bits of a word from bit i on, as bit 4 of four bytes
static __device__ __forceinline__ uint32_t spread_bits(uint32_t word, int i) { return ((word >> i & 15) * 0x02040810) & 0x10101010; }

template <> struct chunk_reader<TYPE_Q5_0> {
    static constexpr int  GROUP = 32;
    static constexpr bool ALIGNED = false, HAS_MINIMUM = false;
    chunk_words<ALIGNED> row, mine;
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(step / 2 * 22 + 6), high = row.u32(step / 2 * 22 + 2);
        const int      t = static_cast<int>(threadIdx.x) % 4;
        return to_bf16<16>(((step % 2 ? q >> 4 : q) & 0x0f0f0f0f) | spread_bits(high, step % 2 * 16 + 4 * t));
    }
    __device__ __forceinline__ void scales(int t, float * s, float *) const { s[0] = row.half(t * 44), s[1] = row.half(t * 44 + 22); }
};

template <> struct chunk_reader<TYPE_Q8_0> {
    static constexpr int  GROUP = 32;
    static constexpr bool ALIGNED = false, HAS_MINIMUM = false;
    chunk_words<ALIGNED> row, mine;
    // a negative byte is its lower 7 bits less 128: 0x4380 is 256
    static __device__ __forceinline__ uint32_t pair(uint32_t q) { return subtract_bf16((q & 0x007f007f) | 0x43004300, (q & 0x00800080) | 0x43004300); }
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(step / 2 * 34 + 2 + step % 2 * 16);
        return make_uint2(pair(q), pair(q >> 8));
    }
    __device__ __forceinline__ void scales(int t, float * s, float *) const { s[0] = row.half(t * 68), s[1] = row.half(t * 68 + 34); }
};

// 6-bit scales and minima of Q4_K and Q5_K, two groups of a lane: the first four are whole, the others' upper bits lie above these
static __device__ __forceinline__ void load_scales_k4(const chunk_words<true> & row, int t, float * s, float * m) {
    const uint32_t low_s = row.u32(4), low_m = row.u32(8), high = row.u32(12);
    const int      shift = t % 2 * 16;
    const uint32_t scale   = (t < 2 ? low_s & 0x3f3f3f3f : (high & 0x0f0f0f0f) | (low_s >> 2 & 0x30303030)) >> shift;
    const uint32_t minimum = (t < 2 ? low_m & 0x3f3f3f3f : (high >> 4 & 0x0f0f0f0f) | (low_m >> 2 & 0x30303030)) >> shift;
    const float d = row.half(0), dmin = row.half(2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s[i] = d * byte_of(scale, i);
        m[i] = dmin * byte_of(minimum, i);
    }
}

template <> struct chunk_reader<TYPE_Q4_K> {
    static constexpr int  GROUP = 32;
    static constexpr bool ALIGNED = true, HAS_MINIMUM = true;
    chunk_words<ALIGNED> row, mine;
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(16 + step / 4 * 32 + step % 2 * 16);
        return to_bf16<0>((step % 4 / 2 ? q >> 4 : q) & 0x0f0f0f0f);
    }
    __device__ __forceinline__ void scales(int t, float * s, float * m) const { load_scales_k4(row, t, s, m); }
};

template <> struct chunk_reader<TYPE_Q5_K> {
    static constexpr int  GROUP = 32;
    static constexpr bool ALIGNED = true, HAS_MINIMUM = true;
    chunk_words<ALIGNED> row, mine;
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(48 + step / 4 * 32 + step % 2 * 16), high = mine.u32(16 + step % 2 * 16);
        const int      bit = step / 2;
        return to_bf16<0>(((step % 4 / 2 ? q >> 4 : q) & 0x0f0f0f0f) | ((bit < 4 ? high << (4 - bit) : high >> (bit - 4)) & 0x10101010));
    }
    __device__ __forceinline__ void scales(int t, float * s, float * m) const { load_scales_k4(row, t, s, m); }
};

template <> struct chunk_reader<TYPE_Q6_K> {
    static constexpr int  GROUP = 16;
    static constexpr bool ALIGNED = false, HAS_MINIMUM = false;
    chunk_words<ALIGNED> row, mine;
    __device__ __forceinline__ uint2 quad(int step) const {
        const int      half = step / 8, part = step % 8 / 2, side = step % 2 * 16; // part: 32 weights of 128
        const uint32_t low = mine.u32(half * 64 + part % 2 * 32 + side), high = mine.u32(128 + half * 32 + side);
        return to_bf16<32>(((part / 2 ? low >> 4 : low) & 0x0f0f0f0f) | ((part < 2 ? high << (4 - 2 * part) : high >> (2 * part - 4)) & 0x30303030));
    }
    __device__ __forceinline__ void scales(int, float * s, float *) const {
        const uint32_t word = mine.u32(192);
        const float    d    = row.half(208);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[i] = d * signed_byte_of(word, i);
        }
    }
};

// ---- the product ----

template <tensor_type TYPE, int COLS, int MT, int STAGES, bool X_SHARED> struct quantized_shape {
    using block  = typename value_type<TYPE>::block;
    using reader = chunk_reader<TYPE>;
    static constexpr int ROWS   = 16 * MT;
    static constexpr int NBYTES = CHUNK / value_type<TYPE>::BLOCK * static_cast<int>(sizeof(block));
    static constexpr int UNITS  = (NBYTES + 14 + 15) / 16;  // that a chunk touches at most
    static constexpr int STRIDE = (UNITS | 1) * 16;         // from row to row: odd, so that 8 rows are in different banks
    static constexpr int SCALES = CHUNK / reader::GROUP * (reader::HAS_MINIMUM ? 2 : 1) + 4; // floats from row to row, eight rows in different banks
    static constexpr int COLUMNS = X_PARTS * COLS;
    static constexpr int N_TILES = (COLUMNS + 7) / 8;       // of 8 columns of the MMA
    static constexpr int X_NBYTES     = COLUMNS * X_STRIDE; // of a chunk
    static constexpr int SUM_NBYTES   = reader::HAS_MINIMUM ? CHUNK / 32 * N_TILES * 8 * 4 : 0;
    static constexpr int WARP_NBYTES  = ROWS * (STAGES * STRIDE + SCALES * 4) + (X_SHARED ? 0 : X_NBYTES + SUM_NBYTES);
    static constexpr int BATCH        = X_SHARED ? 2 : 1;   // tiles from barrier to barrier
    static constexpr int PARTIAL      = ROWS * COLUMNS;     // floats of a warp and tile
    static constexpr int nbytes(int n_warps, int n_chunks) { return n_warps * (WARP_NBYTES + 2 * BATCH * PARTIAL * 4) + (X_SHARED ? n_chunks * (X_NBYTES + SUM_NBYTES) : 0); }
};

// c = a * b
static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}

// 8 values of x in three parts of 8 bits: the upper 16 bits of a float are a bf16. Of four values, the order is that of to_bf16.
static __device__ __forceinline__ void store_parts(char * to, float v[8]) {
#pragma unroll
    for (int part = 0; part < X_PARTS; part++) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            packed[i] = __byte_perm(__float_as_uint(v[i / 2 * 4 + i % 2]), __float_as_uint(v[i / 2 * 4 + i % 2 + 2]), 0x7632);
        }
        *reinterpret_cast<uint4 *>(to + part * X_STRIDE) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] -= __uint_as_float(__float_as_uint(v[i]) & 0xffff0000u);
        }
    }
}

template <tensor_type TYPE, int COLS, int MT, int STAGES, bool X_SHARED>
__global__ void __launch_bounds__(512, 1) quantized_kernel(const __grid_constant__ quantized_args p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    using S = quantized_shape<TYPE, COLS, MT, STAGES, X_SHARED>;
    using R = chunk_reader<TYPE>;
    constexpr int NT = S::N_TILES, LANE_ROWS = 2 * MT;
    extern __shared__ __align__(16) char shared[];
    const int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP, n_warps = static_cast<int>(blockDim.x) / WARP;
    const int g = lane / 4, t = lane % 4;
    char  * stages  = shared + warp * S::WARP_NBYTES;
    float * scales  = reinterpret_cast<float *>(stages + STAGES * S::ROWS * S::STRIDE);
    float * partial = reinterpret_cast<float *>(shared + n_warps * S::WARP_NBYTES);
    char  * x_parts = X_SHARED ? reinterpret_cast<char *>(partial + n_warps * 2 * S::BATCH * S::PARTIAL) : reinterpret_cast<char *>(scales + S::ROWS * S::SCALES);
    const int n_chunks = (p.k + CHUNK - 1) / CHUNK, n_tiles = (p.m + S::ROWS - 1) / S::ROWS;

    const auto row_at = [&](int tile, int r) { return p.w + static_cast<uint64_t>(static_cast<uint32_t>(min(tile * S::ROWS + r, p.m - 1))) * p.w_nb1; };
    // copies of the next chunk, in the order of the work below: eight lanes to a row, so that their 128 bytes are in different banks
    constexpr int COPY_ROWS = S::ROWS / 4;
    const int copy_row = lane / 8, copy_at = lane % 8 * 16;
    int next_tile = static_cast<int>(blockIdx.x), next_chunk = warp, next_stage = 0;
    const auto copy_next = [&] {
        while (next_chunk >= n_chunks) {
            next_chunk -= n_chunks;
            next_tile += static_cast<int>(gridDim.x);
        }
        if (next_tile < n_tiles) {
            char * to = stages + (next_stage * S::ROWS + copy_row) * S::STRIDE + copy_at;
            uintptr_t from[COPY_ROWS];
#pragma unroll
            for (int r = 0; r < COPY_ROWS; r++) {
                from[r] = reinterpret_cast<uintptr_t>(row_at(next_tile, copy_row + 4 * r) + (next_chunk * S::NBYTES + copy_at));
            }
            const int left = p.row_nbytes - next_chunk * S::NBYTES - copy_at;
            const bool last = next_chunk == n_chunks - 1; // nothing is read beyond the row's end: who knows what is there
#pragma unroll
            for (int at = 0; at < S::UNITS * 16; at += 128) {
                if (at + 128 <= S::UNITS * 16 || copy_at < S::UNITS * 16 - at) {
                    if (!last) {
#pragma unroll
                        for (int r = 0; r < COPY_ROWS; r++) {
                            copy_16(to + r * 4 * S::STRIDE + at, reinterpret_cast<const char *>(from[r] & ~uintptr_t(15)) + at);
                        }
                    } else {
#pragma unroll
                        for (int r = 0; r < COPY_ROWS; r++) {
                            const int some = left + static_cast<int>(from[r] & 15) - at;
                            copy_16_or_less(to + r * 4 * S::STRIDE + at, reinterpret_cast<const char *>(from[r] & ~uintptr_t(15)) + at, min(max(some, 0), 16));
                        }
                    }
                }
            }
            next_chunk += n_warps;
        }
        commit_copies();
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        copy_next();
    }
    wait_for_previous();

    // x of chunk in parts, by the warp
    const auto prepare_x = [&](int chunk, char * parts) {
        float * sums = reinterpret_cast<float *>(parts + S::X_NBYTES);
        if constexpr (R::HAS_MINIMUM) {
#pragma unroll
            for (int i = lane; i < S::SUM_NBYTES / 4; i += WARP) {
                sums[i] = 0;
            }
            __syncwarp();
        }
        const int k = chunk * CHUNK + lane * 8;
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            if (c < p.n) {
                float v[8] = {};
                if (k < p.k) {
                    value_type<TYPE_F32>::load8(p.x + c * p.x_nb1, k, v);
                }
                if constexpr (R::HAS_MINIMUM) {
                    const float sum = warp_sum<4>(((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])));
                    if (t == 0) {
                        sums[g * S::N_TILES * 8 + X_PARTS * c] = sum;
                    }
                }
                store_parts(parts + X_PARTS * c * X_STRIDE + lane * 16, v);
            }
        }
    };
    if constexpr (X_SHARED) {
        for (int chunk = warp; chunk < n_chunks; chunk += n_warps) {
            prepare_x(chunk, x_parts + chunk * (S::X_NBYTES + S::SUM_NBYTES));
        }
        __syncthreads();
    }
    int x_mine[NT]; // columns that are not there may hold anything: they do not meet the others
#pragma unroll
    for (int j = 0; j < NT; j++) {
        x_mine[j] = min(j * 8 + g, X_PARTS * p.n - 1) * X_STRIDE + t * 8;
    }
    int stage = 0, chunk = warp, n_done = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < n_tiles; tile += static_cast<int>(gridDim.x)) {
        float    acc[MT][NT][4] = {};
        uint32_t low[LANE_ROWS];
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            low[r] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row_at(tile, g + 8 * r)));
        }
        for (; chunk < n_chunks; chunk += n_warps) {
            __syncwarp(); // x_parts and the stage before have been read
            copy_next();
            const char * x_now = x_parts;
            if constexpr (X_SHARED) {
                x_now += chunk * (S::X_NBYTES + S::SUM_NBYTES);
            } else {
                prepare_x(chunk, x_parts);
            }
            const float * sums = reinterpret_cast<const float *>(x_now + S::X_NBYTES);
            wait_for_copies_but<STAGES - 1>();
            __syncwarp();
            R rows[LANE_ROWS];
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) {
                rows[r].row.at  = stages + (stage * S::ROWS + g + 8 * r) * S::STRIDE + (low[r] + static_cast<uint32_t>(chunk * S::NBYTES)) % 16;
                rows[r].mine.at = rows[r].row.at + 4 * t;
                float * to = scales + (g + 8 * r) * S::SCALES;
                if constexpr (R::GROUP == 16) {
                    float4 s;
                    rows[r].scales(t, &s.x, nullptr);
                    reinterpret_cast<float4 *>(to)[t] = s;
                } else {
                    float2 s, m;
                    rows[r].scales(t, &s.x, &m.x);
                    reinterpret_cast<float2 *>(to)[t] = s;
                    if constexpr (R::HAS_MINIMUM) {
                        reinterpret_cast<float2 *>(to + 8)[t] = m;
                    }
                }
            }
            __syncwarp();
            float4 four_scales[LANE_ROWS], four_minima[R::HAS_MINIMUM ? LANE_ROWS : 1];
#pragma unroll
            for (int group = 0; group < CHUNK / R::GROUP; group++) {
                if (group % 4 == 0) {
#pragma unroll
                    for (int r = 0; r < LANE_ROWS; r++) {
                        const float4 * from = reinterpret_cast<const float4 *>(scales + (g + 8 * r) * S::SCALES);
                        four_scales[r] = from[group / 4];
                        if constexpr (R::HAS_MINIMUM) {
                            four_minima[r] = from[2 + group / 4];
                        }
                    }
                }
                float c[MT][NT][4];
#pragma unroll
                for (int i = 0; i < R::GROUP / 16; i++) {
                    const int step = group * (R::GROUP / 16) + i;
                    uint2 b[NT];
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        b[j] = *reinterpret_cast<const uint2 *>(x_now + x_mine[j] + step * 32);
                    }
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
                        const uint2    q0 = rows[2 * mt].quad(step), q1 = rows[2 * mt + 1].quad(step);
                        const uint32_t a[4] = { q0.x, q1.x, q0.y, q1.y };
#pragma unroll
                        for (int j = 0; j < NT; j++) {
                            if (i == 0) {
                                multiply(c[mt][j], a, b[j]);
                            } else {
                                multiply_add<__nv_bfloat16>(c[mt][j], a, b[j].x, b[j].y);
                            }
                        }
                    }
                }
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    const float s0 = (&four_scales[2 * mt].x)[group % 4], s1 = (&four_scales[2 * mt + 1].x)[group % 4];
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        acc[mt][j][0] += s0 * c[mt][j][0];
                        acc[mt][j][1] += s0 * c[mt][j][1];
                        acc[mt][j][2] += s1 * c[mt][j][2];
                        acc[mt][j][3] += s1 * c[mt][j][3];
                    }
                    if constexpr (R::HAS_MINIMUM) {
                        const float m0 = (&four_minima[2 * mt].x)[group % 4], m1 = (&four_minima[2 * mt + 1].x)[group % 4];
#pragma unroll
                        for (int j = 0; j < NT; j++) {
                            const float2 sum = *reinterpret_cast<const float2 *>(sums + (group * NT + j) * 8 + 2 * t);
                            acc[mt][j][0] -= m0 * sum.x;
                            acc[mt][j][1] -= m0 * sum.y;
                            acc[mt][j][2] -= m1 * sum.x;
                            acc[mt][j][3] -= m1 * sum.y;
                        }
                    }
                }
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        chunk -= n_chunks;
        // sums of the tile, then, once per batch, of all warps: no second barrier, as the next batch has its own place
        const int slot = n_done % (2 * S::BATCH);
        float * mine = partial + (slot * n_warps + warp) * S::PARTIAL;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int j = 0; j < NT; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int q = j * 8 + 2 * t + i % 2;
                    if (q < S::COLUMNS) {
                        mine[(mt * 16 + i / 2 * 8 + g) * S::COLUMNS + q] = acc[mt][j][i];
                    }
                }
            }
        }
        n_done++;
        if (n_done % S::BATCH != 0 && tile + static_cast<int>(gridDim.x) < n_tiles) {
            continue;
        }
        __syncthreads();
        const int some = (n_done - 1) % S::BATCH + 1; // tiles, the last one is this one
        for (int i = static_cast<int>(threadIdx.x); i < some * S::ROWS * p.n; i += static_cast<int>(blockDim.x)) {
            const int r = i % S::ROWS, c = i / S::ROWS % p.n, b = i / S::ROWS / p.n;
            const int row = (tile - (some - 1 - b) * static_cast<int>(gridDim.x)) * S::ROWS + r;
            const float * from = partial + (n_done - some + b) % (2 * S::BATCH) * n_warps * S::PARTIAL + r * S::COLUMNS + X_PARTS * c;
            float sum = 0;
            for (int w = 0; w < n_warps; w++, from += S::PARTIAL) {
                sum += from[0] + (from[1] + from[2]);
            }
            if (row < p.m) {
                reinterpret_cast<float *>(p.y + c * p.y_nb1)[row] = sum;
            }
        }
    }
#endif
}

} // namespace macko
