// The devices of all backends of the process.
#pragma once

#include "ggml-backend.h"

#include <vector>

namespace macko {

// None if the process has no shared libggml.
std::vector<ggml_backend_dev_t> registered_devices();
// ggml's CPU, or nullptr
ggml_backend_dev_t cpu_device();

} // namespace macko
