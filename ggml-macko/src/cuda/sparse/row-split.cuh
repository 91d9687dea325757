// y = W x for up to eight columns of x, with W in the layout INLINE_DELTA or EXP_CODED (gpu-layout/row-split.h). Memory
// bandwidth limits it, so the kernel keeps as many bytes in flight as it can.
//
// Several .cu files include this file, so that its kernels compile in parallel. The kernel is longer than other
// functions because its unrolled loops share the registers of the whole pipeline.
#pragma once

#include "cuda/lib/copies.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>
#include <type_traits>

namespace macko::cuda {

// Two or more columns are stored in 16 bits; ggml's own products round x in the same way for such weights. In float32,
// gathers from shared memory would take longer than weights from global memory, and two columns of a wide matrix would
// not fit.
template <typename T, int NX> using x_type = std::conditional_t<(NX > 1), value16<T>, float>;
template <typename X, int NX> struct alignas(sizeof(X) * NX) columns {
    X v[NX];
};

// Loads NX columns of x from a byte address of shared memory plus a constant.
template <typename T, int NX, int OFFSET> __device__ __forceinline__ void load_x(float (&x)[NX], uint32_t address) {
    if constexpr (NX == 1) {
        asm volatile("ld.shared.f32 %0, [%1+%2];" : "=f"(x[0]) : "r"(address), "n"(OFFSET));
    } else {
        uint32_t w[NX / 2];
        if constexpr (NX == 2) {
            asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(w[0]) : "r"(address), "n"(OFFSET));
        } else if constexpr (NX == 4) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(w[0]), "=r"(w[1]) : "r"(address), "n"(OFFSET));
        } else {
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
                         : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                         : "r"(address), "n"(OFFSET));
        }
#pragma unroll
        for (int c = 0; c < NX; c++) {
            x[c] = c % 2 ? half_word<true>(value16<T>(), w[c / 2]) : half_word<false>(value16<T>(), w[c / 2]);
        }
    }
}

// True if dp4a yields byte addresses directly: its weights are then scaled by the bytes per step, for all columns.
template <typename T, int BITS, bool BANK_ORDER, int NX>
constexpr bool DIRECT = SHIFT<BITS, BANK_ORDER> == 0 && (x_words(NX) == 1 || (!is_exp_coded<T> && BITS < 4));
// The factor of positions that are counted in units of 2^-SHIFT bytes of one column.
template <typename T, int BITS, bool BANK_ORDER, int NX>
constexpr uint32_t SCALE = DIRECT<T, BITS, BANK_ORDER, NX> ? x_words(NX) : 1;

