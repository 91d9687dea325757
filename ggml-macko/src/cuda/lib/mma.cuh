// Tensor cores: a 16 x 8 product over 16 steps of k, in F16 or BF16, with float32 sums. Fragments are those of the PTX
// instruction mma.m16n8k16 (lane = 4 * g + t):
//   a0: row g, k 2t and 2t + 1    a1: row g + 8        a2, a3: the same with k + 8
//   b0: column g, k 2t, 2t + 1    b1: the same with k + 8
//   c0, c1: row g, columns 2t, 2t + 1                  c2, c3: row g + 8
#pragma once

#include "cuda/lib/copies.cuh"
#include "cuda/ops/common.cuh"

namespace macko::cuda {

// Loads four 8 x 8 matrices of 16-bit values; lane i passes the shared-memory address of row i % 8 of matrix i / 8.
static __device__ __forceinline__ void load_matrices(uint32_t r[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}
static __device__ __forceinline__ void load_matrices_transposed(uint32_t r[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}

// Transposes an 8 x 8 matrix of 16-bit values; lane i holds columns 2 (i % 4) and 2 (i % 4) + 1 of row i / 4.
static __device__ __forceinline__ uint32_t transposed(__half2 rows) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(*reinterpret_cast<const uint32_t *>(&rows)));
    return r;
}

// High and low parts of x as a pair; |x| < 65520.
static __device__ __forceinline__ __half2 split_f16(float x) {
    const __half high = __float2half_rn(x);
    return __halves2half2(high, __float2half_rn(x - __half2float(high)));
}

// c += a * b
template <typename T>
static __device__ __forceinline__ void multiply_add(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__half>(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
                 "%1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif // cc 7.5 has no BF16 tensor cores: the host never launches this there
}

// c += a * b for signed bytes, 16 x 8 over 32 steps of k: a and b as above, with 4 k per word.
static __device__ __forceinline__ void multiply_add_bytes(int c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const auto quarter = [](int & c0, int & c1, uint32_t rows, uint32_t columns) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(c0), "+r"(c1)
            : "r"(rows), "r"(columns));
    };
    quarter(c[0], c[1], a[0], b0);
    quarter(c[0], c[1], a[2], b1);
    quarter(c[2], c[3], a[1], b0);
    quarter(c[2], c[3], a[3], b1);
#endif
}

static __device__ __forceinline__ uint32_t pack_pair(__half, float lo, float hi) {
    const __half2 h = __floats2half2_rn(saturate_f16(lo), saturate_f16(hi));
    return *reinterpret_cast<const uint32_t *>(&h);
}
static __device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16, float lo, float hi) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
}
template <typename H> static __device__ __forceinline__ uint4 pack8(const float * x) {
    return make_uint4(pack_pair(H(), x[0], x[1]), pack_pair(H(), x[2], x[3]), pack_pair(H(), x[4], x[5]),
                      pack_pair(H(), x[6], x[7]));
}

} // namespace macko::cuda
