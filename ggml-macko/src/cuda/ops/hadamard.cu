// Products with a Hadamard matrix (Sylvester's, divided by the square root of its size) as fast Walsh-Hadamard
// transforms, without reading the matrix. llama.cpp rotates q, k, v and the result of attention this way if the cache
// is quantized.
#include "cuda/ops/hadamard.cuh"

namespace macko::cuda {

namespace {

constexpr int THREADS = 256;

template <int N> __global__ void __launch_bounds__(THREADS) hadamard_kernel(op_tensor x, op_tensor dst) {
    wait_for_previous();
    using hadamard     = hadamard_row<N>;
    const int     lane = static_cast<int>(threadIdx.x) % hadamard::LANES;
    const int64_t i_row =
                      static_cast<int64_t>(blockIdx.x) * (THREADS / hadamard::LANES) + threadIdx.x / hadamard::LANES,
                  n_rows = dst.ne[1] * dst.ne[2] * dst.ne[3];
    const row_index row  = split_row(i_row < n_rows ? i_row : n_rows - 1, dst.ne[1], dst.ne[2]);
    const float *   from = reinterpret_cast<const float *>(row_of(x, row));
    hadamard        r;
    r.load(from, lane);
    r.transform(lane);
    if (i_row < n_rows) {
        r.store(reinterpret_cast<float *>(row_of(dst, row)), lane);
    }
}

} // namespace

bool op_hadamard_supported(const op_tensor & x, const op_tensor & dst) {
    const bool size_ok = with_hadamard_size(x.ne[0], false, [](auto) { return true; });
    return size_ok && x.type == TYPE_F32 && dst.type == TYPE_F32 && same_shape(x, dst) && is_contiguous_rows(x) &&
           is_contiguous_rows(dst) && is_aligned(x, 16) && is_aligned(dst, 16) && fits_grid(dst.n_rows());
}

cudaError_t op_hadamard(const op_context & ctx, const op_tensor & x, const op_tensor & dst) {
    return with_hadamard_size(x.ne[0], cudaErrorInvalidValue, [&](auto size) {
        constexpr int N = decltype(size)::value, ROWS = THREADS / hadamard_row<N>::LANES;
        return launch(ctx, hadamard_kernel<N>, static_cast<unsigned>((dst.n_rows() + ROWS - 1) / ROWS), THREADS, 0, x,
                      dst);
    });
}

} // namespace macko::cuda
