// A group of the QUANTIZED layout (quantized.h) as the kernels read it. A new value type is a struct here, two lines in
// quantized.cpp (pack_values) and quantized.h (quantized_value_words), and a .cu file.
#pragma once

#include "cuda/lib/common.cuh"
#include "gpu-layout/quantized.h"

namespace macko::cuda {

// the words of a group, from planes of 4, 2 and 1 words of its tile
template <int N> struct group_words {
    uint32_t w[N];

    template <int FIRST = 0> __device__ __forceinline__ void load(const uint8_t * base, unsigned slot) {
        if constexpr (FIRST < N) {
            constexpr int   WIDTH = N - FIRST >= 4 ? 4 : N - FIRST >= 2 ? 2 : 1;
            const uint8_t * plane = base + CUDA_QUANTIZED_TILE * FIRST * 4;
            if constexpr (WIDTH == 4) {
                const uint4 v = load_streaming(reinterpret_cast<const uint4 *>(plane) + slot);
                w[FIRST] = v.x, w[FIRST + 1] = v.y, w[FIRST + 2] = v.z, w[FIRST + 3] = v.w;
            } else if constexpr (WIDTH == 2) {
                const uint2 v = load_streaming(reinterpret_cast<const uint2 *>(plane) + slot);
                w[FIRST] = v.x, w[FIRST + 1] = v.y;
            } else {
                w[FIRST] = load_streaming(reinterpret_cast<const uint32_t *>(plane) + slot);
            }
            load<FIRST + WIDTH>(base, slot);
        }
    }
};

// Value types: WORDS of 32 bits per group, and quad I as four signed bytes, which are the values / UNIT.
struct q8_0_values {
    static constexpr int32_t                                    TYPE  = GGML_MACKO_TYPE_Q8_0;
    static constexpr int                                        WORDS = quantized_value_words(TYPE);
    static constexpr float                                      UNIT  = 1.0f;
    template <int I> static __device__ __forceinline__ uint32_t quad(const uint32_t (&w)[WORDS]) { return w[I]; }
};
struct q4_0_values {
    static constexpr int32_t                                    TYPE  = GGML_MACKO_TYPE_Q4_0;
    static constexpr int                                        WORDS = quantized_value_words(TYPE);
    static constexpr float                                      UNIT  = 1.0f / 16;
    template <int I> static __device__ __forceinline__ uint32_t quad(const uint32_t (&w)[WORDS]) {
        return (I % 2 ? w[I / 2] : w[I / 2] << 4) & 0xf0f0f0f0u;
    }
};

// The deltas of quad I, one per byte. Unless they have 8 bits, those of odd quads start at bit BITS.
template <int BITS, int I> __device__ __forceinline__ uint32_t quad_deltas(const uint32_t (&w)[BITS]) {
    if constexpr (BITS == 8) {
        return w[I];
    } else if constexpr (BITS == 4) {
        return w[I / 2] & (I % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
    } else {
        const uint32_t field = I / 2 < 3
                                   ? w[I / 2 < 3 ? I / 2 : 0]
                                   : (w[0] >> 6 & 0x03030303u) | (w[1] >> 4 & 0x0c0c0c0cu) | (w[2] >> 2 & 0x30303030u);
        return field & (I % 2 ? 0x38383838u : 0x07070707u);
    }
}

// a group on its way to registers
template <typename V, int BITS> struct loaded_group {
    group_words<V::WORDS> values;
    group_words<BITS>     deltas;
    uint32_t              scale_bits;

    __device__ __forceinline__ void load(const uint8_t * tiles, unsigned group) {
        const uint8_t * tile =
            tiles + static_cast<int64_t>(group / CUDA_QUANTIZED_TILE) * quantized_tile_nbytes(V::WORDS, BITS);
        unsigned slot = group % CUDA_QUANTIZED_TILE;
        // masked once, then one instruction per address: the compiler would mask that of each plane
        asm("" : "+r"(slot));
        values.load(tile, slot);
        deltas.load(tile + CUDA_QUANTIZED_TILE * 4 * V::WORDS, slot);
        scale_bits = load_streaming(
            reinterpret_cast<const uint16_t *>(tile + CUDA_QUANTIZED_TILE * 4 * (V::WORDS + BITS)) + slot);
    }
    __device__ __forceinline__ float scale() const {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(scale_bits)));
    }
};

// a cuda_quantized_segment; quad 0 or 1 of it
struct quantized_segment {
    uint4                           w;
    __device__ __forceinline__ void load(const uint8_t * end, int i) {
        w = load_streaming(reinterpret_cast<const uint4 *>(end) - 1 - i);
    }
    __device__ __forceinline__ uint32_t                     values(int quad) const { return quad ? w.y : w.x; }
    template <int BITS> __device__ __forceinline__ uint32_t deltas(int quad) const {
        return w.z & (((1u << BITS) - 1) << quad * BITS) * 0x01010101u;
    }
    __device__ __forceinline__ float scale() const {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(w.w)));
    }
    __device__ __forceinline__ uint32_t word() const { return w.w >> 16; }
};

} // namespace macko::cuda
