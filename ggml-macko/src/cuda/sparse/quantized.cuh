// y = W x for up to four columns of x, W in the QUANTIZED layout (gpu-layout/quantized.h): quantized values times x in
// 16-bit integers.
//
// x is rounded to multiples of max |x| / 32767, one scale per column, and kept in shared memory. Products and sums of a
// group are exact integers (dp2a: two products per instruction), which its scale turns into float32. That adds at most
// sum |w| max |x| / 65534 to the usual error bound. The rest is as in row-split.cuh: rows are dealt to warps, DEPTH
// groups per run are on their way, the first ones before x is there.
//
// Included by one .cu file per value type, so that they compile side by side. The kernel is longer than other functions
// because its loops have to be unrolled around registers that the whole pipeline shares.
#pragma once

#include "cuda/lib/copies.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/quantized-groups.cuh"

#include <algorithm>

namespace macko::cuda {

// ---- a group ----

constexpr uint32_t QUANTIZED_STEP =
    128; // bytes of shared memory from one column of x to the next, with words of 4 bytes

// dp4a weights of entry k % 4 of an even (k < 4) or odd quad: they sum the deltas up to it, in bytes; with deltas of 8
// bits only its own
inline void set_quantized_weights(uint32_t weight[8], int bits) {
    for (int k = 0; k < 8; k++) {
        weight[k] = 0;
        for (int i = bits == 8 ? k % 4 : 0; i <= k % 4; i++) {
            weight[k] |= QUANTIZED_STEP >> (bits == 8 ? 0 : k / 4 * bits) << 8 * i;
        }
    }
}

// Where a thread is in x: a byte address of shared memory, or, with words of 8 bytes, half the distance from x_address.
struct x_cursor {
    uint32_t                        at, limit, x_period;
    __device__ __forceinline__ void wrap() { reduce_once(at, limit, x_period); }
};

// a pair of columns per word; one column is the lower half
template <int NX> struct x_columns {
    uint32_t w[(NX + 1) / 2];
};

template <int NX, int OFFSET> __device__ __forceinline__ x_columns<NX> load_columns(uint32_t x_address, uint32_t to) {
    x_columns<NX> x;
    if constexpr (NX <= 2) {
        asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(x.w[0]) : "r"(to), "n"(OFFSET));
    } else {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];"
                     : "=r"(x.w[0]), "=r"(x.w[1])
                     : "r"(x_address + to * 2), "n"(2 * OFFSET));
    }
    return x;
}

__device__ __forceinline__ int dot_low(uint32_t x, uint32_t q, int sum) {
    return __dp2a_lo(static_cast<int>(x), static_cast<int>(q), sum);
}
__device__ __forceinline__ int dot_high(uint32_t x, uint32_t q, int sum) {
    return __dp2a_hi(static_cast<int>(x), static_cast<int>(q), sum);
}

// Four entries with deltas c and values q: the first ones of a segment, or the last.
template <int BITS, int NX, bool LAST>
__device__ __forceinline__ void multiply_quad(x_cursor & p, uint32_t x_address, const uint32_t * weight, uint32_t c,
                                              uint32_t q, int (&sum)[NX]) {
    constexpr int    K       = BITS == 8 || !LAST ? 0 : 4; // entries that p.at does not count yet
    const uint32_t * weights = weight + (LAST ? 4 : 0);
    x_columns<NX>    x[4];
    if constexpr (BITS == 8) {
        const auto next = [&](int k) {
            p.at = __dp4a(c, weights[k], p.at);
            p.wrap();
            x[k] = load_columns<NX, 0>(x_address, p.at);
            p.at += QUANTIZED_STEP; // reduced with the next delta
        };
        next(0), next(1), next(2), next(3);
    } else {
        x[0] = load_columns<NX, (K + 0) * QUANTIZED_STEP>(x_address, __dp4a(c, weights[0], p.at));
        x[1] = load_columns<NX, (K + 1) * QUANTIZED_STEP>(x_address, __dp4a(c, weights[1], p.at));
        x[2] = load_columns<NX, (K + 2) * QUANTIZED_STEP>(x_address, __dp4a(c, weights[2], p.at));
        p.at = __dp4a(c, weights[3], p.at);
        x[3] = load_columns<NX, (K + 3) * QUANTIZED_STEP>(x_address, p.at);
        if (LAST) {
            p.at += CUDA_QUANTIZED_SEGMENT * QUANTIZED_STEP;
            p.wrap();
        }
    }
#pragma unroll
    for (int i = 0; i < NX; i++) {
        const int halves = i % 2 ? 0x7632 : 0x5410;
        sum[i]           = dot_low(__byte_perm(x[0].w[i / 2], x[1].w[i / 2], halves), q, sum[i]);
        sum[i]           = dot_high(__byte_perm(x[2].w[i / 2], x[3].w[i / 2], halves), q, sum[i]);
    }
}

