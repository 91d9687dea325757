// The vectors of a kernel set, and what all its kernels share.
#pragma once

#include "cpu/kernels/dispatch.h"

#pragma GCC diagnostic ignored "-Wsign-conversion" // int template arguments as array bounds

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define NOINLINE __attribute__((noinline))
#else
#define NOINLINE __attribute__((noinline, noclone)) // one copy for all callers
#endif

namespace macko::cpu {
namespace {

using vec       = simd::vec;
constexpr int W = simd::width; // floats in a vector

// local versions of mask_words() and std::min(), which are functions of other headers
INLINE int64_t words_of(int64_t cols) { return (cols + 63) / 64; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Transposes a W x W matrix by log2(W) perfect shuffles of its rows.
INLINE void transpose(vec (&v)[W]) {
    for (int round = 1; round < W; round *= 2) {
        vec t[W];
        for (int i = 0; i < W / 2; i++) {
            simd::zip(v[i], v[i + W / 2], t[2 * i], t[2 * i + 1]);
        }
        for (int i = 0; i < W; i++) {
            v[i] = t[i];
        }
    }
}

// acc is [row][vecs * W], y is [token][row]
NOINLINE void store_block(const mul_mat_params & p, const float * acc, int64_t vecs, int64_t row, int64_t n_rows,
                          int64_t token, int64_t n_tokens) {
    for (int64_t r = 0; r < n_rows; r += W) {
        for (int64_t g = 0; g < vecs; g++) {
            vec v[W];
            for (int i = 0; i < W; i++) {
                v[i] = simd::load(acc + ((r + i) * vecs + g) * W); // rows from n_rows on are not stored
            }
            transpose(v);
            for (int i = 0; i < W && g * W + i < n_tokens; i++) {
                float * dst = p.y[token + g * W + i] + (row + r - p.row_begin);
                if (n_rows - r >= W) {
                    simd::store(dst, v[i]);
                } else {
                    float part[W];
                    simd::store(part, v[i]);
                    for (int64_t k = 0; k < n_rows - r; k++) {
                        dst[k] = part[k];
                    }
                }
            }
        }
    }
}

} // namespace
} // namespace macko::cpu
