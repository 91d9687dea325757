// y = W x on the CPU for a sparse W and one or many x. There is a kernel set for each instruction set, and one of them
// is chosen at run time. No ggml here.
#pragma once

#include "codec/team.h"
#include "cpu/layout/columns.h"

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
    // null, or with n = 1 a float for each of these rows: y may be 0 where it is not positive
    const float * gate = nullptr;
    // The columns of w's rows row_begin ... row_end - 1, as rows (columns.h), or no masks. Used with n = 1 where so
    // much of x is zero that reading only the other columns is faster.
    bitmap_matrix columns = {};
    // Whether the columns of zeros are left out. If not, y is the same but for the sign of a zero.
    bool skip_zeros = true;
};

int64_t mul_mat_scratch_nbytes(int64_t cols, int64_t n);

// All nth threads of a team or an OpenMP parallel region call this with the same params: it has barriers, and returns
// when y is complete. The result is the same for each nth, bit for bit.
void mul_mat_thread(const mul_mat_params & p, int ith, int nth);

// mul_mat_thread() in two parts, for products that have the same x. Each needs a barrier after it; the caller has them.
//
// Copies x to p.scratch. All nth threads call this, or one of them does it for all with ith = 0 and nth = 1.
void mul_mat_prepare(const mul_mat_params & p, int ith, int nth);
// Computes y from what was prepared for p, or for another product whose x also serves p. All nth threads call this, and
// it may have barriers; `number` is the product's among those that are computed between two barriers, below MAX_SAME_X.
void          mul_mat_multiply(const mul_mat_params & p, int number, int ith, int nth);
constexpr int MAX_SAME_X = 8;
// whether what is prepared for p serves q, which has the same x and the same scratch memory
bool same_prepared_x(const mul_mat_params & p, const mul_mat_params & q);

// What a matrix is in memory for the kernels in use, from the type of its values on file and the bytes that they take
// there: coded values stay coded where these kernels multiply faster with them, and are expanded where not; quantized,
// F16 and BF16 values become bundles where they multiply faster with those.
struct cpu_plan {
    bitmap_form  form;
    int64_t      nbytes;
    const char * layout; // BITMAP, CODED_BITMAP or BUNDLES; bundles that take more than `nbytes` become a bitmap
    const char * reason;
};
cpu_plan choose_cpu_layout(const macko_desc & desc, int32_t value_type, int64_t values_nbytes);
// What that depends on besides the kernels' name: the CPU's, if it has forms of its own, else "".
const char * cpu_with_own_forms();

// The name of the kernel set in use: that of GGML_MACKO_FORCE, which is read once, or the fastest that this CPU
// supports. Fails with BAD_ARGUMENT and a message if GGML_MACKO_FORCE names no set or one that this CPU does not
// support.
[[nodiscard]] int select_kernels(const char ** name);

} // namespace macko::cpu
