// y = W x for up to eight columns of x, W in the layout INLINE_DELTA or EXP_CODED (gpu-layout/row-split.h), whose runs
// of a row are interleaved. Bound by memory: what matters is how many bytes are in flight.
//
//   block   One per multiprocessor. Fills shared memory with x (one column in float32; 2, 4 or 8 columns, side by side,
//           in the type of the weights), then deals rows to its warps.
//   warp    32 / LANES rows at a time, of LANES runs each. DEPTH groups of each run are in registers while the next
//           DEPTH are on their way, across the borders of rows; the first ones are requested before x is there (before
//           the previous kernel has ended).
//   thread  Per group 8, 7 or 6 (EXP_CODED: 16) values and deltas. A dp4a gives the address of the x of entry k: the
//           base plus deltas 0 ... k times the bytes per step.
//
// Included by several .cu files, so that they compile side by side. The kernel is longer than
// other functions because its loops have to be unrolled around registers that the whole pipeline shares.
#pragma once

#include "cuda/lib/copies.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>
#include <type_traits>

namespace macko::cuda {

// Two columns or more are kept in 16 bits, as ggml's own products round x with such weights. In float32 the gathers
// from shared memory would take longer than the weights from global memory, and two columns of a wide matrix would not
// fit.
template <typename T, int NX> using x_type = std::conditional_t<(NX > 1), value16<T>, float>;
template <typename X, int NX> struct alignas(sizeof(X) * NX) columns {
    X v[NX];
};

// NX columns of x at a byte address of shared memory plus a constant
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

// Whether walking over the deltas gives addresses: their weights are then bytes, and count the columns beside each
// other.
template <typename T, int BITS, bool BANK_ORDER, int NX>
constexpr bool DIRECT = SHIFT<BITS, BANK_ORDER> == 0 && (x_words(NX) == 1 || (!is_exp_coded<T> && BITS < 4));
// the factor of positions beside units of 2^-SHIFT bytes of one column
template <typename T, int BITS, bool BANK_ORDER, int NX>
constexpr uint32_t SCALE = DIRECT<T, BITS, BANK_ORDER, NX> ? x_words(NX) : 1;

template <typename T, int BITS, int NX> struct group {
    group_bits<T, BITS> bits;

    static constexpr int CHAINS   = NX > 2 ? 1 : 2; // sums per column: enough to hide the latency of an addition
    static constexpr int PER_PART = group_bits<T, BITS>::ENTRIES / group_bits<T, BITS>::PARTS;

    // to: the address of entry K without the steps of the entries up to it; with x_address if DIRECT
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
    // at: the position of the first step of the group; becomes that of the next group. A position of `limit` or more is
    // `period` too large. scale: EXP_CODED, what values are multiplied with
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
    // a group of four outliers; bf16: the type of the matrix
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

// Zeros behind x, and behind the words that repeat.
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

// Fills the shared memory that does not depend on the previous kernel: zeros behind x, and the weights of the norm in
// the place of the x that they will be multiplied with (by the same threads: store_x has the same loop), in the first
// four bytes of its word.
template <int NX> __device__ __forceinline__ void fill_constants(float * xs, const row_split_launch & p) {
    fill_zeros<NX>(xs, p);
    if (p.norm_weight) {
        for (int i = static_cast<int>(threadIdx.x); i < p.cols; i += static_cast<int>(blockDim.x)) {
            copy_float(xs + i * x_words(NX), p.norm_weight + i);
        }
    }
}

// The factor of x after the weights of its norm, from the sums of squares of the warps.
__device__ __forceinline__ float norm_scale(const row_split_launch & p, const float * partial) {
    const unsigned l = threadIdx.x % 32;
    return rsqrtf(__fdividef(warp_sum(l < blockDim.x / 32 ? partial[l] : 0.0f), static_cast<float>(p.cols)) +
                  p.norm_eps);
}

// x through registers, with a norm or for several columns, where one wide store per word is faster than 4-byte copies
// (measured). In 16 bits it is the normalized x that is rounded, so its scale has to be known first, by a pass of its
// own. In float32 the scale is left to the sums.
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
    // All of a batch is requested before the first of it is stored: for all the compiler knows, x could be what is
    // stored to, and each element would wait for the one before.
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
    const bool have_all = NORM && ROUNDS && p.cols <= BATCH * step; // of x is in v
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

// Words 0 ... modulus-1 are x; the next `overshoot` words repeat the first ones. With norm_weight, x is multiplied by
// it, and the sums of squares of the warps go to partial. Ends with a barrier.
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

// n floats to shared memory, in vectors; a thread gets those that it handles in finish_x. By cp.async: in registers
// they would share a scoreboard with the sparse weights, and whoever waits for them would wait for these as well.
__device__ __forceinline__ void request_vectors(float * to, const float * from, int n) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 4; i < n; i += static_cast<int>(blockDim.x) * 4) {
        copy_16(to + i, from + i);
    }
    commit_copies();
}

