// Surveys row-split layouts (gpu-layout/row-split.h) on the GPU, and makes them from MACKO's arrays. The survey of
// gpu-layout/survey.cpp has the same results.
#include "cuda/sparse/repack.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>

namespace macko::cuda {

// ---- one row as dense values in shared memory ----

static __device__ void decode_row(const macko_layout & raw, int64_t row, uint16_t * dense, int n_dense) {
    const int        lane   = threadIdx.x % 32;
    const uint16_t * values = reinterpret_cast<const uint16_t *>(raw.values);
    for (int i = lane; i < n_dense; i += 32) {
        dense[i] = 0;
    }
    __syncwarp();
    constexpr int AHEAD  = 4; // loads in flight
    int           column = -1;
    const int     end    = raw.row_ptr[row + 1];
    for (int e = raw.row_ptr[row]; e < end; e += 32 * AHEAD) {
        int      step[AHEAD]  = {};
        uint16_t value[AHEAD] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = e + 32 * i + lane;
            if (k < end) {
                step[i]  = 1 + macko_delta(raw.deltas, k, raw.delta_bits);
                value[i] = values[k];
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int sum = warp_prefix_sum(step[i]);
            if (value[i] != 0) {
                dense[column + sum] = value[i];
            }
            column += __shfl_sync(FULL_WARP, sum, 31);
        }
    }
    __syncwarp();
}

// Calls entry(index, slot of its first step, delta, value) for each entry of a row, which decode_row() wrote to shared
// memory. Returns the number of entries on all lanes.
template <typename F>
static __device__ int walk_row(const row_order & order, const uint16_t * dense, int delta_bits, F && entry) {
    const int lane = threadIdx.x % 32;
    int       n = 0, last = -1; // entries so far, slot of the last non-zero
    for (int q0 = 0; q0 < order.x_slots; q0 += 32) {
        const int      q      = q0 + lane;
        const uint16_t value  = q < order.x_slots ? dense[order.word(q)] : uint16_t(0);
        const unsigned here   = __ballot_sync(FULL_WARP, value != 0);
        const unsigned below  = here & ((1u << lane) - 1);
        const int      before = below ? q0 + 31 - __clz(below) : last;
        const int      gap    = q - before - 1;
        const int      fill   = value != 0 ? gap >> delta_bits : 0;
        int            index  = __popc(below);
        int            total  = __popc(here);
        if (__any_sync(FULL_WARP, fill)) {
            const int sum = warp_prefix_sum(fill);
            index += sum - fill;
            total += __shfl_sync(FULL_WARP, sum, 31);
        }
        if (value != 0) {
            for (int f = 0; f < fill; f++) {
                entry(n + index + f, before + 1 + (f << delta_bits), (1u << delta_bits) - 1, uint16_t(0));
            }
            entry(n + index + fill, before + 1 + (fill << delta_bits),
                  static_cast<unsigned>(gap) & ((1u << delta_bits) - 1), value);
        }
        n += total;
        if (here) {
            last = q0 + 31 - __clz(here);
        }
    }
    return n;
}

template <typename M> static __device__ __forceinline__ uint32_t widened(const M & m, uint16_t bits) {
    return widened(bits, m.type == GGML_MACKO_TYPE_BF16);
}

// Calls outlier(index, column, value) for each value of a row that a group cannot hold. Returns their number on all
// lanes.
template <typename M, typename F>
static __device__ int walk_outliers(const M & m, const row_order & order, const uint16_t * dense, F && outlier) {
    const int lane = threadIdx.x % 32;
    int       n    = 0;
    for (int q0 = 0; q0 < order.x_slots; q0 += 32) {
        const int      word = q0 + lane < order.x_slots ? order.word(q0 + lane) : -1;
        const bool     here = word >= 0 && held_as(m, widened(m, dense[word])) < 0;
        const unsigned all  = __ballot_sync(FULL_WARP, here);
        if (here) {
            outlier(n + __popc(all & ((1u << lane) - 1)), word, dense[word]);
        }
        n += __popc(all);
    }
    return n;
}

// Counts, for each exponent, the values that groups hold with it, minus those that they hold with the exponent before.
template <typename M> static __global__ void exponents_kernel(const macko_layout raw, const M m, int * changes) {
    __shared__ int mine[N_EXPONENTS + 1];
    for (int i = threadIdx.x; i <= N_EXPONENTS; i += blockDim.x) {
        mine[i] = 0;
    }
    __syncthreads();
    const int        n      = raw.row_ptr[raw.rows];
    const uint16_t * values = reinterpret_cast<const uint16_t *>(raw.values);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const exponent_range e = exponents_of(m, widened(m, values[i] & 0x7fff));
        if (e.first < e.end) {
            atomicAdd(mine + min(N_EXPONENTS, max(0, e.first)), 1);
            atomicAdd(mine + min(N_EXPONENTS, max(0, e.end)), -1);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= N_EXPONENTS; i += blockDim.x) {
        atomicAdd(changes + i, mine[i]);
    }
}

// Writes the number of groups of each row to row_ptr[row + 1].
template <typename M>
static __global__ void count_kernel(const macko_layout raw, const M m, bool whole_lines, repack_counts * counts) {
    extern __shared__ __align__(16) uint16_t dense[];
    const row_order                          shape(m, 0);
    for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
        decode_row(raw, row, dense, shape.x_slots);
        const row_order order(m, row);
        const int       n        = walk_row(order, dense, m.delta_bits, [](int, int, unsigned, uint16_t) {});
        const int       outliers = walk_outliers(m, order, dense, [&](int, int, uint16_t value) {
            if (!outlier_fits(m, widened(m, value))) {
                counts->impossible = 1;
            }
        });
        if (threadIdx.x == 0) {
            const int outlier_groups = (outliers + OUTLIERS_OF_GROUP - 1) / OUTLIERS_OF_GROUP,
                      used           = (n + entries_of_group(m) - 1) / entries_of_group(m) + outlier_groups,
                      unused         = whole_lines ? -used & (LINE_GROUPS - 1) : 0;
            if (outlier_groups > MAX_OUTLIER_GROUPS) {
                counts->impossible = 1;
            }
            m.trailing[row] = static_cast<uint16_t>(pack_trailing(min(outlier_groups, MAX_OUTLIER_GROUPS), unused));
            atomicAdd(reinterpret_cast<unsigned long long *>(&counts->unused_groups),
                      static_cast<unsigned long long>(unused));
            m.row_ptr[row + 1] = used + unused;
        }
        __syncwarp();
    }
}

