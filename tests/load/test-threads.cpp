// Concurrent loads, codec calls and products, for ThreadSanitizer (GGML_MACKO_SANITIZE=thread): several threads read
// the same files and other files, and each call uses threads of its own. The results must equal those of one thread.
#include "capi/struct-size.h"
#include "gguf-builder.h"
#include "load/dense-stream.h"
#include "load/payload.h"
#include "temporary.h"
#include "test.h"

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

using builder::bytes;

static std::atomic<int> n_broken{ 0 }; // rules broken on any thread; CHECK counts without a lock

static void expect(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "broken rule: %s: %s\n", what, ggml_macko_last_error());
        n_broken++;
    }
}

constexpr int N_THREADS = 4; // calling threads
constexpr int N_TEAM    = 3; // threads per call

// ---- models in a folder of their own ----

struct models {
    const temporary_folder folder{ "test-threads" };
    // one model: sparse with all formats, dense, and sparse in two parts
    std::array<std::string, 3> files;
    builder::model             model = builder::tiny_llama(64, 2, 5, true);

    models() {
        const std::string & path = folder.path;
        files                    = { path + "/sparse.gguf", path + "/dense.gguf", path + "/m-00001-of-00002.gguf" };
        write(files[0], builder::sparse_file(model, false, true));
        write(files[1], model.dense);
        const builder::file whole = builder::sparse_file(model, false, true);
        for (uint16_t i = 0; i < 2; i++) {
            const auto    middle = whole.tensors.begin() + static_cast<int64_t>(whole.tensors.size() / 2);
            builder::file part   = whole;
            part.keys            = i == 0 ? whole.keys : std::vector<builder::key>();
            part.set(builder::scalar<uint16_t>("split.no", builder::U16, i));
            part.set(builder::scalar<uint16_t>("split.count", builder::U16, 2));
            part.tensors.assign(i == 0 ? whole.tensors.begin() : middle, i == 0 ? middle : whole.tensors.end());
            write(i == 0 ? files[2] : path + "/m-00002-of-00002.gguf", part);
        }
    }
    static void write(const std::string & name, const builder::file & f) { write_file(name, builder::serialize(f)); }
};

// ---- the steps of a load ----

struct decoder : macko::payload_consumer {
    bytes   dense;
    int64_t row_nbytes;
    bool    ordered;
    decoder(const macko::sparse_tensor_info & m, bool o)
        : dense(static_cast<size_t>(m.nbytes_dense)), row_nbytes(m.nbytes_dense / m.desc.rows), ordered(o) {}
    int consume(const macko::macko_view & view, int64_t) override {
        macko::decode(view, dense.data() + view.rows().row_begin * row_nbytes);
        return GGML_MACKO_STATUS_OK;
    }
    bool wants_first_value() const override { return ordered; }
};

// Reads the stream, and all matrices; compares the elements of matrices that are not quantized.
static bytes load(const std::string & path, bool compress) {
    std::unique_ptr<macko::model_file>   file;
    std::unique_ptr<macko::dense_stream> stream;
    const macko::compression             how = compress ? macko::compression::on : macko::compression::off;
    bytes                                all;
    if (macko::model_file_open_sparse(path.c_str(), how, false, &file) || macko::dense_stream::create(*file, &stream)) {
        expect(false, "a valid model opens");
        return all;
    }
    bytes dense(static_cast<size_t>(stream->size()));
    expect(stream->read_at(0, dense.data(), stream->size()) == 0, "the stream is read");
    for (const macko::sparse_tensor_info & m : file->sparse) {
        decoder d(m, m.first % 2 == 0);
        expect(macko::read_payload(*file, m, N_TEAM, d) == 0, "a payload is read");
        if (m.value_type == m.desc.type) {
            all.insert(all.end(), d.dense.begin(), d.dense.end());
        }
    }
    expect(file->check_unchanged() == 0, "the file is unchanged");
    return all;
}

// ---- calls of the C API ----