// A group of entries in registers, which is multiplied by NX columns of x.
template <typename T, int BITS, int NX> struct group {
    group_bits<T, BITS> bits;

    static constexpr int CHAINS   = NX > 2 ? 1 : 2; // sums per column, to hide the latency of an addition
    static constexpr int PER_PART = group_bits<T, BITS>::ENTRIES / group_bits<T, BITS>::PARTS;

    // to: the address of entry K without the steps of the entries up to it; includes x_address if DIRECT
    template <bool BANK_ORDER, int K>
    __device__ __forceinline__ void add(uint32_t to, uint32_t x_address, uint32_t scale,
                                        float (&sum)[CHAINS][NX]) const {
        constexpr uint32_t shift   = SHIFT<BITS, BANK_ORDER>;
        constexpr int      words   = x_words(NX);
        const uint32_t     address = DIRECT<T, BITS, BANK_ORDER, NX> ? to : x_address + (to >> shift) * words;
        float              x[NX];
        load_x<T, NX, K % PER_PART * static_cast<int>(STEP<BITS, BANK_ORDER> >> shift) * words>(x, address);
#pragma unroll
        for (int c = 0; c < NX; c++) {
            sum[K % CHAINS][c] = fmaf(bits.template get<K>(scale), x[c], sum[K % CHAINS][c]);
        }
    }
    // at: the position of the first step of the group; the call advances it to the next group. A position of `limit` or
    // more is `period` too large. scale: the factor of EXP_CODED values
    template <bool BANK_ORDER>
    __device__ __forceinline__ void multiply(uint32_t & at, uint32_t limit, uint32_t period, uint32_t x_address,
                                             const uint32_t * weight, uint32_t scale, float (&sum)[CHAINS][NX]) const {
        multiply_part<BANK_ORDER, 0>(at, limit, period, x_address, weight, scale, sum);
        if constexpr (group_bits<T, BITS>::PARTS == 2) {
            multiply_part<BANK_ORDER, 1>(at, limit, period, x_address, weight, scale, sum);
        }
    }
    template <bool BANK_ORDER, int PART>
    __device__ __forceinline__ void multiply_part(uint32_t & at, uint32_t limit, uint32_t period, uint32_t x_address,
                                                  const uint32_t * weight, uint32_t scale,
                                                  float (&sum)[CHAINS][NX]) const {
        at = bits.template walk<PART>(at, weight, [&](auto k, uint32_t to) {
            add<BANK_ORDER, decltype(k)::value>(to, x_address, scale, sum);
        }) + PER_PART * STEP<BITS, BANK_ORDER> * SCALE<T, BITS, BANK_ORDER, NX>;
        if (BANK_ORDER && at >= limit) {
            at -= period;
        }
    }
    // Multiplies a group of four outliers. bf16: the type of the matrix
    __device__ __forceinline__ void multiply_outliers(uint32_t x_address, float inverse, bool bf16,
                                                      float (&sum)[CHAINS][NX]) const {
        bits.for_each_outlier([&](int k, uint32_t column, uint32_t value) {
            const float weight = is_exp_coded<T>
                                     ? __uint_as_float(value)
                                     : __uint_as_float(widened(static_cast<uint16_t>(value), bf16)) * inverse;
            float       x[NX];
            load_x<T, NX, 0>(x, x_address + column * (4 * x_words(NX)));
#pragma unroll
            for (int c = 0; c < NX; c++) {
                sum[k % CHAINS][c] = fmaf(weight, x[c], sum[k % CHAINS][c]);
            }
        });
    }
};

// ---- x into shared memory ----

// Writes zeros after x and after the words that repeat.
template <int NX> __device__ __forceinline__ void fill_zeros(float * xs, const row_split_launch & p) {
    constexpr int words   = x_words(NX);
    const int     threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    for (int i = p.cols * words + thread; i < p.modulus * words; i += threads) {
        xs[i] = 0.0f;
    }
    for (int i = (p.modulus + p.cols) * words + thread; i < (p.modulus + p.overshoot) * words; i += threads) {
        xs[i] = 0.0f;
    }
}

// Fills the shared memory that does not depend on the previous kernel: zeros after x, and the weights of the norm. Each
// weight is stored in the first four bytes of the word of x that it will be multiplied by; the same thread does that,
// because store_x has the same loop.
template <int NX> __device__ __forceinline__ void fill_constants(float * xs, const row_split_launch & p) {
    fill_zeros<NX>(xs, p);
    if (p.norm_weight) {
        for (int i = static_cast<int>(threadIdx.x); i < p.cols; i += static_cast<int>(blockDim.x)) {
            copy_float(xs + i * x_words(NX), p.norm_weight + i);
        }
    }
}

// The factor of x that remains after the weights of its norm, from the warps' sums of squares.
__device__ __forceinline__ float norm_scale(const row_split_launch & p, const float * partial) {
    const unsigned l = threadIdx.x % 32;
    return rsqrtf(__fdividef(warp_sum(l < blockDim.x / 32 ? partial[l] : 0.0f), static_cast<float>(p.cols)) +
                  p.norm_eps);
}

