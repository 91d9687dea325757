// Lies about sparse tensors: keys, shapes, components, and the payload of MACKO.
#include "lies.h"

TEST(malformed_sparse_keys_are_refused) {
    for (const char * name : { "macko.tensor.name", "macko.tensor.format", "macko.tensor.type", "macko.tensor.ne",
                               "macko.tensor.index_bits", "macko.tensor.nnz" }) {
        lie(name, S(MISSING_KEY), [name](file & f) { f.drop(name); });
    }
    lie("macko.version missing", S(BAD_KEY), [](file & f) { f.drop("macko.version"); });
    lie("reserved key", S(BAD_KEY), [](file & f) { f.keys.push_back(text("macko.tensor.checksum", "x")); });
    lie("reserved key, bare", S(BAD_KEY), [](file & f) { f.keys.push_back(text("macko.", "x")); });
    lie("experimental key", S(OK), [](file & f) { f.keys.push_back(text("macko.x-note", "x")); });
    lie("names are u32", S(BAD_KEY_TYPE), [](file & f) { f.set(array<uint32_t>("macko.tensor.name", U32, { 1 })); });
    lie("names are one string", S(BAD_KEY_TYPE), [](file & f) { f.set(text("macko.tensor.name", UP)); });
    lie("formats are u8", S(BAD_KEY_TYPE), [](file & f) { f.set(array<uint8_t>("macko.tensor.format", U8, { 1 })); });
    lie("types are i32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<int32_t>("macko.tensor.type", I32, std::vector<int32_t>(12, 1))); });
    lie("ne is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("macko.tensor.ne", U32, std::vector<uint32_t>(48, 16))); });
    lie("nnz is i64", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<int64_t>("macko.tensor.nnz", I64, std::vector<int64_t>(12, 16))); });
    lie("no names", S(BAD_KEY_VALUE), [](file & f) { f.set(texts("macko.tensor.name", {})); });
    lie("one name less", S(BAD_KEY_VALUE), [](file & f) {
        std::vector<std::string> n;
        for (size_t i = 0; i + 1 < base_model().sparse.size(); i++) {
            n.push_back(base_model().sparse[i].name);
        }
        f.set(texts("macko.tensor.name", n));
    });
    lie("21846 names", S(LIMIT),
        [](file & f) { f.set(texts("macko.tensor.name", std::vector<std::string>(21846, "a"))); });
    lie("formats too few", S(BAD_KEY_VALUE), [](file & f) { f.set(texts("macko.tensor.format", { "macko" })); });
    lie("types too many", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("macko.tensor.type", U32, std::vector<uint32_t>(13, 1))); });
    lie("ne too few", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint64_t>("macko.tensor.ne", U64, std::vector<uint64_t>(47, 16))); });
    lie("index_bits too few", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("macko.tensor.index_bits", U32, { 4 })); });
    lie("nnz too few", S(BAD_KEY_VALUE), [](file & f) { f.set(array<uint64_t>("macko.tensor.nnz", U64, { 4 })); });
}

// Changes element i of one of the arrays macko.tensor.*, whose elements begin at byte 12 of the value. Elements 0 to 5
// of these arrays are q, k, output, gate, up and down of layer 0; macko.tensor.ne has four numbers for each.
static file_lie u32_at(const char * key, size_t i, uint32_t value) {
    return [=](file & f) { patch<uint32_t>(&f.find(key)->value, 12 + 4 * i, value); };
}
static file_lie u64_at(const char * key, size_t i, uint64_t value) {
    return [=](file & f) { patch<uint64_t>(&f.find(key)->value, 12 + 8 * i, value); };
}

TEST(malformed_sparse_format_is_refused) {
    lie("format ec-csr", S(MISSING_COMPONENT), [](file & f) {
        std::vector<std::string> v(12, "macko");
        v[4] = "ec-csr";
        f.set(texts("macko.tensor.format", v));
    });
    lie("format empty", S(BAD_FORMAT), [](file & f) {
        std::vector<std::string> v(12, "macko");
        v[0] = "";
        f.set(texts("macko.tensor.format", v));
    });
    lie("format with NUL", S(BAD_FORMAT), [](file & f) {
        std::vector<std::string> v(12, "macko");
        v[0] = std::string("macko\0x", 7);
        f.set(texts("macko.tensor.format", v));
    });
    for (uint32_t type : { 2u, 8u, 24u, 26u, 28u, 0x80000001u, UINT32_MAX }) {
        lie("value type", S(BAD_FORMAT), u32_at("macko.tensor.type", 4, type));
    }
    lie("BF16 for F16", S(BAD_COMPONENT), u32_at("macko.tensor.type", 4, 30));
    lie("F32 for F16", S(BAD_COMPONENT), u32_at("macko.tensor.type", 4, 0));
    for (uint32_t bits : { 0u, 3u, 5u, 16u, 0x80000004u }) {
        lie("index_bits", S(BAD_FORMAT), u32_at("macko.tensor.index_bits", 4, bits));
    }
    lie("8 bits for 4", S(BAD_COMPONENT), u32_at("macko.tensor.index_bits", 4, 8));
    lie("2 bits for 4", S(BAD_COMPONENT), u32_at("macko.tensor.index_bits", 4, 2));
}

