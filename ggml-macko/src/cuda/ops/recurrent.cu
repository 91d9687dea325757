// Recurrent layers: short convolutions along tokens, state space models (Mamba), gated delta networks, RWKV and gated
// linear attention. The state of a row stays in the registers of LANES threads from the first token to the last one.
// Sums have a fixed order.
#include "cuda/ops/common.cuh"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <type_traits>

namespace macko::cuda {

namespace {

constexpr int THREADS        = 128;
constexpr int LANES          = 8; // threads of a row
constexpr int ROWS_PER_BLOCK = THREADS / LANES;
constexpr int MAX_PER_LANE   = 32; // elements of a row's state
constexpr int CONV_ROWS = 32, CONV_TOKENS = 32, MAX_CONV = 32;

__host__ __device__ __forceinline__ const float * floats(const char * p) { return reinterpret_cast<const float *>(p); }

// A lane has PER elements of a row: quadruples of neighbors, or single ones if there are fewer than four.
template <int PER> constexpr int                  NEIGHBORS = PER < 4 ? 1 : 4;
template <int PER> __device__ __forceinline__ int element_of(int lane, int k) {
    constexpr int N = NEIGHBORS<PER>;
    return (k / N * LANES + lane) * N + k % N;
}
template <int PER> __device__ __forceinline__ bool has_quadruples(const float * row) {
    return NEIGHBORS<PER> == 4 && reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0;
}
// APART: floats from an element to the next one
template <int64_t APART = 1, int PER>
__device__ __forceinline__ void load_lane(const float * row, int lane, float (&x)[PER]) {
    if (APART == 1 && has_quadruples<PER>(row)) {
#pragma unroll
        for (int k = 0; k < PER; k += 4) {
            const float4 v = reinterpret_cast<const float4 *>(row)[k / 4 * LANES + lane];
            x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < PER; k++) {
        x[k] = row[element_of<PER>(lane, k) * APART];
    }
}
template <int64_t APART, int PER>
__device__ __forceinline__ void store_lane(float * row, int lane, const float (&x)[PER]) {
    if (APART == 1 && has_quadruples<PER>(row)) {
#pragma unroll
        for (int k = 0; k < PER; k += 4) {
            reinterpret_cast<float4 *>(row)[k / 4 * LANES + lane] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < PER; k++) {
        row[element_of<PER>(lane, k) * APART] = x[k];
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
template <int64_t APART = 1, int PER>
__device__ __forceinline__ void store_snapshot(const snapshots & to, int64_t tokens_left, int64_t at, int lane,
                                               const float (&state)[PER]) {
    if (tokens_left < to.slots) {
        char * slot = reinterpret_cast<char *>(to.first) + tokens_left * to.nbytes;
        store_lane<APART>(reinterpret_cast<float *>(slot) + at, lane, state);
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

// The state of a head is a matrix of SIZE x SIZE for layers with keys and values; a thread block has whole rows of it.
struct matrix_args {
    const float * state;
    float *       y; // [SIZE, heads, tokens, sequences]
    snapshots     to;
    int64_t       heads, tokens;
};
struct matrix_row {
    int64_t head, row, sequence;
    int     lane;
};

// A LAYER loads the inputs of a row for one token t with load(begin(at), at, t), and returns y from step(state,
// inputs). BY_COLUMN: elements of a row are SIZE apart in memory.
template <int PER, typename LAYER>
__global__ void __launch_bounds__(THREADS) matrix_state_kernel(LAYER p, matrix_args m) {
    wait_for_previous();
    constexpr int64_t SIZE  = PER * LANES;
    const int64_t     row   = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / LANES;
    const matrix_row  at    = { row / SIZE, row % SIZE, blockIdx.y, static_cast<int>(threadIdx.x) % LANES };
    constexpr int64_t APART = LAYER::BY_COLUMN ? SIZE : 1;
    const int64_t     first = (at.sequence * m.heads + at.head) * SIZE * SIZE + at.row * (LAYER::BY_COLUMN ? 1 : SIZE);
    float             state[PER];
    load_lane<APART>(m.state + first, at.lane, state);
    const auto begin = p.begin(at);
    auto       next  = p.load(begin, at, 0);
    for (int64_t t = 0; t < m.tokens; t++) {
        const auto in = next;
        next          = p.load(begin, at, min(t + 1, m.tokens - 1));
        const float y = p.step(state, in);
        if (at.lane == 0) {
            m.y[((at.sequence * m.tokens + t) * m.heads + at.head) * SIZE + at.row] = y;
        }
        store_snapshot<APART>(m.to, m.tokens - 1 - t, first, at.lane, state);
    }
}

// A row of the transposed state: its column of the key-value matrix. With m = the row after the gate,
//     d = (v - m k) beta,  m' = m + d k,  y = m' q = m q + d (k q),
// so that the sums over lanes do not wait for each other. GATES: 1 for all elements, or PER.
template <int PER, int GATES> struct delta_layer {
    op_tensor             q, k, v, g, beta;
    float                 scale;
    static constexpr bool BY_COLUMN = false;
    struct inputs {
        float q[PER], k[PER], gate[GATES];
        float v, beta;
    };

    struct place {
        const char *q, *k, *v, *g, *beta;
    };

    __device__ __forceinline__ place begin(const matrix_row & at) const {
        const auto of_keys = [&](const op_tensor & x) {
            return x.data + at.head % x.ne[1] * x.nb[1] + at.sequence / (v.ne[3] / x.ne[3]) * x.nb[3];
        };
        const auto of_head = [&](const op_tensor & x) { return x.data + at.head * x.nb[1] + at.sequence * x.nb[3]; };
        return { of_keys(q), of_keys(k), of_head(v), of_head(g), of_head(beta) };
    }
    __device__ __forceinline__ inputs load(const place & from, const matrix_row & at, int64_t t) const {
        inputs        in;
        const float * gates = floats(from.g + t * g.nb[2]);
        load_lane(floats(from.q + t * q.nb[2]), at.lane, in.q);
        load_lane(floats(from.k + t * k.nb[2]), at.lane, in.k);
        if constexpr (GATES == 1) {
            in.gate[0] = gates[0];
        } else {
            load_lane(gates, at.lane, in.gate);
        }
        in.v    = floats(from.v + t * v.nb[2])[at.row];
        in.beta = floats(from.beta + t * beta.nb[2])[0];
        return in;
    }
    __device__ __forceinline__ float step(float (&state)[PER], const inputs & in) const {
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
        return (mq + delta * kq) * scale;
    }
};

// Rows of [PER * LANES, heads, tokens of all sequences] without gaps.
template <int PER> struct token_rows {
    static constexpr int PER_LANE = PER;
    int64_t              heads, tokens; // of a sequence

    __device__ __forceinline__ int64_t begin(const matrix_row & at) const {
        return (at.sequence * tokens * heads + at.head) * PER * LANES;
    }
    __device__ __forceinline__ int64_t token(int64_t t) const { return t * heads * PER * LANES; }
};

// A column m of the state: m' = decay m + v k. y = m' q, or in RWKV 6, which has `first`, y = m q + v (first k q).
template <int PER, bool HAS_FIRST> struct linear_attention_layer : token_rows<PER> {
    const float *         k, *v, *q, *decay, *first;
    float                 scale;
    static constexpr bool BY_COLUMN = true;
    struct inputs {
        float k[PER], q[PER], decay[PER], first[HAS_FIRST ? PER : 1];
        float v;
    };

    __device__ __forceinline__ inputs load(int64_t begin, const matrix_row & at, int64_t t) const {
        inputs        in;
        const int64_t i = begin + this->token(t);
        load_lane(k + i, at.lane, in.k), load_lane(q + i, at.lane, in.q), load_lane(decay + i, at.lane, in.decay);
        if constexpr (HAS_FIRST) {
            load_lane(first + at.head * PER * LANES, at.lane, in.first);
        }
        in.v = v[i + at.row];
        return in;
    }
    __device__ __forceinline__ float step(float (&state)[PER], const inputs & in) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const float kv  = in.k[i] * in.v;
            const float old = state[i];
            state[i]        = old * in.decay[i] + kv;
            sum += in.q[i] * (HAS_FIRST ? old + in.first[HAS_FIRST ? i : 0] * kv : state[i]);
        }
        return warp_sum<LANES>(sum) * scale;
    }
};

// RWKV 7. A row m of the state: m' = decay m + v k + (m a) b, y = m' r.
template <int PER> struct rwkv7_layer : token_rows<PER> {
    const float *         r, *decay, *k, *v, *a, *b;
    static constexpr bool BY_COLUMN = false;
    struct inputs {
        float r[PER], decay[PER], k[PER], a[PER], b[PER];
        float v;
    };

    __device__ __forceinline__ inputs load(int64_t begin, const matrix_row & at, int64_t t) const {
        inputs        in;
        const int64_t i = begin + this->token(t);
        load_lane(r + i, at.lane, in.r), load_lane(decay + i, at.lane, in.decay), load_lane(k + i, at.lane, in.k);
        load_lane(a + i, at.lane, in.a), load_lane(b + i, at.lane, in.b);
        in.v = v[i + at.row];
        return in;
    }
    __device__ __forceinline__ float step(float (&state)[PER], const inputs & in) const {
        const float ma = warp_sum<LANES>(dot(state, in.a));
#pragma unroll
        for (int i = 0; i < PER; i++) {
            state[i] = state[i] * in.decay[i] + in.v * in.k[i] + ma * in.b[i];
        }
        return warp_sum<LANES>(dot(state, in.r));
    }
};

// Calls f with the number of elements of a lane, PER ... MAX; returns cudaErrorInvalidValue for other sizes.
template <int PER, int MAX = MAX_PER_LANE, typename F> cudaError_t with_per_lane(int64_t size, const F & f) {
    if (size == PER * LANES) {
        return f(std::integral_constant<int, PER>{});
    }
    if constexpr (PER < MAX) {
        return with_per_lane<2 * PER, MAX>(size, f);
    } else {
        return cudaErrorInvalidValue;
    }
}
bool is_state_size(int64_t size, int64_t min_per_lane, int64_t max_per_lane = MAX_PER_LANE) {
    return size >= min_per_lane * LANES && size <= max_per_lane * LANES && (size & (size - 1)) == 0;
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

constexpr int MIN_SCAN = 1, MIN_MATRIX = ROWS_PER_BLOCK / LANES; // elements of a lane
constexpr int MAX_RWKV = 16;                                     // more would not fit the registers

template <int PER, typename LAYER>
cudaError_t launch_matrix_state(const op_context & ctx, const LAYER & layer, const matrix_args & m, int64_t sequences) {
    const dim3 grid(static_cast<unsigned>(PER * LANES * m.heads / ROWS_PER_BLOCK), static_cast<unsigned>(sequences));
    return launch(ctx, matrix_state_kernel<PER, LAYER>, grid, THREADS, 0, layer, m);
}

// The operands of RWKV and gated linear attention: inputs are [size, heads, tokens of all sequences].
bool is_rwkv(std::initializer_list<op_tensor> inputs, const op_tensor & state, const op_tensor & dst) {
    const op_tensor & x         = *inputs.begin();
    const int64_t     sequences = state.ne[1];
    const auto is_alike = [&](const op_tensor & t) { return is_f32_rows(t) && is_contiguous(t) && same_shape(t, x); };
    const bool sizes_ok = is_state_size(x.ne[0], MIN_MATRIX, MAX_RWKV) && x.ne[2] >= 1 && x.ne[3] == 1 &&
                          sequences >= 1 && sequences <= MAX_GRID_YZ && x.ne[2] % sequences == 0 &&
                          fits_grid(x.ne[0] * x.ne[1]);
    return std::all_of(inputs.begin(), inputs.end(), is_alike) && sizes_ok && is_f32_rows(state) &&
           is_contiguous(state) && state.n_elements() == x.ne[0] * x.ne[0] * x.ne[1] * sequences && is_f32_rows(dst) &&
           is_contiguous(dst) && n_slots(dst, x.n_elements(), state.n_elements()) == 1;
}

// Launches the layer that f makes from the rows of a token.
template <typename F>
cudaError_t launch_rwkv(const op_context & ctx, const op_tensor & x, const op_tensor & state, const op_tensor & dst,
                        const F & f) {
    const int64_t     heads = x.ne[1], sequences = state.ne[1], tokens = x.ne[2] / sequences;
    const matrix_args m = { floats(state.data), reinterpret_cast<float *>(dst.data),
                            snapshots_of(dst, x.n_elements(), state.n_elements()), heads, tokens };
    return with_per_lane<MIN_MATRIX, MAX_RWKV>(x.ne[0], [&](auto per) {
        return launch_matrix_state<per.value>(ctx, f(token_rows<per.value>{ heads, tokens }), m, sequences);
    });
}

template <bool HAS_FIRST>
cudaError_t launch_linear_attention(const op_context & ctx, float scale, const op_tensor & k, const op_tensor & v,
                                    const op_tensor & q, const op_tensor & decay, const float * first,
                                    const op_tensor & state, const op_tensor & dst) {
    return launch_rwkv(ctx, k, state, dst, [&](auto rows) {
        return linear_attention_layer<rows.PER_LANE, HAS_FIRST>{ rows,           floats(k.data),     floats(v.data),
                                                                 floats(q.data), floats(decay.data), first,
                                                                 scale };
    });
}

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
    const bool sizes_ok = is_state_size(size, MIN_MATRIX) && tokens >= 1 && fits_grid(heads * size) && sequences >= 1 &&
                          sequences <= MAX_GRID_YZ;
    return is_qk(q) && is_qk(k) && is_f32_rows(v) && is_gate(g) && (g.ne[0] == 1 || g.ne[0] == size) && is_gate(beta) &&
           beta.ne[0] == 1 && state_ok && sizes_ok && is_f32_rows(dst) && is_contiguous(dst) &&
           n_slots(dst, v.n_elements(), state.n_elements()) > 0;
}

cudaError_t op_gated_delta_net(const op_context & ctx, const op_tensor & q, const op_tensor & k, const op_tensor & v,
                               const op_tensor & g, const op_tensor & beta, const op_tensor & state,
                               const op_tensor & dst) {
    const matrix_args m     = { floats(state.data), reinterpret_cast<float *>(dst.data),
                                snapshots_of(dst, v.n_elements(), state.n_elements()), v.ne[1], v.ne[2] };
    const float       scale = 1 / std::sqrt(static_cast<float>(v.ne[0]));
    return with_per_lane<MIN_MATRIX>(v.ne[0], [&](auto per) {
        constexpr int PER = per.value;
        return g.ne[0] == 1
                   ? launch_matrix_state<PER>(ctx, delta_layer<PER, 1>{ q, k, v, g, beta, scale }, m, v.ne[3])
                   : launch_matrix_state<PER>(ctx, delta_layer<PER, PER>{ q, k, v, g, beta, scale }, m, v.ne[3]);
    });
}

bool op_rwkv6_supported(const op_tensor & k, const op_tensor & v, const op_tensor & r, const op_tensor & first,
                        const op_tensor & decay, const op_tensor & state, const op_tensor & dst) {
    return is_rwkv({ k, v, r, decay }, state, dst) && is_f32_rows(first) && is_contiguous(first) &&
           first.n_elements() == k.ne[0] * k.ne[1];
}
cudaError_t op_rwkv6(const op_context & ctx, const op_tensor & k, const op_tensor & v, const op_tensor & r,
                     const op_tensor & first, const op_tensor & decay, const op_tensor & state, const op_tensor & dst) {
    return launch_linear_attention<true>(ctx, 1, k, v, r, decay, floats(first.data), state, dst);
}

bool op_gated_linear_attention_supported(const op_tensor & k, const op_tensor & v, const op_tensor & q,
                                         const op_tensor & gate, const op_tensor & state, const op_tensor & dst) {
    return is_rwkv({ k, v, q, gate }, state, dst);
}
cudaError_t op_gated_linear_attention(const op_context & ctx, float scale, const op_tensor & k, const op_tensor & v,
                                      const op_tensor & q, const op_tensor & gate, const op_tensor & state,
                                      const op_tensor & dst) {
    return launch_linear_attention<false>(ctx, scale, k, v, q, gate, nullptr, state, dst);
}

bool op_rwkv7_supported(const op_tensor & r, const op_tensor & decay, const op_tensor & k, const op_tensor & v,
                        const op_tensor & a, const op_tensor & b, const op_tensor & state, const op_tensor & dst) {
    return is_rwkv({ r, decay, k, v, a, b }, state, dst);
}
cudaError_t op_rwkv7(const op_context & ctx, const op_tensor & r, const op_tensor & decay, const op_tensor & k,
                     const op_tensor & v, const op_tensor & a, const op_tensor & b, const op_tensor & state,
                     const op_tensor & dst) {
    return launch_rwkv(ctx, r, state, dst, [&](auto rows) {
        return rwkv7_layer<rows.PER_LANE>{ rows,           floats(r.data), floats(decay.data), floats(k.data),
                                           floats(v.data), floats(a.data), floats(b.data) };
    });
}

} // namespace macko::cuda
