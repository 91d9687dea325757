#include "cuda/device/rpc-memory.h"

#include "backend/log.h"
#include "cuda/device/buffer.h"
#include "cuda/device/upload.h"

#include <algorithm>
#include <cstring>

namespace macko::cuda {

namespace {

constexpr double MIB = 1 << 20;

} // namespace

// ---- plain bytes ----

std::unique_ptr<gpu_memory> gpu_memory::reserve(rpc_gpu & server, size_t nbytes) {
    gpu &                          device = server.device;
    std::unique_ptr<address_range> range;
    if (!device.select()) {
        return nullptr;
    }
    if (const cudaError_t error = address_range::reserve(device.id, nbytes, &range)) {
        log_error("%s: cannot reserve %.2f MiB of addresses: %s\n", device.name.c_str(),
                  static_cast<double>(nbytes) / MIB, cudaGetErrorString(error));
        return nullptr;
    }
    return std::unique_ptr<gpu_memory>(new gpu_memory(server, std::move(range), nbytes));
}

gpu_memory::~gpu_memory() {
    if (server_.device.select()) {
        server_.device.synchronize(); // kernels may still use it
    }
    server_.device.buffers_freed++;
}

bool gpu_memory::commit(const void * at, size_t n) {
    const size_t offset = offset_of(at);
    bool         has    = false;
    if (lost_ || (range_->end_of_run(offset, offset + n, &has) == offset + n && has)) {
        return !lost_;
    }
    gpu &                               device = server_.device;
    std::vector<address_range::segment> fresh;
    lost_ = !device.select() || !device.check_memory(range_->commit(offset, n, &fresh), "memory for an RPC client");
    for (const address_range::segment & p : fresh) {
        lost_ = lost_ || !device.check(cudaMemsetAsync(p.at, value_, p.nbytes, device.stream), "cudaMemset");
    }
    return !lost_;
}

void gpu_memory::write(void * at, const void * data, size_t n) {
    if (commit(at, n)) {
        server_.device.write(at, data, n);
    }
}

void gpu_memory::fill(void * at, uint8_t value, size_t n) {
    if (commit(at, n)) {
        server_.device.fill(at, value, n);
    }
}

void gpu_memory::read(const void * at, void * data, size_t n) {
    size_t       offset = offset_of(at);
    const size_t end    = offset + n;
    for (char * out = static_cast<char *>(data); offset < end;) {
        bool         has;
        const size_t part = range_->end_of_run(offset, end, &has) - offset;
        if (has && !lost_) {
            server_.device.read(out, range_->base() + offset, part);
        } else {
            memset(out, lost_ ? 0xff : value_, part); // NaN, the same content as after a GPU failure
        }
        out += part;
        offset += part;
    }
}

void gpu_memory::copy(void * at, rpc_memory & from, const void * source, size_t n) {
    gpu & device = server_.device;
    if (!static_cast<gpu_memory &>(from).commit(source, n)) {
        fill(at, 0xff, n);
    } else if (commit(at, n) && device.select()) {
        device.check(cudaMemcpyAsync(at, source, n, cudaMemcpyDeviceToDevice, device.stream), "copy on the GPU");
    }
}

void gpu_memory::clear(uint8_t value) {
    value_ = value;
    lost_  = false;
    for (const address_range::segment & p : range_->committed()) {
        server_.device.fill(p.at, value, p.nbytes);
    }
}

// ---- weights ----

struct gpu_memory::placed_weight : rpc_weight {
    gpu_memory &                   memory;
    char *                         at;
    size_t                         nbytes;
    std::unique_ptr<stored_matrix> matrix;

    placed_weight(gpu_memory & m, char * where, size_t n) : memory(m), at(where), nbytes(n) {}
    ~placed_weight() override;
    void densify(size_t offset, void * data, size_t n) const override {
        if (!read_sparse(memory.server_.device, *matrix, static_cast<char *>(data), offset, n)) {
            memset(data, 0xff, n);
        }
    }
};

gpu_memory::placed_weight::~placed_weight() {
    gpu &   device = memory.server_.device;
    arena & a      = memory.weights_;
    if (device.select()) {
        device.synchronize(); // kernels may still read it
    }
    device.buffers_freed++; // captured graphs contain its address
    a.n_weights--;
    if (a.n_weights == 0) {
        a.used = 0;
    } else if (at + nbytes == a.range->base() + a.used) {
        a.used -= nbytes;
    }
}

// Reserves addresses and memory for a weight, which belongs to the arena from now on.
int gpu_memory::take(const sparse_tensor_info & matrix, size_t nbytes, std::unique_ptr<placed_weight> * out) {
    gpu &                               device = server_.device;
    arena &                             a      = weights_;
    std::vector<address_range::segment> fresh; // the upload writes all bytes that are read
    const auto                          checked = [&](cudaError_t error) -> int {
        if (error == cudaSuccess) {
            return GGML_MACKO_STATUS_OK;
        }
        const char * why = cudaGetErrorString(error);
        const double mib = static_cast<double>(nbytes) / MIB;
        return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s: no room for %.2f MiB on %s: %s", matrix.name.c_str(), mib,
                                             device.name.c_str(), why);
    };
    if (!a.range) { // a layout may need more than the dense elements; addresses cost nothing
        const size_t room = 4 * nbytes_ + (size_t(64) << 20);
        TRY(checked(address_range::reserve(device.id, room, &a.range)));
        a.nbytes = room;
    }
    const bool fits = nbytes <= a.nbytes - a.used;
    TRY(checked(fits ? a.range->commit(a.used, nbytes, &fresh) : cudaErrorMemoryAllocation));
    *out = std::make_unique<placed_weight>(*this, a.range->base() + a.used, nbytes);
    a.used += nbytes;
    a.n_weights++;
    return GGML_MACKO_STATUS_OK;
}

int gpu_memory::make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) {
    const sparse_tensor_info &     matrix = file.sparse[0];
    gpu &                          device = server_.device;
    std::unique_ptr<placed_weight> made;
    if (!device.select()) {
        return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s: %s cannot be used", matrix.name.c_str(), device.name.c_str());
    }
    const size_t nbytes = static_cast<size_t>(gpu_aligned(plan_of(device, matrix).nbytes));
    TRY(take(matrix, nbytes, &made));
    if (!server_.uploader) {
        TRY(cuda_sparse_uploader::create(device.id, &server_.uploader));
    }
    const auto read = [&](payload_consumer & consumer) { return read_payload(file, file.header, matrix, 0, consumer); };
    const int  status = upload_matrix(device, *server_.uploader, matrix, made->at, read, &made->matrix);
    *out              = status ? nullptr : std::move(made);
    return status;
}

stored_matrix * gpu_memory::matrix_of(const rpc_weight & weight) {
    return static_cast<const placed_weight &>(weight).matrix.get();
}

} // namespace macko::cuda
