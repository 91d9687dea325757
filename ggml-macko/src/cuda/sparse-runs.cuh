// y = W x for up to eight columns of x, W in the RUNS, STRIPED or COMPACT layout (sparse-layout.h). Memory-bound: what matters is bytes in flight.
//
//   block   fills shared memory with x (1 column in float32; 2, 4 or 8, interleaved, in the type of the weights), one block per
//           SM, then deals rows to its warps
//   warp    32 / LANES rows at a time, `LANES` runs each; DEPTH groups per run are in registers while the next DEPTH are on their way,
//           across row borders, and the first ones are requested before x is there (before the previous kernel has ended)
//   thread  per group: 8 values, 8 codes; one dp4a gives the address of entry k: codes[0..k] times the bytes per step, plus the base
//
// Included by one .cu file per value type, so that they compile side by side. Measurements: docs/notes-gpu-kernels.md.
#pragma once

#include "cuda/sparse-copies.cuh"
#include "cuda/sparse-groups.cuh"
#include "cuda/sparse-mul-mat-params.cuh"

#include <algorithm>
#include <type_traits>

namespace macko {

// Two columns or more are kept in 16 bits, as ggml's own products round x with such weights: in float32 the gathers from shared memory
// would take longer than the weights from global memory, and wide matrices would not have two columns fit.
template <typename T, int NX> using x_type = std::conditional_t<(NX > 1), value16<T>, float>;
template <typename X, int NX> struct alignas(sizeof(X) * NX) columns { X v[NX]; };

// x at a byte address of shared memory + a constant
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
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4+%5];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address), "n"(OFFSET));
        }
#pragma unroll
        for (int c = 0; c < NX; c++) {
            x[c] = c % 2 ? half_word<true>(value16<T>(), w[c / 2]) : half_word<false>(value16<T>(), w[c / 2]);
        }
    }
}

template <typename T, int BITS, int NX> struct group {
    group_bits<T, BITS> bits;

    static constexpr int CHAINS = NX > 2 ? 1 : 2; // of sums, per column: enough to hide the latency of an addition

    // at: where the group's first step starts. With words of 4 bytes and steps of whole bytes, x_address is in it already.
    template <bool STRIPED, int K>
    __device__ __forceinline__ uint32_t add(uint32_t packed, uint32_t at, uint32_t x_address, const uint32_t * weight, float (&sum)[CHAINS][NX]) const {
        constexpr uint32_t shift = SHIFT<BITS, STRIPED>;
        constexpr int      words = x_words(NX);
        const uint32_t to = __dp4a(packed, weight[K], at);
        const uint32_t address = words == 1 && shift == 0 ? to : x_address + (to >> shift) * words;
        float x[NX];
        load_x<T, NX, K * static_cast<int>(STEP<BITS, STRIPED> >> shift) * words>(x, address);
#pragma unroll
        for (int c = 0; c < NX; c++) {
            sum[K % CHAINS][c] = fmaf(bits.template get<K>(), x[c], sum[K % CHAINS][c]);
        }
        return to;
    }
    // returns where the next group starts
    template <bool STRIPED>
    __device__ __forceinline__ uint32_t multiply(uint32_t at, uint32_t x_address, const uint32_t * weight, float (&sum)[CHAINS][NX]) const {
        const uint32_t lo = bits.lo(), hi = bits.hi();
        add<STRIPED, 0>(lo, at, x_address, weight, sum);
        add<STRIPED, 1>(lo, at, x_address, weight, sum);
        add<STRIPED, 2>(lo, at, x_address, weight, sum);
        const uint32_t middle = add<STRIPED, 3>(lo, at, x_address, weight, sum);
        add<STRIPED, 4>(hi, middle, x_address, weight, sum);
        add<STRIPED, 5>(hi, middle, x_address, weight, sum);
        add<STRIPED, 6>(hi, middle, x_address, weight, sum);
        return add<STRIPED, 7>(hi, middle, x_address, weight, sum) + 8 * STEP<BITS, STRIPED>;
    }
    // COMPACT: the group has four spilled values
    __device__ __forceinline__ void multiply_spilled(uint32_t x_address, float inverse, float (&sum)[CHAINS][NX]) const {
        const uint32_t pairs[4] = { bits.v.x, bits.v.y, bits.v.z, bits.v.w };
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x[NX];
            load_x<T, NX, 0>(x, x_address + (pairs[k] & 0xffff) * (4 * x_words(NX)));
#pragma unroll
            for (int c = 0; c < NX; c++) {
                sum[k % CHAINS][c] = fmaf(half_word<true>(__half(), pairs[k]) * inverse, x[c], sum[k % CHAINS][c]);
            }
        }
    }
};