// Turns counts into offsets, in one block. If *total exceeds 31 bits, row_ptr is not used.
static __global__ void scan_kernel(int32_t * row_ptr, int64_t rows, int64_t * total) {
    __shared__ int64_t warp_total[32];
    const int          lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t            sum = 0;
    for (int64_t r0 = 0; r0 < rows; r0 += blockDim.x) {
        const int64_t r = r0 + threadIdx.x;
        const int64_t n = warp_prefix_sum(r < rows ? static_cast<int64_t>(row_ptr[r + 1]) : int64_t(0));
        if (lane == 31) {
            warp_total[warp] = n;
        }
        __syncthreads();
        int64_t before = sum;
        for (int w = 0; w < warp; w++) {
            before += warp_total[w];
        }
        for (unsigned w = 0; w < blockDim.x / 32; w++) {
            sum += warp_total[w];
        }
        if (r < rows) {
            row_ptr[r + 1] = static_cast<int32_t>(before + n);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        row_ptr[0] = 0;
        *total     = sum;
    }
}

// Set entry k of the group in this slot, which is zero before; read its delta; set the k-th outlier of a group.
static __device__ __forceinline__ void set_entry(const inline_delta_layout & m, int64_t slot, int k, uint32_t held,
                                                 unsigned delta) {
    unsigned * const words = reinterpret_cast<unsigned *>(m.groups);
    set_inline_delta_entry(k, held, delta, m.delta_bits,
                           [&](int word, uint32_t bits) { atomicOr(words + slot * 4 + word, bits); });
}
static __device__ __forceinline__ int delta_at(const inline_delta_layout & m, int64_t slot, int k) {
    return inline_delta_of(reinterpret_cast<const uint32_t *>(m.groups) + slot * 4, k, m.delta_bits);
}
static __device__ __forceinline__ void set_outlier(const inline_delta_layout & m, int64_t slot, int k, int column,
                                                   uint16_t value) {
    reinterpret_cast<unsigned *>(m.groups)[slot * OUTLIERS_OF_GROUP + k] =
        static_cast<unsigned>(column) | static_cast<unsigned>(value) << 16;
}
static __device__ __forceinline__ void set_entry(const exp_coded_layout & m, int64_t slot, int k, uint32_t held,
                                                 unsigned delta) {
    unsigned * const words = reinterpret_cast<unsigned *>(m.groups);
    set_exp_coded_entry(k, held, delta, m.delta_bits, [&](int word, uint32_t bits) {
        atomicOr(words + exp_coded_word(slot, word, m.delta_bits), bits);
    });
}
static __device__ __forceinline__ int delta_at(const exp_coded_layout & m, int64_t slot, int k) {
    const uint32_t * const words = reinterpret_cast<const uint32_t *>(m.groups);
    return exp_coded_delta_of(k, m.delta_bits,
                              [&](int word) { return words[exp_coded_word(slot, word, m.delta_bits)]; });
}
static __device__ __forceinline__ void set_outlier(const exp_coded_layout & m, int64_t slot, int k, int column,
                                                   uint16_t value) {
    unsigned * const words                       = reinterpret_cast<unsigned *>(m.groups);
    words[exp_coded_word(slot, k, m.delta_bits)] = widened(m, value);
    atomicOr(words + exp_coded_word(slot, 4 + k / 2, m.delta_bits), static_cast<unsigned>(column) << k % 2 * 16);
}

// Writes the groups, which are zero before, and the bases.
template <typename M> static __global__ void repack_kernel(const macko_layout raw, const M m) {
    extern __shared__ __align__(16) uint16_t dense[];
    const int                                entries = entries_of_group(m);
    const row_order                          shape(m, 0);
    for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
        decode_row(raw, row, dense, shape.x_slots);
        const row_order order(m, row);
        const row_span  span(m.row_ptr[row], m.row_ptr[row + 1], m.trailing[row]);
        walk_outliers(m, order, dense, [&](int index, int word, uint16_t value) {
            set_outlier(m, span.begin + span.groups + index / OUTLIERS_OF_GROUP, index % OUTLIERS_OF_GROUP, word,
                        value);
        });
        walk_row(order, dense, m.delta_bits, [&](int index, int from, unsigned delta, uint16_t value) {
            const int k     = index % entries;
            const int group = index / entries, run = span.run_of(group, m.lanes),
                      in_run = group - span.n_before(run, m.lanes);
            set_entry(m, span.slot(run, m.lanes, span.first_step(run) + in_run), k,
                      static_cast<uint32_t>(max(held_as(m, widened(m, value)), 0)), delta);
            if (k == 0 && in_run == 0) {
                m.bases[row * m.lanes + run] = static_cast<uint16_t>(order.word(from));
            }
        });
        __syncwarp();
    }
}