// Writes x to shared memory through registers, for a norm or for several columns: one wide store per word is faster
// than 4-byte copies (measured). In 16 bits, the normalized x is rounded, so a first pass computes its scale. In
// float32, the scale is applied to the sums.
template <typename T, int NX, bool NORM>
__device__ __forceinline__ void store_x(float * xs, float * partial, const row_split_launch & p, const float * x,
                                        int column) {
    using word                 = columns<x_type<T, NX>, NX>;
    constexpr bool ROUNDS      = sizeof(x_type<T, NX>) == 2;
    const auto     x_at        = [&](int c, int i) { return c < p.n_columns - column ? x[c * p.ldx + i] : 0.0f; };
    float          squares[NX] = {}, scale[NX];
    const auto     sum_squares = [&] {
#pragma unroll
        for (int c = 0; c < NX; c++) {
            const float sum = warp_sum(squares[c]);
            if (threadIdx.x % 32 == 0) {
                partial[c * 32 + threadIdx.x / 32] = sum;
            }
        }
    };
    // Requests all elements of a batch before it stores the first: the compiler must assume that a store changes x, so
    // each load would otherwise wait for the store before it.
    constexpr int BATCH  = NX == 8 ? 2 : 4;
    const int     thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    float         v[BATCH][NX];
    const auto    fetch = [&](int begin) {
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
#pragma unroll
            for (int c = 0; c < NX; c++) {
                v[k][c] = begin + k * step < p.cols ? x_at(c, begin + k * step) : 0.0f;
            }
        }
    };
    if (NORM && ROUNDS) {
#pragma unroll 1
        for (int begin = thread; begin < p.cols; begin += BATCH * step) {
            fetch(begin);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
#pragma unroll
                for (int c = 0; c < NX; c++) {
                    squares[c] = fmaf(v[k][c], v[k][c], squares[c]);
                }
            }
        }
        sum_squares();
        __syncthreads();
#pragma unroll
        for (int c = 0; c < NX; c++) {
            scale[c] = norm_scale(p, partial + c * 32);
        }
    }
    const bool have_all = NORM && ROUNDS && p.cols <= BATCH * step; // v holds all of x
#pragma unroll 1
    for (int begin = thread; begin < p.cols; begin += BATCH * step) {
        if (!have_all) {
            fetch(begin);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = begin + k * step;
            if (i >= p.cols) {
                break;
            }
            const float weight = NORM ? xs[i * x_words(NX)] : 1.0f;
            word        w;
#pragma unroll
            for (int c = 0; c < NX; c++) {
                if (NORM && ROUNDS) {
                    v[k][c] *= scale[c] * weight;
                } else if (NORM) {
                    squares[c] = fmaf(v[k][c], v[k][c], squares[c]);
                    v[k][c] *= weight;
                }
                round_to(&w.v[c], v[k][c]);
            }
            reinterpret_cast<word *>(xs)[i] = w;
            if (i < p.overshoot) {
                reinterpret_cast<word *>(xs)[p.modulus + i] = w;
            }
        }
    }
    if (NORM && !ROUNDS) {
        sum_squares();
    }
}

// Writes x to words 0 ... modulus-1; the next `overshoot` words repeat the first words. With norm_weight, multiplies x
// by it and writes the warps' sums of squares to partial. Ends with a barrier.
template <typename T, int NX>
__device__ __forceinline__ void fill_x(float * xs, float * partial, const row_split_launch & p, int column) {
    const float * x       = p.x + column * p.ldx;
    const int     threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    if (NX == 1 && !p.norm_weight) {
        for (int i = thread; i < p.cols; i += threads) {
            copy_float(xs + i, x + i);
        }
        for (int i = thread; i < min(p.overshoot, p.cols); i += threads) {
            copy_float(xs + p.modulus + i, x + i);
        }
        wait_for_copies();
    } else if (p.norm_weight) {
        wait_for_copies(); // copies of the norm's weights
        store_x<T, NX, true>(xs, partial, p, x, column);
    } else {
        store_x<T, NX, false>(xs, partial, p, x, column);
    }
    __syncthreads();
}

// Requests n floats in vectors; each thread requests those that it handles in finish_x. Uses cp.async: loads to
// registers would share a scoreboard with the sparse weights, so waiting for one would wait for the other.
__device__ __forceinline__ void request_vectors(float * to, const float * from, int n) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < n; i += static_cast<int>(blockDim.x) * 4) {
        copy_16(to + i, from + i);
    }
    commit_copies();
}

