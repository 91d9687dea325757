// Lies in the header of a GGUF: magic, counts, keys, alignment, tensors, format version.
#include "lies.h"

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
    lie("reader too old", S(FORMAT_VERSION), [](file & f) { f.set(scalar<uint32_t>("macko.version", U32, 2)); });
    lie("reader much too old", S(FORMAT_VERSION),
        [](file & f) { f.set(scalar<uint32_t>("macko.version", U32, UINT32_MAX)); });
    lie("reader too old for a key", S(FORMAT_VERSION), [](file & f) {
        f.set(scalar<uint32_t>("macko.version", U32, 2));
        f.keys.push_back(text("macko.tensor.checksum", "x"));
    });
    lie("version 0", S(BAD_KEY_VALUE), [](file & f) { f.set(scalar<uint32_t>("macko.version", U32, 0)); });
    lie("version is a string", S(BAD_KEY_TYPE), [](file & f) { f.set(text("macko.version", "1")); });
    lie("version is u64", S(BAD_KEY_TYPE), [](file & f) { f.set(scalar<uint64_t>("macko.version", U64, 1)); });
    lie("version is i32", S(BAD_KEY_TYPE), [](file & f) { f.set(scalar<int32_t>("macko.version", I32, 1)); });
}
