// The operations between the matrix products of a transformer block, on a row of floats. Each kernel set has its own.
#pragma once

#include <cstdint>

namespace macko::cpu {

// Each argument is n floats; y may be an operand.
struct row_ops {
    void (*add)(const float * a, const float * b, float * y, int64_t n);
    void (*mul)(const float * a, const float * b, float * y, int64_t n);
    void (*silu_mul)(const float * a, const float * b, float * y, int64_t n); // y = a / (1 + e^-a) * b
    void (*relu_mul)(const float * a, const float * b, float * y, int64_t n); // y = a > 0 ? a * b : 0
    void (*relu)(const float * x, float * y, int64_t n);                      // y = x > 0 ? x : 0
    void (*sqr)(const float * x, float * y, int64_t n);                       // y = x * x
    // y = x / sqrt(mean(x^2) + eps); the sum is a double
    void (*rms_norm)(const float * x, float * y, int64_t n, float eps);
};

// The row operations of the kernel set in use (kernels.h).
const row_ops & row_ops_in_use();

} // namespace macko::cpu
