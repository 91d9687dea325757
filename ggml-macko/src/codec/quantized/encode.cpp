// Dense matrices to quantized arrays (FORMAT.md section 9): the levels of a matrix, the scales of its windows, and the
// codes. Compiled without floating-point contraction, so that every CPU gets the same bytes.
//
// A window is normalized: its largest magnitude is 1, and the largest level is 127, so scales are about 1 / 127.
// Vectors hold the sums of 16 tried scales.
#include "codec/nonzero.h"
#include "codec/quantized/quantized.h"
#include "codec/team.h"
#include "platform/compiler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>

namespace macko {

namespace {

using float16 = float __attribute__((vector_size(64)));

constexpr int LANES    = 16;
constexpr int TOP      = 127;     // largest level
constexpr int TOP_CODE = 127;     // magnitude of the largest scale code, which the largest window of a row gets
constexpr int SAMPLE   = 1 << 16; // non-zeros that decide the levels
constexpr int TURNS    = 48;      // of fitting the levels
constexpr int SEARCHES = 4;       // turns between two searches for scales
// places of the largest value, as shares of the largest level
constexpr float TRIED[8] = { .72f, .78f, .84f, .9f, .95f, 1.0f, 1.06f, 1.14f };

#define ALWAYS_INLINE inline __attribute__((always_inline))

// The levels of a matrix, ascending, as the sum of steps that begin at places.
struct level_table {
    int   n; // levels; 256: all integers from -127 to 127
    float first, place[31], step[31];

