// Recurrent layers: short convolutions along tokens, state space models (Mamba) and gated delta networks. The state of
// a row stays in the registers of LANES threads from the first token to the last one. Sums have a fixed order.
#include "cuda/ops/common.cuh"

#include <cmath>
#include <type_traits>

namespace macko::cuda {

namespace {

constexpr int THREADS        = 128;
constexpr int LANES          = 8; // threads of a row
constexpr int ROWS_PER_BLOCK = THREADS / LANES;
constexpr int MAX_PER_LANE   = 32; // elements of a row's state
constexpr int CONV_ROWS = 32, CONV_TOKENS = 32, MAX_CONV = 32;

__device__ __forceinline__ const float * floats(const char * p) { return reinterpret_cast<const float *>(p); }

// A lane has PER elements of a row: quadruples of neighbors, or single ones if there are fewer than four.
template <int PER> constexpr int                  NEIGHBORS = PER < 4 ? 1 : 4;
template <int PER> __device__ __forceinline__ int element_of(int lane, int k) {
    constexpr int N = NEIGHBORS<PER>;
    return (k / N * LANES + lane) * N + k % N;
}
template <int PER> __device__ __forceinline__ bool has_quadruples(const float * row) {
    return NEIGHBORS<PER> == 4 && reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0;
}
template <int PER> __device__ __forceinline__ void load_lane(const float * row, int lane, float (&x)[PER]) {
    if (has_quadruples<PER>(row)) {
#pragma unroll
        for (int k = 0; k < PER; k += 4) {
            const float4 v = reinterpret_cast<const float4 *>(row)[k / 4 * LANES + lane];
            x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < PER; k++) {
        x[k] = row[element_of<PER>(lane, k)];
    }
}
template <int PER> __device__ __forceinline__ void store_lane(float * row, int lane, const float (&x)[PER]) {
    if (has_quadruples<PER>(row)) {
#pragma unroll
        for (int k = 0; k < PER; k += 4) {
            reinterpret_cast<float4 *>(row)[k / 4 * LANES + lane] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < PER; k++) {
        row[element_of<PER>(lane, k)] = x[k];
    }
}
template <int PER> __device__ __forceinline__ float dot(const float (&a)[PER], const float (&b)[PER]) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < PER; k++) {
        sum += a[k] * b[k];
    }
    return sum;
}

// Where a recurrent op stores states: `slots` snapshots of all states. Slot 0 has the state after the last token, and
// slot i the one after i tokens less, if there is one.
struct snapshots {
    float * first;
    int64_t nbytes; // of the states in a slot
    int64_t slots;
};
template <int PER>
__device__ __forceinline__ void store_snapshot(const snapshots & to, int64_t tokens_left, int64_t at, int lane,
                                               const float (&state)[PER]) {
    if (tokens_left < to.slots) {
        char * slot = reinterpret_cast<char *>(to.first) + tokens_left * to.nbytes;
        store_lane(reinterpret_cast<float *>(slot) + at, lane, state);
    }
}

// A block has CONV_ROWS rows and CONV_TOKENS tokens of a sequence. Inputs of a row are neighbors in x, and rows are
// neighbors in dst.
__global__ void __launch_bounds__(THREADS) ssm_conv_kernel(op_tensor x, op_tensor weights, op_tensor dst) {
    wait_for_previous();
    __shared__ float tile[CONV_ROWS][CONV_TOKENS + MAX_CONV - 1]; // an odd stride: a warp reads a column
    const int        n_conv = static_cast<int>(weights.ne[0]);
    const int64_t    row    = static_cast<int64_t>(blockIdx.x) * CONV_ROWS;
    const int64_t    token  = static_cast<int64_t>(blockIdx.y) * CONV_TOKENS;
    const int        rows   = static_cast<int>(min(int64_t(CONV_ROWS), dst.ne[0] - row));
    const int        tokens = static_cast<int>(min(int64_t(CONV_TOKENS), dst.ne[1] - token));
    const int        width  = tokens + n_conv - 1;
    const char *     from   = x.data + token * x.nb[0] + row * x.nb[1] + blockIdx.z * x.nb[2];
    for (int i = static_cast<int>(threadIdx.x); i < rows * width; i += THREADS) {
        tile[i / width][i % width] = floats(from + i / width * x.nb[1])[i % width];
    }
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x) % CONV_ROWS;
    if (r >= rows) {
        return;
    }
    const float * w = floats(weights.data + (row + r) * weights.nb[1]);
    for (int t = static_cast<int>(threadIdx.x) / CONV_ROWS; t < tokens; t += THREADS / CONV_ROWS) {
        float sum = 0;
        for (int k = 0; k < n_conv; k++) {
            sum += tile[r][t + k] * w[k];
        }
        char * out                              = dst.data + (token + t) * dst.nb[1] + blockIdx.z * dst.nb[2];
        reinterpret_cast<float *>(out)[row + r] = sum;
    }
}

struct scan_args {
    op_tensor state, x, dt, a, b, c, ids;
    float *   y;
    snapshots to;
};

// The inputs of a row for one token.
template <int PER> struct scan_inputs {
    float b[PER], c[PER];
    float x, dt;
};

template <int PER, bool SCALAR_A> __global__ void __launch_bounds__(THREADS) ssm_scan_kernel(scan_args p) {
    wait_for_previous();
    const int64_t dim = p.x.ne[0], heads = p.x.ne[1], tokens = p.x.ne[2];
    const int     lane   = static_cast<int>(threadIdx.x) % LANES;
    const int64_t row    = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / LANES;
    const bool    is_row = row < dim * heads; // all lanes take part in sums
    const int64_t r = is_row ? row : 0, head = r / dim, group = head / (heads / p.b.ne[1]), seq = blockIdx.y;
    const int64_t id = existing_row(*reinterpret_cast<const int32_t *>(p.ids.data + seq * p.ids.nb[0]), p.state.ne[3]);
    const int64_t at = seq * dim * heads * PER * LANES + r * PER * LANES; // in a slot
    float         state[PER], a[PER];
    load_lane(floats(p.state.data + id * p.state.nb[3]) + r * PER * LANES, lane, state);
    const float * a_row = floats(p.a.data + head * p.a.nb[1]);
    if constexpr (SCALAR_A) {
        a[0] = a_row[0];
    } else {
        load_lane(a_row, lane, a);
    }
    const auto load = [&](int64_t t) {
        scan_inputs<PER> in;
        load_lane(floats(p.b.data + group * p.b.nb[1] + t * p.b.nb[2] + seq * p.b.nb[3]), lane, in.b);
        load_lane(floats(p.c.data + group * p.c.nb[1] + t * p.c.nb[2] + seq * p.c.nb[3]), lane, in.c);
        in.x  = floats(p.x.data + t * p.x.nb[2] + seq * p.x.nb[3])[r];
        in.dt = floats(p.dt.data + t * p.dt.nb[1] + seq * p.dt.nb[2])[head];
        return in;
    };
    scan_inputs<PER> next = load(0);
    for (int64_t t = 0; t < tokens; t++) {
        const scan_inputs<PER> in = next;
        next                      = load(min(t + 1, tokens - 1));
        const float dt            = softplus(in.dt);
        const float step          = in.x * dt;
        const float decay         = SCALAR_A ? expf(dt * a[0]) : 0;
#pragma unroll
        for (int k = 0; k < PER; k++) {
            state[k] = state[k] * (SCALAR_A ? decay : expf(dt * a[k])) + in.b[k] * step;
        }
        const float y = warp_sum<LANES>(dot(state, in.c));
        if (is_row) {
            if (lane == 0) {
                p.y[(seq * tokens + t) * dim * heads + r] = y;
            }
            store_snapshot(p.to, tokens - 1 - t, at, lane, state);
        }
    }
}

struct delta_args {
    op_tensor q, k, v, g, beta, state;
    float *   y;
    snapshots to;
    float     scale;
};

template <int PER, int GATES> struct delta_inputs {
    float q[PER], k[PER], gate[GATES];
    float v, beta;
};

// A row of the transposed state: its column of the key-value matrix. With m = the row after the gate,
//     d = (v - m k) beta,  m' = m + d k,  y = m' q = m q + d (k q),
// so that the sums over lanes do not wait for each other. GATES: 1 for all elements, or PER.
template <int PER, int GATES> __global__ void __launch_bounds__(THREADS) gated_delta_net_kernel(delta_args p) {
    wait_for_previous();
    constexpr int64_t SIZE  = PER * LANES;
    const int64_t     heads = p.v.ne[1], tokens = p.v.ne[2], sequences = p.v.ne[3];
    const int         lane = static_cast<int>(threadIdx.x) % LANES;
    const int64_t     row  = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / LANES;
    const int64_t     head = row / SIZE, r = row % SIZE, seq = blockIdx.y; // blocks are full: SIZE has whole blocks
    const int64_t     at = (seq * heads * SIZE + row) * SIZE;
    const char *      q  = p.q.data + head % p.q.ne[1] * p.q.nb[1] + seq / (sequences / p.q.ne[3]) * p.q.nb[3];
    const char *      k  = p.k.data + head % p.k.ne[1] * p.k.nb[1] + seq / (sequences / p.k.ne[3]) * p.k.nb[3];
    float             state[PER];
    load_lane(floats(p.state.data) + at, lane, state);
    const auto load = [&](int64_t t) {
        delta_inputs<PER, GATES> in;
        load_lane(floats(q + t * p.q.nb[2]), lane, in.q);
        load_lane(floats(k + t * p.k.nb[2]), lane, in.k);
        const float * gate = floats(p.g.data + head * p.g.nb[1] + t * p.g.nb[2] + seq * p.g.nb[3]);
        if constexpr (GATES == 1) {
            in.gate[0] = gate[0];
        } else {
            load_lane(gate, lane, in.gate);
        }
        in.v    = floats(p.v.data + head * p.v.nb[1] + t * p.v.nb[2] + seq * p.v.nb[3])[r];
        in.beta = floats(p.beta.data + head * p.beta.nb[1] + t * p.beta.nb[2] + seq * p.beta.nb[3])[0];
        return in;
    };
    delta_inputs<PER, GATES> next = load(0);
    for (int64_t t = 0; t < tokens; t++) {
        const delta_inputs<PER, GATES> in = next;
        next                              = load(min(t + 1, tokens - 1));
        float gate[GATES];
#pragma unroll
        for (int i = 0; i < GATES; i++) {
            gate[i] = expf(in.gate[i]);
        }
#pragma unroll
        for (int i = 0; i < PER; i++) {
            state[i] *= gate[i % GATES];
        }
        const float mk    = warp_sum<LANES>(dot(state, in.k));
        const float mq    = warp_sum<LANES>(dot(state, in.q));
        const float kq    = warp_sum<LANES>(dot(in.k, in.q));
        const float delta = (in.v - mk) * in.beta;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            state[i] += delta * in.k[i];
        }
        if (lane == 0) {
            p.y[((seq * tokens + t) * heads + head) * SIZE + r] = (mq + delta * kq) * p.scale;
        }
        store_snapshot(p.to, tokens - 1 - t, at, lane, state);
    }
}

