// Layout ROW_BLOCKS, for F32 matrices that an EC-CSR file stores in blocks of rows (FORMAT.md section 6). Plain C++:
// sizes, addresses and the host's copy of the arrays.
//
// Blocks have the structure of the file: 32 lanes, the columns of a lane one after the other, x gathered once for all
// rows of a block.
//   segment  At most 4 rows of a block, which a warp processes at a time. Larger blocks are cut into segments; each
//            segment has a copy of the block's columns.
//   chunk    128 columns of a segment. Lane l has four of them: 4 deltas of delta_bits bits, and 4 * rows values
//            (column after column) in vectors of 16 bytes; vector v of all lanes, then vector v + 1. Short blocks
//            (FORMAT.md) are one chunk, with zeros after their last column.
//   base     The first column of a lane, in 16 bits. The first delta is 0; each other delta is the distance from the
//            previous column.
//   slot     The place of the sum of a row of a segment. The slots of a row are adjacent, in the order of the segments.
//            A second kernel adds them up, so the result does not depend on the order in which segments finish.
#pragma once

#include "codec/ec-csr/ec-csr.h"
#include "gpu-layout/desc.h"
#include "gpu-layout/memory.h"

namespace macko::cuda {

constexpr int     ROW_BLOCKS_CHUNK       = EC_UNIT;
constexpr int     ROW_BLOCKS_MAX_COLUMNS = 4; // of x at a time, as many as registers allow
constexpr int32_t ROW_BLOCKS_MAX_ROWS    = 4; // of a segment: four vectors of values per lane and chunk

struct row_blocks_set {     // segments with the same number of rows; arrays in device memory
    int32_t    granularity; // rows: 1, 2, 4
    int32_t    n_segments;
    int64_t    n_chunks;
    int32_t *  chunk_ptr; // n_segments + 1: first chunk of a segment
    uint16_t * bases;     // 32 per segment
    int32_t *  rows;      // `granularity` per segment
    int32_t *  slots;     // the same
    uint8_t *  deltas;
    float *    values;
};

// Whether matrices of a format are stored in blocks.
bool is_in_blocks(const codec & format);

struct row_blocks_shape {};

// The struct is in host memory, its arrays are in device memory.
struct row_blocks_layout : layout_base {
    int32_t        delta_bits;
    int32_t        n_sets;
    row_blocks_set sets[EC_MAX_SETS];
    int32_t        n_segments; // of all sets
    int32_t        n_slots;
    int32_t *      slot_ptr;      // rows + 1: first slot of a row
    float *        partial;       // n_slots per column of x
    int64_t        nbytes_arrays; // up to the scratch memory (partial)
};

// Whether there are kernels for a matrix in blocks. Only F32 matrices have them: they have no other fast layout, and
// blocks are 1.2 to 2 times faster. For 16-bit values, MACKO rows were faster in 153 of 160 cases (lab/ec-csr.md). The
// kernels need all of x in shared memory, and bases of 16 bits.
constexpr bool has_row_blocks(const macko_desc & desc, const gpu_device & device) {
    return desc.type == GGML_MACKO_TYPE_F32 && desc.cols * 4 <= device.shared_nbytes && ec_base_nbytes(desc.cols) == 2;
}
// Binds the blocks of a checked F32 matrix to memory: sizes and addresses (null: offsets).
row_blocks_layout bind_row_blocks(const ec_csr_view & view, void * memory);
// Fills the arrays of b, which is bound to nbytes_arrays bytes of zeros in host memory.
void fill_row_blocks(const ec_csr_view & view, int n_threads, const row_blocks_layout & b);

// Finds the MACKO rows of an EC-CSR matrix with the width of deltas that takes the least GPU memory.
[[nodiscard]] int smallest_rows(const ec_csr_view & view, int n_threads, gpu_matrix * rows);

} // namespace macko::cuda
