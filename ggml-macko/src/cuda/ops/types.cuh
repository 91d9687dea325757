// The value types of dense tensors on the GPU, value_type<TYPE>, in the layouts of llama.cpp's ggml-common.h:
//
//   block       a block of elements; for F32, F16 and BF16 (IS_PLAIN) a single value
//   BLOCK       elements of a block
//   load8       reads 8 adjacent elements at a multiple of 8 as floats: kernels read weights 8 elements at a time
//   to_float, from_float    convert a value of a plain type
//   CAN_STORE   the type is one for KV caches; a quantized one has store, with which eight lanes write a block together
#pragma once

#include "cuda/ops/ops.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace macko::cuda {

struct alignas(2) block_q4_0 {
    __half  d;
    uint8_t qs[16];
};
struct alignas(2) block_q4_1 {
    __half  d, m;
    uint8_t qs[16];
};
struct alignas(2) block_q5_0 {
    __half  d;
    uint8_t qh[4];
    uint8_t qs[16];
};
struct alignas(2) block_q5_1 {
    __half  d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};
struct alignas(2) block_q8_0 {
    __half d;
    int8_t qs[32];
};
struct alignas(2) block_q2_k {
    uint8_t scales[16];
    uint8_t qs[64];
    __half  d, dmin;
};
struct alignas(2) block_q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    __half  d;
};
struct alignas(2) block_q4_k {
    __half  d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
};
struct alignas(2) block_q5_k {
    __half  d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};
struct alignas(2) block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t  scales[16];
    __half  d;
};
struct block_mxfp4 {
    uint8_t e;
    uint8_t qs[16];
};
static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q4_1) == 20 && sizeof(block_q5_0) == 22 &&
                  sizeof(block_q5_1) == 24 && sizeof(block_q8_0) == 34,
              "32-element blocks");
static_assert(sizeof(block_q2_k) == 84 && sizeof(block_q3_k) == 110 && sizeof(block_q4_k) == 144 &&
                  sizeof(block_q5_k) == 176 && sizeof(block_q6_k) == 210,
              "256-element blocks");
static_assert(sizeof(block_mxfp4) == 17, "mxfp4 block");

static __constant__ int8_t iq4_nl_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                                 1,    13,   25,  38,  53,  69,  89,  113 };
static __constant__ int8_t mxfp4_values[16]  = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

template <tensor_type TYPE> struct value_type;

// Loads elements of a matrix that are read once. Bypasses L1, which serves the repeated reads of the other operand.
static __device__ __forceinline__ uint4 load_once(const uint4 * p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Sets out[k] = value(k) for 8 elements.
template <typename F> static __device__ __forceinline__ void set8(float * out, F && value) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        out[k] = value(k);
    }
}

// ---- plain types ----

template <typename T> struct plain_type {
    using block                     = T;
    static constexpr int  BLOCK     = 1;
    static constexpr bool IS_PLAIN  = true;
    static constexpr bool CAN_STORE = true;
};

template <> struct value_type<TYPE_F32> : plain_type<float> {
    static __device__ float to_float(float x) { return x; }
    static __device__ float from_float(float x) { return x; }
    static __device__ void  load8(const char * row, int64_t i, float * out) { // row aligned to 16 bytes
        const float4 * v = reinterpret_cast<const float4 *>(row);
        const float4   a = v[i / 4], b = v[i / 4 + 1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
        out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    }
};

template <> struct value_type<TYPE_F16> : plain_type<__half> {
    static __device__ float  to_float(__half x) { return __half2float(x); }
    static __device__ __half from_float(float x) { return __float2half_rn(x); }
    static __device__ void   load8(const char * row, int64_t i, float * out) {
        unpack8(load_once(reinterpret_cast<const uint4 *>(row) + i / 8), out);
    }
    static __device__ void unpack8(uint4 raw, float * out) {
        const __half2 * h = reinterpret_cast<const __half2 *>(&raw);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 f = __half22float2(h[k]);
            out[2 * k]     = f.x;
            out[2 * k + 1] = f.y;
        }
    }
};

template <> struct value_type<TYPE_BF16> : plain_type<__nv_bfloat16> {
    static __device__ float         to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
    static __device__ void          load8(const char * row, int64_t i, float * out) {
        const uint4    raw  = load_once(reinterpret_cast<const uint4 *>(row) + i / 8);
        const uint32_t w[4] = { raw.x, raw.y, raw.z, raw.w };
        // a BF16 is the upper half of a float
        set8(out, [&](int k) { return __uint_as_float(k % 2 ? w[k / 2] & 0xffff0000u : w[k / 2] << 16); });
    }
};

// ---- writing blocks of 32 ----