    explicit level_table(const std::vector<float> & levels) : n(static_cast<int>(levels.size())), first(levels[0]) {
        for (size_t k = 0; k + 1 < levels.size() && k < 31; k++) {
            place[k] = (levels[k] + levels[k + 1]) / 2;
            step[k]  = levels[k + 1] - levels[k];
        }
    }
};

// The non-zeros of a window: x in units of their largest magnitude, and their weights in units of the largest weight.
struct window_values {
    int64_t n;
    float   largest;
    float * x;
    float * weights;
};

// ---- vectors ----

// 16 floats as vectors of the CPU: gcc would compare longer vectors element by element.
template <int WIDTH> struct floats {
    typedef float        vec __attribute__((vector_size(WIDTH * 4)));
    typedef int32_t      ints __attribute__((vector_size(WIDTH * 4)));
    static constexpr int PARTS = LANES / WIDTH;
    vec                  part[size_t(PARTS)];
};

// Calls f(begin) ... f(begin + N - 1), unrolled.
template <int N, typename F> ALWAYS_INLINE void unroll(int begin, const F & f) {
    int i = begin;
#pragma GCC unroll 8
    for (; i < begin + N; i++) {
        f(i);
    }
}
template <typename V, typename F> ALWAYS_INLINE void for_each_part(const F & f) { unroll<V::PARTS>(0, f); }
// f(k) for the steps between 8, 16 or 32 levels, in order
template <typename F> ALWAYS_INLINE void for_each_step(int n_levels, const F & f) {
    unroll<7>(0, f);
    for (int first = 7; first < n_levels - 1; first += 8) {
        unroll<8>(first, f);
    }
}

// The level nearest to y. INTEGERS: all integers from -127 to 127 are levels.
template <bool INTEGERS, typename V> ALWAYS_INLINE void set_nearest(const level_table & t, const V & y, V * q) {
    using vec = typename V::vec;
    if constexpr (INTEGERS) {
        constexpr float WHOLE = 0x1.8p23f; // adding it rounds to a whole number, ties to even
        for_each_part<V>([&](int i) __attribute__((always_inline)) {
            const vec low = y.part[i] > float(TOP) ? vec{} + float(TOP) : y.part[i];
            q->part[i]    = ((low < float(-TOP) ? vec{} - float(TOP) : low) + WHOLE) - WHOLE;
        });
    } else {
        V level;
        for_each_part<V>([&](int i) __attribute__((always_inline)) { level.part[i] = vec{} + t.first; });
        for_each_step(t.n, [&](int k) __attribute__((always_inline)) {
            for_each_part<V>([&](int i) __attribute__((always_inline)) {
                level.part[i] += y.part[i] >= t.place[k] ? vec{} + t.step[k] : vec{};
            });
        });
        *q = level;
    }
}

// The levels for x * inverse.
template <bool INTEGERS, typename V>
ALWAYS_INLINE void set_levels(const level_table & t, float x, const V & inverse, V * q) {
    V y;
    for_each_part<V>([&](int i) __attribute__((always_inline)) { y.part[i] = x * inverse.part[i]; });
    set_nearest<INTEGERS>(t, y, q);
}

// Sums of w x q and w q^2 for the levels q that the scales 1 / inverse lead to.
struct scale_sums {
    float16 wxq, wqq;
};
template <typename V>
ALWAYS_INLINE void sums_with(const window_values & v, const level_table & t, const float16 & inverse,
                             scale_sums * out) {
    V all, wxq = {}, wqq = {};
    memcpy(&all, &inverse, sizeof(all));
    for (int64_t n = 0; n < v.n; n++) {
        V q;
        set_levels<false>(t, v.x[n], all, &q);
        for_each_part<V>([&](int i) __attribute__((always_inline)) {
            wxq.part[i] += v.weights[n] * v.x[n] * q.part[i];
            wqq.part[i] += v.weights[n] * (q.part[i] * q.part[i]);
        });
    }
    memcpy(&out->wxq, &wxq, sizeof(wxq));
    memcpy(&out->wqq, &wqq, sizeof(wqq));
}

// Sums of w (x - scale q)^2.
template <bool INTEGERS, typename V>
ALWAYS_INLINE void errors_with(const window_values & v, const level_table & t, const float16 & scale,
                               const float16 & inverse, float16 * out) {
    V scales, all, sum = {};
    memcpy(&scales, &scale, sizeof(scales));
    memcpy(&all, &inverse, sizeof(all));
    for (int64_t n = 0; n < v.n; n++) {
        V q;
        set_levels<INTEGERS>(t, v.x[n], all, &q);
        for_each_part<V>([&](int i) __attribute__((always_inline)) {
            const auto e = v.x[n] - scales.part[i] * q.part[i];
            sum.part[i] += v.weights[n] * (e * e);
        });
    }
    memcpy(out, &sum, sizeof(sum));
}

// The index of the nearest level, ascending, for each value.
template <bool INTEGERS, typename V>
ALWAYS_INLINE void numbers_with(const float * x, int64_t n, float inverse, const level_table & t, uint8_t * numbers) {
    using ints = typename V::ints;
    for (int64_t at = 0; at < n; at += LANES) {
        V    y;
        ints number[size_t(V::PARTS)] = {};
        memcpy(&y, x + at, sizeof(y)); // the buffer is longer
        for_each_part<V>([&](int i) __attribute__((always_inline)) { y.part[i] *= inverse; });
        if constexpr (INTEGERS) {
            V q;
            set_nearest<INTEGERS>(t, y, &q);
            for_each_part<V>([&](int i) __attribute__((always_inline)) {
                number[i] = __builtin_convertvector(q.part[i], ints) + 128;
            });
        } else {
            for_each_step(t.n, [&](int k) __attribute__((always_inline)) {
                for_each_part<V>([&](int i) __attribute__((always_inline)) { number[i] -= y.part[i] >= t.place[k]; });
            });
        }
        int32_t all[LANES];
        memcpy(all, number, sizeof(all));
        for (int i = 0; i < LANES; i++) {
            numbers[at + i] = static_cast<uint8_t>(all[i]);
        }
    }
}

// Functions with vectors of the CPU's width. Only sets of 8, 16 and 32 levels have scales to try.
#define WITH_WIDTH(WIDTH, ATTRIBUTE)                                                                                 \
    ATTRIBUTE void sums_of(const window_values & v, const level_table & t, const float16 & inverse,                  \
                           scale_sums * out) {                                                                       \
        sums_with<floats<WIDTH>>(v, t, inverse, out);                                                                \
    }                                                                                                                \
    ATTRIBUTE void errors_of(const window_values & v, const level_table & t, const float16 & scale,                  \
                             const float16 & inverse, float16 * out) {                                               \
        t.n == 256 ? errors_with<true, floats<WIDTH>>(v, t, scale, inverse, out)                                     \
                   : errors_with<false, floats<WIDTH>>(v, t, scale, inverse, out);                                   \
    }                                                                                                                \
    ATTRIBUTE void numbers_of(const float * x, int64_t n, float inverse, const level_table & t, uint8_t * numbers) { \
        t.n == 256 ? numbers_with<true, floats<WIDTH>>(x, n, inverse, t, numbers)                                    \
                   : numbers_with<false, floats<WIDTH>>(x, n, inverse, t, numbers);                                  \
    }
MACKO_WITH_WIDTHS(WITH_WIDTH)

// ---- scales ----

// The best scale of each sign, 0 if there is none, and which of the two is better. Normalized.
struct found_scales {
    float d[2];
    int   better;
};

// Least magnitude of a scale: the outermost level represents half of the window's largest magnitude, and some more for
// the rounding of factors. error_bounds() accepts no smaller scale. Without the limit, least squares ignore an outlier.
constexpr float LEAST_SCALE = 0.51f / TOP;

// d[s] are the best scales for the levels that 8 tried scales of sign s lead to.
found_scales best_of(const window_values & v, const level_table & t, const float16 & inverse) {
    scale_sums   sums;
    double       gain[2] = {};
    found_scales found   = {};
    sums_of(v, t, inverse, &sums);
    for (int l = 0; l < LANES; l++) {
        const double wxq = static_cast<double>(sums.wxq[l]), wqq = static_cast<double>(sums.wqq[l]);
        const double d = wxq / wqq; // NaN if all weights are 0
        const int    s = l / 8;
        if (wxq * d > gain[s] && (d < 0) == (s == 1)) {
            gain[s]    = wxq * d; // reduction of the sum of w x^2
            found.d[s] = std::copysign(std::max(static_cast<float>(std::fabs(d)), LEAST_SCALE), s ? -1.0f : 1.0f);
        }
    }
    found.better = gain[1] > gain[0];
    return found;
}

found_scales search_scales(const window_values & v, const level_table & t) {
    if (t.n == 256) {
        return { { 1.0f / TOP, -1.0f / TOP }, 0 };
    }
    float16 inverse = {};
    for (int l = 0; l < 8; l++) {
        inverse[l]     = TOP / TRIED[l];
        inverse[l + 8] = -inverse[l];
    }
    found_scales found = best_of(v, t, inverse);
    for (int s = 0; s < 2; s++) {
        found.d[s] = found.d[s] != 0 ? found.d[s] : (s ? -1.0f : 1.0f) / TOP;
    }
    return found;
}

// Improves scales: the best of 16 near them.
float improve_scale(const window_values & v, const level_table & t, const found_scales & found) {
    constexpr float NEAR[8] = { .88f, .92f, .95f, .98f, 1.0f, 1.03f, 1.06f, 1.1f };
    float16         inverse = {};
    for (int l = 0; l < LANES; l++) {
        inverse[l] = 1 / (found.d[l / 8] * NEAR[l % 8]);
    }
    const found_scales better = best_of(v, t, inverse);
    const float        d      = better.d[better.better];
    return d != 0 ? d : found.d[found.better];
}

// The magnitude of the scale code nearest to d, as whole steps of 2^19 in the bits of a float.
int nearest_code(double d) {
    const uint32_t bits = bits_of_float(static_cast<float>(std::min(d, 2.0)));
    return std::max(0, std::min(TOP_CODE, static_cast<int>((bits + (1u << 18)) >> 19) - (120 << 4)));
}

// The scale code with the least error among 8 of each sign near the scales found. unit: the row's factor in units of
// the window's largest magnitude.
uint8_t best_code(const window_values & v, const level_table & t, const found_scales & found, double unit) {
    float16 scale = {}, inverse = {}, errors = {};
    uint8_t codes[LANES];
    for (int l = 0; l < LANES; l++) {
        const int center = nearest_code(std::fabs(static_cast<double>(found.d[l / 8])) / unit);
        const int code   = std::max(0, std::min(TOP_CODE, center + l % 8 - 4));
        codes[l]         = static_cast<uint8_t>(code | (l / 8) << 7);
        scale[l]         = static_cast<float>(static_cast<double>(scale_of_code(codes[l])) * unit);
        inverse[l]       = 1 / scale[l];
    }
    errors_of(v, t, scale, inverse, &errors);
    for (int l = 0; l < LANES; l++) {
        errors[l] = std::fabs(scale[l]) * (2 * TOP) < 1 ? INFINITY : errors[l];
    }
    int best = 0;
    for (int l = 1; l < (t.n == 256 ? 8 : LANES); l++) {
        best = errors[l] < errors[best] ? l : best;
    }
    return codes[best];
}

// ---- windows of a dense matrix ----

struct dense_matrix {
    const void *  elements;
    macko_desc    desc;
    int64_t       window;
    const float * weights; // n_weights x cols, or nullptr
    int64_t       n_weights;
    bool          has_scales; // factors and scales are known
};

// Loads a window with up to `window` values to v.x and v.weights, without normalizing them. bitmap: its bytes of the
// bitmap, or nullptr.
template <typename T>
void load_window(const dense_matrix & m, int64_t row, int64_t begin, uint8_t * bitmap, window_values * v) {
    const T *     elements = static_cast<const T *>(m.elements) + row * m.desc.cols;
    const float * weights  = m.weights ? m.weights + row * m.n_weights / m.desc.rows * m.desc.cols : nullptr;
    const int64_t end      = std::min(begin + m.window, m.desc.cols);
    v->n                   = 0;
    for (int64_t at = begin; at < end; at += 64) {
        const int64_t n    = std::min<int64_t>(64, end - at);
        uint64_t      mask = n == 64 ? nonzero_mask_64(elements + at) : nonzero_mask_any(elements + at, n);
        if (bitmap) {
            memcpy(bitmap + (at - begin) / 8, &mask, static_cast<size_t>((n + 7) / 8));
        }
        for (; mask; mask &= mask - 1, v->n++) {
            const int64_t col = at + __builtin_ctzll(mask);
            v->x[v->n]        = float_of_value(elements[col], m.desc.type);
            v->weights[v->n]  = weights ? weights[col] : 1;
        }
    }
}

void normalize(window_values * v) {
    float largest = 0, weight = 0;
    for (int64_t i = 0; i < v->n; i++) {
        largest = std::max(largest, std::fabs(v->x[i]));
        weight  = std::max(weight, v->weights[i]);
    }
    const double inverse = largest > 0 ? 1 / static_cast<double>(largest) : 0;
    for (int64_t i = 0; i < v->n; i++) {
        v->x[i]       = static_cast<float>(static_cast<double>(v->x[i]) * inverse);
        v->weights[i] = weight > 0 ? v->weights[i] / weight : 1;
    }
    v->largest = largest;
}

// ---- levels ----

// Windows spread over the matrix.
struct window_sample {
    std::vector<float>         x, weights; // normalized
    std::vector<float>         importance; // of squared errors, in the units of the matrix
    std::vector<window_values> windows;
};

template <typename T> window_sample take_sample(const dense_matrix & m) {
    const int64_t       per_row = windows_of_row(m.desc.cols, m.window), n = m.desc.rows * per_row;
    const int64_t       step = std::max<int64_t>(1, m.desc.nnz / SAMPLE);
    window_sample       s;
    const auto          room = static_cast<size_t>(m.window + LANES);
    std::vector<float>  x(room), weights(room);
    std::vector<size_t> first;
    double              largest = 0, weight = 0;
    for (int64_t i = 0; i < n / step; i++) {
        const uint64_t mixed = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u; // not always the same columns
        const int64_t  at    = i * step + static_cast<int64_t>((mixed >> 33) % static_cast<uint64_t>(step));
        window_values  v     = { 0, 0, x.data(), weights.data() };
        load_window<T>(m, at / per_row, at % per_row * m.window, nullptr, &v);
        for (int64_t k = 0; k < v.n; k++) {
            weight = std::max(weight, static_cast<double>(weights[static_cast<size_t>(k)]));
        }
        s.importance.insert(s.importance.end(), weights.begin(), weights.begin() + v.n);
        normalize(&v);
        largest = std::max(largest, static_cast<double>(v.largest));
        first.push_back(s.x.size());
        s.x.insert(s.x.end(), x.begin(), x.begin() + v.n);
        s.weights.insert(s.weights.end(), weights.begin(), weights.begin() + v.n);
        s.windows.push_back(v);
    }
    s.x.resize(s.x.size() + LANES);
    for (size_t i = 0; i < first.size(); i++) {
        window_values & v    = s.windows[i];
        const double    size = largest > 0 ? static_cast<double>(v.largest) / largest : 0;
        v.x                  = s.x.data() + first[i];
        v.weights            = s.weights.data() + first[i];
        for (size_t k = first[i]; k < first[i] + static_cast<size_t>(v.n); k++) {
            s.importance[k] =
                static_cast<float>((weight > 0 ? static_cast<double>(s.importance[k]) / weight : 1) * size * size);
        }
    }
    return s;
}

// Quantiles of the values of one sign, ascending magnitudes.
std::vector<float> magnitudes(const std::vector<float> & y, bool negative, size_t n) {
    std::vector<float> of_sign, out;
    for (const float value : y) {
        if (value != 0 && (value < 0) == negative) {
            of_sign.push_back(std::fabs(value));
        }
    }
    std::sort(of_sign.begin(), of_sign.end());
    for (size_t k = 0; k < n; k++) {
        out.push_back(of_sign.empty() ? static_cast<float>(TOP * (k + 1)) / static_cast<float>(n)
                                      : of_sign[(2 * k + 1) * of_sign.size() / (2 * n)]);
    }
    return out;
}

// Scales levels so that the largest magnitude is TOP.
void scale_to_top(std::vector<float> * levels) {
    const float largest = std::max(-levels->front(), levels->back());
    for (float & level : *levels) {
        level = level / largest * TOP;
    }
}

// One step of Lloyd's algorithm: each level becomes the mean of its values.
void improve_levels(const std::vector<float> & y, const std::vector<float> & importance, std::vector<float> * levels) {
    const level_table    table(*levels);
    const size_t         n = importance.size();
    std::vector<uint8_t> numbers(n + LANES);
    std::vector<double>  sums(levels->size()), total(levels->size());
    numbers_of(y.data(), static_cast<int64_t>(n), 1, table, numbers.data());
    for (size_t i = 0; i < n; i++) {
        total[numbers[i]] += static_cast<double>(importance[i]);
        sums[numbers[i]] += static_cast<double>(importance[i]) * static_cast<double>(y[i]);
    }
    for (size_t k = 0; k < levels->size(); k++) {
        const bool positive = k >= levels->size() / 2;
        const auto mean     = static_cast<float>(sums[k] / total[k]);
        if (total[k] > 0 && (mean > 0) == positive && mean != 0) {
            (*levels)[k] = mean;
        }
    }
}

// Rounds ascending levels to different integers that are not 0, in the order of the codes.
std::vector<int8_t> rounded_levels(std::vector<float> levels) {
    scale_to_top(&levels);
    const int           half = static_cast<int>(levels.size()) / 2;
    std::vector<int8_t> out(levels.size());
    for (const int sign : { 1, -1 }) {
        int last = TOP + 1;
        for (int k = half - 1; k >= 0; k--) { // from the largest magnitude
            const float level = levels[static_cast<size_t>(sign > 0 ? half + k : half - 1 - k)];
            last              = std::max(k + 1, std::min(last - 1, static_cast<int>(std::lround(std::fabs(level)))));
            out[static_cast<size_t>(sign > 0 ? k : 2 * half - 1 - k)] = static_cast<int8_t>(sign * last);
        }
    }
    return out;
}

// Levels and scales in turns.
std::vector<int8_t> fit_levels(const window_sample & s, int32_t bits, int n_threads) {
    const size_t       half = size_t(1) << (bits - 1);
    std::vector<float> y(s.x.size()), importance(s.importance.size()), levels;
    const auto         set_scale = [&](const window_values & v, float d) {
        const auto begin = static_cast<size_t>(v.x - s.x.data());
        for (size_t k = begin; k < begin + static_cast<size_t>(v.n); k++) {
            y[k]          = s.x[k] / d;
            importance[k] = s.importance[k] * (d * d);
        }
    };
    for (const window_values & v : s.windows) { // the largest value has level -TOP
        const float * extreme =
            std::max_element(v.x, v.x + v.n, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
        set_scale(v, v.n && *extreme < 0 ? 1.0f / TOP : -1.0f / TOP);
    }
    levels = magnitudes(y, true, half);
    std::reverse(levels.begin(), levels.end());
    std::transform(levels.begin(), levels.end(), levels.begin(), std::negate<float>());
    const std::vector<float> positive = magnitudes(y, false, half);
    levels.insert(levels.end(), positive.begin(), positive.end());
    for (int turn = 0; turn < TURNS; turn++) {
        if (turn % SEARCHES == 0 && turn > 0) {
            scale_to_top(&levels);
            const level_table table(levels);
            parallel_ranges(n_threads, static_cast<int64_t>(s.windows.size()), [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; i++) {
                    const window_values & v = s.windows[static_cast<size_t>(i)];
                    set_scale(v, improve_scale(v, table, search_scales(v, table)));
                }
            });
        }
        improve_levels(y, importance, &levels);
    }
    return rounded_levels(levels);
}

// ---- the matrix ----

level_table table_of(const std::vector<int8_t> & levels) {
    std::vector<float> ascending;
    for (size_t i = 0; i < levels.size(); i++) {
        ascending.push_back(static_cast<float>(levels[(i + levels.size() / 2) % levels.size()]));
    }
    return level_table(ascending);
}

// The window width for which a scale serves about 32 non-zeros, as the lengths of the arrays tell it.
int64_t window_for(const macko_desc & desc) {
    const double density = static_cast<double>(std::max<int64_t>(1, desc.nnz)) /
                           (static_cast<double>(desc.rows) * static_cast<double>(desc.cols));
    int64_t window = MIN_WINDOW;
    while (window < MAX_WINDOW && static_cast<double>(window) * density < 32 / std::sqrt(2.0)) {
        window *= 2;
    }
    const int64_t windows = windows_of_row(desc.cols, window);
    while (window > MIN_WINDOW && windows_of_row(desc.cols, window / 2) == windows) {
        window /= 2;
    }
    return window;
}

// The windows of a row, and how they are stored.
class row_encoder {
public:
    row_encoder(const dense_matrix & m, const level_table & table, quantized_matrix * out)
        : m_(m), table_(table), out_(*out), windows_(windows_of_row(m.desc.cols, m.window)) {
        const auto n = static_cast<size_t>(windows_ * (m.window + LANES));
        x_.resize(n);
        weights_.resize(n);
        values_.resize(static_cast<size_t>(windows_));
        found_.resize(static_cast<size_t>(windows_));
        codes_.resize(static_cast<size_t>(m.desc.cols + m.window + LANES + CODE_GROUP));
    }

