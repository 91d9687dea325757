// The CPU device: a buffer type that holds sparse weights as bitmap matrices, and a backend that multiplies with them.
// Its default buffer type is its own only while one of our loads runs on the thread, and the plain CPU type otherwise: so it needs no
// compute buffers, copies nothing between splits and does not touch models that are not sparse.
#include "backend/devices.h"
#include "backend/load.h"
#include "backend/log.h"
#include "cpu/kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <omp.h>
#include <sys/mman.h>

namespace macko {

namespace {

// ---- a weight in a buffer ----

// stands at tensor->data; the bitmap's memory follows
struct alignas(BITMAP_ALIGNMENT) stored_matrix {
    uint64_t   magic; // STORED_MATRIX once the payload is complete
    macko_desc desc;
    int32_t    value_type;      // desc.type, or quantized
    int64_t    rows_per_matrix; // ne1; experts and other matrices follow each other

    bitmap_matrix bitmap() const { return bitmap_bind(desc, value_type, const_cast<stored_matrix *>(this) + 1); }
};
constexpr uint64_t STORED_MATRIX = 0x78697274616d6b6dull;

const stored_matrix * stored(const ggml_tensor * tensor) {
    const auto * m = static_cast<const stored_matrix *>(tensor->data);
    return m && m->magic == STORED_MATRIX ? m : nullptr;
}

// ---- buffer ----

void buffer_free_buffer(ggml_backend_buffer_t buffer) {
    free(buffer->context);
}

void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t, size_t, size_t) {
    log_error("%s: %s: sparse weights cannot be overwritten\n", __func__, tensor->name);
}

void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    struct pack : payload_consumer {
        bitmap_matrix bitmap;
        int consume(const macko_view & view, int64_t first_value) override {
            bitmap_pack(view, first_value, bitmap);
            return GGML_MACKO_STATUS_OK;
        }
        bool takes_packed() const override { return true; }
        int consume_packed(const packed_view & view) override {
            bitmap_pack(view, omp_get_max_threads(), bitmap);
            return GGML_MACKO_STATUS_OK;
        }
    };
    load                * current = load::current();
    const sparse_matrix * matrix  = current ? current->find(tensor) : nullptr;
    if (!matrix) {
        log_error("%s: %s: sparse weights cannot be overwritten\n", __func__, tensor->name);
        return;
    }
    if (offset > 0) {
        return; // the first piece had the handle; the rest of what llama.cpp reads for a sparse tensor is zeros
    }
    auto * m = static_cast<stored_matrix *>(tensor->data);
    *m = { 0, matrix->desc, matrix->value_type, tensor->ne[1] };
    pack consumer;
    consumer.bitmap = m->bitmap();
    if (current->receive(tensor, data, size, consumer) == GGML_MACKO_STATUS_OK) {
        m->magic = STORED_MATRIX;
    }
}

// dense elements, for whoever saves or inspects the model
void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const stored_matrix * m = stored(tensor);
    if (!m) {
        memset(data, 0, size);
        return;
    }
    const size_t         nbytes_row = static_cast<size_t>(m->desc.cols * value_nbytes(m->desc.type));
    std::vector<uint8_t> row(nbytes_row);
    for (size_t done = 0; done < size;) {
        const size_t at = offset + done, in_row = at % nbytes_row, n = std::min(size - done, nbytes_row - in_row);
        const auto   r  = static_cast<int64_t>(at / nbytes_row);
        bitmap_unpack(m->bitmap(), m->desc.type, r, r + 1, row.data());
        memcpy(static_cast<uint8_t *>(data) + done, row.data() + in_row, n);
        done += n;
    }
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(buffer->context, value, buffer->size);
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
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// ---- buffer type ----

const char * buft_get_name(ggml_backend_buffer_type_t) {
    return "MACKO_CPU";
}

size_t buft_get_alignment(ggml_backend_buffer_type_t) {
    return BITMAP_ALIGNMENT;
}

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    constexpr size_t huge_page = size_t(2) << 20; // fewer page faults while loading, fewer TLB misses while streaming
    void * memory = nullptr;
    if (posix_memalign(&memory, huge_page, size)) {
        log_error("%s: cannot allocate %.2f MiB for sparse weights\n", __func__, static_cast<double>(size) / 1024 / 1024);
        return nullptr;
    }
    madvise(memory, size, MADV_HUGEPAGE);
    return ggml_backend_buffer_init(buft, buffer_iface, memory, size);
}

// known from the header, so that llama.cpp's memory figures are the true ones
size_t buft_get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    const load          * current = load::current();
    const sparse_matrix * matrix  = current ? current->find(tensor) : nullptr;
    return matrix ? sizeof(stored_matrix) + static_cast<size_t>(bitmap_nbytes(matrix->desc, matrix->value_type)) : ggml_nbytes(tensor);
}

bool buft_is_host(ggml_backend_buffer_type_t) {
    return false;
}

