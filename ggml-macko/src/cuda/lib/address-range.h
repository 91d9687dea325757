// A range of reserved GPU addresses that gets memory on demand, in granules (2 MiB on current GPUs), through CUDA's
// virtual memory management. Its functions belong to the driver and are found at run time, never linked.
#pragma once

#include <cstddef>
#include <cuda_runtime_api.h>
#include <memory>
#include <vector>

namespace macko::cuda {

class address_range {
public:
    // Whether the driver and this GPU support virtual memory management.
    static bool is_supported(int device);

    // Reserves nbytes of addresses on a GPU with support. An error changes nothing.
    [[nodiscard]] static cudaError_t reserve(int device, size_t nbytes, std::unique_ptr<address_range> * out);
    ~address_range(); // no work on the GPU may still use the memory
    address_range(const address_range &)             = delete;
    address_range & operator=(const address_range &) = delete;

    struct segment {
        char * at;
        size_t nbytes;
    };

    char * base() const { return base_; }
    // Allocates memory for the granules of n bytes from `offset` on that have none. *fresh: the new granules, with
    // undefined content. After an error, some of them may have memory.
    [[nodiscard]] cudaError_t commit(size_t offset, size_t n, std::vector<segment> * fresh);
    // End of the run of bytes in [offset, end) that, like the first byte, have memory (*has) or have none.
    size_t                       end_of_run(size_t offset, size_t end, bool * has) const;
    const std::vector<segment> & committed() const { return mapped_; }

private:
    int                  device_  = 0;
    char *               base_    = nullptr;
    size_t               nbytes_  = 0; // a multiple of granule_
    size_t               granule_ = 0;
    std::vector<bool>    has_;    // indexed by granule
    std::vector<segment> mapped_; // one element per allocation; each must be freed as a whole

    address_range() = default;
    cudaError_t map(size_t first, size_t end);
};

} // namespace macko::cuda
