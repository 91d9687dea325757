// y = W x, with W in the layout ROW_BLOCKS (gpu-layout/row-blocks.h; EC-SpMV paper, section 7). Two launches: the first
// writes the sums of all segments to separate slots; the second adds up the slots of each row in order (the paper uses
// atomic additions). Each launch may start before the previous kernel has ended.
#include "cuda/sparse/row-split.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

struct segments_launch {
    row_blocks_set sets[EC_MAX_SETS];
    int32_t        first_segment[EC_MAX_SETS]; // counted over all sets
    int32_t        n_sets;
    const float *  x;
    int64_t        ldx;
    int32_t        cols;
    int32_t        n_columns;
    int32_t        n_slots;
    float *        partial;
    uint32_t       weight[4]; // dp4a weights of entry k: bytes from one column of x to the next, for deltas 0 ... k
};

// ---- the four columns of a lane in a chunk ----

template <int BITS> struct chunk_deltas;
template <> struct chunk_deltas<8> {
    uint32_t                        c;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t i) {
        c = load_streaming(reinterpret_cast<const uint32_t *>(p) + i);
    }
    __device__ __forceinline__ uint32_t bytes() const { return c; }
};
template <> struct chunk_deltas<4> {
    uint32_t                        c;
    __device__ __forceinline__ void load(const uint8_t * p, int64_t i) {
        c = load_streaming(reinterpret_cast<const uint16_t *>(p) + i);
    }
    __device__ __forceinline__ uint32_t bytes() const { return __byte_perm(c & 0x0f0fu, c >> 4 & 0x0f0fu, 0x5140); }
};

template <int E> __device__ __forceinline__ uint32_t word_of(const uint4 & v) {
    return E == 0 ? v.x : E == 1 ? v.y : E == 2 ? v.z : v.w;
}

template <int G> struct chunk_values {
    uint4                           v[G];
    __device__ __forceinline__ void load(const float * p, int64_t chunk, int lane) {
#pragma unroll
        for (int i = 0; i < G; i++) {
            v[i] = load_streaming(reinterpret_cast<const uint4 *>(p) + (chunk * G + i) * 32 + lane);
        }
    }
    template <int E> __device__ __forceinline__ float get() const { // column E / G, row E % G
        return __uint_as_float(word_of<E % 4>(v[E / 4]));
    }
};

template <int NX> __device__ __forceinline__ void gather(float (&x)[NX], uint32_t address) {
    if constexpr (NX == 1) {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(address));
    } else {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(address));
    }
}

template <int BITS, int G, int NX> struct chunk {
    chunk_values<G>    values;
    chunk_deltas<BITS> deltas;

    template <int J>
    __device__ __forceinline__ uint32_t add(uint32_t packed, uint32_t at, const uint32_t * weight,
                                            float (&sum)[NX][G]) const {
        const uint32_t to = __dp4a(packed, weight[J], at);
        float          x[NX];
        gather<NX>(x, to);
        add_rows<J, 0>(x, sum);
        return to;
    }
    template <int J, int K> __device__ __forceinline__ void add_rows(const float (&x)[NX], float (&sum)[NX][G]) const {
        if constexpr (K < G) {
            const float value = values.template get<J * G + K>();
#pragma unroll
            for (int c = 0; c < NX; c++) {
                sum[c][K] = fmaf(value, x[c], sum[c][K]);
            }
            add_rows<J, K + 1>(x, sum);
        }
    }
    // at: the address of x for the previous column; returns the address for the last column
    __device__ __forceinline__ uint32_t multiply(uint32_t at, const uint32_t * weight, float (&sum)[NX][G]) const {
        const uint32_t packed = deltas.bytes();
        add<0>(packed, at, weight, sum);
        add<1>(packed, at, weight, sum);
        add<2>(packed, at, weight, sum);
        return add<3>(packed, at, weight, sum);
    }
};

// ---- sums over the lanes ----

// Returns v[r] summed over the warp, r = lane * G / 32. Each exchange halves the rows of a lane; then the lanes of a
// row are added up.
template <int G> __device__ __forceinline__ float sum_rows(float (&v)[G]) {
    int offset = 16;
#pragma unroll
    for (int n = G; n > 1; n /= 2, offset /= 2) {
        const bool upper = threadIdx.x & static_cast<unsigned>(offset);
#pragma unroll
        for (int r = 0; r < G / 2; r++) {
            if (r < n / 2) {
                const float mine = upper ? v[r + n / 2] : v[r], other = upper ? v[r] : v[r + n / 2];
                v[r] = mine + __shfl_xor_sync(FULL_WARP, other, offset);
            }
        }
    }
    float sum = v[0];
    for (; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    }
    return sum;
}

