// The kernels of y = W x, written once for all instruction sets and value types.
//
// Why one body works for all instruction sets. Each kernels-*.cpp defines `struct simd`, a thin layer of vector
// operations, in an unnamed namespace, includes this file after it, and is compiled with its own -m flags. Everything
// here has internal linkage, so each of these translation units has a copy for its instruction set, which other code
// reaches only through its kernel_set. No code here may call a function of another header, including std:: templates:
// the compiler could emit that function with AVX-512 instructions, and the linker could pick that copy for code that
// runs on any CPU. The test kernel-objects checks this.
//
// How the work is divided. W has one of the layouts of layouts.h, mostly a bit mask and the packed non-zeros of each
// row. Three kernels differ in the layout of x in the scratch memory (x_layout), and in the operand that is moved to
// match the other:
//
//   rows     float x[n][cols]. Weights are expanded to their columns and multiplied by up to X_BATCH x.
//
//                mask       1 0 0 1 1 0 1 0
//                values     a b c d              the next non-zeros of the row
//                expanded   a 0 0 b c 0 d 0      acc[i] += expanded * x[i][columns], for each x
//
//            One FMA per W columns and x. Limited by memory at n = 1; used for few x (decoding).
//
//   rows16   x[cols] of F16 or BF16, n = 1. Weights stay packed, and x is compressed to match them.
//
//                mask       1 0 0 1 1 0 1 0
//                x          0 1 2 3 4 5 6 7      64 columns are in two registers
//                compressed 0 3 4 6              acc += compressed * values
//
//            One FMA per W non-zeros, so it is faster than `rows` at low densities. Only where a simd has_rows16:
//            it provides dot_gathered() (AVX-512 VBMI2), or compress(), which works on segments of rows_compressed
//            rows, and dot_floats().
//
//   panels   float x[tile][cols][tokens of the tile]: the packed panels of a dense GEMM, for many x (prefill).
//
//                for each block of rows, for each chunk of columns:      the chunk's part of the panel stays in L1
//                    bits and values of a row -> list of (column, weight)                      decode_chunk()
//                    acc[row][tokens] += weight * x[column][tokens], for each of the list      accumulate()
//
//            One FMA per non-zero and W tokens, and a row is decoded once for a whole tile of TILE tokens.
//
// `columns` is a separate product for one x with many zeros: it adds x_c times column c of W to y for each c with a
// non-zero x_c. Threads process parts of the columns with sums of their own, which dispatch.cpp adds.
//
// `planes` is a separate product for matrices in bundles (bundles.h), in the sets that have kernels for them
// (kernels-bundles-*.h). Their `panels` begin with lists for all rows of a group.
//
// `blocks` is a separate product for quantized matrices (kernels-quantized.h).
#pragma once

#include "cpu/kernels/kernels-bundles.h"
#include "cpu/kernels/kernels-columns.h"
#include "cpu/kernels/kernels-common.h"
#include "cpu/kernels/kernels-panels.h"
#include "cpu/kernels/kernels-quantized.h"
#include "cpu/kernels/kernels-rows.h"
#include "cpu/kernels/kernels-rows16.h"

namespace macko::cpu {
namespace {

template <int TYPE>
void prepare_type(const layout_base & w, const mul_mat_params & p, x_layout layout, int64_t col_begin,
                  int64_t col_end) {
    if constexpr (simd::has_rows16 && is_16_bits<TYPE>) {
        if (layout == x_layout::rows16) {
            return prepare_rows16<TYPE, simd>(w, p, col_begin, col_end);
        }
    }
    if constexpr (coded_kernels<simd>) {
        if (layout == x_layout::coded) {
            return prepare_coded<TYPE, simd>(w, p, col_begin, col_end);
        }
    }
    if constexpr (simd::has_basis) {
        return simd::basis->prepare(w, p, layout, col_begin, col_end);
    } else if constexpr (simd::has_bundles && is_16_bits<TYPE>) {
        if (layout == x_layout::planes) {
            return prepare_bundles<TYPE, simd>(w, p, col_begin, col_end);
        }
    }
    if (layout == x_layout::panels) {
        prepare_panels<TYPE>(w, p, col_begin, col_end);
    } else {
        prepare_rows<TYPE>(w, p, col_begin, col_end);
    }
}

void prepare(const layout_base & w, const mul_mat_params & p, x_layout layout, int64_t col_begin, int64_t col_end) {
    with_dense_type(w.dense_type, [&](auto type) { prepare_type<type.value>(w, p, layout, col_begin, col_end); });
}

template <int TYPE>
void multiply_type(const layout_of<TYPE> & w, const mul_mat_params & p, x_layout layout, int64_t row_begin,
                   int64_t row_end) {
    if constexpr (simd::has_basis && !is_coded<TYPE>) {
        if (layout == x_layout::panels || is_of_basis<TYPE>) {
            return simd::basis->multiply.bitmap(w, p, layout, row_begin, row_end);
        }
    }
    if constexpr (simd::has_rows16 && is_16_bits<TYPE>) {
        if (layout == x_layout::rows16) {
            return multiply_rows16<TYPE, simd>(w, p, row_begin, row_end);
        }
    }
    if (layout == x_layout::panels) {
        multiply_panels<TYPE>(w, p, row_begin, row_end);
    } else {
        multiply_rows<TYPE>(w, p, row_begin, row_end);
    }
}

void multiply_bitmap(const bitmap_layout & w, const mul_mat_params & p, x_layout layout, int64_t row_begin,
                     int64_t row_end) {
    with_dense_type(w.dense_type, [&](auto type) { multiply_type<type.value>(w, p, layout, row_begin, row_end); });
}

template <typename S>
void multiply_in_bundles(const bundles_layout & w, const mul_mat_params & p, x_layout layout, int64_t row_begin,
                         int64_t row_end) {
    if constexpr (S::has_basis) {
        S::basis->multiply.bundles(w, p, layout, row_begin, row_end);
    } else {
        with_dense_type(w.dense_type, [&](auto type) {
            if constexpr (is_16_bits<type.value>) {
                layout == x_layout::planes ? multiply_bundles<type.value, S>(w, p, row_begin, row_end)
                                           : multiply_bundle_panels<type.value, S>(w, p, row_begin, row_end);
            }
        });
    }
}

// The functions of this set; those of layouts without kernels are null.
template <typename S> constexpr multiply_fns multiply_of() {
    multiply_fns all = { multiply_bitmap, nullptr, nullptr };
    if constexpr (coded_kernels<S>) {
        all.coded_bitmap = multiply_type<GGML_MACKO_TYPE_CODED>;
    }
    if constexpr (S::has_bundles) {
        all.bundles = multiply_in_bundles<S>;
    }
    return all;
}
constexpr multiply_fns      MULTIPLY  = multiply_of<simd>();
constexpr quantized_kernels QUANTIZED = { prepare_blocks, multiply_quantized };

} // namespace
} // namespace macko::cpu
