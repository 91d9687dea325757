// Products of matrices with quantized values, whose kernels round x to integers, against float64. A test's matrix M has
// rows(), cols(), `weights` (rows * cols doubles), `device` (gpu_layout) and INTEGERS, the largest of the integers.
#pragma once

#include "test-cuda.h"

// x16 of cuda_sparse_mul_mat_params, poisoned once.
inline void * x16_of_tests() {
    static const std::unique_ptr<void, cuda_free> memory = [] {
        void * made = nullptr;
        CUDA_CHECK(cudaMalloc(&made, CUDA_SPARSE_X16_NBYTES));
        CUDA_CHECK(cudaMemset(made, 0x5a, CUDA_SPARSE_X16_NBYTES));
        return cuda_memory(made);
    }();
    return memory.get();
}

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
    const bool               exact = !o.norm && random.unit() < 0.5;
    const int64_t            cols = w[0]->cols(), ldx = cols + random.range(0, 3);
    const std::vector<float> x = random_x(random, ldx, n, exact ? M::INTEGERS : 0);
    std::vector<float>       norm(static_cast<size_t>(o.norm ? cols : 0));
    for (float & v : norm) {
        v = static_cast<float>(random.unit() + 0.5);
    }
    guarded dx(ldx * n), dnorm(cols);
    std::copy(x.begin(), x.end(), &dx.at(0));
    std::copy(norm.begin(), norm.end(), &dnorm.at(0));
    dx.put();
    dnorm.put();
    cuda_sparse_mul_mat_params p = {};
    p.x                          = dx.data();
    p.ldx                        = ldx;
    p.n                          = n;
    p.norm_weight                = o.norm ? dnorm.data() : nullptr;
    p.norm_eps                   = 1e-5f;
    p.silu_mul                   = o.silu;
    p.x16                        = x16_of_tests();
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
            reference(*w[i], p.row_begin[i], m, &x[static_cast<size_t>(j * ldx)], norm, p.norm_eps, exact, want, bound);
            if (o.silu) {
                reference(*w[1], 0, m, &x[static_cast<size_t>(j * ldx)], norm, p.norm_eps, exact, up, up_bound);
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
