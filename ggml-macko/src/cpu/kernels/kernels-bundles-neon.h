// Products with bundles (bundles.h) for arm64 CPUs with byte dot products (sdot), and for F16 with fmlal and fmlal2 if
// the compiler may use them.
//
// x is converted to 16-bit numbers in two planes of bytes. A window is 16 bytes of each plane, and tbl moves the bytes
// at the places of 16 slots to those slots.
//
//   F16, BF16  x has the type of the values. Each piece has one lane of a sum.
//   quantized  x = 256 high + low, both from -128 to 127. A lane of sdot's result has the four products of a piece.
#pragma once

#include "cpu/kernels/kernels-neon-common.h"

namespace macko::cpu {
namespace {

struct bundles_neon : neon {
    static constexpr bool has_bundles = true;

    template <int TYPE> static constexpr int64_t HEADER_NBYTES = bundle_header_nbytes(TYPE);
    template <int TYPE> static constexpr int64_t SCALES_AT     = bundle_scales_at(TYPE);
    template <int TYPE> static constexpr int64_t VECTOR_NBYTES = bundle_vector_nbytes(TYPE);

    // x is between -LARGEST and LARGEST
    template <int TYPE> static constexpr int   BUNDLE_LARGEST  = 256 * 127 + 127;
    template <int TYPE> static constexpr float BUNDLE_X_OFFSET = 0;

    static constexpr int PLANE_STEP = 4;

    // quantized matrices: bytes
    using weight_t = int8_t;
    using x_t      = int8_t;

