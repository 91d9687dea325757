// The kernel `columns` (kernels-impl.h): for one x with many zeros; reads only the columns of the other elements.
#pragma once

#include "cpu/kernels/kernels-common.h"

namespace macko::cpu {
namespace {

constexpr int64_t COLUMN_LIST      = 2048; // columns that are listed at a time
constexpr int     COLUMNS_PER_PASS = 4;    // columns that are added to each vector of sums in one pass
constexpr int64_t PREFETCHED       = 2 * COLUMNS_PER_PASS;

// The columns with a non-zero x, in ascending order, followed by copies of the last one.
struct column_list {
    int64_t  n;
    uint32_t col[COLUMN_LIST + PREFETCHED + W];
};

INLINE void list_columns(const mul_mat_params & p, int64_t begin, int64_t end, column_list & list) {
    const float * x = static_cast<const float *>(p.scratch);
    list.n          = 0;
    for (int64_t c = begin; c < end; c += W) {
        uint32_t bits = static_cast<uint32_t>((uint64_t(1) << smaller(W, end - c)) - 1);
        if (p.skip_zeros) {
            bits &= simd::nonzeros(simd::load(x + c));
        }
        simd::columns(bits, static_cast<uint32_t>(c), list.col + list.n);
        list.n += __builtin_popcount(bits);
    }
    for (int64_t i = 0; i < PREFETCHED && list.n > 0; i++) {
        list.col[list.n + i] = list.col[list.n - 1];
    }
}

INLINE const uint64_t * column_mask(const bitmap_layout & m, uint32_t col) {
    return m.masks + static_cast<int64_t>(col) * words_of(m.cols);
}
template <int TYPE> INLINE const uint8_t * column_values(const bitmap_layout & m, uint32_t col) {
    return m.values + static_cast<int64_t>(m.row_off[col]) * value_size<TYPE>;
}

// Adds NC columns times their x to the sums. It also prefetches the columns of the next pass, one or more cache lines
// of values for each mask word, because a CPU's own prefetchers cannot predict gaps between columns. The result does
// not depend on NC: columns are added to each sum one after the other.
template <int TYPE, int NC>
void add_columns_of(const mul_mat_params & p, const uint32_t * col, int64_t lines, float * sums) {
    constexpr int         STEP  = simd::step<TYPE>;
    constexpr int         VECS  = STEP / W;
    constexpr int         PARTS = simd::unrolled_columns / STEP;
    const bitmap_layout & m     = p.columns;
    const int64_t         words = words_of(m.cols);
    const uint64_t *      mask[NC];
    const uint64_t *      mask_ahead[NC];
    const uint8_t *       at[NC];
    const uint8_t *       ahead[NC];
    vec                   x[NC];
#pragma GCC unroll 4
    for (int i = 0; i < NC; i++) {
        mask[i]       = column_mask(m, col[i]);
        mask_ahead[i] = column_mask(m, col[i + COLUMNS_PER_PASS]);
        at[i]         = column_values<TYPE>(m, col[i]);
        ahead[i]      = column_values<TYPE>(m, col[i + COLUMNS_PER_PASS]);
        x[i]          = simd::set1(static_cast<const float *>(p.scratch)[col[i]]);
        __builtin_prefetch(m.row_off + col[i + PREFETCHED]);
    }
    for (int64_t word = 0; word < words; word++, sums += 64) {
        uint64_t bits[NC];
#pragma GCC unroll 4
        for (int i = 0; i < NC; i++) {
            bits[i] = simd::table_bits(mask[i][word]);
            if (word % 8 == 0) {
                __builtin_prefetch(mask_ahead[i] + word);
            }
            for (int64_t line = 0; line < lines; line++, ahead[i] += 64) {
                __builtin_prefetch(ahead[i]);
            }
        }
        for (int first = 0; first < 64 / STEP; first += PARTS) {
#pragma GCC unroll 16
            for (int s = first; s < first + PARTS; s++) {
                vec sum[VECS];
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
                    sum[v] = simd::load(sums + s * STEP + v * W);
                }
#pragma GCC unroll 4
                for (int i = 0; i < NC; i++) {
                    vec w[VECS];
                    expand_next<TYPE, STEP>(at[i], bits[i], s, w);
#pragma GCC unroll 8
                    for (int v = 0; v < VECS; v++) {
                        sum[v] = simd::fma(w[v], x[i], sum[v]);
                    }
                }
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
                    simd::store(sums + s * STEP + v * W, sum[v]);
                }
            }
        }
    }
}

template <int TYPE>
void add_columns_type(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end,
                      float * sums) {
    const int64_t lines = 1 + static_cast<int64_t>(density_of(w, p) * value_size<TYPE> * 0.9f); // per mask word
    column_list   list;
    for (int64_t i = 0; i < words_of(p.columns.cols) * 64; i += W) {
        simd::store(sums + i, simd::zero());
    }
    for (int64_t c = col_begin; c < col_end; c += COLUMN_LIST) {
        list_columns(p, c, smaller(c + COLUMN_LIST, col_end), list);
        int64_t i = 0;
        for (; i + COLUMNS_PER_PASS <= list.n; i += COLUMNS_PER_PASS) {
            add_columns_of<TYPE, COLUMNS_PER_PASS>(p, list.col + i, lines, sums);
        }
        for (; i < list.n; i++) {
            add_columns_of<TYPE, 1>(p, list.col + i, lines, sums);
        }
    }
}

void add_columns(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end, float * sums) {
    with_dense_type(p.columns.dense_type, [&](auto type) {
        if constexpr (is_of_basis<type.value>) {
            simd::basis->add_columns(w, p, col_begin, col_end, sums);
        } else {
            add_columns_type<type.value>(w, p, col_begin, col_end, sums);
        }
    });
}

} // namespace
} // namespace macko::cpu
