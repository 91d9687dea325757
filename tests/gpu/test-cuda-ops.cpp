// The dense operations of the GPU against float64, element by element, on random shapes, strides and data with
// outliers. Outputs are poisoned before each call and lie between guard zones. Skipped (exit code 77) without a GPU.
#include "cuda/lib/cublas.h"
#include "cuda/ops/ops.h"
#include "test.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

using namespace macko;
using namespace macko::cuda;

namespace {

constexpr size_t  GUARD  = 4096;    // bytes before and after every tensor
constexpr uint8_t POISON = 0xff;    // NaN in every floating-point type
constexpr double  U32    = 0x1p-24; // unit roundoff of float
constexpr double  U_F16  = 0x1p-11;
constexpr double  U_BF16 = 0x1p-8;

op_context ctx;
rng        random_source(20261121);

void cuda_ok(cudaError_t error, const char * what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

uint16_t to_f16(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint32_t sign = x >> 16 & 0x8000;
    const float    a    = std::fabs(f);
    if (std::isnan(f)) {
        return 0x7e00;
    }
    if (a == 0) {
        return static_cast<uint16_t>(sign);
    }
    if (a >= 65520.0f) {
        return static_cast<uint16_t>(sign | 0x7c00);
    }
    int            e;
    const double   m        = std::frexp(static_cast<double>(a), &e); // a = m * 2^e, m in [0.5, 1)
    const int      exponent = std::max(e, -13);
    const double   scaled   = std::nearbyint(std::ldexp(m, e - exponent + 11)); // units of 2^(exponent - 11)
    const uint32_t units    = static_cast<uint32_t>(scaled);
    // units < 1024: subnormal; the addition carries into the exponent when rounding does
    return static_cast<uint16_t>(sign | (units + (static_cast<uint32_t>(exponent + 13) << 10)));
}

double from_f16(uint16_t h) {
    const int    e = h >> 10 & 31, m = h & 1023;
    const double v = e == 31 ? (m ? NAN : INFINITY) : e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
    return h & 0x8000 ? -v : v;
}

// A strided tensor on the GPU. Rows may have gaps (`pad` elements), and dimensions 1 and 2 may be swapped in memory.
struct device_tensor {
    char *               memory = nullptr;
    size_t               nbytes = 0;
    op_tensor            t      = {};
    std::vector<uint8_t> host;

    device_tensor(const device_tensor &) = delete;
    device_tensor(tensor_type type, std::vector<int64_t> ne, int64_t pad = 0, bool permuted = false) {
        ne.resize(4, 1);
        t.type  = type;
        t.nb[0] = type_block_nbytes(type);
        std::copy(ne.begin(), ne.end(), t.ne);
        const int64_t row = (ne[0] / type_block_size(type) + pad) * t.nb[0];
        if (permuted) {
            t.nb[2] = row, t.nb[1] = row * ne[2];
        } else {
            t.nb[1] = row, t.nb[2] = row * ne[1];
        }
        t.nb[3] = row * ne[1] * ne[2];
        nbytes  = static_cast<size_t>(t.nb[3] * ne[3]);
        cuda_ok(cudaMalloc(&memory, nbytes + 2 * GUARD), "cudaMalloc");
        cuda_ok(cudaMemset(memory, POISON, nbytes + 2 * GUARD), "cudaMemset");
        cuda_ok(cudaDeviceSynchronize(), "cudaMemset"); // it is not ordered with the stream of ctx
        t.data = memory + GUARD;
        host.assign(nbytes, POISON);
    }
    ~device_tensor() { cudaFree(memory); }

    size_t at(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
        return static_cast<size_t>(i0 * t.nb[0] + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3]);
    }
    double get(int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) const {
        const uint8_t * p = host.data() + at(i0, i1, i2, i3);
        switch (t.type) {
            case TYPE_F32: {
                float v;
                memcpy(&v, p, 4);
                return static_cast<double>(v);
            }
            case TYPE_I32: {
                int32_t v;
                memcpy(&v, p, 4);
                return v;
            }
            case TYPE_F16: {
                uint16_t v;
                memcpy(&v, p, 2);
                return from_f16(v);
            }
            case TYPE_BF16: {
                uint32_t v = 0;
                memcpy(reinterpret_cast<char *>(&v) + 2, p, 2);
                float f;
                memcpy(&f, &v, 4);
                return static_cast<double>(f);
            }
            default: return NAN;
        }
    }
    void set(double v, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
        uint8_t *   p = host.data() + at(i0, i1, i2, i3);
        const float f = static_cast<float>(v);
        switch (t.type) {
            case TYPE_F32: memcpy(p, &f, 4); break;
            case TYPE_I32: {
                const int32_t i = static_cast<int32_t>(v);
                memcpy(p, &i, 4);
                break;
            }
            case TYPE_I64: {
                const int64_t i = static_cast<int64_t>(v);
                memcpy(p, &i, 8);
                break;
            }
            case TYPE_F16: {
                const uint16_t h = to_f16(f);
                memcpy(p, &h, 2);
                break;
            }
            case TYPE_BF16: memcpy(p, reinterpret_cast<const char *>(&f) + 2, 2); break;
            default:        break;
        }
    }
    void each(const std::function<void(int64_t, int64_t, int64_t, int64_t)> & f) const {
        for (int64_t i3 = 0; i3 < t.ne[3]; i3++) {
            for (int64_t i2 = 0; i2 < t.ne[2]; i2++) {
                for (int64_t i1 = 0; i1 < t.ne[1]; i1++) {
                    for (int64_t i0 = 0; i0 < t.ne[0]; i0++) {
                        f(i0, i1, i2, i3);
                    }
                }
            }
        }
    }
    // Copies on the stream of ctx: a plain cudaMemcpy may return before the data has arrived, and that stream does not
    // wait.
    void upload() {
        cuda_ok(cudaMemcpyAsync(t.data, host.data(), nbytes, cudaMemcpyHostToDevice, ctx.stream), "upload");
        cuda_ok(cudaStreamSynchronize(ctx.stream), "upload");
    }
    void download(const char * name) {
        std::vector<uint8_t> all(nbytes + 2 * GUARD);
        cuda_ok(cudaStreamSynchronize(ctx.stream), name);
        cuda_ok(cudaMemcpy(all.data(), memory, all.size(), cudaMemcpyDeviceToHost), name);
        const auto poisoned = [](uint8_t b) { return b == POISON; };
        CHECK(std::all_of(all.begin(), all.begin() + GUARD, poisoned), "%s: wrote in front of its output", name);
        CHECK(std::all_of(all.end() - GUARD, all.end(), poisoned), "%s: wrote past its output", name);
        host.assign(all.begin() + GUARD, all.end() - static_cast<long>(GUARD));
    }
    // normal values; one in sixteen rows holds an outlier
    device_tensor & random(double scale = 1) {
        std::normal_distribution<double> normal(0, scale);
        each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            set(normal(random_source.engine) * (random_source.range(0, 16 * t.ne[0]) == 0 ? 20 : 1), i0, i1, i2, i3);
        });
        upload();
        return *this;
    }
};
using tensor_ptr = std::unique_ptr<device_tensor>;
tensor_ptr make(tensor_type type, std::vector<int64_t> ne, int64_t pad = 0, bool permuted = false) {
    return std::make_unique<device_tensor>(type, std::move(ne), pad, permuted);
}

// Checks that every element of out is within bound(...) of reference(...): pair of value and bound.
using reference = std::function<std::pair<double, double>(int64_t, int64_t, int64_t, int64_t)>;
void check(const std::string & name, cudaError_t error, device_tensor & out, const reference & f) {
    CHECK(error == cudaSuccess, "%s: %s", name.c_str(), cudaGetErrorString(error));
    out.download(name.c_str());
    int64_t bad = 0;
    out.each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
        const auto   expected = f(i0, i1, i2, i3);
        const double got      = out.get(i0, i1, i2, i3);
        if (!(std::fabs(got - expected.first) <= expected.second + 1e-37) && bad++ < 3) {
            fprintf(stderr, "%s: [%d %d %d %d] is %.9g, should be %.9g +- %.3g\n", name.c_str(), static_cast<int>(i0),
                    static_cast<int>(i1), static_cast<int>(i2), static_cast<int>(i3), got, expected.first,
                    expected.second);
        }
    });
    CHECK(bad == 0, "%s: %d elements", name.c_str(), static_cast<int>(bad));
}

int64_t pick(std::vector<int64_t> of) {
    return of[static_cast<size_t>(random_source.range(0, static_cast<int64_t>(of.size()) - 1))];
}

// ---- elementwise, rows, reductions ----

TEST(binary_broadcast_and_in_place) {
    for (int k = 0; k < 40; k++) {
        const std::vector<int64_t> ne = { pick({ 1, 3, 64, 257, 1030, 4096 }), pick({ 1, 2, 7 }), pick({ 1, 4 }),
                                          pick({ 1, 2 }) };
        std::vector<int64_t>       nb = ne;
        for (auto & n : nb) {
            n = random_source.range(0, 1) ? n : 1;
        }
        const auto type = random_source.range(0, 3) ? TYPE_F32 : TYPE_F16;
        auto       a = make(type, ne, pick({ 0, 3 })), b = make(type, nb), dst = make(type, ne, pick({ 0, 1 }));
        a->random(), b->random();
        const auto op = static_cast<binary_op>(random_source.range(0, 2)); // division by near-zero has no useful bound
        CHECK(op_binary_supported(op, a->t, b->t, dst->t), "binary");
        check("binary", op_binary(ctx, op, a->t, b->t, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
                  const double x = a->get(i0, i1, i2, i3), y = b->get(i0 % nb[0], i1 % nb[1], i2 % nb[2], i3 % nb[3]);
                  const double z = op == binary_op::ADD ? x + y : op == binary_op::SUB ? x - y : x * y;
                  return std::make_pair(z, std::fabs(z) * (type == TYPE_F16 ? 2 * U_F16 : 2 * U32) +
                                               (type == TYPE_F16 ? 0x1p-25 : 0));
              });
        auto in_place = make(type, ne);
        in_place->random();
        const auto        before = in_place->host;
        device_tensor &   t      = *in_place;
        const cudaError_t error  = op_binary(ctx, binary_op::ADD, t.t, t.t, t.t);
        device_tensor     old(type, ne);
        old.host = before;
        check("binary in place", error, t, [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            const double x = 2 * old.get(i0, i1, i2, i3);
            return std::make_pair(x, std::fabs(x) * U_F16);
        });
    }
}

// the source, of NaN, only provides the shape
TEST(fill_with_a_number_and_infinity) {
    for (const tensor_type type : { TYPE_F32, TYPE_F16 }) {
        for (const float value : { 0.0f, -2.5f, -INFINITY }) {
            auto x   = make(type, { pick({ 1, 64, 1030 }), 3, 2, 2 }, pick({ 0, 3 }));
            auto dst = make(type, { x->t.ne[0], 3, 2, 2 }, pick({ 0, 1 }));
            CHECK(op_unary_supported(x->t, dst->t), "fill");
            const cudaError_t error = op_unary(ctx, { unary_op::FILL, { value } }, x->t, dst->t);
            CHECK(error == cudaSuccess, "fill: %s", cudaGetErrorString(error));
            dst->download("fill");
            int64_t bad = 0;
            dst->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
                bad += dst->get(i0, i1, i2, i3) != static_cast<double>(value);
            });
            CHECK(bad == 0, "fill with %g: %d elements", static_cast<double>(value), static_cast<int>(bad));
        }
    }
}

TEST(xielu_of_both_signs_and_ranges) {
    for (int k = 0; k < 12; k++) {
        const std::vector<int64_t> ne = { pick({ 1, 65, 1030 }), pick({ 1, 5 }), pick({ 1, 2 }) };
        auto                       x = make(TYPE_F32, ne, pick({ 0, 3 })), dst = make(TYPE_F32, ne, pick({ 0, 1 }));
        x->random(2);
        const unary_params p = { unary_op::XIELU, { 0.8f, 0.3f, 0.5f, -1e-6f } };
        check("xielu", op_unary(ctx, p, x->t, dst->t), *dst, [&](int64_t i0, int64_t i1, int64_t i2, int64_t) {
            const double v = x->get(i0, i1, i2), alpha_n = static_cast<double>(p.p[0]),
                         alpha_p = static_cast<double>(p.p[1]), beta = static_cast<double>(p.p[2]),
                         z = beta * v + (v > 0 ? alpha_p * v * v
                                               : alpha_n * (std::expm1(std::min(v, static_cast<double>(p.p[3]))) - v));
            return std::make_pair(z, 16 * U32 * (1e-6 + std::fabs(v) + v * v));
        });
    }
    for (const int64_t n : { 1, 32, 2050 }) {
        auto dst = make(TYPE_F32, { n });
        CHECK(op_arange_supported(dst->t), "arange");
        check("arange", op_arange(ctx, -3, 0.5f, dst->t), *dst, [&](int64_t i, int64_t, int64_t, int64_t) {
            return std::make_pair(-3 + 0.5 * static_cast<double>(i), 0.0);
        });
    }
}

TEST(glu_halves_and_pairs) {
    for (int k = 0; k < 36; k++) {
        const int64_t n = pick({ 1, 65, 768, 1500 }), rows = pick({ 1, 5 });
        const bool    single = random_source.range(0, 1), swapped = single && random_source.range(0, 1);
        auto          x = make(TYPE_F32, { single ? 2 * n : n, rows }), up = make(TYPE_F32, { n, rows }),
             dst = make(TYPE_F32, { n, rows });
        x->random(2), up->random(2);
        const glu_op     ops[] = { glu_op::SWIGLU, glu_op::SWIGLU_OAI, glu_op::SWIGLU_CLAMP };
        const glu_params p     = { ops[k % 3], swapped, 1.702f, 3.0f };
        check("glu", op_glu(ctx, p, x->t, single ? nullptr : &up->t, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t, int64_t) {
                  double g = single ? x->get(i0 + (swapped ? n : 0), i1) : x->get(i0, i1),
                         u = single ? x->get(i0 + (swapped ? 0 : n), i1) : up->get(i0, i1);
                  if (p.op != glu_op::SWIGLU) {
                      g = std::min(g, 3.0), u = std::clamp(u, -3.0, 3.0) + (p.op == glu_op::SWIGLU_OAI);
                  }
                  const double z =
                      g / (1 + std::exp(-(p.op == glu_op::SWIGLU_OAI ? static_cast<double>(p.alpha) : 1.0) * g)) * u;
                  return std::make_pair(z,
                                        16 * U32 * (std::fabs(z) + std::fabs(g) * (1 + std::fabs(g)) * std::fabs(u)));
              });
    }
}

TEST(rms_norm_with_sum_and_scale) {
    for (int k = 0; k < 40; k++) {
        const std::vector<int64_t> ne  = { pick({ 1, 6, 64, 100, 128, 4096, 4100, 8192 }), pick({ 1, 3, 9 }),
                                           pick({ 1, 2 }) };
        const int64_t              pad = ne[0] % 4 ? 1 : 4;
        auto x = make(TYPE_F32, ne, pick({ 0, pad })), dst = make(TYPE_F32, ne), scale = make(TYPE_F32, { ne[0] }),
             add = make(TYPE_F32, ne), sum = make(TYPE_F32, ne);
        x->random(), scale->random(), add->random();
        rms_norm_params p = { x->t, dst->t, k % 2 ? &scale->t : nullptr, k % 3 ? &add->t : nullptr, &sum->t, 1e-5f };
        CHECK(op_rms_norm_supported(p), "rms_norm");
        check("rms_norm", op_rms_norm(ctx, p), *dst, [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            double     squares = 0;
            const auto value = [&](int64_t i) { return x->get(i, i1, i2, i3) + (p.add ? add->get(i, i1, i2, i3) : 0); };
            for (int64_t i = 0; i < ne[0]; i++) {
                squares += value(i) * value(i);
            }
            const double s = p.scale ? scale->get(i0) : 1,
                         z = value(i0) / std::sqrt(squares / static_cast<double>(ne[0]) + 1e-5) * s;
            const double size =
                (std::fabs(x->get(i0, i1, i2, i3)) + (p.add ? std::fabs(add->get(i0, i1, i2, i3)) : 0)) /
                std::sqrt(squares / static_cast<double>(ne[0]) + 1e-5) * std::fabs(s);
            return std::make_pair(z, size * U32 * (16 + std::sqrt(static_cast<double>(ne[0]))));
        });
    }
}

