#include "cuda/device/gpu.h"

#include "backend/log.h"
#include "codec/team.h"
#include "cuda/sparse/mul-mat.cuh"
#include "platform/platform.h"

#include <cstring>

namespace macko::cuda {

namespace {

constexpr size_t RING_NBYTES    = size_t(1) << 20;
constexpr size_t RING_MAX_WRITE = size_t(64) << 10;
constexpr size_t MIN_STAGED     = size_t(2) << 20; // starting threads does not pay for smaller writes

bool make_event(cudaEvent_t * event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming) == cudaSuccess; }

void free_event(cudaEvent_t event) {
    if (event) {
        cudaEventDestroy(event);
    }
}

} // namespace

// ---- workspace ----

bool workspace::create(size_t panel_nbytes) {
    bool ok = gemm || cudaMalloc(&gemm, CUBLAS_WORKSPACE_NBYTES) == cudaSuccess;
    if (panel_nbytes > 0 && !panels.nbytes) {
        const bool made = create_panels(panel_nbytes);
        panels.nbytes   = made ? panel_nbytes : 0;
        ok              = ok && made;
    }
    panels.staging = &staging;
    cudaGetLastError(); // running out of memory is not sticky
    return ok;
}

bool workspace::create_panels(size_t panel_nbytes) {
    bool made = cudaStreamCreateWithFlags(&panels.stream, cudaStreamNonBlocking) == cudaSuccess &&
                make_event(&panels.begin) && cudaMalloc(&panels.x16, CUDA_SPARSE_X16_NBYTES) == cudaSuccess;
    for (int i = 0; i < panel_buffers::N; i++) {
        made = made && cudaMalloc(&panels.memory[i], panel_nbytes) == cudaSuccess && make_event(&panels.made[i]) &&
               make_event(&panels.used[i]);
    }
    return made;
}

workspace::~workspace() {
    cudaFree(gemm);
    cudaFree(panels.x16);
    for (int i = 0; i < panel_buffers::N; i++) {
        cudaFree(panels.memory[i]);
        free_event(panels.made[i]);
        free_event(panels.used[i]);
    }
    free_event(panels.begin);
    if (panels.stream) {
        cudaStreamDestroy(panels.stream);
    }
}

// ---- gpu: the calling thread, the stream ----

gpu::gpu() : n_threads(default_threads()), pid_(platform::process_id()) {}

bool gpu::select() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return make_current() && queue_pending();
}

bool gpu::queue_pending() {
    const cudaError_t error = op_small_writes(pending_, stream);
    pending_.n = pending_.nbytes = 0;
    return check(error, "writing to the GPU");
}

bool gpu::make_current() {
    if (dead_) {
        return false;
    }
    if (pid_ != platform::process_id()) {
        dead_ = true;
        log_error("%s: the CUDA context belongs to the parent process: load the model after fork()\n", name.c_str());
        return false;
    }
    return check_memory(cudaSetDevice(id), "cudaSetDevice") && (stream || make_stream());
}

// Gives the stream the highest priority: products run before the panels that are filled at the same time.
bool gpu::make_stream() {
    int least = 0, most = 0;
    return check(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange") &&
           (ring_ || check_memory(cudaMallocHost(&ring_, RING_NBYTES), "cudaMallocHost")) &&
           check_memory(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, most), "cudaStreamCreate");
}

bool gpu::check_memory(cudaError_t error, const char * what) {
    if (error != cudaErrorMemoryAllocation) {
        return check(error, what);
    }
    cudaGetLastError(); // not sticky
    log_error("%s: %s: out of memory; free some and try again\n", name.c_str(), what);
    return false;
}

bool gpu::check(cudaError_t error, const char * what) {
    if (error == cudaSuccess) {
        return true;
    }
    give_up(what, cudaGetErrorString(error) + std::string(" (") + cudaGetErrorName(error) + ")");
    return false;
}

void gpu::give_up(const char * what, const std::string & why) {
    if (!dead_.exchange(true)) {
        log_error("%s: %s: %s. The GPU is no longer used; restart the process\n", name.c_str(), what, why.c_str());
    }
}

// ---- gpu: copies ----

bool gpu::select_for_copy() {
    if (!select()) {
        give_up("a copy", "it could not be made");
        return false;
    }
    return true;
}

bool gpu::write(void * dst, const void * src, size_t size) {
    if (size <= small_writes::MAX_NBYTES) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (make_current() && (pending_.add(dst, src, size) || (queue_pending() && pending_.add(dst, src, size)))) {
            return true;
        }
        give_up("a copy", "it could not be made");
        return false;
    }
    if (!select_for_copy()) {
        return false;
    }
    if (size > RING_MAX_WRITE) {
        return write_large(dst, src, size);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return write_through_ring(dst, src, size);
}

// The GPU reads pinned memory directly.
bool gpu::write_large(void * dst, const void * src, size_t size) {
    std::shared_ptr<workspace> work;
    cudaPointerAttributes      attributes = {};
    if (size >= MIN_STAGED) {
        if (!check(cudaPointerGetAttributes(&attributes, src), "cudaPointerGetAttributes")) {
            return false;
        }
        const std::lock_guard<std::mutex> lock(compute);
        work = shared.lock();
    }
    if (!work || attributes.type != cudaMemoryTypeUnregistered) {
        return check(cudaMemcpyAsync(dst, src, size, cudaMemcpyHostToDevice, stream), "copy to the GPU") &&
               synchronize();
    }
    const staged_rows bytes = { dst, 1, 1, static_cast<int64_t>(size), 1 };
    const auto        fill  = [&](int64_t begin, int64_t end, void * memory) {
        memcpy(memory, static_cast<const char *>(src) + begin, static_cast<size_t>(end - begin));
    };
    return check(work->staging.copy(bytes, n_threads, stream, fill), "copy to the GPU");
}

bool gpu::write_through_ring(void * dst, const void * src, size_t size) {
    if (ring_used_ + size > RING_NBYTES) {
        if (!synchronize()) {
            return false;
        }
        ring_used_ = 0;
    }
    char * slot = ring_ + ring_used_;
    ring_used_ += GGML_PAD(size, 64);
    memcpy(slot, src, size);
    return check(cudaMemcpyAsync(dst, slot, size, cudaMemcpyHostToDevice, stream), "copy to the GPU");
}

void gpu::read(void * dst, const void * src, size_t size) {
    if (!select_for_copy() ||
        !check(cudaMemcpyAsync(dst, src, size, cudaMemcpyDeviceToHost, stream), "copy from the GPU") ||
        !synchronize()) {
        memset(dst, 0xff, size);
    }
}

bool gpu::fill(void * dst, uint8_t value, size_t size) {
    return select_for_copy() && check(cudaMemsetAsync(dst, value, size, stream), "cudaMemset") && synchronize();
}

} // namespace macko::cuda
