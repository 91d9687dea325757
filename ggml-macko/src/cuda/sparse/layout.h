// How the GPU keeps a sparse matrix: one of four layouts, chosen per matrix when it is loaded and made from the file's
// arrays, never stored on file. docs/design/gpu-layouts.md draws each of them and says which matrices have it.
// Plain C++ (sizes and addresses only), so that buffers can be sized where there is no CUDA. No ggml.
//
//   FILE       the arrays of the file as they are (FORMAT.md section 3). The slowest; takes any matrix, whatever its
//              type, width and structure.
//   FUSED      F16 and BF16 values whose deltas stand in bits that the values can spare. A row is cut into `lanes` runs
//              of nearly equally many groups of entries, one per thread, interleaved group by group, so that the
//              threads read whole lines. Each run has a base: the column of its first entry. The weights of a matrix
//              have few exponents: a value keeps its sign, 10 bits of mantissa and 3 (or 2) of exponent, as an F16 that
//              is 2^exponent times too small, and leaves 2 (or 3) bits below the sign for its delta. A group is 16
//              bytes:
//                deltas of 2, 3 bits   8 entries, each delta in the free bits of its own value
//                deltas of 4 bits      7 entries; the deltas of entries 0-3 are the last half word, those of 4-6 in
//                                      what both values of words 0-2 leave free
//                deltas of 6 bits      6 entries; the deltas of 0-3 are the last word, those of 4 and 5 in free bits
//              Of wide matrices entries are in the order of the shared-memory banks of their columns: by (c % 32) * W +
//              c / 32, W = bank_width_of(cols), instead of by column c. A delta then counts steps of 32 columns, a lane
//              stays in one bank for long, and gathers of x hardly collide. With deltas of 6 bits, whose long steps
//              would pass through all banks, and in narrow matrices, columns ascend.
//              A file with deltas of 1 or 2 bits becomes 2 or, in wide matrices, 3 here, one of 4 bits 4 or 3,
//              whichever takes fewer groups; 8 bits become 6. Values that these bits cannot say exactly (1.7 % of
//              normal random values with 3 bits of exponent, 25 % with 2; after magnitude pruning none to 5 %) are zero
//              there and outliers: behind the groups of a row stand groups of four pairs (column, value) of 16 bits
//              each. Lossless. Rows of wide matrices begin at lines, so there may be unused groups behind those.
//   CODED      FUSED with shorter values and longer groups, of wide matrices: values that have 8 significant bits and
//              one of three exponents, as FORMAT.md section 8 codes them. A group has 16 entries: 16 bytes of lower
//              bits of codes and of mantissas, a word of signs and upper bits of codes, and 1, 2 or 3 words of deltas
//              of 2, 4 or 6 bits (6: columns ascend). 8 groups are a line: first the bytes of all, then the words of
//              all (4 bits: all deltas, then all signs and codes). Other values are zero there and outliers, in groups
//              of four: floats in place of the bytes, columns in place of deltas.
//   QUANTIZED  packed matrices with quantized values (quantized.h).
#pragma once

#include "codec/macko/macko.h"