    // Returns false if a value is too large for a factor.
    template <typename T> [[nodiscard]] bool encode(int64_t row) {
        double largest = 0; // scale
        for (int64_t w = 0; w < windows_; w++) {
            window_values & v  = values_[static_cast<size_t>(w)];
            const auto      at = static_cast<size_t>(w * (m_.window + LANES));
            v                  = { 0, 0, &x_[at], &weights_[at] };
            load_window<T>(m_, row, w * m_.window, bitmap_of(row) + w * m_.window / 8, &v);
            normalize(&v);
            if (v.n > 0) {
                const found_scales found       = m_.has_scales ? found_scales{} : search_scales(v, table_);
                found_[static_cast<size_t>(w)] = found;
                largest = std::max(largest, static_cast<double>(std::fabs(found.d[found.better])) *
                                                static_cast<double>(v.largest));
            }
        }
        if (!set_factor(row, largest / static_cast<double>(scale_of_code(TOP_CODE)))) {
            return false;
        }
        bool    fits = true;
        int64_t k    = 0;
        for (int64_t w = 0; w < windows_; w++) {
            const window_values & v = values_[static_cast<size_t>(w)];
            if (v.n > 0) {
                fits = encode_window(row, w, v, &codes_[static_cast<size_t>(k)]) && fits;
                k += v.n;
            } else {
                out_.scales[static_cast<size_t>(row * windows_ + w)] = 0;
            }
        }
        put_codes(row, k);
        return fits;
    }

private:
    uint8_t * bitmap_of(int64_t row) { return out_.bitmap.data() + row * bitmap_row_nbytes(m_.desc.cols); }

