// How the GPU keeps a sparse matrix: chosen per tensor, made from the file's arrays at load time, never on file.
// Plain C++ (sizes and addresses only), so that the device can size buffers where there is no CUDA. No ggml.
//
// RUNS: what the fast kernels read. A row is cut into `lanes` runs of nearly equal length, one per thread.
//   group    8 entries of one run: 8 values, and 8 codes of delta_bits bits; a row has ceil(entries / 8) groups, G
//   run l    the groups at places l, l + lanes, l + 2 lanes ... from the start of the row's first line (of 128 bytes, 8
//            groups) on: what the threads of
//            a row read at a time are whole lines, wherever rows begin. A run's groups follow each other in the row,
//            runs are in lane order
//   base     where a run's columns start, 16 bits per run
//   order    entries are ordered by column c, or (STRIPED) by position p = (c % 32) * W + c / 32, W =
//            stripe_width(cols). Stepping by
//            one position is stepping by 32 columns, so lane l stays in shared-memory bank ~l for long: gathers of x
//            hardly collide.
// COMPACT: STRIPED with F16 values that share 16 bytes with their codes: a group. The weights of a matrix lie within
// few powers of two: a value is its sign,
//   10 bits of mantissa and 3 (2) of exponent, an F16 that is 2^exponent times too small, and has 2 (3) bits free below
//   the sign.
//     2, 3 bits   eight entries, each one's code in the free bits of its value
//     4 bits      seven entries beside 3 bits of exponent: the codes of 0-3 are the last half word, those of 4-6 what
//                 both values of words 0-2 leave free
//     6 bits      six: the codes of 0-3 in the last word, those of 4 and 5 in free bits. Columns ascend as in RUNS:
//                 long steps would walk around all stripes
//   At load: 2 or 3 bits for files with codes of 1 or 2, 3 or 4 for those of 4, whichever takes fewer groups; 6 for
//   those of 8. What a value's bits cannot say
//   exactly (with 3 bits of exponent 1.7 % of normal random values, with 2 25 %; where pruning has taken the small ones
//   none to 5 %) is zero there, and
//   "spilled": the row's groups are followed by groups of four pairs (column, value) of 16 bits each. Lossless. Rows of
//   wide matrices begin at lines, so
//   there may be unused groups behind those.
// ROWS: the arrays of the file as they are (FORMAT.md section 3). Slower; it takes any matrix, and exactly the file's
// bytes. It is used
//   when x does not fit shared memory, and when a matrix of unusual structure would outgrow its memory as RUNS.
// BLOCKS: packed matrices with quantized values (sparse-blocks.h).
#pragma once

#include "codec/macko/macko.h"

