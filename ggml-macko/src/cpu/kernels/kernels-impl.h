// The kernels of y = W x, written once for all instruction sets and value types.
//
// How one body serves all instruction sets. Each kernels-*.cpp defines `struct simd`, a thin layer of vector
// operations, in an unnamed namespace, includes this file after it, and is compiled with its own -m flags. Everything
// here has internal linkage, so each of those translation units has a copy that is compiled for its instruction set and
// that others reach only through its kernel_set. Nothing here may call a function of another header, std:: templates
// included: the compiler could emit that function here with AVX-512 instructions, and the linker could pick that copy
// for code that runs on any CPU. The test kernel-objects checks this.
//
// How the work is laid out. W is a bitmap_matrix (bitmap.h): per row a bit mask and the packed non-zeros. Three kernels
// differ in how x lies in the scratch memory (x_layout), and in which operand is moved to meet the other:
//
//   rows     float x[n][cols]. Weights are expanded to their columns and meet up to X_BATCH x.
//
//                mask       1 0 0 1 1 0 1 0
//                values     a b c d              the next non-zeros of the row
//                expanded   a 0 0 b c 0 d 0      acc[i] += expanded * x[i][columns], for each x
//
//            One FMA per W columns and x. Bound by memory at n = 1; the choice for few x (decoding).
//
//   rows16   x[cols] of 16-bit numbers, n = 1. Weights stay packed, and x is compressed to them.
//
//                mask       1 0 0 1 1 0 1 0
//                x          0 1 2 3 4 5 6 7      64 columns are in two registers
//                compressed 0 3 4 6              acc += compressed * values
//
//            One FMA per W non-zeros, so it is faster than `rows` at low densities. Only where a simd has_rows16<TYPE>:
//            it brings dot_gathered() (AVX-512 VBMI2, F16 and BF16), or compress(), which works on segments of
//            rows_compressed<TYPE> rows, and dot_groups() and dot_floats(). With quantized weights x are 16-bit
//            integers, so that products and their sums are exact.
//
//   panels   float x[tile][cols][tokens of the tile]: the packed panels of a dense GEMM, for many x (prefill).
//
//                for each block of rows, for each chunk of columns:      the chunk's part of the panel stays in L1
//                    bits and values of a row -> list of (column, weight)                      decode_chunk()
//                    acc[row][tokens] += weight * x[column][tokens], for each of the list      accumulate()
//
//            One FMA per non-zero and W tokens, and a row is decoded once for a whole tile of TILE tokens.
//
// `columns` is another product altogether, for one x with many zeros: it adds x_c times column c of W to y for each c
// whose x_c is not zero. Threads take parts of the columns and have sums of their own, which dispatch.cpp adds up.
//
// Another, `planes`, is for matrices in bundles (bundles.h), in the sets that have kernels for them
// (kernels-bundles-*.h). Their `panels` begin with lists for all rows of a group.
//
// Quantized weights in `rows` and `panels` are dequantized to floats half a group (32 values with one scale) at a time.
#pragma once

#include "cpu/kernels/dispatch.h"

#pragma GCC diagnostic ignored "-Wsign-conversion" // int template arguments as array bounds

#define INLINE inline __attribute__((always_inline))

