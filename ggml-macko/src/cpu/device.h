// The devices of this plugin, for the registry (registry.cpp).
#pragma once

#include "ggml-backend-impl.h"

#include <cstdint>

namespace macko::cpu {

// type ACCEL: MUL_MAT and MUL_MAT_ID with sparse weights, on the CPU; the CPU backend does the rest
ggml_backend_dev_t device(ggml_backend_reg_t reg);
// for ggml_backend_set_n_threads
void set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace macko::cpu
