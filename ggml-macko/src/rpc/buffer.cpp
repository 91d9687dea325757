#include "rpc/buffer.h"
#include "backend/log.h"
#include "platform/platform.h"
#include "rpc/message.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <map>

namespace macko {

namespace {

// A sparse weight that is arriving or complete.
struct incoming : rpc_place {
    size_t                         nbytes = 1; // its addresses; known when the weight is complete
    std::unique_ptr<received_file> file;       // nullptr when the weight is complete, and after an error
    uint64_t                       total  = 0;
    rpc_result                     result = {};
};

struct buffer_context {
    std::unique_ptr<rpc_memory>   memory;
    size_t                        nbytes;
    std::map<uintptr_t, incoming> weights; // by address

    uintptr_t base() const { return reinterpret_cast<uintptr_t>(memory->base()); }

    // the first weight that overlaps n bytes at an address, or weights.end()
    std::map<uintptr_t, incoming>::iterator find(uintptr_t at, size_t n) {
        auto it = weights.upper_bound(at);
        if (it != weights.begin() && std::prev(it)->first + std::prev(it)->second.nbytes > at) {
            return std::prev(it);
        }
        return it != weights.end() && it->first - at < n ? it : weights.end();
    }
    // removes the weights at addresses where plain bytes are about to be written
    void forget(uintptr_t at, size_t n) {
        for (auto it = find(at, n); it != weights.end(); it = find(at, n)) {
            weights.erase(it);
        }
    }
};

buffer_context & context_of(ggml_backend_buffer_t buffer) { return *static_cast<buffer_context *>(buffer->context); }

uintptr_t address_of(const ggml_tensor * tensor) { return reinterpret_cast<uintptr_t>(tensor->data); }

// ---- messages ----

int check_place(buffer_context & buffer, uintptr_t at, const sparse_tensor_info & matrix) {
    const auto   nbytes = static_cast<size_t>(matrix.nbytes_dense);
    const size_t skip   = at - buffer.base();
    if (skip > buffer.nbytes || nbytes > buffer.nbytes - skip) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s: %zu dense bytes at %zu of a buffer of %zu",
                    matrix.name.c_str(), nbytes, skip, buffer.nbytes);
    }
    const auto next = buffer.weights.upper_bound(at);
    if (next != buffer.weights.end() && next->first - at < nbytes) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT,
                    "%s: %zu dense bytes, but another sparse weight begins %zu bytes later", matrix.name.c_str(),
                    nbytes, static_cast<size_t>(next->first - at));
    }
    return GGML_MACKO_STATUS_OK;
}

// Called after the last chunk: checks the matrix file like any file, and makes the weight.
int finish(buffer_context & buffer, uintptr_t at, incoming * w) {
    const std::unique_ptr<received_file> file = std::move(w->file); // freed on every path
    TRY(check_matrix_file(file.get()));
    const sparse_tensor_info & matrix = file->sparse[0];
    TRY(check_place(buffer, at, matrix));
    TRY(buffer.memory->make_weight(*file, &w->weight));
    w->at     = reinterpret_cast<const void *>(at);
    w->nbytes = static_cast<size_t>(matrix.nbytes_dense);
    w->type   = static_cast<ggml_type>(matrix.desc.type);
    memcpy(w->ne, matrix.ne, sizeof(w->ne));
    return GGML_MACKO_STATUS_OK;
}

// Chunks arrive in order; the first chunk restarts the weight.
int take_chunk(buffer_context & buffer, const ggml_tensor * tensor, const rpc_message & chunk, const void * data,
               size_t n) {
    const uintptr_t at = address_of(tensor);
    if (chunk.version != RPC_VERSION) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH, "message of RPC version %u, this is %u", chunk.version,
                    RPC_VERSION);
    }
    if (chunk.offset == 0) {
        buffer.forget(at, 1);
        incoming & w    = buffer.weights[at];
        w.file          = std::make_unique<received_file>();
        w.total         = chunk.total;
        w.result.status = GGML_MACKO_STATUS_TRUNCATED; // until the last chunk is there
        snprintf(w.result.text, sizeof(w.result.text), "chunks are missing");
    }
    const auto it = buffer.weights.find(at);
    if (it == buffer.weights.end() || !it->second.file) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "a chunk without a first chunk");
    }
    incoming &     w   = it->second;
    const uint64_t got = static_cast<uint64_t>(w.file->size());
    if (n == 0 || chunk.offset != got || chunk.total != w.total || n > w.total - got) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT,
                    "%zu bytes at %" PRIu64 " of %" PRIu64 ", after %" PRIu64 " of %" PRIu64, n, chunk.offset,
                    chunk.total, got, w.total);
    }
    w.file->append(data, n);
    if (got + n < w.total) {
        return GGML_MACKO_STATUS_OK;
    }
    const int status = finish(buffer, at, &w);
    platform::trim_heap(); // releases large temporary blocks, of this code and of the server
    if (status == GGML_MACKO_STATUS_OK) {
        w.result = {};
    }
    return status;
}