template <typename V, int BITS, int NX> struct dot_group : loaded_group<V, BITS> {
    template <int I>
    __device__ __forceinline__ void quad(x_cursor & p, uint32_t x_address, const uint32_t * weight,
                                         int (&sum)[NX]) const {
        multiply_quad<BITS, NX, I % 2 == 1>(p, x_address, weight, quad_deltas<BITS, I>(this->deltas.w),
                                            V::template quad<I>(this->values.w), sum);
    }

    __device__ __forceinline__ void multiply(x_cursor & p, uint32_t x_address, const uint32_t * weight,
                                             float (&total)[NX]) const {
        int sum[NX] = {};
        quad<0>(p, x_address, weight, sum);
        quad<1>(p, x_address, weight, sum);
        quad<2>(p, x_address, weight, sum);
        quad<3>(p, x_address, weight, sum);
        quad<4>(p, x_address, weight, sum);
        quad<5>(p, x_address, weight, sum);
        quad<6>(p, x_address, weight, sum);
        quad<7>(p, x_address, weight, sum);
        const float d = this->scale();
#pragma unroll
        for (int i = 0; i < NX; i++) {
            total[i] = fmaf(d, static_cast<float>(sum[i]), total[i]);
        }
    }
};

// The work of a block before its first row is bound by the instructions that its 24 warps issue, and data that passes
// through registers waits behind the weights (measured). So x comes by bulk copies, which one thread asks for, and the
// loops below have constant offsets.

struct quantized_memory {
    // A column of x, later times the weights of its norm: lanes * width floats. With several columns of x there may be
    // two, p.column_step words apart.
    float *     column;
    float *     squares; // of 32 warps
    uint32_t *  largest; // of 32 warps: the bits of |x|, which grow with |x|, NaN above all
    float *     scales;  // of 4 columns: what an integer stands for, times the factor of the norm
    bulk_copies copies;
    // modulus + overshoot words of NX 16-bit integers (one column: in their lower half). Until then, the weights of the
    // norm of one column.
    uint32_t * x;
};

// copies n floats with all threads, where there are no bulk copies
__device__ __forceinline__ void copy_floats(float * to, const float * from, int n, bool aligned) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int i = thread * 4; aligned && i < n; i += threads * 4) {
        copy_16(to + i, from + i);
    }
    for (int i = thread; !aligned && i < n; i += threads) {
        copy_float(to + i, from + i);
    }
}

// The rows of words that a thread writes, from floats of a column that are counted as the words are.
struct word_rows {
    int from, to, n; // rows; n differs between lanes
    // Keeps the compiler from moving the arithmetic behind the wait for x, where all warps would do it at once.
    __device__ __forceinline__ void now() { asm volatile("" : "+r"(from), "+r"(to), "+r"(n)); }
};

