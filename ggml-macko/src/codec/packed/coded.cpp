// Coded values: check, expand, encode (FORMAT.md section 8).
#include "codec/packed/coded.h"
#include "codec/packed/packed.h"
#include "codec/team.h"

#include <algorithm>
#include <array>
#include <mutex>

namespace macko {

namespace {

constexpr int64_t MAX_EXPONENTS = 256;

using histogram = std::array<int64_t, MAX_EXPONENTS>; // values that fit but for the base, by exponent

int64_t n_ranks(int64_t n_blocks) { return (n_blocks + CODED_RANK_BLOCKS - 1) / CODED_RANK_BLOCKS; }
int64_t coded_blocks(int64_t nnz) { return packed_n_values(nnz) / CODED_BLOCK; }
int64_t outliers_words(int64_t n, int32_t type) { return (n * value_nbytes(type) + 3) / 4; }
// Exponent of Inf and NaN.
constexpr int infinite_exponent(int32_t type) { return type == GGML_MACKO_TYPE_F16 ? 31 : 255; }

template <typename T> inline int exponent_of(T value, int32_t type) {
    return static_cast<int>((value & exponent_mask<T>(type)) >> coded_dense_mantissa_bits(type));
}
// Whether a value is normal and its mantissa has at most mantissa_bits significant bits.
template <typename T> inline bool is_short(T value, int32_t type, int mantissa_bits) {
    const int dropped = coded_dense_mantissa_bits(type) - mantissa_bits;
    return (value & ((T(1) << dropped) - 1)) == 0 && exponent_of(value, type) != 0;
}
template <typename T> inline int code_of(T value, int32_t type, const coded_widths & w) {
    const int code = exponent_of(value, type) - w.base;
    return is_short(value, type, w.mantissa_bits) && code >= 1 && code <= w.n_codes() ? code : 0;
}

// ---- blocks ----

int bits_of(uint32_t mask) { return static_cast<int>(set_bits(reinterpret_cast<const uint8_t *>(&mask), 4)); }

// Bit 7 of each of 32 bytes.
uint32_t top_bits(const uint32_t * bytes) {
    uint32_t mask = 0;
    for (int i = 0; i < 8; i++) {
        mask |= ((bytes[i] >> 7 & 0x01010101u) * 0x10204080u >> 28) << (4 * i);
    }
    return mask;
}

coded_block_view masks_of(const uint32_t * block, const coded_widths & w) {
    coded_block_view m    = {};
    m.bytes               = reinterpret_cast<const uint8_t *>(block);
    const uint32_t * mask = block + 8;
    m.sign                = *mask++;
    m.code[0]             = top_bits(block);
    for (int j = 1; j < w.exponent_bits; j++) {
        m.code[j] = *mask++;
    }
    for (int j = 0; j < w.mantissa_bits - 7; j++) {
        m.mantissa[j] = *mask++;
    }
    return m;
}

uint32_t places_of(int64_t block, int64_t nnz) { // the values of a block that exist, as a mask
    const int64_t n = nnz - block * CODED_BLOCK;
    return n >= CODED_BLOCK ? ~uint32_t(0) : n <= 0 ? 0 : (uint32_t(1) << n) - 1;
}

using lanes = uint16_t __attribute__((vector_size(16)));

lanes all(uint32_t value) {
    const auto v = static_cast<uint16_t>(value);
    return lanes{ v, v, v, v, v, v, v, v };
}

// Values 8 i ... 8 i + 7 of a block: the sign in bit 15, the code from bit mantissa_bits on, and the mantissa below.
lanes eight_values(const coded_block_view & m, const coded_widths & w, int i) {
    uint8_t __attribute__((vector_size(8))) bytes;
    memcpy(&bytes, m.bytes + 8 * i, sizeof(bytes));
    const auto bit = [&](uint32_t mask, int to) { // bits 8 i ... of a mask, as bit `to` of the values
        constexpr lanes place = { 1, 2, 4, 8, 16, 32, 64, 128 };
        return lanes((all(mask >> (8 * i)) & place) == place) & all(1u << to);
    };
    lanes v = __builtin_convertvector(bytes, lanes) << (w.mantissa_bits - 7);
    v |= bit(m.sign, 15) | bit(m.code[1], w.mantissa_bits + 1);
    if (w.exponent_bits == 3) {
        v |= bit(m.code[2], w.mantissa_bits + 2);
    }
    if (w.mantissa_bits == 10) {
        v |= bit(m.mantissa[0], 2) | bit(m.mantissa[1], 1) | bit(m.mantissa[2], 0);
    }
    return v;
}

// Writes the 32 values of a block as bits of the dense type; a value without a code is undefined.
void expand_block(const coded_block_view & m, const coded_widths & w, int32_t type, uint16_t * out) {
    const int   bits = coded_dense_mantissa_bits(type);
    const lanes base = all(static_cast<uint32_t>(w.base << bits)), sign = all(0x8000);
    for (int i = 0; i < 4; i++) {
        const lanes u = eight_values(m, w, i);
        const lanes v = (((u & ~sign) << (bits - w.mantissa_bits)) + base) | (u & sign);
        memcpy(out + 8 * i, &v, sizeof(v));
    }
}
void expand_block(const coded_block_view & m, const coded_widths & w, int32_t, uint32_t * out) {
    const int      shift = 23 - w.mantissa_bits;
    const uint32_t base  = static_cast<uint32_t>(w.base) << 23;
    for (int i = 0; i < 32; i++) {
        const uint32_t v = eight_values(m, w, i / 8)[i % 8];
        out[i]           = (v & 0x8000) << 16 | (((v & 0x7fff) << shift) + base);
    }
}

// Stores n values in a block of zeros; returns a mask of the outliers.
template <typename T>
uint32_t put_values(uint32_t * block, const T * values, int n, int32_t type, const coded_widths & w) {
    const int        dropped = coded_dense_mantissa_bits(type) - w.mantissa_bits, low = w.mantissa_bits - 7;
    coded_block_view m        = {};
    uint32_t         outliers = 0;
    for (int i = 0; i < n; i++) {
        const auto code = static_cast<uint32_t>(code_of(values[i], type, w));
        if (code == 0) {
            outliers |= 1u << i;
            continue;
        }
        const auto mantissa = static_cast<uint32_t>(values[i] >> dropped) & ((1u << w.mantissa_bits) - 1);
        block[i / 4] |= ((code & 1) << 7 | mantissa >> low) << (i % 4 * 8);
        m.sign |= static_cast<uint32_t>(values[i] >> (8 * sizeof(T) - 1)) << i;
        m.code[1] |= (code >> 1 & 1) << i;
        m.code[2] |= (code >> 2) << i;
        for (int j = 0; j < low; j++) {
            m.mantissa[j] |= (mantissa >> (low - 1 - j) & 1) << i;
        }
    }
    uint32_t * mask = block + 8;
    *mask++         = m.sign;
    mask            = std::copy(m.code + 1, m.code + w.exponent_bits, mask);
    std::copy(m.mantissa, m.mantissa + low, mask);
    return outliers;
}

// ---- base ----

// The base that codes the most values, and their number.
std::pair<int32_t, int64_t> best_base(const histogram & values, int exponent_bits, int32_t type) {
    const int                   n_codes = (1 << exponent_bits) - 1;
    std::pair<int32_t, int64_t> best    = { 0, -1 };
    for (int base = 0; base + n_codes < infinite_exponent(type); base++) {
        int64_t n = 0;
        for (int code = 1; code <= n_codes; code++) {
            n += values[static_cast<size_t>(base + code)];
        }
        if (n > best.second) {
            best = { base, n };
        }
    }
    return best;
}

void add(histogram * sum, const histogram & h) {
    for (size_t i = 0; i < h.size(); i++) {
        (*sum)[i] += h[i];
    }
}

} // namespace

int64_t max_coded_words(int64_t nnz, int32_t type) {
    constexpr coded_widths widest = { 10, 3, 0 };
    return CODED_HEADER_WORDS + widest.blocks_words(packed_n_values(nnz)) + outliers_words(nnz, type);
}

int64_t max_short_outliers(int64_t nnz, int32_t type, int64_t nbytes) {
    constexpr coded_widths shortest = { 7, 2, 0 };
    const int64_t          n = packed_n_values(nnz), words = nbytes / 4 - CODED_HEADER_WORDS - shortest.blocks_words(n);
    // blocks with any other widths would need one word more each
    return words >= 0 && words < n / CODED_BLOCK ? words * 4 / value_nbytes(type) : -1;
}

// ---- check ----

namespace {

// Results of the pass over the blocks.
struct block_counts {
    histogram            values = {};        // values with a code, by exponent
    int64_t              bad    = INT64_MAX; // first value without a code whose other bits are not zero
    std::vector<int64_t> outliers;           // outliers per CODED_RANK_BLOCKS blocks
};

void count_codes(const coded_block_view & m, const coded_widths & w, histogram * values) {
    for (int code = 1; code <= w.n_codes(); code++) {
        uint32_t mask = ~uint32_t(0);
        for (int j = 0; j < w.exponent_bits; j++) {
            mask &= code >> j & 1 ? m.code[j] : ~m.code[j];
        }
        (*values)[static_cast<size_t>(w.base + code)] += bits_of(mask);
    }
}

// The first value of a block that has no code but other bits, or that is padding but has a code; else -1.
int bad_place(const uint32_t * block, const coded_block_view & m, uint32_t places) {
    uint32_t bad = (m.sign | m.mantissa[0] | m.mantissa[1] | m.mantissa[2]) & ~m.has_code();
    bad |= m.has_code() & ~places;
    for (uint32_t empty = ~m.has_code(); empty; empty &= empty - 1) {
        const int i = __builtin_ctz(empty);
        bad |= (block[i / 4] >> (i % 4 * 8) & 0xff) != 0 ? uint32_t(1) << i : 0;
    }
    return bad ? __builtin_ctz(bad) : -1;
}

block_counts count_blocks(const uint32_t * blocks, const coded_widths & w, int64_t nnz, int n_threads) {
    const int64_t n_blocks = coded_blocks(nnz);
    block_counts  all;
    all.outliers.assign(static_cast<size_t>(n_ranks(n_blocks)), 0);
    std::mutex mutex;
    parallel_ranges(n_threads, n_ranks(n_blocks), [&](int64_t begin, int64_t end) {
        histogram values = {};
        int64_t   bad    = INT64_MAX;
        for (int64_t b = begin * CODED_RANK_BLOCKS; b < std::min(n_blocks, end * CODED_RANK_BLOCKS); b++) {
            const uint32_t *       block  = blocks + b * w.bits();
            const coded_block_view m      = masks_of(block, w);
            const uint32_t         places = places_of(b, nnz);
            if (const int i = bad_place(block, m, places); i >= 0) {
                bad = std::min(bad, b * CODED_BLOCK + i);
            }
            all.outliers[static_cast<size_t>(b / CODED_RANK_BLOCKS)] += bits_of(places & ~m.has_code());
            count_codes(m, w, &values);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        add(&all.values, values);
        all.bad = std::min(all.bad, bad);
    });
    return all;
}

// Adds the outliers that a different base would code.
template <typename T>
int check_outliers(const uint8_t * outliers, int64_t n, int32_t type, const coded_widths & w, histogram * values) {
    for (int64_t i = 0; i < n; i++) {
        T v;
        memcpy(&v, outliers + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        if (exponent_of(v, type) == infinite_exponent(type)) {
            return fail(GGML_MACKO_STATUS_NOT_FINITE, "outlier %lld is Inf or NaN (bits 0x%x)",
                        static_cast<long long>(i), static_cast<unsigned>(v));
        }
        if (v == 0 || code_of(v, type, w) != 0) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL, v == 0 ? "outlier %lld is zero" : "outlier %lld has a code",
                        static_cast<long long>(i));
        }
        if (is_short(v, type, w.mantissa_bits)) {
            (*values)[static_cast<size_t>(exponent_of(v, type))]++;
        }
    }
    const int64_t  nbytes = n * static_cast<int64_t>(sizeof(T));
    const uint32_t zero   = 0;
    return memcmp(outliers + nbytes, &zero, static_cast<size_t>(outliers_words(n, type) * 4 - nbytes)) == 0
               ? static_cast<int>(GGML_MACKO_STATUS_OK)
               : fail(GGML_MACKO_STATUS_NOT_CANONICAL, "the bytes after the last outlier are not zero");
}

int check_header(const uint32_t * words, int64_t n_words, int32_t type, int64_t nnz, coded_widths * w,
                 int64_t * n_outliers) {
    if (n_words < CODED_HEADER_WORDS) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "values has the wrong length (%lld words, without a header)",
                    static_cast<long long>(n_words));
    }
    *w          = { static_cast<int32_t>(words[0] & 255), static_cast<int32_t>(words[0] >> 8 & 255),
                    static_cast<int32_t>(words[0] >> 16) };
    *n_outliers = words[1];
    if (!is_coded_mantissa_bits(w->mantissa_bits, type) || !is_coded_exponent_bits(w->exponent_bits) ||
        w->base + w->n_codes() >= infinite_exponent(type)) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT,
                    "coded values with %d bits of mantissa, %d of exponent and base %d (limit 7 or 10, 2 or 3, and "
                    "exponents up to %d)",
                    w->mantissa_bits, w->exponent_bits, w->base, infinite_exponent(type) - 1);
    }
    if (*n_outliers > nnz) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%lld outliers of %lld values",
                    static_cast<long long>(*n_outliers), static_cast<long long>(nnz));
    }
    const int64_t length =
        CODED_HEADER_WORDS + w->blocks_words(packed_n_values(nnz)) + outliers_words(*n_outliers, type);
    return n_words == length ? static_cast<int>(GGML_MACKO_STATUS_OK)
                             : fail(GGML_MACKO_STATUS_BAD_COMPONENT, "values has the wrong length (%lld vs %lld)",
                                    static_cast<long long>(n_words), static_cast<long long>(length));
}

} // namespace