namespace macko::cuda {

enum cuda_sparse_layout : int32_t {
    CUDA_SPARSE_LAYOUT_FILE      = 0,
    CUDA_SPARSE_LAYOUT_FUSED     = 1,
    CUDA_SPARSE_LAYOUT_CODED     = 2,
    CUDA_SPARSE_LAYOUT_QUANTIZED = 3,
};
const char * cuda_sparse_layout_name(int32_t layout);

constexpr int64_t CUDA_SPARSE_ALIGNMENT = 256; // of a matrix's memory, and of each part in it
constexpr int     CUDA_SPARSE_LINE      = 8;   // groups of a line: 128 bytes of FUSED
// Columns from which on rows are long enough for the order of banks, and those of CODED to begin at lines: in narrower
// ones a group soon passes through all banks.
constexpr int64_t CUDA_SPARSE_WIDE = 2048;
// FUSED: bytes of a group, and its entries
constexpr int64_t FUSED_GROUP_NBYTES    = 16;
constexpr int32_t FUSED_ASCENDING_LANES = 8; // where columns ascend, but with deltas of 6 bits
constexpr int64_t fused_entries(int delta_bits) { return delta_bits == 6 ? 6 : delta_bits == 4 ? 7 : 8; }
// CODED: entries of a group, words of deltas, signs and codes beside its bytes of values, and its bytes
constexpr int64_t CODED_GROUP     = 16;
constexpr int     CODED_PART      = 8; // entries after which a position in x is reduced
constexpr int     CODED_EXPONENTS = 3; // a value has one of, in two bits
constexpr int32_t CODED_LANES     = 16;
constexpr int64_t coded_words(int delta_bits) { return 1 + delta_bits / 2; }
constexpr int64_t coded_group_nbytes(int delta_bits) { return CODED_GROUP + 4 * coded_words(delta_bits); }
constexpr int64_t cuda_sparse_aligned(int64_t nbytes) {
    return (nbytes + CUDA_SPARSE_ALIGNMENT - 1) & ~(CUDA_SPARSE_ALIGNMENT - 1);
}

// Cuts an allocation into aligned parts. Without memory (null) the addresses are offsets.
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

// A matrix in device memory: pointers into one allocation that the caller owns.
struct cuda_sparse_matrix {
    int64_t rows;
    int64_t cols;
    int32_t type;       // enum ggml_macko_type
    int32_t value_type; // the same, but of QUANTIZED a quantized type
    int32_t delta_bits; // FILE: 1, 2, 4 or 8; FUSED: 2, 3, 4 or 6; CODED: 2, 4 or 6; QUANTIZED: 3, 4 or 8
    int32_t layout;     // enum cuda_sparse_layout
    int32_t lanes;      // all but FILE: 8, 16 or 32 runs per row
    // FUSED, CODED: bank_width_of(cols) where entries are in the order of banks; QUANTIZED: quantized_width(). The copy
    // of x in shared memory repeats after 32 * bank_width - 1 words. Else 0.
    int32_t bank_width;
    int32_t exponent; // FUSED, CODED: values are 2^exponent times those that are stored
    // with bank_width: words behind the end of x that a group may touch before its position is reduced
    int32_t overshoot;
    // FUSED: 16 bytes per group; CODED: coded_group_nbytes() per group; FILE: n_padded values; QUANTIZED: groups in
    // tiles
    uint8_t * values;
    // FILE: as in the file; QUANTIZED: the end of `values`, in front of which the segments stand; else null
    uint8_t *  deltas;
    uint16_t * bases; // FUSED, CODED: rows * lanes
    uint16_t * tails; // FUSED, CODED: per row, tail_of() what stands behind its groups
    // rows + 1. FILE: first entry of a row; FUSED, CODED: its first group; QUANTIZED: instead, of each row a
    // cuda_quantized_row and the bases
    int32_t *                    row_ptr;
    struct cuda_sparse_outlier * outliers; // QUANTIZED
    int64_t                      n_groups; // QUANTIZED
    int64_t                      nbytes;   // from the first part to the end of the last
    // The matrix in the layout of another codec (mul-mat.cuh), owned by the owner of this one, which then has no
    // arrays; or null.
    const class matrix_part * part;
};

// Columns of x per bank of shared memory: column c is at position (c % 32) * W + c / 32, so c = 32 * position mod (32 *
// W - 1), and 32 * W - 1 is at least cols.
constexpr int64_t bank_width_of(int64_t cols) { return cols / 32 + 1; }

// Words of x in shared memory before it repeats, or, without banks, all that a group may touch.
inline int64_t cuda_sparse_words(const cuda_sparse_matrix & m) {
    return m.bank_width ? 32 * m.bank_width - 1
                        : m.cols + (m.layout == CUDA_SPARSE_LAYOUT_CODED ? CODED_GROUP : fused_entries(m.delta_bits));
}

// FUSED, CODED: groups of outliers, and unused groups, behind those of a row
constexpr int OUTLIERS_OF_GROUP = 4; // values
constexpr int TAIL_MAX_OUTLIERS = 8191;
constexpr int tail_of(int outliers, int unused) { return outliers << 3 | unused; }
constexpr int tail_outliers(int tail) { return tail >> 3; }
constexpr int tail_unused(int tail) { return tail & 7; }

// The runs per row (8, 16, 32) that kernels are built for. What no real shape would choose is not built
// (docs/design/gpu-layouts.md). type: GGML_MACKO_TYPE_F16 or _BF16.
struct lanes_range {
    int32_t        least, most;
    constexpr bool has(int32_t lanes) const { return least <= lanes && lanes <= most; }
};
constexpr lanes_range cuda_sparse_built_lanes(int32_t layout, int32_t type, int32_t delta_bits, bool banked) {
    const bool f16 = type == GGML_MACKO_TYPE_F16, bf16 = type == GGML_MACKO_TYPE_BF16;
    if (layout == CUDA_SPARSE_LAYOUT_FUSED) {
        constexpr int32_t ASCENDING = FUSED_ASCENDING_LANES;
        return !banked && delta_bits < 6 ? lanes_range{ ASCENDING, (f16 || bf16) && delta_bits != 3 ? ASCENDING : 0 }
               : bf16                    ? lanes_range{ 16, 16 }
                                         : lanes_range{ delta_bits <= 2 ? 16 : 8, f16 ? 32 : 0 };
    }
    if (layout == CUDA_SPARSE_LAYOUT_CODED) {
        return { CODED_LANES, (f16 || bf16) && (banked || delta_bits == 6) ? CODED_LANES : 0 };
    }
    return { 0, 32 };
}
inline bool cuda_sparse_has_kernels(const cuda_sparse_matrix & m) {
    return cuda_sparse_built_lanes(m.layout, m.type, m.delta_bits, m.bank_width != 0).has(m.lanes);
}

// Bytes to reserve for a matrix. Known from the header alone: whatever the data is, FILE fits them, and FUSED where
// zeros are at random places and no more than a few percent of the values are outliers.
int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded);
// The same where the header also says that at most `outliers` values are not as CODED takes them: what CODED takes if
// zeros are at random places, and 2 % of its groups. A matrix of unusual structure needs more (mul-mat.cuh).
// shared_nbytes: shared memory that a block may use on the device.
int64_t cuda_sparse_nbytes(const macko_desc & desc, int64_t n_padded, int64_t outliers, int64_t shared_nbytes);
// words of x that a block can hold in so much shared memory
constexpr int64_t cuda_sparse_room_of_x(int64_t shared_nbytes) { return shared_nbytes / 4 - 32; }

