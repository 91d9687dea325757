// The backend registry that the plugin hands to ggml_backend_load. It lists the devices. The list is empty for a ggml
// that the plugin does not support (abi/ggml-abi.h).
#include "abi/ggml-abi.h"
#include "backend/log.h"
#include "backend/registered-devices.h"
#include "cpu/device/device.h"
#include "cpu/device/rpc-device.h"
#ifdef GGML_MACKO_CUDA
#include "cuda/device/backend.h"
#include "cuda/device/device.h"
#include "cuda/device/rpc-device.h"
#endif
#include "ggml-macko.h"
#include "platform/environment.h"

#include <cstring>
#include <string>
#include <vector>

namespace macko {

namespace {

const char * reg_get_name(ggml_backend_reg_t) { return "MACKO"; }

// Whether the process is llama.cpp's RPC server.
bool serves_rpc() { return environment::is_enabled("rpc-server"); }

// All GPUs, then the CPU. An RPC server offers devices whose buffers also accept dense weights.
std::vector<ggml_backend_dev_t> all_devices(ggml_backend_reg_t reg) {
    const bool                      serves = serves_rpc();
    std::vector<ggml_backend_dev_t> devices;
#ifdef GGML_MACKO_CUDA
    devices = serves ? cuda::rpc_devices(reg) : cuda::cuda_devices(reg);
#endif
    devices.push_back(serves ? cpu::rpc_device(reg, devices.empty()) : cpu::device(reg));
    return devices;
}

size_t reg_get_device_count(ggml_backend_reg_t reg) { return all_devices(reg).size(); }

ggml_backend_dev_t reg_get_device(ggml_backend_reg_t reg, size_t index) {
    const std::vector<ggml_backend_dev_t> devices = all_devices(reg);
    return index < devices.size() ? devices[index] : nullptr;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
#ifdef GGML_MACKO_CUDA
    if (cuda::set_n_threads(backend, n_threads) || cuda::rpc_set_n_threads(backend, n_threads)) {
        return;
    }
#endif
    if (!cpu::rpc_set_n_threads(backend, n_threads)) {
        cpu::set_n_threads(backend, n_threads);
    }
}

void * reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    if (!strcmp(name, "ggml_backend_set_n_threads")) {
        return reinterpret_cast<void *>(set_n_threads);
    }
    return nullptr;
}

ggml_backend_reg_t unchecked_registry() {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */
        {
            /* .get_name         = */ reg_get_name,
            /* .get_device_count = */ reg_get_device_count,
            /* .get_device       = */ reg_get_device,
            /* .get_proc_address = */ reg_get_proc_address,
        },
        /* .context     = */ nullptr,
    };
    return &reg;
}

// The version of the interface in the running ggml, which refuses any other: that of its own backends. The structs are
// checked by themselves.
int running_api_version() {
    for (ggml_backend_dev_t device : registered_devices()) {
        if (ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device)) {
            return reg->api_version;
        }
    }
    return GGML_BACKEND_API_VERSION;
}

ggml_backend_reg_t registry() {
    // a server of RPC loads no model, so that no load would report a wrong variable
    if (ggml_macko_check_running_ggml() || (serves_rpc() && ggml_macko_check_environment())) {
        log_error("%s\n", ggml_macko_last_error());
        return nullptr;
    }
    if (*untested_version()) {
        log_warn("%s\n", untested_version());
    }
    ggml_backend_reg_t reg = unchecked_registry();
    reg->api_version       = running_api_version();
    return reg;
}

#ifdef GGML_MACKO_CUDA
std::string describe_gpus() {
    std::string names;
    for (ggml_backend_dev_t device : cuda::cuda_devices(unchecked_registry())) {
        names += (names.empty() ? "" : ", ") + std::string(ggml_backend_dev_description(device));
    }
    return (names.empty() ? "none (" + cuda::cuda_no_device_reason() + ")" : names) + ", built for " GGML_MACKO_CUDA;
}
#endif

} // namespace

} // namespace macko

const char * ggml_macko_gpus(void) {
#ifdef GGML_MACKO_CUDA
    static const std::string text = macko::describe_gpus();
    return text.c_str();
#else
    return "none (built without CUDA)";
#endif
}

GGML_BACKEND_DL_IMPL(macko::registry)
