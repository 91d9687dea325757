// y = W x for up to four columns of x, W in the BLOCKS layout (sparse-blocks.h): quantized values times x in 16-bit integers.
//
// x is rounded to multiples of max |x| / 32767, one scale per column, and kept in shared memory; products and sums of a group are exact integers
// (dp2a: two products per instruction), which its scale then turns into float32. That adds at most sum |w| max |x| / 65534 to the usual error bound.
// The rest is as in sparse-runs.cuh: rows are dealt to warps, DEPTH groups per run are on their way, the first ones before x is there.
//
// Included by one .cu file per value type, so that they compile side by side. Measurements: docs/notes-quantized.md.
#pragma once

#include "cuda/sparse-blocks-groups.cuh"
#include "cuda/sparse-copies.cuh"
#include "cuda/sparse-mul-mat-params.cuh"

#include <algorithm>

namespace macko {

// ---- a group ----

constexpr uint32_t BLOCK_STEP = 128; // bytes of shared memory from one column to the next, with words of 4 bytes

// dp4a weights of entry k % 4 of an even (k < 4) or odd quad: the sum of the codes up to it in bytes, with 8 bits of its own code only
inline void set_block_weights(uint32_t weight[8], int bits) {
    for (int k = 0; k < 8; k++) {
        weight[k] = 0;
        for (int i = bits == 8 ? k % 4 : 0; i <= k % 4; i++) {
            weight[k] |= BLOCK_STEP >> (bits == 8 ? 0 : k / 4 * bits) << 8 * i;
        }
    }
}

// where a thread is in x: a byte address of shared memory, or with words of 8 bytes half the distance from x_address
struct block_place {
    uint32_t at, limit, lap;
    __device__ __forceinline__ void wrap() {
        if (at >= limit) {
            at -= lap;
        }
    }
};

template <int NX> struct x_columns { uint32_t w[(NX + 1) / 2]; }; // a pair of columns per word; of one column the lower half

template <int NX, int OFFSET> __device__ __forceinline__ x_columns<NX> load_columns(uint32_t x_address, uint32_t to) {
    x_columns<NX> x;
    if constexpr (NX <= 2) {
        asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(x.w[0]) : "r"(to), "n"(OFFSET));
    } else {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(x.w[0]), "=r"(x.w[1]) : "r"(x_address + to * 2), "n"(2 * OFFSET));
    }
    return x;
}

__device__ __forceinline__ int dot_low(uint32_t x, uint32_t q, int sum)  { return __dp2a_lo(static_cast<int>(x), static_cast<int>(q), sum); }
__device__ __forceinline__ int dot_high(uint32_t x, uint32_t q, int sum) { return __dp2a_hi(static_cast<int>(x), static_cast<int>(q), sum); }