// Slot lane * width + row is word row * 32 + lane. A warp takes some rows of each copy of x, `rows_apart` from one copy
// to the next, so that it reads from 32 banks, and writes each row to all copies, in an order in which it writes to 32
// banks.
__device__ __forceinline__ word_rows rows_of_x(const quantized_launch & p, int lane_bits, int lane, int warp) {
    const int skip = warp * p.rows_of_warp, top = (lane >> lane_bits) * p.rows_apart + skip;
    return { (lane & (p.lanes - 1)) * p.width + top, top * 32 + lane,
             min(min(p.rows_of_warp, p.rows_apart - skip), p.width - top) };
}
// The first rows again, behind x. Their first word is there already, as the slot behind the last one.
__device__ __forceinline__ word_rows rows_behind_x(const quantized_launch & p, int lane, int warp) {
    const int again = warp * p.again_of_warp, begin = again + (again + lane == 0);
    return { (lane & (p.lanes - 1)) * p.width + begin, p.modulus + begin * 32 + lane,
             min(again + p.again_of_warp, p.overshoot / 32) - begin };
}

// Words of rows, `inverse` times their floats, to COPIES places each. most: the largest n of any lane. No branches,
// constant offsets.
template <int NX, int COPIES>
__device__ __forceinline__ void store_rows(const float * column, uint16_t * x, const word_rows & rows, int most,
                                           float inverse) {
    // rows that are read before the first of them is stored: for all the compiler knows, they could be the same memory
    constexpr int WORD = 2 * x_words(NX), BATCH = 4;
    const float * from = column + rows.from;
    uint16_t *    to[COPIES];
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        to[c] = x + (rows.to ^ c * (32 / COPIES)) * WORD;
    }
    int n = rows.n;
#pragma unroll 1
    for (; most > 0; most -= BATCH, n -= BATCH) {
        uint32_t v[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (k < n) {
                // 1.5 * 2^23: the low bits of the sum are those of the integer
                v[k] = __float_as_uint(fmaf(from[k], inverse, 12582912.0f));
            }
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (k < n) {
#pragma unroll
                for (int c = 0; c < COPIES; c++) {
                    if constexpr (NX == 1) {
                        *reinterpret_cast<uint32_t *>(to[c] + k * 32 * WORD) = v[k];
                    } else {
                        to[c][k * 32 * WORD] = static_cast<uint16_t>(v[k]);
                    }
                }
            }
        }
        from += BATCH;
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            to[c] += BATCH * 32 * WORD;
        }
    }
}

// A column in shared memory to words and s.scales. Ends with a barrier.
template <int NX>
__device__ __forceinline__ void fill_column(const quantized_memory & s, const quantized_launch & p,
                                            const word_rows & rows, const word_rows & behind, float * column, int i) {
    const int  threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), lane = thread & 31;
    const int  warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
    float      squares = 0.0f;
    uint32_t   largest = 0;
    const auto prepare = [&](float v, float weight) {
        squares = fmaf(v, v, squares);
        v *= weight;
        largest = max(largest, __float_as_uint(v) & 0x7fffffffu);
        return v;
    };
    const float * weights = NX == 1 ? reinterpret_cast<const float *>(s.x) : p.norm_weight;
    const int     vectors = NX == 1 || p.aligned ? p.cols / 4 : 0; // of one column all is in shared memory
#pragma unroll 1
    for (int c = thread * 4; c < vectors * 4; c += threads * 4) {
        float4 & v = *reinterpret_cast<float4 *>(column + c);
        if (p.norm_weight) {
            const float4 w = *reinterpret_cast<const float4 *>(weights + c);
            v              = make_float4(prepare(v.x, w.x), prepare(v.y, w.y), prepare(v.z, w.z), prepare(v.w, w.w));
        } else {
            prepare(v.x, 1.0f), prepare(v.y, 1.0f), prepare(v.z, 1.0f), prepare(v.w, 1.0f);
        }
    }
