// The functions of span-ops.h in AVX2, for the kernel sets with bundles.
#pragma once

#include "cpu/kernels/mask-tables.h"
#include "cpu/layout/span-ops.h"

#include <immintrin.h>

namespace macko::cpu {
namespace {

// The codes of eight entries from k on, one byte each. Entries k ... k + 15 exist, so whole words can be loaded.
template <int BITS> inline uint64_t eight_codes(const uint8_t * deltas, int64_t k) {
    const int64_t bit   = k * BITS;
    uint64_t      codes = 0;
    if constexpr (BITS == 8) {
        __builtin_memcpy(&codes, deltas + k, 8);
        return codes;
    }
    if constexpr (BITS == 4) { // at most half a byte precedes them
        uint64_t word = 0;
        __builtin_memcpy(&word, deltas + (bit >> 3), 8);
        codes = word >> (bit & 7) & 0xffffffff;
        codes = (codes | codes << 16) & 0x0000ffff0000ffff;
        codes = (codes | codes << 8) & 0x00ff00ff00ff00ff;
        return (codes | codes << 4) & 0x0f0f0f0f0f0f0f0f;
    }
    if constexpr (BITS == 2) {
        uint32_t word;
        __builtin_memcpy(&word, deltas + (bit >> 3), 4);
        codes = word >> (bit & 7) & 0xffff;
        codes = (codes | codes << 24) & 0x000000ff000000ff;
        codes = (codes | codes << 12) & 0x000f000f000f000f;
        return (codes | codes << 6) & 0x0303030303030303;
    }
    uint16_t word;
    __builtin_memcpy(&word, deltas + (bit >> 3), 2);
    codes = static_cast<uint64_t>(word >> (bit & 7) & 0xff) * 0x0101010101010101 & 0x8040201008040201;
    return (codes + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101;
}

// One bit for each of eight 16-bit numbers that are 0 or -1.
inline uint32_t bits_of(__m128i all) {
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(all, _mm_setzero_si128())));
}

template <int BITS>
int read_macko_row(macko_row * row, int64_t begin, int64_t limit, int n, int32_t * entries, uint16_t * end) {
    macko_row r      = *row;
    int       span   = 0;
    const int behind = static_cast<int>(limit - begin); // end of the chunk
    while (r.k + 16 <= r.end) {
        __m128i cols = _mm_add_epi16(
            _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<long long>(eight_codes<BITS>(r.deltas, r.k)))),
            _mm_set1_epi16(1));
        cols           = _mm_add_epi16(cols, _mm_slli_si128(cols, 2)); // prefix sums
        cols           = _mm_add_epi16(cols, _mm_slli_si128(cols, 4));
        cols           = _mm_add_epi16(cols, _mm_slli_si128(cols, 8));
        cols           = _mm_add_epi16(cols, _mm_set1_epi16(static_cast<int16_t>(r.col - begin)));
        const int last = static_cast<int16_t>(_mm_extract_epi16(cols, 7));
        if (last >= behind) {
            break;
        }
        const __m128i  values = _mm_loadu_si128(reinterpret_cast<const __m128i *>(r.values + r.k));
        const uint32_t used   = 255 & ~bits_of(_mm_cmpeq_epi16(values, _mm_setzero_si128()));
        for (; span < last / BUNDLE_SPAN; span++) {
            const auto span_end = static_cast<int16_t>((span + 1) * BUNDLE_SPAN);
            end[span]           = static_cast<uint16_t>(
                n + __builtin_popcount(used & bits_of(_mm_cmplt_epi16(cols, _mm_set1_epi16(span_end)))));
        }
        // drop the fillers
        const __m128i pack = _mm_load_si128(reinterpret_cast<const __m128i *>(tables_of_masks.pack[used]));
        const __m128i c = _mm_shuffle_epi8(cols, pack), v = _mm_shuffle_epi8(values, pack);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(entries + n), _mm_unpacklo_epi16(v, c));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(entries + n + 4), _mm_unpackhi_epi16(v, c));
        n += __builtin_popcount(used);
        end[span] = static_cast<uint16_t>(n);
        r.k += 8;
        r.col = begin + last;
    }
    *row = r;
    return plain_span_ops.read_row(BITS, row, begin, limit, n, entries, end); // the end of the row or chunk
}