// ---- the segments of a set ----

// Copies one column of x, or NX columns side by side, to shared memory.
template <int NX> __device__ __forceinline__ void fill_columns(float * xs, const segments_launch & p) {
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    if constexpr (NX == 1) {
        const int aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 ? p.cols & ~3 : 0;
        for (int i = thread * 4; i < aligned; i += threads * 4) {
            copy_16(xs + i, p.x + i);
        }
        for (int i = aligned + thread; i < p.cols; i += threads) {
            copy_float(xs + i, p.x + i);
        }
        wait_for_copies();
    } else {
#pragma unroll 4
        for (int i = thread; i < p.cols; i += threads) {
            float v[NX];
#pragma unroll
            for (int c = 0; c < NX; c++) {
                v[c] = c < p.n_columns ? p.x[c * p.ldx + i] : 0.0f;
            }
            reinterpret_cast<float4 *>(xs)[i] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    __syncthreads();
}

// fill: copies x to shared memory; called after the first loads are requested
template <int BITS, int G, int NX, typename FILL>
__device__ __forceinline__ void multiply_set(const segments_launch & p, int index, uint32_t x_address, FILL && fill) {
    // chunks ahead: with more, registers spill, which is slower (measured)
    constexpr int          DEPTH  = 4 / G;
    const row_blocks_set & set    = p.sets[index];
    const int              lane   = threadIdx.x % 32;
    const int              stride = gridDim.x * (blockDim.x / 32);
    const int              warp =
        blockIdx.x + gridDim.x * (threadIdx.x / 32); // of all blocks: warps get the sets one after the other
    const int first = (warp - p.first_segment[index] % stride + stride) % stride;

    struct segment {
        int      begin, end, slot;
        uint32_t base;
    };
    const auto fetch = [&](int i) {
        segment t = { 0, 0, 0, 0 };
        if (i < set.n_segments) {
            t.begin = __ldg(set.chunk_ptr + i);
            t.end   = __ldg(set.chunk_ptr + i + 1);
            t.base  = __ldg(set.bases + static_cast<int64_t>(i) * 32 + lane);
            t.slot  = __ldg(set.slots + static_cast<int64_t>(i) * G + lane * G / 32);
        }
        return t;
    };
    chunk<BITS, G, NX> now[DEPTH];
    const auto         load = [&](chunk<BITS, G, NX> & c, const segment & t, int i) {
        if (t.begin + i < t.end) {
            c.values.load(set.values, t.begin + i, lane);
            c.deltas.load(set.deltas, static_cast<int64_t>(t.begin + i) * 32 + lane);
        }
    };
    segment t = fetch(first);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        load(now[d], t, d);
    }
    segment ahead = fetch(first + stride);
    fill();
    for (int i = first; i < set.n_segments; i += stride) {
        float         sum[NX][G] = {};
        const segment here       = t;
        uint32_t      at         = x_address + here.base * static_cast<uint32_t>(4 * NX);
        int           step       = 0;
        bool          more;
        do {
            chunk<BITS, G, NX> next[DEPTH];
            int                to = step + DEPTH;
            more                  = here.begin + to < here.end;
            if (!more) {
                t     = ahead;
                ahead = fetch(i + 2 * stride);
                to    = 0;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                load(next[d], t, to + d);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (here.begin + step + d < here.end) {
                    at = now[d].multiply(at, p.weight, sum);
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                now[d] = next[d];
            }
            step += DEPTH;
        } while (more);
#pragma unroll
        for (int c = 0; c < NX; c++) {
            const float y = sum_rows<G>(sum[c]);
            if (lane % (32 / G) == 0 && c < p.n_columns) {
                p.partial[static_cast<int64_t>(c) * p.n_slots + here.slot] = y;
            }
        }
    }
}

// maximum: fewer warps than for row-split layouts leave more registers for the sums and chunks of several rows
constexpr int THREADS = 512;

template <int BITS, int NX>
__global__ void __launch_bounds__(THREADS, 1) segments_kernel(const __grid_constant__ segments_launch p) {
    extern __shared__ __align__(16) float xs[];
    const uint32_t                        x_address = static_cast<uint32_t>(__cvta_generic_to_shared(xs));
    for (int s = 0; s < p.n_sets; s++) {
        const auto fill = [&] {
            if (s == 0) {
                cuda_allow_next();
                cuda_wait_for_previous();
                fill_columns<NX>(xs, p);
            }
        };
        switch (p.sets[s].granularity) {
            case 4:  multiply_set<BITS, 4, NX>(p, s, x_address, fill); break;
            case 2:  multiply_set<BITS, 2, NX>(p, s, x_address, fill); break;
            default: multiply_set<BITS, 1, NX>(p, s, x_address, fill);
        }
    }
}

// ---- the slots of each row ----

struct sums_launch {
    const int32_t * slot_ptr; // of the first row
    const float *   partial;
    const float *   residual; // or null
    const float *   bias;     // or null
    float *         y;
    int64_t         ldy; // of y and residual
    int32_t         n_rows;
    int32_t         n_slots;
};

__global__ void __launch_bounds__(256) sums_kernel(const __grid_constant__ sums_launch p) {
    const int row = static_cast<int>(blockIdx.x * 256 + threadIdx.x), column = blockIdx.y;
    const int begin = row < p.n_rows ? __ldg(p.slot_ptr + row) : 0,
              end   = row < p.n_rows ? __ldg(p.slot_ptr + row + 1) : 0;
    cuda_allow_next();
    cuda_wait_for_previous();
    if (row >= p.n_rows) {
        return;
    }
    float y = 0.0f;
    for (int i = begin; i < end; i++) {
        y += p.partial[static_cast<int64_t>(column) * p.n_slots + i];
    }
    if (p.bias) {
        y += p.bias[row];
    }
    if (p.residual) {
        y += p.residual[column * p.ldy + row];
    }
    p.y[column * p.ldy + row] = y;
}

// ---- launches ----

template <int BITS>
cudaError_t launch_segments(segments_launch & p, int nx, int n_segments, bool programmatic, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    for (int k = 0; k < 4; k++) {
        p.weight[k] = (0x01010101u >> (24 - 8 * k)) * static_cast<uint32_t>(4 * nx);
    }
    const int blocks =
        std::min(device.multiprocessors, n_segments); // one per multiprocessor: x is in shared memory once
    // at least 8, which fetch x
    const int     warps  = std::max(8, std::min(THREADS / 32, (n_segments + blocks - 1) / blocks));
    const int64_t shared = static_cast<int64_t>(p.cols) * 4 * nx;
    const dim3    grid(static_cast<unsigned>(blocks));
    return nx == 1 ? launch_kernel(segments_kernel<BITS, 1>, p, grid, warps * 32, shared, programmatic, stream)
                   : launch_kernel(segments_kernel<BITS, ROW_BLOCKS_MAX_COLUMNS>, p, grid, warps * 32, shared,
                                   programmatic, stream);
}

// Multiplies one matrix b by a.n columns of x, at most nx.
cudaError_t multiply_columns(const row_blocks_layout & b, const cuda_sparse_mul_mat_params & a, int nx,
                             cudaStream_t stream) {
    segments_launch p = {};
    std::copy_n(b.sets, b.n_sets, p.sets);
    for (int i = 1; i < b.n_sets; i++) {
        p.first_segment[i] = p.first_segment[i - 1] + b.sets[i - 1].n_segments;
    }
    p.n_sets    = b.n_sets;
    p.x         = a.x;
    p.ldx       = a.ldx;
    p.cols      = static_cast<int32_t>(b.cols);
    p.n_columns = static_cast<int32_t>(a.n);
    p.n_slots   = b.n_slots;
    p.partial   = b.partial;
    CUDA_TRY(b.delta_bits == 4 ? launch_segments<4>(p, nx, b.n_segments, a.programmatic, stream)
                               : launch_segments<8>(p, nx, b.n_segments, a.programmatic, stream));
    const int32_t     n_rows = static_cast<int32_t>(a.row_end[0] - a.row_begin[0]);
    const sums_launch s      = {
        b.slot_ptr + a.row_begin[0], b.partial, a.residual[0], a.bias[0], a.y[0], a.ldy[0], n_rows, b.n_slots
    };
    return launch_kernel(sums_kernel, s, dim3(static_cast<unsigned>((n_rows + 255) / 256), static_cast<unsigned>(a.n)),
                         256, 0, a.programmatic, stream);
}

} // namespace

int columns_at_once(const row_blocks_layout & w, const cuda_sparse_mul_mat_params &, const cuda_device_info & device) {
    return w.cols * 4 * ROW_BLOCKS_MAX_COLUMNS <= device.shared_nbytes ? ROW_BLOCKS_MAX_COLUMNS : 1;
}

cudaError_t multiply(const row_blocks_layout & w, const cuda_sparse_mul_mat_params & a, int nx, cudaStream_t stream) {
    return multiply_columns(w, a, nx > 1 ? ROW_BLOCKS_MAX_COLUMNS : 1, stream);
}

} // namespace macko::cuda