#pragma unroll 1
    for (int c = vectors * 4 + thread; c < p.cols; c += threads) {
        column[c] = prepare(column[c], p.norm_weight ? weights[c] : 1.0f);
    }
    if (thread == 0) { // the slot behind the last one is the first one again
        column[p.width * p.lanes - 1] = column[0];
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
    const float most = __uint_as_float(warp_max_bits(lane < warps ? s.largest[lane] : 0u));
    const bool  zero = most < 0x1p-100f, finite = most < INFINITY; // both false for NaN
    const float inverse = !zero && finite ? 32767.0f * __frcp_rn(most) : 0.0f;
    if (warp == warps - 1) { // the warp with the fewest rows: nobody waits for it at the barrier
        const float norm =
            p.norm_weight
                ? rsqrtf(warp_sum(lane < warps ? s.squares[lane] : 0.0f) / static_cast<float>(p.cols) + p.norm_eps)
                : 1.0f;
        if (lane == 0) {
            s.scales[i] = zero ? 0.0f : finite ? most * (1.0f / 32767.0f) * norm : NAN;
        }
    }
    uint16_t * x = reinterpret_cast<uint16_t *>(s.x) + i;
    switch (p.lanes) {
        case 8:  store_rows<NX, 4>(column, x, rows, p.rows_of_warp, inverse); break;
        case 16: store_rows<NX, 2>(column, x, rows, p.rows_of_warp, inverse); break;
        default: store_rows<NX, 1>(column, x, rows, p.rows_of_warp, inverse); break;
    }
    store_rows<NX, 1>(column, x, behind, p.again_of_warp, inverse);
    __syncthreads();
}

// sum over groups of `lanes` neighbouring lanes
__device__ __forceinline__ float lanes_sum(float v, int lanes) {
    v = warp_sum<8>(v);
    if (lanes > 8) {
        v += __shfl_xor_sync(FULL_WARP, v, 8);
    }
    if (lanes > 16) {
        v += __shfl_xor_sync(FULL_WARP, v, 16);
    }
    return v;
}

// ---- the kernel ----