// Eight lanes of a warp that write a block together: lane i has elements 4i ... 4i + 3. The lanes are adjacent and the
// first one's threadIdx.x is a multiple of 8; other lanes of the warp may run different code.
struct block_lanes {
    int      lane = static_cast<int>(threadIdx.x % 8);
    unsigned mask = 0xffu << (threadIdx.x & 24);

    template <typename T, typename F> __device__ __forceinline__ T reduce(T x, F && f) const {
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2) {
            x = f(x, __shfl_xor_sync(mask, x, bit));
        }
        return x;
    }
    __device__ __forceinline__ float sum(float x) const {
        return reduce(x, [](float a, float b) { return a + b; });
    }
    __device__ __forceinline__ float min_of(const float * x) const {
        return reduce(fminf(fminf(x[0], x[1]), fminf(x[2], x[3])), [](float a, float b) { return fminf(a, b); });
    }
    __device__ __forceinline__ float max_of(const float * x) const {
        return reduce(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), [](float a, float b) { return fmaxf(a, b); });
    }
    // the first of the elements with the largest magnitude
    __device__ __forceinline__ float extreme_of(const float * x) const {
        float extreme = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            extreme = fabsf(x[k]) > fabsf(extreme) ? x[k] : extreme;
        }
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2) {
            const float other  = __shfl_xor_sync(mask, extreme, bit);
            const bool  larger = fabsf(other) > fabsf(extreme), first = (lane & bit) && fabsf(other) == fabsf(extreme);
            extreme = larger || first ? other : extreme;
        }
        return extreme;
    }
    // stores the low four bits of q[k] as nibbles of the block, and ignores the other bits
    __device__ __forceinline__ void store_nibbles(uint8_t * qs, const int * q) const {
        const uint32_t mine = (q[0] & 15) | (q[1] & 15) << 8 | (q[2] & 15) << 16 | (q[3] & 15) << 24,
                       high = __shfl_xor_sync(mask, mine, 4);
        if (lane < 4) {
            store_u32(qs + 4 * lane, mine | high << 4);
        }
    }
    // stores bit 4 of q[k] as a bit of the block
    __device__ __forceinline__ void store_fifth_bits(uint8_t * qh, const int * q) const {
        uint32_t bits = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            bits |= static_cast<uint32_t>(q[k] >> 4 & 1) << (4 * lane + k);
        }
        bits = reduce(bits, [](uint32_t a, uint32_t b) { return a | b; });
        if (lane == 0) {
            store_u32(qh, bits);
        }
    }
    static __device__ __forceinline__ void store_u32(uint8_t * p, uint32_t x) { // p aligned to 2 bytes at least
        uint16_t * h = reinterpret_cast<uint16_t *>(p);
        h[0]         = static_cast<uint16_t>(x);
        h[1]         = static_cast<uint16_t>(x >> 16);
    }
};

// ---- blocks of 32: element j < 16 in the low nibble of byte j, element 16 + j in the high nibble ----

template <typename B, int SIZE> struct block_type {
    using block                               = B;
    static constexpr int            BLOCK     = SIZE;
    static constexpr bool           IS_PLAIN  = false;
    static constexpr bool           CAN_STORE = SIZE == 32;
    static __device__ const block & at(const char * row, int64_t i) {
        return reinterpret_cast<const B *>(row)[i / SIZE];
    }
};

// Loads the nibbles of elements i % 32 ... i % 32 + 7.
static __device__ __forceinline__ void load_nibbles(const uint8_t * qs, int64_t i, int * q) {
    const int j     = static_cast<int>(i) & 8;
    const int shift = (static_cast<int>(i) & 16) >> 2;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        q[k] = (qs[j + k] >> shift) & 15;
    }
}

static __device__ __forceinline__ uint32_t load_u32(const uint8_t * p) { // p aligned to 2 bytes at least
    const uint16_t * h = reinterpret_cast<const uint16_t *>(p);
    return h[0] | (static_cast<uint32_t>(h[1]) << 16);
}

// Q4_0, Q5_0: d * (q - ZERO). Q4_1, Q5_1: d * q + m.
template <typename B,   // block
          int  BITS,    // of q: four in qs; the fifth in qh
          bool HAS_MIN> // B has m
