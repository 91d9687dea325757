// Lies in the header of quantized matrices, and some in the payload; test_column_windows.py has all payload lies.
#include "lies.h"

#include <algorithm>

TEST(malformed_quantized_is_refused) {
    const auto lie = [](const char * name, int expected, const file_lie & change) {
        builder::file f = builder::sparse_file(base_model(), false, true);
        change(f);
        expect(name, expected, check_all(builder::serialize(f), true));
    };
    const auto name   = [](const char * component) { return base_model().sparse[7].name + component; };
    const auto resize = [=](const char * component, int64_t n, size_t nbytes = 1) {
        return [=](file & f) {
            tensor & t = f.at(name(component));
            t.ne[0] += static_cast<uint64_t>(n);
            t.data.resize(t.ne[0] * nbytes);
        };
    };
    const auto patched = [=](const char * component, size_t at, uint8_t value) {
        return [=](file & f) { f.at(name(component)).data[at] = value; };
    };
    for (const char * component : { ".codes", ".bitmap", ".wscales", ".factors", ".row_ptr", ".levels" }) {
        lie("quantized component missing", S(MISSING_COMPONENT), [=](file & f) {
            f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(name(component))));
        });
        lie("quantized component of rank 2", S(BAD_COMPONENT),
            [=](file & f) { f.at(name(component)).ne.push_back(1); });
        lie("quantized component of another type", S(BAD_COMPONENT), [=](file & f) {
            tensor & t = f.at(name(component));
            t.type     = TYPE_F32;
            t.data.resize(4 * t.ne[0]);
        });
    }
    lie("quantized with 4 bits", S(BAD_FORMAT), [](file & f) {
        f.set(array<uint32_t>("macko.tensor.index_bits", U32, std::vector<uint32_t>(base_model().sparse.size(), 4)));
    });
    lie("codes beyond any row", S(BAD_COMPONENT), resize(".codes", 1 << 20));
    lie("no multiple of 4 codes", S(BAD_COMPONENT), resize(".codes", 1));
    lie("codes too long", S(BAD_ROW_PTR), resize(".codes", 4));
    lie("codes for fewer values", S(BAD_NNZ), [=](file & f) {
        tensor & t = f.at(name(".codes"));
        t.ne[0]    = 4;
        t.data.resize(4);
    });
    lie("bitmap too long", S(BAD_COMPONENT), resize(".bitmap", 4));
    lie("scales of no window", S(BAD_COMPONENT), resize(".wscales", 1));
    lie("factors too short", S(BAD_COMPONENT), resize(".factors", -1, 2));
    lie("row_ptr too short", S(BAD_COMPONENT), resize(".row_ptr", -1, 4));
    lie("levels of no width", S(BAD_COMPONENT), resize(".levels", 1));
    lie("levels of 4 bits", S(NOT_CANONICAL), resize(".levels", 8));
    lie("a factor that is NaN", S(NOT_FINITE),
        [=](file & f) { patch<uint16_t>(&f.at(name(".factors")).data, 0, 0x7fc0); });
    lie("a factor that is NaN, and bits missing from later rows", S(BAD_ROW_PTR), [=](file & f) {
        patch<uint16_t>(&f.at(name(".factors")).data, 0, 0x7fc0);
        auto & bitmap = f.at(name(".bitmap")).data;
        std::fill(bitmap.begin() + static_cast<int64_t>(bitmap.size()) / 2, bitmap.end(), uint8_t(0));
    });
    lie("level 0", S(NOT_CANONICAL), patched(".levels", 0, 0));
    lie("row_ptr beyond the payload", S(BAD_ROW_PTR), patched(".row_ptr", 7, 0x7f));
}