TEST(layer_and_l2_norms_of_rows) {
    for (int k = 0; k < 40; k++) {
        const std::vector<int64_t> ne     = { pick({ 1, 6, 64, 100, 1023, 4096, 8192 }), pick({ 1, 3, 9 }),
                                              pick({ 1, 2 }) };
        const auto                 kind   = k % 2 ? row_norm::LAYER : row_norm::L2;
        const double               offset = static_cast<double>(pick({ 0, 30 })), n = static_cast<double>(ne[0]);
        auto x = make(TYPE_F32, ne, pick({ 0, ne[0] % 4 ? 1 : 4 }), k % 3 == 0), dst = make(TYPE_F32, ne);
        x->random();
        x->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t) { x->set(x->get(i0, i1, i2) + offset, i0, i1, i2); });
        x->upload();
        CHECK(op_row_norm_supported(kind, x->t, dst->t), "norm");
        check("norm", op_row_norm(ctx, kind, 1e-5f, x->t, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t i2, int64_t) {
                  double mean = 0, size = 0, squares = 0;
                  for (int64_t i = 0; i < ne[0]; i++) {
                      mean += kind == row_norm::LAYER ? x->get(i, i1, i2) / n : 0;
                      size = std::max(size, std::fabs(x->get(i, i1, i2)));
                  }
                  for (int64_t i = 0; i < ne[0]; i++) {
                      squares += std::pow(x->get(i, i1, i2) - mean, 2);
                  }
                  const double length =
                      kind == row_norm::LAYER ? std::sqrt(squares / n + 1e-5) : std::max(std::sqrt(squares), 1e-5);
                  const double z = (x->get(i0, i1, i2) - mean) / length;
                  return std::make_pair(z, (std::fabs(z) + size / length * (kind == row_norm::LAYER)) * U32 *
                                               (16 + std::sqrt(n)));
              });
    }
}

TEST(sums_and_means_of_rows) {
    for (const int64_t n : { 1, 5, 32, 1000, 5000 }) {
        auto x = make(TYPE_F32, { n, 3, 2 }, pick({ 0, 3 })), dst = make(TYPE_F32, { 1, 3, 2 });
        x->random();
        CHECK(op_sum_rows_supported(x->t, dst->t), "sum");
        for (const bool mean : { false, true }) {
            check(mean ? "mean" : "sum", mean ? op_mean_rows(ctx, x->t, dst->t) : op_sum_rows(ctx, x->t, dst->t), *dst,
                  [&](int64_t, int64_t i1, int64_t i2, int64_t) {
                      double sum = 0, size = 0;
                      for (int64_t i = 0; i < n; i++) {
                          sum += x->get(i, i1, i2), size += std::fabs(x->get(i, i1, i2));
                      }
                      const double divisor = mean ? static_cast<double>(n) : 1;
                      return std::make_pair(sum / divisor, size / divisor * U32 * 16);
                  });
        }
    }
}

TEST(concatenations_and_copies_of_tensors) {
    for (int k = 0; k < 40; k++) {
        const auto           type = static_cast<tensor_type>(pick({ TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_I32 }));
        const auto           dim  = static_cast<size_t>(k % 4);
        std::vector<int64_t> ne = { pick({ 1, 3, 64, 300 }), pick({ 1, 5 }), pick({ 1, 4 }), pick({ 1, 2 }) }, nb = ne;
        nb[dim]                   = pick({ 1, 2, 7 });
        std::vector<int64_t> both = ne, copies = ne;
        both[dim] += nb[dim];
        for (auto & n : copies) {
            n *= pick({ 1, 2, 3 });
        }
        auto a = make(type, ne, pick({ 0, 3 }), k % 3 == 0), b = make(type, nb, pick({ 0, 1 })), dst = make(type, both),
             repeated = make(type, copies, pick({ 0, 1 }));
        a->random(50), b->random(50);
        const int d = static_cast<int>(dim);
        CHECK(op_concat_supported(d, a->t, b->t, dst->t), "concat");
        check("concat", op_concat(ctx, d, a->t, b->t, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
                  int64_t    i[4] = { i0, i1, i2, i3 };
                  const bool in_a = i[dim] < ne[dim];
                  i[dim] -= in_a ? 0 : ne[dim];
                  return std::make_pair((in_a ? a : b)->get(i[0], i[1], i[2], i[3]), 0.0);
              });
        CHECK(op_repeat_supported(a->t, repeated->t), "repeat");
        check("repeat", op_repeat(ctx, a->t, repeated->t), *repeated,
              [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
                  return std::make_pair(a->get(i0 % ne[0], i1 % ne[1], i2 % ne[2], i3 % ne[3]), 0.0);
              });
        CHECK(!op_repeat_supported(make(type, { ne[0] + 1, 1 })->t, make(type, { ne[0] + 2, 1 })->t), "repeat: parts");
    }
}

TEST(soft_max_masked_rows) {
    for (int k = 0; k < 30; k++) {
        const int64_t n = pick({ 1, 31, 256, 1000, 5000 }), tokens = pick({ 1, 4 }), heads = pick({ 1, 6 });
        auto          x = make(TYPE_F32, { n, tokens, heads }), mask = make(k % 2 ? TYPE_F16 : TYPE_F32, { n, tokens }),
             sinks = make(TYPE_F32, { heads });
        x->random(3), sinks->random();
        mask->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
            mask->set(i0 && random_source.range(0, 2) == 0 ? -INFINITY : 0, i0, i1);
        });
        mask->upload();
        const bool    has_sinks = k % 3 == 0;
        device_tensor in(TYPE_F32, { n, tokens, heads });
        in.host     = x->host;
        int64_t row = -1; // the row of max and sum
        double  max = 0, sum = 0;
        check("soft_max in place", op_soft_max(ctx, 0.25f, 0, x->t, &mask->t, has_sinks ? &sinks->t : nullptr, x->t),
              *x, [&](int64_t i0, int64_t i1, int64_t i2, int64_t) {
                  const auto value = [&](int64_t i) { return 0.25 * in.get(i, i1, i2) + mask->get(i, i1); };
                  if (row != i2 * tokens + i1) {
                      row = i2 * tokens + i1;
                      max = has_sinks ? sinks->get(i2) : -INFINITY;
                      for (int64_t i = 0; i < n; i++) {
                          max = std::max(max, value(i));
                      }
                      sum = has_sinks ? std::exp(sinks->get(i2) - max) : 0;
                      for (int64_t i = 0; i < n; i++) {
                          sum += std::exp(value(i) - max);
                      }
                  }
                  const double z = std::exp(value(i0) - max) / sum;
                  return std::make_pair(z, z * U32 *
                                               (40 + 4 * std::fabs(std::max(value(i0), -1000.0) - max) +
                                                std::sqrt(static_cast<double>(n))));
              });
    }
}

TEST(argsort_is_a_sorted_permutation) {
    for (int64_t n : { 1, 2, 7, 8, 60, 128, 1000, 5000 }) {
        auto x = make(TYPE_F32, { n, 3 }), dst = make(TYPE_I32, { n, 3 });
        x->random();
        for (const bool descending : { false, true }) {
            CHECK(op_argsort(ctx, descending, x->t, dst->t) == cudaSuccess, "argsort");
            dst->download("argsort");
            for (int64_t row = 0; row < 3; row++) {
                std::vector<bool> seen(static_cast<size_t>(n));
                bool              ok = true;
                for (int64_t i = 0; i < n; i++) {
                    const auto id = static_cast<int64_t>(dst->get(i, row));
                    ok            = ok && id >= 0 && id < n && !seen[static_cast<size_t>(id)];
                    if (!ok) {
                        break;
                    }
                    seen[static_cast<size_t>(id)] = true;
                    if (i) {
                        const double a = x->get(static_cast<int64_t>(dst->get(i - 1, row)), row), b = x->get(id, row);
                        ok = descending ? a >= b : a <= b;
                    }
                }
                CHECK(ok, "argsort of %d", static_cast<int>(n));
            }
        }
    }
}

// ---- mixtures of experts ----

void must_run(cudaError_t error) { CHECK(error == cudaSuccess, "%s", cudaGetErrorString(error)); }

// A router of random kind, its operands, and its results by single ops.
struct choice_of_experts {
    int64_t       n, used, tokens;
    router_params p = {};
    tensor_ptr    x, bias, order, weights; // order: of all experts

    explicit choice_of_experts(int kind)
        : n(pick({ 1, 2, 8, 31, 60, 64, 128, 160, 256, 512, 1000, 1024 })),
          used(std::min(n, pick({ 1, 2, 4, 8, 10, 32 }))),
          tokens(pick({ 1, 4, 33 })),
          x(make(TYPE_F32, { n, tokens }, pick({ 0, 3 }))),
          bias(make(TYPE_F32, { n })),
          order(make(TYPE_I32, { n, tokens })),
          weights(make(TYPE_F32, { used, tokens })) {
        x->random(2), bias->random(0.1);
        if (kind % 2) { // equal values, and zeros of both signs
            x->each([&](int64_t i0, int64_t i1, int64_t, int64_t) { x->set(std::nearbyint(x->get(i0, i1)), i0, i1); });
            x->upload();
            bias->each([&](int64_t i0, int64_t, int64_t, int64_t) { bias->set(0.25, i0); });
            bias->upload();
        }
        p.x        = x->t;
        p.gate     = static_cast<router_gate>(kind % 3);
        p.bias     = p.gate != router_gate::NONE && kind % 5 < 3 ? reinterpret_cast<float *>(bias->t.data) : nullptr;
        p.soft_max = p.gate == router_gate::NONE;
        p.norm     = random_source.range(0, 1);
        p.clamp[0] = 6.103515625e-5f, p.clamp[1] = INFINITY;
        if (random_source.range(0, 1)) {
            p.scale[0] = 2.5f, p.scale[1] = kind % 4 ? 0.0f : 0.25f;
        }
    }

    void run_ops() {
        device_tensor   probs(TYPE_F32, { n, tokens }), biased(TYPE_F32, { n, tokens }), sums(TYPE_F32, { 1, tokens });
        const op_tensor gated = p.gate == router_gate::NONE ? x->t : probs.t;
        if (p.gate == router_gate::SOFT_MAX) {
            must_run(op_soft_max(ctx, 1, 0, x->t, nullptr, nullptr, probs.t));
        } else if (p.gate == router_gate::SIGMOID) {
            must_run(op_unary(ctx, { unary_op::SIGMOID, {} }, x->t, probs.t));
        }
        if (p.bias) {
            must_run(op_binary(ctx, binary_op::ADD, gated, bias->t, biased.t));
        }
        must_run(op_argsort(ctx, true, p.bias ? biased.t : gated, order->t));
        op_tensor       ids = order->t, w = weights->t;
        const op_tensor rows    = { gated.data, TYPE_F32, { 1, n, tokens, 1 }, { 4, 4, gated.nb[1], gated.nb[2] } };
        const op_tensor results = { w.data, TYPE_F32, { 1, used, tokens, 1 }, { 4, 4, w.nb[1], w.nb[2] } };
        ids.ne[0]               = used;
        must_run(op_get_rows(ctx, rows, ids, results));
        if (p.soft_max) {
            must_run(op_soft_max(ctx, 1, 0, w, nullptr, nullptr, w));
        }
        if (p.norm) {
            must_run(op_sum_rows(ctx, w, sums.t));
            must_run(op_unary(ctx, { unary_op::CLAMP, { p.clamp[0], p.clamp[1] } }, sums.t, sums.t));
            must_run(op_binary(ctx, binary_op::DIV, w, sums.t, w));
        }
        must_run(op_unary(ctx, { unary_op::SCALE, { p.scale[0], p.scale[1] } }, w, w));
        order->download("argsort"), weights->download("weights");
    }

    // Probabilities of a token in float64, and the relative error that float32 may have.
    std::vector<double> probabilities(int64_t token, double * error) const {
        std::vector<double> v;
        for (int64_t i = 0; i < n; i++) {
            v.push_back(x->get(i, token));
        }
        const auto [low, high] = std::minmax_element(v.begin(), v.end());
        const double least = *low, most = *high;
        *error     = U32 * (80 + 8 * (most - least) + 8 * std::fabs(least) + 2 * std::sqrt(static_cast<double>(n)));
        double sum = 0;
        for (const double e : v) {
            sum += std::exp(e - most);
        }
        for (double & e : v) {
            e = p.gate == router_gate::SOFT_MAX  ? std::exp(e - most) / sum
                : p.gate == router_gate::SIGMOID ? 1 / (1 + std::exp(-e))
                                                 : e;
        }
        return v;
    }

    // Weights of a token in float64, for the ids that the GPU chose.
    std::vector<double> weights_of(int64_t token, const std::vector<double> & probs) const {
        std::vector<double> w;
        for (int64_t u = 0; u < used; u++) {
            w.push_back(probs[static_cast<size_t>(order->get(u, token))]);
        }
        if (p.soft_max) {
            const double most = *std::max_element(w.begin(), w.end());
            std::transform(w.begin(), w.end(), w.begin(), [&](double e) { return std::exp(e - most); });
            const double sum = std::accumulate(w.begin(), w.end(), 0.0);
            std::transform(w.begin(), w.end(), w.begin(), [&](double e) { return e / sum; });
        }
        const double sum =
            p.norm ? std::max(std::accumulate(w.begin(), w.end(), 0.0), static_cast<double>(p.clamp[0])) : 1;
        std::transform(w.begin(), w.end(), w.begin(), [&](double e) {
            return e / sum * static_cast<double>(p.scale[0]) + static_cast<double>(p.scale[1]);
        });
        return w;
    }
};

TEST(a_choice_in_one_launch_has_the_bits_of_its_ops) {
    for (int kind = 0; kind < 120; kind++) {
        choice_of_experts c(kind);
        auto              ids = make(TYPE_I32, { c.n, c.tokens }), weights = make(TYPE_F32, { c.used, c.tokens });
        c.p.ids = ids->t, c.p.weights = weights->t;
        c.p.ids.ne[0] = c.used; // rows have gaps, as in a view of an argsort
        CHECK(op_router_supported(c.p), "router");
        c.run_ops();
        must_run(op_router(ctx, c.p));
        ids->download("ids"), weights->download("weights");
        CHECK(weights->host == c.weights->host, "router of kind %d, %d of %d: other weights", kind,
              static_cast<int>(c.used), static_cast<int>(c.n));
        int64_t bad_ids = 0, bad_weights = 0, bad_order = 0;
        for (int64_t t = 0; t < c.tokens; t++) {
            double                    error  = 0;
            const std::vector<double> probs  = c.probabilities(t, &error);
            const std::vector<double> w      = c.weights_of(t, probs);
            const auto                choice = [&](double id) {
                const auto i = static_cast<size_t>(id);
                return probs[i] + (c.p.bias ? c.bias->get(static_cast<int64_t>(i)) : 0);
            };
            for (int64_t u = 0; u < c.n; u++) {
                bad_ids += u < c.used ? ids->get(u, t) != c.order->get(u, t) : ids->get(u, t) != -1; // poison
                const double above = choice(c.order->get(std::max(std::min(u, c.used) - 1, int64_t(0)), t));
                const double own   = choice(c.order->get(u, t));
                bad_order += own > above + error * (2 + std::fabs(own) + std::fabs(above));
            }
            for (int64_t u = 0; u < c.used; u++) {
                const double expected = w[static_cast<size_t>(u)];
                bad_weights += !(std::fabs(weights->get(u, t) - expected) <= 4 * error * (std::fabs(expected) + 1e-6));
            }
        }
        CHECK(bad_ids + bad_weights + bad_order == 0, "router of kind %d, %d of %d: %d ids, %d weights, %d places",
              kind, static_cast<int>(c.used), static_cast<int>(c.n), static_cast<int>(bad_ids),
              static_cast<int>(bad_weights), static_cast<int>(bad_order));
    }
}

// The order of NaN is arbitrary, but every id is chosen at most once.
TEST(a_choice_among_nan_stays_inside_its_row) {
    for (const int64_t n : { 8, 128, 1000 }) {
        auto x = make(TYPE_F32, { n, 3 }), ids = make(TYPE_I32, { 8, 3 }), weights = make(TYPE_F32, { 8, 3 });
        x->random();
        x->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
            if (i1 == 0 || random_source.range(0, 3) == 0) {
                x->set(i1 == 2 ? -INFINITY : NAN, i0, i1);
            }
        });
        x->upload();
        for (const router_gate gate : { router_gate::NONE, router_gate::SOFT_MAX, router_gate::SIGMOID }) {
            router_params p = {};
            p.x = x->t, p.ids = ids->t, p.weights = weights->t, p.gate = gate;
            must_run(op_router(ctx, p));
            ids->download("ids");
            for (int64_t t = 0; t < 3; t++) {
                std::vector<bool> seen(static_cast<size_t>(n));
                bool              ok = true;
                for (int64_t u = 0; u < 8 && ok; u++) {
                    const double id = ids->get(u, t);
                    ok              = id >= 0 && id < static_cast<double>(n) && !seen[static_cast<size_t>(id)];
                    if (ok) {
                        seen[static_cast<size_t>(id)] = true;
                    }
                }
                CHECK(ok, "8 of %d experts", static_cast<int>(n));
            }
        }
    }
}

