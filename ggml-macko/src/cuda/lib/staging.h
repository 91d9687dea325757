// Copies data from host threads to the GPU. Each thread fills pinned memory of its own and queues its copy, so filling,
// copying and the kernels run at the same time. cudaMemcpy from ordinary memory uses one thread.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace macko::cuda {

// Rows of equal length in GPU memory.
struct staged_rows {
    void *  dst;
    int64_t row_nbytes; // at most host_staging::SLOT_NBYTES
    int64_t row_pitch;  // bytes from one row to the next
    int64_t n;
    int64_t step; // rows are filled fastest in groups of this size
};

class host_staging {
public:
    static constexpr int64_t SLOT_NBYTES = int64_t(4) << 20;

    host_staging() = default;
    ~host_staging();
    host_staging(const host_staging &)             = delete;
    host_staging & operator=(const host_staging &) = delete;

    // fill(begin, end, memory) writes rows [begin, end) without gaps, on up to n_threads threads. The data that it
    // reads may change after this function returns; the copies complete in stream order.
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
    std::unique_ptr<char[]> pageable_; // used if the system limits pinned memory: only slower
    slot                    slots_[N_SLOTS];

    cudaError_t create();
};

} // namespace macko::cuda
