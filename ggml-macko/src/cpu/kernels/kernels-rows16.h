// The kernel `rows16` (kernels-impl.h): one x, compressed to the packed weights of a row.
#pragma once

#include "cpu/kernels/kernels-common.h"

namespace macko::cpu {
namespace {

// S is simd, passed as a template parameter, so that its functions are looked up only in sets that have them.

// With quantized weights, x is converted to the 16-bit integers x / scale, so that their products with q are exact in
// int32. S::X_OFFSET is added to them, which adds a known amount to each y: X_OFFSET * scale * row_sums[row]. The
// scratch memory has 128 bytes for each 64 columns, in the order of S::store_integers. The scale follows the last of
// them.
INLINE float * scale_of_x(const layout_base & w, const mul_mat_params & p) {
    return reinterpret_cast<float *>(static_cast<uint8_t *>(p.scratch) + words_of(w.cols) * 128);
}

template <typename S>
void prepare_integers(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t cols    = w.cols;
    const float   largest = largest_of<S>(p.x[0], cols);
    const float   inverse = largest > 0x1p-100f ? 32767.0f / largest : 0.0f; // finite
    uint8_t *     dst     = static_cast<uint8_t *>(p.scratch);
    for (int64_t c = col_begin; c < col_end; c += W) {
        const int64_t left = cols - c;
        S::store_integers(dst, c, load_x<GGML_MACKO_TYPE_F32>(left > 0 ? p.x[0] + c : nullptr, left, false), inverse);
    }
    if (col_begin == 0 && col_end > 0) {
        *scale_of_x(w, p) = largest / 32767.0f;
    }
}

// Mask words of a segment with about `nonzeros` non-zeros.
INLINE int64_t segment_words(float density, int nonzeros) {
    const float words = static_cast<float>(nonzeros) / 64;
    return density * SEGMENT_WORDS <= words ? SEGMENT_WORDS : static_cast<int64_t>(words / density);
}

// Processes each segment of a row in two steps: compress the x of its non-zeros, then multiply them by the packed
// weights. Quantized weights are multiplied in whole groups: up to 63 zeros come first, so that the first x has the
// same position in its group as its weight, and weights of the group from other segments are multiplied by zeros. The
// second step is one segment behind the first, because a load that covers several recent stores waits until these have
// reached the cache (AVX-512: 2.0 against 1.5 ns per 64 columns at density 0.3).
template <int TYPE, typename S> struct compressor {
    struct segment_of_row {
        const uint8_t * values; // plain types: the first value; otherwise the group of the first value
        int64_t         n;      // number of x, including the zeros in front
        float *         y;
    };
    static constexpr int ROWS = S::template rows_compressed<TYPE>; // rows at a time, which share the loads of x

    const layout_of<TYPE> * matrix;
    const mul_mat_params *  params;
    int64_t                 segment; // mask words; equal for all rows and threads: it sets the order of sums
    float                   scale;
    int                     now;
    segment_of_row          last[ROWS];
    compressed_x            compressed[2][ROWS];

    void start(const layout_of<TYPE> & w, const mul_mat_params & p) {
        matrix  = &w;
        params  = &p;
        segment = segment_words(density_of(w, p), S::segment_nonzeros);
        scale   = is_quant<TYPE> ? *scale_of_x(w, p) : 1.0f;
        now     = 0;
        for (int r = 0; r < ROWS; r++) {
            last[r].y = nullptr;
        }
    }

    static float dot(const segment_of_row & s, const compressed_x & x) {
        if constexpr (is_quant<TYPE>) {
            return S::template dot_groups<TYPE>(s.values, s.n, x);
        } else {
            return S::template dot_floats<TYPE>(s.values, s.n, x);
        }
    }

    float first_y(int64_t row) const {
        if constexpr (is_quant<TYPE>) {
            return -S::X_OFFSET * scale * matrix->row_sums[row];
        } else {
            return 0;
        }
    }

    void multiply_last() {
        for (int r = 0; r < ROWS; r++) {
            if (last[r].y) {
                *last[r].y += scale * dot(last[r], compressed[now ^ 1][r]);
                last[r].y = nullptr;
            }
        }
    }

    template <int NR> void add_rows(int64_t row) {
        const layout_of<TYPE> & w     = *matrix;
        const mul_mat_params &  p     = *params;
        const int64_t           words = words_of(w.cols);
        const uint8_t *         x     = static_cast<const uint8_t *>(p.scratch);
        const auto *            mask  = w.masks + row * words;
        int64_t                 at[NR];
        for (int r = 0; r < NR; r++) {
            at[r]                         = w.row_off[row + r];
            p.y[0][row + r - p.row_begin] = first_y(row + r);
        }
        // few: rarely more than 32 non-zeros in 64 columns
        const bool few = static_cast<int64_t>(w.row_off[row + 1]) - at[0] < w.cols * 3 / 8;
        for (int64_t word = 0; word < words; word += segment, now ^= 1) {
            const int64_t n_words = smaller(segment, words - word);
            int64_t       n[NR];
            for (int r = 0; r < NR; r++) {
                n[r] = is_quant<TYPE> ? at[r] % 64 : 0;
                for (int64_t line = 0; line < n_words; line += 8) {
                    __builtin_prefetch(mask + r * words + word + 256 + line);
                }
            }
            S::template compress<TYPE, NR>(mask + word, words, n_words, x + word * 128, few, n, compressed[now]);
            multiply_last();
            for (int r = 0; r < NR; r++) {
                float * y = p.y[0] + (row + r - p.row_begin);
                if (is_quant<TYPE>) {
                    last[r] = { w.values + at[r] / 64 * group_size<TYPE>, n[r], y };
                    at[r] += n[r] - at[r] % 64;
                } else {
                    last[r] = { w.values + at[r] * value_size<TYPE>, n[r], y };
                    at[r] += n[r];
                }
            }
        }
    }
};

template <int TYPE, typename S>
void multiply_compressed(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    using rows = compressor<TYPE, S>;
    rows    all;
    int64_t row = row_begin;
    all.start(w, p);
    for (; row + rows::ROWS <= row_end; row += rows::ROWS) {
        all.template add_rows<rows::ROWS>(row);
    }
    for (; row < row_end; row++) {
        all.template add_rows<1>(row);
    }
    all.multiply_last();
}

template <int TYPE, typename S>
void prepare_rows16(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    uint8_t * dst = static_cast<uint8_t *>(p.scratch);
    for (int64_t c = col_begin; c < col_end; c += W) {
        const int64_t left = w.cols - c;
        S::template store16<TYPE>(dst + c * 2, load_x<TYPE>(left > 0 ? p.x[0] + c : nullptr, left, true));
    }
}

template <int TYPE, typename S>
void multiply_gathered(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    const int64_t words = words_of(w.cols);
    for (int64_t row = row_begin; row < row_end; row++) {
        const uint8_t * values = w.values + static_cast<int64_t>(w.row_off[row]) * 2;
        const uint8_t * x      = static_cast<const uint8_t *>(p.scratch);
        // few: at this density 64 columns have 9.6 non-zeros on average
        const bool few = static_cast<int64_t>(w.row_off[row + 1] - w.row_off[row]) * 20 <= w.cols * 3;
        p.y[0][row - p.row_begin] =
            few ? S::template dot_gathered<TYPE, true>(w.masks + row * words, words, values, x)
                : S::template dot_gathered<TYPE, false>(w.masks + row * words, words, values, x);
    }
}

template <int TYPE, typename S>
void multiply_rows16(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    if constexpr (S::template rows_compressed<TYPE> > 0) {
        multiply_compressed<TYPE, S>(w, p, row_begin, row_end);
    } else {
        multiply_gathered<TYPE, S>(w, p, row_begin, row_end);
    }
}

} // namespace
} // namespace macko::cpu
