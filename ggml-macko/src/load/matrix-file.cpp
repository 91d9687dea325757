#include "load/matrix-file.h"
#include "codec/registry.h"
#include "gguf/append.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>

namespace macko {

namespace {

constexpr int64_t ALIGNMENT = 32; // default alignment of a GGUF

int64_t aligned(int64_t n) { return (n + ALIGNMENT - 1) & ~(ALIGNMENT - 1); }

void append_key(std::vector<uint8_t> * out, std::string_view name, gguf_type type) {
    gguf_append(out, name);
    gguf_append<uint32_t>(out, type);
}

void append_array_key(std::vector<uint8_t> * out, std::string_view name, gguf_type type, uint64_t n) {
    append_key(out, name, GGUF_ARRAY);
    gguf_append<uint32_t>(out, type);
    gguf_append<uint64_t>(out, n);
}

void append_keys(std::vector<uint8_t> * out, const sparse_tensor_info & m) {
    append_key(out, "macko.version", GGUF_U32);
    gguf_append(out, static_cast<uint32_t>(FORMAT_VERSION));
    append_array_key(out, "macko.tensor.name", GGUF_STRING, 1);
    gguf_append(out, std::string_view(m.name));
    append_array_key(out, "macko.tensor.format", GGUF_STRING, 1);
    gguf_append(out, std::string_view(m.format->name()));
    append_array_key(out, "macko.tensor.type", GGUF_U32, 1);
    gguf_append(out, static_cast<uint32_t>(m.desc.type));
    append_array_key(out, "macko.tensor.ne", GGUF_U64, MAX_DIMS);
    for (const int64_t ne : m.ne) {
        gguf_append(out, static_cast<uint64_t>(ne));
    }
    append_array_key(out, "macko.tensor.index_bits", GGUF_U32, 1);
    gguf_append(out, static_cast<uint32_t>(m.index_bits));
    append_array_key(out, "macko.tensor.nnz", GGUF_U64, 1);
    gguf_append(out, static_cast<uint64_t>(m.desc.nnz));
}
constexpr uint64_t N_KEYS = 7;

// A new header, then the components, which are read from the model.
struct matrix_of_model : model_file {
    struct range {
        int64_t begin, source, n; // source: offset in the model
    };
    const model_file &   of;
    std::vector<uint8_t> head; // up to the data section
    std::vector<range>   components;

    explicit matrix_of_model(const model_file & model) : of(model) {}

    int64_t size() const override { return components.back().begin + components.back().n; }

    int read(int64_t offset, void * dst, int64_t n) const override {
        if (offset < 0 || n < 0 || offset > size() - n) {
            return fail(GGML_MACKO_STATUS_TRUNCATED, "reading past the end");
        }
        auto *     out  = static_cast<uint8_t *>(dst);
        const auto part = [&](int64_t begin, int64_t end) { // the part of [begin, end) that was requested
            return std::pair<int64_t, int64_t>(std::max(offset, begin), std::min(offset + n, end));
        };
        memset(out, 0, static_cast<size_t>(n)); // padding between the components
        const auto [first, last] = part(0, static_cast<int64_t>(head.size()));
        if (first < last) {
            memcpy(out + (first - offset), head.data() + first, static_cast<size_t>(last - first));
        }
        for (const range & c : components) {
            const auto [from, to] = part(c.begin, c.begin + c.n);
            if (from < to) {
                TRY(of.read(c.source + (from - c.begin), out + (from - offset), to - from));
            }
        }
        return GGML_MACKO_STATUS_OK;
    }
};

} // namespace

int make_matrix_file(const model_file & of, const sparse_tensor_info & matrix, std::unique_ptr<model_file> * out) {
    if (matrix.is_encoded_on_load()) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s is not sparse on file", matrix.name.c_str());
    }
    auto                   file = std::make_unique<matrix_of_model>(of);
    std::vector<uint8_t> & head = file->head;
    gguf_append(&head, std::array<char, 4>{ 'G', 'G', 'U', 'F' });
    gguf_append<uint32_t>(&head, 3);
    gguf_append<uint64_t>(&head, matrix.n_tensors);
    gguf_append<uint64_t>(&head, N_KEYS);
    append_keys(&head, matrix);
    int64_t offset = 0; // offset in the data section
    for (size_t c = 0; c < matrix.n_tensors; c++) {
        const gguf_tensor & t = of.header.tensors[matrix.first + c];
        gguf_append(&head, std::string_view(t.name));
        gguf_append(&head, static_cast<uint32_t>(t.n_dims));
        for (int d = 0; d < t.n_dims; d++) {
            gguf_append(&head, t.ne[d]);
        }
        gguf_append(&head, t.type);
        gguf_append(&head, offset);
        file->components.push_back({ offset, t.offset, t.nbytes });
        offset = aligned(offset + t.nbytes);
    }
    head.resize(static_cast<size_t>(aligned(static_cast<int64_t>(head.size()))));
    for (auto & c : file->components) {
        c.begin += static_cast<int64_t>(head.size());
    }
    TRY(check_matrix_file(file.get()));
    *out = std::move(file);
    return GGML_MACKO_STATUS_OK;
}

int check_matrix_file(model_file * file) {
    TRY(read_gguf_header(*file, &file->header));
    TRY(check_sparse_tensors(file));
    if (file->sparse.size() != 1 || file->header.tensors.size() != file->sparse[0].n_tensors ||
        file->header.keys.size() != N_KEYS) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "not one sparse matrix alone (%zu of them, %zu tensors, %zu keys)",
                    file->sparse.size(), file->header.tensors.size(), file->header.keys.size());
    }
    return GGML_MACKO_STATUS_OK;
}

void received_file::append(const void * data, size_t n) {
    chunk p = { size_, std::vector<uint8_t>(n) };
    if (n > 0) {
        memcpy(p.bytes.data(), data, n);
        chunks_.push_back(std::move(p));
        size_ += static_cast<int64_t>(n);
    }
}

int received_file::read(int64_t offset, void * dst, int64_t n) const {
    if (offset < 0 || n < 0 || offset > size_ - n) {
        return fail(GGML_MACKO_STATUS_TRUNCATED,
                    "reading past the end (%" PRId64 " bytes from %" PRId64 " of %" PRId64 ")", n, offset, size_);
    }
    auto * out  = static_cast<uint8_t *>(dst);
    auto   next = std::upper_bound(chunks_.begin(), chunks_.end(), offset,
                                   [](int64_t at, const chunk & p) { return at < p.begin; });
    while (n > 0) {
        const chunk & p    = *(next++ - 1); // the last chunk that begins at or before offset
        const int64_t skip = offset - p.begin;
        const int64_t part = std::min(n, static_cast<int64_t>(p.bytes.size()) - skip);
        memcpy(out, p.bytes.data() + skip, static_cast<size_t>(part));
        out += part;
        offset += part;
        n -= part;
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