TEST(a_sum_of_experts_has_the_bits_of_its_ops) {
    for (int k = 0; k < 60; k++) {
        const int64_t n = pick({ 1, 100, 128, 129, 2048, 2880 }), used = pick({ 2, 4, 8, 10 }),
                      tokens = pick({ 1, 4, 37 });
        auto x = make(TYPE_F32, { n, used, tokens }, pick({ 0, 3 }), k % 2), m = make(TYPE_F32, { n, used, tokens }),
             w = make(TYPE_F32, { 1, used, tokens }, pick({ 0, 1 })), expected = make(TYPE_F32, { n, tokens }),
             residual = make(TYPE_F32, { n, tokens }), dst = make(TYPE_F32, { n, tokens });
        x->random(), w->random(), residual->random();
        const bool in_place = k % 3 == 1, has_residual = in_place || k % 3 == 2;
        if (in_place) {
            dst->host = residual->host;
            dst->upload();
        }
        const auto of = [&](int64_t u) {
            return op_tensor{
                m->t.data + u * m->t.nb[1], TYPE_F32, { n, tokens, 1, 1 }, { 4, m->t.nb[2], m->t.nb[3], m->t.nb[3] }
            };
        };
        must_run(op_binary(ctx, binary_op::MUL, x->t, w->t, m->t));
        for (int64_t u = 1; u < used; u++) {
            must_run(op_binary(ctx, binary_op::ADD, u == 1 ? of(0) : expected->t, of(u), expected->t));
        }
        if (has_residual) {
            must_run(op_binary(ctx, binary_op::ADD, expected->t, residual->t, expected->t));
        }
        const op_tensor * r = in_place ? &dst->t : has_residual ? &residual->t : nullptr;
        CHECK(op_expert_sum_supported(x->t, w->t, r, dst->t), "sum of experts");
        check("sum of experts", op_expert_sum(ctx, x->t, w->t, r, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t, int64_t) {
                  double sum = has_residual ? residual->get(i0, i1) : 0, size = std::fabs(sum);
                  for (int64_t u = 0; u < used; u++) {
                      const double term = x->get(i0, u, i1) * w->get(0, u, i1);
                      sum += term, size += std::fabs(term);
                  }
                  return std::make_pair(sum, size * U32 * static_cast<double>(used + 2));
              });
        expected->download("sum of experts, by ops");
        CHECK(dst->host == expected->host, "sum of %d experts: other bits", static_cast<int>(used));
    }
}

TEST(rows_of_one_element_and_strided_sources) {
    for (int k = 0; k < 24; k++) { // set_rows: the transposed V cache has rows of one element
        const int64_t width = pick({ 1, 8, 64, 100 }), tokens = pick({ 1, 5, 33 }), rows = 64;
        const auto    type = pick({ TYPE_F16, TYPE_F32, TYPE_BF16 });
        auto          src  = make(TYPE_F32, { width, tokens }, pick({ 0, 3 })),
             dst = make(static_cast<tensor_type>(type), { width, rows }), ids = make(TYPE_I64, { tokens });
        src->random();
        std::vector<int64_t> to(static_cast<size_t>(rows));
        for (int64_t i = 0; i < rows; i++) {
            to[static_cast<size_t>(i)] = i;
        }
        std::shuffle(to.begin(), to.end(), random_source.engine);
        for (int64_t i = 0; i < tokens; i++) {
            ids->set(static_cast<double>(to[static_cast<size_t>(i)]), i);
        }
        ids->upload();
        const double      u     = type == TYPE_F16 ? U_F16 : type == TYPE_BF16 ? U_BF16 : U32;
        const cudaError_t error = op_set_rows(ctx, src->t, ids->t, dst->t);
        CHECK(error == cudaSuccess, "set_rows");
        dst->download("set_rows");
        bool ok = true;
        for (int64_t r = 0; r < rows; r++) {
            const auto from = std::find(to.begin(), to.begin() + tokens, r) - to.begin();
            for (int64_t i = 0; i < width; i++) {
                const double got = dst->get(i, r);
                if (from == tokens) {
                    ok = ok && std::isnan(got);
                } else {
                    const double want = src->get(i, from);
                    ok                = ok && std::fabs(got - want) <= std::fabs(want) * u + 0x1p-25;
                }
            }
        }
        CHECK(ok, "set_rows of %d x %d", static_cast<int>(width), static_cast<int>(tokens));
    }
    for (int k = 0; k < 16; k++) {
        const int64_t width = pick({ 1, 64, 1000 }), rows = pick({ 1, 9 }), n = pick({ 1, 12 });
        auto src = make(k % 2 ? TYPE_F16 : TYPE_F32, { width, rows }, pick({ 0, 5 })), ids = make(TYPE_I32, { n }),
             dst = make(TYPE_F32, { width, n });
        src->random();
        for (int64_t i = 0; i < n; i++) {
            ids->set(static_cast<double>(random_source.range(0, rows - 1)), i);
        }
        ids->upload();
        check("get_rows", op_get_rows(ctx, src->t, ids->t, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t, int64_t) {
                  return std::make_pair(src->get(i0, static_cast<int64_t>(ids->get(i1))), 0.0);
              });
    }
    for (int k = 0; k < 16; k++) { // cont of a permuted tensor
        const std::vector<int64_t> ne = { pick({ 1, 32, 77 }), pick({ 1, 5 }), pick({ 1, 6 }), pick({ 1, 2 }) };
        auto src = make(TYPE_F32, ne, pick({ 0, 1 }), true), dst = make(k % 2 ? TYPE_F16 : TYPE_F32, ne);
        src->random();
        check("copy", op_copy(ctx, src->t, dst->t), *dst, [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            const double x = src->get(i0, i1, i2, i3);
            return std::make_pair(x, k % 2 ? std::fabs(x) * U_F16 + 0x1p-25 : 0.0);
        });
    }
}

// ---- writing blocks ----

const std::vector<tensor_type> CACHE_BLOCKS = { TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q5_0, TYPE_Q5_1, TYPE_IQ4_NL };
constexpr int                  IQ4_NL[] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

double rounded_to_f16(double x) { return from_f16(to_f16(static_cast<float>(x))); }
// Returns whether the float32 arithmetic that computes x may round it to the next F16 number.
bool is_f16_tie(double x) { return rounded_to_f16(x * (1 - 0x1p-22)) != rounded_to_f16(x * (1 + 0x1p-22)); }

// The decoded elements of a block of 32 elements, quantized by ggml's rule for a type. error: of each element of x.
class written_block {
public:
    written_block(tensor_type type, const std::vector<double> & x, double error) : x_(x), error_(error) {
        const auto less      = [](double a, double b) { return std::fabs(a) < std::fabs(b); };
        const auto [lo, hi]  = std::minmax_element(x.begin(), x.end());
        const double extreme = *std::max_element(x.begin(), x.end(), less); // the first of equal ones
        if (type == TYPE_Q4_1 || type == TYPE_Q5_1) {
            top_ = type == TYPE_Q4_1 ? 15 : 31, zero_ = 0, offset_ = *lo, step_ = (*hi - *lo) / top_;
        } else if (type == TYPE_IQ4_NL) {
            values_ = IQ4_NL, step_ = extreme / IQ4_NL[0];
        } else if (type == TYPE_Q8_0) {
            top_ = 254, zero_ = 127, step_ = std::fabs(extreme) / 127;
        } else {
            top_ = type == TYPE_Q4_0 ? 15 : 31, zero_ = (top_ + 1) / 2, step_ = extreme / -zero_;
        }
        scale_ = step_;
        if (values_) { // the scale with the smallest error, weighted by x^2
            double sum_qx = 0, sum_q2 = 0;
            for (const double v : x) {
                const double q = values_[nearest(v)];
                sum_qx += v * v * q * v, sum_q2 += v * v * q * q;
            }
            scale_ = sum_q2 > 0 ? sum_qx / sum_q2 : step_;
        }
    }

    // element i and its bound: a unit of each F16 number, and a step if rounding is almost a tie
    std::pair<double, double> operator[](int i) const {
        const rounding r     = round(i);
        const double   value = r.q * rounded_to_f16(scale_) + rounded_to_f16(offset_);
        const double   f16   = 2 * U_F16 * (error_ > 0 || values_ || is_f16_tie(scale_) ? 1 : 1e-3);
        double         bound = (std::fabs(r.q * scale_) + std::fabs(offset_)) * f16 + error_ + 0x1p-24;
        if (r.is_tie) {
            bound += r.gap * std::max(std::fabs(step_), std::fabs(scale_)) * 1.001;
        }
        for (int k = 0; values_ && k < 32; k++) { // a different value of one element changes the scale of all
            bound += round(k).is_tie ? 0.02 * std::fabs(value) : 0;
        }
        return { value, bound };
    }

private:
    const std::vector<double> & x_;
    double                      error_, offset_ = 0, step_ = 0, scale_ = 0;
    int                         top_ = 15, zero_ = 0;
    const int *                 values_ = nullptr;

    struct rounding {
        double q, gap; // to the value on the other side of a tie
        bool   is_tie; // nearly
    };
    rounding round(int i) const {
        const double x = x_[static_cast<size_t>(i)];
        rounding     r = { 0, 1, false };
        if (step_ == 0) {
            return r;
        }
        const double near = error_ / std::fabs(step_) * 4 + 1e-4;
        if (!values_) {
            const double place = (x - offset_) / step_ + zero_ + 0.5;
            r.q                = std::min<double>(top_, std::floor(place)) - zero_;
            r.is_tie           = std::fabs(place - std::nearbyint(place)) < near;
            return r;
        }
        const int best = nearest(x);
        r.q            = values_[best];
        for (const int other : { best - 1, best + 1 }) {
            if (other >= 0 && other < 16 && std::fabs(x / step_ - (r.q + values_[other]) / 2) < near) {
                r.gap = std::max(r.gap, std::fabs(r.q - values_[other])), r.is_tie = true;
            }
        }
        return r;
    }
    int nearest(double x) const {
        int best = 0;
        for (int k = 1; k < 16 && step_ != 0; k++) {
            best = std::fabs(x / step_ - values_[k]) < std::fabs(x / step_ - values_[best]) ? k : best;
        }
        return best;
    }
};

// Compares decoded rows of a quantized tensor with the expected ones: row(r) returns the elements and their error, or
// nothing if the row is not written.
void check_written_rows(const char * name, device_tensor & rows,
                        const std::function<std::pair<std::vector<double>, double>(int64_t)> & row) {
    rows.download(name);
    auto decoded = make(TYPE_F32, { rows.t.ne[0], rows.t.ne[1] });
    CHECK(op_copy(ctx, rows.t, decoded->t) == cudaSuccess, "%s: decode", name);
    decoded->download(name);
    bool ok = true;
    for (int64_t r = 0; r < rows.t.ne[1]; r++) {
        const auto [x, error] = row(r);
        if (x.empty()) {
            const auto begin = rows.host.begin() + r * rows.t.nb[1];
            ok               = ok && std::all_of(begin, begin + rows.t.nb[1], [](uint8_t b) { return b == POISON; });
            continue;
        }
        for (int64_t i = 0; i < rows.t.ne[0]; i += 32) {
            const std::vector<double> block(x.begin() + i, x.begin() + i + 32);
            const written_block       expected(rows.t.type, block, error);
            for (int k = 0; k < 32; k++) {
                const auto [value, bound] = expected[k];
                const double got          = decoded->get(i + k, r);
                if (!(std::fabs(got - value) <= bound) && ok) {
                    ok = false;
                    fprintf(stderr, "%s: type %d, [%d %d] is %.9g, should be %.9g +- %.3g\n", name, rows.t.type,
                            static_cast<int>(i + k), static_cast<int>(r), got, value, bound);
                }
            }
        }
    }
    CHECK(ok, "%s: rows of type %d", name, rows.t.type);
}

TEST(blocks_are_written_by_ggmls_rules) {
    for (const tensor_type type : CACHE_BLOCKS) {
        for (int k = 0; k < 12; k++) {
            const int64_t width = 32 * pick({ 1, 2, 5, 33 }), tokens = pick({ 1, 3, 40 }), rows = 64;
            auto          src = make(TYPE_F32, { width, tokens }, pick({ 0, 3 })), dst = make(type, { width, rows }),
                 copy = make(type, { width, tokens }), ids = make(TYPE_I64, { tokens });
            src->random(pick({ 1, 100 }));
            if (k % 3 == 0) { // ties of the largest magnitude, and a block of zeros
                for (int64_t i = 0; i < 32; i++) {
                    src->set(tokens > 1 ? 0 : src->get(i), i, tokens - 1);
                }
                src->set(-500, 13, 0), src->set(500, 7, 0), src->set(-500, 25, 0);
                src->upload();
            }
            const int64_t first = random_source.range(0, rows - tokens);
            for (int64_t i = 0; i < tokens; i++) {
                ids->set(static_cast<double>(first + tokens - 1 - i), i);
            }
            ids->upload();
            const auto source_row = [&](int64_t r) {
                std::vector<double> x;
                for (int64_t i = 0; r >= 0 && r < tokens && i < width; i++) {
                    x.push_back(src->get(i, r));
                }
                return std::make_pair(x, 0.0);
            };
            CHECK(op_copy_supported(src->t, copy->t) && op_set_rows_supported(src->t, ids->t, dst->t), "refused");
            CHECK(op_copy(ctx, src->t, copy->t) == cudaSuccess, "copy");
            check_written_rows("copy", *copy, source_row);
            CHECK(op_set_rows(ctx, src->t, ids->t, dst->t) == cudaSuccess, "set_rows");
            check_written_rows("set_rows", *dst, [&](int64_t r) { return source_row(first + tokens - 1 - r); });
        }
    }
}

// Row numbers may come from an untrusted client: a kernel must stay inside its operands and use the nearest row.
constexpr int64_t ROW_NUMBERS[] = { -1, INT32_MIN, 9, 10, INT32_MAX, 4, 0, 8 };
int64_t           nearest_row(int64_t id, int64_t rows) { return std::min(std::max<int64_t>(id, 0), rows - 1); }

TEST(row_numbers_stay_inside_their_tensor) {
    const int64_t rows = 9, n = std::size(ROW_NUMBERS);
    const auto    ids_of = [](tensor_type type, int64_t first, int64_t count) {
        auto ids = make(type, { count });
        for (int64_t i = 0; i < count; i++) {
            ids->set(static_cast<double>(ROW_NUMBERS[first + i]), i);
        }
        ids->upload();
        return ids;
    };
    for (const int64_t width : { 1, 70 }) {
        for (const auto type : { TYPE_F32, TYPE_F16, TYPE_I32 }) {
            auto src = make(type, { width, rows }), dst = make(type == TYPE_I32 ? TYPE_I32 : TYPE_F32, { width, n });
            const auto ids = ids_of(TYPE_I32, 0, n);
            src->random(1000);
            check("get_rows, any row number", op_get_rows(ctx, src->t, ids->t, dst->t), *dst,
                  [&](int64_t i0, int64_t i1, int64_t, int64_t) {
                      return std::make_pair(src->get(i0, nearest_row(ROW_NUMBERS[i1], rows)), 0.0);
                  });
        }
        auto x = make(TYPE_F32, { width, n, 1 }), bias = make(TYPE_F32, { width, rows }),
             sum       = make(TYPE_F32, { width, n, 1 });
        const auto ids = ids_of(TYPE_I32, 0, n);
        x->random(), bias->random();
        check("add_id, any row number", op_add_id(ctx, x->t, bias->t, ids->t, sum->t), *sum,
              [&](int64_t i0, int64_t i1, int64_t, int64_t) {
                  const double v = x->get(i0, i1) + bias->get(i0, nearest_row(ROW_NUMBERS[i1], rows));
                  return std::make_pair(v, std::fabs(v) * U32);
              });
        for (int64_t i = 0; i < n; i++) {
            for (const auto type : { TYPE_I32, TYPE_I64 }) {
                auto       src = make(TYPE_F32, { width, 1 }), dst = make(TYPE_F32, { width, rows });
                const auto id = ids_of(type, i, 1);
                src->random();
                CHECK(op_set_rows(ctx, src->t, id->t, dst->t) == cudaSuccess, "set_rows, any row number");
                dst->download("set_rows, any row number");
                bool ok = true;
                dst->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
                    const double got = dst->get(i0, i1);
                    ok = ok && (i1 == nearest_row(ROW_NUMBERS[i], rows) ? got == src->get(i0) : std::isnan(got));
                });
                CHECK(ok, "set_rows: row number %d", static_cast<int>(ROW_NUMBERS[i]));
            }
        }
    }
}

struct rope_case {
    int64_t     head_dim, heads, tokens;
    rope_params p = {};
    tensor_ptr  x, dst, pos, factors_;
    bool        has_factors;

    explicit rope_case(int k) : rope_case(k, pick({ 8, 64, 96, 128, 768 }), pick({ 1, 5, 32 }), pick({ 1, 3, 70 })) {}
    rope_case(int k, int64_t head_dim, int64_t heads, int64_t tokens)
        : head_dim(head_dim), heads(heads), tokens(tokens), has_factors(k % 4 == 1) {
        p.n_dims = static_cast<int>(k % 3 ? head_dim : head_dim / 2), p.mode = k % 2 ? 2 : 0, p.n_ctx_orig = 4096,
        p.freq_base = 10000, p.freq_scale = k % 5 ? 1 : 0.25f, p.ext_factor = k % 5 ? 0 : 1, p.attn_factor = 1,
        p.beta_fast = 32, p.beta_slow = 1, p.inverse = k % 6 == 5;
        x   = make(TYPE_F32, { head_dim, heads, tokens }, k % 4 ? 0 : 8),
        dst = make(TYPE_F32, { head_dim, heads, tokens });
        pos = make(TYPE_I32, { tokens }), factors_ = make(TYPE_F32, { head_dim / 2 });
        x->random();
        factors_->each([&](int64_t i0, int64_t, int64_t, int64_t) { factors_->set(1 + random_source.unit(), i0); });
        factors_->upload();
        for (int64_t i = 0; i < tokens; i++) {
            pos->set(static_cast<double>(random_source.range(0, 2000)), i);
        }
        pos->upload();
    }
    const op_tensor * factors() const { return has_factors ? &factors_->t : nullptr; }

