// The GPUs as devices of llama.cpp's RPC server (docs/design/rpc.md). They compute whole graphs, with weights that
// arrive compressed and stay compressed.
#pragma once

#include "ggml-backend-impl.h"

#include <vector>

namespace macko::cuda {

// One device for each of cuda_devices(), with the same name, which an RPC server does not register. GPUs without
// virtual memory management are omitted, and the log names them.
const std::vector<ggml_backend_dev_t> & rpc_devices(ggml_backend_reg_t reg);
// Sets the threads of the CPU backend, which computes nodes without a GPU kernel. Returns false for a backend of
// another device.
bool rpc_set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace macko::cuda
