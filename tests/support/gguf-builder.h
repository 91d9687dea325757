// Writes valid and invalid GGUF files for the tests, with slow encoders of its own: this file never calls the library
// under test. A file is a struct that a test may change before it is serialized; the serialized bytes may be changed,
// too.
#pragma once

#include "values.h"

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace builder {

using bytes = std::vector<uint8_t>;

enum value_type : uint32_t { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 };
enum tensor_type : uint32_t {
    TYPE_F32   = 0,
    TYPE_F16   = 1,
    TYPE_Q8_0  = 8,
    TYPE_Q8_1  = 9,
    TYPE_I8    = 24,
    TYPE_I16   = 25,
    TYPE_I32   = 26,
    TYPE_BF16  = 30,
    TYPE_CODED = 1005
};

template <typename T> void put(bytes * out, T value) {
    const size_t n = out->size();
    out->resize(n + sizeof(T));
    memcpy(out->data() + n, &value, sizeof(T));
}
inline void put_string(bytes * out, const std::string & s) {
    put<uint64_t>(out, s.size());
    out->insert(out->end(), s.begin(), s.end());
}
template <typename T> void patch(bytes * out, size_t at, T value) { memcpy(out->data() + at, &value, sizeof(T)); }

struct key {
    std::string name;
    uint32_t    type;
    bytes       value; // the bytes that follow the type field
};

struct tensor {
    std::string           name;
    std::vector<uint64_t> ne;
    uint32_t              type;
    bytes                 data;
    uint64_t              hole = 0; // number of zeros after data; serialize_header counts them but does not write them
};

template <typename T> key scalar(const std::string & name, value_type type, T value) {
    key k = { name, type, {} };
    put<T>(&k.value, value);
    return k;
}
inline key text(const std::string & name, const std::string & value) {
    key k = { name, STRING, {} };
    put_string(&k.value, value);
    return k;
}
template <typename T> key array(const std::string & name, value_type type, const std::vector<T> & values) {
    key k = { name, ARRAY, {} };
    put<uint32_t>(&k.value, type);
    put<uint64_t>(&k.value, values.size());
    for (T v : values) {
        put<T>(&k.value, v);
    }
    return k;
}
inline key texts(const std::string & name, const std::vector<std::string> & values) {
    key k = { name, ARRAY, {} };
    put<uint32_t>(&k.value, STRING);
    put<uint64_t>(&k.value, values.size());
    for (const std::string & v : values) {
        put_string(&k.value, v);
    }
    return k;
}

// Offsets of the fields in the serialized file, so that a test can change their bytes.
struct layout {
    size_t              n_tensors_at = 8;
    size_t              n_keys_at    = 16;
    std::vector<size_t> key_at;    // of the record of each key
    std::vector<size_t> tensor_at; // of the record of each tensor
    std::vector<size_t> dims_at;   // of n_dims of each tensor, which ne, type and offset follow
    std::vector<size_t> offset_at;
    std::vector<size_t> data_at; // of the data of each tensor, from the start of the file
    size_t              table_end = 0;
};

struct file {
    uint32_t            version   = 3;
    uint64_t            alignment = 32;
    bool                pad_end   = true;
    std::vector<key>    keys;
    std::vector<tensor> tensors;

    key * find(const std::string & name) {
        for (key & k : keys) {
            if (k.name == name) {
                return &k;
            }
        }
        throw std::runtime_error("no key " + name);
    }
    size_t tensor_index(const std::string & name) const {
        for (size_t i = 0; i < tensors.size(); i++) {
            if (tensors[i].name == name) {
                return i;
            }
        }
        throw std::runtime_error("no tensor " + name);
    }
    tensor & at(const std::string & name) { return tensors[tensor_index(name)]; }
    void     set(key k) { // replaces the key with the same name, or appends it
        for (key & old : keys) {
            if (old.name == k.name) {
                old = std::move(k);
                return;
            }
        }
        keys.push_back(std::move(k));
    }
    void drop(const std::string & name) {
        for (size_t i = 0; i < keys.size(); i++) {
            if (keys[i].name == name) {
                keys.erase(keys.begin() + static_cast<int64_t>(i));
                return;
            }
        }
        throw std::runtime_error("no key " + name);
    }
};

inline void pad(bytes * out, uint64_t alignment) {
    while (alignment != 0 && out->size() % alignment != 0) {
        out->push_back(0);
    }
}

// The bytes from the magic to the end of the tensor table. *file_size is the size of the file with its data.
inline bytes serialize_header(const file & f, layout * l, uint64_t * file_size) {
    bytes out;
    put<uint32_t>(&out, 0x46554747); // "GGUF"
    put<uint32_t>(&out, f.version);
    put<uint64_t>(&out, f.tensors.size());
    put<uint64_t>(&out, f.keys.size());
    for (const key & k : f.keys) {
        l->key_at.push_back(out.size());
        put_string(&out, k.name);
        put<uint32_t>(&out, k.type);
        out.insert(out.end(), k.value.begin(), k.value.end());
    }
    uint64_t end        = 0;
    uint64_t end_padded = 0;
    for (const tensor & t : f.tensors) {
        l->tensor_at.push_back(out.size());
        put_string(&out, t.name);
        l->dims_at.push_back(out.size());
        put<uint32_t>(&out, static_cast<uint32_t>(t.ne.size()));
        for (uint64_t n : t.ne) {
            put<uint64_t>(&out, n);
        }
        put<uint32_t>(&out, t.type);
        l->offset_at.push_back(out.size());
        put<uint64_t>(&out, end_padded);
        end        = end_padded + t.data.size() + t.hole;
        end_padded = end + (f.alignment - end % f.alignment) % f.alignment;
    }
    l->table_end = out.size();
    const uint64_t data_begin =
        f.tensors.empty() ? out.size() : out.size() + (f.alignment - out.size() % f.alignment) % f.alignment;
    *file_size = data_begin + (f.pad_end ? end_padded : end);
    return out;
}

inline bytes serialize(const file & f, layout * where = nullptr) {
    layout   l;
    uint64_t file_size = 0;
    bytes    out       = serialize_header(f, &l, &file_size);
    for (const tensor & t : f.tensors) {
        pad(&out, f.alignment);
        l.data_at.push_back(out.size());
        out.insert(out.end(), t.data.begin(), t.data.end());
    }
    out.resize(file_size);
    if (where) {
        *where = l;
    }
    return out;
}

// ---- sparse tensors ----

struct dense_matrix {
    std::string           name;
    std::vector<uint64_t> ne;
    uint32_t              type; // F32, F16 or BF16
    bytes                 data;
    uint64_t              value_nbytes() const { return type == TYPE_F32 ? 4 : 2; }
};

struct components {
    bytes    values, deltas, row_ptr;
    uint64_t nnz = 0;
};

// Encodes a matrix to MACKO element by element, as FORMAT.md section 3 describes it.
inline components encode(const dense_matrix & m, uint32_t bits) {
    components            c;
    const uint64_t        nb       = m.value_nbytes();
    const uint64_t        cols     = m.ne[0];
    const uint64_t        rows     = m.data.size() / nb / cols;
    const uint64_t        max_code = (uint64_t(1) << bits) - 1;
    std::vector<uint64_t> codes;
    put<int32_t>(&c.row_ptr, 0);
    for (uint64_t r = 0; r < rows; r++) {
        int64_t prev = -1;
        for (uint64_t col = 0; col < cols; col++) {
            const uint8_t * value = m.data.data() + (r * cols + col) * nb;
            bool            zero  = true;
            for (uint64_t i = 0; i < nb; i++) {
                zero = zero && value[i] == 0;
            }
            if (zero) {
                continue;
            }
            while (static_cast<int64_t>(col) - prev - 1 > static_cast<int64_t>(max_code)) {
                codes.push_back(max_code);
                c.values.insert(c.values.end(), nb, 0);
                prev += static_cast<int64_t>(max_code) + 1;
            }
            codes.push_back(col - static_cast<uint64_t>(prev + 1));
            c.values.insert(c.values.end(), value, value + nb);
            prev = static_cast<int64_t>(col);
            c.nnz++;
        }
        put<int32_t>(&c.row_ptr, static_cast<int32_t>(codes.size()));
    }
    while (codes.size() % 8 != 0 || codes.empty()) {
        codes.push_back(0);
    }
    c.values.resize(codes.size() * nb);
    c.deltas.resize((codes.size() * bits / 8 + 3) / 4 * 4);
    for (size_t k = 0; k < codes.size(); k++) {
        c.deltas[k * bits / 8] = static_cast<uint8_t>(c.deltas[k * bits / 8] | codes[k] << (k * bits % 8));
    }
    return c;
}

// The inverse of encode, for arrays that the library has accepted. Throws if an entry is outside of the matrix.
inline bytes decode(const bytes & values, const bytes & deltas, const bytes & row_ptr, uint64_t nb, uint64_t rows,
                    uint64_t cols, uint32_t bits) {
    bytes   out(rows * cols * nb);
    int32_t begin = 0;
    for (uint64_t r = 0; r < rows; r++) {
        int32_t end = 0;
        memcpy(&end, row_ptr.data() + 4 * (r + 1), 4);
        int64_t col = -1;
        for (int32_t k = begin; k < end; k++) {
            const uint64_t bit = static_cast<uint64_t>(k) * bits;
            col += 1 + ((deltas.at(bit / 8) >> (bit % 8)) & ((1 << bits) - 1));
            if (col >= static_cast<int64_t>(cols)) {
                throw std::runtime_error("column out of range");
            }
            memcpy(out.data() + (r * cols + static_cast<uint64_t>(col)) * nb,
                   values.data() + static_cast<uint64_t>(k) * nb, nb);
        }
        begin = end;
    }
    return out;
}

// The components of an ec-csr matrix (FORMAT.md section 6).
struct ec_components {
    bytes    values, deltas, bases, blk_ptr, rows, sets;
    uint64_t nnz = 0;
};

// Encodes a narrow matrix to ec-csr: each row with non-zeros becomes one short block. cols must be at most 65536, and a
// row must have at most 96 entries.
inline ec_components encode_ec(const dense_matrix & m, uint32_t bits) {
    struct entry {
        uint16_t col;
        bytes    value;
    };
    struct block {
        int32_t            row;
        std::vector<entry> entries;
    };
    const uint64_t     nb = m.value_nbytes(), cols = m.ne[0], rows = m.data.size() / nb / cols;
    const uint16_t     step = static_cast<uint16_t>((1u << bits) - 1);
    const bytes        zero(nb, 0);
    ec_components      c;
    std::vector<block> blocks;
    for (uint64_t r = 0; r < rows; r++) {
        block b = { static_cast<int32_t>(r), {} };
        for (uint64_t col = 0; col < cols; col++) {
            const bytes value(m.data.begin() + static_cast<int64_t>((r * cols + col) * nb),
                              m.data.begin() + static_cast<int64_t>((r * cols + col + 1) * nb));
            if (value == zero) {
                continue;
            }
            while (!b.entries.empty() && col - b.entries.back().col > step) {
                b.entries.push_back({ static_cast<uint16_t>(b.entries.back().col + step), zero });
            }
            b.entries.push_back({ static_cast<uint16_t>(col), value });
            c.nnz++;
        }
        if (!b.entries.empty()) {
            blocks.push_back(b);
        }
    }
    if (blocks.empty()) {
        blocks.push_back({ 0, { { 0, zero } } });
    }
    for (block & b : blocks) {
        while (b.entries.size() % 32) {
            b.entries.push_back({ b.entries.back().col, zero });
        }
        if (b.entries.size() > 96) {
            throw std::runtime_error("a row of more than 96 entries");
        }
    }
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const block & a, const block & b) { return a.entries.size() > b.entries.size(); });
    int32_t n_cols = 0;
    put<int32_t>(&c.blk_ptr, 0);
    // Lane l has n / 32 entries, starting with entry l * n / 32; entry k of lane l is stored at k * 32 + l.
    for (const block & b : blocks) {
        const size_t per_lane = b.entries.size() / 32;
        const size_t first    = static_cast<size_t>(n_cols);
        n_cols += static_cast<int32_t>(b.entries.size());
        c.deltas.resize(static_cast<size_t>(n_cols) * bits / 8);
        c.values.resize(static_cast<size_t>(n_cols) * nb);
        for (size_t lane = 0; lane < 32; lane++) {
            put<uint16_t>(&c.bases, b.entries[lane * per_lane].col);
            for (size_t k = 0; k < per_lane; k++) {
                const entry & e     = b.entries[lane * per_lane + k];
                const size_t  place = first + k * 32 + lane;
                const size_t  delta = k ? static_cast<size_t>(e.col - b.entries[lane * per_lane + k - 1].col) : 0;
                c.deltas[place * bits / 8] =
                    static_cast<uint8_t>(c.deltas[place * bits / 8] | delta << (place * bits % 8));
                std::copy(e.value.begin(), e.value.end(), c.values.begin() + static_cast<int64_t>(place * nb));
            }
        }
        put<int32_t>(&c.blk_ptr, n_cols);
        put<int32_t>(&c.rows, b.row);
    }
    for (const int32_t x : { 1, 1, static_cast<int32_t>(blocks.size()), n_cols }) {
        put<int32_t>(&c.sets, x);
    }
    return c;
}

