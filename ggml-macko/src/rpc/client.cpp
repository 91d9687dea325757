#include "rpc/client.h"
#include "backend/load-session.h"
#include "backend/log.h"
#include "backend/registered-devices.h"
#include "load/matrix-file.h"
#include "platform/platform.h"
#include "rpc/message.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace macko {

namespace {

// Above 10 MiB, llama.cpp's client first tries a hash of the data, and rpc-server -c caches the data. Chunks are larger
// than that.
constexpr size_t CHUNK_NBYTES = 16 << 20;

// The RPC backend's own functions, which all its devices share; null before there is a device.
struct {
    decltype(ggml_backend_buffer_type_i::alloc_buffer) alloc_buffer;
    decltype(ggml_backend_buffer_i::init_tensor)       init_tensor;
    decltype(ggml_backend_buffer_i::set_tensor)        set_tensor;
} original;

// State of the server behind a buffer during a load.
struct server {
    bool        is_ours = false;
    size_t      n       = 0; // sparse weights sent
    int64_t     n_sent  = 0; // bytes sent
    int64_t     n_dense = 0; // bytes of the same weights as dense
    std::string name;

    ~server() {
        if (n > 0) {
            log_info("ggml-macko: %s: %zu sparse tensors, %.1f MiB sent for %.1f MiB\n", name.c_str(), n,
                     static_cast<double>(n_sent) / 1048576, static_cast<double>(n_dense) / 1048576);
        }
    }
};

// Asks whether the server of a buffer runs the plugin; weight lies in the buffer. VERSION_MISMATCH: it runs another
// version.
int ask(const ggml_tensor * weight, bool * is_ours) {
    rpc_message hello = rpc_make_message(rpc_kind::HELLO);
    if (!platform::random_bytes(hello.challenge, sizeof(hello.challenge))) {
        return fail(GGML_MACKO_STATUS_IO, "no random bytes: %s", strerror(errno));
    }
    rpc_hello         answer  = {};
    const ggml_tensor carrier = rpc_message_tensor(weight, hello, sizeof(answer));
    weight->buffer->iface.get_tensor(weight->buffer, &carrier, &answer, 0, sizeof(answer));
    *is_ours = rpc_is_answer(answer, hello);
    if (*is_ours && answer.version != RPC_VERSION) {
        return fail(GGML_MACKO_STATUS_VERSION_MISMATCH,
                    "%s runs ggml-macko %s with RPC version %u, and this is %s with %u: use the same on both",
                    ggml_backend_buffer_name(weight->buffer), printable(answer.plugin, sizeof(answer.plugin)).text,
                    answer.version, ggml_macko_version(), RPC_VERSION);
    }
    return GGML_MACKO_STATUS_OK;
}

// Sends a matrix to the server and waits for its result.
int send(const ggml_tensor * weight, const model_file & file) {
    rpc_message          chunk = rpc_make_message(rpc_kind::CHUNK);
    const auto           total = static_cast<size_t>(file.size());
    const size_t         step  = std::min(CHUNK_NBYTES, ggml_nbytes(weight)); // must fit the addresses
    std::vector<uint8_t> bytes(std::min(step, total));
    chunk.total = total;
    for (size_t at = 0; at < total; at += step) {
        const size_t n = std::min(step, total - at);
        TRY(file.read(static_cast<int64_t>(at), bytes.data(), static_cast<int64_t>(n)));
        chunk.offset              = at;
        const ggml_tensor carrier = rpc_message_tensor(weight, chunk, n);
        original.set_tensor(weight->buffer, const_cast<ggml_tensor *>(&carrier), bytes.data(), 0, n);
    }
    rpc_result        result  = {};
    const ggml_tensor carrier = rpc_message_tensor(weight, rpc_make_message(rpc_kind::RESULT), sizeof(result));
    weight->buffer->iface.get_tensor(weight->buffer, &carrier, &result, 0, sizeof(result));
    return result.status == GGML_MACKO_STATUS_OK
               ? GGML_MACKO_STATUS_OK
               : fail(result.status, "%s: %.*s", ggml_backend_buffer_name(weight->buffer),
                      static_cast<int>(sizeof(result.text)), result.text);
}

// The server of a buffer that was allocated during this load, or nullptr.
server * server_of(load_session & session, ggml_backend_buffer_t buffer) {
    const auto it = session.this_thread().staging.find(buffer);
    return it != session.this_thread().staging.end() ? static_cast<server *>(it->second.get()) : nullptr;
}

// ---- functions of RPC buffers ----

ggml_status claim(load_session & session, ggml_backend_buffer_t buffer, ggml_tensor * tensor,
                  const sparse_tensor_info & matrix) {
    std::unique_ptr<model_file> file;
    if (ggml_nbytes(tensor) < RPC_ANSWER_NBYTES || session.make_matrix_file(matrix, &file)) {
        return GGML_STATUS_SUCCESS; // the weight becomes dense on the server
    }
    server * s = server_of(session, buffer);
    if (!s) {
        auto made  = std::make_shared<server>();
        s          = made.get();
        s->name    = ggml_backend_buffer_name(buffer);
        int status = ask(tensor, &s->is_ours);
        if (status) {
            session.keep_error(status);
            return GGML_STATUS_FAILED;
        }
        session.this_thread().staging[buffer] = std::move(made);
    }
    return s->is_ours ? load_session::claim_tensor(buffer, tensor) : GGML_STATUS_SUCCESS;
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    ggml_status    status  = original.init_tensor ? original.init_tensor(buffer, tensor) : GGML_STATUS_SUCCESS;
    load_session * session = load_session::current();
    const sparse_tensor_info * matrix = session ? session->find(tensor) : nullptr;
    if (status == GGML_STATUS_SUCCESS && matrix) {
        const int error = c_boundary([&] {
            status = claim(*session, buffer, tensor, *matrix);
            return static_cast<int>(GGML_MACKO_STATUS_OK);
        });
        if (error) {
            session->keep_error(error);
            status = GGML_STATUS_FAILED;
        }
    }
    return status;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    load_session * session = load_session::current();
    server *       s       = session ? server_of(*session, buffer) : nullptr;
    if (!s || !session->is_claimed(tensor)) {
        original.set_tensor(buffer, tensor, data, offset, size);
    } else if (offset == 0) { // the stream has no data after the placeholder
        static_cast<void>(session->deliver(tensor, data, size, [&](const sparse_tensor_info & matrix) -> int {
            std::unique_ptr<model_file> file;
            int                         status = session->make_matrix_file(matrix, &file);
            status                             = status ? status : send(tensor, *file);
            if (status == GGML_MACKO_STATUS_OK) {
                s->n++;
                s->n_sent += file->size();
                s->n_dense += matrix.nbytes_dense;
            }
            return status;
        }));
    }
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = original.alloc_buffer(buft, size);
    if (buffer && load_session::current()) {
        static std::once_flag once; // several threads may load models at once
        std::call_once(once, [&] {
            original.init_tensor = buffer->iface.init_tensor;
            original.set_tensor  = buffer->iface.set_tensor;
        });
        buffer->iface.init_tensor = init_tensor;
        buffer->iface.set_tensor  = set_tensor;
    }
    return buffer;
}

} // namespace

void rpc_watch_devices() {
    static std::mutex                 mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    for (ggml_backend_dev_t device : registered_devices()) {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
        if (!reg || strcmp(ggml_backend_reg_name(reg), "RPC") != 0) {
            continue;
        }
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device);
        if (buft && buft->iface.alloc_buffer != alloc_buffer) {
            if (!original.alloc_buffer) {
                original.alloc_buffer = buft->iface.alloc_buffer;
            }
            buft->iface.alloc_buffer = alloc_buffer;
        }
    }
}

} // namespace macko
