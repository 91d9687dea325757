// A survey of a matrix's values on the CPU: the numbers that settle() needs in addition to the header. The GPU makes
// the same survey while a matrix is loaded (cuda/sparse/repack.cu). Plain C++.
#pragma once

#include "gpu-layout/choose.h"

namespace macko::cuda {

// Finds the exponent with which groups hold the most values. changes[e]: values that exponent e holds, minus those that
// e - 1 holds; end: of the exponents
void find_exponent(const int32_t (&changes)[N_EXPONENTS + 1], int end, shape_survey * found);

// Surveys a matrix until its plan is settled; *verdict is its layout on a GPU. If a matrix in blocks becomes rows, the
// plan of the rows replaces *plan. view has passed all checks.
[[nodiscard]] int survey_on_cpu(gpu_plan * plan, const codec_view & view, int n_threads, layout_survey * found,
                                layout_verdict * verdict);

} // namespace macko::cuda
