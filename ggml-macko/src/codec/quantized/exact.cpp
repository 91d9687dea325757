// Finds the levels, factors and scales from which a dense matrix was decoded, for example by `macko prune
// --quant-values`. Such values have standard levels. A dense value is d * level, rounded to the dense type, so the
// largest value of a row gives few candidates for the factor, and each window then has few scale codes to try. A result
// is compared bit for bit.
#include "codec/first-bad.h"
#include "codec/quantized/quantized.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace macko {

// Fitted to trained matrices with 70 % zeros (a narrow gap around zero), and to normally distributed values of which
// the smaller half is zero (a wide gap).
static constexpr int8_t Q3_LEVELS[2][8]  = { { 24, 50, 77, 109, -127, -84, -55, -29 },
                                             { 40, 57, 79, 107, -127, -86, -60, -40 } };
static constexpr int8_t Q4_LEVELS[2][16] = {
    { 10, 27, 40, 53, 65, 79, 95, 116, -127, -100, -83, -68, -55, -44, -32, -18 },
    { 32, 39, 47, 56, 66, 77, 91, 107, -127, -97, -81, -68, -58, -49, -40, -32 },
};
static constexpr int8_t Q5_LEVELS[2][32] = {
    { 5,    17,   25,  31,  38,  43,  48,  52,  57,  63,  68,  74,  80,  88,  99,  113,
      -127, -109, -97, -87, -78, -72, -66, -60, -55, -50, -45, -39, -33, -27, -20, -11 },
    { 28,   32,   36,  39,  43,  46,  50,  54,  58,  62,  67,  73,  79,  87,  99,  110,
      -127, -107, -94, -85, -77, -70, -65, -60, -55, -51, -48, -44, -40, -36, -32, -28 },
};

std::vector<int8_t> standard_levels(int32_t bits, int table) {
    std::vector<int8_t> found(size_t(1) << bits);
    for (size_t i = 0; i < found.size(); i++) {
        found[i] = bits == 3   ? Q3_LEVELS[table][i]
                   : bits == 4 ? Q4_LEVELS[table][i]
                   : bits == 5 ? Q5_LEVELS[table][i]
                               : static_cast<int8_t>(i);
    }
    return found;
}

namespace {

// [256 + floor(2 y)]: the level nearest to y, -128 <= y < 128.
struct nearest_levels {
    int8_t level[512];

    explicit nearest_levels(std::vector<int8_t> levels) {
        std::sort(levels.begin(), levels.end());
        levels.erase(levels.begin(), std::upper_bound(levels.begin(), levels.end(), int8_t(-128)));
        size_t k = 0;
        for (int h = -256; h < 256; h++) {
            while (k + 1 < levels.size() && levels[k] + levels[k + 1] <= h) {
                k++;
            }
            level[h + 256] = levels[k];
        }
    }
    int operator()(float y) const { return level[static_cast<int>(std::max(-128.0f, std::min(127.5f, y)) * 2 + 256)]; }
};

template <typename T> struct row_finder {
    const macko_desc &          desc;
    const std::vector<int8_t> & levels;
    const nearest_levels &      nearest;
    int64_t                     window;
    // non-zeros of the row, and where each window begins among them
    std::vector<T>      values;
    std::vector<size_t> first;

    bool is_exact(size_t w, float d) const {
        for (size_t i = first[w]; i < first[w + 1]; i++) {
            const int level = nearest(float_of_value(values[i], desc.type) / d);
            if (level == 0 || dense_of_quant<T>(d, level, desc.type) != values[i] ||
                (desc.type == GGML_MACKO_TYPE_F16 && std::fabs(d * static_cast<float>(level)) >= BEYOND_F16)) {
                return false;
            }
        }
        return true;
    }

    // The codes of all windows with this factor; false if there are none.
    bool find_codes(float factor, uint8_t * scales) const {
        for (size_t w = 0; w + 1 < first.size(); w++) {
            int code = 0;
            while (first[w] < first[w + 1] && code < 256 &&
                   !is_exact(w, scale_of_code(static_cast<uint8_t>(code)) * factor)) {
                code++;
            }
            if (code == 256) {
                return false;
            }
            scales[w] = static_cast<uint8_t>(code);
        }
        return true;
    }

    // Tries the factors with which the largest value of the row has scale `code` and any level.
    bool find_factor(size_t at, uint8_t code, uint16_t * factor, uint8_t * scales) const {
        const size_t w = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), at) - first.begin()) - 1;
        const float  x = float_of_value(values[at], desc.type), scale = scale_of_code(code);
        for (const int8_t level : levels) {
            const float wanted = level ? x / (static_cast<float>(level) * scale) : 0;
            if (wanted < 0x1p-90f || wanted > 0x1p90f) {
                continue;
            }
            const uint32_t near = (bits_of_float(wanted) + 0x8000u) >> 16;
            for (uint32_t f = near - 1; f <= near + 1; f++) { // x is rounded
                const float found = float_of_value(static_cast<uint16_t>(f), GGML_MACKO_TYPE_BF16);
                if (f >= MIN_FACTOR && f <= MAX_FACTOR && is_exact(w, scale * found) && find_codes(found, scales)) {
                    *factor = static_cast<uint16_t>(f);
                    return true;
                }
            }
        }
        return false;
    }

    // Finds the lattice of a row, with the largest scale code first.
    bool find(const T * row, uint16_t * factor, uint8_t * scales) {
        values.clear();
        first.assign(1, 0);
        size_t largest = 0;
        for (int64_t col = 0; col < desc.cols; col++) {
            if (row[col]) {
                values.push_back(row[col]);
                const float x = float_of_value(row[col], desc.type), most = float_of_value(values[largest], desc.type);
                largest = std::fabs(x) > std::fabs(most) ? values.size() - 1 : largest;
            }
            if (col + 1 == desc.cols || (col + 1) % window == 0) {
                first.push_back(values.size());
            }
        }
        if (values.empty()) {
            *factor = 0;
            return true;
        }
        for (int magnitude = 127; magnitude >= 0; magnitude--) {
            for (const int sign : { 0, 128 }) {
                if (find_factor(largest, static_cast<uint8_t>(magnitude | sign), factor, scales)) {
                    return true;
                }
            }
        }
        return false;
    }
};

template <typename T> bool find_type(const T * dense, quantized_matrix * m, int n_threads) {
    const int64_t        windows = windows_of_row(m->dense.cols, m->window), rows = m->dense.rows;
    const nearest_levels nearest(m->levels);
    const auto           fails = [&](int64_t row) {
        row_finder<T> finder = { m->dense, m->levels, nearest, m->window, {}, {} };
        return !finder.find(dense + row * m->dense.cols, &m->factors[static_cast<size_t>(row)],
                                      &m->scales[static_cast<size_t>(row * windows)]);
    };
    // the first row with values decides whether the others are worth a search
    const auto * value = std::find_if(dense, dense + rows * m->dense.cols, [](T v) { return v != 0; });
    return value < dense + rows * m->dense.cols && !fails((value - dense) / m->dense.cols) &&
           first_bad(rows, n_threads, fails) == rows;
}

} // namespace

bool find_exact(const void * dense, int n_threads, quantized_matrix * m) {
    for (const int table : { 0, 1 }) {
        m->levels = standard_levels(m->bits, table);
        if (m->dense.type == GGML_MACKO_TYPE_F32 ? find_type(static_cast<const uint32_t *>(dense), m, n_threads)
                                                 : find_type(static_cast<const uint16_t *>(dense), m, n_threads)) {
            return true;
        }
        if (m->bits == 8) {
            break; // one table
        }
    }
    return false;
}

} // namespace macko
