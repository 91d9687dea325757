// Compiled without floating-point contraction, so that ggml's reference quantizers and the NumPy twin
// (python/ggml_macko/codecs/packed.py) get the same bytes.
#include "codec/quantize.h"
#include "codec/packed/packed.h"
#include "codec/team.h"
#include "platform/compiler.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace macko {

// Adds q to a block that contains zeros at its position; not for Q4_NL.
static void put_quant(uint8_t * block, int32_t type, int64_t i, int q) {
    if (type == GGML_MACKO_TYPE_Q8_0) {
        block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(q));
        return;
    }
    const int u       = q - quant_range(type).low;
    uint8_t * nibbles = block + quant_block_nbytes(type) - 16;
    nibbles[i % 16]   = static_cast<uint8_t>(nibbles[i % 16] | (u & 15) << (i / 16 * 4));
    if (type == GGML_MACKO_TYPE_Q5_0) {
        block[2 + i / 8] = static_cast<uint8_t>(block[2 + i / 8] | u >> 4 << (i % 8));
    }
}

// Rounds one block like ggml's reference quantizers. Q8_0: scale amax / 127, ties away from zero. Q4_0: scale = extreme
// value / -8, and q + 8 = trunc(x / d + 8.5), at most 15. Q5_0: the same with 16 instead of 8. Returns the scale.
static uint16_t round_block(const float * x, int32_t type, uint8_t * block) {
    float extreme = 0;
    for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        extreme = std::fabs(x[i]) > std::fabs(extreme) ? x[i] : extreme;
    }
    const bool  q8      = type == GGML_MACKO_TYPE_Q8_0;
    const int   half    = type == GGML_MACKO_TYPE_Q5_0 ? 16 : 8;
    const float d       = q8 ? std::fabs(extreme) / 127 : extreme / static_cast<float>(-half);
    const float inverse = d != 0 && std::isfinite(1 / d) ? 1 / d : 0;
    for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        const float scaled = x[i] * inverse;
        const int   q      = q8 ? static_cast<int>(std::round(scaled))
                                : std::min(half - 1, static_cast<int>(scaled + static_cast<float>(half) + 0.5f) - half);
        put_quant(block, type, i, q);
    }
    return f16_of_float(d);
}

// ---- Q4_NL ----

// [table][256 + h]: index of the level nearest to h / 2; levels meet at multiples of 1/2.
struct nearest_table {
    uint8_t number[2][512];
};
constexpr nearest_table make_nearest_table() {
    nearest_table t = {};
    for (int table = 0; table < 2; table++) {
        const int8_t * levels = Q4_NL_LEVELS[table];
        for (int h = -256; h < 256; h++) {
            for (int k = 0; k < 15; k++) {
                t.number[table][256 + h] =
                    static_cast<uint8_t>(t.number[table][256 + h] + (levels[k] + levels[k + 1] <= h));
            }
        }
    }
    return t;
}
constexpr nearest_table NEAREST = make_nearest_table();

// 256 + floor(2 * x * inverse), the place in the table. A NaN becomes 127.5.
static inline int find_place(float x, float inverse) {
    return static_cast<int>(std::max(-128.0f, std::min(127.5f, x * inverse)) * 2 + 256);
}

static inline __attribute__((always_inline)) float inverse_of(float d) {
    return d != 0 && std::isfinite(1 / d) ? 1 / d : 0;
}

struct table_scale {
    int    table;
    float  d;
    double gain; // reduction of the sum of w * x^2 by d * q
};

// The search tries both tables, and scales of both signs that put the largest magnitude at .78 to 1.16 times the
// outermost level. Vectors hold the sums of different scales; comparisons are faster than a table.
using float16           = float __attribute__((vector_size(64)));
using double16          = double __attribute__((vector_size(128)));
constexpr float TRIED[] = { .78f, .84f, .9f, .95f, 1.0f, 1.05f, 1.1f, 1.16f };

