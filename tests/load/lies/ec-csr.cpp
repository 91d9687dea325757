// Lies in the header of EC-CSR matrices, and some in the payload; test-ec-csr.cpp has all payload lies.
#include "lies.h"

static void ec_lie(const char * name, int expected, const file_lie & change) {
    builder::file f = builder::sparse_file(base_model(), true);
    change(f);
    expect(name, expected, check_all(builder::serialize(f), true));
}

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
    ec_lie("ec-csr with 2 bits", S(BAD_FORMAT), [](file & f) {
        std::vector<uint32_t> v(12, 2);
        f.set(array<uint32_t>("macko.tensor.index_bits", U32, v));
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
            const temporary_file trial(serialize(f));
            const auto           opened = open_or_die(trial);
            collector            c(opened->sparse[4]);
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
        const temporary_file               f(builder::serialize(builder::sparse_file(m, true)));
        std::unique_ptr<macko::model_file> file;
        CHECK(macko::model_file_open(f.path.c_str(), true, &file) == S(OK), "%s", ggml_macko_last_error());
        for (size_t i = 0; i < m.sparse.size(); i++) {
            collector c(file->sparse[i]);
            CHECK(macko::read_payload(*file, file->sparse[i], 3, c) == S(OK), "%s", ggml_macko_last_error());
            CHECK(c.dense == m.sparse[i].data, "%s: decoded differently", m.sparse[i].name.c_str());
            CHECK(std::accumulate(c.nnz.begin(), c.nnz.end(), int64_t(0)) == file->sparse[i].desc.nnz, "%s: nnz",
                  m.sparse[i].name.c_str());
        }
    }
}