// Finishes one column of x, which was requested in vectors with the weights of its norm: multiplies x by the weights,
// writes the warps' sums of squares to partial, and writes the words that repeat. Ends with a barrier.
__device__ __forceinline__ void finish_x(float * xs, const float * weights, float * partial,
                                         const row_split_launch & p) {
    const int  thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x) * 4;
    const bool norm    = p.norm_weight;
    float      squares = 0.0f;
    wait_for_committed_copies();
#pragma unroll 1
    for (int i = thread * 4; i < (norm ? p.cols : p.overshoot); i += step) {
        float4 v = *reinterpret_cast<const float4 *>(xs + i);
        if (norm) {
            const float4 w                      = *reinterpret_cast<const float4 *>(weights + i);
            squares                             = add_squares(squares, v);
            v                                   = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
            *reinterpret_cast<float4 *>(xs + i) = v;
        }
        if (i < p.overshoot) { // the modulus is not a multiple of 4
            const float again[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (i + e < p.overshoot) {
                    xs[p.modulus + i + e] = again[e];
                }
            }
        }
    }
    if (norm) {
        squares = warp_sum(squares);
        if (thread % 32 == 0) {
            partial[thread / 32] = squares;
        }
    }
    __syncthreads();
}

// ---- the kernel ----

// Keeps a number in a register: the compiler would otherwise compute it again at each use.
__device__ __forceinline__ uint32_t in_register(uint32_t v) {
    asm volatile("mov.u32 %0, %0;" : "+r"(v));
    return v;
}

// Sums NX columns over LANES lanes; lane i gets the sum of column i / (LANES / NX). Each exchange halves the columns of
// a lane. This takes fewer shuffles than all sums on all lanes, and the epilogues of the columns run in parallel.
template <int LANES, int NX> __device__ __forceinline__ float sum_columns(float (&v)[NX], int lane) {
    if constexpr (NX == 1) {
        return warp_sum<LANES>(v[0]);
    } else {
        const bool upper = lane & LANES / 2;
        float      half[NX / 2];
#pragma unroll
        for (int c = 0; c < NX / 2; c++) {
            half[c] =
                (upper ? v[c + NX / 2] : v[c]) + __shfl_xor_sync(FULL_WARP, upper ? v[c] : v[c + NX / 2], LANES / 2);
        }
        return sum_columns<LANES / 2, NX / 2>(half, lane);
    }
}

template <typename T,      // layout and type of the values: inline_delta<...> or exp_coded<...>
          int  BITS,       // bits of a delta
          int  LANES,      // runs per row: 8, 16 or 32
          bool BANK_ORDER, // entries are in the order of shared-memory banks, not of columns
          int  NX,         // columns of x: 1, 2, 4 or 8
          bool BATCHED,    // several matrices, or gate and up
          int  THREADS,    // maximum threads of a block
          int  DEPTH>       // groups of a run that are requested ahead