int open_coded(const uint32_t * words, int64_t n_words, int32_t type, int64_t nnz, int n_threads, coded_view * out) {
    coded_view v;
    v.type_ = type;
    TRY(check_header(words, n_words, type, nnz, &v.widths_, &v.n_outliers_));
    const coded_widths & w = v.widths_;
    v.blocks_              = words + CODED_HEADER_WORDS;
    v.outliers_            = reinterpret_cast<const uint8_t *>(v.blocks_ + w.blocks_words(packed_n_values(nnz)));
    block_counts found     = count_blocks(v.blocks_, w, nnz, n_threads);
    if (found.bad != INT64_MAX) {
        return fail(GGML_MACKO_STATUS_NOT_CANONICAL,
                    found.bad < nnz ? "value %lld is an outlier, but not zero in its place"
                                    : "value %lld, after the last non-zero, is not zero",
                    static_cast<long long>(found.bad));
    }
    v.outliers_before_.assign(1, 0);
    for (const int64_t n : found.outliers) {
        v.outliers_before_.push_back(v.outliers_before_.back() + n);
    }
    if (v.outliers_before_.back() != v.n_outliers_) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%lld values have no code, but there are %lld outliers",
                    static_cast<long long>(v.outliers_before_.back()), static_cast<long long>(v.n_outliers_));
    }
    TRY(type == GGML_MACKO_TYPE_F32 ? check_outliers<uint32_t>(v.outliers_, v.n_outliers_, type, w, &found.values)
                                    : check_outliers<uint16_t>(v.outliers_, v.n_outliers_, type, w, &found.values));
    if (const int32_t base = best_base(found.values, w.exponent_bits, type).first; base != w.base) {
        return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "base %d codes no more values than base %d", w.base, base);
    }
    *out = std::move(v);
    return GGML_MACKO_STATUS_OK;
}