    struct angle {
        double theta, size; // YaRN also scales the pair
    };
    angle angle_of(int64_t pair, double extrapolated) const {
        const double theta = extrapolated * static_cast<double>(p.freq_scale);
        if (p.ext_factor == 0) {
            return { theta, 1 };
        }
        const auto dim = [&](double n) {
            return p.n_dims * std::log(p.n_ctx_orig / (n * 2 * M_PI)) /
                   (2 * std::log(static_cast<double>(p.freq_base)));
        };
        const double low = std::max(0.0, std::floor(dim(32))), high = std::min(p.n_dims - 1.0, std::ceil(dim(1)));
        const double ramp = (static_cast<double>(pair) - low) / std::max(0.001, high - low);
        const double mix  = 1 - std::clamp(ramp, 0.0, 1.0);
        return { theta * (1 - mix) + extrapolated * mix, 1 + 0.1 * std::log(1 / static_cast<double>(p.freq_scale)) };
    }
    // Element i0 of head h of token t after rotation, and the bound of its error.
    std::pair<double, double> rotated(int64_t i0, int64_t h, int64_t t) const {
        if (i0 >= p.n_dims) {
            return { x->get(i0, h, t), 0.0 };
        }
        const int64_t half = p.n_dims / 2, pair = p.mode ? i0 % half : i0 / 2, first = p.mode ? pair : 2 * pair,
                      second      = p.mode ? pair + half : first + 1;
        const double exponent     = -2.0 * static_cast<double>(pair) / p.n_dims;
        const double extrapolated = pos->get(t) * std::pow(static_cast<double>(p.freq_base), exponent) /
                                    (has_factors ? factors_->get(pair) : 1);
        const auto [angle, size] = angle_of(pair, extrapolated);
        const double theta       = p.inverse ? -angle : angle;
        const double a = x->get(first, h, t), b = x->get(second, h, t);
        const double z = size * (i0 == first ? a * std::cos(theta) - b * std::sin(theta)
                                             : a * std::sin(theta) + b * std::cos(theta));
        // the angle is a float, and a power of a float
        const double bound = size * (std::fabs(a) + std::fabs(b)) * U32 *
                             (16 + (24 + static_cast<double>(pair)) * std::fabs(extrapolated));
        return { z, bound };
    }
    void check_dst(const char * name, cudaError_t error) const {
        check(name, error, *dst, [&](int64_t i0, int64_t i1, int64_t i2, int64_t) { return rotated(i0, i1, i2); });
    }
};

// fused: the same keys go to rows of an F16 cache, and values to rows of another.
void check_rope_cache(const rope_case & r) {
    const int64_t rows = 128, width = pick({ 64, 72 });
    auto          k_cache = make(TYPE_F16, { r.head_dim * r.heads, rows }), v_cache = make(TYPE_F16, { width, rows }),
         v = make(TYPE_F32, { width, r.tokens }, 4), ids = make(TYPE_I64, { r.tokens });
    v->random();
    const int64_t first_row = random_source.range(0, rows - r.tokens);
    for (int64_t i = 0; i < r.tokens; i++) {
        ids->set(static_cast<double>(first_row + r.tokens - 1 - i), i);
    }
    ids->upload();
    const auto *            id = reinterpret_cast<const int64_t *>(ids->t.data);
    const rope_cache_params c  = { r.x->t, r.dst->t, r.x->t, k_cache->t, v->t, v_cache->t, id, id };
    CHECK(op_rope_cache_supported(r.p, r.pos->t, r.factors(), c), "rope_cache");
    cuda_ok(cudaMemsetAsync(r.dst->t.data, POISON, r.dst->nbytes, ctx.stream), "poison");
    r.check_dst("rope_cache q", op_rope_cache(ctx, r.p, r.pos->t, r.factors(), c));
    k_cache->download("rope_cache k");
    v_cache->download("rope_cache v");
    bool       ok            = true;
    const auto check_element = [&](bool is_written, double got, double expected, double bound) {
        ok = ok && (is_written ? std::fabs(got - expected) <= bound : std::isnan(got));
    };
    for (int64_t row = 0; row < rows; row++) {
        const int64_t t          = first_row + r.tokens - 1 - row;
        const bool    is_written = t >= 0 && t < r.tokens;
        for (int64_t i = 0; i < r.head_dim * r.heads; i++) {
            const auto [key, bound] =
                is_written ? r.rotated(i % r.head_dim, i / r.head_dim, t) : std::make_pair(0.0, 0.0);
            check_element(is_written, k_cache->get(i, row), key, bound + std::fabs(key) * 2 * U_F16 + 0x1p-24);
        }
        for (int64_t i = 0; i < width; i++) {
            const double value = is_written ? v->get(i, t) : 0;
            check_element(is_written, v_cache->get(i, row), value, std::fabs(value) * U_F16 + 0x1p-25);
        }
    }
    CHECK(ok, "rope_cache: caches");
}

// llama.cpp asks whether a device supports it, to find a place for the factors of a model.
TEST(a_rotation_of_no_dimension_copies) {
    rope_case r(1);
    r.p = {};
    CHECK(op_rope_supported(r.p, r.x->t, r.pos->t, r.factors(), r.dst->t), "rope of 0 dimensions");
    check("rope of 0 dimensions", op_rope(ctx, r.p, r.x->t, r.pos->t, r.factors(), r.dst->t), *r.dst,
          [&](int64_t i0, int64_t i1, int64_t i2, int64_t) { return std::make_pair(r.x->get(i0, i1, i2), 0.0); });
}

TEST(rope_modes_offsets_and_cache_write) {
    for (int k = 0; k < 30; k++) {
        const rope_case r(k);
        r.check_dst("rope", op_rope(ctx, r.p, r.x->t, r.pos->t, r.factors(), r.dst->t));
        check_rope_cache(r);
    }
}

// ---- products ----

const std::vector<tensor_type> WEIGHT_TYPES = { TYPE_F32,  TYPE_F16,  TYPE_BF16, TYPE_Q4_0,   TYPE_Q4_1,
                                                TYPE_Q5_0, TYPE_Q5_1, TYPE_Q8_0, TYPE_IQ4_NL, TYPE_Q2_K,
                                                TYPE_Q3_K, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K,   TYPE_MXFP4 };

// A weight and its decoded values: random bytes for types without an encoder, with harmless scales.
std::pair<tensor_ptr, tensor_ptr> make_weight(tensor_type type, const std::vector<int64_t> & ne, int64_t pad) {
    auto w = make(type, ne, pad), decoded = make(TYPE_F32, ne);
    if (type_block_size(type) == 1) {
        w->random(0.5);
    } else {
        auto source = make(TYPE_F32, ne);
        source->random(0.5);
        if (op_copy_supported(source->t, w->t)) {
            CHECK(op_copy(ctx, source->t, w->t) == cudaSuccess, "quantize");
        } else {
            // K-quants: halves (d, dmin) get small values, all other bits are free
            const size_t block   = static_cast<size_t>(type_block_nbytes(type));
            const size_t per_row = static_cast<size_t>(w->t.nb[1]) / block;
            for (size_t b = 0; b + block <= w->nbytes; b += block) {
                if (b / block % per_row >= per_row - static_cast<size_t>(pad)) {
                    continue; // padding stays NaN
                }
                for (size_t i = 0; i < block; i++) {
                    w->host[b + i] = static_cast<uint8_t>(random_source.bits());
                }
                const uint16_t            small  = to_f16(static_cast<float>(0.001 + 0.01 * random_source.unit()));
                const std::vector<size_t> places = type == TYPE_Q2_K    ? std::vector<size_t>{ 80, 82 }
                                                   : type == TYPE_Q3_K  ? std::vector<size_t>{ 108 }
                                                   : type == TYPE_Q6_K  ? std::vector<size_t>{ 208 }
                                                   : type == TYPE_MXFP4 ? std::vector<size_t>{}
                                                                        : std::vector<size_t>{ 0, 2 };
                for (const size_t p : places) {
                    memcpy(&w->host[b + p], &small, 2);
                }
                if (type == TYPE_MXFP4) {
                    w->host[b] = static_cast<uint8_t>(random_source.range(118, 130));
                }
            }
            w->upload();
        }
    }
    CHECK(op_copy(ctx, w->t, decoded->t) == cudaSuccess, "decode");
    decoded->download("decode");
    if (type_block_size(type) == 1) {
        w->download("weight");
    }
    return { std::move(w), std::move(decoded) };
}

// Returns whether cuBLAS may multiply few columns of one matrix of 16-bit weights, like more than 8 columns.
bool narrow_in_16_bits(tensor_type type, int64_t cols, int64_t rows, int64_t n) {
    return ctx.cublas && (type == TYPE_F16 || type == TYPE_BF16) && cols * rows >= 1 << 22 && n >= 3;
}

// Rounding of x and w before tensor cores.
double product_roundoff(tensor_type type, int64_t n, bool narrow = false) {
    return (n <= 8 && !narrow) || type == TYPE_F32 ? 0 : type == TYPE_F16 ? U_F16 : 2.01 * U_BF16;
}

// An element of w x and its bound; u: product_roundoff().
std::pair<double, double> product_at(const tensor_ptr & w, const tensor_ptr & x, int64_t row, int64_t col, int64_t w_i2,
                                     int64_t x_i2, double u) {
    const int64_t cols = w->t.ne[0];
    double        sum = 0, size = 0;
    for (int64_t i = 0; i < cols; i++) {
        const double product = w->get(i, row, w_i2) * x->get(i, col, x_i2);
        sum += product;
        size += std::fabs(product);
    }
    return { sum, size * (u + U32 * (4 + 2 * std::sqrt(static_cast<double>(cols)))) + (u > 0 ? 1e-6 : 0) };
}

TEST(products_of_every_type) {
    for (const tensor_type type : WEIGHT_TYPES) {
        for (int k = 0; k < 18; k++) {
            const bool    tall  = k >= 14; // two rows to a warp
            const int64_t block = type_block_size(type);
            const int64_t cols  = block > 1 ? block * pick({ 1, 2, 5 })
                                  : tall    ? 264
                                            : pick({ 1, 7, 8, 33, 64, 256, 1000, 2048 });
            const int64_t rows  = tall ? 128 * ctx.n_sm + 5 : pick({ 1, 3, 64, 130, 257, 512 }),
                          n     = tall ? std::max<int64_t>(1, (1 << (k - 14)) - pick({ 0, 1 }))
                                       : pick({ 1, 2, 3, 5, 8, 9, 33, 64, 130 });
            const int64_t n2 = n < 64 && !tall ? pick({ 1, 1, 2 }) : 1, ratio = tall ? 1 : pick({ 1, 3 });
            auto          pair = make_weight(type, { cols, rows, n2 }, block > 1 ? 0 : pick({ 0, 0, 1, 8 }));
            auto          x    = make(TYPE_F32, { cols, n, n2 * ratio },
                          cols % 4 == 0 ? pick({ 0, 4 })
                                      : block > 1   ? 0
                                                    : 1,
                                      random_source.range(0, 1) != 0),
                 y             = make(TYPE_F32, { rows, n, n2 * ratio });
            x->random();
            if (!op_mul_mat_supported(pair.first->t, x->t, y->t)) {
                CHECK(false, "mul_mat type %d refused", type);
                continue;
            }
            char * scratch = nullptr;
            cuda_ok(cudaMalloc(&scratch, op_mul_mat_scratch_nbytes(pair.first->t, x->t) + 256), "scratch");
            const double u = product_roundoff(type, n, n2 * ratio == 1 && narrow_in_16_bits(type, cols, rows, n));
            check("mul_mat type " + std::to_string(type) + " " + std::to_string(rows) + "x" + std::to_string(cols) +
                      " n " + std::to_string(n),
                  op_mul_mat(ctx, pair.first->t, x->t, y->t, scratch), *y,
                  [&](int64_t row, int64_t col, int64_t i2, int64_t) {
                      return product_at(pair.second, x, row, col, i2 / ratio, i2, u);
                  });
            cudaFree(scratch);
        }
    }
}

// 2 to 8 columns of matrices just below and above the sizes at which cuBLAS takes over.
TEST(few_columns_of_large_matrices) {
    for (const tensor_type type : { TYPE_F16, TYPE_BF16 }) {
        for (const auto & [cols, rows] :
             { std::pair<int64_t, int64_t>{ 2048, 2047 }, { 2048, 2048 }, { 4096, 4096 } }) {
            const int64_t n    = random_source.range(2, 8);
            auto          pair = make_weight(type, { cols, rows }, 0);
            auto          x = make(TYPE_F32, { cols, n }), y = make(TYPE_F32, { rows, n });
            x->random();
            char * scratch = nullptr;
            cuda_ok(cudaMalloc(&scratch, op_mul_mat_scratch_nbytes(pair.first->t, x->t) + 256), "scratch");
            const double u = product_roundoff(type, n, narrow_in_16_bits(type, cols, rows, n));
            check("mul_mat type " + std::to_string(type) + " " + std::to_string(rows) + "x" + std::to_string(cols) +
                      " n " + std::to_string(n),
                  op_mul_mat(ctx, pair.first->t, x->t, y->t, scratch), *y,
                  [&](int64_t row, int64_t col, int64_t, int64_t) {
                      return product_at(pair.second, x, row, col, 0, 0, u);
                  });
            cudaFree(scratch);
        }
    }
}

// Partial chunks of 256 weights, rows at every even address, the last rows of a tile, more chunks than warps; NaN after
// each row (in its padding).
TEST(quantized_columns_read_no_more_than_their_rows) {
    for (const tensor_type type : { TYPE_Q4_0, TYPE_Q5_0, TYPE_Q8_0, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K }) {
        for (int k = 0; k < 24; k++) {
            const int64_t block  = type_block_size(type),
                          blocks = block == 256 ? pick({ 1, 2, 3, 17, 43 }) : pick({ 1, 3, 8, 9, 129, 130, 344 });
            const int64_t cols = block * blocks, rows = pick({ 1, 15, 17, 100, 16 * ctx.n_sm + 3 }), n = 1 + k % 8;
            auto          pair = make_weight(type, { cols, rows }, pick({ 0, 1, 2 }));
            auto x = make(TYPE_F32, { cols, n }, pick({ 0, 4 })), y = make(TYPE_F32, { rows, n }, pick({ 0, 3 }));
            x->random();
            check("columns type " + std::to_string(type) + " " + std::to_string(rows) + "x" + std::to_string(cols) +
                      " n " + std::to_string(n),
                  op_mul_mat(ctx, pair.first->t, x->t, y->t, nullptr, nullptr, k % 3 != 0), *y,
                  [&](int64_t row, int64_t col, int64_t, int64_t) {
                      return product_at(pair.second, x, row, col, 0, 0, 0);
                  });
        }
    }
}

TEST(products_keep_nan_and_survive_infinities) {
    for (const tensor_type type : { TYPE_F16, TYPE_BF16, TYPE_F32, TYPE_Q8_0 }) {
        // float32 throughout; tensor cores: cuBLAS, or, from 9 columns on, the plugin's kernel if cuBLAS is missing
        for (const int64_t n : { 2, 3, 9, 70 }) {
            const int64_t cols = 512, rows = 300, with_nan = (n - 1) / 2, with_infinity = n - 1;
            auto          pair = make_weight(type, { cols, rows }, 0);
            auto          x = make(TYPE_F32, { cols, n }), y = make(TYPE_F32, { rows, n });
            x->random();
            x->set(NAN, 77, with_nan), x->set(-INFINITY, 300, with_infinity);
            x->upload();
            char * scratch = nullptr;
            cuda_ok(cudaMalloc(&scratch, op_mul_mat_scratch_nbytes(pair.first->t, x->t) + 256), "scratch");
            CHECK(op_mul_mat(ctx, pair.first->t, x->t, y->t, scratch) == cudaSuccess, "mul_mat");
            y->download("mul_mat of NaN");
            const bool saturates = type == TYPE_F16 && (n > 8 || narrow_in_16_bits(type, cols, rows, n));
            int64_t    bad       = 0;
            y->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
                const double v = y->get(i0, i1);
                bad += i1 == with_nan                      ? !std::isnan(v)
                       : i1 == with_infinity && !saturates ? std::isfinite(v)
                                                           : !std::isfinite(v);
            });
            CHECK(bad == 0, "mul_mat type %d, n %d: NaN missing or unexpected in %d elements", type,
                  static_cast<int>(n), static_cast<int>(bad));
            cudaFree(scratch);
        }
    }
}