// Calls f with the number of elements of a lane, PER or a multiple; returns cudaErrorInvalidValue for other sizes.
template <int PER, typename F> cudaError_t with_per_lane(int64_t size, const F & f) {
    if (size == PER * LANES) {
        return f(std::integral_constant<int, PER>{});
    }
    if constexpr (PER < MAX_PER_LANE) {
        return with_per_lane<2 * PER>(size, f);
    } else {
        return cudaErrorInvalidValue;
    }
}
bool is_state_size(int64_t size, int64_t min_per_lane) {
    return size >= min_per_lane * LANES && size <= MAX_PER_LANE * LANES && (size & (size - 1)) == 0;
}

// The snapshots in a result with `outputs` elements before them; 0 if these are not whole.
int64_t n_slots(const op_tensor & dst, int64_t outputs, int64_t states) {
    const int64_t rest = dst.n_elements() - outputs;
    return states > 0 && rest > 0 && rest % states == 0 ? rest / states : 0;
}
snapshots snapshots_of(const op_tensor & dst, int64_t outputs, int64_t states) {
    return { reinterpret_cast<float *>(dst.data) + outputs, states * int64_t(sizeof(float)),
             n_slots(dst, outputs, states) };
}

constexpr int64_t MAX_GRID_YZ = 65535;

