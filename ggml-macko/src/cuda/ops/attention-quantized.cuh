// Reads rows of a quantized cache for attention_decode_kernel. The rows are copied to shared memory unchanged. A lane
// reads pieces of a block of 32 and converts them exactly to integers in F16. The scales are applied separately: those
// of K multiply the sums of a block, those of V the weights of the positions.
//
// Each type defines its pieces. load_8 (piece t of 4) and load_4 (piece g of 8) return values + OFFSET as bytes, the
// first value in the lowest byte. The values of a piece need not be adjacent: element e of a block is value
// key_place(e) % 8 of piece key_place(e) / 8, and value p % 4 of the smaller piece p / 4 is element value_element(p).
#pragma once

#include "cuda/lib/mma.cuh"

namespace macko::cuda {

// Loads 4 bytes at p + at; p is a multiple of 4; `at` is a constant multiple of 2.
static __device__ __forceinline__ uint32_t load_bytes(const char * p, int at) {
    const uint32_t * w = reinterpret_cast<const uint32_t *>(p) + at / 4;
    return at % 4 == 0 ? w[0] : __byte_perm(w[0], w[1], 0x5432);
}

template <tensor_type TYPE> struct packed_block;

template <> struct packed_block<TYPE_Q8_0> {
    using block                                    = block_q8_0;
    static constexpr int                    OFFSET = 128;
    static __device__ __forceinline__ int   key_place(int e) { return e; }
    static __device__ __forceinline__ int   value_element(int p) { return p; }
    static __device__ __forceinline__ uint2 load_8(const char * row, int at, int t) {
        return make_uint2(load_bytes(row + 8 * t, at + 2) ^ 0x80808080u, load_bytes(row + 8 * t, at + 6) ^ 0x80808080u);
    }
    static __device__ __forceinline__ uint32_t load_4(const char * row, int at, int g) {
        return load_bytes(row + 4 * g, at + 2) ^ 0x80808080u;
    }
};

// byte j has element j in its low nibble and element 16 + j in the high one
struct nibble_block {
    static __device__ __forceinline__ int   key_place(int e) { return e % 16 / 4 * 8 + e / 16 * 4 + e % 4; }
    static __device__ __forceinline__ int   value_element(int p) { return p % 4 / 2 * 16 + p / 4 * 2 + p % 2; }
    static __device__ __forceinline__ uint2 load_8(const char * row, int at, int t) {
        const uint32_t w = load_bytes(row + 4 * t, at);
        return make_uint2(w & 0x0f0f0f0fu, w >> 4 & 0x0f0f0f0fu);
    }
    static __device__ __forceinline__ uint32_t two_bytes(const char * row, int at, int g) {
        return *reinterpret_cast<const uint16_t *>(row + at + 2 * g);
    }
    static __device__ __forceinline__ uint32_t load_4(const char * row, int at, int g) {
        const uint32_t w = two_bytes(row, at, g);
        return (w & 0x0f0fu) | (w & 0xf0f0u) << 12;
    }
};

template <> struct packed_block<TYPE_Q4_0> : nibble_block {
    using block                                    = block_q4_0;
    static constexpr int                    OFFSET = 8;
    static __device__ __forceinline__ uint2 load_8(const char * row, int at, int t) {
        return nibble_block::load_8(row, at + 2, t);
    }
    static __device__ __forceinline__ uint32_t load_4(const char * row, int at, int g) {
        return nibble_block::load_4(row, at + 2, g);
    }
};

template <> struct packed_block<TYPE_Q5_0> : nibble_block {
    using block                 = block_q5_0;
    static constexpr int OFFSET = 16;
    // moves bits 0 ... 3 to bit 4 of the bytes
    static __device__ __forceinline__ uint32_t spread(uint32_t bits) {
        return ((bits & 15) * 0x00204081u & 0x01010101u) << 4;
    }
    static __device__ __forceinline__ uint2 load_8(const char * row, int at, int t) {
        const uint32_t high = load_bytes(row, at + 2) >> 4 * t;
        const uint2    low  = nibble_block::load_8(row, at + 6, t);
        return make_uint2(low.x | spread(high), low.y | spread(high >> 16));
    }
    static __device__ __forceinline__ uint32_t load_4(const char * row, int at, int g) {
        const uint32_t high = load_bytes(row, at + 2) >> 2 * g;
        return nibble_block::load_4(row, at + 6, g) | spread((high & 3) | (high >> 14 & 12));
    }
};

template <> struct packed_block<TYPE_IQ4_NL> : nibble_block {
    using block                 = block_q4_0;
    static constexpr int OFFSET = 128;
    // looks up values + 128 for the four nibbles of two bytes
    static __device__ __forceinline__ uint32_t look_up(uint32_t nibbles) {
        const uint32_t which = nibbles & 0x7777u;
        return __byte_perm(__byte_perm(0x3f2d1801u, 0x766a5d4fu, which), __byte_perm(0xa6998d81u, 0xf1d9c5b5u, which),
                           0x3210u | (nibbles & 0x8888u) >> 1);
    }
    static __device__ __forceinline__ uint2 load_8(const char * row, int at, int t) {
        const uint32_t w = load_bytes(row + 4 * t, at + 2), a = look_up(w), b = look_up(w >> 16);
        return make_uint2(__byte_perm(a, b, 0x6420), __byte_perm(a, b, 0x7531));
    }
    static __device__ __forceinline__ uint32_t load_4(const char * row, int at, int g) {
        return __byte_perm(look_up(two_bytes(row, at + 2, g)), 0, 0x3120);
    }
};

// Rows of 16 positions of K and V in shared memory, for each warp and stage.
template <tensor_type TYPE, int HEAD_DIM> struct packed_rows : packed_block<TYPE> {
    using typename packed_block<TYPE>::block;
    using packed_block<TYPE>::OFFSET;
    static constexpr bool PACKED = true;
    static constexpr int  BLOCKS = HEAD_DIM / 32, NBYTES = BLOCKS * static_cast<int>(sizeof(block));
    static constexpr int  ALIGNMENT = NBYTES % 8 == 0 ? 8 : 4; // of the rows in the cache
    // Copies have 16 bytes and begin at multiples of 16. With an odd pitch (in pieces), the rows of V that a warp reads
    // together lie in different banks.
    static constexpr int PIECES = (16 - ALIGNMENT + NBYTES + 15) / 16, PITCH = (PIECES | 1) * 16;
    static constexpr int STAGE_NBYTES = 2 * 16 * PITCH; // per warp
    // The rings of 16 warps have at most 144 KB, of which at least 57 KB are in flight.
    static constexpr int STAGES = STAGE_NBYTES * 4 <= 9216 ? 4 : 9216 / STAGE_NBYTES;

    static __device__ __forceinline__ int offset_in_piece(const char * row) {
        return static_cast<int>(reinterpret_cast<uintptr_t>(row) & 15);
    }
    // Lane t of 4 copies its part of a row to `to`, where the row has the same offset within 16 bytes
    static __device__ __forceinline__ void copy(char * to, const char * row, int t) {
        const int offset = offset_in_piece(row), n = offset + NBYTES;
#pragma unroll
        for (int i = 0; i < (PIECES + 3) / 4; i++) {
            const int at = 16 * (t + 4 * i);
            if (at < n) {
                copy_16_or_less(to + at, row - offset + at, min(16, n - at));
            }
        }
    }
    static __device__ __forceinline__ float scale(const char * row, int b) {
        return __half2float(*reinterpret_cast<const __half *>(row + b * static_cast<int>(sizeof(block))));
    }
    static __device__ __forceinline__ void load_scales(float * to, const char * row) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            to[b] = scale(row, b);
        }
    }
    // converts the lower two or the upper two of four bytes
    static __device__ __forceinline__ uint32_t to_f16(uint32_t bytes, int upper) {
        const uint32_t biased = __byte_perm(bytes, 0x64646464u, upper ? 0x4342 : 0x4140); // 1024 + byte
        const __half2  bias   = __half2half2(__ushort_as_half(0x6400 | OFFSET));
        const __half2  h      = __hsub2(*reinterpret_cast<const __half2 *>(&biased), bias);
        return *reinterpret_cast<const uint32_t *>(&h);
    }

    // Scores of rows g and g + 8, for the head whose high and low parts of q are in columns 2t and 2t + 1. q: column g,
    // from element 8t on.
    static __device__ __forceinline__ void multiply_keys(float score[2], const char * const rows[2], const __half * q,
                                                         int t) {
        score[0] = score[1] = 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const int   at = b * static_cast<int>(sizeof(block));
            const uint4 q8 = *reinterpret_cast<const uint4 *>(q + 32 * b);
            const uint2 x = packed_block<TYPE>::load_8(rows[0], at, t), y = packed_block<TYPE>::load_8(rows[1], at, t);
            const uint32_t a0[4] = { to_f16(x.x, 0), to_f16(y.x, 0), to_f16(x.x, 1), to_f16(y.x, 1) },
                           a1[4] = { to_f16(x.y, 0), to_f16(y.y, 0), to_f16(x.y, 1), to_f16(y.y, 1) };
            float dot0[4] = {}, dot1[4] = {};
            multiply_add<__half>(dot0, a0, q8.x, q8.y);
            multiply_add<__half>(dot1, a1, q8.z, q8.w);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                score[i] += scale(rows[i], b) * ((dot0[2 * i] + dot1[2 * i]) + (dot0[2 * i + 1] + dot1[2 * i + 1]));
            }
        }
    }

    // out[2b + i]: sums for columns 2t and 2t + 1, at place 32b + 4g + 2i and at the next place. rows: of positions 2t,
    // 2t + 1, 2t + 8, 2t + 9; weights and scales: of positions g and g + 8. A scale times a weight is below 65520.
    static __device__ __forceinline__ void multiply_values(float out[][4], const char * const rows[4],
                                                           const float weight[2], const float scales[2][BLOCKS],
                                                           int g) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            uint32_t w[2], x[4];