// Finishes one column of x that was requested in vectors, with the weights of its norm: multiplies x by the weights,
// puts the warps' sums of squares into partial, and writes the words that repeat. Ends with a barrier.
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
        if (i < p.overshoot) { // the modulus is no multiple of 4
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

// keeps the compiler from computing a number again wherever it is used
__device__ __forceinline__ uint32_t in_register(uint32_t v) {
    asm volatile("mov.u32 %0, %0;" : "+r"(v));
    return v;
}

// Sums of NX columns over LANES lanes: lane i gets that of column i / (LANES / NX). Each exchange halves the columns of
// a lane, which takes fewer shuffles than all sums on all lanes, and the epilogues of the columns run side by side.
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

template <typename T, // of the values
          int  BITS,  // of a delta
          int  LANES, // runs per row
          bool BANK_ORDER,
          int  NX,      // columns of x
          bool GROUPED, // several matrices, or gate and up
          int  THREADS, // at most
          int  DEPTH>    // groups ahead
__global__ void __launch_bounds__(THREADS, 1) row_split_kernel(const __grid_constant__ row_split_launch p) {
    constexpr int      ROWS  = 32 / LANES; // that a warp has at a time
    constexpr uint32_t shift = SHIFT<BITS, BANK_ORDER>;
    constexpr bool     POINTERS =
        GROUPED && NX == 1 && !is_exp_coded<T>; // to the groups of each row: there are registers for them
    // what is added to the results, and where they belong, is known before they are
    constexpr bool AHEAD = !GROUPED && NX == 1;
    // warp_rows of which the lanes keep the results, to store them side by side
    constexpr int     KEPT = LANES / NX;
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
        int      tail;
    };
    const auto fetch = [&](int j) {
        const sparse_task t = task_at<GROUPED, ROWS>(p, first, stride, sub, j);
        row_start         s = { t.matrix, 0, 0, 0, 0 };
        if (t.valid && row_offset >= 0) {
            const row_split_operand & m   = p.m[t.matrix];
            const int                 row = m.row_begin + row_offset + t.row;
            s.begin                       = __ldg(m.row_ptr + row);
            s.end                         = __ldg(m.row_ptr + row + 1);
            s.tail                        = __ldg(m.tails + row);
            s.base                        = __ldg(m.bases + static_cast<int64_t>(row) * LANES + lane);
        }
        return s;
    };

    // this thread's run of a row: groups in steps begin ... end-1, then groups of outliers up to end_of_outliers
    struct cursor {
        int             matrix, slot, begin, end, end_of_outliers, steps;
        uint32_t        at;
        const uint8_t * values;
        const uint8_t * words; // EXP_CODED
    };
    const auto begin_row = [&](const row_start & s) {
        const row_span row(s.begin, s.end, s.tail);
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

    // The results of up to KEPT warp_rows, from `number` (counted per warp) on: where the one that this thread keeps
    // belongs, and what is added to it. lane % KEPT says which warp_rows it is, lane / KEPT which column.
    struct kept_result {
        float * y;
        float   added;
    };
    const auto expect_results = [&](int number) {
        const sparse_task t =
            task_at<GROUPED, ROWS>(p, first, stride, sub, (number + lane % KEPT) * (GROUPED && p.silu_mul ? 2 : 1));
        const int k = column + lane / KEPT;
        return t.valid && k < p.n_columns
                   ? kept_result{ result_at(p.m[t.matrix], k, t.row), added_to_result(p, p.m[t.matrix], k, t.row) }
                   : kept_result{ nullptr, 0.0f };
    };

    // The loads of a multiprocessor come back in order: where x takes a pass of its own for its norm, it is requested
    // before the sparse weights (measured).
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
    kept_result kept = AHEAD ? expect_results(0) : kept_result{};
    if (aligned) {
        finish_x(xs, norm_weights, partial, p);
    } else {
        fill_x<T, NX>(xs, partial, p, column);
    }
    const float scale = NX == 1 && p.norm_weight ? norm_scale(p, partial) : 1.0f;

    float result = 0.0f, gate = 0.0f; // of the warp_rows and column that this thread keeps
    for (int j = 0; first + (GROUPED && p.silu_mul ? j / 2 : j) * stride < p.n_warp_rows; j++) {
        float     sum[group<T, BITS, NX>::CHAINS][NX] = {};
        const int matrix = c.matrix, begin = c.begin, end = c.end, end_of_outliers = c.end_of_outliers, steps = c.steps;
        uint32_t  at   = c.at;
        int       step = 0;
        bool      more;
        // EXP_CODED: as a bfloat16 number behind a zero
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
        const int   number = GROUPED && p.silu_mul ? j / 2 : j;
        const bool  mine   = number % KEPT == lane % KEPT;
        if (GROUPED && p.silu_mul && j % 2 == 0) {
            gate = mine ? y : gate;
            continue;
        }
        result          = mine ? y : result;
        const bool last = first + (number + 1) * stride >= p.n_warp_rows;
        if (last || number % KEPT == KEPT - 1) {
            // only those that exist: others may be of matrices whose parameters were never read, which takes long
            if (lane % KEPT <= number % KEPT) {
                if (!AHEAD) {
                    kept = expect_results(number / KEPT * KEPT);
                }
                if (kept.y) {
                    const float v = result * scale, g = gate * scale;
                    *kept.y = (GROUPED && p.silu_mul ? v * silu(g) : v) + kept.added;
                }
            }
            if (AHEAD && !last) {
                kept = expect_results(number + 1);
            }
        }
    }
}

// ---- launch ----

template <typename T, int BITS, int LANES, bool BANK_ORDER, int NX, bool GROUPED, int THREADS, int DEPTH>
cudaError_t launch_row_split_config(row_split_launch & p, int blocks, int warps, int grid_y, cudaStream_t stream) {
    constexpr uint32_t scale = SCALE<T, BITS, BANK_ORDER, NX>, step = STEP<BITS, BANK_ORDER> * scale;
    if (is_exp_coded<T>) {
        set_exp_coded_weights(p.weight, BITS, step);
    } else {
        set_inline_delta_weights(p.weight, BITS, step);
    }
    p.x_period = static_cast<uint32_t>(p.modulus) * 4 * scale;
    p.aligned  = NX == 1 && takes_vectors(p);
    return launch_sparse(row_split_kernel<T, BITS, LANES, BANK_ORDER, NX, GROUPED, THREADS, DEPTH>, p, warps * 32,
                         row_split_shared_nbytes(p, NX), blocks, grid_y, stream);
}

// INLINE_DELTA. One column does not depend on the type of the matrix, so that F16 and BF16 share kernels.
template <typename T, int BITS, int LANES, bool BANK_ORDER>
cudaError_t launch_row_split_shape(row_split_launch & p, int nx, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    // one block per multiprocessor: x is in shared memory once
    const int  blocks    = std::min(device.multiprocessors, p.n_warp_rows);
    const int  warp_rows = (p.n_warp_rows + blocks - 1) / blocks;
    const bool grouped   = p.n_matrices > 1;
    if constexpr (LANES <= 16) {
        if (warp_rows <= 16 && nx > 1) { // for the reason given below
            return nx == 8 ? launch_row_split_config<T, BITS, LANES, BANK_ORDER, 8, true, 512, 3>(p, blocks, 16, grid_y,
                                                                                                  stream)
                   : nx == 4 ? launch_row_split_config<T, BITS, LANES, BANK_ORDER, 4, true, 512, 4>(p, blocks, 16,
                                                                                                    grid_y, stream)
                             : launch_row_split_config<T, BITS, LANES, BANK_ORDER, 2, true, 512, 4>(p, blocks, 16,
                                                                                                    grid_y, stream);
        }
    }
    if (nx == 8) { // 8 sums and 8 x per thread: no registers for more groups ahead
        return launch_row_split_config<T, BITS, LANES, BANK_ORDER, 8, true, 1024, 1>(
            p, blocks, warps_for(warp_rows, 24, 32), grid_y, stream);
    }
    if (nx == 4) {
        return launch_row_split_config<T, BITS, LANES, BANK_ORDER, 4, true, 1024, 2>(
            p, blocks, warps_for(warp_rows, 24, 32), grid_y, stream);
    }
    if (nx == 2) {
        return launch_row_split_config<T, BITS, LANES, BANK_ORDER, 2, true, 1024, 2>(
            p, blocks, warps_for(warp_rows, 24, 32), grid_y, stream);
    }
    // Where rows are few, each warp has more of its runs in flight, as their latency is all there is. (Matrices whose
    // rows suit 32 lanes with deltas of more than 2 bits have more rows than that.) Else 32 warps with 2 groups ahead
    // or 24 with 3 have 40 KB in flight.
    if constexpr (LANES <= 16 || BITS <= 2) {
        if (warp_rows <= 16) {
            return grouped ? launch_row_split_config<T, BITS, LANES, BANK_ORDER, 1, true, 512, 5>(p, blocks, 16, grid_y,
                                                                                                  stream)
                           : launch_row_split_config<T, BITS, LANES, BANK_ORDER, 1, false, 512, 5>(p, blocks, 16,
                                                                                                   grid_y, stream);
        }
    }
    constexpr bool AT_MOST_24 = BITS < 6 && LANES == 16;
    const int      warps      = AT_MOST_24 ? warps_for(warp_rows, 18, 24) : warps_for(warp_rows, 20, 32);
    if constexpr (!AT_MOST_24) {
        if (warps > 24) {
            return grouped ? launch_row_split_config<T, BITS, LANES, BANK_ORDER, 1, true, 1024, 2>(p, blocks, warps,
                                                                                                   grid_y, stream)
                           : launch_row_split_config<T, BITS, LANES, BANK_ORDER, 1, false, 1024, 2>(p, blocks, warps,
                                                                                                    grid_y, stream);
        }
    }
    return grouped
               ? launch_row_split_config<T, BITS, LANES, BANK_ORDER, 1, true, 768, 3>(p, blocks, warps, grid_y, stream)
               : launch_row_split_config<T, BITS, LANES, BANK_ORDER, 1, false, 768, 3>(p, blocks, warps, grid_y,
                                                                                       stream);
}

// At most 16 warps: EXP_CODED, and several columns of INLINE_DELTA BF16 matrices
template <typename T, int BITS, int LANES, bool BANK_ORDER, int NX, bool GROUPED, int DEPTH>
cudaError_t launch_row_split_few_warps(row_split_launch & p, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const int blocks    = std::min(device.multiprocessors, p.n_warp_rows);
    const int warp_rows = (p.n_warp_rows + blocks - 1) / blocks;
    return launch_row_split_config<T, BITS, LANES, BANK_ORDER, NX, GROUPED, 512, DEPTH>(
        p, blocks, warp_rows <= 16 ? 16 : warps_for(warp_rows, 14, 16), grid_y, stream);
}

// EXP_CODED: 36 KB are in flight, of 16 warps with three groups ahead. For four columns and more there are no registers
// for that. One column does not depend on X, the type of the matrix.
template <typename X, int BITS>
cudaError_t launch_exp_coded_shape(row_split_launch & p, int nx, int grid_y, cudaStream_t stream) {
    constexpr int  LANES      = EXP_CODED_LANES;
    constexpr bool BANK_ORDER = BITS < 6;
    switch (nx) {
        case 8: return launch_row_split_few_warps<exp_coded<X>, BITS, LANES, BANK_ORDER, 8, true, 2>(p, grid_y, stream);
        case 4: return launch_row_split_few_warps<exp_coded<X>, BITS, LANES, BANK_ORDER, 4, true, 2>(p, grid_y, stream);
        case 2: return launch_row_split_few_warps<exp_coded<X>, BITS, LANES, BANK_ORDER, 2, true, 3>(p, grid_y, stream);
        default:
            return p.n_matrices > 1
                       ? launch_row_split_few_warps<exp_coded<__half>, BITS, LANES, BANK_ORDER, 1, true, 3>(p, grid_y,
                                                                                                            stream)
                       : launch_row_split_few_warps<exp_coded<__half>, BITS, LANES, BANK_ORDER, 1, false, 3>(p, grid_y,
                                                                                                             stream);
    }
}

// several columns of INLINE_DELTA BF16 matrices
template <int BITS, bool BANK_ORDER>
cudaError_t launch_inline_delta_bf16_shape(row_split_launch & p, int nx, int grid_y, cudaStream_t stream) {
    using T             = inline_delta<__nv_bfloat16>;
    constexpr int LANES = inline_delta_built_lanes(GGML_MACKO_TYPE_BF16, BITS, BANK_ORDER).least;
    switch (nx) {
        case 8:  return launch_row_split_few_warps<T, BITS, LANES, BANK_ORDER, 8, true, 3>(p, grid_y, stream);
        case 4:  return launch_row_split_few_warps<T, BITS, LANES, BANK_ORDER, 4, true, 4>(p, grid_y, stream);
        default: return launch_row_split_few_warps<T, BITS, LANES, BANK_ORDER, 2, true, 4>(p, grid_y, stream);
    }
}

// INLINE_DELTA: several columns of F16 matrices, and one of any
template <int BITS, bool BANK_ORDER>
cudaError_t launch_inline_delta_bits(row_split_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    const auto launch = [&](auto n) {
        constexpr int LANES = decltype(n)::value;
        if constexpr (inline_delta_built_lanes(GGML_MACKO_TYPE_F16, BITS, BANK_ORDER).has(LANES)) {
            return launch_row_split_shape<inline_delta<__half>, BITS, LANES, BANK_ORDER>(p, nx, grid_y, stream);
        } else {
            return cudaErrorNotSupported; // no matrix is kept like this (inline_delta_built_lanes)
        }
    };
    switch (lanes) {
        case 8:  return launch(std::integral_constant<int, 8>());
        case 16: return launch(std::integral_constant<int, 16>());
        default: return launch(std::integral_constant<int, 32>());
    }
}

} // namespace macko::cuda