// The inverse of encode_ec, for arrays that the library has accepted and whose blocks are all short.
inline bytes decode_ec(const ec_components & c, uint64_t nb, uint64_t rows, uint64_t cols, uint32_t bits) {
    bytes      out(rows * cols * nb);
    const auto number = [](const bytes & b, size_t i) {
        int32_t x;
        memcpy(&x, b.data() + 4 * i, 4);
        return x;
    };
    for (size_t b = 0; b < c.rows.size() / 4; b++) {
        const size_t first    = static_cast<size_t>(number(c.blk_ptr, b)),
                     per_lane = static_cast<size_t>(number(c.blk_ptr, b + 1) - number(c.blk_ptr, b)) / 32;
        for (size_t lane = 0; lane < 32; lane++) {
            uint16_t base;
            memcpy(&base, c.bases.data() + 2 * (32 * b + lane), 2);
            uint64_t col = base;
            for (size_t k = 0; k < per_lane; k++) {
                const size_t place = first + k * 32 + lane;
                col += (c.deltas.at(place * bits / 8) >> (place * bits % 8)) & ((1u << bits) - 1);
                if (col >= cols) {
                    throw std::runtime_error("column out of range");
                }
                for (size_t i = 0; i < nb; i++) {
                    out[(static_cast<size_t>(number(c.rows, b)) * cols + col) * nb + i] |= c.values.at(place * nb + i);
                }
            }
        }
    }
    return out;
}

