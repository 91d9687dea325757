// Addresses of a GPU that are reserved at once and get memory by and by, in granules (2 MiB on GPUs of today): CUDA's
// virtual memory management. Its functions are the driver's; they are found at run time, never linked.
#pragma once

#include <cstddef>
#include <cuda_runtime_api.h>
#include <memory>
#include <vector>

namespace macko::cuda {

class address_range {
public:
    // Whether the driver and this GPU have virtual memory management.
    static bool is_supported(int device);

    // Reserves nbytes of addresses of a GPU that supports it. Errors leave everything as it was.
    [[nodiscard]] static cudaError_t reserve(int device, size_t nbytes, std::unique_ptr<address_range> * out);
    ~address_range(); // nothing on the GPU may use the memory any more
    address_range(const address_range &)             = delete;
    address_range & operator=(const address_range &) = delete;

    struct piece {
        char * at;
        size_t nbytes;
    };

    char * base() const { return base_; }
    // Gives memory to those granules of n bytes from `offset` on that have none; *fresh: which, with any content. On an
    // error, some of them may have got it.
    [[nodiscard]] cudaError_t commit(size_t offset, size_t n, std::vector<piece> * fresh);
    // Where those bytes of [offset, end) end that have memory like the first one (*has), or have none like it.
    size_t                     end_of_run(size_t offset, size_t end, bool * has) const;
    const std::vector<piece> & committed() const { return mapped_; }

private:
    int                device_  = 0;
    char *             base_    = nullptr;
    size_t             nbytes_  = 0; // a multiple of granule_
    size_t             granule_ = 0;
    std::vector<bool>  has_;    // by granule
    std::vector<piece> mapped_; // as it was committed, which is how it has to be given back

    address_range() = default;
    cudaError_t map(size_t first, size_t end);
};

} // namespace macko::cuda