// The levels as the sum of steps, each from a place on.
struct step_table {
    float place[2][15], step[2][15];
};
constexpr step_table make_step_table() {
    step_table t = {};
    for (int table = 0; table < 2; table++) {
        const int8_t * levels = Q4_NL_LEVELS[table];
        for (int k = 0; k < 15; k++) {
            t.place[table][k] = static_cast<float>(levels[k] + levels[k + 1] + 256);
            t.step[table][k]  = static_cast<float>(levels[k + 1] - levels[k]);
        }
    }
    return t;
}
constexpr step_table STEPS = make_step_table();

static inline __attribute__((always_inline)) table_scale scale_of_sums(int table, double wxq, double wqq) {
    const double ratio = wxq / wqq; // NaN if all weights are 0
    return wxq * ratio > 0 ? table_scale{ table, static_cast<float>(ratio), wxq * ratio } : table_scale{ table, 0, 0 };
}

// The best of the scales for the levels that the scales 1 / inverse lead to.
static inline __attribute__((always_inline)) table_scale best_scale(const float * x, const float * weights, int table,
                                                                    const float16 & inverse) {
    double16 wxq = {}, wqq = {};
    for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        const double  w = static_cast<double>(weights[i]), wx = w * static_cast<double>(x[i]);
        const float16 place = x[i] * inverse * 2 + 256;
        float16       q     = float16{} + static_cast<float>(Q4_NL_LEVELS[table][0]);
#pragma GCC unroll 15
        for (int k = 0; k < 15; k++) {
            q += place >= STEPS.place[table][k] ? float16{} + STEPS.step[table][k] : float16{};
        }
        wxq += wx * __builtin_convertvector(q, double16);
        wqq += w * __builtin_convertvector(q * q, double16);
    }
    table_scale best = { table, 0, 0 };
    for (int s = 0; s < 16; s++) {
        const table_scale found = scale_of_sums(table, wxq[s], wqq[s]);
        best                    = found.gain > best.gain ? found : best;
    }
    return best;
}

// The best scale for the levels that scale d leads to.
static table_scale improve_scale(const float * x, const float * weights, int table, float d) {
    const float inverse = inverse_of(d);
    double      wxq = 0, wqq = 0;
    for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        const double w = static_cast<double>(weights[i]);
        const double q = Q4_NL_LEVELS[table][NEAREST.number[table][find_place(x[i], inverse)]];
        wxq += w * static_cast<double>(x[i]) * q;
        wqq += w * (q * q);
    }
    return scale_of_sums(table, wxq, wqq);
}

// The best of the scales tried for each table is replaced twice more by the best scale for its levels.
MACKO_WIDE_CLONES static table_scale search_scale(const float * x, const float * weights) {
    table_scale best    = { 0, 0, 0 };
    float       largest = 0;
    for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        largest = std::max(largest, std::fabs(x[i]));
    }
    float16 inverse;
    for (int s = 0; s < 8; s++) {
        inverse[s]     = inverse_of(largest / 127 * TRIED[s]);
        inverse[s + 8] = -inverse[s];
    }
    for (const int table : { 0, 1 }) {
        table_scale found = best_scale(x, weights, table, inverse);
        best              = found.gain > best.gain ? found : best;
        for (int round = 0; round < 2; round++) {
            found = improve_scale(x, weights, table, found.d);
            best  = found.gain > best.gain ? found : best;
        }
    }
    return best;
}

// d as F16, with the table in its lowest bit.
static uint16_t scale_with_table(float d, int table) {
    const uint16_t h = f16_of_float(d);
    if ((h & 1) == table || (h & 0x7fff) == 0x7c00) {
        return h;
    }
    const auto below = static_cast<uint16_t>(h - 1), above = static_cast<uint16_t>(h + 1); // of magnitude
    const bool has_below = (h & 0x7fff) != 0, has_above = (above & 0x7fff) != 0x7c00;
    return has_below && (!has_above || std::fabs(float_of_f16(below) - d) <= std::fabs(float_of_f16(above) - d))
               ? below
               : above;
}