// Rows and columns of any magnitude of BF16, even on GPUs whose tensor cores support only F16 (cc 7.5).
TEST(products_of_bf16_keep_its_range) {
    for (const int64_t n : { 9, 70 }) {
        for (const int64_t cols : { 77, 264, 520 }) {
            const int64_t rows = 300;
            auto          w = make(TYPE_BF16, { cols, rows }), x = make(TYPE_F32, { cols, n });
            auto          y     = make(TYPE_F32, { rows, n });
            const auto    power = [](int64_t i) { return std::exp2(static_cast<double>(i * 37 % 111 - 55)); };
            w->random(), x->random();
            w->each([&](int64_t i, int64_t row, int64_t, int64_t) { w->set(w->get(i, row) * power(row), i, row); });
            x->each([&](int64_t i, int64_t col, int64_t, int64_t) { x->set(x->get(i, col) * power(col), i, col); });
            w->upload(), x->upload();
            char * scratch = nullptr;
            cuda_ok(cudaMalloc(&scratch, op_mul_mat_scratch_nbytes(w->t, x->t) + 256), "scratch");
            check("mul_mat of any magnitude, " + std::to_string(cols) + " columns, n " + std::to_string(n),
                  op_mul_mat(ctx, w->t, x->t, y->t, scratch), *y, [&](int64_t row, int64_t col, int64_t, int64_t) {
                      double sum = 0, size = 0;
                      for (int64_t i = 0; i < cols; i++) {
                          sum += w->get(i, row) * x->get(i, col);
                          size += std::fabs(w->get(i, row) * x->get(i, col));
                      }
                      return std::make_pair(
                          sum, size * (2.01 * U_BF16 + U32 * (4 + 2 * std::sqrt(static_cast<double>(cols)))));
                  });
            cudaFree(scratch);
        }
    }
}

TEST(expert_products_with_strided_ids) {
    for (const tensor_type type : { TYPE_F16, TYPE_F32, TYPE_BF16, TYPE_Q8_0, TYPE_Q4_K, TYPE_MXFP4 }) {
        for (const int64_t tokens : { 1, 4, 9, 70 }) {
            const int64_t cols = 256, rows = pick({ 48, 200 }), experts = pick({ 4, 9 }), used = pick({ 1, 3 });
            const bool    shared = random_source.range(0, 1); // one x per token
            auto          pair   = make_weight(type, { cols, rows, experts }, 0);
            auto          x      = make(TYPE_F32, { cols, shared ? 1 : used, tokens }),
                 ids = make(TYPE_I32, { used, tokens }, experts - used), y = make(TYPE_F32, { rows, used, tokens });
            x->random();
            ids->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
                ids->set(static_cast<double>((random_source.range(0, experts - 1) + i0) % experts), i0, i1);
            });
            ids->upload();
            CHECK(op_mul_mat_id_supported(pair.first->t, x->t, ids->t, y->t), "mul_mat_id");
            char * scratch = nullptr;
            cuda_ok(cudaMalloc(&scratch, op_mul_mat_id_scratch_nbytes(pair.first->t, x->t, ids->t) + 256), "scratch");
            const double u = product_roundoff(type, tokens);
            check("mul_mat_id type " + std::to_string(type),
                  op_mul_mat_id(ctx, pair.first->t, x->t, ids->t, y->t, scratch), *y,
                  [&](int64_t row, int64_t slot, int64_t token, int64_t) {
                      double sum = 0, size = 0;
                      for (int64_t i = 0; i < cols; i++) {
                          const double product = pair.second->get(i, row, static_cast<int64_t>(ids->get(slot, token))) *
                                                 x->get(i, shared ? 0 : slot, token);
                          sum += product;
                          size += std::fabs(product);
                      }
                      return std::make_pair(sum, size * (u + U32 * (4 + 2 * std::sqrt(static_cast<double>(cols)))) +
                                                     (u > 0 ? 1e-6 : 0));
                  });
            cudaFree(scratch);
        }
    }
}

// Sylvester's matrix: element (i, j) is -1 to the power of the number of bits that are set in both i and j.
TEST(hadamard_is_the_product_with_its_matrix) {
    for (const int64_t n : { 64, 128, 256, 512 }) {
        for (const int64_t rows : { 1, 7, 32, 513 }) {
            auto x = make(TYPE_F32, { n, rows, 3 }, pick({ 0, 4, 64 }), random_source.range(0, 1) != 0),
                 y = make(TYPE_F32, { n, rows, 3 });
            x->random();
            CHECK(op_hadamard_supported(x->t, y->t), "hadamard refused");
            check("hadamard of " + std::to_string(n), op_hadamard(ctx, x->t, y->t), *y,
                  [&](int64_t i, int64_t i1, int64_t i2, int64_t) {
                      double sum = 0, size = 0;
                      for (int64_t j = 0; j < n; j++) {
                          const int shared = static_cast<int>(std::bitset<64>(static_cast<uint64_t>(i & j)).count());
                          sum += shared % 2 ? -x->get(j, i1, i2) : x->get(j, i1, i2);
                          size += std::fabs(x->get(j, i1, i2));
                      }
                      const double root = std::sqrt(static_cast<double>(n));
                      return std::pair<double, double>{ sum / root, 12 * U32 * size / root };
                  });
        }
    }
    auto odd = make(TYPE_F32, { 96, 2 });
    CHECK(!op_hadamard_supported(odd->t, odd->t), "a transform of 96 elements");
}

// q and k rotated, then q, k and v times a Hadamard matrix, with k and v in rows of quantized caches.
TEST(rotated_and_turned_rows_in_one_launch) {
    for (int k = 0; k < 48; k++) {
        const int64_t head_dim = pick({ 64, 128, 256, 512 }), n_kv = pick({ 1, 2, 8 }), n_v = pick({ 1, 3, 8 }),
                      v_size = std::min(head_dim, pick({ 64, 64, 512 })), tokens = pick({ 1, 2, 5, 70 }), rows = 128;
        const rope_case q(k, head_dim, pick({ 1, 5, 32 }), tokens);
        rope_case       key(k, head_dim, n_kv, tokens);
        key.pos->host = q.pos->host, key.factors_->host = q.factors_->host;
        const auto pick_type = [] { return CACHE_BLOCKS[static_cast<size_t>(random_source.range(0, 5))]; };
        auto       k_cache   = make(pick_type(), { head_dim * n_kv, rows }),
             v_cache = make(pick_type(), { head_dim * n_v, rows }), v = make(TYPE_F32, { head_dim, n_v, tokens }),
             ids = make(TYPE_I64, { tokens });
        v->random();
        const int64_t first = random_source.range(0, rows - tokens);
        for (int64_t i = 0; i < tokens; i++) {
            ids->set(static_cast<double>(first + tokens - 1 - i), i);
        }
        ids->upload();
        const auto *            id = reinterpret_cast<const int64_t *>(ids->t.data);
        const rope_cache_params c  = { q.x->t, q.dst->t, key.x->t, k_cache->t, v->t, v_cache->t, id, id };
        CHECK(op_rope_hadamard_cache_supported(q.p, q.pos->t, q.factors(), c, v_size), "rope_hadamard_cache refused");
        cuda_ok(cudaMemsetAsync(q.dst->t.data, POISON, q.dst->nbytes, ctx.stream), "poison");
        const cudaError_t error = op_rope_hadamard_cache(ctx, q.p, q.pos->t, q.factors(), c, v_size);

        // each n elements of a head times the matrix, and the bound of all elements
        const auto turned = [&](int64_t n, const std::function<std::pair<double, double>(int64_t)> & element) {
            std::vector<double> x;
            double              size = 0, error_of_x = 0;
            for (int64_t i = 0; i < head_dim; i++) {
                const auto [value, bound] = element(i);
                x.push_back(value), size += std::fabs(value), error_of_x += bound;
            }
            for (size_t bit = 1; bit < static_cast<size_t>(n); bit *= 2) {
                for (size_t i = 0; i < x.size(); i++) {
                    if (!(i & bit)) {
                        const double a = x[i], b = x[i | bit];
                        x[i] = a + b, x[i | bit] = a - b;
                    }
                }
            }
            const double root = std::sqrt(static_cast<double>(n));
            for (double & value : x) {
                value /= root;
            }
            return std::make_pair(x, (12 * U32 * size + error_of_x) / root);
        };
        int64_t                                row_of_x = -1;
        std::pair<std::vector<double>, double> x;
        check("rope_hadamard_cache q", error, *q.dst, [&](int64_t i, int64_t h, int64_t t, int64_t) {
            if (row_of_x != t * q.heads + h) {
                row_of_x = t * q.heads + h;
                x        = turned(head_dim, [&](int64_t e) { return q.rotated(e, h, t); });
            }
            return std::make_pair(x.first[static_cast<size_t>(i)], x.second);
        });
        const auto row_of = [&](int64_t row, int64_t heads, int64_t n,
                                auto && element) { // the expected contents of a row of a cache
            const int64_t                          t = first + tokens - 1 - row;
            std::pair<std::vector<double>, double> all;
            for (int64_t h = 0; t >= 0 && t < tokens && h < heads; h++) {
                const auto [head, bound] = turned(n, [&](int64_t e) { return element(e, h, t); });
                all.first.insert(all.first.end(), head.begin(), head.end());
                all.second = std::max(all.second, bound);
            }
            return all;
        };
        check_written_rows("rope_hadamard_cache k", *k_cache, [&](int64_t row) {
            return row_of(row, n_kv, head_dim, [&](int64_t e, int64_t h, int64_t t) { return key.rotated(e, h, t); });
        });
        check_written_rows("rope_hadamard_cache v", *v_cache, [&](int64_t row) {
            return row_of(row, n_v, v_size,
                          [&](int64_t e, int64_t h, int64_t t) { return std::make_pair(v->get(e, h, t), 0.0); });
        });
        rope_cache_params other = c;
        other.k_cache.type      = TYPE_F16;
        CHECK(!op_rope_hadamard_cache_supported(q.p, q.pos->t, q.factors(), other, v_size), "an F16 cache");
    }
}

// Rows of x by expert, in the order of entries, and results back to their places; ids without an expert are skipped.
TEST(rows_of_an_expert_are_side_by_side) {
    for (int k = 0; k < 24; k++) {
        const int64_t width = pick({ 7, 64, 1000 }), experts = 5, used = pick({ 1, 3 }), tokens = pick({ 2, 33, 70 }),
                      n = used * tokens, ld = op_expert_rows_ld(width), max_f32 = pick({ 0, 8, 1000 });
        const bool        shared = k % 2; // one x per token
        const tensor_type type   = k % 3 ? TYPE_F16 : TYPE_BF16;
        auto              x      = make(TYPE_F32, { width, shared ? 1 : used, tokens }, pick({ 0, 3 })),
             ids = make(TYPE_I32, { used, tokens }, 2), rows = make(TYPE_F32, { ld, n }),
             results = make(TYPE_F32, { width, n }), dst = make(TYPE_F32, { width, used, tokens }, pick({ 0, 5 }));
        x->random(k % 5 ? 1 : 1e5), results->random();
        std::vector<std::vector<int64_t>> of(static_cast<size_t>(experts)); // entries
        for (int64_t e = 0; e < n; e++) {
            const int64_t id =
                random_source.range(0, 9) ? random_source.range(0, experts - 1) : pick({ -1, experts, 1 << 20 });
            ids->set(static_cast<double>(id), e % used, e / used);
            if (id >= 0 && id < experts) {
                of[static_cast<size_t>(id)].push_back(e);
            }
        }
        ids->upload();
        op_tensor w  = {};
        w.ne[2]      = experts;
        char * lists = nullptr;
        cuda_ok(cudaMalloc(&lists, op_mul_mat_id_scratch_nbytes(w, x->t, ids->t)), "lists");
        CHECK(op_mul_mat_id_sort(ctx, experts, ids->t, lists) == cudaSuccess &&
                  op_gather_expert_rows(ctx, type, x->t, ids->t, experts, lists, max_f32, rows->t.data) ==
                      cudaSuccess &&
                  op_scatter_expert_rows(ctx, results->t.data, ids->t, experts, lists, dst->t) == cudaSuccess,
              "rows by expert");
        rows->download("rows by expert"), dst->download("results by expert");
        int64_t           j = 0, bad = 0;
        std::vector<bool> written(static_cast<size_t>(n));
        for (const auto & entries : of) {
            const bool      f32   = static_cast<int64_t>(entries.size()) <= max_f32;
            const uint8_t * begin = rows->host.data() + j * ld * 4;
            for (size_t r = 0; r < entries.size(); r++, j++) {
                const int64_t e = entries[r], token = e / used, slot = e % used;
                written[static_cast<size_t>(e)] = true;
                for (int64_t i = 0; i < width; i++) {
                    const double    v    = x->get(i, shared ? 0 : slot, token);
                    const uint8_t * at   = begin + (static_cast<int64_t>(r) * ld + i) * (f32 ? 4 : 2);
                    float           got  = 0;
                    uint16_t        half = 0;
                    memcpy(f32 ? static_cast<void *>(&got) : &half, at, f32 ? 4 : 2);
                    if (!f32) {
                        const uint32_t bits = static_cast<uint32_t>(half) << 16;
                        memcpy(&got, &bits, 4);
                        got = type == TYPE_F16 ? static_cast<float>(from_f16(half)) : got;
                    }
                    const double most  = type == TYPE_F16 ? std::max(-65504.0, std::min(65504.0, v)) : v;
                    const double error = f32 ? 0 : std::fabs(most) * (type == TYPE_F16 ? U_F16 : 0x1p-8) + 0x1p-25;
                    bad += !(std::fabs(static_cast<double>(got) - (f32 ? v : most)) <= error);
                    bad += dst->get(i, slot, token) != results->get(i, j);
                }
            }
        }
        CHECK(bad == 0, "rows by expert: %d elements differ, width %d, %d tokens", static_cast<int>(bad),
              static_cast<int>(width), static_cast<int>(tokens));
        for (int64_t e = 0; e < n; e++) {
            const uint8_t * row = dst->host.data() + dst->at(0, e % used, e / used, 0);
            CHECK(written[static_cast<size_t>(e)] ||
                      std::all_of(row, row + width * 4, [](uint8_t b) { return b == POISON; }),
                  "a result without an expert was written");
        }
        cudaFree(lists);
    }
}

// ---- attention ----

constexpr tensor_type QUANTIZED_CACHES[] = { TYPE_Q8_0, TYPE_Q4_0, TYPE_Q5_0, TYPE_IQ4_NL, TYPE_Q4_1, TYPE_Q5_1 };

struct attention_case {
    tensor_type                       type;
    int64_t                           head_dim, kv_heads, group, heads, tokens, streams, n_kv;
    int64_t                           window = 0; // positions that the mask of a deep cache shows; 0: see make_mask
    tensor_ptr                        q, mask, sinks, dst;
    std::pair<tensor_ptr, tensor_ptr> keys, values;
    attention_params                  p = {};

