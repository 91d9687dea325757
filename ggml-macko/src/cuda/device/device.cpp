// ggml's vtables for an NVIDIA GPU. All work of a device, of every context and buffer, goes to one stream: copies,
// clears and kernels are
// ordered by construction. Copies from and to host memory block, but for small writes, which wait for the next use of
// the stream (the smallest,
// which then go in one launch) or pass through a pinned ring.
// A CUDA error makes the device dead: every later graph fails, every read returns NaN bytes. CUDA offers no recovery
// within a process. Memory that is
// wanting for a buffer, a context or a graph makes that fail alone.
#include "cuda/device/device.h"

#include "cuda/graph/graph.h"
#include "cuda/lib/cublas.h"
#include "cuda/sparse/ec-csr/upload.h"
#include "ggml-impl.h"
#include "host/load-session.h"
#include "host/log.h"
#include "host/planned-buffer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <omp.h>
#include <unistd.h>

namespace macko::cuda {

namespace {

constexpr size_t ALIGNMENT      = CUDA_SPARSE_ALIGNMENT;
constexpr size_t RING_NBYTES    = size_t(1) << 20;
constexpr size_t RING_MAX_WRITE = size_t(64) << 10;
// of a sparse matrix made dense: whole matrices of common models, so that the product's
constexpr size_t MAX_PANEL_NBYTES = size_t(96) << 20;
// tiles fill the GPU as they do for dense weights; of the GPU's memory at most 1/512
constexpr size_t MAX_PANEL_SHARE = 512;
constexpr size_t MAX_CAPTURES    = 24; // graphs kept per context: one per batch shape and window of 256 positions
// larger batches keep the GPU busy while the CPU queues, and seldom come twice
constexpr int64_t MAX_CAPTURE_COLUMNS = 64;

// ---- GPU ----

// What the products of many columns need beside the tensors, shared by the contexts of a GPU: their work is on one
// stream. Gone with the last context.
struct workspace {
    void *        gemm = nullptr; // cuBLAS's
    panel_buffers panels;

    // false: no memory; what there is stays usable
    bool create(size_t panel_nbytes) {
        bool ok = gemm || cudaMalloc(&gemm, CUBLAS_WORKSPACE_NBYTES) == cudaSuccess;
        if (panel_nbytes > 0 && !panels.nbytes) {
            bool made = cudaStreamCreateWithFlags(&panels.stream, cudaStreamNonBlocking) == cudaSuccess &&
                        cudaEventCreateWithFlags(&panels.begin, cudaEventDisableTiming) == cudaSuccess &&
                        cudaMalloc(&panels.x16, CUDA_SPARSE_X16_NBYTES) == cudaSuccess;
            for (int i = 0; i < panel_buffers::N; i++) {
                made = made && cudaMalloc(&panels.memory[i], panel_nbytes) == cudaSuccess &&
                       cudaEventCreateWithFlags(&panels.made[i], cudaEventDisableTiming) == cudaSuccess &&
                       cudaEventCreateWithFlags(&panels.used[i], cudaEventDisableTiming) == cudaSuccess;
            }
            panels.nbytes = made ? panel_nbytes : 0;
            ok            = ok && made;
        }
        cudaGetLastError();
        return ok;
    }
    ~workspace() {
        cudaFree(gemm);
        cudaFree(panels.x16);
        for (int i = 0; i < panel_buffers::N; i++) {
            cudaFree(panels.memory[i]);
            if (panels.made[i]) {
                cudaEventDestroy(panels.made[i]);
            }
            if (panels.used[i]) {
                cudaEventDestroy(panels.used[i]);
            }
        }
        if (panels.begin) {
            cudaEventDestroy(panels.begin);
        }
        if (panels.stream) {
            cudaStreamDestroy(panels.stream);
        }
    }
};

struct gpu {
    int         id = 0;
    std::string name, description, pci_id;
    int         n_sm = 0, shared_nbytes = 0;
    size_t      max_panel_nbytes = 0;
    pid_t       pid              = getpid();

    ggml_backend_buffer_type buft = {}, host_buft = {};

    std::mutex compute; // held while a graph is queued: contexts share what follows
    // a handle costs host memory that CUDA never gives back: one per GPU, for good
    std::unique_ptr<cublas_library> cublas;
    bool                            cublas_opened = false;
    std::weak_ptr<workspace>        shared;

