// Packs a matrix that comes as MACKO rows, into the form in which it is to be.
#pragma once

#include "cpu/layout/span-packer.h"

#include <optional>

namespace macko::cpu {

class matrix_packer {
public:
    explicit matrix_packer(const bitmap_matrix & dst);

    // As long as rows become bundles, all views have to be whole groups of them, and first_value does not matter.
    bool makes_bundles() const { return writer_.has_value(); }
    // Views may be packed in any order and at the same time.
    void pack(const macko_view & view, int64_t first_value);
    // When all rows are there. false if bundles take too much memory: then all rows are to be packed again, and become
    // a bitmap.
    [[nodiscard]] bool finish();

private:
    const bitmap_matrix                       dst_;
    std::optional<group_writer>               writer_;
    std::mutex                                mutex_;
    std::vector<std::unique_ptr<span_packer>> packers_; // that no thread uses

    std::unique_ptr<span_packer> take_packer();
};

} // namespace macko::cpu
