#include "cpu/layout/choose.h"

#include <algorithm>

namespace macko::cpu {

cpu_shape shape_with(const macko_desc & desc, bool bundles) {
    return bundles && bundles_nbytes(desc) > 0 ? cpu_shape(bundles_shape{}) : bitmap_shape{};
}

cpu_plan plan_with(const macko_desc & desc, const cpu_shape & shape, const char * reason) {
    const int64_t least = std::holds_alternative<bundles_shape>(shape) ? layout_nbytes(desc, bitmap_shape{}) : 0;
    return { desc, shape, std::max(layout_nbytes(desc, shape), least), reason };
}

// Coded values need 10 bits instead of 16 or 32. Where instructions are the limit, they must also be at least as fast
// as expanded values, which depends on the set: with AVX-512 VBMI2 it is cheap to move bytes, signs and one exponent
// bit to their columns, while all other sets would expand the values again for each product. Rows with few columns are
// smaller without the alignment of the rows.
cpu_plan choose_cpu_layout(const layout_traits & kernels, const macko_desc & desc, int32_t value_type,
                           int64_t values_nbytes, int64_t window, bool round_x) {
    if (const int32_t bits = code_bits(value_type)) {
        return plan_with(desc, quantized_shape{ bits, window, values_nbytes },
                         "codes with scales for windows of columns, as in the file");
    }
    const double    elements = static_cast<double>(desc.rows) * static_cast<double>(desc.cols);
    const auto      nnz      = static_cast<double>(desc.nnz);
    const float     below    = desc.cols <= SHORT_ROW ? kernels.short_bundles_below : kernels.bundles_below;
    const bool      wanted   = round_x && has_bundles(desc.type) && nnz < elements * static_cast<double>(below);
    const cpu_shape shape    = shape_with(desc, wanted);
    const bool      bundles  = std::holds_alternative<bundles_shape>(shape);
    const cpu_plan  expanded = plan_with(desc, shape,
                                        !has_bundles(desc.type) ? "values of 32 bits"
                                         : bundles ? "few non-zeros, which these kernels multiply faster in bundles"
                                         : wanted  ? "too few non-zeros or too many columns for bundles"
                                                   : "non-zeros that these kernels multiply as fast from a bitmap");
    const int64_t   outliers =
        value_type == GGML_MACKO_TYPE_CODED ? max_short_outliers(desc.nnz, desc.type, values_nbytes) : -1;
    const bool faster = kernels.coded &&
                        (nnz >= elements * static_cast<double>(kernels.coded_from) || desc.type == GGML_MACKO_TYPE_F32);
    if (!faster || !can_stay_coded(desc, outliers)) {
        return expanded;
    }
    const cpu_plan as_stored =
        plan_with(desc, coded_bitmap_shape{ outliers }, "coded values, which these kernels multiply as they are");
    return as_stored.nbytes < expanded.nbytes ? as_stored : expanded;
}

} // namespace macko::cpu