// ---- expand ----

namespace {

template <typename T> struct expander {
    const uint32_t *     blocks;
    const uint8_t *      outliers; // the next outlier
    const coded_widths & w;
    int32_t              type;

    void skip(int64_t block, uint32_t places) { // skips the outliers of these values
        const uint32_t mask = places & ~masks_of(blocks + block * w.bits(), w).has_code();
        outliers += bits_of(mask) * static_cast<int64_t>(sizeof(T));
    }
    // places: mask of the values that exist in the block
    void expand(int64_t block, uint32_t places, T * out) {
        const coded_block_view m = masks_of(blocks + block * w.bits(), w);
        expand_block(m, w, type, out);
        for (uint32_t mask = places & ~m.has_code(); mask; mask &= mask - 1) {
            memcpy(out + __builtin_ctz(mask), outliers, sizeof(T));
            outliers += sizeof(T);
        }
    }
};

template <typename T> void expand_values(expander<T> e, int64_t k, int64_t n, T * out) {
    for (int64_t b = k / CODED_BLOCK / CODED_RANK_BLOCKS * CODED_RANK_BLOCKS; b < k / CODED_BLOCK; b++) {
        e.skip(b, ~uint32_t(0));
    }
    while (n > 0) {
        const int64_t b = k / CODED_BLOCK, first = k % CODED_BLOCK, there = std::min(CODED_BLOCK - first, n);
        if (there == CODED_BLOCK) {
            e.expand(b, ~uint32_t(0), out);
        } else {
            T block[CODED_BLOCK];
            e.skip(b, (uint32_t(1) << first) - 1);
            e.expand(b, places_of(0, there) << first, block);
            memcpy(out, block + first, static_cast<size_t>(there) * sizeof(T));
        }
        k += there;
        n -= there;
        out += there;
    }
}

} // namespace

