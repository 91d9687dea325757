// The angles of rotary position embedding, for the kernels that rotate.
#pragma once

#include "cuda/ops/common.cuh"

#include <cmath>

namespace macko::cuda {

constexpr int MODE_NEOX = 2, MODE_MROPE = 8, MODE_VISION = 24, MODE_IMROPE = 40;

struct rope_args {
    rope_params     p;
    const int32_t * pos;
    int64_t         n_pos; // tokens: stride between the position streams of MROPE
    const float *   factors;
    // log2_step: step of the logarithms of the frequencies, as a sum of two floats
    float log2_step, log2_step_low, corr_low, corr_high;
};

struct rotation {
    float cosine, sine;
};

// The rotation of pair `pair` at a position. Its frequency is freq_base^(-2 power / n_dims).
static __device__ __forceinline__ rotation rotation_at(const rope_args & a, float position, int pair, int power) {
    const float n = static_cast<float>(power), exponent = n * a.log2_step,
                rest      = fmaf(n, a.log2_step, -exponent) + n * a.log2_step_low;
    const float frequency = exp2f(exponent), base = position * fmaf(frequency, rest * 0.69314718f, frequency);
    const float extrapolated = a.factors ? base / a.factors[pair] : base;
    float       theta        = a.p.freq_scale * extrapolated;
    float       magnitude    = a.p.attn_factor;
    if (a.p.ext_factor != 0) { // YaRN
        const float ramp =
            1 - fminf(1, fmaxf(0, (static_cast<float>(pair) - a.corr_low) / fmaxf(0.001f, a.corr_high - a.corr_low)));
        const float mix = ramp * a.p.ext_factor;
        theta           = theta * (1 - mix) + extrapolated * mix;
        magnitude *= 1 + 0.1f * logf(1 / a.p.freq_scale);
    }
    rotation r;
    sincosf(theta, &r.sine, &r.cosine);
    r.cosine *= magnitude;
    r.sine *= a.p.inverse ? -magnitude : magnitude;
    return r;
}

// The rotation of pair `pair` (0 ... n_dims / 2 - 1; more for VISION) of token t.
static __device__ __forceinline__ rotation rotation_of(const rope_args & a, int pair, int64_t t) {
    int stream = 0; // index among MROPE's four positions, and the exponent of its frequency
    int power  = pair;
    if (a.p.mode & MODE_MROPE) {
        const int * s      = a.p.sections;
        const int   total  = s[0] + s[1] + s[2] + s[3];
        const int   at     = pair % total;
        const int   second = s[0] + s[1], third = second + s[2];
        if (a.p.mode == MODE_IMROPE) { // interleaved streams
            stream = at % 3 == 1 && at < 3 * s[1]   ? 1
                     : at % 3 == 2 && at < 3 * s[2] ? 2
                     : at % 3 == 0 && at < 3 * s[0] ? 0
                                                    : 3;
        } else {
            stream = at < s[0] ? 0 : at < second ? 1 : at < third ? 2 : 3;
        }
        if (a.p.mode == MODE_VISION) { // the frequencies restart in each section
            power = at - (stream == 0 ? 0 : stream == 1 ? s[0] : stream == 2 ? second : third);
        }
    }
    return rotation_at(a, static_cast<float>(a.pos[t + stream * a.n_pos]), pair, power);
}

inline float correction_dim(const rope_params & p, float n_rotations) {
    return static_cast<float>(p.n_dims) *
           std::log(static_cast<float>(p.n_ctx_orig) / (n_rotations * 2 * static_cast<float>(M_PI))) /
           (2 * std::log(p.freq_base));
}

inline rope_args make_rope_args(const rope_params & p, const op_tensor & pos, const op_tensor * factors,
                                int64_t n_tokens) {
    rope_args a       = {};
    a.p               = p;
    a.pos             = reinterpret_cast<const int32_t *>(pos.data);
    a.n_pos           = n_tokens;
    a.factors         = factors ? reinterpret_cast<const float *>(factors->data) : nullptr;
    const double step = -2 * std::log2(static_cast<double>(p.freq_base)) / p.n_dims;
    a.log2_step       = static_cast<float>(step);
    a.log2_step_low   = static_cast<float>(step - static_cast<double>(a.log2_step));
    a.corr_low        = std::fmax(0.0f, std::floor(correction_dim(p, p.beta_fast)));
    a.corr_high       = std::fmin(static_cast<float>(p.n_dims - 1), std::ceil(correction_dim(p, p.beta_slow)));
    return a;
}

} // namespace macko::cuda
