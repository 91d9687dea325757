// Functions of the sets avx2, avx2-vnni and avx512 for quantized matrices (kernels-quantized.h): codes to levels, and
// levels to their columns.
#pragma once

#include "cpu/kernels/mask-tables.h"

#include <immintrin.h>

namespace macko::cpu {
namespace {

struct quantized_avx2 {
    using weight_t = int16_t;
    using x_t      = int16_t;

    static constexpr int  COLUMNS = 2, OFFSET = 0, TABLE_OFFSET = 0, unrolled_steps = 4;
    static constexpr bool has_levels_at = false;

    // 64 levels
    template <int BITS> static void to_levels(const uint8_t * codes, const uint8_t * levels, uint8_t * out) {
        __m256i first, second;
        if constexpr (BITS == 4) { // even and odd codes
            const __m256i all = _mm256_permute4x64_epi64(load_bytes(codes), 0xd8), low = _mm256_set1_epi8(15);
            const __m256i even = _mm256_shuffle_epi8(load_twice(levels), _mm256_and_si256(all, low));
            const __m256i odd =
                _mm256_shuffle_epi8(load_twice(levels), _mm256_and_si256(_mm256_srli_epi16(all, 4), low));
            first  = _mm256_unpacklo_epi8(even, odd);
            second = _mm256_unpackhi_epi8(even, odd);
        } else {
            first  = some_levels<BITS>(codes, levels);
            second = some_levels<BITS>(codes + 4 * BITS, levels);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), first);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + 32), second);
    }
    // Calls f with the levels of each 16 columns of a word, and zeros. Four independent counts and addresses are faster
    // than steps that each need the last one, and a rotated word has the offset of each byte's table after one shift.
    template <typename F> static void for_each_16(uint64_t bits, const uint8_t * levels, F && f) {
        const auto rotated = [&](int n) { return n ? bits >> n | bits << (64 - n) : bits; };
        const auto offset  = [&](int byte) { return rotated((8 * byte + 60) % 64) & 0xff0; };
        const auto before  = [&](int part) { return part ? __builtin_popcountll(bits << (64 - 16 * part)) : 0; };
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const auto table = [](const uint8_t(&t)[256][16], uint64_t at) {
                return _mm_load_si128(reinterpret_cast<const __m128i *>(t[0] + at));
            };
            const __m128i order =
                _mm_add_epi8(table(byte_tables.first, offset(2 * i)), table(byte_tables.second, offset(2 * i + 1)));
            const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(levels + before(i)));
            f(i, _mm_shuffle_epi8(packed, order));
        }
    }
    // The same with 32 columns.
    template <typename F> static void for_each_32(uint64_t bits, const uint8_t * levels, F && f) {
        __m128i low;
        for_each_16(bits, levels, [&](int i, __m128i part) __attribute__((always_inline)) {
            i % 2 ? f(i / 2, _mm256_set_m128i(part, low)) : void(low = part);
        });
    }

private:
    static __m256i load_bytes(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    static __m256i load_twice(const void * p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    // The levels of 32 codes of other than 4 bits.
    template <int BITS> static __m256i some_levels(const uint8_t * codes, const uint8_t * levels) {
        if constexpr (BITS == 8) {
            return load_bytes(codes);
        } else { // two groups in each half; multiplications move a code to the highest bits of 16
            constexpr const code_words & words = words_of_codes<BITS>;
            const auto                   half  = [&](int64_t at) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + at));
            };
            const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(half(0)), half(2 * BITS), 1);
            const auto    group = [&](int i) {
                const __m256i in_words = _mm256_shuffle_epi8(bytes, load_twice(words.bytes[i]));
                return _mm256_srli_epi16(_mm256_mullo_epi16(in_words, load_twice(words.multiplier)), 16 - BITS);
            };
            const __m256i each  = _mm256_packus_epi16(group(0), group(1));
            const __m256i first = _mm256_shuffle_epi8(load_twice(levels), each);
            return BITS == 3 ? first
                             : _mm256_blendv_epi8(first, _mm256_shuffle_epi8(load_twice(levels + 16), each),
                                                  _mm256_slli_epi16(each, 3));
        }
    }
};

} // namespace
} // namespace macko::cpu
