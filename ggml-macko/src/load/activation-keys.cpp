#include "load/activation-keys.h"
#include "gguf/names.h"

#include <algorithm>
#include <cfloat>
#include <cinttypes>
#include <cmath>
#include <initializer_list>
#include <iterator>

namespace macko {

static const char * const VERSION_KEY = "macko.act.version";
constexpr int64_t         VERSION     = 1;

static const struct {
    const char * name;
    gguf_type    type; // of the elements, if it is a list
    bool         is_list;
} KEYS[] = {
    { VERSION_KEY, GGUF_U32, false },           { "macko.act.kind", GGUF_STRING, false },
    { "macko.act.share", GGUF_F32, false },     { "macko.act.allocation", GGUF_STRING, false },
    { "macko.act.text", GGUF_STRING, false },   { "macko.act.chunks", GGUF_U32, false },
    { "macko.act.n_ctx", GGUF_U32, false },     { "macko.act.part.down", GGUF_STRING, true },
    { "macko.act.part.share", GGUF_F32, true }, { "macko.act.part.threshold", GGUF_F32, true },
};

constexpr uint64_t MAX_TEXT_NAME = 1024; // bytes: 255 of a file name, if each non-UTF-8 byte becomes three

bool is_activation_key(std::string_view name) { return starts_with(name, "macko.act."); }

static bool is_later_version(const gguf_header & header) {
    const gguf_key * key     = header.find(VERSION_KEY);
    int64_t          version = 0;
    return key != nullptr && key->type == GGUF_U32 && header.get_int(*key, 0, &version) && version > VERSION;
}

bool has_activation_keys(const gguf_header & header) {
    return !is_later_version(header) && std::any_of(header.keys.begin(), header.keys.end(),
                                                    [](const gguf_key & key) { return is_activation_key(key.name); });
}

static int check_names_of_keys(const gguf_header & header) {
    for (const gguf_key & key : header.keys) {
        if (is_activation_key(key.name) && std::none_of(std::begin(KEYS), std::end(KEYS),
                                                        [&](const auto & known) { return key.name == known.name; })) {
            return fail(GGML_MACKO_STATUS_BAD_KEY, "key %s is reserved", printable(key.name.c_str()).text);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_types(const gguf_header & header) {
    uint64_t n_parts = 0;
    for (const auto & known : KEYS) {
        const gguf_key * key = header.find(known.name);
        if (key == nullptr) {
            return fail(GGML_MACKO_STATUS_MISSING_KEY, "key %s is missing, but other macko.act.* keys are present",
                        known.name);
        }
        if (key->type != (known.is_list ? GGUF_ARRAY : known.type) || key->element_type != known.type) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s has the wrong type", known.name);
        }
        if (!known.is_list) {
            continue;
        }
        n_parts = n_parts == 0 ? key->n : n_parts; // the first list determines the number of parts
        if (key->n < 1 || key->n > MAX_TENSORS || key->n != n_parts) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                        "key %s has %" PRIu64 " elements (1 ... %" PRIu64 ", as many as macko.act.part.down)",
                        known.name, key->n, MAX_TENSORS);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_one_of(const gguf_header & header, const char * name, std::initializer_list<const char *> words) {
    std::string value;
    std::string list;
    header.get_string(*header.find(name), 0, &value); // cannot fail, because check_types() found a string
    for (const char * word : words) {
        if (value == word) {
            return GGML_MACKO_STATUS_OK;
        }
        list += list.empty() ? word : std::string(", ") + word;
    }
    return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s is '%s' (one of %s)", name,
                printable(value.c_str(), value.size()).text, list.c_str());
}

// Checks that all elements of an F32 key are finite and in 0 ... max.
static int check_numbers(const gguf_header & header, const char * name, double max) {
    const gguf_key & key = *header.find(name);
    for (uint64_t i = 0; i < key.n; i++) {
        double value = 0;
        header.get_float(key, i, &value); // cannot fail, because check_types() found F32
        if (!std::isfinite(value) || value < 0 || value > max) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s: element %" PRIu64 " is %g (0 ... %g)", name, i, value,
                        max);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_positive(const gguf_header & header, const char * name) {
    int64_t value = 0;
    header.get_int(*header.find(name), 0, &value); // cannot fail, because check_types() found U32
    return value > 0 ? GGML_MACKO_STATUS_OK : fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s is 0 (at least 1)", name);
}

static int check_names(const gguf_header & header) {
    std::vector<std::string> names;
    std::string              text;
    header.get_strings(*header.find("macko.act.part.down"), &names);
    header.get_string(*header.find("macko.act.text"), 0, &text);
    if (text.empty() || text.size() > MAX_TEXT_NAME) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                    "key macko.act.text has %zu bytes (a file's name: 1 ... %" PRIu64 ")", text.size(), MAX_TEXT_NAME);
    }
    for (size_t i = 0; i < names.size(); i++) {
        if (names[i].empty() || names[i].size() > MAX_NAME) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                        "key macko.act.part.down: element %zu has %zu bytes (a tensor's name: 1 ... %zu)", i,
                        names[i].size(), MAX_NAME);
        }
    }
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    return twice == names.end() ? GGML_MACKO_STATUS_OK
                                : fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key macko.act.part.down has '%s' twice",
                                       printable(twice->c_str(), twice->size()).text);
}

int check_activation_keys(const gguf_header & header) {
    if (!has_activation_keys(header)) {
        return GGML_MACKO_STATUS_OK;
    }
    TRY(check_names_of_keys(header));
    TRY(check_types(header));
    TRY(check_one_of(header, "macko.act.kind", { "cats", "product", "wina" }));
    TRY(check_one_of(header, "macko.act.allocation", { "uniform", "greedy" }));
    for (const char * name : { "macko.act.share", "macko.act.part.share" }) {
        TRY(check_numbers(header, name, 1.0));
    }
    TRY(check_numbers(header, "macko.act.part.threshold", FLT_MAX));
    for (const char * name : { VERSION_KEY, "macko.act.chunks", "macko.act.n_ctx" }) {
        TRY(check_positive(header, name));
    }
    return check_names(header);
}

} // namespace macko