constexpr int MIN_SCAN = 1, MIN_DELTA = ROWS_PER_BLOCK / LANES; // elements of a lane

} // namespace

bool op_ssm_conv_supported(const op_tensor & x, const op_tensor & weights, const op_tensor & dst) {
    const bool rows_ok = is_f32_rows(x) && is_f32_rows(weights) && is_f32_rows(dst);
    const bool fits    = weights.ne[0] >= 1 && weights.ne[0] <= MAX_CONV && dst.ne[1] <= MAX_GRID_YZ * CONV_TOKENS &&
                      dst.ne[2] <= MAX_GRID_YZ && fits_grid(dst.ne[0]);
    return rows_ok && fits && x.ne[0] == weights.ne[0] - 1 + dst.ne[1] && x.ne[1] == dst.ne[0] &&
           x.ne[2] == dst.ne[2] && x.ne[3] == 1 && dst.ne[3] == 1 && weights.ne[1] == dst.ne[0] && weights.ne[2] == 1 &&
           weights.ne[3] == 1;
}

cudaError_t op_ssm_conv(const op_context & ctx, const op_tensor & x, const op_tensor & weights, const op_tensor & dst) {
    const auto parts = [](int64_t n, int64_t size) { return static_cast<unsigned>((n + size - 1) / size); };
    const dim3 grid(parts(dst.ne[0], CONV_ROWS), parts(dst.ne[1], CONV_TOKENS), static_cast<unsigned>(dst.ne[2]));
    return launch(ctx, ssm_conv_kernel, grid, THREADS, 0, x, weights, dst);
}

