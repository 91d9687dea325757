// Tests of the file layer with valid and hostile files. Each hostile file has one fault, and must be refused with the
// status of that fault. Limits are tested at their exact value, files are truncated at every byte, and the dense stream
// is compared with a dense file that was written without the library.
#include "gguf-builder.h"
#include "gguf/model-keys.h"
#include "load/activation-keys.h"
#include "load/dense-stream.h"
#include "load/payload.h"
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

// A regular file without a name.
struct memory_file {
    int fd;
    explicit memory_file(const bytes & content) : fd(memfd_create("test", MFD_CLOEXEC)) {
        if (fd < 0 || write(fd, content.data(), content.size()) != static_cast<ssize_t>(content.size())) {
            perror("memfd");
            exit(1);
        }
    }
    ~memory_file() { close(fd); }
    memory_file(const memory_file &) = delete;
    std::string path() const { return "/proc/self/fd/" + std::to_string(fd); }
};

static std::set<int> seen; // status codes that at least one file has produced

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

static int check_all(const bytes & content, bool require_model) {
    const memory_file                  f(content);
    std::unique_ptr<macko::model_file> file;
    int                                status = macko::model_file_open(f.path().c_str(), require_model, &file);
    for (size_t i = 0; status == GGML_MACKO_STATUS_OK && i < file->sparse.size(); i++) {
        collector c(file->sparse[i]);
        status = macko::read_payload(*file, file->sparse[i], 2, c);
    }
    seen.insert(status);
    return status;
}

// Checks the header only: the file is not written, so that it may be larger than memory.
static int check_header(const builder::file & f) {
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

// ---- cases: a change of the valid file, and the status that it must get ----

using file_lie  = std::function<void(builder::file &)>;
using bytes_lie = std::function<void(bytes &, const layout &)>;

static const builder::model & base_model() {
    static const builder::model m = builder::tiny_llama(16, 2, 1);
    return m;
}

static int n_cases = 0;

static void expect(const char * name, int expected, int status) {
    n_cases++;
    CHECK(status == expected, "%s: expected %s, got %s: %s", name, ggml_macko_status_name(expected),
          ggml_macko_status_name(status), ggml_macko_last_error());
    CHECK(status == GGML_MACKO_STATUS_OK ||
              (strchr(ggml_macko_last_error(), '\n') == nullptr && strlen(ggml_macko_last_error()) > 10),
          "%s: the message is one line: %s", name, ggml_macko_last_error());
}

static void lie(const char * name, int expected, const file_lie & change) {
    builder::file f = builder::sparse_file(base_model());
    change(f);
    expect(name, expected, check_all(builder::serialize(f), true));
}

static void patch_lie(const char * name, int expected, const bytes_lie & change) {
    const builder::file f = builder::sparse_file(base_model());
    layout              l;
    bytes               b = builder::serialize(f, &l);
    change(b, l);
    expect(name, expected, check_all(b, true));
}

#define S(name) GGML_MACKO_STATUS_##name
using namespace builder; // NOLINT: keeps the cases below short

static const char * const UP = "blk.0.ffn_up.weight"; // F16, delta_bits 4, 16 columns, 32 rows
static const char * const Q  = "blk.0.attn_q.weight";

TEST(valid_file_is_accepted) {
    lie("the valid file", S(OK), [](file &) {});
    lie("a dense file", S(OK), [](file & f) { f = base_model().dense; });
}

TEST(malformed_magic_or_version_is_refused) {
    patch_lie("magic", S(BAD_MAGIC), [](bytes & b, const layout &) { b[0] = 'X'; });
    patch_lie("magic GGML", S(BAD_MAGIC), [](bytes & b, const layout &) { memcpy(b.data(), "GGML", 4); });
    patch_lie("magic reversed", S(BAD_MAGIC), [](bytes & b, const layout &) { memcpy(b.data(), "FUGG", 4); });
    patch_lie("empty file", S(TRUNCATED), [](bytes & b, const layout &) { b.clear(); });
    patch_lie("three bytes", S(TRUNCATED), [](bytes & b, const layout &) { b.resize(3); });
    lie("version 2", S(BAD_GGUF_VERSION), [](file & f) { f.version = 2; });
    lie("version 4", S(BAD_GGUF_VERSION), [](file & f) { f.version = 4; });
    lie("version 0", S(BAD_GGUF_VERSION), [](file & f) { f.version = 0; });
    lie("big-endian", S(BAD_GGUF_VERSION), [](file & f) { f.version = 3u << 24; });
}

TEST(wrong_count_of_tensors_or_keys_is_refused) {
    patch_lie("n_tensors 2^63", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_tensors_at, uint64_t(1) << 63); });
    patch_lie("n_tensors 2^64-1", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_tensors_at, UINT64_MAX); });
    patch_lie("n_tensors 65537", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_tensors_at, 65537); });
    patch_lie("n_tensors 65536", S(TRUNCATED),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_tensors_at, 65536); });
    patch_lie("n_keys 2^64-1", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_keys_at, UINT64_MAX); });
    patch_lie("n_keys 65537", S(LIMIT), [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_keys_at, 65537); });
    patch_lie("n_keys 65536", S(TRUNCATED),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.n_keys_at, 65536); });
    patch_lie("one key less", S(BAD_SHAPE), [](bytes & b, const layout & l) {
        uint64_t n;
        memcpy(&n, &b[l.n_keys_at], 8);
        patch(&b, l.n_keys_at, n - 1);
    });
}

TEST(malformed_key_name_is_refused) {
    patch_lie("key name 2^40 bytes", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.key_at[1], uint64_t(1) << 40); });
    patch_lie("key name 2^64-1 bytes", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.key_at[1], UINT64_MAX); });
    patch_lie("key name to the end", S(TRUNCATED), [](bytes & b, const layout & l) {
        b.resize(l.key_at[1] + 40);
        patch<uint64_t>(&b, l.key_at[1], 60000);
    });
    lie("key name empty", S(BAD_KEY), [](file & f) { f.keys.insert(f.keys.begin(), text("", "x")); });
    lie("key name with a newline", S(BAD_KEY), [](file & f) { f.keys.push_back(text("a\nb", "x")); });
    lie("key name with NUL", S(BAD_KEY), [](file & f) { f.keys.push_back(text(std::string("a\0b", 3), "x")); });
    lie("key name with escape code", S(BAD_KEY), [](file & f) { f.keys.push_back(text("\x1b[31m", "x")); });
    lie("key name not ASCII", S(BAD_KEY), [](file & f) { f.keys.push_back(text("caf\xc3\xa9", "x")); });
    lie("duplicate key", S(DUPLICATE_KEY), [](file & f) { f.keys.push_back(text("general.name", "two")); });
    lie("duplicate key, other type", S(DUPLICATE_KEY),
        [](file & f) { f.keys.push_back(scalar<uint32_t>("general.architecture", U32, 1)); });
    lie("duplicate sparse key", S(DUPLICATE_KEY),
        [](file & f) { f.keys.push_back(scalar<uint32_t>("macko.version", U32, 1)); });
}

TEST(malformed_key_value_is_refused) {
    lie("value type 13", S(BAD_KEY), [](file & f) { f.find("general.name")->type = 13; });
    lie("value type 2^32-1", S(BAD_KEY), [](file & f) { f.find("general.name")->type = UINT32_MAX; });
    lie("element type 13", S(BAD_KEY),
        [](file & f) { patch<uint32_t>(&f.find("tokenizer.ggml.tokens")->value, 0, 13); });
    lie("array of arrays", S(LIMIT),
        [](file & f) { patch<uint32_t>(&f.find("tokenizer.ggml.tokens")->value, 0, ARRAY); });
    lie("array of 2^24+1", S(LIMIT),
        [](file & f) { patch<uint64_t>(&f.find("tokenizer.ggml.tokens")->value, 4, (1 << 24) + 1); });
    lie("array of 2^64-1", S(LIMIT),
        [](file & f) { patch<uint64_t>(&f.find("tokenizer.ggml.scores")->value, 4, UINT64_MAX); });
    lie("array of 2^62 u64", S(LIMIT),
        [](file & f) { patch<uint64_t>(&f.find("macko.tensor.ne")->value, 4, uint64_t(1) << 62); });
    lie("array of 2^24 strings", S(TRUNCATED),
        [](file & f) { patch<uint64_t>(&f.find("tokenizer.ggml.tokens")->value, 4, 1 << 24); });
    lie("array of 2^24 floats", S(TRUNCATED),
        [](file & f) { patch<uint64_t>(&f.find("tokenizer.ggml.scores")->value, 4, 1 << 24); });
    lie("string of 64 MiB + 1", S(LIMIT),
        [](file & f) { patch<uint64_t>(&f.find("general.name")->value, 0, (64 << 20) + 1); });
    lie("string of 2^64-1", S(LIMIT), [](file & f) { patch<uint64_t>(&f.find("general.name")->value, 0, UINT64_MAX); });
    lie("string of 64 MiB", S(TRUNCATED),
        [](file & f) { patch<uint64_t>(&f.find("general.name")->value, 0, 64 << 20); });
    lie("token of 2^63", S(LIMIT),
        [](file & f) { patch<uint64_t>(&f.find("tokenizer.ggml.tokens")->value, 12, uint64_t(1) << 63); });
    lie("bool of 2", S(BAD_KEY_VALUE), [](file & f) { f.find("tokenizer.ggml.add_bos_token")->value[0] = 2; });
    lie("bool array with 255", S(BAD_KEY_VALUE),
        [](file & f) { f.keys.push_back(array<uint8_t>("x.flags", BOOL, { 0, 1, 255 })); });
}

TEST(malformed_alignment_is_refused) {
    for (uint32_t a : { 0u, 1u, 4u, 7u, 24u, 33u, 1u << 21, 0x80000000u, UINT32_MAX }) {
        lie("alignment", S(BAD_ALIGNMENT), [a](file & f) { f.set(scalar<uint32_t>("general.alignment", U32, a)); });
    }
    lie("alignment of the wrong type", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint64_t>("general.alignment", U64, 32)); });
    lie("alignment is a string", S(BAD_KEY_TYPE), [](file & f) { f.set(text("general.alignment", "32")); });
    lie("alignment 64, data at 32", S(BAD_OFFSET),
        [](file & f) { f.set(scalar<uint32_t>("general.alignment", U32, 64)); });
}

