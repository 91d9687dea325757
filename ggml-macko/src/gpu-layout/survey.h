// A survey of a matrix's values on the CPU: what settle() needs beside the header. The GPU makes the same survey while
// a matrix is loaded (cuda/sparse/repack.cu). Plain C++.
#pragma once

#include "gpu-layout/choose.h"

namespace macko::cuda {

// The exponent with which most values are held, where changes[e] is how many more values exponent e holds than e - 1
// does. end: of the exponents.
void find_exponent(const int32_t (&changes)[N_EXPONENTS + 1], int end, shape_survey * found);

// Surveys a matrix until its plan is settled: *verdict is the layout that a GPU gives it. *plan: of a matrix in blocks
// that becomes rows it is replaced by that of the rows. view: passed all checks.
[[nodiscard]] int survey_on_cpu(gpu_plan * plan, const codec_view & view, int n_threads, layout_survey * found,
                                layout_verdict * verdict);

} // namespace macko::cuda
