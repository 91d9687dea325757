// Mixtures of experts: a router's choice, and the weighted sum of the experts' results. Both compute what several ops
// compute, with the same roundings in the same order.
#include "cuda/ops/common.cuh"

namespace macko::cuda {

namespace {

constexpr int MAX_EXPERTS = 1024; // one thread each
constexpr int MAX_USED    = WARP; // one lane each
constexpr int SUM_THREADS = 128;
constexpr int AT_ONCE     = 8; // loads of a thread

// Soft-max of the values of the threads that are `in` the row, with the sums of op_soft_max.
template <typename MAX, typename SUM>
__device__ __forceinline__ float soft_max(float x, bool in, MAX && max_of, SUM && sum_of) {
    const float max = max_of(in ? fmaxf(-INFINITY, x) : -INFINITY);
    const float e   = in && max != -INFINITY ? expf(x - max) : 0.0f;
    const float sum = sum_of(e);
    return __fmul_rn(e, sum > 0 ? 1 / sum : 0);
}

// A block has a token, a thread an expert. An expert's place is the number of experts before it.
__global__ void __launch_bounds__(MAX_EXPERTS) router_kernel(router_params p) {
    wait_for_previous();
    __shared__ float partial[WARP], chosen[MAX_USED];
    __shared__ __align__(16) uint32_t keys[MAX_EXPERTS];
    const int                         i = static_cast<int>(threadIdx.x), n = static_cast<int>(p.x.ne[0]);
    const int                         used  = static_cast<int>(p.ids.ne[0]);
    const int64_t                     token = blockIdx.x;
    const bool                        in    = i < n;
    float                             v     = in ? reinterpret_cast<const float *>(p.x.data + token * p.x.nb[1])[i] : 0;
    if (p.gate == router_gate::SOFT_MAX) {
        v = soft_max(
            v, in, [&](float x) { return block_reduce(x, partial, warp_max, -INFINITY); },
            [&](float x) { return block_reduce(x, partial, warp_sum<>, 0); });
    } else if (p.gate == router_gate::SIGMOID) {
        v = 1 / (1 + expf(-v));
    }
    const uint32_t key = in ? sort_key(p.bias ? __fadd_rn(v, p.bias[i]) : v) : 0;
    keys[i]            = key;
    __syncthreads();
    int place = 0;
    for (int j = 0; j < n; j += 4) {
        const uint4 k = *reinterpret_cast<const uint4 *>(keys + j); // threads outside the row have the last place
        place += (k.x > key || (k.x == key && j < i)) + (k.y > key || (k.y == key && j + 1 < i)) +
                 (k.z > key || (k.z == key && j + 2 < i)) + (k.w > key || (k.w == key && j + 3 < i));
    }
    if (in && place < used) {
        reinterpret_cast<int32_t *>(p.ids.data + token * p.ids.nb[1])[place] = i;
        chosen[place]                                                        = v;
    }
    __syncthreads();
    if (i >= WARP) {
        return;
    }
    float w = i < used ? chosen[i] : 0;
    if (p.soft_max) {
        w = soft_max(w, i < used, warp_max, warp_sum<>);
    }
    if (p.norm) {
        const float sum = warp_sum(w);
        w               = w / (sum < p.clamp[0] ? p.clamp[0] : sum > p.clamp[1] ? p.clamp[1] : sum);
    }
    if (i < used) {
        reinterpret_cast<float *>(p.weights.data)[token * used + i] = w * p.scale[0] + p.scale[1];
    }
}

// A block has a token (blockIdx.x) and SUM_THREADS elements.
__global__ void __launch_bounds__(SUM_THREADS)
    expert_sum_kernel(op_tensor x, op_tensor weights, op_tensor residual, bool has_residual, op_tensor dst) {
    wait_for_previous();
    const int64_t token = blockIdx.x, i = static_cast<int64_t>(blockIdx.y) * SUM_THREADS + threadIdx.x;
    if (i >= dst.ne[0]) {
        return;
    }
    const char * from = x.data + token * x.nb[2] + i * static_cast<int64_t>(sizeof(float));
    const char * w    = weights.data + token * weights.nb[2];
    const auto   term = [&](int64_t u) {
        return __fmul_rn(*reinterpret_cast<const float *>(from + u * x.nb[1]),
                           *reinterpret_cast<const float *>(w + u * weights.nb[1]));
    };
    float sum = -0.0f; // plus x is x, also for zeros
    for (int64_t first = 0; first < x.ne[1]; first += AT_ONCE) {
        float terms[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            terms[k] = term(min(first + k, x.ne[1] - 1)); // no branches between the loads
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            sum = first + k < x.ne[1] ? __fadd_rn(sum, terms[k]) : sum;
        }
    }
    if (has_residual) {
        sum = __fadd_rn(sum, reinterpret_cast<const float *>(residual.data + token * residual.nb[1])[i]);
    }
    reinterpret_cast<float *>(dst.data + token * dst.nb[1])[i] = sum;
}

bool is_f32_matrix(const op_tensor & t) { return is_f32_rows(t) && t.ne[2] * t.ne[3] == 1; }

} // namespace

bool op_router_supported(const router_params & p) {
    const int64_t used = p.ids.ne[0], tokens = p.x.ne[1];
    const bool    ids_ok = p.ids.type == TYPE_I32 && is_contiguous_rows(p.ids) && p.ids.ne[1] == tokens &&
                        p.ids.ne[2] * p.ids.ne[3] == 1 && used <= p.x.ne[0] && used <= MAX_USED;
    return is_f32_matrix(p.x) && p.x.ne[0] <= MAX_EXPERTS && ids_ok && p.weights.type == TYPE_F32 &&
           is_contiguous(p.weights) && p.weights.n_elements() == used * tokens && fits_grid(tokens);
}

cudaError_t op_router(const op_context & ctx, const router_params & p) {
    return launch(ctx, router_kernel, static_cast<unsigned>(p.x.ne[1]), row_threads(p.x.ne[0], MAX_EXPERTS), 0, p);
}

bool op_expert_sum_supported(const op_tensor & x, const op_tensor & weights, const op_tensor * residual,
                             const op_tensor & dst) {
    const bool weights_ok = weights.type == TYPE_F32 && weights.ne[0] == 1 && weights.ne[1] == x.ne[1] &&
                            weights.ne[2] == x.ne[2] && weights.ne[3] == 1;
    const bool residual_ok = !residual || (is_f32_rows(*residual) && same_shape(*residual, dst));
    return is_f32_rows(x) && x.ne[1] > 0 && x.ne[3] == 1 && weights_ok && residual_ok && is_f32_matrix(dst) &&
           dst.ne[0] == x.ne[0] && dst.ne[1] == x.ne[2] && fits_grid(dst.ne[1]) &&
           dst.ne[0] <= int64_t(SUM_THREADS) * UINT16_MAX;
}

cudaError_t op_expert_sum(const op_context & ctx, const op_tensor & x, const op_tensor & weights,
                          const op_tensor * residual, const op_tensor & dst) {
    const dim3 grid(static_cast<unsigned>(dst.ne[1]),
                    static_cast<unsigned>((dst.ne[0] + SUM_THREADS - 1) / SUM_THREADS));
    return launch(ctx, expert_sum_kernel, grid, SUM_THREADS, 0, x, weights, residual ? *residual : dst,
                  residual != nullptr, dst);
}

} // namespace macko::cuda
