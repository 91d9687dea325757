// Kernels for AVX-512 with VBMI, VBMI2 and VNNI. Processes 32 columns at a time: vpexpandw moves 16-bit values to the
// lanes of their columns, then they are widened. Also has the functions of the layout rows16, which needs byte and word
// permutations.
#include "cpu/kernels/kernels-avx512-common.h"
#include "cpu/kernels/kernels-bundles-avx2.h"

namespace macko::cpu {
namespace {

struct positions_table {
    alignas(64) uint8_t position[64];
};
constexpr positions_table make_positions_table() {
    positions_table t = {};
    for (int i = 0; i < 64; i++) {
        t.position[i] = static_cast<uint8_t>(i);
    }
    return t;
}
constexpr positions_table positions_0_63 = make_positions_table();

// For 64 codes in eight groups: each group's bytes in eight bytes, from which the codes are shifted to bytes.
template <int BITS> struct code_shuffles {
    alignas(64) uint8_t group[64];
    alignas(64) uint8_t shift[64];
};
template <int BITS> constexpr code_shuffles<BITS> make_code_shuffles() {
    code_shuffles<BITS> s = {};
    for (int i = 0; i < 64; i++) {
        s.group[i] = static_cast<uint8_t>(i / 8 * BITS + i % 8);
        s.shift[i] = static_cast<uint8_t>(i % 8 * BITS);
    }
    return s;
}
template <int BITS> constexpr code_shuffles<BITS> shuffles_of = make_code_shuffles<BITS>();

struct simd : avx512, bundles_avx2 {
    static constexpr bool               has_bundles = true;
    static constexpr bool               has_basis   = true;
    static constexpr const kernel_set * basis       = &kernels_avx512;
    template <int TYPE>
    static constexpr int  step            = TYPE == GGML_MACKO_TYPE_F32     ? 16
                                            : TYPE == GGML_MACKO_TYPE_CODED ? 64
                                                                            : 32;
    static constexpr bool has_rows16      = true;
    static constexpr int  rows_compressed = 0; // x is gathered

    template <int TYPE> static void expand(const uint8_t * values, uint32_t bits, vec * w) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            avx512::expand<TYPE>(values, bits, w);
        } else {
            const __m512i packed = in_register(_mm512_loadu_si512(values));
            const __m512i all    = _mm512_mask_expand_epi16(in_register(_mm512_setzero_si512()), bits, packed);
            w[0]                 = widen<TYPE>(_mm512_castsi512_si256(all));
            w[1]                 = widen<TYPE>(_mm512_extracti64x4_epi64(all, 1));
        }
    }
    // quantized matrices: bytes, and weights that are not negative because of vpdpbusd
    using weight_t = uint8_t;
    using x_t      = int8_t;

    static constexpr int COLUMNS = 4, OFFSET = 128, TABLE_OFFSET = OFFSET, unrolled_steps = 16;

