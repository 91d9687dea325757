// Rotary position embedding as in ggml's CPU backend: pairs of a head's elements are rotated by angles that grow with
// the token's position. Does not use ggml.
#pragma once

#include <cstdint>

namespace macko::cpu {

struct rope_params {
    int64_t       n_dims; // elements of a head that are rotated; an even number
    bool          halves; // element i is paired with i + n_dims / 2 (NEOX); otherwise with its neighbor
    float         freq_base, freq_scale;
    float         magnitude;    // factor of both sine and cosine
    const float * freq_factors; // n_dims / 2 divisors of the angles, or nullptr
};

// Writes the cosine and sine of each pair for a token at `position`: n_dims floats.
void rope_angles(const rope_params & p, int32_t position, float * angles);
// Rotates one head of n elements; elements from n_dims on are copied. y may be x.
void rope_row(const rope_params & p, const float * angles, const float * x, float * y, int64_t n);

} // namespace macko::cpu