    bool set_factor(int64_t row, double factor) {
        uint16_t & bits = out_.factors[static_cast<size_t>(row)];
        if (out_.row_ptr[static_cast<size_t>(row)] == out_.row_ptr[static_cast<size_t>(row) + 1]) {
            bits = 0;
            return true;
        }
        if (m_.has_scales) {
            return bits >= MIN_FACTOR && bits <= MAX_FACTOR;
        }
        bits = bf16_of_float(static_cast<float>(std::max(factor, 0x1p-90)));
        return bits <= MAX_FACTOR;
    }

    bool encode_window(int64_t row, int64_t w, const window_values & v, uint8_t * codes) {
        const float  factor  = float_of_value(out_.factors[static_cast<size_t>(row)], GGML_MACKO_TYPE_BF16);
        const double largest = v.largest > 0 ? static_cast<double>(v.largest) : 1; // only -0.0
        const double unit    = static_cast<double>(factor) / largest;
        uint8_t &    code    = out_.scales[static_cast<size_t>(row * windows_ + w)];
        if (!m_.has_scales) {
            code = best_code(v, table_, found_[static_cast<size_t>(w)], unit);
        }
        const auto half = static_cast<unsigned>(out_.levels.size() / 2);
        const auto set  = [&] {
            float most = 0;
            numbers_of(v.x, v.n, static_cast<float>(1 / (static_cast<double>(scale_of_code(code)) * unit)), table_,
                        codes);
            for (int64_t i = 0; i < v.n; i++) {
                codes[i] = static_cast<uint8_t>((codes[i] + half) & (2 * half - 1));
                most     = std::max(most, std::fabs(static_cast<float>(out_.levels[codes[i]])));
            }
            return std::fabs(scale_of_code(code) * factor) * most;
        };
        bool beyond = set() >= BEYOND_F16 && m_.desc.type == GGML_MACKO_TYPE_F16;
        while (beyond && !m_.has_scales) { // a scale was rounded up
            code--;
            beyond = set() >= BEYOND_F16;
        }
        return !beyond;
    }

