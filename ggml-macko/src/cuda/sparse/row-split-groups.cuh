// A group of the layouts INLINE_DELTA and EXP_CODED (gpu-layout/row-split.h): loads its values and deltas, and turns
// deltas into addresses with dp4a. Device code; no launches.
#pragma once

#include "cuda/lib/common.cuh"
#include "gpu-layout/layouts.h"

#include <algorithm>
#include <type_traits>

namespace macko::cuda {

// Returns one of the two 16-bit values of a word.
template <bool HIGH> __device__ __forceinline__ float half_word(__half, uint32_t w) {
    const __half2 h = *reinterpret_cast<const __half2 *>(&w);
    return HIGH ? __high2float(h) : __low2float(h);
}
template <bool HIGH> __device__ __forceinline__ float half_word(__nv_bfloat16, uint32_t w) {
    return __uint_as_float(HIGH ? w & 0xffff0000u : w << 16);
}

// Rounds to the type of x in shared memory.
__device__ __forceinline__ void round_to(float * to, float v) { *to = v; }
__device__ __forceinline__ void round_to(__half * to, float v) { *to = __float2half_rn(saturate_f16(v)); }
__device__ __forceinline__ void round_to(__nv_bfloat16 * to, float v) { *to = __float2bfloat16_rn(v); }

template <typename T> __device__ __forceinline__ float rounded_to(float v) {
    T rounded;
    round_to(&rounded, v);
    return to_f32(rounded);
}

// Returns the K-th of eight values.
template <int K> __device__ __forceinline__ uint16_t half_of(const uint4 & v) {
    const uint32_t w = K / 2 == 0 ? v.x : K / 2 == 1 ? v.y : K / 2 == 2 ? v.z : v.w;
    return static_cast<uint16_t>(K % 2 ? w >> 16 : w);
}

// c + the dot product of the four bytes of a and b. Tests call it on the host.
__host__ __device__ __forceinline__ uint32_t dot4(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    return __dp4a(a, b, c);
#else
    for (int i = 0; i < 32; i += 8) {
        c += (a >> i & 255) * (b >> i & 255);
    }
    return c;
#endif
}

// Walks over the deltas of a group. walk<PART>(at, weight, entry) calls entry(K, address) for each entry of one of its
// PARTS in order, with K as an integral constant, and returns the last address. An address is `at` plus the deltas up
// to its entry, scaled by weight[]. The caller adds the constant step of one column per entry.
template <int K, typename F>
__host__ __device__ __forceinline__ uint32_t walk_one(uint32_t packed, uint32_t at, const uint32_t * weight,
                                                      F && entry) {
    const uint32_t to = dot4(packed, weight[K], at);
    entry(std::integral_constant<int, K>(), to);
    return to;
}
// packed: four deltas, one per byte
template <int K, typename F>
__host__ __device__ __forceinline__ uint32_t walk_quad(uint32_t packed, uint32_t at, const uint32_t * weight,
                                                       F && entry) {
    walk_one<K>(packed, at, weight, entry);
    walk_one<K + 1>(packed, at, weight, entry);
    walk_one<K + 2>(packed, at, weight, entry);
    return walk_one<K + 3>(packed, at, weight, entry);
}
template <typename F>
__host__ __device__ __forceinline__ uint32_t walk_deltas(uint32_t lo, uint32_t hi, uint32_t at, const uint32_t * weight,
                                                         F && entry) {
    return walk_quad<4>(hi, walk_quad<0>(lo, at, weight, entry), weight, entry);
}

// Tags of INLINE_DELTA and EXP_CODED values, by the 16-bit type of the matrix.
template <typename T> struct inline_delta {};
template <typename T> struct exp_coded {};
// The 16-bit type of a tag; for any other type, the type itself.
template <typename T> struct value16_of {
    using type = T;
};
template <typename T> struct value16_of<inline_delta<T>> {
    using type = T;
};
template <typename T> struct value16_of<exp_coded<T>> {
    using type = T;
};
template <typename T> using value16 = typename value16_of<T>::type;

template <typename T> constexpr bool is_exp_coded               = false;
template <typename T> constexpr bool is_exp_coded<exp_coded<T>> = true;
template <typename T> constexpr bool is_bf16                    = std::is_same<value16<T>, __nv_bfloat16>::value;

// Converts a 16-bit value to the bits of a float, and back.
__device__ __forceinline__ uint32_t widened(uint16_t bits, bool bf16) {
    return bf16 ? static_cast<uint32_t>(bits) << 16 : __float_as_uint(__half2float(__ushort_as_half(bits)));
}
__device__ __forceinline__ uint16_t narrowed(uint32_t f, bool bf16) {
    return bf16 ? static_cast<uint16_t>(f >> 16) : __half_as_ushort(__float2half_rn(__uint_as_float(f)));
}

// ---- INLINE_DELTA ----

// The values and deltas of a group.
template <typename T, int BITS> struct group_bits;
template <typename X, int BITS> struct group_bits<inline_delta<X>, BITS> {
    static constexpr int ENTRIES = static_cast<int>(inline_delta_entries(BITS));
    static constexpr int PARTS   = 1; // after each part, a position is reduced
    // the free bits of two values, below their signs
    static constexpr uint32_t                 FREE = (0x8000u - (0x8000u >> (BITS == 3 ? 3 : 2))) * 0x10001u;
    uint4                                     v;
    __host__ __device__ __forceinline__ uint4 words() const {
        return make_uint4(v.x & ~FREE, v.y & ~FREE, v.z & ~FREE, BITS >= 4 ? v.w : v.w & ~FREE);
    }
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { load(values_at(p, g)); }
    // the group in slot g of row_span
    static constexpr int                              NBYTES = static_cast<int>(INLINE_DELTA_GROUP_NBYTES);
    __device__ __forceinline__ static const uint8_t * values_at(const uint8_t * p, int64_t g) { return p + g * NBYTES; }
    __device__ __forceinline__ void                   load(const uint8_t * at) {
        v = load_streaming(reinterpret_cast<const uint4 *>(at));
    }
    // Returns the values in pairs. scale: scale_of() of the power of two that restores them
    __device__ __forceinline__ static __half2                  scale_of(float power) { return __float2half2_rn(power); }
    template <int PART, int N> __device__ __forceinline__ void scaled(uint32_t (&pairs)[N], __half2 scale) const {
        const uint4    w      = words();
        const uint32_t all[4] = { w.x, w.y, w.z, w.w };
#pragma unroll
        for (int i = 0; i < N; i++) {
            const __half2 h = __hmul2(*reinterpret_cast<const __half2 *>(all + i), scale);
            pairs[i]        = *reinterpret_cast<const uint32_t *>(&h);
        }
    }
    __device__ __forceinline__ static uint32_t           half_of_outlier(uint32_t value) { return value; }
    template <int K> __device__ __forceinline__ uint16_t half() const { return half_of<K>(words()); }
    // For a group of outliers: calls outlier(index, column, bits of the value).
    template <typename F> __device__ __forceinline__ void for_each_outlier(F && outlier) const {
        const uint32_t pairs[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
        for (int k = 0; k < 4; k++) {
            outlier(k, pairs[k] & 0xffff, pairs[k] >> 16);
        }
    }
    template <int K> __device__ __forceinline__ float get(uint32_t) const {
        const uint4 w = words();
        return half_word < K % 2 == 1 > (__half(), K / 2 == 0 ? w.x : K / 2 == 1 ? w.y : K / 2 == 2 ? w.z : w.w);
    }
    template <int PART, typename F>
    __host__ __device__ __forceinline__ uint32_t walk(uint32_t at, const uint32_t * weight, F && entry) const {
        // deltas of entries 0-3: nibbles of the last half word; of 4-6: free bits of two values each
        if constexpr (BITS == 4) {
            const uint32_t packed = (v.w & 0x0f0f0000u) | (v.w >> 16 & 0xf0f0u);
            at                    = walk_quad<0>(packed, at, weight, entry);
            at                    = walk_one<4>(v.x & FREE, at, weight, entry);
            at                    = walk_one<5>(v.y & FREE, at, weight, entry);
            return walk_one<6>(v.z & FREE, at, weight, entry);
            // deltas of entries 0-3: bytes of the last word; of 4 and 5: free bits of three values each
        } else if constexpr (BITS == 6) {
            at               = walk_quad<0>(v.w, at, weight, entry);
            const uint32_t x = v.x >> 13 & 0x30003u, y = v.y >> 13 & 0x30003u, z = v.z >> 13 & 0x30003u;
            at = walk_one<4>(x, dot4(y, weight[6], at), weight, entry);
            return walk_one<5>(z, dot4(y, weight[7], at), weight, entry);
        } else { // deltas of entries 0-3 (4-7): in the upper bits but one of bytes 1, 3, 0, 2
            return walk_deltas((v.x & FREE) | (v.y & FREE) >> 8, (v.z & FREE) | (v.w & FREE) >> 8, at, weight, entry);
        }
    }
};

// Calls set(word of the group, bits to set in it) for entry k of an INLINE_DELTA group, which is zero before.
template <typename F>
__host__ __device__ __forceinline__ void set_inline_delta_entry(int k, uint32_t value, uint32_t delta, int delta_bits,
                                                                F && set) {
    if (delta_bits < 4) {
        set(k / 2, (value | delta << (15 - delta_bits)) << 16 * (k % 2));
        return;
    }
    set(k / 2, value << 16 * (k % 2));
    if (k < 4) {
        set(3, delta_bits == 4 ? delta << (16 + 4 * k) : delta << 8 * k);
    } else if (delta_bits == 4) {
        set(k - 4, (delta & 3) << 13 | delta >> 2 << 29);
    } else { // entry 4: free bits of word 0 and of the lower half of word 1; 5: the upper half of word 1, word 2
        set(k == 4 ? 0 : 2,
            k == 4 ? (delta & 3) << 13 | (delta >> 2 & 3) << 29 : (delta >> 2 & 3) << 13 | delta >> 4 << 29);
        set(1, k == 4 ? delta >> 4 << 13 : (delta & 3) << 29);
    }
}
// The delta of entry k of the INLINE_DELTA group that begins at `words`.
__host__ __device__ __forceinline__ int inline_delta_of(const uint32_t * words, int k, int delta_bits) {
    const auto bits_of = [&](int i) { return static_cast<int>(words[i / 2] >> (13 + 16 * (i % 2)) & 3); };
    if (delta_bits < 4) {
        return static_cast<int>((words[k / 2] >> 16 * (k % 2) & 0x7fff) >> (15 - delta_bits));
    }
    if (k < 4) {
        return static_cast<int>(delta_bits == 4 ? words[3] >> (16 + 4 * k) & 15 : words[3] >> 8 * k & 63);
    }
    if (delta_bits == 4) {
        return bits_of(2 * (k - 4)) | bits_of(2 * (k - 4) + 1) << 2;
    }
    return bits_of(3 * (k - 4)) | bits_of(3 * (k - 4) + 1) << 2 | bits_of(3 * (k - 4) + 2) << 4;
}

// Converts a value of a group to the type of the matrix: times 2^exponent.
__device__ __forceinline__ uint16_t from_inline_delta(uint16_t bits, float power, bool bf16) {
    return narrowed(__float_as_uint(__half2float(__ushort_as_half(bits)) * power), bf16);
}
// ---- EXP_CODED ----

// Multiplies the lower or upper one of two bfloat16 numbers by `scale`, a power of two, and returns it as a float.
template <bool HIGH> __device__ __forceinline__ float scaled_bf16(uint32_t pair, uint32_t scale) {
    uint32_t v;
#if __CUDA_ARCH__ >= 800
    // Upper half: the product. Lower half: 0 * number + 0 = +0.
    if (HIGH) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(pair), "r"(scale), "r"(0));
    } else {
        asm("{\n.reg .b16 l, h;\n.reg .b32 d;\nmov.b32 {l, h}, %1;\nmov.b32 d, {l, l};\n"
            "fma.rn.bf16x2 %0, d, %2, %3;\n}"
            : "=r"(v)
            : "r"(pair), "r"(scale), "r"(0));
    }
    return __uint_as_float(v);
#else
    v = HIGH ? pair & 0xffff0000u : pair << 16;
    return __uint_as_float(v) * __uint_as_float(scale);
#endif
}

