// The GPU devices of this plugin. Each computes whole graphs, independent of ggml's own CUDA backend.
//
//   device     interface of the registry: names, memory, supported ops
//   backend    interface of a context: computes graphs
//   captures   CUDA graphs of repeated graphs
//   buffer     GPU memory with dense tensors and sparse weights; pinned host memory
//   upload     copies sparse weights from the file to a buffer
//   gpu        the physical device: stream, copies, error state
#pragma once

#include "ggml-backend-impl.h"

#include <string>
#include <vector>

namespace macko::cuda {

// One device per NVIDIA GPU of compute capability 7.5 or higher. Empty without a driver or a GPU. The first call makes
// them.
const std::vector<ggml_backend_dev_t> & cuda_devices(ggml_backend_reg_t reg);

// Why that list is empty.
const std::string & cuda_no_device_reason();

} // namespace macko::cuda