struct nibble_type : block_type<B, 32> {
    static constexpr int   MAX = (1 << BITS) - 1, ZERO = 1 << (BITS - 1);
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const B &   b  = block_type<B, 32>::at(row, i);
        const float d  = __half2float(b.d);
        float       m  = 0;
        uint32_t    qh = 0;
        int         q[8];
        if constexpr (HAS_MIN) {
            m = __half2float(b.m);
        }
        if constexpr (BITS == 5) {
            qh = load_u32(b.qh) >> (i & 31);
        }
        load_nibbles(b.qs, i, q);
        set8(out, [&](int k) {
            const int v = static_cast<int>(q[k] | ((qh >> k) & 1) << 4);
            return HAS_MIN ? d * v + m : d * (v - ZERO);
        });
    }
    static __device__ void store(B * b, const float * x, const block_lanes & lanes) {
        float lo = 0, d;
        if constexpr (HAS_MIN) {
            lo = lanes.min_of(x);
            d  = (lanes.max_of(x) - lo) / MAX;
        } else {
            d = lanes.extreme_of(x) / -ZERO;
        }
        const float id = d != 0 ? 1 / d : 0;
        int         q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k] = min(MAX, static_cast<int>(HAS_MIN ? (x[k] - lo) * id + 0.5f : x[k] * id + (ZERO + 0.5f)));
        }
        lanes.store_nibbles(b->qs, q);
        if constexpr (BITS == 5) {
            lanes.store_fifth_bits(b->qh, q);
        }
        if (lanes.lane == 0) {
            b->d = __float2half_rn(d);
            if constexpr (HAS_MIN) {
                b->m = __float2half_rn(lo);
            }
        }
    }
};

template <> struct value_type<TYPE_Q4_0> : nibble_type<block_q4_0, 4, false> {};
template <> struct value_type<TYPE_Q4_1> : nibble_type<block_q4_1, 4, true> {};
template <> struct value_type<TYPE_Q5_0> : nibble_type<block_q5_0, 5, false> {};
template <> struct value_type<TYPE_Q5_1> : nibble_type<block_q5_1, 5, true> {};

template <> struct value_type<TYPE_Q8_0> : block_type<block_q8_0, 32> {
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i);
        const float   d = __half2float(b.d);
        // blocks have 34 bytes, so only 2-byte loads are aligned
        const uint16_t * q = reinterpret_cast<const uint16_t *>(b.qs + (i & 31));
        set8(out, [&](int k) { return d * static_cast<int8_t>(q[k / 2] >> k % 2 * 8); });
    }
    static __device__ void store(block * b, const float * x, const block_lanes & lanes) {
        const float d  = fabsf(lanes.extreme_of(x)) / 127;
        const float id = d != 0 ? 1 / d : 0;
        uint32_t    q  = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q |= static_cast<uint32_t>(static_cast<uint8_t>(static_cast<int>(roundf(x[k] * id)))) << 8 * k;
        }
        lanes.store_u32(reinterpret_cast<uint8_t *>(b->qs) + 4 * lanes.lane, q);
        if (lanes.lane == 0) {
            b->d = __float2half_rn(d);
        }
    }
};

template <> struct value_type<TYPE_IQ4_NL> : block_type<block_q4_0, 32> {
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i);
        const float   d = __half2float(b.d);
        int           q[8];
        load_nibbles(b.qs, i, q);
        set8(out, [&](int k) { return d * iq4_nl_values[q[k]]; });
    }
    static __device__ int nearest(float x) {
        int best = 0;
        for (int k = 1; k < 16; k++) {
            if (fabsf(x - iq4_nl_values[k]) < fabsf(x - iq4_nl_values[best])) {
                best = k;
            }
        }
        return best;
    }
    static __device__ void store(block * b, const float * x, const block_lanes & lanes) {
        const float d      = lanes.extreme_of(x) / iq4_nl_values[0];
        const float id     = d != 0 ? 1 / d : 0;
        float       sum_qx = 0, sum_q2 = 0; // least squares for the scale, weighted by x^2
        int         q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k]              = nearest(x[k] * id);
            const float value = iq4_nl_values[q[k]], weight = x[k] * x[k];
            sum_qx += weight * value * x[k];
            sum_q2 += weight * value * value;
        }
        sum_qx = lanes.sum(sum_qx), sum_q2 = lanes.sum(sum_q2);
        lanes.store_nibbles(b->qs, q);
        if (lanes.lane == 0) {
            b->d = __float2half_rn(sum_q2 > 0 ? sum_qx / sum_q2 : d);
        }
    }
};

template <> struct value_type<TYPE_MXFP4> : block_type<block_mxfp4, 32> {
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i);
        // half of 2^(e - 127), since mxfp4_values are doubled; e < 2 gives a subnormal
        const float d = __uint_as_float(b.e < 2 ? 0x00200000u << b.e : static_cast<uint32_t>(b.e - 1) << 23);
        int         q[8];
        load_nibbles(b.qs, i, q);
        set8(out, [&](int k) { return d * mxfp4_values[q[k]]; });
    }
};

// ---- super-blocks of 256; e: the first of the 8 elements in its block ----

template <> struct value_type<TYPE_Q2_K> : block_type<block_q2_k, 256> {
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block &   b  = at(row, i);
        const int       e  = static_cast<int>(i) & 255;
        const int       sc = b.scales[e / 16];
        const float     d = __half2float(b.d) * (sc & 15), m = __half2float(b.dmin) * (sc >> 4);
        const int       shift = (e % 128) / 32 * 2;
        const uint8_t * q     = b.qs + e / 128 * 32 + e % 32;
        set8(out, [&](int k) { return d * ((q[k] >> shift) & 3) - m; });
    }
};

