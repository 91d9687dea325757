// The kernels of y = W x, written once for all instruction sets and value types.
//
// Why one body works for all instruction sets. Each kernels-*.cpp defines `struct simd`, a thin layer of vector
// operations, in an unnamed namespace, includes this file after it, and is compiled with its own -m flags. Everything
// here has internal linkage, so each of these translation units has a copy for its instruction set, which other code
// reaches only through its kernel_set. No code here may call a function of another header, including std:: templates:
// the compiler could emit that function with AVX-512 instructions, and the linker could pick that copy for code that
// runs on any CPU. The test kernel-objects checks this.
//
// How the work is divided. W is a bitmap_matrix (bitmap.h): a bit mask and the packed non-zeros of each row. Three
// kernels differ in the layout of x in the scratch memory (x_layout), and in the operand that is moved to match the
// other:
//
//   rows     float x[n][cols]. Weights are expanded to their columns and multiplied by up to X_BATCH x.
//
//                mask       1 0 0 1 1 0 1 0
//                values     a b c d              the next non-zeros of the row
//                expanded   a 0 0 b c 0 d 0      acc[i] += expanded * x[i][columns], for each x
//
//            One FMA per W columns and x. Limited by memory at n = 1; used for few x (decoding).
//
//   rows16   x[cols] of 16-bit numbers, n = 1. Weights stay packed, and x is compressed to match them.
//
//                mask       1 0 0 1 1 0 1 0
//                x          0 1 2 3 4 5 6 7      64 columns are in two registers
//                compressed 0 3 4 6              acc += compressed * values
//
//            One FMA per W non-zeros, so it is faster than `rows` at low densities. Only where a simd has_rows16<TYPE>:
//            it provides dot_gathered() (AVX-512 VBMI2, F16 and BF16), or compress(), which works on segments of
//            rows_compressed<TYPE> rows, and dot_groups() and dot_floats(). With quantized weights, x are 16-bit
//            integers, so products and their sums are exact.
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
// Quantized weights in `rows` and `panels` are dequantized to floats half a group (32 values with one scale) at a time.
#pragma once

#include "cpu/kernels/kernels-bundles.h"
#include "cpu/kernels/kernels-columns.h"
#include "cpu/kernels/kernels-common.h"
#include "cpu/kernels/kernels-panels.h"
#include "cpu/kernels/kernels-rows.h"
#include "cpu/kernels/kernels-rows16.h"

