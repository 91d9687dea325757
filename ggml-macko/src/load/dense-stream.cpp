// The dense GGUF file as a list of segments: a header derived from the sparse file's, ranges of the sparse file, two
// segments per sparse tensor, and zeros.
#include "load/dense-stream.h"
#include "codec/team.h"
#include "gguf/append.h"
#include "load/payload.h"
#include "platform/platform.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <mutex>
#include <new>

namespace macko {

static_assert(sizeof(tensor_placeholder) == 24, "the placeholder is copied byte for byte");

namespace {

// Size of stdio's buffer. stdio reads a stream in chunks of this size, whatever size fread is called with. A chunk is
// large enough to keep all threads busy.
constexpr size_t  STREAM_NBYTES = 4 << 20;
constexpr int64_t FEW_ZEROS     = 4096;

// SEGMENT_UNREAD is the rest of a sparse tensor, after its placeholder. Without a claim, both segments are dense
// elements.
enum segment_kind { SEGMENT_HEADER, SEGMENT_FILE, SEGMENT_PLACEHOLDER, SEGMENT_UNREAD, SEGMENT_ZERO };

struct segment {
    int64_t      begin; // offset in the dense stream; a segment ends where the next one begins
    segment_kind kind;
    int64_t      source; // offset in the header or in the sparse file, or the index of the matrix
};

bool is_of_matrix(const segment & s) { return s.kind == SEGMENT_PLACEHOLDER || s.kind == SEGMENT_UNREAD; }

// writes the dense elements of a matrix
struct dense_consumer : payload_consumer {
    uint8_t * dense;
    int64_t   nbytes_row;
    int       n_threads;

    dense_consumer(const macko_desc & desc, uint8_t * elements)
        : dense(elements),
          nbytes_row(desc.cols * value_nbytes(desc.type)),
          n_threads(threads_for(0, desc.rows * desc.cols)) {}
    int consume(const macko_view & view, int64_t) override {
        decode(view, dense + view.rows().row_begin * nbytes_row);
        return GGML_MACKO_STATUS_OK;
    }
    bool takes(const codec &) const override { return true; }
    int  consume_matrix(const codec_view & view) override { return view.decode(dense, n_threads); }
};

} // namespace

struct dense_stream::impl {
    const model_file &   file;
    std::vector<uint8_t> header;
    std::vector<segment> segments; // in ascending order; the first one begins at 0
    int64_t              size      = 0;
    uint8_t              nonce[16] = {};

    std::vector<std::unique_ptr<char[]>> stream_buffers; // buffers for stdio, one per stream

    std::vector<bool>          claimed, was_decoded; // by index into file.sparse
    bool                       sparse_only = false;
    std::mutex                 decoded_mutex;      // guards the next two members
    int64_t                    decoded_index = -1; // the matrix that `decoded` holds, or -1
    std::unique_ptr<uint8_t[]> decoded;

    std::mutex  error_mutex;
    int         error_status = GGML_MACKO_STATUS_OK;
    std::string error_text;

    explicit impl(const model_file & f) : file(f), claimed(f.sparse.size()), was_decoded(f.sparse.size()) {}