// Finds the number of words after x that runs reach. One thread per run follows its deltas like a product. INT32_MAX: a
// run passes the words that repeat.
template <typename M> static __global__ void overshoot_kernel(const M m, int32_t * overshoot) {
    const int64_t run  = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    int           most = 0;
    if (run < m.rows * m.lanes) {
        const int64_t  row  = run / m.lanes;
        const int      lane = static_cast<int>(run % m.lanes);
        const row_span span(m.row_ptr[row], m.row_ptr[row + 1], m.trailing[row]);
        const int      modulus = 32 * m.bank_width - 1;
        int            at      = m.bases[run];
        for (int step = span.first_step(lane); step < span.end_step(lane, m.lanes); step++) {
            const int64_t slot = span.slot(lane, m.lanes, step);
            for (int k = 0; k < entries_of_group(m); k += entries_of_part(m)) {
                int steps = entries_of_part(m) - 1;
                for (int i = k; i < k + entries_of_part(m); i++) {
                    steps += delta_at(m, slot, i);
                }
                const int last = at + 32 * steps;
                most           = max(most, last + 1 - modulus);
                at             = last + 32;
                at -= at >= modulus ? modulus : 0;
                if (at >= modulus) {
                    atomicMax(overshoot, INT32_MAX);
                    return;
                }
            }
        }
    }
    if (most > 0) {
        atomicMax(overshoot, most);
    }
}

// ---- launches ----

