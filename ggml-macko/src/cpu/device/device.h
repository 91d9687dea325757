// The CPU device, for the registry (plugin/registry.cpp).
#pragma once

#include "ggml-backend-impl.h"

#include <cstdint>

namespace macko::cpu {

// A device of type ACCEL. It computes MUL_MAT and MUL_MAT_ID with sparse weights, and the operations between them;
// ggml's CPU backend computes the rest.
ggml_backend_dev_t device(ggml_backend_reg_t reg);
// The result of ggml_backend_reg_get_proc_address() for "ggml_backend_set_n_threads".
void set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace macko::cpu