    static __m512i offsets() { return _mm512_set1_epi8(static_cast<char>(OFFSET)); }
    static __m512i dot(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
    static void    store_negative(int32_t * p, __m512i v) {
        _mm512_store_si512(p, _mm512_sub_epi32(_mm512_setzero_si512(), v));
    }
    // 64 levels
    template <int BITS> static void to_levels(const uint8_t * codes, const uint8_t * levels, uint8_t * out) {
        _mm512_store_si512(
            out, levels_of<BITS>(_mm512_loadu_si512(codes), shuffles_of<BITS>.shift, _mm512_load_si512(levels)));
    }
    // The levels of 64 codes. shift: the bits before each code in its group.
    template <int BITS> static __m512i levels_of(__m512i bytes, const uint8_t * shift, __m512i table) {
        if constexpr (BITS == 8) {
            return _mm512_xor_si512(bytes, offsets());
        } else { // permutations ignore the bits after a code
            const __m512i groups = _mm512_permutexvar_epi8(_mm512_load_si512(shuffles_of<BITS>.group), bytes);
            return _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(_mm512_load_si512(shift), groups), table);
        }
    }
    // For the shifts of groups that begin at each bit of a byte.
    static constexpr bool has_levels_at = true;
    struct code_shifts {
        alignas(64) uint8_t of_bit[8][64];
    };
    template <int BITS> static void make_shifts(code_shifts & shifts) {
        for (int bit = 0; bit < 8 && BITS < 8; bit++) {
            _mm512_store_si512(shifts.of_bit[bit], _mm512_add_epi8(_mm512_load_si512(shuffles_of<BITS>.shift),
                                                                   _mm512_set1_epi8(static_cast<char>(bit))));
        }
    }
    // The levels of 64 codes; bit: the address of the first, times 8, plus the number of its bit.
    template <int BITS> static __m512i levels_at(uint64_t bit, const code_shifts & shifts, __m512i table) {
        return levels_of<BITS>(_mm512_loadu_si512(reinterpret_cast<const void *>(bit / 8)), shifts.of_bit[bit % 8],
                               table);
    }
    // Moves levels to the columns of a word of the bitmap.
    static __m512i spread_levels(uint64_t bits, __m512i levels) {
        return _mm512_mask_expand_epi8(in_register(offsets()), bits, in_register(levels));
    }
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        f(0, spread_levels(bits, _mm512_loadu_si512(levels)));
    }
    // bits from `first` on; at least 57 are valid
    static uint64_t next_bits(const uint8_t * bits, uint64_t first) {
        uint64_t low;
        __builtin_memcpy(&low, bits + first / 8, sizeof(low));
        return low >> (first % 8);
    }
    // the bits among the 64 from `first` on that next_bits() may lack
    static uint64_t last_bits(const uint8_t * bits, uint64_t first) {
        return static_cast<uint64_t>(bits[first / 8 + 8]) << 1 << (63 - first % 8);
    }
    // Expands the n values of a mask word's columns, in the order of coded_place(). Bytes, signs and the bits of `high`
    // are moved to their columns; two adjacent bytes are the upper half of a float, and zero for columns without a
    // value.
    static void expand_coded(const coded_values & v, uint64_t bits, int n, vec * w) {
        uint64_t signs = next_bits(v.signs, v.first), highs = next_bits(v.highs, v.first);
        if (__builtin_expect(n > 56, 0)) {
            signs |= last_bits(v.signs, v.first);
            highs |= last_bits(v.highs, v.first);
        }
        signs              = _pdep_u64(signs, bits);
        highs              = _pdep_u64(highs, bits);
        const __m512i high = _mm512_set1_epi8(static_cast<char>(v.high));
        const __m512i low =
            _mm512_mask_expand_epi8(in_register(_mm512_setzero_si512()), bits, in_register(_mm512_loadu_si512(v.at)));
        __m512i top        = _mm512_maskz_mov_epi8(bits, high);
        top                = _mm512_mask_add_epi8(top, highs, top, _mm512_set1_epi8(1));
        top                = _mm512_mask_add_epi8(top, signs, top, _mm512_set1_epi8(-128));
        const __m512i left = _mm512_unpacklo_epi8(low, top), right = _mm512_unpackhi_epi8(low, top);
        const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        w[0]              = _mm512_castsi512_ps(_mm512_slli_epi32(left, 16));
        w[1]              = _mm512_castsi512_ps(_mm512_and_si512(left, odd));
        w[2]              = _mm512_castsi512_ps(_mm512_slli_epi32(right, 16));
        w[3]              = _mm512_castsi512_ps(_mm512_and_si512(right, odd));
    }
    // loads the next 16 values
    static vec load_coded(const coded_values & v) {
        const auto signs = static_cast<__mmask16>(next_bits(v.signs, v.first));
        const auto highs = static_cast<__mmask16>(next_bits(v.highs, v.first));
        __m512i    u =
            _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(v.at))), 16);
        u = _mm512_add_epi32(u, _mm512_set1_epi32(static_cast<int>(v.high << 24)));
        u = _mm512_mask_add_epi32(u, highs, u, _mm512_set1_epi32(1 << 24));
        return _mm512_castsi512_ps(
            _mm512_mask_add_epi32(u, signs, u, _mm512_set1_epi32(static_cast<int>(0x80000000u))));
    }
    // v: 16 columns of a mask word; out: the position of the first of them
    static void store_coded_x(float * out, vec v) {
        const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        const vec     lanes = _mm512_permutexvar_ps(order, v);
        _mm_storeu_ps(out, _mm512_castps512_ps128(lanes));
        _mm_storeu_ps(out + 16, _mm512_extractf32x4_ps(lanes, 1));
        _mm_storeu_ps(out + 32, _mm512_extractf32x4_ps(lanes, 2));
        _mm_storeu_ps(out + 48, _mm512_extractf32x4_ps(lanes, 3));
    }
    // The product of a row with one x. For each mask word, the numbers 0 ... 63 compressed by the mask are the
    // positions of its non-zeros. The positions select the x from the two registers of the word's 64 columns, in the
    // same lanes as the packed values. FEW: a word rarely has more than 16 non-zeros.
    template <int TYPE, bool FEW>
    static float dot_gathered(const uint64_t * mask, int64_t words, const uint8_t * values, const uint8_t * x) {
        constexpr int PREFETCH  = 4096; // bytes ahead in the values
        const __m512i positions = _mm512_load_si512(positions_0_63.position);
        vec           acc[4]    = { zero(), zero(), zero(), zero() };
        const auto    add_word  = [&](int64_t word, int a) __attribute__((always_inline)) {
            const uint64_t bits = mask[word];
            const int      n    = __builtin_popcountll(bits);
            const __m512i  at   = _mm512_mask_compress_epi8(in_register(_mm512_setzero_si512()), bits, positions);
            const __m512i  lo   = _mm512_load_si512(x + word * 128);
            const __m512i  hi   = _mm512_load_si512(x + word * 128 + 64);
            // Adds non-zeros first ... first + 31 of the word, at the given positions. The x of missing non-zeros are
            // zero, and the values after the last one are finite.
            const auto add_entries = [&](int first, __m256i their_positions) __attribute__((always_inline)) {
                const __mmask32 some = _cvtu32_mask32(_bzhi_u32(~0u, static_cast<unsigned>(n - first)));
                const __m512i xs = _mm512_maskz_permutex2var_epi16(some, lo, _mm512_cvtepu8_epi16(their_positions), hi);
                acc[a] = fma(load_values<TYPE>(values + first * 2), widen<TYPE>(_mm512_castsi512_si256(xs)), acc[a]);
                if (!FEW || __builtin_expect(n - first > 16, 0)) {
                    acc[a + 2] = fma(load_values<TYPE>(values + first * 2 + 32),
                                         widen<TYPE>(_mm512_extracti64x4_epi64(xs, 1)), acc[a + 2]);
                }
            };
            add_entries(0, _mm512_castsi512_si256(at));
            if (__builtin_expect(n > 32, 0)) {
                add_entries(32, _mm512_extracti64x4_epi64(at, 1));
            }
            values += n * 2;
        };
        int64_t word = 0;
        for (; word + 4 <= words; word += 4) {
            __builtin_prefetch(values + PREFETCH);
            __builtin_prefetch(mask + word + 256);
            add_word(word, 0);
            add_word(word + 1, 1);
            if (!FEW) {
                __builtin_prefetch(values + PREFETCH);
            }
            add_word(word + 2, 0);
            add_word(word + 3, 1);
        }
        for (; word < words; word++) {
            add_word(word, 0);
        }
        return sum(add(add(acc[0], acc[2]), add(acc[1], acc[3])));
    }
    // Stores v, which has TYPE's precision, as 16-bit numbers.
    template <int TYPE> static void store16(uint8_t * out, vec v) {
        __m256i h;
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        } else {
            h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16));
        }
        _mm256_store_si256(reinterpret_cast<__m256i *>(out), h);
    }
};

// Loads read up to 64 bytes after the values of the row, which VALUES_SLACK provides.
void expand_row(const uint64_t * masks, const uint8_t * values, int64_t cols, uint16_t * dense) {
    for (int64_t col = 0; col < cols; col += 32) {
        const auto    bits   = static_cast<uint32_t>(masks[col / 64] >> (col & 32));
        const __m512i packed = simd::in_register(_mm512_loadu_si512(values));
        const __m512i all    = _mm512_maskz_expand_epi16(bits, packed);
        if (cols - col >= 32) {
            _mm512_storeu_si512(dense + col, all);
        } else {
            _mm512_mask_storeu_epi16(dense + col, (1u << (cols - col)) - 1, all);
        }
        values += 2 * __builtin_popcount(bits);
    }
}

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"
#include "cpu/kernels/span-ops-avx2.h"

const macko::cpu::kernel_set macko::cpu::kernels_avx512_vbmi2 =
    macko::cpu::make_set("avx512-vbmi2", { 0.4f, 16, 0.03f, 0.032f, 0.12f, 0.5f, 0.46f }, { 0.25f, 0.55f, true, 0.45f },
                         { macko::cpu::expand_row, macko::cpu::expand_quantized }, &macko::cpu::SPAN_OPS);
