// Products of up to 8 columns with quantized weights, on tensor cores (cc 8.0) and without rounding x.
//
// The quants of a block are integers that BF16 represents exactly, and a float32 value of x is the sum of three BF16
// values with 8 bits each. So an MMA of 16 rows of w, with three columns for each column of x, computes exact products
// and float32 sums; scales are applied to the sums over the 16 or 32 weights that share one. mul_mat_vec_kernel needs
// an operation per weight and column, which is slower than memory at less than a byte per weight.
//
// A block owns ROWS rows, and its warps process chunks of CHUNK weights of all rows in turn. Blocks of most types are
// aligned to only 2 bytes, so a warp copies the 16-byte words that contain its chunks to shared memory and reads words
// at even addresses there; if w is a constant, the first copy is made before the previous kernel ends. In the end the
// sums of the warps are added in order. Each warp splits its own x into parts, so the warps synchronize only once.
// Sharing x among warps, or several tiles of rows per block, was not faster.
#pragma once

#include "cuda/lib/mma.cuh"

namespace macko::cuda {

struct quantized_args {
    const char * w;
    const char * x;
    char *       y;
    int64_t      x_nb1, y_nb1; // bytes
    uint32_t     w_nb1;
    int          m, n, k;
    int          row_nbytes;
    bool         constant; // w may be read before the preceding kernel has ended
};

constexpr int QUANTIZED_THREADS = 512; // maximum threads of a block
constexpr int ROWS              = 16;
constexpr int CHUNK             = 256; // weights of a row that a warp processes at a time: a super-block, or 8 blocks
constexpr int STAGES            = 2;   // chunks in shared memory: one in flight, one in use
constexpr int X_PARTS           = 3;
// bytes from column to column: four columns are read at once, from different banks
constexpr int X_STRIDE = CHUNK * 2 + 32;

// ---- reading quants: a chunk of a row at any even address of shared memory, for one of the 4 lanes of the row ----

// ALIGNED: chunks begin at multiples of 4
template <bool ALIGNED> struct chunk_words {
    const char * at;

    __device__ __forceinline__ uint32_t u16(int i) const { return *reinterpret_cast<const uint16_t *>(at + i); }
    __device__ __forceinline__ float    half(int i) const {
        return __half2float(*reinterpret_cast<const __half *>(at + i));
    }
    // 4 bytes at i, which is even, and constant except for multiples of 4
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

// Bytes as floats: 0x4b000000 is 2^23, and its last bit has the value 1.
static __device__ __forceinline__ float byte_of(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + i)) - 8388608.0f;
}
static __device__ __forceinline__ float signed_byte_of(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word ^ 0x80808080, 0x4b000000, 0x7440 + i)) - 8388736.0f;
}

static __device__ __forceinline__ uint32_t subtract_bf16(uint32_t a, uint32_t b) {
    const __nv_bfloat162 d =
        __hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&d);
}

// Four bytes in 0 ... 127, minus OFFSET, as BF16: bytes 0 and 2, then 1 and 3. 0x4300 is 128; its last bit has the
// value 1.
template <int OFFSET> static __device__ __forceinline__ uint2 to_bf16(uint32_t q) {
    constexpr uint32_t ZERO = 0x43004300 + OFFSET * 0x00010001;
    return make_uint2(subtract_bf16(__byte_perm(q, 0x43434343, 0x4240), ZERO),
                      subtract_bf16(__byte_perm(q, 0x43434343, 0x4341), ZERO));
}

// For each type: GROUP weights share a scale. quad(step): the four quants from 16 * step + 4 * t on, as BF16. scales(t,
// s, m): writes the scales (and minima, if any) of CHUNK / GROUP / 4 groups, starting at t times that number; a weight
// is s * quant - m. t: lane of the four that share the row; its own bytes are at `mine`.
template <tensor_type TYPE> struct chunk_reader;

// Blocks of 32 weights after their scale.
template <int NBYTES> struct reader_of_blocks {
    static constexpr int            GROUP   = 32;
    static constexpr bool           ALIGNED = false, HAS_MINIMUM = false;
    chunk_words<ALIGNED>            row, mine;
    __device__ __forceinline__ void scales(int t, float * s, float *) const {
        s[0] = row.half(t * 2 * NBYTES), s[1] = row.half(t * 2 * NBYTES + NBYTES);
    }
};