// ---- x into shared memory ----

// zeros behind x, and behind what is repeated of it
template <int NX> __device__ __forceinline__ void fill_zeros(float * xs, const sparse_launch & p) {
    constexpr int words = x_words(NX);
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    for (int i = p.cols * words + thread; i < p.modulus * words; i += threads) {
        xs[i] = 0.0f;
    }
    for (int i = (p.modulus + p.cols) * words + thread; i < (p.modulus + p.overshoot) * words; i += threads) {
        xs[i] = 0.0f;
    }
}

// Shared memory that does not depend on the previous kernel: zeros behind x, and the norm's weights at the place of the x that they will be
// multiplied with (by the same threads: store_x has the same loop), in the first four bytes of its word.
template <int NX> __device__ __forceinline__ void fill_constants(float * xs, const sparse_launch & p) {
    fill_zeros<NX>(xs, p);
    if (p.norm_weight) {
        for (int i = static_cast<int>(threadIdx.x); i < p.cols; i += static_cast<int>(blockDim.x)) {
            copy_float(xs + i * x_words(NX), p.norm_weight + i);
        }
    }
}

// One column of x and the weights of its norm on their way through registers. Loads of an SM seem to come back in order, so x is requested before the
// sparse weights are: behind them it would wait for memory (notes, section 21).
template <int THREADS> struct x_in_registers {
    static constexpr int N = 3072 / THREADS; // up to 12288 columns
    float4 weight[N], x[N];

    __device__ __forceinline__ static bool fits(const sparse_launch & p) {
        const uintptr_t places = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.norm_weight) | static_cast<uintptr_t>(p.ldx * 4);
        return p.cols <= static_cast<int>(blockDim.x) * 4 * N && p.cols % 4 == 0 && places % 16 == 0;
    }
    __device__ __forceinline__ static int place(int k) { return static_cast<int>(threadIdx.x + k * blockDim.x) * 4; }
    __device__ __forceinline__ void request_weights(const sparse_launch & p) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            if (place(k) < p.cols) {
                weight[k] = __ldg(reinterpret_cast<const float4 *>(p.norm_weight + place(k)));
            }
        }
    }
    __device__ __forceinline__ void request_x(const sparse_launch & p) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            if (place(k) < p.cols) {
                x[k] = __ldcg(reinterpret_cast<const float4 *>(p.x + place(k)));
            }
        }
    }
    // x times weights to shared memory; the warps' sums of squares of x to partial
    __device__ __forceinline__ void store(float * xs, float * partial, const sparse_launch & p) {
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int i = place(k);
            if (i < p.cols) {
                const float4 v = x[k], w = weight[k], vw = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
                squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
                *reinterpret_cast<float4 *>(xs + i) = vw;
                const float again[4] = { vw.x, vw.y, vw.z, vw.w }; // the modulus is no multiple of 4
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (i + e < p.overshoot) {
                        xs[p.modulus + i + e] = again[e];
                    }
                }
            }
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) {
            partial[threadIdx.x / 32] = squares;
        }
    }
};