template <typename V, int BITS, int NX> struct block_group {
    group_words<V::WORDS> values;
    group_words<BITS>     codes;
    uint32_t              scale;

    __device__ __forceinline__ void load(const sparse_operand & m, int slot) {
        values.load(m.values, m.n_groups, slot);
        codes.load(m.codes, m.n_groups, slot);
        scale = load_streaming(m.scales + slot);
    }

    template <int I> __device__ __forceinline__ void quad(block_place & p, uint32_t x_address, const uint32_t * weight, int (&sum)[NX]) const {
        constexpr int K = BITS == 8 ? 0 : I % 2 * 4; // entries since p.at
        const uint32_t c = quad_codes<BITS, I>(codes.w), q = V::template quad<I>(values.w);
        const uint32_t * weights = weight + I % 2 * 4;
        x_columns<NX> x[4];
        if constexpr (BITS == 8) {
            const auto next = [&](int k) {
                p.at = __dp4a(c, weights[k], p.at);
                p.wrap();
                x[k] = load_columns<NX, 0>(x_address, p.at);
                p.at += BLOCK_STEP; // wraps with the next code
            };
            next(0), next(1), next(2), next(3);
        } else {
            x[0] = load_columns<NX, (K + 0) * BLOCK_STEP>(x_address, __dp4a(c, weights[0], p.at));
            x[1] = load_columns<NX, (K + 1) * BLOCK_STEP>(x_address, __dp4a(c, weights[1], p.at));
            x[2] = load_columns<NX, (K + 2) * BLOCK_STEP>(x_address, __dp4a(c, weights[2], p.at));
            p.at = __dp4a(c, weights[3], p.at);
            x[3] = load_columns<NX, (K + 3) * BLOCK_STEP>(x_address, p.at);
            if (I % 2) {
                p.at += CUDA_BLOCKS_SEGMENT * BLOCK_STEP;
                p.wrap();
            }
        }
#pragma unroll
        for (int i = 0; i < NX; i++) {
            const int halves = i % 2 ? 0x7632 : 0x5410;
            sum[i] = dot_low(__byte_perm(x[0].w[i / 2], x[1].w[i / 2], halves), q, sum[i]);
            sum[i] = dot_high(__byte_perm(x[2].w[i / 2], x[3].w[i / 2], halves), q, sum[i]);
        }
    }

    __device__ __forceinline__ void multiply(block_place & p, uint32_t x_address, const uint32_t * weight, float (&total)[NX]) const {
        int sum[NX] = {};
        quad<0>(p, x_address, weight, sum);
        quad<1>(p, x_address, weight, sum);
        quad<2>(p, x_address, weight, sum);
        quad<3>(p, x_address, weight, sum);
        quad<4>(p, x_address, weight, sum);
        quad<5>(p, x_address, weight, sum);
        quad<6>(p, x_address, weight, sum);
        quad<7>(p, x_address, weight, sum);
        const float d = __half2float(__ushort_as_half(static_cast<unsigned short>(scale)));
#pragma unroll
        for (int i = 0; i < NX; i++) {
            total[i] = fmaf(d, static_cast<float>(sum[i]), total[i]);
        }
    }
};

// the largest of a warp's numbers, on each lane
__device__ __forceinline__ uint32_t warp_max_bits(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, v);
#else
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        v = max(v, __shfl_xor_sync(FULL_WARP, v, offset));
    }
    return v;
#endif
}

// ---- x into shared memory ----

struct block_memory {
    uint32_t * x;       // modulus + overshoot words of NX 16-bit integers, or of one in their lower half
    float    * column;  // of x, times its norm's weights, then zeros up to lanes * width
    float    * squares; // of 32 warps
    uint32_t * largest; // of 32 warps: bits of |x|, of which larger ones are of larger numbers, and NaN above all
};

// Of four floats that a thread takes at a time, the rest one by one: the norm's weights (of one column) and x in the same way
template <int NX> __device__ __forceinline__ int n_vectors(const sparse_launch & p, const float * x) {
    const bool aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(p.norm_weight)) % 16 == 0;
    return x && aligned && (NX == 1 || !p.norm_weight) ? p.cols / 4 : 0;
}

// The norm's weights to the place of the x that they will be multiplied with, by the same threads. They are weights: the kernel before may still run.
__device__ __forceinline__ void copy_norm_weights(const block_memory & s, const sparse_launch & p, const float * x) {
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), vectors = n_vectors<1>(p, x);
    for (int i = thread; i < vectors; i += threads) {
        copy_float4(s.column + 4 * i, p.norm_weight + 4 * i);
    }
    for (int i = vectors * 4 + thread; i < p.cols; i += threads) {
        copy_float(s.column + i, p.norm_weight + i);
    }
}

