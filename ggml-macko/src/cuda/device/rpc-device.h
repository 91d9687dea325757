// The GPUs as devices of llama.cpp's RPC server (docs/design/rpc.md): they compute whole graphs, with weights that
// arrive compressed and stay so.
#pragma once

#include "ggml-backend-impl.h"

#include <vector>

namespace macko::cuda {

// One for each of cuda_devices(), with its name, which is not in the registry of a process that serves. Without those
// whose driver has no virtual memory management; the log says which.
const std::vector<ggml_backend_dev_t> & rpc_devices(ggml_backend_reg_t reg);
// of the CPU, for what a GPU has no kernel for; false: not a backend of such a device
bool rpc_set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace macko::cuda