namespace macko::cpu {
namespace {

using vec       = simd::vec;
constexpr int W = simd::width; // floats in a vector

constexpr int TILE_VECS = simd::tile_vecs; // vectors of tokens in a full tile
constexpr int TILE      = TILE_VECS * W;   // tokens in a full tile
constexpr int MAX_CHUNK = 512;             // columns of a chunk
// floats of a panel that stay in L1 (32 KiB): the fastest of 16 to 256 KiB at density 1/2
constexpr int CHUNK_SIZE = 8192;
constexpr int BLOCK_SIZE = 32768; // floats of accumulators that stay in L2, on the stack (128 KiB)
// mask words of a chunk and rows of a block, for a tile of NV vectors of tokens
template <int NV>
constexpr int CHUNK_WORDS = (CHUNK_SIZE / (NV * W) > MAX_CHUNK ? MAX_CHUNK : CHUNK_SIZE / (NV * W)) / 64;
template <int NV> constexpr int BLOCK_ROWS = BLOCK_SIZE / (NV * W) / W * W;
static_assert(CHUNK_WORDS<TILE_VECS> > 0, "a chunk has whole mask words");

constexpr int PREFETCH = 4096; // bytes ahead in the values; with 512, AVX2 was half as fast at density 1/2

constexpr int X_BATCH = 8; // x that each expanded vector of weights meets

template <int TYPE> constexpr bool is_quant = is_quant_type(TYPE);
template <int TYPE> constexpr bool is_coded = TYPE == GGML_MACKO_TYPE_CODED;
// the type that expand() and load_values() read: quantized values have been dequantized to F32
template <int TYPE> constexpr int     PLAIN      = is_quant<TYPE> ? GGML_MACKO_TYPE_F32 : TYPE;
template <int TYPE> constexpr int64_t value_size = PLAIN<TYPE> == GGML_MACKO_TYPE_F32 ? 4 : 2;
template <int TYPE> constexpr int64_t group_size = quant_group_nbytes(TYPE);

// whether a simd has expand_coded(), load_coded() and store_coded_x()
template <typename S, typename = void> constexpr bool coded_kernels                                = false;
template <typename S> constexpr bool coded_kernels<S, decltype(static_cast<void>(&S::load_coded))> = true;

// mask_words(), std::min() and in_bundles(), which are functions of other headers
INLINE int64_t words_of(int64_t cols) { return (cols + 63) / 64; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE bool    is_bundled(const bitmap_matrix & w) {
    return w.group_off && w.group_off[(w.rows + BUNDLE_ROWS - 1) / BUNDLE_ROWS] != 0;
}

// bits s * STEP ... (s + 1) * STEP - 1 of a mask word
template <int STEP> INLINE uint32_t mask_bits(uint64_t bits, int s) {
    return static_cast<uint32_t>(bits >> (s * STEP)) & static_cast<uint32_t>((uint64_t(1) << STEP) - 1);
}

// Reads the values of a row from front to back: next(n, buffer) returns where the next n lie as PLAIN<TYPE>. buffer has
// BUFFER<TYPE, n> floats. Kernels may read up to 64 values behind the n, and ignore them.
template <int TYPE> struct plain_reader {
    const uint8_t * at;
    INLINE void     start(const bitmap_matrix & w, int64_t row) {
        at = w.values + static_cast<int64_t>(w.row_off[row]) * value_size<TYPE>;
    }
    INLINE const uint8_t * next(int64_t n, float *) {
        const uint8_t * values = at;
        at += n * value_size<TYPE>;
        return values;
    }
};
template <int TYPE> struct quant_reader {
    const uint8_t * at;   // the current group
    int64_t         skip; // values of it that have been read
    INLINE void     start(const bitmap_matrix & w, int64_t row) {
        const int64_t first = w.row_off[row];
        at                  = w.values + first / 64 * group_size<TYPE>;
        skip                = first % 64;
    }
    INLINE const uint8_t * next(int64_t n, float * buffer) {
        const int64_t first = skip, last = skip + n;
        for (int64_t i = first / 32 * 32; i < last; i += 32) { // a half that the next call ends is dequantized twice
            simd::template dequantize<TYPE>(at + i / 64 * group_size<TYPE>, static_cast<int>(i / 32 % 2), buffer + i);
        }
        at += last / 64 * group_size<TYPE>;
        skip = last % 64;
        return reinterpret_cast<const uint8_t *>(buffer + first);
    }
};
// Coded values are not made floats in a buffer: next() says where they are. Outliers are not among them.
struct coded_reader {
    const uint8_t * at;
    uint64_t        first; // values in front of it
    uint32_t        outlier;
    uint32_t        high;
    const uint8_t * signs;
    const uint8_t * highs;
    INLINE void     start(const bitmap_matrix & w, int64_t row) {
        first   = w.row_off[row];
        at      = w.values + first;
        outlier = w.coded.outlier_off[row];
        high    = *w.coded.high;
        signs   = w.coded.signs;
        highs   = w.coded.highs;
    }
    INLINE coded_values next(int64_t n, float *) {
        const coded_values values = { at, signs, highs, first, high };
        at += n;
        first += static_cast<uint64_t>(n);
        return values;
    }
};
// The three streams beside the bytes, so far ahead as they are read while 4 KiB of bytes are at density 1/2.
INLINE void prefetch_bits(const coded_reader & values, const uint64_t * mask) {
    __builtin_prefetch(mask + 128);
    __builtin_prefetch(values.signs + values.first / 8 + 512);
    __builtin_prefetch(values.highs + values.first / 8 + 512);
}
template <typename R> INLINE void prefetch_bits(const R &, const uint64_t *) {}
template <bool QUANT, bool CODED> struct reader_of {
    template <int TYPE> using type = plain_reader<TYPE>;
};
template <> struct reader_of<true, false> {
    template <int TYPE> using type = quant_reader<TYPE>;
};
template <> struct reader_of<false, true> {
    template <int TYPE> using type = coded_reader;
};
template <int TYPE> using reader = typename reader_of<is_quant<TYPE>, is_coded<TYPE>>::template type<TYPE>;
template <int TYPE, int N> constexpr int BUFFER = is_quant<TYPE> ? N + 64 + 32 + 64 : 1;

// Expands the next values to the STEP columns of part s of a mask word, and goes past them.
template <int TYPE, int STEP> INLINE void expand_next(const uint8_t *& at, uint64_t bits, int s, vec * w) {
    const auto part = simd::template table_part<STEP>(bits, s);
    simd::template expand<PLAIN<TYPE>>(at, part, w);
    at += __builtin_popcount(part) * value_size<TYPE>;
}
template <int TYPE, int STEP, typename S = simd>
INLINE void expand_next(coded_values & at, uint64_t bits, int, vec * w) {
    static_assert(STEP == 64, "a whole mask word");
    const int n = __builtin_popcountll(bits);
    S::expand_coded(at, bits, n, w);
    at.at += n;
    at.first += static_cast<uint64_t>(n);
}

// Where column c of a mask word's x lies where x meets coded values, whose bytes come out of their registers in this
// order: of each 16 columns, those with even numbers below 8 are in a lane of the first vector, the odd ones in a lane
// of the second, and the others in the third and fourth.
INLINE int64_t coded_place(int64_t c) {
    return (c & ~int64_t(63)) | (c & 8) << 2 | (c & 1) << 4 | (c & 48) >> 2 | (c & 6) >> 1;
}

// Sum of the outliers of a row times an x of prepare_coded().
INLINE float dot_outliers(const bitmap_matrix & w, int64_t row, const float * x) {
    float sum = 0;
    for (uint32_t i = w.coded.outlier_off[row]; i < w.coded.outlier_off[row + 1]; i++) {
        sum += w.coded.outliers[i] * x[coded_place(w.coded.outlier_cols[i])];
    }
    return sum;
}

// ---- copying x to the scratch memory ----

// The W floats at src, of which the first n exist and the others are zero; rounded to TYPE if `round`.
template <int TYPE> INLINE vec load_x(const float * src, int64_t n, bool round) {
    vec v;
    if (n >= W) {
        v = simd::load(src);
    } else {
        float part[W] = {};
        for (int64_t i = 0; i < n; i++) {
            part[i] = src[i];
        }
        v = simd::load(part);
    }
    if (TYPE == GGML_MACKO_TYPE_F16 && round) {
        return simd::round_f16(v);
    }
    if (TYPE == GGML_MACKO_TYPE_BF16 && round) {
        return simd::round_bf16(v);
    }
    return v;
}

// Transposes a W x W matrix by log2(W) perfect shuffles of its rows.
INLINE void transpose(vec (&v)[W]) {
    for (int round = 1; round < W; round *= 2) {
        vec t[W];
        for (int i = 0; i < W / 2; i++) {
            simd::zip(v[i], v[i + W / 2], t[2 * i], t[2 * i + 1]);
        }
        for (int i = 0; i < W; i++) {
            v[i] = t[i];
        }
    }
}

// Columns col_begin ... col_end-1 of all x; both are multiples of W, and columns from cols on become zero.
template <int TYPE> void prepare_rows(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t padded = words_of(p.w.cols) * 64;
    for (int64_t i = 0; i < p.n; i++) {
        float * dst = static_cast<float *>(p.scratch) + i * padded;
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = p.w.cols - c;
            simd::store(dst + c, load_x<TYPE>(left > 0 ? p.x[i] + c : nullptr, left, p.round_x));
        }
    }
}

// For coded values: each 64 columns in the order of coded_place().
template <int TYPE, typename S> void prepare_coded(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t padded = words_of(p.w.cols) * 64;
    for (int64_t i = 0; i < p.n; i++) {
        float * dst = static_cast<float *>(p.scratch) + i * padded;
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = p.w.cols - c;
            S::store_coded_x(dst + coded_place(c), load_x<TYPE>(left > 0 ? p.x[i] + c : nullptr, left, p.round_x));
        }
    }
}

template <int TYPE> void prepare_panels(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t padded = words_of(p.w.cols) * 64;
    for (int64_t t = 0; t < p.n; t += TILE) {
        const int64_t tokens = smaller(TILE, p.n - t);
        const int64_t stride = (tokens + W - 1) / W * W;
        float *       dst    = static_cast<float *>(p.scratch) + t * padded;
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = p.w.cols - c;
            for (int64_t g = 0; g < tokens; g += W) {
                vec v[W];
                for (int i = 0; i < W; i++) {
                    v[i] =
                        left > 0 && g + i < tokens ? load_x<TYPE>(p.x[t + g + i] + c, left, p.round_x) : simd::zero();
                }
                transpose(v);
                for (int i = 0; i < W; i++) {
                    simd::store(dst + (c + i) * stride + g, v[i]);
                }
            }
        }
    }
}

