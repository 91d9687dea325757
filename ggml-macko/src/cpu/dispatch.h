// The kernel sets that this build has, one per instruction set. Internal: kernels.h is what other layers use; tests compare sets.
#pragma once

#include "cpu/kernels.h"

namespace macko {

// how x lies in the scratch memory, and with it the kernel that reads it
enum class x_layout {
    rows,   // n rows of padded_cols floats: weights are expanded once for up to 8 x (decode)
    panels, // tiles of tokens, each [padded_cols][tokens of the tile]: each non-zero meets a vector of tokens (prefill)
};

// all pointers are set; no function of shared headers is called behind them (see kernels-impl.h)
struct kernel_set {
    const char * name;
    // thread ith's part of the copy of x into scratch
    void (*prepare)(const mul_mat_params & p, x_layout layout, int ith, int nth);
    // rows row_begin ... row_end-1 (numbered as in p.w) of y, from the scratch memory that all threads prepared
    void (*multiply)(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end);
    // cost of one x in the rows layout, and of one vector of tokens in the panels layout, per column and per non-zero:
    // dispatch.cpp compares them
    int     vector_width;
    float   expand_cost;  // per column: expanding weights once for up to 8 x
    float   row_cost;     // per column and x
    float   panel_cost;   // per non-zero: decoding
    float   vector_cost;  // per non-zero and vector of tokens
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

} // namespace macko