TEST(malformed_tensor_is_refused) {
    patch_lie("tensor name 2^64-1", S(LIMIT),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.tensor_at[1], UINT64_MAX); });
    patch_lie("tensor name empty", S(BAD_NAME),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.tensor_at[1], 0); });
    lie("tensor name 64 bytes", S(BAD_NAME), [](file & f) { f.tensors[0].name = std::string(64, 'a'); });
    lie("tensor name with newline", S(BAD_NAME), [](file & f) { f.tensors[0].name = "token\nembd"; });
    lie("tensor name with NUL", S(BAD_NAME), [](file & f) { f.tensors[0].name = std::string("a\0b", 3); });
    lie("tensor name with DEL", S(BAD_NAME), [](file & f) { f.tensors[0].name = "a\x7f"; });
    lie("duplicate tensor", S(DUPLICATE_TENSOR),
        [](file & f) { f.at("blk.1.ffn_norm.weight").name = "blk.0.ffn_norm.weight"; });
    lie("duplicate component", S(DUPLICATE_TENSOR),
        [](file & f) { f.at("blk.1.attn_q.weight.values").name = "blk.0.attn_q.weight.values"; });
    lie("no dimensions", S(BAD_SHAPE), [](file & f) { f.at("output_norm.weight").ne.clear(); });
    lie("five dimensions", S(BAD_SHAPE), [](file & f) { f.at("output_norm.weight").ne = { 16, 1, 1, 1, 1 }; });
    patch_lie("2^32-1 dimensions", S(BAD_SHAPE),
              [](bytes & b, const layout & l) { patch<uint32_t>(&b, l.dims_at[0], UINT32_MAX); });
    lie("ne0 zero", S(BAD_SHAPE), [](file & f) { f.at("output_norm.weight").ne = { 0 }; });
    lie("ne1 zero", S(BAD_SHAPE), [](file & f) { f.at("token_embd.weight").ne[1] = 0; });
    lie("ne0 2^63", S(BAD_SHAPE), [](file & f) { f.at("output_norm.weight").ne = { uint64_t(1) << 63 }; });
    lie("ne0 2^64-1", S(BAD_SHAPE), [](file & f) { f.at("output_norm.weight").ne = { UINT64_MAX }; });
    lie("elements overflow", S(LIMIT),
        [](file & f) { f.at("token_embd.weight").ne = { uint64_t(1) << 32, uint64_t(1) << 32 }; });
    lie("bytes overflow", S(LIMIT), [](file & f) { f.at("token_embd.weight").ne = { uint64_t(1) << 62 }; });
    lie("2^62 x 3", S(LIMIT), [](file & f) { f.at("token_embd.weight").ne = { uint64_t(1) << 62, 3 }; });
    lie("elements wrap to few", S(LIMIT),
        [](file & f) { f.at("token_embd.weight").ne = { uint64_t(1) << 33, uint64_t(1) << 31, 4 }; });
    lie("bomb", S(BAD_OFFSET), [](file & f) { f.at("token_embd.weight").ne = { 1 << 16, 1 << 16 }; });
    lie("bomb in the last tensor", S(TRUNCATED),
        [](file & f) { f.at("output_norm.weight").ne = { 1 << 16, 1 << 15 }; });
    for (uint32_t type : { 4u, 5u, 31u, 36u, 43u, 1000u, UINT32_MAX }) {
        lie("unknown type", S(BAD_TYPE), [type](file & f) { f.tensors[0].type = type; });
    }
    lie("rows of partial blocks", S(BAD_SHAPE), [](file & f) { f.at("token_embd.weight").type = TYPE_Q8_0; });
    patch_lie("first offset not 0", S(BAD_OFFSET),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.offset_at[0], 32); });
    patch_lie("offset of the previous", S(BAD_OFFSET),
              [](bytes & b, const layout & l) { memcpy(&b[l.offset_at[2]], &b[l.offset_at[1]], 8); });
    patch_lie("offset with a hole", S(BAD_OFFSET), [](bytes & b, const layout & l) {
        uint64_t o;
        memcpy(&o, &b[l.offset_at[2]], 8);
        patch(&b, l.offset_at[2], o + 32);
    });
    patch_lie("offset misaligned", S(BAD_OFFSET), [](bytes & b, const layout & l) {
        uint64_t o;
        memcpy(&o, &b[l.offset_at[2]], 8);
        patch(&b, l.offset_at[2], o + 1);
    });
    patch_lie("offset 2^64-32", S(BAD_OFFSET),
              [](bytes & b, const layout & l) { patch<uint64_t>(&b, l.offset_at[2], UINT64_MAX - 31); });
    patch_lie("offsets swapped", S(BAD_OFFSET), [](bytes & b, const layout & l) {
        std::swap_ranges(&b[l.offset_at[1]], &b[l.offset_at[1]] + 8, &b[l.offset_at[3]]);
    });
    patch_lie("data behind the end", S(TRAILING_DATA), [](bytes & b, const layout &) { b.insert(b.end(), 32, 0); });
    patch_lie("one byte behind", S(TRAILING_DATA), [](bytes & b, const layout &) { b.push_back(0); });
    patch_lie("a ZIP behind the end", S(TRAILING_DATA),
              [](bytes & b, const layout &) { b.insert(b.end(), { 'P', 'K', 5, 6 }); });
    lie("tensor cut from the table", S(BAD_OFFSET),
        [](file & f) { f.tensors[0].data.resize(f.tensors[0].data.size() - 32); });
    lie("64 bytes more than declared", S(TRAILING_DATA), [](file & f) { f.tensors.back().hole = 64; });
    patch_lie("no tensors, but data", S(TRAILING_DATA), [](bytes & b, const layout & l) {
        b.resize(l.tensor_at[0] + 64);
        patch<uint64_t>(&b, l.n_tensors_at, 0);
    });
}

TEST(malformed_format_version_is_refused) {
    lie("reader too old", S(FORMAT_VERSION), [](file & f) {
        f.set(scalar<uint32_t>("macko.version", U32, 8));
        f.set(scalar<uint32_t>("macko.min_reader_version", U32, 7));
    });
    lie("reader much too old", S(FORMAT_VERSION),
        [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, UINT32_MAX)); });
    lie("version 0", S(BAD_KEY_VALUE), [](file & f) { f.set(scalar<uint32_t>("macko.version", U32, 0)); });
    lie("min_reader_version 0", S(BAD_KEY_VALUE),
        [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, 0)); });
    lie("version is a string", S(BAD_KEY_TYPE), [](file & f) { f.set(text("macko.version", "1")); });
    lie("version is u64", S(BAD_KEY_TYPE), [](file & f) { f.set(scalar<uint64_t>("macko.version", U64, 1)); });
    lie("min_reader_version is i32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<int32_t>("macko.min_reader_version", I32, 1)); });
}

static void lie_of_activations(const char * what, int expected, const file_lie & change) {
    lie(what, expected, [&](file & f) {
        set_activation_keys(&f);
        change(f);
    });
}

TEST(malformed_activation_keys_are_refused) {
    lie("activation keys", S(OK), [](file & f) { set_activation_keys(&f); });
    for (const char * name : { "macko.act.kind", "macko.act.share", "macko.act.allocation", "macko.act.text",
                               "macko.act.chunks", "macko.act.n_ctx", "macko.act.part.down", "macko.act.part.share",
                               "macko.act.part.threshold", "macko.act.part.zeros" }) {
        lie_of_activations(name, S(MISSING_KEY), [name](file & f) { f.drop(name); });
        lie_of_activations(name, S(BAD_KEY_TYPE), [name](file & f) { f.set(scalar<int32_t>(name, I32, 1)); });
        lie_of_activations(name, S(BAD_KEY_TYPE), [name](file & f) { f.set(array<uint64_t>(name, U64, { 1, 1 })); });
    }
    lie_of_activations("another key", S(BAD_KEY), [](file & f) { f.set(text("macko.act.note", "x")); });
    for (const char * name : { "macko.act.kind", "macko.act.allocation" }) {
        for (const char * value : { "", "Product", "product\n", "cats,product" }) {
            lie_of_activations(name, S(BAD_KEY_VALUE), [&](file & f) { f.set(text(name, value)); });
        }
    }
    const float beyond_one = std::nextafter(1.0f, 2.0f);
    for (const float value : { -FLT_TRUE_MIN, beyond_one, NAN, INFINITY, -INFINITY }) {
        lie_of_activations("share", S(BAD_KEY_VALUE),
                           [&](file & f) { f.set(scalar<float>("macko.act.share", F32, value)); });
        for (const char * name : { "macko.act.part.share", "macko.act.part.zeros" }) {
            lie_of_activations(name, S(BAD_KEY_VALUE),
                               [&](file & f) { f.set(array<float>(name, F32, { 0.5f, value })); });
        }
        lie_of_activations("threshold", value == beyond_one ? S(OK) : S(BAD_KEY_VALUE),
                           [&](file & f) { f.set(array<float>("macko.act.part.threshold", F32, { value, 1 })); });
    }
    for (const char * name : { "macko.act.chunks", "macko.act.n_ctx" }) {
        lie_of_activations(name, S(BAD_KEY_VALUE), [name](file & f) { f.set(scalar<uint32_t>(name, U32, 0)); });
    }
    for (const size_t n : { 0, 1, 3 }) {
        for (const char * name : { "macko.act.part.share", "macko.act.part.threshold", "macko.act.part.zeros" }) {
            lie_of_activations(name, S(BAD_KEY_VALUE),
                               [&](file & f) { f.set(array<float>(name, F32, std::vector<float>(n, 0.5f))); });
        }
        lie_of_activations("parts", S(BAD_KEY_VALUE), [&](file & f) {
            const std::vector<std::string> all = { "a", "b", "c" };
            f.set(texts("macko.act.part.down", { all.begin(), all.begin() + static_cast<int64_t>(n) }));
        });
    }
    lie_of_activations("more parts than tensors", S(BAD_KEY_VALUE), [](file & f) {
        std::vector<std::string> names;
        for (size_t i = 0; i < 65537; i++) {
            names.push_back(std::to_string(i));
        }
        f.set(texts("macko.act.part.down", names));
        for (const char * name : { "macko.act.part.share", "macko.act.part.threshold", "macko.act.part.zeros" }) {
            f.set(array<float>(name, F32, std::vector<float>(names.size())));
        }
    });
    lie_of_activations("part twice", S(BAD_KEY_VALUE), [](file & f) {
        f.set(texts("macko.act.part.down", { "blk.1.ffn_down.weight", "blk.1.ffn_down.weight" }));
    });
    lie_of_activations("name of 63 bytes", S(OK),
                       [](file & f) { f.set(texts("macko.act.part.down", { "a", std::string(63, 'x') })); });
    for (const size_t n : { 0, 64 }) {
        lie_of_activations("name of a part", S(BAD_KEY_VALUE),
                           [n](file & f) { f.set(texts("macko.act.part.down", { "a", std::string(n, 'x') })); });
    }
    for (const size_t n : { 0, 1024, 1025 }) {
        lie_of_activations("name of a text", n == 1024 ? S(OK) : S(BAD_KEY_VALUE),
                           [n](file & f) { f.set(text("macko.act.text", std::string(n, 'x'))); });
    }
}

// Of the downs that the keys name; of anything else, and without the keys, none are known.
TEST(zeros_of_a_down_are_read) {
    const builder::model m         = builder::tiny_llama(512, 2, 31);
    file                 with_keys = builder::sparse_file(m);
    set_activation_keys(&with_keys);
    for (const bool has_keys : { true, false }) {
        const bytes         b = builder::serialize(has_keys ? with_keys : builder::sparse_file(m));
        macko::model_file   file;
        const memory_source source(b.data(), b.size());
        CHECK(macko::read_gguf_header(source, &file.header) == S(OK), "%s", ggml_macko_last_error());
        CHECK(macko::check_sparse_tensors(&file) == S(OK), "%s", ggml_macko_last_error());
        const auto zeros = [&](const char * down) { return macko::activation_zeros(file.header, down); };
        CHECK(zeros("blk.0.ffn_down.weight") == (has_keys ? 0.125f : 0), "%g", zeros("blk.0.ffn_down.weight"));
        CHECK(zeros("blk.1.ffn_down.weight") == (has_keys ? 1.0f : 0), "%g", zeros("blk.1.ffn_down.weight"));
        for (const char * other : { "", "blk.0.ffn_down.weigh", "blk.0.ffn_down.weight ", "blk.0.ffn_up.weight" }) {
            CHECK(zeros(other) == 0, "'%s': %g", other, zeros(other));
        }
    }
}

TEST(malformed_sparse_keys_are_refused) {
    for (const char * name :
         { "macko.min_reader_version", "macko.tensor.name", "macko.tensor.format", "macko.tensor.type",
           "macko.tensor.ne", "macko.tensor.delta_bits", "macko.tensor.nnz" }) {
        lie(name, S(MISSING_KEY), [name](file & f) { f.drop(name); });
    }
    lie("macko.version missing", S(BAD_KEY), [](file & f) { f.drop("macko.version"); });
    lie("reserved key", S(BAD_KEY), [](file & f) { f.keys.push_back(text("macko.tensor.checksum", "x")); });
    lie("reserved key, bare", S(BAD_KEY), [](file & f) { f.keys.push_back(text("macko.", "x")); });
    lie("experimental key", S(OK), [](file & f) { f.keys.push_back(text("macko.x-note", "x")); });
    lie("names are u32", S(BAD_KEY_TYPE), [](file & f) { f.set(array<uint32_t>("macko.tensor.name", U32, { 1 })); });
    lie("names are one string", S(BAD_KEY_TYPE), [](file & f) { f.set(text("macko.tensor.name", UP)); });
    lie("formats are u8", S(BAD_KEY_TYPE), [](file & f) { f.set(array<uint8_t>("macko.tensor.format", U8, { 1 })); });
    lie("types are i32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<int32_t>("macko.tensor.type", I32, std::vector<int32_t>(12, 1))); });
    lie("ne is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("macko.tensor.ne", U32, std::vector<uint32_t>(48, 16))); });
    lie("nnz is i64", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<int64_t>("macko.tensor.nnz", I64, std::vector<int64_t>(12, 16))); });
    lie("no names", S(BAD_KEY_VALUE), [](file & f) { f.set(texts("macko.tensor.name", {})); });
    lie("one name less", S(BAD_KEY_VALUE), [](file & f) {
        std::vector<std::string> n;
        for (size_t i = 0; i + 1 < base_model().sparse.size(); i++) {
            n.push_back(base_model().sparse[i].name);
        }
        f.set(texts("macko.tensor.name", n));
    });
    lie("21846 names", S(LIMIT),
        [](file & f) { f.set(texts("macko.tensor.name", std::vector<std::string>(21846, "a"))); });
    lie("formats too few", S(BAD_KEY_VALUE), [](file & f) { f.set(texts("macko.tensor.format", { "macko" })); });
    lie("types too many", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("macko.tensor.type", U32, std::vector<uint32_t>(13, 1))); });
    lie("ne too few", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint64_t>("macko.tensor.ne", U64, std::vector<uint64_t>(47, 16))); });
    lie("delta_bits too few", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("macko.tensor.delta_bits", U32, { 4 })); });
    lie("nnz too few", S(BAD_KEY_VALUE), [](file & f) { f.set(array<uint64_t>("macko.tensor.nnz", U64, { 4 })); });
}

// Change element i of one of the arrays macko.tensor.*, whose elements begin at byte 12 of the value. Elements 0 to 5
// of these arrays are q, k, output, gate, up and down of layer 0; macko.tensor.ne has four numbers for each.
static file_lie u32_at(const char * key, size_t i, uint32_t value) {
    return [=](file & f) { patch<uint32_t>(&f.find(key)->value, 12 + 4 * i, value); };
}
static file_lie u64_at(const char * key, size_t i, uint64_t value) {
    return [=](file & f) { patch<uint64_t>(&f.find(key)->value, 12 + 8 * i, value); };
}

