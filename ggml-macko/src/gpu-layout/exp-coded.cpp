#include "gpu-layout/exp-coded.h"

#include "gpu-layout/inline-delta.h"

#include <algorithm>

namespace macko::cuda {

int32_t exp_coded_delta_bits(const macko_desc & desc) {
    const auto nbytes = [&](int32_t bits) {
        return expected_groups(desc, EXP_CODED_ENTRIES, bits) * static_cast<double>(exp_coded_group_nbytes(bits));
    };
    return nbytes(2) <= nbytes(4) ? 2 : nbytes(4) <= nbytes(6) ? 4 : 6;
}

// trailing, bases and row_ptr, and the part of the last line after its groups
int64_t exp_coded_nbytes_of_rows(const macko_desc & desc) {
    return gpu_aligned(2 * desc.rows) + gpu_aligned(2 * desc.rows * EXP_CODED_LANES) +
           gpu_aligned(4 * (desc.rows + 1)) + GPU_ALIGNMENT;
}

int64_t exp_coded_room(const macko_desc & desc, int64_t nbytes) {
    const int64_t room = nbytes - exp_coded_nbytes_of_rows(desc);
    return std::max<int64_t>(0, room & ~(GPU_ALIGNMENT - 1));
}

bool exp_coded_pays(const macko_desc & desc, int64_t n_padded, int64_t nbytes) {
    const double  separate = static_cast<double>(n_padded) * (2 + desc.delta_bits / 8.0);
    const int32_t bits     = desc.delta_bits == 8 ? 6 : std::max(desc.delta_bits, 2),
                  other    = desc.delta_bits < 8 && desc.cols >= WIDE_COLS ? 3 : bits;
    const auto inlined     = [&](int32_t delta_bits) {
        return expected_groups(desc, inline_delta_entries(delta_bits), delta_bits) *
               static_cast<double>(INLINE_DELTA_GROUP_NBYTES);
    };
    return static_cast<double>(nbytes) < std::min({ separate, inlined(bits), inlined(other) });
}

int64_t exp_coded_expected_nbytes(const macko_desc & desc, int64_t outliers, int64_t * of_groups) {
    const int32_t bits = exp_coded_delta_bits(desc);
    const auto    rows = static_cast<double>(desc.rows), group = static_cast<double>(exp_coded_group_nbytes(bits));
    const double  groups = expected_groups_of_row(desc, EXP_CODED_ENTRIES, bits, static_cast<double>(outliers));
    *of_groups           = static_cast<int64_t>(rows * groups * group);
    return gpu_aligned(static_cast<int64_t>(GROUPS_MARGIN * rows * with_unused_groups(groups) * group)) +
           exp_coded_nbytes_of_rows(desc);
}

exp_coded_layout bind_exp_coded(const macko_desc & desc, const exp_coded_shape & shape, int64_t nbytes, void * memory) {
    exp_coded_layout m = {};
    bind_row_split(desc, shape, exp_coded_room(desc, nbytes) + GPU_ALIGNMENT, memory, &m); // the last line is whole
    return m;
}

} // namespace macko::cuda