// All of a column, from float32 in global memory to words. scale: what an integer stands for, with the norm's factor. Ends with a barrier.
template <int NX> __device__ __forceinline__ void fill_column(const block_memory & s, const sparse_launch & p, const float * x, int i, float * scale) {
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, warps = threads / 32;
    float    squares = 0.0f;
    uint32_t largest = 0;
    const auto prepare = [&](float v, float weight) {
        if (p.norm_weight) {
            squares = fmaf(v, v, squares);
            v *= weight;
        }
        largest = max(largest, __float_as_uint(v) & 0x7fffffffu);
        return v;
    };
    const float * weights = NX == 1 ? s.column : p.norm_weight; // of one column the norm's weights are there already
    const int vectors = n_vectors<NX>(p, x);
#pragma unroll 4
    for (int c = thread; c < vectors; c += threads) {
        const float4 v = reinterpret_cast<const float4 *>(x)[c];
        float4 & to = reinterpret_cast<float4 *>(s.column)[c];
        const float4 w = p.norm_weight ? to : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        to = make_float4(prepare(v.x, w.x), prepare(v.y, w.y), prepare(v.z, w.z), prepare(v.w, w.w));
    }
#pragma unroll 4
    for (int c = vectors * 4 + thread; c < p.cols; c += threads) {
        s.column[c] = prepare(x ? x[c] : 0.0f, p.norm_weight ? weights[c] : 1.0f);
    }
    if (p.norm_weight) {
        squares = warp_sum(squares);
    }
    largest = warp_max_bits(largest);
    if (lane == 0) {
        s.squares[warp] = squares;
        s.largest[warp] = largest;
    }
    __syncthreads();
    largest = warp_max_bits(lane < warps ? s.largest[lane] : 0u);
    const float norm = p.norm_weight ? rsqrtf(warp_sum(lane < warps ? s.squares[lane] : 0.0f) / static_cast<float>(p.cols) + p.norm_eps) : 1.0f;
    const float most = __uint_as_float(largest);
    const bool  zero = most < 0x1p-100f, finite = most < INFINITY; // of NaN both false
    const float inverse = !zero && finite ? 32767.0f / most : 0.0f;
    *scale = zero ? 0.0f : finite ? most * (1.0f / 32767.0f) * norm : NAN;
    // a warp per row of 32 words: place = lane * width + row
    const int width = (p.modulus + 1) / 32;
    const float * from = s.column + (lane & (p.lanes - 1)) * width;
    const auto store = [&](int word, uint32_t rounded) {
        if constexpr (NX == 1) {
            s.x[word] = rounded;
        } else {
            reinterpret_cast<uint16_t *>(s.x)[word * NX + i] = static_cast<uint16_t>(rounded);
        }
    };
    const auto rounded = [&](int row) { return __float_as_uint(fmaf(from[row], inverse, 12582912.0f)); }; // 1.5 * 2^23: the low bits are those of the integer
#pragma unroll 4
    for (int row = warp; row < width - 1; row += warps) {
        store(row * 32 + lane, rounded(row));
    }
    if (warp == 0 && lane < 31) { // the last one is a word shorter
        store((width - 1) * 32 + lane, rounded(width - 1));
    }
#pragma unroll 4
    for (int row = warp; row < p.overshoot / 32; row += warps) {
        store(p.modulus + row * 32 + lane, rounded(row));
    }
    __syncthreads();
}

// sum over groups of `lanes` neighbouring lanes
__device__ __forceinline__ float lanes_sum(float v, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
        v += __shfl_xor_sync(FULL_WARP, v, offset);
    }
    return v;
}

// ---- the kernel ----