template <> struct chunk_reader<TYPE_Q4_0> : reader_of_blocks<18> {
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(step / 2 * 18 + 2);
        return to_bf16<8>((step % 2 ? q >> 4 : q) & 0x0f0f0f0f);
    }
};

// The four bits of a word from bit i on, as bit 4 of four bytes.
static __device__ __forceinline__ uint32_t spread_bits(uint32_t word, int i) {
    return ((word >> i & 15) * 0x02040810) & 0x10101010;
}

template <> struct chunk_reader<TYPE_Q5_0> : reader_of_blocks<22> {
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(step / 2 * 22 + 6), high = row.u32(step / 2 * 22 + 2);
        const int      t = static_cast<int>(threadIdx.x) % 4;
        return to_bf16<16>(((step % 2 ? q >> 4 : q) & 0x0f0f0f0f) | spread_bits(high, step % 2 * 16 + 4 * t));
    }
};

template <> struct chunk_reader<TYPE_Q8_0> : reader_of_blocks<34> {
    // a negative byte is its lower 7 bits minus 128: 0x4380 is 256
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(step / 2 * 34 + 2 + step % 2 * 16), low = q & 0x7f7f7f7f, sign = q & 0x80808080;
        return make_uint2(subtract_bf16(__byte_perm(low, 0x43434343, 0x4240), __byte_perm(sign, 0x43434343, 0x4240)),
                          subtract_bf16(__byte_perm(low, 0x43434343, 0x4341), __byte_perm(sign, 0x43434343, 0x4341)));
    }
};

// 6-bit scales and minima of Q4_K and Q5_K, two groups of a lane. The first four are stored whole, the upper bits of
// the others above them.
struct reader_of_scales_k4 {
    static constexpr int            GROUP   = 32;
    static constexpr bool           ALIGNED = true, HAS_MINIMUM = true;
    chunk_words<ALIGNED>            row, mine;
    __device__ __forceinline__ void scales(int t, float * s, float * m) const {
        const uint32_t low_s = row.u32(4), low_m = row.u32(8), high = row.u32(12);
        const int      shift = t % 2 * 16;
        const uint32_t scale = (t < 2 ? low_s & 0x3f3f3f3f : (high & 0x0f0f0f0f) | (low_s >> 2 & 0x30303030)) >> shift;
        const uint32_t minimum =
            (t < 2 ? low_m & 0x3f3f3f3f : (high >> 4 & 0x0f0f0f0f) | (low_m >> 2 & 0x30303030)) >> shift;
        const float d = row.half(0), dmin = row.half(2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[i] = d * byte_of(scale, i);
            m[i] = dmin * byte_of(minimum, i);
        }
    }
};

template <> struct chunk_reader<TYPE_Q4_K> : reader_of_scales_k4 {
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(16 + step / 4 * 32 + step % 2 * 16);
        return to_bf16<0>((step % 4 / 2 ? q >> 4 : q) & 0x0f0f0f0f);
    }
};

template <> struct chunk_reader<TYPE_Q5_K> : reader_of_scales_k4 {
    __device__ __forceinline__ uint2 quad(int step) const {
        const uint32_t q = mine.u32(48 + step / 4 * 32 + step % 2 * 16), high = mine.u32(16 + step % 2 * 16);
        const int      bit = step / 2;
        return to_bf16<0>(((step % 4 / 2 ? q >> 4 : q) & 0x0f0f0f0f) |
                          ((bit < 4 ? high << (4 - bit) : high >> (bit - 4)) & 0x10101010));
    }
};

