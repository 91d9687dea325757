// The registry of formats: the properties of each row, and a format of this test, "toy", added through register_codec()
// like in a user's program. It must load, validate, decode and encode through the loader and the C API without changes
// to them.
#include "capi/struct-size.h"
#include "codec/floats.h"
#include "codec/macko/encode.h"
#include "codec/registry.h"
#include "gguf-builder.h"
#include "load/payload.h"
#include "test.h"

#include <algorithm>
#include <atomic>
#include <cstring>

using builder::bytes;

// ---- the toy format: CSR with 32-bit columns, "toy" in macko.tensor.format ----

namespace {

enum toy_component : size_t { TOY_VALUES, TOY_COLS, TOY_ROW_PTR };

const macko::codec & toy_codec();

class toy_view : public macko::codec_view {
public:
    explicit toy_view(const ggml_macko_matrix & m)
        : codec_view(toy_codec()),
          desc_(rows_desc(toy_codec(), m)),
          values_(static_cast<const uint8_t *>(m.arrays[TOY_VALUES].data)),
          cols_(static_cast<const int32_t *>(m.arrays[TOY_COLS].data)),
          row_ptr_(static_cast<const int32_t *>(m.arrays[TOY_ROW_PTR].data)) {}

    const macko::macko_desc & desc() const override { return desc_; }

    int for_each_row(int, const std::function<void(int64_t, const void *)> & f) const override {
        const size_t nbytes = static_cast<size_t>(macko::value_nbytes(desc_.type));
        bytes        row(static_cast<size_t>(desc_.cols) * nbytes);
        for (int64_t r = 0; r < desc_.rows; r++) {
            std::fill(row.begin(), row.end(), 0);
            for (int32_t k = row_ptr_[r]; k < row_ptr_[r + 1]; k++) {
                memcpy(&row[static_cast<size_t>(cols_[k]) * nbytes], values_ + static_cast<size_t>(k) * nbytes, nbytes);
            }
            f(r, row.data());
        }
        return GGML_MACKO_STATUS_OK;
    }

    int check() const {
        if (row_ptr_[0] != 0 || row_ptr_[desc_.rows] != desc_.nnz) {
            return macko::fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr does not run from 0 to nnz");
        }
        for (int64_t r = 0; r < desc_.rows; r++) {
            if (row_ptr_[r] > row_ptr_[r + 1] || row_ptr_[r + 1] > desc_.nnz) {
                return macko::fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row %lld", static_cast<long long>(r));
            }
            for (int32_t k = row_ptr_[r]; k < row_ptr_[r + 1]; k++) {
                if (cols_[k] >= desc_.cols || cols_[k] <= (k > row_ptr_[r] ? cols_[k - 1] : -1)) {
                    return macko::fail(GGML_MACKO_STATUS_BAD_COLUMN, "row %lld: column %d", static_cast<long long>(r),
                                       cols_[k]);
                }
            }
        }
        return GGML_MACKO_STATUS_OK;
    }

private:
    macko::macko_desc desc_;
    const uint8_t *   values_;
    const int32_t *   cols_;
    const int32_t *   row_ptr_;
};

class toy_matrix : public macko::encoded_matrix {
public:
    macko::macko_desc    desc = {};
    bytes                values;
    std::vector<int32_t> cols;
    std::vector<int32_t> row_ptr;

    ggml_macko_matrix matrix() const override {
        ggml_macko_matrix m   = { 0, nullptr, desc.rows, desc.cols, desc.type, desc.type, 1, desc.nnz, 3, {} };
        m.arrays[TOY_VALUES]  = { values.data(), static_cast<int64_t>(values.size()), desc.type };
        m.arrays[TOY_COLS]    = { cols.data(), static_cast<int64_t>(4 * cols.size()), GGML_MACKO_TYPE_I32 };
        m.arrays[TOY_ROW_PTR] = { row_ptr.data(), static_cast<int64_t>(4 * row_ptr.size()), GGML_MACKO_TYPE_I32 };
        return m;
    }
};

class toy_format final : public macko::codec {
public:
    toy_format() : codec({ "toy", { ".values", ".cols", ".row_ptr" }, { { "max_nnz", 1000 } }, false }) {}