TEST(malformed_sparse_format_is_refused) {
    lie("format ec-csr", S(BAD_FORMAT), [](file & f) {
        std::vector<std::string> v(12, "macko");
        v[4] = "ec-csr";
        f.set(texts("macko.tensor.format", v));
    });
    lie("format empty", S(BAD_FORMAT), [](file & f) {
        std::vector<std::string> v(12, "macko");
        v[0] = "";
        f.set(texts("macko.tensor.format", v));
    });
    lie("format with NUL", S(BAD_FORMAT), [](file & f) {
        std::vector<std::string> v(12, "macko");
        v[0] = std::string("macko\0x", 7);
        f.set(texts("macko.tensor.format", v));
    });
    for (uint32_t type : { 2u, 8u, 24u, 26u, 28u, 0x80000001u, UINT32_MAX }) {
        lie("value type", S(BAD_FORMAT), u32_at("macko.tensor.type", 4, type));
    }
    lie("BF16 for F16", S(BAD_COMPONENT), u32_at("macko.tensor.type", 4, 30));
    lie("F32 for F16", S(BAD_COMPONENT), u32_at("macko.tensor.type", 4, 0));
    for (uint32_t bits : { 0u, 3u, 5u, 16u, 0x80000004u }) {
        lie("delta_bits", S(BAD_FORMAT), u32_at("macko.tensor.delta_bits", 4, bits));
    }
    lie("8 bits for 4", S(BAD_COMPONENT), u32_at("macko.tensor.delta_bits", 4, 8));
    lie("2 bits for 4", S(BAD_COMPONENT), u32_at("macko.tensor.delta_bits", 4, 2));
}

TEST(malformed_sparse_shape_is_refused) {
    lie("cols 0", S(BAD_SHAPE), u64_at("macko.tensor.ne", 16, 0));
    lie("rows 0", S(BAD_SHAPE), u64_at("macko.tensor.ne", 17, 0));
    lie("ne3 0", S(BAD_SHAPE), u64_at("macko.tensor.ne", 19, 0));
    lie("cols 2^24+1", S(LIMIT), u64_at("macko.tensor.ne", 16, (1 << 24) + 1));
    lie("rows 2^24+1", S(LIMIT), u64_at("macko.tensor.ne", 17, (1 << 24) + 1));
    lie("cols 2^63", S(LIMIT), u64_at("macko.tensor.ne", 16, uint64_t(1) << 63));
    lie("rows overflow", S(LIMIT), [](file & f) {
        for (size_t d : { 17, 18, 19 }) {
            patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * d, uint64_t(1) << 30);
        }
    });
    lie("rows wrap to 32", S(LIMIT), [](file & f) {
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 18, uint64_t(1) << 62);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 19, 8);
    });
    lie("dense tensor of 512 TiB", S(LIMIT), [](file & f) {
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 16, 1 << 24);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 17, 1 << 24);
    });
    lie("rows one more", S(BAD_COMPONENT), u64_at("macko.tensor.ne", 17, 33));
    lie("rows one less", S(BAD_COMPONENT), u64_at("macko.tensor.ne", 17, 31));
    lie("expansion beyond 64", S(LIMIT), u64_at("macko.tensor.ne", 16, 1 << 20));
    lie("fewer cols", S(BAD_COLUMN), u64_at("macko.tensor.ne", 16, 15));
    lie("cols 1: more entries than elements", S(BAD_NNZ), u64_at("macko.tensor.ne", 0, 1));
}

TEST(wrong_nnz_is_refused) {
    lie("nnz 2^63", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, uint64_t(1) << 63));
    lie("nnz 2^64-1", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, UINT64_MAX));
    lie("nnz more than elements", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, 16 * 32 + 1));
    lie("nnz more than entries", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, 16 * 32));
    lie("nnz of an empty matrix", S(BAD_NNZ), u64_at("macko.tensor.nnz", 11, 1));
    lie("nnz one less", S(BAD_NNZ), [](file & f) { f.find("macko.tensor.nnz")->value[12 + 8 * 4]--; });
    lie("nnz one more", S(BAD_NNZ), [](file & f) { f.find("macko.tensor.nnz")->value[12 + 8 * 4]++; });
}

static file_lie rename_sparse(size_t i, const std::string & name) {
    return [=](file & f) {
        std::vector<std::string> names;
        for (const dense_matrix & m : base_model().sparse) {
            names.push_back(m.name);
        }
        names[i] = name;
        f.set(texts("macko.tensor.name", names));
    };
}

TEST(malformed_sparse_name_is_refused) {
    lie("sparse name unknown", S(MISSING_COMPONENT), rename_sparse(4, "blk.0.nonesuch.weight"));
    lie("sparse name empty", S(BAD_NAME), rename_sparse(4, ""));
    lie("sparse name 56 bytes", S(BAD_NAME), rename_sparse(4, std::string(56, 'x')));
    lie("sparse name 55 bytes", S(MISSING_COMPONENT), rename_sparse(4, std::string(55, 'x')));
    lie("sparse name with newline", S(BAD_NAME), rename_sparse(4, "blk\n0"));
    lie("sparse name with NUL", S(BAD_NAME), rename_sparse(4, std::string("blk.0.ffn_up.weight\0", 20)));
    lie("sparse name twice", S(DUPLICATE_TENSOR), rename_sparse(4, Q));
    lie("sparse name is a dense one", S(MISSING_COMPONENT), rename_sparse(4, "output_norm.weight"));
    lie("dense tensor beside sparse", S(DUPLICATE_TENSOR), [](file & f) { f.at("output_norm.weight").name = UP; });
    lie("dense tensor before sparse", S(DUPLICATE_TENSOR), [](file & f) { f.at("token_embd.weight").name = UP; });
    lie("names in another order", S(BAD_COMPONENT), [](file & f) {
        std::vector<std::string> names;
        for (const dense_matrix & m : base_model().sparse) {
            names.push_back(m.name);
        }
        std::swap(names[0], names[2]); // these have the same shape and type
        f.set(texts("macko.tensor.name", names));
    });
}

TEST(malformed_component_is_refused) {
    for (const char * component : { ".values", ".deltas", ".row_ptr" }) {
        const std::string name = std::string(UP) + component;
        lie("component missing", S(MISSING_COMPONENT),
            [=](file & f) { f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(name))); });
        lie("component renamed", S(MISSING_COMPONENT), [=](file & f) { f.at(name).name = std::string(UP) + ".bogus"; });
        lie("component moved to the end", S(BAD_COMPONENT), [=](file & f) {
            tensor t = f.at(name);
            f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(name)));
            f.tensors.push_back(t);
        });
        lie("component of wrong type", S(BAD_COMPONENT), [=](file & f) {
            tensor & t = f.at(name);
            t.type     = t.type == TYPE_I8 ? TYPE_I32 : TYPE_I8;
            t.ne[0]    = t.type == TYPE_I8 ? t.data.size() : t.data.size() / 4;
        });
        lie("component of two dims", S(BAD_COMPONENT), [=](file & f) { f.at(name).ne.push_back(1); });
        lie("component longer", S(BAD_COMPONENT), [=](file & f) {
            tensor &     t  = f.at(name);
            const size_t nb = t.data.size() / t.ne[0];
            t.ne[0] += 4;
            t.data.resize(t.data.size() + 4 * nb);
        });
        lie("component shorter", S(BAD_COMPONENT), [=](file & f) {
            tensor &     t  = f.at(name);
            const size_t nb = t.data.size() / t.ne[0];
            t.ne[0] -= 4;
            t.data.resize(t.data.size() - 4 * nb);
        });
    }
}

TEST(wrong_order_of_components_is_refused) {
    lie("components swapped", S(BAD_COMPONENT), [](file & f) {
        const size_t i = f.tensor_index(std::string(UP) + ".values");
        std::swap(f.tensors[i], f.tensors[i + 1]);
    });
    lie("tensor between components", S(BAD_COMPONENT), [](file & f) {
        const size_t i    = f.tensor_index(std::string(UP) + ".deltas");
        tensor       norm = f.at("output_norm.weight");
        f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index("output_norm.weight")));
        f.tensors.insert(f.tensors.begin() + static_cast<int64_t>(i), norm);
    });
    lie("unknown suffix", S(BAD_COMPONENT),
        [](file & f) { f.at("output_norm.weight").name = std::string(UP) + ".scales"; });
    lie("unknown suffix, before", S(BAD_COMPONENT),
        [](file & f) { f.at("token_embd.weight").name = std::string(UP) + ".values2"; });
    lie("suffix of a suffix", S(BAD_COMPONENT),
        [](file & f) { f.at("output_norm.weight").name = std::string(UP) + ".values.x"; });
    lie("component of nothing", S(BAD_COMPONENT), [](file & f) { f.at("output_norm.weight").name = "nobody.values"; });
}

TEST(wrong_length_of_values_is_refused) {
    lie("values 8 more, zero", S(BAD_COMPONENT), [](file & f) {
        tensor & t = f.at(std::string(UP) + ".values");
        t.ne[0] += 8;
        t.data.resize(t.data.size() + 16);
    });
    lie("padding of 8 more", S(BAD_ROW_PTR), [](file & f) { // the lengths fit each other, but not row_ptr
        tensor & v = f.at(std::string(UP) + ".values");
        tensor & d = f.at(std::string(UP) + ".deltas");
        v.ne[0] += 8;
        v.data.resize(v.data.size() + 16);
        d.ne[0] = (v.ne[0] / 2 + 3) / 4 * 4;
        d.data.resize(d.ne[0]);
    });
}

static int32_t row_ptr_get(const bytes & data, size_t r) {
    int32_t v;
    memcpy(&v, &data[4 * r], 4);
    return v;
}

// Change the bytes of one component of UP.
using data_lie = std::function<void(bytes &)>;

static file_lie row_ptr(const data_lie & change) {
    return [=](file & f) { change(f.at(std::string(UP) + ".row_ptr").data); };
}
static file_lie values(const data_lie & change) {
    return [=](file & f) { change(f.at(std::string(UP) + ".values").data); };
}
static file_lie deltas(const data_lie & change) {
    return [=](file & f) { change(f.at(std::string(UP) + ".deltas").data); };
}

TEST(malformed_row_ptr_is_refused) {
    lie("row_ptr[0] is 1", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 0, 1); }));
    lie("row_ptr[0] is -1", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 0, -1); }));
    lie("row_ptr negative", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 5, -5); }));
    lie("row_ptr decreases", S(BAD_ROW_PTR), row_ptr([](bytes & d) {
            patch<int32_t>(&d, 4 * 5, row_ptr_get(d, 32));
            patch<int32_t>(&d, 4 * 6, 0);
        }));
    lie("row_ptr beyond the payload", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 5, INT32_MAX); }));
    lie("row_ptr INT32_MIN", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 5, INT32_MIN); }));
    lie("last row_ptr too large", S(BAD_ROW_PTR),
        row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 32, row_ptr_get(d, 32) + 8); }));
    lie("last row_ptr too small", S(BAD_ROW_PTR), row_ptr([](bytes & d) {
            for (size_t r = 0; r <= 32; r++) {
                patch<int32_t>(&d, 4 * r, 0);
            }
        }));
    lie("all row_ptr INT32_MAX", S(LIMIT), row_ptr([](bytes & d) {
            for (size_t r = 1; r <= 32; r++) {
                patch<int32_t>(&d, 4 * r, INT32_MAX);
            }
        }));
}

TEST(column_past_the_last_is_refused) {
    lie("all in one row", S(BAD_COLUMN), row_ptr([](bytes & d) {
            for (size_t r = 1; r < 32; r++) {
                patch<int32_t>(&d, 4 * r, row_ptr_get(d, 32));
            }
        }));
    lie("a delta past the last col", S(BAD_COLUMN), deltas([](bytes & d) {
            d[0] = 0xff;
            d[1] = 0xff;
            d[2] = 0xff;
            d[3] = 0xff;
        }));
}