bool op_ssm_scan_supported(const op_tensor & state, const op_tensor & x, const op_tensor & dt, const op_tensor & a,
                           const op_tensor & b, const op_tensor & c, const op_tensor & ids, const op_tensor & dst) {
    const int64_t size = state.ne[0], dim = x.ne[0], heads = x.ne[1], tokens = x.ne[2], sequences = x.ne[3];
    const bool types_ok = is_f32_rows(state) && is_f32_rows(x) && is_f32_rows(dt) && is_f32_rows(a) && is_f32_rows(b) &&
                          is_f32_rows(c) && ids.type == TYPE_I32 && dst.type == TYPE_F32;
    const bool state_ok = is_state_size(size, MIN_SCAN) && state.ne[1] == dim && state.ne[2] == heads &&
                          state.ne[3] >= 1 && is_contiguous(state);
    const bool x_ok  = x.nb[1] == dim * x.nb[0] && tokens >= 1 && fits_grid(dim * heads) && sequences <= MAX_GRID_YZ;
    const bool dt_ok = dt.ne[0] == heads && dt.ne[1] == tokens && dt.ne[2] == sequences;
    const bool a_ok  = (a.ne[0] == 1 || a.ne[0] == size) && a.ne[1] == heads;
    const bool bc_ok = b.ne[0] == size && b.ne[1] >= 1 && heads % b.ne[1] == 0 && b.ne[2] == tokens &&
                       b.ne[3] == sequences && same_shape(b, c) && b.nb[1] == size * b.nb[0] && c.nb[1] == b.nb[1];
    return types_ok && state_ok && x_ok && dt_ok && a_ok && bc_ok && ids.ne[0] == sequences && is_contiguous(dst) &&
           n_slots(dst, x.n_elements(), size * dim * heads * sequences) > 0;
}

