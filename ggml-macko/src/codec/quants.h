// Conversions of value types: F16 and BF16 to and from float, and ggml's block types (FORMAT.md section 7). No ggml.
#pragma once

#include "codec/macko/macko.h"

#include <cstring>

namespace macko {

constexpr int64_t QUANT_BLOCK = 32;  // values that share a scale
constexpr int     QUANT_MAX   = 128; // maximum |q| of all types

// Bytes of a block; 0 if the type is not quantized. A block is an F16 scale, followed by
//   Q8_0: 32 int8;
//   Q4_0: 16 bytes with q + 8; values 0 ... 15 in the low nibbles, 16 ... 31 in the high nibbles;
//   Q5_0: 32 bits with the highest bit of each q + 16, and 16 bytes with the other bits, as in Q4_0;
//   Q4_NL: as Q4_0, with the index of a level instead of q + 8; the lowest bit of the scale selects the table.
constexpr int64_t quant_block_nbytes(int32_t type) {
    return type == GGML_MACKO_TYPE_Q8_0                                    ? 34
           : type == GGML_MACKO_TYPE_Q5_0                                  ? 22
           : type == GGML_MACKO_TYPE_Q4_0 || type == GGML_MACKO_TYPE_Q4_NL ? 18
                                                                           : 0;
}
// The levels of Q4_NL, as q. The non-zeros of a pruned matrix leave a gap around zero. One table has a narrow gap, the
// other a wide one.
alignas(16) constexpr int8_t Q4_NL_LEVELS[2][16] = {
    { -127, -100, -81, -67, -54, -42, -31, -17, 10, 25, 38, 50, 63, 77, 94, 121 },
    { -127, -107, -89, -74, -61, -50, -39, -28, 23, 36, 47, 58, 70, 84, 101, 124 },
};
// Minimum and maximum q of a type.
struct quant_limits {
    int low, high;
};
constexpr quant_limits quant_range(int32_t type) {
    return type == GGML_MACKO_TYPE_Q8_0    ? quant_limits{ -127, 127 }
           : type == GGML_MACKO_TYPE_Q5_0  ? quant_limits{ -16, 15 }
           : type == GGML_MACKO_TYPE_Q4_NL ? quant_limits{ -127, 124 }
                                           : quant_limits{ -8, 7 };
}
constexpr bool is_quant_type(int32_t type) { return quant_block_nbytes(type) != 0; }
// Bytes of n values; n is a multiple of QUANT_BLOCK if the type is quantized.
constexpr int64_t values_nbytes(int32_t type, int64_t n) {
    return is_quant_type(type) ? n / QUANT_BLOCK * quant_block_nbytes(type) : n * value_nbytes(type);
}

inline uint32_t bits_of_float(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}
inline __attribute__((always_inline)) float float_of_bits(uint32_t u) { // kernels define no symbol
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

inline float float_of_f16(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
    if (exponent == 0) {
        return float_of_bits(sign | bits_of_float(static_cast<float>(mantissa) * 0x1p-24f));
    }
    return float_of_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

// Rounds to nearest, ties to even; Inf from 65520 on.
inline uint16_t f16_of_float(float f) {
    const uint32_t sign = (bits_of_float(f) >> 16) & 0x8000u, u = bits_of_float(f) & 0x7fffffffu;
    if (u > 0x7f800000u) {
        return static_cast<uint16_t>(sign | 0x7e00u);
    }
    if (u >= 0x477ff000u) {
        return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (u < 0x38800000u) { // multiples of 2^-24, the spacing of floats at 0.5
        return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(u) + 0.5f) - 0x3f000000u));
    }
    return static_cast<uint16_t>(
        sign | (((u + 0xfffu + ((u >> 13) & 1)) >> 13) - 0x1c000u)); // F16 exponents are biased by 112 less
}

// Rounds to nearest, ties to even, for a finite f.
inline uint16_t bf16_of_float(float f) {
    const uint32_t u = bits_of_float(f);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
// Largest relative error of rounding to a dense type, without subnormal numbers.
constexpr double rounding_error(int32_t type) {
    return type == GGML_MACKO_TYPE_F32 ? 0x1p-24 : type == GGML_MACKO_TYPE_F16 ? 0x1p-11 : 0x1p-8;
}

inline float float_of_value(uint16_t bits, int32_t type) {
    return type == GGML_MACKO_TYPE_F16 ? float_of_f16(bits) : float_of_bits(static_cast<uint32_t>(bits) << 16);
}
inline float float_of_value(uint32_t bits, int32_t) { return float_of_bits(bits); }

// q of value i of a block.
inline int quant_at(const uint8_t * block, int32_t type, int64_t i) {
    if (type == GGML_MACKO_TYPE_Q8_0) {
        return static_cast<int8_t>(block[2 + i]);
    }
    if (type == GGML_MACKO_TYPE_Q5_0) {
        const int high = (block[2 + i / 8] >> (i % 8)) & 1;
        return (high << 4 | ((block[6 + i % 16] >> (i / 16 * 4)) & 15)) - 16;
    }
    const int nibble = (block[2 + i % 16] >> (i / 16 * 4)) & 15;
    return type == GGML_MACKO_TYPE_Q4_NL ? Q4_NL_LEVELS[block[0] & 1][nibble] : nibble - 8;
}
// q of the padding after the last non-zero; for Q4_NL, level 0.
constexpr int   padding_quant(int32_t type) { return type == GGML_MACKO_TYPE_Q4_NL ? Q4_NL_LEVELS[0][0] : 0; }
inline uint16_t quant_scale_bits(const uint8_t * block) { return static_cast<uint16_t>(block[0] | block[1] << 8); }

// d * q as bits of the dense type: rounded to nearest even, finite, +0 if the product is 0.
template <typename T> inline T dense_of_quant(float d, int q, int32_t type) {
    const float v = d * static_cast<float>(q); // exact: 11 and 8 bits
    if (v == 0) {
        return 0;
    }
    if constexpr (sizeof(T) == 4) {
        return bits_of_float(v);
    } else if (type == GGML_MACKO_TYPE_F16) {
        const uint16_t h = f16_of_float(v);
        return static_cast<T>((h & 0x7fff) == 0x7c00 ? h - 1 : h);
    } else {
        return static_cast<T>(bf16_of_float(v));
    }
}

// Value k (counted from the first block) of quantized values, as bits of the dense type.
template <typename T> inline T dense_at(const uint8_t * blocks, int32_t quant, int64_t k, int32_t type) {
    const uint8_t * block = blocks + k / QUANT_BLOCK * quant_block_nbytes(quant);
    return dense_of_quant<T>(float_of_f16(quant_scale_bits(block)), quant_at(block, quant, k % QUANT_BLOCK), type);
}

} // namespace macko