__global__ void __launch_bounds__(THREADS, 1)
    row_split_kernel(const __grid_constant__ row_split_launch p) { // matrices, x, epilogue, dp4a weights
    // One block per multiprocessor:
    //
    //   shared memory   | sums of squares | x, `modulus` words | its first `overshoot` words again |
    //                   a word: one column in float32, or 2, 4 or 8 columns side by side in the type of the weights
    //
    //   warp            32 / LANES rows at a time; its rows are `stride` warp_rows apart
    //                   row r      | lane 0: run 0     | lane 1: run 1 | ... | lane LANES - 1 |
    //                   row r + 1  | lane LANES: run 0 | ...
    //
    //   thread          | now: DEPTH groups of its run | next: DEPTH groups on their way |, across the ends of rows
    //   group           8, 7 or 6 (EXP_CODED: 16) values and deltas; a dp4a adds deltas 0 ... k to the base, which
    //                   gives the address of the x of entry k
    //
    // Phases: request the first groups; wait for the previous kernel; fill shared memory with x; for each row request
    // the next groups, multiply, multiply the outliers, sum over the lanes; store the results of several rows together.
    constexpr int      ROWS  = 32 / LANES; // rows of a warp at a time
    constexpr uint32_t shift = SHIFT<BITS, BANK_ORDER>;
    // whether there are registers for pointers to the groups of each row
    constexpr bool POINTERS = BATCHED && NX == 1 && !is_exp_coded<T>;
    // whether the destinations of results are found before the results are computed
    constexpr bool AHEAD = !BATCHED && NX == 1;
    // warp_rows whose results the lanes hold until they store them together
    constexpr int     HELD = LANES / NX;
    extern __shared__ __align__(16) float shared_words[];
    float *                               partial = shared_words;
    float *                               xs      = partial + NX * 32;

    const int lane   = threadIdx.x % LANES;
    const int sub    = threadIdx.x % 32 / LANES;
    const int first  = blockIdx.x + gridDim.x * (threadIdx.x / 32);
    const int stride = gridDim.x * (blockDim.x / 32);
    const int column = blockIdx.y * NX;

    const uint32_t x_address = shared_address(xs);
    const uint32_t origin    = DIRECT<T, BITS, BANK_ORDER, NX> ? x_address : 0;
    const uint32_t limit     = in_register(origin + p.x_period); // where x repeats

    const bool aligned      = NX == 1 && p.aligned;
    float *    norm_weights = xs + ((p.modulus + p.overshoot + 3) & ~3);
    const int  row_offset   = p.expert_ids ? expert_row(p, column) : 0;

    struct row_start {
        int      matrix, begin, end;
        uint32_t base;
        int      trailing;
    };
    const auto fetch = [&](int j) {
        const sparse_task t = task_at<BATCHED, ROWS>(p, first, stride, sub, j);
        row_start         s = { t.matrix, 0, 0, 0, 0 };
        if (t.valid && row_offset >= 0) {
            const row_split_operand & m   = p.m[t.matrix];
            const int                 row = m.row_begin + row_offset + t.row;
            s.begin                       = __ldg(m.row_ptr + row);
            s.end                         = __ldg(m.row_ptr + row + 1);
            s.trailing                    = __ldg(m.trailing + row);
            s.base                        = __ldg(m.bases + static_cast<int64_t>(row) * LANES + lane);
        }
        return s;
    };

    // This thread's run of a row: groups in steps begin ... end - 1, then groups of outliers up to end_of_outliers.
    struct cursor {
        int             matrix, slot, begin, end, end_of_outliers, steps;
        uint32_t        at;
        const uint8_t * values;
        const uint8_t * words; // EXP_CODED
    };
    const auto begin_row = [&](const row_start & s) {
        const row_span row(s.begin, s.end, s.trailing);
        cursor         c;
        c.matrix          = s.matrix;
        c.slot            = row.slot(lane, LANES, 0);
        c.begin           = row.first_step(lane);
        c.end             = row.end_step(lane, LANES);
        c.end_of_outliers = row.end_of_outliers(lane, LANES);
        c.steps           = row.end_of_outliers(0, LANES);
        if constexpr (is_exp_coded<T>) {
            c.values = group_bits<T, BITS>::values_at(p.m[s.matrix].groups, c.slot);
            c.words  = group_bits<T, BITS>::words_at(p.m[s.matrix].groups, c.slot);
        } else if (POINTERS) {
            c.values = p.m[s.matrix].groups + c.slot * INLINE_DELTA_GROUP_NBYTES;
            c.slot   = 0;
        }
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            c.steps = max(c.steps, __shfl_xor_sync(FULL_WARP, c.steps, offset));
        }
        c.at = origin + (s.base * 4 << shift) * SCALE<T, BITS, BANK_ORDER, NX>;
        return c;
    };

    group<T, BITS, NX> now[DEPTH];
    const auto         load = [&](group<T, BITS, NX> & g, const cursor & c, int step) {
        if (step >= c.begin && step < c.end_of_outliers) {
            if constexpr (is_exp_coded<T>) {
                const int64_t from = static_cast<int64_t>(step) * (LANES * group_bits<T, BITS>::NBYTES);
                g.bits.load(c.values + from, c.words + from);
            } else {
                g.bits.load(POINTERS ? c.values : p.m[c.matrix].groups, c.slot + step * LANES);
            }
        }
    };

    // The destination of the result that this thread holds, and the number added to it. Results of up to HELD warp_rows
    // are held, from `number` (counted per warp) on: lane % HELD selects the warp_rows, lane / HELD the column.
    struct destination {
        float * y;
        float   added;
    };
    const auto find_destination = [&](int number) {
        const sparse_task t =
            task_at<BATCHED, ROWS>(p, first, stride, sub, (number + lane % HELD) * (BATCHED && p.silu_mul ? 2 : 1));
        const int k = column + lane / HELD;
        return t.valid && k < p.n_columns
                   ? destination{ result_at(p.m[t.matrix], k, t.row), added_to_result(p, p.m[t.matrix], k, t.row) }
                   : destination{ nullptr, 0.0f };
    };

    // The loads of a multiprocessor return in order. If x needs a separate pass for its norm, x is requested before the
    // sparse weights (measured).
    const bool      x_first = aligned && p.norm_weight;
    const row_start start   = fetch(0);
    if (x_first) {
        request_vectors(norm_weights, p.norm_weight, p.cols);
    }
    const auto request_x = [&] {
        cuda_allow_next();
        cuda_wait_for_previous();
        request_vectors(xs, p.x + column * p.ldx, p.cols);
    };
    if (x_first) {
        request_x();
    }
    cursor c = begin_row(start);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        load(now[d], c, d);
    }
    row_start ahead = fetch(1);
    if (aligned) {
        if (static_cast<int>(threadIdx.x) < p.modulus - p.cols) {
            xs[p.cols + threadIdx.x] = 0.0f;
        }
        if (!x_first) {
            request_x();
        }
    } else {
        fill_constants<NX>(xs, p);
        cuda_allow_next();
        cuda_wait_for_previous();
    }
    destination to_y = AHEAD ? find_destination(0) : destination{};
    if (aligned) {
        finish_x(xs, norm_weights, partial, p);
    } else {
        fill_x<T, NX>(xs, partial, p, column);
    }
    const float scale = NX == 1 && p.norm_weight ? norm_scale(p, partial) : 1.0f;

    float result = 0.0f, gate = 0.0f; // of the warp_rows and the column that this thread holds
    for (int j = 0; first + (BATCHED && p.silu_mul ? j / 2 : j) * stride < p.n_warp_rows; j++) {
        float     sum[group<T, BITS, NX>::CHAINS][NX] = {};
        const int matrix = c.matrix, begin = c.begin, end = c.end, end_of_outliers = c.end_of_outliers, steps = c.steps;
        uint32_t  at   = c.at;
        int       step = 0;
        bool      more;
        // EXP_CODED: a bfloat16 number in the upper half of a word
        const uint32_t values_scale = is_exp_coded<T> ? __float_as_uint(p.m[matrix].power) : 0;
        do {
            group<T, BITS, NX> next[DEPTH];
            int                to = step + DEPTH;
            more                  = to < steps;
            if (!more) {
                c     = begin_row(ahead);
                ahead = fetch(j + 2);
                to    = 0;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                load(next[d], c, to + d);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (step + d >= begin && step + d < end) {
                    now[d].template multiply<BANK_ORDER>(at, limit, p.x_period, x_address, p.weight, values_scale, sum);
                }
            }
            if (step + DEPTH > end && step < end_of_outliers) {
                const float inverse = p.m[matrix].inverse;
                const bool  bf16    = NX == 1 ? p.m[matrix].bf16 : is_bf16<T>;
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    if (step + d >= end && step + d < end_of_outliers) {
                        now[d].multiply_outliers(x_address, inverse, bf16, sum);
                    }
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                now[d] = next[d];
            }
            step += DEPTH;
        } while (more);

        float total[NX];
#pragma unroll
        for (int k = 0; k < NX; k++) {
            total[k] = NX > 2 ? sum[0][k] : sum[0][k] + sum[NX > 2 ? 0 : 1][k];
        }
        const float y      = sum_columns<LANES, NX>(total, lane) * (is_exp_coded<T> ? 1.0f : p.m[matrix].power);
        const int   number = BATCHED && p.silu_mul ? j / 2 : j;
        const bool  mine   = number % HELD == lane % HELD;
        if (BATCHED && p.silu_mul && j % 2 == 0) {
            gate = mine ? y : gate;
            continue;
        }
        result          = mine ? y : result;
        const bool last = first + (number + 1) * stride >= p.n_warp_rows;
        if (last || number % HELD == HELD - 1) {
            // only results that exist: others may belong to matrices whose parameters were never read, which takes long
            if (lane % HELD <= number % HELD) {
                if (!AHEAD) {
                    to_y = find_destination(number / HELD * HELD);
                }
                if (to_y.y) {
                    const float v = result * scale, g = gate * scale;
                    *to_y.y = (BATCHED && p.silu_mul ? v * silu(g) : v) + to_y.added;
                }
            }
            if (AHEAD && !last) {
                to_y = find_destination(number + 1);
            }
        }
    }
}