TEST(malformed_sparse_shape_is_refused) {
    lie("cols 0", S(BAD_SHAPE), u64_at("macko.tensor.ne", 16, 0));
    lie("rows 0", S(BAD_SHAPE), u64_at("macko.tensor.ne", 17, 0));
    lie("ne3 0", S(BAD_SHAPE), u64_at("macko.tensor.ne", 19, 0));
    lie("cols 2^24+1", S(LIMIT), u64_at("macko.tensor.ne", 16, (1 << 24) + 1));
    lie("rows 2^24+1", S(LIMIT), u64_at("macko.tensor.ne", 17, (1 << 24) + 1));
    lie("cols 2^63", S(LIMIT), u64_at("macko.tensor.ne", 16, uint64_t(1) << 63));
    lie("rows overflow", S(LIMIT), [](file & f) {
        for (size_t d : { 17, 18, 19 }) {
            patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * d, uint64_t(1) << 30);
        }
    });
    lie("rows wrap to 32", S(LIMIT), [](file & f) {
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 18, uint64_t(1) << 62);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 19, 8);
    });
    lie("dense tensor of 512 TiB", S(LIMIT), [](file & f) {
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 16, 1 << 24);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12 + 8 * 17, 1 << 24);
    });
    lie("rows one more", S(BAD_COMPONENT), u64_at("macko.tensor.ne", 17, 33));
    lie("rows one less", S(BAD_COMPONENT), u64_at("macko.tensor.ne", 17, 31));
    lie("expansion beyond 64", S(LIMIT), u64_at("macko.tensor.ne", 16, 1 << 20));
    lie("fewer cols", S(BAD_COLUMN), u64_at("macko.tensor.ne", 16, 15));
    lie("cols 1: more entries than elements", S(BAD_NNZ), u64_at("macko.tensor.ne", 0, 1));
}

TEST(wrong_nnz_is_refused) {
    lie("nnz 2^63", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, uint64_t(1) << 63));
    lie("nnz 2^64-1", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, UINT64_MAX));
    lie("nnz more than elements", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, 16 * 32 + 1));
    lie("nnz more than entries", S(BAD_NNZ), u64_at("macko.tensor.nnz", 4, 16 * 32));
    lie("nnz of an empty matrix", S(BAD_NNZ), u64_at("macko.tensor.nnz", 11, 1));
    lie("nnz one less", S(BAD_NNZ), [](file & f) { f.find("macko.tensor.nnz")->value[12 + 8 * 4]--; });
    lie("nnz one more", S(BAD_NNZ), [](file & f) { f.find("macko.tensor.nnz")->value[12 + 8 * 4]++; });
}

static file_lie rename_sparse(size_t i, const std::string & name) {
    return [=](file & f) {
        std::vector<std::string> names;
        for (const dense_matrix & m : base_model().sparse) {
            names.push_back(m.name);
        }
        names[i] = name;
        f.set(texts("macko.tensor.name", names));
    };
}

TEST(malformed_sparse_name_is_refused) {
    lie("sparse name unknown", S(MISSING_COMPONENT), rename_sparse(4, "blk.0.nonesuch.weight"));
    lie("sparse name empty", S(BAD_NAME), rename_sparse(4, ""));
    lie("sparse name 56 bytes", S(BAD_NAME), rename_sparse(4, std::string(56, 'x')));
    lie("sparse name 55 bytes", S(MISSING_COMPONENT), rename_sparse(4, std::string(55, 'x')));
    lie("sparse name with newline", S(BAD_NAME), rename_sparse(4, "blk\n0"));
    lie("sparse name with NUL", S(BAD_NAME), rename_sparse(4, std::string("blk.0.ffn_up.weight\0", 20)));
    lie("sparse name twice", S(DUPLICATE_TENSOR), rename_sparse(4, Q));
    lie("sparse name is a dense one", S(MISSING_COMPONENT), rename_sparse(4, "output_norm.weight"));
    lie("dense tensor beside sparse", S(DUPLICATE_TENSOR), [](file & f) { f.at("output_norm.weight").name = UP; });
    lie("dense tensor before sparse", S(DUPLICATE_TENSOR), [](file & f) { f.at("token_embd.weight").name = UP; });
    lie("names in another order", S(BAD_COMPONENT), [](file & f) {
        std::vector<std::string> names;
        for (const dense_matrix & m : base_model().sparse) {
            names.push_back(m.name);
        }
        std::swap(names[0], names[2]); // these have the same shape and type
        f.set(texts("macko.tensor.name", names));
    });
}

