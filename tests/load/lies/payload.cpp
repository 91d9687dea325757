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
            const memory_file                  f(builder::serialize(builder::sparse_file(m)));
            std::unique_ptr<macko::model_file> file;
            CHECK(macko::model_file_open(f.path().c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
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
    const memory_file                  f(builder::serialize(builder::sparse_file(m)));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open(f.path().c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
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
    const memory_file                  f(builder::serialize(builder::sparse_file(m)));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open(f.path().c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
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
    const memory_file f(builder::serialize(builder::sparse_file(base_model())));
    const auto        file = open_or_die(f);
    throwing_consumer c;
    CHECK(macko::read_payload(*file, file->sparse[0], 2, c) == S(OUT_OF_MEMORY), "%s", ggml_macko_last_error());
}

static void claim_all(macko::dense_stream & stream, const macko::model_file & file) {
    for (size_t i = 0; i < file.sparse.size(); i++) {
        stream.claim(static_cast<int64_t>(i));
    }
}

// For sparse tensors, claimed or not.
TEST(dense_stream_is_the_dense_file) {
    for (uint64_t seed : { 1, 2, 3 }) {
        const builder::model                 m = builder::tiny_llama(seed == 3 ? 64 : 16, 2, seed);
        const memory_file                    f(builder::serialize(builder::sparse_file(m, seed == 2)));
        const auto                           file = open_or_die(f);
        std::unique_ptr<macko::dense_stream> v;
        CHECK(macko::dense_stream::create(*file, &v) == S(OK), "%s", ggml_macko_last_error());
        layout l;
        bytes  expected = builder::serialize(m.dense, &l);
        CHECK(v->size() == static_cast<int64_t>(expected.size()), "size %lld vs %zu", static_cast<long long>(v->size()),
              expected.size());
        bytes got(expected.size(), 0xee);
        CHECK(v->read_at(0, got.data(), v->size()) == S(OK), "%s", ggml_macko_last_error());
        CHECK(got == expected, "seed %llu: without claims", static_cast<unsigned long long>(seed));
        claim_all(*v, *file);
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

        bytes whole(expected.size());
        CHECK(v->read_at(0, whole.data(), v->size()) == S(OK), "%s", ggml_macko_last_error());
        FILE * stream = v->open_stream();
        CHECK(stream != nullptr, "%s", ggml_macko_last_error());
        bytes streamed(expected.size());
        CHECK(fread(streamed.data(), 1, streamed.size() + 1, stream) == streamed.size() && feof(stream),
              "stream length");
        CHECK(streamed == whole, "stream content");
        rng random(seed);
        for (int i = 0; i < 3000; i++) { // pieces that extend over several segments
            const int64_t at = random.range(0, v->size() - 1);
            const int64_t n  = random.range(0, std::min<int64_t>(v->size() - at, 700));
            bytes         a(static_cast<size_t>(n)), b(static_cast<size_t>(n));
            CHECK(v->read_at(at, a.data(), n) == S(OK), "%s", ggml_macko_last_error());
            CHECK(std::equal(a.begin(), a.end(), whole.begin() + at), "read_at %lld", static_cast<long long>(at));
            CHECK(fseeko(stream, at, SEEK_SET) == 0 && fread(b.data(), 1, b.size(), stream) == b.size() && a == b,
                  "stream at %lld", static_cast<long long>(at));
        }
        CHECK(fseeko(stream, -1, SEEK_SET) != 0 && errno == EINVAL, "seek before the start");
        CHECK(fseeko(stream, v->size() + 1, SEEK_SET) != 0 && errno == EINVAL, "seek past the end");
        CHECK(fseeko(stream, 0, SEEK_END) == 0 && ftello(stream) == v->size(), "seek to the end");
        CHECK(fputc('x', stream) == EOF || fflush(stream) != 0, "the stream is read-only");
        clearerr(stream);
        CHECK(v->status() == S(OK), "%s", ggml_macko_last_error());
        fclose(stream);
        uint8_t byte = 0;
        CHECK(v->read_at(-1, &byte, 1) == S(BAD_ARGUMENT) && v->read_at(v->size(), &byte, 1) == S(BAD_ARGUMENT) &&
                  v->read_at(0, &byte, -1) == S(BAD_ARGUMENT),
              "read outside");
        CHECK(v->read_at(v->size(), &byte, 0) == S(OK), "empty read at the end");
    }
}

// Reads a tensor like llama.cpp's llama_file: in pieces, each limited by the end of the file, which it finds by
// seeking. Returns the number of bytes that the stream has read.
static int64_t read_as_llama_cpp(FILE * stream, int64_t size, int64_t at, bytes & out, int64_t piece) {
    CHECK(fseeko(stream, at, SEEK_SET) == 0, "seek to %lld", static_cast<long long>(at));
    const int64_t n_out  = static_cast<int64_t>(out.size());
    int64_t       n_read = 0;
    for (int64_t i = 0; i < n_out; i += piece) {
        const int64_t told = ftello(stream);
        CHECK(told >= 0 && told <= size, "position %lld", static_cast<long long>(told));
        const int64_t n = std::min({ piece, n_out - i, size - told });
        CHECK(n <= 0 || fread(&out[static_cast<size_t>(i)], static_cast<size_t>(n), 1, stream) == 1,
              "%lld bytes at %lld", static_cast<long long>(n), static_cast<long long>(at + i));
        n_read += n;
    }
    return n_read;
}

// a sparse model of some size, and its dense stream
struct served_model {
    builder::model                       m;
    memory_file                          f;
    std::unique_ptr<macko::model_file>   file;
    std::unique_ptr<macko::dense_stream> stream;

    explicit served_model(uint64_t seed)
        : m(builder::tiny_llama(seed == 4   ? 512
                                : seed == 3 ? 64
                                            : 16,
                                2, seed)),
          f(builder::serialize(builder::sparse_file(m, seed == 2))),
          file(open_or_die(f)) {
        CHECK(macko::dense_stream::create(*file, &stream) == S(OK), "%s", ggml_macko_last_error());
    }
};

// Dense tensors are read in full, a sparse tensor that a device has claimed only up to its placeholder.
TEST(zeros_of_claimed_tensors_are_not_read) {
    for (uint64_t seed : { 1, 2, 3, 4 }) {
        const served_model                           served(seed);
        const builder::model &                       m    = served.m;
        const std::unique_ptr<macko::model_file> &   file = served.file;
        const std::unique_ptr<macko::dense_stream> & v    = served.stream;
        claim_all(*v, *file);
        layout      l;
        const bytes dense  = builder::serialize(m.dense, &l);
        FILE *      stream = v->open_stream();
        CHECK(stream != nullptr, "%s", ggml_macko_last_error());
        rng random(seed);
        for (int i = 0; i < 300; i++) {
            const size_t  t  = static_cast<size_t>(random.range(0, static_cast<int64_t>(m.dense.tensors.size()) - 1));
            const auto    is = std::find_if(m.sparse.begin(), m.sparse.end(),
                                            [&](const auto & s) { return s.name == m.dense.tensors[t].name; });
            bytes         got(m.dense.tensors[t].data.size(), 0xee);
            const int64_t n = static_cast<int64_t>(got.size()), piece = i % 2 ? n : random.range(24, 9000);
            const int64_t n_read = read_as_llama_cpp(stream, v->size(), static_cast<int64_t>(l.data_at[t]), got, piece);
            if (is == m.sparse.end()) {
                CHECK(n_read == n && got == m.dense.tensors[t].data, "seed %llu: %s",
                      static_cast<unsigned long long>(seed), m.dense.tensors[t].name.c_str());
            } else {
                CHECK(v->match_placeholder(got.data(), got.size()) == is - m.sparse.begin(), "placeholder of %s",
                      is->name.c_str());
                CHECK(n_read == sizeof(macko::tensor_placeholder), "%lld of %lld bytes of %s were read",
                      static_cast<long long>(n_read), static_cast<long long>(n), is->name.c_str());
            }
        }
        fclose(stream);
    }
}

// Some tensors are claimed and others not; they are read as llama.cpp reads them: in any order, whole or in pieces.
TEST(unclaimed_tensors_are_read_as_dense_elements) {
    for (uint64_t seed : { 1, 2, 3, 4 }) {
        const served_model                           served(seed);
        const builder::model &                       m      = served.m;
        const std::unique_ptr<macko::model_file> &   file   = served.file;
        const std::unique_ptr<macko::dense_stream> & v      = served.stream;
        FILE *                                       stream = v->open_stream();
        CHECK(stream != nullptr, "%s", ggml_macko_last_error());
        uint8_t header[64]; // llama.cpp reads it before any claim
        CHECK(fread(header, sizeof(header), 1, stream) == 1, "header");
        rng     random(seed);
        int64_t n_unclaimed = 0, nbytes_unclaimed = 0;
        for (size_t i = 0; i < m.sparse.size(); i++) {
            if (i % 3 == seed % 3) {
                v->claim(static_cast<int64_t>(i));
            } else {
                n_unclaimed++;
                nbytes_unclaimed += file->sparse[i].nbytes_dense;
            }
        }
        layout l;
        builder::serialize(m.dense, &l);
        for (int i = 0; i < 600; i++) {
            const size_t  at = static_cast<size_t>(random.range(0, static_cast<int64_t>(m.sparse.size()) - 1));
            const size_t  t  = m.dense.tensor_index(m.sparse[at].name);
            bytes         got(m.dense.tensors[t].data.size(), 0xee);
            const auto    n      = static_cast<int64_t>(got.size());
            const int64_t n_read = read_as_llama_cpp(stream, v->size(), static_cast<int64_t>(l.data_at[t]), got,
                                                     i % 2 ? n : random.range(24, 9000));
            CHECK(v->is_claimed(static_cast<int64_t>(at)) ? n_read == sizeof(macko::tensor_placeholder)
                                                          : n_read == n && got == m.dense.tensors[t].data,
                  "seed %llu: %s", static_cast<unsigned long long>(seed), m.sparse[at].name.c_str());
        }
        const macko::dense_stream::dense_reads reads = v->decoded();
        CHECK(reads.n == n_unclaimed && reads.nbytes_dense == nbytes_unclaimed && reads.nbytes_stored > 0 &&
                  v->status() == S(OK),
              "%lld tensors, %lld bytes", static_cast<long long>(reads.n), static_cast<long long>(reads.nbytes_dense));
        const macko::sparse_tensor_info & first = file->sparse[seed % 3 == 0 ? 1 : 0];
        const size_t                      t     = m.dense.tensor_index(first.name);
        uint8_t                           byte  = 0;
        v->refuse_unclaimed();
        CHECK(v->read_at(static_cast<int64_t>(l.data_at[t]), &byte, 1) == S(LOAD_FAILED) &&
                  strstr(ggml_macko_last_error(), first.name.c_str()),
              "%s", ggml_macko_last_error());
        fclose(stream);
    }
}

TEST(damage_of_an_unclaimed_tensor_is_an_error) {
    const builder::model m       = base_model();
    bytes                content = builder::serialize(builder::sparse_file(m));
    {
        const memory_file f(content);
        const auto        file   = open_or_die(f);
        const auto &      values = file->header.tensors[file->sparse[0].first];
        std::fill_n(content.begin() + values.offset, 8, 0xff); // NaN
    }
    const memory_file                    f(content);
    const auto                           file = open_or_die(f);
    std::unique_ptr<macko::dense_stream> v;
    CHECK(macko::dense_stream::create(*file, &v) == S(OK), "%s", ggml_macko_last_error());
    FILE * stream = v->open_stream();
    CHECK(stream != nullptr, "%s", ggml_macko_last_error());
    bytes got(static_cast<size_t>(v->size()));
    CHECK(fread(got.data(), 1, got.size(), stream) < got.size() && ferror(stream), "a damaged tensor was read");
    expect("values of an unclaimed tensor", S(NOT_FINITE), v->status());
    CHECK(strstr(ggml_macko_last_error(), file->sparse[0].name.c_str()), "%s", ggml_macko_last_error());
    fclose(stream);
}

TEST(forged_placeholders_do_not_match) {
    const builder::model                 m = base_model();
    const memory_file                    f(builder::serialize(builder::sparse_file(m)));
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
    const memory_file dense(builder::serialize(base_model().dense));
    const auto        file = open_or_die(dense);
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
    const memory_file                  f(builder::serialize(builder::sparse_file(tiny)));
    std::unique_ptr<macko::model_file> small;
    CHECK(macko::model_file_open(f.path().c_str(), false, &small) == S(OK), "%s", ggml_macko_last_error());
    expect("matrix smaller than a placeholder", S(BAD_SHAPE), macko::dense_stream::create(*small, &v));
}
