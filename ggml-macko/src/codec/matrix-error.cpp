#include "codec/matrix-error.h"
#include "codec/floats.h"
#include "codec/nonzero.h"
#include "codec/team.h"

#include <algorithm>
#include <cmath>

namespace macko {

namespace {

struct row_error {
    double  lost, power;                   // sums of error^2 and value^2
    double  weighted_lost, weighted_power; // the same sums, weighted
    double  max_error;
    int32_t not_zero, too_large; // column of the first such fault, or -1
    bool    is_equal;
};

// The dense matrix, and the rule for its zeros.
template <typename T> struct dense_source {
    const T *            elements;
    int64_t              cols;
    int32_t              type;
    T                    significant; // an element with none of these bits is a zero
    std::vector<int64_t> first;       // non-zeros before a row
};

template <typename T> constexpr T NOT_SIGN = static_cast<T>(~T(0)) >> 1;

// Counts the non-zeros of each row. -0.0 counts only if the encoded matrix, which has nnz non-zeros, has kept it.
template <typename T>
dense_source<T> count_nonzeros(const T * elements, const macko_desc & desc, int64_t nnz, int n_threads) {
    dense_source<T> s = { elements, desc.cols, desc.type, static_cast<T>(~T(0)), {} };
    for (const T significant : { static_cast<T>(~T(0)), NOT_SIGN<T> }) {
        s.significant = significant;
        s.first.assign(static_cast<size_t>(desc.rows) + 1, 0);
        parallel_ranges(n_threads, desc.rows, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) {
                const T * row = elements + r * desc.cols;
                int64_t   n   = 0;
                for (int64_t c = 0; c < desc.cols; c++) {
                    n += (row[c] & significant) != 0;
                }
                s.first[static_cast<size_t>(r) + 1] = n;
            }
        });
        for (size_t r = 1; r < s.first.size(); r++) {
            s.first[r] += s.first[r - 1];
        }
        if (s.first.back() == nnz) {
            break;
        }
    }
    return s;
}

// Adds the errors of up to 64 elements of row r. k: index of their first non-zero. Returns the number of their
// non-zeros. has_bounds: the non-zeros of source and the values of view correspond one to one.
template <typename T>
int64_t measure_columns(const codec_view & view, const dense_source<T> & source, int64_t r, int64_t begin,
                        const T * decoded, const float * weights, int64_t k, bool has_bounds, row_error * e) {
    const T *     row = source.elements + r * source.cols + begin;
    const int64_t n   = std::min<int64_t>(64, source.cols - begin);
    float         values[64];
    double        errors[64], bounds[64];
    int32_t       columns[64];
    int64_t       n_values = 0;
    uint64_t      mask     = n == 64 ? nonzero_mask_64(row) | nonzero_mask_64(decoded)
                                     : nonzero_mask_any(row, n) | nonzero_mask_any(decoded, n);
    for (; mask; mask &= mask - 1) {
        const int    c     = __builtin_ctzll(mask);
        const float  want  = float_of_value(row[c], source.type);
        const double value = static_cast<double>(want), w = weights ? static_cast<double>(weights[begin + c]) : 1;
        const double got   = static_cast<double>(float_of_value(decoded[c], source.type));
        const double error = std::fabs(got - value);
        const auto   col   = static_cast<int32_t>(begin + c);
        if (row[c] & source.significant) {
            values[n_values]    = want;
            errors[n_values]    = error;
            columns[n_values++] = col;
        } else if (got != 0 && e->not_zero < 0) {
            e->not_zero = col;
        }
        e->is_equal = e->is_equal && row[c] == decoded[c];
        e->lost += error * error;
        e->power += value * value;
        e->weighted_lost += w * (error * error);
        e->weighted_power += w * (value * value);
        e->max_error = std::max(e->max_error, error);
    }
    if (has_bounds && e->too_large < 0) {
        view.error_bounds(r, columns, k, n_values, values, bounds);
        for (int64_t i = n_values - 1; i >= 0; i--) {
            e->too_large = errors[i] <= bounds[i] ? e->too_large : columns[i];
        }
    }
    return n_values;
}

