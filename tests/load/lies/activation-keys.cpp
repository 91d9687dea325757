// Lies in the keys macko.act.*
#include "lies.h"

static void lie_of_activations(const char * what, int expected, const file_lie & change) {
    lie(what, expected, [&](file & f) {
        set_activation_keys(&f);
        change(f);
    });
}

TEST(malformed_activation_keys_are_refused) {
    lie("activation keys", S(OK), [](file & f) { set_activation_keys(&f); });
    for (const char * name : { "macko.act.version", "macko.act.kind", "macko.act.share", "macko.act.allocation",
                               "macko.act.text", "macko.act.chunks", "macko.act.n_ctx", "macko.act.part.down",
                               "macko.act.part.share", "macko.act.part.threshold" }) {
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
        lie_of_activations("share of a part", S(BAD_KEY_VALUE),
                           [&](file & f) { f.set(array<float>("macko.act.part.share", F32, { 0.5f, value })); });
        lie_of_activations("threshold", value == beyond_one ? S(OK) : S(BAD_KEY_VALUE),
                           [&](file & f) { f.set(array<float>("macko.act.part.threshold", F32, { value, 1 })); });
    }
    lie_of_activations("another key in a later version", S(OK), [](file & f) {
        f.set(scalar<uint32_t>("macko.act.version", U32, 2));
        f.set(text("macko.act.note", "x"));
        f.drop("macko.act.kind");
    });
    for (const char * name : { "macko.act.version", "macko.act.chunks", "macko.act.n_ctx" }) {
        lie_of_activations(name, S(BAD_KEY_VALUE), [name](file & f) { f.set(scalar<uint32_t>(name, U32, 0)); });
    }
    for (const size_t n : { 0, 1, 3 }) {
        for (const char * name : { "macko.act.part.share", "macko.act.part.threshold" }) {
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
        for (const char * name : { "macko.act.part.share", "macko.act.part.threshold" }) {
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