namespace macko::cpu {
namespace {

template <int TYPE> void prepare_type(const mul_mat_params & p, x_layout layout, int64_t col_begin, int64_t col_end) {
    if constexpr (simd::has_bundles && has_bundles(TYPE)) {
        if (layout == x_layout::planes) {
            if constexpr (is_quant<TYPE>) {
                return prepare_quant_bundles<TYPE, simd>(p, col_begin, col_end);
            } else {
                return prepare_bundles<TYPE, simd>(p, col_begin, col_end);
            }
        }
    }
    if constexpr (simd::has_rows16<TYPE>) {
        if (layout == x_layout::rows16) {
            if constexpr (is_quant<TYPE>) {
                return prepare_integers<simd>(p, col_begin, col_end);
            } else {
                return prepare_rows16<TYPE, simd>(p, col_begin, col_end);
            }
        }
    }
    if (layout == x_layout::panels) {
        prepare_panels<TYPE>(p, col_begin, col_end);
    } else {
        prepare_rows<TYPE>(p, col_begin, col_end);
    }
}

// x is rounded to the dense type.
template <int TYPE, typename S>
void prepare_for_coded(const mul_mat_params & p, x_layout layout, int64_t col_begin, int64_t col_end) {
    if constexpr (coded_kernels<S>) {
        return layout == x_layout::panels ? prepare_panels<TYPE>(p, col_begin, col_end)
                                          : prepare_coded<TYPE, S>(p, col_begin, col_end);
    }
}

void prepare(const mul_mat_params & p, x_layout layout, int ith, int nth) {
    const int64_t words = words_of(p.w.cols);
    const int64_t begin = words * ith / nth * 64;
    const int64_t end   = words * (ith + 1) / nth * 64;
    if (layout == x_layout::columns) {
        switch (p.columns.type) {
            case GGML_MACKO_TYPE_F16:  return prepare_rows<GGML_MACKO_TYPE_F16>(p, begin, end);
            case GGML_MACKO_TYPE_BF16: return prepare_rows<GGML_MACKO_TYPE_BF16>(p, begin, end);
            default:                   return prepare_rows<GGML_MACKO_TYPE_F32>(p, begin, end);
        }
    }
    if (p.w.type == GGML_MACKO_TYPE_CODED) {
        switch (p.w.dense_type) {
            case GGML_MACKO_TYPE_F16:  return prepare_for_coded<GGML_MACKO_TYPE_F16, simd>(p, layout, begin, end);
            case GGML_MACKO_TYPE_BF16: return prepare_for_coded<GGML_MACKO_TYPE_BF16, simd>(p, layout, begin, end);
            default:                   return prepare_for_coded<GGML_MACKO_TYPE_F32, simd>(p, layout, begin, end);
        }
    }
    switch (p.w.type) {
        case GGML_MACKO_TYPE_F16:   prepare_type<GGML_MACKO_TYPE_F16>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_BF16:  prepare_type<GGML_MACKO_TYPE_BF16>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q8_0:  prepare_type<GGML_MACKO_TYPE_Q8_0>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q5_0:  prepare_type<GGML_MACKO_TYPE_Q5_0>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q4_0:  prepare_type<GGML_MACKO_TYPE_Q4_0>(p, layout, begin, end); break;
        case GGML_MACKO_TYPE_Q4_NL: prepare_type<GGML_MACKO_TYPE_Q4_NL>(p, layout, begin, end); break;
        default:                    prepare_type<GGML_MACKO_TYPE_F32>(p, layout, begin, end); break;
    }
}

template <int TYPE> void multiply_type(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end) {
    if constexpr (simd::has_bundles && has_bundles(TYPE)) {
        if (layout == x_layout::planes) {
            return multiply_bundles<TYPE, simd>(p, row_begin, row_end);
        }
        if (is_bundled(p.w)) {
            return multiply_bundle_panels<TYPE, simd>(p, row_begin, row_end);
        }
    }
    if constexpr (simd::has_rows16<TYPE>) {
        if (layout == x_layout::rows16) {
            return multiply_rows16<TYPE, simd>(p, row_begin, row_end);
        }
    }
    if (layout == x_layout::panels) {
        multiply_panels<TYPE>(p, row_begin, row_end);
    } else {
        multiply_rows<TYPE>(p, row_begin, row_end);
    }
}

template <typename S>
void multiply_coded(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end) {
    if constexpr (coded_kernels<S>) {
        if (layout == x_layout::panels) {
            multiply_panels<GGML_MACKO_TYPE_CODED>(p, row_begin, row_end);
        } else {
            multiply_rows<GGML_MACKO_TYPE_CODED>(p, row_begin, row_end);
        }
    }
}

void multiply(const mul_mat_params & p, x_layout layout, int64_t row_begin, int64_t row_end) {
    switch (p.w.type) {
        case GGML_MACKO_TYPE_F16:   multiply_type<GGML_MACKO_TYPE_F16>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_BF16:  multiply_type<GGML_MACKO_TYPE_BF16>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q8_0:  multiply_type<GGML_MACKO_TYPE_Q8_0>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q5_0:  multiply_type<GGML_MACKO_TYPE_Q5_0>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q4_0:  multiply_type<GGML_MACKO_TYPE_Q4_0>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_Q4_NL: multiply_type<GGML_MACKO_TYPE_Q4_NL>(p, layout, row_begin, row_end); break;
        case GGML_MACKO_TYPE_CODED: multiply_coded<simd>(p, layout, row_begin, row_end); break;
        default:                    multiply_type<GGML_MACKO_TYPE_F32>(p, layout, row_begin, row_end); break;
    }
}

} // namespace
} // namespace macko::cpu
