// Weights as numbers, computed without the library.
#pragma once

#include "ggml-macko.h"

#include <cmath>
#include <cstdint>
#include <cstring>

// the value of a finite F16, BF16 or F32
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