    void put_codes(int64_t row, int64_t n) {
        uint8_t * group = out_.codes.data() + int64_t(out_.row_ptr[static_cast<size_t>(row)]) * out_.bits;
        std::fill(codes_.begin() + n, codes_.begin() + code_groups(n) * CODE_GROUP, uint8_t(0));
        for (int64_t k = 0; k < n; k += CODE_GROUP, group += out_.bits) {
            uint64_t word = 0;
            for (int64_t i = 0; i < CODE_GROUP; i++) {
                word |= static_cast<uint64_t>(codes_[static_cast<size_t>(k + i)]) << (i * out_.bits);
            }
            memcpy(group, &word, static_cast<size_t>(out_.bits));
        }
    }

    const dense_matrix &       m_;
    const level_table &        table_;
    quantized_matrix &         out_;
    const int64_t              windows_;
    std::vector<float>         x_, weights_;
    std::vector<window_values> values_;
    std::vector<found_scales>  found_;
    std::vector<uint8_t>       codes_;
};

template <typename T> std::vector<int32_t> count_groups(const T * dense, const macko_desc & desc, int n_threads) {
    std::vector<int32_t> row_ptr(static_cast<size_t>(desc.rows) + 1, 0);
    parallel_ranges(n_threads, desc.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int64_t n = 0;
            for (int64_t c = 0; c < desc.cols; c++) {
                n += dense[r * desc.cols + c] != 0;
            }
            row_ptr[static_cast<size_t>(r) + 1] = static_cast<int32_t>(code_groups(n));
        }
    });
    for (size_t r = 1; r < row_ptr.size(); r++) {
        row_ptr[r] += row_ptr[r - 1];
    }
    return row_ptr;
}

