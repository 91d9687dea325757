// Makes sparse rows dense: for products with many columns (a panel of rows at a time, then a dense product), and for
// get_tensor.
#include "cuda/lib/common.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>

namespace macko::cuda {

// ---- INLINE_DELTA, EXP_CODED ----

struct densify_params {
    row_split_layout m;
    int64_t          row_begin;
    int64_t          row_end;
    uint16_t *       dst;
    int64_t          ld;
    int32_t          rows;   // rows of a block in shared memory at a time, at most 32 / lanes
    int32_t          pitch;  // elements of a row in shared memory: those of dst, and space for fillers after them
    int32_t          vector; // 8 if rows of dst are aligned to 16 bytes and cols is a multiple of 8, else 1
    uint32_t         weight[16];
};

constexpr int MAX_DENSIFY_WARPS = 8;

// Positions are counted in units of 2^-SHIFT bytes of 16-bit columns, STEP units from one delta step to the next:
// set_inline_delta_weights() and set_exp_coded_weights() divide STEP by up to 64.
template <int BITS, bool BANK_ORDER> constexpr uint32_t DENSIFY_SHIFT = !BANK_ORDER && BITS < 6 ? 6 : 0;
template <int BITS, bool BANK_ORDER>
constexpr uint32_t DENSIFY_STEP = (BANK_ORDER ? 64u : 2u) << DENSIFY_SHIFT<BITS, BANK_ORDER>;

template <typename T,      // layout and type of the values: inline_delta<...> or exp_coded<...>
          int  BITS,       // bits of a delta
          bool BANK_ORDER> // entries are in the order of shared-memory banks, not of columns
__global__ void __launch_bounds__(MAX_DENSIFY_WARPS * 32)
    densify_row_split_kernel(const __grid_constant__ densify_params p) { // matrix, rows, destination, dp4a weights
    // One block per row, or per 32 / lanes rows:
    //
    //   run of a lane   | groups of warp 0 | groups of warp 1 | ... |
    //   position        base + deltas of the warps before + deltas of this warp's groups so far
    //
    // Phases: clear the row in shared memory; add up the deltas of each warp's groups; scatter the values to their
    // columns, then the outliers; request the groups of the next row; copy the row to dst.
    constexpr int DEPTH   = 4; // groups requested at a time
    constexpr int ENTRIES = group_bits<T, BITS>::ENTRIES, PARTS = group_bits<T, BITS>::PARTS,
                  PER_PART  = ENTRIES / PARTS;
    constexpr uint32_t STEP = DENSIFY_STEP<BITS, BANK_ORDER>, shift = DENSIFY_SHIFT<BITS, BANK_ORDER>;
    extern __shared__ __align__(16) uint16_t dense[];
    __shared__ uint32_t                      advance[MAX_DENSIFY_WARPS][32];
    const row_split_layout &                 m     = p.m;
    const int                                lanes = m.lanes, rows = p.rows;
    const int                                warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int                                lane = threadIdx.x % lanes, sub = threadIdx.x % 32 / lanes;
    const int                                pitch = p.pitch;
    // minus the bytes of all positions of a row; used only with BANK_ORDER
    const uint32_t negative = 2 - 64 * static_cast<uint32_t>(m.bank_width);
    const float    power    = __int_as_float((127 + m.exponent) << 23); // 2^exponent
    const bool     bf16     = is_exp_coded<T> ? is_bf16<T> : m.type == GGML_MACKO_TYPE_BF16;
    char *         mine     = reinterpret_cast<char *>(dense + sub * pitch); // accessed only if sub < rows
    cuda_wait_for_previous();
    cuda_allow_next();

    // this thread's share of a row: groups from ... to - 1 of its run
    row_span            span;
    int                 from, to, end = 0, end_of_outliers = 0;
    uint32_t            base;
    group_bits<T, BITS> bits[DEPTH], outliers; // outliers: the run's first group of outliers, requested early
    const auto          load = [&](int first) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (first + d < to) {
                bits[d].load(m.groups, span.slot(lane, lanes, first + d));
            }
        }
    };
    const auto begin_rows = [&](int64_t row0) {
        const int64_t row  = row0 + sub;
        const bool    here = row < p.row_end && sub < rows;
        span               = here ? row_span(m.row_ptr[row], m.row_ptr[row + 1], m.trailing[row]) : row_span();
        base               = here ? m.bases[row * lanes + lane] : 0;
        const int first = span.first_step(lane), own = span.end_step(lane, lanes) - first;
        from = first + own * warp / warps;
        to   = first + own * (warp + 1) / warps;
        end = span.end_step(lane, lanes), end_of_outliers = span.end_of_outliers(lane, lanes);
        load(from);
        if (warp == 0 && end < end_of_outliers) {
            outliers.load(m.groups, span.slot(lane, lanes, end));
        }
    };

    const int64_t stride = static_cast<int64_t>(gridDim.x) * rows;
    int64_t       row0   = p.row_begin + static_cast<int64_t>(blockIdx.x) * rows;
    begin_rows(row0);
    for (; row0 < p.row_end; row0 += stride) {
        uint32_t at = base * 2 << shift;
        for (int i = threadIdx.x; i < rows * pitch / 8; i += blockDim.x) {
            reinterpret_cast<uint4 *>(dense)[i] = make_uint4(0, 0, 0, 0);
        }
        if (warps > 1) {
            uint32_t   sum = 0;
            const auto add = [&](const group_bits<T, BITS> & c) {
                sum = c.template walk<0>(sum, p.weight, [](auto, uint32_t) {});
                if constexpr (PARTS == 2) {
                    sum = c.template walk<1>(sum, p.weight, [](auto, uint32_t) {});
                }
                sum += ENTRIES * STEP;
            };
#pragma unroll 4
            for (int s = from + DEPTH; s < to; s++) {
                group_bits<T, BITS> c;
                c.load(m.groups, span.slot(lane, lanes, s));
                add(c);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (from + d < to) {
                    add(bits[d]);
                }
            }
            advance[warp][threadIdx.x % 32] = sum;
        }
        __syncthreads();
        for (int w = 0; w < warp; w++) {
            at += advance[w][threadIdx.x % 32];
        }
        if (BANK_ORDER && warps > 1) {
            at %= (0 - negative) << shift;
        }
        for (int s = from; s < to; s += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (s + d < to) {
                    const auto scatter = [&](auto part) {
                        [[maybe_unused]] uint32_t pairs[PER_PART / 2]; // EXP_CODED
                        if constexpr (is_exp_coded<T>) {
                            bits[d].template scaled<decltype(part)::value>(pairs, __float_as_uint(power));
                        }
                        at = bits[d].template walk<decltype(part)::value>(at, p.weight, [&](auto entry, uint32_t sum) {
                            constexpr int k       = decltype(entry)::value;
                            constexpr int in_part = k % PER_PART;
                            uint16_t      value;
                            if constexpr (is_exp_coded<T>) {
                                value = static_cast<uint16_t>(pairs[in_part / 2] >> 16 * (in_part % 2));
                            } else {
                                value = bits[d].template half<k>();
                            }
                            uint32_t to = (sum >> shift) + in_part * (STEP >> shift);
                            if (BANK_ORDER) {
                                to = wrap(to, negative);
                            }
                            // An outlier may be zero here, and fillers after the last entry of a row would overwrite
                            // its first entries.
                            if (value != 0) {
                                *reinterpret_cast<uint16_t *>(mine + to) =
                                    is_exp_coded<T> ? value : from_inline_delta(value, power, bf16);
                            }
                        });
                        at += PER_PART * STEP;
                        if (BANK_ORDER) {
                            at = wrap(at, negative << shift);
                        }
                    };
                    scatter(std::integral_constant<int, 0>());
                    if constexpr (PARTS == 2) {
                        scatter(std::integral_constant<int, 1>());
                    }
                }
            }
            load(s + DEPTH);
        }
        if (warp == 0) {
            for (int step = end; step < end_of_outliers; step++) {
                if (step > end) {
                    outliers.load(m.groups, span.slot(lane, lanes, step));
                }
                outliers.for_each_outlier([&](int, uint32_t column, uint32_t value) {
                    if (value != 0) {
                        *reinterpret_cast<uint16_t *>(mine + column * 2) =
                            is_exp_coded<T> ? narrowed(value, bf16) : static_cast<uint16_t>(value);
                    }
                });
            }
        }
        __syncthreads();
        begin_rows(row0 + stride);
        for (int r = 0; r < rows && row0 + r < p.row_end; r++) {
            uint16_t *       out = p.dst + (row0 + r - p.row_begin) * p.ld;
            const uint16_t * in  = dense + r * pitch;
            if (p.vector == 8) {
#pragma unroll 4
                for (int i = threadIdx.x; i < m.cols / 8; i += blockDim.x) {
                    reinterpret_cast<uint4 *>(out)[i] = reinterpret_cast<const uint4 *>(in)[i];
                }
            } else {
                for (int i = threadIdx.x; i < m.cols; i += blockDim.x) {
                    out[i] = in[i];
                }
            }
        }
        __syncthreads();
    }
}