// ---- models ----

struct model {
    file                      dense;  // the model as a dense file
    std::vector<dense_matrix> sparse; // the tensors that sparse_file encodes, in the order of the table
    std::vector<uint32_t>     bits;
};

// F16 bits of a number that is a normal F16 number; the mantissa is truncated.
inline uint16_t half_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return static_cast<uint16_t>((u >> 16 & 0x8000) | (((u >> 23 & 0xff) - 112) << 10) | (u >> 13 & 0x3ff));
}

// n random values in rows of cols, with the given density; some rows are empty and some gaps are wide.
inline bytes random_data(std::mt19937_64 & rng, uint32_t type, uint64_t n, uint64_t cols, double density) {
    std::uniform_real_distribution<double> unit(0, 1);
    std::normal_distribution<float>        normal(0, 0.1f);
    bytes                                  out;
    bool                                   empty = false;
    for (uint64_t i = 0; i < n; i++) {
        if (i % cols == 0) {
            empty = density < 1 && unit(rng) < 0.15;
        }
        float value = empty || unit(rng) >= density ? 0.0f : normal(rng);
        if (value != 0 && value < 1e-3f && value > -1e-3f) {
            value = 1e-3f;
        }
        uint32_t u;
        memcpy(&u, &value, 4);
        switch (type) {
            case TYPE_F32:  put<uint32_t>(&out, u); break;
            case TYPE_BF16: put<uint16_t>(&out, static_cast<uint16_t>(u >> 16)); break;
            default:        put<uint16_t>(&out, value == 0 ? uint16_t(0) : half_of(value)); break;
        }
    }
    return out;
}