// ---- rows16 ----
// S is simd, as a template parameter: its functions are looked up only where a set has them.

// With quantized weights, x becomes the integers x / scale, which have 16 bits, so that their products with q are exact
// in int32. S::X_OFFSET is added to them, which adds a known amount to each y, X_OFFSET * scale * row_sums[row]. In the
// scratch memory there are 128 bytes for each 64 columns, in the order that S::store_integers gives them. The scale
// comes after the last of them.
INLINE float * scale_of_x(const mul_mat_params & p) {
    return reinterpret_cast<float *>(static_cast<uint8_t *>(p.scratch) + words_of(p.w.cols) * 128);
}

// the largest magnitude in x; each thread finds it by itself, which is faster than a barrier
template <typename S> float largest_of(const float * x, int64_t cols) {
    vec most = simd::zero();
    for (int64_t c = 0; c < cols; c += W) {
        most = S::max_magnitude(most, load_x<GGML_MACKO_TYPE_F32>(x + c, cols - c, false));
    }
    return S::largest(most);
}

template <typename S> void prepare_integers(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    const int64_t cols    = p.w.cols;
    const float   largest = largest_of<S>(p.x[0], cols);
    const float   inverse = largest > 0x1p-100f ? 32767.0f / largest : 0.0f; // finite
    uint8_t *     dst     = static_cast<uint8_t *>(p.scratch);
    for (int64_t c = col_begin; c < col_end; c += W) {
        const int64_t left = cols - c;
        S::store_integers(dst, c, load_x<GGML_MACKO_TYPE_F32>(left > 0 ? p.x[0] + c : nullptr, left, false), inverse);
    }
    if (col_begin == 0 && col_end > 0) {
        *scale_of_x(p) = largest / 32767.0f;
    }
}

INLINE float density_of(const mul_mat_params & p) {
    return static_cast<float>(p.w.row_off[p.row_end] - p.w.row_off[p.row_begin]) /
           (static_cast<float>(p.row_end - p.row_begin) * static_cast<float>(p.w.cols));
}

// mask words of a segment, which has about so many non-zeros
INLINE int64_t segment_words(float density, int nonzeros) {
    const float words = static_cast<float>(nonzeros) / 64;
    return density * SEGMENT_WORDS <= words ? SEGMENT_WORDS : static_cast<int64_t>(words / density);
}

// Two steps for each segment of a row: the x of its non-zeros are compressed, then multiplied by the packed weights.
// Quantized weights are multiplied by whole groups: up to 63 zeros go in front, so that the first x lies in its group
// as its weight does, and weights of a group that belong to other segments meet zeros. The second step is one segment
// behind the first: a load that covers several recent stores waits until they have reached the cache (AVX-512: 2.0
// against 1.5 ns per 64 columns at density 0.3).
template <int TYPE, typename S> struct compressor {
    struct segment_of_row {
        const uint8_t * values; // of plain types: the first value; else the group of the first value
        int64_t         n;      // x, with the zeros in front
        float *         y;
    };
    static constexpr int ROWS = S::template rows_compressed<TYPE>; // at a time: they share the loads of x

    const mul_mat_params * params;
    int64_t                segment; // mask words; the same for all rows and threads, since it decides the order of sums
    float                  scale;
    int                    now;
    segment_of_row         last[ROWS];
    compressed_x           compressed[2][ROWS];

    void start(const mul_mat_params & p) {
        params  = &p;
        segment = segment_words(density_of(p), S::segment_nonzeros);
        scale   = is_quant<TYPE> ? *scale_of_x(p) : 1.0f;
        now     = 0;
        for (int r = 0; r < ROWS; r++) {
            last[r].y = nullptr;
        }
    }

    static float dot(const segment_of_row & s, const compressed_x & x) {
        if constexpr (is_quant<TYPE>) {
            return S::template dot_groups<TYPE>(s.values, s.n, x);
        } else {
            return S::template dot_floats<TYPE>(s.values, s.n, x);
        }
    }

    void multiply_last() {
        for (int r = 0; r < ROWS; r++) {
            if (last[r].y) {
                *last[r].y += scale * dot(last[r], compressed[now ^ 1][r]);
                last[r].y = nullptr;
            }
        }
    }

    template <int NR> void add_rows(int64_t row) {
        const mul_mat_params & p     = *params;
        const int64_t          words = words_of(p.w.cols);
        const uint8_t *        x     = static_cast<const uint8_t *>(p.scratch);
        const auto *           mask  = p.w.masks + row * words;
        int64_t                at[NR];
        for (int r = 0; r < NR; r++) {
            at[r]                         = p.w.row_off[row + r];
            p.y[0][row + r - p.row_begin] = is_quant<TYPE> ? -S::X_OFFSET * scale * p.w.row_sums[row + r] : 0.0f;
        }
        // few: rarely more than 32 non-zeros in 64 columns
        const bool few = static_cast<int64_t>(p.w.row_off[row + 1]) - at[0] < p.w.cols * 3 / 8;
        for (int64_t word = 0; word < words; word += segment, now ^= 1) {
            const int64_t n_words = smaller(segment, words - word);
            int64_t       n[NR];
            for (int r = 0; r < NR; r++) {
                n[r] = is_quant<TYPE> ? at[r] % 64 : 0;
                for (int64_t line = 0; line < n_words; line += 8) {
                    __builtin_prefetch(mask + r * words + word + 256 + line);
                }
            }
            S::template compress<TYPE, NR>(mask + word, words, n_words, x + word * 128, few, n, compressed[now]);
            multiply_last();
            for (int r = 0; r < NR; r++) {
                float * y = p.y[0] + (row + r - p.row_begin);
                if (is_quant<TYPE>) {
                    last[r] = { p.w.values + at[r] / 64 * group_size<TYPE>, n[r], y };
                    at[r] += n[r] - at[r] % 64;
                } else {
                    last[r] = { p.w.values + at[r] * value_size<TYPE>, n[r], y };
                    at[r] += n[r];
                }
            }
        }
    }
};

template <int TYPE, typename S> void multiply_compressed(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    using rows = compressor<TYPE, S>;
    rows    all;
    int64_t row = row_begin;
    all.start(p);
    for (; row + rows::ROWS <= row_end; row += rows::ROWS) {
        all.template add_rows<rows::ROWS>(row);
    }
    for (; row < row_end; row++) {
        all.template add_rows<1>(row);
    }
    all.multiply_last();
}

template <int TYPE, typename S> void prepare_rows16(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    uint8_t * dst = static_cast<uint8_t *>(p.scratch);
    for (int64_t c = col_begin; c < col_end; c += W) {
        const int64_t left = p.w.cols - c;
        S::template store16<TYPE>(dst + c * 2, load_x<TYPE>(left > 0 ? p.x[0] + c : nullptr, left, true));
    }
}

