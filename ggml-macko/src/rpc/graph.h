// Checks graphs from clients on a server of llama.cpp's RPC backend (docs/design/rpc.md): how a node uses sparse
// weights, and which result replaces a node that cannot be computed. Every number in a graph comes from a client, and
// its nodes may form cycles.
#pragma once

#include "rpc/buffer.h"

#include "ggml-impl.h"

namespace macko {

// Whether all elements of a tensor lie in its buffer. ggml does not check this.
bool rpc_lies_in_buffer(const ggml_tensor * tensor);
// Bytes from the first to the last element of a tensor that lies in its buffer.
size_t rpc_nbytes(const ggml_tensor * tensor);
// Whether a tensor has rows of floats that lie in a buffer. tensor may be null.
bool rpc_is_f32(const ggml_tensor * tensor);

enum class rpc_verdict {
    ABSENT,  // there is no node: a client may omit it
    SKIPPED, // the node computes nothing
    PRODUCT, // MUL_MAT or MUL_MAT_ID like those of ggml_mul_mat(), with a sparse weight as src[0]
    REFUSED, // uses a sparse weight in another way
    FOREIGN, // unknown op, or an op that calls a function pointer from the client
    OTHER,   // uses dense tensors only
};
rpc_verdict rpc_vet(const ggml_tensor * node); // node may be null

// The nodes of one graph that cannot be computed. Their results become NaN, because the protocol cannot report them to
// the client, and a status other than success would end the server. The log has one line for the first such node and
// one line for the others.
class rpc_refusals {
public:
    rpc_refusals() = default;
    ~rpc_refusals();
    rpc_refusals(const rpc_refusals &)             = delete;
    rpc_refusals & operator=(const rpc_refusals &) = delete;

    void add(const ggml_tensor * node, const char * why); // why: the missing resource

private:
    int n_ = 0;
};

constexpr const char * RPC_NEEDS_WEIGHT =
    "needs a sparse weight that is incomplete, or uses one outside a matrix product";

constexpr const char * RPC_NEEDS_OPERATION = "is not an operation that a client may request";

// Nodes [begin, end) as a graph for a backend.
ggml_cgraph rpc_stretch(const ggml_cgraph * graph, int begin, int end);

} // namespace macko
