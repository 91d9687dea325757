// Layout FRAGMENTS, for quantized values with scales for windows of columns (FORMAT.md section 9). Plain C++: sizes,
// addresses, and the number of bytes of each tile. docs/design/gpu-layouts.md draws it.
//
//   step     32 columns. Lane 4 g + t of a warp has columns 8 t ... 8 t + 7 of each step, in rows g and g + 8: the A
//            operand of the tensor cores' 16 x 8 x 32 product of bytes, so the same memory serves any number of
//            columns of x.
//   chunk    8 steps.
//   tile     16 rows and tile_chunks chunks, which a warp decodes at a time. The tiles of 16 rows are adjacent.
//   stream   The codes of a lane in a tile: step by step, row g before row g + 8, columns ascending. A code has 4 bits
//            (levels of up to 4 bits: bit 3 is the sign) or 8 bits (the level itself). A stream is whole words.
//
// A tile in memory:
//   tail ends   32 uint16: words of the tails of lanes 0 ... l
//   scales      16 scale codes (rows) per window
//   bitmaps     per chunk and lane 16 bytes: for each step a byte of row g, then a byte of row g + 8
//   words       word j of the streams of all lanes, for each j that all lanes have
//   tails       the other words of lane 0, then of lane 1, ...
// padded to 16 bytes. Rows and columns past the last one have no non-zeros.
#pragma once

#include "codec/quantized/quantized.h"
#include "gpu-layout/desc.h"
#include "gpu-layout/memory.h"

#include <vector>

namespace macko::cuda {

constexpr int64_t FRAGMENT_ROWS = 16, FRAGMENT_STEP = 32, FRAGMENT_CHUNK = 256;
constexpr int64_t FRAGMENT_UNIT      = 16; // bytes; tiles are aligned to it
constexpr int64_t FRAGMENT_TAIL_ENDS = 64; // bytes of a tile's tail ends

struct fragments_shape {
    int32_t code_bits;   // in memory: 4 or 8
    int32_t window;      // columns that share a scale
    int32_t tile_chunks; // of a tile
    int32_t most_words;  // of a stream; found by the survey
};

struct fragments_layout : layout_base, fragments_shape {
    uint8_t    magnitudes[16]; // with codes of 4 bits: of the levels of codes 0 ... 7, then 8 ... 15 (negative levels)
    uint32_t * starts;         // of each tile and of their end, in units of FRAGMENT_UNIT bytes
    float *    factors;        // of the rows
    uint8_t *  tiles;
};

constexpr int64_t fragments_groups(int64_t rows) { return (rows + FRAGMENT_ROWS - 1) / FRAGMENT_ROWS; }
constexpr int64_t fragments_all_chunks(int64_t cols) { return (cols + FRAGMENT_CHUNK - 1) / FRAGMENT_CHUNK; }
// Tiles of 16 rows.
constexpr int64_t fragments_segments(int64_t cols, int32_t tile_chunks) {
    return (fragments_all_chunks(cols) + tile_chunks - 1) / tile_chunks;
}
// Chunks of a tile at segment s of its rows.
constexpr int fragments_chunks(int64_t cols, int32_t tile_chunks, int64_t s) {
    const int64_t left = fragments_all_chunks(cols) - s * tile_chunks;
    return static_cast<int>(left < tile_chunks ? left : tile_chunks);
}
constexpr int fragments_windows(int chunks, int32_t window) {
    return (chunks * static_cast<int>(FRAGMENT_CHUNK) + window - 1) / window;
}
// Offset of a tile's words.
constexpr int fragments_words_at(int chunks, int32_t window) {
    return static_cast<int>(FRAGMENT_TAIL_ENDS) + fragments_windows(chunks, window) * static_cast<int>(FRAGMENT_ROWS) +
           chunks * 512;
}
// Bytes of a tile whose streams have n_words words.
constexpr int64_t fragments_tile_nbytes(int chunks, int32_t window, int64_t n_words) {
    return (fragments_words_at(chunks, window) + 4 * n_words + FRAGMENT_UNIT - 1) / FRAGMENT_UNIT * FRAGMENT_UNIT;
}
constexpr int fragments_stream_words(int n_codes, int32_t code_bits) { return (n_codes * code_bits + 31) / 32; }

// The shape for a matrix; its most_words is unknown (0). Streams have about 16 words, so that tail ends and unused bits
// take few bytes, or half as many, so that more warps have buffers in little shared memory.
fragments_shape fragments_shape_of(const gpu_matrix & matrix, const gpu_device & device);
constexpr bool  has_little_shared_memory(int64_t nbytes) { return nbytes < 128 * 1024; } // as GeForce cards
// Expected bytes of memory, with a margin. They depend little on the places of the zeros.
int64_t fragments_expected_nbytes(const macko_desc & desc, const fragments_shape & shape);
// Binds the layout to all of `nbytes`, of which tiles have what remains. nbytes 0: no tiles.
fragments_layout bind_fragments(const macko_desc & desc, const fragments_shape & shape, int64_t nbytes, void * memory);

// starts of the layout, and most_words.
struct fragments_sizes {
    std::vector<uint32_t> starts;
    int32_t               most_words = 0;
    int64_t               nbytes     = 0; // of the layout
};
fragments_sizes size_fragments(const quantized_arrays & arrays, const fragments_shape & shape, int n_threads);
// The code of 4 bits in memory for a code of the file, which has 3 or 4 bits.
constexpr uint32_t fragments_nibble(uint32_t code, int32_t bits) {
    return bits == 3 ? (code & 4) << 1 | (code & 3) : code;
}

} // namespace macko::cuda
