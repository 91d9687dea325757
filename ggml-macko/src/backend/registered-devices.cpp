#include "backend/registered-devices.h"
#include "platform/platform.h"

namespace macko {

// The plugin is not linked to libggml, which has the list of devices, and Python loads libggml without making its
// symbols global.
static void * find_function(const char * name) { return platform::find_function("ggml", name); }

std::vector<ggml_backend_dev_t> registered_devices() {
    const auto count = reinterpret_cast<decltype(&ggml_backend_dev_count)>(find_function("ggml_backend_dev_count"));
    const auto get   = reinterpret_cast<decltype(&ggml_backend_dev_get)>(find_function("ggml_backend_dev_get"));
    std::vector<ggml_backend_dev_t> devices;
    for (size_t i = 0; count && get && i < count(); i++) {
        devices.push_back(get(i));
    }
    return devices;
}

ggml_backend_dev_t cpu_device() {
    for (ggml_backend_dev_t device : registered_devices()) {
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return device;
        }
    }
    return nullptr;
}

void set_cpu_threads(ggml_backend_t cpu, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    const auto         set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set) {
        set(cpu, n_threads);
    }
}

} // namespace macko
