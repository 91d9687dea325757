// Decides the layout of a sparse matrix on a GPU and the bytes to reserve; no other code does. Pure functions.
#pragma once

#include "gpu-layout/plan.h"

namespace macko::cuda {

// Returns all decisions that need only the header: the bytes to reserve, and the candidates in the order of preference.
// One of the candidates fits any values. All fit the reserved bytes if zeros are at random places and at most a few
// percent of the values are outliers.
gpu_plan choose(const gpu_matrix & matrix, const gpu_device & device);
// The same with candidates of one layout only (a name from layout_name()) and a number of lanes (0: the best number for
// the matrix), for tests and measurements. No candidates: there are no kernels for it.
gpu_plan choose_only(const gpu_matrix & matrix, const gpu_device & device, const std::string & layout, int32_t lanes);

// Bytes to reserve for a matrix with the candidates MACKO and INLINE_DELTA only.
int64_t nbytes_of_rows(const gpu_matrix & matrix);

// Returns the layout, or the next step of the survey and its candidate. If no candidate of a forced plan fits, the
// index of the candidate is the number of candidates.
layout_verdict settle(const gpu_plan & plan, const layout_survey & found);

} // namespace macko::cuda
