// Products that read a matrix by columns, on the GPU: against float64, element by element, with any share of zeros in
// x. Exit code 77 (skipped) without a GPU.
#include "codec/macko/encode.h"
#include "cuda/sparse/columns.cuh"
#include "test-cuda.h"

namespace {

// a random matrix by rows and by columns on the device; experts: matrices one after the other
struct matrix_by_columns {
    int64_t             rows, cols;
    std::vector<double> weights;
    void *              by_rows    = nullptr;
    void *              by_columns = nullptr;
    cuda_sparse_matrix  device     = {};
    cuda_columns        columns    = {};

    matrix_by_columns(rng & random, cuda_sparse_uploader & uploader, int64_t rows, int64_t cols, int type,
                      double density, int64_t experts = 1)
        : rows(rows), cols(cols), weights(static_cast<size_t>(rows * cols)) {
        std::vector<uint16_t> dense(weights.size());
        for (size_t i = 0; i < dense.size(); i++) {
            if (random.unit() < density) { // some -0
                dense[i]   = random.unit() < 0.01 ? 0x8000 : static_cast<uint16_t>(random_bits(random, type));
                weights[i] = to_double(dense[i], type);
            }
        }
        ggml_macko_count count;
        STATUS_CHECK(count_dense(dense.data(), type, rows, cols, 2, &count));
        const int64_t        stored = n_padded(count.n_stored[1]);
        std::vector<uint8_t> values(static_cast<size_t>(stored * 2)),
            deltas(static_cast<size_t>(deltas_nbytes(stored, 2)));
        std::vector<int32_t> row_ptr(static_cast<size_t>(rows + 1));
        const macko_arrays   coded = { rows,          cols,          type,          2, count.nnz, count.n_stored[1],
                                       values.data(), deltas.data(), row_ptr.data() };
        STATUS_CHECK(encode(dense.data(), coded, 2));
        const macko_desc desc = { rows, cols, type, 2, count.nnz };
        const macko_rows all  = { desc, 0, rows, row_ptr.data(), 0, values.data(), deltas.data() };
        macko_view       view;
        STATUS_CHECK(validate(all, &view));
        CUDA_CHECK(cudaMalloc(&by_rows, static_cast<size_t>(cuda_sparse_nbytes(desc, stored))));
        STATUS_CHECK(uploader.begin(desc, stored, by_rows));
        STATUS_CHECK(uploader.rows(view));
        STATUS_CHECK(uploader.finish(&device));

        CHECK(cuda_columns_supported(desc, type), "a matrix of type %d", type);
        const size_t nbytes = static_cast<size_t>(cuda_columns_nbytes(desc, rows / experts)), behind = 512;
        CUDA_CHECK(cudaMalloc(&by_columns, nbytes + behind));
        CUDA_CHECK(cudaMemset(by_columns, 0xa5, nbytes + behind));
        STATUS_CHECK(cuda_columns_make(device, desc, rows / experts, by_columns, nullptr, &columns));
        std::vector<uint8_t> kept(behind);
        CUDA_CHECK(
            cudaMemcpy(kept.data(), static_cast<uint8_t *>(by_columns) + nbytes, behind, cudaMemcpyDeviceToHost));
        CHECK(std::all_of(kept.begin(), kept.end(), [](uint8_t b) { return b == 0xa5; }), "wrote behind the columns");
        device.columns = &columns;
    }
    ~matrix_by_columns() { cudaFree(by_rows), cudaFree(by_columns); }
    matrix_by_columns(const matrix_by_columns &) = delete;
};

void set_random(rng & random, guarded & x, int64_t n, double zeros) {
    for (int64_t i = 0; i < n; i++) {
        const bool is_zero = random.unit() < zeros;
        x.at(i)            = is_zero ? (random.unit() < 0.5 ? 0.0f : -0.0f)
                                     : static_cast<float>((random.unit() - 0.5) * (random.unit() < 0.01 ? 40 : 2));
    }
    x.put();
}

struct summed {
    double value = 0, magnitude = 1e-30;
};
// row r of w times x, where f(element of x) takes part
template <typename F> summed product(const matrix_by_columns & w, int64_t r, guarded & x, int64_t first, F && f) {
    summed sum;
    for (int64_t c = 0; c < w.cols; c++) {
        const double term = w.weights[static_cast<size_t>(r * w.cols + c)] * f(static_cast<double>(x.at(first + c)));
        sum.value += term;
        sum.magnitude += std::fabs(term);
    }
    return sum;
}

double same(double x) { return x; }
double squared_relu(double x) { return x > 0 ? x * x : 0; }

int random_type(rng & random) { return random.unit() < 0.5 ? GGML_MACKO_TYPE_F16 : GGML_MACKO_TYPE_BF16; }

// One product, its result poisoned first. Element by element, and with the same result if nothing is left out.
void check_product(rng & random, matrix_by_columns & w, guarded & x, bool square_relu, const std::string & name) {
    guarded y(w.rows), bias(w.rows), residual(w.rows);
    for (int64_t r = 0; r < w.rows; r++) {
        bias.at(r)     = static_cast<float>(random.unit() - 0.5);
        residual.at(r) = static_cast<float>(random.unit() - 0.5);
    }
    bias.put(), residual.put();
    const bool                 has_bias = random.unit() < 0.5, has_residual = random.unit() < 0.5;
    const bool                 in_place = has_residual && random.unit() < 0.5;
    cuda_sparse_mul_mat_params p        = plain_product(w.device, x, y, 1);
    p.square_relu                       = square_relu;
    p.bias[0]                           = has_bias ? bias.data() : nullptr;
    p.residual[0]                       = in_place ? y.data() : has_residual ? residual.data() : nullptr;
    CHECK(cuda_columns_serve(p), "%s: does not read columns", name.c_str());
    std::vector<float> with_skipping;
    for (const bool skips : { true, false }) {
        w.columns.skips = skips;
        y.host          = in_place ? residual.host : std::vector<float>(y.host.size(), POISON);
        y.put();
        CUDA_CHECK(cuda_sparse_mul_mat(p, nullptr));
        y.get();
        CHECK(y.guards_intact(), "%s: wrote outside of y", name.c_str());
        for (int64_t r = 0; r < w.rows; r++) {
            const summed want  = product(w, r, x, 0, square_relu ? squared_relu : same);
            const double added = (has_bias ? static_cast<double>(bias.at(r)) : 0.0) +
                                 (has_residual ? static_cast<double>(residual.at(r)) : 0.0);
            const double error = std::fabs(static_cast<double>(y.at(r)) - want.value - added) /
                                 (want.magnitude + has_bias + has_residual);
            CHECK(error <= MAX_ERROR, "%s, row %lld: relative error %.3g", name.c_str(), static_cast<long long>(r),
                  error);
            CHECK(skips || with_skipping[static_cast<size_t>(r)] == y.at(r), "%s, row %lld: %g, not %g", name.c_str(),
                  static_cast<long long>(r), static_cast<double>(with_skipping[static_cast<size_t>(r)]),
                  static_cast<double>(y.at(r)));
            if (skips) {
                with_skipping.push_back(y.at(r));
            }
        }
    }
}

GPU_TEST(products_with_any_share_of_zeros) {
    const int     n_cases   = random_cases(200);
    const int64_t widths[]  = { 1, 7, 31, 32, 33, 64, 300, 1000, 1025, 3000, 11008, 18432 };
    const double  zeros[]   = { 0, 0.2, 0.5, 0.9, 0.99, 1 };
    const double  density[] = { 0, 0.02, 0.3, 0.5, 1 };
    for (int i = 0; i < n_cases; i++) {
        rng               random(static_cast<uint64_t>(500 + i));
        const int64_t     cols = widths[random.range(0, 11)], rows = random.range(1, cols > 3000 ? 70 : 400);
        matrix_by_columns w(random, uploader, rows, cols, random_type(random), density[random.range(0, 4)]);
        guarded           x(cols);
        set_random(random, x, cols, zeros[random.range(0, 5)]);
        const std::string name = "case " + std::to_string(i) + ", " + std::to_string(rows) + "x" + std::to_string(cols);
        check_product(random, w, x, false, name);
        check_product(random, w, x, true, name + ", square of ReLU");
    }
}

GPU_TEST(nan_in_x_is_not_left_out) {
    rng               random(3);
    matrix_by_columns w(random, uploader, 70, 500, GGML_MACKO_TYPE_F16, 1);
    guarded           x(500), y(70);
    set_random(random, x, 500, 0.9);
    x.at(333) = NAN;
    x.put();
    CUDA_CHECK(cuda_sparse_mul_mat(plain_product(w.device, x, y, 1), nullptr));
    y.get();
    for (int64_t r = 0; r < 70; r++) {
        CHECK(std::isnan(y.at(r)) == (w.weights[static_cast<size_t>(r * 500 + 333)] != 0), "row %lld is %g",
              static_cast<long long>(r), static_cast<double>(y.at(r)));
    }
}

GPU_TEST(experts_and_ids_out_of_range) {
    for (uint64_t seed = 0; seed < 8; seed++) {
        rng               random(seed);
        const int64_t     rows = random.range(3, 70), cols = seed % 2 ? 2100 : 200, ldx = seed % 3 ? cols : 0;
        matrix_by_columns w(random, uploader, N_EXPERTS * rows, cols, random_type(random), 0.3, N_EXPERTS);
        guarded           x(cols * N_EXPERT_COLUMNS), y(rows * N_EXPERT_COLUMNS);
        set_random(random, x, cols * N_EXPERT_COLUMNS, 0.8);
        multiply_experts(w.device, x, ldx, y);
        for (int64_t j = 0; j < N_EXPERT_COLUMNS; j++) {
            for (int64_t r = 0; r < rows; r++) {
                const int64_t first = expert_row(j, rows);
                const summed  want  = first < 0 ? summed() : product(w, first + r, x, j * ldx, same);
                const double  error = std::fabs(static_cast<double>(y.at(j * rows + r)) - want.value) / want.magnitude;
                CHECK(error <= MAX_ERROR, "seed %llu, column %lld, row %lld: relative error %.3g",
                      static_cast<unsigned long long>(seed), static_cast<long long>(j), static_cast<long long>(r),
                      error);
            }
        }
    }
}

GPU_TEST(repeats_are_bit_identical) {
    rng               random(9);
    matrix_by_columns w(random, uploader, 1000, 4096, GGML_MACKO_TYPE_BF16, 0.5);
    guarded           x(4096), y(1000);
    set_random(random, x, 4096, 0.7);
    check_repeats(plain_product(w.device, x, y, 1), y, 100, "columns");
}

// Several tokens, some rows, and a norm in front are computed by rows.
GPU_TEST(other_products_read_rows) {
    rng               random(4);
    matrix_by_columns w(random, uploader, 64, 256, GGML_MACKO_TYPE_F16, 0.5);
    guarded           x(512), y(128);
    set_random(random, x, 512, 0.5);
    cuda_sparse_mul_mat_params one = plain_product(w.device, x, y, 1), two = plain_product(w.device, x, y, 2),
                               some = one, norm = one;
    some.row_begin[0] = 3;
    norm.norm_weight  = x.data();
    CHECK(cuda_columns_serve(one) && !cuda_columns_serve(two) && !cuda_columns_serve(some) && !cuda_columns_serve(norm),
          "which products read columns");
    two.square_relu = true;
    CHECK(cuda_sparse_mul_mat(two, nullptr) == cudaErrorNotSupported, "two tokens behind RELU and SQR");
    two.square_relu = false;
    CUDA_CHECK(cuda_sparse_mul_mat(two, nullptr));
    y.get();
    for (int64_t r = 0; r < 64; r++) {
        const summed want = product(w, r, x, 256, [](double v) { return round_to(v, GGML_MACKO_TYPE_F16); });
        CHECK(std::fabs(static_cast<double>(y.at(64 + r)) - want.value) <= MAX_ERROR * want.magnitude, "row %lld",
              static_cast<long long>(r));
    }
}

} // namespace

int main(int argc, char ** argv) { return gpu_test_main("test-cuda-columns", argc, argv); }
