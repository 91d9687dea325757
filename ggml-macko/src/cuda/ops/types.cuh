// The value types of dense tensors on the GPU. Each type defines its block and load8, which reads 8 adjacent elements
// at a multiple of 8 as floats; every kernel that reads weights reads 8 elements at a time. Types for KV caches also
// define store, with which eight lanes write a block together. Layouts are those of llama.cpp's ggml-common.h.
#pragma once

#include "cuda/ops/ops.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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
        const float4 a = reinterpret_cast<const float4 *>(row)[i / 4];
        const float4 b = reinterpret_cast<const float4 *>(row)[i / 4 + 1];
        out[0]         = a.x;
        out[1]         = a.y;
        out[2]         = a.z;
        out[3]         = a.w;
        out[4]         = b.x;
        out[5]         = b.y;
        out[6]         = b.z;
        out[7]         = b.w;
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
#pragma unroll
        for (int k = 0; k < 4; k++) { // bf16 is the upper half of a float
            out[2 * k]     = __uint_as_float(w[k] << 16);
            out[2 * k + 1] = __uint_as_float(w[k] & 0xffff0000u);
        }
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

// ---- blocks of 32: element j < 16 in the low nibble of byte j, element 16 + j in the high one ----
template <typename B> struct block_type {
    using block                          = B;
    static constexpr bool       IS_PLAIN = false;
    static __device__ const B & at(const char * row, int64_t i, int block_size) {
        return reinterpret_cast<const B *>(row)[i / block_size];
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

template <> struct value_type<TYPE_Q4_0> : block_type<block_q4_0> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = true;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        const float   d = __half2float(b.d);
        int           q[8];
        load_nibbles(b.qs, i, q);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * (q[k] - 8);
        }
    }
    static __device__ void store(block * b, const float * x, const block_lanes & lanes) {
        const float d  = lanes.extreme_of(x) / -8;
        const float id = d != 0 ? 1 / d : 0;
        int         q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k] = min(15, static_cast<int>(x[k] * id + 8.5f));
        }
        lanes.store_nibbles(b->qs, q);
        if (lanes.lane == 0) {
            b->d = __float2half_rn(d);
        }
    }
};

template <> struct value_type<TYPE_Q4_1> : block_type<block_q4_1> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = true;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        const float   d = __half2float(b.d), m = __half2float(b.m);
        int           q[8];
        load_nibbles(b.qs, i, q);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * q[k] + m;
        }
    }
    static __device__ void store(block * b, const float * x, const block_lanes & lanes) {
        const float lo = lanes.min_of(x), d = (lanes.max_of(x) - lo) / 15;
        const float id = d != 0 ? 1 / d : 0;
        int         q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k] = min(15, static_cast<int>((x[k] - lo) * id + 0.5f));
        }
        lanes.store_nibbles(b->qs, q);
        if (lanes.lane == 0) {
            b->d = __float2half_rn(d);
            b->m = __float2half_rn(lo);
        }
    }
};

template <> struct value_type<TYPE_Q5_0> : block_type<block_q5_0> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = true;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block &  b  = at(row, i, BLOCK);
        const float    d  = __half2float(b.d);
        const uint32_t qh = load_u32(b.qh) >> (i & 31);
        int            q[8];
        load_nibbles(b.qs, i, q);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * (static_cast<int>(q[k] | ((qh >> k) & 1) << 4) - 16);
        }
    }
    static __device__ void store(block * b, const float * x, const block_lanes & lanes) {
        const float d  = lanes.extreme_of(x) / -16;
        const float id = d != 0 ? 1 / d : 0;
        int         q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k] = min(31, static_cast<int>(x[k] * id + 16.5f));
        }
        lanes.store_nibbles(b->qs, q);
        lanes.store_fifth_bits(b->qh, q);
        if (lanes.lane == 0) {
            b->d = __float2half_rn(d);
        }
    }
};

template <> struct value_type<TYPE_Q5_1> : block_type<block_q5_1> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = true;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block &  b = at(row, i, BLOCK);
        const float    d = __half2float(b.d), m = __half2float(b.m);
        const uint32_t qh = load_u32(b.qh) >> (i & 31);
        int            q[8];
        load_nibbles(b.qs, i, q);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * static_cast<int>(q[k] | ((qh >> k) & 1) << 4) + m;
        }
    }
    static __device__ void store(block * b, const float * x, const block_lanes & lanes) {
        const float lo = lanes.min_of(x), d = (lanes.max_of(x) - lo) / 31;
        const float id = d != 0 ? 1 / d : 0;
        int         q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q[k] = min(31, static_cast<int>((x[k] - lo) * id + 0.5f));
        }
        lanes.store_nibbles(b->qs, q);
        lanes.store_fifth_bits(b->qh, q);
        if (lanes.lane == 0) {
            b->d = __float2half_rn(d);
            b->m = __float2half_rn(lo);
        }
    }
};

template <> struct value_type<TYPE_Q8_0> : block_type<block_q8_0> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = true;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        const float   d = __half2float(b.d);
        // blocks have 34 bytes, so only 2-byte loads are aligned
        const uint16_t * q = reinterpret_cast<const uint16_t *>(b.qs + (i & 31));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int two  = q[k];
            out[2 * k]     = d * static_cast<int8_t>(two);
            out[2 * k + 1] = d * static_cast<int8_t>(two >> 8);
        }
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

template <> struct value_type<TYPE_IQ4_NL> : block_type<block_q4_0> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = true;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        const float   d = __half2float(b.d);
        int           q[8];
        load_nibbles(b.qs, i, q);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * iq4_nl_values[q[k]];
        }
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