template <> struct chunk_reader<TYPE_Q6_K> {
    static constexpr int             GROUP   = 16;
    static constexpr bool            ALIGNED = false, HAS_MINIMUM = false;
    chunk_words<ALIGNED>             row, mine;
    __device__ __forceinline__ uint2 quad(int step) const {
        const int      half = step / 8, part = step % 8 / 2, side = step % 2 * 16; // part: 32 weights of 128
        const uint32_t low = mine.u32(half * 64 + part % 2 * 32 + side), high = mine.u32(128 + half * 32 + side);
        return to_bf16<32>(((part / 2 ? low >> 4 : low) & 0x0f0f0f0f) |
                           ((part < 2 ? high << (4 - 2 * part) : high >> (2 * part - 4)) & 0x30303030));
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

template <tensor_type TYPE, int COLS> struct quantized_shape {
    using reader = chunk_reader<TYPE>;
    static constexpr int NBYTES =
        CHUNK / value_type<TYPE>::BLOCK * static_cast<int>(sizeof(typename value_type<TYPE>::block));
    static constexpr int UNITS = (NBYTES + 14 + 15) / 16; // maximum number of 16-byte words that contain a chunk
    // bytes from row to row: an odd multiple of 16, so that 8 rows are in different banks
    static constexpr int STRIDE = (UNITS | 1) * 16;
    // floats from row to row, so that 8 rows are in different banks
    static constexpr int SCALES      = CHUNK / reader::GROUP * (reader::HAS_MINIMUM ? 2 : 1) + 4;
    static constexpr int COLUMNS     = X_PARTS * COLS;
    static constexpr int N_TILES     = (COLUMNS + 7) / 8; // tiles of 8 columns of the MMA
    static constexpr int X_NBYTES    = COLUMNS * X_STRIDE;
    static constexpr int SUM_NBYTES  = reader::HAS_MINIMUM ? CHUNK / 32 * N_TILES * 8 * 4 : 0;
    static constexpr int WARP_NBYTES = ROWS * (STAGES * STRIDE + SCALES * 4) + X_NBYTES + SUM_NBYTES;
    static_assert(X_NBYTES >= ROWS * COLUMNS * 4, "a warp's sums take the place of x");
};

// Splits 8 values of x into three parts of 8 bits: the upper 16 bits of a float are a BF16. Groups of four values are
// in the order of to_bf16().
static __device__ __forceinline__ void store_parts(char * to, float v[8]) {
#pragma unroll
    for (int part = 0; part < X_PARTS; part++) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            packed[i] =
                __byte_perm(__float_as_uint(v[i / 2 * 4 + i % 2]), __float_as_uint(v[i / 2 * 4 + i % 2 + 2]), 0x7632);
        }
        *reinterpret_cast<uint4 *>(to + part * X_STRIDE) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] -= __uint_as_float(__float_as_uint(v[i]) & 0xffff0000u);
        }
    }
}

template <tensor_type TYPE, // type of w, with a chunk_reader
          int         COLS>         // columns of x, at most
