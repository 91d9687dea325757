// Tiles of the layout FRAGMENTS (gpu-layout/fragments.h): made from the arrays of a file, and back to dense rows. A
// warp has a tile at a time.
#include "cuda/sparse/fragments.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/repack.cuh"

#include <algorithm>
#include <cstring>

namespace macko::cuda {

namespace {

// The place of a warp's tile, and of the lane in it.
struct tile_place {
    int64_t tile;
    int64_t row[2]; // rows g and g + 8
    int     segment, chunks, words_at;
};
__device__ __forceinline__ tile_place place_of(const fragments_layout & m, int segments, int64_t tile) {
    const int     lane = threadIdx.x % 32;
    const int64_t row  = tile / segments * FRAGMENT_ROWS + lane / 4;
    tile_place    p    = { tile, { row, row + 8 }, static_cast<int>(tile % segments), 0, 0 };
    p.chunks           = fragments_chunks(m.cols, m.tile_chunks, p.segment);
    p.words_at         = fragments_words_at(p.chunks, m.window);
    return p;
}

// ---- from a file ----

struct pack_params {
    fragments_source source;
    fragments_layout m;
    int              segments;
    int64_t          n_tiles;
    int64_t          row_nbytes; // of the bitmap
};

__device__ __forceinline__ uint32_t bitmap_byte(const pack_params & p, int64_t row, int64_t i) {
    return row < p.m.rows && i < p.row_nbytes ? p.source.arrays.bitmap[row * p.row_nbytes + i] : 0;
}
// Code k of a row.
__device__ __forceinline__ uint32_t code_of(const pack_params & p, int64_t row, int64_t k) {
    const int       bits  = p.source.arrays.bits;
    const int64_t   at    = k * bits;
    const uint8_t * codes = p.source.arrays.codes + int64_t(p.source.arrays.row_ptr[row]) * bits + at / 8;
    const int       shift = static_cast<int>(at % 8);
    const uint32_t  word  = codes[0] | (shift + bits > 8 ? codes[1] << 8 : 0);
    return word >> shift & ((1u << bits) - 1);
}

__global__ void __launch_bounds__(128) pack_kernel(const __grid_constant__ pack_params p) {
    const int     lane = threadIdx.x % 32, t = lane % 4, bits = p.m.code_bits;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * 4;
    for (int64_t tile = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32; tile < p.n_tiles; tile += stride) {
        const tile_place place  = place_of(p.m, p.segments, tile);
        const int64_t    first  = static_cast<int64_t>(place.segment) * p.m.tile_chunks * (FRAGMENT_CHUNK / 8);
        const uint32_t   begin  = p.m.starts[tile];
        uint8_t * const  to     = p.m.tiles + static_cast<uint64_t>(begin) * FRAGMENT_UNIT;
        const int        nbytes = static_cast<int>(p.m.starts[tile + 1] - begin) * static_cast<int>(FRAGMENT_UNIT);

        // codes of the two rows before this tile, and of this lane in it
        int64_t before[2];
        int     n_codes = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int n = 0;
            for (int64_t i = t; i < first; i += 4) {
                n += __popc(bitmap_byte(p, place.row[h], i));
            }
            n += __shfl_xor_sync(FULL_WARP, n, 1);
            n += __shfl_xor_sync(FULL_WARP, n, 2);
            before[h] = n;
            for (int s = 0; s < place.chunks * 8; s++) {
                n_codes += __popc(bitmap_byte(p, place.row[h], first + s * 4 + t));
            }
        }
        const int n_words = fragments_stream_words(n_codes, bits);
        int       common  = n_words;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            common = min(common, __shfl_xor_sync(FULL_WARP, common, offset));
        }
        const int end = warp_prefix_sum(n_words - common), tail = end - (n_words - common);
        reinterpret_cast<uint16_t *>(to)[lane] = static_cast<uint16_t>(end);

        const int64_t windows = windows_of_row(p.m.cols, p.source.arrays.window),
                      window  = place.segment * (p.m.tile_chunks * FRAGMENT_CHUNK) / p.m.window;
        for (int i = lane; i < fragments_windows(place.chunks, p.m.window) * 16; i += 32) {
            const int64_t row = tile / p.segments * FRAGMENT_ROWS + i % 16, w = window + i / 16;
            to[FRAGMENT_TAIL_ENDS + i] =
                row < p.m.rows && w < windows ? p.source.arrays.scales[row * windows + w] : uint8_t(0);
        }

