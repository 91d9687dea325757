// The CPU device: a buffer type whose tensors are sparse weights (weight.h), and a backend that multiplies with them
// and computes the small operations in between (graph-plan.h).
//
// The device uses its own buffer type as the default only while the thread loads a sparse model; otherwise the default
// is the buffer type of ggml's CPU backend. So its results are in ordinary host memory: it needs no compute buffers,
// the scheduler copies no data when the backend changes, and dense models in the same process run as without the
// plugin.
#include "cpu/device/device.h"
#include "abi/buffer-type.h"
#include "abi/op-numbers.h"
#include "backend/backend-functions.h"
#include "backend/host-weights.h"
#include "backend/load-session.h"
#include "backend/log.h"
#include "backend/offload.h"
#include "backend/planned-buffer.h"
#include "cpu/device/graph-plan.h"
#include "cpu/device/weight.h"
#include "load/compress.h"
#include "platform/environment.h"
#include "platform/platform.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

namespace {

// ---- buffer ----

void buffer_free_buffer(ggml_backend_buffer_t buffer) { platform::unmap_memory(buffer->context, buffer->size); }

void * buffer_get_base(ggml_backend_buffer_t buffer) { return buffer->context; }

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t, size_t, size_t) {
    log_error("%s: %s: sparse weights cannot be overwritten\n", __func__, tensor->name);
}

void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    load_session *             current = load_session::current();
    const sparse_tensor_info * matrix  = current ? current->find(tensor) : nullptr;
    if (!matrix) {
        log_error("%s: %s: sparse weights cannot be overwritten\n", __func__, tensor->name);
        return;
    }
    if (current->ignores(tensor, *matrix, offset, size)) {
        return;
    }
    auto *         m         = static_cast<weight *>(tensor->data);
    weight_cache * cache     = current->cache();
    const bool     is_mapped = cache && cache->map(matrix->name, m, static_cast<int64_t>(weight_nbytes(*matrix)));
    weight_init(m, *matrix);
    weight_packer packer(*m);
    const int     status = is_mapped ? current->deliver(tensor, data, size,
                                                        [](const sparse_tensor_info &) { return GGML_MACKO_STATUS_OK; })
                                     : current->receive(tensor, data, size, packer);
    if (status) {
        return;
    }
    if (cache && !is_mapped) {
        current->add_to_cache(matrix->name, m, weight_used_nbytes(*m));
    }
    m->magic = WEIGHT_MAGIC;
    if (!matrix->is_only_looked_up) {
        note_host_weight(tensor);
    }
}

// Returns dense elements, for programs that save or inspect a model.
void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (const weight * m = weight_of(tensor)) {
        weight_densify(*m, offset, data, size);
    } else {
        memset(data, 0, size);
    }
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) { memset(buffer->context, value, buffer->size); }

const ggml_backend_buffer_i buffer_iface = {
    /* .free_buffer   = */ buffer_free_buffer,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ load_session::claim_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// ---- buffer type ----

const char * buft_get_name(ggml_backend_buffer_type_t) { return "MACKO_CPU"; }

size_t buft_get_alignment(ggml_backend_buffer_type_t) {
    const load_session * current = load_session::current();
    return current && current->cache() ? platform::page_size() : size_t(LAYOUT_ALIGNMENT);
}

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    // Outside of a load, the caller is a LoRA adapter, which places its tensors beside the weight that they adapt. They
    // are dense, and the CPU backend computes with them.
    if (!load_session::current()) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    if (load_session::current()->refuses()) {
        return nullptr; // the log has the reason
    }
    void * memory = platform::map_memory(size, true);
    if (!memory) {
        load_session::keep_out_of_memory("cannot allocate %.2f MiB for sparse weights",
                                         static_cast<double>(size) / 1024 / 1024);
        return nullptr;
    }
    platform::use_huge_pages(memory, size); // fewer page faults while loading, fewer TLB misses while streaming
    return ggml_backend_buffer_init(buft, buffer_iface, memory, size);
}

size_t matrix_nbytes(ggml_backend_buffer_type_t, const sparse_tensor_info & matrix) { return weight_nbytes(matrix); }

// The size is known before the payload is read, so the memory figures that llama.cpp prints are exact.
size_t buft_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    const load_session *       current = load_session::current();
    const sparse_tensor_info * matrix  = current ? current->find(tensor) : nullptr;
    return matrix ? matrix_nbytes(buft, *matrix) : ggml_nbytes(tensor);
}

// ---- backend ----

bool add_step(graph_plan & steps, const ggml_tensor * node) {
    if (is_product(node)) {
        return steps.add_product(node, weight_of(node->src[0]));
    }
    const bool is_of_weight = is_lookup(node) && host_weights_of(node->src[0]);
    return is_of_weight ? steps.add_lookup(node, weight_of(node->src[0])) : steps.add_row_op(node);
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    auto & steps = *static_cast<graph_plan *>(backend->context);
    try {
        steps.clear();
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            ggml_tensor * node = ggml_graph_node(graph, i);
            if (ggml_is_empty(node) || is_no_op(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
                continue;
            }
            steps.skip_closed_rows(graph, i);
            if (!add_step(steps, node)) {
                return GGML_STATUS_FAILED;
            }
        }
        steps.run();
        return GGML_STATUS_SUCCESS;
    } catch (const std::bad_alloc &) {
        log_error("%s: out of memory\n", __func__);
        return GGML_STATUS_ALLOC_FAILED;
    }
}

