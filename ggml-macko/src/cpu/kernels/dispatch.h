// The kernel sets of this build, one per instruction set. Only cpu/ and its tests use this header; other code uses
// kernels.h.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/row-ops.h"

namespace macko::cpu {

// The layout of x in the scratch memory, which determines the kernel that reads it; kernels-impl.h has pictures.
enum class x_layout {
    rows16,  // one x of the value type, F16 or BF16; needs n = 1 and round_x
    rows,    // n rows of floats
    coded,   // like rows, for coded values: each 64 columns in the order in which kernels expand them
    panels,  // tiles of tokens, each [columns][tokens of the tile] of floats
    planes,  // for matrices in bundles, n at most MAX_PLANES: 16-bit numbers as bytes; needs round_x
    columns, // like rows, n = 1, for add_columns()
    blocks,  // for quantized matrices: tiles of tokens, each [blocks of columns] of integers with their scales
};

constexpr int64_t MAX_PLANES = 8;

// blocks: columns of a block of x; rows that share a load of x; rows that are decoded together for more than FEW_X x
__attribute__((always_inline)) constexpr int block_columns(int64_t window) { return window < 64 ? 32 : 64; }
constexpr int                                ROWS_PER_PASS = 4, ROW_TILE = 32, FEW_X = 16;

// rows16, compressed: the x of the non-zeros in a segment of a row. There is space for zeros after them, and for stores
// of whole vectors.
constexpr int64_t SEGMENT_WORDS = 64; // mask words
struct compressed_x {
    alignas(64) uint8_t bytes[2 * SEGMENT_WORDS * 64 + 64];
};

// The coded values of a matrix (layouts.h), from one value on.
struct coded_values {
    const uint8_t * at;    // the byte of the first value
    const uint8_t * signs; // of all values of the matrix
    const uint8_t * highs;
    uint64_t        first; // number of values before the first one
    uint32_t        high;
};

// Costs of a multiplication per element of W, zeros included, from which dispatch.cpp chooses a layout. The unit is
// arbitrary, because only ratios matter. Measured with rows in L2.
struct kernel_costs {
    // for F16 and BF16 at n = 1: rows16 is faster than rows below this density; 0: it does not exist
    float rows16_below;
    int   vector_width; // tokens in a vector
    float x_batch, x;   // rows: expanding the weights, once per batch of up to 8 x; each x
    float column;       // panels: each column,
    float entry;        //         each non-zero,
    float vector;       //         each non-zero and vector of tokens
    // columns are faster than rows from this share of zeros in x on
    float columns_from = 0.45f;
};

// Compute rows row_begin ... row_end - 1 of y, numbered as in w, from the scratch memory prepared by all threads. Null:
// the set has no kernel for the layout.
template <typename LAYOUT>
using multiply_fn = void (*)(const LAYOUT & w, const mul_mat_params & p, x_layout layout, int64_t row_begin,
                             int64_t row_end);
struct multiply_fns {
    multiply_fn<bitmap_layout>       bitmap;
    multiply_fn<coded_bitmap_layout> coded_bitmap;
    multiply_fn<bundles_layout>      bundles;
};
struct quantized_kernels {
    // kernel_set::prepare() for the layout `blocks`
    void (*prepare)(const quantized_layout & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end);
    multiply_fn<quantized_layout> multiply;
};

struct kernel_set {
    const char * name;
    // Copies the columns col_begin ... col_end - 1 of x, multiples of 64, to p.scratch. w: p.w.
    void (*prepare)(const layout_base & w, const mul_mat_params & p, x_layout layout, int64_t col_begin,
                    int64_t col_end);
    multiply_fns      multiply;
    quantized_kernels quantized;
    // Writes the sum of x_c times column c over the columns col_begin ... col_end - 1 of p.columns, with col_begin a
    // multiple of 64 and x in p.scratch. w: p.w. sums: one float per row, rounded up to a multiple of 64.
    void (*add_columns)(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end,
                        float * sums);
    kernel_costs     costs;
    row_ops          rows;
    layout_traits    layouts;
    expanders        expand = {};
    const span_ops * spans  = &plain_span_ops; // makes bundles
};

// Whether the set has rows16 for values of this dense type, which are not coded.
bool has_rows16(const kernel_set & set, int32_t type);
// Whether the set multiplies with a packed matrix.
bool multiplies_with(const kernel_set & set, const cpu_matrix & w);

extern const kernel_set kernels_portable;
#if defined(__x86_64__)
extern const kernel_set        kernels_avx2;
extern const quantized_kernels kernels_avx2_vnni; // with GGML_MACKO_AVX2_VNNI
extern const kernel_set        kernels_avx512;
extern const kernel_set        kernels_avx512_vbmi2;
#elif defined(__aarch64__)
extern const kernel_set kernels_neon;
extern const kernel_set kernels_neon_dotprod;
extern const kernel_set kernels_neon_fhm;
#endif

// The i-th kernel set that this CPU and operating system support, fastest first; nullptr past the last.
const kernel_set * supported_kernel_set(int i);
// The set with that name, or the fastest one if name is empty. BAD_ARGUMENT if this CPU does not support it.
[[nodiscard]] int find_kernel_set(const char * name, const kernel_set ** set);
// The steps of a product with a given set and layout of x.
void prepare_with(const kernel_set & set, const mul_mat_params & p, x_layout layout, int ith, int nth);
void multiply_with(const kernel_set & set, const mul_mat_params & p, x_layout layout, int64_t row_begin,
                   int64_t row_end);
// mul_mat_thread() with a given set.
void mul_mat_thread_with(const kernel_set & set, const mul_mat_params & p, int ith, int nth);

} // namespace macko::cpu
