// Layout ROW_BLOCKS, of F32 matrices that an EC-CSR file has in blocks of rows (FORMAT.md section 6). Plain C++: sizes,
// addresses and the host's copy of the arrays.
//
// Blocks stay what they are in the file: 32 lanes, the columns of a lane one behind the other, x gathered once for all
// rows of a block.
//   piece   At most 4 rows of a block, which a warp has at a time. Larger blocks are cut; their columns are then there
//           several times.
//   chunk   128 columns of a piece. Lane l has four of them: 4 deltas of delta_bits bits, and 4 * rows values (column
//           after column) in vectors of 16 bytes; vector v of all lanes, then vector v + 1. Short blocks (FORMAT.md)
//           are one chunk, with zeros behind their last column.
//   base    Where the columns of a lane start, in 16 bits. The first delta is 0, each other one the distance to the
//           column before.
//   slot    Where the sum of a row of a piece goes. The slots of a row are neighbors, in the order of the pieces: a
//           second kernel adds them up, so the result does not depend on which piece was done first.
#pragma once

#include "codec/ec-csr/ec-csr.h"
#include "gpu-layout/desc.h"
#include "gpu-layout/memory.h"

namespace macko::cuda {

constexpr int     ROW_BLOCKS_CHUNK       = EC_UNIT;
constexpr int     ROW_BLOCKS_MAX_COLUMNS = 4; // of x at a time: there are registers for so many sums
constexpr int32_t ROW_BLOCKS_MAX_ROWS    = 4; // of a piece: four vectors of values per lane and chunk

struct row_blocks_set {     // pieces with equally many rows; arrays in device memory
    int32_t    granularity; // rows: 1, 2, 4
    int32_t    n_pieces;
    int64_t    n_chunks;
    int32_t *  chunk_ptr; // n_pieces + 1: first chunk of a piece
    uint16_t * bases;     // 32 per piece
    int32_t *  rows;      // `granularity` per piece
    int32_t *  slots;     // the same
    uint8_t *  deltas;
    float *    values;
};

// whether matrices of a format are in blocks
bool is_in_blocks(const codec & format);

struct row_blocks_shape {};

// described in host memory; the arrays are in device memory
struct row_blocks_layout : layout_base {
    int32_t        delta_bits;
    int32_t        n_sets;
    row_blocks_set sets[EC_MAX_SETS];
    int32_t        n_pieces; // of all sets
    int32_t        n_slots;
    int32_t *      slot_ptr;      // rows + 1: first slot of a row
    float *        partial;       // n_slots per column of x
    int64_t        nbytes_arrays; // up to the scratch memory (partial)
};

// Whether there are kernels for a matrix in blocks. This is so for F32 values: they have no other fast layout, and
// blocks take 1.2 to 2 times less time. Of 16-bit values, MACKO rows were faster in 153 of 160 cases
// (lab/ec-csr.md). The kernels need all of x in shared memory, and bases of 16 bits.
constexpr bool has_row_blocks(const macko_desc & desc, const gpu_device & device) {
    return desc.type == GGML_MACKO_TYPE_F32 && desc.cols * 4 <= device.shared_nbytes && ec_base_nbytes(desc.cols) == 2;
}
// The blocks that the GPU keeps of a checked F32 matrix: sizes, and addresses in memory (null: offsets).
row_blocks_layout bind_row_blocks(const ec_csr_view & view, void * memory);
// Fills the arrays of b, which is bound to nbytes_arrays bytes of host memory, all zero.
void fill_row_blocks(const ec_csr_view & view, int n_threads, const row_blocks_layout & b);

// The MACKO rows of an EC-CSR matrix, with the deltas that take the least memory of a GPU: never more than with the
// file's own.
[[nodiscard]] int smallest_rows(const ec_csr_view & view, int n_threads, gpu_matrix * rows);

} // namespace macko::cuda