// ---- backend ----

struct job {
    const stored_matrix      * m;
    int64_t                    matrix; // which of ne2 * ne3 matrices, or which expert
    std::vector<const float *> x;
    std::vector<float *>       y;
};

struct backend_context {
    int              n_threads = omp_get_max_threads();
    std::vector<job> jobs; // of the graph being computed; kept for its memory
    size_t           n_jobs = 0;
    std::unique_ptr<void, void (*)(void *)> scratch = { nullptr, free };
    int64_t          scratch_nbytes = 0;

    job & next_job(const stored_matrix * m, int64_t matrix) {
        if (n_jobs == jobs.size()) {
            jobs.emplace_back();
        }
        job & j = jobs[n_jobs++];
        j.m      = m;
        j.matrix = matrix;
        j.x.clear();
        j.y.clear();
        return j;
    }
};

const float * x_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    const char * data = static_cast<const char *>(t->data);
    return reinterpret_cast<const float *>(data + i1 * static_cast<int64_t>(t->nb[1]) + i2 * static_cast<int64_t>(t->nb[2]) + i3 * static_cast<int64_t>(t->nb[3]));
}

float * y_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return const_cast<float *>(x_at(t, i1, i2, i3));
}

// dst[rows, n1, n2, n3] = w[cols, rows, m2, m3] * x[cols, n1, n2, n3]; m2 and m3 divide n2 and n3 (broadcast)
void add_mul_mat(backend_context & ctx, const stored_matrix * m, const ggml_tensor * dst) {
    const ggml_tensor * w  = dst->src[0];
    const ggml_tensor * x  = dst->src[1];
    const int64_t       r2 = x->ne[2] / w->ne[2];
    const int64_t       r3 = x->ne[3] / w->ne[3];
    for (int64_t m3 = 0; m3 < w->ne[3]; m3++) {
        for (int64_t m2 = 0; m2 < w->ne[2]; m2++) {
            job & j = ctx.next_job(m, m3 * w->ne[2] + m2);
            for (int64_t i3 = m3 * r3; i3 < (m3 + 1) * r3; i3++) {
                for (int64_t i2 = m2 * r2; i2 < (m2 + 1) * r2; i2++) {
                    for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                        j.x.push_back(x_at(x, i1, i2, i3));
                        j.y.push_back(y_at(dst, i1, i2, i3));
                    }
                }
            }
        }
    }
}

// dst[rows, used, tokens] = w[cols, rows, experts] * x[cols, used or 1, tokens], expert of (used, token) from ids. False on a bad id.
bool add_mul_mat_id(backend_context & ctx, const stored_matrix * m, const ggml_tensor * dst) {
    const ggml_tensor * w   = dst->src[0];
    const ggml_tensor * x   = dst->src[1];
    const ggml_tensor * ids = dst->src[2];
    const size_t first = ctx.n_jobs;
    for (int64_t e = 0; e < w->ne[2]; e++) {
        ctx.next_job(m, e);
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t used = 0; used < ids->ne[0]; used++) {
            const char * at = static_cast<const char *>(ids->data) + token * static_cast<int64_t>(ids->nb[1]) + used * static_cast<int64_t>(ids->nb[0]);
            int32_t e;
            memcpy(&e, at, sizeof(e));
            if (e < 0 || e >= w->ne[2]) {
                log_error("%s: %s: expert %d of %d\n", __func__, dst->name, e, static_cast<int>(w->ne[2]));
                return false;
            }
            job & j = ctx.jobs[first + static_cast<size_t>(e)];
            j.x.push_back(x_at(x, used % x->ne[1], token, 0));
            j.y.push_back(y_at(dst, used, token, 0));
        }
    }
    return true;
}

void run_jobs(backend_context & ctx) {
    int64_t nbytes = 0;
    for (size_t i = 0; i < ctx.n_jobs; i++) {
        nbytes = std::max(nbytes, mul_mat_scratch_nbytes(ctx.jobs[i].m->desc.cols, static_cast<int64_t>(ctx.jobs[i].x.size())));
    }
    if (nbytes > ctx.scratch_nbytes) {
        void * memory = nullptr;
        if (posix_memalign(&memory, 64, static_cast<size_t>(nbytes))) {
            throw std::bad_alloc();
        }
        ctx.scratch.reset(memory);
        ctx.scratch_nbytes = nbytes;
    }
#pragma omp parallel num_threads(ctx.n_threads)
    for (size_t i = 0; i < ctx.n_jobs; i++) {
        const job & j = ctx.jobs[i];
        if (!j.x.empty()) {
            const int64_t        row = j.matrix * j.m->rows_per_matrix;
            const mul_mat_params p   = { j.m->bitmap(), row, row + j.m->rows_per_matrix, static_cast<int64_t>(j.x.size()), j.x.data(), j.y.data(),
                                         j.m->desc.type != GGML_MACKO_TYPE_F32, ctx.scratch.get() };
            mul_mat_thread(p, omp_get_thread_num(), omp_get_num_threads());
        }
    }
    ctx.n_jobs = 0;
}

