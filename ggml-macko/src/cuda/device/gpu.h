// One NVIDIA GPU: its stream, its error state, and what its contexts share.
//
// All work of a GPU, of every context and buffer, goes to one stream, so copies, clears and kernels are ordered by
// construction. Copies from and to host memory block, except small writes: the smallest wait for the next use of the
// stream, which queues all of them in one launch, and others pass through a ring of pinned memory. Large ones, such as
// weights that llama.cpp sends for one prompt, pass through the workspace's (cuda/lib/staging.h).
//
// A CUDA error makes the device dead: every later graph fails and every read returns NaN bytes, because CUDA offers no
// recovery within a process. Running out of memory is no such error: it fails only the buffer, context or graph that
// asked.
#pragma once

#include "cuda/graph/graph.h"
#include "cuda/lib/cublas.h"

#include "ggml-backend-impl.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>

namespace macko::cuda {

// What products of many columns need beside their tensors. The contexts of a GPU share it, because their work is on one
// stream; it is freed with the last of them.
struct workspace {
    void *        gemm = nullptr; // cuBLAS's
    panel_buffers panels;
    host_staging  staging;

    workspace() = default;
    ~workspace();
    workspace(const workspace &)             = delete;
    workspace & operator=(const workspace &) = delete;

    // panel_nbytes 0: no panels. false: out of memory; what was allocated is usable
    bool create(size_t panel_nbytes);

private:
    bool create_panels(size_t panel_nbytes);
};

struct gpu {
    int         id = 0;
    std::string name, description, pci_id;
    int         n_sm = 0, shared_nbytes = 0;
    size_t      max_panel_nbytes = 0;

    ggml_backend_buffer_type buft = {}, host_buft = {};

    std::mutex compute; // held while a graph is queued. Contexts share what follows
    // A handle costs host memory that CUDA never gives back: one per GPU, kept for good.
    std::unique_ptr<cublas_library> cublas;
    bool                            cublas_opened = false;
    std::weak_ptr<workspace>        shared;

    cudaStream_t          stream = nullptr; // made by the first select()
    std::atomic<uint64_t> buffers_freed{ 0 };
    std::atomic<size_t>   panel_nbytes{ 0 }; // that suit the largest sparse matrix so far

    // What device_supports_op() and copies ask; written when a context is made, or begins to compute.
    std::atomic<size_t> offload_panel_nbytes{ 0 }; // of the last workspace; 0: no weight in host memory is multiplied
    std::atomic<int>    cc{ 0 };                   // op_compute_capability()
    std::atomic<int>    n_threads;                 // that make weights dense and copy them

    gpu();

    // Makes this GPU current on the calling thread and queues pending writes. Every use of the stream begins with it.
    bool select();
    // Is the call a success? If not, the device is dead from now on.
    bool check(cudaError_t error, const char * what);
    // The same for calls that leave everything as it was if memory is short, of the GPU or of its driver (kernels are
    // loaded on first use): then the device stays alive, because others may have taken the memory for a moment only.
    bool check_memory(cudaError_t error, const char * what);
    bool synchronize() { return check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

    // Host memory: dst or src may be reused when they return. A copy that cannot be made for whatever reason makes the
    // device dead, since nobody looks at tensors again.
    bool write(void * dst, const void * src, size_t size);
    void read(void * dst, const void * src, size_t size); // NaN bytes on failure, never what an earlier graph left
    bool fill(void * dst, uint8_t value, size_t size);

private:
    pid_t             pid_;
    std::atomic<bool> dead_{ false };

    std::mutex   mutex_;               // of what follows, and of making the stream
    char *       ring_      = nullptr; // pinned
    size_t       ring_used_ = 0;
    small_writes pending_; // not queued yet

    void give_up(const char * what, const std::string & why);
    bool select_for_copy();
    bool write_large(void * dst, const void * src, size_t size);

    // mutex_ is held
    bool make_current();
    bool make_stream();
    bool queue_pending();
    bool write_through_ring(void * dst, const void * src, size_t size);
};

inline gpu & gpu_of(ggml_backend_buffer_type_t buft) { return *static_cast<gpu *>(buft->context); }
inline gpu & gpu_of(ggml_backend_dev_t dev) { return *static_cast<gpu *>(dev->context); }

} // namespace macko::cuda
