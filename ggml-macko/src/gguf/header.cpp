// Strict reader of a GGUF v3 header. Before reading any elements, it compares their count with a limit and with the
// number of bytes left in the file, so no number in the file can cause an allocation that exceeds the bytes in the
// file. This file has no code for models or sparse tensors.
#include "gguf/header.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <string_view>

namespace macko {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF v3 files and this reader are little-endian");

constexpr int64_t  CHUNK_MIN      = 64 << 10; // size of the first read; each further read doubles the bytes in memory
constexpr int64_t  CHUNK_MAX      = 4 << 20;
constexpr uint64_t MAX_KEY_NAME   = 65535; // limit of the GGUF specification
constexpr int64_t  KEY_NBYTES_MIN = 8 + 1 + 4 + 1;
constexpr int64_t  TENSOR_NBYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8;
constexpr int64_t  ALIGNMENT_DEFAULT = 32;

struct ggml_type_info {
    int32_t type;
    int16_t block;  // elements per block
    int16_t nbytes; // bytes per block
};

// The types of ggml 0.25.3. tests/load/test_hostile_files.py compares this table with the installed library.
static const ggml_type_info GGML_TYPES[] = {
    { 0, 1, 4 },      // F32
    { 1, 1, 2 },      // F16
    { 2, 32, 18 },    // Q4_0
    { 3, 32, 20 },    // Q4_1
    { 6, 32, 22 },    // Q5_0
    { 7, 32, 24 },    // Q5_1
    { 8, 32, 34 },    // Q8_0
    { 9, 32, 36 },    // Q8_1
    { 10, 256, 84 },  // Q2_K
    { 11, 256, 110 }, // Q3_K
    { 12, 256, 144 }, // Q4_K
    { 13, 256, 176 }, // Q5_K
    { 14, 256, 210 }, // Q6_K
    { 15, 256, 292 }, // Q8_K
    { 16, 256, 66 },  // IQ2_XXS
    { 17, 256, 74 },  // IQ2_XS
    { 18, 256, 98 },  // IQ3_XXS
    { 19, 256, 50 },  // IQ1_S
    { 20, 32, 18 },   // IQ4_NL
    { 21, 256, 110 }, // IQ3_S
    { 22, 256, 82 },  // IQ2_S
    { 23, 256, 136 }, // IQ4_XS
    { 24, 1, 1 },     // I8
    { 25, 1, 2 },     // I16
    { 26, 1, 4 },     // I32
    { 27, 1, 8 },     // I64
    { 28, 1, 8 },     // F64
    { 29, 256, 56 },  // IQ1_M
    { 30, 1, 2 },     // BF16
    { 34, 256, 54 },  // TQ1_0
    { 35, 256, 66 },  // TQ2_0
    { 39, 32, 17 },   // MXFP4
    { 40, 64, 36 },   // NVFP4
    { 41, 128, 18 },  // Q1_0
    { 42, 64, 18 },   // Q2_0
};

static const ggml_type_info * find_ggml_type(int64_t type) {
    for (const ggml_type_info & info : GGML_TYPES) {
        if (info.type == type) {
            return &info;
        }
    }
    return nullptr;
}

// Bytes of one value; 0 for strings, arrays and unknown types.
static uint64_t scalar_nbytes(uint32_t type) {
    switch (type) {
        case GGUF_U8:
        case GGUF_I8:
        case GGUF_BOOL: return 1;
        case GGUF_U16:
        case GGUF_I16:  return 2;
        case GGUF_U32:
        case GGUF_I32:
        case GGUF_F32:  return 4;
        case GGUF_U64:
        case GGUF_I64:
        case GGUF_F64:  return 8;
        default:        return 0;
    }
}

template <typename T> static T load_le(const uint8_t * p) {
    T value;
    memcpy(&value, p, sizeof(T));
    return value;
}

static bool is_printable_ascii(std::string_view s) {
    return std::all_of(s.begin(), s.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

// Index of an element that occurs twice, or -1. It sorts instead of hashing, because a hostile file could contain many
// hash collisions.
template <typename T> static int64_t find_duplicate(const std::vector<T> & items) {
    std::vector<size_t> order(items.size());
    for (size_t i = 0; i < order.size(); i++) {
        order[i] = i;
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return items[a].name < items[b].name; });
    for (size_t i = 1; i < order.size(); i++) {
        if (items[order[i]].name == items[order[i - 1]].name) {
            return static_cast<int64_t>(order[i]);
        }
    }
    return -1;
}

// ---- cursor ----

namespace {

struct reader {
    const byte_source &    source;
    std::vector<uint8_t> & bytes;
    int64_t                pos = 0;

    // bytes of the file after pos, whether already read or not
    int64_t left() const { return source.size() - pos; }

    // Reads from the file until bytes holds n bytes from pos on.
    int need(uint64_t n, const char * what) {
        if (n > static_cast<uint64_t>(left())) {
            return fail(GGML_MACKO_STATUS_TRUNCATED,
                        "the file ends inside %s (%" PRId64 " bytes left vs %" PRIu64 " needed)", what, left(), n);
        }
        const int64_t have = static_cast<int64_t>(bytes.size());
        const int64_t want = pos + static_cast<int64_t>(n);
        if (want <= have) {
            return GGML_MACKO_STATUS_OK;
        }
        const int64_t target = std::min(source.size(), std::max(want, have + std::clamp(have, CHUNK_MIN, CHUNK_MAX)));
        bytes.resize(static_cast<size_t>(target));
        return source.read(have, bytes.data() + have, target - have);
    }

    template <typename T> int get(T * out, const char * what) {
        const int status = need(sizeof(T), what);
        if (status == GGML_MACKO_STATUS_OK) {
            *out = load_le<T>(bytes.data() + pos);
            pos += static_cast<int64_t>(sizeof(T));
        }
        return status;
    }

    int get_string(uint64_t limit, std::string_view * out, const char * what) {
        uint64_t n      = 0;
        int      status = get(&n, what);
        if (status != GGML_MACKO_STATUS_OK) {
            return status;
        }
        if (n > limit) {
            return fail(GGML_MACKO_STATUS_LIMIT, "%s is too long (%" PRIu64 " vs %" PRIu64 " bytes)", what, n, limit);
        }
        status = need(n, what);
        if (status == GGML_MACKO_STATUS_OK) {
            *out = std::string_view(reinterpret_cast<const char *>(bytes.data()) + pos, static_cast<size_t>(n));
            pos += static_cast<int64_t>(n);
        }
        return status;
    }
};

} // namespace

static int read_bools(reader & r, uint64_t n, const gguf_key & key) {
    for (uint64_t i = 0; i < n; i++) {
        const uint8_t value = r.bytes[key.value + i];
        if (value > 1) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s: a bool is 0 or 1, not %u",
                        printable(key.name.c_str()).text, value);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// Checks n values of a type and moves r after them.
static int read_values(reader & r, uint32_t type, uint64_t n, const gguf_key & key) {
    if (type == GGUF_STRING) {
        if (n > static_cast<uint64_t>(r.left()) / sizeof(uint64_t)) {
            return fail(GGML_MACKO_STATUS_TRUNCATED, "key %s: the file ends before its %" PRIu64 " strings",
                        printable(key.name.c_str()).text, n);
        }
        std::string_view ignored;
        for (uint64_t i = 0; i < n; i++) {
            TRY(r.get_string(MAX_STRING, &ignored, "a string value"));
        }
        return GGML_MACKO_STATUS_OK;
    }
    const uint64_t nbytes = n * scalar_nbytes(type); // cannot overflow, because n <= MAX_ARRAY
    TRY(r.need(nbytes, "a key's value"));
    if (type == GGUF_BOOL) {
        TRY(read_bools(r, n, key));
    }
    r.pos += static_cast<int64_t>(nbytes);
    return GGML_MACKO_STATUS_OK;
}

static int read_key(reader & r, gguf_key * key) {
    key->begin = static_cast<size_t>(r.pos);
    std::string_view name;
    TRY(r.get_string(MAX_KEY_NAME, &name, "a key name"));
    if (name.empty() || !is_printable_ascii(name)) {
        return fail(GGML_MACKO_STATUS_BAD_KEY, "key name '%s' is empty or not printable ASCII",
                    printable(name.data(), name.size()).text);
    }
    key->name = name;

    uint32_t type = 0;
    TRY(r.get(&type, "a key's type"));
    if (type > GGUF_F64) {
        return fail(GGML_MACKO_STATUS_BAD_KEY, "key %s has an unknown value type (%u vs <= %u)",
                    printable(key->name.c_str()).text, type, GGUF_F64);
    }
    key->type         = static_cast<gguf_type>(type);
    key->element_type = key->type;
    key->n            = 1;
    if (type == GGUF_ARRAY) {
        uint32_t element_type = 0;
        TRY(r.get(&element_type, "an array's type"));
        TRY(r.get(&key->n, "an array's length"));
        if (element_type == GGUF_ARRAY) {
            return fail(GGML_MACKO_STATUS_LIMIT, "key %s is an array of arrays", printable(key->name.c_str()).text);
        }
        if (element_type > GGUF_F64) {
            return fail(GGML_MACKO_STATUS_BAD_KEY, "key %s has an unknown element type (%u vs <= %u)",
                        printable(key->name.c_str()).text, element_type, GGUF_F64);
        }
        if (key->n > MAX_ARRAY) {
            return fail(GGML_MACKO_STATUS_LIMIT, "key %s has too many elements (%" PRIu64 " vs %" PRIu64 ")",
                        printable(key->name.c_str()).text, key->n, MAX_ARRAY);
        }
        key->element_type = static_cast<gguf_type>(element_type);
    }
    key->value = static_cast<size_t>(r.pos);
    TRY(read_values(r, key->element_type, key->n, *key));
    key->end = static_cast<size_t>(r.pos);
    return GGML_MACKO_STATUS_OK;
}

static int read_tensor(reader & r, int64_t alignment, gguf_tensor * t, int64_t * data_size,
                       int64_t * data_size_padded) {
    std::string_view name;
    TRY(r.get_string(MAX_STRING, &name, "a tensor name"));
    if (name.empty() || name.size() > MAX_NAME || !is_printable_ascii(name)) {
        return fail(GGML_MACKO_STATUS_BAD_NAME,
                    "tensor name '%s' is empty, too long or not printable (%zu vs 1...%zu bytes)",
                    printable(name.data(), name.size()).text, name.size(), MAX_NAME);
    }
    t->name                 = name;
    const char * const text = t->name.c_str();

    uint32_t n_dims = 0;
    TRY(r.get(&n_dims, "a tensor's dimensions"));
    if (n_dims < 1 || n_dims > MAX_DIMS) {
        return fail(GGML_MACKO_STATUS_BAD_SHAPE, "%s: number of dimensions (%u vs 1...%d)", text, n_dims, MAX_DIMS);
    }
    t->n_dims          = static_cast<int32_t>(n_dims);
    int64_t n_elements = 1;
    for (int i = 0; i < MAX_DIMS; i++) {
        t->ne[i] = 1;
        if (i < t->n_dims) {
            TRY(r.get(&t->ne[i], "a tensor's shape"));
        }
        if (t->ne[i] < 1) {
            return fail(GGML_MACKO_STATUS_BAD_SHAPE, "%s: dimension %d is %" PRId64, text, i, t->ne[i]);
        }
        if (!checked_mul(n_elements, t->ne[i], &n_elements)) {
            return fail(GGML_MACKO_STATUS_LIMIT, "%s: the number of elements overflows", text);
        }
    }

    uint32_t type = 0;
    TRY(r.get(&type, "a tensor's type"));
    const ggml_type_info * info = find_ggml_type(type);
    if (info == nullptr) {
        return fail(GGML_MACKO_STATUS_BAD_TYPE, "%s: unknown tensor type %u", text, type);
    }
    t->type = info->type;
    if (t->ne[0] % info->block != 0) {
        return fail(GGML_MACKO_STATUS_BAD_SHAPE, "%s: rows of %" PRId64 " elements are not whole blocks of %d", text,
                    t->ne[0], info->block);
    }
    if (!checked_mul(n_elements / info->block, int64_t(info->nbytes), &t->nbytes) || t->nbytes > MAX_TENSOR_BYTES) {
        return fail(GGML_MACKO_STATUS_LIMIT, "%s: tensor too large (%" PRId64 " elements vs %" PRId64 " bytes)", text,
                    n_elements, MAX_TENSOR_BYTES);
    }

    uint64_t offset = 0;
    TRY(r.get(&offset, "a tensor's offset"));
    if (offset != static_cast<uint64_t>(*data_size_padded)) {
        return fail(GGML_MACKO_STATUS_BAD_OFFSET,
                    "%s: hole, overlap or misalignment (offset %" PRIu64 " vs %" PRId64 ")", text, offset,
                    *data_size_padded);
    }
    t->offset = *data_size_padded; // relative to the data section; read_gguf_header adds its start
    // The sum cannot overflow: there are at most 2^16 tensors of 2^34 bytes.
    *data_size        = t->offset + t->nbytes;
    *data_size_padded = (*data_size + alignment - 1) & ~(alignment - 1);
    return GGML_MACKO_STATUS_OK;
}

static int find_alignment(const gguf_header & header, int64_t * alignment) {
    *alignment           = ALIGNMENT_DEFAULT;
    const gguf_key * key = header.find("general.alignment");
    if (key == nullptr) {
        return GGML_MACKO_STATUS_OK;
    }
    if (key->type != GGUF_U32) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key general.alignment is not a u32");
    }
    const uint32_t value = load_le<uint32_t>(header.bytes.data() + key->value);
    if (value < MIN_ALIGNMENT || value > MAX_ALIGNMENT || (value & (value - 1)) != 0) {
        return fail(GGML_MACKO_STATUS_BAD_ALIGNMENT,
                    "general.alignment is not a power of two in range (%u vs %" PRIu64 "...%" PRIu64 ")", value,
                    MIN_ALIGNMENT, MAX_ALIGNMENT);
    }
    *alignment = value;
    return GGML_MACKO_STATUS_OK;
}

// Compares a number of records with its limit and with the number of bytes that are left for them.
static int read_count(uint64_t n, uint64_t limit, int64_t nbytes_min, int64_t left, const char * what) {
    if (n > limit) {
        return fail(GGML_MACKO_STATUS_LIMIT, "too many %s (%" PRIu64 " vs %" PRIu64 ")", what, n, limit);
    }
    if (static_cast<int64_t>(n) * nbytes_min > left) {
        return fail(GGML_MACKO_STATUS_TRUNCATED, "the file ends before its %" PRIu64 " %s", n, what);
    }
    return GGML_MACKO_STATUS_OK;
}

// Names the likely format of a file that is not a GGUF, among formats that model sites offer; nullptr if unknown.
static const char * other_format(const byte_source & source) {
    char       start[9];
    const auto begins = [&](const char * text) { return memcmp(start, text, strlen(text)) == 0; };
    if (source.size() < static_cast<int64_t>(sizeof(start)) || source.read(0, start, sizeof(start))) {
        return nullptr;
    }
    uint64_t n_header = 0;
    memcpy(&n_header, start, sizeof(n_header));
    if (start[8] == '{' && n_header < static_cast<uint64_t>(source.size())) {
        return "a safetensors file, not a GGUF: convert the model's folder with llama.cpp's convert_hf_to_gguf.py";
    }
    if (begins("PK\3\4")) {
        return "a ZIP archive of PyTorch weights, not a GGUF: convert the model's folder with llama.cpp's "
               "convert_hf_to_gguf.py";
    }
    if (begins("version ")) {
        return "a Git LFS pointer, not a GGUF: the file itself was not downloaded";
    }
    return begins("<!DOCTYPE") || begins("<!doctype") || begins("<html") ? "a web page, not a GGUF" : nullptr;
}

int read_gguf_header(const byte_source & source, gguf_header * header) {
    *header           = gguf_header();
    header->file_size = source.size();
    reader r          = { source, header->bytes };

    TRY(r.need(4, "the magic"));
    if (memcmp(header->bytes.data(), "GGUF", 4) != 0) {
        if (const char * found = other_format(source)) {
            return fail(GGML_MACKO_STATUS_BAD_MAGIC, "%s", found);
        }
        return fail(GGML_MACKO_STATUS_BAD_MAGIC, "not a GGUF file (starts with '%s')",
                    printable(reinterpret_cast<const char *>(header->bytes.data()), 4).text);
    }
    r.pos            = 4;
    uint32_t version = 0;
    TRY(r.get(&version, "the version"));
    if (version != 2 && version != 3) { // version 3 only added big-endian files
        const bool swapped = version != 0 && (version & 0xffff) == 0;
        return fail(GGML_MACKO_STATUS_BAD_GGUF_VERSION,
                    swapped ? "big-endian GGUF (version field %u)" : "GGUF version %u, this build reads 2 and 3",
                    version);
    }
    uint64_t n_tensors = 0;
    uint64_t n_keys    = 0;
    TRY(r.get(&n_tensors, "the number of tensors"));
    TRY(r.get(&n_keys, "the number of keys"));

    TRY(read_count(n_keys, MAX_KEYS, KEY_NBYTES_MIN, r.left(), "keys"));
    TRY(read_count(n_tensors, MAX_TENSORS, TENSOR_NBYTES_MIN, r.left(), "tensors"));
    for (uint64_t i = 0; i < n_keys; i++) {
        header->keys.emplace_back();
        TRY(read_key(r, &header->keys.back()));
    }
    const int64_t twice_key = find_duplicate(header->keys);
    if (twice_key >= 0) {
        return fail(GGML_MACKO_STATUS_DUPLICATE_KEY, "key %s occurs twice",
                    printable(header->keys[static_cast<size_t>(twice_key)].name.c_str()).text);
    }
    const bool is_sparse = header->find("macko.version") != nullptr;
    if (is_sparse && version != 3) {
        return fail(GGML_MACKO_STATUS_BAD_GGUF_VERSION, "GGUF version %u, sparse files have 3", version);
    }
    TRY(find_alignment(*header, &header->alignment));

    int64_t data_size        = 0;
    int64_t data_size_padded = 0;
    for (uint64_t i = 0; i < n_tensors; i++) {
        header->tensors.emplace_back();
        TRY(read_tensor(r, header->alignment, &header->tensors.back(), &data_size, &data_size_padded));
    }
    const int64_t twice = find_duplicate(header->tensors);
    if (twice >= 0) {
        return fail(GGML_MACKO_STATUS_DUPLICATE_TENSOR, "tensor %s occurs twice",
                    header->tensors[static_cast<size_t>(twice)].name.c_str());
    }

    header->bytes.resize(static_cast<size_t>(r.pos));
    if (!checked_align(r.pos, header->alignment, &header->data_offset)) {
        return fail(GGML_MACKO_STATUS_LIMIT, "the start of the data section overflows");
    }
    for (gguf_tensor & t : header->tensors) {
        t.offset += header->data_offset;
    }
    // A file without tensors has no data section, so it may end right after the header.
    const int64_t end        = n_tensors == 0 ? r.pos : header->data_offset + data_size;
    const int64_t end_padded = header->data_offset + data_size_padded; // at least end
    if (header->file_size > end_padded) {
        if (!is_sparse) { // llama.cpp reads such files, too
            return GGML_MACKO_STATUS_OK;
        }
        return fail(GGML_MACKO_STATUS_TRAILING_DATA,
                    "data after the last tensor (file of %" PRId64 " bytes vs %" PRId64 ")", header->file_size,
                    end_padded);
    }
    if (header->file_size != end && header->file_size != end_padded) {
        return fail(GGML_MACKO_STATUS_TRUNCATED, "the file ends at %" PRId64 ", its tensors need %" PRId64,
                    header->file_size, end);
    }
    return GGML_MACKO_STATUS_OK;
}

// ---- access ----

const gguf_key * gguf_header::find(const char * name) const {
    for (const gguf_key & key : keys) {
        if (key.name == name) {
            return &key;
        }
    }
    return nullptr;
}

bool gguf_header::get_int(const gguf_key & key, uint64_t i, int64_t * out) const {
    const uint64_t nbytes = scalar_nbytes(key.element_type);
    if (nbytes == 0 || i >= key.n) {
        return false;
    }
    const uint8_t * p = bytes.data() + key.value + i * nbytes;
    switch (key.element_type) {
        case GGUF_U8:
        case GGUF_BOOL: *out = load_le<uint8_t>(p); return true;
        case GGUF_I8:   *out = load_le<int8_t>(p); return true;
        case GGUF_U16:  *out = load_le<uint16_t>(p); return true;
        case GGUF_I16:  *out = load_le<int16_t>(p); return true;
        case GGUF_U32:  *out = load_le<uint32_t>(p); return true;
        case GGUF_I32:  *out = load_le<int32_t>(p); return true;
        case GGUF_I64:  *out = load_le<int64_t>(p); return true;
        case GGUF_U64:  {
            const uint64_t value = load_le<uint64_t>(p);
            *out                 = static_cast<int64_t>(value);
            return value <= INT64_MAX;
        }
        default: return false;
    }
}

bool gguf_header::get_float(const gguf_key & key, uint64_t i, double * out) const {
    if (i >= key.n) {
        return false;
    }
    const uint8_t * p = bytes.data() + key.value + i * scalar_nbytes(key.element_type);
    switch (key.element_type) {
        case GGUF_F32: *out = load_le<float>(p); return true;
        case GGUF_F64: *out = load_le<double>(p); return true;
        default:       return false;
    }
}

// The string at p, which lies inside the header; *next points after it.
static std::string_view string_at(const std::vector<uint8_t> & bytes, size_t pos, size_t * next) {
    const size_t n = static_cast<size_t>(load_le<uint64_t>(bytes.data() + pos));
    *next          = pos + sizeof(uint64_t) + n;
    return std::string_view(reinterpret_cast<const char *>(bytes.data()) + pos + sizeof(uint64_t), n);
}

bool gguf_header::get_string(const gguf_key & key, uint64_t i, std::string * out) const {
    if (key.element_type != GGUF_STRING || i >= key.n) {
        return false;
    }
    size_t pos = key.value;
    for (uint64_t j = 0; j < i; j++) {
        string_at(bytes, pos, &pos);
    }
    *out = string_at(bytes, pos, &pos);
    return true;
}

bool gguf_header::get_strings(const gguf_key & key, std::vector<std::string> * out) const {
    if (key.element_type != GGUF_STRING) {
        return false;
    }
    out->clear();
    size_t pos = key.value;
    for (uint64_t i = 0; i < key.n; i++) {
        out->emplace_back(string_at(bytes, pos, &pos));
    }
    return true;
}

} // namespace macko
