// The EC-CSR codec: blocks to arrays, check, arrays to rows (FORMAT.md section 6; EC-SpMV paper, section 6). Plain
// C++17: no ggml, no CUDA.
// Which blocks a matrix has is decided in extract.h; this file only knows how they stand in the arrays.
#pragma once

#include "codec/macko/macko.h"

#include <functional>
#include <vector>

namespace macko {

constexpr int64_t EC_LANES  = 32; // threads that share a block
constexpr int64_t EC_VECTOR = 4;  // consecutive columns of a lane in the arrays
// columns of a block with g > 1, and of a long one, are a multiple
constexpr int64_t EC_UNIT            = EC_LANES * EC_VECTOR;
constexpr int32_t EC_MAX_GRANULARITY = 64;
constexpr int64_t EC_MAX_SETS        = 8; // 64, 32 ... 1 long, 1 short

struct ec_csr_set { // four elements of X.sets
    int32_t granularity;
    int32_t vector_size;
    int32_t n_blocks;
    int32_t n_cols; // of all its blocks, fillers and padding counted
};
static_assert(sizeof(ec_csr_set) == 16, "read from and written to the file as it is");

constexpr bool    is_ec_delta_bits(int32_t bits) { return bits == 4 || bits == 8; }
constexpr int64_t ec_base_nbytes(int64_t cols) { return cols <= 65536 ? 2 : 4; }
// check_desc, and delta_bits 4 or 8
[[nodiscard]] int check_ec_csr_desc(const macko_desc & desc);

// a matrix as it stands in a file, checked by nobody. Lengths are in elements (deltas: bytes).
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

// a set, and where it starts in the arrays
struct ec_csr_range : ec_csr_set {
    int64_t block;   // of all blocks; bases start at 32 * block
    int64_t row;     // in rows
    int64_t blk_ptr; // in blk_ptr
    int64_t col;     // columns before: deltas start at bit col * delta_bits
    int64_t value;   // in values
};

// Arrays whose sets, lengths, row indices, block pointers and order of blocks are right; row by row they can be taken
// apart. Columns and
// values are checked by decode_rows: until it has seen all rows, nothing else may use them.
class ec_csr_view {
public:
    const ec_csr_arrays &             arrays() const { return arrays_; }
    const std::vector<ec_csr_range> & sets() const { return sets_; }

    struct block_row {  // one row of one block
        uint32_t block; // in its set
        uint16_t set;
        uint16_t index; // among the block's rows
    };
    // the blocks that a row is in
    const block_row * row_begin(int64_t row) const { return block_rows_.data() + row_off_[static_cast<size_t>(row)]; }
    const block_row * row_end(int64_t row) const { return block_rows_.data() + row_off_[static_cast<size_t>(row) + 1]; }

private:
    friend int                check_ec_csr(const ec_csr_arrays & arrays, ec_csr_view * view);
    ec_csr_arrays             arrays_ = {}; // no sets until check_ec_csr() fills it
    std::vector<ec_csr_range> sets_;
    std::vector<uint32_t>     row_off_;
    std::vector<block_row>    block_rows_;
};

// everything but columns and values; the arrays must outlive *view
[[nodiscard]] int check_ec_csr(const ec_csr_arrays & arrays, ec_csr_view * view);
// rows row_begin ... row_end-1 as dense elements of desc.type: checks columns, deltas, fillers, padding, that values
// are finite, and that no
// two blocks hold one element. *nnz = non-zeros of these rows; the caller compares the sum over all rows with desc.nnz.
[[nodiscard]] int decode_rows(const ec_csr_view & view, int64_t row_begin, int64_t row_end, void * dense,
                              int64_t * nnz);
// decode_rows for all rows, one at a time: f(row, its cols elements) is called from several threads, rows in any order.
// Checks nnz too.
// On an error f has seen some of the rows.
[[nodiscard]] int each_row(const ec_csr_view & view, int n_threads,
                           const std::function<void(int64_t, const void *)> & f);

// the blocks of one row alone, as a matrix of its own (no sets: none; then it passes no check)
ec_csr_arrays rows_of_one(const ec_csr_view & view);

// ---- making ----

// a block by what it holds: rows ascending; columns of non-zeros, strictly ascending, whose distances within lanes fit
// if there are several rows
struct ec_csr_block {
    int32_t granularity;
    int32_t vector_size;
    int64_t rows;     // first of `granularity` in ec_csr_blocks::rows
    int64_t cols;     // first of n_cols in ec_csr_blocks::cols
    int64_t n_cols;   // non-zeros per row
    int64_t n_stored; // with fillers and padding
};
struct ec_csr_blocks {
    std::vector<ec_csr_block> blocks; // in any order
    std::vector<int32_t>      rows;
    std::vector<int32_t>      cols;
};

// arrays with their memory
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

// the canonical arrays of blocks (whose order this changes); dense: the matrix that they came from. LIMIT if there are
// too many entries.
[[nodiscard]] int assemble(const macko_desc & desc, const void * dense, ec_csr_blocks & blocks, int n_threads,
                           ec_csr_matrix * out);

} // namespace macko