    std::mutex   mutex; // of what follows
    cudaStream_t stream    = nullptr;
    char *       ring      = nullptr; // pinned
    size_t       ring_used = 0;
    // not queued yet: select() does it, and everything that uses the stream selects first
    small_writes          pending;
    std::atomic<bool>     dead{ false };
    std::atomic<uint64_t> buffers_freed{ 0 };
    std::atomic<size_t>   panel_nbytes{ 0 }; // that suit the largest sparse matrix so far

    // makes this GPU current on the calling thread, and its stream on first use
    bool select() {
        const std::lock_guard<std::mutex> lock(mutex);
        return make_current() && queue_pending();
    }
    bool queue_pending() { // mutex is held
        const cudaError_t error = op_small_writes(pending, stream);
        pending.n = pending.nbytes = 0;
        return check(error, "writing to the GPU");
    }
    bool make_current() { // mutex is held
        if (dead) {
            return false;
        }
        if (pid != getpid()) {
            dead = true;
            log_error("%s: the CUDA context belongs to the parent process: load the model after fork()\n",
                      name.c_str());
            return false;
        }
        if (!check_memory(cudaSetDevice(id), "cudaSetDevice")) {
            return false;
        }
        int least = 0, most = 0; // products before the panels that are made beside them
        return stream ||
               (check(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange") &&
                (ring || check_memory(cudaMallocHost(&ring, RING_NBYTES), "cudaMallocHost")) &&
                check_memory(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, most), "cudaStreamCreate"));
    }

