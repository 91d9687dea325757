// The row operations (row-ops.h), written once for all instruction sets. Each kernels-*.cpp includes this file after
// kernels-impl.h, and the same rules apply: internal linkage, and no calls to functions of other headers. Vectors are
// GNU vectors with the operators +, *, / and comparisons.
#pragma once

namespace macko::cpu {
namespace {

typedef int32_t int_vec __attribute__((vector_size(sizeof(vec))));

// e^x to 4 units in the last place for -86 <= x <= 88; x beyond these bounds is clamped. e^x = 2^n e^r with |r| <= ln 2
// / 2, and e^r is the series up to r^7.
INLINE vec exp_vec(vec x) {
    const vec low = simd::set1(-86.0f), high = simd::set1(88.0f);
    x                = x < low ? low : x; // NaN passes
    x                = x > high ? high : x;
    const vec shift  = simd::set1(0x1.8p23f); // adding it rounds to an integer in the low bits
    const vec biased = simd::fma(x, simd::set1(0x1.715476p+0f), shift);
    const vec n      = biased - shift;
    // x - n ln 2, where ln 2 is the sum of two floats
    const vec r = simd::fma(n, simd::set1(-0x1.7f7d1cp-20f), simd::fma(n, simd::set1(-0x1.62e4p-1f), x));
    vec       p = simd::set1(1.0f / 5040);
    // an array, because the functions of std::initializer_list belong to another header
    constexpr float series[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f };
    for (const float c : series) {
        p = simd::fma(p, r, simd::set1(c));
    }
    return reinterpret_cast<vec>(reinterpret_cast<int_vec>(p) + (reinterpret_cast<int_vec>(biased) << 23));
}

// y = f(a, b) for all n elements, vector by vector; the remainder is copied to full vectors.
template <typename F> INLINE void map(const float * a, const float * b, float * y, int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        simd::store(y + i, f(simd::load(a + i), simd::load(b + i)));
    }
    if (i < n) {
        float last[3][W] = {};
        for (int64_t k = i; k < n; k++) {
            last[0][k - i] = a[k];
            last[1][k - i] = b[k];
        }
        simd::store(last[2], f(simd::load(last[0]), simd::load(last[1])));
        for (int64_t k = i; k < n; k++) {
            y[k] = last[2][k - i];
        }
    }
}

void add_rows(const float * a, const float * b, float * y, int64_t n) {
    map(a, b, y, n, [](vec p, vec q) { return simd::add(p, q); });
}

void mul_rows(const float * a, const float * b, float * y, int64_t n) {
    map(a, b, y, n, [](vec p, vec q) { return p * q; });
}

void silu_mul_rows(const float * a, const float * b, float * y, int64_t n) {
    map(a, b, y, n, [](vec p, vec q) { return p / (simd::set1(1.0f) + exp_vec(-p)) * q; });
}

void relu_mul_rows(const float * a, const float * b, float * y, int64_t n) {
    map(a, b, y, n, [](vec p, vec q) { return p > simd::zero() ? p * q : simd::zero(); });
}

void relu_row(const float * x, float * y, int64_t n) {
    map(x, x, y, n, [](vec p, vec) { return p > simd::zero() ? p : simd::zero(); });
}

void sqr_row(const float * x, float * y, int64_t n) {
    map(x, x, y, n, [](vec p, vec) { return p * p; });
}

void rms_norm_row(const float * x, float * y, int64_t n, float eps) {
    double  sums[8] = {};
    int64_t i       = 0;
    for (; i + 8 <= n; i += 8) {
        for (int k = 0; k < 8; k++) {
            sums[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
        }
    }
    for (; i < n; i++) {
        sums[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    const double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    const float  scale =
        static_cast<float>(1.0 / __builtin_sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
    const vec s = simd::set1(scale);
    map(x, x, y, n, [s](vec p, vec) { return p * s; });
}

constexpr row_ops ROW_OPS = { add_rows, mul_rows, silu_mul_rows, relu_mul_rows, relu_row, sqr_row, rms_norm_row };

// The set of the functions above and of kernels-impl.h, which is included before.
constexpr kernel_set make_set(const char * name, const kernel_costs & costs, const layout_traits & layouts,
                              const expanders & expand = {}, const span_ops * spans = &plain_span_ops) {
    return { name, prepare, MULTIPLY, QUANTIZED, add_columns, costs, ROW_OPS, layouts, expand, spans };
}

} // namespace
} // namespace macko::cpu
