// The one place that decides in which layout the CPU keeps a sparse matrix, and how many bytes it reserves. A pure
// function.
#pragma once

#include "cpu/layout/layouts.h"

namespace macko::cpu {

constexpr int64_t SHORT_ROW = 1024; // columns

// The properties of a kernel set on which the choice depends. The defaults are those of a set without any.
struct layout_traits {
    float bundles_below = 0; // matrices of F16 and BF16 use bundles below this density
    // bundles_below of matrices with at most SHORT_ROW columns, for which summing a row from a bitmap takes about as
    // long as its products
    float short_bundles_below = bundles_below;
    bool  coded               = false; // the set multiplies with coded values
    float coded_from          = 1;     // at n = 1, it does so faster than with expanded values from this density on
};

struct cpu_plan {
    macko_desc   desc;
    cpu_shape    shape;
    int64_t      nbytes; // to reserve; bundles that take more become a BITMAP
    const char * reason;
};
// value_type, values_nbytes, window: type and bytes of the values in the file, and the columns that share a scale in
// the format `quantized`, which stays as it is. Coded values stay coded if the kernels multiply them faster, and are
// expanded otherwise. F16 and BF16 values become bundles if the kernels multiply these faster and round_x: x is rounded
// to F16 or BF16.
cpu_plan choose_cpu_layout(const layout_traits & kernels, const macko_desc & desc, int32_t value_type,
                           int64_t values_nbytes, int64_t window, bool round_x = true);
// A plan for this shape.
cpu_plan plan_with(const macko_desc & desc, const cpu_shape & shape, const char * reason = "");
// BUNDLES if they are wanted and possible, or BITMAP.
cpu_shape shape_with(const macko_desc & desc, bool bundles);

} // namespace macko::cpu
