// Kernels for any CPU, including arm64. The compiler maps vectors of four floats to the target's instructions. Written
// for readability, not for speed.
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/mask-tables.h"

namespace macko::cpu {
namespace {

struct simd : plain_mask_bits {
    typedef float vec __attribute__((vector_size(16)));

    static constexpr int                     width            = 4;
    static constexpr int                     tile_vecs        = 8;
    template <int TYPE> static constexpr int step             = 8; // columns per call of expand()
    static constexpr int                     unrolled_columns = 16;
    static constexpr bool                    has_rows16       = false;
    template <int NX> static constexpr int   rows_per_pass    = 1;

    static vec zero() { return vec{ 0, 0, 0, 0 }; }
    static vec set1(float a) { return vec{ a, a, a, a }; }
    static vec load(const float * p) {
        vec v;
        __builtin_memcpy(&v, p, sizeof(v));
        return v;
    }
    static void  store(float * p, vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
    static vec   add(vec a, vec b) { return a + b; }
    static vec   fma(vec a, vec b, vec c) { return a * b + c; }
    static vec   mul(vec a, vec b) { return a * b; }
    static float sum(vec v) { return (v[0] + v[1]) + (v[2] + v[3]); }

    // one bit for each element that is not zero; NaN counts as non-zero
    static uint32_t nonzeros(vec v) {
        uint32_t bits = 0;
        for (int i = 0; i < width; i++) {
            bits |= static_cast<uint32_t>(v[i] != 0) << i;
        }
        return bits;
    }

    // lo = a0 b0 a1 b1, hi = a2 b2 a3 b3
    static void zip(vec a, vec b, vec & lo, vec & hi) {
        lo = vec{ a[0], b[0], a[1], b[1] };
        hi = vec{ a[2], b[2], a[3], b[3] };
    }

    static uint32_t bits_of(float f) {
        uint32_t u;
        __builtin_memcpy(&u, &f, sizeof(u));
        return u;
    }
    static float float_of(uint32_t u) {
        float f;
        __builtin_memcpy(&f, &u, sizeof(f));
        return f;
    }

    // rounds to the nearest F16 (ties to even) and back
    static float round_f16(float f) {
        const uint32_t sign = bits_of(f) & 0x80000000u;
        const uint32_t u    = bits_of(f) & 0x7fffffffu;
        if (u > 0x7f800000u) {
            return f; // NaN
        }
        if (u >= 0x477ff000u) { // 65520 and up
            return float_of(sign | 0x7f800000u);
        }
        if (u < 0x38800000u) { // below 2^-14: multiples of 2^-24, which is the spacing of floats at 0.5
            const float r = float_of(u) + 0.5f;
            return float_of(sign | bits_of(r - 0.5f));
        }
        return float_of(sign | ((u + 0x0fffu + ((u >> 13) & 1)) & ~0x1fffu));
    }
    static float round_bf16(float f) {
        const uint32_t u = bits_of(f);
        if ((u & 0x7fffffffu) > 0x7f800000u) {
            return f;
        }
        return float_of((u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u);
    }
    static vec round_f16(vec v) { return vec{ round_f16(v[0]), round_f16(v[1]), round_f16(v[2]), round_f16(v[3]) }; }
    static vec round_bf16(vec v) {
        return vec{ round_bf16(v[0]), round_bf16(v[1]), round_bf16(v[2]), round_bf16(v[3]) };
    }

    template <int TYPE> static float value(const uint8_t * p) {
        if constexpr (TYPE == GGML_MACKO_TYPE_F32) {
            float f;
            __builtin_memcpy(&f, p, sizeof(f));
            return f;
        }
        uint16_t h;
        __builtin_memcpy(&h, p, sizeof(h));
        if constexpr (TYPE == GGML_MACKO_TYPE_BF16) {
            return float_of(static_cast<uint32_t>(h) << 16);
        }
        const uint32_t sign     = (h & 0x8000u) << 16;
        const uint32_t exponent = (h >> 10) & 31;
        const uint32_t mantissa = h & 0x3ffu;
        if (exponent == 0) {
            return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
        }
        return float_of(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
    }
    template <int TYPE> static vec load_values(const uint8_t * p) {
        constexpr int size = TYPE == GGML_MACKO_TYPE_F32 ? 4 : 2;
        return vec{ value<TYPE>(p), value<TYPE>(p + size), value<TYPE>(p + 2 * size), value<TYPE>(p + 3 * size) };
    }
    template <int TYPE> static void expand(const uint8_t * values, uint32_t bits, vec * w) {
        constexpr int size              = TYPE == GGML_MACKO_TYPE_F32 ? 4 : 2;
        float         lanes[step<TYPE>] = {};
        for (; bits; bits &= bits - 1, values += size) {
            lanes[__builtin_ctz(bits)] = value<TYPE>(values);
        }
        w[0] = load(lanes);
        w[1] = load(lanes + 4);
    }
    // quantized matrices (kernels-quantized.h): a column in each lane
    using weight_t = int16_t;
    using x_t      = int16_t;
    typedef int32_t ints __attribute__((vector_size(16)));

    static constexpr int  COLUMNS = 1, OFFSET = 0, TABLE_OFFSET = 0, unrolled_steps = 1, x_vecs = 2;
    static constexpr bool has_levels_at = false;

    static ints                  no_sum() { return ints{ 0, 0, 0, 0 }; }
    static ints                  load_sum(const int32_t * p) { return ints{ p[0], p[1], p[2], p[3] }; }
    static ints                  load_ints(const int16_t * p) { return ints{ p[0], p[1], p[2], p[3] }; }
    static ints                  dot(ints sum, ints w, ints x) { return sum + w * x; }
    static vec                   to_floats(ints v) { return __builtin_convertvector(v, vec); }
    template <int T> static ints load_weights(const int16_t * p) {
        return T == 1 ? load_ints(p) : T == 2 ? ints{ p[0], p[1], p[0], p[1] } : ints{ p[0], p[0], p[0], p[0] };
    }
    // 64 levels
    template <int BITS> static void to_levels(const uint8_t * codes, const uint8_t * levels, uint8_t * out) {
        for (int i = 0; i < 64; i++) {
            uint64_t group;
            __builtin_memcpy(&group, codes + i / 8 * BITS, sizeof(group));
            const auto code = static_cast<uint8_t>(group >> (i % 8 * BITS));
            out[i]          = BITS == 8 ? code : levels[code & 63];
        }
    }
    static void store_ints(int16_t * p, ints v) {
        for (int i = 0; i < width; i++) {
            p[i] = static_cast<int16_t>(v[i]);
        }
    }
    // Moves levels to the columns of a word of the bitmap: 16 vectors.
    template <typename F> static void for_each_part(uint64_t bits, const uint8_t * levels, F && f) {
        for (int i = 0; i < 16; i++) {
            ints part = no_sum();
            for (int k = 0; k < width; k++, bits >>= 1) {
                part[k] = bits & 1 ? static_cast<int8_t>(*levels++) : 0;
            }
            f(i, part);
        }
    }
    // base + the position of each set bit, lowest first; may write `width` elements
    static void columns(uint32_t bits, uint32_t base, uint32_t * out) {
        for (; bits; bits &= bits - 1) {
            *out++ = base + static_cast<uint32_t>(__builtin_ctz(bits));
        }
    }
};

} // namespace
} // namespace macko::cpu

#include "cpu/kernels/kernels-impl.h"
#include "cpu/kernels/row-ops-impl.h"

const macko::cpu::kernel_set macko::cpu::kernels_portable =
    macko::cpu::make_set("portable", { 0.0f, 4, 3.5f, 0.1f, 1.7f, 4.0f, 0.25f }, {});