    // for what leaves everything as it was if there is no memory, of the GPU or for its driver: kernels are loaded on
    // first use, too. Others may have taken it for a moment only
    bool check_memory(cudaError_t error, const char * what) {
        if (error != cudaErrorMemoryAllocation) {
            return check(error, what);
        }
        cudaGetLastError(); // not sticky
        log_error("%s: %s: out of memory; free some and try again\n", name.c_str(), what);
        return false;
    }
    bool check(cudaError_t error, const char * what) {
        if (error == cudaSuccess) {
            return true;
        }
        if (!dead.exchange(true)) {
            log_error("%s: %s: %s (%s). The GPU is not used any more; restart the process\n", name.c_str(), what,
                      cudaGetErrorString(error), cudaGetErrorName(error));
        }
        return false;
    }
    bool synchronize() { return check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

    bool write(void * dst, const void * src, size_t size) {
        if (size <= small_writes::MAX_NBYTES) {
            const std::lock_guard<std::mutex> lock(mutex);
            return make_current() && (pending.add(dst, src, size) || (queue_pending() && pending.add(dst, src, size)));
        }
        if (!select()) {
            return false;
        }
        if (size > RING_MAX_WRITE) {
            return check(cudaMemcpyAsync(dst, src, size, cudaMemcpyHostToDevice, stream), "copy to the GPU") &&
                   synchronize();
        }
        const std::lock_guard<std::mutex> lock(mutex);
        if (ring_used + size > RING_NBYTES) {
            if (!synchronize()) {
                return false;
            }
            ring_used = 0;
        }
        char * slot = ring + ring_used;
        ring_used += GGML_PAD(size, 64);
        memcpy(slot, src, size);
        return check(cudaMemcpyAsync(dst, slot, size, cudaMemcpyHostToDevice, stream), "copy to the GPU");
    }

    void read(void * dst, const void * src, size_t size) {
        if (!select() || !check(cudaMemcpyAsync(dst, src, size, cudaMemcpyDeviceToHost, stream), "copy from the GPU") ||
            !synchronize()) {
            memset(dst, 0xff, size); // never what a previous graph left there
        }
    }

    bool fill(void * dst, uint8_t value, size_t size) {
        return select() && check(cudaMemsetAsync(dst, value, size, stream), "cudaMemset") && synchronize();
    }
};

gpu & gpu_of(ggml_backend_buffer_type_t buft) { return *static_cast<gpu *>(buft->context); }
gpu & gpu_of(ggml_backend_dev_t dev) { return *static_cast<gpu *>(dev->context); }

const sparse_tensor_info * sparse_of_load(const ggml_tensor * tensor) {
    const load_session * current = load_session::current();
    return current ? current->find(tensor) : nullptr;
}

// ---- buffer ----

struct buffer_context {
    gpu &                                       device;
    void *                                      base = nullptr;
    std::vector<std::unique_ptr<stored_matrix>> matrices;
};

gpu &            gpu_of(ggml_backend_buffer_t buffer) { return static_cast<buffer_context *>(buffer->context)->device; }
buffer_context & context_of(ggml_backend_buffer_t buffer) { return *static_cast<buffer_context *>(buffer->context); }

bool is_ours(ggml_backend_buffer_t buffer);

void buffer_free_buffer(ggml_backend_buffer_t buffer) {
    buffer_context * context = &context_of(buffer);
    if (context->device.select()) {
        context->device.synchronize(); // kernels may still use it
        context->device.check(cudaFree(context->base), "cudaFree");
    }
    context->device.buffers_freed++;
    delete context;
}

void * buffer_get_base(ggml_backend_buffer_t buffer) { return context_of(buffer).base; }

void refuse_write(const ggml_tensor * tensor) { log_error("%s: sparse weights cannot be overwritten\n", tensor->name); }

void buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                          size_t size) {
    if (stored(tensor)) {
        refuse_write(tensor);
        return;
    }
    gpu_of(buffer).fill(static_cast<char *>(tensor->data) + offset, value, size);
}

// the staging memory of a load, shared by the buffers of a device, gone with the load
cuda_sparse_uploader * uploader_of(load_session & current, gpu & device) {
    std::shared_ptr<void> & slot = current.staging[&device];
    if (!slot) {
        std::unique_ptr<cuda_sparse_uploader> made;
        if (const int status = cuda_sparse_uploader::create(device.id, &made)) {
            current.keep_error(status);
            return nullptr;
        }
        slot = std::shared_ptr<cuda_sparse_uploader>(std::move(made));
    }
    return static_cast<cuda_sparse_uploader *>(slot.get());
}

packed_desc packed_of(const sparse_tensor_info & matrix) { return { matrix.desc, matrix.value_type, matrix.bits }; }

// how this GPU keeps a packed matrix with quantized values; lanes 0: it does not, and takes it recoded to MACKO like
// all others
blocks_shape blocks_shape_of(const gpu & device, const sparse_tensor_info & matrix) {
    return matrix.format == &packed_codec() ? cuda_blocks_shape(packed_of(matrix), device.shared_nbytes)
                                            : blocks_shape{ 0, 0 };
}

void set_sparse(ggml_backend_buffer_t buffer, load_session & current, const sparse_tensor_info & matrix,
                ggml_tensor * tensor, const void * data, size_t size) {
    struct upload : payload_consumer {
        cuda_sparse_uploader &     uploader;
        const sparse_tensor_info & matrix;
        ggml_tensor *              tensor;
        stored_matrix &            stored;
        const blocks_shape         shape;
        bool                       finished = false;
        upload(cuda_sparse_uploader & u, const sparse_tensor_info & s, ggml_tensor * t, stored_matrix & out,
               const blocks_shape & b)
            : uploader(u), matrix(s), tensor(t), stored(out), shape(b) {}
        int  consume(const macko_view & rows, int64_t) override { return uploader.rows(rows); }
        bool takes(const codec & format) const override {
            return &format == &ec_csr_codec() || (&format == &packed_codec() && shape.lanes != 0);
        }
        int consume_matrix(const codec_view & view) override {
            finished = true;
            return &view.format() == &packed_codec() ? upload_packed(static_cast<const packed_view &>(view))
                                                     : upload_blocks(static_cast<const ec_csr_view &>(view));
        }
        int upload_blocks(const ec_csr_view & view) {
            // blocks lie across the experts' rows
            const ec_csr_choice choice =
                tensor->ne[1] == matrix.desc.rows ? ec_csr_choice_of_environment() : ec_csr_choice::ROWS;
            return cuda_ec_csr_upload(uploader, view, choice, omp_get_max_threads(), tensor->data,
                                      cuda_sparse_nbytes(matrix.desc, matrix.n_padded), &stored.matrix, &stored.blocks);
        }
        int upload_packed(const packed_view & view) {
            return uploader.packed(view, shape, tensor->data, omp_get_max_threads(), &stored.matrix, &stored.outgrown);
        }
    };
    buffer_context & context = context_of(buffer);
    if (!context.device.select()) {
        return;
    }
    cuda_sparse_uploader * uploader = uploader_of(current, context.device);
    if (!uploader) {
        return;
    }
    auto m             = std::make_unique<stored_matrix>();
    m->rows_per_matrix = tensor->ne[1];
    upload     consumer(*uploader, matrix, tensor, *m, blocks_shape_of(context.device, matrix));
    const auto failed = [&](int status) {
        if (status) {
            current.keep_error(status);
        }
        return status != GGML_MACKO_STATUS_OK;
    };
    if (consumer.shape.lanes == 0 && failed(uploader->begin(matrix.desc, matrix.n_padded, tensor->data))) {
        return;
    }
    if (current.receive(tensor, data, size, consumer) != GGML_MACKO_STATUS_OK) {
        return;
    }
    if (!consumer.finished && failed(uploader->finish(&m->matrix))) {
        return;
    }
    tensor->extra      = m.get();
    const size_t dense = static_cast<size_t>(m->rows_per_matrix * GGML_PAD(m->matrix.cols, 8) * 2);
    context.device.panel_nbytes =
        std::max<size_t>(context.device.panel_nbytes, std::min(dense, context.device.max_panel_nbytes));
    context.matrices.push_back(std::move(m));
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size) {
    if (const sparse_tensor_info * matrix = sparse_of_load(tensor)) {
        if (offset == 0) { // the first piece has the placeholder; the stream has nothing more of a sparse tensor
            set_sparse(buffer, *load_session::current(), *matrix, tensor, data, size);
        }
    } else if (stored(tensor)) {
        refuse_write(tensor);
    } else {
        gpu_of(buffer).write(static_cast<char *>(tensor->data) + offset, data, size);
    }
}

// dense elements of a sparse weight, for whoever saves or inspects the model
bool get_sparse(gpu & device, const stored_matrix & m, char * data, size_t offset, size_t size) {
    const size_t  nbytes_row = static_cast<size_t>(m.matrix.cols * value_nbytes(m.matrix.type));
    const int64_t first      = static_cast<int64_t>(offset / nbytes_row),
                  end        = static_cast<int64_t>((offset + size + nbytes_row - 1) / nbytes_row);
    const int64_t rows       = std::max<int64_t>(1, static_cast<int64_t>((size_t(16) << 20) / nbytes_row)); // at a time
    void *        dense      = nullptr;
    if (!device.select()) {
        return false;
    }
    if (cudaMalloc(&dense, static_cast<size_t>(std::min(rows, end - first)) * nbytes_row) != cudaSuccess) {
        cudaGetLastError();
        log_error("%s: no memory to unpack a sparse weight\n", device.name.c_str());
        return false;
    }
    bool ok = true;
    for (int64_t row = first; ok && row < end; row += rows) {
        const int64_t row_end = std::min(end, row + rows);
        ok =
            device.check(cuda_sparse_unpack(m.matrix, row, row_end, m.matrix.type, dense, m.matrix.cols, device.stream),
                         "unpacking a sparse weight");
        const size_t from = std::max(offset, static_cast<size_t>(row) * nbytes_row),
                     to   = std::min(offset + size, static_cast<size_t>(row_end) * nbytes_row);
        if (ok) {
            device.read(data + (from - offset),
                        static_cast<char *>(dense) + (from - static_cast<size_t>(row) * nbytes_row), to - from);
        }
    }
    device.check(cudaFree(dense), "cudaFree");
    return ok;
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                       size_t size) {
    if (!stored(tensor)) {
        gpu_of(buffer).read(data, static_cast<const char *>(tensor->data) + offset, size);
    } else if (!get_sparse(gpu_of(buffer), *stored(tensor), static_cast<char *>(data), offset, size)) {
        memset(data, 0xff, size);
    }
}

bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    ggml_backend_buffer_t src_buffer = src->view_src ? src->view_src->buffer : src->buffer;
    if (!is_ours(src_buffer) || stored(src) || stored(dst) || !ggml_is_contiguous(src) || !ggml_is_contiguous(dst)) {
        return false;
    }
    gpu & from = gpu_of(src_buffer);
    gpu & to   = gpu_of(buffer);
    if (&from == &to) {
        return to.select() &&
               to.check(cudaMemcpyAsync(dst->data, src->data, ggml_nbytes(src), cudaMemcpyDeviceToDevice, to.stream),
                        "copy on the GPU");
    }
    // ggml synchronized nothing for us: the source is complete when its stream is
    return from.select() && from.synchronize() && to.select() &&
           to.check(cudaMemcpyPeerAsync(dst->data, to.id, src->data, from.id, ggml_nbytes(src), to.stream),
                    "copy between GPUs") &&
           to.synchronize();
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    gpu_of(buffer).fill(context_of(buffer).base, value, buffer->size);
}

const ggml_backend_buffer_i buffer_iface = {
    /* .free_buffer   = */ buffer_free_buffer,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

bool is_ours(ggml_backend_buffer_t buffer) { return buffer && buffer->iface.free_buffer == buffer_free_buffer; }

// ---- buffer type ----

const char * buft_get_name(ggml_backend_buffer_type_t buft) { return gpu_of(buft).name.c_str(); }

size_t buft_get_alignment(ggml_backend_buffer_type_t) { return ALIGNMENT; }

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    gpu & device = gpu_of(buft);
    if (!device.select()) {
        return nullptr;
    }
    void *            base  = nullptr;
    const cudaError_t error = cudaMalloc(&base, size);
    if (error == cudaErrorMemoryAllocation) {
        size_t free = 0, total = 0;
        cudaGetLastError(); // not sticky
        cudaMemGetInfo(&free, &total);
        load_session::keep_out_of_memory(
            "%s: out of memory: %.0f MiB are needed at once, %.0f MiB of %.0f are free; lower "
            "n_gpu_layers or the context size",
            device.name.c_str(), static_cast<double>(size) / 1048576, static_cast<double>(free) / 1048576,
            static_cast<double>(total) / 1048576);
        return nullptr;
    }
    if (!device.check(error, "cudaMalloc")) {
        return nullptr;
    }
    return ggml_backend_buffer_init(buft, buffer_iface, new buffer_context{ device, base, {} }, size);
}

// w, or what it is a view of, is or will be one of our sparse matrices in this buffer type
bool is_sparse_weight(ggml_backend_buffer_type_t buft, const ggml_tensor * w) {
    if (!w || !w->buffer || real_buffer_type(w->buffer->buft) != buft) {
        return false;
    }
    const ggml_tensor * root = w->view_src ? w->view_src : w;
    return stored(root) || sparse_of_load(root) || is_planned_matrix(w->buffer->buft, root);
}

size_t matrix_nbytes(ggml_backend_buffer_type_t buft, const sparse_tensor_info & matrix) {
    const blocks_shape shape = blocks_shape_of(gpu_of(buft), matrix);
    return static_cast<size_t>(shape.lanes ? cuda_blocks_bind(packed_of(matrix), shape,
                                                              cuda_blocks_max_spill(packed_of(matrix), shape), nullptr)
                                                 .nbytes
                                           : cuda_sparse_nbytes(matrix.desc, matrix.n_padded));
}

// sparse weights: known from the file's header, so that llama.cpp's memory figures are the true ones
size_t buft_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    if (const sparse_tensor_info * matrix = sparse_of_load(tensor)) {
        return matrix_nbytes(buft, *matrix);
    }
    const size_t scratch = graph_scratch_nbytes(tensor, is_sparse_weight(buft, tensor->src[0]));
    return scratch ? GGML_PAD(ggml_nbytes(tensor), 256) + scratch : ggml_nbytes(tensor);
}

