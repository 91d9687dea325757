// Sparse rows back to dense ones: for products with many columns (a panel of rows at a time, then a dense product) and
// for get_tensor.
#include "cuda/lib/common.cuh"
#include "cuda/sparse/groups.cuh"
#include "cuda/sparse/mul-mat-params.cuh"

#include <algorithm>

namespace macko::cuda {

// ---- RUNS, STRIPED, COMPACT ----

struct unpack_params {
    cuda_sparse_matrix m;
    int64_t            row_begin;
    int64_t            row_end;
    uint16_t *         dst;
    int64_t            ld;
    int32_t            rows;   // at a time in a block's shared memory, at most 32 / lanes
    int32_t            pitch;  // elements of a row there: those of dst, and behind them where fillers may land
    int32_t            vector; // 8 if rows of dst are aligned to 16 bytes and cols is a multiple of 8, else 1
    uint32_t           weight[8];
};

constexpr int MAX_UNPACK_WARPS = 4;

// Where entries go is counted in units of 2^-SHIFT bytes of 16-bit columns, STEP of them from one code step to the
// next: set_weights divides
// it by up to 16 for codes of 4 bits, 64 for those of 2, 128 for those of 1.
template <int BITS, bool STRIPED> constexpr uint32_t UNPACK_SHIFT = STRIPED ? (BITS == 1 ? 1 : 0) : BITS < 6 ? 6 : 0;
template <int BITS, bool STRIPED> constexpr uint32_t UNPACK_STEP  = (STRIPED ? 64u : 2u) << UNPACK_SHIFT<BITS, STRIPED>;

// A block per row (with fewer than 32 runs, per several rows): zeros in shared memory, entries scattered to their
// columns there, then one
// pass to dst. Each warp has a share of every run's groups; the sum of the codes before them says where it starts. The
// groups of the next
// row are on their way while this one goes to dst.
template <typename T, int BITS, bool STRIPED, typename CONVERT>
__global__ void __launch_bounds__(MAX_UNPACK_WARPS * 32) unpack_runs_kernel(const __grid_constant__ unpack_params p) {
    constexpr int      DEPTH   = 4; // groups requested at a time
    constexpr bool     COMPACT = std::is_same<T, compact_f16>::value;
    constexpr int      ENTRIES = group_bits<T, BITS>::ENTRIES;
    constexpr uint32_t UNIT = UNPACK_STEP<BITS, STRIPED>, shift = UNPACK_SHIFT<BITS, STRIPED>;
    extern __shared__ __align__(16) uint16_t dense[];
    __shared__ uint32_t                      advance[MAX_UNPACK_WARPS][32];
    const cuda_sparse_matrix &               m     = p.m;
    const int                                lanes = m.lanes, rows = p.rows;
    const int                                warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int                                lane = threadIdx.x % lanes, sub = threadIdx.x % 32 / lanes;
    const int                                pitch = p.pitch;
    // -(bytes of the places of a row); only used if STRIPED
    const uint32_t negative = 2 - 64 * static_cast<uint32_t>(m.stripe);
    const CONVERT  convert;
    const float    power = __int_as_float((127 + m.exponent) << 23);      // 2^exponent
    char *         mine  = reinterpret_cast<char *>(dense + sub * pitch); // only touched if sub < rows
    cuda_wait_for_previous();
    cuda_allow_next();

    // this thread's share of a row: groups from ... to-1 of its run
    row_places          places;
    int                 from, to, last_group;
    uint32_t            base;
    group_bits<T, BITS> bits[DEPTH];
    const auto          load = [&](int first) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (first + d < to) {
                bits[d].load(m.values, m.codes, places.slot(lane, lanes, first + d));
            }
        }
    };
    const auto begin_rows = [&](int64_t row0) {
        const int64_t row  = row0 + sub;
        const bool    here = row < p.row_end && sub < rows;
        places = here ? row_places(m.row_ptr[row], m.row_ptr[row + 1], COMPACT ? m.tails[row] : 0) : row_places();
        base   = here ? m.bases[row * lanes + lane] : 0;
        const int first = places.first_step(lane), own = places.end_step(lane, lanes) - first;
        from       = first + own * warp / warps;
        to         = first + own * (warp + 1) / warps;
        last_group = own > 0 && places.n_before(lane + 1, lanes) == places.groups ? first + own - 1 : -1; // of the row
        load(from);
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
                sum = c.walk(sum, p.weight, [](auto, uint32_t) {}) + ENTRIES * UNIT;
            };
