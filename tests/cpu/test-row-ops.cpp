// Compares the row operations of each kernel set, and ROPE, with float64, element by element: odd lengths, results that
// overwrite an operand, and extreme arguments. All memory ends at a page without access.
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/rope.h"
#include "guarded.h"
#include "test.h"

#include <cmath>
#include <limits>
#include <vector>

using namespace macko;
using namespace macko::cpu;

static constexpr double EPSILON = 0x1p-24; // half a unit in the last place, relative

// The operands a and b and the result y of one call. y_is: 0 separate memory, filled with NaN; 1 a; 2 b.
struct rows {
    guarded a, b, other;
    float * y;

    rows(rng & r, int64_t n, int y_is)
        : a(n * 4),
          b(n * 4),
          other(n * 4),
          y(y_is == 0   ? other.floats()
            : y_is == 1 ? a.floats()
                        : b.floats()) {
        for (int64_t i = 0; i < n; i++) {
            const double scale = std::ldexp(1, static_cast<int>(r.range(-12, 5)));
            a.floats()[i]      = static_cast<float>((r.unit() * 2 - 1) * scale * 3);
            b.floats()[i]      = static_cast<float>((r.unit() * 2 - 1) * scale);
        }
    }
    bool intact() const { return a.intact() && b.intact() && other.intact(); }
};

static double silu(double x) { return x / (1 + std::exp(-x)); }

// The error of e^x is at most 4 units in the last place, that of the division and of the product half a unit each.
static constexpr double SILU_BOUND = 6 * 2 * EPSILON;
// Below a = -88 the result is at most |a b| e^-88, with |a| up to 96 and |b| up to 32.
static constexpr double SILU_FLOOR = 96 * 32 * 6.1e-39;

template <typename F, typename G>
static void check(rng & r, const kernel_set & set, const char * name, int64_t n, double bound, double floor, F call,
                  G expected) {
    for (const int y_is : { 0, 1, 2 }) {
        rows                m(r, n, y_is);
        std::vector<double> want(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; i++) {
            want[static_cast<size_t>(i)] = expected(m, i);
        }
        call(m);
        for (int64_t i = 0; i < n; i++) {
            const double w = want[static_cast<size_t>(i)], got = static_cast<double>(m.y[i]);
            CHECK(std::fabs(got - w) <= bound * std::fabs(w) + floor, "%s %s, %ld of %ld: %.9g, not %.9g", set.name,
                  name, (long)i, (long)n, got, w);
        }
        CHECK(m.intact(), "%s %s, n = %ld", set.name, name, (long)n);
    }
}

static void check_rows(rng & r, const kernel_set & set, int64_t n) {
    const auto a = [](const rows & m, int64_t i) { return static_cast<double>(m.a.floats()[i]); };
    const auto b = [](const rows & m, int64_t i) { return static_cast<double>(m.b.floats()[i]); };
    check(
        r, set, "add", n, EPSILON, 1e-45, [&](rows & m) { set.rows.add(m.a.floats(), m.b.floats(), m.y, n); },
        [&](const rows & m, int64_t i) { return a(m, i) + b(m, i); });
    check(
        r, set, "mul", n, EPSILON, 1e-45, [&](rows & m) { set.rows.mul(m.a.floats(), m.b.floats(), m.y, n); },
        [&](const rows & m, int64_t i) { return a(m, i) * b(m, i); });
    check(
        r, set, "silu_mul", n, SILU_BOUND, SILU_FLOOR,
        [&](rows & m) { set.rows.silu_mul(m.a.floats(), m.b.floats(), m.y, n); },
        [&](const rows & m, int64_t i) { return silu(a(m, i)) * b(m, i); });
    check(
        r, set, "relu_mul", n, EPSILON, 1e-45, [&](rows & m) { set.rows.relu_mul(m.a.floats(), m.b.floats(), m.y, n); },
        [&](const rows & m, int64_t i) { return a(m, i) > 0 ? a(m, i) * b(m, i) : 0; });
    check(
        r, set, "relu", n, 0, 0, [&](rows & m) { set.rows.relu(m.a.floats(), m.y, n); },
        [&](const rows & m, int64_t i) { return a(m, i) > 0 ? a(m, i) : 0; });
    check(
        r, set, "sqr", n, EPSILON, 1e-45, [&](rows & m) { set.rows.sqr(m.a.floats(), m.y, n); },
        [&](const rows & m, int64_t i) { return a(m, i) * a(m, i); });
    const float eps = 1e-5f;
    check(
        r, set, "rms_norm", n, 3 * EPSILON, 1e-45, [&](rows & m) { set.rows.rms_norm(m.a.floats(), m.y, n, eps); },
        [&](const rows & m, int64_t i) {
            double sum = 0;
            for (int64_t k = 0; k < n; k++) {
                sum += a(m, k) * a(m, k);
            }
            return a(m, i) / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps));
        });
}

