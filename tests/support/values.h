// Values of weights, computed without the library.
#pragma once

#include "ggml-macko.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// The value of a finite F16, BF16 or F32.
inline double value_of(uint32_t bits, int32_t type) {
    if (type == GGML_MACKO_TYPE_F16) {
        const int    e = (bits >> 10) & 31;
        const double m = bits & 0x3ff;
        const double v = e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
        return bits & 0x8000 ? -v : v;
    }
    const uint32_t u = type == GGML_MACKO_TYPE_BF16 ? bits << 16 : bits;
    float          f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

// ---- coded values, written from FORMAT.md section 8 alone ----

inline int stored_mantissa_bits(int32_t type) {
    return type == GGML_MACKO_TYPE_F32 ? 23 : type == GGML_MACKO_TYPE_F16 ? 10 : 7;
}

// Decodes coded values to bits of the dense type.
inline std::vector<uint32_t> decode_coded(const uint8_t * data, size_t nnz, int32_t type) {
    const size_t    m = data[0], e = data[1], base = data[2], size = type == GGML_MACKO_TYPE_F32 ? 4 : 2;
    const size_t    places = std::max<size_t>(32, (nnz + 31) / 32 * 32), block_nbytes = 4 * (m + e + 1);
    const auto      stored  = static_cast<size_t>(stored_mantissa_bits(type));
    const uint8_t * outlier = data + 8 + places / 32 * block_nbytes;

    std::vector<uint32_t> values;
    for (size_t k = 0; k < nnz; k++) {
        const uint8_t * block    = data + 8 + k / 32 * block_nbytes;
        const size_t    i        = k % 32;
        const auto      bit      = [&](size_t word) { return size_t(block[32 + 4 * word + i / 8] >> (i % 8) & 1); };
        const size_t    code     = size_t(block[i] >> 7) | bit(1) << 1 | (e == 3 ? bit(2) << 2 : 0);
        size_t          mantissa = block[i] & 127;
        for (size_t j = 0; j + 7 < m; j++) {
            mantissa = mantissa << 1 | bit(e + j);
        }
        uint32_t value =
            static_cast<uint32_t>(bit(0) << (8 * size - 1) | (base + code) << stored | mantissa << (stored - m));
        if (code == 0) {
            value = 0;
            memcpy(&value, outlier, size);
            outlier += size;
        }
        values.push_back(value);
    }
    return values;
}

// The code of a value; 0 for an outlier.
inline int code_of_value(uint32_t value, int32_t type, int m, int e, int base) {
    const int      stored   = stored_mantissa_bits(type);
    const uint32_t field    = value >> stored & (type == GGML_MACKO_TYPE_F16 ? 31 : 255);
    const int      code     = static_cast<int>(field) - base;
    const bool     is_short = (value & ((1u << (stored - m)) - 1)) == 0;
    return is_short && code >= 1 && code < 1 << e ? code : 0;
}

inline std::vector<uint8_t> encode_coded(const std::vector<uint32_t> & values, int32_t type, int m, int e) {
    const int    stored = stored_mantissa_bits(type), inf = type == GGML_MACKO_TYPE_F16 ? 31 : 255;
    const size_t size   = type == GGML_MACKO_TYPE_F32 ? 4 : 2,
                 places = std::max<size_t>(32, (values.size() + 31) / 32 * 32);
    int     base        = 0;
    int64_t most        = -1;
    for (int b = 0; b + (1 << e) - 1 < inf; b++) {
        const int64_t n = std::count_if(values.begin(), values.end(),
                                        [&](uint32_t v) { return code_of_value(v, type, m, e, b) != 0; });
        if (n > most) {
            base = b;
            most = n;
        }
    }
    const auto           block_nbytes = static_cast<size_t>(4 * (m + e + 1));
    std::vector<uint8_t> out          = { uint8_t(m), uint8_t(e), uint8_t(base), 0 };
    const auto           n_outliers   = static_cast<uint32_t>(values.size() - static_cast<size_t>(most));
    for (int i = 0; i < 4; i++) {
        out.push_back(static_cast<uint8_t>(n_outliers >> (8 * i)));
    }
    out.resize(8 + places / 32 * block_nbytes, 0);
    for (size_t k = 0; k < values.size(); k++) {
        uint8_t *  block = &out[8 + k / 32 * block_nbytes]; // until the next push
        const auto code  = static_cast<uint32_t>(code_of_value(values[k], type, m, e, base));
        if (code == 0) {
            const auto * bytes = reinterpret_cast<const uint8_t *>(&values[k]);
            out.insert(out.end(), bytes, bytes + size);
            continue;
        }
        const uint32_t mantissa = (values[k] & ((1u << stored) - 1)) >> (stored - m);
        const size_t   i        = k % 32;
        size_t         word     = 0;
        const auto     put      = [&](uint32_t bit) {
            block[32 + 4 * word + i / 8] = static_cast<uint8_t>(block[32 + 4 * word + i / 8] | (bit & 1) << (i % 8));
            word++;
        };
        block[i] = static_cast<uint8_t>((code & 1) << 7 | mantissa >> (m - 7));
        put(values[k] >> (8 * size - 1));
        for (int j = 1; j < e; j++) {
            put(code >> j);
        }
        for (int j = m - 8; j >= 0; j--) {
            put(mantissa >> j);
        }
    }
    out.resize((out.size() + 3) / 4 * 4, 0);
    return out;
}
