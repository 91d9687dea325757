#include "rpc/message.h"
#include "abi/op-numbers.h"

#include <cstdio>
#include <cstring>

namespace macko {

static const uint8_t MAGIC[16] = {
    'm', 'a', 'c', 'k', 'o', ' ', 'r', 'p', 'c', 0x9e, 0x1f, 0x5c, 0xd3, 0x07, 0xb8, 0x42
};

rpc_message rpc_make_message(rpc_kind kind) {
    rpc_message m = {};
    memcpy(m.magic, MAGIC, sizeof(MAGIC));
    m.version = RPC_VERSION;
    m.kind    = kind;
    return m;
}

ggml_tensor rpc_message_tensor(const ggml_tensor * weight, const rpc_message & message, size_t n) {
    ggml_tensor t = {};
    t.type        = GGML_TYPE_I8;
    t.buffer      = weight->buffer;
    t.data        = weight->data;
    t.op          = running_op(GGML_OP_NONE);
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        t.ne[d] = d == 0 ? static_cast<int64_t>(n) : 1;
        t.nb[d] = d == 0 ? 1 : n;
    }
    memcpy(t.op_params, &message, sizeof(message));
    ggml_set_name(&t, weight->name);
    return t;
}

bool rpc_read_message(const ggml_tensor * tensor, rpc_message * message) {
    if (tensor->type != GGML_TYPE_I8 || op_of(tensor) != GGML_OP_NONE) {
        return false;
    }
    memcpy(message, tensor->op_params, sizeof(*message));
    return memcmp(message->magic, MAGIC, sizeof(MAGIC)) == 0;
}

rpc_hello rpc_answer(const rpc_message & hello) {
    rpc_hello answer = {};
    memcpy(answer.magic, MAGIC, sizeof(MAGIC));
    answer.version = RPC_VERSION;
    memcpy(answer.challenge, hello.challenge, sizeof(answer.challenge));
    snprintf(answer.plugin, sizeof(answer.plugin), "%s", ggml_macko_version());
    return answer;
}

bool rpc_is_answer(const rpc_hello & answer, const rpc_message & hello) {
    return memcmp(answer.magic, MAGIC, sizeof(MAGIC)) == 0 &&
           memcmp(answer.challenge, hello.challenge, sizeof(hello.challenge)) == 0;
}

} // namespace macko
