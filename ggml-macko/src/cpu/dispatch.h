// The kernel sets that this build has, one per instruction set. Internal: kernels.h is what other layers use; tests
// compare sets.
#pragma once

#include "cpu/kernels.h"
#include "cpu/row-ops.h"

namespace macko::cpu {

// how x lies in the scratch memory, and with it the kernel that reads it
enum class x_layout {
    // one x as padded_cols 16-bit numbers of the value type, or integers for quantized weights (n = 1, round_x); sets
    // without it
    rows16,
    // (rows16_below 0) read `rows`
    rows,   // n rows of padded_cols floats: weights are expanded once for up to 8 x (decode)
    panels, // tiles of tokens, each [padded_cols][tokens of the tile]: each non-zero meets a vector of tokens (prefill)
};

// What a multiplication costs per matrix column (of every row), in ticks of one clock: only ratios matter. Measured
// with rows that
// lie in L2 (docs/notes-cpu-kernels.md); dispatch.cpp compares the layouts with it.
struct kernel_costs {
    // density below which `narrow` is faster than `rows` at n = 1; quantized weights: at any density, unless this is 0
    float rows16_below;
    int   vector_width; // tokens in a vector
    float x_batch, x;   // rows: expanding weights for a group of up to 8 x; each x
    float column;       // panels: each column,
    float entry;        //         each non-zero,
    float vector;       //         each non-zero and vector of tokens
};

struct kernel_set {
    const char * name;
    // thread ith's part of the copy of x into scratch
    void (*prepare)(const mul_mat_params & p, x_layout layout, int ith, int nth);
    // rows row_begin ... row_end-1 (numbered as in p.w) of y, from the scratch memory that all threads prepared
    void (*multiply)(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end);
    kernel_costs costs;
    row_ops      rows;
};

extern const kernel_set kernels_portable;
#if defined(__x86_64__)
extern const kernel_set kernels_avx2;
extern const kernel_set kernels_avx512;
extern const kernel_set kernels_avx512_vbmi2;
#endif

// the sets that this CPU and operating system can run, best first; nullptr past the last
const kernel_set * supported_kernel_set(int i);
// as mul_mat_thread, with a given set
void mul_mat_thread_with(const kernel_set & set, const mul_mat_params & p, int ith, int nth);

} // namespace macko::cpu
