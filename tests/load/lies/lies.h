// Shared by the tables of lies. A lie is one fault in a valid file; a load must refuse it with the status of that
// fault.
#pragma once

#include "gguf-builder.h"
#include "gguf/model-keys.h"
#include "load/dense-stream.h"
#include "load/payload.h"
#include "temporary.h"
#include "test.h"

#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>

using builder::bytes;
using builder::layout;

// ---- running a file through the checks of a load ----

struct memory_source : macko::byte_source {
    const uint8_t * data;
    int64_t         n;
    memory_source(const uint8_t * d, size_t size) : data(d), n(static_cast<int64_t>(size)) {}
    int64_t size() const override { return n; }
    int     read(int64_t offset, void * dst, int64_t count) const override {
        if (offset < 0 || count < 0 || offset > n || count > n - offset) {
            return macko::fail(GGML_MACKO_STATUS_IO, "test: read outside the file");
        }
        memcpy(dst, data + offset, static_cast<size_t>(count));
        return GGML_MACKO_STATUS_OK;
    }
};

// A header followed by zeros, up to a size that is larger than any memory.
struct hole_source : macko::byte_source {
    bytes   header;
    int64_t n;
    int64_t size() const override { return n; }
    int     read(int64_t offset, void * dst, int64_t count) const override {
        for (int64_t i = 0; i < count; i++) {
            static_cast<uint8_t *>(dst)[i] =
                offset + i < static_cast<int64_t>(header.size()) ? header[static_cast<size_t>(offset + i)] : 0;
        }
        return GGML_MACKO_STATUS_OK;
    }
};

// A file that exists as long as this object.
struct temporary_file {
    std::string path;
    explicit temporary_file(const bytes & content) {
        static const temporary_folder folder("test-gguf-header");
        static int                    n = 0;
        path                            = folder.path + "/" + std::to_string(n++);
        write_file(path, content);
    }
    ~temporary_file() { std::filesystem::remove(path); }
    temporary_file(const temporary_file &) = delete;
};

inline std::set<int> seen; // status codes that at least one file has produced

// Decodes the blocks of a matrix, which arrive in any order, into one dense matrix.
struct collector : macko::payload_consumer {
    bytes                dense;
    std::vector<int64_t> first_values, nnz; // of each block, in the order of their arrival
    int64_t              row_nbytes;
    std::mutex           mutex;
    int                  answer = GGML_MACKO_STATUS_OK;
    bool                 wants_first_value() const override { return true; }
    explicit collector(const macko::sparse_tensor_info & m)
        : dense(static_cast<size_t>(m.nbytes_dense), 0xee), row_nbytes(m.nbytes_dense / m.desc.rows) {}
    int consume(const macko::macko_view & view, int64_t first_value) override {
        macko::decode(view, dense.data() + view.rows().row_begin * row_nbytes);
        const std::lock_guard<std::mutex> lock(mutex);
        first_values.push_back(first_value);
        nnz.push_back(view.nnz());
        return answer == GGML_MACKO_STATUS_OK ? answer : macko::fail(answer, "test: consumer says no");
    }
};

inline int check_all(const bytes & content, bool require_model) {
    const temporary_file               f(content);
    std::unique_ptr<macko::model_file> file;
    int                                status = macko::model_file_open(f.path.c_str(), require_model, &file);
    for (size_t i = 0; status == GGML_MACKO_STATUS_OK && i < file->sparse.size(); i++) {
        collector c(file->sparse[i]);
        status = macko::read_payload(*file, file->sparse[i], 2, c);
    }
    seen.insert(status);
    return status;
}

// Checks the header only: the file is not written, so that it may be larger than memory.
inline int check_header(const builder::file & f) {
    layout      l;
    uint64_t    size = 0;
    hole_source source;
    source.header = builder::serialize_header(f, &l, &size);
    source.n      = static_cast<int64_t>(size);
    macko::model_file file;
    int               status = macko::read_gguf_header(source, &file.header);
    if (status == GGML_MACKO_STATUS_OK) {
        status = macko::check_sparse_tensors(&file);
    }
    seen.insert(status);
    return status;
}

// ---- cases: a change of the valid file, and the expected status ----

using file_lie  = std::function<void(builder::file &)>;
using bytes_lie = std::function<void(bytes &, const layout &)>;

inline const builder::model & base_model() {
    static const builder::model m = builder::tiny_llama(16, 2, 1);
    return m;
}

inline int n_cases = 0;

inline void expect(const char * name, int expected, int status) {
    n_cases++;
    CHECK(status == expected, "%s: expected %s, got %s: %s", name, ggml_macko_status_name(expected),
          ggml_macko_status_name(status), ggml_macko_last_error());
    CHECK(status == GGML_MACKO_STATUS_OK ||
              (strchr(ggml_macko_last_error(), '\n') == nullptr && strlen(ggml_macko_last_error()) > 10),
          "%s: the message is one line: %s", name, ggml_macko_last_error());
}

inline void lie(const char * name, int expected, const file_lie & change) {
    builder::file f = builder::sparse_file(base_model());
    change(f);
    expect(name, expected, check_all(builder::serialize(f), true));
}

inline void patch_lie(const char * name, int expected, const bytes_lie & change) {
    const builder::file f = builder::sparse_file(base_model());
    layout              l;
    bytes               b = builder::serialize(f, &l);
    change(b, l);
    expect(name, expected, check_all(b, true));
}