#pragma unroll 4
            for (int s = from + DEPTH; s < to; s++) {
                group_bits<T, BITS> c;
                c.load(m.values, m.codes, places.slot(lane, lanes, s));
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
        if (STRIPED && warps > 1) {
            at %= (0 - negative) << shift;
        }
        for (int s = from; s < to; s += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (s + d < to) {
                    const uint4    v        = bits[d].words();
                    const uint32_t words[4] = { v.x, v.y, v.z, v.w };
                    const auto     scatter  = [&](auto && wanted) {
                        return bits[d].walk(at, p.weight, [&](auto entry, uint32_t sum) {
                            constexpr int k  = decltype(entry)::value;
                            uint32_t      to = (sum >> shift) + k * (UNIT >> shift);
                            if (STRIPED) {
                                to = wrap(to, negative);
                            }
                            const uint16_t value = static_cast<uint16_t>(k % 2 ? words[k / 2] >> 16 : words[k / 2]);
                            if (wanted(value)) {
                                *reinterpret_cast<uint16_t *>(mine + to) =
                                    COMPACT ? from_compact(value, power) : convert(value);
                            }
                        });
                    };
                    // COMPACT: what is zero here may be spilled; fillers behind the row's entries would hit the first
                    // ones
                    if (COMPACT || (STRIPED && s + d == last_group)) {
                        at = scatter([](uint16_t value) { return value != 0; });
                    } else {
                        at = scatter([](uint16_t) { return true; });
                    }
                    at += ENTRIES * UNIT;
                    if (STRIPED) {
                        at = wrap(at, negative << shift);
                    }
                }
            }
            load(s + DEPTH);
        }
        if (COMPACT && warp == 0) {
            for (int i = lane; i < places.spilled; i += lanes) {
                const uint4 v =
                    load_streaming(reinterpret_cast<const uint4 *>(m.values) + places.begin + places.groups + i);
                for (const uint32_t pair : { v.x, v.y, v.z, v.w }) {
                    if (pair) {
                        *reinterpret_cast<uint16_t *>(mine + (pair & 0xffff) * 2) = static_cast<uint16_t>(pair >> 16);
                    }
                }
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

template <typename T, int BITS, bool STRIPED, typename CONVERT>
static cudaError_t launch_unpack_runs(unpack_params & p, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    if (std::is_same<T, compact_f16>::value) {
        set_compact_weights(p.weight, BITS, UNPACK_STEP<BITS, STRIPED>);
    } else {
        set_weights(p.weight, BITS, UNPACK_STEP<BITS, STRIPED>);
    }
    const auto kernel = unpack_runs_kernel<T, BITS, STRIPED, CONVERT>;
    p.pitch =
        static_cast<int32_t>((std::max<int64_t>(p.m.cols + CUDA_SPARSE_GROUP, 32 * p.m.stripe) + 7) & ~int64_t(7));
    const int64_t pitch_nbytes = p.pitch * 2; // fits: x, which is twice as large, does
    const int64_t room         = device.shared_nbytes - static_cast<int64_t>(MAX_UNPACK_WARPS * 32 * sizeof(uint32_t));
    const int     rows         = static_cast<int>(std::min<int64_t>(32 / p.m.lanes, room / pitch_nbytes));
    const size_t  shared       = static_cast<size_t>(rows * pitch_nbytes);
    // one warp per row needs no sums of codes, but there have to be enough blocks on an SM
    const int64_t resident = room / (rows * pitch_nbytes + 2048);
    const int     warps    = resident >= 16 ? 1 : MAX_UNPACK_WARPS;
    p.rows                 = rows;
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)));
    const int64_t blocks = std::min<int64_t>((p.row_end - p.row_begin + rows - 1) / rows,
                                             std::max<int64_t>(1, resident) * device.multiprocessors);
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(warps * 32), shared, stream>>>(p);
    return cudaGetLastError();
}

template <typename CONVERT> static cudaError_t launch_unpack_bits(unpack_params & p, cudaStream_t stream) {
    const bool striped = p.m.stripe != 0;
    switch (p.m.delta_bits) { // __half: any 16 bits
        case 1:
            return striped ? launch_unpack_runs<__half, 1, true, CONVERT>(p, stream)
                           : launch_unpack_runs<__half, 1, false, CONVERT>(p, stream);
        case 2:
            return striped ? launch_unpack_runs<__half, 2, true, CONVERT>(p, stream)
                           : launch_unpack_runs<__half, 2, false, CONVERT>(p, stream);
        case 4:
            return striped ? launch_unpack_runs<__half, 4, true, CONVERT>(p, stream)
                           : launch_unpack_runs<__half, 4, false, CONVERT>(p, stream);
        default: return launch_unpack_runs<__half, 8, false, CONVERT>(p, stream);
    }
}

// ---- ROWS ----

