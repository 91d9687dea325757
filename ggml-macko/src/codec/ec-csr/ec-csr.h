// The EC-CSR codec: converts blocks to arrays, checks arrays, and decodes rows (FORMAT.md section 6; EC-SpMV paper,
// section 6). extract.h chooses the blocks of a matrix; this file only defines their storage in the arrays. Plain
// C++17: no ggml, no CUDA.
#pragma once

#include "codec/codec.h"

namespace macko {

// the components, in the order of the tensor table
enum ec_csr_component : size_t { EC_VALUES, EC_DELTAS, EC_BASES, EC_BLK_PTR, EC_ROWS, EC_SETS };

const codec & ec_csr_codec();

constexpr int64_t EC_LANES  = 32; // threads that share a block
constexpr int64_t EC_VECTOR = 4;  // consecutive columns of a lane in the arrays
// blocks with several rows and long blocks have a multiple of this many columns
constexpr int64_t EC_UNIT = EC_LANES * EC_VECTOR;
// A block of one row with at most this many entries (non-zeros and fillers) is short: more round up to EC_UNIT columns.
constexpr int64_t EC_MAX_SHORT       = EC_UNIT - EC_LANES;
constexpr int32_t EC_MAX_GRANULARITY = 64;
constexpr int64_t EC_MAX_SETS        = 8; // granularities 64, 32 ... 2, 1 with long blocks, 1 with short ones

struct ec_csr_set { // four elements of X.sets
    int32_t granularity;
    int32_t vector_size;
    int32_t n_blocks;
    int32_t n_cols; // columns of all its blocks, with fillers and padding
};
static_assert(sizeof(ec_csr_set) == 16, "read from and written to the file as it is");

constexpr bool    is_ec_delta_bits(int32_t bits) { return bits == 4 || bits == 8; }
constexpr int64_t ec_base_nbytes(int64_t cols) { return cols <= 65536 ? 2 : 4; }
// Runs check_desc, and checks that delta_bits is 4 or 8.
[[nodiscard]] int check_ec_csr_desc(const macko_desc & desc);

// An unchecked matrix from a file. Lengths are in elements, for deltas in bytes.
struct ec_csr_arrays {
    macko_desc         desc;
    const ec_csr_set * sets;
    int64_t            n_sets;
    const int32_t *    rows;
    int64_t            n_rows;
    const int32_t *    blk_ptr;
    int64_t            n_blk_ptr;
    const void *       bases;
    int64_t            n_bases;
    const uint8_t *    deltas;
    int64_t            n_deltas;
    const void *       values;
    int64_t            n_values;
};

// A set, and its offsets in the arrays.
struct ec_csr_range : ec_csr_set {
    int64_t block;   // index of its first block; bases start at 32 * block
    int64_t row;     // offset in rows
    int64_t blk_ptr; // offset in blk_ptr
    int64_t col;     // columns before this set: deltas start at bit col * delta_bits
    int64_t value;   // offset in values
};

// Arrays with valid sets, lengths, row indices, block pointers and block order, so that rows can be decoded. Decoding
// checks columns and values: no other code may use them before all rows were decoded once (check_rows).
class ec_csr_view : public codec_view {
public:
    ec_csr_view() : codec_view(ec_csr_codec()) {}
    const macko_desc & desc() const override { return arrays_.desc; }
    int                check_rows(int n_threads) const override;
    int                for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const override;

    const ec_csr_arrays &             arrays() const { return arrays_; }
    const std::vector<ec_csr_range> & sets() const { return sets_; }

    struct block_row {  // one row of one block
        uint32_t block; // index within its set
        uint16_t set;
        uint16_t index; // index within the block's rows
    };
    // the blocks with elements of a row
    const block_row * row_begin(int64_t row) const { return block_rows_.data() + row_off_[static_cast<size_t>(row)]; }
    const block_row * row_end(int64_t row) const { return block_rows_.data() + row_off_[static_cast<size_t>(row) + 1]; }

private:
    friend int                check_ec_csr(const ec_csr_arrays & arrays, ec_csr_view * view);
    ec_csr_arrays             arrays_ = {}; // no sets until check_ec_csr() fills it
    std::vector<ec_csr_range> sets_;
    std::vector<uint32_t>     row_off_;
    std::vector<block_row>    block_rows_;
};

// Checks everything except columns and values. The arrays must outlive *view.
[[nodiscard]] int check_ec_csr(const ec_csr_arrays & arrays, ec_csr_view * view);

// ---- encoding ----

// The elements of a block: its rows in ascending order, and the columns of their non-zeros in strictly ascending order.
// In a block with several rows, the distance between columns of a lane fits in a delta.
struct ec_csr_block {
    int32_t granularity;
    int32_t vector_size;
    int64_t rows;     // first of `granularity` in ec_csr_blocks::rows
    int64_t cols;     // first of n_cols in ec_csr_blocks::cols
    int64_t n_cols;   // non-zeros per row
    int64_t n_stored; // columns stored per row, with fillers and padding
};
struct ec_csr_blocks {
    std::vector<ec_csr_block> blocks; // in any order
    std::vector<int32_t>      rows;
    std::vector<int32_t>      cols;
};

// Arrays with their memory.
struct ec_csr_matrix {
    macko_desc              desc = {};
    std::vector<ec_csr_set> sets;
    std::vector<int32_t>    rows;
    std::vector<int32_t>    blk_ptr;
    std::vector<uint8_t>    bases; // bytes
    std::vector<uint8_t>    deltas;
    std::vector<uint8_t>    values; // bytes

    ec_csr_arrays arrays() const;
    int64_t       nbytes() const;
};

// Writes the canonical arrays of blocks and sorts blocks; dense is the matrix that contains them. LIMIT if there are
// too many entries.
[[nodiscard]] int assemble(const macko_desc & desc, const void * dense, ec_csr_blocks & blocks, int n_threads,
                           ec_csr_matrix * out);

} // namespace macko
