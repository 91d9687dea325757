#include "cuda/device/device.h"

#include "backend/backend-functions.h"
#include "backend/host-weights.h"
#include "backend/load-session.h"
#include "backend/offload.h"
#include "backend/planned-buffer.h"
#include "cuda/device/backend.h"
#include "cuda/device/buffer.h"

#include <cstdio>

namespace macko::cuda {

namespace {

constexpr int MIN_COMPUTE_CAPABILITY = 75;

const char * device_get_name(ggml_backend_dev_t dev) { return gpu_of(dev).name.c_str(); }

const char * device_get_description(ggml_backend_dev_t dev) { return gpu_of(dev).description.c_str(); }

void device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    *free = *total = 0;
    gpu & device   = gpu_of(dev);
    if (device.select()) {
        device.check(cudaMemGetInfo(free, total), "cudaMemGetInfo");
    }
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    device_get_props(dev, props);
    props->device_id = gpu_of(dev).pci_id.c_str();
    // While one of our loads runs, llama.cpp must read weights in pieces of 1 MiB (see the CPU device), and must not
    // map the file, which is a stream. At other times the first three capabilities stay off: with events, llama.cpp
    // would build pipelines over several copies of the inputs, which one blocking stream does not need.
    const bool loading       = load_session::current() != nullptr;
    props->caps.async        = loading;
    props->caps.host_buffer  = loading;
    props->caps.events       = loading;
    props->caps.mmap_support = !loading;
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) { return make_backend(dev); }

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    ggml_backend_buffer_type_t buft    = gpu_of(dev).buft.get();
    const load_session *       current = load_session::current();
    return current && current->may_not_alloc() ? planned_buffer_type(buft, *current, matrix_nbytes, false) : buft;
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t dev) { return gpu_of(dev).host_buft.get(); }

// Whether op or one of its operands is a sparse weight in host memory.
bool touches_host_weight(const ggml_tensor * op) {
    bool touches = host_weights_of(op) != nullptr;
    for (const ggml_tensor * src : op->src) {
        touches = touches || host_weights_of(src);
    }
    return touches;
}

// Never refuses products with a sparse weight of this device, because the scheduler would read the weight as dense on
// another device. Never refuses writes to its KV cache either.
bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    gpu & device = gpu_of(dev);
    for (const ggml_tensor * src : op->src) {
        ggml_backend_buffer_type_t buft = src && src->buffer ? real_buffer_type(src->buffer->buft) : nullptr;
        if (buft && is_gpu_buffer_type(buft) && buft != device.buft.get()) {
            return false; // on another GPU
        }
    }
    if (touches_host_weight(op)) {
        return wants_offload(op) && graph_supports_host_weight(op, device.offload_panel_nbytes, device.cc);
    }
    const ggml_tensor * w      = op->src[0];
    const bool          sparse = is_sparse_weight(device.buft.get(), w);
    const bool          here   = w && w->buffer && real_buffer_type(w->buffer->buft) == device.buft.get();
    if (!sparse && w && !here && sparse_of_load(w)) {
        return false; // another device will hold this sparse weight
    }
    return graph_supports_op(op, sparse);
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    gpu & device = gpu_of(dev);
    return real_buffer_type(buft) == device.buft.get() ||
           (device.offload_panel_nbytes > 0 && is_host_weights_buffer_type(buft));
}

// Called for ops with a dense weight in host memory that the device supports. The scheduler copies the weight, or only
// its experts that are used.
bool device_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return offload_columns(op) >= offload_columns_in_use();
}

const ggml_backend_device_i device_iface = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ get_props,
    /* .init_backend         = */ device_init_backend,
    /* .get_buffer_type      = */ device_get_buffer_type,
    /* .get_host_buffer_type = */ device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buft,
    /* .offload_op           = */ device_offload_op,
    /* .event_new            = */ device_event_new,
    /* .event_free           = */ device_event_free,
    /* .event_synchronize    = */ device_event_synchronize,
};

// The reason why there is no device, if there is none.
std::string no_device_reason = "no GPU of compute capability 7.5 or more";

// Makes a device that lives as long as the process, like the registry's entries. number: index among the plugin's
// devices.
ggml_backend_dev_t make_device(ggml_backend_reg_t reg, int id, const cudaDeviceProp & prop, size_t number) {
    char pci[32];
    snprintf(pci, sizeof(pci), "%04x:%02x:%02x.0", prop.pciDomainID, prop.pciBusID, prop.pciDeviceID);
    auto * device            = new gpu;
    device->id               = id;
    device->name             = "MACKO" + std::to_string(number);
    device->description      = prop.name;
    device->pci_id           = pci;
    device->n_sm             = prop.multiProcessorCount;
    device->shared_nbytes    = static_cast<int>(prop.sharedMemPerBlockOptin);
    device->max_panel_nbytes = op_mul_mat_max_panel_nbytes(prop.totalGlobalMem);
    auto * dev               = new ggml_backend_device{ device_iface, reg, device };
    device->buft             = buffer_type(gpu_buffer_functions, dev, device);
    device->host_buft        = buffer_type(host_buffer_functions, dev, device);
    return dev;
}

std::vector<ggml_backend_dev_t> make_devices(ggml_backend_reg_t reg) {
    std::vector<ggml_backend_dev_t> devices;
    int                             n = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&n)) {
        no_device_reason = error == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one that is too old"
                                                                : cudaGetErrorString(error);
        cudaGetLastError();
        return devices;
    }
    for (int id = 0; id < n; id++) {
        cudaDeviceProp prop;
        if (cudaGetDeviceProperties(&prop, id) != cudaSuccess ||
            prop.major * 10 + prop.minor < MIN_COMPUTE_CAPABILITY) {
            cudaGetLastError();
            continue;
        }
        devices.push_back(make_device(reg, id, prop, devices.size()));
    }
    return devices;
}

} // namespace

const std::string & cuda_no_device_reason() { return no_device_reason; }

const std::vector<ggml_backend_dev_t> & cuda_devices(ggml_backend_reg_t reg) {
    static const std::vector<ggml_backend_dev_t> devices = make_devices(reg);
    return devices;
}

} // namespace macko::cuda