        uint32_t * const words  = reinterpret_cast<uint32_t *>(to + place.words_at);
        uint64_t         held   = 0; // codes that are not written yet
        int              n_held = 0, n_written = 0;
        const auto       write = [&] {
            words[n_written < common ? n_written * 32 + lane : common * 32 + tail + n_written - common] =
                static_cast<uint32_t>(held);
            held >>= 32;
            n_held -= 32;
            n_written++;
        };
        for (int s = 0; s < place.chunks * 8; s++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int64_t  row  = place.row[h];
                const uint32_t byte = bitmap_byte(p, row, first + s * 4 + t);
                to[place.words_at - place.chunks * 512 + s / 8 * 512 + lane * 16 + s % 8 * 2 + h] =
                    static_cast<uint8_t>(byte);
                int n = __popc(byte), up_to = n; // of the row's 32 columns: up to this lane
                {
                    const int from1 = __shfl_up_sync(FULL_WARP, up_to, 1, 4);
                    up_to += t >= 1 ? from1 : 0;
                    const int from2 = __shfl_up_sync(FULL_WARP, up_to, 2, 4);
                    up_to += t >= 2 ? from2 : 0;
                }
                int64_t k = before[h] + up_to - n;
                before[h] += __shfl_sync(FULL_WARP, up_to, 3, 4);
                for (; n > 0; n--, k++) {
                    const uint32_t code      = code_of(p, row, k);
                    const uint32_t in_memory = bits == 4 ? fragments_nibble(code, p.source.arrays.bits)
                                                         : static_cast<uint8_t>(p.source.level_of[code]);
                    held |= static_cast<uint64_t>(in_memory) << n_held;
                    n_held += bits;
                    if (n_held >= 32) {
                        write();
                    }
                }
            }
        }
        if (n_held > 0) {
            write();
        }
        // padding
        const int all = __shfl_sync(FULL_WARP, end, 31), used = place.words_at + (common * 32 + all) * 4;
        if (lane < (nbytes - used) / 4) {
            reinterpret_cast<uint32_t *>(to + used)[lane] = 0;
        }
    }
}

__global__ void factors_kernel(const uint16_t * factors, int64_t rows, float * to) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < rows) {
        to[row] = __uint_as_float(static_cast<uint32_t>(factors[row]) << 16);
    }
}

// ---- to dense rows ----

constexpr int UNPACK_WARPS = 8, UNPACK_COPIES = 8; // of a block, at most; of the table

struct unpack_params {
    fragments_layout m;
    int              segments, window_bits, buffer_nbytes;
    int64_t          row_begin, row_end;
    void *           dst;
    int64_t          ld;
    bool             vector; // rows of dst are aligned to 16 bytes
};

// d * q rounded to nearest even, the largest finite value where that overflows, +0 for 0 (FORMAT.md section 2)
__device__ __forceinline__ void to_dense(float * to, float v) { *to = v == 0.0f ? 0.0f : v; }
__device__ __forceinline__ void to_dense(__half * to, float v) {
    *to = v == 0.0f ? __half(0.0f) : __float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f));
}
__device__ __forceinline__ void to_dense(__nv_bfloat16 * to, float v) {
    *to = v == 0.0f ? __nv_bfloat16(0.0f) : __float2bfloat16_rn(v);
}

// Four levels (signed bytes) times d.
template <typename T> __device__ __forceinline__ void scale_levels(T * to, uint32_t levels, float d) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // the bits of 2^23 + 128 + level
        const uint32_t bits = __byte_perm(levels ^ 0x80808080u, 0x4b000000u, 0x7540u + static_cast<uint32_t>(i));
        to_dense(to + i, d * (__uint_as_float(bits) - 8388736.0f));
    }
}