    int check_desc(const ggml_macko_matrix & m) const override {
        return m.index_bits == 1
                   ? macko::check_desc(rows_desc(*this, m))
                   : macko::fail(GGML_MACKO_STATUS_BAD_FORMAT, "index_bits %d of toy is not 1", m.index_bits);
    }
    void component_rules(const ggml_macko_matrix & m, macko::component_rule * rules) const override {
        rules[TOY_VALUES]  = { m.type, m.nnz, 0 };
        rules[TOY_COLS]    = { GGML_MACKO_TYPE_I32, m.nnz, 0 };
        rules[TOY_ROW_PTR] = { GGML_MACKO_TYPE_I32, m.rows + 1, 0 };
    }
    int32_t recoded_bits(int32_t) const override { return 4; }
    int     open(const ggml_macko_matrix & m, int, std::unique_ptr<macko::codec_view> * view) const override {
        macko::component_rule rules[3];
        component_rules(m, rules);
        for (int i = 0; i < 3; i++) {
            if (macko::array_length(m.arrays[i]) != rules[i].length) {
                return macko::fail(GGML_MACKO_STATUS_BAD_COMPONENT, "array %d has the wrong length", i);
            }
        }
        auto      v      = std::make_unique<toy_view>(m);
        const int status = v->check();
        if (status == GGML_MACKO_STATUS_OK) {
            *view = std::move(v);
        }
        return status;
    }
    int encode(const void * dense, const macko::macko_desc & desc, const int64_t * options, int n_threads,
               std::unique_ptr<macko::encoded_matrix> * out) const override {
        ggml_macko_count count = {};
        if (const int status = macko::count_finite(dense, desc, n_threads, &count)) {
            return status;
        }
        if (count.nnz > options[0]) {
            return macko::fail(GGML_MACKO_STATUS_LIMIT, "more than max_nnz");
        }
        auto m                = std::make_unique<toy_matrix>();
        m->desc               = desc;
        m->desc.nnz           = count.nnz;
        const auto * elements = static_cast<const uint8_t *>(dense);
        const auto   nbytes   = static_cast<size_t>(macko::value_nbytes(desc.type));
        m->row_ptr.push_back(0);
        for (int64_t i = 0; i < desc.rows * desc.cols; i++, elements += nbytes) {
            if (std::any_of(elements, elements + nbytes, [](uint8_t b) { return b != 0; })) {
                m->values.insert(m->values.end(), elements, elements + nbytes);
                m->cols.push_back(static_cast<int32_t>(i % desc.cols));
            }
            if ((i + 1) % desc.cols == 0) {
                m->row_ptr.push_back(static_cast<int32_t>(m->cols.size()));
            }
        }
        *out = std::move(m);
        return GGML_MACKO_STATUS_OK;
    }
};

const macko::codec & toy_codec() {
    static const toy_format format;
    return format;
}

} // namespace

// ---- a file with one toy matrix ----

constexpr int64_t ROWS = 5, COLS = 70;

static std::vector<uint16_t> sample_matrix() {
    std::vector<uint16_t> dense(ROWS * COLS, 0);
    rng                   r(19);
    for (uint16_t & v : dense) {
        v = r.unit() < 0.3 ? static_cast<uint16_t>(r.range(1, 0x7bff)) : 0;
    }
    std::fill(dense.begin() + 2 * COLS, dense.begin() + 3 * COLS, 0); // an empty row
    return dense;
}

// A file with that matrix alone; change may edit it before it is written.
static bytes toy_file(const std::vector<uint16_t> & dense, const std::function<void(builder::file &)> & change) {
    std::unique_ptr<macko::encoded_matrix> encoded;
    CHECK(macko::encode_matrix(toy_codec(), dense.data(), { ROWS, COLS, GGML_MACKO_TYPE_F16, 4, 0 }, nullptr, 0, 1,
                               &encoded) == 0,
          "%s", ggml_macko_last_error());
    const ggml_macko_matrix m = encoded->matrix();
    builder::file           f;
    f.keys = { builder::text("general.architecture", "llama"),
               builder::scalar<uint32_t>("macko.version", builder::U32, 1),
               builder::texts("macko.tensor.name", { "w.weight" }),
               builder::texts("macko.tensor.format", { "toy" }),
               builder::array<uint32_t>("macko.tensor.type", builder::U32, { GGML_MACKO_TYPE_F16 }),
               builder::array<uint64_t>("macko.tensor.ne", builder::U64, { COLS, ROWS, 1, 1 }),
               builder::array<uint32_t>("macko.tensor.index_bits", builder::U32, { 1 }),
               builder::array<uint64_t>("macko.tensor.nnz", builder::U64, { static_cast<uint64_t>(m.nnz) }) };
    for (size_t c = 0; c < 3; c++) {
        const auto * data   = static_cast<const uint8_t *>(m.arrays[c].data);
        const auto   length = static_cast<uint64_t>(macko::array_length(m.arrays[c]));
        f.tensors.push_back({ std::string("w.weight") + toy_codec().components()[c],
                              { length },
                              static_cast<uint32_t>(m.arrays[c].type),
                              bytes(data, data + m.arrays[c].nbytes) });
    }
    change(f);
    return builder::serialize(f);
}

