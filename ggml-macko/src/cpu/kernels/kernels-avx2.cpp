// Kernels for AVX2 + FMA + F16C + BMI2. Processes eight columns at a time: for each mask byte, a table has the
// permutation that moves the packed values to the lanes of their columns.
#include "cpu/kernels/kernels-avx2-common.h"
#include "cpu/kernels/kernels-bundles-avx2.h"
#include "cpu/kernels/kernels-quantized-avx2.h"

#pragma GCC diagnostic ignored "-Wsign-conversion" // int template arguments as array bounds

namespace macko::cpu {
namespace {

// Tables for each mask byte, in addition to tables_of_masks.
struct lane_tables {
    alignas(64) uint8_t lanes[256][8];     // like `spread`, for vpermps; expand() zeroes the lanes with bit 7 set
    alignas(64) uint8_t positions[256][8]; // positions of the set bits, lowest first
};
constexpr lane_tables make_lane_tables() {
    lane_tables t = {};
    for (int m = 0; m < 256; m++) {
        int k = 0;
        for (int i = 0; i < 8; i++) {
            const bool set = (m >> i) & 1;
            t.lanes[m][i]  = set ? static_cast<uint8_t>(k) : 0x80;
            if (set) {
                t.positions[m][k++] = static_cast<uint8_t>(i);
            }
        }
    }
    return t;
}
constexpr lane_tables tables = make_lane_tables();

struct simd : avx2, bundles_avx2, quantized_avx2 {
    static constexpr bool                    has_bundles      = true;
    static constexpr int                     tile_vecs        = 8;
    template <int TYPE> static constexpr int step             = 8;
    static constexpr int                     unrolled_columns = 64;
    static constexpr bool                    has_rows16       = true;
    static constexpr int                     rows_compressed  = 2;
    template <int NX> static constexpr int   rows_per_pass    = 1;

    // Approximate number of non-zeros in a segment. With more, the compressed x (two rows, two segments) would push x
    // out of an L1 cache of 32 KiB.
    static constexpr int segment_nonzeros = 512;

    static uint64_t rotate_right(uint64_t bits, int n) { return n == 0 ? bits : bits >> n | bits << (64 - n); }

    // The argument of expand() is a mask byte times 16, an offset in `spread`, so that no byte needs a separate shift.
    static uint64_t                     table_bits(uint64_t word) { return rotate_right(word, 60); }
    template <int STEP> static uint32_t table_part(uint64_t bits, int s) {
        static_assert(STEP == 8, "bytes");
        return static_cast<uint32_t>(rotate_right(bits, 8 * s)) & 0xff0;
    }