// ---- launch ----

template <typename T, int BITS, int LANES, bool BANK_ORDER, int NX, bool BATCHED, int THREADS, int DEPTH>
cudaError_t launch_row_split_kernel(row_split_launch & p, int blocks, int warps, int grid_y, cudaStream_t stream) {
    constexpr uint32_t scale = SCALE<T, BITS, BANK_ORDER, NX>, step = STEP<BITS, BANK_ORDER> * scale;
    set_weights<T>(p.weight, BITS, step);
    p.x_period = static_cast<uint32_t>(p.modulus) * 4 * scale;
    p.aligned  = NX == 1 && takes_vectors(p);
    return launch_sparse(row_split_kernel<T, BITS, LANES, BANK_ORDER, NX, BATCHED, THREADS, DEPTH>, p, warps * 32,
                         row_split_shared_nbytes(p, NX), blocks, grid_y, stream);
}

// The launches of one layout, type and width of deltas. One block per multiprocessor: x is in shared memory once.
template <typename T, int BITS, int LANES, bool BANK_ORDER> struct row_split_launcher {
    row_split_launch & p;
    int                grid_y;
    cudaStream_t       stream;
    int                blocks    = 0;
    int                warp_rows = 0; // of a block

    cudaError_t find_blocks() {
        cuda_device_info device;
        CUDA_TRY(cuda_current_device(&device));
        blocks    = std::min(device.multiprocessors, p.n_warp_rows);
        warp_rows = (p.n_warp_rows + blocks - 1) / blocks;
        return cudaSuccess;
    }
    // THREADS: of a block, at most; DEPTH: groups ahead. One column does not depend on the type of the matrix, so F16
    // and BF16 matrices of EXP_CODED share kernels.
    template <int NX, int THREADS, int DEPTH> cudaError_t launch(int warps) const {
        using V = std::conditional_t<NX == 1 && is_exp_coded<T>, exp_coded<__half>, T>;
        if constexpr (NX == 1) {
            if (p.n_matrices == 1) {
                return launch_row_split_kernel<V, BITS, LANES, BANK_ORDER, NX, false, THREADS, DEPTH>(p, blocks, warps,
                                                                                                      grid_y, stream);
            }
        }
        return launch_row_split_kernel<V, BITS, LANES, BANK_ORDER, NX, true, THREADS, DEPTH>(p, blocks, warps, grid_y,
                                                                                             stream);
    }
    // For EXP_CODED, and several columns of INLINE_DELTA BF16 matrices.
    template <int NX, int DEPTH> cudaError_t launch_at_most_16_warps() const {
        return launch<NX, 512, DEPTH>(warp_rows <= 16 ? 16 : warps_for(warp_rows, 14, 16));
    }
};