// The tokens of a small SentencePiece vocabulary: special tokens, bytes and words.
inline std::vector<std::string> spm_tokens() {
    std::vector<std::string> tokens = { "<unk>", "<s>", "</s>" };
    for (unsigned b = 0; b < 256; b++) {
        char token[8];
        snprintf(token, sizeof(token), "<0x%02X>", b);
        tokens.push_back(token);
    }
    for (const char * word : { "\xe2\x96\x81", "a", "b", "c",
                               "\xe2\x96\x81"
                               "a",
                               "ab", "bc", "abc" }) {
        tokens.push_back(word);
    }
    return tokens;
}

inline void add_spm_vocab(file * f) {
    const std::vector<std::string> tokens = spm_tokens();
    std::vector<float>             scores;
    std::vector<int32_t>           types;
    for (size_t i = 0; i < tokens.size(); i++) {
        scores.push_back(-static_cast<float>(i));
        types.push_back(i == 0 ? 2 : i < 3 ? 3 : i < 259 ? 6 : 1);
    }
    f->keys.push_back(text("tokenizer.ggml.model", "llama"));
    f->keys.push_back(texts("tokenizer.ggml.tokens", tokens));
    f->keys.push_back(array<float>("tokenizer.ggml.scores", F32, scores));
    f->keys.push_back(array<int32_t>("tokenizer.ggml.token_type", I32, types));
    f->keys.push_back(scalar<uint32_t>("tokenizer.ggml.bos_token_id", U32, 1));
    f->keys.push_back(scalar<uint32_t>("tokenizer.ggml.eos_token_id", U32, 2));
    f->keys.push_back(scalar<uint8_t>("tokenizer.ggml.add_bos_token", BOOL, 1));
    f->keys.push_back(text("tokenizer.chat_template", "{{ messages }}"));
}

