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

    static constexpr int  COLUMNS = 2, OFFSET = 0, TABLE_OFFSET = 0, precise_n = 0, unrolled_steps = 4;
    static constexpr bool has_levels_at = false;

    // 64 levels at a time
    template <int BITS>
    static void to_levels(const uint8_t * codes, int64_t steps, const uint8_t * levels, uint8_t * out) {
        for (int64_t i = 0; i < steps * 2; i++, codes += 4 * BITS, out += 32) {
            __builtin_prefetch(codes + 4096);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), some_levels<BITS>(codes, levels));
        }
    }
    // The levels of the next 16 columns, the lowest of `bits`; the others are zero. Advances both.
    static __m128i next_levels(uint64_t & bits, const uint8_t *& levels) {
        const auto    part  = static_cast<uint32_t>(bits) & 0xffff;
        const __m128i first = _mm_load_si128(reinterpret_cast<const __m128i *>(byte_tables.first[part & 255]));
        const __m128i order =
            _mm_add_epi8(first, _mm_load_si128(reinterpret_cast<const __m128i *>(byte_tables.second[part >> 8])));
        const __m128i all = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(levels)), order);
        levels += __builtin_popcount(part);
        bits >>= 16;
        return all;
    }
    // The levels of the next 32 columns.
    static __m256i next_32_levels(uint64_t & bits, const uint8_t *& levels) {
        const __m128i low = next_levels(bits, levels), high = next_levels(bits, levels);
        return _mm256_set_m128i(high, low);
    }

private:
    static __m256i load_bytes(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    static __m256i load_twice(const void * p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    // The levels of 32 codes.
    template <int BITS> static __m256i some_levels(const uint8_t * codes, const uint8_t * levels) {
        if constexpr (BITS == 8) {
            return load_bytes(codes);
        } else if constexpr (BITS == 4) {
            const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes)));
            const __m256i each  = _mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4));
            return _mm256_shuffle_epi8(load_twice(levels), _mm256_and_si256(each, _mm256_set1_epi8(15)));
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
