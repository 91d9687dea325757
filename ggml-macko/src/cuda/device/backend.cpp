#include "cuda/device/backend.h"

#include "abi/ggml-abi.h"
#include "backend/backend-functions.h"
#include "backend/host-weights.h"
#include "backend/load-session.h"
#include "backend/log.h"
#include "backend/offload.h"
#include "cuda/device/buffer.h"
#include "cuda/device/captures.h"
#include "platform/environment.h"

#include <algorithm>
#include <cstdlib>

namespace macko::cuda {

namespace {

struct backend_context {
    gpu &                      device;
    op_context                 ops;
    std::shared_ptr<workspace> shared;
    cudaStream_t               capture_stream = nullptr;
    unsigned *                 counters       = nullptr; // of the ops
    size_t                     scratch_nbytes = 0;       // of the ops
    size_t                     panels_for     = 0;       // panel_nbytes of the device when `shared` was chosen
    bool                       busy           = false;   // work was queued since the last synchronize()

    bool            use_graphs = true, use_fusion = true, use_cublas = true;
    captured_graphs captures;
    uint64_t        buffers_freed = 0; // counter of the device when the captures were made

    explicit backend_context(gpu & d) : device(d) {}
    ~backend_context();
    backend_context(const backend_context &)             = delete;
    backend_context & operator=(const backend_context &) = delete;