template <typename V, int BITS, int NX, int THREADS, int DEPTH>
__global__ void __launch_bounds__(THREADS, 1) sparse_quantized_kernel(const __grid_constant__ quantized_launch p) {
    extern __shared__ __align__(16) uint32_t shared_words[];
    constexpr int                            WORDS = (NX + 1) / 2;
    quantized_memory                         s;
    s.column  = reinterpret_cast<float *>(shared_words);
    s.squares = s.column + p.sums_at;
    s.largest = reinterpret_cast<uint32_t *>(s.squares + 32);
    s.scales  = s.squares + 64;
    s.copies  = { shared_address(s.squares + 68) };
    s.x       = s.largest + 40;

    // lanes is a power of two: shifts instead of divisions
    const int lanes = p.lanes, lane_bits = p.lane_bits, rows = 32 >> lane_bits;
    const int lane   = threadIdx.x & (lanes - 1);
    const int sub    = (threadIdx.x & 31) >> lane_bits;
    const int column = blockIdx.y * NX;

    const uint32_t x_address = shared_address(s.x);
    const uint32_t origin    = WORDS == 1 ? x_address : 0;
    const uint32_t x_period  = static_cast<uint32_t>(p.modulus) * 4;
    // a thread of the warp with the fewest rows
    const bool    bulk = bulk_copies::KNOWN && p.aligned, asks = bulk && threadIdx.x == blockDim.x - 32;
    const float * x = p.x + column * p.ldx;
    if (asks) {
        s.copies.init();
    }
    __syncwarp(); // for racecheck: the warp's uniform unit may have done it
    if (asks) {
        const bool norm = NX == 1 && p.norm_weight;
        s.copies.expect(p.cols * (norm ? 8 : 4));
        if (norm) { // a weight: the kernel before may still run
            s.copies.copy(s.x, p.norm_weight, p.cols * 4);
        }
    }
    const int row_offset = p.expert_ids ? expert_row(p, column) : 0;

    constexpr int NO_ROW = -1, NO_WARP_ROWS = -2; // of this thread, of the whole warp
    // row: from the matrix' row_begin; head: a cuda_quantized_row
    struct row_start {
        int      matrix, row;
        int4     head;
        uint32_t base;
    };
    // of the next row to fetch; silu_mul: matrix 0 or 1
    int        warp_rows = blockIdx.x + gridDim.x * (threadIdx.x / 32), turn = 0;
    const auto fetch = [&] {
        row_start r = {};
        r.row       = NO_WARP_ROWS;
        if (warp_rows >= p.n_warp_rows) {
            return r;
        }
        const sparse_task t = p.n_matrices > 1 ? task_at<true>(p, rows, warp_rows, 0, sub, turn)
                                               : task_at<false>(p, rows, warp_rows, 0, sub, turn);
        turn ^= p.silu_mul;
        warp_rows += turn ? 0 : gridDim.x * (blockDim.x / 32);
        r.matrix = t.matrix;
        r.row    = t.valid ? t.row : NO_ROW;
        if (t.valid && row_offset >= 0) {
            const quantized_operand & m   = p.m[t.matrix];
            const unsigned            row = m.row_begin + row_offset + t.row, nbytes = quantized_row_nbytes(lanes);
            const uint8_t *           record = m.row_heads + static_cast<uint64_t>(row) * nbytes;
            r.head                           = __ldg(reinterpret_cast<const int4 *>(record));
            r.base = __ldg(reinterpret_cast<const uint16_t *>(record + sizeof(cuda_quantized_row)) + lane);
        }
        return r;
    };

    // this thread's run of a row, its segment (none: all bits are 0), and the first two of its outliers
    struct cursor {
        int               matrix, row, first, full, behind, own, steps;
        uint32_t          at, rest;
        int               next_outlier, outliers_end;
        quantized_segment segment;
        uint2             outliers[2]; // at next_outlier, and `lanes` further
    };
    const auto begin_row = [&](const row_start & r) {
        cursor c                = {};
        c.matrix                = r.matrix;
        c.row                   = r.row;
        const quantized_run run = quantized_run_of(r.head.y & 0xffff, lane, lane_bits);
        c.own                   = run.groups;
        c.first                 = static_cast<int>(static_cast<uint32_t>(r.head.x) >> 8) * 8 + run.slot;
        c.full                  = r.head.x & 255;
        c.behind                = r.head.w + run.slot - (c.full << lane_bits);
        c.steps                 = static_cast<int>(warp_max_bits(static_cast<uint32_t>(c.own)));
        c.at                    = origin + r.base * 4;
        c.rest                  = (r.head.y & 0xffff) > c.full << lane_bits ? 0 : static_cast<uint32_t>(r.head.w);
        c.next_outlier          = r.head.z + lane;
        c.outliers_end          = r.head.z + static_cast<int>(static_cast<uint32_t>(r.head.y) >> 16);
        return c;
    };
    const auto fetch_rest = [&](cursor & c) {
        c.segment.w = make_uint4(0, 0, 0, 0);
        if (BITS < 8 && lane < static_cast<int>(c.rest & 255)) {
            c.segment.load(p.m[c.matrix].groups_end, static_cast<int>(c.rest >> 8) + lane);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (c.next_outlier + i * lanes < c.outliers_end) {
                c.outliers[i] = load_streaming(p.m[c.matrix].outliers + c.next_outlier + i * lanes);
            }
        }
    };

    dot_group<V, BITS, NX> groups[DEPTH];
    const auto             load = [&](dot_group<V, BITS, NX> & g, const cursor & c, int step) {
        if (step < c.own) {
            g.load(p.m[c.matrix].groups,
                   step < c.full ? c.first + step * CUDA_QUANTIZED_TILE : c.behind + (step << lane_bits));
        }
    };

    // Column i of x to shared memory. With bulk copies it was asked for before: the first column as soon as the
    // previous kernel has ended, each next one, where there is room for two, while the one before is rounded.
    const auto ask_for_column = [&](int i) {
        if (asks && i < NX && column + i < p.n_columns) {
            bulk_copies::fence();
            s.copies.expect(p.cols * 4);
            s.copies.copy(s.column + i % 2 * p.column_step, x + i * p.ldx, p.cols * 4);
        }
    };
    const auto bring_column = [&](int i, float * to) {
        if (column + i >= p.n_columns) {
            for (int k = threadIdx.x; k < p.cols; k += blockDim.x) {
                to[k] = 0.0f;
            }
        } else if (!bulk) {
            copy_floats(to, x + i * p.ldx, p.cols, p.aligned);
            if (NX == 1 && p.norm_weight) {
                copy_floats(reinterpret_cast<float *>(s.x), p.norm_weight, p.cols, p.aligned);
            }
            wait_for_copies();
        }
        if (asks && column + i < p.n_columns) {
            // the others wait at the barrier: hundreds of threads that poll an mbarrier keep racecheck busy for minutes
            s.copies.wait(i);
        }
        __syncthreads();
    };

    const row_start start = fetch();
    if (asks) {
        cuda_wait_for_previous();
        s.copies.copy(s.column, x, p.cols * 4);
    }
    __syncwarp();
    cursor c = begin_row(start);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        load(groups[d], c, d);
    }
    fetch_rest(c);
    row_start ahead = fetch();
    cuda_allow_next();
    if (!p.expert_ids) {
        cuda_wait_for_previous();
    }
    word_rows x_rows   = rows_of_x(p, lane_bits, threadIdx.x & 31, threadIdx.x / 32),
              x_behind = rows_behind_x(p, threadIdx.x & 31, threadIdx.x / 32);
    x_rows.now(), x_behind.now();
