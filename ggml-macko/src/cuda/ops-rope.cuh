// The angles of rotary position embedding, for the kernels that rotate.
#pragma once

#include "cuda/ops-common.cuh"

#include <cmath>

namespace macko {

constexpr int MODE_NEOX = 2, MODE_MROPE = 8, MODE_VISION = 24, MODE_IMROPE = 40;

struct rope_args {
    rope_params     p;
    const int32_t * pos;
    int64_t         n_pos;   // tokens: stride between the position streams of MROPE
    const float   * factors;
    float           theta_scale, corr_low, corr_high;
};

struct rotation { float cosine, sine; };

// angle of pair `pair` (0 ... n_dims/2-1, beyond for VISION) of token t
static __device__ __forceinline__ rotation rotation_of(const rope_args & a, int pair, int64_t t) {
    int stream = 0; // which of MROPE's four positions, and the exponent of its frequency
    int power  = pair;
    if (a.p.mode & MODE_MROPE) {
        const int * s     = a.p.sections;
        const int   total = s[0] + s[1] + s[2] + s[3];
        const int   at    = pair % total;
        const int   second = s[0] + s[1], third = second + s[2];
        if (a.p.mode == MODE_IMROPE) { // interleaved streams
            stream = at % 3 == 1 && at < 3 * s[1] ? 1 : at % 3 == 2 && at < 3 * s[2] ? 2 : at % 3 == 0 && at < 3 * s[0] ? 0 : 3;
        } else {
            stream = at < s[0] ? 0 : at < second ? 1 : at < third ? 2 : 3;
        }
        if (a.p.mode == MODE_VISION) { // frequencies start again in each section
            power = at - (stream == 0 ? 0 : stream == 1 ? s[0] : stream == 2 ? second : third);
        }
    }
    const float base  = static_cast<float>(a.pos[t + stream * a.n_pos]) * powf(a.theta_scale, static_cast<float>(power));
    const float extrapolated = a.factors ? base / a.factors[pair] : base;
    float theta     = a.p.freq_scale * extrapolated;
    float magnitude = a.p.attn_factor;
    if (a.p.ext_factor != 0) { // YaRN
        const float ramp = 1 - fminf(1, fmaxf(0, (static_cast<float>(pair) - a.corr_low) / fmaxf(0.001f, a.corr_high - a.corr_low)));
        const float mix  = ramp * a.p.ext_factor;
        theta      = theta * (1 - mix) + extrapolated * mix;
        magnitude *= 1 + 0.1f * logf(1 / a.p.freq_scale);
    }
    rotation r;
    sincosf(theta, &r.sine, &r.cosine);
    r.cosine *= magnitude;
    r.sine   *= magnitude;
    return r;
}

inline float correction_dim(const rope_params & p, float n_rotations) {
    return static_cast<float>(p.n_dims) * std::log(static_cast<float>(p.n_ctx_orig) / (n_rotations * 2 * static_cast<float>(M_PI))) / (2 * std::log(p.freq_base));
}

inline rope_args make_rope_args(const rope_params & p, const op_tensor & pos, const op_tensor * factors, int64_t n_tokens) {
    rope_args a = {};
    a.p           = p;
    a.pos         = reinterpret_cast<const int32_t *>(pos.data);
    a.n_pos       = n_tokens;
    a.factors     = factors ? reinterpret_cast<const float *>(factors->data) : nullptr;
    a.theta_scale = std::pow(p.freq_base, -2.0f / static_cast<float>(p.n_dims));
    a.corr_low    = std::fmax(0.0f, std::floor(correction_dim(p, p.beta_fast)));
    a.corr_high   = std::fmin(static_cast<float>(p.n_dims - 1), std::ceil(correction_dim(p, p.beta_slow)));
    return a;
}

} // namespace macko