int read_row(int32_t delta_bits, macko_row * row, int64_t begin, int64_t limit, int n, int32_t * entries,
             uint16_t * end) {
    switch (delta_bits) {
        case 1:  return read_macko_row<1>(row, begin, limit, n, entries, end);
        case 2:  return read_macko_row<2>(row, begin, limit, n, entries, end);
        case 4:  return read_macko_row<4>(row, begin, limit, n, entries, end);
        default: return read_macko_row<8>(row, begin, limit, n, entries, end);
    }
}

// Loads eight entries one by one, because gather instructions are slow on many CPUs.
inline __m256i eight_entries(const int32_t * entries, const int32_t * at) {
    return _mm256_setr_epi32(entries[at[0]], entries[at[1]], entries[at[2]], entries[at[3]], entries[at[4]],
                             entries[at[5]], entries[at[6]], entries[at[7]]);
}
// The minimum of all lanes, in all lanes.
inline __m256i least_of(__m256i a, __m256i b) {
    const __m256i m = _mm256_min_epi32(a, b);
    __m128i       l = _mm_min_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    l               = _mm_min_epi32(l, _mm_shuffle_epi32(l, 0x4e));
    return _mm256_broadcastd_epi32(_mm_min_epi32(l, _mm_shuffle_epi32(l, 0xb1)));
}
// 16 numbers below 65536, in order.
inline __m256i as_16_bits(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8); }

// positions of the values of the second step, and of the second half of the pieces
constexpr int SECOND_STEP = bundle_value_at(1, 0), SECOND_HALF = bundle_value_at(0, 8);

int write_vectors(const int32_t * entries, const int32_t * first, int32_t end, span_vector * out) {
    alignas(32) int32_t at[STEP_SLOTS];
    __m256i             at0 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first));
    __m256i             at1 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first + 8));
    __m256i             e0 = eight_entries(entries, first), e1 = eight_entries(entries, first + 8);
    __m256i             least   = least_of(e0, e1);
    const __m256i       no_more = _mm256_set1_epi32(end << 16), value_bits = _mm256_set1_epi32(0xffff);
    int32_t             now = _mm_cvtsi128_si32(_mm256_castsi256_si128(least)) >> 16, window = now;
    int                 n = 0;
    for (; now < end; n++) {
        __m256i places = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int step = 0; step < 2; step++) {
            const int32_t delta = now < end ? now - window : 0;
            window += delta;
            out[n].delta[step]   = static_cast<uint8_t>(delta);
            const __m256i begins = _mm256_srli_epi32(least, 16); // where the window begins, if any lane is used
            const __m256i limit  = _mm256_min_epi32(
                no_more, _mm256_add_epi32(_mm256_andnot_si256(value_bits, least), _mm256_set1_epi32(WINDOW << 16)));
            const __m256i used0 = _mm256_cmpgt_epi32(limit, e0), used1 = _mm256_cmpgt_epi32(limit, e1);
            at0 = _mm256_sub_epi32(at0, used0);
            at1 = _mm256_sub_epi32(at1, used1);
            _mm256_store_si256(reinterpret_cast<__m256i *>(at), at0);
            _mm256_store_si256(reinterpret_cast<__m256i *>(at + 8), at1);
            e0                  = _mm256_and_si256(e0, used0);
            e1                  = _mm256_and_si256(e1, used1);
            const __m256i value = as_16_bits(_mm256_and_si256(e0, value_bits), _mm256_and_si256(e1, value_bits));
            const __m256i place =
                as_16_bits(_mm256_and_si256(_mm256_sub_epi32(_mm256_srli_epi32(e0, 16), begins), used0),
                           _mm256_and_si256(_mm256_sub_epi32(_mm256_srli_epi32(e1, 16), begins), used1));
            uint16_t * values = out[n].value + step * SECOND_STEP;
            _mm_storeu_si128(reinterpret_cast<__m128i *>(values), _mm256_castsi256_si128(value));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(values + SECOND_HALF), _mm256_extracti128_si256(value, 1));
            places = _mm256_or_si256(places, step == 0 ? place : _mm256_slli_epi16(place, 4));
            e0     = eight_entries(entries, at);
            e1     = eight_entries(entries, at + 8);
            least  = least_of(e0, e1);
            now    = _mm_cvtsi128_si32(_mm256_castsi256_si128(least)) >> 16;
        }
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out[n].place),
                         _mm_packus_epi16(_mm256_castsi256_si128(places), _mm256_extracti128_si256(places, 1)));
    }
    return n;
}

constexpr span_ops SPAN_OPS = { read_row, write_vectors };

} // namespace
} // namespace macko::cpu
