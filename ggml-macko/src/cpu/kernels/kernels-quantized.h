// The kernel `blocks` (kernels-impl.h): products with quantized matrices (FORMAT.md section 9) by integers.
//
// Columns are divided into blocks of 64, or of 32 if a window has 32 columns. The x of a block are integers with a
// scale of their own. For some rows and CHUNK columns at a time, codes become levels, and levels are moved to their
// columns, which gives dense rows of integers in L1 or L2:
//
//     codes      5 0 3 7           the next ones of the row
//     levels     a b c d           to_levels(), by a table
//     bitmap     1 0 0 1 1 0 1 0
//     weights    a 0 0 b c 0 d 0   spread()
//
// Then dot() multiplies them by x. A vector of T tokens has LANES / T lanes for each, so that weights are loaded with
// the same elements for all tokens. A lane adds the products of COLUMNS columns:
//
//     T = 1      weights  w0 w1 w2 w3 ...      x   x0 x1 x2 x3 ...     of one token
//     T = LANES  weights  w0 w0 w0 w0 ...      x   x0 of each token
//
// The sum of a block is an exact integer. It is multiplied by the scales of the block's window and of x, and added to
// floats. If x needs more digits than its elements have, they are in several planes: x = 256 * (256 * top + middle) +
// low. Weights may be stored with an OFFSET, so that they are not negative; then sums begin with -OFFSET * x. A part of
// it, TABLE_OFFSET, is in the table; spread() adds the rest.
//
// One x has no use for dense rows: add_words() multiplies the weights of a word of the bitmap when they are in
// registers. Sets with levels_at() do not store levels either (add_coded_words()).
#pragma once

#include "cpu/kernels/kernels-basics.h"

#include <type_traits>