static void check_silu(const kernel_set & set) {
    const float one[] = { 1 };
    for (int k = -3000; k <= 3000; k++) {
        const float x[] = { static_cast<float>(k) * 0.03f }; // |x| to 90
        float       y;
        set.rows.silu_mul(x, one, &y, 1);
        const double want = silu(static_cast<double>(x[0]));
        CHECK(std::fabs(static_cast<double>(y) - want) <= SILU_BOUND * std::fabs(want) + SILU_FLOOR,
              "%s silu(%g): %.9g, not %.9g", set.name, x[0], y, want);
    }
    const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const struct {
        float x, y;
    } ends[] = { { largest, largest }, { inf, inf }, { 0, 0 }, { -1000, 0 } };
    for (const auto & e : ends) {
        float y;
        set.rows.silu_mul(&e.x, one, &y, 1);
        CHECK(y == e.y || std::fabs(y) < 1e-34f, "%s silu(%g): %g", set.name, e.x, y);
    }
    float y = 0;
    set.rows.silu_mul(&nan, one, &y, 1);
    CHECK(std::isnan(y), "%s silu(NaN): %g", set.name, y);
    set.rows.rms_norm(&nan, &y, 1, 1e-5f);
    CHECK(std::isnan(y), "%s norm of NaN: %g", set.name, y);
}

// A closed gate gives +0 for any input, even if the input is not finite or was not computed.
static void check_closed_gate(const kernel_set & set) {
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (const float gate : { -0.0f, 0.0f, -1e-45f, -inf, nan }) {
        for (const float up : { -1.0f, 1.0f, inf, -inf, nan }) {
            float y = -1;
            set.rows.relu_mul(&gate, &up, &y, 1);
            CHECK(y == 0 && !std::signbit(y), "%s relu(%g) * %g: %g", set.name, gate, up, y);
        }
    }
    float y = 0;
    set.rows.relu_mul(&inf, &nan, &y, 1);
    CHECK(std::isnan(y), "%s relu(inf) * NaN: %g", set.name, y);
    for (const float x : { -0.0f, -1.0f, -inf, nan }) {
        y = -1;
        set.rows.relu(&x, &y, 1);
        CHECK(y == 0 && !std::signbit(y), "%s relu(%g): %g", set.name, x, y);
    }
    set.rows.sqr(&nan, &y, 1);
    CHECK(std::isnan(y), "%s square of NaN: %g", set.name, y);
}

// The angle is the product of i + 3 rounded factors; the error of sine and cosine is at most that of the angle plus 2
// units in the last place.
static void check_rope(rng & r, bool halves, bool with_factors, int64_t n_dims, int64_t n) {
    std::vector<float> factors(static_cast<size_t>(n_dims / 2));
    for (float & f : factors) {
        f = static_cast<float>(1 + r.unit() * 31);
    }
    const rope_params p = { n_dims, halves, 10000.0f, 0.5f, 1.25f, with_factors ? factors.data() : nullptr };
    for (const int32_t position : { 0, 1, 77, 4095 }) {
        for (const int y_is : { 0, 1 }) {
            rows                m(r, n, y_is);
            std::vector<float>  angles(static_cast<size_t>(n_dims));
            std::vector<double> want(m.a.floats(), m.a.floats() + n), bound(static_cast<size_t>(n));
            for (int64_t i = 0; i < n_dims / 2; i++) {
                const auto   first = static_cast<size_t>(halves ? i : 2 * i);
                const size_t other = first + static_cast<size_t>(halves ? n_dims / 2 : 1);
                const double angle = 0.5 * position *
                                     std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(n_dims)) /
                                     (with_factors ? static_cast<double>(factors[static_cast<size_t>(i)]) : 1);
                const double a = want[first], b = want[other];
                want[first]  = 1.25 * (a * std::cos(angle) - b * std::sin(angle));
                want[other]  = 1.25 * (a * std::sin(angle) + b * std::cos(angle));
                bound[first] = bound[other] =
                    1.25 * (std::fabs(a) + std::fabs(b)) * EPSILON * (6 + 2 * angle * static_cast<double>(2 * i + 3));
            }
            rope_angles(p, position, angles.data());
            rope_row(p, angles.data(), m.a.floats(), m.y, n);
            for (int64_t i = 0; i < n; i++) {
                const auto   at  = static_cast<size_t>(i);
                const double got = static_cast<double>(m.y[i]);
                CHECK(std::fabs(got - want[at]) <= bound[at], "rope %d %d, position %d, %ld of %ld: %.9g, not %.9g",
                      halves, with_factors, position, (long)i, (long)n, got, want[at]);
            }
            CHECK(m.intact(), "rope, n = %ld", (long)n);
        }
    }
}

TEST(rows_are_within_the_error_bound) {
    rng r(20261121);
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        for (const int64_t n : { 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 257, 1000, 4096, 11008 }) {
            check_rows(r, *set, n);
        }
    }
}

TEST(silu_is_right_where_the_exponential_is_clamped) {
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        check_silu(*set);
    }
}

TEST(closed_gate_gives_zero) {
    for (int i = 0; const kernel_set * set = supported_kernel_set(i); i++) {
        check_closed_gate(*set);
    }
}

TEST(rope_is_within_the_error_bound) {
    rng r(20261122);
    for (const bool halves : { false, true }) {
        for (const bool with_factors : { false, true }) {
            check_rope(r, halves, with_factors, 64, 64);
            check_rope(r, halves, with_factors, 20, 35);
            check_rope(r, halves, with_factors, 2, 2);
        }
    }
}

int main(int argc, char ** argv) { return test_main("test-row-ops", argc, argv); }