template <typename V, int BITS, int NX, int THREADS, int DEPTH> __global__ void __launch_bounds__(THREADS, 1) blocks_kernel(const __grid_constant__ sparse_launch p) {
    extern __shared__ __align__(16) uint32_t shared_words[];
    constexpr int WORDS = (NX + 1) / 2;
    block_memory s;
    s.column  = reinterpret_cast<float *>(shared_words);
    s.squares = s.column + blocks_column_words((p.modulus + 1) / 32, p.lanes);
    s.largest = reinterpret_cast<uint32_t *>(s.squares + 32);
    s.x       = s.largest + 32;

    const int lanes  = p.lanes, lane_bits = __ffs(lanes) - 1, rows = 32 >> lane_bits; // a power of two: shifts, not divisions
    const int lane   = threadIdx.x & (lanes - 1);
    const int sub    = (threadIdx.x & 31) >> lane_bits;
    const int first  = blockIdx.x + gridDim.x * (threadIdx.x / 32);
    const int stride = gridDim.x * (blockDim.x / 32);
    const int column = blockIdx.y * NX;

    const uint32_t x_address = static_cast<uint32_t>(__cvta_generic_to_shared(s.x));
    const uint32_t origin    = WORDS == 1 ? x_address : 0;
    const uint32_t lap       = static_cast<uint32_t>(p.modulus) * 4;
    const int row_offset = p.expert_ids ? expert_row(p, column) : 0;

    struct row_start { int row, from, to, spill, spill_end; uint32_t base; };
    const auto fetch = [&](int j) {
        const sparse_task t = task_at<true>(p, rows, first, stride, sub, j);
        row_start r = {};
        if (t.valid && row_offset >= 0) {
            const sparse_operand & m = p.m[t.matrix];
            r.row       = m.row_begin + row_offset + t.row;
            r.from      = __ldg(m.row_ptr + r.row);
            r.to        = __ldg(m.row_ptr + r.row + 1);
            r.spill     = __ldg(m.spill_ptr + r.row);
            r.spill_end = __ldg(m.spill_ptr + r.row + 1);
            r.base      = __ldg(m.bases + static_cast<int64_t>(r.row) * lanes + lane);
        }
        return r;
    };

    // this thread's run of a row, and the first two of its spilled non-zeros
    struct cursor { int matrix, first, full, own, last, steps; uint32_t at; int spill, spill_end; uint2 spilled[2]; };
    const auto begin_row = [&](int j, const row_start & r) {
        cursor c = {};
        if (first + (p.silu_mul ? j / 2 : j) * stride >= p.n_units) { // of the whole warp
            return c;
        }
        constexpr int BITS_OF_BLOCK = 5; // shifts: the numbers are not negative
        static_assert(QUANT_BLOCK == 1 << BITS_OF_BLOCK, "entries of a block are counted with shifts");
        const int block = r.from >> BITS_OF_BLOCK, groups = ((r.to + 31) >> BITS_OF_BLOCK) - block;
        const int begin = block + r.row, skip = lane * groups >> lane_bits;
        c.matrix = task_at<true>(p, rows, first, stride, sub, j).matrix;
        c.full   = groups >> lane_bits;
        c.own    = ((lane + 1) * groups >> lane_bits) - skip;
        c.first  = begin + lane;
        c.last   = begin + c.full * lanes + skip - lane * c.full;
        c.steps  = static_cast<int>(warp_max_bits(static_cast<uint32_t>((groups + lanes - 1) >> lane_bits)));
        c.at     = origin + r.base * 4;
        c.spill     = r.spill + lane;
        c.spill_end = r.spill_end;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (c.spill + i * lanes < c.spill_end) {
                c.spilled[i] = load_streaming(p.m[c.matrix].spill + c.spill + i * lanes);
            }
        }
        return c;
    };

    block_group<V, BITS, NX> groups[DEPTH];
    const auto load = [&](block_group<V, BITS, NX> & g, const cursor & c, int step) {
        if (step < c.own) {
            g.load(p.m[c.matrix], step < c.full ? c.first + step * lanes : c.last);
        }
    };

    cursor c = begin_row(0, fetch(0));
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        load(groups[d], c, d);
    }
    row_start ahead = fetch(1);
    if (NX == 1 && p.norm_weight) {
        copy_norm_weights(s, p, p.x + column * p.ldx);
    }

    for (int i = p.cols + threadIdx.x; i < lanes * ((p.modulus + 1) / 32); i += blockDim.x) {
        s.column[i] = 0.0f;
    }

    cuda_allow_next();
    if (!p.expert_ids) {
        cuda_wait_for_previous();
    }
    wait_for_copies();
    float scale[NX];