__global__ void __launch_bounds__(QUANTIZED_THREADS, 1)
    quantized_kernel(const __grid_constant__ quantized_args p) { // operands, strides and shapes
    // A block owns 16 rows of w; warp i processes chunks i, i + n_warps, ... of 256 weights of all rows:
    //
    //   shared memory of a warp   | STAGES x 16 rows of a chunk | scales | x in 3 parts per column | sums of x |
    //
    // Phases: copy the first chunk; for each chunk split x, copy the next chunk, multiply, apply the scales; reduce
    // over the warps and write y.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 // the host never launches it on older GPUs
    using S              = quantized_shape<TYPE, COLS>;
    using R              = chunk_reader<TYPE>;
    constexpr int     NT = S::N_TILES;
    extern __shared__ __align__(16) char shared[];
    const int lane = static_cast<int>(threadIdx.x % WARP), warp = static_cast<int>(threadIdx.x / WARP),
              n_warps = static_cast<int>(blockDim.x / WARP);
    const int  g = lane / 4, t = lane % 4; // lane of an MMA: rows g and g + 8
    char *     stages   = shared + warp * S::WARP_NBYTES;
    float *    scales   = reinterpret_cast<float *>(stages + STAGES * ROWS * S::STRIDE);
    char *     x_parts  = reinterpret_cast<char *>(scales + ROWS * S::SCALES);
    float *    sums     = reinterpret_cast<float *>(x_parts + S::X_NBYTES);
    const int  n_chunks = (p.k + CHUNK - 1) / CHUNK, row0 = static_cast<int>(blockIdx.x) * ROWS;
    const auto row_at = [&](int r) {
        return reinterpret_cast<uintptr_t>(p.w) +
               static_cast<uint64_t>(static_cast<uint32_t>(min(row0 + r, p.m - 1))) * p.w_nb1;
    };

    // eight lanes copy a row, so that their 128 bytes are in different banks
    const auto copy_chunk = [&](int chunk, int stage) {
        if (chunk < n_chunks) {
            const int copy_at = lane % 8 * 16;
            char *    to      = stages + (stage * ROWS + lane / 8) * S::STRIDE + copy_at;
            uint64_t  from[ROWS / 4];
#pragma unroll
            for (int r = 0; r < ROWS / 4; r++) {
                from[r] = row_at(lane / 8 + 4 * r) + static_cast<uint32_t>(chunk * S::NBYTES + copy_at);
            }
            const auto each_unit = [&](auto && copy) {
#pragma unroll
                for (int at = 0; at < S::UNITS * 16; at += 128) {
                    if (at + 128 <= S::UNITS * 16 || copy_at < S::UNITS * 16 - at) {
#pragma unroll
                        for (int r = 0; r < ROWS / 4; r++) {
                            copy(r, to + r * 4 * S::STRIDE + at, at);
                        }
                    }
                }
            };
            if (chunk < n_chunks - 1) {
#pragma unroll
                for (int r = 0; r < ROWS / 4; r++) {
                    from[r] &= ~uint64_t(15);
                    // use one pair of registers for all copies: they are read late, and a copy of the registers would
                    // wait for that
                    asm volatile("" : "+l"(from[r]));
                }
                each_unit(
                    [&](int r, char * unit, int at) { copy_16(unit, reinterpret_cast<const char *>(from[r]) + at); });
            } else { // the memory after the end of the row may not exist
                const int left = p.row_nbytes - chunk * S::NBYTES - copy_at;
                each_unit([&](int r, char * unit, int at) {
                    const int before = static_cast<int>(from[r] & 15);
                    copy_16_or_less(unit, reinterpret_cast<const char *>(from[r] - before) + at,
                                    min(max(left + before - at, 0), 16));
                });
            }
        }
        commit_copies();
    };
    if (!p.constant) {
        wait_for_previous();
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        copy_chunk(warp + i * n_warps, i);
    }
    if constexpr (R::HAS_MINIMUM) {
        for (int i = lane; i < S::SUM_NBYTES / 4; i += WARP) {
            sums[i] = 0;
        }
    }
    if (p.constant) {
        wait_for_previous();
    }

    uint32_t low[2]; // low bits of the rows' addresses
#pragma unroll
    for (int r = 0; r < 2; r++) {
        low[r] = static_cast<uint32_t>(row_at(g + 8 * r));
    }
    const char * x_mine[NT]; // missing columns may have any content, because columns do not mix
#pragma unroll
    for (int j = 0; j < NT; j++) {
        x_mine[j] = x_parts + min(j * 8 + g, X_PARTS * p.n - 1) * X_STRIDE + t * 8;
    }
    float acc[NT][4] = {};
    int   stage      = 0;
    // for each chunk: load and split x, copy the next chunk, multiply, apply the scales
    for (int chunk = warp; chunk < n_chunks; chunk += n_warps) {
        float     x[COLS][8] = {};
        const int k          = chunk * CHUNK + lane * 8;
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            if (k < p.k && c < p.n) {
                value_type<TYPE_F32>::load8(p.x + c * p.x_nb1 + static_cast<int64_t>(k) * 4, 0, x[c]);
            }
        }
        __syncwarp(); // all lanes have read x_parts and the previous stage
        copy_chunk(chunk + (STAGES - 1) * n_warps, (stage + STAGES - 1) % STAGES);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            if (c < p.n) {
                if constexpr (R::HAS_MINIMUM) {
                    const float sum = warp_sum<4>(((x[c][0] + x[c][1]) + (x[c][2] + x[c][3])) +
                                                  ((x[c][4] + x[c][5]) + (x[c][6] + x[c][7])));
                    if (t == 0) {
                        sums[g * NT * 8 + X_PARTS * c] = sum;
                    }
                }
                store_parts(x_parts + X_PARTS * c * X_STRIDE + lane * 16, x[c]);
            }
        }
        wait_for_committed_copies<STAGES - 1>();
        __syncwarp();
        R     rows[2];
        float row_scales[2][CHUNK / R::GROUP / 4], row_minima[2][CHUNK / R::GROUP / 4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            rows[r].row.at = stages + (stage * ROWS + g + 8 * r) * S::STRIDE +
                             (low[r] + static_cast<uint32_t>(chunk * S::NBYTES)) % 16;
            rows[r].mine.at = rows[r].row.at + 4 * t;
            rows[r].scales(t, row_scales[r], row_minima[r]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) { // share a lane's scales with all four lanes
            float * to = scales + (g + 8 * r) * S::SCALES;
            if constexpr (R::GROUP == 16) {
                reinterpret_cast<float4 *>(to)[t] =
                    make_float4(row_scales[r][0], row_scales[r][1], row_scales[r][2], row_scales[r][3]);
            } else {
                reinterpret_cast<float2 *>(to)[t] = make_float2(row_scales[r][0], row_scales[r][1]);
            }
            if constexpr (R::HAS_MINIMUM) {
                reinterpret_cast<float2 *>(to + 8)[t] = make_float2(row_minima[r][0], row_minima[r][1]);
            }
        }
        __syncwarp();
        float4 four_scales[2], four_minima[2];
#pragma unroll
        for (int group = 0; group < CHUNK / R::GROUP; group++) {
            if (group % 4 == 0) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float4 * from = reinterpret_cast<const float4 *>(scales + (g + 8 * r) * S::SCALES);
                    four_scales[r]      = from[group / 4];
                    if constexpr (R::HAS_MINIMUM) {
                        four_minima[r] = from[2 + group / 4];
                    }
                }
            }
            float c[NT][4] = {};