const char * backend_get_name(ggml_backend_t) { return "MACKO"; }

// Synchronous; it exists because get_props() reports the capability `async`.
void backend_set_tensor_async(ggml_backend_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    buffer_set_tensor(tensor->buffer, tensor, data, offset, size);
}

void backend_event_record(ggml_backend_t, ggml_backend_event_t) {}

constexpr ggml_backend_i backend_iface = [] {
    ggml_backend_i table   = backend_functions<graph_plan>(backend_get_name, backend_graph_compute);
    table.set_tensor_async = backend_set_tensor_async;
    table.event_record     = backend_event_record;
    return table;
}();

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x63, 0x70,
                              0x75, 0x2d, 0x31, 0x9e, 0x47, 0x5b, 0x20, 0x11 };
    return &guid;
}

// ---- device ----

const char * device_get_name(ggml_backend_dev_t) { return "MACKO_CPU"; }

const char * device_get_description(ggml_backend_dev_t) { return "sparse weights on the CPU"; }

void device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0; // it uses host memory, which the device of the CPU backend reports
    *total = 0;
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    device_get_props(dev, props);
    // With these capabilities, llama.cpp reads weights through four buffers of 1 MiB instead of one buffer as large as
    // the dense tensor. Only the placeholder at the start of a sparse tensor's bytes carries information, and touching
    // new memory for the rest took most of the load time.
    props->caps.async       = load_session::current() != nullptr;
    props->caps.host_buffer = props->caps.async;
    props->caps.events      = props->caps.async;
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t) {
    return load_session::current() ? ggml_backend_cpu_buffer_type() : nullptr;
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    auto * context = new (std::nothrow) graph_plan;
    if (context) {
        context->skips = !environment::is_disabled("relu-skip");
    }
    return context ? new ggml_backend{ backend_guid(), backend_iface, dev, context } : nullptr;
}

ggml_backend_buffer_type_t sparse_buffer_type(ggml_backend_dev_t dev) {
    static buffer_type buft({ buft_get_name, buft_alloc_buffer, buft_get_alignment, buft_get_alloc_size, nullptr }, dev,
                            nullptr);
    return buft.get();
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    const load_session * current = load_session::current_or_linked([] {
        const char * kernels = nullptr;
        return ggml_macko_check_environment() ?: select_kernels(&kernels);
    });
    if (!current) {
        return ggml_backend_cpu_buffer_type();
    }
    return current->may_not_alloc() ? planned_buffer_type(sparse_buffer_type(dev), *current, matrix_nbytes, true)
                                    : sparse_buffer_type(dev);
}

// Whether op is a product with a sparse weight, or a lookup in one. Never refuses these: the scheduler would assign
// them to a backend that reads the weight as dense.
bool is_ours(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const ggml_tensor *  w       = op->src[0];
    const ggml_tensor *  x       = op->src[1];
    const load_session * current = load_session::current();
    if (!w->buffer || real_buffer_type(w->buffer->buft) != sparse_buffer_type(dev) || w->view_src) {
        return false; // a dense weight, or a view of a sparse one, which does not point to the weight's header
    }
    if (current && !current->owns(w)) {
        return false; // a dense tensor of the model that is being loaded
    }
    if (is_lookup(op)) { // during a load, only of embeddings: other weights may also be read in other ways
        return !current || weight_use(w->name, 2) == GGML_MACKO_WEIGHT_HEAD;
    }
    return x->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
           op->nb[0] == sizeof(float);
}

// Called during a load for a weight in our buffer type, before it has data, and by the scheduler for each node. Also
// accepts a product that a GPU computes, because that GPU may not be one of the scheduler's backends. It does not
// accept the operations near such a product, because activations would be copied back and forth, or near a lookup.
bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return is_no_op(op) || (is_lookup(op) && is_ours(dev, op)) ||
           is_near_product(op, [dev, op](const ggml_tensor * node) {
               return is_ours(dev, node) && (node == op || !wants_offload(node));
           });
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return real_buffer_type(buft) == sparse_buffer_type(dev) || ggml_backend_buft_is_host(buft);
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
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ device_event_new,
    /* .event_free           = */ device_event_free,
    /* .event_synchronize    = */ device_event_synchronize,
};

} // namespace

ggml_backend_dev_t device(ggml_backend_reg_t reg) {
    static ggml_backend_device device  = { device_iface, reg, nullptr };
    static const host_weights  weights = {
        sparse_buffer_type(&device),
        [](const ggml_tensor * w) { return weight_of(w) != nullptr; },
        [](const ggml_tensor * w) { return weight_row_step(*weight_of(w)); },
        [](const ggml_tensor * w, int64_t begin, int64_t end, void * dense) {
            weight_densify_rows(*weight_of(w), begin, end, dense);
        },
    };
    set_host_weights(&weights);
    return &device;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    if (backend && ggml_guid_matches(backend->guid, backend_guid())) {
        static_cast<graph_plan *>(backend->context)->n_threads = n_threads;
    }
}

} // namespace macko::cpu
