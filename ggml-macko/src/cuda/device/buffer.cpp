#include "cuda/device/buffer.h"

#include "backend/host-weights.h"
#include "backend/load-session.h"
#include "backend/log.h"
#include "backend/planned-buffer.h"
#include "cuda/device/upload.h"

#include <algorithm>
#include <cstring>

namespace macko::cuda {

namespace {

// ---- buffer ----

void buffer_free_buffer(ggml_backend_buffer_t buffer) {
    buffer_context * context = &context_of(buffer);
    if (load_session * current = load_session::current()) {
        current->wait(); // a load that ends early
    }
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

void set_sparse(ggml_backend_buffer_t buffer, load_session & current, const sparse_tensor_info & matrix,
                ggml_tensor * tensor, const void * data, size_t size) {
    gpu &                            device = gpu_of(buffer);
    std::unique_ptr<stored_matrix> & out    = context_of(buffer).matrices.emplace_back();
    const auto take = [&device, &matrix, tensor, &out](load_thread & thread, const payload_source & read) {
        TRY(upload_matrix(device, thread, matrix, tensor, read, &out));
        tensor->extra = out.get();
        return static_cast<int>(GGML_MACKO_STATUS_OK);
    };
    current.receive_soon(tensor, data, size, take);
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                       size_t size) {
    if (!stored(tensor)) {
        gpu_of(buffer).read(data, static_cast<const char *>(tensor->data) + offset, size);
    } else if (!read_sparse(gpu_of(buffer), *stored(tensor), static_cast<char *>(data), offset, size)) {
        memset(data, 0xff, size);
    }
}

bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    ggml_backend_buffer_t src_buffer = src->view_src ? src->view_src->buffer : src->buffer;
    const bool            is_plain   = !stored(dst) && ggml_is_contiguous(src) && ggml_is_contiguous(dst);
    if (!is_gpu_buffer(src_buffer) || stored(src) || !is_plain) {
        return false;
    }
    gpu & from = gpu_of(src_buffer);
    gpu & to   = gpu_of(buffer);
    if (&from == &to) {
        return to.select() &&
               to.check(cudaMemcpyAsync(dst->data, src->data, ggml_nbytes(src), cudaMemcpyDeviceToDevice, to.stream),
                        "copy on the GPU");
    }
    // ggml did not synchronize, so wait until the source's stream has completed the data
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
    /* .init_tensor   = */ load_session::claim_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// ---- buffer type ----

const char * buffer_type_get_name(ggml_backend_buffer_type_t buft) { return gpu_of(buft).name.c_str(); }

ggml_backend_buffer_t buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    gpu & device = gpu_of(buft);
    if (!device.select()) {
        return nullptr;
    }
    void *            base  = nullptr;
    const cudaError_t error = cudaMalloc(&base, size);
    if (error == cudaErrorMemoryAllocation) {
        const auto mib  = [](size_t nbytes) { return static_cast<double>(nbytes) / 1048576; };
        size_t     free = 0, total = 0;
        cudaGetLastError(); // not sticky
        cudaMemGetInfo(&free, &total);
        load_session::keep_out_of_memory(
            "%s: out of memory: %.0f MiB are needed at once, %.0f MiB of %.0f are free; lower "
            "n_gpu_layers or the context size",
            device.name.c_str(), mib(size), mib(free), mib(total));
        return nullptr;
    }
    if (!device.check(error, "cudaMalloc")) {
        return nullptr;
    }
    return ggml_backend_buffer_init(buft, buffer_iface, new buffer_context{ device, base, {} }, size);
}

size_t buffer_type_get_alignment(ggml_backend_buffer_type_t) { return GPU_ALIGNMENT; }

// Sizes of sparse weights are known from the file's header, so the memory figures that llama.cpp prints are exact.
size_t buffer_type_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    if (const sparse_tensor_info * matrix = sparse_of_load(tensor)) {
        return matrix_nbytes(buft, *matrix);
    }
    const ggml_tensor * w       = tensor->src[0];
    const size_t        scratch = graph_scratch_nbytes(tensor, is_sparse_weight(buft, w) || host_weights_of(w));
    return scratch ? GGML_PAD(ggml_nbytes(tensor), 256) + scratch : ggml_nbytes(tensor);
}

// ---- host buffer type: pinned memory for data that a context reads and writes on the CPU (embeddings, logits) ----

const char * host_buffer_type_get_name(ggml_backend_buffer_type_t) { return "MACKO_Host"; }

void host_buffer_free_buffer(ggml_backend_buffer_t buffer) { cudaFreeHost(buffer->context); }

ggml_backend_buffer_t host_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void * memory = nullptr;
    if (!gpu_of(buft).select() || cudaMallocHost(&memory, size) != cudaSuccess) {
        cudaGetLastError(); // the system limits pinned memory; ordinary memory is only slower
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
    buffer->buft                 = buft;
    buffer->iface.free_buffer    = host_buffer_free_buffer;
    return buffer;
}

size_t host_buffer_type_get_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

bool host_buffer_type_is_host(ggml_backend_buffer_type_t) { return true; }

} // namespace

