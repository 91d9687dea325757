// The fast Walsh-Hadamard transform of a row in registers: n log n additions.
#pragma once

#include "cuda/ops/common.cuh"

namespace macko::cuda {

// A row of N elements in LANES adjacent lanes of a warp: element(k, lane) is the first of the four in v[k].
template <int N> struct hadamard_row {
    static constexpr int LANES = N / 4 < WARP ? N / 4 : WARP, VECTORS = N / 4 / LANES;

    float v[VECTORS][4];

    static __device__ __forceinline__ int element(int k, int lane) { return 4 * (k * LANES + lane); }

    __device__ __forceinline__ void load(const float * row, int lane) { // row aligned to 16 bytes
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const float4 four = *reinterpret_cast<const float4 *>(row + element(k, lane));
            v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
        }
    }

    // Multiplies each n elements by Sylvester's Hadamard matrix of that size, divided by the square root of n. n: a
    // power of two, 4 to N. Called by whole warps.
    __device__ __forceinline__ void transform(int lane, int n = N) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            add_and_subtract(v[k][0], v[k][1]), add_and_subtract(v[k][2], v[k][3]);
            add_and_subtract(v[k][0], v[k][2]), add_and_subtract(v[k][1], v[k][3]);
#pragma unroll
            for (int bit = 1; bit < LANES; bit *= 2) {
                if (4 * bit >= n) {
                    continue;
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float other = __shfl_xor_sync(FULL_WARP, v[k][i], bit);
                    v[k][i]           = lane & bit ? other - v[k][i] : v[k][i] + other;
                }
            }
        }
#pragma unroll
        for (int bit = 1; bit < VECTORS; bit *= 2) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (!(k & bit) && 4 * LANES * bit < n) {
                        add_and_subtract(v[k][i], v[k | bit][i]);
                    }
                }
            }
        }
        const float scale = rsqrtf(static_cast<float>(n));
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[k][i] *= scale;
            }
        }
    }

    __device__ __forceinline__ void store(float * row, int lane) const { // row aligned to 16 bytes
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            *reinterpret_cast<float4 *>(row + element(k, lane)) = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
        }
    }

private:
    static __device__ __forceinline__ void add_and_subtract(float & a, float & b) {
        const float sum = a + b;
        b               = a - b;
        a               = sum;
    }
};

// Calls f(size) with the size as a value of an empty type; returns `otherwise` for sizes without a kernel.
template <typename R, typename F> R with_hadamard_size(int64_t n, R otherwise, F && f) {
    return with_constant<64, 128, 256, 512>(n, otherwise, f);
}

} // namespace macko::cuda