inline std::vector<std::string> bpe_tokens() {
    return { "a",
             "b",
             "c",
             "ab",
             "bc",
             "abc",
             "\xc4\xa0",
             "\xc4\x8a",
             "\xc4\xa0"
             "a",
             "<|bos|>",
             "<|eos|>",
             "<|pad|>" };
}

inline void add_bpe_vocab(file * f) {
    const std::vector<std::string> tokens = bpe_tokens();
    std::vector<int32_t>           types(tokens.size(), 1);
    std::fill(types.end() - 3, types.end(), 3);
    f->keys.push_back(text("tokenizer.ggml.model", "gpt2"));
    f->keys.push_back(text("tokenizer.ggml.pre", "llama-bpe"));
    f->keys.push_back(texts("tokenizer.ggml.tokens", tokens));
    f->keys.push_back(array<int32_t>("tokenizer.ggml.token_type", I32, types));
    f->keys.push_back(texts("tokenizer.ggml.merges", { "a b", "b c", "a bc" }));
    f->keys.push_back(scalar<uint32_t>("tokenizer.ggml.bos_token_id", U32, 9));
    f->keys.push_back(scalar<uint32_t>("tokenizer.ggml.eos_token_id", U32, 10));
}

// A llama model that llama.cpp can load, with 4 heads, 2 KV heads and a feed-forward length of 2 n_embd.
inline model tiny_llama(uint64_t n_embd, uint32_t n_layer, uint64_t seed, bool bpe = false) {
    std::mt19937_64 rng(seed);
    model           m;
    file &          f = m.dense;
    f.keys.push_back(text("general.architecture", "llama"));
    f.keys.push_back(text("general.name", "tiny"));
    f.keys.push_back(scalar<uint32_t>("general.alignment", U32, 32));
    f.keys.push_back(scalar<uint32_t>("llama.block_count", U32, n_layer));
    f.keys.push_back(scalar<uint32_t>("llama.context_length", U32, 128));
    f.keys.push_back(scalar<uint32_t>("llama.embedding_length", U32, static_cast<uint32_t>(n_embd)));
    f.keys.push_back(scalar<uint32_t>("llama.feed_forward_length", U32, static_cast<uint32_t>(2 * n_embd)));
    f.keys.push_back(scalar<uint32_t>("llama.attention.head_count", U32, 4));
    f.keys.push_back(scalar<uint32_t>("llama.attention.head_count_kv", U32, 2));
    f.keys.push_back(scalar<float>("llama.attention.layer_norm_rms_epsilon", F32, 1e-5f));
    f.keys.push_back(scalar<float>("llama.rope.freq_base", F32, 10000.0f));
    bpe ? add_bpe_vocab(&f) : add_spm_vocab(&f);
    f.keys.push_back(scalar<float>("macko.prune.density", F32, 0.3f));

    const uint64_t n_vocab   = bpe ? bpe_tokens().size() : spm_tokens().size();
    auto           add_dense = [&](const std::string & name, std::vector<uint64_t> ne, uint32_t type) {
        uint64_t n = 1;
        for (uint64_t d : ne) {
            n *= d;
        }
        f.tensors.push_back({ name, ne, type, random_data(rng, type, n, ne[0], 1.0), 0 });
    };
    auto add_sparse = [&](const std::string & name, std::vector<uint64_t> ne, uint32_t type, uint32_t bits,
                          double density) {
        dense_matrix d = { name, ne, type, random_data(rng, type, ne[0] * ne[1], ne[0], density) };
        f.tensors.push_back({ name, ne, type, d.data, 0 });
        m.sparse.push_back(d);
        m.bits.push_back(bits);
    };
    add_dense("token_embd.weight", { n_embd, n_vocab }, TYPE_F16);
    for (uint32_t i = 0; i < n_layer; i++) {
        const std::string blk = "blk." + std::to_string(i) + ".";
        add_dense(blk + "attn_norm.weight", { n_embd }, TYPE_F32);
        add_sparse(blk + "attn_q.weight", { n_embd, n_embd }, TYPE_F16, 4, 0.3);
        add_sparse(blk + "attn_k.weight", { n_embd, n_embd / 2 }, TYPE_BF16, 2, 0.3);
        add_dense(blk + "attn_v.weight", { n_embd, n_embd / 2 }, TYPE_F16);
        add_sparse(blk + "attn_output.weight", { n_embd, n_embd }, TYPE_F16, 8, 0.2);
        add_dense(blk + "ffn_norm.weight", { n_embd }, TYPE_F32);
        add_sparse(blk + "ffn_gate.weight", { n_embd, 2 * n_embd }, TYPE_F32, 1, 0.4);
        add_sparse(blk + "ffn_up.weight", { n_embd, 2 * n_embd }, TYPE_F16, 4, 0.1);
        add_sparse(blk + "ffn_down.weight", { 2 * n_embd, n_embd }, TYPE_F16, 4, i == 0 ? 0.3 : 0.0);
    }
    add_dense("output_norm.weight", { n_embd }, TYPE_F32);
    return m;
}

