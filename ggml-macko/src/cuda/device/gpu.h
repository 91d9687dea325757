// One NVIDIA GPU: its stream, its error state, and the data that its contexts share.
//
// All work of a GPU, for every context and buffer, goes to one stream, so copies, clears and kernels are ordered by
// construction. Copies from and to host memory block, except small writes: the smallest are collected until the next
// use of the stream, which queues all of them in one launch, and others pass through a ring of pinned memory. Large
// writes, such as weights that llama.cpp sends for one prompt, use the pinned memory of the workspace
// (cuda/lib/staging.h).
//
// After a CUDA error the device is dead: every later graph fails and every read returns NaN bytes, because CUDA offers
// no recovery within a process. Running out of memory does not kill the device: only the buffer, context or graph that
// needed the memory fails.
#pragma once

#include "abi/buffer-type.h"
#include "cuda/graph/graph.h"
#include "cuda/lib/cublas.h"

#include "ggml-backend-impl.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace macko::cuda {

// Extra memory for products of many columns. The contexts of a GPU share it, because their work is on one stream; it is
// freed with the last context.
struct workspace {
    void *        gemm = nullptr; // cuBLAS's workspace
    panel_buffers panels;
    host_staging  staging;

    workspace() = default;
    ~workspace();
    workspace(const workspace &)             = delete;
    workspace & operator=(const workspace &) = delete;

    // panel_nbytes 0: no panels. Returns false if out of memory; the allocated parts are usable.
    bool create(size_t panel_nbytes);

private:
    bool create_panels(size_t panel_nbytes);
};

struct gpu {
    int         id = 0;
    std::string name, description, pci_id;
    int         n_sm = 0, shared_nbytes = 0;
    size_t      max_panel_nbytes = 0;

    buffer_type buft, host_buft;

    std::mutex compute; // held while a graph is queued; guards the members below
    // One per GPU, kept for the life of the process: CUDA never returns the host memory of a handle.
    std::unique_ptr<cublas_library> cublas;
    bool                            cublas_opened = false;
    std::weak_ptr<workspace>        shared;

    cudaStream_t          stream = nullptr; // made by the first select()
    std::atomic<uint64_t> buffers_freed{ 0 };
    std::atomic<size_t>   panel_nbytes{ 0 }; // size for the largest sparse matrix so far

    // Read by device_supports_op() and copies; written when a context is made or begins to compute.
    std::atomic<size_t> offload_panel_nbytes{ 0 }; // of the latest workspace; 0: no host weight is multiplied
    std::atomic<int>    cc{ 0 };                   // op_compute_capability()
    std::atomic<int>    n_threads;                 // host threads that make weights dense and copy them

    gpu();

    // Makes this GPU current on the calling thread and queues pending writes. Call it before every use of the stream.
    bool select();
    // Returns whether the call succeeded. If not, the device is dead from now on.
    bool check(cudaError_t error, const char * what);
    // Like check(), for calls that change nothing when the GPU or its driver (which loads kernels on first use) is out
    // of memory. The device then stays alive, because the shortage may be temporary.
    bool check_memory(cudaError_t error, const char * what);
    bool synchronize() { return check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

    // Copies from and to host memory; dst or src may be reused after the call. A failed copy makes the device dead,
    // because no caller checks the tensors later.
    bool write(void * dst, const void * src, size_t size);
    void read(void * dst, const void * src, size_t size); // NaN bytes on failure, never data of an earlier graph
    bool fill(void * dst, uint8_t value, size_t size);

private:
    int64_t           pid_;
    std::atomic<bool> dead_{ false };

    std::mutex   mutex_;               // guards the members below and the creation of the stream
    char *       ring_      = nullptr; // pinned
    size_t       ring_used_ = 0;
    small_writes pending_; // not yet queued

    void give_up(const char * what, const std::string & why);
    bool select_for_copy();
    bool write_large(void * dst, const void * src, size_t size);

    // the caller holds mutex_
    bool make_current();
    bool make_stream();
    bool queue_pending();
    bool write_through_ring(void * dst, const void * src, size_t size);
};

inline gpu & gpu_of(ggml_backend_buffer_type_t buft) { return *static_cast<gpu *>(buffer_type::of(buft).context()); }
inline gpu & gpu_of(ggml_backend_dev_t dev) { return *static_cast<gpu *>(dev->context); }

} // namespace macko::cuda