bool buft_is_host(ggml_backend_buffer_type_t) { return false; }

// ---- host buffer type: pinned memory for what the CPU side of a context reads and writes (token embeddings, logits)
// ----

const char * host_buft_get_name(ggml_backend_buffer_type_t) { return "MACKO_Host"; }

void host_buffer_free_buffer(ggml_backend_buffer_t buffer) { cudaFreeHost(buffer->context); }

ggml_backend_buffer_t host_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void * memory = nullptr;
    if (!gpu_of(buft).select() || cudaMallocHost(&memory, size) != cudaSuccess) {
        cudaGetLastError(); // the system limits pinned memory: ordinary memory is only slower
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
    buffer->buft                 = buft;
    buffer->iface.free_buffer    = host_buffer_free_buffer;
    return buffer;
}

size_t host_buft_get_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

bool host_buft_is_host(ggml_backend_buffer_type_t) { return true; }

// ---- backend ----

struct capture {
    uint64_t        key[2]    = {};
    cudaGraphExec_t exec      = nullptr;
    bool            failed    = false; // cannot be captured
    uint64_t        last_used = 0;
};

struct backend_context {
    gpu &                      device;
    op_context                 ops;
    std::shared_ptr<workspace> shared;
    cudaStream_t               capture_stream = nullptr;
    unsigned *                 counters       = nullptr;
    bool                       busy           = false; // work queued since the last synchronize