// INLINE_DELTA: several columns of F16 matrices, and one column of F16 or BF16 matrices.
template <int BITS, int LANES, bool BANK_ORDER>
cudaError_t launch_inline_delta_lanes(row_split_launch & p, int nx, int grid_y, cudaStream_t stream) {
    row_split_launcher<inline_delta<__half>, BITS, LANES, BANK_ORDER> l = { p, grid_y, stream };
    CUDA_TRY(l.find_blocks());
    // With few rows, latency dominates, so each warp has more of its runs in flight. (Matrices whose rows suit 32 lanes
    // with deltas of more than 2 bits have more rows than that.)
    if constexpr (LANES <= 16) {
        if (l.warp_rows <= 16 && nx > 1) {
            return nx == 8   ? l.template launch<8, 512, 3>(16)
                   : nx == 4 ? l.template launch<4, 512, 4>(16)
                             : l.template launch<2, 512, 4>(16);
        }
    }
    if (nx > 1) { // 8 sums and 8 x per thread: no registers for more groups ahead
        const int warps = warps_for(l.warp_rows, 24, 32);
        return nx == 8   ? l.template launch<8, 1024, 1>(warps)
               : nx == 4 ? l.template launch<4, 1024, 2>(warps)
                         : l.template launch<2, 1024, 2>(warps);
    }
    if constexpr (LANES <= 16 || BITS <= 2) {
        if (l.warp_rows <= 16) {
            return l.template launch<1, 512, 5>(16);
        }
    }
    // 32 warps with 2 groups ahead or 24 with 3 have 40 KB in flight
    constexpr bool AT_MOST_24 = BITS < 6 && LANES == 16;
    const int      warps      = AT_MOST_24 ? warps_for(l.warp_rows, 18, 24) : warps_for(l.warp_rows, 20, 32);
    if constexpr (!AT_MOST_24) {
        if (warps > 24) {
            return l.template launch<1, 1024, 2>(warps);
        }
    }
    return l.template launch<1, 768, 3>(warps);
}

