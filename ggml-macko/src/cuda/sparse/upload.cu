// Brings a sparse matrix to the GPU: the file's arrays go to device staging memory as they are, and kernels there make
// the layout (layout.h). The host only copies.
#include "cuda/lib/common.cuh"
#include "cuda/sparse/groups.cuh"
#include "cuda/sparse/mul-mat.cuh"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>

namespace macko::cuda {

// ---- order of a row's entries ----

// The order of the entries of a row. Without banks, x_slot q is column q; with banks it is position (q + start) mod
// x_slots. start differs between the rows of a warp, so that their first runs do not begin in the same bank.
struct row_order {
    int x_slots; // of a row
    int width;   // columns per bank; 0: without banks
    int start;

    __device__ row_order(const cuda_sparse_matrix & m, int64_t row) {
        width   = m.bank_width;
        x_slots = width ? 32 * width - 1 : static_cast<int>(m.cols);
        start   = static_cast<int>(row % (32 / m.lanes)) * width;
    }
    // the column of this slot, which is its word of x in shared memory
    __device__ int word(int q) const {
        if (!width) {
            return q;
        }
        const int p = q + start < x_slots ? q + start : q + start - x_slots;
        return p % width * 32 + p / width;
    }
};

// ---- one row, canonical, as dense values in shared memory ----

static __device__ void decode_row(const cuda_sparse_matrix & raw, int64_t row, uint16_t * dense, int n_dense) {
    const int        lane   = threadIdx.x % 32;
    const uint16_t * values = reinterpret_cast<const uint16_t *>(raw.values);
    for (int i = lane; i < n_dense; i += 32) {
        dense[i] = 0;
    }
    __syncwarp();
    constexpr int AHEAD  = 4; // loads on their way at a time
    int           column = -1;
    const int     end    = raw.row_ptr[row + 1];
    for (int e = raw.row_ptr[row]; e < end; e += 32 * AHEAD) {
        int      step[AHEAD]  = {};
        uint16_t value[AHEAD] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = e + 32 * i + lane;
            if (k < end) {
                step[i]  = 1 + file_delta(raw.deltas, k, raw.delta_bits);
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

// Calls entry(index, slot before the step + 1, delta, value) for each entry of a row that decode_row() left in shared
// memory, and returns the number of entries, on all lanes.
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

static __device__ __forceinline__ uint32_t widened(const cuda_sparse_matrix & m, uint16_t bits) {
    return widened(bits, m.type == GGML_MACKO_TYPE_BF16);
}
// what a group has in place of a value; -1: it is an outlier
static __device__ __forceinline__ int said_as(const cuda_sparse_matrix & m, uint16_t bits) {
    const uint32_t f = widened(m, bits);
    return m.layout == CUDA_SPARSE_LAYOUT_CODED ? to_coded(f, m.exponent) : to_fused(f, m.exponent, m.delta_bits);
}

// Calls outlier(index, column, value) for each value of a row that a group cannot say, and returns their
// number, on all lanes.
template <typename F>
static __device__ int walk_outliers(const cuda_sparse_matrix & m, const row_order & order, const uint16_t * dense,
                                    F && outlier) {
    const int lane = threadIdx.x % 32;
    int       n    = 0;
    for (int q0 = 0; q0 < order.x_slots; q0 += 32) {
        const int      word = q0 + lane < order.x_slots ? order.word(q0 + lane) : -1;
        const bool     here = word >= 0 && said_as(m, dense[word]) < 0;
        const unsigned all  = __ballot_sync(FULL_WARP, here);
        if (here) {
            outlier(n + __popc(all & ((1u << lane) - 1)), word, dense[word]);
        }
        n += __popc(all);
    }
    return n;
}

// entries of a group
static __device__ int entries_of(const cuda_sparse_matrix & m) {
    return static_cast<int>(m.layout == CUDA_SPARSE_LAYOUT_CODED ? CODED_GROUP : fused_entries(m.delta_bits));
}

// after so many entries a position is reduced
static __device__ int entries_of_part(const cuda_sparse_matrix & m) {
    return m.layout == CUDA_SPARSE_LAYOUT_CODED ? CODED_PART : entries_of(m);
}

constexpr int N_EXPONENTS = 128; // CODED: those whose power a bfloat16 number can be

// How many values can be said with each exponent. For a value the exponents that can are an interval: +1
// at its begin, -1 behind its end.
static __global__ void exponents_kernel(const cuda_sparse_matrix raw, const cuda_sparse_matrix m, int * changes) {
    __shared__ int mine[N_EXPONENTS + 1];
    for (int i = threadIdx.x; i <= N_EXPONENTS; i += blockDim.x) {
        mine[i] = 0;
    }
    __syncthreads();
    const int        n      = raw.row_ptr[raw.rows];
    const uint16_t * values = reinterpret_cast<const uint16_t *>(raw.values);
    const auto       count  = [&](int begin, int end) {
        atomicAdd(mine + min(N_EXPONENTS, max(0, begin)), 1);
        atomicAdd(mine + min(N_EXPONENTS, max(0, end)), -1);
    };
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const uint32_t f = widened(m, values[i] & 0x7fff);
        const int      e = static_cast<int>(f >> 23);
        if (m.layout == CUDA_SPARSE_LAYOUT_CODED) {
            if (f != 0 && f % 0x10000 == 0) {
                count(e - CODED_EXPONENTS, e);
            }
        } else if (f != 0 && e < 255) {
            const int moved = e - FUSED_BIAS;
            count(moved - fused_exponents(m.delta_bits), moved - 1 + __ffs(0x400 | static_cast<int>(f >> 13 & 0x3ff)));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= N_EXPONENTS; i += blockDim.x) {
        atomicAdd(changes + i, mine[i]);
    }
}

// what impl::repack() reads back
struct repack_counts {
    int64_t groups;
    int64_t unused_groups;
    int32_t impossible; // whether some row has outliers that cannot be kept
    int32_t overshoot;
    int32_t exponents[N_EXPONENTS + 1];
};

// the groups of each row, to row_ptr[row + 1]
static __global__ void count_kernel(const cuda_sparse_matrix raw, const cuda_sparse_matrix m, bool whole_lines,
                                    repack_counts * counts) {
    extern __shared__ __align__(16) uint16_t dense[];
    const row_order                          shape(m, 0);
    for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
        decode_row(raw, row, dense, shape.x_slots);
        const row_order order(m, row);
        const int       n        = walk_row(order, dense, m.delta_bits, [](int, int, unsigned, uint16_t) {});
        const int       outliers = walk_outliers(m, order, dense, [&](int, int, uint16_t value) {
            if (m.layout == CUDA_SPARSE_LAYOUT_FUSED && !fused_outlier_fits(widened(m, value))) {
                counts->impossible = 1;
            }
        });
        if (threadIdx.x == 0) {
            const int outlier_groups = (outliers + OUTLIERS_OF_GROUP - 1) / OUTLIERS_OF_GROUP,
                      used           = (n + entries_of(m) - 1) / entries_of(m) + outlier_groups,
                      unused         = whole_lines ? -used & (CUDA_SPARSE_LINE - 1) : 0;
            if (outlier_groups > TAIL_MAX_OUTLIERS) {
                counts->impossible = 1;
            }
            m.tails[row] = static_cast<uint16_t>(tail_of(min(outlier_groups, TAIL_MAX_OUTLIERS), unused));
            atomicAdd(reinterpret_cast<unsigned long long *>(&counts->unused_groups),
                      static_cast<unsigned long long>(unused));
            m.row_ptr[row + 1] = used + unused;
        }
        __syncwarp();
    }
}

// Counts to offsets, in one block. *total may exceed 31 bits, and then row_ptr is not used.
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

// the entry at place k of the group in this slot, which is zero before
static __device__ __forceinline__ void set_entry(const cuda_sparse_matrix & m, int64_t slot, int k, uint16_t value,
                                                 unsigned delta) {
    unsigned * const words = reinterpret_cast<unsigned *>(m.values);
    const auto       said  = static_cast<uint32_t>(max(said_as(m, value), 0));
    if (m.layout == CUDA_SPARSE_LAYOUT_CODED) {
        set_coded_entry(k, said, delta, m.delta_bits,
                        [&](int word, uint32_t bits) { atomicOr(words + coded_word(slot, word, m.delta_bits), bits); });
    } else {
        set_fused_entry(k, said, delta, m.delta_bits,
                        [&](int word, uint32_t bits) { atomicOr(words + slot * 4 + word, bits); });
    }
}
// its delta
static __device__ __forceinline__ int delta_at(const cuda_sparse_matrix & m, int64_t slot, int k) {
    const uint32_t * const words = reinterpret_cast<const uint32_t *>(m.values);
    return m.layout == CUDA_SPARSE_LAYOUT_CODED
               ? coded_delta(k, m.delta_bits, [&](int word) { return words[coded_word(slot, word, m.delta_bits)]; })
               : fused_delta(words + slot * 4, k, m.delta_bits);
}
// the k-th outlier of the group in this slot, which is zero before
static __device__ __forceinline__ void set_outlier(const cuda_sparse_matrix & m, int64_t slot, int k, int column,
                                                   uint16_t value) {
    unsigned * const words = reinterpret_cast<unsigned *>(m.values);
    if (m.layout == CUDA_SPARSE_LAYOUT_CODED) {
        words[coded_word(slot, k, m.delta_bits)] = widened(m, value);
        atomicOr(words + coded_word(slot, 4 + k / 2, m.delta_bits), static_cast<unsigned>(column) << k % 2 * 16);
    } else {
        words[slot * OUTLIERS_OF_GROUP + k] = static_cast<unsigned>(column) | static_cast<unsigned>(value) << 16;
    }
}

// groups, which are zero before, and bases
static __global__ void repack_kernel(const cuda_sparse_matrix raw, const cuda_sparse_matrix m) {
    extern __shared__ __align__(16) uint16_t dense[];
    const int                                entries = entries_of(m);
    const row_order                          shape(m, 0);
    for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
        decode_row(raw, row, dense, shape.x_slots);
        const row_order order(m, row);
        const row_span  span(m.row_ptr[row], m.row_ptr[row + 1], m.tails[row]);
        walk_outliers(m, order, dense, [&](int index, int word, uint16_t value) {
            set_outlier(m, span.begin + span.groups + index / OUTLIERS_OF_GROUP, index % OUTLIERS_OF_GROUP, word,
                        value);
        });
        walk_row(order, dense, m.delta_bits, [&](int index, int from, unsigned delta, uint16_t value) {
            const int k     = index % entries;
            const int group = index / entries, run = span.run_of(group, m.lanes),
                      in_run = group - span.n_before(run, m.lanes);
            set_entry(m, span.slot(run, m.lanes, span.first_step(run) + in_run), k, value, delta);
            if (k == 0 && in_run == 0) {
                m.bases[row * m.lanes + run] = static_cast<uint16_t>(order.word(from));
            }
        });
        __syncwarp();
    }
}

// One thread per run follows the deltas as the product will, and finds how far past x they reach. INT32_MAX: further
// than x repeats.
static __global__ void overshoot_kernel(const cuda_sparse_matrix m, int32_t * overshoot) {
    const int64_t run  = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    int           most = 0;
    if (run < m.rows * m.lanes) {
        const int64_t  row  = run / m.lanes;
        const int      lane = static_cast<int>(run % m.lanes);
        const row_span span(m.row_ptr[row], m.row_ptr[row + 1], m.tails[row]);
        const int      modulus = 32 * m.bank_width - 1;
        int            at      = m.bases[run];
        for (int step = span.first_step(lane); step < span.end_step(lane, m.lanes); step++) {
            const int64_t slot = span.slot(lane, m.lanes, step);
            for (int k = 0; k < entries_of(m); k += entries_of_part(m)) {
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

// ---- uploader ----

constexpr int64_t PINNED_NBYTES = int64_t(512) << 10; // about the rows that a thread hands over at a time
constexpr int     N_PINNED      = 32;                 // pinning more takes too long

// one piece of pinned memory, on its own stream
struct pinned_buffer {
    void *       data      = nullptr;
    cudaStream_t stream    = nullptr;
    bool         in_flight = false; // a copy may still read it
};

struct cuda_sparse_uploader::impl {
    int                         device         = 0;
    cuda_device_info            info           = {};
    bool                        may_be_coded   = cuda_coded_allowed(); // if it is smaller
    uint8_t *                   staging        = nullptr;              // device memory
    int64_t                     staging_nbytes = 0;
    repack_counts *             counts         = nullptr; // device memory
    pinned_buffer               pinned[N_PINNED];
    std::mutex                  mutex;
    std::condition_variable     freed;
    std::deque<pinned_buffer *> unused; // buffers that nobody fills, the one that was filled first in front

    macko_desc         desc         = {};
    int64_t            n_padded     = 0;
    void *             dst          = nullptr;
    int64_t            reserved     = 0;  // bytes at dst
    cuda_sparse_matrix raw          = {}; // layout FILE, in staging memory
    bool               have_row_ptr = false;
    quantized_image    image        = {}; // kept for the next matrix: fresh pages are slow

    ~impl() {
        cudaSetDevice(device);
        for (pinned_buffer & p : pinned) {
            if (p.stream) {
                cudaStreamSynchronize(p.stream);
                cudaStreamDestroy(p.stream);
            }
            cudaFreeHost(p.data);
        }
        cudaFree(staging);
        cudaFree(counts);
    }

    // Host memory of any kind to the device, from several threads; returns when `from` may be reused. The bytes are
    // there after arrived().
    int copy(void * to, const void * from, int64_t nbytes) {
        CUDA_OK(cudaSetDevice(device));
        for (int64_t at = 0; at < nbytes; at += PINNED_NBYTES) {
            const cudaError_t copied =
                copy_piece(static_cast<uint8_t *>(to) + at, static_cast<const uint8_t *>(from) + at,
                           static_cast<size_t>(std::min(PINNED_NBYTES, nbytes - at)));
            CUDA_OK(copied);
        }
        return GGML_MACKO_STATUS_OK;
    }

    cudaError_t copy_piece(void * to, const void * from, size_t nbytes) {
        pinned_buffer * p = nullptr;
        {
            std::unique_lock<std::mutex> lock(mutex);
            freed.wait(lock, [&] { return !unused.empty(); });
            p = unused.front();
            unused.pop_front();
        }
        cudaError_t error = cudaStreamSynchronize(p->stream);
        if (error == cudaSuccess) {
            memcpy(p->data, from, nbytes);
            p->in_flight = true;
            error        = cudaMemcpyAsync(to, p->data, nbytes, cudaMemcpyHostToDevice, p->stream);
        }
        {
            const std::lock_guard<std::mutex> lock(mutex);
            unused.push_back(p);
        }
        freed.notify_one();
        return error;
    }

    // Waits for all copies. No thread may be copying.
    int arrived() {
        for (pinned_buffer & p : pinned) {
            if (p.in_flight) {
                CUDA_OK(cudaStreamSynchronize(p.stream));
                p.in_flight = false;
            }
        }
        return GGML_MACKO_STATUS_OK;
    }

    // Sets the exponent with which most values can be said, and how many those are.
    int find_exponent(cuda_sparse_matrix * m, int64_t * most) {
        const cudaStream_t stream = pinned[0].stream;
        CUDA_OK(cudaMemsetAsync(counts, 0, sizeof(*counts), stream));
        exponents_kernel<<<static_cast<unsigned>(info.multiprocessors * 8), 256, 0, stream>>>(raw, *m,
                                                                                              counts->exponents);
        CUDA_OK(cudaGetLastError());
        int32_t changes[N_EXPONENTS + 1];
        CUDA_OK(cudaMemcpyAsync(changes, counts->exponents, sizeof(changes), cudaMemcpyDeviceToHost, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        int64_t said  = 0;
        *most         = -1;
        const int end = m->layout == CUDA_SPARSE_LAYOUT_FUSED ? FUSED_MAX_EXPONENT + 1 : N_EXPONENTS;
        for (int i = 0; i < end; i++) {
            said += changes[i];
            if (said > *most) {
                *most       = said;
                m->exponent = i;
            }
        }
        return GGML_MACKO_STATUS_OK;
    }

    // of a dense row
    int      shared_nbytes_of(const cuda_sparse_matrix & m) const { return static_cast<int>(cuda_sparse_words(m) * 2); }
    unsigned blocks_of(const cuda_sparse_matrix & m) const {
        return static_cast<unsigned>(std::min<int64_t>(m.rows, info.multiprocessors * 32));
    }

    // Finds the groups of each row, to m->row_ptr and m->tails, with deltas of m->delta_bits.
    int count(cuda_sparse_matrix * m, repack_counts * found) {
        const cudaStream_t stream = pinned[0].stream;
        CUDA_OK(cudaFuncSetAttribute(count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, info.shared_nbytes));
        CUDA_OK(cudaMemsetAsync(counts, 0, sizeof(*counts), stream));
        count_kernel<<<blocks_of(*m), 32, shared_nbytes_of(*m), stream>>>(
            raw, *m, cuda_sparse_whole_lines(desc, m->layout), counts);
        CUDA_OK(cudaGetLastError());
        scan_kernel<<<1, 1024, 0, stream>>>(m->row_ptr, m->rows, &counts->groups);
        CUDA_OK(cudaGetLastError());
        CUDA_OK(cudaMemcpyAsync(found, counts, sizeof(*found), cudaMemcpyDeviceToHost, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        return GGML_MACKO_STATUS_OK;
    }

    // The same for FUSED, with the width of deltas that takes fewest groups: about as many bits as in the file, or, in
    // wide matrices, 3 beside values of few exponents. Sets m->delta_bits, m->bank_width and m->exponent.
    int count_fused(cuda_sparse_matrix * m, repack_counts * found) {
        const auto with_exponent = [&](int32_t delta_bits, repack_counts * counted) {
            int64_t said;
            m->delta_bits    = delta_bits;
            const int status = find_exponent(m, &said);
            return status ? status : count(m, counted);
        };
        if (m->delta_bits == 8) {
            m->bank_width = 0;
            return with_exponent(6, found);
        }
        const int32_t other = std::max(m->delta_bits, 2);
        if (!m->bank_width) {
            return with_exponent(other, found);
        }
        repack_counts of_3;
        if (const int status = with_exponent(3, &of_3)) {
            return status;
        }
        const int status = with_exponent(other, found);
        return status || found->groups <= of_3.groups ? status : with_exponent(3, found);
    }

    // The same for CODED, if its groups, of which outliers take some more, fit and are smaller than those of another
    // layout (*fits). Sets m->delta_bits, m->bank_width and m->exponent.
    int count_coded(cuda_sparse_matrix * m, bool automatic, repack_counts * found, bool * fits) {
        int64_t said  = 0;
        m->delta_bits = cuda_coded_delta_bits(desc);
        m->bank_width = m->delta_bits == 6 ? 0 : m->bank_width;
        if (const int status = find_exponent(m, &said)) {
            return status;
        }
        // the least that it takes, to know without counting what is hopeless
        const int64_t group = coded_group_nbytes(m->delta_bits),
                      least = (desc.nnz / CODED_GROUP + (desc.nnz - said) / OUTLIERS_OF_GROUP) * group;
        *fits               = !automatic || cuda_coded_pays(desc, n_padded, least);
        if (!*fits) {
            return GGML_MACKO_STATUS_OK;
        }
        if (const int status = count(m, found)) {
            return status;
        }
        *fits = found->groups * group <= cuda_coded_room(desc, reserved) &&
                (!automatic || cuda_coded_pays(desc, n_padded, (found->groups - found->unused_groups) * group));
        return GGML_MACKO_STATUS_OK;
    }

    // Makes the layout of m if there are kernels for it and it fits the reserved memory (*fits). automatic: no layout
    // was asked for. Then CODED is taken only if it is smaller than others are. Sets m->overshoot, m->exponent and
    // m->delta_bits.
    int repack(cuda_sparse_matrix * m, bool automatic, bool * fits) {
        *fits               = false;
        const bool    coded = m->layout == CUDA_SPARSE_LAYOUT_CODED;
        const int64_t room  = cuda_sparse_room_of_x(info.shared_nbytes);
        if (cuda_sparse_words(*m) > room || m->type == GGML_MACKO_TYPE_F32 || (coded && m->nbytes > reserved)) {
            return GGML_MACKO_STATUS_OK;
        }
        const cudaStream_t stream = pinned[0].stream;
        repack_counts      found;
        bool               taken  = true;
        const int          status = coded ? count_coded(m, automatic, &found, &taken) : count_fused(m, &found);
        if (status || !taken || !cuda_sparse_has_kernels(*m) || found.impossible ||
            (!coded && found.groups > cuda_fused_max_groups(desc, n_padded))) {
            return status;
        }
        const int64_t lines = (found.groups + CUDA_SPARSE_LINE - 1) / CUDA_SPARSE_LINE;
        CUDA_OK(cudaMemsetAsync(m->values, 0,
                                static_cast<size_t>(coded ? lines * CUDA_SPARSE_LINE * coded_group_nbytes(m->delta_bits)
                                                          : found.groups * FUSED_GROUP_NBYTES),
                                stream));
        CUDA_OK(cudaMemsetAsync(m->bases, 0, static_cast<size_t>(m->rows * m->lanes * 2), stream));
        CUDA_OK(cudaFuncSetAttribute(repack_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, info.shared_nbytes));
        repack_kernel<<<blocks_of(*m), 32, shared_nbytes_of(*m), stream>>>(raw, *m);
        CUDA_OK(cudaGetLastError());
        if (m->bank_width) {
            overshoot_kernel<<<static_cast<unsigned>((m->rows * m->lanes + 255) / 256), 256, 0, stream>>>(
                *m, &counts->overshoot);
            CUDA_OK(cudaGetLastError());
        }
        CUDA_OK(
            cudaMemcpyAsync(&m->overshoot, &counts->overshoot, sizeof(m->overshoot), cudaMemcpyDeviceToHost, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        const int64_t words = cuda_sparse_words(*m);
        *fits               = m->overshoot <= std::min(words, room - words);
        return GGML_MACKO_STATUS_OK;
    }

    // Makes the matrix in a layout, if it fits (*fits). lanes: 0 as usual; automatic: see repack()
    int make(int32_t layout, int32_t lanes, bool automatic, cuda_sparse_matrix * m, bool * fits) {
        *m = cuda_sparse_bind(desc, n_padded, layout, lanes ? lanes : cuda_sparse_lanes(desc, n_padded, layout), dst,
                              reserved);
        if (layout != CUDA_SPARSE_LAYOUT_FILE) {
            const int status = repack(m, automatic, fits);
            if (status || *fits || !automatic || layout != CUDA_SPARSE_LAYOUT_FUSED || !m->bank_width) {
                return status;
            }
            // Where some rows have hardly any entries, groups of fillers pass through more columns than there are.
            *m            = cuda_sparse_bind(desc, n_padded, layout, FUSED_ASCENDING_LANES, dst, reserved);
            m->bank_width = 0;
            return repack(m, automatic, fits);
        }
        CUDA_OK(
            cudaMemcpyAsync(dst, staging, static_cast<size_t>(m->nbytes), cudaMemcpyDeviceToDevice, pinned[0].stream));
        CUDA_OK(cudaStreamSynchronize(pinned[0].stream));
        *fits = true;
        return GGML_MACKO_STATUS_OK;
    }
};

cuda_sparse_uploader::cuda_sparse_uploader(std::unique_ptr<impl> p) : impl_(std::move(p)) {}
cuda_sparse_uploader::~cuda_sparse_uploader() = default;

int cuda_sparse_uploader::create(int device, std::unique_ptr<cuda_sparse_uploader> * out) {
    auto p    = std::make_unique<impl>();
    p->device = device;
    CUDA_OK(cudaSetDevice(device));
    CUDA_OK(cuda_current_device(&p->info));
    for (pinned_buffer & buffer : p->pinned) {
        CUDA_OK(cudaMallocHost(&buffer.data, static_cast<size_t>(PINNED_NBYTES)));
        CUDA_OK(cudaStreamCreateWithFlags(&buffer.stream, cudaStreamNonBlocking));
        p->unused.push_back(&buffer);
    }
    CUDA_OK(cudaMalloc(&p->counts, sizeof(repack_counts)));
    out->reset(new cuda_sparse_uploader(std::move(p)));
    return GGML_MACKO_STATUS_OK;
}

int cuda_sparse_uploader::begin(const macko_desc & desc, int64_t n_padded, void * dst, int64_t reserved) {
    impl & s = *impl_;
    CUDA_OK(cudaSetDevice(s.device));
    if (const int status = s.arrived()) { // copies of a matrix that was given up
        return status;
    }
    const int64_t nbytes = cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_FILE, 0, nullptr).nbytes;
    if (nbytes > s.staging_nbytes) {
        CUDA_OK(cudaFree(s.staging));
        s.staging        = nullptr;
        s.staging_nbytes = 0;
        CUDA_OK(cudaMalloc(&s.staging, static_cast<size_t>(nbytes)));
        s.staging_nbytes = nbytes;
    }
    s.desc         = desc;
    s.n_padded     = n_padded;
    s.dst          = dst;
    s.reserved     = reserved;
    s.raw          = cuda_sparse_bind(desc, n_padded, CUDA_SPARSE_LAYOUT_FILE, 0, s.staging);
    s.have_row_ptr = false;
    return GGML_MACKO_STATUS_OK;
}

int cuda_sparse_uploader::rows(const macko_view & view) {
    impl &             s     = *impl_;
    const macko_rows & r     = view.rows();
    bool               first = false;
    {
        std::lock_guard<std::mutex> lock(s.mutex);
        first          = !s.have_row_ptr;
        s.have_row_ptr = true;
    }
    int status = GGML_MACKO_STATUS_OK;
    if (first) {
        status = s.copy(s.raw.row_ptr, r.row_ptr, (s.desc.rows + 1) * 4);
    }
    const int64_t begin = r.row_ptr[r.row_begin], end = r.row_ptr[r.row_end], b = s.desc.delta_bits;
    const int64_t value = value_nbytes(s.desc.type);
    if (status == GGML_MACKO_STATUS_OK && begin < end) {
        status = s.copy(s.raw.values + begin * value, static_cast<const uint8_t *>(r.values) + (begin - r.base) * value,
                        (end - begin) * value);
    }
    // The first and the last byte may hold deltas of neighbouring rows. The neighbour writes the same bytes of the
    // file.
    const int64_t byte_begin = begin * b / 8, byte_end = (end * b + 7) / 8;
    if (status == GGML_MACKO_STATUS_OK && begin < end) {
        status = s.copy(s.raw.deltas + byte_begin, r.deltas + byte_begin - r.base * b / 8, byte_end - byte_begin);
    }
    return status;
}

int cuda_sparse_uploader::packed(const packed_view & view, const quantized_shape & shape, void * dst, int n_threads,
                                 cuda_sparse_matrix * out, cuda_memory * outgrown) {
    impl & s = *impl_;
    CUDA_OK(cudaSetDevice(s.device));
    const packed_desc & desc         = view.arrays().desc;
    quantized_shape     used         = shape;
    int64_t             max_outliers = cuda_quantized_max_outliers(desc, shape);
    quantized_image &   image        = s.image;
    cuda_quantized_make(view, used, max_outliers, n_threads, &image);
    if (image.n_outliers > max_outliers) {
        used = { 8, shape.lanes }; // has the fewest outliers
        cuda_quantized_make(view, used, 0, n_threads, &image);
        max_outliers = image.n_outliers;
        cuda_quantized_make(view, used, max_outliers, n_threads, &image);
        CUDA_OK(cudaMalloc(&dst, image.memory.size()));
        outgrown->reset(dst);
    }
    *out             = cuda_quantized_bind(desc, used, max_outliers, dst);
    out->overshoot   = image.matrix.overshoot;
    const int status = s.copy(dst, image.memory.data(), out->nbytes);
    const int late   = s.arrived();
    return status ? status : late;
}

int cuda_sparse_uploader::finish(cuda_sparse_matrix * out, cuda_memory * outgrown) {
    impl & s = *impl_;
    CUDA_OK(cudaSetDevice(s.device));
    if (const int status = s.arrived()) {
        return status;
    }
    bool          fits   = false;
    const int64_t enough = cuda_sparse_nbytes(s.desc, s.n_padded);
    if (s.reserved < enough) { // for CODED
        if (const int status = s.make(CUDA_SPARSE_LAYOUT_CODED, 0, true, out, &fits)) {
            return status;
        }
        if (fits) {
            return GGML_MACKO_STATUS_OK;
        }
        CUDA_OK(cudaMalloc(&s.dst, static_cast<size_t>(enough)));
        outgrown->reset(s.dst);
        s.reserved = enough;
    }
    for (const int32_t wish : { CUDA_SPARSE_LAYOUT_CODED, CUDA_SPARSE_LAYOUT_FUSED, CUDA_SPARSE_LAYOUT_FILE }) {
        if (wish == CUDA_SPARSE_LAYOUT_CODED && (!s.may_be_coded || s.desc.cols < CUDA_SPARSE_WIDE)) {
            continue;
        }
        const int status = s.make(wish, 0, true, out, &fits);
        if (status || fits) {
            return status;
        }
    }
    return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no layout fits the matrix"); // FILE does, in enough memory
}

int cuda_sparse_uploader::finish(cuda_sparse_matrix * out, int32_t layout, int32_t lanes) {
    impl & s = *impl_;
    CUDA_OK(cudaSetDevice(s.device));
    if (const int status = s.arrived()) {
        return status;
    }
    bool      fits   = false;
    const int status = s.make(layout, lanes, false, out, &fits);
    return status || fits ? status : fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "layout %d does not fit the matrix", layout);
}

} // namespace macko::cuda
