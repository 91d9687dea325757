// The kernel `rows` (kernels-impl.h): weights are expanded to their columns, for a few x.
#pragma once

#include "cpu/kernels/kernels-common.h"

namespace macko::cpu {
namespace {

// NR rows times NX x. step: from a row to the next one; 0 computes one row NR times. The result of a row does not
// depend on the rows beside it: the operations and their order are the same for each NR.
template <int TYPE, // type of the values
          int NX,   // number of x for each vector of weights
          int NR    // number of rows for each vector of x
          >
void dot_rows(const layout_of<TYPE> & matrix, const mul_mat_params & p, int64_t row, int64_t step, int64_t first_x) {
    constexpr int STEP = simd::step<TYPE>;
    constexpr int VECS = STEP / W;
    constexpr int ACCS = NX == 1 ? 4 : NX <= 4 ? 2 : 1; // independent sums per row and x, to hide the latency of an FMA
    constexpr int PARTS = simd::unrolled_columns / STEP;
    static_assert(PARTS * VECS % ACCS == 0, "each part begins with the first sum");

    const int64_t words  = words_of(matrix.cols);
    const int64_t padded = words * 64;
    const float * x      = static_cast<const float *>(p.scratch) + first_x * padded;

    const uint64_t * mask[NR];
    reader<TYPE>     values[NR];
    vec              acc[NR][NX][ACCS];
    for (int r = 0; r < NR; r++) {
        mask[r] = matrix.masks + (row + r * step) * words;
        values[r].start(matrix, row + r * step);
        for (int i = 0; i < NX; i++) {
            for (int a = 0; a < ACCS; a++) {
                acc[r][i][a] = simd::zero();
            }
        }
    }
    for (int64_t word = 0; word < words; word++, x += 64) {
        uint64_t                    any = 0;
        decltype(values[0].next(0)) at[NR];
#pragma GCC unroll 4
        for (int r = 0; r < NR; r++) {
            any |= mask[r][word];
            __builtin_prefetch(values[r].at + PREFETCH);
            if (is_coded<TYPE> && word % 8 == 0) { // one cache line of the mask; the bits of its values are fewer
                prefetch_bits(values[r], mask[r] + word);
            }
            at[r] = values[r].next(__builtin_popcountll(mask[r][word]));
        }
        if (!any) {
            continue;
        }
        uint64_t bits[NR];
#pragma GCC unroll 4
        for (int r = 0; r < NR; r++) {
            bits[r] = simd::table_bits(mask[r][word]);
        }
        for (int first = 0; first < 64 / STEP; first += PARTS) {
#pragma GCC unroll 16
            for (int part = 0; part < PARTS; part++) {
                const int s = first + part;
                vec       w[NR][VECS];
#pragma GCC unroll 4
                for (int r = 0; r < NR; r++) {
                    expand_next<TYPE, STEP>(at[r], bits[r], s, w[r]);
                }
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
#pragma GCC unroll 8
                    for (int i = 0; i < NX; i++) {
                        const vec xv = simd::load(x + i * padded + s * STEP + v * W);
#pragma GCC unroll 4
                        for (int r = 0; r < NR; r++) {
                            vec & sum = acc[r][i][(part * VECS + v) % ACCS];
                            sum       = simd::fma(w[r][v], xv, sum);
                        }
                    }
                }
            }
        }
    }
    for (int r = 0; r < NR; r++) {
        for (int i = 0; i < NX; i++) {
            for (int a = ACCS / 2; a > 0; a /= 2) {
                for (int b = 0; b < a; b++) {
                    acc[r][i][b] = simd::add(acc[r][i][b], acc[r][i][b + a]);
                }
            }
            float y = simd::sum(acc[r][i][0]);
            if constexpr (is_coded<TYPE>) {
                y += dot_outliers(matrix, row + r * step,
                                  static_cast<const float *>(p.scratch) + (first_x + i) * padded);
            }
            p.y[first_x + i][row + r * step - p.row_begin] = y;
        }
    }
}

template <int TYPE, int NX>
void multiply_batch(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row, int64_t n_rows, int64_t first_x) {
    constexpr int NR = simd::rows_per_pass<NX>;
    static_assert(NR <= 2, "at most one row is left");
    for (int64_t r = 0; r < n_rows; r += NR) {
        dot_rows<TYPE, NX, NR>(w, p, row + r, r + NR <= n_rows, first_x);
    }
}

template <int TYPE>
void multiply_rows(const layout_of<TYPE> & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    constexpr int64_t BLOCK = 8; // rows that stay in L1 from one batch of x to the next
    const int64_t     step  = p.n <= X_BATCH ? row_end - row_begin : BLOCK;
    for (int64_t row = row_begin; row < row_end; row += step) {
        const int64_t n_rows = smaller(step, row_end - row);
        for (int64_t i = 0; i < p.n; i += X_BATCH) {
            switch (smaller(X_BATCH, p.n - i)) {
                case 1:  multiply_batch<TYPE, 1>(w, p, row, n_rows, i); break;
                case 2:  multiply_batch<TYPE, 2>(w, p, row, n_rows, i); break;
                case 3:  multiply_batch<TYPE, 3>(w, p, row, n_rows, i); break;
                case 4:  multiply_batch<TYPE, 4>(w, p, row, n_rows, i); break;
                case 5:  multiply_batch<TYPE, 5>(w, p, row, n_rows, i); break;
                case 6:  multiply_batch<TYPE, 6>(w, p, row, n_rows, i); break;
                case 7:  multiply_batch<TYPE, 7>(w, p, row, n_rows, i); break;
                default: multiply_batch<TYPE, 8>(w, p, row, n_rows, i); break;
            }
        }
    }
}

} // namespace
} // namespace macko::cpu