TEST(payload_that_is_not_canonical_is_refused) {
    lie("value zero, code 0", S(NOT_CANONICAL), [](file & f) { // the first entry of a row with two or more
        const bytes & rp = f.at(std::string(UP) + ".row_ptr").data;
        size_t        r  = 0;
        while (row_ptr_get(rp, r + 1) - row_ptr_get(rp, r) < 2) {
            r++;
        }
        patch<uint16_t>(&f.at(std::string(UP) + ".values").data, 2 * static_cast<size_t>(row_ptr_get(rp, r)), 0);
    });
    lie("last of a row is zero", S(NOT_CANONICAL), [](file & f) {
        const bytes & rp = f.at(std::string(UP) + ".row_ptr").data;
        patch<uint16_t>(&f.at(std::string(UP) + ".values").data, 2 * static_cast<size_t>(row_ptr_get(rp, 32)) - 2, 0);
    });
    lie("hidden value in the padding", S(NOT_CANONICAL), [](file & f) {
        for (size_t i = 0; i < f.tensors.size(); i++) { // of a matrix with padding
            if (f.tensors[i].name.find(".row_ptr") != std::string::npos &&
                row_ptr_get(f.tensors[i].data, f.tensors[i].ne[0] - 1) % 8 != 0) {
                f.tensors[i - 2].data.back() = 1;
                return;
            }
        }
        throw std::runtime_error("no matrix with padding");
    });
    lie("hidden value in an empty matrix", S(NOT_CANONICAL),
        [](file & f) { f.at("blk.1.ffn_down.weight.values").data[3] = 1; });
    lie("hidden delta in an empty matrix", S(NOT_CANONICAL),
        [](file & f) { f.at("blk.1.ffn_down.weight.deltas").data[3] = 0x10; });
    // With delta_bits 1 the codes take n_padded / 8 bytes, and up to 3 bytes of padding follow.
    lie("hidden bits behind the deltas", S(NOT_CANONICAL), [](file & f) {
        for (tensor & t : f.tensors) {
            if (t.name.find("ffn_gate.weight.values") != std::string::npos && t.ne[0] / 8 % 4 != 0) {
                f.tensors[f.tensor_index(t.name) + 1].data.back() = 0x80;
                return;
            }
        }
        throw std::runtime_error("no matrix with such a tail");
    });
}

TEST(value_that_is_not_finite_is_refused) {
    lie("F16 infinity", S(NOT_FINITE), values([](bytes & d) { patch<uint16_t>(&d, 0, 0x7c00); }));
    lie("F16 NaN", S(NOT_FINITE), values([](bytes & d) { patch<uint16_t>(&d, 0, 0xfe01); }));
    lie("BF16 NaN", S(NOT_FINITE),
        [](file & f) { patch<uint16_t>(&f.at("blk.0.attn_k.weight.values").data, 0, 0x7fc0); });
    lie("BF16 -infinity", S(NOT_FINITE),
        [](file & f) { patch<uint16_t>(&f.at("blk.0.attn_k.weight.values").data, 0, 0xff80); });
    lie("F32 infinity", S(NOT_FINITE),
        [](file & f) { patch<uint32_t>(&f.at("blk.0.ffn_gate.weight.values").data, 0, 0x7f800000); });
    lie("F32 NaN", S(NOT_FINITE),
        [](file & f) { patch<uint32_t>(&f.at("blk.0.ffn_gate.weight.values").data, 0, 0x7fc00001); });
    lie("F16 -0.0 is a value", S(OK), values([](bytes & d) { patch<uint16_t>(&d, 0, 0x8000); }));
    lie("F16 65504", S(OK), values([](bytes & d) { patch<uint16_t>(&d, 0, 0x7bff); }));
}

// ---- helpers for several formats ----

static std::unique_ptr<macko::model_file> open_or_die(const memory_file & f) {
    std::unique_ptr<macko::model_file> file;
    const int                          status = macko::model_file_open(f.path().c_str(), true, &file);
    if (status != GGML_MACKO_STATUS_OK) {
        fprintf(stderr, "cannot open a valid file: %s\n", ggml_macko_last_error());
        exit(1);
    }
    return file;
}

// ---- packed: faults of the header, and some of the payload; test-packed.cpp has all faults of the payload ----

TEST(malformed_packed_is_refused) {
    const auto packed_lie = [](const char * name, int expected, const file_lie & change) {
        builder::file f = builder::sparse_file(base_model(), false, true);
        change(f);
        expect(name, expected, check_all(builder::serialize(f), true));
    };
    const auto q8     = [](const char * component) { return base_model().sparse[0].name + component; }; // Q8_0
    const auto nl     = [](const char * component) { return base_model().sparse[4].name + component; }; // Q4_NL
    const auto coded  = [](const char * component) { return base_model().sparse[5].name + component; };
    const auto plain  = [](const char * component) { return base_model().sparse[6].name + component; };
    const auto resize = [](const std::string & name, int64_t n, size_t nbytes) {
        return [=](file & f) {
            tensor & t = f.at(name);
            t.ne[0] += static_cast<uint64_t>(n);
            t.data.resize(nbytes ? t.ne[0] / 32 * nbytes : t.ne[0]);
        };
    };
    packed_lie("a valid packed file", S(OK), [](file &) {});
    packed_lie("packed for old readers", S(BAD_FORMAT),
               [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, 2)); });
    packed_lie("Q5_0 values for old readers", S(BAD_FORMAT),
               [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, 3)); });
    packed_lie("Q4_NL values for old readers", S(BAD_FORMAT),
               [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, 4)); });
    packed_lie("coded values for old readers", S(BAD_FORMAT),
               [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, 5)); });
    packed_lie("packed with 3 bits", S(BAD_FORMAT), [](file & f) {
        f.set(array<uint32_t>("macko.tensor.delta_bits", U32, std::vector<uint32_t>(base_model().sparse.size(), 3)));
    });
    packed_lie("packed called macko", S(BAD_FORMAT), [](file & f) {
        f.set(texts("macko.tensor.format", std::vector<std::string>(base_model().sparse.size(), "macko")));
    });
    for (const char * component : { ".values", ".index", ".row_ptr" }) {
        packed_lie("packed component missing", S(MISSING_COMPONENT), [=](file & f) {
            f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(q8(component))));
        });
        packed_lie("packed component of rank 2", S(BAD_COMPONENT),
                   [=](file & f) { f.at(q8(component)).ne.push_back(1); });
    }
    packed_lie("Q8_0 values too long", S(BAD_COMPONENT), resize(q8(".values"), 32, 34));
    packed_lie("Q8_0 values too short", S(BAD_COMPONENT), resize(q8(".values"), -32, 34));
    packed_lie("Q4_NL values too long", S(BAD_COMPONENT), resize(nl(".values"), 18, 0));
    packed_lie("Q4_NL values too short", S(BAD_COMPONENT), resize(nl(".values"), -1, 0));
    const auto resize_words = [=](int64_t n) {
        return [=](file & f) {
            tensor & t = f.at(coded(".values"));
            t.ne[0]    = static_cast<uint64_t>(static_cast<int64_t>(t.ne[0]) + n);
            t.data.resize(4 * t.ne[0]);
        };
    };
    packed_lie("coded values a word too long", S(BAD_COMPONENT), resize_words(1));
    packed_lie("coded values a word too short", S(BAD_COMPONENT), resize_words(-1));
    packed_lie("coded values beyond any coding", S(BAD_COMPONENT), resize_words(100000));
    packed_lie("coded values called plain", S(BAD_COMPONENT), [=](file & f) {
        tensor & t = f.at(coded(".values"));
        t.type     = TYPE_F32;
    });
    packed_lie("another width of coded values", S(BAD_FORMAT), [=](file & f) { f.at(coded(".values")).data[0] = 9; });
    packed_lie("a base beyond the dense type", S(BAD_FORMAT), [=](file & f) { f.at(coded(".values")).data[2] = 255; });
    packed_lie("more outliers than values", S(BAD_COMPONENT), [=](file & f) { f.at(coded(".values")).data[7] = 0xff; });
    packed_lie("Q8_0 values called bytes", S(BAD_COMPONENT), [=](file & f) {
        tensor & t = f.at(q8(".values"));
        t.type     = TYPE_I8;
        t.ne[0]    = t.data.size();
    });
    packed_lie("a scale of Q4_NL is NaN", S(NOT_FINITE), [=](file & f) { f.at(nl(".values")).data[1] = 0x7e; });
    packed_lie("index too long", S(BAD_COMPONENT), resize(q8(".index"), 4, 0));
    packed_lie("index too short", S(BAD_COMPONENT), resize(q8(".index"), -4, 0));
    packed_lie("values of another type", S(BAD_COMPONENT), [=](file & f) {
        f.at(plain(".values")).type = f.at(plain(".values")).type == TYPE_F16 ? TYPE_BF16 : TYPE_F16;
    });
    packed_lie("packed components swapped", S(BAD_COMPONENT),
               [=](file & f) { std::swap(f.at(q8(".index")), f.at(q8(".row_ptr"))); });
    packed_lie("a scale is Inf", S(NOT_FINITE), [=](file & f) { f.at(q8(".values")).data[1] = 0x7c; });
    packed_lie("a plain value is zero", S(NOT_CANONICAL), [=](file & f) {
        bytes & d = f.at(plain(".values")).data;
        std::fill(d.begin(), d.begin() + 4, uint8_t(0));
    });
    packed_lie("a bit moves to the next row", S(BAD_ROW_PTR), [=](file & f) {
        bytes & d = f.at(q8(".index")).data;
        d[0]      = static_cast<uint8_t>(d[0] ^ 1);
    });
    packed_lie("row_ptr beyond the payload", S(BAD_ROW_PTR),
               [=](file & f) { patch<int32_t>(&f.at(q8(".row_ptr")).data, 4, INT32_MAX); });
}

// ---- ec-csr: faults of the header, and some of the payload; test-ec-csr.cpp has all faults of the payload ----

static void ec_lie(const char * name, int expected, const file_lie & change) {
    builder::file f = builder::sparse_file(base_model(), true);
    change(f);
    expect(name, expected, check_all(builder::serialize(f), true));
}

static std::string ec(const char * component) { return std::string(UP) + component; }

static file_lie ec_i32(const char * component, size_t i, int32_t v) {
    return [=](file & f) { patch<int32_t>(&f.at(ec(component)).data, 4 * i, v); };
}

// Appends n elements to a component, or removes them if n is negative.
static file_lie ec_resize(const char * component, int64_t n) {
    return [=](file & f) {
        tensor &     t  = f.at(ec(component));
        const size_t nb = t.data.size() / t.ne[0];
        t.ne[0] += static_cast<uint64_t>(n);
        t.data.resize(t.ne[0] * nb);
    };
}

TEST(malformed_ec_csr_component_is_refused) {
    ec_lie("a valid ec-csr file", S(OK), [](file &) {});
    ec_lie("ec-csr for old readers", S(BAD_FORMAT),
           [](file & f) { f.set(scalar<uint32_t>("macko.min_reader_version", U32, 1)); });
    ec_lie("ec-csr with 2 bits", S(BAD_FORMAT), [](file & f) {
        std::vector<uint32_t> v(12, 2);
        f.set(array<uint32_t>("macko.tensor.delta_bits", U32, v));
    });
    ec_lie("ec-csr called macko", S(MISSING_COMPONENT),
           [](file & f) { f.set(texts("macko.tensor.format", std::vector<std::string>(12, "macko"))); });
    ec_lie("macko called ec-csr", S(BAD_FORMAT),
           [](file & f) { f.set(texts("macko.tensor.format", std::vector<std::string>(12, "ec-csr"))); });
    ec_lie("unknown format", S(BAD_FORMAT),
           [](file & f) { f.set(texts("macko.tensor.format", std::vector<std::string>(12, "ec-csr2"))); });
    for (const char * component : { ".values", ".deltas", ".bases", ".blk_ptr", ".rows", ".sets" }) {
        ec_lie("ec-csr component missing", S(MISSING_COMPONENT), [=](file & f) {
            f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(ec(component))));
        });
        ec_lie("ec-csr component of rank 2", S(BAD_COMPONENT), [=](file & f) { f.at(ec(component)).ne.push_back(1); });
        if (std::string(component) != ".sets") {
            ec_lie("ec-csr component too long", S(BAD_COMPONENT), ec_resize(component, 4));
            ec_lie("ec-csr component too short", S(BAD_COMPONENT), ec_resize(component, -2));
        }
    }
    // 200,000 rows of one column: 400 kB of dense data from 8 kB is within all other limits.
    ec_lie("ec-csr with more rows than bytes", S(LIMIT), [](file & f) {
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 16, 1);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 17, 200000);
    });
    ec_lie("bases of 32 bits", S(BAD_COMPONENT), [](file & f) {
        tensor & t = f.at(ec(".bases"));
        t.type     = TYPE_I32;
        t.ne[0] /= 2;
    });
    ec_lie("ec-csr components swapped", S(BAD_COMPONENT),
           [](file & f) { std::swap(f.at(ec(".rows")), f.at(ec(".sets"))); });
    ec_lie("sets of 5 numbers", S(BAD_COMPONENT), ec_resize(".sets", 1));
    ec_lie("nine sets", S(BAD_COMPONENT), ec_resize(".sets", 32));
}