// a block per row: zeros, then one warp writes the entries
template <typename U, typename D, typename CONVERT>
__global__ void __launch_bounds__(128) unpack_rows_kernel(const cuda_sparse_matrix m, int64_t row_begin,
                                                          int64_t row_end, D * dst, int64_t ld, CONVERT convert) {
    const U * values = reinterpret_cast<const U *>(m.values);
    const int lane   = threadIdx.x % 32;
    cuda_wait_for_previous();
    cuda_allow_next();
    for (int64_t row = row_begin + blockIdx.x; row < row_end; row += gridDim.x) {
        D * out = dst + (row - row_begin) * ld;
        for (int64_t c = threadIdx.x; c < m.cols; c += blockDim.x) {
            out[c] = 0;
        }
        __syncthreads();
        int       column = -1;
        const int end    = m.row_ptr[row + 1];
        for (int e = m.row_ptr[row]; e < end && threadIdx.x < 32; e += 32) {
            const int k    = e + lane;
            const int step = warp_prefix_sum(k < end ? 1 + file_code(m.codes, k, m.delta_bits) : 0);
            if (k < end && values[k] != 0) {
                out[column + step] = convert(values[k]);
            }
            column += __shfl_sync(FULL_WARP, step, 31);
        }
        __syncthreads();
    }
}

template <typename U, typename D, typename CONVERT>
static cudaError_t launch_unpack_rows(const cuda_sparse_matrix & m, int64_t row_begin, int64_t row_end, void * dst,
                                      int64_t ld, CONVERT convert, cudaStream_t stream) {
    const int64_t blocks = std::min<int64_t>(row_end - row_begin, 1 << 20);
    unpack_rows_kernel<U, D, CONVERT>
        <<<static_cast<unsigned>(blocks), 128, 0, stream>>>(m, row_begin, row_end, static_cast<D *>(dst), ld, convert);
    return cudaGetLastError();
}

cudaError_t cuda_sparse_unpack(const cuda_sparse_matrix & w, int64_t row_begin, int64_t row_end, int32_t type,
                               void * dst, int64_t ld, cudaStream_t stream) {
    const bool same = type == w.type, to_f16 = type == GGML_MACKO_TYPE_F16;
    if (row_begin >= row_end) {
        return cudaSuccess;
    }
    if (w.part) {
        cuda_sparse_matrix rest = w;
        rest.part               = nullptr;
        CUDA_TRY(cuda_sparse_unpack(rest, row_begin, row_end, type, dst, ld, stream));
        return w.part->densify(row_begin, row_end, type, dst, ld, stream);
    }
    if (w.layout == CUDA_SPARSE_LAYOUT_BLOCKS) {
        return cuda_blocks_unpack(w, row_begin, row_end, type, dst, ld, stream);
    }
    if (w.type == GGML_MACKO_TYPE_F32) { // always ROWS
        if (same) {
            return launch_unpack_rows<uint32_t, uint32_t>(w, row_begin, row_end, dst, ld, same_bits(), stream);
        }
        return to_f16 ? launch_unpack_rows<uint32_t, uint16_t>(w, row_begin, row_end, dst, ld, f32_to_f16(), stream)
                      : launch_unpack_rows<uint32_t, uint16_t>(w, row_begin, row_end, dst, ld, f32_to_bf16(), stream);
    }
    if (!same && !(w.type == GGML_MACKO_TYPE_BF16 && to_f16)) {
        return cudaErrorInvalidValue;
    }
    if (w.layout == CUDA_SPARSE_LAYOUT_ROWS) {
        return same ? launch_unpack_rows<uint16_t, uint16_t>(w, row_begin, row_end, dst, ld, same_bits(), stream)
                    : launch_unpack_rows<uint16_t, uint16_t>(w, row_begin, row_end, dst, ld, bf16_to_f16(), stream);
    }
    const bool    aligned = reinterpret_cast<uintptr_t>(dst) % 16 == 0 && ld % 8 == 0 && w.cols % 8 == 0;
    unpack_params p       = { w, row_begin, row_end, static_cast<uint16_t *>(dst), ld, 1, 0, aligned ? 8 : 1, {} };
    if (w.layout == CUDA_SPARSE_LAYOUT_COMPACT) {
        switch (w.delta_bits) {
            case 2:  return launch_unpack_runs<compact_f16, 2, true, same_bits>(p, stream);
            case 3:  return launch_unpack_runs<compact_f16, 3, true, same_bits>(p, stream);
            case 4:  return launch_unpack_runs<compact_f16, 4, true, same_bits>(p, stream);
            default: return launch_unpack_runs<compact_f16, 6, false, same_bits>(p, stream);
        }
    }
    return same ? launch_unpack_bits<same_bits>(p, stream) : launch_unpack_bits<bf16_to_f16>(p, stream);
}

} // namespace macko::cuda