#pragma unroll
            for (int i = 0; i < R::GROUP / 16; i++) {
                const int      step = group * (R::GROUP / 16) + i;
                const uint2    q0 = rows[0].quad(step), q1 = rows[1].quad(step);
                const uint32_t a[4] = { q0.x, q1.x, q0.y, q1.y };
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    const uint2 b = *reinterpret_cast<const uint2 *>(x_mine[j] + step * 32);
                    multiply_add<__nv_bfloat16>(c[j], a, b.x, b.y);
                }
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    acc[j][i] += (&four_scales[i / 2].x)[group % 4] * c[j][i];
                }
                if constexpr (R::HAS_MINIMUM) {
                    const float2 sum = *reinterpret_cast<const float2 *>(sums + (group * NT + j) * 8 + 2 * t);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        acc[j][i] -= (&four_minima[i / 2].x)[group % 4] * (i % 2 ? sum.y : sum.x);
                    }
                }
            }
        }
        stage = (stage + 1) % STAGES;
    }

    __syncwarp(); // all lanes have read x_parts
    float * mine = reinterpret_cast<float *>(x_parts);
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int q = j * 8 + 2 * t + i % 2;
            if (q < S::COLUMNS) {
                mine[(i / 2 * 8 + g) * S::COLUMNS + q] = acc[j][i];
            }
        }
    }
    // reduce over the warps and write y
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < ROWS * p.n; i += static_cast<int>(blockDim.x)) {
        const int    r = i % ROWS, c = i / ROWS;
        const char * from = shared + (x_parts - stages) + (r * S::COLUMNS + X_PARTS * c) * 4;
        float        sum  = 0;
        for (int w = 0; w < n_warps; w++, from += S::WARP_NBYTES) {
            const float * parts = reinterpret_cast<const float *>(from);
            sum += parts[0] + (parts[1] + parts[2]);
        }
        if (row0 + r < p.m) {
            reinterpret_cast<float *>(p.y + c * p.y_nb1)[row0 + r] = sum;
        }
    }
#endif
}

} // namespace macko::cuda
