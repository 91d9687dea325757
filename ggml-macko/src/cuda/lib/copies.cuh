// Copies from global to shared memory that need no registers: cp.async and bulk copies. Used for x of the sparse
// kernels, and for tiles and rows of attention.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace macko::cuda {

__device__ __forceinline__ uint32_t shared_address(const void * p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 4 or 16 bytes; complete after wait_for_copies(). Without registers, all of x can be in flight at once.
__device__ __forceinline__ void copy_float(float * to, const float * from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
    *to = *from;
#endif
}
__device__ __forceinline__ void copy_16(void * to, const void * from) { // both addresses are multiples of 16
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
    *reinterpret_cast<float4 *>(to) = *reinterpret_cast<const float4 *>(from);
#endif
}
// Copies nbytes (0 to 16) bytes and adds zeros up to 16; both addresses are multiples of 16.
__device__ __forceinline__ void copy_16_or_less(void * to, const void * from, int nbytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(nbytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Asks for the bytes around an address, for a later load.
__device__ __forceinline__ void prefetch_to_l2(const void * at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Waiting in two steps: commit_copies() commits all copies so far; the other function waits for all commits except the
// last N.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N = 0> __device__ __forceinline__ void wait_for_committed_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Bulk copies from global to shared memory (cc 9.0). Single threads issue them, they do not queue behind loads, and an
// mbarrier (8 bytes of shared memory) counts their bytes. Addresses and sizes are multiples of 16 bytes.
struct bulk_copies {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr bool KNOWN = true;
#else
    static constexpr bool KNOWN = false;
#endif
    uint32_t arrived; // address of the mbarrier

    // called by one thread, before a barrier
    __device__ __forceinline__ void init() const {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(arrived)
                     : "memory");
#endif
    }
    // called by each thread that has used memory that the next copies overwrite, before a barrier
    static __device__ __forceinline__ void end_of_own_accesses() {
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    // called by one thread, once per phase, with the number of bytes of all copies of the phase
    __device__ __forceinline__ void expect(int nbytes) const {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(nbytes) : "memory");
#endif
    }
    __device__ __forceinline__ void copy(void * to, const void * from, int nbytes) const {
#if __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(nbytes), "r"(arrived)
                     : "memory");
#endif
    }
    __device__ __forceinline__ void wait(int phase) const {
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done "
                     "bra AGAIN;\n}" ::"r"(arrived),
                     "r"(phase & 1)
                     : "memory");
#endif
    }
};

} // namespace macko::cuda