namespace macko::cpu {
namespace {

using weight_t = simd::weight_t;
using x_t      = simd::x_t;

constexpr int  LANES       = W;                // of 32-bit sums
constexpr int  COLUMNS     = simd::COLUMNS;    // of a lane
constexpr int  CHUNK       = 2048;             // columns
constexpr int  SUB_CHUNK   = 256;              // columns whose x of a tile of tokens stay in L1
constexpr int  TILES       = 8;                // tiles of tokens for which rows are decoded once
constexpr int  TILE_VECS_X = simd::x_vecs;     // vectors of tokens in a full tile
constexpr bool WIDE        = sizeof(x_t) == 2; // 16-bit integers, else 8-bit
constexpr int  OFFSET      = simd::OFFSET;
constexpr int  SCALES      = CHUNK / 32;
constexpr int  SCALE_STEP  = 8; // scales that are computed together

// The largest x, with one plane and with several.
constexpr float LARGEST[2] = { WIDE ? 32767.0f : 127.0f, 127.0f * 32768 };

// How x are stored: for each block, the scales of its tokens, the first values of the sums, and x.
template <int BLOCK_COLUMNS, int TOKENS, int VECTORS, int X_PLANES> struct x_form {
    static constexpr int BLOCK        = BLOCK_COLUMNS;
    static constexpr int T            = TOKENS; // of a vector
    static constexpr int VECS         = VECTORS;
    static constexpr int PLANES       = X_PLANES;
    static constexpr int VEC_COLUMNS  = COLUMNS * LANES / T;
    static constexpr int STEPS        = BLOCK / VEC_COLUMNS;
    static constexpr int VEC_ELEMENTS = COLUMNS * LANES;
    static constexpr int N_SUMS       = OFFSET ? PLANES * VECS * LANES : 0;
    static constexpr int X_AT         = (VECS * LANES + N_SUMS) * 4; // bytes
    static constexpr int NBYTES       = X_AT + STEPS * PLANES * VECS * VEC_ELEMENTS * int(sizeof(x_t));
    static_assert(BLOCK % VEC_COLUMNS == 0, "a block has whole vectors");

    static float *   scales(uint8_t * block) { return reinterpret_cast<float *>(block); }
    static int32_t * sums(uint8_t * block) { return reinterpret_cast<int32_t *>(block) + VECS * LANES; }
    static x_t *     x(uint8_t * block, int step, int plane, int v) {
        return reinterpret_cast<x_t *>(block + X_AT) + ((step * PLANES + plane) * VECS + v) * VEC_ELEMENTS;
    }
};

template <typename X, int R>
void add_blocks(const weight_t * weights, const float * scales, int shift, uint8_t * x, int64_t first_block,
                int64_t n_blocks, float * sums);
using add_blocks_fn = decltype(&add_blocks<x_form<64, LANES, 1, 1>, 1>);

// An x_form as numbers, for code that all forms share, and its kernels.
struct form_of_x {
    int           block, tokens, vecs, planes, x_at, nbytes;
    add_blocks_fn add_rows, add_row; // add_row: null if several x use the form
};

// Tokens of the vectors of one x: no vector has more columns than a block.
template <int BLOCK> constexpr int LEAST_TOKENS = COLUMNS * LANES > BLOCK ? COLUMNS * LANES / BLOCK : 1;

template <typename X> INLINE constexpr add_blocks_fn add_row_of() {
    if constexpr (X::T == LEAST_TOKENS<X::BLOCK> && X::BLOCK == 32) {
        return add_blocks<X, 1>;
    }
    return nullptr;
}
template <int BLOCK, int T, int VECS, int PLANES, typename X = x_form<BLOCK, T, VECS, PLANES>>
constexpr form_of_x form_with = {
    BLOCK, T, VECS, PLANES, X::X_AT, X::NBYTES, add_blocks<X, ROWS_PER_PASS>, add_row_of<X>(),
};

constexpr int MOST_PLANES = WIDE ? 2 : 3; // of unrounded x, which have 23 bits

INLINE int     planes_of(bool round_x) { return round_x ? 1 : MOST_PLANES; }
INLINE int64_t tile_tokens(bool round_x) { return (round_x ? TILE_VECS_X : 1) * LANES; }

template <int BLOCK, int PLANES, int T = LEAST_TOKENS<BLOCK>> INLINE const form_of_x & form_of_tokens(int64_t n) {
    if constexpr (T < LANES) {
        return n <= T ? form_with<BLOCK, T, 1, PLANES> : form_of_tokens<BLOCK, PLANES, 2 * T>(n);
    } else if constexpr (PLANES == 1 && T == LANES) {
        const int64_t vecs = (n + LANES - 1) / LANES;
        static_assert(TILE_VECS_X == 2 || TILE_VECS_X == 4, "cases");
        return vecs <= 1                       ? form_with<BLOCK, LANES, 1, 1>
               : vecs == 2 || TILE_VECS_X == 2 ? form_with<BLOCK, LANES, 2, 1>
               : vecs == 3                     ? form_with<BLOCK, LANES, 3, 1>
                                               : form_with<BLOCK, LANES, TILE_VECS_X, 1>;
    } else {
        return form_with<BLOCK, T, 1, PLANES>;
    }
}
// Calls f with the number of planes.
template <typename F> INLINE auto with_planes(int planes, const F & f) {
    return planes == 1 ? f(std::integral_constant<int, 1>{}) : f(std::integral_constant<int, MOST_PLANES>{});
}
// The form of a tile of n tokens.
NOINLINE const form_of_x & form_of(int block, int planes, int64_t n) {
    return *with_planes(planes, [&](auto p) {
        return block == 32 ? &form_of_tokens<32, p.value>(n) : &form_of_tokens<64, p.value>(n);
    });
}

// ---- x ----

// Rounds the first n of a block's x to integers, and the others are zero. Returns the scale.
template <int BLOCK> NOINLINE float round_block(const float * src, int64_t n, float largest, int32_t * q) {
    float    v[BLOCK];
    uint32_t most = 0;
    for (int64_t i = 0; i < BLOCK; i++) {
        v[i] = i < n ? src[i] : 0.0f;
    }
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, v + i, sizeof(bits));
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float magnitude;
    __builtin_memcpy(&magnitude, &most, sizeof(magnitude));
    const float     inverse = magnitude < 0x1p-100f ? 0.0f : largest / magnitude;
    constexpr float ROUNDER = 0x1.8p23f; // adding it rounds to an integer, which is in the low bits of the sum
    for (int i = 0; i < BLOCK; i++) {
        const float sum = v[i] * inverse + ROUNDER;
        __builtin_memcpy(q + i, &sum, sizeof(sum));
        q[i] -= 0x4b400000;
    }
    return magnitude / largest;
}

// Copies the lowest digits of a block's columns to the lanes of a token in the vectors of a form with T tokens, and
// removes them from q. plane > 0: eight bits, with a sign. stride: elements from a vector to the next one.
template <int T, int BLOCK> NOINLINE void move_digits(int32_t * q, int plane, x_t * to, int64_t stride) {
    constexpr int VEC_COLUMNS = COLUMNS * LANES / T;
    x_t           digits[BLOCK];
    for (int k = 0; k < BLOCK; k++) {
        const int32_t low = plane > 0 ? static_cast<int8_t>(q[k]) : q[k];
        digits[k]         = static_cast<x_t>(low);
        q[k]              = (q[k] - low) >> 8;
    }
    for (int k = 0; k < BLOCK; k += VEC_COLUMNS, to += stride) {
        __builtin_memcpy(to, digits + k, VEC_COLUMNS * sizeof(x_t));
    }
}
template <int BLOCK, int T = LEAST_TOKENS<BLOCK>>
INLINE void move_digits_to(const form_of_x & form, int32_t * q, int plane, x_t * to) {
    if constexpr (T < LANES) {
        if (form.tokens != T) {
            return move_digits_to<BLOCK, 2 * T>(form, q, plane, to);
        }
    }
    move_digits<T, BLOCK>(q, plane, to, int64_t(form.planes) * form.vecs * COLUMNS * LANES);
}

// Writes a block of the x of n tokens; the first n_columns columns exist.
template <int BLOCK, typename S = simd>
void prepare_block(const form_of_x & form, const float * const * x, int64_t n, int64_t column, int64_t n_columns,
                   uint8_t * block) {
    const int per_token = LANES / form.tokens, planes = form.planes, vecs = form.vecs;
    float *   scales = reinterpret_cast<float *>(block);
    x_t *     to     = reinterpret_cast<x_t *>(block + form.x_at);
    if (n < form.tokens * vecs) {
        __builtin_memset(block, 0, static_cast<size_t>(form.nbytes));
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t v = i / form.tokens, t = i % form.tokens;
        int32_t       q[BLOCK];
        const float scale = round_block<BLOCK>(x[i] + (n_columns > 0 ? column : 0), n_columns, LARGEST[planes > 1], q);
        for (int j = 0; j < per_token; j++) {
            scales[i * per_token + j] = scale;
        }
        for (int plane = planes - 1; plane >= 0; plane--) { // the lowest digits are in the last plane
            move_digits_to<BLOCK>(form, q, plane, to + ((plane * vecs + v) * LANES + t * per_token) * COLUMNS);
        }
    }
    if constexpr (OFFSET != 0) {
        int32_t * sums = reinterpret_cast<int32_t *>(block) + vecs * LANES;
        for (int i = 0; i < planes * vecs; i++) {
            auto sum = simd::no_sum();
            for (int k = i; k < BLOCK * form.tokens / (COLUMNS * LANES) * planes * vecs; k += planes * vecs) {
                sum = S::dot(sum, S::offsets(), S::load_ints(to + k * COLUMNS * LANES));
            }
            S::store_negative(sums + i * LANES, sum);
        }
    }
}

void prepare_blocks(const quantized_layout & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int     size = block_columns(w.window), planes = planes_of(p.round_x);
    const int64_t n_blocks = words_of(w.cols) * 64 / size;
    uint8_t *     tile     = static_cast<uint8_t *>(p.scratch);
    for (int64_t token = 0; token < p.n; token += tile_tokens(p.round_x)) {
        const int64_t     n    = smaller(tile_tokens(p.round_x), p.n - token);
        const form_of_x & form = form_of(size, planes, n);
        for (int64_t c = col_begin; c < col_end; c += size) {
            (size == 32 ? prepare_block<32> : prepare_block<64>)(form, p.x + token, n, c, smaller(size, w.cols - c),
                                                                 tile + c / size * form.nbytes);
        }
        tile += n_blocks * form.nbytes;
    }
}

// ---- weights ----

struct level_table { // repeated, so that the bits after a code do not matter
    alignas(64) uint8_t levels[64];
};

// The table and the sizes that all rows share.
struct row_source {
    const quantized_layout & w;
    level_table              table;
    int64_t                  bitmap_nbytes = (w.cols + 7) / 8; // of a row
    int64_t                  windows       = (w.cols + w.window - 1) / w.window;
    int                      log_window    = 5;