#pragma unroll
    for (int i = 0; i < NX; i++) {
        fill_column<NX>(s, p, column + i < p.n_columns ? p.x + (column + i) * p.ldx : nullptr, i, scale + i);
    }

    float gate[NX] = {};
    for (int j = 0; first + (p.silu_mul ? j / 2 : j) * stride < p.n_units; j++) {
        float sum[NX] = {}, spill_sum[NX] = {};
        const auto add_spilled = [&](const uint2 & e, int matrix) {
#pragma unroll
            for (int i = 0; i < NX; i++) {
                const int16_t x = reinterpret_cast<const int16_t *>(s.x)[NX == 1 ? e.x * 2 : e.x * NX + i];
                spill_sum[i] = fmaf(__uint_as_float(e.y), static_cast<float>(x), spill_sum[i]);
            }
        };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (c.spill + i * lanes < c.spill_end) {
                add_spilled(c.spilled[i], c.matrix);
            }
        }
        for (int e = c.spill + 2 * lanes; e < c.spill_end; e += lanes) {
            add_spilled(load_streaming(p.m[c.matrix].spill + e), c.matrix);
        }

        const int own = c.own, steps = c.steps;
        block_place place = { c.at, origin + lap, lap };
        int step = 0;
        bool more;
        do {
            int to = step + DEPTH;
            more = to < steps;
            if (!more) {
                c = begin_row(j + 1, ahead);
                ahead = fetch(j + 2);
                to = 0;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (step + d < own) {
                    groups[d].multiply(place, x_address, p.weight, sum);
                }
                load(groups[d], c, to + d);
            }
            step += DEPTH;
        } while (more);

        const sparse_task t = task_at<true>(p, rows, first, stride, sub, j);
#pragma unroll
        for (int i = 0; i < NX; i++) {
            const float y = lanes_sum(fmaf(sum[i], V::UNIT, spill_sum[i]), lanes) * scale[i];
            if (p.silu_mul && t.matrix == 0) {
                gate[i] = y;
            } else if (lane == 0 && t.row < p.m[t.matrix].n_rows && column + i < p.n_columns) {
                store_result<true>(p, t, column + i, y, gate[i]);
            }
        }
    }
}

// ---- launch ----

template <typename V, int BITS, int NX, int THREADS, int DEPTH> cudaError_t launch_blocks_config(sparse_launch & p, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int blocks = std::min(device.multiprocessors, p.n_units); // one per SM: x is in shared memory once
    const int units  = (p.n_units + blocks - 1) / blocks;
    set_block_weights(p.weight, BITS);
    return launch_sparse(blocks_kernel<V, BITS, NX, THREADS, DEPTH>, p, warps_for(units, THREADS / 48, THREADS / 32) * 32, blocks_shared_nbytes(p, NX), blocks, grid_y, stream);
}

template <typename V, int BITS> cudaError_t launch_blocks_bits(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    switch (nx) {
        case 1:  return launch_blocks_config<V, BITS, 1, 768, 2>(p, grid_y, stream);
        case 2:  return launch_blocks_config<V, BITS, 2, 768, 2>(p, grid_y, stream);
        default: return launch_blocks_config<V, BITS, 4, 512, 2>(p, grid_y, stream);
    }
}

template <typename V> cudaError_t launch_blocks(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 3:  return launch_blocks_bits<V, 3>(p, nx, grid_y, stream);
        case 4:  return launch_blocks_bits<V, 4>(p, nx, grid_y, stream);
        default: return launch_blocks_bits<V, 8>(p, nx, grid_y, stream);
    }
}

} // namespace macko
