#include "cpu/rpc-device.h"
#include "cpu/graph-plan.h"
#include "cpu/rpc-buffer.h"
#include "host/log.h"
#include "host/registered-devices.h"
#include "host/running-ops.h"

#include "ggml-impl.h"

#include <cmath>
#include <cstring>
#include <memory>

namespace macko::cpu {

namespace {

// ---- backend ----

struct backend_deleter {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};

struct backend_context {
    graph_plan                                     plan;
    std::unique_ptr<ggml_backend, backend_deleter> cpu; // ggml's
};

bool is_f32(const ggml_tensor * t) {
    constexpr size_t size = sizeof(float);
    return t && t->type == GGML_TYPE_F32 && t->nb[0] == size && reinterpret_cast<uintptr_t>(t->data) % size == 0 &&
           t->nb[1] % size == 0 && t->nb[2] % size == 0 && t->nb[3] % size == 0 && rpc_lies_in_buffer(t);
}

// Whether a product has the shapes of ggml_mul_mat or ggml_mul_mat_id, and operands where they say; ids are checked
// when they are read.
bool is_sound_product(const ggml_tensor * dst, const rpc_weight & weight) {
    const ggml_tensor * w = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    if (!weight.weight || w->data != weight.place || w->view_src || w->type != weight.type ||
        memcmp(w->ne, weight.ne, sizeof(weight.ne)) != 0 || !is_f32(x) || !is_f32(dst) || x->ne[0] != w->ne[0] ||
        dst->ne[0] != w->ne[1] || !ggml_is_contiguous(dst)) {
        return false;
    }
    if (op_of(dst) == GGML_OP_MUL_MAT) {
        return dst->ne[1] == x->ne[1] && dst->ne[2] == x->ne[2] && dst->ne[3] == x->ne[3] && x->ne[2] % w->ne[2] == 0 &&
               x->ne[3] % w->ne[3] == 0;
    }
    const ggml_tensor * ids = dst->src[2];
    return w->ne[3] == 1 && ids && ids->type == GGML_TYPE_I32 && ids->nb[0] == sizeof(int32_t) &&
           rpc_lies_in_buffer(ids) && ids->ne[2] == 1 && ids->ne[3] == 1 && x->ne[3] == 1 && dst->ne[3] == 1 &&
           dst->ne[1] == ids->ne[0] && dst->ne[2] == ids->ne[1] && x->ne[2] == ids->ne[1] &&
           (x->ne[1] == 1 || x->ne[1] == ids->ne[0]);
}

bool has_sparse_operand(const ggml_tensor * node) {
    for (const ggml_tensor * src : node->src) {
        if (src && rpc_weight_at(src)) {
            return true;
        }
    }
    return rpc_weight_at(node) != nullptr;
}

bool is_sparse_product(const ggml_tensor * node) {
    const ggml_tensor * w      = is_product(node) ? node->src[0] : nullptr;
    const rpc_weight *  weight = w ? rpc_weight_at(w) : nullptr;
    return weight && is_sound_product(node, *weight);
}

// Makes the result of a node that cannot be computed NaN. The protocol has no way to tell the client, and a status
// other than success ends the server.
void refuse(const ggml_tensor * node) {
    log_error("ggml-macko: refused from an RPC client: %s (%s) needs a sparse weight that has not arrived in full, or "
              "in another way than as a factor\n",
              printable(node->name).text, ggml_op_name(node->op));
    if (!is_f32(node) || rpc_weight_at(node)) {
        return;
    }
    for (int64_t r = 0; r < ggml_nrows(node); r++) {
        const int64_t i1 = r % node->ne[1], i2 = r / node->ne[1] % node->ne[2], i3 = r / (node->ne[1] * node->ne[2]);
        auto * row = reinterpret_cast<float *>(static_cast<char *>(node->data) + i1 * node->nb[1] + i2 * node->nb[2] +
                                               i3 * node->nb[3]);
        std::fill(row, row + node->ne[0], NAN);
    }
}

enum class computed_by { nobody, plan, cpu, refused };

computed_by who_computes(const ggml_tensor * node) {
    if (ggml_is_empty(node) || is_no_op(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return computed_by::nobody;
    }
    if (is_sparse_product(node)) {
        return computed_by::plan;
    }
    if (has_sparse_operand(node)) {
        return computed_by::refused;
    }
    const bool sound =
        is_row_op(node) && is_f32(node) && is_f32(node->src[0]) && (!node->src[1] || is_f32(node->src[1]));
    return sound && is_near_product(node, is_sparse_product) ? computed_by::plan : computed_by::cpu;
}

// The nodes of a graph in their order, as stretches that ggml's CPU backend computes and stretches of the plan.
class stretches {
public:
    stretches(backend_context & context, ggml_cgraph * graph) : context_(context), graph_(graph) {
        context_.plan.clear();
    }
    void add_to_plan(const ggml_tensor * node) {
        run_cpu();
        if (!(is_product(node) ? context_.plan.add_product(node, rpc_weight_at(node->src[0])->weight)
                               : context_.plan.add_row_op(node))) {
            run_plan();
            refuse(node);
        }
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
            ggml_cgraph part = *graph_; // what ggml_graph_view() does, which no header declares for plugins
            part.nodes += begin_;
            part.n_nodes = end_ - begin_;
            part.n_leafs = 0;
            part.uid     = 0;
            status_      = ggml_backend_graph_compute(context_.cpu.get(), &part);
        }
        begin_ = -1;
    }

    backend_context & context_;
    ggml_cgraph *     graph_;
    int               begin_ = -1, end_ = 0; // nodes that the CPU backend has to compute next, if begin_ >= 0
    ggml_status       status_ = GGML_STATUS_SUCCESS;
};

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    try {
        stretches s(*static_cast<backend_context *>(backend->context), graph);
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            switch (who_computes(node)) {
                case computed_by::nobody: break;
                case computed_by::plan:   s.add_to_plan(node); break;
                case computed_by::cpu:    s.add_to_cpu(i); break;
                case computed_by::refused:
                    static_cast<void>(s.run());
                    refuse(node);
                    break;
            }
        }
        return s.run();
    } catch (const std::bad_alloc &) {
        log_error("%s: out of memory\n", __func__);
        return GGML_STATUS_ALLOC_FAILED;
    }
}