    bool                 use_graphs = true, use_fusion = true;
    std::vector<capture> captures;
    uint64_t             last_uid      = 0;
    size_t               last_capture  = 0; // index, valid while last_uid is
    uint64_t             buffers_freed = 0;
    uint64_t             clock         = 0;

    explicit backend_context(gpu & d) : device(d) {}

    // what products of many columns need: without it they are slower
    void attach_workspace(bool use_cublas) {
        const std::lock_guard<std::mutex> lock(device.compute);
        if (use_cublas && !device.cublas_opened) {
            device.cublas        = cublas_open();
            device.cublas_opened = true;
        }
        shared = device.shared.lock();
        // those who have the old one keep it
        if (!shared || (shared->panels.nbytes && shared->panels.nbytes < device.panel_nbytes)) {
            device.shared = shared = std::make_shared<workspace>();
        }
        if (!shared->create(device.panel_nbytes)) {
            log_error("%s: no memory for the workspace of matrix products: prompts are processed slowly\n",
                      device.name.c_str());
        }
        ops.cublas           = use_cublas && shared->gemm ? device.cublas.get() : nullptr;
        ops.cublas_workspace = shared->gemm;
        ops.panels           = shared->panels.nbytes ? &shared->panels : nullptr;
    }

    ~backend_context() {
        if (device.select()) {
            device.synchronize();
            drop_captures();
            if (capture_stream) {
                cudaStreamDestroy(capture_stream);
            }
            cudaFree(counters);
        }
    }