// All keys of FORMAT.md section 10, for the parts of a tiny_llama() with two layers.
inline void set_activation_keys(file * f) {
    f->set(scalar<uint32_t>("macko.act.version", U32, 1));
    f->set(text("macko.act.kind", "product"));
    f->set(scalar<float>("macko.act.share", F32, 0.5f));
    f->set(text("macko.act.allocation", "greedy"));
    f->set(text("macko.act.text", "calibration.txt"));
    f->set(scalar<uint32_t>("macko.act.chunks", U32, 16));
    f->set(scalar<uint32_t>("macko.act.n_ctx", U32, 512));
    f->set(texts("macko.act.part.down", { "blk.0.ffn_down.weight", "blk.1.ffn_down.weight" }));
    f->set(array<float>("macko.act.part.share", F32, { 0.25f, 0.75f }));
    f->set(array<float>("macko.act.part.threshold", F32, { 0.0f, FLT_MAX }));
}

// The components of a packed matrix with a bitmap as its index.
struct packed_components {
    bytes    values, index, row_ptr;
    uint64_t nnz, n_values;
};

inline packed_components encode_packed(const dense_matrix & m, bool coded) {
    packed_components c  = {};
    const uint64_t    nb = m.value_nbytes(), cols = m.ne[0], rows = m.data.size() / nb / cols;
    const auto        put_i32 = [&](uint64_t v) {
        for (int i = 0; i < 4; i++) {
            c.row_ptr.push_back(static_cast<uint8_t>(v >> (8 * i)));
        }
    };
    c.index.assign((rows * ((cols + 7) / 8) + 3) / 4 * 4, 0);
    put_i32(0);
    for (uint64_t r = 0; r < rows; r++) {
        for (uint64_t col = 0; col < cols; col++) {
            const uint8_t * v = &m.data[(r * cols + col) * nb];
            if (std::any_of(v, v + nb, [](uint8_t b) { return b != 0; })) {
                c.index[r * ((cols + 7) / 8) + col / 8] |= static_cast<uint8_t>(1 << (col % 8));
                c.values.insert(c.values.end(), v, v + nb);
                c.nnz++;
            }
        }
        put_i32(c.nnz);
    }
    c.n_values = std::max<uint64_t>(32, (c.nnz + 31) / 32 * 32);
    if (!coded) {
        c.values.resize(c.n_values * nb, 0);
        return c;
    }
    std::vector<uint32_t> values(c.nnz, 0);
    for (size_t k = 0; k < c.nnz; k++) {
        memcpy(&values[k], &c.values[k * nb], nb);
    }
    c.values   = encode_coded(values, static_cast<int32_t>(m.type), 7, 2);
    c.n_values = c.values.size() / 4;
    return c;
}

