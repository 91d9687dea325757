#include "gguf.h"

namespace fuzz {

using builder::file;
using builder::key;
using builder::tensor;

// ---- seeds ----

// A llama model of one block with few keys, so that an input is a few hundred bytes.
static file small_header(uint32_t n_embd) {
    file f;
    f.alignment = 8;
    f.keys.push_back(builder::text("general.architecture", "llama"));
    f.keys.push_back(builder::scalar<uint32_t>("general.alignment", builder::U32, 8));
    f.keys.push_back(builder::scalar<uint32_t>("llama.block_count", builder::U32, 1));
    f.keys.push_back(builder::scalar<uint32_t>("llama.context_length", builder::U32, 64));
    f.keys.push_back(builder::scalar<uint32_t>("llama.embedding_length", builder::U32, n_embd));
    f.keys.push_back(builder::scalar<uint32_t>("llama.feed_forward_length", builder::U32, 2 * n_embd));
    f.keys.push_back(builder::scalar<uint32_t>("llama.attention.head_count", builder::U32, 2));
    f.keys.push_back(builder::scalar<float>("llama.attention.layer_norm_rms_epsilon", builder::F32, 1e-5f));
    f.keys.push_back(builder::text("tokenizer.ggml.model", "gpt2"));
    f.keys.push_back(builder::texts("tokenizer.ggml.tokens", { "a", "b", "ab" }));
    f.keys.push_back(builder::array<int32_t>("tokenizer.ggml.token_type", builder::I32, { 1, 1, 1 }));
    f.keys.push_back(builder::texts("tokenizer.ggml.merges", { "a b" }));
    f.keys.push_back(builder::scalar<uint32_t>("tokenizer.ggml.bos_token_id", builder::U32, 0));
    f.keys.push_back(builder::scalar<uint32_t>("tokenizer.ggml.eos_token_id", builder::U32, 1));
    return f;
}

// one matrix of `rows` x `cols` in a dense model
static builder::model one_matrix(uint32_t type, uint32_t bits, uint64_t rows, uint64_t cols, double density) {
    std::mt19937_64 random(rows * 131 + cols * 7 + type);
    builder::model  m;
    m.dense                = small_header(static_cast<uint32_t>(cols));
    const std::string name = "blk.0.ffn_up.weight";
    const bytes       data = builder::random_data(random, type, rows * cols, cols, density);
    m.dense.tensors.push_back({ name, { cols, rows }, type, data, 0 });
    m.sparse.push_back({ name, { cols, rows }, type, data });
    m.bits.push_back(bits);
    return m;
}

std::vector<file> small_sparse_files() {
    std::vector<file> files;
    for (const uint32_t type : { builder::TYPE_F16, builder::TYPE_BF16, builder::TYPE_F32 }) {
        for (const uint32_t bits : { 1u, 2u, 4u, 8u }) {
            files.push_back(builder::sparse_file(one_matrix(type, bits, 5, 24, 0.3)));
            if (bits >= 4) {
                files.push_back(builder::sparse_file(one_matrix(type, bits, 3, 24, 0.3), true));
            }
        }
        files.push_back(builder::sparse_file(one_matrix(type, 4, 5, 24, 0.3), false, true));
        files.push_back(builder::sparse_file(one_matrix(type, 4, 2, 300, 0.02)));
        files.push_back(builder::sparse_file(one_matrix(type, 4, 4, 16, 0.0)));
    }
    // every third matrix is packed, and one is quantized
    builder::model many = one_matrix(builder::TYPE_F16, 4, 2, 16, 0.4);
    for (int i = 1; i < 11; i++) {
        const builder::model next =
            one_matrix(i % 2 ? builder::TYPE_BF16 : builder::TYPE_F16, i % 3 ? 4 : 2, 2, 16, 0.4);
        many.dense.tensors.push_back(next.dense.tensors[0]);
        many.sparse.push_back(next.sparse[0]);
        many.dense.tensors.back().name = many.sparse.back().name = "blk." + std::to_string(i) + ".ffn_up.weight";
        many.bits.push_back(next.bits[0]);
    }
    files.push_back(builder::sparse_file(many, false, true));
    files.push_back(builder::sparse_file(many, true, true));
    return files;
}

std::vector<file> small_dense_files() {
    std::vector<file> files;
    for (const uint32_t type : { builder::TYPE_F16, builder::TYPE_BF16, builder::TYPE_F32 }) {
        for (const double density : { 0.02, 0.3, 0.9 }) {
            files.push_back(one_matrix(type, 4, 6, 64, density).dense);
        }
        files.push_back(one_matrix(type, 4, 2, 700, 0.01).dense);
    }
    file experts            = one_matrix(builder::TYPE_F16, 4, 12, 32, 0.2).dense;
    experts.tensors[0].name = "blk.0.ffn_up_exps.weight";
    experts.tensors[0].ne   = { 32, 4, 3 };
    files.push_back(experts);
    return files;
}

std::vector<file> whole_models() {
    std::vector<file> files;
    for (const bool with_ec : { false, true }) {
        builder::model m = builder::tiny_llama(16, 1, 1, true);
        if (with_ec) {
            builder::set_activation_keys(&m.dense);
        }
        files.push_back(m.dense);
        files.push_back(builder::sparse_file(m, with_ec, true));
    }
    return files;
}

std::vector<file> split(const file & f, size_t n) {
    std::vector<file> parts(n);
    for (size_t i = 0; i < n; i++) {
        const auto cut = [&](size_t k) { return f.tensors.begin() + static_cast<int64_t>(f.tensors.size() * k / n); };
        parts[i].alignment = f.alignment;
        parts[i].keys      = i == 0 ? f.keys : std::vector<key>();
        parts[i].set(builder::scalar<uint32_t>("general.alignment", builder::U32, static_cast<uint32_t>(f.alignment)));
        parts[i].set(builder::scalar<uint16_t>("split.no", builder::U16, static_cast<uint16_t>(i)));
        parts[i].set(builder::scalar<uint16_t>("split.count", builder::U16, static_cast<uint16_t>(n)));
        parts[i].set(
            builder::scalar<int32_t>("split.tensors.count", builder::I32, static_cast<int32_t>(f.tensors.size())));
        parts[i].tensors.assign(cut(i), cut(i + 1));
    }
    return parts;
}

// ---- reading an input back ----

namespace {

constexpr size_t MANY = 256; // keys, tensors and strings of an array: no input has more

struct reader {
    const uint8_t * data;
    size_t          size, pos = 0;
    bool            ok = true;

