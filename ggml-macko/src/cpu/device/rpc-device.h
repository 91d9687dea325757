// The CPU as a device of llama.cpp's RPC server (docs/design/rpc.md): it computes whole graphs, products with sparse
// weights as the CPU device does and everything else with ggml's CPU backend.
#pragma once

#include "ggml-backend-impl.h"

namespace macko::cpu {

// It has the name of the CPU device, which is not in the registry of a process that serves. alone: there is no GPU
// beside it, so that the server is to offer it without being told.
ggml_backend_dev_t rpc_device(ggml_backend_reg_t reg, bool alone);
// sets the number of threads if the backend is one of this device; returns whether it is
bool rpc_set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace macko::cpu
