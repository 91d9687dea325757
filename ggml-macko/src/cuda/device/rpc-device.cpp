#include "cuda/device/rpc-device.h"

#include "abi/op-numbers.h"
#include "backend/backend-functions.h"
#include "backend/log.h"
#include "cuda/device/backend.h"
#include "cuda/device/device.h"
#include "cuda/device/rpc-memory.h"
#include "rpc/cpu.h"
#include "rpc/graph.h"

#include <algorithm>

namespace macko::cuda {

namespace {

// A GPU that the server offers. It lives as long as the process.
struct served_gpu : rpc_gpu {
    ggml_backend_dev_t local; // the device that loads models
    buffer_type        buft;

    explicit served_gpu(ggml_backend_dev_t dev) : rpc_gpu{ gpu_of(dev), nullptr }, local(dev) {}
};

served_gpu & served(ggml_backend_dev_t dev) { return *static_cast<served_gpu *>(dev->context); }
served_gpu & served(ggml_backend_buffer_type_t buft) {
    return *static_cast<served_gpu *>(buffer_type::of(buft).context());
}

// ---- backend ----

struct rpc_backend {
    served_gpu & server;
    backend_ptr  local; // computes graphs
    rpc_cpu      cpu;   // computes nodes without a GPU kernel
};

constexpr const char * NEEDS_KERNEL   = "is a product that the GPU does not compute";
constexpr const char * NEEDS_OPERANDS = "needs operands in buffers of this GPU";
constexpr const char * NEEDS_MEMORY   = "needs memory that the GPU does not have";

// Checks that a tensor lies completely in a buffer of this GPU, and gives it memory. Returns null, or the reason for a
// failure.
const char * why_not_there(const rpc_backend & backend, const ggml_tensor * t) {
    if (!t->buffer || t->buffer->buft != backend.server.buft.get() || !rpc_lies_in_buffer(t)) {
        return NEEDS_OPERANDS;
    }
    auto & memory = static_cast<gpu_memory &>(*rpc_memory_of(t->buffer));
    return memory.commit(t->data, rpc_nbytes(t)) ? nullptr : NEEDS_MEMORY;
}

// Returns null if the GPU can compute a node that rpc_vet() has not refused, else the reason. On success its operands
// have memory and its weight is in place for the kernels. *scratch grows to the memory that the node needs.
const char * prepare_node(const rpc_backend & backend, ggml_tensor * node, bool sparse, size_t * scratch) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        ggml_tensor * src = node->src[i];
        if (!src || (sparse && i == 0)) {
            continue;
        }
        src->extra = nullptr; // a graph may repeat after its weights have changed
        if (const char * why = why_not_there(backend, src)) {
            return why;
        }
    }
    if (sparse) {
        node->src[0]->extra = gpu_memory::matrix_of(*rpc_place_at(node->src[0])->weight);
    }
    node->extra = nullptr;
    *scratch    = std::max(*scratch, graph_scratch_nbytes(node, sparse));
    return why_not_there(backend, node);
}

// The nodes of a graph, in order. All nodes between two refused nodes are computed together.
class stretch {
public:
    stretch(rpc_backend & backend, const ggml_cgraph * graph) : backend_(backend), graph_(graph) {}

    void add(int i, bool sparse) {
        ggml_tensor * node       = graph_->nodes[i];
        const bool    has_kernel = graph_has_kernel(node, sparse);
        const char *  why        = nullptr;
        if (has_kernel) {
            why = prepare_node(backend_, node, sparse, &scratch_);
        } else {
            skip(i);
            why = sparse ? NEEDS_KERNEL : backend_.cpu.compute(node);
        }
        if (why) {
            refuse(i, why);
        }
    }
    void refuse(int i, const char * why) {
        skip(i);
        refused_.add(graph_->nodes[i], why);
    }
    void skip(int i) {
        run(i);
        begin_ = i + 1;
    }
    // computes all nodes up to node `end`
    void run(int end) {
        if (begin_ < end && backend_.server.device.select()) {
            ggml_cgraph part = rpc_stretch(graph_, begin_, end);
            const bool  done = backend_prepare(backend_.local.get(), scratch_) &&
                              ggml_backend_graph_compute_async(backend_.local.get(), &part) == GGML_STATUS_SUCCESS;
            for (int i = begin_; !done && i < end; i++) {
                if (rpc_vet(graph_->nodes[i]) != rpc_verdict::SKIPPED) {
                    refused_.add(graph_->nodes[i], NEEDS_MEMORY);
                }
            }
        }
        begin_   = end;
        scratch_ = 0;
    }

private:
    rpc_backend &       backend_;
    const ggml_cgraph * graph_;
    rpc_refusals        refused_;
    int                 begin_   = 0;
    size_t              scratch_ = 0; // bytes for the nodes from begin_ on
};

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    auto & context = *static_cast<rpc_backend *>(backend->context);
    context.server.uploader.reset(); // all weights have arrived
    const int status = c_boundary([&] {
        stretch s(context, graph);
        for (int i = 0; i < graph->n_nodes; i++) {
            switch (rpc_vet(graph->nodes[i])) {
                case rpc_verdict::ABSENT:  s.skip(i); break;
                case rpc_verdict::SKIPPED: break;
                case rpc_verdict::PRODUCT: s.add(i, true); break;
                case rpc_verdict::OTHER:   s.add(i, false); break;
                case rpc_verdict::REFUSED: s.refuse(i, RPC_NEEDS_WEIGHT); break;
                case rpc_verdict::FOREIGN: s.refuse(i, RPC_NEEDS_OPERATION); break;
            }
        }
        s.run(graph->n_nodes);
        return static_cast<int>(GGML_MACKO_STATUS_OK);
    });
    if (status) {
        log_error("%s: %s\n", context.server.device.name.c_str(), ggml_macko_last_error());
        return GGML_STATUS_ALLOC_FAILED;
    }
    return GGML_STATUS_SUCCESS; // results that were not computed read as NaN; all of them if the GPU has failed
}

