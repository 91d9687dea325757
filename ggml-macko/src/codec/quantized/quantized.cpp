// Quantized arrays: check and decode (FORMAT.md section 9).
#include "codec/quantized/quantized.h"
#include "codec/first-bad.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>

namespace macko {

// ---- checks; n: the non-zeros of the row ----

static int64_t row_nnz(const quantized_arrays & a, int64_t row) {
    return set_bits(a.row_bitmap(row), bitmap_row_nbytes(a.dense.cols));
}

int check_levels(const quantized_arrays & a) {
    const int n = 1 << a.bits, half = n / 2;
    for (int i = 0; i < n; i++) {
        const int  level = a.levels[i];
        const bool ok    = a.bits == 8 ? level == static_cast<int8_t>(i)
                                       : level != -128 && (i < half ? level > 0 : level < 0) &&
                                          (i % half == 0 || level > a.levels[i - 1]);
        if (!ok) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "level %d is %d, which breaks the order of the levels", i,
                        level);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_row_ptr(const quantized_arrays & a, int64_t codes) {
    if (a.row_ptr[0] != 0) {
        return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr starts with %d, not 0", a.row_ptr[0]);
    }
    for (int64_t r = 0; r < a.dense.rows; r++) {
        if (a.row_ptr[r] > a.row_ptr[r + 1]) {
            return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr decreases at row %lld (%d to %d)",
                        static_cast<long long>(r), a.row_ptr[r], a.row_ptr[r + 1]);
        }
    }
    const int64_t expected = codes_nbytes(a.row_ptr[a.dense.rows], a.bits);
    return codes == expected ? static_cast<int>(GGML_MACKO_STATUS_OK)
                             : fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr ends with %d, but codes has %lld bytes",
                                    a.row_ptr[a.dense.rows], static_cast<long long>(codes));
}

static int check_bitmap_row(const quantized_arrays & a, int64_t row, int64_t n) {
    const int64_t groups = a.row_ptr[row + 1] - a.row_ptr[row];
    if (has_bit_past_cols(a.row_bitmap(row), a.dense.cols)) {
        return fail(GGML_MACKO_STATUS_BAD_COLUMN, "row %lld: a bit past column %lld", static_cast<long long>(row),
                    static_cast<long long>(a.dense.cols - 1));
    }
    return groups == code_groups(n)
               ? static_cast<int>(GGML_MACKO_STATUS_OK)
               : fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row %lld: %lld bits, but %lld groups of codes",
                      static_cast<long long>(row), static_cast<long long>(n), static_cast<long long>(groups));
}

static int check_codes_row(const quantized_arrays & a, int64_t row, int64_t n) {
    const int64_t   end   = code_groups(n) * CODE_GROUP;
    const uint8_t * codes = a.row_codes(row);
    for (int64_t k = n; k < end; k++) {
        if (code_at(codes + k / CODE_GROUP * a.bits, a.bits, k % CODE_GROUP)) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "row %lld: code %lld, after the last non-zero, is not 0",
                        static_cast<long long>(row), static_cast<long long>(k));
        }
    }
    return a.bits == 8 && std::find(codes, codes + n, 128) != codes + n
               ? fail(GGML_MACKO_STATUS_NOT_CANONICAL, "row %lld has the code 128", static_cast<long long>(row))
               : static_cast<int>(GGML_MACKO_STATUS_OK);
}

static int check_factor(const quantized_arrays & a, int64_t row, int64_t) {
    const uint16_t factor    = a.factors[row];
    const bool     has_codes = a.row_ptr[row] < a.row_ptr[row + 1];
    if (has_codes ? factor >= MIN_FACTOR && factor <= MAX_FACTOR : factor == 0) {
        return GGML_MACKO_STATUS_OK;
    }
    const bool is_finite = (factor & 0x7f80) != 0x7f80;
    return fail(is_finite ? GGML_MACKO_STATUS_NOT_CANONICAL : GGML_MACKO_STATUS_NOT_FINITE,
                "row %lld: the factor %g is not %s", static_cast<long long>(row),
                static_cast<double>(float_of_value(factor, GGML_MACKO_TYPE_BF16)), has_codes ? "2^-90 ... 2^90" : "0");
}

