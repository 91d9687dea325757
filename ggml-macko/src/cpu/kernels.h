// y = W x on the CPU for a sparse W and one or many x. There is a kernel set for each instruction set, and one of them
// is chosen at run time. No ggml here.
#pragma once

#include "codec/team.h"
#include "cpu/bitmap.h"

namespace macko::cpu {

struct mul_mat_params {
    bitmap_matrix         w;
    int64_t               row_begin; // first row of w to multiply: of an expert, or 0
    int64_t               row_end;
    int64_t               n; // number of x
    const float * const * x; // n pointers to w.cols floats
    float * const *       y; // n pointers to row_end - row_begin floats, all written
    // Round x to the value type first (F16, BF16), as ggml-cpu does with dense weights. With quantized weights and few
    // x, each x may be rounded to multiples of max |x| / 32767, of matrices in bundles max |x| / 32512, which is finer
    // than the 8 bits that ggml gives 32 columns.
    bool   round_x;
    void * scratch; // mul_mat_scratch_nbytes(w.cols, n) bytes, aligned to 64
    // of the team that calls; null: the threads are those of an OpenMP parallel region
    team_barrier * barrier = nullptr;
};

int64_t mul_mat_scratch_nbytes(int64_t cols, int64_t n);

// All nth threads of a team or an OpenMP parallel region call this with the same params: it has barriers, and returns
// when y is complete. The result is the same for each nth, bit for bit.
void mul_mat_thread(const mul_mat_params & p, int ith, int nth);

// What a matrix is in memory for the kernels in use, from the type of its values on file and the bytes that they take
// there: coded values stay coded where these kernels multiply faster with them, and are expanded where not; quantized,
// F16 and BF16 values become bundles where they multiply faster with those.
bitmap_form form_in_memory(const macko_desc & desc, int32_t value_type, int64_t values_nbytes);

// The name of the kernel set in use: that of GGML_MACKO_FORCE, which is read once, or the fastest that this CPU
// supports. Fails with BAD_ARGUMENT and a message if GGML_MACKO_FORCE names no set or one that this CPU does not
// support.
[[nodiscard]] int select_kernels(const char ** name);

} // namespace macko::cpu
