// Sparse times dense on the CPU: y = W x for one or many x. One set of kernels per instruction set, chosen at run time.
#pragma once

#include "cpu/bitmap.h"

namespace macko::cpu {

struct mul_mat_params {
    bitmap_matrix         w;
    int64_t               row_begin; // rows of w that are wanted (an expert's, or all)
    int64_t               row_end;
    int64_t               n; // how many x
    const float * const * x; // n pointers to w.cols floats
    float * const *       y; // n pointers to row_end - row_begin floats, all written
    // round x to the value type first (F16, BF16), as ggml-cpu does with dense weights. With quantized weights: it
    bool round_x;
    // may be rounded to multiples of max |x| / 32767 (one x), which is finer than
    // ggml's 8 bits per 32 columns
    void * scratch; // mul_mat_scratch_nbytes(w.cols, n) bytes, aligned to 64
};

int64_t mul_mat_scratch_nbytes(int64_t cols, int64_t n);

// Called with the same params by all nth threads of one OpenMP parallel region (it contains barriers); returns when y
// is complete
// on all threads. Deterministic: the result does not depend on nth.
void mul_mat_thread(const mul_mat_params & p, int ith, int nth);

// kernel set in use: GGML_MACKO_FORCE, or the best that this CPU has. OK or an error that names the bad value.
[[nodiscard]] int select_kernels(const char ** name);

} // namespace macko::cpu