    void drop_captures() {
        for (capture & c : captures) {
            if (c.exec) {
                cudaGraphExecDestroy(c.exec);
            }
        }
        captures.clear();
        last_uid = 0;
    }
};

// everything that a launch depends on
struct hasher {
    uint64_t a = 0x9e3779b97f4a7c15ull, b = 0xc2b2ae3d27d4eb4full;
    void     add(uint64_t v) {
        a = (a ^ v) * 0xff51afd7ed558ccdull;
        a ^= a >> 32;
        b = (b + v) * 0xc4ceb9fe1a85ec53ull;
        b ^= b >> 29;
    }
    void add(const ggml_tensor * t) {
        add(static_cast<uint64_t>(t->type) | static_cast<uint64_t>(t->op) << 32);
        add(reinterpret_cast<uint64_t>(t->data));
        add(reinterpret_cast<uint64_t>(t->extra));
        for (int k = 0; k < GGML_MAX_DIMS; k++) {
            add(static_cast<uint64_t>(t->ne[k]));
            add(t->nb[k]);
        }
    }
};

void hash_graph(const ggml_cgraph * graph, uint64_t key[2]) {
    hasher h;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        h.add(node);
        h.add(static_cast<uint64_t>(node->flags) | static_cast<uint64_t>(ggml_node_get_use_count(graph, i)) << 32);
        for (size_t k = 0; k < GGML_MAX_OP_PARAMS / sizeof(int32_t); k += 2) {
            h.add(static_cast<uint32_t>(node->op_params[k]) |
                  static_cast<uint64_t>(static_cast<uint32_t>(node->op_params[k + 1])) << 32);
        }
        for (const ggml_tensor * src : node->src) {
            if (src) {
                h.add(src);
            }
        }
    }
    key[0] = h.a;
    key[1] = h.b;
}

// does capturing pay? recording and instantiating 900 nodes takes 5 ms or more
bool is_worth_capturing(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        if (graph->nodes[i]->op == GGML_OP_MUL_MAT) {
            return graph->nodes[i]->src[1]->ne[1] <= MAX_CAPTURE_COLUMNS;
        }
    }
    return true;
}

bool queue_eagerly(backend_context & ctx, const ggml_cgraph * graph) {
    const ggml_tensor * failed = nullptr;
    ctx.ops.stream             = ctx.device.stream;
    const cudaError_t error    = graph_queue(ctx.ops, graph, ctx.use_fusion, &failed);
    return error == cudaSuccess || ctx.device.check_memory(error, failed->name);
}