TEST(malformed_component_is_refused) {
    for (const char * component : { ".values", ".deltas", ".row_ptr" }) {
        const std::string name = std::string(UP) + component;
        lie("component missing", S(MISSING_COMPONENT),
            [=](file & f) { f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(name))); });
        lie("component renamed", S(MISSING_COMPONENT), [=](file & f) { f.at(name).name = std::string(UP) + ".bogus"; });
        lie("component moved to the end", S(BAD_COMPONENT), [=](file & f) {
            tensor t = f.at(name);
            f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index(name)));
            f.tensors.push_back(t);
        });
        lie("component of wrong type", S(BAD_COMPONENT), [=](file & f) {
            tensor & t = f.at(name);
            t.type     = t.type == TYPE_I8 ? TYPE_I32 : TYPE_I8;
            t.ne[0]    = t.type == TYPE_I8 ? t.data.size() : t.data.size() / 4;
        });
        lie("component of two dims", S(BAD_COMPONENT), [=](file & f) { f.at(name).ne.push_back(1); });
        lie("component longer", S(BAD_COMPONENT), [=](file & f) {
            tensor &     t  = f.at(name);
            const size_t nb = t.data.size() / t.ne[0];
            t.ne[0] += 4;
            t.data.resize(t.data.size() + 4 * nb);
        });
        lie("component shorter", S(BAD_COMPONENT), [=](file & f) {
            tensor &     t  = f.at(name);
            const size_t nb = t.data.size() / t.ne[0];
            t.ne[0] -= 4;
            t.data.resize(t.data.size() - 4 * nb);
        });
    }
}

TEST(wrong_order_of_components_is_refused) {
    lie("components swapped", S(BAD_COMPONENT), [](file & f) {
        const size_t i = f.tensor_index(std::string(UP) + ".values");
        std::swap(f.tensors[i], f.tensors[i + 1]);
    });
    lie("tensor between components", S(BAD_COMPONENT), [](file & f) {
        const size_t i    = f.tensor_index(std::string(UP) + ".deltas");
        tensor       norm = f.at("output_norm.weight");
        f.tensors.erase(f.tensors.begin() + static_cast<int64_t>(f.tensor_index("output_norm.weight")));
        f.tensors.insert(f.tensors.begin() + static_cast<int64_t>(i), norm);
    });
    lie("unknown suffix", S(BAD_COMPONENT),
        [](file & f) { f.at("output_norm.weight").name = std::string(UP) + ".scales"; });
    lie("unknown suffix, before", S(BAD_COMPONENT),
        [](file & f) { f.at("token_embd.weight").name = std::string(UP) + ".values2"; });
    lie("suffix of a suffix", S(BAD_COMPONENT),
        [](file & f) { f.at("output_norm.weight").name = std::string(UP) + ".values.x"; });
    lie("component of nothing", S(BAD_COMPONENT), [](file & f) { f.at("output_norm.weight").name = "nobody.values"; });
}

TEST(wrong_length_of_values_is_refused) {
    lie("values 8 more, zero", S(BAD_COMPONENT), [](file & f) {
        tensor & t = f.at(std::string(UP) + ".values");
        t.ne[0] += 8;
        t.data.resize(t.data.size() + 16);
    });
    lie("padding of 8 more", S(BAD_ROW_PTR), [](file & f) { // the lengths fit each other, but they do not fit row_ptr
        tensor & v = f.at(std::string(UP) + ".values");
        tensor & d = f.at(std::string(UP) + ".deltas");
        v.ne[0] += 8;
        v.data.resize(v.data.size() + 16);
        d.ne[0] = (v.ne[0] / 2 + 3) / 4 * 4;
        d.data.resize(d.ne[0]);
    });
}

static int32_t row_ptr_get(const bytes & data, size_t r) {
    int32_t v;
    memcpy(&v, &data[4 * r], 4);
    return v;
}

TEST(malformed_row_ptr_is_refused) {
    lie("row_ptr[0] is 1", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 0, 1); }));
    lie("row_ptr[0] is -1", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 0, -1); }));
    lie("row_ptr negative", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 5, -5); }));
    lie("row_ptr decreases", S(BAD_ROW_PTR), row_ptr([](bytes & d) {
            patch<int32_t>(&d, 4 * 5, row_ptr_get(d, 32));
            patch<int32_t>(&d, 4 * 6, 0);
        }));
    lie("row_ptr beyond the payload", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 5, INT32_MAX); }));
    lie("row_ptr INT32_MIN", S(BAD_ROW_PTR), row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 5, INT32_MIN); }));
    lie("last row_ptr too large", S(BAD_ROW_PTR),
        row_ptr([](bytes & d) { patch<int32_t>(&d, 4 * 32, row_ptr_get(d, 32) + 8); }));
    lie("last row_ptr too small", S(BAD_ROW_PTR), row_ptr([](bytes & d) {
            for (size_t r = 0; r <= 32; r++) {
                patch<int32_t>(&d, 4 * r, 0);
            }
        }));
    lie("all row_ptr INT32_MAX", S(LIMIT), row_ptr([](bytes & d) {
            for (size_t r = 1; r <= 32; r++) {
                patch<int32_t>(&d, 4 * r, INT32_MAX);
            }
        }));
}