    int64_t windows_of(int64_t n_words) const { return (n_words * 64 + w.window - 1) >> log_window; }

    explicit row_source(const quantized_layout & matrix) : w(matrix) {
        while (int64_t(1) << log_window < w.window) {
            log_window++;
        }
        for (int i = 0; i < 64 && w.bits < 8; i++) {
            table.levels[i] = static_cast<uint8_t>(w.levels[i & ((1 << w.bits) - 1)] + simd::TABLE_OFFSET);
        }
    }
};

// At most ROWS_PER_PASS rows in a chunk of columns: their bitmaps, and the levels of their non-zeros.
struct packed_rows {
    uint64_t        mask[ROWS_PER_PASS][CHUNK / 64];
    const uint8_t * at[ROWS_PER_PASS]; // the first level of each row
    alignas(64) uint8_t levels[ROWS_PER_PASS][CHUNK + 128];
};

// Moves levels to the columns of a word of the bitmap.
INLINE void spread(uint64_t bits, const uint8_t * levels, weight_t * out) {
    simd::for_each_part(bits, levels, [&](int part, auto weights) __attribute__((always_inline)) {
        simd::store_ints(out + part * COLUMNS * LANES, weights);
    });
}

// Eight bytes: those from `code` on, each 2^log_times times.
INLINE uint64_t repeated_bytes(const uint8_t * code, int log_times) {
    uint64_t bytes = 0;
    switch (log_times) {
        case 0: __builtin_memcpy(&bytes, code, 8); return bytes;
        case 1:
            __builtin_memcpy(&bytes, code, 4);
            bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
            return ((bytes | bytes << 8) & 0x00ff00ff00ff00ffu) * 0x0101;
        case 2:  return (uint64_t(code[1]) << 32 | code[0]) * 0x01010101u;
        default: return *code * 0x0101010101010101u;
    }
}

// Reads n scales of each of n_rows rows: those of the windows from `column` on, each 2^log_times times.
INLINE void read_scales(const row_source & s, int64_t row, int n_rows, int64_t column, int64_t n, int log_times,
                        float * scales) {
    for (int r = 0; r < n_rows; r++) {
        const float     factor = float_of_bits(static_cast<uint32_t>(s.w.factors[row + r]) << 16);
        const uint8_t * code   = s.w.scales + (row + r) * s.windows + (column >> s.log_window);
        __builtin_prefetch(code + n_rows * s.windows);
        for (int64_t k = 0; k < n; k += SCALE_STEP) {
            uint8_t        codes[SCALE_STEP]; // those after the last window are multiplied by zeros
            const uint64_t bytes = repeated_bytes(code + (k >> log_times), log_times);
            __builtin_memcpy(codes, &bytes, SCALE_STEP);
            for (int i = 0; i < SCALE_STEP; i++) {
                scales[r * SCALES + k + i] = scale_of_code(codes[i]) * factor;
            }
        }
    }
}

// Reads n_rows rows, n_words * 64 columns from `column` on. used: the codes of each row before them.
// Prefetches the same columns of the following n_rows rows, because a CPU's own prefetchers cannot predict the jumps
// from row to row.
// Levels are read again only after those of all rows are written: a load that covers several recent stores waits until
// these have reached the cache.
template <int BITS>
void read_rows(const row_source & s, int64_t row, int n_rows, int64_t column, int64_t n_words, int64_t * used,
               packed_rows & rows) {
    const int64_t left         = s.w.cols - column - (n_words - 1) * 64; // columns of the last word
    const int64_t codes_nbytes = static_cast<int64_t>(s.w.row_off[row + n_rows] - s.w.row_off[row]) * BITS;
    for (int r = 0; r < n_rows; r++) {
        const uint8_t * bitmap = s.w.bitmap + (row + r) * s.bitmap_nbytes + column / 8;
        int64_t         n      = 0;
        for (int64_t i = 0; i < n_words * 8; i += 64) {
            __builtin_prefetch(bitmap + n_rows * s.bitmap_nbytes + i);
        }
#pragma GCC unroll 8
        for (int64_t word = 0; word < n_words; word++) {
            uint64_t bits;
            __builtin_memcpy(&bits, bitmap + word * 8, sizeof(bits));
            rows.mask[r][word] = bits;
            n += __builtin_popcountll(bits);
        }
        if (left < 64) {
            uint64_t & last = rows.mask[r][n_words - 1];
            n -= __builtin_popcountll(last >> left << left);
            last &= (uint64_t(1) << left) - 1;
        }
        const uint8_t * codes = s.w.codes + (static_cast<int64_t>(s.w.row_off[row + r]) + used[r] / 8) * BITS;
        const int64_t   steps = (used[r] % 8 + n + 63) / 64;
        for (int64_t i = 0; i < steps; i++, codes += 8 * BITS) {
            __builtin_prefetch(codes + codes_nbytes);
            simd::template to_levels<BITS>(codes, s.table.levels, rows.levels[r] + i * 64);
        }
        rows.at[r] = rows.levels[r] + used[r] % 8;
        used[r] += n;
    }
}

// Calls f with the bits of a code.
template <typename F> INLINE auto with_bits(int32_t bits, const F & f) {
    switch (bits) {
        case 3:  return f(std::integral_constant<int, 3>{});
        case 4:  return f(std::integral_constant<int, 4>{});
        case 5:  return f(std::integral_constant<int, 5>{});
        default: return f(std::integral_constant<int, 8>{});
    }
}

using read_fn = void (*)(const row_source &, int64_t, int, int64_t, int64_t, int64_t *, packed_rows &);

INLINE read_fn reader_of(int32_t bits) {
    return with_bits(bits, [](auto b) { return static_cast<read_fn>(read_rows<b.value>); });
}

// ---- products ----

// The sums of a block's planes as floats.
template <typename X, typename S = simd, typename SUM> INLINE vec value_of(const SUM (&sum)[X::PLANES]) {
    if constexpr (X::PLANES == 1) {
        return simd::to_floats(sum[0]);
    } else if constexpr (WIDE) {
        return simd::fma(simd::to_floats(sum[0]), simd::set1(256), simd::to_floats(sum[1]));
    } else {
        return simd::fma(simd::to_floats(sum[0]), simd::set1(65536), simd::to_floats(S::join_digits(sum[1], sum[2])));
    }
}

// The first sum of a plane.
template <typename X> INLINE auto first_sum(uint8_t * x, int plane, int v) {
    return OFFSET ? simd::load_sum(X::sums(x) + (plane * X::VECS + v) * LANES) : simd::no_sum();
}

// total + a word of a row * one x. for_each_part: calls its argument with each vector of weights. A block is a word.
template <typename X, typename F> INLINE vec add_word(vec total, float scale, uint8_t * x, F && for_each_part) {
    static_assert(X::BLOCK == 64 && X::T == 1 && X::VECS == 1, "one x");
    decltype(simd::no_sum()) sum[X::PLANES];
    for (int plane = 0; plane < X::PLANES; plane++) {
        sum[plane] = first_sum<X>(x, plane, 0);
    }
    for_each_part([&](int step, auto weights) __attribute__((always_inline)) {
        for (int plane = 0; plane < X::PLANES; plane++) {
            sum[plane] = simd::dot(sum[plane], weights, simd::load_ints(X::x(x, step, plane, 0)));
        }
    });
    return simd::fma(value_of<X>(sum), simd::set1(scale), total);
}

// Multiplies the scales of words by the scales of x there.
template <typename X> INLINE void scale_words(float * scales, int n_rows, uint8_t * x, int64_t n_words) {
    float of_x[CHUNK / 64];
    for (int64_t word = 0; word < n_words; word++) {
        of_x[word] = *X::scales(x + word * X::NBYTES);
    }
    for (int r = 0; r < n_rows; r++, scales += SCALES) {
        for (int64_t word = 0; word < n_words; word++) {
            scales[word] *= of_x[word];
        }
    }
}

// sums[R][LANES] += R rows of levels * one x, without storing the weights. scales: of words.
template <typename X, int R>
void add_words(const uint64_t (*mask)[CHUNK / 64], const uint8_t * const * levels, const float * scales, uint8_t * x,
               int64_t n_words, float * sums) {
    vec             total[R];
    const uint8_t * at[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        total[r] = simd::load(sums + r * LANES);
        at[r]    = levels[r];
    }
    for (int64_t word = 0; word < n_words; word++, x += X::NBYTES) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            total[r] =
                add_word<X>(total[r], scales[r * SCALES + word], x, [&](auto && f) __attribute__((always_inline)) {
                    simd::for_each_part(mask[r][word], at[r], f);
                });
            at[r] += __builtin_popcountll(mask[r][word]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        simd::store(sums + r * LANES, total[r]);
    }
}

// The same from the file's bitmaps and codes: levels stay in a register. used: the codes of each row before `column`.
// Prefetches as many bytes of the following R rows.
template <int BITS, typename X, int R, typename S = simd>
void add_coded_words(const row_source & s, int64_t row, int64_t column, int64_t n_words, const float * scales,
                     uint8_t * x, int64_t * used, float * sums) {
    const auto              table = S::load_ints(s.table.levels);
    typename S::code_shifts shifts;
    S::template make_shifts<BITS>(shifts);
    const int64_t   stride       = s.bitmap_nbytes;
    const uint8_t * bitmap       = s.w.bitmap + row * stride + column / 8;
    const int64_t   left         = s.w.cols - column - (n_words - 1) * 64; // columns of the last word
    const uint64_t  last         = left < 64 ? (uint64_t(1) << left) - 1 : ~uint64_t(0);
    const auto      codes        = [&](int64_t r) { return s.w.codes + static_cast<int64_t>(s.w.row_off[r]) * BITS; };
    const int64_t   step         = (codes(row + R) - codes(row)) / words_of(s.w.cols) + 1;
    const uint8_t * codes_ahead  = codes(row + R) + step * (column / 64);
    const uint8_t * bitmap_ahead = s.w.bitmap + (row + R) * stride + column / 8 * R;
    vec             total[R];
    uint64_t        at[R]; // addresses of bits
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        total[r] = simd::load(sums + r * LANES);
        at[r]    = reinterpret_cast<uintptr_t>(codes(row + r)) * 8 + static_cast<uint64_t>(used[r]) * BITS;
    }
    const auto add_rows = [&](int64_t word, uint64_t exist) __attribute__((always_inline)) {
        __builtin_prefetch(codes_ahead + word * step);
        __builtin_prefetch(bitmap_ahead + word * 8 * R);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            uint64_t bits;
            __builtin_memcpy(&bits, bitmap + r * stride + word * 8, sizeof(bits));
            bits &= exist;
            const auto weights = S::spread_levels(bits, S::template levels_at<BITS>(at[r], shifts, table));
            at[r] += static_cast<uint64_t>(__builtin_popcountll(bits) * BITS);
            total[r] = add_word<X>(total[r], scales[r * SCALES + word], x,
                                   [&](auto && f) __attribute__((always_inline)) { f(0, weights); });
        }
        x += X::NBYTES;
    };
    for (int64_t word = 0; word < n_words - 1; word++) {
        add_rows(word, ~uint64_t(0));
    }
    add_rows(n_words - 1, last);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        simd::store(sums + r * LANES, total[r]);
        used[r] = static_cast<int64_t>(at[r] - reinterpret_cast<uintptr_t>(codes(row + r)) * 8) / BITS;
    }
}