// false: it cannot be captured (and nothing was queued)
bool make_capture(backend_context & ctx, const ggml_cgraph * graph, capture & c) {
    const ggml_tensor * failed = nullptr;
    cudaGraph_t         made   = nullptr;
    ctx.ops.stream             = ctx.capture_stream;
    cudaError_t error          = cudaStreamBeginCapture(ctx.capture_stream, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) {
        const cudaError_t queued = graph_queue(ctx.ops, graph, ctx.use_fusion, &failed);
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

size_t find_capture(backend_context & ctx, const uint64_t key[2]) {
    for (size_t i = 0; i < ctx.captures.size(); i++) {
        if (ctx.captures[i].key[0] == key[0] && ctx.captures[i].key[1] == key[1]) {
            return i;
        }
    }
    return ctx.captures.size();
}

// a free place: a new one, or that of the capture that was not used for longest
size_t add_capture(backend_context & ctx) {
    if (ctx.captures.size() < MAX_CAPTURES) {
        ctx.captures.emplace_back();
        return ctx.captures.size() - 1;
    }
    size_t oldest = 0;
    for (size_t i = 1; i < ctx.captures.size(); i++) {
        if (ctx.captures[i].last_used < ctx.captures[oldest].last_used) {
            oldest = i;
        }
    }
    if (ctx.captures[oldest].exec) {
        cudaGraphExecDestroy(ctx.captures[oldest].exec);
    }
    ctx.captures[oldest] = {};
    return oldest;
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    auto & ctx    = *static_cast<backend_context *>(backend->context);
    gpu &  device = ctx.device;
    if (!device.select()) {
        return GGML_STATUS_FAILED;
    }
    ctx.busy = true;
    const std::lock_guard<std::mutex> lock(device.compute);
    if (!ctx.use_graphs || !is_worth_capturing(graph)) {
        return queue_eagerly(ctx, graph) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
    }
    if (ctx.buffers_freed != device.buffers_freed) { // addresses in the keys may mean something else now
        ctx.buffers_freed = device.buffers_freed;
        device.synchronize();
        ctx.drop_captures();
    }
    // ggml gives a graph that did not change the number that it had before
    size_t at    = ctx.last_capture;
    bool   known = graph->uid != 0 && graph->uid == ctx.last_uid;
    if (!known) {
        uint64_t key[2];
        hash_graph(graph, key);
        at    = find_capture(ctx, key);
        known = at < ctx.captures.size();
        if (!known) {
            at = add_capture(ctx);
            memcpy(ctx.captures[at].key, key, sizeof(key));
        }
        ctx.last_uid     = graph->uid;
        ctx.last_capture = at;
    }
    capture & c = ctx.captures[at];
    c.last_used = ++ctx.clock;
    if (known && (c.exec || (!c.failed && make_capture(ctx, graph, c)))) {
        return device.check_memory(cudaGraphLaunch(c.exec, device.stream), "cudaGraphLaunch") ? GGML_STATUS_SUCCESS
                                                                                              : GGML_STATUS_FAILED;
    }
    // the first time, and what cannot be captured
    return queue_eagerly(ctx, graph) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void backend_synchronize(ggml_backend_t backend) {
    auto & ctx = *static_cast<backend_context *>(backend->context);
    if (ctx.busy && ctx.device.select()) {
        ctx.device.synchronize();
    }
    ctx.busy = false;
}

// Not asynchronous at all: see device_get_props. But what was computed is not waited for first: the copy is queued
// behind it.
void backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset,
                              size_t size) {
    auto &                ctx    = *static_cast<backend_context *>(backend->context);
    ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (!is_ours(buffer) || &gpu_of(buffer) != &ctx.device) {
        backend_synchronize(backend);
    }
    buffer->iface.get_tensor(buffer, tensor, data, offset, size);
    ctx.busy = false; // a read waits for all of the stream
}

// not asynchronous at all: see device_get_props
void backend_set_tensor_async(ggml_backend_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    buffer_set_tensor(tensor->view_src ? tensor->view_src->buffer : tensor->buffer, tensor, data, offset, size);
}

void backend_event_record(ggml_backend_t, ggml_backend_event_t) {}

const char * backend_get_name(ggml_backend_t backend) {
    return static_cast<backend_context *>(backend->context)->device.name.c_str();
}

void backend_free(ggml_backend_t backend) {
    delete static_cast<backend_context *>(backend->context);
    delete backend;
}

void backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    auto & ctx = *static_cast<backend_context *>(backend->context);
    if (ctx.use_fusion) {
        graph_optimize(ctx.ops, graph, params);
    }
}

const ggml_backend_i backend_iface = {
    /* .get_name            = */ backend_get_name,
    /* .free                = */ backend_free,
    /* .set_tensor_async    = */ backend_set_tensor_async,
    /* .get_tensor_async    = */ backend_get_tensor_async,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ backend_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ backend_graph_compute,
    /* .event_record        = */ backend_event_record,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ backend_graph_optimize,
};

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x67, 0x70,
                              0x75, 0x2d, 0x31, 0x4c, 0x07, 0xd2, 0x9e, 0x35 };
    return &guid;
}

// ---- device ----

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