// The components of format `quantized`, in their order: codes of 3 bits, and windows of 32 columns. The codes and
// scales are random: only the positions of the non-zeros are those of the matrix.
struct quantized_components {
    bytes    codes, bitmap, scales, factors, row_ptr, levels;
    uint64_t nnz;
};
inline quantized_components encode_quantized(const dense_matrix & m) {
    quantized_components c  = {};
    const uint64_t       nb = m.value_nbytes(), cols = m.ne[0], rows = m.data.size() / nb / cols;
    uint32_t             groups = 0;
    c.levels                    = { 20, 50, 80, 127, 136, 181, 211, 238 };
    c.bitmap.assign((rows * ((cols + 7) / 8) + 3) / 4 * 4, 0);
    put<uint32_t>(&c.row_ptr, 0);
    for (uint64_t r = 0; r < rows; r++) {
        uint64_t n = 0;
        c.codes.resize(groups * 3 + (cols + 7) / 8 * 3, 0);
        for (uint64_t col = 0; col < cols; col++) {
            const uint8_t * v = &m.data[(r * cols + col) * nb];
            if (col % 32 == 0) {
                c.scales.push_back(0);
            }
            if (std::any_of(v, v + nb, [](uint8_t b) { return b != 0; })) {
                c.bitmap[r * ((cols + 7) / 8) + col / 8] |= static_cast<uint8_t>(1 << (col % 8));
                c.scales.back() = static_cast<uint8_t>(37 * (r + col / 32) + 1);
                for (uint64_t bit = 3 * n; bit < 3 * n + 3; bit++) { // of code v[0] % 8
                    c.codes[groups * 3 + bit / 8] |= static_cast<uint8_t>((v[0] >> (bit - 3 * n) & 1) << (bit % 8));
                }
                n++;
            }
        }
        groups += static_cast<uint32_t>((n + 7) / 8);
        put<uint16_t>(&c.factors, n ? static_cast<uint16_t>(0x3c00 + r) : uint16_t(0));
        put<uint32_t>(&c.row_ptr, groups);
        c.nnz += n;
    }
    c.codes.resize(std::max<uint64_t>(4, (groups * 3 + 3) / 4 * 4), 0);
    return c;
}

