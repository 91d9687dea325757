// What this plugin's two sides of llama.cpp's RPC backend say to each other (docs/design/rpc.md). A message travels as
// the set_tensor or get_tensor of a tensor that the client makes up: its data is the address of the weight that the
// message is about, and its op_params, which are zero in every tensor that holds data, are the message. A server
// without this plugin takes it for plain bytes.
#pragma once

#include "codec/status.h"
#include "ggml-backend-impl.h"

#include <cstdint>

namespace macko {

constexpr uint32_t RPC_VERSION = 1; // of these messages; client and server must have the same

enum class rpc_kind : uint32_t {
    HELLO  = 1, // get_tensor of a rpc_hello: is there a plugin, and of which version?
    PIECE  = 2, // set_tensor of a piece of the weight's matrix file (load/matrix-file.h)
    RESULT = 3, // get_tensor of a rpc_result: what became of the pieces
};

// Both sides run on machines of the same byte order, as llama.cpp's RPC backend asks for.
struct rpc_message {
    uint8_t  magic[16];
    uint32_t version;
    rpc_kind kind;
    uint8_t  challenge[16]; // HELLO: random; a server that has not read this message cannot answer with it
    uint64_t offset;        // PIECE: of the data, in the matrix file
    uint64_t total;         // PIECE: bytes of the matrix file
};
static_assert(sizeof(rpc_message) == 56 && sizeof(rpc_message) <= GGML_MAX_OP_PARAMS, "it must fit op_params");

struct rpc_hello {
    uint8_t  magic[16];
    uint32_t version;
    uint8_t  challenge[16];
    char     plugin[28]; // its version, for messages
};

struct rpc_result {
    int32_t status; // ggml_macko_status
    char    text[252];
};

constexpr size_t RPC_ANSWER_NBYTES = sizeof(rpc_result); // at most; a weight with fewer dense bytes stays dense

rpc_message rpc_make_message(rpc_kind kind);
// The tensor that carries a message about a weight, with n bytes of data.
ggml_tensor rpc_message_tensor(const ggml_tensor * weight, const rpc_message & message, size_t n);
// Whether a tensor carries a message, of any version; then *message is it.
bool rpc_read_message(const ggml_tensor * tensor, rpc_message * message);

// The answer of this plugin, and whether that is what a server answered.
rpc_hello rpc_answer(const rpc_message & hello);
bool      rpc_is_answer(const rpc_hello & answer, const rpc_message & hello);

} // namespace macko