template <typename X, int BITS> struct group_bits<exp_coded<X>, BITS> {
    static constexpr int ENTRIES = static_cast<int>(EXP_CODED_ENTRIES), PARTS = ENTRIES / EXP_CODED_PART,
                         WORDS = exp_coded_words(BITS), NBYTES = exp_coded_group_nbytes(BITS),
                         WORD_STRIDE = BITS == 6 ? 16 : 8;
    uint4    v;        // lower bits, one byte per value
    uint32_t w[WORDS]; // deltas; signs and codes

    // Addresses of the values and the words of the group in slot g of row_span. The group in slot g + n * LINE_GROUPS
    // starts n * LINE_GROUPS * exp_coded_group_nbytes(BITS) bytes later.
    __device__ __forceinline__ static const uint8_t * values_at(const uint8_t * p, int64_t g) {
        return p + g * NBYTES + place() * (16 - NBYTES);
    }
    __device__ __forceinline__ static const uint8_t * words_at(const uint8_t * p, int64_t g) {
        return p + g * NBYTES + 16 * LINE_GROUPS + place() * (WORD_STRIDE - NBYTES);
    }
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { load(values_at(p, g), words_at(p, g)); }
    __device__ __forceinline__ void load(const uint8_t * values) {
        load(values, values + 16 * LINE_GROUPS + place() * (WORD_STRIDE - 16));
    }
    __device__ __forceinline__ void load(const uint8_t * values, const uint8_t * words) {
        v = load_streaming(reinterpret_cast<const uint4 *>(values));
        if constexpr (BITS == 6) {
            const uint4 u = load_streaming(reinterpret_cast<const uint4 *>(words));
            w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w;
        } else {
            const uint2 u = load_streaming(reinterpret_cast<const uint2 *>(words));
            w[0] = u.x, w[1] = u.y;
            if constexpr (BITS == 4) {
                w[2] = load_streaming(reinterpret_cast<const uint32_t *>(words + 8 * LINE_GROUPS - 4 * place()));
            }
        }
    }
    // entries 2 * PAIR and the next as bfloat16 numbers, 2^-exponent times the values
    template <int PAIR> __device__ __forceinline__ uint32_t pair() const {
        constexpr int  SET   = PAIR / 2;
        const uint32_t bytes = SET == 0   ? v.x
                               : SET == 1 ? v.y
                               : SET == 2 ? v.z
                                          : v.w,
                       upper = __funnelshift_r(w[WORDS - 1], w[WORDS - 1], 2 * SET) & 0x81818181u;
        return __byte_perm(bytes, upper, PAIR % 2 ? 0x7362 : 0x5140);
    }
    // Returns the values of a part in pairs of the matrix's type. scale: scale_of() of the power of two that restores
    // them
    __device__ __forceinline__ static uint32_t                 scale_of(float power) { return __float_as_uint(power); }
    template <int PART, int N> __device__ __forceinline__ void scaled(uint32_t (&pairs)[N], uint32_t scale) const {
        pairs[0] = scaled_pair<PART * 4>(scale), pairs[1] = scaled_pair<PART * 4 + 1>(scale);
        pairs[2] = scaled_pair<PART * 4 + 2>(scale), pairs[3] = scaled_pair<PART * 4 + 3>(scale);
    }
    __device__ __forceinline__ static uint32_t half_of_outlier(uint32_t value) {
        return narrowed(value, std::is_same<X, __nv_bfloat16>::value);
    }
    // For a group of outliers: calls outlier(index, column, bits of the value as a float).
    template <typename F> __device__ __forceinline__ void for_each_outlier(F && outlier) const {
        const uint32_t values[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
        for (int k = 0; k < 4; k++) {
            outlier(k, k % 2 ? w[k / 2] >> 16 : w[k / 2] & 0xffff, values[k]);
        }
    }
    template <int K> __device__ __forceinline__ float get(uint32_t scale) const {
        return scaled_bf16 < K % 2 == 1 > (pair<K / 2>(), scale);
    }
    template <int PART, typename F>
    __host__ __device__ __forceinline__ uint32_t walk(uint32_t at, const uint32_t * weight, F && entry) const {
        at = walk_quad<8 * PART>(deltas_of<2 * PART>(), at, weight, entry);
        return walk_quad<8 * PART + 4>(deltas_of<2 * PART + 1>(), at, weight, entry);
    }

private:
    template <int PAIR> __device__ __forceinline__ uint32_t scaled_pair(uint32_t scale) const {
        const float low = get<2 * PAIR>(scale), high = get<2 * PAIR + 1>(scale);
        if constexpr (std::is_same<X, __half>::value) {
            const __half2 h = __floats2half2_rn(low, high);
            return *reinterpret_cast<const uint32_t *>(&h);
        } else {
            return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
        }
    }
    // Index of the group in its line, which is the same for all groups of a thread.
    __device__ __forceinline__ static int place() { return static_cast<int>(threadIdx.x % LINE_GROUPS); }
    // deltas of entries 4 * SET ..., one per byte, as set_exp_coded_weights() expects them
    template <int SET> __host__ __device__ __forceinline__ uint32_t deltas_of() const {
        if constexpr (BITS == 2) {
            return w[0] & 0x03030303u << 2 * SET;
        } else if constexpr (BITS == 4) {
            return w[SET / 2] & 0x0f0f0f0fu << SET % 2 * 4;
        } else if constexpr (SET < 3) {
            return w[SET] & 0x3f3f3f3fu;
        } else {
            return (w[0] >> 6 & 0x03030303u) | (w[1] >> 4 & 0x0c0c0c0cu) | (w[2] >> 2 & 0x30303030u);
        }
    }
};
inline void set_exp_coded_weights(uint32_t weight[16], int bits, uint32_t step) {
    for (int k = 0; k < 16; k++) {
        const int shift = bits == 2 ? k / 4 * 2 : bits == 4 ? k / 4 % 2 * 4 : 0;
        weight[k]       = (step >> shift) * (0x01010101u >> (24 - 8 * (k % 4)));
    }
}

// Index of a word of the EXP_CODED group in slot g, from the start of the matrix. Words 0-3 hold the values' bytes.
__host__ __device__ __forceinline__ int64_t exp_coded_word(int64_t g, int word, int delta_bits) {
    const int     words = static_cast<int>(exp_coded_words(delta_bits)), i = static_cast<int>(g % LINE_GROUPS);
    const int64_t line = g / LINE_GROUPS * LINE_GROUPS * (4 + words);
    if (word < 4) {
        return line + 4 * i + word;
    }
    const int stride = words == 4 ? 4 : 2;
    return line + 4 * LINE_GROUPS + (word < 6 || words == 4 ? stride * i + word - 4 : 2 * LINE_GROUPS + i);
}
// Calls set(word of the group, bits to set in it) for entry k of an EXP_CODED group, which is zero before. value:
// held_as()
template <typename F>
__host__ __device__ __forceinline__ void set_exp_coded_entry(int k, uint32_t value, uint32_t delta, int delta_bits,
                                                             F && set) {
    const int of_set = k / 4, byte = k % 4 * 8, words = static_cast<int>(exp_coded_words(delta_bits));
    set(of_set, (value & 255) << byte);
    set(3 + words, (value >> 8 & 1) << (byte + 2 * of_set) | (value >> 9 & 1) << (byte + 2 * of_set + 7) % 32);
    if (delta_bits == 2) {
        set(4, delta << (byte + 2 * of_set));
    } else if (delta_bits == 4) {
        set(4 + of_set / 2, delta << (byte + of_set % 2 * 4));
    } else if (of_set < 3) {
        set(4 + of_set, delta << byte);
    } else {
        for (int i = 0; i < 3; i++) {
            set(4 + i, (delta >> 2 * i & 3) << (byte + 6));
        }
    }
}
// The delta of entry k of a group whose words are word(i).
template <typename F> __host__ __device__ __forceinline__ int exp_coded_delta_of(int k, int delta_bits, F && word) {
    const int of_set = k / 4, byte = k % 4 * 8;
    if (delta_bits == 2) {
        return static_cast<int>(word(4) >> (byte + 2 * of_set) & 3);
    }
    if (delta_bits == 4) {
        return static_cast<int>(word(4 + of_set / 2) >> (byte + of_set % 2 * 4) & 15);
    }
    if (of_set < 3) {
        return static_cast<int>(word(4 + of_set) >> byte & 63);
    }
    return static_cast<int>((word(4) >> (byte + 6) & 3) | (word(5) >> (byte + 6) & 3) << 2 |
                            (word(6) >> (byte + 6) & 3) << 4);
}

// Positions in x are counted in units of 2^-SHIFT bytes of one column of x; STEP units from one column (BANK_ORDER: 32
// columns) to the next. Deltas of less than 6 bits are not shifted within their byte, so their dp4a weights are as
// small as 1/32 of a step. Deltas that count adjacent columns (4 bytes) therefore need units of 1/32 byte.
template <int BITS, bool BANK_ORDER> constexpr uint32_t SHIFT = !BANK_ORDER && BITS < 6 ? 5 : 0;
template <int BITS, bool BANK_ORDER> constexpr uint32_t STEP  = BANK_ORDER || BITS < 6 ? 128 : 4;

// Returns sum modulo a modulus, if sum is less than twice the modulus. negative: -modulus. A difference below zero
// wraps around to a large unsigned number.
__device__ __forceinline__ uint32_t wrap(uint32_t sum, uint32_t negative) {
#if __CUDA_ARCH__ >= 900
    return __viaddmin_u32(sum, negative, sum); // one instruction
#else
    return min(sum + negative, sum);
#endif
}

inline void set_inline_delta_weights(uint32_t weight[8], int bits, uint32_t step) {
    if (bits == 6) {
        const uint32_t of[8] = { step,           step * 0x101,    step * 0x10101, step * 0x1010101,
                                 step * 0x40001, step * 0x100004, step << 4,      step << 16 };
        std::copy_n(of, 8, weight);
        return;
    }
    // odd entries have their deltas in high nibbles: 16 times as large
    constexpr int BYTE[4] = { 1, 3, 0, 2 }, NIBBLE_BYTE[4] = { 2, 0, 3, 1 };
    for (int k = 0; k < 8; k++) {
        weight[k] = k % 4 ? weight[k - 1] : 0;
        weight[k] |= bits == 4 ? step >> k % 2 * 4 << 8 * NIBBLE_BYTE[k % 4] : step >> (7 - bits) << 8 * BYTE[k % 4];
        if (bits == 4 && k >= 4) { // two bits above bit 5 of byte 1, two above bit 5 of byte 3
            weight[k] = step >> 5 << 8 | step >> 3 << 24;
        }
    }
}

// T: a tag of the layout
template <typename T> void set_weights(uint32_t weight[16], int bits, uint32_t step) {
    is_exp_coded<T> ? set_exp_coded_weights(weight, bits, step) : set_inline_delta_weights(weight, bits, step);
}

} // namespace macko::cuda