    void append(segment_kind kind, int64_t source, int64_t n) {
        if (n > 0) {
            segments.push_back({ size, kind, source });
            size += n;
        }
    }
    // The segment that contains offset. There always is one, because the first segment begins at 0.
    std::vector<segment>::const_iterator find(int64_t offset) const {
        return std::upper_bound(segments.begin(), segments.end(), offset,
                                [](int64_t at, const segment & s) { return at < s.begin; }) -
               1;
    }
    int64_t end(std::vector<segment>::const_iterator s) const {
        return s + 1 == segments.end() ? size : (s + 1)->begin;
    }
    bool is_placeholder(const segment & s) const { return is_of_matrix(s) && claimed[static_cast<size_t>(s.source)]; }
    int  read_segment(const segment & s, int64_t skip, uint8_t * dst, int64_t n);
    int  read_elements(int64_t index, int64_t offset, uint8_t * dst, int64_t n);
    void record_error(int status) noexcept;
};

// ---- building ----

// Whether a key describes how the file stores the model; the dense file must not contain such a key.
static bool describes_storage(const std::string & key, bool split) {
    return key == "macko.version" || key.compare(0, 13, "macko.tensor.") == 0 ||
           (split && key.compare(0, 6, "split.") == 0);
}

// The header of the dense file (FORMAT.md, end of section 2). offsets: of the tensors in the data section.
static std::vector<uint8_t> dense_header(const model_file & file, const std::vector<gguf_tensor> & tensors,
                                         const std::vector<int64_t> & offsets) {
    const gguf_header &  h = file.header;
    std::vector<uint8_t> out(h.bytes.begin(), h.bytes.begin() + 8); // magic and version
    out.reserve(h.bytes.size() + static_cast<size_t>(h.alignment));
    gguf_append<uint64_t>(&out, tensors.size());
    const size_t n_keys_at = out.size();
    gguf_append<uint64_t>(&out, 0);
    uint64_t n_keys = 0;
    for (const gguf_key & key : h.keys) {
        if (!describes_storage(key.name, file.shards.size() > 1)) {
            out.insert(out.end(), h.bytes.begin() + static_cast<int64_t>(key.begin),
                       h.bytes.begin() + static_cast<int64_t>(key.end));
            n_keys++;
        }
    }
    memcpy(out.data() + n_keys_at, &n_keys, sizeof(n_keys));
    for (size_t i = 0; i < tensors.size(); i++) {
        const gguf_tensor & t = tensors[i];
        gguf_append(&out, std::string_view(t.name));
        gguf_append<uint32_t>(&out, static_cast<uint32_t>(t.n_dims));
        for (int d = 0; d < t.n_dims; d++) {
            gguf_append<int64_t>(&out, t.ne[d]);
        }
        gguf_append<int32_t>(&out, t.type);
        gguf_append<int64_t>(&out, offsets[i]);
    }
    out.resize((out.size() + static_cast<size_t>(h.alignment) - 1) & ~(static_cast<size_t>(h.alignment) - 1));
    return out;
}

dense_stream::dense_stream(std::unique_ptr<impl> p) : impl_(std::move(p)) {}
dense_stream::~dense_stream() = default;

int dense_stream::create(const model_file & file, std::unique_ptr<dense_stream> * out) {
    if (!file.is_sparse) {
        return fail(GGML_MACKO_STATUS_NOT_SPARSE, "%s: not a sparse GGUF (no key macko.version)", file.path.c_str());
    }
    for (const sparse_tensor_info & m : file.sparse) {
        if (m.nbytes_dense < static_cast<int64_t>(sizeof(tensor_placeholder))) {
            return fail(GGML_MACKO_STATUS_BAD_SHAPE,
                        "%s: %s is too small to be loaded as a sparse tensor (%" PRId64 " vs %zu bytes)",
                        file.path.c_str(), m.name.c_str(), m.nbytes_dense, sizeof(tensor_placeholder));
        }
    }
    auto p = std::make_unique<impl>(file);
    if (!platform::random_bytes(p->nonce, sizeof(p->nonce))) {
        return fail(GGML_MACKO_STATUS_IO, "no random bytes: %s", strerror(errno));
    }

    const int64_t                  alignment = file.header.alignment;
    const std::vector<gguf_tensor> tensors   = dense_tensors(file);
    std::vector<int64_t>           offsets;
    int64_t                        offset = 0; // cannot overflow, because check_dense_size has checked the sum
    for (const gguf_tensor & t : tensors) {
        offsets.push_back(offset);
        offset = (offset + t.nbytes + alignment - 1) & ~(alignment - 1);
    }
    p->header = dense_header(file, tensors, offsets);
    p->append(SEGMENT_HEADER, 0, static_cast<int64_t>(p->header.size()));
    size_t at = 0; // index in the tensor table of the sparse file
    for (const gguf_tensor & t : tensors) {
        const int64_t index = file.tensor_sparse_index[at];
        if (index >= 0) {
            p->append(SEGMENT_PLACEHOLDER, index, sizeof(tensor_placeholder));
            p->append(SEGMENT_UNREAD, index, t.nbytes - static_cast<int64_t>(sizeof(tensor_placeholder)));
        } else {
            p->append(SEGMENT_FILE, file.header.tensors[at].offset, t.nbytes);
        }
        at += index >= 0 ? file.sparse[static_cast<size_t>(index)].n_tensors : 1;
        p->append(SEGMENT_ZERO, 0, ((p->size + alignment - 1) & ~(alignment - 1)) - p->size);
    }
    out->reset(new dense_stream(std::move(p)));
    return GGML_MACKO_STATUS_OK;
}

// ---- reading ----

void dense_stream::claim(int64_t index) { impl_->claimed[static_cast<size_t>(index)] = true; }

bool dense_stream::is_claimed(int64_t index) const { return impl_->claimed[static_cast<size_t>(index)]; }

void dense_stream::refuse_unclaimed() { impl_->sparse_only = true; }

dense_stream::dense_reads dense_stream::decoded() const {
    dense_reads sum = {};
    for (size_t i = 0; i < impl_->was_decoded.size(); i++) {
        if (!impl_->was_decoded[i]) {
            continue;
        }
        const sparse_tensor_info & m = impl_->file.sparse[i];
        sum.n++;
        sum.nbytes_dense += m.nbytes_dense;
        for (size_t c = 0; c < m.n_tensors; c++) {
            sum.nbytes_stored += impl_->file.header.tensors[m.first + c].nbytes;
        }
    }
    return sum;
}

// Reads n bytes of the dense elements of an unclaimed matrix, from offset on. The decoded elements stay in memory until
// the last one has been read, or another matrix is read.
int dense_stream::impl::read_elements(int64_t index, int64_t offset, uint8_t * dst, int64_t n) {
    const sparse_tensor_info & m = file.sparse[static_cast<size_t>(index)];
    if (sparse_only) {
        return fail(GGML_MACKO_STATUS_LOAD_FAILED,
                    "%s: sparse, but llama.cpp did not place it on a device of this plugin (with another GPU backend, "
                    "select this plugin's device: -dev MACKO0, or -ngl 0)",
                    m.name.c_str());
    }
    const std::lock_guard<std::mutex> lock(decoded_mutex);
    if (decoded_index != index) {
        decoded_index = -1;
        decoded.reset(); // frees its memory before the next matrix is decoded
        decoded.reset(new uint8_t[static_cast<size_t>(m.nbytes_dense)]);
        dense_consumer consumer(m.desc, decoded.get());
        TRY(read_payload(file, file.header, m, 0, consumer));
        decoded_index                           = index;
        was_decoded[static_cast<size_t>(index)] = true;
    }
    memcpy(dst, decoded.get() + offset, static_cast<size_t>(n));
    if (offset + n == m.nbytes_dense) {
        decoded_index = -1;
        decoded.reset();
    }
    return GGML_MACKO_STATUS_OK;
}

int dense_stream::impl::read_segment(const segment & s, int64_t skip, uint8_t * dst, int64_t n) {
    if (is_of_matrix(s) && !is_placeholder(s)) {
        const int64_t before = s.kind == SEGMENT_UNREAD ? static_cast<int64_t>(sizeof(tensor_placeholder)) : 0;
        return read_elements(s.source, before + skip, dst, n);
    }
    switch (s.kind) {
        case SEGMENT_HEADER:
            memcpy(dst, header.data() + s.source + skip, static_cast<size_t>(n));
            return GGML_MACKO_STATUS_OK;
        case SEGMENT_FILE:        return read_by_all(file, s.source + skip, dst, n, default_threads());
        case SEGMENT_PLACEHOLDER: {
            tensor_placeholder placeholder;
            memcpy(placeholder.nonce, nonce, sizeof(nonce));
            placeholder.index = static_cast<uint64_t>(s.source);
            memcpy(dst, reinterpret_cast<const uint8_t *>(&placeholder) + skip, static_cast<size_t>(n));
            return GGML_MACKO_STATUS_OK;
        }
        case SEGMENT_UNREAD:
        case SEGMENT_ZERO:   memset(dst, 0, static_cast<size_t>(n)); return GGML_MACKO_STATUS_OK;
    }
    return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "unknown segment");
}

