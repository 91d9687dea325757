// How a block of the product with FRAGMENTS (cuda/sparse/fragments.cu) divides its shared memory and its work. Plain
// C++, because the verdict for the shared memory of any GPU can be tested without one.
//
// A block has stripes (16 rows of one matrix), in a round some of them, and in a phase of a round (a turn) some
// segments of these, of which x is in shared memory. A stripe has parts of adjacent segments there, and a warp every
// `warps`-th part. The block lists the tiles of a turn in shared memory, part by part, LISTS turns ahead.
//
// In shared memory: a table of table_copies copies of 256 entries; x; lists of tiles; sums of parts; a word and two
// mbarriers per warp; two buffers per warp.
#pragma once

#include "gpu-layout/fragments.h"

namespace macko::cuda {

constexpr int MAX_WARPS = 16;
constexpr int max_warps(int nx) { return nx > 32 ? 12 : MAX_WARPS; } // more sums take more registers
constexpr int LISTS = 3, MAX_LISTED = 1024;                          // of a turn
constexpr int FRAGMENTS_SCRATCH_NBYTES = MAX_WARPS * (4 + 2 * 8);

struct alignas(16) listed_tile {
    const uint8_t * tile;
    int32_t         nbytes;     // 0: no tile, behind the last row or the last segment of a part
    uint16_t        first_step; // in the phase
    uint8_t         chunks, matrix;
};

// x as rounded to integers, in shared memory and as a kernel writes it: factors of the results [column]; scales [chunk]
// [4 columns], or [two steps][column] of bytes; integers as bytes [step][column][high, low, or the only one][32].
constexpr bool has_bytes(int nx) { return nx >= 8; }
constexpr int  x_factors_nbytes(int nx) { return (nx + 3) / 4 * 16; }
constexpr int  x_scale_steps(int nx) { return has_bytes(nx) ? 2 : 8; } // that share a scale
constexpr int  x_scale_columns(int nx) { return has_bytes(nx) ? nx : 4; }
constexpr int  x_scales_nbytes(int steps, int nx) { return steps / x_scale_steps(nx) * x_scale_columns(nx) * 4; }
constexpr int  x_integers_at(int steps, int nx) { return x_factors_nbytes(nx) + x_scales_nbytes(steps, nx); }
constexpr int  x_column_nbytes(int nx) { return has_bytes(nx) ? 32 : 64; } // of a step
constexpr int  x_step_nbytes(int nx) { return nx * x_column_nbytes(nx); }
constexpr int  x_nbytes(int steps, int nx) { return x_integers_at(steps, nx) + steps * x_step_nbytes(nx); }

// Words that a step reads from its position on, which may be the end of a stream.
constexpr int FRAGMENTS_READ_AHEAD = 3;
// Bytes of a warp's memory for a tile.
constexpr int fragments_buffer_nbytes(int32_t tile_chunks, int32_t window, int32_t most_words) {
    return (fragments_words_at(tile_chunks, window) + (most_words + FRAGMENTS_READ_AHEAD) * 128 + 15) / 16 * 16;
}

struct fragments_work {
    int32_t nx;       // columns of x
    int32_t stripes;  // of a block
    int32_t matrices; // stripes that stay together: 2 if the product ends with silu_mul
    int32_t segments; // of a row
    bool    whole_x;  // the block rounds x: there is one phase
    int32_t tile_chunks, window, most_words;
    int32_t room; // bytes of shared memory that a block may use
};
struct fragments_division {
    int32_t warps; // 0: nothing fits
    int32_t table_copies;
    int32_t x_at, lists_at, sums_at, scratch_at, buffers_at, buffer_nbytes;
    int32_t phases;         // of a round
    int32_t phase_segments; // segments of which x is in shared memory at a time
    int32_t round_stripes;  // stripes whose sums are in shared memory at a time
    int32_t parts;          // of a stripe in a phase; a warp adds up the tiles of a part
    int32_t part_segments;  // the last part of a phase may have fewer
    // The places in a list for the tiles of a stripe, and 2^20 divided by this, rounded up.
    int32_t stripe_places, inverse_places;

    int32_t nbytes() const { return buffers_at + warps * 2 * buffer_nbytes; }
};
// The division with the least estimated time. Keeps verdicts, since each launch asks for one; any thread may call it.
fragments_division divide_fragments(const fragments_work & work);

} // namespace macko::cuda