    template <typename T> T get() {
        T v = 0;
        if (ok && size - pos >= sizeof(T)) {
            memcpy(&v, data + pos, sizeof(T));
            pos += sizeof(T);
        } else {
            ok = false;
        }
        return v;
    }
    void skip(uint64_t n) {
        if (ok && n <= size - pos) {
            pos += static_cast<size_t>(n);
        } else {
            ok = false;
        }
    }
    std::string text() {
        const uint64_t n     = get<uint64_t>();
        const size_t   begin = pos;
        skip(n);
        return ok ? std::string(reinterpret_cast<const char *>(data) + begin, static_cast<size_t>(n)) : "";
    }
    void skip_value(uint32_t type) {
        static constexpr uint8_t NBYTES[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
        if (type == builder::STRING) {
            text();
        } else if (type == builder::ARRAY) {
            const uint32_t element = get<uint32_t>();
            const uint64_t n       = get<uint64_t>();
            if (element == builder::ARRAY || element >= sizeof(NBYTES) || n > size) {
                ok = false;
            } else if (element == builder::STRING) {
                for (uint64_t i = 0; ok && i < n; i++) {
                    text();
                }
            } else {
                skip(n * NBYTES[element]);
            }
        } else if (type < sizeof(NBYTES)) {
            skip(NBYTES[type]);
        } else {
            ok = false;
        }
    }
};

} // namespace

bool parse(const uint8_t * data, size_t size, bool stored, uint64_t file_size, file * f) {
    reader r = { data, size };
    if (r.get<uint32_t>() != 0x46554747) {
        return false;
    }
    f->version               = r.get<uint32_t>();
    const uint64_t n_tensors = r.get<uint64_t>(), n_keys = r.get<uint64_t>();
    for (uint64_t i = 0; i < std::min<uint64_t>(n_keys, MANY) && r.ok; i++) {
        key k;
        k.name             = r.text();
        k.type             = r.get<uint32_t>();
        const size_t begin = r.pos;
        r.skip_value(k.type);
        if (r.ok) {
            k.value.assign(data + begin, data + r.pos);
            f->keys.push_back(k);
        }
    }
    std::vector<uint64_t> offsets;
    for (uint64_t i = 0; i < std::min<uint64_t>(n_tensors, MANY) && r.ok; i++) {
        tensor t;
        t.name                = r.text();
        const uint32_t n_dims = r.get<uint32_t>();
        for (uint32_t d = 0; d < std::min(n_dims, 5u); d++) {
            t.ne.push_back(r.get<uint64_t>());
        }
        t.type                = r.get<uint32_t>();
        const uint64_t offset = r.get<uint64_t>();
        if (r.ok) {
            offsets.push_back(offset);
            f->tensors.push_back(t);
        }
    }
    if (f->keys.empty() || f->tensors.empty()) {
        return false;
    }
    f->alignment = 32;
    for (const key & k : f->keys) {
        if (k.name == "general.alignment" && k.value.size() == 4) {
            uint32_t a;
            memcpy(&a, k.value.data(), 4);
            f->alignment = a >= 8 && a <= 4096 && (a & (a - 1)) == 0 ? a : 32;
        }
    }
    const uint64_t begin = (r.pos + f->alignment - 1) / f->alignment * f->alignment;
    const uint64_t n     = file_size > begin ? file_size - begin : 0; // of the data section
    for (size_t i = 0; i < f->tensors.size(); i++) {
        const uint64_t from = std::min(offsets[i], n);
        const uint64_t to   = std::min(std::max(from, i + 1 < offsets.size() ? offsets[i + 1] : n), n);
        if (stored) {
            f->tensors[i].data.assign(data + begin + from, data + begin + to);
        } else {
            f->tensors[i].hole = to - from;
        }
    }
    return true;
}

// ---- mutations ----

static uint64_t odd_number(rng & r, uint64_t old) {
    static const uint64_t numbers[] = {
        // clang-format off
        0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 31, 32, 63, 64, 255, 256, 65535, 65536, 65537, 0x7fffffff, 0x80000000,
        0xffffffff, 0x100000000, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 0x7f800000, 0x7fc00000,
        0x3f800000, 1 << 24, (1 << 24) + 1, uint64_t(1) << 34, uint64_t(1) << 62
        // clang-format on
    };
    switch (r.below(6)) {
        case 0:  return old + 1;
        case 1:  return old - 1;
        case 2:  return old + r.below(129) - 64;
        case 3:  return old ^ (uint64_t(1) << r.below(64));
        default: return numbers[r.pick(std::size(numbers))];
    }
}

static void mutate_number(rng & r, bytes * b, size_t at, size_t n) { // of n <= 8 bytes, little-endian
    if (at + n > b->size()) {
        return;
    }
    uint64_t value = 0;
    memcpy(&value, b->data() + at, n);
    value = odd_number(r, value);
    memcpy(b->data() + at, &value, n);
}

static void mutate_with_driver(bytes * b, size_t room) {
    const size_t n = b->size();
    b->resize(n + room);
    if (!b->empty()) {
        b->resize(LLVMFuzzerMutate(b->data(), n, b->size()));
    }
}

static void mutate_keys(rng & r, std::vector<key> * keys) {
    key & k = (*keys)[r.pick(keys->size())];
    switch (r.below(9)) {
        case 0: keys->erase(keys->begin() + (&k - keys->data())); break;
        case 1: keys->push_back(key(k)); break;
        case 2: std::swap(k, (*keys)[r.pick(keys->size())]); break;
        case 3: k.type = static_cast<uint32_t>(r.below(14)); break;
        case 4: k.value = (*keys)[r.pick(keys->size())].value; break;
        case 5: { // the name of another key, or a driver's mutation of it
            bytes name(k.name.begin(), k.name.end());
            mutate_with_driver(&name, 8);
            k.name = r.one_in(2) ? (*keys)[r.pick(keys->size())].name : std::string(name.begin(), name.end());
            break;
        }
        case 6: // the text of a string
            if (k.type == builder::STRING && k.value.size() >= 8) {
                bytes text(k.value.begin() + 8, k.value.end());
                mutate_with_driver(&text, 16);
                k.value.clear();
                builder::put_string(&k.value, std::string(text.begin(), text.end()));
                break;
            }
            [[fallthrough]];
        default: // the value of a scalar, or an element of an array
            mutate_number(
                r, &k.value,
                k.type == builder::ARRAY && k.value.size() > 12 ? 12 + 4 * r.pick((k.value.size() - 12) / 4 + 1) : 0,
                std::min<size_t>(k.value.size(), r.one_in(2) ? 4 : 8));
            break;
    }
}

static void mutate_tensors(rng & r, std::vector<tensor> * tensors) {
    tensor & t = (*tensors)[r.pick(tensors->size())];
    switch (r.below(7)) {
        case 0: std::swap(t, (*tensors)[r.pick(tensors->size())]); break;
        case 1: tensors->erase(tensors->begin() + (&t - tensors->data())); break;
        case 2: t.name = (*tensors)[r.pick(tensors->size())].name; break;
        case 3: t.type = static_cast<uint32_t>(r.below(44)); break;
        case 4: tensors->push_back(tensor(t)); break;
        case 5: // more or fewer bytes, with a matching shape
            if (t.ne.size() == 1 && t.ne[0] > 8 && t.ne[0] < 4096 && !t.data.empty()) {
                const size_t nb = t.data.size() / static_cast<size_t>(t.ne[0]);
                t.ne[0] += r.one_in(2) ? 8 : static_cast<uint64_t>(-8);
                t.data.resize(static_cast<size_t>(t.ne[0]) * nb);
            }
            break;
        default:
            if (!t.ne.empty()) {
                uint64_t & ne = t.ne[r.pick(t.ne.size())];
                ne            = odd_number(r, ne);
            }
    }
}

// Another sign or mantissa; valid unless the entry was a filler.
static void mutate_value(rng & r, uint8_t * value, size_t nb) {
    if (std::any_of(value, value + nb, [](uint8_t b) { return b != 0; })) {
        value[0] ^= static_cast<uint8_t>(r.below(128) & (value[0] > 1 ? 0x7e : 0));
        value[nb - 1] ^= static_cast<uint8_t>(r.below(2) << 7);
    }
}

static void mutate_data(rng & r, tensor * t) {
    bytes & data = t->data;
    if (data.empty()) {
        return;
    }
    const size_t nb = std::clamp<size_t>(data.size() / std::max<uint64_t>(1, t->ne.empty() ? 1 : t->ne[0]), 1, 4);
    const size_t at = nb * r.pick((data.size() + nb - 1) / nb);
    switch (r.below(8)) {
        case 0: mutate_number(r, &data, at, nb); break;
        case 1: data[r.pick(data.size())] = static_cast<uint8_t>(r.bits()); break;
        case 2: data[r.pick(data.size())] ^= static_cast<uint8_t>(1 << r.below(8)); break;
        case 3: mutate_with_driver(&data, 0); break;
        case 4: { // swap two elements
            const size_t other = nb * r.pick((data.size() + nb - 1) / nb);
            if (std::max(at, other) + nb <= data.size() && at != other) {
                std::swap_ranges(&data[at], &data[at] + nb, &data[other]);
            }
            break;
        }
        case 5: // move a bit to its neighbor, like a non-zero of a bitmap
            data[r.pick(data.size())] ^= static_cast<uint8_t>(3 << r.below(7));
            break;
        default:
            if (at + nb <= data.size()) {
                mutate_value(r, &data[at], nb);
            }
    }
}

void mutate_file(rng & r, bool stored, file * f) {
    for (uint64_t n = 1 + r.below(3); n > 0 && !f->keys.empty() && !f->tensors.empty(); n--) {
        const uint64_t what = r.below(stored ? 8 : 4);
        if (what < 2) {
            mutate_keys(r, &f->keys);
        } else if (what < 4) {
            mutate_tensors(r, &f->tensors);
        } else {
            mutate_data(r, &f->tensors[r.pick(f->tensors.size())]);
        }
    }
}

size_t mutate_gguf(uint8_t * data, size_t size, size_t max_size, uint64_t seed) {
    rng  r(seed);
    file f;
    if (r.one_in(4) || !parse(data, size, true, size, &f)) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    mutate_file(r, true, &f);
    const bytes b = builder::serialize(f);
    if (b.size() > max_size) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::copy(b.begin(), b.end(), data);
    return b.size();
}

} // namespace fuzz