// Encodes, validates, decodes and multiplies a matrix in each format. shared: a matrix of another thread, or nullptr.
static std::vector<float> use_codecs(const bytes & dense, int64_t rows, int64_t cols,
                                     const ggml_macko_cpu_matrix * shared) {
    std::vector<float> x(static_cast<size_t>(2 * cols), 0.5f), y(static_cast<size_t>(2 * rows)), sums;
    const auto         multiply = [&](const ggml_macko_cpu_matrix * m) {
        expect(ggml_macko_cpu_mul_mat(m, x.data(), y.data(), 2, N_TEAM) == 0, "a product");
        sums.insert(sums.end(), y.begin(), y.end());
    };
    for (const char * format : { "macko", "packed", "ec-csr" }) {
        ggml_macko_encoded *    e = nullptr;
        auto                    m = macko::sized<ggml_macko_matrix>();
        ggml_macko_cpu_matrix * w = nullptr;
        bytes                   again(dense.size());
        ggml_macko_count        count;
        expect(ggml_macko_encode(format, dense.data(), builder::TYPE_F16, rows, cols, nullptr, 0, N_TEAM, &e) == 0 &&
                   ggml_macko_encoded_matrix(e, &m) == 0 && ggml_macko_validate(&m, N_TEAM) == 0 &&
                   ggml_macko_decode(&m, again.data(), N_TEAM) == 0 && again == dense &&
                   ggml_macko_cpu_matrix_init(&m, N_TEAM, &w) == 0,
               "a codec");
        expect(ggml_macko_count_dense(dense.data(), builder::TYPE_F16, rows, cols, N_TEAM, &count) == 0 &&
                   count.nnz == m.nnz,
               "counts");
        expect(ggml_macko_validate(nullptr, 1) == GGML_MACKO_STATUS_BAD_ARGUMENT && *ggml_macko_last_error(),
               "an error has a message on each thread");
        multiply(w);
        ggml_macko_cpu_matrix_free(w);
        ggml_macko_encoded_free(e);
    }
    if (shared != nullptr) {
        multiply(shared);
    }
    return sums;
}

template <typename F> static void on_all_threads(F && f) {
    std::vector<std::thread> threads;
    for (int t = 0; t < N_THREADS; t++) {
        threads.emplace_back([&f, t] { f(t); });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

TEST(concurrent_loads_give_what_one_gives) {
    const models         m;
    std::array<bytes, 3> want;
    for (size_t i = 0; i < 3; i++) {
        want[i] = load(m.files[i], i == 1);
    }
    CHECK(!want[0].empty() && want[0] == want[2], "%zu and %zu bytes", want[0].size(), want[2].size());
    on_all_threads([&](int t) {
        for (int i = 0; i < 6; i++) { // the same file on several threads, and other files at the same time
            const size_t file = static_cast<size_t>(t / 2 + i) % 3;
            expect(load(m.files[file], file == 1) == want[file], "a concurrent load gives the same weights");
        }
    });
    CHECK(n_broken == 0, "%d rules broken on threads", n_broken.load());
}

TEST(concurrent_codecs_and_products_give_what_one_gives) {
    const models                  m;
    const builder::dense_matrix * dense = nullptr;
    for (const builder::dense_matrix & d : m.model.sparse) {
        dense = d.type == builder::TYPE_F16 ? &d : dense;
    }
    const auto              cols = static_cast<int64_t>(dense->ne[0]), rows = static_cast<int64_t>(dense->ne[1]);
    ggml_macko_encoded *    e      = nullptr;
    auto                    matrix = macko::sized<ggml_macko_matrix>();
    ggml_macko_cpu_matrix * shared = nullptr;
    CHECK(ggml_macko_encode("packed", dense->data.data(), builder::TYPE_F16, rows, cols, nullptr, 0, 1, &e) == 0 &&
              ggml_macko_encoded_matrix(e, &matrix) == 0 && ggml_macko_cpu_matrix_init(&matrix, 1, &shared) == 0,
          "%s", ggml_macko_last_error());
    const std::vector<float> want = use_codecs(dense->data, rows, cols, shared);
    on_all_threads([&](int) {
        for (int i = 0; i < 4; i++) {
            expect(use_codecs(dense->data, rows, cols, shared) == want, "concurrent products have the same bits");
        }
    });
    ggml_macko_cpu_matrix_free(shared);
    ggml_macko_encoded_free(e);
    CHECK(n_broken == 0, "%d rules broken on threads", n_broken.load());
}

int main(int argc, char ** argv) { return test_main("test-threads", argc, argv); }