namespace macko::cuda {

enum cuda_sparse_layout : int32_t {
    CUDA_SPARSE_LAYOUT_ROWS    = 0,
    CUDA_SPARSE_LAYOUT_RUNS    = 1, // columns ascending
    CUDA_SPARSE_LAYOUT_STRIPED = 2, // positions ascending
    CUDA_SPARSE_LAYOUT_BLOCKS  = 3, // quantized values
    CUDA_SPARSE_LAYOUT_COMPACT = 4, // positions ascending, values and codes together
};
const char * cuda_sparse_layout_name(int32_t layout);

constexpr int64_t CUDA_SPARSE_ALIGNMENT = 256; // of a matrix's memory, and of each part in it
constexpr int64_t CUDA_SPARSE_GROUP     = 8;   // entries (of COMPACT: compact_entries)
constexpr int     CUDA_SPARSE_LINE      = 8;   // groups: 128 bytes of 16-bit values
// columns from which on rows are long enough for stripes, and COMPACT's for lines of their own
constexpr int64_t CUDA_SPARSE_WIDE = 2048;
// of a COMPACT group
constexpr int64_t compact_entries(int code_bits) { return code_bits == 6 ? 6 : code_bits == 4 ? 7 : CUDA_SPARSE_GROUP; }
constexpr int64_t cuda_sparse_aligned(int64_t nbytes) {
    return (nbytes + CUDA_SPARSE_ALIGNMENT - 1) & ~(CUDA_SPARSE_ALIGNMENT - 1);
}

// Cuts an allocation (null: addresses are offsets) into aligned parts
class cuda_sparse_parts {
public:
    explicit cuda_sparse_parts(void * memory) : begin_(static_cast<uint8_t *>(memory)), at_(begin_) {}
    template <typename T> void take(T ** part, int64_t n) {
        *part = reinterpret_cast<T *>(at_);
        at_ += cuda_sparse_aligned(n * static_cast<int64_t>(sizeof(T)));
    }
    int64_t nbytes() const { return at_ - begin_; }

private:
    uint8_t *begin_, *at_;
};

// A matrix in device memory: pointers into one allocation of cuda_sparse_nbytes() bytes that the caller owns.
struct cuda_sparse_matrix {
    int64_t rows;
    int64_t cols;
    int32_t type;       // enum ggml_macko_type
    int32_t value_type; // the same; of BLOCKS a quantized type
    int32_t delta_bits; // 1, 2, 4, 8; of COMPACT 2 or 3, of BLOCKS 3, 4 or 8
    int32_t layout;     // enum cuda_sparse_layout
    int32_t lanes;      // RUNS, STRIPED, COMPACT: 8, 16 or 32 runs per row
    // STRIPED, COMPACT (but codes of 6 bits): stripe_width(cols), BLOCKS: blocks_width(); x repeats after 32 * stripe -
    // 1 words. Else 0
    int32_t stripe;
    int32_t exponent; // COMPACT: values are 2^exponent times those that are stored
    // STRIPED, COMPACT, BLOCKS: words behind the last one of x that a group may touch before it wraps
    int32_t overshoot;
    // RUNS, STRIPED: 8 per group; COMPACT: 16 bytes per group; ROWS: n_padded; BLOCKS: the groups, in tiles
    uint8_t * values;
    // RUNS, STRIPED: delta_bits bytes per group; ROWS: the file's deltas; COMPACT: null; BLOCKS: end of the values, in
    // front of which the segments are
    uint8_t *  codes;
    uint16_t * bases; // RUNS, STRIPED, COMPACT: rows * lanes
    uint16_t * tails; // COMPACT: rows. tail_of() what lies behind a row's groups
    // rows + 1. RUNS, STRIPED, COMPACT: first group of a row; ROWS: first entry; BLOCKS: each row's cuda_blocks_row and
    // bases
    int32_t *                    row_ptr;
    struct cuda_sparse_spilled * spill;    // BLOCKS
    int64_t                      n_groups; // BLOCKS
    int64_t                      nbytes;   // from the first part to the end of the last
    // the part of the matrix that another codec's layout has (mul-mat.cuh), owned by whoever owns the matrix; or null
    const class matrix_part * part;
};

// column c = 32 * position mod (32 * width - 1), which is at least cols
constexpr int64_t stripe_width(int64_t cols) { return cols / 32 + 1; }

// words of x before it repeats, or all that a group may touch of it
inline int64_t cuda_sparse_words(const cuda_sparse_matrix & m) {
    return m.stripe ? 32 * m.stripe - 1 : m.cols + CUDA_SPARSE_GROUP;
}

// groups of spilled values, and unused ones, behind those of a row
constexpr int TAIL_MAX_SPILLED = 8191;
constexpr int tail_of(int spilled, int unused) { return spilled << 3 | unused; }
constexpr int tail_spilled(int tail) { return tail >> 3; }
constexpr int tail_unused(int tail) { return tail & 7; }

// The runs per row (8, 16, 32) that kernels are built for: what no real shape would choose is not built
// (docs/design/gpu-layouts.md). type: GGML_MACKO_TYPE_F16 or _BF16
struct lanes_range {
    int32_t        least, most;
    constexpr bool has(int32_t lanes) const { return least <= lanes && lanes <= most; }
};
constexpr lanes_range cuda_sparse_built_lanes(int32_t layout, int32_t type, int32_t code_bits) {
    const bool f16 = type == GGML_MACKO_TYPE_F16, bf16 = type == GGML_MACKO_TYPE_BF16;
    switch (layout) {
        case CUDA_SPARSE_LAYOUT_RUNS:    return { 8, !f16 && !bf16 ? 0 : code_bits < 8 ? 8 : f16 ? 16 : 32 };
        case CUDA_SPARSE_LAYOUT_STRIPED: return { code_bits <= 2 ? 16 : 8, bf16 && code_bits < 8 ? 32 : 0 };
        case CUDA_SPARSE_LAYOUT_COMPACT: return { code_bits <= 2 ? 16 : 8, f16 ? 32 : 0 };
        default:                         return { 0, 32 };
    }
}
inline bool cuda_sparse_has_kernels(const cuda_sparse_matrix & m) {
    return cuda_sparse_built_lanes(m.layout, m.type, m.delta_bits).has(m.lanes);
}

// bytes to reserve for a matrix, known from the header alone: whatever the data is, one of the layouts fits
int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded);

// for the repack and its tests: runs per row that suit the matrix, groups that a layout may have, and the parts in
// memory
int32_t            cuda_sparse_lanes(const macko_desc & desc, int64_t n_padded, int32_t layout);
int64_t            cuda_sparse_max_groups(const macko_desc & desc, int64_t n_padded, int32_t layout);
cuda_sparse_matrix cuda_sparse_bind(const macko_desc & desc, int64_t n_padded, int32_t layout, int32_t lanes,
                                    void * memory);

} // namespace macko::cuda