int dense_stream::read_at(int64_t offset, void * dst, int64_t n) const {
    if (offset < 0 || n < 0 || offset > impl_->size || n > impl_->size - offset) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "read of %" PRId64 " bytes at %" PRId64 " in a file of %" PRId64, n,
                    offset, impl_->size);
    }
    uint8_t * out = static_cast<uint8_t *>(dst);
    for (auto it = impl_->find(offset); n > 0; ++it) {
        const int64_t len = std::min(n, impl_->end(it) - offset);
        if (const int status = impl_->read_segment(*it, offset - it->begin, out, len)) {
            prefix_error(impl_->file.path.c_str());
            return status;
        }
        out += len;
        offset += len;
        n -= len;
    }
    return GGML_MACKO_STATUS_OK;
}

int64_t dense_stream::reported_offset(int64_t offset) const {
    const auto s = impl_->find(offset);
    if (!impl_->is_placeholder(*s)) {
        return offset;
    }
    return s->kind == SEGMENT_UNREAD ? impl_->size : impl_->size - (impl_->end(s) - offset);
}

int64_t dense_stream::contiguous_bytes(int64_t offset, int64_t n) const {
    auto       s       = impl_->find(offset);
    const bool claimed = impl_->is_placeholder(*s);
    if (claimed && s->kind == SEGMENT_UNREAD) {
        return std::min(n, FEW_ZEROS);
    }
    for (++s; s != impl_->segments.cend() && s->begin < offset + n; ++s) {
        if (s->kind == SEGMENT_PLACEHOLDER || (s->kind == SEGMENT_UNREAD && claimed)) {
            return s->begin - offset;
        }
    }
    return n;
}

