// Rotary position embedding, as ggml's CPU backend computes it: pairs of a head's elements are rotated by angles that
// grow with the token's position. No ggml here.
#pragma once

#include <cstdint>

namespace macko::cpu {

struct rope_params {
    int64_t       n_dims; // elements of a head that are rotated, an even number
    bool          halves; // element i is paired with i + n_dims / 2 (NEOX); else neighbours are a pair
    float         freq_base, freq_scale;
    float         magnitude;    // which both sine and cosine are multiplied by
    const float * freq_factors; // n_dims / 2, by which angles are divided; or nullptr
};

// The cosine and the sine of each pair for a token at `position`, n_dims floats.
void rope_angles(const rope_params & p, int32_t position, float * angles);
// One head of n elements; those from n_dims on are copied. y may be x.
void rope_row(const rope_params & p, const float * angles, const float * x, float * y, int64_t n);

} // namespace macko::cpu