struct memory_source : macko::byte_source {
    const bytes & data;
    explicit memory_source(const bytes & b) : data(b) {}
    int64_t size() const override { return static_cast<int64_t>(data.size()); }
    int     read(int64_t offset, void * dst, int64_t n) const override {
        if (offset < 0 || n < 0 || offset > size() || n > size() - offset) {
            return macko::fail(GGML_MACKO_STATUS_TRUNCATED, "read behind the end");
        }
        memcpy(dst, data.data() + offset, static_cast<size_t>(n));
        return GGML_MACKO_STATUS_OK;
    }
};

static int open_header(const bytes & b, macko::model_file * file) {
    const int status = macko::read_gguf_header(memory_source(b), &file->header);
    return status ? status : macko::check_sparse_tensors(file);
}

// The rows that a device without toy kernels gets.
struct decoder : macko::payload_consumer {
    std::vector<uint16_t> dense = std::vector<uint16_t>(ROWS * COLS, 0xffff);
    int                   consume(const macko::macko_view & view, int64_t) override {
        macko::decode(view, &dense[static_cast<size_t>(view.rows().row_begin * COLS)]);
        return GGML_MACKO_STATUS_OK;
    }
};

// A device with kernels of its own for the format.
struct toy_device : macko::payload_consumer {
    std::vector<uint16_t> dense = std::vector<uint16_t>(ROWS * COLS, 0xffff);
    int                   consume(const macko::macko_view &, int64_t) override {
        return macko::fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "test: rows for a consumer that takes the format");
    }
    bool takes(const macko::codec & format) const override { return &format == &toy_codec(); }
    int  consume_matrix(const macko::codec_view & view) override { return view.decode(dense.data(), 2); }
};

static int read_first(const bytes & b, macko::payload_consumer & consumer) {
    macko::model_file file;
    const int         status = open_header(b, &file);
    return status ? status : macko::read_payload(memory_source(b), file.header, file.sparse[0], 2, consumer);
}

// ---- tests ----

TEST(file_of_a_registered_format_loads) {
    const std::vector<uint16_t> dense = sample_matrix();
    const bytes                 b     = toy_file(dense, [](builder::file &) {});
    macko::model_file           file;
    CHECK(open_header(b, &file) == 0, "%s", ggml_macko_last_error());
    CHECK(file.sparse.size() == 1 && file.sparse[0].format == &toy_codec() && file.sparse[0].desc.delta_bits == 4 &&
              file.sparse[0].n_tensors == 3 && macko::dense_tensors(file).size() == 1,
          "what the header says of it");
    decoder    rows;
    toy_device own;
    CHECK(read_first(b, rows) == 0 && rows.dense == dense, "recoded to MACKO rows: %s", ggml_macko_last_error());
    CHECK(read_first(b, own) == 0 && own.dense == dense, "by a device of its own: %s", ggml_macko_last_error());
}

TEST(hostile_file_of_a_registered_format_is_refused) {
    const std::vector<uint16_t> dense = sample_matrix();
    const struct {
        const char *                         what;
        int                                  status;
        std::function<void(builder::file &)> change;
    } lies[] = {
        { "component missing", GGML_MACKO_STATUS_MISSING_COMPONENT,
          [](builder::file & f) { f.tensors.erase(f.tensors.begin() + 1); } },
        { "component of the wrong type", GGML_MACKO_STATUS_BAD_COMPONENT,
          [](builder::file & f) { f.tensors[1].type = builder::TYPE_F32; } },
        { "component too short", GGML_MACKO_STATUS_BAD_COMPONENT,
          [](builder::file & f) {
              f.tensors[1].ne[0]--;
              f.tensors[1].data.resize(f.tensors[1].data.size() - 4);
          } },
        { "components out of order", GGML_MACKO_STATUS_BAD_COMPONENT,
          [](builder::file & f) { std::swap(f.tensors[1], f.tensors[2]); } },
        { "dense tensor with a suffix of the format", GGML_MACKO_STATUS_BAD_COMPONENT,
          [](builder::file & f) { f.tensors.push_back({ "other.cols", { 8 }, builder::TYPE_I32, bytes(32) }); } },
        { "unknown format", GGML_MACKO_STATUS_BAD_FORMAT,
          [](builder::file & f) {
              *f.find("macko.tensor.format") = builder::texts("macko.tensor.format", { "toy2" });
          } },
        { "bits that the format does not have", GGML_MACKO_STATUS_BAD_FORMAT,
          [](builder::file & f) {
              *f.find("macko.tensor.index_bits") =
                  builder::array<uint32_t>("macko.tensor.index_bits", builder::U32, { 4 });
          } },
        { "column behind the last", GGML_MACKO_STATUS_BAD_COLUMN,
          [](builder::file & f) { builder::patch<int32_t>(&f.tensors[1].data, f.tensors[1].data.size() - 4, COLS); } },
        { "row pointers that decrease", GGML_MACKO_STATUS_BAD_ROW_PTR,
          [](builder::file & f) { builder::patch<int32_t>(&f.tensors[2].data, 4, 1 << 20); } },
    };
    for (const auto & lie : lies) {
        decoder   consumer;
        const int status = read_first(toy_file(dense, lie.change), consumer);
        CHECK(status == lie.status, "%s: %s, not %s: %s", lie.what, ggml_macko_status_name(status),
              ggml_macko_status_name(lie.status), ggml_macko_last_error());
    }
}