void take_message(buffer_context & buffer, const ggml_tensor * tensor, const rpc_message & message, const void * data,
                  size_t n) {
    const int status = c_boundary([&] {
        return message.kind == rpc_kind::CHUNK
                   ? take_chunk(buffer, tensor, message, data, n)
                   : fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "unknown message %u", static_cast<unsigned>(message.kind));
    });
    if (status) {
        log_error("ggml-macko: refused data from an RPC client for %s: %s\n", printable(tensor->name).text,
                  ggml_macko_last_error());
        const auto it = buffer.weights.find(address_of(tensor));
        if (it != buffer.weights.end()) {
            incoming & w = it->second;
            w.file.reset();
            w.weight.reset();
            w.result.status = status;
            snprintf(w.result.text, sizeof(w.result.text), "%s", ggml_macko_last_error());
        }
    }
}

void answer(buffer_context & buffer, const ggml_tensor * tensor, const rpc_message & message, void * data, size_t n) {
    memset(data, 0, n);
    if (message.kind == rpc_kind::HELLO) {
        const rpc_hello hello = rpc_answer(message);
        memcpy(data, &hello, std::min(n, sizeof(hello)));
        return;
    }
    const auto it     = buffer.weights.find(address_of(tensor));
    rpc_result result = { GGML_MACKO_STATUS_BAD_ARGUMENT, "no sparse weight has been sent there" };
    if (it != buffer.weights.end()) {
        result = it->second.result;
    }
    memcpy(data, &result, std::min(n, sizeof(result)));
}

// ---- functions that ggml calls ----

void buffer_free_buffer(ggml_backend_buffer_t buffer) { delete &context_of(buffer); }

void * buffer_get_base(ggml_backend_buffer_t buffer) { return context_of(buffer).memory->base(); }

void buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t n) {
    context_of(buffer).forget(address_of(tensor) + offset, n);
    context_of(buffer).memory->fill(static_cast<char *>(tensor->data) + offset, value, n);
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t n) {
    rpc_message message;
    if (rpc_read_message(tensor, &message)) {
        take_message(context_of(buffer), tensor, message, data, n);
        return;
    }
    context_of(buffer).forget(address_of(tensor) + offset, n);
    context_of(buffer).memory->write(static_cast<char *>(tensor->data) + offset, data, n);
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t n) {
    buffer_context & context = context_of(buffer);
    rpc_message      message;
    if (rpc_read_message(tensor, &message)) {
        answer(context, tensor, message, data, n);
        return;
    }
    context.memory->read(static_cast<const char *>(tensor->data) + offset, data, n);
    const uintptr_t at = address_of(tensor) + offset;
    const auto      it = context.find(at, n); // a reader requests one tensor at a time
    if (it != context.weights.end() && it->second.weight && at >= it->first) {
        const size_t skip = at - it->first;
        it->second.weight->densify(skip, data, std::min(n, it->second.nbytes - skip));
    }
}

bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    if (rpc_place_at(src) || src->buffer->buft != buffer->buft) {
        return false; // ggml then copies through get_tensor and set_tensor
    }
    context_of(buffer).forget(address_of(dst), ggml_nbytes(src));
    context_of(buffer).memory->copy(dst->data, *context_of(src->buffer).memory, src->data, ggml_nbytes(src));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    context_of(buffer).weights.clear();
    context_of(buffer).memory->clear(value);
}

const ggml_backend_buffer_i buffer_iface = {
    /* .free_buffer   = */ buffer_free_buffer,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

} // namespace

ggml_backend_buffer_t rpc_buffer_init(ggml_backend_buffer_type_t buft, size_t size,
                                      std::unique_ptr<rpc_memory> memory) {
    return ggml_backend_buffer_init(buft, buffer_iface, new buffer_context{ std::move(memory), size, {} }, size);
}

rpc_memory * rpc_memory_of(ggml_backend_buffer_t buffer) {
    return buffer && buffer->iface.free_buffer == buffer_free_buffer ? context_of(buffer).memory.get() : nullptr;
}

const rpc_place * rpc_place_at(const ggml_tensor * tensor) {
    if (!rpc_memory_of(tensor->buffer) || context_of(tensor->buffer).weights.empty()) {
        return nullptr;
    }
    buffer_context & context = context_of(tensor->buffer);
    const auto       it      = context.find(address_of(tensor), ggml_nbytes(tensor));
    return it != context.weights.end() ? &it->second : nullptr;
}

} // namespace macko