template <> struct value_type<TYPE_MXFP4> : block_type<block_mxfp4> {
    static constexpr int   BLOCK     = 32;
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        // half of 2^(e - 127), since mxfp4_values are doubled; e < 2 gives a subnormal
        const float d = __uint_as_float(b.e < 2 ? 0x00200000u << b.e : static_cast<uint32_t>(b.e - 1) << 23);
        int         q[8];
        load_nibbles(b.qs, i, q);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * mxfp4_values[q[k]];
        }
    }
};

// ---- super-blocks of 256 ----
template <> struct value_type<TYPE_Q2_K> : block_type<block_q2_k> {
    static constexpr int   BLOCK     = 256;
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block &   b  = at(row, i, BLOCK);
        const int       e  = static_cast<int>(i) & 255;
        const int       sc = b.scales[e / 16];
        const float     d = __half2float(b.d) * (sc & 15), m = __half2float(b.dmin) * (sc >> 4);
        const int       shift = (e % 128) / 32 * 2;
        const uint8_t * q     = b.qs + e / 128 * 32 + e % 32;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * ((q[k] >> shift) & 3) - m;
        }
    }
};

template <> struct value_type<TYPE_Q3_K> : block_type<block_q3_k> {
    static constexpr int   BLOCK     = 256;
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
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
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * (((q[k] >> shift) & 3) - ((h[k] >> high) & 1 ? 0 : 4));
        }
    }
};

// 6-bit scale and minimum of sub-block j (32 elements) of Q4_K and Q5_K
static __device__ __forceinline__ void load_scale_min(const uint8_t * s, int j, int * scale, int * minimum) {
    if (j < 4) {
        *scale   = s[j] & 63;
        *minimum = s[j + 4] & 63;
    } else {
        *scale   = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

template <> struct value_type<TYPE_Q4_K> : block_type<block_q4_k> {
    static constexpr int   BLOCK     = 256;
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        const int     e = static_cast<int>(i) & 255;
        int           scale, minimum;
        load_scale_min(b.scales, e / 32, &scale, &minimum);
        const float     d = __half2float(b.d) * scale, m = __half2float(b.dmin) * minimum;
        const int       shift = (e & 32) >> 3;
        const uint8_t * q     = b.qs + e / 64 * 32 + e % 32;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * ((q[k] >> shift) & 15) - m;
        }
    }
};

template <> struct value_type<TYPE_Q5_K> : block_type<block_q5_k> {
    static constexpr int   BLOCK     = 256;
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block & b = at(row, i, BLOCK);
        const int     e = static_cast<int>(i) & 255;
        int           scale, minimum;
        load_scale_min(b.scales, e / 32, &scale, &minimum);
        const float     d = __half2float(b.d) * scale, m = __half2float(b.dmin) * minimum;
        const int       shift = (e & 32) >> 3;
        const uint8_t * q     = b.qs + e / 64 * 32 + e % 32;
        const uint8_t * h     = b.qh + e % 32;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * (((q[k] >> shift) & 15) | ((h[k] >> (e / 32)) & 1) << 4) - m;
        }
    }
};

template <> struct value_type<TYPE_Q6_K> : block_type<block_q6_k> {
    static constexpr int   BLOCK     = 256;
    static constexpr bool  CAN_STORE = false;
    static __device__ void load8(const char * row, int64_t i, float * out) {
        const block &   b    = at(row, i, BLOCK);
        const int       e    = static_cast<int>(i) & 255;
        const int       part = (e % 128) / 32; // quarter of the half of 128: 0, 1 low nibbles of ql, 2, 3 high nibbles
        const float     d    = __half2float(b.d) * b.scales[e / 16];
        const uint8_t * ql   = b.ql + e / 128 * 64 + (part & 1) * 32 + e % 32;
        const uint8_t * qh   = b.qh + e / 128 * 32 + e % 32;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = d * (static_cast<int>(((ql[k] >> (part / 2 * 4)) & 15) | ((qh[k] >> (part * 2)) & 3) << 4) - 32);
        }
    }
};

// Returns f(value_type<...>{}) for a type known at run time; cudaErrorInvalidValue for types without kernels.
template <typename F> cudaError_t with_type(tensor_type type, F && f) {
    switch (type) {
        case TYPE_F32:    return f(value_type<TYPE_F32>{});
        case TYPE_F16:    return f(value_type<TYPE_F16>{});
        case TYPE_BF16:   return f(value_type<TYPE_BF16>{});
        case TYPE_Q4_0:   return f(value_type<TYPE_Q4_0>{});
        case TYPE_Q4_1:   return f(value_type<TYPE_Q4_1>{});
        case TYPE_Q5_0:   return f(value_type<TYPE_Q5_0>{});
        case TYPE_Q5_1:   return f(value_type<TYPE_Q5_1>{});
        case TYPE_Q8_0:   return f(value_type<TYPE_Q8_0>{});
        case TYPE_Q2_K:   return f(value_type<TYPE_Q2_K>{});
        case TYPE_Q3_K:   return f(value_type<TYPE_Q3_K>{});
        case TYPE_Q4_K:   return f(value_type<TYPE_Q4_K>{});
        case TYPE_Q5_K:   return f(value_type<TYPE_Q5_K>{});
        case TYPE_Q6_K:   return f(value_type<TYPE_Q6_K>{});
        case TYPE_IQ4_NL: return f(value_type<TYPE_IQ4_NL>{});
        case TYPE_MXFP4:  return f(value_type<TYPE_MXFP4>{});
        default:          return cudaErrorInvalidValue;
    }
}

} // namespace macko::cuda
