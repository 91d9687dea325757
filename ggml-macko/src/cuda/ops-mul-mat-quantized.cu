// Products of few columns with quantized weights (ops-mul-mat-quantized.cuh): which matrices, and how many warps share a row.
#include "cuda/ops-mul-mat-quantized.cuh"

#include <algorithm>

namespace macko {

namespace {

constexpr int MAX_COLS  = 8;
constexpr int MAX_WARPS = QUANTIZED_THREADS / WARP;

// f(std::integral_constant<tensor_type, ...>{}) for the types that there is a reader for; else other
template <typename R, typename F> R with_reader(tensor_type type, R other, F && f) {
    switch (type) {
        case TYPE_Q4_0: return f(std::integral_constant<tensor_type, TYPE_Q4_0>());
        case TYPE_Q5_0: return f(std::integral_constant<tensor_type, TYPE_Q5_0>());
        case TYPE_Q8_0: return f(std::integral_constant<tensor_type, TYPE_Q8_0>());
        case TYPE_Q4_K: return f(std::integral_constant<tensor_type, TYPE_Q4_K>());
        case TYPE_Q5_K: return f(std::integral_constant<tensor_type, TYPE_Q5_K>());
        case TYPE_Q6_K: return f(std::integral_constant<tensor_type, TYPE_Q6_K>());
        default:        return other;
    }
}

} // namespace

} // namespace macko
