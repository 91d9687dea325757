// Converts the packed rows of a matrix to columns (columns.h).
#include "cpu/layout/columns.h"
#include "codec/quants.h"
#include "codec/team.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace macko::cpu {

constexpr int64_t WORD      = 64; // rows of a mask word
constexpr int64_t TILE_COLS = 64; // columns that are transposed together: a tile of 64 rows stays in L1

bool columns_can_hold(int64_t rows_per_matrix, int32_t value_type) {
    return rows_per_matrix >= WORD && !is_quant_type(value_type);
}

macko_desc columns_desc(const macko_desc & desc, int64_t rows_per_matrix) {
    macko_desc columns = desc;
    columns.rows       = desc.rows / rows_per_matrix * desc.cols;
    columns.cols       = rows_per_matrix;
    return columns;
}

bitmap_matrix columns_of_matrix(const bitmap_matrix & all, int64_t matrix, int64_t n_cols) {
    bitmap_matrix m = all;
    if (all.masks) {
        m.rows = n_cols;
        m.masks += matrix * n_cols * mask_words(all.cols);
        m.row_off += matrix * n_cols;
    }
    return m;
}

// Calls f(matrix, word, n, dense) for the rows of each mask word of each matrix, on several threads. dense: n dense
// rows, starting at row word * 64 of the matrix.
template <typename T, typename F>
static void for_each_word(const bitmap_matrix & w, int n_threads, int64_t rows, const F & f) {
    const int64_t parts = (rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS; // in bundles, a group of rows is read as a whole
    parallel_ranges(n_threads, w.rows / rows * parts, [&](int64_t begin, int64_t end) {
        std::vector<T> dense(static_cast<size_t>(BUNDLE_ROWS * w.cols));
        for (int64_t part = begin; part < end; part++) {
            const int64_t matrix = part / parts, row = part % parts * BUNDLE_ROWS;
            const int64_t last = std::min(row + BUNDLE_ROWS, rows);
            bitmap_densify(w, w.dense_type, matrix * rows + row, matrix * rows + last, dense.data());
            for (int64_t r = row; r < last; r += WORD) {
                f(matrix, r / WORD, std::min(WORD, last - r), dense.data() + (r - row) * w.cols);
            }
        }
    });
}

template <typename T> static void pack_masks(const bitmap_matrix & w, int n_threads, const bitmap_matrix & dst) {
    const int64_t words = mask_words(dst.cols);
    for_each_word<T>(w, n_threads, dst.cols, [&](int64_t matrix, int64_t word, int64_t n, const T * dense) {
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

static int64_t n_set(const uint64_t * mask, int64_t words) {
    int64_t n = 0;
    for (int64_t word = 0; word < words; word++) {
        n += __builtin_popcountll(mask[word]);
    }
    return n;
}

template <typename T> static void pack_values(const bitmap_matrix & w, int n_threads, const bitmap_matrix & dst) {
    const int64_t words = mask_words(dst.cols);
    for_each_word<T>(w, n_threads, dst.cols, [&](int64_t matrix, int64_t word, int64_t n, const T * dense) {
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

template <typename T> static void pack_type(const bitmap_matrix & w, int n_threads, const bitmap_matrix & dst) {
    const int64_t words = mask_words(dst.cols);
    pack_masks<T>(w, n_threads, dst);
    dst.row_off[0] = 0;
    for (int64_t c = 0; c < dst.rows; c++) {
        dst.row_off[c + 1] = dst.row_off[c] + static_cast<uint32_t>(n_set(dst.masks + c * words, words));
    }
    pack_values<T>(w, n_threads, dst);
    memset(dst.values + static_cast<int64_t>(dst.row_off[dst.rows]) * int64_t(sizeof(T)), 0, VALUES_SLACK);
}

void columns_pack(const bitmap_matrix & w, int n_threads, const bitmap_matrix & dst) {
    if (value_nbytes(dst.type) == 4) {
        pack_type<uint32_t>(w, n_threads, dst);
    } else {
        pack_type<uint16_t>(w, n_threads, dst);
    }
}

template <typename T> static float norm_of(const bitmap_matrix & columns, int64_t column) {
    const T * values = reinterpret_cast<const T *>(columns.values);
    double    sum    = 0;
    for (uint32_t i = columns.row_off[column]; i < columns.row_off[column + 1]; i++) {
        const double value = static_cast<double>(float_of_value(values[i], columns.type));
        sum += value * value;
    }
    return static_cast<float>(std::sqrt(sum));
}

void columns_norms(const bitmap_matrix & columns, int n_threads, float * norms) {
    parallel_ranges(n_threads, columns.rows, [&](int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; c++) {
            norms[c] = value_nbytes(columns.type) == 4 ? norm_of<uint32_t>(columns, c) : norm_of<uint16_t>(columns, c);
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
