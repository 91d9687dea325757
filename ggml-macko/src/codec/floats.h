// Conversions of value types: F16 and BF16 to and from float, and products d * q (FORMAT.md section 2). No ggml.
#pragma once

#include "codec/macko/macko.h"

#include <cstring>

namespace macko {

inline __attribute__((always_inline)) uint32_t bits_of_float(float f) { // kernels define no symbol
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}
inline __attribute__((always_inline)) float float_of_bits(uint32_t u) {
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

// Rounds to nearest, ties to even, for |f| < 65536; Inf from 65520 on. Has no branches, so loops become vector code.
inline __attribute__((always_inline)) uint16_t f16_of_small(float f) {
    constexpr uint32_t LEAST = 113u << 23; // bits of 2^-14, the least normal number
    const uint32_t     u = bits_of_float(f) & 0x7fffffffu, exponent = u & 0x7f800000u;
    const uint32_t     spacing = exponent > LEAST ? exponent : LEAST;
    // floats that are 2^13 times as large have the spacing of the result
    const uint32_t large = spacing + (13u << 23);
    const uint32_t units = bits_of_float(float_of_bits(u) + float_of_bits(large)) - large;
    return static_cast<uint16_t>((bits_of_float(f) >> 16 & 0x8000u) | (((spacing - LEAST) >> 13) + units));
}

// The same for any f.
inline uint16_t f16_of_float(float f) {
    const uint32_t sign = bits_of_float(f) >> 16 & 0x8000u, u = bits_of_float(f) & 0x7fffffffu;
    return u < 0x47800000u ? f16_of_small(f) : static_cast<uint16_t>(sign | (u > 0x7f800000u ? 0x7e00u : 0x7c00u));
}

// Rounds to nearest, ties to even, for a finite f.
inline __attribute__((always_inline)) uint16_t bf16_of_float(float f) {
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

constexpr float BEYOND_F16 = 65536; // |d * q| must be less; from 65,520 on, it is rounded to 65,504
// d * q as bits of the dense type: rounded to nearest even, finite, +0 if the product is 0.
template <typename T> inline __attribute__((always_inline)) T dense_of_quant(float d, int q, int32_t type) {
    const float v = d * static_cast<float>(q) + 0.0f; // exact: d has 13 bits, q has 8; the sum is not -0
    if constexpr (sizeof(T) == 4) {
        return bits_of_float(v);
    } else if (type == GGML_MACKO_TYPE_F16) {
        const uint16_t h = f16_of_small(v);
        return static_cast<T>(h - ((h & 0x7fff) == 0x7c00));
    } else {
        return static_cast<T>(bf16_of_float(v));
    }
}

} // namespace macko