template <typename T>
int quantize_type(dense_matrix m, int32_t bits, const quantized_arrays * lattice, int n_threads,
                  quantized_matrix * out) {
    const macko_desc & desc = m.desc;
    m.has_scales            = lattice && lattice->scales;
    out->dense              = desc;
    out->bits               = bits;
    out->window = m.window = m.has_scales ? lattice->window : window_for(desc);
    out->row_ptr           = count_groups(static_cast<const T *>(m.elements), desc, n_threads);
    out->codes.assign(static_cast<size_t>(codes_nbytes(out->row_ptr.back(), bits)), 0);
    out->bitmap.assign(static_cast<size_t>(bitmap_nbytes(desc.rows, desc.cols)), 0);
    out->scales.assign(static_cast<size_t>(desc.rows * windows_of_row(desc.cols, m.window)), 0);
    out->factors.assign(static_cast<size_t>(desc.rows), 0);
    if (m.has_scales) {
        out->scales.assign(lattice->scales, lattice->scales + out->scales.size());
        out->factors.assign(lattice->factors, lattice->factors + out->factors.size());
    }
    if (lattice) {
        out->levels.assign(lattice->levels, lattice->levels + (1 << bits));
    } else if (find_exact(m.elements, n_threads, out)) {
        m.has_scales = true;
    } else {
        out->levels = bits == 8 ? standard_levels(8, 0) : fit_levels(take_sample<T>(m), bits, n_threads);
    }
    const level_table table = table_of(out->levels);
    std::atomic<bool> fits{ true };
    parallel_parts(n_threads, (desc.rows + 15) / 16, 1, [&](int64_t part, int64_t, int) {
        row_encoder encoder(m, table, out);
        for (int64_t r = part * 16; r < std::min(desc.rows, part * 16 + 16); r++) {
            if (!encoder.encode<T>(r)) {
                fits = false;
            }
        }
    });
    return fits ? static_cast<int>(GGML_MACKO_STATUS_OK)
                : fail(GGML_MACKO_STATUS_NOT_FINITE, "values are too large for the scales of their row");
}

} // namespace

int quantize(const void * dense, const macko_desc & shape, int32_t bits, const float * weights, int64_t n_weights,
             const quantized_arrays * lattice, int n_threads, quantized_matrix * out) {
    const dense_matrix m = { dense, shape, 0, weights, n_weights, false };
    return shape.type == GGML_MACKO_TYPE_F32 ? quantize_type<uint32_t>(m, bits, lattice, n_threads, out)
                                             : quantize_type<uint16_t>(m, bits, lattice, n_threads, out);
}

} // namespace macko
