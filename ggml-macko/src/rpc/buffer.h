// Buffers of devices on a server of llama.cpp's RPC backend (docs/design/rpc.md). The client allocates space for dense
// weights. The buffer reserves that many addresses, and provides memory only for the addresses that are written. A
// sparse weight arrives as messages about its addresses (rpc/message.h), and is stored elsewhere, where no client can
// write. Each device derives its memory from rpc_memory and its weights from rpc_weight.
#pragma once

#include "ggml-backend-impl.h"
#include "load/matrix-file.h"

#include <memory>

namespace macko {

// A sparse weight in a device's layout.
struct rpc_weight {
    virtual ~rpc_weight() = default;
    // writes n bytes of the dense elements, starting at byte `offset`
    virtual void densify(size_t offset, void * data, size_t n) const = 0;
};

// The memory of one buffer. The callers have checked that all n bytes lie in it.
struct rpc_memory {
    virtual ~rpc_memory()                                        = default;
    virtual void * base() const                                  = 0; // the first of the reserved addresses
    virtual void   write(void * at, const void * data, size_t n) = 0;
    virtual void   fill(void * at, uint8_t value, size_t n)      = 0;
    virtual void   read(const void * at, void * data, size_t n)  = 0;
    // from: the memory of a buffer of the same type that contains source
    virtual void copy(void * at, rpc_memory & from, const void * source, size_t n) = 0;
    virtual void clear(uint8_t value)                                              = 0; // all bytes read as this value
    // Stores the matrix of a file that passed check_matrix_file(); checks its payload.
    [[nodiscard]] virtual int make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) = 0;
};

ggml_backend_buffer_t rpc_buffer_init(ggml_backend_buffer_type_t buft, size_t size, std::unique_ptr<rpc_memory> memory);
// nullptr for a buffer of another kind, or for a null buffer.
rpc_memory * rpc_memory_of(ggml_backend_buffer_t buffer);

// The addresses of a buffer that represent a sparse weight. weight: nullptr if the weight is incomplete or was refused;
// no operation may use these addresses then.
struct rpc_place {
    const void *                at; // the first of the addresses
    std::unique_ptr<rpc_weight> weight;
    int64_t                     ne[4];
    ggml_type                   type; // type of the dense weight
};
// The first sparse weight that overlaps a tensor; nullptr if there is none or the buffer is of another kind.
const rpc_place * rpc_place_at(const ggml_tensor * tensor);

} // namespace macko
