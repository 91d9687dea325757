// Shared by the kernels of cuda/ops: launching, reductions, index arithmetic.
//
// Kernels may be longer than host functions: their state is in register arrays, which stay in registers only if every
// loop over them is unrolled where they are declared.
#pragma once

#include "cuda/lib/common.cuh"
#include "cuda/ops/types.cuh"

namespace macko::cuda {

constexpr int WARP = 32;

// Programmatic dependent launch: with ctx.overlap, a kernel may start while the previous one in the stream still runs.
// So every kernel launched by launch() calls wait_for_previous() before it accesses memory that a kernel may have
// written. Every thread calls it exactly once, even threads without work: through it, a kernel guarantees to the next
// one that all earlier kernels are complete.
static __device__ __forceinline__ void wait_for_previous() {
    cuda_wait_for_previous();
    cuda_allow_next();
}

template <typename... PARAMS, typename... ARGS>
cudaError_t launch(const op_context & ctx, void (*kernel)(PARAMS...), dim3 grid, dim3 block, size_t shared_nbytes,
                   ARGS... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return cudaSuccess;
    }
    return cuda_launch(kernel, grid, block, shared_nbytes, ctx.overlap, ctx.stream, args...);
}

// Reduction over all threads of the block (a multiple of 32, at most 1024); every thread gets the result. partial: 32
// floats of shared memory.
template <typename F>
static __device__ __forceinline__ float block_reduce(float x, float * partial, F && warp_reduce, float neutral) {
    x = warp_reduce(x);
    if (blockDim.x == WARP) {
        return x;
    }
    __syncthreads(); // other threads may still read partial for the previous reduction
    if (threadIdx.x % WARP == 0) {
        partial[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    return warp_reduce(threadIdx.x % WARP < blockDim.x / WARP ? partial[threadIdx.x % WARP] : neutral);
}

// Orders like the floats; the sign of zero does not count.
static __device__ __forceinline__ uint32_t sort_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// log(1 + exp(x)), without overflow
static __device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

struct row_index {
    int64_t i1, i2, i3;
};

// Clamps a row number from a tensor to the n existing rows, so that its writer (for example a client) cannot make a
// kernel access memory outside its operands.
static __device__ __forceinline__ int64_t existing_row(int64_t row, int64_t n) {
    return max(min(row, n - 1), int64_t(0));
}

static __device__ __forceinline__ row_index split_row(int64_t row, int64_t ne1, int64_t ne2) {
    if (row <= INT32_MAX && ne1 * ne2 <= INT32_MAX) { // 32-bit divisions are several times faster
        const uint32_t r = static_cast<uint32_t>(row), n1 = static_cast<uint32_t>(ne1), n2 = static_cast<uint32_t>(ne2);
        const uint32_t a = r / n1;
        return { r - a * n1, a % n2, a / n2 };
    }
    return { row % ne1, row / ne1 % ne2, row / (ne1 * ne2) };
}

// Start of row (i1, i2, i3), each index modulo the size of the tensor: ggml's broadcasting.
static __device__ __forceinline__ char * broadcast_row(const op_tensor & t, row_index i) {
    const int64_t i1 = t.ne[1] == 1 ? 0 : i.i1 % t.ne[1];
    const int64_t i2 = t.ne[2] == 1 ? 0 : i.i2 % t.ne[2];
    const int64_t i3 = t.ne[3] == 1 ? 0 : i.i3 % t.ne[3];
    return t.data + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
}
static __device__ __forceinline__ char * row_of(const op_tensor & t, row_index i) {
    return t.data + i.i1 * t.nb[1] + i.i2 * t.nb[2] + i.i3 * t.nb[3];
}

// Threads for a row of n elements: whole warps, at most `max`.
inline int row_threads(int64_t n, int max) {
    const int64_t warps = (n + WARP - 1) / WARP;
    return static_cast<int>(warps * WARP < max ? warps * WARP : max);
}

// Whether the data pointer and every stride of the tensor are multiples of n bytes.
inline bool is_aligned(const op_tensor & t, int64_t n) {
    return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(n) == 0 && t.nb[1] % n == 0 &&
           t.nb[2] % n == 0 && t.nb[3] % n == 0;
}

// Whether whole copies of b fill the shape of a.
inline bool can_repeat(const op_tensor & b, const op_tensor & a) {
    for (int k = 0; k < 4; k++) {
        if (b.ne[k] == 0 ? a.ne[k] != 0 : a.ne[k] % b.ne[k] != 0) {
            return false;
        }
    }
    return true;
}

inline bool fits_grid(int64_t n) { return n <= INT32_MAX; }

inline bool is_f32_rows(const op_tensor & t) { return t.type == TYPE_F32 && is_contiguous_rows(t); }

} // namespace macko::cuda
