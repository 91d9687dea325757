// Fuzzer of sparse model files in one process. It mutates the header, the metadata, the tensor table, the description
// of the sparse tensors and the payload, and it cuts and splices files. A mutant must be refused, or decode to the
// values that a slow scalar decoder finds and encode to the same bytes again. The memory and the time for a mutant are
// bounded. In addition, one twentieth of that number are read through the file system, as split models and as dense
// models whose weights are compressed on load. A build with sanitizers (GGML_MACKO_SANITIZE=ON) finds more errors.
//
//     fuzz-model-file [mutants = 200000] [seed ...]     default seeds: fixed ones and one of the date
#include "codec/ec-csr/ec-csr.h"
#include "codec/negative-zeros.h"
#include "codec/packed/packed.h"
#include "gguf-builder.h"
#include "gguf/model-keys.h"
#include "load/dense-stream.h"
#include "load/payload.h"
#include "test.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <fstream>
#include <malloc.h>
#include <map>
#include <new>
#include <unistd.h>

using builder::bytes;
using builder::layout;

// ---- memory: counts the bytes of every operator new of the process ----

static std::atomic<int64_t> mem_live{ 0 };
static std::atomic<int64_t> mem_peak{ 0 };

static void * counted_alloc(size_t n) {
    void * p = malloc(n);
    if (p == nullptr) {
        return nullptr;
    }
    const int64_t live = mem_live += static_cast<int64_t>(malloc_usable_size(p));
    int64_t       peak = mem_peak;
    while (live > peak && !mem_peak.compare_exchange_weak(peak, live)) {
    }
    return p;
}
static void counted_free(void * p) {
    if (p != nullptr) {
        mem_live -= static_cast<int64_t>(malloc_usable_size(p));
        free(p);
    }
}
static void * counted_or_throw(size_t n) {
    void * p = counted_alloc(n);
    if (p == nullptr) {
        throw std::bad_alloc();
    }
    return p;
}
void * operator new(size_t n) { return counted_or_throw(n); }
void * operator new[](size_t n) { return counted_or_throw(n); }
void * operator new(size_t n, const std::nothrow_t &) noexcept { return counted_alloc(n); }
void * operator new[](size_t n, const std::nothrow_t &) noexcept { return counted_alloc(n); }
void   operator delete(void * p) noexcept { counted_free(p); }
void   operator delete[](void * p) noexcept { counted_free(p); }
void   operator delete(void * p, size_t) noexcept { counted_free(p); }
void   operator delete[](void * p, size_t) noexcept { counted_free(p); }

constexpr int64_t MEM_PER_BYTE = 4;
constexpr int64_t MEM_CONSTANT = 1 << 20;

// ---- a file in memory ----

struct memory_source : macko::byte_source {
    const bytes & data;
    explicit memory_source(const bytes & d) : data(d) {}
    int64_t size() const override { return static_cast<int64_t>(data.size()); }
    int     read(int64_t offset, void * dst, int64_t n) const override {
        if (offset < 0 || n < 0 || offset > size() || n > size() - offset) {
            fprintf(stderr, "fuzz: the library reads outside the file\n");
            abort();
        }
        memcpy(dst, data.data() + offset, static_cast<size_t>(n));
        return GGML_MACKO_STATUS_OK;
    }
};

struct null_consumer : macko::payload_consumer {
    int consume(const macko::macko_view &, int64_t) override { return GGML_MACKO_STATUS_OK; }
};

struct decoder : macko::payload_consumer {
    bytes   dense;
    int64_t row_nbytes;
    explicit decoder(const macko::sparse_tensor_info & m)
        : dense(static_cast<size_t>(m.nbytes_dense), 0xee), row_nbytes(m.nbytes_dense / m.desc.rows) {}
    int consume(const macko::macko_view & view, int64_t) override {
        macko::decode(view, dense.data() + view.rows().row_begin * row_nbytes);
        return GGML_MACKO_STATUS_OK;
    }
};