cudaError_t op_ssm_scan(const op_context & ctx, const op_tensor & state, const op_tensor & x, const op_tensor & dt,
                        const op_tensor & a, const op_tensor & b, const op_tensor & c, const op_tensor & ids,
                        const op_tensor & dst) {
    const int64_t   size = state.ne[0], rows = x.ne[0] * x.ne[1], sequences = x.ne[3];
    const scan_args args = { state,
                             x,
                             dt,
                             a,
                             b,
                             c,
                             ids,
                             reinterpret_cast<float *>(dst.data),
                             snapshots_of(dst, x.n_elements(), size * rows * sequences) };
    const dim3      grid(static_cast<unsigned>((rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK),
                         static_cast<unsigned>(sequences));
    return with_per_lane<MIN_SCAN>(size, [&](auto per) {
        return a.ne[0] == 1 ? launch(ctx, ssm_scan_kernel<per.value, true>, grid, THREADS, 0, args)
                            : launch(ctx, ssm_scan_kernel<per.value, false>, grid, THREADS, 0, args);
    });
}

bool op_gated_delta_net_supported(const op_tensor & q, const op_tensor & k, const op_tensor & v, const op_tensor & g,
                                  const op_tensor & beta, const op_tensor & state, const op_tensor & dst) {
    const int64_t size = v.ne[0], heads = v.ne[1], tokens = v.ne[2], sequences = v.ne[3];
    const auto    is_qk = [&](const op_tensor & t) {
        return is_f32_rows(t) && t.ne[0] == size && t.ne[1] >= 1 && heads % t.ne[1] == 0 && t.ne[2] == tokens &&
               t.ne[3] >= 1 && sequences % t.ne[3] == 0;
    };
    const auto is_gate = [&](const op_tensor & t) {
        return is_f32_rows(t) && t.ne[1] == heads && t.ne[2] == tokens && t.ne[3] == sequences;
    };
    const bool state_ok = is_f32_rows(state) && is_contiguous(state) && state.ne[0] == size && state.ne[1] == size &&
                          state.ne[2] == heads && state.ne[3] == sequences;
    const bool sizes_ok = is_state_size(size, MIN_DELTA) && tokens >= 1 && fits_grid(heads * size) && sequences >= 1 &&
                          sequences <= MAX_GRID_YZ;
    return is_qk(q) && is_qk(k) && is_f32_rows(v) && is_gate(g) && (g.ne[0] == 1 || g.ne[0] == size) && is_gate(beta) &&
           beta.ne[0] == 1 && state_ok && sizes_ok && is_f32_rows(dst) && is_contiguous(dst) &&
           n_slots(dst, v.n_elements(), state.n_elements()) > 0;
}

cudaError_t op_gated_delta_net(const op_context & ctx, const op_tensor & q, const op_tensor & k, const op_tensor & v,
                               const op_tensor & g, const op_tensor & beta, const op_tensor & state,
                               const op_tensor & dst) {
    const delta_args args = { q,
                              k,
                              v,
                              g,
                              beta,
                              state,
                              reinterpret_cast<float *>(dst.data),
                              snapshots_of(dst, v.n_elements(), state.n_elements()),
                              1 / std::sqrt(static_cast<float>(v.ne[0])) };
    const dim3       grid(static_cast<unsigned>(v.ne[0] * v.ne[1] / ROWS_PER_BLOCK), static_cast<unsigned>(v.ne[3]));
    return with_per_lane<MIN_DELTA>(v.ne[0], [&](auto per) {
        return g.ne[0] == 1 ? launch(ctx, gated_delta_net_kernel<per.value, 1>, grid, THREADS, 0, args)
                            : launch(ctx, gated_delta_net_kernel<per.value, per.value>, grid, THREADS, 0, args);
    });
}

} // namespace macko::cuda
