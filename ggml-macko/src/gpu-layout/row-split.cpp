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

void bind_row_split(const macko_desc & desc, const row_split_shape & shape, int64_t nbytes_groups, void * memory,
                    row_split_layout * m) {
    memory_parts parts(memory);
    parts.take(&m->groups, nbytes_groups);
    parts.take(&m->trailing, desc.rows);
    parts.take(&m->bases, desc.rows * shape.lanes);
    parts.take(&m->row_ptr, desc.rows + 1);
    static_cast<layout_base &>(*m) = { desc.rows, desc.cols, desc.type, parts.nbytes() };
    m->delta_bits                  = shape.delta_bits;
    m->lanes                       = shape.lanes;
    m->bank_width                  = shape.banked ? static_cast<int32_t>(bank_width_of(desc.cols)) : 0;
}

} // namespace macko::cuda