// Runs all checks of a load on a file in memory.
static int vet(const memory_source & source, macko::model_file * file) {
    if (const int status = macko::read_gguf_header(source, &file->header)) {
        return status;
    }
    if (const int status = macko::check_sparse_tensors(file)) {
        return status;
    }
    if (const int status = macko::check_model_keys(file->header)) {
        return status;
    }
    if (const int status = macko::check_model_tensors(macko::dense_tensors(*file))) {
        return status;
    }
    null_consumer consumer;
    for (const macko::sparse_tensor_info & m : file->sparse) {
        if (const int status = macko::read_payload(source, file->header, m, 1, consumer)) {
            return status;
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// ---- properties of an accepted file ----

// Decodes the index of a packed matrix, a bitmap or gap codes, bit by bit.
static bytes decode_packed(const bytes & values, const bytes & index, const bytes & row_ptr,
                           const macko::sparse_tensor_info & m) {
    const size_t nb = static_cast<size_t>(macko::value_nbytes(m.desc.type));
    bytes        dense(static_cast<size_t>(m.nbytes_dense), 0);
    size_t       k     = 0;
    const auto   store = [&](int64_t element) {
        uint8_t * out = &dense[static_cast<size_t>(element) * nb];
        if (m.value_type == m.desc.type) {
            memcpy(out, &values[k * nb], nb);
        } else {
            const auto     i = static_cast<int64_t>(k);
            const uint32_t v = nb == 4 ? macko::dense_at<uint32_t>(values.data(), m.value_type, i, m.desc.type)
                                         : macko::dense_at<uint16_t>(values.data(), m.value_type, i, m.desc.type);
            memcpy(out, &v, nb);
        }
        k++;
    };
    if (m.bits == 0) {
        const int64_t stride = (m.desc.cols + 7) / 8 * 8;
        for (int64_t i = 0; i < m.desc.rows * stride; i++) {
            if (index[static_cast<size_t>(i / 8)] >> (i % 8) & 1) {
                store(i / stride * m.desc.cols + i % stride);
            }
        }
        return dense;
    }
    size_t bit = 0;
    for (int64_t r = 0; r < m.desc.rows; r++) {
        int32_t ptr[2];
        memcpy(ptr, &row_ptr[static_cast<size_t>(r) * 4], sizeof(ptr));
        for (int64_t n = 0, col = -1; n < ptr[1] - ptr[0];) {
            int64_t code = 0;
            for (int32_t b = 0; b < m.bits; b++, bit++) {
                code |= (index[bit / 8] >> (bit % 8) & 1) << b;
            }
            const bool escape = code == (1 << m.bits) - 1;
            col += escape ? code : code + 1;
            if (!escape) {
                store(r * m.desc.cols + col);
                n++;
            }
        }
    }
    return dense;
}

static void check_matrix(const bytes & b, const macko::model_file & file, const macko::sparse_tensor_info & m) {
    auto component = [&](size_t i) {
        const macko::gguf_tensor & t = file.header.tensors[i];
        return bytes(b.begin() + t.offset, b.begin() + t.offset + t.nbytes);
    };
    const uint64_t nb   = static_cast<uint64_t>(macko::value_nbytes(m.desc.type)),
                   rows = static_cast<uint64_t>(m.desc.rows), cols = static_cast<uint64_t>(m.desc.cols);
    const uint32_t bits = static_cast<uint32_t>(m.desc.delta_bits);
    bytes          slow;
    if (m.format == &macko::packed_codec()) {
        slow = decode_packed(component(m.first), component(m.first + 1), component(m.first + 2), m);
    } else if (m.format == &macko::ec_csr_codec()) {
        slow = builder::decode_ec({ component(m.first),
                                    component(m.first + 1),
                                    component(m.first + 2),
                                    component(m.first + 3),
                                    component(m.first + 4),
                                    {},
                                    0 },
                                  nb, rows, cols, bits);
    } else {
        slow =
            builder::decode(component(m.first), component(m.first + 1), component(m.first + 2), nb, rows, cols, bits);
    }
    decoder fast(m);
    CHECK(macko::read_payload(memory_source(b), file.header, m, 1, fast) == GGML_MACKO_STATUS_OK, "%s",
          ggml_macko_last_error());
    CHECK(fast.dense == slow, "%s: decoded differently", m.name.c_str());
    if (!m.format->streams_rows()) {
        return; // test-ec-csr and test-packed check mutants of these formats
    }
    const builder::dense_matrix dense = { m.name, { cols, rows }, static_cast<uint32_t>(m.desc.type), slow };
    const builder::components   c     = builder::encode(dense, bits);
    CHECK(c.values == component(m.first) && c.deltas == component(m.first + 1) && c.row_ptr == component(m.first + 2) &&
              static_cast<int64_t>(c.nnz) == m.desc.nnz,
          "%s: accepted, but not canonical", m.name.c_str());
}

// The header of the dense stream must pass the checks of a header, and describe the right tensors.
static void check_virtual(const macko::model_file & file) {
    std::unique_ptr<macko::dense_stream> v;
    if (!file.is_sparse || macko::dense_stream::create(file, &v) != GGML_MACKO_STATUS_OK) {
        return;
    }
    const std::vector<macko::gguf_tensor> expected = macko::dense_tensors(file);
    // The mutant has no file descriptor, so that everything behind the header is read as zeros.
    struct header_source : macko::byte_source {
        const macko::dense_stream & file;
        int64_t                     header_size;
        header_source(const macko::dense_stream & f, int64_t n) : file(f), header_size(n) {}
        int64_t size() const override { return file.size(); }
        int     read(int64_t offset, void * dst, int64_t n) const override {
            const int64_t have = std::clamp<int64_t>(header_size - offset, 0, n);
            memset(static_cast<uint8_t *>(dst) + have, 0, static_cast<size_t>(n - have));
            return have > 0 ? file.read_at(offset, dst, have) : GGML_MACKO_STATUS_OK;
        }
    };
    int64_t data_size = 0;
    for (const macko::gguf_tensor & t : expected) {
        data_size = (data_size + t.nbytes + file.header.alignment - 1) & ~(file.header.alignment - 1);
    }
    macko::gguf_header dense;
    CHECK(macko::read_gguf_header(header_source(*v, v->size() - data_size), &dense) == GGML_MACKO_STATUS_OK,
          "virtual header: %s", ggml_macko_last_error());
    CHECK(dense.tensors.size() == expected.size(), "virtual header: %zu tensors vs %zu", dense.tensors.size(),
          expected.size());
    for (size_t i = 0; i < std::min(dense.tensors.size(), expected.size()); i++) {
        CHECK(dense.tensors[i].name == expected[i].name && dense.tensors[i].type == expected[i].type &&
                  std::equal(expected[i].ne, expected[i].ne + 4, dense.tensors[i].ne),
              "virtual header: tensor %zu", i);
    }
    for (const macko::gguf_key & key : dense.keys) {
        CHECK(key.name.compare(0, 13, "macko.tensor.") != 0 && key.name != "macko.version", "virtual header: %s",
              key.name.c_str());
    }
}

// ---- mutation ----

struct seed_file {
    builder::model model;
    builder::file  file;
    bytes          content;
    layout         where;
};

static seed_file make_seed(uint64_t n_embd, uint32_t n_layer, uint64_t seed, bool bpe, bool with_ec, bool with_packed) {
    seed_file s;
    s.model   = builder::tiny_llama(n_embd, n_layer, seed, bpe);
    s.file    = builder::sparse_file(s.model, with_ec, with_packed);
    s.content = builder::serialize(s.file, &s.where);
    return s;
}

static uint64_t odd_number(rng & r, uint64_t old) {
    static const uint64_t numbers[] = { 0,
                                        1,
                                        2,
                                        3,
                                        4,
                                        7,
                                        8,
                                        9,
                                        15,
                                        16,
                                        31,
                                        32,
                                        63,
                                        64,
                                        255,
                                        256,
                                        65535,
                                        65536,
                                        65537,
                                        0x7fffffff,
                                        0x80000000,
                                        0xffffffff,
                                        0x100000000,
                                        0x7fffffffffffffff,
                                        0x8000000000000000,
                                        0xffffffffffffffff,
                                        0x7f800000,
                                        0x7fc00000,
                                        0x3f800000,
                                        1 << 24,
                                        (1 << 24) + 1,
                                        uint64_t(1) << 34,
                                        uint64_t(1) << 62 };
    switch (r.range(0, 5)) {
        case 0:  return old + 1;
        case 1:  return old - 1;
        case 2:  return old + static_cast<uint64_t>(r.range(-64, 64));
        case 3:  return old ^ (uint64_t(1) << r.range(0, 63));
        default: return numbers[r.range(0, static_cast<int64_t>(std::size(numbers)) - 1)];
    }
}

static void mutate_number(rng & r, bytes * b, size_t at, size_t n) { // of n bytes, little-endian
    if (at + n > b->size()) {
        return;
    }
    uint64_t value = 0;
    memcpy(&value, b->data() + at, n);
    value = odd_number(r, value);
    memcpy(b->data() + at, &value, n);
}

static size_t pick(rng & r, size_t n) { return static_cast<size_t>(r.range(0, static_cast<int64_t>(n) - 1)); }

// Changes one field of the header in the bytes of the file.
static void mutate_field(rng & r, const layout & l, bytes * b) {
    switch (r.range(0, 9)) {
        case 0: mutate_number(r, b, 4, 4); break;
        case 1: mutate_number(r, b, l.n_tensors_at, 8); break;
        case 2: mutate_number(r, b, l.n_keys_at, 8); break;
        case 3: mutate_number(r, b, l.key_at[pick(r, l.key_at.size())], 8); break;
        case 4: mutate_number(r, b, l.tensor_at[pick(r, l.tensor_at.size())], 8); break;
        case 5: mutate_number(r, b, l.dims_at[pick(r, l.dims_at.size())], 4); break;
        case 6: mutate_number(r, b, l.dims_at[pick(r, l.dims_at.size())] + 4 + 8 * pick(r, 2), 8); break;
        case 7: mutate_number(r, b, l.offset_at[pick(r, l.offset_at.size())] - 4, 4); break;
        case 8: mutate_number(r, b, l.offset_at[pick(r, l.offset_at.size())], 8); break;
        case 9: (*b)[pick(r, l.table_end)] = static_cast<uint8_t>(r.bits()); break;
    }
}

// Changes one key or tensor before the file is written, so that lengths and offsets fit the change.
static void mutate_structure(rng & r, builder::file * f) {
    builder::key & k = f->keys[pick(r, f->keys.size())];
    switch (r.range(0, 11)) {
        case 0: f->keys.erase(f->keys.begin() + (&k - f->keys.data())); break;
        case 1: f->keys.push_back(k); break;
        case 2: std::swap(k, f->keys[pick(r, f->keys.size())]); break;
        case 3: k.type = static_cast<uint32_t>(r.range(0, 13)); break;
        case 4:
        case 5:
        case 6: // the value of a scalar, or an element of an array
            mutate_number(
                r, &k.value,
                k.type == builder::ARRAY && k.value.size() > 12 ? 12 + 4 * pick(r, (k.value.size() - 12) / 4 + 1) : 0,
                std::min<size_t>(k.value.size(), r.range(0, 1) ? 4 : 8));
            break;
        case 7:  std::swap(f->tensors[pick(r, f->tensors.size())], f->tensors[pick(r, f->tensors.size())]); break;
        case 8:  f->tensors.erase(f->tensors.begin() + static_cast<int64_t>(pick(r, f->tensors.size()))); break;
        case 9:  f->tensors[pick(r, f->tensors.size())].name = f->tensors[pick(r, f->tensors.size())].name; break;
        case 10: f->tensors[pick(r, f->tensors.size())].type = static_cast<uint32_t>(r.range(0, 43)); break;
        case 11: { // more or fewer bytes, with a shape that fits them
            builder::tensor & t = f->tensors[pick(r, f->tensors.size())];
            if (t.ne.size() == 1 && t.ne[0] > 8) {
                const size_t nb = t.data.size() / t.ne[0];
                t.ne[0] += r.range(0, 1) ? 8 : static_cast<uint64_t>(-8);
                t.data.resize(t.ne[0] * nb);
            }
            break;
        }
    }
}

// Changes the bytes of a component; half of these changes keep the matrix valid.
static void mutate_payload(rng & r, builder::file * f) {
    size_t i = pick(r, f->tensors.size());
    while (f->tensors[i].name.find(".values") == std::string::npos) {
        i = pick(r, f->tensors.size());
    }
    // For ec-csr, a number in any component is changed.
    if (i + 5 < f->tensors.size() && f->tensors[i + 2].name.find(".bases") != std::string::npos && r.range(0, 1)) {
        bytes &      data = f->tensors[i + pick(r, 6)].data;
        const size_t n    = data.size() % 4 ? 2 : size_t(2) << r.range(0, 1);
        mutate_number(r, &data, n * pick(r, data.size() / n), n);
        return;
    }
    bytes & values  = f->tensors[i].data;
    bytes & deltas  = f->tensors[i + 1].data;
    bytes & row_ptr = f->tensors[i + 2].data;
    // The size of a value counts as 1 where values are quantized.
    const size_t nb = std::max<size_t>(1, values.size() / std::max<uint64_t>(1, f->tensors[i].ne[0]));
    switch (r.range(0, 9)) {
        case 0: mutate_number(r, &row_ptr, 4 * pick(r, row_ptr.size() / 4), 4); break;
        case 1: { // an entry moves to a neighbouring row
            const size_t at = 4 * pick(r, row_ptr.size() / 4);
            int32_t      v;
            memcpy(&v, &row_ptr[at], 4);
            v += r.range(0, 1) ? 1 : -1;
            memcpy(&row_ptr[at], &v, 4);
            break;
        }
        case 2: deltas[pick(r, deltas.size())] = static_cast<uint8_t>(r.bits()); break;
        case 3: deltas[pick(r, deltas.size())] ^= static_cast<uint8_t>(1 << r.range(0, 7)); break;
        case 4: mutate_number(r, &values, nb * pick(r, values.size() / nb), nb); break;
        case 5: { // two values are exchanged
            const size_t x = nb * pick(r, values.size() / nb);
            const size_t y = nb * pick(r, values.size() / nb);
            if (x != y) {
                std::swap_ranges(&values[x], &values[x] + nb, &values[y]);
            }
            break;
        }
        default: { // another sign or mantissa; valid unless the entry was a filler
            const size_t at   = nb * pick(r, values.size() / nb);
            bool         zero = true;
            for (size_t j = 0; j < nb; j++) {
                zero = zero && values[at + j] == 0;
            }
            if (!zero) {
                values[at] ^= static_cast<uint8_t>(r.range(0, 127) & (values[at] > 1 ? 0x7e : 0));
                values[at + nb - 1] ^= static_cast<uint8_t>(r.range(0, 1) << 7);
            }
            break;
        }
    }
}

static void mutate_bytes(rng & r, bytes * b) {
    switch (r.range(0, 4)) {
        case 0: b->resize(pick(r, b->size())); break;
        case 1: b->insert(b->end(), pick(r, 100) + 1, static_cast<uint8_t>(r.bits())); break;
        case 2: {
            const size_t at = pick(r, b->size());
            b->erase(b->begin() + static_cast<int64_t>(at),
                     b->begin() + static_cast<int64_t>(std::min(b->size(), at + pick(r, 64) + 1)));
            break;
        }
        case 3: { // one region is copied over another
            const size_t n = pick(r, 64) + 1;
            if (b->size() > n) {
                const size_t from = pick(r, b->size() - n);
                const bytes piece(b->begin() + static_cast<int64_t>(from), b->begin() + static_cast<int64_t>(from + n));
                std::copy(piece.begin(), piece.end(), b->begin() + static_cast<int64_t>(pick(r, b->size() - n)));
            }
            break;
        }
        case 4: (*b)[pick(r, b->size())] ^= static_cast<uint8_t>(1 << r.range(0, 7)); break;
    }
}

static bytes make_mutant(rng & r, const seed_file & s) {
    const int64_t kind = r.range(0, 99);
    if (kind < 20) { // fields of the header are changed in the bytes of the file
        bytes b = s.content;
        for (int64_t n = r.range(1, 2); n > 0; n--) {
            mutate_field(r, s.where, &b);
        }
        return b;
    }
    if (kind < 28) {
        bytes b = s.content;
        mutate_bytes(r, &b);
        return b;
    }
    builder::file f = s.file;
    for (int64_t n = r.range(1, 3); n > 0; n--) {
        kind < 55 ? mutate_structure(r, &f) : mutate_payload(r, &f);
    }
    return builder::serialize(f);
}

// ---- the file system: split models, and weights that are compressed on load ----

// Splits a model like llama-gguf-split: the metadata is in the first part, and the tensors are distributed in order.
static std::vector<builder::file> split(const builder::file & f, size_t n) {
    std::vector<builder::file> parts(n);
    for (size_t i = 0; i < n; i++) {
        const auto cut = [&](size_t k) { return f.tensors.begin() + static_cast<int64_t>(f.tensors.size() * k / n); };
        parts[i].keys  = i == 0 ? f.keys : std::vector<builder::key>();
        parts[i].set(builder::scalar<uint16_t>("split.no", builder::U16, static_cast<uint16_t>(i)));
        parts[i].set(builder::scalar<uint16_t>("split.count", builder::U16, static_cast<uint16_t>(n)));
        parts[i].set(
            builder::scalar<int32_t>("split.tensors.count", builder::I32, static_cast<int32_t>(f.tensors.size())));
        parts[i].tensors.assign(cut(i), cut(i + 1));
    }
    return parts;
}

// A model in several files. A value of one tensor is changed before the model is split, or one part is mutated like in
// make_mutant.
static std::vector<bytes> mutate_parts(rng & r, builder::file whole, bool dense, size_t n) {
    const int64_t kind = r.range(0, 9);
    if (kind >= 5 && dense) {
        bytes & data = whole.tensors[pick(r, whole.tensors.size())].data;
        mutate_number(r, &data, 2 * pick(r, data.size() / 2), 2);
    } else if (kind >= 5) {
        mutate_payload(r, &whole);
    }
    std::vector<builder::file> parts  = split(whole, n);
    const size_t               chosen = pick(r, n);
    if (kind < 3) {
        mutate_structure(r, &parts[chosen]);
    }
    std::vector<bytes> out;
    for (size_t i = 0; i < n; i++) {
        layout where;
        out.push_back(builder::serialize(parts[i], &where));
        if (i == chosen && kind == 3) {
            mutate_field(r, where, &out[i]);
        } else if (i == chosen && kind == 4) {
            mutate_bytes(r, &out[i]);
        }
    }
    return out;
}

// A directory with the parts of one model.
struct folder {
    std::string path    = "/tmp/fuzz-model-file.XXXXXX";
    size_t      n_parts = 0;
    folder() {
        if (mkdtemp(path.data()) == nullptr) {
            perror("mkdtemp");
            exit(1);
        }
    }
    ~folder() {
        write({});
        rmdir(path.c_str());
    }
    std::string part(size_t i, size_t n) const {
        char name[64];
        snprintf(name, sizeof(name), "/m-%05zu-of-%05zu.gguf", i + 1, n);
        return path + name;
    }
    void write(const std::vector<bytes> & parts) { // replaces the files by new ones
        for (size_t i = 0; i < n_parts; i++) {
            unlink(part(i, n_parts).c_str());
        }
        n_parts = parts.size();
        for (size_t i = 0; i < n_parts; i++) {
            std::ofstream(part(i, n_parts), std::ios::binary)
                .write(reinterpret_cast<const char *>(parts[i].data()), static_cast<std::streamsize>(parts[i].size()));
        }
    }
};

static void check_opened(const std::vector<bytes> & parts, const macko::model_file & file, macko::compression how) {
    bytes all; // all parts in one array, because offsets go on from one part to the next
    for (const bytes & part : parts) {
        all.insert(all.end(), part.begin(), part.end());
    }
    for (const macko::sparse_tensor_info & m : file.sparse) {
        null_consumer consumer;
        const bool    compressed = m.is_encoded_on_load();
        if (macko::read_payload(file, m, 1, consumer) != GGML_MACKO_STATUS_OK) {
            CHECK(!compressed, "%s", ggml_macko_last_error());
        } else if (!compressed) {
            check_matrix(all, file, m);
        } else {
            decoder dense(m);
            CHECK(macko::read_payload(file, m, 1, dense) == GGML_MACKO_STATUS_OK, "%s", ggml_macko_last_error());
            const auto source = all.begin() + file.header.tensors[m.first].offset;
            bytes      want(source, source + static_cast<int64_t>(dense.dense.size()));
            if (how == macko::compression::on) {
                macko::drop_negative_zeros(want.data(), m.desc.type, m.desc.rows * m.desc.cols, 1);
            }
            CHECK(std::equal(want.begin(), want.end(), dense.dense.begin(), dense.dense.end()),
                  "%s: compressed to something else", m.name.c_str());
        }
    }
}

static void fuzz_opened(uint64_t seed, int64_t n, macko::compression how) {
    const bool      compress = how != macko::compression::off;
    rng             r(seed);
    const seed_file base = make_seed(16, 1, seed, true, seed % 2 == 1, seed % 4 >= 2);
    folder          dir;
    int64_t         n_accepted = 0, n_matrices = 0;
    for (int64_t i = 0; i < n; i++) {
        const std::vector<bytes> parts = mutate_parts(r, compress ? base.model.dense : base.file, compress,
                                                      static_cast<size_t>(r.range(compress ? 1 : 2, 3)));
        dir.write(parts);
        std::unique_ptr<macko::model_file> file;
        const int status = macko::model_file_open_sparse(dir.part(0, parts.size()).c_str(), how, &file);
        CHECK(strcmp(ggml_macko_status_name(status), "unknown") != 0 && status != GGML_MACKO_STATUS_BAD_ARGUMENT,
              "seed %llu, parts %lld: status %d: %s", static_cast<unsigned long long>(seed), static_cast<long long>(i),
              status, ggml_macko_last_error());
        if (status == GGML_MACKO_STATUS_OK) {
            check_opened(parts, *file, how);
            n_accepted++;
            n_matrices += static_cast<int64_t>(file->sparse.size());
        }
    }
    printf("%lld mutants of %s, %lld accepted\n", static_cast<long long>(n),
           compress ? "dense models, compressed" : "split models", static_cast<long long>(n_accepted));
    CHECK(n < 200 || (n_accepted > n / 20 && n_accepted < n * 9 / 10 && n_matrices > 0),
          "%lld of %lld accepted: one side is hardly tested", static_cast<long long>(n_accepted),
          static_cast<long long>(n));
}

// ---- main loop ----

int main(int argc, char ** argv) {
    const int64_t         n_mutants = argc > 1 ? atoll(argv[1]) : 200000;
    std::vector<uint64_t> seeds;
    for (int i = 2; i < argc; i++) {
        seeds.push_back(strtoull(argv[i], nullptr, 10));
    }
    if (seeds.empty()) {
        seeds = { 1, 2, 3, 4, 5, 6, 7, 8, static_cast<uint64_t>(time(nullptr) / 86400) };
    }
    printf("seeds:");
    for (uint64_t seed : seeds) {
        printf(" %llu", static_cast<unsigned long long>(seed));
    }
    printf("\n");

    std::map<int, int64_t> statuses;
    int64_t                mem_worst = 0;
    double                 slowest   = 0;
    const auto             start     = std::chrono::steady_clock::now();
    int64_t                n_done    = 0;
    for (size_t s = 0; s < seeds.size(); s++) {
        rng r(seeds[s]);
        // two thirds have the small vocabulary, which is faster
        const seed_file base = make_seed(s % 4 == 3 ? 32 : 16, 1 + s % 2, seeds[s], s % 3 != 2, s % 2 == 1, s % 4 >= 2);
        const int64_t   n    = n_mutants / static_cast<int64_t>(seeds.size()) +
                          (s == 0 ? n_mutants % static_cast<int64_t>(seeds.size()) : 0);
        for (int64_t i = 0; i < n; i++) {
            const bytes   b          = make_mutant(r, base);
            const int64_t live       = mem_live;
            mem_peak                 = live;
            const clock_t     before = clock(); // CPU time, so that a busy machine does not look like an endless loop
            macko::model_file file;
            const int         status  = vet(memory_source(b), &file);
            const double      seconds = static_cast<double>(clock() - before) / CLOCKS_PER_SEC;
            const int64_t     used    = mem_peak - live;
            mem_worst                 = std::max(mem_worst, used);
            slowest                   = std::max(slowest, seconds);
            CHECK(used < MEM_PER_BYTE * static_cast<int64_t>(b.size()) + MEM_CONSTANT,
                  "seed %llu, mutant %lld: %lld bytes of memory for a file of %zu",
                  static_cast<unsigned long long>(seeds[s]), static_cast<long long>(i), static_cast<long long>(used),
                  b.size());
            CHECK(seconds < 1, "seed %llu, mutant %lld: %.1f s", static_cast<unsigned long long>(seeds[s]),
                  static_cast<long long>(i), seconds);
            CHECK(strcmp(ggml_macko_status_name(status), "unknown") != 0 && status != GGML_MACKO_STATUS_BAD_ARGUMENT,
                  "seed %llu, mutant %lld: status %d: %s", static_cast<unsigned long long>(seeds[s]),
                  static_cast<long long>(i), status, ggml_macko_last_error());
            statuses[status]++;
            if (status == GGML_MACKO_STATUS_OK) {
                for (const macko::sparse_tensor_info & m : file.sparse) {
                    check_matrix(b, file, m);
                }
                check_virtual(file);
            }
            n_done++;
        }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const auto & [status, n] : statuses) {
        printf("%10lld  %s\n", static_cast<long long>(n), ggml_macko_status_name(status));
    }
    const double accepted =
        static_cast<double>(statuses[GGML_MACKO_STATUS_OK]) / static_cast<double>(std::max<int64_t>(1, n_done));
    printf("%lld mutants, %.0f/s, %.1f %% accepted, at most %.1f KiB of memory and %.1f ms for one\n",
           static_cast<long long>(n_done), static_cast<double>(n_done) / seconds, 100 * accepted,
           static_cast<double>(mem_worst) / 1024, 1000 * slowest);
    CHECK(n_done < 10000 || (accepted > 0.05 && accepted < 0.5), "%.3f accepted: one side is hardly tested", accepted);
    for (const uint64_t seed : seeds) {
        for (const auto how : { macko::compression::off, macko::compression::on, macko::compression::bit_exact }) {
            fuzz_opened(seed, n_mutants / 40 / static_cast<int64_t>(seeds.size()), how);
        }
    }
    return test_summary("fuzz-model-file");
}
