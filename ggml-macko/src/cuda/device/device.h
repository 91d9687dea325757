// The GPU devices of this plugin. Each computes whole graphs, independent of ggml's own CUDA backend.
//
//   device     what the registry sees: names, memory, which ops a GPU supports
//   backend    a context's side: computes graphs
//   captures   CUDA graphs of graphs that come again
//   buffer     memory of the GPU, with dense tensors and sparse weights; pinned host memory
//   upload     sparse weights from the file into a buffer
//   gpu        the physical device: stream, copies, error state
#pragma once

#include "ggml-backend-impl.h"

#include <string>
#include <vector>

namespace macko::cuda {

// One per NVIDIA GPU of compute capability 7.5 or more. Empty where there is no driver or no GPU. The first call makes
// them.
const std::vector<ggml_backend_dev_t> & cuda_devices(ggml_backend_reg_t reg);

// why that list is empty
const std::string & cuda_no_device_reason();

} // namespace macko::cuda