#pragma unroll
    for (int i = 0; i < NX; i++) {
        float * buffer = s.column + i % 2 * p.column_step;
        bring_column(i, buffer);
        if (p.column_step) {
            ask_for_column(i + 1);
        }
        fill_column<NX>(s, p, x_rows, x_behind, buffer, i);
        if (!p.column_step) {
            ask_for_column(i + 1);
        }
    }

    float gate[NX] = {};
    while (c.row != NO_WARP_ROWS) {
        float      sum[NX] = {}, residual[NX] = {}; // sum: in units of the values
        const auto add_outlier = [&](const uint2 & e) {
#pragma unroll
            for (int i = 0; i < NX; i++) {
                const int16_t x = reinterpret_cast<const int16_t *>(s.x)[NX == 1 ? e.x * 2 : e.x * NX + i];
                sum[i]          = fmaf(__uint_as_float(e.y) * (1 / V::UNIT), static_cast<float>(x), sum[i]);
            }
        };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (c.next_outlier + i * lanes < c.outliers_end) {
                add_outlier(c.outliers[i]);
            }
        }
        for (int e = c.next_outlier + 2 * lanes; e < c.outliers_end; e += lanes) {
            add_outlier(load_streaming(p.m[c.matrix].outliers + e));
        }

        if constexpr (BITS < 8) {
            if (c.segment.w.w) {
                x_cursor x_slot  = { origin + c.segment.word() * 4, origin + x_period, x_period };
                int      dot[NX] = {};
                multiply_quad<BITS, NX, false>(x_slot, x_address, p.weight, c.segment.deltas<BITS>(0),
                                               c.segment.values(0), dot);
                multiply_quad<BITS, NX, true>(x_slot, x_address, p.weight, c.segment.deltas<BITS>(1),
                                              c.segment.values(1), dot);
#pragma unroll
                for (int i = 0; i < NX; i++) {
                    sum[i] = fmaf(c.segment.scale(), static_cast<float>(dot[i]), sum[i]);
                }
            }
        }

        const int own = c.own, steps = c.steps, matrix = c.matrix, row = c.row;
        x_cursor  x_slot = { c.at, origin + x_period, x_period };
        int       step   = 0;
        bool      more;
        do {
            int to = step + DEPTH;
            more   = to < steps;
            if (!more) {
                if (lane == 0) {
#pragma unroll
                    for (int i = 0; i < NX; i++) {
                        residual[i] = row >= 0 && (NX == 1 || column + i < p.n_columns)
                                          ? residual_at<true>(p, { matrix, row, true }, column + i)
                                          : 0.0f;
                    }
                }
                c  = begin_row(ahead);
                to = 0;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (step + d < own) {
                    groups[d].multiply(x_slot, x_address, p.weight, sum);
                }
                load(groups[d], c, to + d);
            }
            step += DEPTH;
        } while (more);
        fetch_rest(c);
        ahead = fetch();

        const sparse_task t = { matrix, row, true };
