// Makes the bundles (bundles.h) of a group of rows with quantized values.
#pragma once

#include "cpu/layout/group-writer.h"

namespace macko::cpu {

class quant_packer {
public:
    // Appends the group's bundles to out. Returns false if a bundle has too many vectors.
    [[nodiscard]] bool pack(const packed_view & view, int64_t group, group_bytes * out);

private:
    struct piece {
        int32_t  first; // first entry
        uint16_t first_col, last_col;
        uint16_t scale;
        uint8_t  row;
    };

    std::vector<uint8_t>  quants_;
    std::vector<int32_t>  cols_;
    std::vector<int32_t>  entries_; // of each piece: column * 256 + q as a byte; then entries without a column
    std::vector<piece>    pieces_, sorted_;
    std::vector<uint32_t> starts_;

    void read_quants(const packed_arrays & a, int64_t first_block, int64_t end_block);
    void add_rows(const packed_view & view, int64_t begin, int64_t end);
    void sort(int64_t cols);
};

} // namespace macko::cpu