    explicit attention_case(int k) : type(k % 2 ? TYPE_F16 : QUANTIZED_CACHES[k / 2 % std::size(QUANTIZED_CACHES)]) {
        head_dim = type == TYPE_F16 ? pick({ 40, 64, 80, 96, 128, 256 }) : pick({ 64, 64, 96, 128, 128, 256 });
        kv_heads = pick({ 1, 2, 3 }), group = pick({ 1, 2, 3, 4, 7, 8 }), heads = kv_heads * group;
        tokens = pick({ 1, 1, 2, 8, 9, 65, 100 }), streams = tokens < 9 ? pick({ 1, 3 }) : 1;
        n_kv = tokens > 9 ? pick({ 32, 70, 256 }) : pick({ 1, 32, 70, 256, 1000, 1100, random_source.range(1, 600) });
        make_operands(k);
    }
    // a deep cache
    attention_case(int k, tensor_type of, int64_t depth, int64_t visible)
        : type(of),
          head_dim(k % 2 ? 64 : 128),
          kv_heads(k % 4 ? 1 : 2),
          group(pick({ 1, 4 })),
          heads(kv_heads * group),
          tokens(k % 3 == 2 ? 3 : 1),
          streams(1),
          n_kv(depth),
          window(visible > 0 ? std::max(visible, tokens) : 0) {
        make_operands(k);
    }
    // many tokens, with all earlier positions visible, or only the last `visible` positions and the new ones
    attention_case(int k, tensor_type of, int64_t dim, int64_t n_tokens, int64_t depth, int64_t visible)
        : type(of),
          head_dim(dim),
          kv_heads(1),
          group(k % 3 + 1),
          heads(group),
          tokens(n_tokens),
          streams(k % 4 == 1 ? 2 : 1),
          n_kv(depth),
          window(visible > 0 ? std::max(visible, tokens) : 0) {
        make_operands(k);
    }
    // many sequences, each with a cache of its own
    attention_case(int k, int64_t dim, int64_t n_kv_heads, int64_t in_group, int64_t n_tokens, int64_t n_streams,
                   int64_t depth, int64_t visible)
        : type(TYPE_F16),
          head_dim(dim),
          kv_heads(n_kv_heads),
          group(in_group),
          heads(kv_heads * group),
          tokens(n_tokens),
          streams(n_streams),
          n_kv(depth),
          window(visible > 0 ? std::max(visible, tokens) : 0) {
        make_operands(k);
    }
    void make_operands(int k) {
        q      = make(TYPE_F32, { head_dim, tokens, heads, streams }, 0, true);
        keys   = make_weight(type, { head_dim, n_kv, kv_heads, streams }, 0);
        values = make_weight(type, { head_dim, n_kv, kv_heads, streams }, 0);
        mask = make(TYPE_F16, { n_kv, tokens, k % 5 == 4 ? heads : 1, streams }), sinks = make(TYPE_F32, { heads });
        dst = make(TYPE_F32, { head_dim, heads, tokens, streams });
        q->random(), sinks->random();
        make_mask(k);
        p.q = q->t, p.k = keys.first->t, p.v = values.first->t, p.dst = dst->t;
        p.mask = k % 6 ? &mask->t : nullptr, p.sinks = k % 7 == 0 ? &sinks->t : nullptr;
        p.scale = 1 / std::sqrt(static_cast<float>(head_dim)), p.softcap = k % 8 == 3 ? 20.0f : 0.0f;
        p.max_bias = k % 9 == 5 ? 8.0f : 0.0f;
    }
    // some positions are hidden, including whole tiles, as in a causal mask
    void make_mask(int k) {
        const int64_t hidden_from = k % 4 == 0 ? n_kv : std::max<int64_t>(1, n_kv / 2);
        mask->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            const bool   hidden = window > 0 ? i0 < n_kv - window || i0 >= n_kv - tokens + 1 + i1
                                             : i0 && (i0 >= hidden_from + i1 || random_source.range(0, 9) == 0);
            const double bias   = k % 9 == 5 ? -static_cast<double>(i0 % 32) : 0;
            mask->set(hidden ? -INFINITY : bias, i0, i1, i2, i3);
        });
        mask->upload();
    }
    double slope(double h) const { // ALiBi's
        const double n_log2 = std::exp2(std::floor(std::log2(static_cast<double>(heads))));
        return p.max_bias == 0 ? 1
               : h < n_log2    ? std::exp2(-8 / n_log2 * (h + 1))
                               : std::exp2(-4 / n_log2 * (2 * (h - n_log2) + 1));
    }
    // Weights of the positions for head h of token t. *spread: the largest sum of magnitudes of a score
    std::vector<double> weights(int64_t t, int64_t h, int64_t s, double * spread) const {
        std::vector<double> weight(static_cast<size_t>(n_kv));
        double              max = p.sinks ? sinks->get(h) : -INFINITY, sum = 0;
        for (int64_t i = 0; i < n_kv; i++) {
            double dot = 0, size = 0;
            for (int64_t e = 0; e < head_dim; e++) {
                dot += q->get(e, t, h, s) * keys.second->get(e, i, h / group, s);
                size += std::fabs(q->get(e, t, h, s) * keys.second->get(e, i, h / group, s));
            }
            dot *= static_cast<double>(p.scale);
            *spread = std::max(*spread, size * static_cast<double>(p.scale));
            if (p.softcap != 0) {
                dot = static_cast<double>(p.softcap) * std::tanh(dot / static_cast<double>(p.softcap));
            }
            const double score =
                dot + (p.mask ? slope(static_cast<double>(h)) * mask->get(i, t, h % mask->t.ne[2], s) : 0);
            max                            = std::max(max, score);
            weight[static_cast<size_t>(i)] = score;
        }
        for (double & x : weight) {
            x = std::exp(x - max);
            sum += x;
        }
        sum += p.sinks ? std::exp(sinks->get(h) - max) : 0;
        for (double & x : weight) {
            x /= sum;
        }
        return weight;
    }
    // largest error of head h of token t, in units of its bound
    double worst(int64_t t, int64_t h, int64_t s) const {
        // tiles: q, K and weights are F16, so a score of size s moves by s * 2^-10, and its weight by as much
        const bool                tiles  = tokens >= 9 || (group == 1 && tokens >= 3 && n_kv * (tokens - 2) >= 4096);
        const double              u      = tiles ? 4 * U_F16 : 0x1p-20;
        double                    spread = 0, result = 0;
        const std::vector<double> weight = weights(t, h, s, &spread);
        for (int64_t e = 0; e < head_dim; e++) {
            double z = 0, size = 0;
            for (int64_t i = 0; i < n_kv; i++) {
                z += weight[static_cast<size_t>(i)] * values.second->get(e, i, h / group, s);
                size += weight[static_cast<size_t>(i)] * std::fabs(values.second->get(e, i, h / group, s));
            }
            const double error = std::fabs(dst->get(e, h, t, s) - z);
            if (!(error >= 0)) {
                return INFINITY;
            }
            result = std::max(result, error / (u * (size * (2 + 2 * spread)) + 1e-7));
        }
        return result;
    }
};

void check_attention(const attention_case & a) {
    char * scratch = nullptr;
    cuda_ok(cudaMalloc(&scratch, op_attention_scratch_nbytes(a.p) + 256), "scratch");
    const cudaError_t error = op_attention(ctx, a.p, scratch);
    CHECK(error == cudaSuccess, "attention: %s", cudaGetErrorString(error));
    a.dst->download("attention");
    double worst = 0;
    for (int64_t s = 0; s < a.streams; s++) {
        for (int64_t h = 0; h < a.heads; h++) {
            for (int64_t t = 0; t < a.tokens; t++) {
                worst = std::max(worst, a.worst(t, h, s));
            }
        }
    }
    CHECK(worst <= 1, "attention head %d kv %d group %d tokens %d: %.2f times the bound", static_cast<int>(a.head_dim),
          static_cast<int>(a.n_kv), static_cast<int>(a.group), static_cast<int>(a.tokens), worst);
    const auto first = a.dst->host; // the same bits every time, in any order of the blocks
    for (int repeat = 0; repeat < 5; repeat++) {
        CHECK(op_attention(ctx, a.p, scratch) == cudaSuccess, "attention");
        a.dst->download("attention");
        CHECK(a.dst->host == first, "attention is not deterministic");
    }
    cudaFree(scratch);
}

TEST(attention_masks_groups_and_splits) {
    for (int k = 0; k < 120; k++) {
        const attention_case a(k);
        const bool           supported = op_attention_supported(a.p);
        CHECK(supported, "attention refused: head %d", static_cast<int>(a.head_dim));
        if (supported) {
            check_attention(a);
        }
    }
}

// Several rounds of positions per block, splits of unequal lengths, and windows that hide whole rounds and splits.
TEST(attention_over_deep_caches) {
    int k = 0;
    for (const int64_t depth : { 1537, 5003, 16384, 17000 }) {
        for (const int64_t window : { 0, 1, 300, 4099 }) {
            if (window >= depth) {
                continue;
            }
            check_attention(attention_case(k++, TYPE_F16, depth, window));
            for (const tensor_type type : QUANTIZED_CACHES) {
                if (depth <= 5003) { // float64 is slow
                    check_attention(attention_case(k++, type, depth, window));
                }
            }
        }
    }
}

// Tiles that are hidden, visible to all tokens, or mixed; tiles and splits that end early; every head size with a
// kernel for tiles, and both numbers of groups.
TEST(attention_of_many_tokens) {
    int k = 0;
    for (const int64_t head_dim : { 64, 80, 96, 112, 128, 256 }) {
        for (const auto & [tokens, n_kv] : std::vector<std::pair<int64_t, int64_t>>{ { 9, 64 },
                                                                                     { 16, 4098 },
                                                                                     { 33, 2304 },
                                                                                     { 64, 1000 },
                                                                                     { 65, 66 },
                                                                                     { 128, 256 },
                                                                                     { 130, 513 },
                                                                                     { 200, 456 } }) {
            for (const int64_t visible : { int64_t(0), n_kv, n_kv / 3 }) {
                const tensor_type type =
                    k % 3 || head_dim % 32 ? TYPE_F16 : QUANTIZED_CACHES[k / 3 % std::size(QUANTIZED_CACHES)];
                check_attention(attention_case(k++, type, head_dim, tokens, n_kv, visible));
            }
        }
    }
    const int all = ctx.shared_nbytes;
    for (const int nbytes : { 64 << 10, 99 << 10 }) { // of compute capabilities 7.5, and 8.6, 8.9 and 12.0
        ctx.shared_nbytes = std::min(all, nbytes);
        for (const int64_t head_dim : { 64, 96, 128, 256 }) {
            check_attention(attention_case(k++, TYPE_F16, head_dim, 70, 320, 320));
        }
    }
    ctx.shared_nbytes = all;
}

// Small blocks: heads that share rows of K and V, chunks of heads, short and deep caches, splits, and hidden rounds.
TEST(attention_of_many_sequences) {
    int k = 0;
    for (const int64_t head_dim : { 64, 128 }) {
        for (const int64_t visible : { 0, 40 }) {
            check_attention(attention_case(k++, head_dim, 32, 1, 1, 8, 256, visible));
            check_attention(attention_case(k++, head_dim, 30, 1, 1, 9, 250, visible));
            check_attention(attention_case(k++, head_dim, 8, 4, 1, 33, 290, visible));
            check_attention(attention_case(k++, head_dim, 8, 7, 2, 9, 77, visible));
            check_attention(attention_case(k++, head_dim, 8, 8, 2, 5, 1100, visible));
            check_attention(attention_case(k++, head_dim, 32, 2, 1, 8, 1300, visible));
        }
    }
}

// Rows that the mask hides from a token may contain anything, even NaN, and must not be multiplied, not even by 0. A
// mask may also differ between heads.
TEST(attention_does_not_read_hidden_rows) {
    for (int k = 0; k < 60; k++) {
        const tensor_type type     = k < 36 ? TYPE_F16 : QUANTIZED_CACHES[k / 2 % std::size(QUANTIZED_CACHES)];
        const int64_t     head_dim = k % 2 ? 64 : pick({ 128, 128, 96, 256 }), kv_heads = 2,
                      group = pick({ 1, 2, 3, 4, 8 }), heads = kv_heads * group, tokens = pick({ 1, 3 }),
                      n_kv = k < 6 ? 256 : random_source.range(2, 1400);
        auto q             = make(TYPE_F32, { head_dim, tokens, heads }, 0, true),
             keys          = make_weight(type, { head_dim, n_kv, kv_heads }, 0).first,
             values        = make_weight(type, { head_dim, n_kv, kv_heads }, 0).first;
        auto mask          = make(TYPE_F16, { n_kv, tokens, k % 3 ? 1 : heads }),
             dst           = make(TYPE_F32, { head_dim, heads, tokens });
        q->random();
        keys->download("keys"), values->download("values");
        const int64_t     from = random_source.range(1, n_kv - 1);
        std::vector<bool> hidden(static_cast<size_t>(n_kv)); // from all tokens
        for (int64_t i = 1; i < n_kv; i++) {
            hidden[static_cast<size_t>(i)] = i >= from || random_source.range(0, 3) == 0;
        }
        mask->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            mask->set(hidden[static_cast<size_t>(i0)] || (i0 && random_source.range(0, 3) == 0) ? -INFINITY : 0, i0, i1,
                      i2, i3);
        });
        mask->upload();
        attention_params p = {};
        p.q = q->t, p.k = keys->t, p.v = values->t, p.dst = dst->t, p.mask = &mask->t,
        p.scale        = 1 / std::sqrt(static_cast<float>(head_dim));
        char * scratch = nullptr;
        cuda_ok(cudaMalloc(&scratch, op_attention_scratch_nbytes(p) + 256), "scratch");
        std::vector<uint8_t> first;
        for (const uint16_t garbage : { 0, 0xffff, 0x7c00 }) { // as F16 numbers and scales: 0, NaN, infinity
            for (auto * t : { keys.get(), values.get() }) {
                for (size_t i = 0; i < t->nbytes; i += 2) {
                    if (hidden[i / static_cast<size_t>(t->t.nb[1]) % static_cast<size_t>(n_kv)]) {
                        memcpy(&t->host[i], &garbage, 2);
                    }
                }
                t->upload();
            }
            CHECK(op_attention(ctx, p, scratch) == cudaSuccess, "attention");
            dst->download("attention over hidden rows");
            first = first.empty() ? dst->host : first;
            CHECK(dst->host == first, "attention reads hidden rows: head %d kv %d group %d", static_cast<int>(head_dim),
                  static_cast<int>(n_kv), static_cast<int>(group));
        }
        dst->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t) {
            CHECK(std::isfinite(dst->get(i0, i1, i2)), "attention over hidden rows is not finite");
        });
        cudaFree(scratch);
    }
}

// One token with a new key and value, and a cache.
struct new_row_case {
    int         k;
    bool        each_warp, many; // the new row belongs to each warp in turn; more heads than clusters fit
    bool        deep;            // several rounds of positions per block
    int64_t     head_dim, kv_heads, group, heads, rows, n_kv, width, row;
    rope_params r = {};
    tensor_ptr  q, key, value, q_dst, pos, ids, factors_, mask, sinks;

    explicit new_row_case(int number)
        : k(number), each_warp(k < 32), many(k % 20 > 17), deep(k >= 80), rows(deep ? 17000 : 1100) {
        head_dim = each_warp ? (k % 2 ? 64 : 128) : pick({ 64, 80, 96, 128, 256 });
        kv_heads = many ? 17 : pick({ 1, 2, 8 }), group = many ? 4 : pick({ 1, 2, 3, 4, 7, 8 });
        heads = kv_heads * group, width = head_dim * kv_heads;
        n_kv = each_warp ? pick({ 256, 257, 600 }) : pick({ 32, 70, 256, 1100, random_source.range(1, 600) });
        if (deep) {
            head_dim = k % 2 ? 64 : 128, kv_heads = 1, group = pick({ 1, 4 }), heads = group, width = head_dim;
            n_kv = pick({ 2560, 5003, 16384, 17000 });
        }
        row      = each_warp ? k / 2 * 16 + random_source.range(0, 15) : random_source.range(0, n_kv - 1);
        r.n_dims = static_cast<int>(head_dim), r.mode = k % 2 ? 2 : 0, r.n_ctx_orig = 4096, r.freq_base = 10000,
        r.freq_scale = 1, r.attn_factor = 1, r.beta_fast = 32, r.beta_slow = 1;
        q = make(TYPE_F32, { head_dim, heads, 1 }, k % 3 ? 0 : 8), key = make(TYPE_F32, { head_dim, kv_heads, 1 });
        value = make(TYPE_F32, { width, 1 }), q_dst = make(TYPE_F32, { head_dim, heads, 1 });
        pos = make(TYPE_I32, { 1 }), ids = make(TYPE_I64, { 1 }), factors_ = make(TYPE_F32, { head_dim / 2 });
        mask = make(TYPE_F16, { n_kv, 1 }), sinks = make(TYPE_F32, { heads });
        q->random(), key->random(), value->random(), sinks->random();
        factors_->each([&](int64_t i0, int64_t, int64_t, int64_t) { factors_->set(1 + random_source.unit(), i0); });
        factors_->upload();
        pos->set(static_cast<double>(random_source.range(0, 2000)), 0), pos->upload();
        ids->set(static_cast<double>(row), 0), ids->upload();
        mask->each([&](int64_t i0, int64_t, int64_t, int64_t) {
            mask->set(i0 != row && (i0 > row || random_source.range(0, 5) == 0) ? -INFINITY : 0, i0);
        });
        mask->upload();
    }
    const op_tensor * factors() const { return k % 4 == 1 ? &factors_->t : nullptr; }

    op_tensor heads_of(const device_tensor & cache) const {
        op_tensor t = cache.t;
        t.ne[0] = head_dim, t.ne[1] = n_kv, t.ne[2] = kv_heads, t.ne[3] = 1;
        t.nb[2] = head_dim * 2, t.nb[3] = t.nb[1] * rows;
        return t;
    }
    rope_cache_params cache_params(const device_tensor & k_cache, const device_tensor & v_cache) const {
        const auto * id = reinterpret_cast<const int64_t *>(ids->t.data);
        return { q->t, q_dst->t, key->t, k_cache.t, value->t, v_cache.t, id, id };
    }
    attention_params attention(const device_tensor & k_cache, const device_tensor & v_cache,
                               const device_tensor & out) const {
        attention_params p = {};
        p.q                = q_dst->t;
        std::swap(p.q.ne[1], p.q.ne[2]), std::swap(p.q.nb[1], p.q.nb[2]);
        p.k = heads_of(k_cache), p.v = heads_of(v_cache), p.dst = out.t;
        p.mask = &mask->t, p.sinks = k % 7 == 0 ? &sinks->t : nullptr;
        p.scale = 1 / std::sqrt(static_cast<float>(head_dim)), p.softcap = k % 8 == 3 ? 20.0f : 0.0f;
        return p;
    }
};