template <int BITS, typename T>
__global__ void __launch_bounds__(UNPACK_WARPS * 32) unpack_kernel(const __grid_constant__ unpack_params p) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int       lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    uint8_t * const buffer = shared + UNPACK_COPIES * 256 * 8 + warp * p.buffer_nbytes;
    const int64_t   first = p.row_begin / FRAGMENT_ROWS * p.segments, end = fragments_groups(p.row_end) * p.segments;
    uint4           magnitudes;
    memcpy(&magnitudes, p.m.magnitudes, sizeof(magnitudes));
    fill_table<BITS>(shared, UNPACK_COPIES);
    __syncthreads();
    cuda_wait_for_previous();
    cuda_allow_next();
    for (int64_t tile = first + static_cast<int64_t>(blockIdx.x) * warps + warp; tile < end;
         tile += static_cast<int64_t>(gridDim.x) * warps) {
        const tile_place      place  = place_of(p.m, p.segments, tile);
        const uint32_t        begin  = p.m.starts[tile];
        const uint8_t * const from   = p.m.tiles + static_cast<uint64_t>(begin) * FRAGMENT_UNIT;
        const int             nbytes = static_cast<int>(p.m.starts[tile + 1] - begin) * static_cast<int>(FRAGMENT_UNIT);
#pragma unroll 4
        for (int i = lane * 16; i < nbytes; i += 512) {
            copy_16(buffer + i, from + i);
        }
        wait_for_copies();
        __syncwarp();
        place_tails(buffer, from, nbytes, place.words_at);
        float factor[2];
        bool  wanted[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            wanted[h] = place.row[h] >= p.row_begin && place.row[h] < p.row_end;
            factor[h] = wanted[h] ? p.m.factors[place.row[h]] : 0.0f;
        }
        const uint32_t words = shared_address(buffer) + place.words_at + lane * 4,
                       copy  = shared_address(shared) + lane % UNPACK_COPIES * 8;
        uint32_t at          = 0;
        for (int s = 0; s < place.chunks * 8; s++) {
            const int64_t   column = place.segment * (p.m.tile_chunks * FRAGMENT_CHUNK) + s * 32 + t * 8;
            const uint8_t * bytes  = buffer + place.words_at - place.chunks * 512 + s / 8 * 512 + lane * 16 + s % 8 * 2;
            const auto      entry  = [&](int h) { return load_words(copy + bytes[h] * (UNPACK_COPIES * 8)); };
            const auto      step   = decode_step<BITS, 16>(magnitudes, entry(0), entry(1), words, &at);
            const int8_t *  scales =
                reinterpret_cast<const int8_t *>(buffer) + FRAGMENT_TAIL_ENDS + (s >> p.window_bits) * 16 + lane / 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float   d = fragment_scale(scales[h * 8]) * factor[h];
                alignas(16) T values[8];
                scale_levels(values, step.a[0][h], d);
                scale_levels(values + 4, step.a[0][h + 2], d);
                if (!wanted[h]) {
                    continue;
                }
                T * const to = static_cast<T *>(p.dst) + (place.row[h] - p.row_begin) * p.ld + column;
                if (p.vector && column + 8 <= p.m.cols) {
#pragma unroll
                    for (int i = 0; i < static_cast<int>(sizeof(values)) / 16; i++) {
                        reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(values)[i];
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        if (column + i < p.m.cols) {
                            to[i] = values[i];
                        }
                    }
                }
            }
        }
        __syncwarp();
    }
}

template <int BITS, typename T> cudaError_t unpack(unpack_params & p, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    p.vector = reinterpret_cast<uintptr_t>(p.dst) % 16 == 0 && p.ld * static_cast<int64_t>(sizeof(T)) % 16 == 0;
    constexpr int table = UNPACK_COPIES * 256 * 8;
    const int     warps = std::min(UNPACK_WARPS, (device.shared_nbytes - table) / p.buffer_nbytes),
              shared    = table + warps * p.buffer_nbytes;
    if (warps == 0) {
        return cudaErrorNotSupported;
    }
    const int64_t tiles  = (fragments_groups(p.row_end) - p.row_begin / FRAGMENT_ROWS) * p.segments,
                  blocks = std::min<int64_t>((tiles + warps - 1) / warps,
                                             std::max(1, device.shared_nbytes / shared) * device.multiprocessors);
    CUDA_TRY(cudaFuncSetAttribute(unpack_kernel<BITS, T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  device.shared_nbytes));
    unpack_kernel<BITS, T><<<static_cast<unsigned>(blocks), warps * 32, static_cast<size_t>(shared), stream>>>(p);
    return cudaGetLastError();
}

template <typename T> cudaError_t unpack(unpack_params & p, cudaStream_t stream) {
    return p.m.code_bits == 4 ? unpack<4, T>(p, stream) : unpack<8, T>(p, stream);
}

} // namespace

cudaError_t pack_fragments(const fragments_source & source, const fragments_layout & m, cudaStream_t stream) {
    pack_params p = { source, m, static_cast<int>(fragments_segments(m.cols, m.tile_chunks)), 0,
                      bitmap_row_nbytes(m.cols) };
    p.n_tiles     = fragments_groups(m.rows) * p.segments;
    if (p.n_tiles == 0) {
        return cudaSuccess;
    }
    factors_kernel<<<static_cast<unsigned>((m.rows + 255) / 256), 256, 0, stream>>>(source.arrays.factors, m.rows,
                                                                                    m.factors);
    CUDA_TRY(cudaGetLastError());
    pack_kernel<<<static_cast<unsigned>(std::min<int64_t>((p.n_tiles + 3) / 4, 1 << 16)), 128, 0, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t densify(const fragments_layout & w, const dense_rows & to) {
    unpack_params p = { w,
                        static_cast<int>(fragments_segments(w.cols, w.tile_chunks)),
                        fragments_window_bits(w.window),
                        fragments_buffer_nbytes(w.tile_chunks, w.window, w.most_words),
                        to.row_begin,
                        to.row_end,
                        to.dst,
                        to.ld,
                        false };
    switch (w.type) {
        case GGML_MACKO_TYPE_F16:  return unpack<__half>(p, to.stream);
        case GGML_MACKO_TYPE_BF16: return unpack<__nv_bfloat16>(p, to.stream);
        default:                   return unpack<float>(p, to.stream);
    }
}

} // namespace macko::cuda