template <typename T>
row_error measure_row(const codec_view & view, const dense_source<T> & source, int64_t r, const T * decoded,
                      const float * weights, bool has_bounds) {
    row_error e = { 0, 0, 0, 0, 0, -1, -1, true };
    int64_t   k = source.first[static_cast<size_t>(r)];
    for (int64_t begin = 0; begin < source.cols; begin += 64) {
        k += measure_columns(view, source, r, begin, decoded + begin, weights, k, has_bounds, &e);
    }
    return e;
}

// Adds the totals of the rows, in row order, and finds the worst row. Two kinds of rows do not compete: a row with
// fewer than 64 non-zeros, whose error is mostly chance; and a row below what sums in F32 resolve next to the largest
// row, an untrained token for example.
ggml_macko_error sum_rows(const std::vector<row_error> & rows, const std::vector<int64_t> & first) {
    ggml_macko_error out     = {};
    double           sum_rms = 0, least = 0, lost = 0, power = 0;
    int64_t          n = 0;
    out.is_equal       = true;
    for (const row_error & e : rows) {
        least = std::max(least, e.power * 0x1p-48);
    }
    for (const row_error & e : rows) {
        out.is_equal  = out.is_equal && e.is_equal;
        out.max_error = std::max(out.max_error, e.max_error);
        lost += e.lost;
        power += e.power;
        out.weighted_error += e.weighted_lost;
        out.weighted_power += e.weighted_power;
        if (e.power > 0) {
            const auto   r   = static_cast<size_t>(&e - rows.data());
            const double rms = std::sqrt(e.lost / e.power);
            if (e.power >= least && first[r + 1] - first[r] >= 64 && rms > out.rms_relative_max) {
                out.rms_relative_max = rms;
                out.row              = static_cast<int64_t>(r);
            }
            sum_rms += rms;
            n++;
        }
    }
    out.rms_relative = n > 0 ? sum_rms / static_cast<double>(n) : 0;
    out.rms_total    = power > 0 ? std::sqrt(lost / power) : 0;
    return out;
}

void find_fault(const std::vector<row_error> & rows, bool has_bounds, ggml_macko_error * out) {
    const auto find = [&](int32_t row_error::* column, ggml_macko_fault fault) {
        const auto bad = std::find_if(rows.begin(), rows.end(), [&](const row_error & e) { return e.*column >= 0; });
        if (out->fault == GGML_MACKO_FAULT_NONE && bad != rows.end()) {
            out->fault = fault;
            out->row   = bad - rows.begin();
            out->col   = (*bad).*column;
        }
    };
    if (!has_bounds) {
        out->fault = GGML_MACKO_FAULT_NNZ;
        return;
    }
    find(&row_error::not_zero, GGML_MACKO_FAULT_NOT_ZERO);
    find(&row_error::too_large, GGML_MACKO_FAULT_TOO_LARGE);
}

template <typename T>
int measure(const codec_view & view, const T * dense, const float * weights, int64_t n_weights, int n_threads,
            ggml_macko_error * out) {
    const macko_desc &     desc       = view.desc();
    const dense_source<T>  source     = count_nonzeros(dense, desc, desc.nnz, n_threads);
    const bool             has_bounds = source.first.back() == desc.nnz;
    std::vector<row_error> rows(static_cast<size_t>(desc.rows));
    const int              status = view.for_each_row(n_threads, [&](int64_t r, const void * decoded) {
        const float * w = weights ? weights + r * n_weights / desc.rows * desc.cols : nullptr;
        rows[static_cast<size_t>(r)] = measure_row(view, source, r, static_cast<const T *>(decoded), w, has_bounds);
    });
    if (status) {
        return status;
    }
    *out           = sum_rows(rows, source.first);
    out->n_nonzero = source.first.back();
    find_fault(rows, has_bounds, out);
    return GGML_MACKO_STATUS_OK;
}

} // namespace

int measure_error(const codec_view & view, const void * dense, const float * weights, int64_t n_weights, int n_threads,
                  ggml_macko_error * out) {
    return view.desc().type == GGML_MACKO_TYPE_F32
               ? measure(view, static_cast<const uint32_t *>(dense), weights, n_weights, n_threads, out)
               : measure(view, static_cast<const uint16_t *>(dense), weights, n_weights, n_threads, out);
}

} // namespace macko
