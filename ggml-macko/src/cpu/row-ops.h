// What lies between the products of a transformer block, a row of floats at a time. One set per instruction set, as the
// products.
#pragma once

#include <cstdint>

namespace macko::cpu {

// n floats each; y may be an operand
struct row_ops {
    void (*add)(const float * a, const float * b, float * y, int64_t n);
    void (*mul)(const float * a, const float * b, float * y, int64_t n);
    void (*silu_mul)(const float * a, const float * b, float * y, int64_t n); // y = a / (1 + e^-a) * b
    // y = x / sqrt(mean x^2 + eps), summed in double
    void (*rms_norm)(const float * x, float * y, int64_t n, float eps);
};

// those of the kernel set in use
const row_ops & row_ops_in_use();

} // namespace macko::cpu
