// Products of matrices with quantized values, whose kernels round x to integers, against float64. A test's matrix M has
// rows(), cols(), `weights` (rows * cols doubles), `device` (gpu_layout) and INTEGERS, the largest of the integers.
#pragma once

#include "test-cuda.h"

// integers: 0, or the largest of the integers that a kernel rounds x to: x are such integers, which it keeps
inline std::vector<float> random_x(rng & random, int64_t ldx, int64_t n, int integers) {
    std::vector<float> x(static_cast<size_t>(ldx * n));
    for (float & v : x) {
        v = static_cast<float>((random.unit() - 0.5) * (random.unit() < 0.01 ? 40 : 2));
        v = integers ? static_cast<float>(random.range(-integers, integers)) : v;
    }
    for (int64_t j = 0; j < n && integers; j++) {
        x[static_cast<size_t>(j * ldx)] = static_cast<float>(random.unit() < 0.5 ? integers : -integers);
    }
    return x;
}

// Rows of W x in float64, and their error bound: float32 sums, and x rounded to multiples of max |x| / M::INTEGERS.
template <typename M>
void reference(const M & w, int64_t row0, int64_t rows, const float * x, const std::vector<float> & norm, float eps,
               bool exact, std::vector<double> & y, std::vector<double> & bound) {
    std::vector<double> column(static_cast<size_t>(w.cols()));
    double              squares = 0, largest = 0;
    for (size_t c = 0; c < column.size(); c++) {
        const double v = static_cast<double>(x[c]);
        squares += v * v;
        column[c] = norm.empty() ? v : v * static_cast<double>(norm[c]);
        largest   = std::max(largest, std::fabs(column[c]));
    }
    const double scale =
        norm.empty() ? 1 : 1 / std::sqrt(squares / static_cast<double>(column.size()) + static_cast<double>(eps));
    y.assign(static_cast<size_t>(rows), 0.0);
    bound = y;
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0, magnitude = 0, weights = 0;
        for (size_t c = 0; c < column.size(); c++) {
            const double weight = w.weights[static_cast<size_t>((row0 + r) * w.cols()) + c];
            sum += weight * column[c];
            magnitude += std::fabs(weight * column[c]);
            weights += std::fabs(weight);
        }
        y[static_cast<size_t>(r)] = sum * scale;
        bound[static_cast<size_t>(r)] =
            (MAX_ERROR * magnitude + (exact ? 0 : weights * largest / (2 * M::INTEGERS) * 1.0001)) * scale + 1e-30;
    }
}

template <typename M>
void check_product(rng & random, const std::vector<const M *> & w, int64_t n, const options & o,
                   const std::string & name) {
    const bool                 exact = !o.norm && random.unit() < 0.5;
    const int64_t              cols = w[0]->cols(), ldx = cols + random.range(0, 3);
    const std::vector<float>   x = random_x(random, ldx, n, exact ? M::INTEGERS : 0);
    product_inputs             in(random, x, cols, o);
    cuda_sparse_mul_mat_params p = in.params(ldx, n, o);
    p.x16                        = x16_memory();
    std::vector<const gpu_layout *> devices;
    for (const M * m : w) {
        devices.push_back(&m->device);
    }
    outputs out(random, devices, o, p);
    CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
    out.get(name);
    for (size_t i = 0; i < out.count(); i++) {
        const int64_t m         = out.rows(i);
        double        worst     = 0;
        int64_t       worst_row = 0, worst_column = 0;
        for (int64_t j = 0; j < n; j++) {
            std::vector<double> want, bound, up, up_bound;
            reference(*w[i], p.row_begin[i], m, &x[static_cast<size_t>(j * ldx)], in.norm, p.norm_eps, exact, want,
                      bound);
            if (o.silu) {
                reference(*w[1], 0, m, &x[static_cast<size_t>(j * ldx)], in.norm, p.norm_eps, exact, up, up_bound);
            }
            for (int64_t r = 0; r < m; r++) {
                const size_t k        = static_cast<size_t>(r);
                double       expected = want[k], limit = bound[k];
                if (o.silu) { // |silu'| <= 1.1
                    const double gate = want[k], s = gate / (1 + std::exp(-gate));
                    expected = s * up[k];
                    limit    = 1.1 * bound[k] * std::fabs(up[k]) + up_bound[k] * (std::fabs(s) + 1.1 * bound[k]) +
                            MAX_ERROR * std::fabs(expected) + 1e-25;
                }
                limit += MAX_ERROR * (o.bias + o.residual);
                const double error =
                    std::fabs(static_cast<double>(out.at(i, r, j)) - expected - out.added(i, r, j)) / limit;
                if (!(error <= worst)) { // NaN lands here too
                    worst = error, worst_row = r, worst_column = j;
                }
            }
        }
        CHECK(worst <= 1, "%s: matrix %zu, column %lld, row %lld: %.3g times the bound%s", name.c_str(), i,
              static_cast<long long>(worst_column), static_cast<long long>(worst_row), worst,
              exact ? " (exact x)" : "");
    }
}