// what x is multiplied with after its norm's weights, from the warps' sums of squares
__device__ __forceinline__ float norm_scale(const sparse_launch & p, const float * partial) {
    const unsigned l = threadIdx.x % 32;
    return rsqrtf(warp_sum(l < blockDim.x / 32 ? partial[l] : 0.0f) / static_cast<float>(p.cols) + p.norm_eps);
}

// x through registers: with a norm, or for several columns, where one wide store per word beats 4-byte copies (notes). In 16 bits the
// normalized x is what is rounded: its scale has to be known first, by a pass of its own. In float32 the scale is left to the sums.
template <typename T, int NX, bool NORM> __device__ __forceinline__ void store_x(float * xs, float * partial, const sparse_launch & p, const float * x, int column) {
    using word = columns<x_type<T, NX>, NX>;
    constexpr bool ROUNDS = sizeof(x_type<T, NX>) == 2;
    const auto x_at = [&](int c, int i) { return c < p.n_columns - column ? x[c * p.ldx + i] : 0.0f; };
    float squares[NX] = {}, scale[NX];
    const auto sum_squares = [&] {
#pragma unroll
        for (int c = 0; c < NX; c++) {
            const float sum = warp_sum(squares[c]);
            if (threadIdx.x % 32 == 0) {
                partial[c * 32 + threadIdx.x / 32] = sum;
            }
        }
    };
    // All of a batch is requested before the first of it is stored: to the compiler x could be what is stored to, and each element would wait for
    // the one before.
    constexpr int BATCH = NX == 8 ? 2 : 4;
    const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    float v[BATCH][NX];
    const auto fetch = [&](int begin) {
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
    const bool have_all = NORM && ROUNDS && p.cols <= BATCH * step; // in v
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
            word w;
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

// Words 0 ... modulus-1 are x; the next `overshoot` repeat the first ones. With norm_weight, x is multiplied by it and the warps' sums of
// squares go to partial. Ends with a barrier.
template <typename T, int NX> __device__ __forceinline__ void fill_x(float * xs, float * partial, const sparse_launch & p, int column) {
    const float * x = p.x + column * p.ldx;
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    if (NX == 1 && !p.norm_weight) {
        const int aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? p.cols & ~3 : 0;
        for (int i = thread * 4; i < aligned; i += threads * 4) {
            copy_float4(xs + i, x + i);
        }
        for (int i = aligned + thread; i < p.cols; i += threads) {
            copy_float(xs + i, x + i);
        }
        for (int i = thread; i < min(p.overshoot, p.cols); i += threads) {
            copy_float(xs + p.modulus + i, x + i);
        }
        wait_for_copies();
    } else if (p.norm_weight) {
        wait_for_copies(); // of the norm's weights
        store_x<T, NX, true>(xs, partial, p, x, column);
    } else {
        store_x<T, NX, false>(xs, partial, p, x, column);
    }
    __syncthreads();
}

// ---- the kernel ----

// Sums of NX columns over LANES lanes: lane i gets that of column i / (LANES / NX). Each step halves the columns of a lane, so that there are fewer
// shuffles than with all sums on all lanes, and the columns' epilogues run side by side.
template <int LANES, int NX> __device__ __forceinline__ float sum_columns(float (&v)[NX], int lane) {
    if constexpr (NX == 1) {
        return warp_sum<LANES>(v[0]);
    } else {
        const bool upper = lane & LANES / 2;
        float half[NX / 2];
#pragma unroll
        for (int c = 0; c < NX / 2; c++) {
            half[c] = (upper ? v[c + NX / 2] : v[c]) + __shfl_xor_sync(FULL_WARP, upper ? v[c] : v[c + NX / 2], LANES / 2);
        }
        return sum_columns<LANES / 2, NX / 2>(half, lane);
    }
}

template <
    typename T,    // of the values
    int BITS,      // of a code
    int LANES,     // runs per row
    bool STRIPED,
    int NX,        // columns of x
    bool GROUPED,  // several matrices, or gate and up
    int THREADS,   // at most
    int DEPTH>     // groups ahead
__global__ void __launch_bounds__(THREADS, 1) runs_kernel(const __grid_constant__ sparse_launch p) {
    constexpr int  ROWS    = 32 / LANES; // of a unit
    constexpr bool COMPACT = std::is_same<T, compact_f16>::value;
    constexpr uint32_t shift = SHIFT<BITS, STRIPED>;
    extern __shared__ __align__(16) float xs[];
    float * partial = xs + static_cast<size_t>(p.modulus + p.overshoot) * x_words(NX); // NX * 32

    const int lane   = threadIdx.x % LANES;
    const int sub    = threadIdx.x % 32 / LANES;
    const int first  = blockIdx.x + gridDim.x * (threadIdx.x / 32);
    const int warps  = blockDim.x / 32;
    const int stride = gridDim.x * warps;
    const int column = blockIdx.y * NX;

    const uint32_t x_address = static_cast<uint32_t>(__cvta_generic_to_shared(xs));
    const uint32_t origin    = x_words(NX) == 1 && shift == 0 ? x_address : 0;
    const uint32_t lap       = static_cast<uint32_t>(p.modulus) * 4;

    const int row_offset = p.expert_ids ? expert_row(p, column) : 0;

    struct row_start { int begin, end; uint32_t base; int tail; }; // tail: COMPACT, as what is named spill further down
    const auto fetch = [&](int j) {
        const sparse_task t = task_at<GROUPED, ROWS>(p, first, stride, sub, j);
        row_start s = { 0, 0, 0, 0 };
        if (t.valid && row_offset >= 0) {
            const sparse_operand & m = p.m[t.matrix];
            const int row = m.row_begin + row_offset + t.row;
            s.begin = __ldg(m.row_ptr + row);
            s.end   = __ldg(m.row_ptr + row + 1);
            s.base  = __ldg(m.bases + static_cast<int64_t>(row) * LANES + lane);
            if (COMPACT) {
                s.tail = __ldg(m.tails + row);
            }
        }
        return s;
    };

    // this thread's run of a row
    struct cursor { int matrix, slot, begin, end, end_of_spilled, steps; uint32_t at; }; // it has groups in steps begin ... end-1, then spilled ones
    const auto begin_row = [&](int j, const row_start & s) {
        const row_places row(s.begin, s.end, s.tail);
        cursor c;
        c.matrix = GROUPED ? task_at<GROUPED, ROWS>(p, first, stride, sub, j).matrix : 0;
        c.slot   = row.slot(lane, LANES, 0);
        c.begin  = row.first_step(lane);
        c.end    = row.end_step(lane, LANES);
        c.end_of_spilled = row.end_of_spilled(lane, LANES);
        c.steps  = row.end_of_spilled(0, LANES);
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            c.steps = max(c.steps, __shfl_xor_sync(FULL_WARP, c.steps, offset));
        }
        c.at = origin + (s.base * 4 << shift);
        return c;
    };

    group<T, BITS, NX> now[DEPTH];
    const auto load = [&](group<T, BITS, NX> & g, const cursor & c, int step) {
        if (step >= c.begin && step < c.end_of_spilled) {
            g.bits.load(p.m[c.matrix].values, p.m[c.matrix].codes, c.slot + step * LANES);
        }
    };

    const bool x_first = NX == 1 && p.norm_weight && !p.expert_ids && x_in_registers<THREADS>::fits(p);
    const row_start start = fetch(0);
    x_in_registers<THREADS> x_part;
    if (x_first) {
        x_part.request_weights(p);
        cuda_allow_next();
        cuda_wait_for_previous();
        x_part.request_x(p);
    }
    cursor c = begin_row(0, start);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        load(now[d], c, d);
    }
    row_start ahead = fetch(1);
    if (x_first) {
        fill_zeros<NX>(xs, p);
        x_part.store(xs, partial, p);
        __syncthreads();
    } else {
        fill_constants<NX>(xs, p);
        cuda_allow_next();
        if (!p.expert_ids) {
            cuda_wait_for_previous();
        }
        fill_x<T, NX>(xs, partial, p, column);
    }
    const float scale = NX == 1 && p.norm_weight ? norm_scale(p, partial) : 1.0f;

    float gate = 0.0f; // of this thread's column
    for (int j = 0; first + (GROUPED && p.silu_mul ? j / 2 : j) * stride < p.n_units; j++) {
        float sum[group<T, BITS, NX>::CHAINS][NX] = {};
        const int begin = c.begin, end = c.end, end_of_spilled = c.end_of_spilled, steps = c.steps;
        uint32_t at = c.at;
        int step = 0;
        bool more;
        do {
            group<T, BITS, NX> next[DEPTH];
            int to = step + DEPTH;
            more = to < steps;
            if (!more) {
                c = begin_row(j + 1, ahead);
                ahead = fetch(j + 2);
                to = 0;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                load(next[d], c, to + d);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (step + d >= begin && step + d < end) {
                    at = now[d].template multiply<STRIPED>(at, x_address, p.weight, sum);
                    if (STRIPED && at >= origin + lap) {
                        at -= lap;
                    }
                }
            }
            if constexpr (COMPACT) {
                if (step + DEPTH > end && step < end_of_spilled) {
                    const float inverse = p.m[task_at<GROUPED, ROWS>(p, first, stride, sub, j).matrix].inverse;
#pragma unroll
                    for (int d = 0; d < DEPTH; d++) {
                        if (step + d >= end && step + d < end_of_spilled) {
                            now[d].multiply_spilled(x_address, inverse, sum);
                        }
                    }
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                now[d] = next[d];
            }
            step += DEPTH;
        } while (more);

        const sparse_task t = task_at<GROUPED, ROWS>(p, first, stride, sub, j);
        float total[NX];
#pragma unroll
        for (int k = 0; k < NX; k++) {
            total[k] = NX > 2 ? sum[0][k] : sum[0][k] + sum[NX > 2 ? 0 : 1][k];
        }
        const float y = sum_columns<LANES, NX>(total, lane) * scale * (COMPACT ? p.m[t.matrix].power : 1.0f);
        const int   k = lane / (LANES / NX);
        if (GROUPED && p.silu_mul && t.matrix == 0) {
            gate = y;
        } else if (lane % (LANES / NX) == 0 && t.row < p.m[t.matrix].n_rows && column + k < p.n_columns) {
            store_result<GROUPED>(p, t, column + k, y, gate);
        }
    }
}

// ---- launch ----

template <typename T, int BITS, int LANES, bool STRIPED, int NX, bool GROUPED, int THREADS, int DEPTH>
cudaError_t launch_runs_config(sparse_launch & p, int blocks, int warps, int grid_y, cudaStream_t stream) {
    if (std::is_same<T, compact_f16>::value) {
        set_compact_weights(p.weight, BITS, STEP<BITS, STRIPED>);
    } else {
        set_weights(p.weight, BITS, STEP<BITS, STRIPED>);
    }
    return launch_sparse(runs_kernel<T, BITS, LANES, STRIPED, NX, GROUPED, THREADS, DEPTH>, p, warps * 32, runs_shared_nbytes(p, NX), blocks, grid_y, stream);
}

template <typename T, int BITS, int LANES, bool STRIPED> cudaError_t launch_runs_shape(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    // one block per SM: x is in shared memory once
    const int blocks = std::min(device.multiprocessors, p.n_units);
    const int units  = (p.n_units + blocks - 1) / blocks;
    const bool grouped = p.n_matrices > 1;
    if constexpr (LANES <= 16) {
        if (units <= 16 && nx > 1) { // as for one column, below
            return nx == 8 ? launch_runs_config<T, BITS, LANES, STRIPED, 8, true, 512, 3>(p, blocks, 16, grid_y, stream)
                : nx == 4  ? launch_runs_config<T, BITS, LANES, STRIPED, 4, true, 512, 4>(p, blocks, 16, grid_y, stream)
                           : launch_runs_config<T, BITS, LANES, STRIPED, 2, true, 512, 4>(p, blocks, 16, grid_y, stream);
        }
    }
    if (nx == 8) { // 8 sums and 8 x per thread: no registers for more groups ahead
        return launch_runs_config<T, BITS, LANES, STRIPED, 8, true, 1024, 1>(p, blocks, warps_for(units, 24, 32), grid_y, stream);
    }
    if (nx == 4) {
        return launch_runs_config<T, BITS, LANES, STRIPED, 4, true, 1024, 2>(p, blocks, warps_for(units, 24, 32), grid_y, stream);
    }
    if (nx == 2) {
        return launch_runs_config<T, BITS, LANES, STRIPED, 2, true, 1024, 2>(p, blocks, warps_for(units, 24, 32), grid_y, stream);
    }
    // Rows for a few warps only: each has more of its runs in flight, as their latency is all there is. Else 32 warps with 2 groups ahead or 24 with 3
    // are 40 KB in flight.
    if (units <= 16) {
        return grouped ? launch_runs_config<T, BITS, LANES, STRIPED, 1, true, 512, 5>(p, blocks, 16, grid_y, stream)
                       : launch_runs_config<T, BITS, LANES, STRIPED, 1, false, 512, 5>(p, blocks, 16, grid_y, stream);
    }
    const int warps = BITS < 8 && LANES == 16 ? warps_for(units, 18, 24) : warps_for(units, 20, 32);
    if (warps <= 24) {
        return grouped ? launch_runs_config<T, BITS, LANES, STRIPED, 1, true, 768, 3>(p, blocks, warps, grid_y, stream)
                       : launch_runs_config<T, BITS, LANES, STRIPED, 1, false, 768, 3>(p, blocks, warps, grid_y, stream);
    }
    return grouped ? launch_runs_config<T, BITS, LANES, STRIPED, 1, true, 1024, 2>(p, blocks, warps, grid_y, stream)
                   : launch_runs_config<T, BITS, LANES, STRIPED, 1, false, 1024, 2>(p, blocks, warps, grid_y, stream);
}

template <typename T, int BITS, bool STRIPED> cudaError_t launch_runs_lanes(sparse_launch & p, int lanes, int nx, int grid_y, cudaStream_t stream) {
    if constexpr (!STRIPED && BITS < 8) {
        return launch_runs_shape<T, BITS, 8, STRIPED>(p, nx, grid_y, stream);
    } else {
        switch (lanes) {
            case 8:  return launch_runs_shape<T, BITS,  8, STRIPED>(p, nx, grid_y, stream);
            case 16: return launch_runs_shape<T, BITS, 16, STRIPED>(p, nx, grid_y, stream);
            default: return launch_runs_shape<T, BITS, 32, STRIPED>(p, nx, grid_y, stream);
        }
    }
}

template <typename T> cudaError_t launch_runs(sparse_launch & p, int lanes, bool striped, int nx, int grid_y, cudaStream_t stream) {
    switch (p.m[0].delta_bits) {
        case 1:  return striped ? launch_runs_lanes<T, 1, true>(p, lanes, nx, grid_y, stream) : launch_runs_lanes<T, 1, false>(p, lanes, nx, grid_y, stream);
        case 2:  return striped ? launch_runs_lanes<T, 2, true>(p, lanes, nx, grid_y, stream) : launch_runs_lanes<T, 2, false>(p, lanes, nx, grid_y, stream);
        case 4:  return striped ? launch_runs_lanes<T, 4, true>(p, lanes, nx, grid_y, stream) : launch_runs_lanes<T, 4, false>(p, lanes, nx, grid_y, stream);
        default: return launch_runs_lanes<T, 8, false>(p, lanes, nx, grid_y, stream);
    }
}

} // namespace macko