TEST(malformed_ec_csr_payload_is_refused) {
    ec_lie("two sets", S(BAD_BLOCK), ec_resize(".sets", 4));
    ec_lie("granularity 3", S(BAD_BLOCK), ec_i32(".sets", 0, 3));
    ec_lie("one block more", S(BAD_COMPONENT), [](file & f) {
        patch<int32_t>(&f.at(ec(".sets")).data, 8, static_cast<int32_t>(f.at(ec(".rows")).ne[0]) + 1);
    });
    ec_lie("2^31 - 1 blocks", S(LIMIT), ec_i32(".sets", 2, INT32_MAX));
    ec_lie("row 32 of 32", S(BAD_BLOCK), ec_i32(".rows", 0, 32));
    ec_lie("blk_ptr", S(BAD_BLOCK), ec_i32(".blk_ptr", 1, -32));
    ec_lie("block order", S(NOT_CANONICAL), [](file & f) {
        bytes & d = f.at(ec(".rows")).data;
        std::swap_ranges(&d[0], &d[4], &d[4]);
    });
    ec_lie("base past the last column", S(BAD_COLUMN),
           [](file & f) { patch<uint16_t>(&f.at(ec(".bases")).data, 62, 16); });
    ec_lie("first delta", S(NOT_CANONICAL), [](file & f) { f.at(ec(".deltas")).data[0] = 1; });
    ec_lie("value in padding", S(NOT_CANONICAL), [](file & f) { f.at(ec(".values")).data.back() = 0x3c; });
    ec_lie("ec-csr infinity", S(NOT_FINITE), [](file & f) { patch<uint16_t>(&f.at(ec(".values")).data, 0, 0x7c00); });
    ec_lie("ec-csr nnz", S(BAD_NNZ), [](file & f) {
        uint64_t n;
        bytes &  v = f.find("macko.tensor.nnz")->value;
        memcpy(&n, &v[12], 8);
        patch<uint64_t>(&v, 12, n - 1);
    });
    // A block gets the number of another row whose block has an entry in the same column.
    ec_lie("two blocks over one element", S(OVERLAP), [](file & f) {
        tensor & rows = f.at(ec(".rows"));
        for (size_t a = 0; a + 1 < rows.ne[0]; a++) {
            const bytes before = rows.data;
            memcpy(&rows.data[4 * a + 4], &rows.data[4 * a], 4);
            const memory_file trial(serialize(f));
            const auto        opened = open_or_die(trial);
            collector         c(opened->sparse[4]);
            if (macko::read_payload(*opened, opened->sparse[4], 1, c) == S(OVERLAP)) {
                return;
            }
            rows.data = before;
        }
        throw std::runtime_error("no two blocks share a column");
    });
}

TEST(ec_csr_files_round_trip) {
    for (uint64_t seed : { 1, 2, 3 }) {
        const builder::model               m = builder::tiny_llama(seed == 3 ? 64 : 16, 2, seed);
        const memory_file                  f(builder::serialize(builder::sparse_file(m, true)));
        std::unique_ptr<macko::model_file> file;
        CHECK(macko::model_file_open(f.path().c_str(), true, &file) == S(OK), "%s", ggml_macko_last_error());
        for (size_t i = 0; i < m.sparse.size(); i++) {
            collector c(file->sparse[i]);
            CHECK(macko::read_payload(*file, file->sparse[i], 3, c) == S(OK), "%s", ggml_macko_last_error());
            CHECK(c.dense == m.sparse[i].data, "%s: decoded differently", m.sparse[i].name.c_str());
            CHECK(std::accumulate(c.nnz.begin(), c.nnz.end(), int64_t(0)) == file->sparse[i].desc.nnz, "%s: nnz",
                  m.sparse[i].name.c_str());
        }
    }
}

// ---- the metadata of models ----

constexpr float nan_f32 = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f32 = std::numeric_limits<float>::infinity();

static file_lie set_u32(const char * key, uint32_t v) {
    return [=](file & f) { f.set(scalar<uint32_t>(key, U32, v)); };
}
static file_lie set_f32(const char * key, float v) {
    return [=](file & f) { f.set(scalar<float>(key, F32, v)); };
}
static file_lie set_text(const char * key, const std::string & v) {
    return [=](file & f) { f.set(text(key, v)); };
}

// llama-cpp-python 0.3.36 aborts at seven of these changes of one key, and computes NaN with the other two.
TEST(key_that_breaks_llama_cpp_is_refused) {
    lie("block_count 0", S(BAD_KEY_VALUE), set_u32("llama.block_count", 0));
    lie("block_count 513", S(BAD_KEY_VALUE), set_u32("llama.block_count", 513));
    lie("expert_count 2^31", S(BAD_KEY_VALUE), set_u32("llama.expert_count", 1u << 31));
    lie("nextn_predict_layers 3", S(BAD_KEY_VALUE), set_u32("llama.nextn_predict_layers", 3));
    lie("rope.scaling.type unknown", S(BAD_KEY_VALUE), set_text("llama.rope.scaling.type", "bogus"));
    lie("split.no is u32", S(BAD_KEY_TYPE), set_u32("split.no", 1));
    lie("rms epsilon NaN", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", nan_f32));
    lie("rope.freq_base 0", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", 0));
    lie("rope.freq_base NaN", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", nan_f32));
}

TEST(malformed_general_key_is_refused) {
    lie("general.architecture missing", S(MISSING_KEY), [](file & f) { f.drop("general.architecture"); });
    lie("general.architecture is u32", S(BAD_KEY_TYPE), set_u32("general.architecture", 1));
    for (const char * arch : { "falcon", "mamba", "clip", "llama4", "LLAMA", "", "llama\n", "(unknown)" }) {
        lie("architecture whose own keys are missing", S(MISSING_KEY), set_text("general.architecture", arch));
    }
    lie("general.type adapter", S(BAD_KEY_VALUE), set_text("general.type", "adapter"));
    lie("general.type is u32", S(BAD_KEY_TYPE), set_u32("general.type", 0));
    lie("general.name is u32", S(BAD_KEY_TYPE), set_u32("general.name", 0));
    lie("general.file_type is a string", S(BAD_KEY_TYPE), set_text("general.file_type", "F16"));
    lie("split.count 2", S(SPLIT_FILE), [](file & f) { f.set(scalar<uint16_t>("split.count", U16, 2)); });
    lie("split.count 1", S(OK), [](file & f) { f.set(scalar<uint16_t>("split.count", U16, 1)); });
    lie("split.count is u32", S(BAD_KEY_TYPE), set_u32("split.count", 2));
}

TEST(wrong_dimension_of_the_model_is_refused) {
    for (const char * key : { "block_count", "context_length", "embedding_length", "feed_forward_length",
                              "attention.head_count", "attention.layer_norm_rms_epsilon" }) {
        const std::string name = std::string("llama.") + key;
        lie(name.c_str(), S(MISSING_KEY), [=](file & f) { f.drop(name); });
        lie(name.c_str(), S(BAD_KEY_TYPE), set_text(name.c_str(), "x"));
        lie(name.c_str(), S(BAD_KEY_TYPE), [=](file & f) { f.set(scalar<uint64_t>(name, U64, 16)); });
    }
    lie("context_length 0", S(BAD_KEY_VALUE), set_u32("llama.context_length", 0));
    lie("context_length 2^32-1", S(BAD_KEY_VALUE), set_u32("llama.context_length", UINT32_MAX));
    lie("embedding_length 0", S(BAD_KEY_VALUE), set_u32("llama.embedding_length", 0));
    lie("embedding_length 2^31", S(BAD_KEY_VALUE), set_u32("llama.embedding_length", 1u << 31));
    lie("embedding_length_out 8", S(BAD_KEY_VALUE), set_u32("llama.embedding_length_out", 8));
    lie("feed_forward_length 0", S(BAD_KEY_VALUE), set_u32("llama.feed_forward_length", 0));
}

TEST(wrong_head_count_is_refused) {
    lie("head_count 0", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count", 0));
    lie("head_count 3", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count", 3));
    lie("head_count > embedding", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count", 32));
    lie("head_count_kv 0", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count_kv", 0));
    lie("head_count_kv 3", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count_kv", 3));
    lie("head_count_kv 8", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count_kv", 8));
    lie("head counts per layer", S(OK),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, { 2, 2 })); });
    lie("head counts that differ", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, { 2, 1 })); });
    lie("head counts of 3 layers", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, { 2, 2, 2 })); });
    lie("head counts of 0 layers", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, {})); });
    lie("head counts negative", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<int32_t>("llama.attention.head_count_kv", I32, { -2, -2 })); });
    lie("head counts are floats", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<float>("llama.attention.head_count_kv", F32, { 2, 2 })); });
    lie("context_length is an array", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("llama.context_length", U32, { 2, 2 })); });
}

TEST(wrong_head_dimension_or_rope_is_refused) {
    lie("key_length 0", S(BAD_KEY_VALUE), set_u32("llama.attention.key_length", 0));
    lie("key_length 8", S(BAD_KEY_VALUE), set_u32("llama.attention.key_length", 8));
    lie("value_length 8", S(BAD_KEY_VALUE), set_u32("llama.attention.value_length", 8));
    lie("key_length_swa 8", S(BAD_KEY_VALUE), set_u32("llama.attention.key_length_swa", 8));
    lie("value_length_swa 8", S(BAD_KEY_VALUE), set_u32("llama.attention.value_length_swa", 8));
    lie("rope dimensions 3", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count", 3));
    lie("rope dimensions 2", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count", 2));
    lie("rope dimensions 0", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count", 0));
    lie("rope dimensions swa 2", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count_swa", 2));
    lie("rope.freq_base -1", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", -1));
    lie("rope.freq_base inf", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", inf_f32));
    lie("rope.scaling.factor 0", S(BAD_KEY_VALUE), set_f32("llama.rope.scaling.factor", 0));
    lie("rope.scaling.factor NaN", S(BAD_KEY_VALUE), set_f32("llama.rope.scaling.factor", nan_f32));
    lie("rope.scale_linear -1", S(BAD_KEY_VALUE), set_f32("llama.rope.scale_linear", -1));
    lie("rope.scaling.attn_factor inf", S(BAD_KEY_VALUE), set_f32("llama.rope.scaling.attn_factor", inf_f32));
    lie("rope original context 0", S(BAD_KEY_VALUE), set_u32("llama.rope.scaling.original_context_length", 0));
    lie("rope.scaling.finetuned u32", S(BAD_KEY_TYPE), set_u32("llama.rope.scaling.finetuned", 1));
}

TEST(malformed_attention_or_pooling_is_refused) {
    lie("rms epsilon 0", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", 0));
    lie("rms epsilon -1e-5", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", -1e-5f));
    lie("rms epsilon inf", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", inf_f32));
    lie("rms epsilon is a double", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<double>("llama.attention.layer_norm_rms_epsilon", F64, 1e-5)); });
    lie("attention.causal false", S(BAD_KEY_VALUE),
        [](file & f) { f.set(scalar<uint8_t>("llama.attention.causal", BOOL, 0)); });
    lie("pooling_type 4", S(BAD_KEY_VALUE), set_u32("llama.pooling_type", 4));
    lie("pooling_type 2^32-1", S(BAD_KEY_VALUE), set_u32("llama.pooling_type", UINT32_MAX));
}

TEST(wrong_expert_count_is_refused) {
    lie("expert_used_count without experts", S(BAD_KEY_VALUE), set_u32("llama.expert_used_count", 2));
    lie("experts, none used", S(BAD_KEY_VALUE), set_u32("llama.expert_count", 4));
    lie("expert groups", S(BAD_KEY_VALUE), set_u32("llama.expert_group_count", 2));
    lie("more used than there are", S(BAD_KEY_VALUE), [](file & f) {
        f.set(scalar<uint32_t>("llama.expert_count", U32, 4));
        f.set(scalar<uint32_t>("llama.expert_used_count", U32, 5));
    });
    lie("17 experts used", S(BAD_KEY_VALUE), [](file & f) {
        f.set(scalar<uint32_t>("llama.expert_count", U32, 64));
        f.set(scalar<uint32_t>("llama.expert_used_count", U32, 17));
    });
}

TEST(only_keys_that_llama_cpp_reads_are_checked) {
    lie("vocab_size 0", S(BAD_KEY_VALUE), set_u32("llama.vocab_size", 0));
    lie("labels are u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("llama.classifier.output_labels", U32, { 1 })); });
    lie("unread keys pass", S(OK), set_text("llama.future.key", "x"));
    lie("other architecture's keys pass", S(OK), set_u32("qwen3.block_count", 0));
}

static file_lie tokens_with(size_t i, const std::string & token) {
    std::vector<std::string> t = builder::spm_tokens();
    t[i]                       = token;
    return [t](file & f) { f.set(texts("tokenizer.ggml.tokens", t)); };
}

TEST(malformed_tokenizer_model_is_refused) {
    lie("tokenizer model missing", S(MISSING_KEY), [](file & f) { f.drop("tokenizer.ggml.model"); });
    for (const char * model :
         { "no_vocab", "none", "bert", "t5", "rwkv", "plamo2", "test", "hybriddna", "gemma4", "" }) {
        lie("tokenizer model", S(BAD_KEY_VALUE), set_text("tokenizer.ggml.model", model));
    }
    lie("tokenizer model is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint32_t>("tokenizer.ggml.model", U32, 1)); });
}

TEST(malformed_tokens_are_refused) {
    const std::vector<std::string> good = builder::spm_tokens();
    lie("tokens missing", S(MISSING_KEY), [](file & f) { f.drop("tokenizer.ggml.tokens"); });
    lie("tokens are u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("tokenizer.ggml.tokens", U32, { 1, 2 })); });
    lie("tokens are one string", S(BAD_KEY_TYPE), set_text("tokenizer.ggml.tokens", "abc"));
    lie("tokens empty", S(BAD_KEY_VALUE), [](file & f) { f.set(texts("tokenizer.ggml.tokens", {})); });
    lie("token twice", S(BAD_KEY_VALUE), tokens_with(263, "a"));
    lie("tokens equal up to a NUL", S(BAD_KEY_VALUE), tokens_with(263, std::string("a\0b", 3)));
    lie("empty token named like one", S(BAD_KEY_VALUE), [&](file & f) {
        std::vector<std::string> t = good;
        t[262]                     = "";
        t[263]                     = "[EMPTY_262]";
        f.set(texts("tokenizer.ggml.tokens", t));
    });
    lie("one empty token", S(OK), tokens_with(263, ""));
    for (const char * token : { "<0x-1>", "<0x0>", "<0xZZ>", "0x0A", "<0x0A", "" }) {
        lie("byte token malformed", S(BAD_KEY_VALUE), tokens_with(3 + 10, token));
    }
    lie("byte token missing", S(BAD_KEY_VALUE), [&](file & f) {
        std::vector<int32_t> types(good.size(), 1);
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, types));
        std::vector<std::string> t = good;
        t[3 + 200]                 = "no byte";
        f.set(texts("tokenizer.ggml.tokens", t));
    });
}

TEST(malformed_token_types_or_scores_are_refused) {
    const std::vector<std::string> good = builder::spm_tokens();
    lie("token types too few", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size() - 1, 1)));
    });
    lie("token types too many", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size() + 1, 1)));
    });
    lie("token type 7", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size(), 7)));
    });
    lie("token type -1", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size(), -1)));
    });
    lie("token types are i8", S(BAD_KEY_TYPE),
        [&](file & f) { f.set(array<int8_t>("tokenizer.ggml.token_type", I8, std::vector<int8_t>(good.size(), 1))); });
    lie("scores too few", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<float>("tokenizer.ggml.scores", F32, { 1, 2 })); });
    lie("scores are u8", S(BAD_KEY_TYPE),
        [&](file & f) { f.set(array<uint8_t>("tokenizer.ggml.scores", U8, std::vector<uint8_t>(good.size(), 1))); });
    lie("a score is NaN", S(BAD_KEY_VALUE),
        [](file & f) { patch<uint32_t>(&f.find("tokenizer.ggml.scores")->value, 12 + 4 * 7, 0x7fc00000); });
    lie("a score is infinite", S(BAD_KEY_VALUE),
        [](file & f) { patch<uint32_t>(&f.find("tokenizer.ggml.scores")->value, 12 + 4 * 7, 0xff800000); });
}