static uint16_t search_block(const float * x, const float * weights, int64_t n, uint8_t * block) {
    const table_scale found   = search_scale(x, weights);
    const uint16_t    scale   = scale_with_table(found.d, found.table);
    const float       inverse = inverse_of(float_of_f16(scale));
    for (int64_t i = 0; i < n; i++) {
        const uint8_t number = NEAREST.number[found.table][find_place(x[i], inverse)];
        block[2 + i % 16]    = static_cast<uint8_t>(block[2 + i % 16] | number << (i / 16 * 4));
    }
    return scale;
}

// Loads values begin ... begin + n - 1 to x.
static void load_floats(const void * values, int32_t value_type, int64_t begin, int64_t n, float * x) {
    for (int64_t k = 0; k < n; k++) {
        x[k] = value_type == GGML_MACKO_TYPE_F32
                   ? static_cast<const float *>(values)[begin + k]
                   : float_of_value(static_cast<const uint16_t *>(values)[begin + k], value_type);
    }
}

// Calls f(i) for n blocks, in threads. NOT_FINITE for the first block whose scale, the result of f, is Inf or NaN.
template <typename F> static int for_each_block(int64_t n, int n_threads, F && f) {
    int64_t    bad = n;
    std::mutex bad_mutex;
    parallel_ranges(n_threads, n, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            if ((f(i) & 0x7c00) == 0x7c00) {
                const std::lock_guard<std::mutex> lock(bad_mutex);
                bad = std::min(bad, i);
            }
        }
    });
    return bad < n ? fail(GGML_MACKO_STATUS_NOT_FINITE, "block %lld: values are too large for a scale in F16",
                          static_cast<long long>(bad))
                   : static_cast<int>(GGML_MACKO_STATUS_OK);
}

int quantize(const void * values, int32_t value_type, const float * weights, int64_t n, int32_t type, int n_threads,
             uint8_t * blocks) {
    const int64_t nbytes = quant_block_nbytes(type);
    return for_each_block(packed_n_values(n) / QUANT_BLOCK, n_threads, [&](int64_t i) {
        const int64_t there          = std::min(QUANT_BLOCK, n - i * QUANT_BLOCK);
        float         x[QUANT_BLOCK] = {}, w[QUANT_BLOCK] = {};
        load_floats(values, value_type, i * QUANT_BLOCK, there, x);
        for (int64_t k = 0; k < there; k++) {
            w[k] = weights ? weights[i * QUANT_BLOCK + k] : 1;
        }
        uint8_t * block = blocks + i * nbytes;
        memset(block, 0, static_cast<size_t>(nbytes));
        const uint16_t scale =
            type == GGML_MACKO_TYPE_Q4_NL ? search_block(x, w, there, block) : round_block(x, type, block);
        memcpy(block, &scale, 2);
        return scale;
    });
}

static void round_block_to_scale(const float * x, int32_t type, uint8_t * block) {
    const quant_limits range = quant_range(type);
    const float        d     = float_of_f16(quant_scale_bits(block));
    memset(block + 2, 0, static_cast<size_t>(quant_block_nbytes(type) - 2));
    for (int64_t i = 0; i < QUANT_BLOCK; i++) {
        const float q = d == 0 ? 0 : std::nearbyint(x[i] / d);
        put_quant(
            block, type, i,
            static_cast<int>(std::max(static_cast<float>(range.low), std::min(static_cast<float>(range.high), q))));
    }
}

int round_to_scales(const void * values, int32_t value_type, int64_t n, int32_t type, int n_threads, uint8_t * blocks) {
    return for_each_block(n / QUANT_BLOCK, n_threads, [&](int64_t i) {
        float     x[QUANT_BLOCK];
        uint8_t * block = blocks + i * quant_block_nbytes(type);
        load_floats(values, value_type, i * QUANT_BLOCK, QUANT_BLOCK, x);
        const uint16_t scale = quant_scale_bits(block);
        if ((scale & 0x7c00) != 0x7c00) {
            round_block_to_scale(x, type, block);
        }
        return scale;
    });
}

} // namespace macko
