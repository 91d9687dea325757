// BLOCKS: how the GPU keeps a packed matrix with quantized values (FORMAT.md section 7). Made by the host at load time.
// Plain C++, no CUDA.
//
//   group    a block of the file: 32 non-zeros with one scale, in the file's order. A row has the groups that hold a
//            part of it; one that two
//            rows share is there twice, with zeros for the other row's part
//   run      a row's groups are cut into `lanes` runs of nearly equal length, one per thread, so that their columns are
//            in banks of their own. Interleaved:
//            group i of run l is the row's group i * lanes + blocks_run::slot, where the longer runs come first
//   unit     the 32 / lanes rows that a warp has at a time. As many steps as all of them have groups for all their
//            lanes are a tile each, from which
//            the warp reads whole lines; what is left of rows lies row after row behind the tiles of all units
//   codes    per entry the gap to the one before, minus 1, in delta_bits bits: 3 where that is smallest, 4, or 8. An
//            entry whose gap is
//            larger than a code can say becomes 0 there (its place is a step of the largest gap) and is kept as
//   spill    column and value in float32, row after row. A filler would have moved the entries behind it out of their
//            block
//   place    x stands in shared memory so that one column further is 32 words further, and lanes are in banks of their
//            own: place p is word
//            32 p mod (32 W - 1), W = blocks_width(), and holds column p mod (lanes * W); with fewer than 32 lanes
//            there are copies of x,
//            one for each row that a warp has at a time
//   base     where a run starts: the word of the place of its first entry
//   rest     what a row would have for a few of its lanes only is cut into segments of 8 entries, one for each lane: a
//            step of a quarter of the
//            length. They stand in front of the end of the values, the first one last. Not with codes of 8 bits
//
// In memory a row is a cuda_blocks_row and the bases of its runs. A tile is 32 groups: their values, then codes, then
// scales (F16); so one address leads
// to all of a group, and lanes read next to each other. Values are words of 32 bits, those of a group in planes of 4, 2
// and 1 words; codes likewise. Word
// order within a group: sparse-blocks.cpp (pack_*) writes what sparse-blocks.cuh reads.
#pragma once

#include "codec/packed/packed.h"
#include "cuda/sparse/layout.h"