TEST(column_past_the_last_is_refused) {
    lie("all in one row", S(BAD_COLUMN), row_ptr([](bytes & d) {
            for (size_t r = 1; r < 32; r++) {
                patch<int32_t>(&d, 4 * r, row_ptr_get(d, 32));
            }
        }));
    lie("a delta past the last col", S(BAD_COLUMN), deltas([](bytes & d) {
            d[0] = 0xff;
            d[1] = 0xff;
            d[2] = 0xff;
            d[3] = 0xff;
        }));
}

TEST(payload_that_is_not_canonical_is_refused) {
    lie("value zero, code 0", S(NOT_CANONICAL), [](file & f) { // the first entry of a row with two or more
        const bytes & rp = f.at(std::string(UP) + ".row_ptr").data;
        size_t        r  = 0;
        while (row_ptr_get(rp, r + 1) - row_ptr_get(rp, r) < 2) {
            r++;
        }
        patch<uint16_t>(&f.at(std::string(UP) + ".values").data, 2 * static_cast<size_t>(row_ptr_get(rp, r)), 0);
    });
    lie("last of a row is zero", S(NOT_CANONICAL), [](file & f) {
        const bytes & rp = f.at(std::string(UP) + ".row_ptr").data;
        patch<uint16_t>(&f.at(std::string(UP) + ".values").data, 2 * static_cast<size_t>(row_ptr_get(rp, 32)) - 2, 0);
    });
    lie("hidden value in the padding", S(NOT_CANONICAL), [](file & f) {
        for (size_t i = 0; i < f.tensors.size(); i++) { // for a matrix with padding
            if (f.tensors[i].name.find(".row_ptr") != std::string::npos &&
                row_ptr_get(f.tensors[i].data, f.tensors[i].ne[0] - 1) % 8 != 0) {
                f.tensors[i - 2].data.back() = 1;
                return;
            }
        }
        throw std::runtime_error("no matrix with padding");
    });
    lie("hidden value in an empty matrix", S(NOT_CANONICAL),
        [](file & f) { f.at("blk.1.ffn_down.weight.values").data[3] = 1; });
    lie("hidden delta in an empty matrix", S(NOT_CANONICAL),
        [](file & f) { f.at("blk.1.ffn_down.weight.deltas").data[3] = 0x10; });
    // With delta_bits 1 the codes take n_padded / 8 bytes, and up to 3 bytes of padding follow.
    lie("hidden bits behind the deltas", S(NOT_CANONICAL), [](file & f) {
        for (tensor & t : f.tensors) {
            if (t.name.find("ffn_gate.weight.values") != std::string::npos && t.ne[0] / 8 % 4 != 0) {
                f.tensors[f.tensor_index(t.name) + 1].data.back() = 0x80;
                return;
            }
        }
        throw std::runtime_error("no matrix with such a tail");
    });
}

TEST(value_that_is_not_finite_is_refused) {
    lie("F16 infinity", S(NOT_FINITE), values([](bytes & d) { patch<uint16_t>(&d, 0, 0x7c00); }));
    lie("F16 NaN", S(NOT_FINITE), values([](bytes & d) { patch<uint16_t>(&d, 0, 0xfe01); }));
    lie("BF16 NaN", S(NOT_FINITE),
        [](file & f) { patch<uint16_t>(&f.at("blk.0.attn_k.weight.values").data, 0, 0x7fc0); });
    lie("BF16 -infinity", S(NOT_FINITE),
        [](file & f) { patch<uint16_t>(&f.at("blk.0.attn_k.weight.values").data, 0, 0xff80); });
    lie("F32 infinity", S(NOT_FINITE),
        [](file & f) { patch<uint32_t>(&f.at("blk.0.ffn_gate.weight.values").data, 0, 0x7f800000); });
    lie("F32 NaN", S(NOT_FINITE),
        [](file & f) { patch<uint32_t>(&f.at("blk.0.ffn_gate.weight.values").data, 0, 0x7fc00001); });
    lie("F16 -0.0 is a value", S(OK), values([](bytes & d) { patch<uint16_t>(&d, 0, 0x8000); }));
    lie("F16 65504", S(OK), values([](bytes & d) { patch<uint16_t>(&d, 0, 0x7bff); }));
}