    static constexpr int COLUMNS = 4, precise_n = 4;

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
    template <int TYPE> static void store_planes16(uint8_t * low, uint8_t * high, const float * x) {
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

    // Converts columns begin ... end - 1, a multiple of 8; columns from cols on become zero.
    template <int TYPE>
    static void prepare_planes(const float * x, int64_t cols, int64_t begin, int64_t end, float inverse, uint8_t * low,
                               uint8_t * high) {
        for (int64_t c = begin; c < end; c += 8) {
            float         part[8] = {};
            const float * src     = x + c;
            if (cols - c < 8) {
                for (int64_t i = 0; i < cols - c; i++) {
                    part[i] = x[c + i];
                }
                src = part;
            }
            const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(src), inverse));
            const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(src + 4), inverse));
            const int16x8_t v = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b));
            vst1_s8(reinterpret_cast<int8_t *>(low + c), vmovn_s16(v));
            vst1_s8(reinterpret_cast<int8_t *>(high + c), vshrn_n_s16(vaddq_s16(v, vdupq_n_s16(128)), 8));
        }
    }

    static void nibbles(const uint8_t * at, uint8x16_t (&out)[2]) { // the low halves of 16 bytes, and the high halves
        const uint8x16_t both = vld1q_u8(at);
        out[0]                = vandq_u8(both, vdupq_n_u8(15));
        out[1]                = vshrq_n_u8(both, 4);
    }
    template <int TYPE> static void quants(const uint8_t * vector, int8x16_t (&q)[2]) { // the q of both steps
        const uint8_t * values = vector + BUNDLE_VALUES_AT;
        if constexpr (TYPE == GGML_MACKO_TYPE_Q4_0) {
            uint8x16_t unsigned_q[2];
            nibbles(values, unsigned_q);
            for (int i = 0; i < 2; i++) {
                q[i] = vsubq_s8(vreinterpretq_s8_u8(unsigned_q[i]), vdupq_n_s8(8));
            }
        } else {
            for (int i = 0; i < 2; i++) {
                q[i] = vreinterpretq_s8_u8(vld1q_u8(values + STEP_SLOTS * i));
            }
        }
    }
    // Moves the bytes of a window of a plane to the slots with their places.
    static uint8x16_t pick(const uint8_t * window, uint8x16_t places) { return vqtbl1q_u8(vld1q_u8(window), places); }

    // Adds the sums of each piece to y, which has one element per row of the group.
    template <int TYPE>
    static void multiply_bundles(const uint8_t * at, const uint8_t * end, const uint8_t * low, const uint8_t * high,
                                 float * y) {
        while (at < end) {
            const uint8_t * header = at;
            const uint8_t * first  = at + HEADER_NBYTES<TYPE>;
            const uint8_t * rows   = header + sizeof(bundle_header);
            uint16_t        column;
            __builtin_memcpy(&column, header, sizeof(column));
            at = first + header[offsetof(bundle_header, n_vectors)] * VECTOR_NBYTES<TYPE>;
            if constexpr (is_quant_type(TYPE)) {
                add_quant_bundle<TYPE>(header + SCALES_AT<TYPE>, rows, first, at, low + column, high + column, y);
            } else {
                add_bundle<TYPE>(rows, first, at, low + column, high + column, y);
            }
        }
    }

    static float32x4_t scales_of(const uint8_t * at) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))); }

    // Adds d * q * x. A piece has at most 32 values, so its sum is below 2^31.
    template <int TYPE>
    static void add_quant_bundle(const uint8_t * scales, const uint8_t * rows, const uint8_t * at, const uint8_t * end,
                                 const uint8_t * low, const uint8_t * high, float * y) {
        int32x4_t sum_low[2] = { vdupq_n_s32(0), vdupq_n_s32(0) }, sum_high[2] = { sum_low[0], sum_low[0] };
        int64_t   base = 0;
        for (; at < end; at += VECTOR_NBYTES<TYPE>) {
            uint8x16_t places[2];
            int8x16_t  q[2];
            nibbles(at + 2, places);
            quants<TYPE>(at, q);
#pragma GCC unroll 2
            for (int step = 0; step < 2; step++) {
                base += at[step];
                sum_low[step] = vdotq_s32(sum_low[step], q[step], vreinterpretq_s8_u8(pick(low + base, places[step])));
                sum_high[step] =
                    vdotq_s32(sum_high[step], q[step], vreinterpretq_s8_u8(pick(high + base, places[step])));
            }
        }
        const int32x4_t high_sum = vaddq_s32(sum_high[0], sum_high[1]);
        const int32x4_t sum      = vaddq_s32(vshlq_n_s32(high_sum, 8), vaddq_s32(sum_low[0], sum_low[1]));
        const vec       dx       = vmulq_f32(scales_of(scales), vcvtq_f32_s32(sum));
        y[rows[0]] += vgetq_lane_f32(dx, 0);
        y[rows[1]] += vgetq_lane_f32(dx, 1);
        y[rows[2]] += vgetq_lane_f32(dx, 2);
        y[rows[3]] += vgetq_lane_f32(dx, 3);
    }

    // F16, BF16: the values of slots 0 ... 7 (`half` 0) or 8 ... 15 of a step.
    static uint16x8_t values_of(const uint8_t * vector, int step, int half) {
        return load16(vector + BUNDLE_VALUES_AT + 16 * (2 * half + step));
    }

    // Adds w * x. For each step, the pieces have the lanes of four sums.
    template <int TYPE>
    static void add_bundle(const uint8_t * rows, const uint8_t * at, const uint8_t * end, const uint8_t * low,
                           const uint8_t * high, float * y) {
        vec     sum[2][2][2] = {}; // of a step, for each half of the pieces
        int64_t base         = 0;
        for (; at < end; at += VECTOR_NBYTES<TYPE>) {
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

    // Appends the non-zeros of a bundle to the lists of their rows; `lists` has one list per row of the group.
    // Overwrites up to eight elements after the end of a list.
    template <int TYPE, typename LIST> static const uint8_t * decode_bundle(const uint8_t * at, LIST * lists) {
        if constexpr (is_quant_type(TYPE)) {
            return decode_quant_bundle<TYPE>(at, lists);
        } else {
            return decode_plain_bundle<TYPE>(at, lists);
        }
    }

    template <int TYPE, typename LIST> static const uint8_t * decode_quant_bundle(const uint8_t * at, LIST * lists) {
        const uint8_t * header = at;
        const uint8_t * rows   = at + sizeof(bundle_header);
        float           d[4];
        uint16_t        base;
        vst1q_f32(d, scales_of(header + SCALES_AT<TYPE>));
        __builtin_memcpy(&base, header, sizeof(base));
        at += HEADER_NBYTES<TYPE>;
        for (int v = 0; v < header[offsetof(bundle_header, n_vectors)]; v++, at += VECTOR_NBYTES<TYPE>) {
            uint8x16_t places[2];
            int8x16_t  q[2];
            nibbles(at + 2, places);
            quants<TYPE>(at, q);
            for (int step = 0; step < 2; step++) {
                base                     = static_cast<uint16_t>(base + at[step]);
                const uint16x8_t cols[2] = { vaddw_u8(vdupq_n_u16(base), vget_low_u8(places[step])),
                                             vaddw_u8(vdupq_n_u16(base), vget_high_u8(places[step])) };
                const int16x8_t  w[2]    = { vmovl_s8(vget_low_s8(q[step])), vmovl_s8(vget_high_s8(q[step])) };
                const uint8x16_t is_used = vandq_u8(vtstq_s8(q[step], q[step]), vdupq_n_u8(1));
                uint32_t         count[4]; // of each piece
                vst1q_u32(count, vpaddlq_u16(vpaddlq_u8(is_used)));
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    LIST &           list = lists[rows[i]];
                    const uint16x4_t c    = i % 2 ? vget_high_u16(cols[i / 2]) : vget_low_u16(cols[i / 2]);
                    const int16x4_t  four = i % 2 ? vget_high_s16(w[i / 2]) : vget_low_s16(w[i / 2]);
                    vst1q_u32(list.col + list.n, vmovl_u16(c));
                    vst1q_f32(list.weight + list.n, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(four)), d[i]));
                    list.n += static_cast<int>(count[i]);
                }
            }
        }
        return at;
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

    // Decodes eight steps at a time: columns and values of each piece fill one register, and those of used slots are
    // packed as by a mask.
    template <int TYPE, typename LIST> static const uint8_t * decode_plain_bundle(const uint8_t * at, LIST * lists) {
        constexpr uint16_t bits[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
        const uint8_t *    rows    = at + sizeof(bundle_header);
        const uint8_t * end = at + HEADER_NBYTES<TYPE> + at[offsetof(bundle_header, n_vectors)] * VECTOR_NBYTES<TYPE>;
        uint16_t        base;
        __builtin_memcpy(&base, at, sizeof(base));
        for (at += HEADER_NBYTES<TYPE>; at < end;) {
            uint16x8_t columns[2][8] = {}, values[2][8] = {}; // [half of the pieces][step], then [half][piece of it]
            for (int step = 0; step < 8 && at < end; at += VECTOR_NBYTES<TYPE>) {
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
