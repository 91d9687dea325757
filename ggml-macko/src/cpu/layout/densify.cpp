// Converts rows of a packed matrix back to dense rows.
#include "cpu/layout/layouts.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

namespace {

// Value k of the matrix as a float (exact).
float coded_value(const coded_bitmap_layout & m, int64_t k) {
    const auto bit = [k](const uint8_t * bits) { return static_cast<uint32_t>(bits[k / 8] >> (k % 8)) & 1; };
    return float_of_bits(bit(m.signs) << 31 | (*m.high + bit(m.highs)) << 24 |
                         static_cast<uint32_t>(m.values[k]) << 16);
}

// Converts a float that was made from a value of the dense type back to bits of that type.
template <typename T> T dense_of_float(float v, int32_t dense_type) {
    if constexpr (sizeof(T) == 4) {
        return bits_of_float(v);
    } else {
        return dense_type == GGML_MACKO_TYPE_F16 ? f16_of_float(v) : static_cast<T>(bits_of_float(v) >> 16);
    }
}

// Writes the values of a row, which value_at(their index) returns.
template <typename T, typename F> void for_each_value(const masked_layout & m, int64_t row, T * dense, F && value_at) {
    const int64_t    words = mask_words(m.cols);
    const uint64_t * mask  = m.masks + row * words;
    int64_t          k     = m.row_off[row];
    for (int64_t word = 0; word < words; word++) {
        for (uint64_t bits = mask[word]; bits; bits &= bits - 1, k++) {
            dense[word * 64 + __builtin_ctzll(bits)] = value_at(k);
        }
    }
}

template <typename T> struct densifier {
    int64_t           row_begin, row_end;
    T *               dense;
    const expanders & expand;

    void clear(const layout_base & m) const {
        memset(dense, 0, static_cast<size_t>((row_end - row_begin) * m.cols) * sizeof(T));
    }
    template <typename M, typename F> void rows(const M & m, F && value_at) const {
        clear(m);
        for (int64_t r = row_begin; r < row_end; r++) {
            for_each_value(m, r, dense + (r - row_begin) * m.cols, value_at);
        }
    }
    void operator()(const bitmap_layout & m) const {
        if constexpr (sizeof(T) == 2) {
            for (int64_t r = row_begin; expand.row && r < row_end; r++) {
                expand.row(m.masks + r * mask_words(m.cols), m.values + int64_t(m.row_off[r]) * 2, m.cols,
                           dense + (r - row_begin) * m.cols);
            }
            if (expand.row) {
                return;
            }
        }
        rows(m, [&](int64_t k) { return reinterpret_cast<const T *>(m.values)[k]; });
    }
    void operator()(const coded_bitmap_layout & m) const {
        rows(m, [&](int64_t k) { return dense_of_float<T>(coded_value(m, k), m.dense_type); });
        for (int64_t r = row_begin; r < row_end; r++) {
            for (int64_t i = m.outlier_off[r]; i < m.outlier_off[r + 1]; i++) {
                dense[(r - row_begin) * m.cols + m.outlier_cols[i]] = dense_of_float<T>(m.outliers[i], m.dense_type);
            }
        }
    }
    void operator()(const quantized_layout & m) const {
        if constexpr (sizeof(T) == 2) {
            if (expand.quantized) {
                return expand.quantized(m, row_begin, row_end, dense);
            }
        }
        const quantized_arrays a = arrays_of(m);
        clear(m);
        for (int64_t r = row_begin; r < row_end; r++) {
            put_values(a, r, dense + (r - row_begin) * m.cols);
        }
    }
    void operator()(const bundles_layout & m) const {
        clear(m);
        for (int64_t group = row_begin / BUNDLE_ROWS; group * BUNDLE_ROWS < row_end; group++) {
            for_each_piece(m.bundles + m.group_off[group], m.bundles + m.group_off[group + 1],
                           [&](int row, int64_t first, const uint16_t * values) {
                               const int64_t r = group * BUNDLE_ROWS + row;
                               if (r >= row_begin && r < row_end) {
                                   T * const     to = dense + (r - row_begin) * m.cols + first;
                                   const int64_t n  = std::min<int64_t>(BUNDLE_SPAN, m.cols - first);
                                   for (int64_t i = 0; i < n; i++) {
                                       to[i] = static_cast<T>(to[i] | values[i]); // other bundles have other columns
                                   }
                               }
                           });
        }
    }
};

} // namespace

void densify(const cpu_matrix & m, int64_t row_begin, int64_t row_end, void * dense, const expanders & expand) {
    if (value_nbytes(base_of(m).dense_type) == 4) {
        std::visit(densifier<uint32_t>{ row_begin, row_end, static_cast<uint32_t *>(dense), expand }, m);
    } else {
        std::visit(densifier<uint16_t>{ row_begin, row_end, static_cast<uint16_t *>(dense), expand }, m);
    }
}

} // namespace macko::cpu