#define S(name) GGML_MACKO_STATUS_##name
using namespace builder; // NOLINT: keeps the cases below short

inline const char * const UP = "blk.0.ffn_up.weight"; // F16, delta_bits 4, 16 columns, 32 rows
inline const char * const Q  = "blk.0.attn_q.weight";

// Changes the bytes of one component of UP.
using data_lie = std::function<void(bytes &)>;

inline file_lie row_ptr(const data_lie & change) {
    return [=](file & f) { change(f.at(std::string(UP) + ".row_ptr").data); };
}
inline file_lie values(const data_lie & change) {
    return [=](file & f) { change(f.at(std::string(UP) + ".values").data); };
}
inline file_lie deltas(const data_lie & change) {
    return [=](file & f) { change(f.at(std::string(UP) + ".deltas").data); };
}

inline std::unique_ptr<macko::model_file> open_or_die(const temporary_file & f) {
    std::unique_ptr<macko::model_file> file;
    const int                          status = macko::model_file_open(f.path.c_str(), true, &file);
    if (status != GGML_MACKO_STATUS_OK) {
        fprintf(stderr, "cannot open a valid file: %s\n", ggml_macko_last_error());
        exit(1);
    }
    return file;
}

// A sparse model of some size, and its dense stream.
struct served_model {
    builder::model                       m;
    temporary_file                       f;
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

inline std::string ec(const char * component) { return std::string(UP) + component; }

inline file_lie set_u32(const char * key, uint32_t v) {
    return [=](file & f) { f.set(scalar<uint32_t>(key, U32, v)); };
}
inline file_lie set_f32(const char * key, float v) {
    return [=](file & f) { f.set(scalar<float>(key, F32, v)); };
}
inline file_lie set_text(const char * key, const std::string & v) {
    return [=](file & f) { f.set(text(key, v)); };
}

// A supported architecture, and whether its models have experts and a sliding window.
struct arch_case {
    const char * name;
    bool         experts, window;
};

// A file with the keys that llama.cpp's converter writes for the architecture.
inline builder::file arch_file(const arch_case & a) {
    const std::string arch = a.name;
    builder::file     f;
    f.keys   = { text("general.architecture", arch) };
    auto u32 = [&](const std::string & key, uint32_t v) { f.set(scalar<uint32_t>(arch + "." + key, U32, v)); };
    u32("block_count", 6);
    u32("context_length", 4096);
    u32("embedding_length", 64);
    u32("feed_forward_length", 128);
    u32("attention.head_count", 8);
    u32("attention.head_count_kv", 2);
    f.set(scalar<float>(arch + ".attention.layer_norm_rms_epsilon", F32, 1e-6f));
    if (a.experts) {
        u32("expert_count", 4);
        u32("expert_used_count", 2);
        u32("expert_feed_forward_length", 32);
    }
    if (a.window) {
        u32("attention.sliding_window", 128);
    }
    add_spm_vocab(&f);
    return f;
}

// A file of n sparse tensors of one shape without non-zeros, and of dense tensors with `dense` bytes in all.
inline builder::file empty_sparse_file(size_t n, uint64_t cols, uint64_t rows, uint64_t n_padded, uint64_t dense) {
    builder::file            f;
    std::vector<std::string> names, formats;
    std::vector<uint64_t>    ne;
    for (size_t i = 0; i < n; i++) {
        names.push_back("m" + std::to_string(i));
        formats.push_back("macko");
        f.tensors.push_back({ names[i] + ".values", { n_padded }, TYPE_F16, {}, 2 * n_padded });
        f.tensors.push_back({ names[i] + ".deltas", { n_padded / 2 }, TYPE_I8, {}, n_padded / 2 });
        f.tensors.push_back({ names[i] + ".row_ptr", { rows + 1 }, TYPE_I32, {}, 4 * (rows + 1) });
        ne.insert(ne.end(), { cols, rows, 1, 1 });
    }
    for (size_t i = 0; dense > 0; i++) {
        const uint64_t nb = std::min(dense, uint64_t(1) << 34);
        f.tensors.push_back({ "d" + std::to_string(i), { nb }, TYPE_I8, {}, nb });
        dense -= nb;
    }
    f.keys = { scalar<uint32_t>("macko.version", U32, 1),
               texts("macko.tensor.name", names),
               texts("macko.tensor.format", formats),
               array<uint32_t>("macko.tensor.type", U32, std::vector<uint32_t>(n, 1)),
               array<uint64_t>("macko.tensor.ne", U64, ne),
               array<uint32_t>("macko.tensor.index_bits", U32, std::vector<uint32_t>(n, 4)),
               array<uint64_t>("macko.tensor.nnz", U64, std::vector<uint64_t>(n, 0)) };
    return f;
}

// One matrix that is read in several blocks of rows.
inline builder::model model_of_several_blocks(uint64_t seed) {
    std::mt19937_64 rng(seed);
    builder::model  m;
    m.sparse.push_back(
        { "m.weight", { 1021, 1501 }, TYPE_F16, builder::random_data(rng, TYPE_F16, 1021 * 1501, 1021, 0.4) });
    m.bits = { 4 };
    m.dense.tensors.push_back({ "m.weight", m.sparse[0].ne, TYPE_F16, m.sparse[0].data, 0 });
    return m;
}

inline void claim_all(macko::dense_stream & stream, const macko::model_file & file) {
    for (size_t i = 0; i < file.sparse.size(); i++) {
        stream.claim(static_cast<int64_t>(i));
    }
}