namespace macko::cuda {

// first: first group in tiles / 8 << 8 | steps in tiles; rest: first group behind them, or if there is none first
// segment << 8 | segments
struct cuda_blocks_row {
    uint32_t first;
    uint16_t n_groups, n_spilled;
    int32_t  first_spilled;
    uint32_t rest;
};
// values: signed bytes, Q4_0's times 16, as the kernel has them; codes: of two quads, as in a group; word: of the first
// entry
struct cuda_blocks_segment {
    int8_t   values[8];
    uint8_t  codes[4];
    uint16_t scale, word;
};
struct cuda_sparse_spilled {
    uint32_t word;
    float    value;
}; // word: of its column in the row's copy of x

constexpr int     CUDA_BLOCKS_SEGMENT = 8; // entries between two looks at whether x wrapped, with codes of 3 and 4 bits
constexpr int     CUDA_BLOCKS_SEGMENTS    = QUANT_BLOCK / CUDA_BLOCKS_SEGMENT; // of a group
constexpr int64_t CUDA_BLOCKS_MAX_SEGMENT = int64_t(1) << 24;                  // cuda_blocks_row::rest

// places per lane; odd, so that reading x with this stride has no bank conflicts
constexpr int64_t blocks_width(int64_t cols, int lanes) { return (cols / lanes + 1 < 33 ? 33 : cols / lanes + 1) | 1; }
constexpr int64_t blocks_word(int64_t place, int64_t width) { return place * 32 % (32 * width - 1); }
// the largest gap between entries
constexpr int64_t blocks_reach(int bits, int64_t width) {
    return bits < 8 ? 1 << bits : width - 1 < 256 ? width - 1 : 256;
}
// What values of a quantized type of the file are here: Q4_0, or signed bytes, which Q5_0 and Q4_NL become without loss
constexpr int32_t blocks_value_type(int32_t value_type) {
    return value_type == GGML_MACKO_TYPE_Q4_0 ? value_type : GGML_MACKO_TYPE_Q8_0;
}
// words of 32 bits of a group's values
constexpr int blocks_value_words(int32_t value_type) {
    return blocks_value_type(value_type) == GGML_MACKO_TYPE_Q8_0 ? 8 : 4;
}
// groups of a tile, and its bytes
constexpr int     CUDA_BLOCKS_TILE      = 32;
constexpr int64_t CUDA_BLOCKS_MAX_STEPS = 255, CUDA_BLOCKS_MAX_TILED = int64_t(1) << 27; // cuda_blocks_row::first
constexpr int     blocks_steps(const cuda_blocks_row & r) { return static_cast<int>(r.first & 255); }
// of a run: group `step` in memory
constexpr int64_t blocks_group(const cuda_blocks_row & r, int lanes, int step, int slot) {
    return step < blocks_steps(r) ? static_cast<int64_t>(r.first >> 8) * 8 + step * CUDA_BLOCKS_TILE + slot
                                  : static_cast<int64_t>(r.rest) + (step - blocks_steps(r)) * lanes + slot;
}
constexpr int blocks_segments(const cuda_blocks_row & r, int lanes) {
    return r.n_groups > blocks_steps(r) * lanes ? 0 : static_cast<int>(r.rest & 255);
}
constexpr int blocks_tile_nbytes(int value_words, int bits) {
    return CUDA_BLOCKS_TILE * (4 * (value_words + bits) + 2);
}
// of n groups of a row: the run's first one in the file's order, how many, and its slot
struct blocks_run {
    int begin, groups, slot;
};
constexpr blocks_run blocks_run_of(int n, int lane, int lane_bits) {
    const int full = n >> lane_bits, left = n & ((1 << lane_bits) - 1), before = lane * left >> lane_bits,
              more = ((lane + 1) * left >> lane_bits) - before;
    return { lane * full + before, full + more, more ? before : left + lane - before };
}
constexpr int blocks_lane_bits(int lanes) { return lanes == 8 ? 3 : lanes == 16 ? 4 : 5; }
// bytes of a row with its bases
constexpr int blocks_row_nbytes(int lanes) { return static_cast<int>(sizeof(cuda_blocks_row)) + 2 * lanes; }
// words behind x that the entries of a segment may touch; those of a matrix touch fewer: cuda_blocks_make() counts them
constexpr int64_t blocks_overshoot(int bits) { return bits < 8 ? (CUDA_BLOCKS_SEGMENT << bits) * 32 : 0; }

// words of shared memory for a column of x in float32
constexpr int64_t blocks_column_words(int64_t width, int64_t lanes) { return (width * lanes + 3) & ~int64_t(3); }
// bytes of shared memory of the kernel with nx columns of x: x, with a word more for the place behind the last one,
// which is the first one again; float32 of
// one column; sums of the warps; an mbarrier; what an integer of a column stands for
constexpr int64_t blocks_shared_nbytes(int64_t width, int64_t lanes, int64_t overshoot, int nx) {
    return ((32 * width + overshoot) * ((nx + 1) / 2) + blocks_column_words(width, lanes) + 64 + 8) * 4;
}

// a cuda_blocks_row
inline uint8_t * blocks_row(const cuda_sparse_matrix & m, int64_t row) {
    return reinterpret_cast<uint8_t *>(m.row_ptr) + row * blocks_row_nbytes(m.lanes);
}

struct blocks_shape {
    int bits, lanes;
};
// of a matrix, from its header alone; lanes 0: x does not fit shared memory, or values are not quantized
blocks_shape cuda_blocks_shape(const packed_desc & desc, int64_t shared_nbytes);
// spilled non-zeros to reserve memory for: enough for random masks
int64_t            cuda_blocks_max_spill(const packed_desc & desc, const blocks_shape & shape);
cuda_sparse_matrix cuda_blocks_bind(const packed_desc & desc, const blocks_shape & shape, int64_t n_spill,
                                    void * memory);

// a matrix in host memory, in the order in which it will be in the device's
struct blocks_image {
    cuda_sparse_matrix   matrix; // pointers into memory
    std::vector<uint8_t> memory;
    int64_t              n_spill; // if larger than what there is room for, the image is not complete
};
void cuda_blocks_make(const packed_view & view, const blocks_shape & shape, int64_t max_spill, int n_threads,
                      blocks_image * out);

} // namespace macko::cuda
