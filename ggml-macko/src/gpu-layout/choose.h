// The one place that decides in which layout a GPU keeps a sparse matrix, and how many bytes it reserves. Pure
// functions.
#pragma once

#include "gpu-layout/plan.h"

namespace macko::cuda {

// Returns all decisions that need only the header: the bytes to reserve, and the candidates in the order of preference.
// Whatever the values are, one of the candidates fits; all fit the reserved bytes where zeros are at random places and
// no more than a few percent of the values are outliers.
gpu_plan choose(const gpu_matrix & matrix, const gpu_device & device);
// The same with no candidates but those of one layout (a name that layout_name() gives) with so many lanes (0: those
// that suit the matrix), for tests and measurements. No candidates: there are no kernels for it.
gpu_plan choose_only(const gpu_matrix & matrix, const gpu_device & device, const std::string & layout, int32_t lanes);

// Bytes to reserve for a matrix that has no other layouts than MACKO and INLINE_DELTA.
int64_t nbytes_of_rows(const gpu_matrix & matrix);

// The layout, or what has to be found out next about which candidate. forced plans may have none: then the candidate is
// that behind the last one.
layout_verdict settle(const gpu_plan & plan, const layout_survey & found);

} // namespace macko::cuda
