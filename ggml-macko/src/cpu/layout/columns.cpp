// Converts the packed rows of a matrix to columns (columns.h).
#include "cpu/layout/columns.h"
#include "codec/floats.h"
#include "codec/team.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace macko::cpu {

constexpr int64_t WORD      = 64; // rows of a mask word
constexpr int64_t TILE_COLS = 64; // columns that are transposed together: a tile of 64 rows stays in L1

bool columns_can_hold(int64_t rows_per_matrix, int32_t value_type) {
    return rows_per_matrix >= WORD && code_bits(value_type) == 0;
}

static macko_desc columns_desc(const macko_desc & desc, int64_t rows_per_matrix) {
    macko_desc columns = desc;
    columns.rows       = desc.rows / rows_per_matrix * desc.cols;
    columns.cols       = rows_per_matrix;
    return columns;
}

int64_t columns_nbytes(const macko_desc & desc, int64_t rows_per_matrix) {
    return layout_nbytes(columns_desc(desc, rows_per_matrix), bitmap_shape{});
}

bitmap_layout columns_bind(const macko_desc & desc, int64_t rows_per_matrix, void * memory) {
    return std::get<bitmap_layout>(bind_layout(columns_desc(desc, rows_per_matrix), bitmap_shape{}, memory));
}

bitmap_layout columns_of_matrix(const bitmap_layout & all, int64_t matrix, int64_t n_cols) {
    bitmap_layout m = all;
    if (all.masks) {
        m.rows = n_cols;
        m.masks += matrix * n_cols * mask_words(all.cols);
        m.row_off += matrix * n_cols;
    }
    return m;
}

namespace {

// The rows of W that become columns.
struct source_rows {
    const cpu_matrix &  w;
    const layout_base & base;
    int                 n_threads;
    const expanders &   expand;
};

// Calls f(matrix, word, n, dense) for the rows of each mask word of each matrix, on several threads. dense: n dense
// rows, starting at row word * 64 of the matrix.
template <typename T, typename F> void for_each_word(const source_rows & from, int64_t rows, const F & f) {
    const layout_base & w = from.base;
    const int64_t parts   = (rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS; // in bundles, a group of rows is read as a whole
    parallel_ranges(from.n_threads, w.rows / rows * parts, [&](int64_t begin, int64_t end) {
        std::vector<T> dense(static_cast<size_t>(BUNDLE_ROWS * w.cols));
        for (int64_t part = begin; part < end; part++) {
            const int64_t matrix = part / parts, row = part % parts * BUNDLE_ROWS;
            const int64_t last = std::min(row + BUNDLE_ROWS, rows);
            densify(from.w, matrix * rows + row, matrix * rows + last, dense.data(), from.expand);
            for (int64_t r = row; r < last; r += WORD) {
                f(matrix, r / WORD, std::min(WORD, last - r), dense.data() + (r - row) * w.cols);
            }
        }
    });
}

template <typename T> void pack_masks(const source_rows & from, const bitmap_layout & dst) {
    const layout_base & w     = from.base;
    const int64_t       words = mask_words(dst.cols);
    for_each_word<T>(from, dst.cols, [&](int64_t matrix, int64_t word, int64_t n, const T * dense) {
        uint64_t * mask = dst.masks + matrix * w.cols * words + word;
        for (int64_t col = 0; col < w.cols; col += TILE_COLS) {
            const int64_t n_cols          = std::min(TILE_COLS, w.cols - col);
            uint64_t      bits[TILE_COLS] = {};
            for (int64_t r = 0; r < n; r++) {
                for (int64_t c = 0; c < n_cols; c++) {
                    bits[c] |= static_cast<uint64_t>(dense[r * w.cols + col + c] != 0) << r;
                }
            }
            for (int64_t c = 0; c < n_cols; c++) {
                mask[(col + c) * words] = bits[c];
            }
        }
    });
}

int64_t n_set(const uint64_t * mask, int64_t words) {
    int64_t n = 0;
    for (int64_t word = 0; word < words; word++) {
        n += __builtin_popcountll(mask[word]);
    }
    return n;
}

template <typename T> void pack_values(const source_rows & from, const bitmap_layout & dst) {
    const layout_base & w     = from.base;
    const int64_t       words = mask_words(dst.cols);
    for_each_word<T>(from, dst.cols, [&](int64_t matrix, int64_t word, int64_t n, const T * dense) {
        T tile[TILE_COLS][WORD];
        for (int64_t col = 0; col < w.cols; col += TILE_COLS) {
            const int64_t n_cols = std::min(TILE_COLS, w.cols - col);
            for (int64_t r = 0; r < n; r++) {
                for (int64_t c = 0; c < n_cols; c++) {
                    tile[c][r] = dense[r * w.cols + col + c];
                }
            }
            for (int64_t c = 0; c < n_cols; c++) {
                const int64_t    column = matrix * w.cols + col + c;
                const uint64_t * mask   = dst.masks + column * words;
                T *              value  = reinterpret_cast<T *>(dst.values) + dst.row_off[column] + n_set(mask, word);
                for (uint64_t bits = mask[word]; bits; bits &= bits - 1) {
                    *value++ = tile[c][__builtin_ctzll(bits)];
                }
            }
        }
    });
}

template <typename T> void pack_type(const source_rows & from, const bitmap_layout & dst) {
    const int64_t words = mask_words(dst.cols);
    pack_masks<T>(from, dst);
    dst.row_off[0] = 0;
    for (int64_t c = 0; c < dst.rows; c++) {
        dst.row_off[c + 1] = dst.row_off[c] + static_cast<uint32_t>(n_set(dst.masks + c * words, words));
    }
    pack_values<T>(from, dst);
    memset(dst.values + static_cast<int64_t>(dst.row_off[dst.rows]) * int64_t(sizeof(T)), 0, VALUES_SLACK);
}

} // namespace

void columns_pack(const cpu_matrix & w, int n_threads, const bitmap_layout & dst, const expanders & expand) {
    const source_rows from = { w, base_of(w), n_threads, expand };
    value_nbytes(dst.dense_type) == 4 ? pack_type<uint32_t>(from, dst) : pack_type<uint16_t>(from, dst);
}

template <typename T> static float norm_of(const bitmap_layout & columns, int64_t column) {
    const T * values = reinterpret_cast<const T *>(columns.values);
    double    sum    = 0;
    for (uint32_t i = columns.row_off[column]; i < columns.row_off[column + 1]; i++) {
        const double value = static_cast<double>(float_of_value(values[i], columns.dense_type));
        sum += value * value;
    }
    return static_cast<float>(std::sqrt(sum));
}

void columns_norms(const bitmap_layout & columns, int n_threads, float * norms) {
    parallel_ranges(n_threads, columns.rows, [&](int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; c++) {
            norms[c] =
                value_nbytes(columns.dense_type) == 4 ? norm_of<uint32_t>(columns, c) : norm_of<uint16_t>(columns, c);
        }
    });
}

void columns_skip_below(float threshold, const float * norms, const float * x, int64_t n, float * out) {
    for (int64_t c = 0; c < n; c++) {
        const float score = norms ? std::fabs(x[c]) * norms[c] : std::fabs(x[c]);
        out[c]            = score < threshold ? 0.0f : x[c];
    }
}

} // namespace macko::cpu
