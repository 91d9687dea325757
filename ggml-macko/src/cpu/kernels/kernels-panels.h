// The kernel `panels` (kernels-impl.h): a row is decoded once for a tile of many x.
#pragma once

#include "cpu/kernels/kernels-common.h"

namespace macko::cpu {
namespace {

struct nonzero_list {                         // the non-zeros of a row in a chunk
    alignas(64) uint32_t col[MAX_CHUNK + 64]; // within the chunk
    alignas(64) float weight[MAX_CHUNK + 64];
};

// Writes the next n values as weights, and up to W - 1 more after them.
template <int TYPE> INLINE void store_weights(const uint8_t * at, int n, float * weights) {
    for (int i = 0; i < n; i += W) {
        simd::store(weights + i, simd::template load_values<TYPE>(at + i * value_size<TYPE>));
    }
}
template <int TYPE, typename S = simd> INLINE void store_weights(coded_values at, int n, float * weights) {
    for (int i = 0; i < n; i += W) {
        simd::store(weights + i, S::load_coded(at));
        at.at += W;
        at.first += W;
    }
}

// Appends a row's outliers in columns begin ... end - 1 to a list of n elements; returns the new number of elements.
INLINE int add_outliers(const coded_bitmap_layout & w, int64_t row, int64_t begin, int64_t end, coded_reader & values,
                        nonzero_list & list, int n) {
    for (; values.outlier < w.outlier_off[row + 1] && w.outlier_cols[values.outlier] < end; values.outlier++, n++) {
        list.col[n]    = static_cast<uint32_t>(w.outlier_cols[values.outlier] - begin);
        list.weight[n] = w.outliers[values.outlier];
    }
    return n;
}

// Fills the list with the non-zeros of n_words mask words of a row, from `word` on, and adds zeros up to a multiple of
// `multiple` (a power of two, at most W). Returns the length with the zeros.
template <int TYPE>
INLINE int decode_chunk(const layout_of<TYPE> & w, int64_t row, int64_t first_word, int n_words, int multiple,
                        reader<TYPE> & values, nonzero_list & list) {
    const uint64_t * mask = w.masks + row * words_of(w.cols) + first_word;
    int              n    = 0;
    for (int word = 0; word < n_words; word++) {
        const uint64_t bits = mask[word];
        for (int s = 0; s < 64 / W; s++) {
            const auto part = mask_bits<W>(bits, s);
            simd::columns(part, static_cast<uint32_t>(word * 64 + s * W), list.col + n);
            n += __builtin_popcount(part);
        }
    }
    store_weights<TYPE>(values.next(n), n, list.weight);
    if constexpr (is_coded<TYPE>) {
        n = add_outliers(w, row, first_word * 64, (first_word + n_words) * 64, values, list, n);
    }
    for (; n & (multiple - 1); n++) {
        list.col[n]    = 0;
        list.weight[n] = 0;
    }
    return n;
}

// acc[NV] += sum of weight * x[col][NV] over the n elements of a list. SETS elements at a time have accumulators of
// their own, which hides the latency of an FMA.
INLINE constexpr int            sets_of(int64_t vecs) { return vecs >= 8 ? 1 : vecs >= 4 ? 2 : vecs >= 2 ? 4 : 8; }
template <int NV> constexpr int SETS = sets_of(NV);

template <int NV>
NOINLINE void accumulate(const float * x, const uint32_t * col, const float * weight, int n, float * acc) {
    vec sum[SETS<NV>][NV];
#pragma GCC unroll 8
    for (int s = 0; s < SETS<NV>; s++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            sum[s][v] = s == 0 ? simd::load(acc + v * W) : simd::zero();
        }
    }
    for (int i = 0; i < n; i += SETS<NV>) {
#pragma GCC unroll 8
        for (int s = 0; s < SETS<NV>; s++) {
            const vec     w  = simd::set1(weight[i + s]);
            const float * xc = x + static_cast<int64_t>(col[i + s]) * (NV * W);
            // one address for all loads: gcc may otherwise keep NV addresses, some in memory (AVX2: 20 % slower)
            __asm__("" : "+r"(xc));
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                sum[s][v] = simd::fma(w, simd::load(xc + v * W), sum[s][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
#pragma GCC unroll 8
        for (int s = 1; s < SETS<NV>; s++) {
            sum[0][v] = simd::add(sum[0][v], sum[s][v]);
        }
        simd::store(acc + v * W, sum[0][v]);
    }
}

using accumulate_fn = void (*)(const float * x, const uint32_t * col, const float * weight, int n, float * acc);

// accumulate() with NV = vecs
template <int NV = TILE_VECS> INLINE accumulate_fn accumulate_of(int vecs) {
    if constexpr (NV > 1) {
        return vecs == NV ? accumulate<NV> : accumulate_of<NV - 1>(vecs);
    } else {
        return accumulate<1>;
    }
}

template <int TYPE, int NV>
void multiply_tile(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end,
                   int64_t token, int64_t n_tokens) {
    constexpr int64_t STRIDE = NV * W, ROWS = block_rows(NV), CHUNK_WORDS = chunk_words(NV);
    const int64_t     words = words_of(w.cols);
    const float *     x     = static_cast<const float *>(p.scratch) + token * words * 64;
    alignas(64) float acc[ROWS * STRIDE];
    reader<TYPE>      values[ROWS];
    nonzero_list      list;

    for (int64_t row = row_begin; row < row_end; row += ROWS) {
        const int64_t n_rows = smaller(ROWS, row_end - row);
        for (int64_t i = 0; i < ROWS * STRIDE; i += W) {
            simd::store(acc + i, simd::zero());
        }
        for (int64_t r = 0; r < n_rows; r++) {
            values[r].start(w, row + r);
        }
        for (int64_t word = 0; word < words; word += CHUNK_WORDS) {
            const int n_words = static_cast<int>(smaller(CHUNK_WORDS, words - word));
            for (int64_t r = 0; r < n_rows; r++) {
                const int n = decode_chunk<TYPE>(w, row + r, word, n_words, SETS<NV>, values[r], list);
                __builtin_prefetch(values[r].at + 64, 0, 2); // for this row's next chunk
                accumulate<NV>(x + word * 64 * STRIDE, list.col, list.weight, n, acc + r * STRIDE);
            }
        }
        store_block(p, acc, NV, row, n_rows, token, n_tokens);
    }
}

// multiply_tile with NV = vecs
template <int TYPE, int NV>
void multiply_tile_of(int vecs, const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end,
                      int64_t token, int64_t n_tokens) {
    if (vecs == NV) {
        multiply_tile<TYPE, NV>(w, p, row_begin, row_end, token, n_tokens);
    } else if constexpr (NV > 1) {
        multiply_tile_of<TYPE, NV - 1>(vecs, w, p, row_begin, row_end, token, n_tokens);
    }
}

template <int TYPE>
void multiply_panels(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    for (int64_t token = 0; token < p.n; token += TILE) {
        const int64_t n_tokens = smaller(TILE, p.n - token);
        multiply_tile_of<TYPE, TILE_VECS>(static_cast<int>((n_tokens + W - 1) / W), w, p, row_begin, row_end, token,
                                          n_tokens);
    }
}

} // namespace
} // namespace macko::cpu