// Checks experts of `rows` rows each, with ids in device memory, including ids out of range.
template <typename M> void check_experts(rng & random, const M & w, int64_t rows, int64_t ldx, uint64_t seed) {
    const int64_t            cols   = w.cols();
    const std::vector<float> values = random_x(random, cols, N_EXPERT_COLUMNS, M::INTEGERS);
    guarded                  x(cols * N_EXPERT_COLUMNS), y(rows * N_EXPERT_COLUMNS);
    std::copy(values.begin(), values.end(), &x.at(0));
    x.put();
    multiply_experts(w.device, x, ldx, y, x16_memory());
    for (int64_t j = 0; j < N_EXPERT_COLUMNS; j++) {
        std::vector<double> want(static_cast<size_t>(rows), 0.0), bound(static_cast<size_t>(rows), 1e-30);
        if (expert_row(j, rows) >= 0) {
            reference(w, expert_row(j, rows), rows, &values[static_cast<size_t>(j * ldx)], {}, 0, true, want, bound);
        }
        for (int64_t r = 0; r < rows; r++) {
            const double error = std::fabs(static_cast<double>(y.at(j * rows + r)) - want[static_cast<size_t>(r)]);
            CHECK(error <= bound[static_cast<size_t>(r)], "experts, seed %llu, column %lld, row %lld: off by %.3g",
                  static_cast<unsigned long long>(seed), static_cast<long long>(j), static_cast<long long>(r), error);
        }
    }
}

// Checks that NaN and infinities in the last of n columns do not become finite, and that zeros and tiny x do not become
// NaN.
template <typename M> void check_odd_x(rng & random, const M & w, int64_t n) {
    const int64_t rows = w.rows(), cols = w.cols();
    for (const float odd : { NAN, INFINITY, 0.0f, 0x1p-120f, 0x1p-90f, 0x1p100f }) {
        guarded x(cols * n), y(rows * n);
        for (int64_t i = 0; i < cols * n; i++) {
            x.at(i) = std::isfinite(odd) ? odd : static_cast<float>(random.unit());
        }
        x.at(cols * n - cols / 2) = odd; // in the last column
        x.put();
        cuda_sparse_mul_mat_params p = plain_product(w.device, x, y, n);
        p.x16                        = x16_memory();
        CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
        y.get();
        for (int64_t r = 0; r < rows; r++) {
            const float got  = y.at((n - 1) * rows + r);
            double      want = 0;
            for (int64_t c = 0; c < cols; c++) {
                want += w.weights[static_cast<size_t>(r * cols + c)] * static_cast<double>(odd);
            }
            CHECK(std::isfinite(odd)
                      ? std::fabs(static_cast<double>(got) - want) <= 1e-2 * static_cast<double>(odd) + 0x1p-100
                      : !std::isfinite(got),
                  "x of %g, n %lld, row %lld: %g", static_cast<double>(odd), static_cast<long long>(n),
                  static_cast<long long>(r), static_cast<double>(got));
        }
    }
}
