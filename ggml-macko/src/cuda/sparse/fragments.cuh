// Tiles of the layout FRAGMENTS (gpu-layout/fragments.h) on the device: their parts, and how a warp decodes them.
// Internal to cuda/sparse.
#pragma once

#include "cuda/lib/common.cuh"
#include "cuda/lib/copies.cuh"
#include "gpu-layout/fragments-division.h"

namespace macko::cuda {

// The logarithm of the steps of a window.
constexpr int fragments_window_bits(int32_t window) {
    int bits = 0;
    while (FRAGMENT_STEP << bits < window) {
        bits++;
    }
    return bits;
}
// Words that all lanes of a tile have. tail_words: of all tails
constexpr int fragments_common_words(int tile_nbytes, int words_at, int tail_words) {
    return static_cast<int>((static_cast<uint32_t>(tile_nbytes - words_at) / 4 - static_cast<uint32_t>(tail_words)) /
                            32); // up to 3 words of padding
}

// (-1)^s * (1 + m / 16) * 2^(e - 7) of a scale code with its sign in all upper bits
__device__ __forceinline__ float fragment_scale(int32_t code) {
    return __uint_as_float((static_cast<uint32_t>(code) << 19 & 0x83f80000u) | 120u << 23);
}

// Nibble i: `none` if bit i of the byte is not set, else the number of set bits below it. *n: the number of set bits
__device__ __forceinline__ uint32_t spread_selector(uint32_t byte, uint32_t none, uint32_t * n) {
    uint32_t bits        = byte; // bit i becomes nibble i
    bits                 = (bits | bits << 12) & 0x000f000fu;
    bits                 = (bits | bits << 6) & 0x03030303u;
    bits                 = (bits | bits << 3) & 0x11111111u;
    const uint32_t up_to = bits * 0x11111111u, mask = bits * 15; // nibble i of up_to: set bits 0 ... i
    *n = up_to >> 28;
    return ((up_to - bits) & mask) | (none * 0x11111111u & ~mask);
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ uint2 load_words(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
__device__ __forceinline__ int32_t load_byte(uint32_t address) { // with its sign
    int32_t v;
    asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t v; // __byte_perm() would mask bit 3 of the selectors
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}
// Shifts and bytes by way of the multipliers: PRMT, shifts and logic share the pipe that decoding is bound by.
__device__ __forceinline__ uint32_t upper_half(uint32_t a) { return __dp2a_lo(a, 0x0100u, 0u); }

// An entry of the table for a byte of a bitmap: where each column finds its code; bits of the codes. With codes of 8
// bits, bit 31 tells that all columns have one. copies: 4, 8 or 16
template <int BITS> __device__ __forceinline__ void fill_table(uint8_t * table, int copies) {
    const int half = threadIdx.x % 2;
#pragma unroll 1
    for (uint32_t byte = threadIdx.x / 2; byte < 256; byte += blockDim.x / 2) {
        uint32_t       n        = 0;
        const uint32_t selector = spread_selector(byte, BITS == 4 ? 8 : 7, &n);
        const uint32_t bits     = n * BITS | (BITS == 8 && n == 8 ? 0x80000000u : 0u);
        for (int i = 0; i < copies / 4; i++) { // in an order in which neighbors write to other banks
            const uint32_t pair = (2 * (i + byte) + half) & (copies / 2 - 1);
            *reinterpret_cast<uint4 *>(table + (byte * copies + pair * 2) * 8) =
                make_uint4(selector, bits, selector, bits);
        }
    }
}

// The A operands of a step: one of positive and one of negative levels, or one of all levels. For up to 8 columns of x,
// twice as many products take fewer instructions than to subtract one operand from the other.
template <int BITS, int NX> struct step_operands {
    static constexpr int N = BITS == 4 && NX <= 8 ? 2 : 1;
    uint32_t             a[N][4];
};

// Each byte of a minus the same byte of b; all are 0 ... 127.
__device__ __forceinline__ uint32_t subtract_bytes(uint32_t a, uint32_t b) {
    return ((a | 0x80808080u) - b) ^ 0x80808080u;
}

// Decodes a step. of_g, of_g8: table entries of rows g and g + 8; words: address of the lane's word 0; *at: its
// position, in bits (bit 31 is ignored)
template <int BITS, int NX>
__device__ __forceinline__ step_operands<BITS, NX> decode_step(const uint4 & magnitudes, uint2 of_g, uint2 of_g8,
                                                               uint32_t words, uint32_t * at) {
    step_operands<BITS, NX> s;
    const auto              word_address = [&](uint32_t bit) {
        uint32_t whole = bit & ~31u;
        asm("" : "+r"(whole)); // or the compiler takes three instructions
        return whole * 4 + words;
    };
    if constexpr (BITS == 4) {
        const uint32_t from = word_address(*at), w0 = load_word(from), w1 = load_word(from + 128),
                       w2 = load_word(from + 256), q0 = __funnelshift_r(w0, w1, *at),
                       q1 = __funnelshift_rc(q0, __funnelshift_r(w1, w2, *at), of_g.y); // by up to 32
        *at += of_g.y + of_g8.y;
        const auto spread = [&](uint32_t q, uint32_t selector, int row) {
            const uint32_t flipped = q ^ 0x88888888u, upper = upper_half(selector);
            const uint32_t p0          = permuted(magnitudes.x, magnitudes.y, q),
                           p1          = permuted(magnitudes.x, magnitudes.y, upper_half(q)),
                           n0          = permuted(magnitudes.z, magnitudes.w, flipped),
                           n1          = permuted(magnitudes.z, magnitudes.w, upper_half(flipped));
            const uint32_t positive[2] = { permuted(p0, p1, selector), permuted(p0, p1, upper) },
                           negative[2] = { permuted(n0, n1, selector), permuted(n0, n1, upper) };
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if constexpr (s.N == 2) {
                    s.a[0][row + 2 * i] = positive[i];
                    s.a[1][row + 2 * i] = negative[i];
                } else {
                    s.a[0][row + 2 * i] = subtract_bytes(positive[i], negative[i]);
                }
            }
        };
        spread(q0, of_g.x, 0);
        spread(q1, of_g8.x, 1);
    } else {
        const auto spread = [&](uint2 entry, int row) {
            const uint32_t from = word_address(*at), w0 = load_word(from), w1 = load_word(from + 128),
                           w2 = load_word(from + 256), lower = __funnelshift_r(w0, w1, *at);
            // byte 7 is 0 for the columns without a code, or the code of the last one of 8
            const uint32_t upper =
                __funnelshift_r(w1, w2, *at) & (0x00ffffffu | static_cast<uint32_t>(static_cast<int>(entry.y) >> 7));
            *at += entry.y;
            s.a[0][row]     = permuted(lower, upper, entry.x);
            s.a[0][row + 2] = permuted(lower, upper, upper_half(entry.x));
        };
        spread(of_g, 0);
        spread(of_g8, 1);
    }
    return s;
}

// fragments_words_at() without a division. window_bits: the logarithm of the steps of a window
__device__ __forceinline__ int words_at_of(int chunks, int window_bits) {
    const int windows = (chunks * 8 + (1 << window_bits) - 1) >> window_bits;
    return static_cast<int>(FRAGMENT_TAIL_ENDS) + windows * 16 + chunks * 512;
}

// Moves the tails to their lanes' columns of words. from: the tile in global memory
__device__ __forceinline__ void place_tails(uint8_t * tile, const uint8_t * from, int nbytes, int words_at) {
    constexpr int    MOST  = 8; // words of a tail, except in rows that differ much
    const int        lane  = threadIdx.x % 32;
    const uint16_t * ends  = reinterpret_cast<const uint16_t *>(tile);
    const int        begin = lane ? ends[lane - 1] : 0, n = ends[lane] - begin, all = ends[31];
    const int        common = fragments_common_words(nbytes, words_at, all);
    uint32_t * const words  = reinterpret_cast<uint32_t *>(tile + words_at) + common * 32;
    if (!__any_sync(FULL_WARP, n > MOST)) {
        uint32_t v[MOST];
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            if (j < n) {
                v[j] = words[begin + j];
            }
        }
        __syncwarp(); // columns overwrite the tails
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            if (j < n) {
                words[j * 32 + lane] = v[j];
            }
        }
    } else {
        const uint32_t * tail = reinterpret_cast<const uint32_t *>(from + words_at) + common * 32 + begin;
#pragma unroll 1
        for (int j = 0; j < n; j++) {
            words[j * 32 + lane] = __ldg(tail + j);
        }
    }
    __syncwarp();
}

} // namespace macko::cuda
