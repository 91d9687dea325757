// The devices of all backends of the process.
#pragma once

#include "ggml-backend.h"

#include <vector>

namespace macko {

// Empty if the process has no shared libggml.
std::vector<ggml_backend_dev_t> registered_devices();
// ggml's CPU device, or nullptr.
ggml_backend_dev_t cpu_device();
// Sets the threads of a backend of that device.
void set_cpu_threads(ggml_backend_t cpu, int n_threads);

} // namespace macko
