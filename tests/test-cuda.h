// What the tests of the sparse GPU kernels share: checked calls, values of each type, device arrays with guard zones.
#pragma once

#include "cuda/common.cuh"
#include "test.h"

#include <cmath>
#include <cstring>
#include <vector>

using namespace macko;

#define CUDA_CHECK(call)                                                             \
    do {                                                                             \
        const cudaError_t error = (call);                                            \
        if (error != cudaSuccess) {                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

#define STATUS_CHECK(call)                                                           \
    do {                                                                             \
        const int status = (call);                                                   \
        if (status != GGML_MACKO_STATUS_OK) {                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, ggml_macko_last_error()); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

// float32 sums of products in any order: a few units in the last place of the sum of magnitudes, growing slowly with the length
static constexpr double MAX_ERROR = 3e-6;
static constexpr float  POISON = -1.2345e30f;
static constexpr int64_t GUARD = 64; // floats before and after each output

// ---- values ----

inline double to_double(uint32_t bits, int type) {
    if (type == GGML_MACKO_TYPE_F16) {
        __half_raw raw;
        raw.x = static_cast<unsigned short>(bits);
        return static_cast<double>(__half2float(__half(raw)));
    }
    if (type == GGML_MACKO_TYPE_BF16) {
        bits <<= 16;
    }
    float f;
    memcpy(&f, &bits, sizeof(f));
    return static_cast<double>(f);
}

inline double round_to(double v, int type) {
    const float f = static_cast<float>(v);
    return type == GGML_MACKO_TYPE_F16    ? static_cast<double>(__half2float(__float2half(f)))
           : type == GGML_MACKO_TYPE_BF16 ? static_cast<double>(__bfloat162float(__float2bfloat16(f)))
                                          : v;
}

inline uint32_t random_bits(rng & random, int type) {
    const float magnitude = static_cast<float>(std::exp2(random.unit() * 12 - 8) * (random.unit() < 0.01 ? 30 : 1)); // with outliers
    const float f = random.unit() < 0.5 ? -magnitude : magnitude;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    if (type == GGML_MACKO_TYPE_F16) {
        return static_cast<__half_raw>(__float2half(f)).x;
    }
    return type == GGML_MACKO_TYPE_BF16 ? bits >> 16 : bits;
}

// ---- device arrays with guard zones ----

struct guarded {
    std::vector<float> host;
    float            * memory = nullptr;
    explicit guarded(int64_t n) : host(static_cast<size_t>(n + 2 * GUARD), POISON) {
        CUDA_CHECK(cudaMalloc(&memory, host.size() * 4));
        put();
    }
    ~guarded() { cudaFree(memory); }
    guarded(const guarded &) = delete;
    float * data() { return memory + GUARD; }
    float & at(int64_t i) { return host[static_cast<size_t>(i + GUARD)]; }
    void put() { CUDA_CHECK(cudaMemcpy(memory, host.data(), host.size() * 4, cudaMemcpyHostToDevice)); }
    void get() { CUDA_CHECK(cudaMemcpy(host.data(), memory, host.size() * 4, cudaMemcpyDeviceToHost)); }
    bool guards_intact() const {
        for (int64_t i = 0; i < GUARD; i++) {
            if (host[static_cast<size_t>(i)] != POISON || host[host.size() - 1 - static_cast<size_t>(i)] != POISON) {
                return false;
            }
        }
        return true;
    }
};

struct options {
    bool residual = false, bias = false, norm = false, silu = false, in_place = false;
};

