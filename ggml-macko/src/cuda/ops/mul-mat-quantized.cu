// Products of few columns with quantized weights (mul-mat-quantized.cuh): the supported matrices, and the number of
// warps that share a row.
#include "cuda/ops/mul-mat-quantized.cuh"

#include <algorithm>
#include <type_traits>

namespace macko::cuda {

namespace {

constexpr int MAX_COLS = 8;

// Returns f(type as a constant) for types with a chunk_reader; `other` for other types.
template <typename R, typename F> R with_reader(tensor_type type, R other, F && f) {
    return with_constant<TYPE_Q4_0, TYPE_Q5_0, TYPE_Q8_0, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K>(type, other, [&](auto t) {
        return f(std::integral_constant<tensor_type, static_cast<tensor_type>(decltype(t)::value)>());
    });
}

template <tensor_type TYPE, int COLS> cudaError_t launch_quantized(const op_context & ctx, const quantized_args & p) {
    constexpr int nbytes = quantized_shape<TYPE, COLS>::WARP_NBYTES;
    const int     blocks = (p.m + ROWS - 1) / ROWS, n_chunks = (p.k + CHUNK - 1) / CHUNK;
    // 16 warps or more per SM, in two blocks if there are enough rows; then no more warps than necessary for the same
    // number of rounds
    const int wanted = blocks >= 4 * ctx.n_sm ? 4 : blocks >= ctx.n_sm ? 8 : QUANTIZED_THREADS / WARP;
    const int most =
        std::max(1, std::min({ wanted, n_chunks, ctx.shared_nbytes / nbytes / (blocks > ctx.n_sm ? 2 : 1) }));
    const int rounds = (n_chunks + most - 1) / most, n_warps = (n_chunks + rounds - 1) / rounds;
    CUDA_TRY((cudaFuncSetAttribute(quantized_kernel<TYPE, COLS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   n_warps * nbytes)));
    return launch(ctx, quantized_kernel<TYPE, COLS>, static_cast<unsigned>(blocks),
                  static_cast<unsigned>(n_warps * WARP), static_cast<size_t>(n_warps * nbytes), p);
}

} // namespace

bool op_mul_mat_quantized_supported(const op_context & ctx, const op_tensor & w, const op_tensor & x) {
    return ctx.cc >= 80 && x.ne[1] <= MAX_COLS && x.ne[2] * x.ne[3] == 1 &&
           reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && w.nb[1] <= UINT32_MAX &&
           with_reader(w.type, false, [&](auto type) {
               return w.nb[1] % (chunk_reader<decltype(type)::value>::ALIGNED ? 4 : 2) == 0;
           });
}

cudaError_t op_mul_mat_quantized(const op_context & ctx, const op_tensor & w, const op_tensor & x,
                                 const op_tensor & dst, bool constant) {
    quantized_args p = {};
    p.constant       = constant;
    p.w = w.data, p.x = x.data, p.y = dst.data;
    p.w_nb1 = static_cast<uint32_t>(w.nb[1]), p.x_nb1 = x.nb[1], p.y_nb1 = dst.nb[1];
    p.m = static_cast<int>(w.ne[1]), p.n = static_cast<int>(x.ne[1]), p.k = static_cast<int>(w.ne[0]);
    p.row_nbytes = static_cast<int>(w.ne[0] / type_block_size(w.type) * type_block_nbytes(w.type));
    return with_reader(w.type, cudaErrorInvalidValue, [&](auto type) {
        constexpr tensor_type TYPE = decltype(type)::value;
        return p.n == 1   ? launch_quantized<TYPE, 1>(ctx, p)
               : p.n == 2 ? launch_quantized<TYPE, 2>(ctx, p)
               : p.n <= 5 ? launch_quantized<TYPE, 5>(ctx, p)
                          : launch_quantized<TYPE, MAX_COLS>(ctx, p);
    });
}

} // namespace macko::cuda