coded_block_view coded_view::block(int64_t i) const { return masks_of(blocks_ + i * widths_.bits(), widths_); }

void coded_view::expand(int64_t k, int64_t n, void * out) const {
    const int64_t   before = n > 0 ? outliers_before_[static_cast<size_t>(k / CODED_BLOCK / CODED_RANK_BLOCKS)] : 0;
    const uint8_t * next   = outliers_ + before * value_nbytes(type_);
    if (type_ == GGML_MACKO_TYPE_F32) {
        expand_values<uint32_t>({ blocks_, next, widths_, type_ }, k, n, static_cast<uint32_t *>(out));
    } else {
        expand_values<uint16_t>({ blocks_, next, widths_, type_ }, k, n, static_cast<uint16_t *>(out));
    }
}

// ---- encode ----

namespace {

template <typename T>
void count_exponents(const T * values, int32_t type, int64_t n, int n_threads, histogram * short7,
                     histogram * short10) {
    std::mutex mutex;
    parallel_ranges(n_threads, n, [&](int64_t begin, int64_t end) {
        histogram h7 = {}, h10 = {};
        for (int64_t i = begin; i < end; i++) {
            const auto exponent = static_cast<size_t>(exponent_of(values[i], type));
            h7[exponent] += is_short(values[i], type, 7);
            h10[exponent] += is_coded_mantissa_bits(10, type) && is_short(values[i], type, 10);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        add(short7, h7);
        add(short10, h10);
    });
}

// The given widths, or the widths with the fewest words; on a tie, the first.
template <typename T>
coded_widths choose_widths(const T * values, int32_t type, int64_t n, int32_t mantissa_bits, int32_t exponent_bits,
                           int n_threads, int64_t * n_outliers) {
    histogram short7 = {}, short10 = {};
    count_exponents(values, type, n, n_threads, &short7, &short10);
    coded_widths best       = {};
    int64_t      best_words = INT64_MAX;
    for (const int32_t m : { 7, 10 }) {
        for (const int32_t e : { 2, 3 }) {
            if (!is_coded_mantissa_bits(m, type) || (mantissa_bits != -1 && m != mantissa_bits) ||
                (exponent_bits != -1 && e != exponent_bits)) {
                continue;
            }
            const auto [base, n_coded] = best_base(m == 7 ? short7 : short10, e, type);
            const coded_widths w       = { m, e, base };
            const int64_t      words   = w.blocks_words(packed_n_values(n)) + outliers_words(n - n_coded, type);
            if (words < best_words) {
                best        = w;
                best_words  = words;
                *n_outliers = n - n_coded;
            }
        }
    }
    return best;
}

template <typename T>
void encode_blocks(const T * values, int32_t type, int64_t n, const coded_widths & w, int n_threads, uint32_t * blocks,
                   uint8_t * outliers) {
    const int64_t        n_blocks = coded_blocks(n), per_rank = CODED_RANK_BLOCKS * CODED_BLOCK;
    std::vector<int64_t> before(static_cast<size_t>(n_ranks(n_blocks)) + 1, 0);
    const auto           for_each_rank = [&](auto && f) {
        parallel_ranges(n_threads, n_ranks(n_blocks), [&](int64_t begin, int64_t end) {
            for (int64_t rank = begin; rank < end; rank++) {
                f(static_cast<size_t>(rank), rank * per_rank, std::min(n, (rank + 1) * per_rank));
            }
        });
    };
    for_each_rank([&](size_t rank, int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; k++) {
            before[rank + 1] += code_of(values[k], type, w) == 0;
        }
    });
    for (size_t i = 1; i < before.size(); i++) {
        before[i] += before[i - 1];
    }
    for_each_rank([&](size_t rank, int64_t begin, int64_t end) {
        uint8_t * next = outliers + before[rank] * static_cast<int64_t>(sizeof(T));
        for (int64_t k = begin; k < end; k += CODED_BLOCK) {
            uint32_t * block = blocks + k / CODED_BLOCK * w.bits();
            uint32_t   mask  = put_values(block, values + k, static_cast<int>(std::min(CODED_BLOCK, end - k)), type, w);
            for (; mask; mask &= mask - 1) {
                memcpy(next, values + k + __builtin_ctz(mask), sizeof(T));
                next += sizeof(T);
            }
        }
    });
}

template <typename T>
void encode_type(const T * values, int32_t type, int64_t n, int32_t mantissa_bits, int32_t exponent_bits, int n_threads,
                 std::vector<uint8_t> * out) {
    int64_t            n_outliers = 0;
    const coded_widths w = choose_widths(values, type, n, mantissa_bits, exponent_bits, n_threads, &n_outliers);
    const int64_t      blocks_words = w.blocks_words(packed_n_values(n));
    const auto words = static_cast<size_t>(CODED_HEADER_WORDS + blocks_words + outliers_words(n_outliers, type));
    out->assign(4 * words, 0);
    auto * at = reinterpret_cast<uint32_t *>(out->data()); // a vector's memory is aligned for any type
    at[0]     = static_cast<uint32_t>(w.mantissa_bits | w.exponent_bits << 8 | w.base << 16);
    at[1]     = static_cast<uint32_t>(n_outliers);
    at += CODED_HEADER_WORDS;
    encode_blocks(values, type, n, w, n_threads, at, reinterpret_cast<uint8_t *>(at + blocks_words));
}

} // namespace

int encode_coded(const void * values, int32_t type, int64_t n, int32_t mantissa_bits, int32_t exponent_bits,
                 int n_threads, std::vector<uint8_t> * out) {
    if ((mantissa_bits != -1 && !is_coded_mantissa_bits(mantissa_bits, type)) ||
        (exponent_bits != -1 && !is_coded_exponent_bits(exponent_bits))) {
        return fail(
            GGML_MACKO_STATUS_BAD_FORMAT,
            "coded values of type %d cannot have %d bits of mantissa and %d of exponent (7 or 10, BF16 7; 2 or 3)",
            type, mantissa_bits, exponent_bits);
    }
    if (type == GGML_MACKO_TYPE_F32) {
        encode_type(static_cast<const uint32_t *>(values), type, n, mantissa_bits, exponent_bits, n_threads, out);
    } else {
        encode_type(static_cast<const uint16_t *>(values), type, n, mantissa_bits, exponent_bits, n_threads, out);
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