#pragma unroll
        for (int i = 0; i < NX; i++) {
            const float y = lanes_sum(sum[i], lanes) * (V::UNIT * s.scales[i]);
            if (p.silu_mul && matrix == 0) {
                gate[i] = y;
            } else if (lane == 0 && row >= 0 && (NX == 1 || column + i < p.n_columns)) {
                store_result<true>(p, t, column + i, y, gate[i], residual[i]);
            }
        }
    }
}

// ---- launch ----

template <typename V, int BITS, int NX, int THREADS, int DEPTH>
cudaError_t launch_quantized_config(quantized_launch & p, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int blocks =
        std::min(device.multiprocessors, p.n_warp_rows); // one per multiprocessor: x is in shared memory once
    const int warp_rows = (p.n_warp_rows + blocks - 1) / blocks;
    const int warps     = warps_for(warp_rows, THREADS / 48, THREADS / 32);
    set_quantized_weights(p.weight, BITS);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.norm_weight) |
                                static_cast<uintptr_t>(p.ldx * 4);
    p.aligned   = p.cols % 4 == 0 && addresses % 16 == 0;
    p.width     = (p.modulus + 1) / 32;
    p.lane_bits = quantized_lane_bits(p.lanes);
    // reads at rows that are this far apart are from banks of their own
    p.rows_apart         = ((p.width * p.lanes + 31) / 32 + 31 - p.lanes % 32) / 32 * 32 + p.lanes % 32;
    p.rows_of_warp       = (p.rows_apart + warps - 1) / warps;
    p.again_of_warp      = (p.overshoot / 32 + warps - 1) / warps;
    int64_t       nbytes = quantized_shared_nbytes(p, NX);
    const int32_t step   = static_cast<int32_t>(quantized_column_words(p.width, p.lanes));
    p.column_step        = NX > 1 && nbytes + step * 4 <= device.shared_nbytes ? step : 0;
    p.sums_at            = step + p.column_step;
    nbytes += p.column_step * 4;
    return launch_sparse(sparse_quantized_kernel<V, BITS, NX, THREADS, DEPTH>, p, warps * 32, nbytes, blocks, grid_y,
                         stream);
}

template <typename V, int BITS>
cudaError_t launch_quantized_bits(quantized_launch & p, int nx, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    switch (nx) {
        case 1:
            // rows for 16 warps only: each has more of its runs in flight
            if (p.n_warp_rows <= 16 * device.multiprocessors) {
                return launch_quantized_config<V, BITS, 1, 512, 4>(p, grid_y, stream);
            }
            // a third group ahead where there are registers for it and runs are long (deltas of 3 bits)
            return launch_quantized_config < V, BITS, 1, 768, V::WORDS == 4 && BITS == 3 ? 3 : 2 > (p, grid_y, stream);
        case 2:  return launch_quantized_config<V, BITS, 2, 768, 2>(p, grid_y, stream);
        default: return launch_quantized_config<V, BITS, 4, 512, 2>(p, grid_y, stream);
    }
}

template <typename V>
cudaError_t launch_quantized(quantized_launch & p, int delta_bits, int nx, int grid_y, cudaStream_t stream) {
    switch (delta_bits) {
        case 3:  return launch_quantized_bits<V, 3>(p, nx, grid_y, stream);
        case 4:  return launch_quantized_bits<V, 4>(p, nx, grid_y, stream);
        default: return launch_quantized_bits<V, 8>(p, nx, grid_y, stream);
    }
}

} // namespace macko::cuda
