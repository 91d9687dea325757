// y = W x on the CPU for a sparse W and one or many x. There is one kernel set per instruction set; the set is chosen
// at run time. Does not use ggml.
#pragma once

#include "codec/team.h"
#include "cpu/layout/choose.h"
#include "cpu/layout/columns.h"
#include "cpu/layout/span-ops.h"

namespace macko::cpu {

struct mul_mat_params {
    cpu_matrix            w;
    int64_t               row_begin; // first row of w to multiply: the expert's first row, or 0
    int64_t               row_end;
    int64_t               n; // number of x
    const float * const * x; // n pointers to as many floats as w has columns
    float * const *       y; // n pointers to row_end - row_begin floats, all written
    // Rounds x to the value type first (F16, BF16), as ggml-cpu does with dense weights. With a matrix of the format
    // `quantized`, x become integers with a scale for each 64 columns (32 if its windows have 32 columns): of 8
    // bits if the set multiplies bytes, else of 16. Without round_x, they have 23 bits.
    bool   round_x;
    void * scratch; // mul_mat_scratch_nbytes(columns of w, n) bytes, aligned to 64
    // barrier of the calling team; null: the threads are those of an OpenMP parallel region
    team_barrier * barrier = nullptr;
    // null, or with n = 1 a float for each of these rows: y may be 0 where the gate is not positive
    const float * gate = nullptr;
    // The columns of w's rows row_begin ... row_end - 1, as rows (columns.h), or no masks. Used with n = 1 if x has so
    // many zeros that reading only the other columns is faster.
    bitmap_layout columns = {};
    // Whether the columns of zeros are skipped. If not, y is the same except for the sign of a zero.
    bool skip_zeros = true;
};

int64_t mul_mat_scratch_nbytes(int64_t cols, int64_t n);

// All nth threads of a team or an OpenMP parallel region call this with the same params. It contains barriers and
// returns when y is complete. The result is the same for each nth, bit for bit.
void mul_mat_thread(const mul_mat_params & p, int ith, int nth);

// mul_mat_thread() in two parts, for products with the same x. The caller provides a barrier after each part.
//
// Copies x to p.scratch. Either all nth threads call this, or one thread calls it with ith = 0 and nth = 1.
void mul_mat_prepare(const mul_mat_params & p, int ith, int nth);
// Computes y from the x prepared for p, or for another product with the same prepared x. All nth threads call this, and
// it may contain barriers. number: index of the product among those between two barriers, below MAX_SAME_X.
void          mul_mat_multiply(const mul_mat_params & p, int number, int ith, int nth);
constexpr int MAX_SAME_X = 8;
// Whether the x prepared for p also serves q, which has the same x and the same scratch memory.
bool same_prepared_x(const mul_mat_params & p, const mul_mat_params & q);

// The properties of the kernel set in use on which choose_cpu_layout() depends, and its functions that convert layouts.
const layout_traits & layout_traits_in_use();
const span_ops &      span_ops_in_use();
expanders             expanders_in_use();
// Name of the CPU if the choice depends on it and not only on the kernel set, else "".
const char * cpu_with_own_layouts();

// Name of the kernel set in use: the value of GGML_MACKO_CPU_KERNELS, which is read once, or the fastest set that this
// CPU supports. BAD_ARGUMENT with a message if GGML_MACKO_CPU_KERNELS names an unknown set or one that this CPU does
// not support.
[[nodiscard]] int select_kernels(const char ** name);

} // namespace macko::cpu
