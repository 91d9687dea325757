// A buffer of a device on a server of llama.cpp's RPC backend (docs/design/rpc.md). The client asks for room for dense
// weights. The buffer reserves addresses for them, and memory is given to those that are written. A sparse weight
// arrives as messages about its place there (rpc/message.h) and is kept elsewhere, where no client can write. How
// a device gives memory and keeps weights is its own: it derives from rpc_memory and rpc_weight.
#pragma once

#include "ggml-backend-impl.h"
#include "load/matrix-file.h"

#include <memory>

namespace macko {

// A sparse weight as a device keeps it.
struct rpc_weight {
    virtual ~rpc_weight() = default;
    // n bytes of the dense elements, from byte `offset` of them on
    virtual void densify(size_t offset, void * data, size_t n) const = 0;
};

// The memory of one buffer. The callers have checked that all n bytes lie in it.
struct rpc_memory {
    virtual ~rpc_memory()                                        = default;
    virtual void * base() const                                  = 0; // the first of the reserved addresses
    virtual void   write(void * at, const void * data, size_t n) = 0;
    virtual void   fill(void * at, uint8_t value, size_t n)      = 0;
    virtual void   read(const void * at, void * data, size_t n)  = 0;
    // from: of a buffer of the same type, in which source lies
    virtual void copy(void * at, rpc_memory & from, const void * source, size_t n) = 0;
    virtual void clear(uint8_t value)                                              = 0; // what all of it reads as
    // Keeps the matrix of a file that passed check_matrix_file(); its payload is checked here.
    [[nodiscard]] virtual int make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) = 0;
};

ggml_backend_buffer_t rpc_buffer_init(ggml_backend_buffer_type_t buft, size_t size, std::unique_ptr<rpc_memory> memory);
// nullptr for a buffer of another kind, and for none
rpc_memory * rpc_memory_of(ggml_backend_buffer_t buffer);

// Which part of a buffer's addresses stands for a sparse weight. weight: nullptr if it has not arrived in full, or was
// refused; nobody may compute with what lies there.
struct rpc_place {
    const void *                at; // the first of the addresses
    std::unique_ptr<rpc_weight> weight;
    int64_t                     ne[4];
    ggml_type                   type; // dense
};
// The first sparse weight that a tensor overlaps, or nullptr. A tensor in a buffer of another kind has none.
const rpc_place * rpc_place_at(const ggml_tensor * tensor);

} // namespace macko
