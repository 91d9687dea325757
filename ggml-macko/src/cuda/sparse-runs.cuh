// y = W x for up to four columns of x, W in the RUNS or STRIPED layout (sparse-layout.h). Memory-bound: what matters is bytes in flight.
//
//   block   fills shared memory with x (float32; 1 or 4 columns interleaved), one block per SM, then deals rows to its warps
//   warp    32 / LANES rows at a time, `LANES` runs each; DEPTH groups per run are in registers while the next DEPTH are on their way,
//           across row borders, and the first ones are requested before x is there (before the previous kernel has ended)
//   thread  per group: 8 values, 8 codes; one dp4a gives the address of entry k: codes[0..k] times the bytes per step, plus the base
//
// Included by one .cu file per value type, so that they compile side by side. Measurements: docs/notes-gpu-kernels.md.
#pragma once

#include "cuda/sparse-mul-mat-params.cuh"

#include <algorithm>

namespace macko {

// ---- a group: 8 values and 8 codes ----

template <typename T> struct group_values;
template <> struct group_values<__half> {
    uint4 v;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { v = load_streaming(reinterpret_cast<const uint4 *>(p) + g); }
    template <int K> __device__ __forceinline__ float get() const {
        const uint32_t w = K / 2 == 0 ? v.x : K / 2 == 1 ? v.y : K / 2 == 2 ? v.z : v.w;
        const __half2 h = *reinterpret_cast<const __half2 *>(&w);
        return K % 2 ? __high2float(h) : __low2float(h);
    }
};
template <> struct group_values<__nv_bfloat16> {
    uint4 v;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { v = load_streaming(reinterpret_cast<const uint4 *>(p) + g); }
    template <int K> __device__ __forceinline__ float get() const {
        const uint32_t w = K / 2 == 0 ? v.x : K / 2 == 1 ? v.y : K / 2 == 2 ? v.z : v.w;
        return __uint_as_float(K % 2 ? w & 0xffff0000u : w << 16);
    }
};
// lo, hi: the codes of entries 0-3 and 4-7, one per byte, byte k shifted by what weight[] takes back
template <int BITS> struct group_codes;
template <> struct group_codes<8> {
    uint2 c;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { c = load_streaming(reinterpret_cast<const uint2 *>(p) + g); }
    __device__ __forceinline__ uint32_t lo() const { return c.x; }
    __device__ __forceinline__ uint32_t hi() const { return c.y; }
};
template <> struct group_codes<4> {
    uint32_t c;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { c = load_streaming(reinterpret_cast<const uint32_t *>(p) + g); }
    __device__ __forceinline__ uint32_t lo() const { return c & 0x0f0f0f0fu; }
    __device__ __forceinline__ uint32_t hi() const { return c & 0xf0f0f0f0u; }
};
template <> struct group_codes<2> {
    uint32_t c;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { c = load_streaming(reinterpret_cast<const uint16_t *>(p) + g); }
    __device__ __forceinline__ uint32_t lo() const { return __byte_perm(c, 0, 0x0000) & 0xc0300c03u; }
    __device__ __forceinline__ uint32_t hi() const { return __byte_perm(c, 0, 0x1111) & 0xc0300c03u; }
};
template <> struct group_codes<1> {
    uint32_t c;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t g) { c = load_streaming(p + g); }
    __device__ __forceinline__ uint32_t lo() const { return __byte_perm(c, 0, 0x0000) & 0x08040201u; }
    __device__ __forceinline__ uint32_t hi() const { return __byte_perm(c, 0, 0x0000) & 0x80402010u; }
};

// Where entries are in x is counted in units of 2^-SHIFT bytes of one column; STEP of them from one code step to the next. Codes of less
// than 8 bits are weighted with down to 1/32 of a step (above), so those of adjacent columns (4 bytes) need units of 1/32 byte.
template <int BITS, bool STRIPED> constexpr uint32_t SHIFT = !STRIPED && BITS < 8 ? 5 : 0;
template <int BITS, bool STRIPED> constexpr uint32_t STEP  = STRIPED || BITS < 8 ? 128 : 4;

inline void set_weights(uint32_t weight[8], int bits, uint32_t step) {
    for (int k = 0; k < 8; k++) {
        weight[k] = 0;
        for (int i = 0; i <= k % 4; i++) {
            const int shift = bits == 8 ? 0 : bits == 4 ? k / 4 * 4 : bits == 2 ? 2 * i : k / 4 * 4 + i;
            weight[k] |= step >> shift << 8 * i;
        }
    }
}

template <int NX> struct columns { float v[NX]; };

// x at a byte address of shared memory + a constant
template <int NX, int OFFSET> __device__ __forceinline__ columns<NX> load_x(uint32_t address) {
    columns<NX> x;
    if constexpr (NX == 1) {
        asm volatile("ld.shared.f32 %0, [%1+%2];" : "=f"(x.v[0]) : "r"(address), "n"(OFFSET));
    } else if constexpr (NX == 2) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2+%3];" : "=f"(x.v[0]), "=f"(x.v[1]) : "r"(address), "n"(OFFSET));
    } else {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4+%5];"
                     : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3]) : "r"(address), "n"(OFFSET));
    }
    return x;
}