// Whether each row begins at a line, with unused groups in front of it: in wide matrices, unless that takes too much of
// short rows
bool cuda_sparse_whole_lines(const macko_desc & desc, int32_t layout);

// For the upload and its tests: the runs per row that suit the matrix, the most groups of FUSED that fit the reserved
// bytes, and the parts of a matrix in memory (null: offsets). reserved: bytes of that memory, all of which CODED takes.
int32_t cuda_sparse_lanes(const macko_desc & desc, int64_t n_padded, int32_t layout);
int64_t cuda_fused_max_groups(const macko_desc & desc, int64_t n_padded);
// CODED: whether GGML_MACKO_CODED allows it, the width of deltas that takes the fewest bytes, the most bytes of groups
// that fit, and whether so many bytes are fewer than those of another layout
bool               cuda_coded_allowed();
int32_t            cuda_coded_delta_bits(const macko_desc & desc);
int64_t            cuda_coded_room(const macko_desc & desc, int64_t reserved);
bool               cuda_coded_pays(const macko_desc & desc, int64_t n_padded, int64_t nbytes);
cuda_sparse_matrix cuda_sparse_bind(const macko_desc & desc, int64_t n_padded, int32_t layout, int32_t lanes,
                                    void * memory, int64_t reserved = 0);

} // namespace macko::cuda
