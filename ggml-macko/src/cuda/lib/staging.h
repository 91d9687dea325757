// Copies to the GPU of what host threads write: each thread fills pinned memory of its own and queues the copy of it,
// so that filling, copying and the kernels run at the same time. cudaMemcpy from ordinary memory has one thread.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace macko::cuda {

// rows of equal length in memory of the GPU
struct staged_rows {
    void *  dst;
    int64_t row_nbytes; // at most host_staging::SLOT_NBYTES
    int64_t row_pitch;  // bytes from one row to the next
    int64_t n;
    int64_t step; // the rows are filled fastest so many at a time
};

class host_staging {
public:
    static constexpr int64_t SLOT_NBYTES = int64_t(4) << 20;

    host_staging() = default;
    ~host_staging();
    host_staging(const host_staging &)             = delete;
    host_staging & operator=(const host_staging &) = delete;

    // fill(begin, end, memory) writes rows [begin, end) without gaps, on up to n_threads threads. What it reads may be
    // changed when this returns; the copies end in the order of the stream.
    cudaError_t copy(const staged_rows & rows, int n_threads, cudaStream_t stream,
                     const std::function<void(int64_t begin, int64_t end, void * memory)> & fill);

private:
    static constexpr int N_SLOTS = 16;

    struct slot {
        char *      memory = nullptr;
        cudaEvent_t copied = nullptr;
    };

    std::mutex              mutex_;
    char *                  pinned_ = nullptr;
    std::unique_ptr<char[]> pageable_; // where the system limits pinned memory: only slower
    slot                    slots_[N_SLOTS];

    cudaError_t create();
};

} // namespace macko::cuda