bool is_no_op(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    auto & ctx = *static_cast<backend_context *>(backend->context);
    try {
        ctx.n_jobs = 0;
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            ggml_tensor * node = ggml_graph_node(graph, i);
            if (ggml_is_empty(node) || is_no_op(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
                continue;
            }
            const stored_matrix * m = stored(node->src[0]);
            if (!m) {
                log_error("%s: %s: the weight %s was not loaded\n", __func__, node->name, node->src[0]->name);
                return GGML_STATUS_FAILED;
            }
            if (node->op == GGML_OP_MUL_MAT) {
                add_mul_mat(ctx, m, node);
            } else if (!add_mul_mat_id(ctx, m, node)) {
                return GGML_STATUS_FAILED;
            }
        }
        run_jobs(ctx);
        return GGML_STATUS_SUCCESS;
    } catch (const std::bad_alloc &) {
        log_error("%s: out of memory\n", __func__);
        return GGML_STATUS_ALLOC_FAILED;
    }
}

const char * backend_get_name(ggml_backend_t) {
    return "MACKO";
}

// not asynchronous at all: see device_get_props
void backend_set_tensor_async(ggml_backend_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    buffer_set_tensor(tensor->buffer, tensor, data, offset, size);
}

void backend_event_record(ggml_backend_t, ggml_backend_event_t) {}

void backend_free(ggml_backend_t backend) {
    delete static_cast<backend_context *>(backend->context);
    delete backend;
}

const ggml_backend_i backend_iface = {
    /* .get_name            = */ backend_get_name,
    /* .free                = */ backend_free,
    /* .set_tensor_async    = */ backend_set_tensor_async,
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
    /* .event_record        = */ backend_event_record,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x61, 0x63, 0x6b, 0x6f, 0x2d, 0x63, 0x70, 0x75, 0x2d, 0x31, 0x9e, 0x47, 0x5b, 0x20, 0x11 };
    return &guid;
}

// ---- device ----

const char * device_get_name(ggml_backend_dev_t) {
    return "MACKO_CPU";
}

const char * device_get_description(ggml_backend_dev_t) {
    return "sparse weights on the CPU";
}

void device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0; // host memory: the CPU device reports it
    *total = 0;
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    // With these, llama.cpp reads weights through four buffers of 1 MiB instead of one as large as the dense tensor. There is nothing in a
    // sparse tensor's bytes but a handle, and touching fresh memory for the rest took most of the load time.
    props->caps.async       = load::current() != nullptr;
    props->caps.host_buffer = props->caps.async;
    props->caps.events      = props->caps.async;
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t) {
    return load::current() ? ggml_backend_cpu_buffer_type() : nullptr;
}

ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) {
    return new (std::nothrow) ggml_backend_event { dev, nullptr };
}

void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete event;
}

void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    auto * context = new (std::nothrow) backend_context;
    return context ? new ggml_backend { backend_guid(), backend_iface, dev, context } : nullptr;
}

ggml_backend_buffer_type_t sparse_buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type buft = {
        {
            /* .get_name       = */ buft_get_name,
            /* .alloc_buffer   = */ buft_alloc_buffer,
            /* .get_alignment  = */ buft_get_alignment,
            /* .get_max_size   = */ nullptr, // SIZE_MAX
            /* .get_alloc_size = */ buft_get_alloc_size,
            /* .is_host        = */ buft_is_host,
        },
        dev,
        nullptr,
    };
    return &buft;
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    return load::current() ? sparse_buffer_type(dev) : ggml_backend_cpu_buffer_type();
}

// Asked at load for a weight in our buffer type (no data yet), and by the scheduler for each node. Once a weight is ours, its products
// are never refused: the scheduler would read it as dense.
bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (is_no_op(op)) {
        return true;
    }
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    if (op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) {
        return false; // not ours to compute
    }
    if (!w->buffer || w->buffer->buft != sparse_buffer_type(dev) || w->view_src) {
        return false; // a dense weight, or a slice of a sparse one, which has no rows of its own
    }
    if (load::current() && !load::current()->find(w)) {
        return false; // dense in this file
    }
    return x->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == sparse_buffer_type(dev) || ggml_backend_buft_is_host(buft);
}

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

} // namespace

ggml_backend_dev_t cpu_device(ggml_backend_reg_t reg) {
    static ggml_backend_device device = { device_iface, reg, nullptr };
    return &device;
}

void cpu_set_n_threads(ggml_backend_t backend, int n_threads) {
    if (backend && ggml_guid_matches(backend->guid, backend_guid())) {
        static_cast<backend_context *>(backend->context)->n_threads = n_threads;
    }
}

} // namespace macko