template <int TYPE, typename S> void multiply_gathered(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    const int64_t words = words_of(p.w.cols);
    for (int64_t row = row_begin; row < row_end; row++) {
        const uint8_t * values = p.w.values + static_cast<int64_t>(p.w.row_off[row]) * 2;
        const uint8_t * x      = static_cast<const uint8_t *>(p.scratch);
        // few: at this density 64 columns have 9.6 non-zeros on average
        const bool few = static_cast<int64_t>(p.w.row_off[row + 1] - p.w.row_off[row]) * 20 <= p.w.cols * 3;
        p.y[0][row - p.row_begin] =
            few ? S::template dot_gathered<TYPE, true>(p.w.masks + row * words, words, values, x)
                : S::template dot_gathered<TYPE, false>(p.w.masks + row * words, words, values, x);
    }
}

template <int TYPE, typename S> void multiply_rows16(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    if constexpr (S::template rows_compressed<TYPE> > 0) {
        multiply_compressed<TYPE, S>(p, row_begin, row_end);
    } else {
        multiply_gathered<TYPE, S>(p, row_begin, row_end);
    }
}

// ---- rows ----

// NR rows times NX x. The result of a row does not depend on the rows beside it: the operations and their order are the
// same for each NR.
template <int TYPE, // of the values
          int NX,   // x that each vector of weights meets
          int NR    // rows that each vector of x meets
          >
void dot_rows(const mul_mat_params & p, int64_t row, int64_t first_x) {
    constexpr int STEP = simd::step<PLAIN<TYPE>>;
    constexpr int VECS = STEP / W;
    constexpr int ACCS = NX == 1 ? 4 : NX <= 4 ? 2 : 1; // independent sums per row and x, to hide the latency of an FMA
    // Words whose values are dequantized before the first of them is used: a load that covers several recent stores
    // waits until they have reached the cache.
    constexpr int SEGMENT = is_quant<TYPE> ? 8 : 1;

    const int64_t words  = words_of(p.w.cols);
    const int64_t padded = words * 64;
    const float * x      = static_cast<const float *>(p.scratch) + first_x * padded;

    const uint64_t *  mask[NR];
    reader<TYPE>      values[NR];
    alignas(64) float buffer[NR][BUFFER<TYPE, SEGMENT * 64>];
    vec               acc[NR][NX][ACCS];
    for (int r = 0; r < NR; r++) {
        mask[r] = p.w.masks + (row + r) * words;
        values[r].start(p.w, row + r);
        for (int i = 0; i < NX; i++) {
            for (int a = 0; a < ACCS; a++) {
                acc[r][i][a] = simd::zero();
            }
        }
    }
    for (int64_t segment = 0; segment < words; segment += SEGMENT) {
        const int64_t                        n_words = SEGMENT == 1 ? 1 : smaller(SEGMENT, words - segment);
        uint64_t                             any     = 0;
        decltype(values[0].next(0, nullptr)) at[NR];
#pragma GCC unroll 4
        for (int r = 0; r < NR; r++) {
            int64_t n = 0;
            for (int64_t word = 0; word < n_words; word++) {
                n += __builtin_popcountll(mask[r][segment + word]);
                any |= mask[r][segment + word];
            }
            __builtin_prefetch(values[r].at + PREFETCH);
            if (is_coded<TYPE> && segment % 8 == 0) { // a line of the mask; the bits of its values are less
                prefetch_bits(values[r], mask[r] + segment);
            }
            at[r] = values[r].next(n, buffer[r]);
        }
        if (!any) {
            x += 64 * n_words;
            continue;
        }
        for (int64_t word = segment; word < segment + n_words; word++, x += 64) {
            uint64_t bits[NR];
#pragma GCC unroll 4
            for (int r = 0; r < NR; r++) {
                bits[r] = simd::table_bits(mask[r][word]);
            }
#pragma GCC unroll 16
            for (int s = 0; s < 64 / STEP; s++) {
                vec w[NR][VECS];
#pragma GCC unroll 4
                for (int r = 0; r < NR; r++) {
                    expand_next<TYPE, STEP>(at[r], bits[r], s, w[r]);
                }
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
#pragma GCC unroll 8
                    for (int i = 0; i < NX; i++) {
                        const vec xv = simd::load(x + i * padded + s * STEP + v * W);
#pragma GCC unroll 4
                        for (int r = 0; r < NR; r++) {
                            vec & sum = acc[r][i][(s * VECS + v) % ACCS];
                            sum       = simd::fma(w[r][v], xv, sum);
                        }
                    }
                }
            }
        }
    }
    for (int r = 0; r < NR; r++) {
        for (int i = 0; i < NX; i++) {
            for (int a = ACCS / 2; a > 0; a /= 2) {
                for (int b = 0; b < a; b++) {
                    acc[r][i][b] = simd::add(acc[r][i][b], acc[r][i][b + a]);
                }
            }
            float y = simd::sum(acc[r][i][0]);
            if constexpr (is_coded<TYPE>) {
                y += dot_outliers(p.w, row + r, static_cast<const float *>(p.scratch) + (first_x + i) * padded);
            }
            p.y[first_x + i][row + r - p.row_begin] = y;
        }
    }
}

template <int TYPE, int NX>
void multiply_batch(const mul_mat_params & p, int64_t row, int64_t n_rows, int64_t first_x) {
    constexpr int NR = simd::rows_per_pass<NX>;
    int64_t       r  = 0;
    for (; r + NR <= n_rows; r += NR) {
        dot_rows<TYPE, NX, NR>(p, row + r, first_x);
    }
    for (; r < n_rows; r++) {
        dot_rows<TYPE, NX, 1>(p, row + r, first_x);
    }
}

template <int TYPE> void multiply_rows(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    constexpr int64_t BLOCK = 8; // rows that stay in L1 from one batch of x to the next
    const int64_t     step  = p.n <= X_BATCH ? row_end - row_begin : BLOCK;
    for (int64_t row = row_begin; row < row_end; row += step) {
        const int64_t n_rows = smaller(step, row_end - row);
        for (int64_t i = 0; i < p.n; i += X_BATCH) {
            switch (smaller(X_BATCH, p.n - i)) {
                case 1:  multiply_batch<TYPE, 1>(p, row, n_rows, i); break;
                case 2:  multiply_batch<TYPE, 2>(p, row, n_rows, i); break;
                case 3:  multiply_batch<TYPE, 3>(p, row, n_rows, i); break;
                case 4:  multiply_batch<TYPE, 4>(p, row, n_rows, i); break;
                case 5:  multiply_batch<TYPE, 5>(p, row, n_rows, i); break;
                case 6:  multiply_batch<TYPE, 6>(p, row, n_rows, i); break;
                case 7:  multiply_batch<TYPE, 7>(p, row, n_rows, i); break;
                default: multiply_batch<TYPE, 8>(p, row, n_rows, i); break;
            }
        }
    }
}

// ---- columns ----

constexpr int64_t COLUMN_LIST      = 2048; // columns that are listed at a time
constexpr int     COLUMNS_PER_PASS = 4;    // columns that each vector of sums meets
constexpr int64_t PREFETCHED       = 2 * COLUMNS_PER_PASS;