TEST(malformed_special_token_is_refused) {
    const std::vector<std::string> good = builder::spm_tokens();
    for (const char * name :
         { "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "fim_pre", "fim_rep", "prefix" }) {
        const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
        lie(key.c_str(), S(BAD_KEY_VALUE),
            [=, &good](file & f) { f.set(scalar<uint32_t>(key, U32, static_cast<uint32_t>(good.size()))); });
        lie(key.c_str(), S(BAD_KEY_VALUE), [=](file & f) { f.set(scalar<uint32_t>(key, U32, UINT32_MAX)); });
        lie(key.c_str(), S(BAD_KEY_TYPE), [=](file & f) { f.set(scalar<int32_t>(key, I32, 1)); });
        lie(key.c_str(), S(OK),
            [=, &good](file & f) { f.set(scalar<uint32_t>(key, U32, static_cast<uint32_t>(good.size()) - 1)); });
    }
}

TEST(wrong_type_of_a_tokenizer_key_is_refused) {
    lie("add_bos_token is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint32_t>("tokenizer.ggml.add_bos_token", U32, 1)); });
    lie("chat template is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint32_t>("tokenizer.chat_template", U32, 1)); });
    lie("chat template is an array", S(BAD_KEY_TYPE),
        [](file & f) { f.set(texts("tokenizer.chat_template", { "x" })); });
    lie("charsmap is f32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<float>("tokenizer.ggml.precompiled_charsmap", F32, { 1 })); });
    lie("suppress_tokens is u8", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint8_t>("tokenizer.ggml.suppress_tokens", U8, { 1 })); });
}

TEST(bpe_needs_merges_and_its_default_tokens) {
    lie("BPE without merges", S(MISSING_KEY), set_text("tokenizer.ggml.model", "gpt2"));
    lie("BPE with merges", S(OK), [](file & f) {
        f.set(text("tokenizer.ggml.model", "gpt2"));
        f.set(texts("tokenizer.ggml.merges", { "a b" }));
    });
    lie("merges are u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("tokenizer.ggml.merges", U32, { 1 })); });
    lie("BPE, default bos not there", S(MISSING_KEY), [](file & f) {
        f.set(text("tokenizer.ggml.model", "gpt2"));
        f.set(texts("tokenizer.ggml.merges", { "a b" }));
        f.set(texts("tokenizer.ggml.tokens", { "a", "b", "ab" }));
        f.drop("tokenizer.ggml.token_type");
        f.drop("tokenizer.ggml.scores");
        f.drop("tokenizer.ggml.bos_token_id");
    });
}

TEST(wrong_type_of_a_model_tensor_is_refused) {
    lie("F16 norm", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("output_norm.weight");
        t.type     = TYPE_F16;
        t.data.resize(32);
    });
    lie("F16 norm with two dims", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("output_norm.weight");
        t.type     = TYPE_F16;
        t.data.resize(32);
        t.ne = { 16, 1 };
    });
    lie("I32 norm", S(BAD_TYPE), [](file & f) { f.at("output_norm.weight").type = TYPE_I32; });
    lie("I32 embedding", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("token_embd.weight");
        t.type     = TYPE_I32;
        t.data.resize(2 * t.data.size());
    });
    lie("I8 attention", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("blk.0.attn_v.weight");
        t.type     = TYPE_I8;
        t.data.resize(t.data.size() / 2);
    });
    lie("Q8_1 attention", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("blk.0.attn_v.weight");
        t.type     = TYPE_Q8_1;
        t.ne       = { 32, 8 };
        t.data.resize(8 * 36);
    });
    lie("F16 bias", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("output_norm.weight");
        t.name     = "blk.0.attn_q.bias";
        t.type     = TYPE_F16;
        t.data.resize(32);
    });
    lie("scale of a tied output", S(MISSING_COMPONENT),
        [](file & f) { f.at("output_norm.weight").name = "output.scale"; });
    lie("sparse norm", S(BAD_TYPE), [](file & f) { // a tensor of one row does not count as a matrix
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12, 256);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 20, 1);
        f.at(std::string(Q) + ".row_ptr").ne = { 2 };
        f.at(std::string(Q) + ".row_ptr").data.resize(8);
    });
}

// A supported architecture, and whether its models have experts and a sliding window.
struct arch_case {
    const char * name;
    bool         experts, window;
};

// A file with the keys that llama.cpp's converter writes for the architecture.
static builder::file arch_file(const arch_case & a) {
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

static void arch_lie(const arch_case & a, const char * name, int expected, const file_lie & change,
                     bool strict = false) {
    builder::file f = arch_file(a);
    change(f);
    layout             l;
    uint64_t           size = 0;
    const bytes        b    = serialize_header(f, &l, &size);
    macko::gguf_header header;
    int                status = macko::read_gguf_header(memory_source(b.data(), b.size()), &header);
    if (status == GGML_MACKO_STATUS_OK) {
        status = macko::check_model_keys(header, strict);
    }
    seen.insert(status);
    expect((std::string(a.name) + ": " + name).c_str(), expected, status);
}

static void check_experts_of_an_architecture(const arch_case & a) {
    const std::string arch       = a.name;
    const bool        dense_only = !a.experts && arch != "llama" && arch != "mistral3";
    arch_lie(a, "experts where there are none", dense_only ? S(BAD_KEY_VALUE) : S(OK), [&](builder::file & x) {
        x.set(scalar<uint32_t>(arch + ".expert_count", U32, 4));
        x.set(scalar<uint32_t>(arch + ".expert_used_count", U32, 2));
    });
    const bool must_have_experts = arch == "qwen3moe" || arch == "gpt-oss";
    if (a.experts) {
        arch_lie(a, "no experts", must_have_experts ? S(BAD_KEY_VALUE) : S(OK), [&](builder::file & x) {
            x.drop(arch + ".expert_count");
            x.drop(arch + ".expert_used_count");
        });
    }
}

static void check_sliding_window_of_an_architecture(const arch_case & a) {
    const std::string arch = a.name;
    arch_lie(a, "no layer with a window", S(BAD_KEY_VALUE), [&](builder::file & x) {
        x.set(array<uint8_t>(arch + ".attention.sliding_window_pattern", BOOL, std::vector<uint8_t>(6, 0)));
    });
    arch_lie(a, "pattern of 1", S(BAD_KEY_VALUE),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".attention.sliding_window_pattern", U32, 1)); });
    arch_lie(a, "pattern of 5 layers", S(BAD_KEY_VALUE), [&](builder::file & x) {
        x.set(array<uint8_t>(arch + ".attention.sliding_window_pattern", BOOL, std::vector<uint8_t>(5, 1)));
    });
    arch_lie(a, "pattern of 2s", S(BAD_KEY_VALUE), [&](builder::file & x) {
        x.set(array<uint32_t>(arch + ".attention.sliding_window_pattern", U32, std::vector<uint32_t>(6, 2)));
    });
    arch_lie(a, "pattern of floats", S(BAD_KEY_TYPE), [&](builder::file & x) {
        x.set(array<float>(arch + ".attention.sliding_window_pattern", F32, std::vector<float>(6, 1)));
    });
    arch_lie(a, "alternating pattern", S(OK), [&](builder::file & x) {
        x.set(array<uint8_t>(arch + ".attention.sliding_window_pattern", BOOL, { 1, 0, 1, 0, 1, 0 }));
    });
}

static void check_heads_and_rope_of_an_architecture(const arch_case & a) {
    const std::string arch = a.name;
    arch_lie(a, "window of 2^32-1",
             arch == "gemma2" || arch == "gemma3" || arch == "phi3" || arch == "gpt-oss" ? S(BAD_KEY_VALUE) : S(OK),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".attention.sliding_window", U32, UINT32_MAX)); });
    arch_lie(a, "heads wider than the embedding", arch == "qwen2" || arch == "phi3" ? S(BAD_KEY_VALUE) : S(OK),
             [&](builder::file & x) {
                 x.set(scalar<uint32_t>(arch + ".attention.key_length", U32, 16));
                 x.set(scalar<uint32_t>(arch + ".attention.value_length", U32, 16));
             });
    const bool partial_rope = arch == "gemma2" || arch == "gemma3" || arch == "phi3";
    arch_lie(a, "RoPE over half a head", partial_rope ? S(OK) : S(BAD_KEY_VALUE),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".rope.dimension_count", U32, 4)); });
    arch_lie(a, "RoPE over two heads", S(BAD_KEY_VALUE),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".rope.dimension_count", U32, 16)); });
    if (arch == "gemma2") {
        arch_lie(a, "attention softcap 0", S(BAD_KEY_VALUE),
                 [&](builder::file & x) { x.set(scalar<float>("gemma2.attn_logit_softcapping", F32, 0)); });
        arch_lie(a, "final softcap NaN", S(BAD_KEY_VALUE), [&](builder::file & x) {
            x.set(scalar<float>("gemma2.final_logit_softcapping", F32, std::numeric_limits<float>::quiet_NaN()));
        });
    }
}

TEST(architectures) {
    const arch_case cases[] = {
        { "llama", false, false }, { "llama", true, false },    { "mistral3", false, false }, { "qwen2", false, false },
        { "qwen3", false, false }, { "qwen3moe", true, false }, { "gemma2", false, true },    { "gemma3", false, true },
        { "phi3", false, false },  { "gpt-oss", true, true },
    };
    for (const arch_case & a : cases) {
        arch_lie(a, "as converted", S(OK), [](file &) {});
        check_experts_of_an_architecture(a);
        if (a.window) {
            check_sliding_window_of_an_architecture(a);
        }
        check_heads_and_rope_of_an_architecture(a);
    }
}

// ---- architectures without rules of their own ----

static file_lie set_other(const std::string & key, uint32_t value) {
    return [=](file & f) { f.set(scalar<uint32_t>("falcon." + key, U32, value)); };
}

static file_lie set_other(const std::string & key, float value) {
    return [=](file & f) { f.set(scalar<float>("falcon." + key, F32, value)); };
}

