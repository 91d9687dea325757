// A buffer of the CPU device on a server of llama.cpp's RPC backend (docs/design/rpc.md). The client asks for room for
// dense weights. The buffer reserves addresses for them, and the system gives memory to those that are written. A
// sparse weight arrives as messages about its place there (host/rpc-message.h) and is kept elsewhere, where no client
// can write.
#pragma once

#include "cpu/weight.h"
#include "ggml-backend-impl.h"

namespace macko::cpu {

ggml_backend_buffer_t rpc_buffer_alloc(ggml_backend_buffer_type_t buft, size_t size);

// Which part of a buffer's addresses stands for a sparse weight. weight: nullptr if it has not arrived in full, or was
// refused; nobody may compute with what lies there.
struct rpc_weight {
    const void *        place; // the first of the addresses
    const cpu::weight * weight;
    int64_t             ne[4];
    ggml_type           type; // dense
};
// The first sparse weight that a tensor overlaps, or nullptr. A tensor in a buffer of another kind has none.
const rpc_weight * rpc_weight_at(const ggml_tensor * tensor);
// Whether all elements of a tensor lie in its buffer. Numbers come from a client, which ggml trusts.
bool rpc_lies_in_buffer(const ggml_tensor * tensor);

} // namespace macko::cpu
