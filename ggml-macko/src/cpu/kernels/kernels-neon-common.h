// Shared by the kernel sets for arm64: Advanced SIMD of Armv8.0, which every such CPU has. Processes the eight columns
// of a mask byte at a time: `tbl` moves the packed values to their columns, or the x of the non-zeros to the packed
// values.
#pragma once

#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/mask-tables.h"

#include <arm_neon.h>

#pragma GCC diagnostic ignored "-Wsign-conversion" // int template arguments as array bounds

namespace macko::cpu {
namespace {

// for each mask of four columns: the byte indices that move packed floats to their columns, and the set positions
struct nibble_tables {
    alignas(64) uint8_t spread[16][16];
    alignas(64) uint8_t positions[16][4];
};
constexpr nibble_tables make_nibble_tables() {
    nibble_tables t = {};
    for (int m = 0; m < 16; m++) {
        int k = 0;
        for (int i = 0; i < 4; i++) {
            const bool set = (m >> i) & 1;
            for (int b = 0; b < 4; b++) {
                t.spread[m][4 * i + b] = set ? static_cast<uint8_t>(4 * k + b) : 0x80; // this index gives zero
            }
            if (set) {
                t.positions[m][k++] = static_cast<uint8_t>(i);
            }
        }
    }
    return t;
}
constexpr nibble_tables tables_of_nibbles = make_nibble_tables();

struct neon : plain_mask_bits {
    using vec = float32x4_t;

    static constexpr int                     width            = 4;
    static constexpr int                     tile_vecs        = 8;
    template <int TYPE> static constexpr int step             = TYPE == GGML_MACKO_TYPE_F32 ? 4 : 8;
    static constexpr int                     unrolled_columns = 64;
    static constexpr bool                    has_rows16       = true;
    static constexpr int                     rows_compressed  = 2;
    template <int NX> static constexpr int   rows_per_pass    = 1;

    static constexpr int segment_nonzeros = 512; // same value and reasons as for AVX2

    static vec      zero() { return vdupq_n_f32(0); }
    static vec      set1(float a) { return vdupq_n_f32(a); }
    static vec      load(const float * p) { return vld1q_f32(p); }
    static void     store(float * p, vec v) { vst1q_f32(p, v); }
    static vec      add(vec a, vec b) { return vaddq_f32(a, b); }
    static vec      fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
    static vec      mul(vec a, vec b) { return vmulq_f32(a, b); }
    static float    sum(vec v) { return vaddvq_f32(v); }
    static uint32_t nonzeros(vec v) {
        const uint32x4_t bit = { 1, 2, 4, 8 };
        return vaddvq_u32(vbicq_u32(bit, vceqzq_f32(v)));
    }
    static void zip(vec a, vec b, vec & lo, vec & hi) {
        lo = vzip1q_f32(a, b);
        hi = vzip2q_f32(a, b);
    }