#pragma unroll
            for (int i = 0; i < 2; i++) { // a weight of 0 times a hidden row may be NaN
                w[i] = transposed(split_f16(weight[i] == 0 ? 0 : weight[i] * scales[i][b]));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = packed_block<TYPE>::load_4(rows[i], b * static_cast<int>(sizeof(block)), g);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) { // two of the four values, of adjacent positions
                const int      which = i == 0 ? 0x5140 : 0x7362;
                const uint32_t low = __byte_perm(x[0], x[1], which), high = __byte_perm(x[2], x[3], which);
                const uint32_t a[4] = { to_f16(low, 0), to_f16(low, 1), to_f16(high, 0), to_f16(high, 1) };
                multiply_add<__half>(out[2 * b + i], a, w[0], w[1]);
            }
        }
    }

    // place_of(e): place of element e of q, where lane t finds the 8 adjacent factors of its keys. element_at(place):
    // element of the result at a place; lane g has 4 adjacent places.
    static __device__ __forceinline__ int place_of(int e) {
        return e / 32 * 32 + packed_block<TYPE>::key_place(e % 32);
    }
    static __device__ __forceinline__ int element_at(int place) {
        return place / 32 * 32 + packed_block<TYPE>::value_element(place % 32);
    }
};

// Rows of F16 are loaded to registers.
struct f16_rows {
    static constexpr bool                 PACKED = false;
    static constexpr int                  STAGES = 1;
    static __device__ __forceinline__ int place_of(int e) { return e; }
    static __device__ __forceinline__ int element_at(int place) { return place; }
};

} // namespace macko::cuda
