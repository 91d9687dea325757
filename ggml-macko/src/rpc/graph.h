// Graphs of clients on a server of llama.cpp's RPC backend (docs/design/rpc.md): what a node wants of sparse weights,
// and what becomes of one that cannot be computed. Each number in a graph comes from a client, and its nodes may form
// circles.
#pragma once

#include "rpc/buffer.h"

#include "ggml-impl.h"

namespace macko {

// Whether all elements of a tensor lie in its buffer. ggml trusts the client.
bool rpc_lies_in_buffer(const ggml_tensor * tensor);
// From its first byte to its last one; only for a tensor that lies in its buffer.
size_t rpc_nbytes(const ggml_tensor * tensor);
// Rows of floats that lie in a buffer. tensor may be null.
bool rpc_is_f32(const ggml_tensor * tensor);

enum class rpc_verdict {
    ABSENT,  // there is no node: a client may leave one out
    SKIPPED, // it computes nothing
    PRODUCT, // MUL_MAT or MUL_MAT_ID: src[0] is a sparse weight, and all else is as ggml_mul_mat() makes it
    REFUSED, // it touches a sparse weight in another way
    FOREIGN, // no operation of the running ggml, or one that calls a function whose address the client says
    OTHER,   // all of it is dense
};
rpc_verdict rpc_vet(const ggml_tensor * node); // node may be null

// The nodes of one graph that cannot be computed. Their results are made NaN, since the protocol has no way to tell the
// client, and a status other than success ends the server. The log has a line for the first of them, and one for the
// others.
class rpc_refusals {
public:
    rpc_refusals() = default;
    ~rpc_refusals();
    rpc_refusals(const rpc_refusals &)             = delete;
    rpc_refusals & operator=(const rpc_refusals &) = delete;

    void add(const ggml_tensor * node, const char * why); // why: what it needs that there is not

private:
    int n_ = 0;
};

constexpr const char * RPC_NEEDS_WEIGHT =
    "needs a sparse weight that has not arrived in full, or in another way than as a factor";

constexpr const char * RPC_NEEDS_OPERATION = "is no operation that a client may ask for";

// nodes [begin, end) as a graph, for a backend
ggml_cgraph rpc_stretch(const ggml_cgraph * graph, int begin, int end);

} // namespace macko
