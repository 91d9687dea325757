// Messages between the plugin's client and server sides of llama.cpp's RPC backend (docs/design/rpc.md). A message is a
// set_tensor or get_tensor of a tensor that the client invents. The data address of that tensor is the weight's
// address, and its op_params, which are zero in all tensors with data, contain the message. A server without this
// plugin treats the tensor as plain bytes.
#pragma once

#include "codec/status.h"
#include "ggml-backend-impl.h"

#include <cstdint>

namespace macko {

constexpr uint32_t RPC_VERSION = 1; // message version; must be equal on client and server

enum class rpc_kind : uint32_t {
    HELLO  = 1, // get_tensor of a rpc_hello: requests the version of the plugin
    CHUNK  = 2, // set_tensor of a chunk of the weight's matrix file (load/matrix-file.h)
    RESULT = 3, // get_tensor of a rpc_result: the outcome of the chunks
};

// Client and server have the same byte order, which llama.cpp's RPC backend requires.
struct rpc_message {
    uint8_t  magic[16];
    uint32_t version;
    rpc_kind kind;
    uint8_t  challenge[16]; // HELLO: random; a server cannot answer with it unless it has read this message
    uint64_t offset;        // CHUNK: offset of the data in the matrix file
    uint64_t total;         // CHUNK: total bytes of the matrix file
};
static_assert(sizeof(rpc_message) == 56 && sizeof(rpc_message) <= GGML_MAX_OP_PARAMS, "it must fit op_params");

struct rpc_hello {
    uint8_t  magic[16];
    uint32_t version;
    uint8_t  challenge[16];
    char     plugin[28]; // plugin version, for messages
};

struct rpc_result {
    int32_t status; // ggml_macko_status
    char    text[252];
};

constexpr size_t RPC_ANSWER_NBYTES = sizeof(rpc_result); // at most; a smaller dense weight stays dense

rpc_message rpc_make_message(rpc_kind kind);
// The tensor that carries a message about a weight, with n bytes of data.
ggml_tensor rpc_message_tensor(const ggml_tensor * weight, const rpc_message & message, size_t n);
// Whether a tensor carries a message of any version; copies the message to *message.
bool rpc_read_message(const ggml_tensor * tensor, rpc_message * message);

// The plugin's answer to a hello, and whether a server's answer is the plugin's.
rpc_hello rpc_answer(const rpc_message & hello);
bool      rpc_is_answer(const rpc_hello & answer, const rpc_message & hello);

} // namespace macko
