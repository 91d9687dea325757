// The kernel `rows16` (kernels-impl.h): one x, compressed to the packed weights of a row.
#pragma once

#include "cpu/kernels/kernels-common.h"

namespace macko::cpu {
namespace {

// S is simd, passed as a template parameter, so that its functions are looked up only in sets that have them.

// Mask words of a segment with about `nonzeros` non-zeros.
INLINE int64_t segment_words(float density, int nonzeros) {
    const float words = static_cast<float>(nonzeros) / 64;
    return density * SEGMENT_WORDS <= words ? SEGMENT_WORDS : static_cast<int64_t>(words / density);
}

// Processes each segment of a row in two steps: compress the x of its non-zeros, then multiply them by the packed
// weights. The second step is one segment behind the first, because a load that covers several recent stores waits
// until these have reached the cache.
template <int TYPE, typename S> struct compressor {
    struct segment_of_row {
        const uint8_t * values;
        int64_t         n; // number of x
        float *         y;
    };
    static constexpr int ROWS = S::rows_compressed; // rows at a time, which share the loads of x

    const bitmap_layout *  matrix;
    const mul_mat_params * params;
    int64_t                segment; // mask words; equal for all rows and threads: it sets the order of sums
    int                    now;
    segment_of_row         last[ROWS];
    compressed_x           compressed[2][ROWS];

    void start(const bitmap_layout & w, const mul_mat_params & p) {
        matrix  = &w;
        params  = &p;
        segment = segment_words(density_of(w, p), S::segment_nonzeros);
        now     = 0;
        for (int r = 0; r < ROWS; r++) {
            last[r].y = nullptr;
        }
    }

    void multiply_last() {
        for (int r = 0; r < ROWS; r++) {
            if (last[r].y) {
                *last[r].y += S::template dot_floats<TYPE>(last[r].values, last[r].n, compressed[now ^ 1][r]);
                last[r].y = nullptr;
            }
        }
    }

    template <int NR> void add_rows(int64_t row) {
        const bitmap_layout &  w     = *matrix;
        const mul_mat_params & p     = *params;
        const int64_t          words = words_of(w.cols);
        const uint8_t *        x     = static_cast<const uint8_t *>(p.scratch);
        const auto *           mask  = w.masks + row * words;
        const uint8_t *        at[NR];
        for (int r = 0; r < NR; r++) {
            at[r]                         = w.values + static_cast<int64_t>(w.row_off[row + r]) * 2;
            p.y[0][row + r - p.row_begin] = 0;
        }
        for (int64_t word = 0; word < words; word += segment, now ^= 1) {
            const int64_t n_words = smaller(segment, words - word);
            int64_t       n[NR];
            for (int r = 0; r < NR; r++) {
                for (int64_t line = 0; line < n_words; line += 8) {
                    __builtin_prefetch(mask + r * words + word + 256 + line);
                }
            }
            S::template compress<NR>(mask + word, words, n_words, x + word * 128, n, compressed[now]);
            multiply_last();
            for (int r = 0; r < NR; r++) {
                last[r] = { at[r], n[r], p.y[0] + (row + r - p.row_begin) };
                at[r] += n[r] * 2;
            }
        }
    }
};

template <int TYPE, typename S>
void multiply_compressed(const bitmap_layout & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
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
void multiply_gathered(const bitmap_layout & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
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
void multiply_rows16(const bitmap_layout & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    if constexpr (S::rows_compressed > 0) {
        multiply_compressed<TYPE, S>(w, p, row_begin, row_end);
    } else {
        multiply_gathered<TYPE, S>(w, p, row_begin, row_end);
    }
}

} // namespace
} // namespace macko::cpu