template <typename M> int find_exponent(const repacker & r, const M & m, shape_survey * found) {
    CUDA_OK(cudaMemsetAsync(r.counts, 0, sizeof(*r.counts), r.stream));
    exponents_kernel<<<static_cast<unsigned>(r.device.multiprocessors * 8), 256, 0, r.stream>>>(r.raw, m,
                                                                                                r.counts->exponents);
    CUDA_OK(cudaGetLastError());
    int32_t changes[N_EXPONENTS + 1];
    CUDA_OK(cudaMemcpyAsync(changes, r.counts->exponents, sizeof(changes), cudaMemcpyDeviceToHost, r.stream));
    CUDA_OK(cudaStreamSynchronize(r.stream));
    find_exponent(changes, end_of_exponents(m), found);
    return GGML_MACKO_STATUS_OK;
}

// Bytes of a dense row.
template <typename M> static int      shared_nbytes_of(const M & m) { return static_cast<int>(x_words_of(m) * 2); }
template <typename M> static unsigned blocks_of(const repacker & r, const M & m) {
    return static_cast<unsigned>(std::min<int64_t>(m.rows, r.device.multiprocessors * 32));
}

template <typename M> int count_groups(const repacker & r, const M & m, shape_survey * found) {
    CUDA_OK(cudaFuncSetAttribute(count_kernel<M>, cudaFuncAttributeMaxDynamicSharedMemorySize, r.device.shared_nbytes));
    CUDA_OK(cudaMemsetAsync(r.counts, 0, sizeof(*r.counts), r.stream));
    count_kernel<<<blocks_of(r, m), 32, shared_nbytes_of(m), r.stream>>>(r.raw, m, has_whole_lines(m, r.desc),
                                                                         r.counts);
    CUDA_OK(cudaGetLastError());
    scan_kernel<<<1, 1024, 0, r.stream>>>(m.row_ptr, m.rows, &r.counts->groups);
    CUDA_OK(cudaGetLastError());
    repack_counts counts;
    CUDA_OK(cudaMemcpyAsync(&counts, r.counts, sizeof(counts), cudaMemcpyDeviceToHost, r.stream));
    CUDA_OK(cudaStreamSynchronize(r.stream));
    found->n_groups        = counts.groups;
    found->n_unused_groups = counts.unused_groups;
    found->impossible      = counts.impossible != 0;
    return GGML_MACKO_STATUS_OK;
}

static int64_t nbytes_of_groups(const inline_delta_layout &, int64_t n) { return n * INLINE_DELTA_GROUP_NBYTES; }
static int64_t nbytes_of_groups(const exp_coded_layout & m, int64_t n) { // whole lines
    return (n + LINE_GROUPS - 1) / LINE_GROUPS * LINE_GROUPS * exp_coded_group_nbytes(m.delta_bits);
}

template <typename M> int make_groups(const repacker & r, const M & m, shape_survey * found) {
    CUDA_OK(cudaMemsetAsync(m.groups, 0, static_cast<size_t>(nbytes_of_groups(m, found->n_groups)), r.stream));
    CUDA_OK(cudaMemsetAsync(m.bases, 0, static_cast<size_t>(m.rows * m.lanes * 2), r.stream));
    CUDA_OK(cudaMemsetAsync(r.counts, 0, sizeof(*r.counts), r.stream));
    CUDA_OK(
        cudaFuncSetAttribute(repack_kernel<M>, cudaFuncAttributeMaxDynamicSharedMemorySize, r.device.shared_nbytes));
    repack_kernel<<<blocks_of(r, m), 32, shared_nbytes_of(m), r.stream>>>(r.raw, m);
    CUDA_OK(cudaGetLastError());
    if (m.bank_width) {
        overshoot_kernel<<<static_cast<unsigned>((m.rows * m.lanes + 255) / 256), 256, 0, r.stream>>>(
            m, &r.counts->overshoot);
        CUDA_OK(cudaGetLastError());
    }
    CUDA_OK(cudaMemcpyAsync(&found->overshoot, &r.counts->overshoot, sizeof(found->overshoot), cudaMemcpyDeviceToHost,
                            r.stream));
    CUDA_OK(cudaStreamSynchronize(r.stream));
    return GGML_MACKO_STATUS_OK;
}

template int find_exponent(const repacker &, const inline_delta_layout &, shape_survey *);
template int find_exponent(const repacker &, const exp_coded_layout &, shape_survey *);
template int count_groups(const repacker &, const inline_delta_layout &, shape_survey *);
template int count_groups(const repacker &, const exp_coded_layout &, shape_survey *);
template int make_groups(const repacker &, const inline_delta_layout &, shape_survey *);
template int make_groups(const repacker &, const exp_coded_layout &, shape_survey *);

} // namespace macko::cuda