    bool create();
    void attach_workspace();
    bool make_scratch(size_t nbytes);
};

backend_context & context_of(ggml_backend_t backend) { return *static_cast<backend_context *>(backend->context); }

bool backend_context::create() {
    constexpr size_t counters_nbytes = N_COUNTERS * sizeof(unsigned);

    use_graphs        = !environment::is_disabled("graphs"); // to compare
    use_fusion        = !environment::is_disabled("fusion");
    use_cublas        = !environment::is_disabled("cublas");
    ops.n_sm          = device.n_sm;
    ops.shared_nbytes = device.shared_nbytes;
    if (!device.check_memory(op_compute_capability(&ops.cc), "cudaFuncGetAttributes") ||
        !device.check_memory(cudaStreamCreateWithFlags(&capture_stream, cudaStreamNonBlocking), "cudaStreamCreate") ||
        !device.check_memory(cudaMalloc(&counters, counters_nbytes), "cudaMalloc") ||
        !device.check_memory(cudaMemsetAsync(counters, 0, counters_nbytes, device.stream), "cudaMemset") ||
        !device.synchronize()) {
        return false;
    }
    device.cc    = ops.cc;
    ops.overlap  = ops.cc >= 90 && !environment::is_disabled("overlap");
    ops.counters = counters;
    if (!load_session::current()) { // a backend that only uploads weights needs no workspace
        attach_workspace();
    }
    return true;
}

// Attaches the workspace for products of many columns; without it they are slower.
void backend_context::attach_workspace() {
    const int64_t offload_from =
        offload_min_columns(getenv("GGML_OP_OFFLOAD_MIN_BATCH"), environment::is_disabled("offload"));
    const size_t offloaded    = offload_from < NEVER_OFFLOAD ? largest_host_weight() : 0;
    const size_t panel_nbytes = std::max<size_t>(device.panel_nbytes, std::min(offloaded, device.max_panel_nbytes));
    const std::lock_guard<std::mutex> lock(device.compute);
    if (use_cublas && !device.cublas_opened) {
        device.cublas        = cublas_open();
        device.cublas_opened = true;
    }
    panels_for           = device.panel_nbytes;
    shared               = device.shared.lock();
    const bool too_small = shared && shared->panels.nbytes && shared->panels.nbytes < panel_nbytes;
    if (!shared || too_small) { // contexts with the old workspace keep it
        device.shared = shared = std::make_shared<workspace>();
    }
    if (!shared->create(panel_nbytes)) {
        log_error("%s: no memory for the workspace of matrix products: prompts are processed slowly\n",
                  device.name.c_str());
    }
    ops.cublas           = use_cublas && shared->gemm ? device.cublas.get() : nullptr;
    ops.cublas_workspace = shared->gemm;
    ops.panels           = shared->panels.nbytes ? &shared->panels : nullptr;

    device.offload_panel_nbytes = offload_from < NEVER_OFFLOAD ? shared->panels.nbytes : 0;
    set_offload_columns(offloaded > 0 && !shared->panels.nbytes ? NEVER_OFFLOAD : offload_from);
}

// The caller has selected the device, and it is idle.
bool backend_context::make_scratch(size_t nbytes) {
    constexpr size_t STEP = size_t(1) << 20;
    captures.drop(); // they contain the old address
    const bool freed = device.check(cudaFree(ops.scratch), "cudaFree");
    ops.scratch      = nullptr;
    scratch_nbytes   = 0;
    nbytes           = GGML_PAD(nbytes + 1, STEP);
    if (!freed || !device.check_memory(cudaMalloc(&ops.scratch, nbytes), "cudaMalloc")) {
        return false;
    }
    scratch_nbytes = nbytes;
    return true;
}

backend_context::~backend_context() {
    if (device.select()) {
        device.synchronize();
        captures.drop();
        if (capture_stream) {
            cudaStreamDestroy(capture_stream);
        }
        cudaFree(counters);
        cudaFree(ops.scratch);
    }
}

// ---- graphs ----

bool enqueue_eagerly(backend_context & ctx, const ggml_cgraph * graph) {
    const ggml_tensor * failed = nullptr;
    ctx.ops.stream             = ctx.device.stream;
    const cudaError_t error    = graph_enqueue(ctx.ops, graph, ctx.use_fusion, &failed);
    return error == cudaSuccess || ctx.device.check_memory(error, failed->name);
}

// Returns false if the graph cannot be captured; nothing was queued then.
bool make_capture(backend_context & ctx, const ggml_cgraph * graph, captured_graph & c) {
    if (graph_multiplies_by_expert(ctx.ops, graph)) {
        c.failed = true;
        return false;
    }
    const ggml_tensor * failed = nullptr;
    cudaGraph_t         made   = nullptr;
    ctx.ops.stream             = ctx.capture_stream;
    cudaError_t error          = cudaStreamBeginCapture(ctx.capture_stream, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) {
        const cudaError_t queued = graph_enqueue(ctx.ops, graph, ctx.use_fusion, &failed);
        error                    = cudaStreamEndCapture(ctx.capture_stream, &made);
        error                    = queued != cudaSuccess ? queued : error;
    }
    if (error == cudaSuccess) {
        error = cudaGraphInstantiate(&c.exec, made, 0);
    }
    if (made) {
        cudaGraphDestroy(made);
    }
    if (error != cudaSuccess) {
        cudaGetLastError();
        c.exec   = nullptr;
        c.failed = true;
    }
    return error == cudaSuccess;
}

bool compute(backend_context & ctx, const ggml_cgraph * graph) {
    gpu & device = ctx.device;
    if (ctx.shared) {
        ctx.shared->panels.n_threads = device.n_threads;
    }
    // host threads take part in products with weights in host memory
    if (!ctx.use_graphs || !is_worth_capturing(graph) || graph_has_host_weights(graph)) {
        return enqueue_eagerly(ctx, graph);
    }
    if (ctx.buffers_freed != device.buffers_freed) { // addresses in captured graphs may have a different meaning now
        ctx.buffers_freed = device.buffers_freed;
        device.synchronize();
        ctx.captures.drop();
    }
    bool             is_known;
    captured_graph & c = ctx.captures.find_or_add(graph, &is_known);
    if (is_known && (c.exec || (!c.failed && make_capture(ctx, graph, c)))) {
        return device.check_memory(cudaGraphLaunch(c.exec, device.stream), "cudaGraphLaunch");
    }
    return enqueue_eagerly(ctx, graph); // for the first time, or if it cannot be captured
}

// ---- backend ----

const char * backend_get_name(ggml_backend_t backend) { return context_of(backend).device.name.c_str(); }

void backend_synchronize(ggml_backend_t backend) {
    backend_context & ctx = context_of(backend);
    if (ctx.busy && ctx.device.select()) {
        ctx.device.synchronize();
    }
    ctx.busy = false;
}

// Neither this function nor get_tensor_async is asynchronous: see get_props() of device.cpp.
void backend_set_tensor_async(ggml_backend_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    buffer_set_tensor(tensor->view_src ? tensor->view_src->buffer : tensor->buffer, tensor, data, offset, size);
}

// The copy is queued behind the nodes that compute the tensor, so waiting for the copy is enough.
void backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset,
                              size_t size) {
    backend_context &     ctx    = context_of(backend);
    ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (!is_gpu_buffer(buffer) || &gpu_of(buffer) != &ctx.device) {
        backend_synchronize(backend);
    }
    buffer->iface.get_tensor(buffer, tensor, data, offset, size);
    ctx.busy = false; // a read waits for the whole stream
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    backend_context & ctx = context_of(backend);
    if (!ctx.device.select()) {
        return GGML_STATUS_FAILED;
    }
    ctx.busy = true;
    const std::lock_guard<std::mutex> lock(ctx.device.compute);
    return compute(ctx, graph) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void backend_event_record(ggml_backend_t, ggml_backend_event_t) {}

void backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    backend_context & ctx = context_of(backend);
    if (ctx.use_fusion) {
        graph_optimize(ctx.ops, graph, passed_optimize_params(params));
    }
}

constexpr ggml_backend_i backend_iface = [] {
    ggml_backend_i table   = backend_functions<backend_context>(backend_get_name, backend_graph_compute);
    table.set_tensor_async = backend_set_tensor_async;
    table.get_tensor_async = backend_get_tensor_async;
    table.synchronize      = backend_synchronize;
    table.event_record     = backend_event_record;
    table.graph_optimize   = backend_graph_optimize;
    return table;
}();

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x67, 0x70,
                              0x75, 0x2d, 0x31, 0x4c, 0x07, 0xd2, 0x9e, 0x35 };
    return &guid;
}

} // namespace

ggml_backend_t make_backend(ggml_backend_dev_t dev) {
    gpu & device = gpu_of(dev);
    if (!device.select()) {
        return nullptr;
    }
    auto context = std::make_unique<backend_context>(device);
    if (!context->create()) {
        return nullptr;
    }
    return new ggml_backend{ backend_guid(), backend_iface, dev, context.release() };
}

bool set_n_threads(ggml_backend_t backend, int n_threads) {
    const bool is_ours = backend && ggml_guid_matches(backend->guid, backend_guid());
    if (is_ours) {
        context_of(backend).device.n_threads = n_threads;
    }
    return is_ours;
}

bool backend_prepare(ggml_backend_t backend, size_t scratch_nbytes) {
    backend_context & ctx        = context_of(backend);
    const bool        new_panels = ctx.panels_for < ctx.device.panel_nbytes;
    const bool        new_memory = !ctx.ops.scratch || ctx.scratch_nbytes < scratch_nbytes;
    if ((new_panels || new_memory) && (!ctx.device.select() || !ctx.device.synchronize())) {
        return false;
    }
    if (new_panels) {
        ctx.captures.drop();
        ctx.attach_workspace();
    }
    return !new_memory || ctx.make_scratch(scratch_nbytes);
}

} // namespace macko::cuda
