// The GPU devices of this plugin (type GPU): each computes whole graphs, independent of ggml's own CUDA backend.
#pragma once

#include "ggml-backend-impl.h"

#include <string>
#include <vector>

namespace macko::cuda {

// one per NVIDIA GPU; empty where there is no driver or no GPU. The first call makes them.
const std::vector<ggml_backend_dev_t> & cuda_devices(ggml_backend_reg_t reg);

// if that list is empty
const std::string & cuda_no_device_reason();

} // namespace macko::cuda