template <typename T, int BITS, int NX> struct group {
    group_values<T>   values;
    group_codes<BITS> codes;

    // at: where the group's first step starts. With one column and whole bytes, x_address is in it already.
    template <bool STRIPED, int K>
    __device__ __forceinline__ uint32_t add(uint32_t packed, uint32_t at, uint32_t x_address, const uint32_t * weight, float (&sum)[2][NX]) const {
        constexpr uint32_t shift = SHIFT<BITS, STRIPED>;
        const uint32_t to = __dp4a(packed, weight[K], at);
        const uint32_t address = NX == 1 && shift == 0 ? to : x_address + (to >> shift) * NX;
        const columns<NX> x = load_x<NX, K * static_cast<int>(STEP<BITS, STRIPED> >> shift) * NX>(address);
#pragma unroll
        for (int c = 0; c < NX; c++) {
            sum[K % 2][c] = fmaf(values.template get<K>(), x.v[c], sum[K % 2][c]);
        }
        return to;
    }
    // returns where the next group starts
    template <bool STRIPED>
    __device__ __forceinline__ uint32_t multiply(uint32_t at, uint32_t x_address, const uint32_t * weight, float (&sum)[2][NX]) const {
        const uint32_t lo = codes.lo(), hi = codes.hi();
        add<STRIPED, 0>(lo, at, x_address, weight, sum);
        add<STRIPED, 1>(lo, at, x_address, weight, sum);
        add<STRIPED, 2>(lo, at, x_address, weight, sum);
        const uint32_t middle = add<STRIPED, 3>(lo, at, x_address, weight, sum);
        add<STRIPED, 4>(hi, middle, x_address, weight, sum);
        add<STRIPED, 5>(hi, middle, x_address, weight, sum);
        add<STRIPED, 6>(hi, middle, x_address, weight, sum);
        return add<STRIPED, 7>(hi, middle, x_address, weight, sum) + 8 * STEP<BITS, STRIPED>;
    }
};

// ---- x into shared memory ----

// words 0 ... modulus-1 are x, padded with zeros; the next `overshoot` repeat the first ones. Returns each column's 1 / rms if wanted.
template <int NX, int THREADS>
__device__ __forceinline__ void fill_x(float * xs, float * partial, const sparse_launch & p, int column) {
    float squares[NX] = {};
    const float * x = p.x + column * p.ldx;
    const auto put = [&](int i, const float (&v)[NX]) {
#pragma unroll
        for (int c = 0; c < NX; c++) {
            xs[i * NX + c] = v[c];
        }
        if (i < p.overshoot) {
#pragma unroll
            for (int c = 0; c < NX; c++) {
                xs[(p.modulus + i) * NX + c] = v[c];
            }
        }
    };
#pragma unroll 4
    for (int i = threadIdx.x; i < p.cols; i += THREADS) {
        float v[NX];
#pragma unroll
        for (int c = 0; c < NX; c++) {
            v[c] = NX == 1 || c < p.n_columns - column ? x[c * p.ldx + i] : 0.0f;
        }
        if (p.norm_weight) {
            const float weight = p.norm_weight[i];
#pragma unroll
            for (int c = 0; c < NX; c++) {
                squares[c] = fmaf(v[c], v[c], squares[c]);
                v[c] *= weight;
            }
        }
        put(i, v);
    }
    for (int i = p.cols + threadIdx.x; i < p.modulus; i += THREADS) {
        const float zero[NX] = {};
        put(i, zero);
    }
    if (p.norm_weight) {
#pragma unroll
        for (int c = 0; c < NX; c++) {
            const float sum = warp_sum(squares[c]);
            if (threadIdx.x % 32 == 0) {
                partial[c * 32 + threadIdx.x / 32] = sum;
            }
        }
    }
}

// ---- the kernel ----

template <
    typename T,    // of the values
    int BITS,      // of a code
    int LANES,     // runs per row
    bool STRIPED,
    int NX,        // columns of x
    bool GROUPED,  // several matrices, or gate and up
    int THREADS,
    int DEPTH>     // groups ahead
