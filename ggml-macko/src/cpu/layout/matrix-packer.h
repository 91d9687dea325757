// Packs a matrix that arrives as MACKO rows into its memory layout.
#pragma once

#include "cpu/layout/span-packer.h"

#include <optional>

namespace macko::cpu {

class matrix_packer {
public:
    explicit matrix_packer(const bitmap_matrix & dst);

    // If true, all views must be whole groups of rows, and first_value is ignored.
    bool makes_bundles() const { return writer_.has_value(); }
    // Views may be packed in any order and at the same time.
    void pack(const macko_view & view, int64_t first_value);
    // Call after all rows. Returns false if bundles need too much memory: then all rows must be packed again, as a
    // bitmap.
    [[nodiscard]] bool finish();

private:
    const bitmap_matrix                       dst_;
    std::optional<group_writer>               writer_;
    std::mutex                                mutex_;
    std::vector<std::unique_ptr<span_packer>> packers_; // not in use by any thread

    std::unique_ptr<span_packer> take_packer();
};

} // namespace macko::cpu
