// Runs dense nodes that no other device of an RPC server computes on ggml's CPU backend, with copies of their operands
// in host memory. ggml's scheduler does the same for a local model; this code works node by node.
#pragma once

#include "backend/backend-functions.h"
#include "rpc/graph.h"

namespace macko {

class rpc_cpu {
public:
    int n_threads = 0; // 0: ggml's default

    // Returns nullptr, or the reason for rpc_refusals why the node was not computed. Waits for all queued work on the
    // operands.
    const char * compute(const ggml_tensor * node);

private:
    backend_ptr backend_; // made on first use
};

} // namespace macko