template <> struct value_type<TYPE_Q3_K> : block_type<block_q3_k, 256> {
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i);
        const int     e = static_cast<int>(i) & 255;
        // scales: low nibbles in bytes 0-7 (even half: low, then high), two upper bits in bytes 8-11
        const int       s     = e / 16;
        const int       lo    = (b.scales[s % 8] >> (s / 8 * 4)) & 15;
        const int       hi    = (b.scales[8 + s % 4] >> (s / 4 * 2)) & 3;
        const float     d     = __half2float(b.d) * ((lo | hi << 4) - 32);
        const int       shift = (e % 128) / 32 * 2;
        const int       high  = e / 32; // bit of hmask
        const uint8_t * q     = b.qs + e / 128 * 32 + e % 32;
        const uint8_t * h     = b.hmask + e % 32;
        set8(out, [&](int k) { return d * (((q[k] >> shift) & 3) - ((h[k] >> high) & 1 ? 0 : 4)); });
    }
};

// Q4_K and, if B has qh, Q5_K.
template <typename B> struct scale_min_type : block_type<B, 256> {
    // 6-bit scale and minimum of sub-block j (32 elements)
    static __device__ __forceinline__ void load_scale_min(const uint8_t * s, int j, int * scale, int * minimum) {
        if (j < 4) {
            *scale   = s[j] & 63;
            *minimum = s[j + 4] & 63;
        } else {
            *scale   = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
            *minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
        }
    }
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const B & b = block_type<B, 256>::at(row, i);
        const int e = static_cast<int>(i) & 255;
        int       scale, minimum;
        load_scale_min(b.scales, e / 32, &scale, &minimum);
        const float     d = __half2float(b.d) * scale, m = __half2float(b.dmin) * minimum;
        const int       shift = (e & 32) >> 3;
        const uint8_t * q     = b.qs + e / 64 * 32 + e % 32;
        if constexpr (std::is_same_v<B, block_q5_k>) {
            const uint8_t * h = b.qh + e % 32;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                out[k] = d * (((q[k] >> shift) & 15) | ((h[k] >> (e / 32)) & 1) << 4) - m;
            }
        } else {
            set8(out, [&](int k) { return d * ((q[k] >> shift) & 15) - m; });
        }
    }
};
template <> struct value_type<TYPE_Q4_K> : scale_min_type<block_q4_k> {};
template <> struct value_type<TYPE_Q5_K> : scale_min_type<block_q5_k> {};

template <> struct value_type<TYPE_Q6_K> : block_type<block_q6_k, 256> {
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block &   b       = at(row, i);
        const int       e       = static_cast<int>(i) & 255;
        const int       quarter = (e % 128) / 32; // of the half of 128: 0, 1 low nibbles of ql, 2, 3 high nibbles
        const float     d       = __half2float(b.d) * b.scales[e / 16];
        const uint8_t * ql      = b.ql + e / 128 * 64 + (quarter & 1) * 32 + e % 32;
        const uint8_t * qh      = b.qh + e / 128 * 32 + e % 32;
        set8(out, [&](int k) {
            return d *
                   (static_cast<int>(((ql[k] >> (quarter / 2 * 4)) & 15) | ((qh[k] >> (quarter * 2)) & 3) << 4) - 32);
        });
    }
};

// Reads elements [i, i + N) of a row.
template <typename T, int N>
static __device__ __forceinline__ void read_chunk(const char * row, int64_t i, int64_t nb0, float * x) {
    if constexpr (T::IS_PLAIN) {
        for (int k = 0; k < N; k++) {
            x[k] = T::to_float(*reinterpret_cast<const typename T::block *>(row + (i + k) * nb0));
        }
    } else {
        for (int k = 0; k < N; k += 8) {
            T::load8(row, i + k, x + k);
        }
    }
}

// Returns f(value_type<...>{}) for one of TYPES that is known at run time; cudaErrorInvalidValue for other types.
template <tensor_type... TYPES, typename F> cudaError_t with_type_of(tensor_type type, F && f) {
    cudaError_t error = cudaErrorInvalidValue;
    (void)((type == TYPES && (error = f(value_type<TYPES>{}), true)) || ...);
    return error;
}
// The same for all types that have kernels.
template <typename F> cudaError_t with_type(tensor_type type, F && f) {
    return with_type_of<TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q5_0, TYPE_Q5_1, TYPE_Q8_0, TYPE_Q2_K,
                        TYPE_Q3_K, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K, TYPE_IQ4_NL, TYPE_MXFP4>(type, f);
}

} // namespace macko::cuda