TEST(c_api_serves_a_registered_format) {
    const std::vector<uint16_t> dense = sample_matrix();
    bool                        found = false;
    for (int32_t i = 0; i < ggml_macko_codec_count(); i++) {
        auto info = macko::sized<ggml_macko_codec_info>();
        CHECK(ggml_macko_codec_at(i, &info) == 0, "%s", ggml_macko_last_error());
        found |= !strcmp(info.name, "toy") && info.n_arrays == 3 && !strcmp(info.suffixes[1], ".cols") &&
                 info.n_options == 1 && info.options[0].value == 1000;
    }
    CHECK(found, "the list of codecs");
    ggml_macko_encoded * e = nullptr;
    auto                 m = macko::sized<ggml_macko_matrix>();
    CHECK(ggml_macko_encode("toy", dense.data(), GGML_MACKO_TYPE_F16, ROWS, COLS, nullptr, 0, 2, &e) == 0 &&
              ggml_macko_encoded_matrix(e, &m) == 0 && !strcmp(m.format, "toy"),
          "%s", ggml_macko_last_error());
    std::vector<uint16_t> back(dense.size(), 0xffff);
    CHECK(ggml_macko_validate(&m, 2) == 0 && ggml_macko_decode(&m, back.data(), 2) == 0 && back == dense, "%s",
          ggml_macko_last_error());

    ggml_macko_cpu_matrix * w = nullptr;
    std::vector<float>      x(COLS, 0), y(ROWS, -1);
    x[3] = 1;
    CHECK(ggml_macko_cpu_matrix_init(&m, 2, &w) == 0 && ggml_macko_cpu_mul_mat(w, x.data(), y.data(), 1, 2) == 0, "%s",
          ggml_macko_last_error());
    for (int64_t r = 0; r < ROWS; r++) {
        CHECK(y[static_cast<size_t>(r)] == macko::float_of_f16(dense[static_cast<size_t>(r * COLS + 3)]),
              "product of row %lld", static_cast<long long>(r));
    }
    ggml_macko_cpu_matrix_free(w);

    const ggml_macko_option few = { "max_nnz", 1 }, unknown = { "nonesuch", 1 };
    CHECK(ggml_macko_encode("toy", dense.data(), GGML_MACKO_TYPE_F16, ROWS, COLS, &few, 1, 2, &e) ==
              GGML_MACKO_STATUS_LIMIT,
          "an option reaches the encoder");
    CHECK(ggml_macko_encode("toy", dense.data(), GGML_MACKO_TYPE_F16, ROWS, COLS, &unknown, 1, 2, &e) ==
              GGML_MACKO_STATUS_BAD_ARGUMENT,
          "an unknown option");
    ggml_macko_matrix wrong = m;
    wrong.format            = "nonesuch";
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_ARGUMENT, "an unknown format");
    wrong             = m;
    wrong.struct_size = sizeof(m) - 1;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_ARGUMENT, "a struct of an API that there never was");
    wrong.struct_size = sizeof(m) + 8;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_OK, "a struct of a later API");
    wrong          = m;
    wrong.n_arrays = 2;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_ARGUMENT, "an array too few");
    wrong                = m;
    wrong.arrays[1].data = nullptr;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_ARGUMENT, "a null array");
    wrong                = m;
    wrong.arrays[1].type = GGML_MACKO_TYPE_I8;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_COMPONENT, "an array of the wrong type");
    wrong = m;
    wrong.arrays[1].nbytes -= 1;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_COMPONENT, "half an element");
    wrong            = m;
    wrong.value_type = GGML_MACKO_TYPE_Q8;
    CHECK(ggml_macko_validate(&wrong, 1) == GGML_MACKO_STATUS_BAD_FORMAT, "values of a type that the format has not");
    ggml_macko_encoded_free(e);
}