const buffer_type_functions gpu_buffer_functions = { buffer_type_get_name, buffer_type_alloc_buffer,
                                                     buffer_type_get_alignment, buffer_type_get_alloc_size, nullptr };

const buffer_type_functions host_buffer_functions = { host_buffer_type_get_name, host_buffer_type_alloc_buffer,
                                                      host_buffer_type_get_alignment, nullptr,
                                                      host_buffer_type_is_host };

bool is_gpu_buffer(ggml_backend_buffer_t buffer) { return buffer && buffer->iface.free_buffer == buffer_free_buffer; }

bool is_gpu_buffer_type(ggml_backend_buffer_type_t buft) { return buft->iface.get_name == buffer_type_get_name; }

bool read_sparse(gpu & device, const stored_matrix & m, char * data, size_t offset, size_t size) {
    constexpr size_t MAX_DENSE  = size_t(16) << 20; // bytes at a time
    const int64_t    cols       = base_of(m.matrix).cols;
    const size_t     nbytes_row = static_cast<size_t>(cols * value_nbytes(base_of(m.matrix).type));
    const int64_t    first      = static_cast<int64_t>(offset / nbytes_row);
    const int64_t    end        = static_cast<int64_t>((offset + size + nbytes_row - 1) / nbytes_row);
    const int64_t    rows       = std::max<int64_t>(1, static_cast<int64_t>(MAX_DENSE / nbytes_row));
    void *           dense      = nullptr;
    if (!device.select()) {
        return false;
    }
    if (cudaMalloc(&dense, static_cast<size_t>(std::min(rows, end - first)) * nbytes_row) != cudaSuccess) {
        cudaGetLastError();
        log_error("%s: no memory to make a sparse weight dense\n", device.name.c_str());
        return false;
    }
    bool ok = true;
    for (int64_t row = first; ok && row < end; row += rows) {
        const int64_t row_end = std::min(end, row + rows);
        const auto    error   = cuda_sparse_densify(m.matrix, row, row_end, dense, cols, device.stream);
        const size_t  begin   = static_cast<size_t>(row) * nbytes_row; // offset of the data in `dense`
        const size_t  from    = std::max(offset, begin);
        const size_t  to      = std::min(offset + size, static_cast<size_t>(row_end) * nbytes_row);
        ok                    = device.check(error, "making a sparse weight dense");
        if (ok) {
            device.read(data + (from - offset), static_cast<char *>(dense) + (from - begin), to - from);
        }
    }
    device.check(cudaFree(dense), "cudaFree");
    return ok;
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size) {
    if (const sparse_tensor_info * matrix = sparse_of_load(tensor)) {
        load_session & current = *load_session::current();
        if (!current.ignores(tensor, *matrix, offset, size)) {
            set_sparse(buffer, current, *matrix, tensor, data, size);
        }
    } else if (stored(tensor)) {
        refuse_write(tensor);
    } else {
        gpu_of(buffer).write(static_cast<char *>(tensor->data) + offset, data, size);
    }
}

const sparse_tensor_info * sparse_of_load(const ggml_tensor * tensor) {
    const load_session * current = load_session::current();
    return current ? current->find(tensor) : nullptr;
}

bool is_sparse_weight(ggml_backend_buffer_type_t buft, const ggml_tensor * w) {
    if (!w || !w->buffer || real_buffer_type(w->buffer->buft) != buft) {
        return false;
    }
    const ggml_tensor * root = w->view_src ? w->view_src : w;
    return stored(root) || sparse_of_load(root) || is_planned_matrix(w->buffer->buft, root);
}

size_t matrix_nbytes(ggml_backend_buffer_type_t buft, const sparse_tensor_info & matrix) {
    return static_cast<size_t>(plan_of(gpu_of(buft), matrix).nbytes);
}

} // namespace macko::cuda
