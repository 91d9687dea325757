// Products with bundles (bundles.h) for arm64 CPUs with byte dot products, and for F16 with fmlal and fmlal2 if the
// compiler may use them; and the functions of these CPUs for quantized matrices (kernels-quantized.h), which use sdot.
//
// x is rounded to the type of the values and split into two planes of bytes. A window is 16 bytes of each plane, and
// tbl moves the bytes at the places of 16 slots to those slots. Each piece has one lane of a sum.
#pragma once

#include "cpu/kernels/kernels-neon-common.h"

namespace macko::cpu {
namespace {

struct bundles_neon : neon {
    static constexpr bool has_bundles = true;

    static constexpr int PLANE_STEP = 4;

    // quantized matrices: bytes
    using weight_t = int8_t;
    using x_t      = int8_t;

    static constexpr int COLUMNS = 4;

    static int8x16_t load_ints(const int8_t * p) { return vld1q_s8(p); }
    static int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) { return vdotq_s32(sum, w, x); }
    static void      store_ints(int8_t * p, int8x16_t v) { vst1q_s8(p, v); }
    // Moves levels to the columns of a word of the bitmap: four vectors.
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        for (int i = 0; i < 4; i++) {
            f(i, next_levels(bits, levels));
        }
    }
    static int32x4_t join_digits(int32x4_t high, int32x4_t low) { return vaddq_s32(vshlq_n_s32(high, 8), low); }
    // 4 / T lanes from p, T times
    template <int T> static int8x16_t load_weights(const int8_t * p) {
        if constexpr (T == 1) {
            return vld1q_s8(p);
        } else if constexpr (T == 2) {
            return vreinterpretq_s8_s64(vld1q_dup_s64(reinterpret_cast<const int64_t *>(p)));
        } else {
            return vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t *>(p)));
        }
    }

    // Splits floats with the precision of TYPE (F16 or BF16).
    template <int TYPE> static void store_planes(uint8_t * low, uint8_t * high, const float * x) {
        uint8_t bytes[8];
        store16<TYPE>(bytes, vld1q_f32(x));
        const uint8x8_t b = vld1_u8(bytes);
        store_bytes4(low, vuzp1_u8(b, b));
        store_bytes4(high, vuzp2_u8(b, b));
    }
    static void store_bytes4(uint8_t * to, uint8x8_t bytes) {
        const uint32_t first = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
        __builtin_memcpy(to, &first, sizeof(first));
    }

    static void nibbles(const uint8_t * at, uint8x16_t (&out)[2]) { // the low halves of 16 bytes, and the high halves
        const uint8x16_t both = vld1q_u8(at);
        out[0]                = vandq_u8(both, vdupq_n_u8(15));
        out[1]                = vshrq_n_u8(both, 4);
    }
    // Moves the bytes of a window of a plane to the slots with their places.
    static uint8x16_t pick(const uint8_t * window, uint8x16_t places) { return vqtbl1q_u8(vld1q_u8(window), places); }

    // The values of slots 0 ... 7 (`half` 0) or 8 ... 15 of a step.
    static uint16x8_t values_of(const uint8_t * vector, int step, int half) {
        return load16(vector + BUNDLE_VALUES_AT + 16 * (2 * half + step));
    }

    // Adds w * x. For each step, the pieces have the lanes of four sums.
    template <int TYPE>
    static void add_bundle(const uint8_t * rows, const uint8_t * at, const uint8_t * end, const uint8_t * low,
                           const uint8_t * high, float * y) {
        vec     sum[2][2][2] = {}; // of a step, for each half of the pieces
        int64_t base         = 0;
        for (; at < end; at += BUNDLE_VECTOR_NBYTES) {
            uint8x16_t places[2];
            nibbles(at + 2, places);
#pragma GCC unroll 2
            for (int step = 0; step < 2; step++) {
                base += at[step];
                const uint8x16_t xl = pick(low + base, places[step]), xh = pick(high + base, places[step]);
                for (int half = 0; half < 2; half++) {
                    const uint8x16_t x = half ? vzip2q_u8(xl, xh) : vzip1q_u8(xl, xh);
                    add_products<TYPE>(values_of(at, step, half), vreinterpretq_u16_u8(x), sum[step][half]);
                }
            }
        }
        float of_piece[STEP_SLOTS];
        for (int i = 0; i < 4; i++) {
            vst1q_f32(of_piece + 4 * i, vaddq_f32(sum[0][i / 2][i % 2], sum[1][i / 2][i % 2]));
        }
        for (int i = 0; i < STEP_SLOTS; i++) {
            y[rows[i]] += of_piece[i];
        }
    }

    // Transposes eight rows of eight 16-bit numbers.
    static void transpose16(uint16x8_t (&v)[8]) {
        uint16x8_t t[8];
#pragma GCC unroll 3
        for (int round = 0; round < 3; round++) { // perfect shuffles of the rows
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                t[2 * i]     = vzip1q_u16(v[i], v[i + 4]);
                t[2 * i + 1] = vzip2q_u16(v[i], v[i + 4]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                v[i] = t[i];
            }
        }
    }

    // Appends the non-zeros of a bundle to the lists of their rows; `lists` has one list per row of the group.
    // Overwrites up to eight elements after the end of a list. Decodes eight steps at a time: columns and values of
    // each piece fill one register, and those of used slots are packed as by a mask.
    template <int TYPE, typename LIST> static const uint8_t * decode_bundle(const uint8_t * at, LIST * lists) {
        constexpr uint16_t bits[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
        const uint8_t *    rows    = at + sizeof(bundle_header);
        const uint8_t * end = at + BUNDLE_HEADER_NBYTES + at[offsetof(bundle_header, n_vectors)] * BUNDLE_VECTOR_NBYTES;
        uint16_t        base;
        __builtin_memcpy(&base, at, sizeof(base));
        for (at += BUNDLE_HEADER_NBYTES; at < end;) {
            uint16x8_t columns[2][8] = {}, values[2][8] = {}; // [half of the pieces][step], then [half][piece of it]
            for (int step = 0; step < 8 && at < end; at += BUNDLE_VECTOR_NBYTES) {
                uint8x16_t places[2];
                nibbles(at + 2, places);
                for (int i = 0; i < 2; i++, step++) {
                    base             = static_cast<uint16_t>(base + at[i]);
                    columns[0][step] = vaddw_u8(vdupq_n_u16(base), vget_low_u8(places[i]));
                    columns[1][step] = vaddw_u8(vdupq_n_u16(base), vget_high_u8(places[i]));
                    for (int half = 0; half < 2; half++) {
                        values[half][step] = values_of(at, i, half);
                    }
                }
            }
            for (int half = 0; half < 2; half++) {
                transpose16(columns[half]);
                transpose16(values[half]);
                for (int i = 0; i < 8; i++) {
                    LIST &           list    = lists[rows[8 * half + i]];
                    const uint16x8_t is_used = vtstq_u16(values[half][i], values[half][i]);
                    const uint8x16_t order =
                        vld1q_u8(tables_of_masks.pack[vaddvq_u16(vandq_u16(is_used, vld1q_u16(bits)))]);
                    const uint16x8_t v = vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(values[half][i]), order));
                    const uint16x8_t c =
                        vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(columns[half][i]), order));
                    vst1q_u32(list.col + list.n, vmovl_u16(vget_low_u16(c)));
                    vst1q_u32(list.col + list.n + 4, vmovl_u16(vget_high_u16(c)));
                    vst1q_f32(list.weight + list.n, widen<TYPE>(vget_low_u16(v)));
                    vst1q_f32(list.weight + list.n + 4, widen_high<TYPE>(v));
                    list.n -= static_cast<int16_t>(vaddvq_u16(is_used)); // each used slot is -1
                }
            }
        }
        return at;
    }
};

} // namespace
} // namespace macko::cpu