// Windows without non-zeros have the code 0. If the dense type is F16, all values stay below BEYOND_F16.
static int check_scales_row(const quantized_arrays & a, int64_t row, int64_t) {
    const bool    is_f16  = a.dense.type == GGML_MACKO_TYPE_F16;
    const int64_t windows = a.windows();
    int64_t       k       = 0;
    for (int64_t w = 0; w < windows; w++) {
        const int64_t begin = w * a.window, end = std::min(begin + a.window, a.dense.cols);
        const int64_t n = set_bits(a.row_bitmap(row) + begin / 8, (end - begin + 7) / 8);
        const float   d = std::fabs(window_scale(a, row, w));
        if (n == 0 && a.row_scales(row)[w]) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL,
                        "row %lld: window %lld has no non-zeros, but scale code %d instead of 0",
                        static_cast<long long>(row), static_cast<long long>(w), a.row_scales(row)[w]);
        }
        if (!is_f16 || d * 127 < BEYOND_F16) {
            k += n;
            continue;
        }
        bool beyond = false;
        for_each_code(a, row, begin, end, &k, [&](int64_t, uint32_t code) {
            beyond = beyond || d * static_cast<float>(std::abs(a.levels[code])) >= BEYOND_F16;
        });
        if (beyond) {
            return fail(GGML_MACKO_STATUS_NOT_FINITE, "row %lld: window %lld has a value beyond F16, the dense type",
                        static_cast<long long>(row), static_cast<long long>(w));
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// Checks all rows; the message is that of the first bad row.
static int check_rows(const quantized_arrays & a, int n_threads,
                      int (*check)(const quantized_arrays &, int64_t, int64_t)) {
    const auto    check_row = [&](int64_t r) { return check(a, r, row_nnz(a, r)); };
    const int64_t row       = first_bad(a.dense.rows, n_threads, [&](int64_t r) { return check_row(r) != 0; });
    return row < a.dense.rows ? check_row(row) : static_cast<int>(GGML_MACKO_STATUS_OK);
}

static int check_end(const quantized_arrays & a, int64_t codes) {
    const auto is_zero = [](const uint8_t * bytes, int64_t begin, int64_t end) {
        return std::all_of(bytes + begin, bytes + end, [](uint8_t byte) { return byte == 0; });
    };
    const int64_t used = int64_t(a.row_ptr[a.dense.rows]) * a.bits, rows = a.dense.rows, cols = a.dense.cols;
    if (!is_zero(a.codes, used, codes)) {
        return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "codes are not zero after the last row");
    }
    return is_zero(a.bitmap, rows * bitmap_row_nbytes(cols), bitmap_nbytes(rows, cols))
               ? static_cast<int>(GGML_MACKO_STATUS_OK)
               : fail(GGML_MACKO_STATUS_NOT_CANONICAL, "the bitmap is not zero after the last row");
}

// Whether all rows pass all checks; *nnz: their non-zeros. One pass for all checks, because starting its threads takes
// longer than some of them.
static bool all_rows_pass(const quantized_arrays & a, int n_threads, int64_t * nnz) {
    std::atomic<int64_t> sum{ 0 };
    std::atomic<bool>    pass{ true };
    parallel_ranges(n_threads, a.dense.rows, [&](int64_t begin, int64_t end) {
        int64_t n_all = 0;
        for (int64_t r = begin; r < end; r++) {
            const int64_t n = row_nnz(a, r);
            n_all += n;
            for (const auto check : { check_bitmap_row, check_codes_row, check_factor, check_scales_row }) {
                if (check(a, r, n)) {
                    pass = false;
                    break; // the next check relies on this one
                }
            }
        }
        sum += n_all;
    });
    *nnz = sum;
    return pass;
}

int check_quantized(const quantized_arrays & a, int64_t codes, int n_threads, quantized_view * view) {
    TRY(check_levels(a));
    TRY(check_row_ptr(a, codes));
    int64_t    nnz  = 0;
    const bool pass = all_rows_pass(a, n_threads, &nnz);
    if (!pass) {
        TRY(check_rows(a, n_threads, check_bitmap_row));
    }
    if (nnz != a.dense.nnz) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "%lld non-zeros, but nnz is %lld", static_cast<long long>(nnz),
                    static_cast<long long>(a.dense.nnz));
    }
    if (!pass) {
        TRY(check_rows(a, n_threads, check_codes_row));
        TRY(check_rows(a, n_threads, check_factor));
        TRY(check_rows(a, n_threads, check_scales_row));
    }
    TRY(check_end(a, codes));
    view->arrays_ = a;
    return GGML_MACKO_STATUS_OK;
}

// ---- decode ----

template <typename T> static void decode_row(const quantized_arrays & a, int64_t row, T * dense) {
    memset(dense, 0, static_cast<size_t>(a.dense.cols) * sizeof(T));
    put_values(a, row, dense);
}

int quantized_view::for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const {
    const auto decode = [&](int64_t row, void * dense) {
        desc().type == GGML_MACKO_TYPE_F32 ? decode_row(arrays_, row, static_cast<uint32_t *>(dense))
                                           : decode_row(arrays_, row, static_cast<uint16_t *>(dense));
    };
    for_each_decoded_row(desc(), n_threads, decode, f);
    return GGML_MACKO_STATUS_OK;
}

// The distance to the nearest d * level, and the rounding of the product to the dense type. A value beyond twice the
// largest level cannot belong to its scale: searched scales cut off less than half of a value.
void quantized_view::error_bounds(int64_t row, const int32_t * columns, int64_t, int64_t n, const float * source,
                                  double * bounds) const {
    const double   rounding = rounding_error(desc().type);
    const int8_t * levels   = arrays_.levels;
    for (int64_t i = 0; i < n; i++) {
        const double d = static_cast<double>(window_scale(arrays_, row, columns[i] / arrays_.window));
        const double x = static_cast<double>(source[i]);
        const double q = std::max(-127.0, std::min(127.0, x / d));
        double       nearest;
        if (arrays_.bits == 8) {
            nearest = std::fabs(x - d * std::nearbyint(q));
        } else {
            nearest = std::fabs(x - d * levels[0]);
            for (int l = 1; l < 1 << arrays_.bits; l++) {
                nearest = std::min(nearest, std::fabs(x - d * levels[l]));
            }
        }
        bounds[i] = (std::fabs(x) + nearest) * rounding + 0x1p-24 * (desc().type == GGML_MACKO_TYPE_F16);
        if (std::fabs(x) <= 2 * 127 * std::fabs(d)) {
            bounds[i] += nearest + 1e-4 * std::fabs(d);
        }
    }
}

} // namespace macko
