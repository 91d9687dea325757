#include "rpc/cpu.h"
#include "abi/op-numbers.h"
#include "backend/registered-devices.h"

#include <algorithm>

namespace macko {

namespace {

constexpr const char * NEEDS_OPERATION = "is not an operation that this server computes";
constexpr const char * NEEDS_OPERANDS  = "needs operands in buffers of this server";
constexpr const char * NEEDS_MEMORY    = "needs more host memory than there is";
constexpr size_t       ALIGNMENT       = 64; // alignment of tensors on ggml's CPU

struct buffer_deleter {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
struct context_deleter {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};

bool can_be_copied(const ggml_tensor * t) { return rpc_memory_of(t->buffer) && rpc_lies_in_buffer(t); }

// A copy of t as a leaf tensor, with its data at a host address.
ggml_tensor copied(const ggml_tensor * t, ggml_backend_buffer_t host, char * at) {
    ggml_tensor copy = *t;
    rpc_memory_of(t->buffer)->read(t->data, at, rpc_nbytes(t));
    copy.buffer   = host;
    copy.data     = at;
    copy.view_src = nullptr;
    copy.extra    = nullptr;
    return copy;
}

} // namespace

const char * rpc_cpu::compute(const ggml_tensor * node) {
    size_t nbytes = GGML_PAD(rpc_nbytes(node), ALIGNMENT);
    if (!can_be_copied(node)) {
        return NEEDS_OPERANDS;
    }
    for (const ggml_tensor * src : node->src) {
        if (src && !can_be_copied(src)) {
            return NEEDS_OPERANDS;
        }
        nbytes += src ? GGML_PAD(rpc_nbytes(src), ALIGNMENT) : 0;
    }
    if (!backend_) {
        ggml_backend_dev_t cpu = cpu_device();
        backend_.reset(cpu ? ggml_backend_dev_init(cpu, nullptr) : nullptr);
    }
    const std::unique_ptr<ggml_backend_buffer, buffer_deleter> host(
        ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), nbytes));
    const std::unique_ptr<ggml_context, context_deleter> ctx(
        ggml_init({ ggml_graph_overhead_custom(1, false), nullptr, true }));
    if (!backend_ || !host || !ctx) {
        return NEEDS_MEMORY;
    }
    auto *      at     = static_cast<char *>(ggml_backend_buffer_get_base(host.get()));
    ggml_tensor result = copied(node, host.get(), at); // an operation may write only part of its result
    ggml_tensor operands[GGML_MAX_SRC];
    at += GGML_PAD(rpc_nbytes(node), ALIGNMENT);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (const ggml_tensor * src = node->src[i]) {
            operands[i]    = copied(src, host.get(), at);
            operands[i].op = running_op(GGML_OP_NONE);
            std::fill(std::begin(operands[i].src), std::end(operands[i].src), nullptr);
            result.src[i] = &operands[i];
            at += GGML_PAD(rpc_nbytes(src), ALIGNMENT);
        }
    }
    if (!ggml_backend_supports_op(backend_.get(), &result)) {
        return NEEDS_OPERATION;
    }
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 1, false);
    graph->nodes[0]     = &result;
    graph->n_nodes      = 1;
    if (n_threads > 0) {
        set_cpu_threads(backend_.get(), n_threads);
    }
    if (ggml_backend_graph_compute(backend_.get(), graph) != GGML_STATUS_SUCCESS) {
        return NEEDS_MEMORY;
    }
    rpc_memory_of(node->buffer)->write(node->data, result.data, rpc_nbytes(node));
    return nullptr;
}

} // namespace macko