// Caches and results of two ways to compute the same operations.
struct two_caches {
    tensor_ptr k_cache, v_cache, k_cache2, v_cache2, want, got;
    explicit two_caches(const new_row_case & c)
        : k_cache(make(TYPE_F16, { c.width, c.rows })),
          v_cache(make(TYPE_F16, { c.width, c.rows })),
          k_cache2(make(TYPE_F16, { c.width, c.rows })),
          v_cache2(make(TYPE_F16, { c.width, c.rows })),
          want(make(TYPE_F32, { c.head_dim, c.heads, 1 })),
          got(make(TYPE_F32, { c.head_dim, c.heads, 1 })) {
        k_cache->random(), v_cache->random();
        k_cache2->host = k_cache->host, v_cache2->host = v_cache->host;
        k_cache2->upload(), v_cache2->upload();
    }
    void check_equal(const new_row_case & c) const {
        want->download("rope, attention"), got->download("rope and attention");
        k_cache->download("k"), k_cache2->download("k2"), v_cache->download("v"), v_cache2->download("v2");
        CHECK(v_cache->host == v_cache2->host, "rope and attention: the values differ, head %d row %d",
              static_cast<int>(c.head_dim), static_cast<int>(c.row));
        bool   same_keys = true;
        double worst     = 0;
        // the new row: a different order of the same operations may change the last bit
        k_cache->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
            const double key = k_cache->get(i0, i1), difference = std::fabs(key - k_cache2->get(i0, i1));
            same_keys = same_keys && difference <= (i1 == c.row ? 2 * U_F16 * (std::fabs(key) + 0x1p-14) : 0);
        });
        CHECK(same_keys, "rope and attention: the keys differ, head %d row %d", static_cast<int>(c.head_dim),
              static_cast<int>(c.row));
        want->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
            const double difference = std::fabs(got->get(i0, i1) - want->get(i0, i1));
            worst                   = difference >= 0 ? std::max(worst, difference) : INFINITY;
        });
        CHECK(worst <= 2e-3, "rope and attention: head %d kv %d group %d row %d: off by %.3g",
              static_cast<int>(c.head_dim), static_cast<int>(c.n_kv), static_cast<int>(c.group),
              static_cast<int>(c.row), worst);
    }
};

// One token: compared with op_rope_cache followed by op_attention, which other tests check.
TEST(rope_and_attention_in_one_launch) {
    for (int k = 0; k < 96; k++) {
        const new_row_case      c(k);
        const two_caches        m(c);
        const rope_cache_params first = c.cache_params(*m.k_cache, *m.v_cache);
        const rope_cache_params fused = c.cache_params(*m.k_cache2, *m.v_cache2);
        const attention_params  a     = c.attention(*m.k_cache, *m.v_cache, *m.want);
        const attention_params  a2    = c.attention(*m.k_cache2, *m.v_cache2, *m.got);
        if (!op_rope_attention_supported(c.r, c.pos->t, c.factors(), fused, a2)) {
            CHECK(false, "rope and attention refused: head %d", static_cast<int>(c.head_dim));
            continue;
        }
        char * scratch = nullptr;
        cuda_ok(cudaMalloc(&scratch, op_attention_scratch_nbytes(a) + 256), "scratch");
        CHECK(op_rope_attention(ctx, c.r, c.pos->t, c.factors(), fused, a2, scratch) == cudaSuccess,
              "rope and attention");
        CHECK(op_rope_cache(ctx, c.r, c.pos->t, c.factors(), first) == cudaSuccess &&
                  op_attention(ctx, a, scratch) == cudaSuccess,
              "rope, attention");
        m.check_equal(c);
        cudaFree(scratch);
    }
}

// k and v of one token, by each kernel that writes them.
TEST(row_numbers_of_new_keys_stay_inside_the_cache) {
    for (const int k : { 0, 1, 40, 43, 44, 85, 90 }) {
        for (const int64_t id :
             { int64_t(-1), int64_t(INT32_MIN), int64_t(1) << 40, int64_t(INT64_MIN), int64_t(20000) }) {
            new_row_case     c(k);
            const two_caches m(c);
            memcpy(c.ids->host.data(), &id, sizeof id);
            c.ids->upload();
            c.row                           = nearest_row(id, c.rows);
            const rope_cache_params one     = c.cache_params(*m.k_cache, *m.v_cache);
            const rope_cache_params both    = c.cache_params(*m.k_cache2, *m.v_cache2);
            const attention_params  a       = c.attention(*m.k_cache, *m.v_cache, *m.want);
            const attention_params  a2      = c.attention(*m.k_cache2, *m.v_cache2, *m.got);
            char *                  scratch = nullptr;
            cuda_ok(cudaMalloc(&scratch, op_attention_scratch_nbytes(a) + 256), "scratch");
            CHECK(op_rope_attention(ctx, c.r, c.pos->t, c.factors(), both, a2, scratch) == cudaSuccess &&
                      op_rope_cache(ctx, c.r, c.pos->t, c.factors(), one) == cudaSuccess &&
                      op_attention(ctx, a, scratch) == cudaSuccess,
                  "rope and attention, any row number");
            if (c.row < c.n_kv) { // attention reads it
                m.check_equal(c);
            } else {
                m.k_cache->download("k"), m.v_cache->download("v");
                m.k_cache2->download("k2"), m.v_cache2->download("v2");
            }
            cudaFree(scratch);
        }
    }
}

// ---- hyper-connections ----

TEST(hyper_connections_of_streams) {
    for (int k = 0; k < 24; k++) {
        const int64_t width = pick({ 1, 33, 1030 }), streams = pick({ 1, 4, 5 }), tokens = pick({ 1, 3, 40 });
        const bool    gated = k % 2, has_comb = k % 3;
        auto x = make(TYPE_F32, { width, streams, tokens }, pick({ 0, 3 })), post = make(TYPE_F32, { streams, tokens }),
             weights = gated ? make(TYPE_F32, { width, streams, tokens }) : make(TYPE_F32, { streams, tokens }),
             one     = make(TYPE_F32, { width, tokens }, pick({ 0, 1 })),
             comb = make(TYPE_F32, { streams, streams, tokens }), mixed = make(TYPE_F32, { width, tokens }),
             dst = make(TYPE_F32, { width, streams, tokens });
        x->random(), weights->random(), post->random(), one->random(), comb->random();
        CHECK(op_hc_pre_supported(gated, x->t, weights->t, mixed->t), "hc_pre");
        check("hc_pre", op_hc_pre(ctx, gated, 0.5f, x->t, weights->t, mixed->t), *mixed,
              [&](int64_t i, int64_t t, int64_t, int64_t) {
                  double sum = 0, size = 0;
                  for (int64_t h = 0; h < streams; h++) {
                      const double w    = gated ? 1 / (1 + std::exp(-weights->get(i, h, t))) : weights->get(h, t);
                      const double term = 0.5 * x->get(i, h, t) * w;
                      sum += term, size += std::fabs(term) * (gated ? 1 + std::fabs(weights->get(i, h, t)) : 1);
                  }
                  return std::make_pair(sum, 16 * U32 * size);
              });
        const op_tensor * matrix = has_comb ? &comb->t : nullptr;
        CHECK(op_hc_post_supported(one->t, x->t, post->t, matrix, dst->t), "hc_post");
        check("hc_post", op_hc_post(ctx, one->t, x->t, post->t, matrix, dst->t), *dst,
              [&](int64_t i, int64_t h, int64_t t, int64_t) {
                  double sum = one->get(i, t) * post->get(h, t), size = std::fabs(sum);
                  for (int64_t from = 0; from < streams; from++) {
                      const double term = x->get(i, from, t) * (has_comb ? comb->get(h, from, t) : from == h);
                      sum += term, size += std::fabs(term);
                  }
                  return std::make_pair(sum, 16 * U32 * size);
              });
    }
    CHECK(!op_hc_pre_supported(true, make(TYPE_F32, { 8, 4, 2 })->t, make(TYPE_F32, { 4, 2 })->t,
                               make(TYPE_F32, { 8, 2 })->t),
          "hc_pre: gates of another shape");
}

TEST(matrices_of_hyper_connections_are_normalized) {
    constexpr int N = 4;
    for (const int64_t tokens : { 1, 3, 300 }) {
        const int n_iter = static_cast<int>(pick({ 1, 2, 20 }));
        auto mixes = make(TYPE_F32, { (2 + N) * N, tokens }, pick({ 0, 2 })), base = make(TYPE_F32, { (2 + N) * N }),
             scale = make(TYPE_F32, { 3 }), dst = make(TYPE_F32, { N, N, tokens });
        mixes->random(), base->random(), scale->random();
        const double eps = static_cast<double>(1e-6f);
        // element [column][row], as in dst
        std::vector<std::array<std::array<double, N>, N>> expected(static_cast<size_t>(tokens));
        for (int64_t t = 0; t < tokens; t++) {
            auto &     m         = expected[static_cast<size_t>(t)];
            const auto normalize = [&](bool rows, double least) {
                for (size_t i = 0; i < N; i++) {
                    double sum = least;
                    for (size_t k = 0; k < N; k++) {
                        sum += rows ? m[k][i] : m[i][k];
                    }
                    for (size_t k = 0; k < N; k++) {
                        (rows ? m[k][i] : m[i][k]) /= sum;
                    }
                }
            };
            for (size_t row = 0; row < N; row++) {
                double largest = -INFINITY;
                for (size_t i = 0; i < N; i++) {
                    const auto at = static_cast<int64_t>(2 * N + row * N + i);
                    m[i][row]     = mixes->get(at, t) * scale->get(2) + base->get(at);
                    largest       = std::max(largest, m[i][row]);
                }
                for (size_t i = 0; i < N; i++) {
                    m[i][row] = std::exp(m[i][row] - largest);
                }
            }
            normalize(true, 0);
            for (auto & column : m) {
                for (double & v : column) {
                    v += eps;
                }
            }
            normalize(false, eps);
            for (int k = 1; k < n_iter; k++) {
                normalize(true, eps), normalize(false, eps);
            }
        }
        CHECK(op_hc_comb_supported(mixes->t, scale->t, base->t, dst->t), "hc_comb");
        check("hc_comb", op_hc_comb(ctx, 1e-6f, n_iter, mixes->t, scale->t, base->t, dst->t), *dst,
              [&](int64_t i0, int64_t i1, int64_t t, int64_t) {
                  double largest = 0; // the exponents are floats
                  for (int64_t i = 2 * N; i < (2 + N) * N; i++) {
                      largest =
                          std::max(largest, std::fabs(mixes->get(i, t) * scale->get(2)) + std::fabs(base->get(i)));
                  }
                  const double z = expected[static_cast<size_t>(t)][static_cast<size_t>(i0)][static_cast<size_t>(i1)];
                  return std::make_pair(z, U32 * (64 + 8 * n_iter) * (1 + largest));
              });
    }
}

// ---- the choice of keys ----

TEST(indexer_scores_of_every_type) {
    for (const tensor_type type : WEIGHT_TYPES) {
        const int64_t dims  = type_block_size(type) == 1 ? pick({ 8, 40, 128 }) : pick({ 256, 512 }),
                      heads = pick({ 1, 5, 64, 100 }), tokens = pick({ 1, 3 }), keys = pick({ 1, 64, 150 }),
                      streams = pick({ 1, 2 }), masks = pick({ 1, streams });
        const auto [k, decoded] = make_weight(type, { dims, 1, keys, streams }, 0);
        auto q                  = make(TYPE_F32, { dims, heads, tokens, streams }, pick({ 0, 3 })),
             weights = make(TYPE_F32, { heads, tokens, 1, streams }), mask = make(TYPE_F16, { keys, tokens, 1, masks }),
             dst = make(TYPE_F32, { keys, tokens, 1, streams });
        q->random(), weights->random();
        mask->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            mask->set(random_source.range(0, 3) ? 0 : -2, i0, i1, i2, i3);
        });
        mask->upload();
        CHECK(op_indexer_scores_supported(q->t, k->t, weights->t, mask->t, dst->t), "indexer");
        check("indexer", op_indexer_scores(ctx, q->t, k->t, weights->t, mask->t, dst->t), *dst,
              [&, &decoded = decoded](int64_t key, int64_t t, int64_t, int64_t s) {
                  double score = mask->get(key, t, 0, s % masks), size = std::fabs(score);
                  for (int64_t h = 0; h < heads; h++) {
                      double product = 0, product_size = 0;
                      for (int64_t i = 0; i < dims; i++) {
                          const double term = q->get(i, h, t, s) * decoded->get(i, 0, key, s);
                          product += term, product_size += std::fabs(term);
                      }
                      score += std::max(product, 0.0) * weights->get(h, t, 0, s);
                      size += product_size * std::fabs(weights->get(h, t, 0, s));
                  }
                  return std::make_pair(score, size * U32 * (8 + 2 * std::sqrt(static_cast<double>(dims + heads))));
              });
    }
}

// Ties are taken from the left, so that the choice is the only one.
TEST(top_k_chooses_the_largest_once) {
    for (const int64_t n : { 1, 2, 40, 1024, 1025, 5000, 70000 }) {
        for (const bool ties : { false, true }) {
            const int64_t n_chosen = pick({ 1, std::max<int64_t>(1, n / 3), n }), rows = 3;
            auto          x = make(TYPE_F32, { n, rows }, pick({ 0, 3 })),
                 dst        = make(TYPE_I32, { n_chosen, rows }, pick({ 0, 1 }));
            x->random();
            x->each([&](int64_t i0, int64_t i1, int64_t, int64_t) {
                x->set(ties                        ? std::round(x->get(i0, i1))
                       : random_source.range(0, 9) ? x->get(i0, i1)
                                                   : -INFINITY,
                       i0, i1);
            });
            x->upload();
            CHECK(op_top_k_supported(x->t, dst->t), "top_k");
            CHECK(op_top_k(ctx, x->t, dst->t) == cudaSuccess, "top_k");
            dst->download("top_k");
            for (int64_t row = 0; row < rows; row++) {
                std::vector<int64_t> order(static_cast<size_t>(n)), chosen;
                std::iota(order.begin(), order.end(), 0);
                std::stable_sort(order.begin(), order.end(),
                                 [&](int64_t a, int64_t b) { return x->get(a, row) > x->get(b, row); });
                order.resize(static_cast<size_t>(n_chosen));
                std::sort(order.begin(), order.end());
                for (int64_t i = 0; i < n_chosen; i++) {
                    chosen.push_back(static_cast<int64_t>(dst->get(i, row)));
                }
                std::sort(chosen.begin(), chosen.end());
                CHECK(chosen == order, "top_k: %d of %d", static_cast<int>(n_chosen), static_cast<int>(n));
            }
        }
    }
}

TEST(pools_at_the_borders) {
    for (int k = 0; k < 24; k++) {
        pool_params p                 = {};
        p.maximum                     = k % 2;
        const std::vector<int64_t> ne = { pick({ 4, 37, 600 }), pick({ 3, 9 }), pick({ 1, 3 }), pick({ 1, 2 }) };
        std::vector<int64_t>       to = ne;
        for (size_t d = 0; d < 2; d++) {
            p.size[d] = static_cast<int>(pick({ 1, 2, 3 })), p.stride[d] = static_cast<int>(pick({ 1, 2 })),
            p.padding[d] = p.size[d] > 1 ? static_cast<int>(pick({ 0, 1 })) : 0;
            to[d]        = (ne[d] + 2 * p.padding[d] - p.size[d]) / p.stride[d] + 1;
        }
        auto x = make(TYPE_F32, ne, pick({ 0, 3 })), dst = make(TYPE_F32, to);
        x->random();
        CHECK(op_pool_supported(p, x->t, dst->t), "pool");
        check("pool", op_pool(ctx, p, x->t, dst->t), *dst, [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
            double sum = 0, size = 0, largest = -INFINITY;
            for (int64_t y = i1 * p.stride[1] - p.padding[1], n = 0; n < p.size[1]; n++, y++) {
                for (int64_t at = i0 * p.stride[0] - p.padding[0], m = 0; m < p.size[0]; m++, at++) {
                    if (y >= 0 && y < ne[1] && at >= 0 && at < ne[0]) {
                        const double v = x->get(at, y, i2, i3);
                        sum += v, size += std::fabs(v), largest = std::max(largest, v);
                    }
                }
            }
            const double area = p.size[0] * p.size[1];
            return p.maximum ? std::make_pair(largest, 0.0) : std::make_pair(sum / area, size / area * 16 * U32);
        });
    }
}

// ---- recurrent layers ----

TEST(convolutions_along_tokens) {
    for (int k = 0; k < 24; k++) {
        const int64_t width = pick({ 1, 2, 4, 32 }), rows = pick({ 1, 31, 32, 100 }), tokens = pick({ 1, 2, 32, 70 }),
                      sequences = pick({ 1, 3 });
        auto x                  = make(TYPE_F32, { width - 1 + tokens, rows, sequences }, pick({ 0, 1 })),
             weights = make(TYPE_F32, { width, rows }), dst = make(TYPE_F32, { rows, tokens, sequences });
        x->random(), weights->random();
        CHECK(op_ssm_conv_supported(x->t, weights->t, dst->t), "convolution");
        check("convolution", op_ssm_conv(ctx, x->t, weights->t, dst->t), *dst,
              [&](int64_t row, int64_t token, int64_t sequence, int64_t) {
                  double sum = 0, size = 0;
                  for (int64_t i = 0; i < width; i++) {
                      const double term = x->get(token + i, row, sequence) * weights->get(i, row);
                      sum += term, size += std::fabs(term);
                  }
                  return std::make_pair(sum, size * U32 * static_cast<double>(width + 2));
              });
    }
}

