// The kernel sets of this build, one per instruction set. For cpu/ and its tests; other layers use kernels.h.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/row-ops.h"
#include "cpu/layout/span-ops.h"

namespace macko::cpu {

// How x lies in the scratch memory, and with it the kernel that reads it; kernels-impl.h has pictures.
enum class x_layout {
    rows16,  // one x of 16-bit numbers: of the value type, or integers for quantized weights. Needs n = 1 and round_x.
    rows,    // n rows of floats
    panels,  // tiles of tokens, each [columns][tokens of the tile] of floats
    planes,  // of a matrix in bundles, n at most MAX_PLANES: 16-bit numbers, as bytes. Needs round_x.
    columns, // as rows, n = 1, for add_columns()
};

constexpr int64_t MAX_PLANES = 8;

// rows16, compressed: the x of the non-zeros in a segment of a row, and zeros on both sides of them. There is room for
// a whole group of zeros in front, one behind, and for stores that write whole vectors.
constexpr int64_t SEGMENT_WORDS    = 64; // mask words
constexpr int64_t COMPRESSED_PLANE = SEGMENT_WORDS * 64 + 64 + 64;
struct compressed_x {
    alignas(64) uint8_t bytes[2 * COMPRESSED_PLANE];
};

// Values of a matrix of coded values (bitmap.h), from one on.
struct coded_values {
    const uint8_t * at;    // its byte
    const uint8_t * signs; // of all values
    const uint8_t * highs;
    uint64_t        first; // values in front of it
    uint32_t        high;
};

// What a multiplication costs per element of W, zeros included, by which dispatch.cpp chooses between the layouts. The
// unit is arbitrary, since only ratios matter. Measured with rows in L2.
struct kernel_costs {
    bool quant_rows16; // rows16 exists for quantized weights, where it is faster than rows at any density
    float
        rows16_below; // density below which rows16 is faster than rows at n = 1 for F16 and BF16; 0: it does not exist
    int vector_width; // tokens in a vector
    float x_batch, x; // rows: expanding the weights, once for up to 8 x; each x
    float column;     // panels: each column,
    float entry;      //         each non-zero,
    float vector;     //         each non-zero and vector of tokens
    // density from which coded values are multiplied faster than expanded ones at n = 1; 2: there is no kernel for them
    float coded_from = 2.0f;
    // share of zeros in x from which columns are faster than rows
    float columns_from = 0.45f;
};

constexpr int64_t SHORT_ROW = 1024;

struct kernel_set {
    const char * name;
    // copies thread ith's part of x to p.scratch
    void (*prepare)(const mul_mat_params & p, x_layout layout, int ith, int nth);
    // computes rows row_begin ... row_end-1 of y, numbered as in p.w, from the scratch memory that all threads prepared
    void (*multiply)(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end);
    // Writes the sum of x_c times column c over the columns col_begin ... col_end - 1 of p.columns, col_begin a
    // multiple of 64, and of p.scratch's x: a float for each of their rows, and for others up to a multiple of 64.
    void (*add_columns)(const mul_mat_params & p, int64_t col_begin, int64_t col_end, float * sums);
    kernel_costs costs;
    row_ops      rows;
    bool         bundles       = false; // it multiplies with bundles
    bool         quant_bundles = false; // quantized matrices are to be in bundles
    // density below which matrices of F16 and BF16 are to be in bundles
    float            bundles_below = 0;
    const span_ops * spans         = &plain_span_ops; // to make them
    // bundles_below of matrices with at most SHORT_ROW columns, where the sums of a row take a bitmap about as long as
    // its products
    float         short_bundles_below = bundles_below;
    expand_row_fn expand_row          = nullptr; // faster than bits one by one
};

// whether the set has rows16 for this type of values
bool has_rows16(const kernel_set & set, int32_t type);
// whether the set multiplies with coded values
bool has_coded(const kernel_set & set);
// whether the set multiplies with this matrix, which has been packed
bool multiplies_with(const kernel_set & set, const bitmap_matrix & w);
// choose_cpu_layout() with a given set, a pure function
cpu_plan choose_cpu_layout_with(const kernel_set & set, const macko_desc & desc, int32_t value_type,
                                int64_t values_nbytes);

extern const kernel_set kernels_portable;
#if defined(__x86_64__)
extern const kernel_set kernels_avx2;
extern const kernel_set kernels_avx512;
extern const kernel_set kernels_avx512_vbmi2;
#elif defined(__aarch64__)
extern const kernel_set kernels_neon;
extern const kernel_set kernels_neon_dotprod;
extern const kernel_set kernels_neon_fhm;
#endif

// the i-th of the sets that this CPU and operating system support, fastest first; nullptr past the last
const kernel_set * supported_kernel_set(int i);
// mul_mat_thread() with a given set
void mul_mat_thread_with(const kernel_set & set, const mul_mat_params & p, int ith, int nth);

} // namespace macko::cpu
