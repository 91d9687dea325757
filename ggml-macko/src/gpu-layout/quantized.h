// Layout QUANTIZED, of packed matrices with quantized values (FORMAT.md section 7). Made by the host at load time,
// drawn in docs/design/gpu-layouts.md. Plain C++, no CUDA.
//
//   group      A block of the file: 32 non-zeros with one scale, in the file's order. A row has the groups that hold a
//              part of it; a block that two rows share is a group of both, with zeros for the other row's part.
//   run        The groups of a row are cut into `lanes` runs of nearly equal length, one per thread, so that their
//              columns are in different banks. They are interleaved: group i of run l is group i * lanes +
//              quantized_run::slot of the row; longer runs come first.
//   warp_rows  The 32 / lanes rows that a warp has at a time. The steps for which all of them have groups for all their
//              lanes are one tile each, from which the warp reads whole lines; the other groups stand row after row
//              behind the tiles of all warp_rows.
//   deltas     The gap to the entry before, minus 1, in delta_bits bits: 3 where that takes the fewest bytes, 4, or 8.
//              An entry with a larger gap is 0 in its group (its delta is the largest step) and an outlier: a filler
//              would move the entries behind it out of their block.
//   outliers   Column and value in float32, row after row.
//   x_slot     In shared memory, x of the next column is 32 words further, and lanes start in different banks: slot p
//              is word 32 p mod (32 W - 1), W = quantized_width(), and holds column p mod (lanes * W). With fewer than
//              32 lanes there is a copy of x for each of the rows that a warp has at a time.
//   base       The word of the x_slot of a run's first entry.
//   segments   What only a few lanes of a row would have is cut into segments of 8 entries, one per lane: a step of a
//              quarter of the length. They stand in front of the end of the groups, the first one last. Not with deltas
//              of 8 bits.
//
// In memory a row is a cuda_quantized_row and the bases of its runs. A tile is 32 groups: their values, then their
// deltas, then their scales (F16), so that one address leads to all of a group, and lanes read next to each other.
// Values are words of 32 bits, those of a group in planes of 4, 2 and 1 words; deltas likewise. The order of the words
// in a group is written by quantized.cpp (pack_*) and read by quantized.cuh.
#pragma once

#include "codec/packed/packed.h"
#include "gpu-layout/desc.h"
#include "gpu-layout/memory.h"

