// The CPU as a device of llama.cpp's RPC server (docs/design/rpc.md). It computes whole graphs: products with sparse
// weights like the CPU device, and everything else with ggml's CPU backend.
#pragma once

#include "ggml-backend-impl.h"

namespace macko::cpu {

// The device has the name of the CPU device, which an RPC server does not register. alone: the server has no GPU, so it
// must offer this device by default.
ggml_backend_dev_t rpc_device(ggml_backend_reg_t reg, bool alone);
// Sets the number of threads if the backend belongs to this device; returns whether it does.
bool rpc_set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace macko::cpu