// The sparse file of a model. with_ec: matrices with delta_bits 4 or 8 are ec-csr. with_packed: every third matrix is
// packed, with plain values; the sixth has coded values, and the eighth is in format `quantized`.
inline file sparse_file(const model & m, bool with_ec = false, bool with_packed = false) {
    file f = m.dense;
    f.tensors.clear();
    std::vector<std::string> names, formats;
    std::vector<uint32_t>    types, bits;
    std::vector<uint64_t>    ne, nnz;
    size_t                   next = 0;
    for (const tensor & t : m.dense.tensors) {
        if (next == m.sparse.size() || t.name != m.sparse[next].name) {
            f.tensors.push_back(t);
            continue;
        }
        const uint64_t nb = m.sparse[next].value_nbytes();
        if (with_packed && (next % 3 == 0 || next == 5)) {
            const bool              coded = next == 5; // stored as words, because ggml has no such type
            const packed_components c     = encode_packed(m.sparse[next], coded);
            f.tensors.push_back(
                { t.name + ".values", { c.n_values }, coded ? uint32_t(TYPE_I32) : t.type, c.values, 0 });
            f.tensors.push_back({ t.name + ".index", { c.index.size() }, TYPE_I8, c.index, 0 });
            f.tensors.push_back({ t.name + ".row_ptr", { c.row_ptr.size() / 4 }, TYPE_I32, c.row_ptr, 0 });
            nnz.push_back(c.nnz);
            formats.push_back("packed");
        } else if (with_packed && next == 7) {
            const quantized_components c = encode_quantized(m.sparse[next]);
            f.tensors.push_back({ t.name + ".codes", { c.codes.size() }, TYPE_I8, c.codes, 0 });
            f.tensors.push_back({ t.name + ".bitmap", { c.bitmap.size() }, TYPE_I8, c.bitmap, 0 });
            f.tensors.push_back({ t.name + ".wscales", { c.scales.size() }, TYPE_I8, c.scales, 0 });
            f.tensors.push_back({ t.name + ".factors", { c.factors.size() / 2 }, TYPE_BF16, c.factors, 0 });
            f.tensors.push_back({ t.name + ".row_ptr", { c.row_ptr.size() / 4 }, TYPE_I32, c.row_ptr, 0 });
            f.tensors.push_back({ t.name + ".levels", { c.levels.size() }, TYPE_I8, c.levels, 0 });
            nnz.push_back(c.nnz);
            formats.push_back("quantized");
        } else if (with_ec && m.bits[next] >= 4) {
            const ec_components c = encode_ec(m.sparse[next], m.bits[next]);
            f.tensors.push_back({ t.name + ".values", { c.values.size() / nb }, t.type, c.values, 0 });
            f.tensors.push_back({ t.name + ".deltas", { c.deltas.size() }, TYPE_I8, c.deltas, 0 });
            f.tensors.push_back({ t.name + ".bases", { c.bases.size() / 2 }, TYPE_I16, c.bases, 0 });
            f.tensors.push_back({ t.name + ".blk_ptr", { c.blk_ptr.size() / 4 }, TYPE_I32, c.blk_ptr, 0 });
            f.tensors.push_back({ t.name + ".rows", { c.rows.size() / 4 }, TYPE_I32, c.rows, 0 });
            f.tensors.push_back({ t.name + ".sets", { c.sets.size() / 4 }, TYPE_I32, c.sets, 0 });
            nnz.push_back(c.nnz);
            formats.push_back("ec-csr");
        } else {
            const components c = encode(m.sparse[next], m.bits[next]);
            f.tensors.push_back({ t.name + ".values", { c.values.size() / nb }, t.type, c.values, 0 });
            f.tensors.push_back({ t.name + ".deltas", { c.deltas.size() }, TYPE_I8, c.deltas, 0 });
            f.tensors.push_back({ t.name + ".row_ptr", { c.row_ptr.size() / 4 }, TYPE_I32, c.row_ptr, 0 });
            nnz.push_back(c.nnz);
            formats.push_back("macko");
        }
        names.push_back(t.name);
        types.push_back(t.type);
        bits.push_back(formats.back() == "packed" || formats.back() == "quantized" ? 0 : m.bits[next]);
        for (size_t d = 0; d < 4; d++) {
            ne.push_back(d < t.ne.size() ? t.ne[d] : 1);
        }
        next++;
    }
    f.keys.push_back(scalar<uint32_t>("macko.version", U32, 1));
    f.keys.push_back(texts("macko.tensor.name", names));
    f.keys.push_back(texts("macko.tensor.format", formats));
    f.keys.push_back(array<uint32_t>("macko.tensor.type", U32, types));
    f.keys.push_back(array<uint64_t>("macko.tensor.ne", U64, ne));
    f.keys.push_back(array<uint32_t>("macko.tensor.index_bits", U32, bits));
    f.keys.push_back(array<uint64_t>("macko.tensor.nnz", U64, nnz));
    return f;
}

} // namespace builder