// Each built-in format encodes with its defaults, describes its arrays by its own rules, and returns the same matrix
// (if it quantizes, one with the same non-zeros).
TEST(every_format_keeps_its_promises) {
    const std::vector<uint16_t> dense = sample_matrix();
    for (const macko::codec * format : macko::all_codecs()) {
        std::unique_ptr<macko::encoded_matrix> e;
        std::unique_ptr<macko::codec_view>     view;
        CHECK(macko::encode_matrix(*format, dense.data(), { ROWS, COLS, GGML_MACKO_TYPE_F16, 4, 0 }, nullptr, 0, 2,
                                   &e) == 0,
              "%s: %s", format->name(), ggml_macko_last_error());
        const ggml_macko_matrix m = e->matrix();
        CHECK(static_cast<size_t>(m.n_arrays) == format->components().size(), "%s: arrays", format->name());
        macko::component_rule rules[GGML_MACKO_MAX_ARRAYS];
        CHECK(format->check_desc(m) == 0 && format->check_nnz(m) == 0, "%s: %s", format->name(),
              ggml_macko_last_error());
        format->component_rules(m, rules);
        for (int i = 0; i < m.n_arrays; i++) {
            const int64_t n = macko::array_length(m.arrays[i]);
            CHECK(m.arrays[i].type == rules[i].type &&
                      (rules[i].multiple ? n % rules[i].multiple == 0 && n <= rules[i].length : n == rules[i].length),
                  "%s: component %d", format->name(), i);
        }
        std::vector<uint16_t> back(dense.size(), 0xffff);
        macko::macko_matrix   rows;
        const bool            is_lossless = macko::is_value_type(m.value_type);
        CHECK(macko::open_matrix(*format, m, 2, &view) == 0 && view->check_rows(2) == 0 &&
                  view->decode(back.data(), 2) == 0 && &view->format() == format &&
                  std::equal(back.begin(), back.end(), dense.begin(),
                             [&](uint16_t a, uint16_t b) { return is_lossless ? a == b : !a == !b; }),
              "%s: %s", format->name(), ggml_macko_last_error());
        std::atomic<int64_t> n_rows{ 0 }, n_wrong{ 0 };
        CHECK(view->for_each_row(2,
                                 [&](int64_t r, const void * row) {
                                     n_rows++;
                                     n_wrong += memcmp(row, &back[static_cast<size_t>(r * COLS)], 2 * COLS) != 0;
                                 }) == 0 &&
                  n_rows == ROWS && n_wrong == 0,
              "%s: row by row", format->name());
        CHECK(macko::recode(*view, 2, &rows) == 0 && rows.desc.nnz == m.nnz &&
                  macko::n_padded(rows.row_ptr.back()) <= format->max_entries(m),
              "%s: recoded", format->name());
    }
}

TEST(format_beyond_the_limits_is_refused) {
    const auto refused = [](macko::codec::traits t) {
        struct other : macko::codec {
            using codec::codec;
            int  check_desc(const ggml_macko_matrix &) const override { return 0; }
            void component_rules(const ggml_macko_matrix &, macko::component_rule *) const override {}
            int  open(const ggml_macko_matrix &, int, std::unique_ptr<macko::codec_view> *) const override { return 0; }
            int  encode(const void *, const macko::macko_desc &, const int64_t *, int,
                        std::unique_ptr<macko::encoded_matrix> *) const override {
                return 0;
            }
        };
        static std::vector<std::unique_ptr<other>> formats;
        formats.push_back(std::make_unique<other>(std::move(t)));
        return macko::register_codec(*formats.back()) == GGML_MACKO_STATUS_BAD_ARGUMENT;
    };
    CHECK(refused({ "macko", { ".values" }, {}, false }), "a name that is taken");
    CHECK(refused({ "other", {}, {}, false }), "no component");
    CHECK(refused({ "other", { ".far_too_long" }, {}, false }), "a suffix longer than names allow for");
    CHECK(refused({ "other", { "values" }, {}, false }), "a suffix without a dot");
    CHECK(refused({ "other", std::vector<const char *>(GGML_MACKO_MAX_ARRAYS + 1, ".v"), {}, false }),
          "too many components");
}

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    CHECK(macko::find_codec("toy") == nullptr, "toy is not known before it is registered");
    CHECK(macko::register_codec(toy_codec()) == 0, "%s", ggml_macko_last_error());
    run_tests();
    return test_summary("test-codec-registry");
}
