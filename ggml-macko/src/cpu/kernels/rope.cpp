#include "cpu/kernels/rope.h"

#include <cmath>

namespace macko::cpu {

void rope_angles(const rope_params & p, int32_t position, float * angles) {
    const float step  = powf(p.freq_base, -2.0f / static_cast<float>(p.n_dims));
    auto        theta = static_cast<float>(position);
    for (int64_t i = 0; i < p.n_dims; i += 2, theta *= step) {
        const float angle = p.freq_scale * (p.freq_factors ? theta / p.freq_factors[i / 2] : theta);
        angles[i]         = cosf(angle) * p.magnitude;
        angles[i + 1]     = sinf(angle) * p.magnitude;
    }
}

void rope_row(const rope_params & p, const float * angles, const float * x, float * y, int64_t n) {
    const int64_t apart = p.halves ? p.n_dims / 2 : 1;
    for (int64_t i = 0; i < p.n_dims; i += 2) {
        const int64_t at = p.halves ? i / 2 : i;
        const float   a = x[at], b = x[at + apart];
        y[at]         = a * angles[i] - b * angles[i + 1];
        y[at + apart] = a * angles[i + 1] + b * angles[i];
    }
    for (int64_t i = p.n_dims; i < n; i++) {
        y[i] = x[i];
    }
}

} // namespace macko::cpu