TEST(general_keys_without_rules_are_checked) {
    const arch_case falcon   = { "falcon", false, false };
    const auto      with_two = [](uint32_t n, uint32_t used) {
        return [=](file & f) {
            set_other("expert_count", n)(f);
            set_other("expert_used_count", used)(f);
        };
    };
    const auto per_layer = [](const char * key, uint32_t n, uint32_t last) {
        return [=](file & f) {
            std::vector<uint32_t> values(n, 2);
            values.back() = last;
            f.set(array<uint32_t>(std::string("falcon.") + key, U32, values));
        };
    };
    arch_lie(falcon, "as converted", S(OK), [](file &) {});
    arch_lie(falcon, "as converted, strict", S(UNSUPPORTED_ARCH), [](file &) {}, true);
    arch_lie({ "llama", false, false }, "with rules, strict", S(OK), [](file &) {}, true);
    arch_lie({ "llama", false, false }, "rules hold up to a NUL, as llama.cpp reads the name", S(MISSING_KEY),
             [](file & f) {
                 f.set(text("general.architecture", std::string("llama\0x", 7)));
                 f.drop("llama.attention.layer_norm_rms_epsilon");
             });
    arch_lie(falcon, "no block_count", S(MISSING_KEY), [](file & f) { f.drop("falcon.block_count"); });
    arch_lie(falcon, "block_count 0", S(BAD_KEY_VALUE), set_other("block_count", 0u));
    arch_lie(falcon, "block_count 513", S(BAD_KEY_VALUE), set_other("block_count", 513u));
    arch_lie(falcon, "more layers that predict than layers", S(BAD_KEY_VALUE), set_other("nextn_predict_layers", 7u));
    arch_lie(falcon, "no heads", S(OK), set_other("attention.head_count", 0u));
    arch_lie(falcon, "heads of each layer", S(OK), per_layer("attention.head_count", 6, 0));
    arch_lie(falcon, "heads of five layers", S(BAD_KEY_VALUE), per_layer("attention.head_count", 5, 2));
    arch_lie(falcon, "a million heads", S(BAD_KEY_VALUE), set_other("attention.head_count", 1000000u));
    arch_lie(falcon, "experts", S(OK), with_two(4, 2));
    arch_lie(falcon, "no expert used", S(BAD_KEY_VALUE), with_two(4, 0));
    arch_lie(falcon, "more experts used than there are", S(BAD_KEY_VALUE), with_two(2, 4));
    arch_lie(falcon, "more experts used in one layer than there are", S(BAD_KEY_VALUE), [&](file & f) {
        set_other("expert_count", 4u)(f);
        per_layer("expert_used_count", 6, 5)(f);
    });
    arch_lie(falcon, "groups that do not divide the experts", S(BAD_KEY_VALUE), [&](file & f) {
        with_two(8, 2)(f);
        set_other("expert_group_count", 3u)(f);
        set_other("expert_group_used_count", 1u)(f);
    });
    arch_lie(falcon, "groups of experts", S(OK), [&](file & f) {
        with_two(8, 2)(f);
        set_other("expert_group_count", 4u)(f);
        set_other("expert_group_used_count", 2u)(f);
    });
    arch_lie(falcon, "unknown scaling", S(BAD_KEY_VALUE),
             [](file & f) { f.set(text("falcon.rope.scaling.type", "bogus")); });
    arch_lie(falcon, "a key of its own that is NaN", S(BAD_KEY_VALUE),
             set_other("residual_scale", std::numeric_limits<float>::quiet_NaN()));
    arch_lie(falcon, "an array of its own with an infinity", S(BAD_KEY_VALUE), [](file & f) {
        f.set(array<float>("falcon.swiglu_clamp_exp", F32, { 0.0f, std::numeric_limits<float>::infinity() }));
    });
    arch_lie(falcon, "a key of its own", S(OK), set_other("residual_scale", 2.0f));
}

TEST(tokenizers_without_rules_are_checked) {
    const arch_case falcon    = { "falcon", false, false };
    const auto      tokenizer = [](const char * model) {
        return [=](file & f) { f.set(text("tokenizer.ggml.model", model)); };
    };
    const auto cut = [&](const char * model, size_t n) {
        return [=](file & f) {
            tokenizer(model)(f);
            std::vector<std::string> tokens;
            for (size_t i = 0; i < n; i++) {
                tokens.push_back("t" + std::to_string(i));
            }
            f.set(texts("tokenizer.ggml.tokens", tokens));
            f.drop("tokenizer.ggml.scores");
            f.drop("tokenizer.ggml.token_type");
        };
    };
    arch_lie(falcon, "unknown tokenizer", S(BAD_KEY_VALUE), tokenizer("bogus"));
    arch_lie(falcon, "no vocabulary", S(OK), [&](file & f) {
        tokenizer("none")(f);
        f.drop("tokenizer.ggml.tokens");
    });
    arch_lie({ "llama", false, false }, "no vocabulary, with rules", S(BAD_KEY_VALUE), tokenizer("none"));
    arch_lie({ "llama", false, false }, "a tokenizer of others, with rules", S(BAD_KEY_VALUE), cut("rwkv", 300));
    arch_lie(falcon, "rwkv", S(OK), cut("rwkv", 16));
    arch_lie(falcon, "bert", S(OK), cut("bert", 104));
    arch_lie(falcon, "bert without its mask", S(MISSING_KEY), cut("bert", 103));
    arch_lie(falcon, "t5", S(OK), cut("t5", 3));
    arch_lie(falcon, "t5 without an unknown token", S(MISSING_KEY), [&](file & f) {
        cut("t5", 2)(f);
        f.drop("tokenizer.ggml.eos_token_id");
    });
    arch_lie(falcon, "gpt2 without merges", S(MISSING_KEY), cut("gpt2", 300));
    arch_lie(falcon, "plamo2 without bytes", S(BAD_KEY_VALUE), cut("plamo2", 300));
}

TEST(use_of_a_weight_follows_from_its_name) {
    const struct {
        const char * name;
        int          n_dims, use;
    } cases[] = {
        { "output.weight", 2, GGML_MACKO_WEIGHT_HEAD },
        { "token_embd.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_qkv.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.10.attn_kv_a_mqa.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.10.attn_q_b.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.attn_k_b.weight", 3, GGML_MACKO_WEIGHT_OTHER }, // a matrix for each head
        { "blk.0.ffn_up_shexp.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ffn_up_exps.weight", 3, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ffn_up_chexps.weight", 3, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ffn_gate_inp.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ffn_gate_inp_shexp.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ffn_gate_tid2eid.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_norm.weight", 1, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_q.bias", 1, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ssm_in.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ssm_out.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ssm_x.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ssm_conv1d.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ssm_a", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.time_mix_key.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.time_mix_w1.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.channel_mix_value.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.shortconv.in_proj.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "enc.blk.0.attn_q.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "dec.blk.0.cross_attn_q.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "dec.blk.0.cross_attn_rel_b.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "enc.enc.blk.0.attn_q.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk..attn_q.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.weight", 2, GGML_MACKO_WEIGHT_OTHER },
    };
    for (const auto & c : cases) {
        const int use = ggml_macko_weight_use_of(c.name, c.n_dims);
        CHECK(use == c.use, "%s: %d vs %d", c.name, use, c.use);
    }
}

// ---- limits: the largest accepted value and the smallest refused one ----

TEST(limits_of_keys_and_tensors_are_enforced) {
    auto keys = [](size_t n) {
        builder::file f;
        for (size_t i = 0; i < n; i++) {
            f.keys.push_back(scalar<uint8_t>("k" + std::to_string(i), U8, 0));
        }
        return f;
    };
    expect("65536 keys", S(OK), check_header(keys(65536)));
    expect("65537 keys", S(LIMIT), check_header(keys(65537)));
    auto tensors = [](size_t n) {
        builder::file f;
        for (size_t i = 0; i < n; i++) {
            f.tensors.push_back({ "t" + std::to_string(i), { 1 }, TYPE_I8, {}, 1 });
        }
        return f;
    };
    expect("65536 tensors", S(OK), check_header(tensors(65536)));
    expect("65537 tensors", S(LIMIT), check_header(tensors(65537)));
    auto one = [](const tensor & t) {
        builder::file f;
        f.tensors.push_back(t);
        return f;
    };
    expect("name of 63", S(OK), check_header(one({ std::string(63, 'n'), { 4 }, TYPE_I8, {}, 4 })));
    expect("name of 64", S(BAD_NAME), check_header(one({ std::string(64, 'n'), { 4 }, TYPE_I8, {}, 4 })));
    expect("four dimensions", S(OK), check_header(one({ "t", { 2, 3, 4, 5 }, TYPE_F32, {}, 480 })));
    expect("16 GiB", S(OK), check_header(one({ "t", { uint64_t(1) << 34 }, TYPE_I8, {}, uint64_t(1) << 34 })));
    expect("16 GiB + 1", S(LIMIT),
           check_header(one({ "t", { (uint64_t(1) << 34) + 1 }, TYPE_I8, {}, (uint64_t(1) << 34) + 1 })));
    expect("no tensors", S(OK), check_header(keys(3)));
    auto with_key = [](const key & k) {
        builder::file f;
        f.keys.push_back(k);
        return f;
    };
    expect("key name of 65535", S(OK), check_header(with_key(scalar<uint8_t>(std::string(65535, 'k'), U8, 0))));
    expect("key name of 65536", S(LIMIT), check_header(with_key(scalar<uint8_t>(std::string(65536, 'k'), U8, 0))));
    expect("array of 2^24", S(OK), check_header(with_key(array<uint8_t>("k", U8, std::vector<uint8_t>(1 << 24)))));
    expect("array of 2^24+1", S(LIMIT),
           check_header(with_key(array<uint8_t>("k", U8, std::vector<uint8_t>((1 << 24) + 1)))));
    expect("string of 64 MiB", S(OK), check_header(with_key(text("k", std::string(64 << 20, 's')))));
    expect("string of 64 MiB + 1", S(LIMIT), check_header(with_key(text("k", std::string((64 << 20) + 1, 's')))));
}

TEST(valid_alignment_and_padding_are_accepted) {
    for (uint32_t a : { 8u, 16u, 1u << 20 }) {
        builder::file f = builder::sparse_file(base_model());
        f.set(scalar<uint32_t>("general.alignment", U32, a));
        f.alignment = a;
        expect("alignment", S(OK), check_header(f));
    }
    builder::file unpadded = builder::sparse_file(base_model());
    unpadded.tensors.push_back({ "last", { 5 }, TYPE_F32, bytes(20), 0 });
    unpadded.pad_end = false;
    expect("unpadded end", S(OK), check_header(unpadded));
}

// A file of n sparse tensors of one shape without non-zeros, and of dense tensors with `dense` bytes in all.
static builder::file empty_sparse_file(size_t n, uint64_t cols, uint64_t rows, uint64_t n_padded, uint64_t dense) {
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
               scalar<uint32_t>("macko.min_reader_version", U32, 1),
               texts("macko.tensor.name", names),
               texts("macko.tensor.format", formats),
               array<uint32_t>("macko.tensor.type", U32, std::vector<uint32_t>(n, 1)),
               array<uint64_t>("macko.tensor.ne", U64, ne),
               array<uint32_t>("macko.tensor.delta_bits", U32, std::vector<uint32_t>(n, 4)),
               array<uint64_t>("macko.tensor.nnz", U64, std::vector<uint64_t>(n, 0)) };
    return f;
}

TEST(limits_of_sparse_tensors_are_enforced) {
    const uint64_t MiB = 1 << 20;
    const uint64_t GiB = 1 << 30;
    expect("cols 2^24", S(OK), check_header(empty_sparse_file(1, 1 << 24, 1, 8, MiB)));
    expect("cols 2^24+1", S(LIMIT), check_header(empty_sparse_file(1, (1 << 24) + 1, 1, 8, MiB)));
    expect("rows 2^24", S(OK), check_header(empty_sparse_file(1, 1, 1 << 24, 8, MiB)));
    expect("rows 2^24+1", S(LIMIT), check_header(empty_sparse_file(1, 1, (1 << 24) + 1, 8, MiB)));
    expect("matrix of 16 GiB", S(OK), check_header(empty_sparse_file(1, 1 << 24, 512, 8, GiB)));
    expect("matrix of 16 GiB + a row", S(LIMIT), check_header(empty_sparse_file(1, 1 << 24, 513, 8, GiB)));
    expect("n_padded 2^31-512", S(OK), check_header(empty_sparse_file(1, 1 << 23, 256, (uint64_t(1) << 31) - 512, 0)));
    expect("n_padded 2^31-504", S(BAD_COMPONENT),
           check_header(empty_sparse_file(1, 1 << 23, 256, (uint64_t(1) << 31) - 504, 0)));
    expect("n_padded of all elements", S(OK), check_header(empty_sparse_file(1, 15, 5, 80, 0)));
    expect("n_padded of more", S(BAD_COMPONENT), check_header(empty_sparse_file(1, 15, 5, 88, 0)));
    expect("2 TiB", S(OK), check_header(empty_sparse_file(126, 1 << 24, 512, 8, 32 * GiB)));
    expect("2 TiB + 1", S(LIMIT), check_header(empty_sparse_file(126, 1 << 24, 512, 8, 32 * GiB + 1)));
    // The dense file may be 64 times as large as the sparse one. With s bytes beside a dense tensor of d bytes, the
    // limit is 2^25 + d = 64 (s + d).
    for (int64_t extra : { -1, 0, 1 }) {
        layout        l;
        uint64_t      rest = 0;
        builder::file f    = empty_sparse_file(1, 1 << 24, 1, 8, 1);
        f.pad_end          = false;
        serialize_header(f, &l, &rest);
        rest -= 1;
        const uint64_t fit = ((uint64_t(1) << 25) - 64 * rest + 62) / 63; // smallest d with 2^25 + d <= 64 (rest + d)
        f                  = empty_sparse_file(1, 1 << 24, 1, 8, fit + static_cast<uint64_t>(extra));
        f.pad_end          = false;
        expect("64 x file size", extra < 0 ? S(LIMIT) : S(OK), check_header(f));
    }
}

