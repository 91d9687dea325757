#include "cpu/layout/bundles.h"

namespace macko::cpu {

// Share of filled slots by density. Measured with random places; for plain values also with rows of different
// densities, as in pruned attention matrices. The plan adds a margin.
struct measured_fill {
    double density, fill;
};
constexpr measured_fill QUANT_FILLS[] = { { 0.05, 0.22 }, { 0.1, 0.37 }, { 0.3, 0.71 }, { 0.5, 0.82 }, { 1.0, 0.9 } };
constexpr measured_fill FILLS[]       = { { 0.02, 0.25 }, { 0.05, 0.4 }, { 0.1, 0.53 },
                                          { 0.3, 0.78 },  { 0.5, 0.9 },  { 1.0, 0.98 } };

template <size_t N> static double fill_of(const measured_fill (&measured)[N], double density) {
    size_t i = 1;
    for (; i + 1 < N && density > measured[i].density; i++) {
    }
    const measured_fill & a = measured[i - 1];
    const measured_fill & b = measured[i];
    return a.fill + (b.fill - a.fill) * (density - a.density) / (b.density - a.density);
}

int64_t bundles_nbytes(const macko_desc & desc, int32_t value_type) {
    const bool   quantized = is_quant_type(value_type);
    const double density =
        static_cast<double>(desc.nnz) / (static_cast<double>(desc.rows) * static_cast<double>(desc.cols));
    if (!has_bundles(value_type) || desc.cols > BUNDLE_COLS || density < (quantized ? 0.05 : 0.02)) {
        return 0;
    }
    constexpr double margin = 1.05;
    const int64_t    pieces = bundle_pieces(value_type), groups = n_bundle_groups(desc.rows);
    const int64_t    bundles =
        quantized ? (desc.rows + desc.nnz / QUANT_BLOCK) / pieces + groups
                     : (desc.rows + groups * (pieces - 1)) / pieces * ((desc.cols + BUNDLE_SPAN - 1) / BUNDLE_SPAN);
    const double fill = quantized ? fill_of(QUANT_FILLS, density) : fill_of(FILLS, density);
    // on average, half of the steps in the last vector of a bundle are empty
    const double full    = static_cast<double>(desc.nnz) / (2 * STEP_SLOTS) / fill;
    const auto   vectors = static_cast<int64_t>((full + static_cast<double>(bundles) / 2) * margin) + 1;
    return bundles * bundle_header_nbytes(value_type) + vectors * bundle_vector_nbytes(value_type);
}

} // namespace macko::cpu
