// The memory of a sparse matrix on a GPU: aligned parts of one allocation. Plain C++.
#pragma once

#include <cstdint>

namespace macko::cuda {

constexpr int64_t GPU_ALIGNMENT = 256; // bytes; alignment of a matrix's memory and of each part of it

constexpr int64_t gpu_aligned(int64_t nbytes) { return (nbytes + GPU_ALIGNMENT - 1) & ~(GPU_ALIGNMENT - 1); }

// Cuts an allocation into aligned parts. Without memory (null) the addresses are offsets.
class memory_parts {
public:
    explicit memory_parts(void * memory) : begin_(static_cast<uint8_t *>(memory)), at_(begin_) {}
    template <typename T> void take(T ** part, int64_t n) {
        *part = reinterpret_cast<T *>(at_);
        at_ += gpu_aligned(n * static_cast<int64_t>(sizeof(T)));
    }
    int64_t nbytes() const { return at_ - begin_; }

private:
    uint8_t *begin_, *at_;
};

// The members that the structs of all layouts share.
struct layout_base {
    int64_t rows;
    int64_t cols;
    int32_t type;   // of the dense matrix: enum ggml_macko_type
    int64_t nbytes; // of memory, from the first part to the end of the last
};

} // namespace macko::cuda
