// The stdio stream from which llama.cpp reads a model: its content, its positions, and its errors.
#include "lies.h"

TEST(stream_reads_like_read_at) {
    for (uint64_t seed : { 1, 2, 3 }) {
        const served_model                           served(seed);
        const std::unique_ptr<macko::dense_stream> & v = served.stream;
        claim_all(*v, *served.file);
        bytes whole(static_cast<size_t>(v->size()));
        CHECK(v->read_at(0, whole.data(), v->size()) == S(OK), "%s", ggml_macko_last_error());
        FILE * stream = v->open_stream();
        CHECK(stream != nullptr, "%s", ggml_macko_last_error());
        bytes streamed(whole.size());
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
        const temporary_file f(content);
        const auto           file   = open_or_die(f);
        const auto &         values = file->header.tensors[file->sparse[0].first];
        std::fill_n(content.begin() + values.offset, 8, 0xff); // NaN
    }
    const temporary_file                 f(content);
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