template <int BITS, bool BANK_ORDER>
cudaError_t launch_inline_delta(row_split_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    return with_constant<8, 16, 32>(lanes, cudaErrorNotSupported, [&](auto n) {
        constexpr int LANES = decltype(n)::value;
        if constexpr (inline_delta_built_lanes(GGML_MACKO_TYPE_F16, BITS, BANK_ORDER).has(LANES)) {
            return launch_inline_delta_lanes<BITS, LANES, BANK_ORDER>(p, nx, grid_y, stream);
        } else {
            return cudaErrorNotSupported; // no matrix has this layout (inline_delta_built_lanes)
        }
    });
}

template <int BITS, bool BANK_ORDER>
cudaError_t launch_inline_delta_bf16(row_split_launch & p, int nx, int grid_y, cudaStream_t stream) {
    constexpr int LANES = inline_delta_built_lanes(GGML_MACKO_TYPE_BF16, BITS, BANK_ORDER).least;
    row_split_launcher<inline_delta<__nv_bfloat16>, BITS, LANES, BANK_ORDER> l = { p, grid_y, stream };
    CUDA_TRY(l.find_blocks());
    return nx == 8   ? l.template launch_at_most_16_warps<8, 3>()
           : nx == 4 ? l.template launch_at_most_16_warps<4, 4>()
                     : l.template launch_at_most_16_warps<2, 4>();
}

// 16 warps with three groups ahead have 36 KB in flight. Four or more columns leave no registers for that.
template <typename X, int BITS>
cudaError_t launch_exp_coded(row_split_launch & p, int nx, int grid_y, cudaStream_t stream) {
    row_split_launcher<exp_coded<X>, BITS, EXP_CODED_LANES, (BITS < 6)> l = { p, grid_y, stream };
    CUDA_TRY(l.find_blocks());
    return nx == 8   ? l.template launch_at_most_16_warps<8, 2>()
           : nx == 4 ? l.template launch_at_most_16_warps<4, 2>()
           : nx == 2 ? l.template launch_at_most_16_warps<2, 3>()
                     : l.template launch_at_most_16_warps<1, 3>();
}

} // namespace macko::cuda