template <typename T, int BITS, bool BANK_ORDER>
static cudaError_t launch_densify_row_split(densify_params & p, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    set_weights<T>(p.weight, BITS, DENSIFY_STEP<BITS, BANK_ORDER>);
    const auto kernel = densify_row_split_kernel<T, BITS, BANK_ORDER>;
    p.pitch           = static_cast<int32_t>(
        (std::max<int64_t>(p.m.cols + group_bits<T, BITS>::ENTRIES, 32 * p.m.bank_width) + 7) & ~int64_t(7));
    const int64_t pitch_nbytes = p.pitch * 2; // fits shared memory, because x is twice as large and fits
    const int64_t room         = device.shared_nbytes - static_cast<int64_t>(MAX_DENSIFY_WARPS * 32 * sizeof(uint32_t));
    const int     rows         = static_cast<int>(std::min<int64_t>(32 / p.m.lanes, room / pitch_nbytes));
    const size_t  shared       = static_cast<size_t>(rows * pitch_nbytes);
    // With fewer blocks on a multiprocessor, more warps share a row (measured). A warp then has few groups of a run,
    // and does not read them again after it has added up their deltas.
    const int64_t resident = room / (rows * pitch_nbytes + 2048);
    const int     warps    = resident >= 16 ? 3 : resident >= 8 ? 4 : MAX_DENSIFY_WARPS;
    p.rows                 = rows;
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)));
    const int64_t blocks = std::min<int64_t>((p.row_end - p.row_begin + rows - 1) / rows,
                                             std::max<int64_t>(1, resident) * device.multiprocessors);
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(warps * 32), shared, stream>>>(p);
    return cudaGetLastError();
}

