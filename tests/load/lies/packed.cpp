// Lies in the header of packed matrices, and some in the payload; test-packed.cpp has all payload lies.
#include "lies.h"

TEST(malformed_packed_is_refused) {
    const auto packed_lie = [](const char * name, int expected, const file_lie & change) {
        builder::file f = builder::sparse_file(base_model(), false, true);
        change(f);
        expect(name, expected, check_all(builder::serialize(f), true));
    };
    const auto plain  = [](const char * component) { return base_model().sparse[0].name + component; }; // F16
    const auto coded  = [](const char * component) { return base_model().sparse[5].name + component; };
    const auto resize = [](const std::string & name, int64_t n, size_t nbytes) {
        return [=](file & f) {
            tensor & t = f.at(name);
            t.ne[0] += static_cast<uint64_t>(n);
            t.data.resize(t.ne[0] * nbytes);
        };
    };
    packed_lie("a valid packed file", S(OK), [](file &) {});
    packed_lie("packed with 3 bits", S(BAD_FORMAT), [](file & f) {
        f.set(array<uint32_t>("macko.tensor.index_bits", U32, std::vector<uint32_t>(base_model().sparse.size(), 3)));
    });
    packed_lie("packed called macko", S(BAD_FORMAT), [](file & f) {
        f.set(texts("macko.tensor.format", std::vector<std::string>(base_model().sparse.size(), "macko")));
    });
    for (const char * component : { ".values", ".index", ".row_ptr" }) {
        packed_lie("packed component missing", S(MISSING_COMPONENT), [=](file & f) {
            f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(plain(component))));
        });
        packed_lie("packed component of rank 2", S(BAD_COMPONENT),
                   [=](file & f) { f.at(plain(component)).ne.push_back(1); });
    }
    packed_lie("values too long", S(BAD_COMPONENT), resize(plain(".values"), 32, 2));
    packed_lie("values too short", S(BAD_COMPONENT), resize(plain(".values"), -32, 2));
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
    packed_lie("values called bytes", S(BAD_COMPONENT), [=](file & f) {
        tensor & t = f.at(plain(".values"));
        t.type     = TYPE_I8;
        t.ne[0]    = t.data.size();
    });
    packed_lie("values in blocks of Q8_0", S(BAD_COMPONENT), [=](file & f) {
        tensor & t = f.at(plain(".values"));
        t.type     = TYPE_Q8_0;
        t.data.resize(t.ne[0] / 32 * 34);
    });
    packed_lie("index too long", S(BAD_COMPONENT), resize(plain(".index"), 4, 1));
    packed_lie("index too short", S(BAD_COMPONENT), resize(plain(".index"), -4, 1));
    packed_lie("values of another type", S(BAD_COMPONENT), [=](file & f) { f.at(plain(".values")).type = TYPE_BF16; });
    packed_lie("packed components swapped", S(BAD_COMPONENT),
               [=](file & f) { std::swap(f.at(plain(".index")), f.at(plain(".row_ptr"))); });
    packed_lie("a plain value is Inf or NaN", S(NOT_FINITE), [=](file & f) { f.at(plain(".values")).data[1] = 0x7c; });
    packed_lie("a plain value is zero", S(NOT_CANONICAL), [=](file & f) {
        bytes & d = f.at(plain(".values")).data;
        std::fill(d.begin(), d.begin() + 4, uint8_t(0));
    });
    packed_lie("a bit moves to the next row", S(BAD_ROW_PTR), [=](file & f) {
        bytes & d = f.at(plain(".index")).data;
        d[0]      = static_cast<uint8_t>(d[0] ^ 1);
    });
    packed_lie("row_ptr beyond the payload", S(BAD_ROW_PTR),
               [=](file & f) { patch<int32_t>(&f.at(plain(".row_ptr")).data, 4, INT32_MAX); });
}
