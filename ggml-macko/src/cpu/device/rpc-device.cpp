#include "cpu/device/rpc-device.h"
#include "abi/buffer-type.h"
#include "backend/backend-functions.h"
#include "backend/log.h"
#include "backend/registered-devices.h"
#include "cpu/device/graph-plan.h"
#include "cpu/device/rpc-memory.h"
#include "rpc/graph.h"

#include <algorithm>

namespace macko::cpu {

namespace {

// ---- backend ----

struct backend_context {
    graph_plan  plan;
    backend_ptr cpu; // ggml's CPU backend
};

bool is_sparse_product(const ggml_tensor * node) { return rpc_vet(node) == rpc_verdict::PRODUCT; }

// Whether a dense node is a row operation near a sparse product, which the plan computes.
bool is_planned(const ggml_tensor * node) {
    const bool sound =
        is_row_op(node) && rpc_is_f32(node) && rpc_is_f32(node->src[0]) && (!node->src[1] || rpc_is_f32(node->src[1]));
    return sound && is_near_product(node, is_sparse_product);
}

// Divides the nodes of a graph, in order, into ranges for ggml's CPU backend and ranges for the plan.
class stretches {
public:
    stretches(backend_context & context, ggml_cgraph * graph) : context_(context), graph_(graph) {
        context_.plan.clear();
    }
    void add_to_plan(const ggml_tensor * node) {
        run_cpu();
        const bool added = is_product(node)
                               ? context_.plan.add_product(node, &rpc_weight_of(*rpc_place_at(node->src[0])->weight))
                               : context_.plan.add_row_op(node);
        if (!added) {
            run_plan();
            refused_.add(node, RPC_NEEDS_WEIGHT);
        }
    }
    void refuse(const ggml_tensor * node, const char * why) {
        static_cast<void>(run());
        refused_.add(node, why);
    }
    void add_to_cpu(int i) {
        run_plan();
        begin_ = begin_ < 0 ? i : begin_;
        end_   = i + 1;
    }
    ggml_status run() {
        run_plan();
        run_cpu();
        return status_;
    }

private:
    void run_plan() {
        if (!context_.plan.is_empty()) {
            context_.plan.run();
            context_.plan.clear();
        }
    }
    void run_cpu() {
        if (begin_ >= 0 && status_ == GGML_STATUS_SUCCESS) {
            ggml_cgraph part = rpc_stretch(graph_, begin_, end_);
            status_          = ggml_backend_graph_compute(context_.cpu.get(), &part);
        }
        begin_ = -1;
    }

    backend_context & context_;
    ggml_cgraph *     graph_;
    rpc_refusals      refused_;
    int               begin_ = -1, end_ = 0; // the next nodes for the CPU backend, if begin_ >= 0
    ggml_status       status_ = GGML_STATUS_SUCCESS;
};

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    try {
        stretches s(*static_cast<backend_context *>(backend->context), graph);
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            switch (rpc_vet(node)) {
                case rpc_verdict::ABSENT:  static_cast<void>(s.run()); break;
                case rpc_verdict::SKIPPED: break;
                case rpc_verdict::PRODUCT: s.add_to_plan(node); break;
                case rpc_verdict::OTHER:   is_planned(node) ? s.add_to_plan(node) : s.add_to_cpu(i); break;
                case rpc_verdict::REFUSED: s.refuse(node, RPC_NEEDS_WEIGHT); break;
                case rpc_verdict::FOREIGN: s.refuse(node, RPC_NEEDS_OPERATION); break;
            }
        }
        return s.run();
    } catch (const std::bad_alloc &) {
        log_error("%s: out of memory\n", __func__);
        return GGML_STATUS_ALLOC_FAILED;
    }
}

const char * backend_get_name(ggml_backend_t) { return "MACKO"; }

constexpr ggml_backend_i backend_iface = backend_functions<backend_context>(backend_get_name, backend_graph_compute);

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x72, 0x70,
                              0x63, 0x2d, 0xc4, 0x1e, 0x83, 0x5a, 0x6f, 0x29 };
    return &guid;
}

// ---- buffer type ----

const char * buft_get_name(ggml_backend_buffer_type_t) { return "MACKO_CPU"; }

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    size                               = std::max(size, size_t(1));
    std::unique_ptr<rpc_memory> memory = rpc_memory_reserve(size);
    return memory ? rpc_buffer_init(buft, size, std::move(memory)) : nullptr;
}

size_t buft_get_alignment(ggml_backend_buffer_type_t) { return LAYOUT_ALIGNMENT; }

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    // it allocates the dense size of each tensor
    static buffer_type buft({ buft_get_name, buft_alloc_buffer, buft_get_alignment, nullptr, nullptr }, dev, nullptr);
    return buft.get();
}

// ---- device ----

const char * device_get_name(ggml_backend_dev_t) { return "MACKO_CPU"; }

const char * device_get_description(ggml_backend_dev_t) { return "sparse and dense weights on the CPU"; }

void device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free                  = 0;
    *total                 = 0;
    ggml_backend_dev_t cpu = cpu_device();
    if (cpu) {
        ggml_backend_dev_memory(cpu, free, total);
    }
}

// rpc-server offers devices of type GPU by default, and no others.
enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t dev) {
    return *static_cast<const bool *>(dev->context) ? GGML_BACKEND_DEVICE_TYPE_GPU : GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    const char * kernels = nullptr;
    if (select_kernels(&kernels)) {
        log_error("ggml-macko: %s\n", ggml_macko_last_error());
        return nullptr;
    }
    ggml_backend_dev_t cpu     = cpu_device();
    auto               context = std::make_unique<backend_context>();
    context->cpu.reset(cpu ? ggml_backend_dev_init(cpu, nullptr) : nullptr);
    if (!context->cpu) {
        log_error("ggml-macko: the process has no CPU backend\n");
        return nullptr;
    }
    return new ggml_backend{ backend_guid(), backend_iface, dev, context.release() };
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    ggml_backend_dev_t cpu = cpu_device();
    return cpu && ggml_backend_dev_supports_op(cpu, op);
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == device_get_buffer_type(dev) || ggml_backend_buft_is_host(buft);
}

const ggml_backend_device_i device_iface = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ device_get_props,
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

} // namespace

ggml_backend_dev_t rpc_device(ggml_backend_reg_t reg, bool alone) {
    static bool                is_alone = alone;
    static ggml_backend_device device   = { device_iface, reg, &is_alone };
    return &device;
}

bool rpc_set_n_threads(ggml_backend_t backend, int n_threads) {
    if (!backend || !ggml_guid_matches(backend->guid, backend_guid())) {
        return false;
    }
    auto & context         = *static_cast<backend_context *>(backend->context);
    context.plan.n_threads = n_threads;
    set_cpu_threads(context.cpu.get(), n_threads);
    return true;
}

} // namespace macko::cpu