// Expected outputs and states of a recurrent op in the order of its result, with magnitudes of their errors.
struct recurrent_result {
    std::vector<std::pair<double, double>> all;
    int64_t                                n_outputs, n_states, slots;

    recurrent_result(int64_t outputs, int64_t states, int64_t n_slots)
        : all(static_cast<size_t>(outputs + states * n_slots), { UNCHANGED, 0 }),
          n_outputs(outputs),
          n_states(states),
          slots(n_slots) {}
    std::pair<double, double> & output(int64_t i) { return all[static_cast<size_t>(i)]; }
    void                        set_states(int64_t tokens_left, int64_t at, const std::vector<double> & values,
                                           const std::vector<double> & errors) {
        for (size_t i = 0; i < values.size() && tokens_left < slots; i++) {
            all[static_cast<size_t>(n_outputs + tokens_left * n_states + at) + i] = { values[i], errors[i] };
        }
    }
    // Runs f, which writes `result`, whose elements are the same number before.
    template <typename F> void compare(const char * name, const F & f) {
        auto result = make(TYPE_F32, { static_cast<int64_t>(all.size()) });
        result->each([&](int64_t i, int64_t, int64_t, int64_t) { result->set(UNCHANGED, i); });
        result->upload();
        check(name, f(result->t), *result,
              [&](int64_t i, int64_t, int64_t, int64_t) { return all[static_cast<size_t>(i)]; });
    }

    static constexpr double UNCHANGED = 7;
};

TEST(state_space_scans_and_their_snapshots) {
    for (int k = 0; k < 30; k++) {
        const int64_t size = pick({ 8, 16, 64, 128, 256 }), dim = pick({ 1, 5, 16 }), groups = pick({ 1, 2 }),
                      heads = groups * pick({ 1, 3 }), tokens = pick({ 1, 2, 30 }), sequences = pick({ 1, 2 });
        const bool scalar = k % 2 == 0;
        auto state = make(TYPE_F32, { size, dim, heads, 4 }), x = make(TYPE_F32, { dim, heads, tokens, sequences }),
             dt = make(TYPE_F32, { heads, tokens, sequences }), a = make(TYPE_F32, { scalar ? 1 : size, heads }),
             b = make(TYPE_F32, { size, groups, tokens, sequences }),
             c = make(TYPE_F32, { size, groups, tokens, sequences }), ids = make(TYPE_I32, { sequences });
        state->random(), x->random(), dt->random(), b->random(), c->random();
        a->each([&](int64_t i, int64_t head, int64_t, int64_t) { a->set(-2 * random_source.unit(), i, head); });
        ids->each([&](int64_t i, int64_t, int64_t, int64_t) { ids->set(static_cast<double>(3 - i), i); });
        a->upload(), ids->upload();

        const int64_t    rows = dim * heads;
        recurrent_result expected(rows * tokens * sequences, size * rows * sequences, pick({ 1, 3 }));
        for (int64_t sequence = 0; sequence < sequences; sequence++) {
            for (int64_t row = 0; row < rows; row++) {
                const int64_t       head = row / dim, group = head / (heads / groups);
                std::vector<double> s(static_cast<size_t>(size)), errors(s.size());
                for (int64_t i = 0; i < size; i++) {
                    s[static_cast<size_t>(i)] = state->get(i, row % dim, head, 3 - sequence);
                }
                std::vector<double> magnitude = s;
                for (int64_t t = 0; t < tokens; t++) {
                    const double raw = dt->get(head, t, sequence), step = raw > 20 ? raw : std::log1p(std::exp(raw));
                    double       y = 0, y_size = 0;
                    for (int64_t i = 0; i < size; i++) {
                        const auto   at    = static_cast<size_t>(i);
                        const double decay = std::exp(step * a->get(scalar ? 0 : i, head));
                        const double term = b->get(i, group, t, sequence) * x->get(row % dim, head, t, sequence) * step;
                        s[at]             = s[at] * decay + term;
                        magnitude[at]     = std::fabs(magnitude[at]) * decay + std::fabs(term);
                        errors[at]        = magnitude[at] * U32 * (16 + 8 * static_cast<double>(t));
                        y += s[at] * c->get(i, group, t, sequence);
                        y_size += magnitude[at] * std::fabs(c->get(i, group, t, sequence));
                    }
                    expected.output((sequence * tokens + t) * rows + row) = {
                        y, y_size * U32 * (32 + 8 * static_cast<double>(t) + std::sqrt(static_cast<double>(size)))
                    };
                    expected.set_states(tokens - 1 - t, (sequence * rows + row) * size, s, errors);
                }
            }
        }
        expected.compare("scan", [&](const op_tensor & dst) {
            CHECK(op_ssm_scan_supported(state->t, x->t, dt->t, a->t, b->t, c->t, ids->t, dst), "scan");
            return op_ssm_scan(ctx, state->t, x->t, dt->t, a->t, b->t, c->t, ids->t, dst);
        });
    }
}

TEST(gated_delta_networks_and_their_snapshots) {
    for (int k = 0; k < 30; k++) {
        const int64_t size = pick({ 16, 32, 64, 128 }), key_heads = pick({ 1, 2 }), heads = key_heads * pick({ 1, 2 }),
                      tokens = pick({ 1, 2, 30 }), sequences = pick({ 1, 2 });
        const bool    scalar = k % 2 == 0;
        const int64_t pad    = pick({ 0, 1, 4 });
        const auto    qk_ne  = std::vector<int64_t>{ size, key_heads, tokens, sequences };
        auto          q = make(TYPE_F32, qk_ne, pad), key = make(TYPE_F32, qk_ne, pad, k % 3 == 0),
             v     = make(TYPE_F32, { size, heads, tokens, sequences }, pad),
             g     = make(TYPE_F32, { scalar ? 1 : size, heads, tokens, sequences }),
             beta  = make(TYPE_F32, { 1, heads, tokens, sequences }),
             state = make(TYPE_F32, { size, size, heads, sequences });
        q->random(), v->random(), state->random();
        key->random(0.5 / std::sqrt(static_cast<double>(size)));
        const auto fill = [&](device_tensor & t, double low, double high) {
            t.each([&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
                t.set(low + (high - low) * random_source.unit(), i0, i1, i2, i3);
            });
            t.upload();
        };
        fill(*g, -2, 0), fill(*beta, 0, 1);

        const double     scale = 1 / std::sqrt(static_cast<double>(size));
        recurrent_result expected(size * heads * tokens * sequences, size * size * heads * sequences, pick({ 1, 3 }));
        for (int64_t sequence = 0; sequence < sequences; sequence++) {
            for (int64_t row = 0; row < size * heads; row++) {
                const int64_t       head = row / size, r = row % size, key_head = head % key_heads;
                std::vector<double> m(static_cast<size_t>(size)), magnitude(m.size()), errors(m.size());
                for (int64_t i = 0; i < size; i++) {
                    m[static_cast<size_t>(i)]         = state->get(i, r, head, sequence);
                    magnitude[static_cast<size_t>(i)] = std::fabs(m[static_cast<size_t>(i)]);
                }
                for (int64_t t = 0; t < tokens; t++) {
                    double mk = 0, mk_size = 0, y = 0, y_size = 0;
                    for (int64_t i = 0; i < size; i++) {
                        const auto   at   = static_cast<size_t>(i);
                        const double gate = std::exp(g->get(scalar ? 0 : i, head, t, sequence));
                        m[at] *= gate, magnitude[at] *= gate;
                        mk += m[at] * key->get(i, key_head, t, sequence);
                        mk_size += magnitude[at] * std::fabs(key->get(i, key_head, t, sequence));
                    }
                    const double b = beta->get(0, head, t, sequence), value = v->get(r, head, t, sequence);
                    for (int64_t i = 0; i < size; i++) {
                        const auto   at     = static_cast<size_t>(i);
                        const double of_key = key->get(i, key_head, t, sequence),
                                     of_q   = q->get(i, key_head, t, sequence);
                        m[at] += (value - mk) * b * of_key;
                        magnitude[at] += (std::fabs(value) + mk_size) * b * std::fabs(of_key);
                        errors[at] = magnitude[at] * U32 * (32 + 16 * static_cast<double>(t));
                        y += m[at] * of_q, y_size += magnitude[at] * std::fabs(of_q);
                    }
                    expected.output(((sequence * tokens + t) * heads + head) * size +
                                    r) = { y * scale, y_size * scale * U32 * (48 + 16 * static_cast<double>(t)) };
                    expected.set_states(tokens - 1 - t, (sequence * heads * size + row) * size, m, errors);
                }
            }
        }
        expected.compare("delta network", [&](const op_tensor & dst) {
            CHECK(op_gated_delta_net_supported(q->t, key->t, v->t, g->t, beta->t, state->t, dst), "delta network");
            return op_gated_delta_net(ctx, q->t, key->t, v->t, g->t, beta->t, state->t, dst);
        });
    }
}

// RWKV 6, RWKV 7 and gated linear attention. A row of the state is a row of its matrix in RWKV 7, and a column in the
// others.
TEST(rwkv_and_gated_linear_attention) {
    for (int k = 0; k < 45; k++) {
        const bool    rwkv6 = k % 3 == 0, rwkv7 = k % 3 == 1;
        const int64_t size = pick({ 16, 32, 64, 128 }), heads = pick({ 1, 3 }), tokens = pick({ 1, 2, 30 }),
                      sequences = pick({ 1, 3 }), states = size * size * heads;
        const auto ne  = std::vector<int64_t>{ size, heads, tokens * sequences };
        auto       key = make(TYPE_F32, ne), v = make(TYPE_F32, ne), q = make(TYPE_F32, ne), decay = make(TYPE_F32, ne),
             a = make(TYPE_F32, ne), b = make(TYPE_F32, ne), first = make(TYPE_F32, { size, heads }),
             state = make(TYPE_F32, { states, sequences });
        key->random(), v->random(), q->random(), first->random(), state->random();
        a->random(0.5 / std::sqrt(static_cast<double>(size))), b->random(0.5 / std::sqrt(static_cast<double>(size)));
        decay->each([&](int64_t i0, int64_t i1, int64_t i2, int64_t) { decay->set(random_source.unit(), i0, i1, i2); });
        decay->upload();
        const double scale = rwkv6 || rwkv7 ? 1 : 0.125;

        recurrent_result expected(size * heads * tokens * sequences, states * sequences, 1);
        for (int64_t sequence = 0; sequence < sequences; sequence++) {
            for (int64_t row = 0; row < size * heads; row++) {
                const int64_t head = row / size, r = row % size;
                const auto    place = [&](int64_t i) {
                    return head * size * size + (rwkv7 ? r * size + i : i * size + r);
                };
                std::vector<double> m(static_cast<size_t>(size)), magnitude(m.size());
                for (int64_t i = 0; i < size; i++) {
                    m[static_cast<size_t>(i)]         = state->get(place(i), sequence);
                    magnitude[static_cast<size_t>(i)] = std::fabs(m[static_cast<size_t>(i)]);
                }
                for (int64_t t = 0; t < tokens; t++) {
                    const int64_t token = sequence * tokens + t;
                    const double  error = U32 * (48 + 16 * static_cast<double>(t)), value = v->get(r, head, token);
                    double        ma = 0, ma_size = 0, y = 0, y_size = 0;
                    for (int64_t i = 0; i < size && rwkv7; i++) {
                        ma += m[static_cast<size_t>(i)] * a->get(i, head, token);
                        ma_size += magnitude[static_cast<size_t>(i)] * std::fabs(a->get(i, head, token));
                    }
                    for (int64_t i = 0; i < size; i++) {
                        const auto   at = static_cast<size_t>(i);
                        const double kv = key->get(i, head, token) * value, of_q = q->get(i, head, token),
                                     w = decay->get(i, head, token), of_b = b->get(i, head, token);
                        if (rwkv6) {
                            y += of_q * (m[at] + first->get(i, head) * kv);
                            y_size += std::fabs(of_q) * (magnitude[at] + std::fabs(first->get(i, head) * kv));
                        }
                        m[at]         = m[at] * w + kv + ma * of_b;
                        magnitude[at] = magnitude[at] * w + std::fabs(kv) + ma_size * std::fabs(of_b);
                        y += rwkv6 ? 0 : m[at] * of_q;
                        y_size += rwkv6 ? 0 : magnitude[at] * std::fabs(of_q);
                        if (t == tokens - 1) {
                            expected.set_states(0, sequence * states + place(i), { m[at] }, { magnitude[at] * error });
                        }
                    }
                    expected.output((token * heads + head) * size + r) = { y * scale, y_size * scale * error };
                }
            }
        }
        expected.compare(
            rwkv6   ? "rwkv6"
            : rwkv7 ? "rwkv7"
                    : "gated linear attention",
            [&](const op_tensor & dst) {
                if (rwkv6) {
                    CHECK(op_rwkv6_supported(key->t, v->t, q->t, first->t, decay->t, state->t, dst), "rwkv6");
                    return op_rwkv6(ctx, key->t, v->t, q->t, first->t, decay->t, state->t, dst);
                }
                if (rwkv7) {
                    CHECK(op_rwkv7_supported(q->t, decay->t, key->t, v->t, a->t, b->t, state->t, dst), "rwkv7");
                    return op_rwkv7(ctx, q->t, decay->t, key->t, v->t, a->t, b->t, state->t, dst);
                }
                CHECK(op_gated_linear_attention_supported(key->t, v->t, q->t, decay->t, state->t, dst),
                      "linear attention");
                return op_gated_linear_attention(ctx, 0.125f, key->t, v->t, q->t, decay->t, state->t, dst);
            });
    }
    const auto x = make(TYPE_F32, { 64, 2, 6 }), state = make(TYPE_F32, { 64 * 64 * 2, 4 }),
               dst = make(TYPE_F32, { 128, 6 + 64 * 4 });
    CHECK(!op_gated_linear_attention_supported(x->t, x->t, x->t, x->t, state->t, dst->t), "6 tokens of 4 sequences");
}

// Any bytes to any address, several of them to the same address: the result must equal consecutive memcpy calls.
TEST(small_writes_in_one_launch) {
    constexpr size_t NBYTES = 6000;
    rng              random(11);
    char *           memory = nullptr;
    cuda_ok(cudaMalloc(reinterpret_cast<void **>(&memory), NBYTES), "memory");
    for (int i = 0; i < 50; i++) {
        std::vector<char> want(NBYTES, 0x5a), got(NBYTES);
        cuda_ok(cudaMemcpy(memory, want.data(), NBYTES, cudaMemcpyHostToDevice), "poison");
        small_writes w;
        const int    n      = static_cast<int>(random.range(0, 20));
        size_t       padded = 0;
        for (int k = 0; k < n; k++) {
            const size_t size = static_cast<size_t>(random.unit() < 0.5 ? random.range(0, 9) : random.range(0, 900)),
                         at   = static_cast<size_t>(random.range(0, 4000));
            std::vector<char> bytes(size);
            for (char & b : bytes) {
                b = static_cast<char>(random.range(0, 255));
            }
            const bool fits  = k < small_writes::MAX && padded + (size + 3) / 4 * 4 <= small_writes::MAX_NBYTES;
            const bool added = w.add(memory + at, bytes.data(), size);
            CHECK(added == fits, "small writes: the one of %d bytes, number %d, was %s", static_cast<int>(size), k,
                  added ? "taken" : "refused");
            if (!added) {
                break;
            }
            padded += (size + 3) / 4 * 4;
            std::copy(bytes.begin(), bytes.end(), want.begin() + static_cast<long>(at));
        }
        cuda_ok(op_small_writes(w, ctx.stream), "small writes");
        cuda_ok(cudaStreamSynchronize(ctx.stream), "small writes");
        cuda_ok(cudaMemcpy(got.data(), memory, NBYTES, cudaMemcpyDeviceToHost), "result");
        CHECK(got == want, "small writes: case %d differs", i);
    }
    cudaFree(memory);
}

} // namespace

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("test-cuda-ops: skipped: no GPU\n");
        return 77;
    }
    cudaDeviceProp prop;
    cuda_ok(cudaGetDeviceProperties(&prop, 0), "properties");
    cuda_ok(cudaStreamCreateWithFlags(&ctx.stream, cudaStreamNonBlocking), "stream");
    cuda_ok(cudaMalloc(&ctx.counters, N_COUNTERS * sizeof(unsigned)), "counters");
    cuda_ok(cudaMemset(ctx.counters, 0, N_COUNTERS * sizeof(unsigned)), "counters");
    cuda_ok(op_compute_capability(&ctx.cc), "compute capability");
    printf("test-cuda-ops: code for compute capability %d\n", ctx.cc);
    ctx.n_sm          = prop.multiProcessorCount;
    ctx.shared_nbytes = static_cast<int>(prop.sharedMemPerBlockOptin);
    const auto cublas = cublas_open();
    cuda_ok(cudaMalloc(&ctx.cublas_workspace, CUBLAS_WORKSPACE_NBYTES), "workspace");
    for (const bool overlap : { false, true }) {
        ctx.overlap = overlap && ctx.cc >= 90;
        ctx.cublas  = overlap ? nullptr : cublas.get(); // both kinds of products
        run_tests();
    }
    return test_summary("test-cuda-ops");
}