const char * backend_get_name(ggml_backend_t backend) {
    return static_cast<rpc_backend *>(backend->context)->server.device.name.c_str();
}

void backend_synchronize(ggml_backend_t backend) {
    ggml_backend_synchronize(static_cast<rpc_backend *>(backend->context)->local.get());
}

constexpr ggml_backend_i backend_iface = [] {
    ggml_backend_i table = backend_functions<rpc_backend>(backend_get_name, backend_graph_compute);
    table.synchronize    = backend_synchronize;
    return table;
}();

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x72, 0x70,
                              0x63, 0x2d, 0x67, 0x70, 0x75, 0x91, 0x0b, 0xe4 };
    return &guid;
}

// ---- buffer type ----

const char * buft_get_name(ggml_backend_buffer_type_t buft) { return served(buft).device.name.c_str(); }

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    size                               = std::max(size, size_t(1));
    std::unique_ptr<gpu_memory> memory = gpu_memory::reserve(served(buft), size);
    return memory ? rpc_buffer_init(buft, size, std::move(memory)) : nullptr;
}

size_t buft_get_alignment(ggml_backend_buffer_type_t) { return GPU_ALIGNMENT; }

// it allocates the dense size of each tensor: scratch memory is the backend's
const buffer_type_functions buft_functions = { buft_get_name, buft_alloc_buffer, buft_get_alignment, nullptr, nullptr };

// ---- device ----

const char * device_get_name(ggml_backend_dev_t dev) { return served(dev).device.name.c_str(); }

const char * device_get_description(ggml_backend_dev_t dev) { return served(dev).device.description.c_str(); }

void device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    ggml_backend_dev_memory(served(dev).local, free, total);
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    device_get_props(dev, props);
    props->device_id = served(dev).device.pci_id.c_str();
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    backend_ptr local(make_backend(served(dev).local));
    if (!local) {
        return nullptr;
    }
    return new ggml_backend{ backend_guid(), backend_iface, dev, new rpc_backend{ served(dev), std::move(local), {} } };
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) { return served(dev).buft.get(); }

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return graph_supports_op(op, false); }

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == served(dev).buft.get();
}

const ggml_backend_device_i device_iface = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ get_props,
    /* .init_backend         = */ device_init_backend,
    /* .get_buffer_type      = */ device_get_buffer_type,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

std::vector<ggml_backend_dev_t> make_devices(ggml_backend_reg_t reg) {
    std::vector<ggml_backend_dev_t> devices;
    for (ggml_backend_dev_t local : cuda_devices(reg)) {
        if (!address_range::is_supported(gpu_of(local).id)) {
            log_warn("ggml-macko: %s is not offered: its driver has no virtual memory management\n",
                     gpu_of(local).name.c_str());
            continue;
        }
        auto * server = new served_gpu(local);
        auto * dev    = new ggml_backend_device{ device_iface, reg, server };
        server->buft  = buffer_type(buft_functions, dev, server);
        devices.push_back(dev);
    }
    return devices;
}

} // namespace

const std::vector<ggml_backend_dev_t> & rpc_devices(ggml_backend_reg_t reg) {
    static const std::vector<ggml_backend_dev_t> devices = make_devices(reg);
    return devices;
}

bool rpc_set_n_threads(ggml_backend_t backend, int n_threads) {
    const bool is_ours = backend && ggml_guid_matches(backend->guid, backend_guid());
    if (is_ours) {
        static_cast<rpc_backend *>(backend->context)->cpu.n_threads = n_threads;
    }
    return is_ours;
}

} // namespace macko::cuda