// sums[R][VECS * LANES] += R rows of weights * x, over n_blocks blocks. shift: log2 of the blocks of a window.
template <typename X, int R>
void add_blocks(const weight_t * weights, const float * scales, int shift, uint8_t * x, int64_t first_block,
                int64_t n_blocks, float * sums) {
    constexpr bool IN_REGISTERS = R * X::VECS <= 8;
    constexpr int  STRIDE       = X::VECS * LANES;
    vec            total[R][X::VECS];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < X::VECS; v++) {
            total[r][v] = IN_REGISTERS ? simd::load(sums + r * STRIDE + v * LANES) : simd::zero();
        }
    }
    for (int64_t b = first_block; b < first_block + n_blocks; b++, x += X::NBYTES) {
        decltype(simd::no_sum()) sum[R][X::VECS][X::PLANES];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int v = 0; v < X::VECS; v++) {
#pragma GCC unroll 3
                for (int plane = 0; plane < X::PLANES; plane++) {
                    sum[r][v][plane] = first_sum<X>(x, plane, v);
                }
            }
        }
        const auto add_step = [&](int step) __attribute__((always_inline)) {
            decltype(simd::load_ints(X::x(x, 0, 0, 0))) xs[X::VECS][X::PLANES];
#pragma GCC unroll 4
            for (int v = 0; v < X::VECS; v++) {
#pragma GCC unroll 3
                for (int plane = 0; plane < X::PLANES; plane++) {
                    xs[v][plane] = simd::load_ints(X::x(x, step, plane, v));
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const auto w =
                    simd::template load_weights<X::T>(weights + r * CHUNK + b * X::BLOCK + step * X::VEC_COLUMNS);
#pragma GCC unroll 4
                for (int v = 0; v < X::VECS; v++) {
#pragma GCC unroll 3
                    for (int plane = 0; plane < X::PLANES; plane++) {
                        sum[r][v][plane] = simd::dot(sum[r][v][plane], w, xs[v][plane]);
                    }
                }
            }
        };
        constexpr int TOGETHER = X::STEPS < simd::unrolled_steps ? X::STEPS : simd::unrolled_steps; // powers of two
        for (int step = 0; step < X::STEPS; step += TOGETHER) {
#pragma GCC unroll 16
            for (int i = 0; i < TOGETHER; i++) {
                add_step(step + i);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vec scale = simd::set1(scales[r * SCALES + (b >> shift)]);
#pragma GCC unroll 4
            for (int v = 0; v < X::VECS; v++) {
                const vec value = value_of<X>(sum[r][v]);
                const vec both  = simd::mul(scale, simd::load(X::scales(x) + v * LANES));
                if constexpr (IN_REGISTERS) {
                    total[r][v] = simd::fma(value, both, total[r][v]);
                } else {
                    float * at = sums + r * STRIDE + v * LANES;
                    simd::store(at, simd::fma(value, both, simd::load(at)));
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R && IN_REGISTERS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < X::VECS; v++) {
            simd::store(sums + r * STRIDE + v * LANES, total[r][v]);
        }
    }
}

// Rows of weights as integers, with the sums of N_TILES tiles of tokens.
template <int N_ROWS, int N_TILES> struct quantized_rows {
    static constexpr int     SUMS = (N_ROWS + W - 1) / W * W * (N_TILES == 1 ? 1 : TILE_VECS_X) * LANES;
    const quantized_layout & w;
    const mul_mat_params &   p;
    row_source               source = row_source(w);
    read_fn                  read   = reader_of(w.bits);
    int                      block = block_columns(w.window), planes = planes_of(p.round_x);
    int                      shift    = source.log_window - (block == 32 ? 5 : 6); // log2 of the blocks of a window
    bool                     one_x    = N_TILES == 1 && p.n == 1 && block == 64;   // which add_words() multiplies
    int64_t                  tile     = tile_tokens(p.round_x);
    int64_t                  n_blocks = words_of(w.cols) * 64 / block;
    packed_rows              packed;
    alignas(64) weight_t weights[N_ROWS * CHUNK];
    alignas(64) float scales[N_ROWS * SCALES];
    alignas(64) float sums[N_TILES][SUMS];

    quantized_rows(const quantized_layout & matrix, const mul_mat_params & params) : w(matrix), p(params) {}

    // Calls f(form, tile, its x, token, its n) for tiles from `token` on.
    template <typename F> INLINE void for_each_tile(int64_t first, int64_t last, const F & f) {
        const int64_t full = n_blocks * form_of(block, planes, smaller(tile, p.n)).nbytes; // of the x of a full tile
        for (int64_t token = first; token < last; token += tile) {
            const int64_t n = smaller(tile, p.n - token);
            f(form_of(block, planes, n), (token - first) / tile,
              static_cast<uint8_t *>(p.scratch) + token / tile * full, token, n);
        }
    }

    // Rows of levels * one x, from `column` on.
    INLINE void multiply_one(int64_t row, int64_t n_rows, int64_t column, int64_t n_words, int64_t * used) {
        with_planes(planes, [&](auto n_planes) {
            using X     = x_form<64, 1, 1, n_planes.value>;
            uint8_t * x = static_cast<uint8_t *>(p.scratch) + column / X::BLOCK * X::NBYTES;
            read_scales(source, row, static_cast<int>(n_rows), column, n_words, shift, scales);
            scale_words<X>(scales, static_cast<int>(n_rows), x, n_words);
            if constexpr (simd::has_levels_at) {
                with_bits(w.bits, [&](auto bits) {
                    if (n_rows == ROWS_PER_PASS) {
                        add_coded_words<bits.value, X, ROWS_PER_PASS>(source, row, column, n_words, scales, x, used,
                                                                      sums[0]);
                        return;
                    }
                    for (int64_t r = 0; r < n_rows; r++) {
                        add_coded_words<bits.value, X, 1>(source, row + r, column, n_words, scales + r * SCALES, x,
                                                          used + r, sums[0] + r * LANES);
                    }
                });
            } else if (n_rows == ROWS_PER_PASS) {
                add_words<X, ROWS_PER_PASS>(packed.mask, packed.at, scales, x, n_words, sums[0]);
            } else {
                for (int64_t r = 0; r < n_rows; r++) {
                    add_words<X, 1>(packed.mask + r, packed.at + r, scales + r * SCALES, x, n_words,
                                    sums[0] + r * LANES);
                }
            }
        });
    }

    // Rows of weights * tiles of tokens, from `column` on.
    INLINE void multiply_tiles(int64_t n_rows, int64_t first, int64_t last, int64_t column, int64_t n_columns) {
        const int     log_block = block == 32 ? 5 : 6;
        const int64_t part      = (N_TILES == 1 ? CHUNK : SUB_CHUNK) >> log_block;
        const int64_t all       = n_columns >> log_block;
        for_each_tile(first, last, [&](const form_of_x & form, int64_t t, uint8_t * x, int64_t, int64_t) {
            const int64_t       stride = form.vecs * LANES;
            const bool          single = form.add_row && n_rows < ROWS_PER_PASS;
            const add_blocks_fn add    = single ? form.add_row : form.add_rows;
            x += (column >> log_block) * form.nbytes;
            for (int64_t b = 0; b < all; b += part) {
                for (int64_t r = 0; r < n_rows; r += single ? 1 : ROWS_PER_PASS) {
                    add(weights + r * CHUNK, scales + r * SCALES, shift, x + b * form.nbytes, b, smaller(part, all - b),
                        sums[t] + r * stride);
                }
            }
        });
    }

    void multiply(int64_t row, int64_t n_rows, int64_t first, int64_t last) {
        int64_t used[N_ROWS] = {};
        for (auto & of_tile : sums) {
            __builtin_memset(of_tile, 0, sizeof(of_tile));
        }
        for (int64_t column = 0; column < w.cols; column += CHUNK) {
            const int64_t n_columns = smaller(CHUNK, words_of(w.cols - column) * 64);
            const int64_t n_words   = n_columns / 64;
            for (int64_t r = 0; r < n_rows && !(one_x && simd::has_levels_at); r += ROWS_PER_PASS) {
                const auto n = static_cast<int>(smaller(ROWS_PER_PASS, n_rows - r));
                read(source, row + r, n, column, n_words, used + r, packed);
                if (!one_x) {
                    read_scales(source, row + r, n, column, source.windows_of(n_words), 0, scales + r * SCALES);
                }
                for (int k = 0; k < n && !one_x; k++) {
                    const uint8_t * at = packed.at[k];
                    for (int64_t word = 0; word < n_words; word++) {
                        spread(packed.mask[k][word], at, weights + (r + k) * CHUNK + word * 64);
                        at += __builtin_popcountll(packed.mask[k][word]);
                    }
                }
                for (int k = n; k < ROWS_PER_PASS && !one_x; k++) { // add_rows() reads and ignores them
                    __builtin_memset(weights + (r + k) * CHUNK, 0, static_cast<size_t>(n_columns) * sizeof(weight_t));
                    __builtin_memset(scales + (r + k) * SCALES, 0, SCALES * sizeof(float));
                }
            }
            if constexpr (N_TILES == 1) {
                if (one_x) {
                    multiply_one(row, n_rows, column, n_words, used);
                    continue;
                }
            }
            multiply_tiles(n_rows, first, last, column, n_columns);
        }
        for_each_tile(first, last, [&](const form_of_x & form, int64_t t, uint8_t *, int64_t token, int64_t n) {
            if (form.tokens == LANES) {
                store_block(p, sums[t], form.vecs, row, n_rows, token, n);
                return;
            }
            const int per_token = LANES / form.tokens;
            for (int64_t r = 0; r < n_rows; r++) {
                for (int64_t i = 0; i < n; i++) {
                    const float * lanes = sums[t] + r * LANES + i * per_token;
                    float         y     = lanes[0];
                    for (int j = 1; j < per_token; j++) {
                        y += lanes[j];
                    }
                    p.y[token + i][row + r - p.row_begin] = y;
                }
            }
        });
    }
};

template <int N_ROWS, int N_TILES>
void multiply_quantized_rows(const quantized_layout & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    quantized_rows<N_ROWS, N_TILES> rows(w, p);
    const int64_t                   group = N_TILES * rows.tile;
    for (int64_t token = 0; token < p.n; token += group) {
        for (int64_t row = row_begin; row < row_end; row += N_ROWS) {
            rows.multiply(row, smaller(N_ROWS, row_end - row), token, smaller(token + group, p.n));
        }
    }
}

void multiply_quantized(const quantized_layout & w, const mul_mat_params & p, x_layout, int64_t row_begin,
                        int64_t row_end) {
    p.n <= LANES ? multiply_quantized_rows<ROWS_PER_PASS, 1>(w, p, row_begin, row_end)
                 : multiply_quantized_rows<ROW_TILE, TILES>(w, p, row_begin, row_end);
}

// ---- dense rows ----

// Writes the n first columns of a word. low, high: the scales of its halves.
using write_word_fn = void (*)(const weight_t * weights, float low, float high, int64_t n, uint16_t * dense);
template <int TYPE> void write_word(const weight_t * weights, float low, float high, int64_t n, uint16_t * dense) {
    float    scales[64];
    uint16_t all[64];
    for (int i = 0; i < 64; i++) {
        scales[i] = i < 32 ? low : high;
    }
    for (int i = 0; i < 64; i++) { // as many as bytes in the longest vector
        all[i] = dense_of_quant<uint16_t>(scales[i], weights[i] - OFFSET, TYPE);
    }
    if (n >= 64) {
        __builtin_memcpy(dense, all, sizeof(all));
    } else {
        __builtin_memcpy(dense, all, static_cast<size_t>(n) * 2);
    }
}

[[maybe_unused]] void expand_quantized(const quantized_layout & w, int64_t row_begin, int64_t row_end,
                                       uint16_t * dense) {
    const row_source    source(w);
    const read_fn       read = reader_of(w.bits);
    const write_word_fn write =
        w.dense_type == GGML_MACKO_TYPE_F16 ? write_word<GGML_MACKO_TYPE_F16> : write_word<GGML_MACKO_TYPE_BF16>;
    packed_rows          packed;
    alignas(64) weight_t weights[64];
    float                scales[ROWS_PER_PASS * SCALES];
    for (int64_t row = row_begin; row < row_end; row += ROWS_PER_PASS, dense += ROWS_PER_PASS * w.cols) {
        const auto n_rows              = static_cast<int>(smaller(ROWS_PER_PASS, row_end - row));
        int64_t    used[ROWS_PER_PASS] = {};
        for (int64_t column = 0; column < w.cols; column += CHUNK) {
            const int64_t n_words = words_of(smaller(CHUNK, w.cols - column));
            read(source, row, n_rows, column, n_words, used, packed);
            read_scales(source, row, n_rows, column, source.windows_of(n_words), 0, scales);
            for (int r = 0; r < n_rows; r++) {
                const uint8_t * at    = packed.at[r];
                const float *   scale = scales + r * SCALES;
                uint16_t *      out   = dense + r * w.cols + column;
                for (int64_t col = 0; col < n_words * 64; col += 64) {
                    const uint64_t bits = packed.mask[r][col / 64];
                    spread(bits, at, weights);
                    at += __builtin_popcountll(bits);
                    write(weights, scale[col >> source.log_window], scale[(col + 32) >> source.log_window],
                          w.cols - column - col, out + col);
                }
            }
        }
    }
}

} // namespace
} // namespace macko::cpu