    static uint32_t nonzeros(vec v) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, zero(), _CMP_NEQ_UQ)));
    }
    static vec round_f16(vec v) {
        return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static vec round_bf16(vec v) {
        const __m256i u   = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i r   = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const vec     rf  = _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
        return _mm256_blendv_ps(rf, v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }

    template <int TYPE> static vec widen(__m128i values) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            return _mm256_cvtph_ps(values);
        } else {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
        }
    }
    template <int TYPE> static vec load_values(const uint8_t * p) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            return _mm256_loadu_ps(reinterpret_cast<const float *>(p));
        } else {
            return widen<TYPE>(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        }
    }
    template <int TYPE> static void expand(const uint8_t * values, uint32_t offset, vec * w) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            const __m256i lanes =
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(tables.lanes[0] + offset / 2)));
            const vec all = _mm256_permutevar8x32_ps(load_values<TYPE>(values), lanes);
            w[0]          = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srai_epi32(lanes, 31)), all);
        } else {
            const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(values));
            w[0]                 = widen<TYPE>(_mm_shuffle_epi8(
                packed, _mm_load_si128(reinterpret_cast<const __m128i *>(tables_of_masks.spread[0] + offset))));
        }
    }
    // quantized matrices
    static __m256i dot(__m256i sum, __m256i w, __m256i x) {
        // GCC would make all products first, for which registers are too few
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
        __asm__("" : "+x"(sum));
        return sum;
    }
    // Moves levels to the columns of a word of the bitmap: four vectors.
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        for_each_16(bits, levels,
                    [&](int i, __m128i part) __attribute__((always_inline)) { f(i, _mm256_cvtepi8_epi16(part)); });
    }
    // ---- rows16 ----

    // Compresses the x of the non-zeros of some mask words of NR rows, whose masks are `stride` words apart. Writes
    // them, zeros up to a multiple of 16 numbers, and their number to n[r]. Two rows share the loads of x, and hide the
    // latency of the addresses, each of which depends on the previous one.
    template <int NR>
    static void compress(const uint64_t * mask, int64_t stride, int64_t words, const uint8_t * x, int64_t (&n)[NR],
                         compressed_x * out) {
        const uint8_t * controls = tables_of_masks.pack[0];
        uint8_t *       to[NR];
        for (int r = 0; r < NR; r++) {
            to[r] = out[r].bytes;
        }
        for (int64_t word = 0; word < words; word++, x += 128) {
            uint64_t bits[NR]; // rotated, so that no byte needs a separate shift to become a table offset
            for (int r = 0; r < NR; r++) {
                bits[r] = rotate_right(mask[r * stride + word], 60);
            }
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                const __m128i xs = _mm_load_si128(reinterpret_cast<const __m128i *>(x) + s);
#pragma GCC unroll 4
                for (int r = 0; r < NR; r++) {
                    const uint64_t at = rotate_right(bits[r], 8 * s) & 0xff0;
                    // overwrites the part of the previous store after its last x
                    _mm_storeu_si128(
                        reinterpret_cast<__m128i *>(to[r]),
                        _mm_shuffle_epi8(xs, _mm_load_si128(reinterpret_cast<const __m128i *>(controls + at))));
                    to[r] += 2 * __builtin_popcountll(at);
                }
            }
        }
        for (int r = 0; r < NR; r++) {
            n[r] = (to[r] - out[r].bytes) / 2;
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to[r]), _mm256_setzero_si256());
        }
    }
    // Sum of value * x over n x. The values after them are finite and multiplied by zeros.
    template <int TYPE> static float dot_floats(const uint8_t * values, int64_t n, const compressed_x & compressed) {
        constexpr int   PREFETCH = 4096; // bytes ahead
        const __m128i * w        = reinterpret_cast<const __m128i *>(values);
        const __m128i * x        = reinterpret_cast<const __m128i *>(compressed.bytes);
        vec             total[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int64_t i = 0; i < n; i += 16, w += 2, x += 2) {
            __builtin_prefetch(reinterpret_cast<const uint8_t *>(w) + PREFETCH);
            for (int k = 0; k < 2; k++) {
                total[k] =
                    _mm256_fmadd_ps(widen<TYPE>(_mm_loadu_si128(w + k)), widen<TYPE>(_mm_load_si128(x + k)), total[k]);
            }
        }
        return sum(add(total[0], total[1]));
    }
    // Stores v, which has TYPE's precision, as 16-bit numbers.
    template <int TYPE> static void store16(uint8_t * out, vec v) {
        __m128i h;
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        } else {
            const __m256i u = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
            h               = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
        }
        _mm_store_si128(reinterpret_cast<__m128i *>(out), h);
    }
    static void columns(uint32_t bits, uint32_t base, uint32_t * out) {
        const __m256i positions =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(tables.positions[bits])));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out),
                            _mm256_add_epi32(positions, _mm256_set1_epi32(static_cast<int>(base))));
    }
};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"
#include "cpu/kernels/span-ops-avx2.h"

const macko::cpu::kernel_set macko::cpu::kernels_avx2 =
    macko::cpu::make_set("avx2", { 0.17f, 8, 0.03f, 0.068f, 0.22f, 0.42f, 0.38f }, { 0.55f },
                         { nullptr, macko::cpu::expand_quantized }, &macko::cpu::SPAN_OPS);
