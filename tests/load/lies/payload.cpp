// Payloads that are read in blocks and by several consumers, and the dense stream.
#include "lies.h"

// Blocks that several threads read give the same bytes as the dense matrix, and first_value is the number of non-zeros
// before each block.
TEST(payload_blocks) {
    std::mt19937_64 rng(5);
    for (uint32_t type : { TYPE_F16, TYPE_F32 }) {
        for (uint32_t bits : { 1, 2, 4, 8 }) {
            builder::model m;
            m.sparse.push_back(
                { "m.weight", { 1021, 1501 }, type, builder::random_data(rng, type, 1021 * 1501, 1021, 0.4) });
            m.bits = { bits };
            m.dense.tensors.push_back({ "m.weight", m.sparse[0].ne, type, m.sparse[0].data, 0 });
            const temporary_file               f(builder::serialize(builder::sparse_file(m)));
            std::unique_ptr<macko::model_file> file;
            CHECK(macko::model_file_open(f.path.c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
            for (int n_threads : { 1, 2, 3 }) {
                collector c(file->sparse[0]);
                const int status = macko::read_payload(*file, file->sparse[0], n_threads, c);
                CHECK(status == S(OK), "%s", ggml_macko_last_error());
                CHECK(c.dense == m.sparse[0].data, "type %u, %u bits, %d threads: decoded payload differs", type, bits,
                      n_threads);
                CHECK(c.nnz.size() > 2, "the matrix is one block: nothing was tested");
                std::vector<std::pair<int64_t, int64_t>> blocks;
                for (size_t i = 0; i < c.nnz.size(); i++) {
                    blocks.push_back({ c.first_values[i], c.nnz[i] });
                }
                std::sort(blocks.begin(), blocks.end());
                int64_t sum = 0;
                for (const auto & b : blocks) {
                    CHECK(b.first == sum, "first_value %lld vs %lld", static_cast<long long>(b.first),
                          static_cast<long long>(sum));
                    sum += b.second;
                }
                CHECK(sum == file->sparse[0].desc.nnz, "nnz");
            }
            collector no(file->sparse[0]);
            no.answer = S(CANCELLED);
            CHECK(macko::read_payload(*file, file->sparse[0], 2, no) == S(CANCELLED) &&
                      strstr(ggml_macko_last_error(), "m.weight: test: consumer says no"),
                  "%s", ggml_macko_last_error());
        }
    }
}

// Waits in each call until a second call has begun.
struct meeting_consumer : macko::payload_consumer {
    std::mutex              mutex;
    std::condition_variable changed;
    int                     n_inside = 0;
    bool                    met      = false;
    int                     consume(const macko::macko_view &, int64_t) override {
        std::unique_lock<std::mutex> lock(mutex);
        met = ++n_inside > 1 || met;
        changed.notify_all();
        met = changed.wait_for(lock, std::chrono::seconds(20), [&] { return met; });
        n_inside--;
        return met ? S(OK) : macko::fail(S(CANCELLED), "test: nobody else came");
    }
};

TEST(consumers_of_a_matrix_work_side_by_side) {
    const builder::model               m = model_of_several_blocks(6);
    const temporary_file               f(builder::serialize(builder::sparse_file(m)));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open(f.path.c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
    meeting_consumer c;
    CHECK(macko::read_payload(*file, file->sparse[0], 2, c) == S(OK), "%s", ggml_macko_last_error());
}

// Accepts blocks of whole groups of rows, and requests everything twice.
struct repeating_consumer : collector {
    static constexpr int64_t GROUP   = 7;
    int                      n_begun = 0, n_ended = 0;
    bool                     whole_groups = true;
    explicit repeating_consumer(const macko::sparse_tensor_info & m) : collector(m) {}
    void    begin() override { n_begun++; }
    bool    end() override { return ++n_ended == 2; }
    int64_t rows_of_blocks() const override { return GROUP; }
    int     consume(const macko::macko_view & view, int64_t first_value) override {
        const int                         status = collector::consume(view, first_value);
        const std::lock_guard<std::mutex> lock(mutex);
        whole_groups &= view.rows().row_begin % GROUP == 0;
        return status;
    }
};

TEST(a_consumer_may_ask_for_groups_and_for_a_second_pass) {
    const builder::model               m = model_of_several_blocks(8);
    const temporary_file               f(builder::serialize(builder::sparse_file(m)));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open(f.path.c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
    repeating_consumer c(file->sparse[0]);
    CHECK(macko::read_payload(*file, file->sparse[0], 2, c) == S(OK), "%s", ggml_macko_last_error());
    CHECK(c.dense == m.sparse[0].data, "elements");
    CHECK(c.n_begun == 1 && c.n_ended == 2, "begun %d times, ended %d times", c.n_begun, c.n_ended);
    CHECK(c.whole_groups && c.nnz.size() >= 4, "%zu blocks", c.nnz.size());
    const auto half = static_cast<std::ptrdiff_t>(c.nnz.size() / 2);
    CHECK(std::accumulate(c.nnz.begin(), c.nnz.begin() + half, int64_t(0)) == file->sparse[0].desc.nnz, "half");
}

struct throwing_consumer : macko::payload_consumer {
    int consume(const macko::macko_view &, int64_t) override { throw std::bad_alloc(); }
};

TEST(out_of_memory_in_a_thread_is_a_status) {
    const temporary_file f(builder::serialize(builder::sparse_file(base_model())));
    const auto           file = open_or_die(f);
    throwing_consumer    c;
    CHECK(macko::read_payload(*file, file->sparse[0], 2, c) == S(OUT_OF_MEMORY), "%s", ggml_macko_last_error());
}

// For sparse tensors, claimed or not.
TEST(dense_stream_is_the_dense_file) {
    for (uint64_t seed : { 1, 2, 3 }) {
        const served_model                           served(seed);
        const builder::model &                       m = served.m;
        const std::unique_ptr<macko::dense_stream> & v = served.stream;
        layout                                       l;
        bytes                                        expected = builder::serialize(m.dense, &l);
        CHECK(v->size() == static_cast<int64_t>(expected.size()), "size %lld vs %zu", static_cast<long long>(v->size()),
              expected.size());
        bytes got(expected.size(), 0xee);
        CHECK(v->read_at(0, got.data(), v->size()) == S(OK), "%s", ggml_macko_last_error());
        CHECK(got == expected, "seed %llu: without claims", static_cast<unsigned long long>(seed));
        claim_all(*v, *served.file);
        CHECK(v->read_at(0, got.data(), v->size()) == S(OK), "%s", ggml_macko_last_error());
        for (size_t i = 0; i < m.sparse.size(); i++) { // a sparse tensor is read as a placeholder and zeros
            const size_t at = l.data_at[m.dense.tensor_index(m.sparse[i].name)];
            const size_t n  = m.sparse[i].data.size();
            CHECK(v->match_placeholder(&got[at], n) == static_cast<int64_t>(i), "placeholder of %s",
                  m.sparse[i].name.c_str());
            std::fill_n(expected.begin() + static_cast<int64_t>(at), n, 0);
            std::fill_n(got.begin() + static_cast<int64_t>(at), sizeof(macko::tensor_placeholder), 0);
        }
        CHECK(got == expected, "seed %llu: the dense stream is not the dense file",
              static_cast<unsigned long long>(seed));

        uint8_t byte = 0;
        CHECK(v->read_at(-1, &byte, 1) == S(BAD_ARGUMENT) && v->read_at(v->size(), &byte, 1) == S(BAD_ARGUMENT) &&
                  v->read_at(0, &byte, -1) == S(BAD_ARGUMENT),
              "read outside");
        CHECK(v->read_at(v->size(), &byte, 0) == S(OK), "empty read at the end");
    }
}

TEST(forged_placeholders_do_not_match) {
    const builder::model                 m = base_model();
    const temporary_file                 f(builder::serialize(builder::sparse_file(m)));
    const auto                           file = open_or_die(f);
    std::unique_ptr<macko::dense_stream> a, b;
    CHECK(macko::dense_stream::create(*file, &a) == S(OK) && macko::dense_stream::create(*file, &b) == S(OK), "%s",
          ggml_macko_last_error());
    claim_all(*a, *file);
    layout l;
    builder::serialize(m.dense, &l);
    macko::tensor_placeholder h  = {};
    const int64_t             at = static_cast<int64_t>(l.data_at[m.dense.tensor_index(Q)]);
    CHECK(a->read_at(at, &h, sizeof(h)) == S(OK), "%s", ggml_macko_last_error());
    CHECK(a->match_placeholder(&h, sizeof(h)) == 0, "own placeholder");
    CHECK(b->match_placeholder(&h, sizeof(h)) == -1, "placeholder of another load of the same file");
    CHECK(a->match_placeholder(&h, sizeof(h) - 1) == -1 && a->match_placeholder(nullptr, 0) == -1, "too short");
    macko::tensor_placeholder forged = h;
    forged.index                     = m.sparse.size();
    CHECK(a->match_placeholder(&forged, sizeof(forged)) == -1, "index past the end");
    forged.index = UINT64_MAX;
    CHECK(a->match_placeholder(&forged, sizeof(forged)) == -1, "index 2^64-1");
    for (size_t i = 0; i < sizeof(h.nonce); i++) {
        forged = h;
        forged.nonce[i] ^= 1;
        CHECK(a->match_placeholder(&forged, sizeof(forged)) == -1, "one bit of the nonce");
    }
    const macko::tensor_placeholder zero = {};
    CHECK(a->match_placeholder(&zero, sizeof(zero)) == -1, "zeros");
}

TEST(unservable_matrix_is_refused) {
    const temporary_file dense(builder::serialize(base_model().dense));
    const auto           file = open_or_die(dense);
    CHECK(!file->is_sparse, "a dense file is not sparse");
    std::unique_ptr<macko::dense_stream> v;
    int                                  status = macko::dense_stream::create(*file, &v);
    seen.insert(status);
    expect("dense file", S(NOT_SPARSE), status);

    builder::model  tiny; // 3 x 3 F16 values: 18 bytes are too few for a placeholder
    std::mt19937_64 rng(1);
    tiny.sparse.push_back({ "m", { 3, 3 }, TYPE_F16, builder::random_data(rng, TYPE_F16, 9, 3, 1) });
    tiny.bits = { 4 };
    tiny.dense.tensors.push_back({ "m", { 3, 3 }, TYPE_F16, tiny.sparse[0].data, 0 });
    const temporary_file               f(builder::serialize(builder::sparse_file(tiny)));
    std::unique_ptr<macko::model_file> small;
    CHECK(macko::model_file_open(f.path.c_str(), false, &small) == S(OK), "%s", ggml_macko_last_error());
    expect("matrix smaller than a placeholder", S(BAD_SHAPE), macko::dense_stream::create(*small, &v));
}