// Columns whose x is not zero, in ascending order, and copies of the last one behind them.
struct column_list {
    int64_t  n;
    uint32_t col[COLUMN_LIST + PREFETCHED + W];
};

INLINE void list_columns(const mul_mat_params & p, int64_t begin, int64_t end, column_list & list) {
    const float * x = static_cast<const float *>(p.scratch);
    list.n          = 0;
    for (int64_t c = begin; c < end; c += W) {
        uint32_t bits = static_cast<uint32_t>((uint64_t(1) << smaller(W, end - c)) - 1);
        if (p.skip_zeros) {
            bits &= simd::nonzeros(simd::load(x + c));
        }
        simd::columns(bits, static_cast<uint32_t>(c), list.col + list.n);
        list.n += __builtin_popcount(bits);
    }
    for (int64_t i = 0; i < PREFETCHED && list.n > 0; i++) {
        list.col[list.n + i] = list.col[list.n - 1];
    }
}

INLINE const uint64_t * column_mask(const bitmap_matrix & m, uint32_t col) {
    return m.masks + static_cast<int64_t>(col) * words_of(m.cols);
}
template <int TYPE> INLINE const uint8_t * column_values(const bitmap_matrix & m, uint32_t col) {
    return m.values + static_cast<int64_t>(m.row_off[col]) * value_size<TYPE>;
}

// Adds NC columns times their x to the sums. Meanwhile it fetches the columns that come COLUMNS_PER_PASS later, a cache
// line of values or more for each mask word: gaps between columns are what a CPU's own prefetchers do not foresee. The
// result does not depend on NC: each sum meets one column after the other.
template <int TYPE, int NC>
void add_columns_of(const mul_mat_params & p, const uint32_t * col, int64_t lines, float * sums) {
    constexpr int         STEP  = simd::step<TYPE>;
    constexpr int         VECS  = STEP / W;
    const bitmap_matrix & m     = p.columns;
    const int64_t         words = words_of(m.cols);
    const uint64_t *      mask[NC];
    const uint64_t *      mask_ahead[NC];
    const uint8_t *       at[NC];
    const uint8_t *       ahead[NC];
    vec                   x[NC];
#pragma GCC unroll 4
    for (int i = 0; i < NC; i++) {
        mask[i]       = column_mask(m, col[i]);
        mask_ahead[i] = column_mask(m, col[i + COLUMNS_PER_PASS]);
        at[i]         = column_values<TYPE>(m, col[i]);
        ahead[i]      = column_values<TYPE>(m, col[i + COLUMNS_PER_PASS]);
        x[i]          = simd::set1(static_cast<const float *>(p.scratch)[col[i]]);
        __builtin_prefetch(m.row_off + col[i + PREFETCHED]);
    }
    for (int64_t word = 0; word < words; word++, sums += 64) {
        uint64_t bits[NC];
#pragma GCC unroll 4
        for (int i = 0; i < NC; i++) {
            bits[i] = simd::table_bits(mask[i][word]);
            if (word % 8 == 0) {
                __builtin_prefetch(mask_ahead[i] + word);
            }
            for (int64_t line = 0; line < lines; line++, ahead[i] += 64) {
                __builtin_prefetch(ahead[i]);
            }
        }
#pragma GCC unroll 16
        for (int s = 0; s < 64 / STEP; s++) {
            vec sum[VECS];
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) {
                sum[v] = simd::load(sums + s * STEP + v * W);
            }
#pragma GCC unroll 4
            for (int i = 0; i < NC; i++) {
                vec w[VECS];
                expand_next<TYPE, STEP>(at[i], bits[i], s, w);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
                    sum[v] = simd::fma(w[v], x[i], sum[v]);
                }
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) {
                simd::store(sums + s * STEP + v * W, sum[v]);
            }
        }
    }
}

template <int TYPE> void add_columns_type(const mul_mat_params & p, int64_t col_begin, int64_t col_end, float * sums) {
    const int64_t lines = 1 + static_cast<int64_t>(density_of(p) * value_size<TYPE> * 0.9f); // of a mask word's values
    column_list   list;
    for (int64_t i = 0; i < words_of(p.columns.cols) * 64; i += W) {
        simd::store(sums + i, simd::zero());
    }
    for (int64_t c = col_begin; c < col_end; c += COLUMN_LIST) {
        list_columns(p, c, smaller(c + COLUMN_LIST, col_end), list);
        int64_t i = 0;
        for (; i + COLUMNS_PER_PASS <= list.n; i += COLUMNS_PER_PASS) {
            add_columns_of<TYPE, COLUMNS_PER_PASS>(p, list.col + i, lines, sums);
        }
        for (; i < list.n; i++) {
            add_columns_of<TYPE, 1>(p, list.col + i, lines, sums);
        }
    }
}

void add_columns(const mul_mat_params & p, int64_t col_begin, int64_t col_end, float * sums) {
    switch (p.columns.type) {
        case GGML_MACKO_TYPE_F16:  return add_columns_type<GGML_MACKO_TYPE_F16>(p, col_begin, col_end, sums);
        case GGML_MACKO_TYPE_BF16: return add_columns_type<GGML_MACKO_TYPE_BF16>(p, col_begin, col_end, sums);
        default:                   return add_columns_type<GGML_MACKO_TYPE_F32>(p, col_begin, col_end, sums);
    }
}

// ---- panels ----

struct nonzero_list {                         // the non-zeros of a row in a chunk
    alignas(64) uint32_t col[MAX_CHUNK + 64]; // within the chunk
    alignas(64) float weight[MAX_CHUNK + 64];
};

// The weights of the next n values, with up to W - 1 more behind them.
template <int TYPE> INLINE void store_weights(const uint8_t * at, int n, float * weights) {
    for (int i = 0; i < n; i += W) {
        simd::store(weights + i, simd::template load_values<PLAIN<TYPE>>(at + i * value_size<TYPE>));
    }
}
template <int TYPE, typename S = simd> INLINE void store_weights(coded_values at, int n, float * weights) {
    for (int i = 0; i < n; i += W) {
        simd::store(weights + i, S::load_coded(at));
        at.at += W;
        at.first += W;
    }
}

// Adds a row's outliers in the columns begin ... end - 1 to a list of n elements; returns how many it has then.
INLINE int add_outliers(const bitmap_matrix & w, int64_t row, int64_t begin, int64_t end, coded_reader & values,
                        nonzero_list & list, int n) {
    for (; values.outlier < w.coded.outlier_off[row + 1] && w.coded.outlier_cols[values.outlier] < end;
         values.outlier++, n++) {
        list.col[n]    = static_cast<uint32_t>(w.coded.outlier_cols[values.outlier] - begin);
        list.weight[n] = w.coded.outliers[values.outlier];
    }
    return n;
}

