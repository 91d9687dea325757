// How the GPU keeps the blocks of an EC-CSR matrix (FORMAT.md section 6): made from the file's arrays at load time,
// never on file. Plain C++: sizes, addresses and the host's copy of the arrays. No ggml.
//
// Blocks of several rows stay what they are: 32 lanes, the columns of a lane one behind the other, x gathered once for
// all rows of a block. The rest of the rows (blocks of one row) becomes MACKO rows (cuda/sparse/layout.h), whose kernel
// is faster for them; F32 values, for which that has no fast layout, keep blocks of one row as well.
//   piece   At most 8 rows of a block (F32: 4), which a warp has at a time. Larger blocks are cut; their columns are
//           then there several times.
//   chunk   128 columns of a piece. Lane l has four of them: 4 deltas of delta_bits bits, and 4 * rows values (column
//           after column) in vectors of 16 bytes; vector v of all lanes, then vector v + 1. Short blocks (FORMAT.md)
//           are one chunk, with zeros behind their last column.
//   base    Where the columns of a lane start, in 16 bits. The first delta is 0, each other one the distance to the
//           column before.
//   slot    Where the sum of a row of a piece goes. The slots of a row are neighbours, in the order of the pieces: a
//           second kernel adds them up, so the result does not depend on which piece was done first.
#pragma once

#include "codec/ec-csr/cost.h"
#include "codec/ec-csr/ec-csr.h"

namespace macko::cuda {

constexpr int CUDA_EC_CSR_CHUNK       = EC_UNIT;
constexpr int CUDA_EC_CSR_MAX_COLUMNS = 4; // of x at a time: there are registers for so many sums

struct cuda_ec_csr_set {    // pieces with equally many rows; arrays in device memory
    int32_t    granularity; // rows: 1, 2, 4, 8
    int32_t    n_pieces;
    int64_t    n_chunks;
    int32_t *  chunk_ptr; // n_pieces + 1: first chunk of a piece
    uint16_t * bases;     // 32 per piece
    int32_t *  rows;      // `granularity` per piece
    int32_t *  slots;     // the same
    uint8_t *  deltas;
    uint8_t *  values;
};

// The part of a matrix that is in blocks: described in host memory, in one device allocation of `nbytes` bytes.
struct cuda_ec_csr_blocks {
    int64_t         rows; // of the matrix
    int64_t         cols;
    int32_t         type;
    int32_t         delta_bits;
    bool            whole; // nothing is left beside the blocks
    int32_t         n_sets;
    cuda_ec_csr_set sets[EC_MAX_SETS];
    int32_t         n_pieces; // of all sets
    int32_t         n_slots;
    int32_t *       slot_ptr;      // rows + 1: first slot of a row
    float *         partial;       // n_slots per column of x
    int64_t         nbytes_arrays; // up to the scratch memory (partial)
    int64_t         nbytes;
};

// The blocks that the GPU would keep of a checked matrix: sizes, and addresses in memory (null: offsets). all: blocks
// of one row as well.
cuda_ec_csr_blocks cuda_ec_csr_bind(const ec_csr_view & view, bool all, void * memory);
// Whether the blocks of this matrix have kernels: x fits shared memory, columns fit 16 bits, some blocks have several
// rows (or all).
bool cuda_ec_csr_supported(const ec_csr_view & view, bool all, int64_t shared_nbytes);
// Fills the arrays of b, which is bound to nbytes_arrays bytes of host memory, all zero.
void cuda_ec_csr_fill(const ec_csr_view & view, bool all, int n_threads, const cuda_ec_csr_blocks & b);

} // namespace macko::cuda
