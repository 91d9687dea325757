// Shared by the kernels of kernels-impl.h, except for quantized matrices: reading values, and copying x to the scratch
// memory.
#pragma once

#include "cpu/kernels/kernels-basics.h"

namespace macko::cpu {
namespace {

constexpr int TILE_VECS = simd::tile_vecs; // vectors of tokens in a full tile
constexpr int TILE      = TILE_VECS * W;   // tokens in a full tile
constexpr int MAX_CHUNK = 512;             // columns of a chunk
// floats of a panel that stay in L1 (32 KiB): the fastest of 16 to 256 KiB at density 1/2
constexpr int CHUNK_SIZE = 8192;
constexpr int BLOCK_SIZE = 32768; // floats of accumulators that stay in L2, on the stack (128 KiB)
// mask words of a chunk, and rows of a block, for a tile with some vectors of tokens
INLINE constexpr int chunk_words(int vecs) {
    return (CHUNK_SIZE / (vecs * W) > MAX_CHUNK ? MAX_CHUNK : CHUNK_SIZE / (vecs * W)) / 64;
}
INLINE constexpr int block_rows(int vecs) { return BLOCK_SIZE / (vecs * W) / W * W; }
static_assert(chunk_words(TILE_VECS) > 0, "a chunk has whole mask words");

constexpr int PREFETCH = 4096; // bytes ahead in the values; with 512, AVX2 was half as fast at density 1/2

constexpr int X_BATCH = 8; // number of x that use each expanded vector of weights

template <int TYPE> constexpr bool    is_coded   = TYPE == GGML_MACKO_TYPE_CODED;
template <int TYPE> constexpr bool    is_16_bits = TYPE == GGML_MACKO_TYPE_F16 || TYPE == GGML_MACKO_TYPE_BF16;
template <int TYPE> constexpr int64_t value_size = TYPE == GGML_MACKO_TYPE_F32 ? 4 : 2;

// Call f with a type as a constant.
template <int TYPE> struct type_constant {
    static constexpr int value = TYPE;
};
template <typename F> INLINE void with_dense_type(int32_t type, F && f) {
    switch (type) {
        case GGML_MACKO_TYPE_F16:  return f(type_constant<GGML_MACKO_TYPE_F16>{});
        case GGML_MACKO_TYPE_BF16: return f(type_constant<GGML_MACKO_TYPE_BF16>{});
        default:                   return f(type_constant<GGML_MACKO_TYPE_F32>{});
    }
}

// whether a simd has expand_coded(), load_coded() and store_coded_x()
template <typename S, typename = void> constexpr bool coded_kernels                                = false;
template <typename S> constexpr bool coded_kernels<S, decltype(static_cast<void>(&S::load_coded))> = true;

// whether the kernels of a dense type, other than `rows16`, are those of the set simd::basis
template <int TYPE> constexpr bool is_of_basis = simd::has_basis && TYPE == GGML_MACKO_TYPE_F32;

// Bits s * STEP ... (s + 1) * STEP - 1 of a mask word.
template <int STEP> INLINE uint32_t mask_bits(uint64_t bits, int s) {
    return static_cast<uint32_t>(bits >> (s * STEP)) & static_cast<uint32_t>((uint64_t(1) << STEP) - 1);
}

// Reads the values of a row from front to back. next(n) returns a pointer to the next n values. Kernels may read up to
// 64 values after them, and ignore these.
template <int TYPE> struct plain_reader {
    const uint8_t * at;
    INLINE void     start(const bitmap_layout & w, int64_t row) {
        at = w.values + static_cast<int64_t>(w.row_off[row]) * value_size<TYPE>;
    }
    INLINE const uint8_t * next(int64_t n) {
        const uint8_t * values = at;
        at += n * value_size<TYPE>;
        return values;
    }
};
// Reads coded values without converting them to floats: next() returns their position. Outliers are not included.
struct coded_reader {
    const uint8_t * at;
    uint64_t        first; // number of values before the current one
    uint32_t        outlier;
    uint32_t        high;
    const uint8_t * signs;
    const uint8_t * highs;
    INLINE void     start(const coded_bitmap_layout & w, int64_t row) {
        first   = w.row_off[row];
        at      = w.values + first;
        outlier = w.outlier_off[row];
        high    = *w.high;
        signs   = w.signs;
        highs   = w.highs;
    }
    INLINE coded_values next(int64_t n) {
        const coded_values values = { at, signs, highs, first, high };
        at += n;
        first += static_cast<uint64_t>(n);
        return values;
    }
};
// Prefetches the three streams beside the bytes, as far ahead as 4 KiB of bytes at density 1/2.
INLINE void prefetch_bits(const coded_reader & values, const uint64_t * mask) {
    __builtin_prefetch(mask + 128);
    __builtin_prefetch(values.signs + values.first / 8 + 512);
    __builtin_prefetch(values.highs + values.first / 8 + 512);
}
template <typename R> INLINE void prefetch_bits(const R &, const uint64_t *) {}
template <int TYPE> struct bitmap_of {
    using reader = plain_reader<TYPE>;
    using layout = bitmap_layout;
};
template <> struct bitmap_of<GGML_MACKO_TYPE_CODED> {
    using reader = coded_reader;
    using layout = coded_bitmap_layout;
};
template <int TYPE> using reader    = typename bitmap_of<TYPE>::reader;
template <int TYPE> using layout_of = typename bitmap_of<TYPE>::layout;

// Expands the next values to the STEP columns of part s of a mask word, and advances `at` past them.
template <int TYPE, int STEP> INLINE void expand_next(const uint8_t *& at, uint64_t bits, int s, vec * w) {
    const auto part = simd::template table_part<STEP>(bits, s);
    simd::template expand<TYPE>(at, part, w);
    at += __builtin_popcount(part) * value_size<TYPE>;
}
template <int TYPE, int STEP, typename S = simd>
INLINE void expand_next(coded_values & at, uint64_t bits, int, vec * w) {
    static_assert(STEP == 64, "a whole mask word");
    const int n = __builtin_popcountll(bits);
    S::expand_coded(at, bits, n, w);
    at.at += n;
    at.first += static_cast<uint64_t>(n);
}

// Position of the x of column c of a mask word for products with coded values. The order is that in which their bytes
// leave the registers: of each 16 columns, those with even numbers below 8 are in a lane of the first vector, the odd
// ones in a lane of the second, and the others in the third and fourth.
INLINE int64_t coded_place(int64_t c) {
    return (c & ~int64_t(63)) | (c & 8) << 2 | (c & 1) << 4 | (c & 48) >> 2 | (c & 6) >> 1;
}

INLINE float density_of(const layout_base & w, const mul_mat_params & p) {
    return static_cast<float>(w.row_off[p.row_end] - w.row_off[p.row_begin]) /
           (static_cast<float>(p.row_end - p.row_begin) * static_cast<float>(w.cols));
}

// Sum over the outliers of a row, times an x of prepare_coded().
INLINE float dot_outliers(const coded_bitmap_layout & w, int64_t row, const float * x) {
    float sum = 0;
    for (uint32_t i = w.outlier_off[row]; i < w.outlier_off[row + 1]; i++) {
        sum += w.outliers[i] * x[coded_place(w.outlier_cols[i])];
    }
    return sum;
}

// ---- copying x to the scratch memory ----

// The W floats at src; the first n exist and the others are zero. Rounded to TYPE if `round`.
template <int TYPE> INLINE vec load_x(const float * src, int64_t n, bool round) {
    vec v;
    if (n >= W) {
        v = simd::load(src);
    } else {
        float part[W] = {};
        for (int64_t i = 0; i < n; i++) {
            part[i] = src[i];
        }
        v = simd::load(part);
    }
    if (TYPE == GGML_MACKO_TYPE_F16 && round) {
        return simd::round_f16(v);
    }
    if (TYPE == GGML_MACKO_TYPE_BF16 && round) {
        return simd::round_bf16(v);
    }
    return v;
}

// Copies columns col_begin ... col_end-1 of all x. Both bounds are multiples of W, and columns from cols on become
// zero.
template <int TYPE>
void prepare_rows(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t padded = words_of(w.cols) * 64;
    for (int64_t i = 0; i < p.n; i++) {
        float * dst = static_cast<float *>(p.scratch) + i * padded;
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = w.cols - c;
            simd::store(dst + c, load_x<TYPE>(left > 0 ? p.x[i] + c : nullptr, left, p.round_x));
        }
    }
}

// Copies x for coded values: each 64 columns in the order of coded_place().
template <int TYPE, typename S>
void prepare_coded(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t padded = words_of(w.cols) * 64;
    for (int64_t i = 0; i < p.n; i++) {
        float * dst = static_cast<float *>(p.scratch) + i * padded;
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = w.cols - c;
            S::store_coded_x(dst + coded_place(c), load_x<TYPE>(left > 0 ? p.x[i] + c : nullptr, left, p.round_x));
        }
    }
}

template <int TYPE>
void prepare_panels(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t padded = words_of(w.cols) * 64;
    for (int64_t t = 0; t < p.n; t += TILE) {
        const int64_t tokens = smaller(TILE, p.n - t);
        const int64_t stride = (tokens + W - 1) / W * W;
        float *       dst    = static_cast<float *>(p.scratch) + t * padded;
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = w.cols - c;
            for (int64_t g = 0; g < tokens; g += W) {
                vec v[W];
                for (int i = 0; i < W; i++) {
                    v[i] =
                        left > 0 && g + i < tokens ? load_x<TYPE>(p.x[t + g + i] + c, left, p.round_x) : simd::zero();
                }
                transpose(v);
                for (int i = 0; i < W; i++) {
                    simd::store(dst + (c + i) * stride + g, v[i]);
                }
            }
        }
    }
}

} // namespace
} // namespace macko::cpu
