// Functions that the backends and devices of this plugin share.
#pragma once

#include "ggml-backend-impl.h"

#include <memory>
#include <new>

namespace macko {

// The functions that ggml requires, for a backend that owns a CONTEXT. The others are null: ggml then copies
// synchronously, and makes no plans of graphs.
template <typename CONTEXT>
constexpr ggml_backend_i backend_functions(decltype(ggml_backend_i::get_name)      get_name,
                                           decltype(ggml_backend_i::graph_compute) graph_compute) {
    ggml_backend_i table = {};
    table.get_name       = get_name;
    table.free           = [](ggml_backend_t backend) {
        delete static_cast<CONTEXT *>(backend->context);
        delete backend;
    };
    table.graph_compute = graph_compute;
    return table;
}

struct backend_deleter {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
using backend_ptr = std::unique_ptr<ggml_backend, backend_deleter>;

// The properties that other functions of a device return. It has no id and no capabilities.
inline void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = dev->iface.get_name(dev);
    props->description = dev->iface.get_description(dev);
    props->type        = dev->iface.get_type(dev);
    dev->iface.get_memory(dev, &props->memory_free, &props->memory_total);
}

// Events of a device whose writes are complete when they return.
inline ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) {
    return new (std::nothrow) ggml_backend_event{ dev, nullptr };
}
inline void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }
inline void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

} // namespace macko