void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    props->device_id   = gpu_of(dev).pci_id.c_str();
    device_get_memory(dev, &props->memory_free, &props->memory_total);
    // While one of our loads runs, llama.cpp shall read weights in pieces of 1 MiB (see the CPU device); and not map
    // the file: it is a stream.
    // At other times these stay off: events would allow pipelines over several contexts' copies, which one blocking
    // stream does not need.
    const bool loading       = load_session::current() != nullptr;
    props->caps.async        = loading;
    props->caps.host_buffer  = loading;
    props->caps.events       = loading;
    props->caps.mmap_support = !loading;
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    gpu & device = gpu_of(dev);
    if (!device.select()) {
        return nullptr;
    }
    auto context                     = std::make_unique<backend_context>(device);
    context->use_graphs              = !getenv("GGML_MACKO_NO_GRAPHS"); // to compare
    context->use_fusion              = !getenv("GGML_MACKO_NO_FUSION");
    context->ops.n_sm                = device.n_sm;
    context->ops.shared_nbytes       = device.shared_nbytes;
    constexpr size_t counters_nbytes = N_COUNTERS * sizeof(unsigned);
    if (!device.check_memory(op_compute_capability(&context->ops.cc), "cudaFuncGetAttributes") ||
        !device.check_memory(cudaStreamCreateWithFlags(&context->capture_stream, cudaStreamNonBlocking),
                             "cudaStreamCreate") ||
        !device.check_memory(cudaMalloc(&context->counters, counters_nbytes), "cudaMalloc") ||
        !device.check_memory(cudaMemsetAsync(context->counters, 0, counters_nbytes, device.stream), "cudaMemset") ||
        !device.synchronize()) {
        return nullptr;
    }
    context->ops.overlap  = context->ops.cc >= 90 && !getenv("GGML_MACKO_NO_OVERLAP");
    context->ops.counters = context->counters;
    if (!load_session::current()) { // one that only uploads weights needs none
        context->attach_workspace(!getenv("GGML_MACKO_NO_CUBLAS"));
    }
    return new ggml_backend{ backend_guid(), backend_iface, dev, context.release() };
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    ggml_backend_buffer_type_t buft    = &gpu_of(dev).buft;
    const load_session *       current = load_session::current();
    return current && current->no_alloc() ? planned_buffer_type(buft, *current, matrix_nbytes, false) : buft;
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t dev) { return &gpu_of(dev).host_buft; }

// Products with a sparse weight of ours are never refused: the scheduler would read it as dense. Neither are writes
// into the KV cache.
bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    gpu & device = gpu_of(dev);
    for (const ggml_tensor * src : op->src) {
        ggml_backend_buffer_type_t buft = src && src->buffer ? real_buffer_type(src->buffer->buft) : nullptr;
        if (buft && buft->iface.get_name == buft_get_name && buft != &device.buft) {
            return false; // on another GPU
        }
    }
    const ggml_tensor * w      = op->src[0];
    const bool          sparse = is_sparse_weight(&device.buft, w);
    if (!sparse && w && !(w->buffer && real_buffer_type(w->buffer->buft) == &device.buft) && sparse_of_load(w)) {
        return false; // sparse, and somewhere else: that place's affair
    }
    return graph_supports_op(op, sparse);
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return real_buffer_type(buft) == &gpu_of(dev).buft;
}

ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) {
    return new (std::nothrow) ggml_backend_event{ dev, nullptr };
}

void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }

void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {} // writes are complete when they return

const ggml_backend_device_i device_iface = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ device_get_props,
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

std::string no_device_reason = "no GPU of compute capability 7.5 or more"; // if there is no device

std::vector<ggml_backend_dev_t> make_devices(ggml_backend_reg_t reg) {
    std::vector<ggml_backend_dev_t> devices;
    int                             n = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&n)) { // no driver, or one that is too old
        no_device_reason = error == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one that is too old"
                                                                : cudaGetErrorString(error);
        cudaGetLastError();
        return devices;
    }
    for (int id = 0; id < n; id++) {
        cudaDeviceProp prop;
        if (cudaGetDeviceProperties(&prop, id) != cudaSuccess || prop.major * 10 + prop.minor < 75) {
            cudaGetLastError();
            continue;
        }
        char pci[32];
        snprintf(pci, sizeof(pci), "%04x:%02x:%02x.0", prop.pciDomainID, prop.pciBusID, prop.pciDeviceID);
        auto * device            = new gpu; // lives as long as the process, like the registry's entries
        device->id               = id;
        device->name             = "MACKO" + std::to_string(devices.size());
        device->description      = prop.name;
        device->pci_id           = pci;
        device->n_sm             = prop.multiProcessorCount;
        device->shared_nbytes    = static_cast<int>(prop.sharedMemPerBlockOptin);
        device->max_panel_nbytes = std::min(MAX_PANEL_NBYTES, prop.totalGlobalMem / MAX_PANEL_SHARE);
        auto * dev               = new ggml_backend_device{ device_iface, reg, device };
        device->buft      = { { buft_get_name, buft_alloc_buffer, buft_get_alignment, nullptr, buft_get_alloc_size,
                                buft_is_host },
                              dev,
                              device };
        device->host_buft = { { host_buft_get_name, host_buft_alloc_buffer, host_buft_get_alignment, nullptr, nullptr,
                                host_buft_is_host },
                              dev,
                              device };
        devices.push_back(dev);
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
