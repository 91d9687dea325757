// Memory with the alignment that the arrays of kernels need.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace macko::cpu {

struct aligned_delete {
    static constexpr std::align_val_t ALIGNMENT{ 64 };
    void                              operator()(void * memory) const { operator delete(memory, ALIGNMENT); }
};
using aligned_memory = std::unique_ptr<void, aligned_delete>;

// Throws std::bad_alloc.
inline aligned_memory allocate_aligned(int64_t nbytes) {
    return aligned_memory(operator new(static_cast<size_t>(nbytes), aligned_delete::ALIGNMENT));
}

} // namespace macko::cpu