__global__ void __launch_bounds__(THREADS, 1) runs_kernel(const __grid_constant__ sparse_launch p) {
    constexpr int WARPS = THREADS / 32;
    constexpr int ROWS  = 32 / LANES; // of a unit
    constexpr uint32_t shift = SHIFT<BITS, STRIPED>;
    extern __shared__ __align__(16) float xs[];
    float * partial = xs + static_cast<size_t>(p.modulus + p.overshoot) * NX; // NX * 32

    const int lane   = threadIdx.x % LANES;
    const int sub    = threadIdx.x % 32 / LANES;
    const int first  = blockIdx.x + gridDim.x * (threadIdx.x / 32);
    const int stride = gridDim.x * WARPS;
    const int column = blockIdx.y * NX;

    const uint32_t x_address = static_cast<uint32_t>(__cvta_generic_to_shared(xs));
    const uint32_t origin    = NX == 1 && shift == 0 ? x_address : 0;
    const uint32_t wrap      = static_cast<uint32_t>(p.modulus) * 4;

    const int row_offset = p.expert_ids ? expert_row(p, column) : 0;

    struct row_start { int begin, end; uint32_t base; };
    const auto fetch = [&](int j) {
        const sparse_task t = task_at<GROUPED, ROWS>(p, first, stride, sub, j);
        row_start s = { 0, 0, 0 };
        if (t.valid && row_offset >= 0) {
            const sparse_operand & m = p.m[t.matrix];
            const int row = m.row_begin + row_offset + t.row;
            s.begin = __ldg(m.row_ptr + row);
            s.end   = __ldg(m.row_ptr + row + 1);
            s.base  = __ldg(m.bases + static_cast<int64_t>(row) * LANES + lane);
        }
        return s;
    };

    // this thread's run of a row
    struct cursor { int matrix, first, full, own, last, steps; uint32_t at; };
    const auto begin_row = [&](int j, const row_start & s) {
        const int groups = s.end - s.begin;
        const int skip   = lane * groups / LANES;
        cursor c;
        c.matrix = GROUPED ? task_at<GROUPED, ROWS>(p, first, stride, sub, j).matrix : 0;
        c.full   = groups / LANES;
        c.own    = (lane + 1) * groups / LANES - skip;
        c.first  = s.begin + lane;
        c.last   = s.begin + c.full * LANES + skip - lane * c.full;
        c.steps  = (groups + LANES - 1) / LANES;
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            c.steps = max(c.steps, __shfl_xor_sync(FULL_WARP, c.steps, offset));
        }
        c.at = origin + (s.base * 4 << shift);
        return c;
    };

    group<T, BITS, NX> now[DEPTH];
    const auto load = [&](group<T, BITS, NX> & g, const cursor & c, int step) {
        if (step < c.own) {
            const int at = step < c.full ? c.first + step * LANES : c.last;
            g.values.load(p.m[c.matrix].values, at);
            g.codes.load(p.m[c.matrix].codes, at);
        }
    };

    cursor c = begin_row(0, fetch(0));
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        load(now[d], c, d);
    }
    row_start ahead = fetch(1);

    cuda_allow_next();
    if (!p.expert_ids) {
        cuda_wait_for_previous();
    }
    fill_x<NX, THREADS>(xs, partial, p, column);
    __syncthreads();
    float scale[NX];
#pragma unroll
    for (int k = 0; k < NX; k++) {
        scale[k] = 1.0f;
        if (p.norm_weight) {
            const int l = threadIdx.x % 32;
            scale[k] = rsqrtf(warp_sum(l < WARPS ? partial[k * 32 + l] : 0.0f) / static_cast<float>(p.cols) + p.norm_eps);
        }
    }

    float gate[NX] = {};
    for (int j = 0; first + (GROUPED && p.silu_mul ? j / 2 : j) * stride < p.n_units; j++) {
        float sum[2][NX] = {};
        const int own = c.own, steps = c.steps;
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
                if (step + d < own) {
                    at = now[d].template multiply<STRIPED>(at, x_address, p.weight, sum);
                    if (STRIPED && at >= origin + wrap) {
                        at -= wrap;
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
#pragma unroll
        for (int k = 0; k < NX; k++) {
            const float y = warp_sum<LANES>(sum[0][k] + sum[1][k]) * scale[k];
            if (GROUPED && p.silu_mul && t.matrix == 0) {
                gate[k] = y;
            } else if (lane == 0 && t.row < p.m[t.matrix].n_rows && column + k < p.n_columns) {
                store_result<GROUPED>(p, t, column + k, y, gate[k]);
            }
        }
    }
}

// ---- launch ----

template <typename T, int BITS, int LANES, bool STRIPED, int NX, bool GROUPED, int THREADS, int DEPTH>
cudaError_t launch_runs_config(sparse_launch & p, int grid_y, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    set_weights(p.weight, BITS, STEP<BITS, STRIPED>);
    return launch_sparse(runs_kernel<T, BITS, LANES, STRIPED, NX, GROUPED, THREADS, DEPTH>, p, THREADS, runs_shared_nbytes(p, NX),
                         std::min(device.multiprocessors, p.n_units), grid_y, stream);
}

template <typename T, int BITS, int LANES, bool STRIPED> cudaError_t launch_runs_shape(sparse_launch & p, int nx, int grid_y, cudaStream_t stream) {
    // one block per SM: x is in shared memory once. 1024 threads with 2 groups ahead are 41 KB in flight
    if (nx == 4) {
        return launch_runs_config<T, BITS, LANES, STRIPED, 4, true, 1024, 1>(p, grid_y, stream); // 4 sums and 4 x: no registers for more ahead
    }
    return p.n_matrices == 1 ? launch_runs_config<T, BITS, LANES, STRIPED, 1, false, 1024, 2>(p, grid_y, stream)
                             : launch_runs_config<T, BITS, LANES, STRIPED, 1, true, 1024, 2>(p, grid_y, stream);
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
