// ggml's CPU backend on a server of llama.cpp's RPC backend, for dense nodes that another device does not compute: it
// works on copies of their operands in host memory. What ggml's scheduler does for a local model, node by node.
#pragma once

#include "rpc/graph.h"

namespace macko {

class rpc_cpu {
public:
    int n_threads = 0; // 0: as many as ggml takes

    // nullptr, or why the node was not computed: for rpc_refusals. What was queued for its operands is waited for.
    const char * compute(const ggml_tensor * node);

private:
    struct backend_deleter {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
    };
    std::unique_ptr<ggml_backend, backend_deleter> backend_; // made when it is first needed
};

} // namespace macko