// Fills the list with the non-zeros of n_words mask words of a row, from `word` on, and adds zeros up to a multiple of
// `multiple` (at most W). Returns the length with the zeros.
template <int TYPE>
INLINE int decode_chunk(const bitmap_matrix & w, int64_t row, int64_t first_word, int n_words, int multiple,
                        reader<TYPE> & values, nonzero_list & list) {
    const uint64_t *  mask = w.masks + row * words_of(w.cols) + first_word;
    alignas(64) float buffer[BUFFER<TYPE, MAX_CHUNK>];
    int               n = 0;
    for (int word = 0; word < n_words; word++) {
        const uint64_t bits = mask[word];
        for (int s = 0; s < 64 / W; s++) {
            const auto part = mask_bits<W>(bits, s);
            simd::columns(part, static_cast<uint32_t>(word * 64 + s * W), list.col + n);
            n += __builtin_popcount(part);
        }
    }
    store_weights<TYPE>(values.next(n, buffer), n, list.weight);
    if constexpr (is_coded<TYPE>) {
        n = add_outliers(w, row, first_word * 64, (first_word + n_words) * 64, values, list, n);
    }
    for (; n % multiple; n++) {
        list.col[n]    = 0;
        list.weight[n] = 0;
    }
    return n;
}

// acc[NV] += sum of weight * x[col][NV] over the n elements of the list. SETS of them at a time have accumulators of
// their own, which hides the latency of an FMA.
INLINE constexpr int            sets_of(int64_t vecs) { return vecs >= 8 ? 1 : vecs >= 4 ? 2 : vecs >= 2 ? 4 : 8; }
template <int NV> constexpr int SETS = sets_of(NV);

