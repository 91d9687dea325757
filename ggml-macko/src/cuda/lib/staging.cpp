#include "cuda/lib/staging.h"

#include "codec/team.h"
#include "cuda/lib/common.cuh"

#include <algorithm>
#include <atomic>
#include <new>

namespace macko::cuda {

namespace {

// Bytes that one thread fills at a time: large enough that the calls take less time than the copy, and small enough
// that all threads have work in a small matrix.
constexpr int64_t CHUNK_NBYTES = int64_t(1) << 20;

int64_t rows_of_chunk(const staged_rows & r) {
    const int64_t most = std::max<int64_t>(1, host_staging::SLOT_NBYTES / r.row_nbytes);
    const int64_t some = std::max<int64_t>(1, CHUNK_NBYTES / r.row_nbytes);
    return std::min(most, (some + r.step - 1) / r.step * r.step);
}

cudaError_t queue_copy(const staged_rows & r, int64_t begin, int64_t end, const char * memory, cudaStream_t stream) {
    char *     dst    = static_cast<char *>(r.dst) + begin * r.row_pitch;
    const auto nbytes = static_cast<size_t>(r.row_nbytes), n = static_cast<size_t>(end - begin);
    if (r.row_pitch == r.row_nbytes) {
        return cudaMemcpyAsync(dst, memory, n * nbytes, cudaMemcpyHostToDevice, stream);
    }
    return cudaMemcpy2DAsync(dst, static_cast<size_t>(r.row_pitch), memory, nbytes, nbytes, n, cudaMemcpyHostToDevice,
                             stream);
}

} // namespace

cudaError_t host_staging::create() {
    constexpr auto nbytes = static_cast<size_t>(SLOT_NBYTES * N_SLOTS);
    if (!pinned_ && !pageable_ && cudaMallocHost(&pinned_, nbytes) != cudaSuccess) {
        cudaGetLastError(); // not sticky
        pinned_ = nullptr;
        pageable_.reset(new (std::nothrow) char[nbytes]);
        if (!pageable_) {
            return cudaErrorMemoryAllocation;
        }
    }
    for (int i = 0; i < N_SLOTS; i++) {
        slots_[i].memory = (pinned_ ? pinned_ : pageable_.get()) + i * SLOT_NBYTES;
        if (!slots_[i].copied) {
            CUDA_TRY(cudaEventCreateWithFlags(&slots_[i].copied, cudaEventDisableTiming));
        }
    }
    return cudaSuccess;
}

host_staging::~host_staging() {
    for (const slot & s : slots_) {
        if (s.copied) {
            cudaEventSynchronize(s.copied);
            cudaEventDestroy(s.copied);
        }
    }
    cudaFreeHost(pinned_);
}

cudaError_t host_staging::copy(const staged_rows & rows, int n_threads, cudaStream_t stream,
                               const std::function<void(int64_t begin, int64_t end, void * memory)> & fill) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int                               device = 0;
    CUDA_TRY(create());
    CUDA_TRY(cudaGetDevice(&device));
    const int                n = std::clamp(n_threads, 1, N_SLOTS);
    std::atomic<cudaError_t> error{ cudaSuccess };
    int                      next_slot[N_SLOTS]; // next slot of each thread, whose slots are its number + i * n
    std::fill(next_slot, next_slot + N_SLOTS, -1);
    parallel_parts(n, rows.n, rows_of_chunk(rows), [&](int64_t begin, int64_t end, int thread) {
        int & at        = next_slot[thread];
        at              = at < 0 || at + n >= N_SLOTS ? thread : at + n;
        const slot & s  = slots_[at];
        const auto   ok = [&](cudaError_t status) {
            cudaError_t none = cudaSuccess;
            return status == cudaSuccess || (error.compare_exchange_strong(none, status), false);
        };
        if (error == cudaSuccess && ok(cudaSetDevice(device)) && ok(cudaEventSynchronize(s.copied))) {
            fill(begin, end, s.memory);
            if (ok(queue_copy(rows, begin, end, s.memory, stream))) {
                ok(cudaEventRecord(s.copied, stream));
            }
        }
    });
    return error;
}

} // namespace macko::cuda