int64_t dense_stream::size() const { return impl_->size; }

int64_t dense_stream::match_placeholder(const void * data, size_t n) const {
    tensor_placeholder placeholder;
    if (data == nullptr || n < sizeof(placeholder)) {
        return -1;
    }
    memcpy(&placeholder, data, sizeof(placeholder));
    if (memcmp(placeholder.nonce, impl_->nonce, sizeof(placeholder.nonce)) != 0 ||
        placeholder.index >= impl_->file.sparse.size()) {
        return -1;
    }
    return static_cast<int64_t>(placeholder.index);
}

void dense_stream::impl::record_error(int status) noexcept {
    const std::lock_guard<std::mutex> lock(error_mutex);
    if (error_status != GGML_MACKO_STATUS_OK) {
        return;
    }
    error_status = status;
    try {
        error_text = ggml_macko_last_error();
    } catch (const std::bad_alloc &) {
        error_text.clear();
    }
}

int dense_stream::status() const {
    const std::lock_guard<std::mutex> lock(impl_->error_mutex);
    return impl_->error_status == GGML_MACKO_STATUS_OK ? GGML_MACKO_STATUS_OK
                                                       : fail(impl_->error_status, "%s", impl_->error_text.c_str());
}

// ---- the stdio stream ----

namespace {

struct cookie {
    const dense_stream * file;
    int64_t              pos;
    void (*record_error)(const dense_stream * file, int status);
};

} // namespace

static int64_t stream_read(void * c, char * buffer, size_t n) noexcept {
    cookie *      k   = static_cast<cookie *>(c);
    const int64_t len = k->file->contiguous_bytes(
        k->pos, std::min<int64_t>(static_cast<int64_t>(std::min<size_t>(n, INT64_MAX)), k->file->size() - k->pos));
    // stdio, which calls this function, is C: no exception may pass through it
    if (const int status = c_boundary([&] { return k->file->read_at(k->pos, buffer, len); })) {
        k->record_error(k->file, status);
        errno = EIO;
        return -1;
    }
    k->pos += len;
    return len;
}

static int stream_seek(void * c, int64_t * offset, int whence) noexcept {
    cookie * k = static_cast<cookie *>(c);
    if (whence == SEEK_CUR && *offset == 0) {
        *offset = k->file->reported_offset(k->pos);
        return 0;
    }
    const int64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? k->pos : k->file->size();
    int64_t       to   = 0;
    if (!checked_add(base, *offset, &to) || to < 0 || to > k->file->size()) {
        errno = EINVAL;
        return -1;
    }
    k->pos  = to;
    *offset = to;
    return 0;
}

static int stream_close(void * c) noexcept {
    delete static_cast<cookie *>(c);
    return 0;
}

FILE * dense_stream::open_stream() {
    auto k = std::make_unique<cookie>(
        cookie{ this, 0, [](const dense_stream * file, int status) { file->impl_->record_error(status); } });
    std::unique_ptr<char[]> memory(new (std::nothrow) char[STREAM_NBYTES]);
    char *                  buffer = memory.get();
    impl_->stream_buffers.push_back(std::move(memory));
    FILE * stream = platform::open_stream(k.get(), { stream_read, stream_seek, stream_close });
    if (stream == nullptr) {
        (void)fail(GGML_MACKO_STATUS_IO, "no stream: %s", strerror(errno));
        return nullptr;
    }
    k.release();  // stream_close deletes it from now on
    if (buffer) { // without a buffer of our own, stdio reads smaller chunks
        setvbuf(stream, buffer, _IOFBF, STREAM_NBYTES);
    }
    return stream;
}

} // namespace macko