static densify_params params_of(const row_split_layout & w, const dense_rows & to) {
    const bool aligned = reinterpret_cast<uintptr_t>(to.dst) % 16 == 0 && to.ld % 8 == 0 && w.cols % 8 == 0;
    return { w, to.row_begin, to.row_end, static_cast<uint16_t *>(to.dst), to.ld, 1, 0, aligned ? 8 : 1, {} };
}
cudaError_t densify(const inline_delta_layout & w, const dense_rows & to) {
    using T          = inline_delta<__half>; // F16 and BF16 matrices share kernels
    densify_params p = params_of(w, to);
    return with_constant<2, 3, 4, 6>(w.delta_bits, cudaErrorNotSupported, [&](auto n) {
        constexpr int BITS = decltype(n)::value;
        return w.bank_width ? launch_densify_row_split<T, BITS, (BITS < 6)>(p, to.stream)
                            : launch_densify_row_split<T, BITS, (BITS == 3)>(p, to.stream);
    });
}
cudaError_t densify(const exp_coded_layout & w, const dense_rows & to) {
    densify_params p = params_of(w, to);
    return with_constant<2, 4, 6>(w.delta_bits, cudaErrorNotSupported, [&](auto n) {
        constexpr int BITS = decltype(n)::value;
        return w.type == GGML_MACKO_TYPE_F16
                   ? launch_densify_row_split<exp_coded<__half>, BITS, (BITS < 6)>(p, to.stream)
                   : launch_densify_row_split<exp_coded<__nv_bfloat16>, BITS, (BITS < 6)>(p, to.stream);
    });
}

// ---- MACKO ----

// One block per row: all warps write zeros, then one warp writes the entries.
template <typename U>
__global__ void __launch_bounds__(128)
    densify_macko_kernel(const macko_layout m, int64_t row_begin, int64_t row_end, U * dst, int64_t ld) {
    const U * values = reinterpret_cast<const U *>(m.values);
    const int lane   = threadIdx.x % 32;
    cuda_wait_for_previous();
    cuda_allow_next();
    for (int64_t row = row_begin + blockIdx.x; row < row_end; row += gridDim.x) {
        U * out = dst + (row - row_begin) * ld;
        for (int64_t c = threadIdx.x; c < m.cols; c += blockDim.x) {
            out[c] = 0;
        }
        __syncthreads();
        int       column = -1;
        const int end    = m.row_ptr[row + 1];
        for (int e = m.row_ptr[row]; e < end && threadIdx.x < 32; e += 32) {
            const int k    = e + lane;
            const int step = warp_prefix_sum(k < end ? 1 + macko_delta(m.deltas, k, m.delta_bits) : 0);
            if (k < end && values[k] != 0) {
                out[column + step] = values[k];
            }
            column += __shfl_sync(FULL_WARP, step, 31);
        }
        __syncthreads();
    }
}

template <typename U> static cudaError_t launch_densify_macko(const macko_layout & m, const dense_rows & to) {
    const int64_t blocks = std::min<int64_t>(to.row_end - to.row_begin, 1 << 20);
    densify_macko_kernel<U><<<static_cast<unsigned>(blocks), 128, 0, to.stream>>>(m, to.row_begin, to.row_end,
                                                                                  static_cast<U *>(to.dst), to.ld);
    return cudaGetLastError();
}

cudaError_t densify(const macko_layout & w, const dense_rows & to) {
    return w.type == GGML_MACKO_TYPE_F32 ? launch_densify_macko<uint32_t>(w, to)
                                         : launch_densify_macko<uint16_t>(w, to);
}

// ---- any layout ----

cudaError_t cuda_sparse_densify(const gpu_layout & w, int64_t row_begin, int64_t row_end, void * dst, int64_t ld,
                                cudaStream_t stream) {
    const dense_rows to = { row_begin, row_end, dst, ld, stream };
    return row_begin < row_end ? std::visit([&](const auto & layout) { return densify(layout, to); }, w) : cudaSuccess;
}

} // namespace macko::cuda
