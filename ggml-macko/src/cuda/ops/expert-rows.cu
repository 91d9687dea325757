// Groups rows of x and of results by expert, so that each expert's product is an ordinary matrix product with one
// column per token that uses the expert. The lists of op_mul_mat_id_sort give the rows of an expert.
#include "cuda/lib/mma.cuh"

namespace macko::cuda {

namespace {

constexpr int ROW_THREADS = 256;

struct expert_rows_args {
    const int * begin;   // first entry of each expert, and the end
    const int * entries; // token * n_used + slot
    const char *ids, *x;
    char *      rows;
    int64_t     ids_nb0, ids_nb1, x_nb1, x_nb2;
    int         n_experts, n_used, x_ne1, width, ld, max_f32;
};

// One block per row.
template <typename H> __global__ void __launch_bounds__(ROW_THREADS) gather_expert_rows_kernel(expert_rows_args p) {
    wait_for_previous();
    const int j = static_cast<int>(blockIdx.x);
    if (j >= p.begin[p.n_experts]) {
        return; // some entries have no expert
    }
    const int     e = p.entries[j], token = e / p.n_used, slot = e % p.n_used;
    const int     expert = *reinterpret_cast<const int *>(p.ids + slot * p.ids_nb0 + token * p.ids_nb1);
    const int     begin = p.begin[expert], n = p.begin[expert + 1] - begin;
    const float * from      = reinterpret_cast<const float *>(p.x + token * p.x_nb2 + slot % p.x_ne1 * p.x_nb1);
    char *        of_expert = p.rows + static_cast<int64_t>(begin) * p.ld * 4;
    if (n <= p.max_f32) {
        float * to = reinterpret_cast<float *>(of_expert) + static_cast<int64_t>(j - begin) * p.ld;
        for (int i = static_cast<int>(threadIdx.x); i < p.width; i += ROW_THREADS) {
            to[i] = from[i];
        }
        return;
    }
    uint32_t * to = reinterpret_cast<uint32_t *>(of_expert) + static_cast<int64_t>(j - begin) * (p.ld / 2);
    for (int i = static_cast<int>(threadIdx.x); i < p.ld / 2; i += ROW_THREADS) {
        const float low = 2 * i < p.width ? from[2 * i] : 0, high = 2 * i + 1 < p.width ? from[2 * i + 1] : 0;
        to[i] = pack_pair(H(), low, high);
    }
}

struct expert_results_args {
    const int *   begin, *entries;
    const float * rows;
    char *        dst;
    int64_t       dst_nb1, dst_nb2;
    int           n_experts, n_used, width;
};

__global__ void __launch_bounds__(ROW_THREADS) scatter_expert_rows_kernel(expert_results_args p) {
    wait_for_previous();
    const int j = static_cast<int>(blockIdx.x);
    if (j >= p.begin[p.n_experts]) {
        return;
    }
    const int     e    = p.entries[j];
    const float * from = p.rows + static_cast<int64_t>(j) * p.width;
    float *       to   = reinterpret_cast<float *>(p.dst + e / p.n_used * p.dst_nb2 + e % p.n_used * p.dst_nb1);
    for (int i = static_cast<int>(threadIdx.x); i < p.width; i += ROW_THREADS) {
        to[i] = from[i];
    }
}

} // namespace

int64_t op_expert_rows_ld(int64_t width) { return (width + 7) / 8 * 8; }

cudaError_t op_gather_expert_rows(const op_context & ctx, tensor_type type, const op_tensor & x, const op_tensor & ids,
                                  int64_t n_experts, const char * lists, int64_t max_f32, char * rows) {
    expert_rows_args p = {};
    p.begin = reinterpret_cast<const int *>(lists), p.entries = p.begin + n_experts + 1;
    p.ids = ids.data, p.ids_nb0 = ids.nb[0], p.ids_nb1 = ids.nb[1];
    p.x = x.data, p.x_nb1 = x.nb[1], p.x_nb2 = x.nb[2];
    p.rows      = rows;
    p.n_experts = static_cast<int>(n_experts), p.n_used = static_cast<int>(ids.ne[0]);
    p.x_ne1 = static_cast<int>(x.ne[1]), p.width = static_cast<int>(x.ne[0]);
    p.ld = static_cast<int>(op_expert_rows_ld(x.ne[0])), p.max_f32 = static_cast<int>(max_f32);
    return launch(ctx, type == TYPE_F16 ? gather_expert_rows_kernel<__half> : gather_expert_rows_kernel<__nv_bfloat16>,
                  static_cast<unsigned>(ids.ne[0] * ids.ne[1]), ROW_THREADS, 0, p);
}

cudaError_t op_scatter_expert_rows(const op_context & ctx, const char * rows, const op_tensor & ids, int64_t n_experts,
                                   const char * lists, const op_tensor & dst) {
    expert_results_args p = {};
    p.begin = reinterpret_cast<const int *>(lists), p.entries = p.begin + n_experts + 1;
    p.rows = reinterpret_cast<const float *>(rows);
    p.dst = dst.data, p.dst_nb1 = dst.nb[1], p.dst_nb2 = dst.nb[2];
    p.n_experts = static_cast<int>(n_experts), p.n_used = static_cast<int>(ids.ne[0]);
    p.width = static_cast<int>(dst.ne[0]);
    return launch(ctx, scatter_expert_rows_kernel, static_cast<unsigned>(ids.ne[0] * ids.ne[1]), ROW_THREADS, 0, p);
}

} // namespace macko::cuda