template <int NV, typename LIST> INLINE void accumulate(const float * x, const LIST & list, int n, float * acc) {
    vec sum[SETS<NV>][NV];
#pragma GCC unroll 8
    for (int s = 0; s < SETS<NV>; s++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            sum[s][v] = s == 0 ? simd::load(acc + v * W) : simd::zero();
        }
    }
    for (int i = 0; i < n; i += SETS<NV>) {
#pragma GCC unroll 8
        for (int s = 0; s < SETS<NV>; s++) {
            const vec     w  = simd::set1(list.weight[i + s]);
            const float * xc = x + static_cast<int64_t>(list.col[i + s]) * (NV * W);
            // one address for all loads: gcc may otherwise keep NV of them, some in memory (AVX2: a fifth slower)
            __asm__("" : "+r"(xc));
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                sum[s][v] = simd::fma(w, simd::load(xc + v * W), sum[s][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
#pragma GCC unroll 8
        for (int s = 1; s < SETS<NV>; s++) {
            sum[0][v] = simd::add(sum[0][v], sum[s][v]);
        }
        simd::store(acc + v * W, sum[0][v]);
    }
}

// acc is [row][NV * W], y is [token][row]
template <int NV>
void store_block(const mul_mat_params & p, const float * acc, int64_t row, int64_t n_rows, int64_t token,
                 int64_t n_tokens) {
    for (int64_t r = 0; r < n_rows; r += W) {
        for (int g = 0; g < NV; g++) {
            vec v[W];
            for (int i = 0; i < W; i++) {
                v[i] = simd::load(acc + ((r + i) * NV + g) * W); // rows from n_rows on are not stored
            }
            transpose(v);
            for (int i = 0; i < W && g * W + i < n_tokens; i++) {
                float * dst = p.y[token + g * W + i] + (row + r - p.row_begin);
                if (n_rows - r >= W) {
                    simd::store(dst, v[i]);
                } else {
                    float part[W];
                    simd::store(part, v[i]);
                    for (int64_t k = 0; k < n_rows - r; k++) {
                        dst[k] = part[k];
                    }
                }
            }
        }
    }
}

template <int TYPE, int NV>
void multiply_tile(const mul_mat_params & p, int64_t row_begin, int64_t row_end, int64_t token, int64_t n_tokens) {
    constexpr int     STRIDE = NV * W;
    const int64_t     words  = words_of(p.w.cols);
    const float *     x      = static_cast<const float *>(p.scratch) + token * words * 64;
    alignas(64) float acc[BLOCK_ROWS<NV> * STRIDE];
    reader<TYPE>      values[BLOCK_ROWS<NV>];
    nonzero_list      list;

    for (int64_t row = row_begin; row < row_end; row += BLOCK_ROWS<NV>) {
        const int64_t n_rows = smaller(BLOCK_ROWS<NV>, row_end - row);
        for (int64_t i = 0; i < BLOCK_ROWS<NV> * STRIDE; i += W) {
            simd::store(acc + i, simd::zero());
        }
        for (int64_t r = 0; r < n_rows; r++) {
            values[r].start(p.w, row + r);
        }
        for (int64_t word = 0; word < words; word += CHUNK_WORDS<NV>) {
            const int n_words = static_cast<int>(smaller(CHUNK_WORDS<NV>, words - word));
            for (int64_t r = 0; r < n_rows; r++) {
                const int n = decode_chunk<TYPE>(p.w, row + r, word, n_words, SETS<NV>, values[r], list);
                __builtin_prefetch(values[r].at + 64, 0, 2); // for this row's next chunk
                accumulate<NV>(x + word * 64 * STRIDE, list, n, acc + r * STRIDE);
            }
        }
        store_block<NV>(p, acc, row, n_rows, token, n_tokens);
    }
}

// multiply_tile with NV = vecs
template <int TYPE, int NV>
void multiply_tile_of(int vecs, const mul_mat_params & p, int64_t row_begin, int64_t row_end, int64_t token,
                      int64_t n_tokens) {
    if (vecs == NV) {
        multiply_tile<TYPE, NV>(p, row_begin, row_end, token, n_tokens);
    } else if constexpr (NV > 1) {
        multiply_tile_of<TYPE, NV - 1>(vecs, p, row_begin, row_end, token, n_tokens);
    }
}

template <int TYPE> void multiply_panels(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    for (int64_t token = 0; token < p.n; token += TILE) {
        const int64_t n_tokens = smaller(TILE, p.n - token);
        multiply_tile_of<TYPE, TILE_VECS>(static_cast<int>((n_tokens + W - 1) / W), p, row_begin, row_end, token,
                                          n_tokens);
    }
}

// ---- bundles ----

constexpr int64_t PLANE_SLACK = 64; // bytes behind the last column of a plane: windows may begin at any column

// where the planes of an x lie in the scratch memory, and its scale
struct x_planes {
    uint8_t *low, *high;
    float *  scale;
};
INLINE x_planes planes_of(const mul_mat_params & p, int64_t i) {
    const int64_t plane = words_of(p.w.cols) * 64 + PLANE_SLACK;
    uint8_t *     at    = static_cast<uint8_t *>(p.scratch) + i * (2 * plane + 64);
    return { at, at + plane, reinterpret_cast<float *>(at + 2 * plane) };
}

template <int TYPE, typename S> void prepare_bundles(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    for (int64_t i = 0; i < p.n; i++) {
        const x_planes planes = planes_of(p, i);
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = p.w.cols - c;
            float         part[W];
            simd::store(part, load_x<TYPE>(left > 0 ? p.x[i] + c : nullptr, left, true));
            for (int k = 0; k < W; k += S::PLANE_STEP) {
                S::template store_planes16<TYPE>(planes.low + c + k, planes.high + c + k, part + k);
            }
        }
    }
}

template <int TYPE, typename S>
void prepare_quant_bundles(const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    for (int64_t i = 0; i < p.n; i++) {
        constexpr float limit   = S::template BUNDLE_LARGEST<TYPE>;
        const float     largest = largest_of<S>(p.x[i], p.w.cols);
        const x_planes  planes  = planes_of(p, i);
        S::template prepare_planes<TYPE>(p.x[i], p.w.cols, col_begin, col_end,
                                         largest > 0x1p-100f ? limit / largest : 0.0f, planes.low, planes.high);
        if (col_begin == 0 && col_end > 0) {
            *planes.scale = largest / limit;
        }
    }
}

// A group is computed as a whole, even if only some of its rows are asked for. What comes from memory for the first x
// is in the cache for the others.
template <int TYPE, typename S> void multiply_bundles(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    for (int64_t group = row_begin / BUNDLE_ROWS; group * BUNDLE_ROWS < row_end; group++) {
        for (int64_t i = 0; i < p.n; i++) {
            const x_planes planes         = planes_of(p, i);
            float          y[BUNDLE_ROWS] = {};
            S::template multiply_bundles<TYPE>(p.w.bundles + p.w.group_off[group],
                                               p.w.bundles + p.w.group_off[group + 1], planes.low, planes.high, y);
            for (int64_t r = 0; r < BUNDLE_ROWS; r++) {
                const int64_t row = group * BUNDLE_ROWS + r;
                if (row < row_begin || row >= row_end) {
                    continue;
                }
                if constexpr (is_quant<TYPE>) {
                    p.y[i][row - p.row_begin] =
                        *planes.scale * (y[r] - S::template BUNDLE_X_OFFSET<TYPE> * p.w.row_sums[row]);
                } else {
                    p.y[i][row - p.row_begin] = y[r];
                }
            }
        }
    }
}

// Panels. Bundles of a group lie in the order of their first columns, so the lists of all rows grow together, and what
// they have of a chunk is used before more is decoded. With quantized values that is so but for the BUNDLE_BLOCK of a
// block, whose pieces are in the order of their last columns. A list may then have more: of a piece that ends in a
// later chunk, and of the whole last block.
constexpr int BUNDLE_CHUNK = 128; // columns
static_assert(BUNDLE_CHUNK == BUNDLE_SPAN, "pieces that are not quantized belong to one chunk");
template <int TYPE> constexpr int DECODED_TOGETHER = is_quant<TYPE> ? BUNDLE_BLOCK : 1; // bundles
struct row_list {
    static constexpr int CAPACITY = BUNDLE_CHUNK + (BUNDLE_BLOCK * bundle_pieces(GGML_MACKO_TYPE_Q8_0) + 1) * 32 + 16;
    int                  n;
    alignas(64) uint32_t col[CAPACITY];
    alignas(64) float weight[CAPACITY];
};

// How many elements of the list are of columns before `limit`; those that make it no multiple of `multiple` wait for
// the next chunk, or, if it is the last, zeros are added.
INLINE int usable(row_list & list, uint32_t limit, bool last, int multiple) {
    int n = list.n;
    while (n > 0 && list.col[n - 1] >= limit) {
        n--;
    }
    if (!last) {
        return n - n % multiple;
    }
    for (; n % multiple; n++) {
        list.col[n]    = 0;
        list.weight[n] = 0;
    }
    return n;
}

// Removes the first n elements.
INLINE void drop(row_list & list, int n) {
    const int rest = list.n - n;
    for (int i = 0; i < rest; i += W) {
        simd::store(list.weight + i, simd::load(list.weight + n + i));
        simd::store(reinterpret_cast<float *>(list.col + i), simd::load(reinterpret_cast<float *>(list.col + n + i)));
    }
    list.n = rest;
}

// Tiles that meet the lists of a group while these are in L2. So are the accumulators, 128 KiB.
constexpr int GROUP_TILES = BLOCK_SIZE / (static_cast<int>(BUNDLE_ROWS) * TILE);

// Products of a group of rows with up to GROUP_TILES tiles of tokens. Only the last tile may have less than TILE.
template <int TYPE, typename S> struct bundle_panels {
    const mul_mat_params & p;
    int64_t                group = 0, begin = 0, end = 0;             // its rows to be computed: begin ... end - 1
    int64_t                token = 0, n_tokens = 0;                   // of these tiles
    alignas(64) float acc[GROUP_TILES][(BUNDLE_ROWS + W - 1) * TILE]; // store_block() reads whole vectors of rows
    row_list lists[BUNDLE_ROWS];
    int      n_used[BUNDLE_ROWS]; // elements of each list that are of the current chunk

    explicit bundle_panels(const mul_mat_params & params) : p(params) {}

    // steps of multiply(), for a tile of NV vectors that begins with token t of these tiles
    struct clear {
        template <int NV> static void run(bundle_panels & g, int64_t t, int64_t) {
            for (int64_t i = 0; i < BUNDLE_ROWS * NV * W; i += W) {
                simd::store(g.acc[t / TILE] + i, simd::zero());
            }
        }
    };
    struct use_lists {
        template <int NV> static void run(bundle_panels & g, int64_t t, int64_t) {
            const float * x = static_cast<const float *>(g.p.scratch) + (g.token + t) * words_of(g.p.w.cols) * 64;
            for (int64_t r = g.begin; r < g.end; r++) {
                accumulate<NV>(x, g.lists[r], g.n_used[r], g.acc[t / TILE] + r * NV * W);
            }
        }
    };
    struct store {
        template <int NV> static void run(bundle_panels & g, int64_t t, int64_t n) {
            store_block<NV>(g.p, g.acc[t / TILE] + g.begin * NV * W, g.group * BUNDLE_ROWS + g.begin, g.end - g.begin,
                            g.token + t, n);
        }
    };
    template <typename STEP, int NV> void run(int64_t vecs, int64_t t, int64_t n) {
        if (vecs == NV) {
            STEP::template run<NV>(*this, t, n);
        } else if constexpr (NV > 1) {
            run<STEP, NV - 1>(vecs, t, n);
        }
    }
    template <typename STEP> void for_each_tile() {
        for (int64_t t = 0; t < n_tokens; t += TILE) {
            const int64_t n = smaller(TILE, n_tokens - t);
            run<STEP, TILE_VECS>((n + W - 1) / W, t, n);
        }
    }

    void multiply() {
        const uint8_t * at        = p.w.bundles + p.w.group_off[group];
        const uint8_t * at_end    = p.w.bundles + p.w.group_off[group + 1];
        const int       multiple  = sets_of(((n_tokens - 1) % TILE + W) / W); // of the last tile: the most
        int             n_bundles = 0;
        for_each_tile<clear>();
        for (row_list & list : lists) {
            list.n = 0;
        }
        for (int64_t limit = BUNDLE_CHUNK;; limit += BUNDLE_CHUNK) {
            for (bool begun = true; at < at_end && (begun || n_bundles % DECODED_TOGETHER<TYPE> != 0); n_bundles++) {
                uint16_t column;
                __builtin_memcpy(&column, at + offsetof(bundle_header, first), sizeof(column));
                begun = begun && column < limit;
                if (!begun && n_bundles % DECODED_TOGETHER<TYPE> == 0) {
                    break;
                }
                at = S::template decode_bundle<TYPE>(at, lists);
            }
            const bool last = limit >= p.w.cols;
            for (int64_t r = 0; r < BUNDLE_ROWS; r++) {
                n_used[r] = usable(lists[r], static_cast<uint32_t>(limit), last, multiple);
            }
            for_each_tile<use_lists>();
            if (last) {
                break;
            }
            for (int64_t r = 0; r < BUNDLE_ROWS; r++) {
                drop(lists[r], n_used[r]);
            }
        }
        for_each_tile<store>();
    }
};

template <int TYPE, typename S>
void multiply_bundle_panels(const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    bundle_panels<TYPE, S> panels(p);
    for (int64_t token = 0; token < p.n; token += GROUP_TILES * TILE) {
        panels.token    = token;
        panels.n_tokens = smaller(GROUP_TILES * TILE, p.n - token);
        for (int64_t group = row_begin / BUNDLE_ROWS; group * BUNDLE_ROWS < row_end; group++) {
            const int64_t row = group * BUNDLE_ROWS;
            panels.group      = group;
            panels.begin      = row > row_begin ? 0 : row_begin - row;
            panels.end        = smaller(BUNDLE_ROWS, row_end - row);
            panels.multiply();
        }
    }
}

// ---- the functions of a kernel_set ----

template <int TYPE> void prepare_type(const mul_mat_params & p, x_layout layout, int64_t col_begin, int64_t col_end) {
    if constexpr (simd::has_bundles && has_bundles(TYPE)) {
        if (layout == x_layout::planes) {
            if constexpr (is_quant<TYPE>) {
                return prepare_quant_bundles<TYPE, simd>(p, col_begin, col_end);
            } else {
                return prepare_bundles<TYPE, simd>(p, col_begin, col_end);
            }
        }
    }
    if constexpr (simd::has_rows16<TYPE>) {
        if (layout == x_layout::rows16) {
            if constexpr (is_quant<TYPE>) {
                return prepare_integers<simd>(p, col_begin, col_end);
            } else {
                return prepare_rows16<TYPE, simd>(p, col_begin, col_end);
            }
        }
    }
    if (layout == x_layout::panels) {
        prepare_panels<TYPE>(p, col_begin, col_end);
    } else {
        prepare_rows<TYPE>(p, col_begin, col_end);
    }
}

// x is rounded to the dense type.
template <int TYPE, typename S>
void prepare_for_coded(const mul_mat_params & p, x_layout layout, int64_t col_begin, int64_t col_end) {
    if constexpr (coded_kernels<S>) {
        return layout == x_layout::panels ? prepare_panels<TYPE>(p, col_begin, col_end)
                                          : prepare_coded<TYPE, S>(p, col_begin, col_end);
    }
}

void prepare(const mul_mat_params & p, x_layout layout, int ith, int nth) {
    const int64_t words = words_of(p.w.cols);
    const int64_t begin = words * ith / nth * 64;
    const int64_t end   = words * (ith + 1) / nth * 64;
    if (layout == x_layout::columns) {
        switch (p.columns.type) {
            case GGML_MACKO_TYPE_F16:  return prepare_rows<GGML_MACKO_TYPE_F16>(p, begin, end);
            case GGML_MACKO_TYPE_BF16: return prepare_rows<GGML_MACKO_TYPE_BF16>(p, begin, end);
            default:                   return prepare_rows<GGML_MACKO_TYPE_F32>(p, begin, end);
        }
    }
    if (p.w.type == GGML_MACKO_TYPE_CODED) {
        switch (p.w.dense_type) {
            case GGML_MACKO_TYPE_F16:  return prepare_for_coded<GGML_MACKO_TYPE_F16, simd>(p, layout, begin, end);
            case GGML_MACKO_TYPE_BF16: return prepare_for_coded<GGML_MACKO_TYPE_BF16, simd>(p, layout, begin, end);
            default:                   return prepare_for_coded<GGML_MACKO_TYPE_F32, simd>(p, layout, begin, end);
        }
    }
    switch (p.w.type) {
        case GGML_MACKO_TYPE_F16:   prepare_type<GGML_MACKO_TYPE_F16>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_BF16:  prepare_type<GGML_MACKO_TYPE_BF16>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q8_0:  prepare_type<GGML_MACKO_TYPE_Q8_0>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q5_0:  prepare_type<GGML_MACKO_TYPE_Q5_0>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q4_0:  prepare_type<GGML_MACKO_TYPE_Q4_0>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q4_NL: prepare_type<GGML_MACKO_TYPE_Q4_NL>(p, layout, begin, end); break;
        default:                    prepare_type<GGML_MACKO_TYPE_F32>(p, layout, begin, end); break;
    }
}

template <int TYPE> void multiply_type(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end) {
    if constexpr (simd::has_bundles && has_bundles(TYPE)) {
        if (layout == x_layout::planes) {
            return multiply_bundles<TYPE, simd>(p, row_begin, row_end);
        }
        if (is_bundled(p.w)) {
            return multiply_bundle_panels<TYPE, simd>(p, row_begin, row_end);
        }
    }
    if constexpr (simd::has_rows16<TYPE>) {
        if (layout == x_layout::rows16) {
            return multiply_rows16<TYPE, simd>(p, row_begin, row_end);
        }
    }
    if (layout == x_layout::panels) {
        multiply_panels<TYPE>(p, row_begin, row_end);
    } else {
        multiply_rows<TYPE>(p, row_begin, row_end);
    }
}

template <typename S>
void multiply_coded(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end) {
    if constexpr (coded_kernels<S>) {
        if (layout == x_layout::panels) {
            multiply_panels<GGML_MACKO_TYPE_CODED>(p, row_begin, row_end);
        } else {
            multiply_rows<GGML_MACKO_TYPE_CODED>(p, row_begin, row_end);
        }
    }
}

void multiply(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end) {
    switch (p.w.type) {
        case GGML_MACKO_TYPE_F16:   multiply_type<GGML_MACKO_TYPE_F16>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_BF16:  multiply_type<GGML_MACKO_TYPE_BF16>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q8_0:  multiply_type<GGML_MACKO_TYPE_Q8_0>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q5_0:  multiply_type<GGML_MACKO_TYPE_Q5_0>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q4_0:  multiply_type<GGML_MACKO_TYPE_Q4_0>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q4_NL: multiply_type<GGML_MACKO_TYPE_Q4_NL>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_CODED: multiply_coded<simd>(p, layout, row_begin, row_end); break;
        default:                    multiply_type<GGML_MACKO_TYPE_F32>(p, layout, row_begin, row_end); break;
    }
}

} // namespace
} // namespace macko::cpu
