#include "gpu-layout/row-split.h"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

double expected_groups(const macko_desc & desc, int64_t entries, int32_t delta_bits) {
    const double zeros = 1 - static_cast<double>(desc.nnz) / static_cast<double>(desc.rows * desc.cols);
    return desc.nnz
               ? static_cast<double>(desc.nnz) / static_cast<double>(entries) / (1 - std::pow(zeros, 1 << delta_bits))
               : 0;
}

double expected_groups_of_row(const macko_desc & desc, int64_t entries, int32_t delta_bits, double outliers) {
    const auto   rows     = static_cast<double>(desc.rows);
    const double of_a_row = outliers / rows;
    return expected_groups(desc, entries, delta_bits) / rows + 0.5 + of_a_row / OUTLIERS_OF_GROUP +
           std::min(of_a_row, 0.5);
}

double with_unused_groups(double groups) {
    return std::max(groups + (LINE_GROUPS - 1) / 2.0, std::ceil((groups + 1) / LINE_GROUPS) * LINE_GROUPS);
}

} // namespace macko::cuda
