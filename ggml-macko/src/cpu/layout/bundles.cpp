#include "cpu/layout/bundles.h"

#include <iterator>

namespace macko::cpu {

// Share of filled slots by density. Measured with random places, and with rows of different densities, as in pruned
// attention matrices. The plan adds a margin.
constexpr struct {
    double density, fill;
} FILLS[] = { { 0.02, 0.25 }, { 0.05, 0.4 }, { 0.1, 0.53 }, { 0.3, 0.78 }, { 0.5, 0.9 }, { 1.0, 0.98 } };

static double fill_of(double density) {
    size_t i = 1;
    for (; i + 1 < std::size(FILLS) && density > FILLS[i].density; i++) {
    }
    const auto &a = FILLS[i - 1], &b = FILLS[i];
    return a.fill + (b.fill - a.fill) * (density - a.density) / (b.density - a.density);
}

int64_t bundles_nbytes(const macko_desc & desc) {
    const double density =
        static_cast<double>(desc.nnz) / (static_cast<double>(desc.rows) * static_cast<double>(desc.cols));
    if (!has_bundles(desc.type) || desc.cols > BUNDLE_COLS || density < FILLS[0].density) {
        return 0;
    }
    constexpr double margin  = 1.05;
    const int64_t    bundles = (desc.rows + n_bundle_groups(desc.rows) * (STEP_SLOTS - 1)) / STEP_SLOTS *
                            ((desc.cols + BUNDLE_SPAN - 1) / BUNDLE_SPAN);
    // on average, half of the steps in the last vector of a bundle are empty
    const double full    = static_cast<double>(desc.nnz) / (2 * STEP_SLOTS) / fill_of(density);
    const auto   vectors = static_cast<int64_t>((full + static_cast<double>(bundles) / 2) * margin) + 1;
    return bundles * BUNDLE_HEADER_NBYTES + vectors * BUNDLE_VECTOR_NBYTES;
}

} // namespace macko::cpu