namespace macko::cuda {

struct quantized_shape {
    int     bits; // of a delta
    int     lanes;
    int64_t max_outliers;
};

struct quantized_layout : layout_base {
    int32_t                      value_type; // GGML_MACKO_TYPE_Q8_0 or _Q4_0: quantized_value_type()
    int32_t                      delta_bits; // 3, 4 or 8
    int32_t                      lanes;
    int32_t                      width;      // quantized_width(): x in shared memory repeats after 32 * width - 1 words
    int32_t                      overshoot;  // words behind the end of x that the entries of a segment may touch
    uint8_t *                    groups;     // in tiles
    uint8_t *                    groups_end; // in front of it stand the segments
    uint8_t *                    row_heads;  // of each row a cuda_quantized_row and the bases of its runs
    struct cuda_sparse_outlier * outliers;
};

// first: the first group in tiles / 8 << 8 | steps in tiles; rest: the first group behind the tiles, or if there is
// none, the first segment << 8 | segments
struct cuda_quantized_row {
    uint32_t first;
    uint16_t n_groups, n_outliers;
    int32_t  first_outlier;
    uint32_t rest;
};
// values: signed bytes, those of Q4_0 times 16, as the kernel has them; deltas: of two quads, as in a group; word: of
// the first entry
struct cuda_quantized_segment {
    int8_t   values[8];
    uint8_t  deltas[4];
    uint16_t scale, word;
};
struct cuda_sparse_outlier {
    uint32_t word;
    float    value;
}; // word: of its column, in the row's copy of x

constexpr int CUDA_QUANTIZED_SEGMENT  = 8; // entries between two reductions of the address, with deltas of 3 and 4 bits
constexpr int CUDA_QUANTIZED_SEGMENTS = QUANT_BLOCK / CUDA_QUANTIZED_SEGMENT; // of a group
constexpr int64_t CUDA_QUANTIZED_MAX_SEGMENT = int64_t(1) << 24;              // cuda_quantized_row::rest

// x_slots per lane. Odd: reading x with this stride has no bank conflicts.
constexpr int64_t quantized_width(int64_t cols, int lanes) {
    return (cols / lanes + 1 < 33 ? 33 : cols / lanes + 1) | 1;
}
constexpr int64_t quantized_word(int64_t x_slot, int64_t width) { return x_slot * 32 % (32 * width - 1); }
// the largest gap between entries that a delta can say
constexpr int64_t quantized_reach(int bits, int64_t width) {
    return bits < 8 ? 1 << bits : width - 1 < 256 ? width - 1 : 256;
}
// The type of the values in memory, by their type in the file: Q4_0 stays; Q8_0 also holds Q5_0 and Q4_NL without loss.
constexpr int32_t quantized_value_type(int32_t value_type) {
    return value_type == GGML_MACKO_TYPE_Q4_0 ? value_type : GGML_MACKO_TYPE_Q8_0;
}
// 32-bit words of the values of a group
constexpr int quantized_value_words(int32_t value_type) {
    return quantized_value_type(value_type) == GGML_MACKO_TYPE_Q8_0 ? 8 : 4;
}
// groups of a tile, and the limits of cuda_quantized_row::first
constexpr int     CUDA_QUANTIZED_TILE      = 32;
constexpr int64_t CUDA_QUANTIZED_MAX_STEPS = 255, CUDA_QUANTIZED_MAX_TILED = int64_t(1)
                                                                             << 27; // cuda_quantized_row::first
constexpr int quantized_steps(const cuda_quantized_row & r) { return static_cast<int>(r.first & 255); }
// the group in memory that is `step` of a run
constexpr int64_t quantized_group(const cuda_quantized_row & r, int lanes, int step, int slot) {
    return step < quantized_steps(r) ? static_cast<int64_t>(r.first >> 8) * 8 + step * CUDA_QUANTIZED_TILE + slot
                                     : static_cast<int64_t>(r.rest) + (step - quantized_steps(r)) * lanes + slot;
}
constexpr int quantized_segments(const cuda_quantized_row & r, int lanes) {
    return r.n_groups > quantized_steps(r) * lanes ? 0 : static_cast<int>(r.rest & 255);
}
constexpr int quantized_tile_nbytes(int value_words, int bits) {
    return CUDA_QUANTIZED_TILE * (4 * (value_words + bits) + 2);
}
// A run of a row of n groups: its first group in the file's order, its number of groups, and its slot.
struct quantized_run {
    int begin, groups, slot;
};
constexpr quantized_run quantized_run_of(int n, int lane, int lane_bits) {
    const int full = n >> lane_bits, left = n & ((1 << lane_bits) - 1), before = lane * left >> lane_bits,
              more = ((lane + 1) * left >> lane_bits) - before;
    return { lane * full + before, full + more, more ? before : left + lane - before };
}
constexpr int quantized_lane_bits(int lanes) { return lanes == 8 ? 3 : lanes == 16 ? 4 : 5; }
// bytes of a cuda_quantized_row with its bases
constexpr int quantized_row_nbytes(int lanes) { return static_cast<int>(sizeof(cuda_quantized_row)) + 2 * lanes; }
// Words behind x that the entries of a segment may touch. Those of a matrix touch fewer: make_quantized() counts
// them.
constexpr int64_t quantized_overshoot(int bits) { return bits < 8 ? (CUDA_QUANTIZED_SEGMENT << bits) * 32 : 0; }

// words of shared memory of a column of x in float32
constexpr int64_t quantized_column_words(int64_t width, int64_t lanes) { return (width * lanes + 3) & ~int64_t(3); }
// Bytes of shared memory of the kernel with nx columns of x: x, with one more word for the slot behind the last one,
// which is the first one again; one column in float32; sums of the warps; an mbarrier; what an integer of a column
// stands for.
constexpr int64_t quantized_shared_nbytes(int64_t width, int64_t lanes, int64_t overshoot, int nx) {
    return ((32 * width + overshoot) * ((nx + 1) / 2) + quantized_column_words(width, lanes) + 64 + 8) * 4;
}

// a cuda_quantized_row
inline uint8_t * quantized_row(const quantized_layout & m, int64_t row) {
    return m.row_heads + row * quantized_row_nbytes(m.lanes);
}

// The bits and lanes that suit a matrix, with room for the outliers of random masks. lanes 0: x does not fit shared
// memory.
quantized_shape quantized_shape_of(const gpu_matrix & matrix, const gpu_device & device);
// Bytes of memory: nbytes of the layout.
quantized_layout bind_quantized(const macko_desc & desc, int32_t value_type, const quantized_shape & shape,
                                void * memory);

// A matrix in host memory, in the order that it will have on the device.
struct quantized_image {
    quantized_layout     matrix; // pointers into memory
    std::vector<uint8_t> memory;
    int64_t              n_outliers; // if there is not room for so many, the image is incomplete
};
void make_quantized(const packed_view & view, const quantized_shape & shape, int n_threads, quantized_image * out);

} // namespace macko::cuda