const char * backend_get_name(ggml_backend_t) { return "MACKO"; }

void backend_free(ggml_backend_t backend) {
    delete static_cast<backend_context *>(backend->context);
    delete backend;
}

const ggml_backend_i backend_iface = {
    /* .get_name            = */ backend_get_name,
    /* .free                = */ backend_free,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ backend_graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x72, 0x70,
                              0x63, 0x2d, 0xc4, 0x1e, 0x83, 0x5a, 0x6f, 0x29 };
    return &guid;
}

// ---- buffer type ----

const char * buft_get_name(ggml_backend_buffer_type_t) { return "MACKO_CPU"; }

size_t buft_get_alignment(ggml_backend_buffer_type_t) { return BITMAP_ALIGNMENT; }

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type buft = {
        {
            /* .get_name       = */ buft_get_name,
            /* .alloc_buffer   = */ rpc_buffer_alloc,
            /* .get_alignment  = */ buft_get_alignment,
            /* .get_max_size   = */ nullptr, // SIZE_MAX
            /* .get_alloc_size = */ nullptr, // the dense size
            /* .is_host        = */ nullptr, // no
        },
        dev,
        nullptr,
    };
    return &buft;
}

// ---- device ----

ggml_backend_dev_t cpu_device() {
    for (ggml_backend_dev_t device : registered_devices()) {
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return device;
        }
    }
    return nullptr;
}

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

// rpc-server offers devices of this type without being told
enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    device_get_memory(dev, &props->memory_free, &props->memory_total);
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

ggml_backend_dev_t rpc_device(ggml_backend_reg_t reg) {
    static ggml_backend_device device = { device_iface, reg, nullptr };
    return &device;
}

bool rpc_set_n_threads(ggml_backend_t backend, int n_threads) {
    if (!backend || !ggml_guid_matches(backend->guid, backend_guid())) {
        return false;
    }
    auto & context         = *static_cast<backend_context *>(backend->context);
    context.plan.n_threads = n_threads;
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(context.cpu.get()));
    const auto         set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set) {
        set(context.cpu.get(), n_threads);
    }
    return true;
}

} // namespace macko::cpu