    static vec round_f16(vec v) { return vcvt_f32_f16(vcvt_f16_f32(v)); }
    static vec round_bf16(vec v) {
        const uint32x4_t u       = vreinterpretq_u32_f32(v);
        const uint32x4_t odd     = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        return vbslq_f32(vceqq_f32(v, v), vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xffff0000u))), v);
    }

    template <int TYPE> static vec widen(uint16x4_t values) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            return vcvt_f32_f16(vreinterpret_f16_u16(values));
        } else {
            return vreinterpretq_f32_u32(vshll_n_u16(values, 16));
        }
    }
    template <int TYPE> static vec widen_high(uint16x8_t values) { // gcc 12 misses it in widen(vget_high_u16())
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            return vcvt_high_f32_f16(vreinterpretq_f16_u16(values));
        } else {
            return vreinterpretq_f32_u32(vshll_high_n_u16(values, 16));
        }
    }
    template <int TYPE> static vec load_values(const uint8_t * p) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            return vreinterpretq_f32_u8(vld1q_u8(p));
        } else {
            return widen<TYPE>(vreinterpret_u16_u8(vld1_u8(p)));
        }
    }
    // quantized matrices (kernels-quantized.h): a column in each lane. Sets with byte dot products replace these types.
    using weight_t = int16_t;
    using x_t      = int16_t;

    static constexpr int  COLUMNS = 1, OFFSET = 0, TABLE_OFFSET = 0, unrolled_steps = 4, x_vecs = 2;
    static constexpr bool has_levels_at = false;

    static int32x4_t no_sum() { return vdupq_n_s32(0); }
    static int32x4_t load_sum(const int32_t * p) { return vld1q_s32(p); }
    static int16x4_t load_ints(const int16_t * p) { return vld1_s16(p); }
    static int32x4_t dot(int32x4_t sum, int16x4_t w, int16x4_t x) { return vmlal_s16(sum, w, x); }
    static vec       to_floats(int32x4_t v) { return vcvtq_f32_s32(v); }
    // 4 / T lanes from p, T times
    template <int T> static int16x4_t load_weights(const int16_t * p) {
        if constexpr (T == 1) {
            return vld1_s16(p);
        } else if constexpr (T == 2) {
            int32_t two;
            __builtin_memcpy(&two, p, sizeof(two));
            return vreinterpret_s16_s32(vdup_n_s32(two));
        } else {
            return vld1_dup_s16(p);
        }
    }
    // 64 levels
    template <int BITS> static void to_levels(const uint8_t * codes, const uint8_t * levels, uint8_t * out) {
        if constexpr (BITS == 8) {
            __builtin_memcpy(out, codes, 64);
            return;
        }
        constexpr const code_words & words = words_of_codes < BITS == 8 ? 4 : BITS > ;
        const int16x8_t              back  = vnegq_s16(vld1q_s16(words.bits_before));
        const uint8x16x2_t           table = { { vld1q_u8(levels), vld1q_u8(levels + 16) } };
        for (int i = 0; i < 4; i++, codes += 2 * BITS, out += 16) {
            const uint8x16_t bytes = vld1q_u8(codes);
            uint16x8_t       group[2];
            for (int k = 0; k < 2; k++) {
                group[k] = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(bytes, vld1q_u8(words.bytes[k]))), back);
            }
            const uint8x16_t each = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(group[0]), vreinterpretq_u8_u16(group[1])),
                                             vdupq_n_u8((1 << BITS) - 1));
            vst1q_u8(out, BITS == 5 ? vqtbl2q_u8(table, each) : vqtbl1q_u8(table.val[0], each));
        }
    }
    // The levels of the next 16 columns, the lowest of `bits`; the others are zero. Advances both.
    static int8x16_t next_levels(uint64_t & bits, const uint8_t *& levels) {
        const auto       part = static_cast<uint32_t>(bits) & 0xffff;
        const uint8x16_t order =
            vaddq_u8(vld1q_u8(byte_tables.first[part & 255]), vld1q_u8(byte_tables.second[part >> 8]));
        const uint8x16_t all = vqtbl1q_u8(vld1q_u8(levels), order);
        levels += __builtin_popcount(part);
        bits >>= 16;
        return vreinterpretq_s8_u8(all);
    }
    static void store_ints(int16_t * p, int16x4_t v) { vst1_s16(p, v); }
    // Moves levels to the columns of a word of the bitmap: 16 vectors.
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        for (int i = 0; i < 16; i += 4) {
            const int8x16_t all = next_levels(bits, levels);
            const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
            f(i, vget_low_s16(low));
            f(i + 1, vget_high_s16(low));
            f(i + 2, vget_low_s16(high));
            f(i + 3, vget_high_s16(high));
        }
    }
    template <int TYPE> static void expand(const uint8_t * values, uint32_t bits, vec * w) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            w[0] = vreinterpretq_f32_u8(vqtbl1q_u8(vld1q_u8(values), vld1q_u8(tables_of_nibbles.spread[bits])));
        } else {
            const uint16x8_t all =
                vreinterpretq_u16_u8(vqtbl1q_u8(vld1q_u8(values), vld1q_u8(tables_of_masks.spread[bits])));
            w[0] = widen<TYPE>(vget_low_u16(all));
            w[1] = widen_high<TYPE>(all);
        }
    }
    static void columns(uint32_t bits, uint32_t base, uint32_t * out) {
        uint32_t four;
        __builtin_memcpy(&four, tables_of_nibbles.positions[bits], sizeof(four));
        const uint16x4_t positions = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))));
        vst1q_u32(out, vaddw_u16(vdupq_n_u32(base), positions));
    }

    // ---- rows16: same arithmetic as AVX2 ----

    // v has TYPE's precision
    template <int TYPE> static void store16(uint8_t * dst, vec v) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) {
            vst1_u8(dst, vreinterpret_u8_f16(vcvt_f16_f32(v)));
        } else {
            vst1_u8(dst, vreinterpret_u8_u16(vshrn_n_u32(vreinterpretq_u32_f32(v), 16)));
        }
    }
    // Compresses the x of the non-zeros of some mask words of NR rows, whose masks are `stride` words apart. Writes
    // them, zeros up to a multiple of 16 numbers, and their number to n[r].
    template <int NR>
    static void compress(const uint64_t * mask, int64_t stride, int64_t words, const uint8_t * x, int64_t (&n)[NR],
                         compressed_x * out) {
        uint8_t * to[NR];
        for (int r = 0; r < NR; r++) {
            to[r] = out[r].bytes;
        }
        for (int64_t word = 0; word < words; word++, x += 128) {
            uint64_t bits[NR], counts[NR];
            for (int r = 0; r < NR; r++) {
                bits[r] = mask[r * stride + word];
                // number of set bits in each byte
                counts[r] = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(bits[r]))), 0);
            }
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                const uint8x16_t xs = vld1q_u8(x + 16 * s);
#pragma GCC unroll 4
                for (int r = 0; r < NR; r++) {
                    // overwrites the part of the previous store after its last x
                    vst1q_u8(to[r], vqtbl1q_u8(xs, vld1q_u8(tables_of_masks.pack[(bits[r] >> (8 * s)) & 255])));
                    to[r] += 2 * ((counts[r] >> (8 * s)) & 255);
                }
            }
        }
        for (int r = 0; r < NR; r++) {
            n[r] = (to[r] - out[r].bytes) / 2;
            vst1q_u8(to[r], vdupq_n_u8(0));
            vst1q_u8(to[r] + 16, vdupq_n_u8(0));
        }
    }
    // Adds w * x of eight 16-bit numbers to two sums.
    template <int TYPE> static void add_products(uint16x8_t w, uint16x8_t x, vec * sum) {
#if defined(__ARM_FEATURE_FP16_FML)
        if constexpr (TYPE == GGML_MACKO_TYPE_F16) { // rounds once, like an FMA of floats
            const float16x8_t a = vreinterpretq_f16_u16(w), b = vreinterpretq_f16_u16(x);
            sum[0] = vfmlalq_low_f16(sum[0], a, b);
            sum[1] = vfmlalq_high_f16(sum[1], a, b);
            return;
        }
#endif
        sum[0] = fma(widen<TYPE>(vget_low_u16(w)), widen<TYPE>(vget_low_u16(x)), sum[0]);
        sum[1] = fma(widen_high<TYPE>(w), widen_high<TYPE>(x), sum[1]);
    }
    static uint16x8_t load16(const uint8_t * p) { return vreinterpretq_u16_u8(vld1q_u8(p)); }

    // Sum of value * x over n x. The values after them are finite and multiplied by zeros.
    template <int TYPE> static float dot_floats(const uint8_t * values, int64_t n, const compressed_x & compressed) {
        const uint8_t * x        = compressed.bytes;
        vec             total[4] = { zero(), zero(), zero(), zero() };
        for (int64_t i = 0; i < n; i += 16) {
            for (int k = 0; k < 4; k += 2, values += 16, x += 16) {
                add_products<TYPE>(load16(values), load16(x), total + k);
            }
        }
        return sum(add(add(total[0], total[1]), add(total[2], total[3])));
    }
};

// Instruction counts of the inner loops, because no such CPU was available for measurements.
constexpr kernel_costs NEON_COSTS = { 1.0f, 4, 0.6f, 0.25f, 0.5f, 0.6f, 0.5f };

} // namespace
} // namespace macko::cpu
