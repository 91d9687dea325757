// Makes the bundles (bundles.h) of a group of rows with F16 or BF16 values.
#pragma once

#include "cpu/layout/group-writer.h"
#include "cpu/layout/span-ops.h"

namespace macko::cpu {

class span_packer {
public:
    explicit span_packer(const span_ops & ops);
    ~span_packer();
    span_packer(const span_packer &)             = delete;
    span_packer & operator=(const span_packer &) = delete;

    // Appends the bundles of the group that begins at a row, and writes the number of non-zeros of each of its rows.
    void pack(const macko_view & view, int64_t row, uint32_t * row_nnz, group_bytes * out);
    void pack(const packed_view & view, int64_t group, group_bytes * out);

    struct chunk;

private:
    const span_ops &       ops_;
    std::unique_ptr<chunk> chunk_;
};

} // namespace macko::cpu