// ---- truncation ----

TEST(truncated_file_is_refused) {
    builder::model  small; // one matrix and no vocabulary, about 4 KB
    std::mt19937_64 rng(3);
    small.sparse.push_back({ "m", { 64, 80 }, TYPE_F16, builder::random_data(rng, TYPE_F16, 64 * 80, 64, 0.3) });
    small.bits = { 4 };
    small.dense.tensors.push_back({ "m", { 64, 80 }, TYPE_F16, small.sparse[0].data, 0 });
    for (const builder::model & m : { small, builder::tiny_llama(96, 2, 2) }) {
        const bytes b = builder::serialize(builder::sparse_file(m));
        printf("truncation at every byte of a file of %zu bytes\n", b.size());
        for (size_t n = 0; n < b.size(); n++) {
            macko::gguf_header header;
            const int          status = macko::read_gguf_header(memory_source(b.data(), n), &header);
            // only the padding behind the last tensor may be missing
            CHECK(status == S(TRUNCATED) || (status == S(OK) && n + 32 > b.size()), "cut at %zu of %zu: %s", n,
                  b.size(), ggml_macko_last_error());
            n_cases++;
        }
        seen.insert(S(TRUNCATED));
        for (size_t n : { b.size() / 3, b.size() - 40 }) { // read from the file system, too
            expect("cut", S(TRUNCATED), check_all(bytes(b.begin(), b.begin() + static_cast<int64_t>(n)), false));
        }
    }
}

// ---- payload, dense stream ----

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

// one matrix, which is read in several blocks of rows
static builder::model model_of_several_blocks(uint64_t seed) {
    std::mt19937_64 rng(seed);
    builder::model  m;
    m.sparse.push_back(
        { "m.weight", { 1021, 1501 }, TYPE_F16, builder::random_data(rng, TYPE_F16, 1021 * 1501, 1021, 0.4) });
    m.bits = { 4 };
    m.dense.tensors.push_back({ "m.weight", m.sparse[0].ne, TYPE_F16, m.sparse[0].data, 0 });
    return m;
}

TEST(consumers_of_a_matrix_work_side_by_side) {
    const builder::model               m = model_of_several_blocks(6);
    const memory_file                  f(builder::serialize(builder::sparse_file(m)));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open(f.path().c_str(), false, &file) == S(OK), "%s", ggml_macko_last_error());
    meeting_consumer c;
    CHECK(macko::read_payload(*file, file->sparse[0], 2, c) == S(OK), "%s", ggml_macko_last_error());
}

// Takes blocks of whole groups of rows, and everything twice.
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

// of sparse tensors that a device has claimed, and of those that none has
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
        CHECK(fseeko(stream, v->size() + 1, SEEK_SET) != 0 && errno == EINVAL, "seek behind the end");
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

// Reads a tensor like llama.cpp's llama_file does: in pieces, each limited by the end of the file, which it finds by
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

// a sparse model of some size, and the dense stream of it
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

// Dense tensors are read in full; of a sparse tensor that a device has claimed only the placeholder is read.
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

// Some tensors claimed, others not, read as llama.cpp reads them: in any order, whole or in pieces.
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
    CHECK(a->match_placeholder(&forged, sizeof(forged)) == -1, "index behind the end");
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

// ---- the file system ----

TEST(file_system) {
    char dir[] = "/tmp/macko-test-XXXXXX";
    CHECK(mkdtemp(dir) != nullptr, "mkdtemp");
    const std::string base      = dir;
    const bytes       content   = builder::serialize(builder::sparse_file(base_model()));
    auto              open_path = [](const std::string & path) {
        std::unique_ptr<macko::model_file> file;
        const int                          status = macko::model_file_open(path.c_str(), true, &file);
        seen.insert(status);
        return status;
    };
    auto write_file = [&](const std::string & path) {
        FILE * out = fopen(path.c_str(), "wb");
        CHECK(out && fwrite(content.data(), 1, content.size(), out) == content.size(), "write %s", path.c_str());
        fclose(out);
    };
    expect("directory", S(NOT_A_FILE), open_path(base));
    CHECK(mkfifo((base + "/fifo").c_str(), 0600) == 0, "mkfifo");
    expect("FIFO without a writer", S(NOT_A_FILE), open_path(base + "/fifo"));
    expect("device", S(NOT_A_FILE), open_path("/dev/zero"));
    expect("missing", S(IO), open_path(base + "/nonesuch"));
    CHECK(strstr(ggml_macko_last_error(), "No such file") && strstr(ggml_macko_last_error(), "nonesuch"), "%s",
          ggml_macko_last_error());
    expect("no name", S(IO), open_path(""));
    CHECK(symlink("loop", (base + "/loop").c_str()) == 0, "symlink");
    expect("symlink loop", S(IO), open_path(base + "/loop"));
    expect("procfs file of size 0", S(TRUNCATED), open_path("/proc/self/status"));
    write_file(base + "/model");
    CHECK(symlink("model", (base + "/link").c_str()) == 0, "symlink");
    expect("symlink to a file", S(OK), open_path(base + "/link"));

    std::unique_ptr<macko::model_file>   file;
    std::unique_ptr<macko::dense_stream> v;
    CHECK(macko::model_file_open((base + "/model").c_str(), true, &file) == S(OK) &&
              macko::dense_stream::create(*file, &v) == S(OK),
          "%s", ggml_macko_last_error());
    CHECK(file->check_unchanged() == S(OK), "%s", ggml_macko_last_error());
    write_file(base + "/other");
    CHECK(rename((base + "/other").c_str(), (base + "/model").c_str()) == 0, "rename");
    CHECK(file->check_unchanged() == S(OK), "renamed over: the old inode is still open and unchanged");
    CHECK(macko::model_file_open((base + "/model").c_str(), true, &file) == S(OK) &&
              macko::dense_stream::create(*file, &v) == S(OK),
          "%s", ggml_macko_last_error());
    FILE * stream = v->open_stream();
    CHECK(truncate((base + "/model").c_str(), static_cast<off_t>(content.size() / 2)) == 0, "truncate");
    int status = file->check_unchanged();
    seen.insert(status);
    expect("truncated while open", S(FILE_CHANGED), status);
    bytes buffer(content.size() * 2);
    CHECK(fread(buffer.data(), 1, buffer.size(), stream) < static_cast<size_t>(v->size()) && ferror(stream),
          "the stream reports an error");
    expect("truncated while read", S(TRUNCATED), v->status());
    CHECK(strstr(ggml_macko_last_error(), "/model: short read"), "%s", ggml_macko_last_error());
    collector c(file->sparse.back());
    expect("payload gone", S(TRUNCATED), macko::read_payload(*file, file->sparse.back(), 2, c));
    fclose(stream);
    for (const char * name : { "/fifo", "/loop", "/link", "/model" }) {
        unlink((base + name).c_str());
    }
    rmdir(dir);
}

// Which files the plugin opens, and which it leaves to llama.cpp with NOT_SPARSE.
TEST(open_sparse) {
    auto open_content = [](const bytes & content) {
        const memory_file                  f(content);
        std::unique_ptr<macko::model_file> file;
        return macko::model_file_open_sparse(f.path().c_str(), macko::compression::off, false, &file);
    };
    auto sparse_with = [](const file_lie & change) {
        builder::file f = builder::sparse_file(base_model());
        change(f);
        return builder::serialize(f);
    };
    expect("sparse", S(OK), open_content(sparse_with([](file &) {})));
    expect("sparse, hostile metadata", S(BAD_KEY_VALUE),
           open_content(sparse_with([](file & f) { f.set(scalar<uint32_t>("llama.block_count", U32, 0)); })));
    expect("sparse, broken header", S(DUPLICATE_KEY),
           open_content(sparse_with([](file & f) { f.keys.push_back(f.keys[1]); })));
    expect("sparse, macko.version missing", S(BAD_KEY),
           open_content(sparse_with([](file & f) { f.drop("macko.version"); })));
    bytes late =
        sparse_with([](file & f) { f.keys.insert(f.keys.begin(), text("x", std::string((1 << 20) - 2000, 'x'))); });
    for (size_t n = 0; n < 3000; n += 7) { // so that the key also lies across the border of two chunks
        late.insert(late.begin() + 100, 7, 'x');
        CHECK(open_content(late) != S(NOT_SPARSE), "claim not found after %zu more bytes", n);
    }
    builder::file dense = base_model().dense;
    expect("dense", S(NOT_SPARSE), open_content(builder::serialize(dense)));
    dense.set(text("general.architecture", "mamba"));
    expect("dense, other architecture", S(NOT_SPARSE), open_content(builder::serialize(dense)));
    dense.keys.push_back(dense.keys[1]);
    expect("dense, broken", S(NOT_SPARSE), open_content(builder::serialize(dense)));
    expect("no GGUF", S(NOT_SPARSE), open_content({ 'P', 'K' }));
    std::unique_ptr<macko::model_file> file;
    expect("missing", S(NOT_SPARSE), macko::model_file_open_sparse("/nonesuch", macko::compression::off, false, &file));
    expect("directory", S(NOT_A_FILE), macko::model_file_open_sparse("/", macko::compression::off, false, &file));
}

// A consumer that copies whole bytes, like the one for GPUs, must not overwrite the codes of a neighbouring block with
// zeros.
TEST(compressed_blocks_are_not_the_sparse_file) {
    struct copier : macko::payload_consumer {
        bytes values, deltas;
        int   n_blocks = 0;
        int   consume(const macko::macko_view & view, int64_t) override {
            static std::mutex                 mutex;
            const std::lock_guard<std::mutex> lock(mutex);
            const macko::macko_rows &         r = view.rows();
            const int64_t begin = r.row_ptr[r.row_begin], end = r.row_ptr[r.row_end], b = r.desc.delta_bits,
                          nb         = macko::value_nbytes(r.desc.type);
            const int64_t byte_begin = begin * b / 8, byte_end = (end * b + 7) / 8;
            memcpy(values.data() + begin * nb, static_cast<const uint8_t *>(r.values) + (begin - r.base) * nb,
                     static_cast<size_t>((end - begin) * nb));
            memcpy(deltas.data() + byte_begin, r.deltas + byte_begin - r.base * b / 8,
                     static_cast<size_t>(byte_end - byte_begin));
            n_blocks++;
            return S(OK);
        }
    };
    const builder::model               m = builder::tiny_llama(512, 1, 31);
    const memory_file                  f(builder::serialize(m.dense));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open_sparse(f.path().c_str(), macko::compression::bit_exact, false, &file) == S(OK), "%s",
          ggml_macko_last_error());
    int n_blocks = 0;
    for (const macko::sparse_tensor_info & matrix : file->sparse) {
        const auto                t = std::find_if(m.dense.tensors.begin(), m.dense.tensors.end(),
                                                   [&](const builder::tensor & x) { return x.name == matrix.name; });
        const builder::components want =
            builder::encode({ t->name, t->ne, t->type, t->data }, static_cast<uint32_t>(matrix.desc.delta_bits));
        copier c;
        c.values.resize(want.values.size());
        c.deltas.resize(want.deltas.size());
        CHECK(macko::read_payload(*file, matrix, 2, c) == S(OK), "%s", ggml_macko_last_error());
        CHECK(c.values == want.values && c.deltas == want.deltas, "%s, %d bits, %d blocks", matrix.name.c_str(),
              matrix.desc.delta_bits, c.n_blocks);
        n_blocks += c.n_blocks;
    }
    CHECK(n_blocks > 2 * static_cast<int>(file->sparse.size()), "%d blocks of %zu matrices", n_blocks,
          file->sparse.size());
}

// All tests together have produced each status that a file can cause.
static void check_every_status_was_seen() {
    for (int code : { S(IO), S(NOT_A_FILE), S(TRUNCATED), S(FILE_CHANGED) }) {
        CHECK(seen.count(code), "no test file produced %s", ggml_macko_status_name(code));
    }
    for (int code = 20; code < 60; code++) {
        CHECK(strcmp(ggml_macko_status_name(code), "unknown") == 0 || seen.count(code), "no test file produced %s",
              ggml_macko_status_name(code));
    }
}

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    run_tests();
    if (all_tests_run()) {
        check_every_status_was_seen();
    }
    printf("%d cases\n", n_cases);
    return test_summary("test-gguf-header");
}
