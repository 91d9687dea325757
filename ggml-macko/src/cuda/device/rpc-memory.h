// The memory of a buffer of a GPU on a server of llama.cpp's RPC backend (rpc/buffer.h). The addresses that the
// client asked for are reserved; those that are written or used in a graph get memory. Sparse weights lie side by side
// behind other addresses, which no request can name.
#pragma once

#include "cuda/device/gpu.h"
#include "cuda/lib/address-range.h"
#include "cuda/sparse/mul-mat.cuh"
#include "cuda/stored-matrix.h"
#include "rpc/buffer.h"

namespace macko::cuda {

// A GPU that serves, and what its buffers share.
struct rpc_gpu {
    gpu & device;
    // of the weights that arrive; given back when a graph is computed
    std::unique_ptr<cuda_sparse_uploader> uploader;
};

class gpu_memory : public rpc_memory {
public:
    // Null, with the reason in the log, if the addresses cannot be reserved.
    static std::unique_ptr<gpu_memory> reserve(rpc_gpu & server, size_t nbytes);
    ~gpu_memory() override;

    void * base() const override { return range_->base(); }
    void   write(void * at, const void * data, size_t n) override;
    void   fill(void * at, uint8_t value, size_t n) override;
    void   read(const void * at, void * data, size_t n) override;
    void   copy(void * at, rpc_memory & from, const void * source, size_t n) override;
    void   clear(uint8_t value) override;
    int    make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) override;

    // Gives memory to n bytes, which hold what they read as until then. False, with the reason in the log: there was
    // none, now or earlier, and nothing may be computed from this buffer.
    bool commit(const void * at, size_t n);
    // what a gpu_memory has made of a matrix
    static stored_matrix * matrix_of(const rpc_weight & weight);

private:
    // Sparse weights, one behind the other. Room is used again from the end, and when none is left.
    struct arena {
        std::unique_ptr<address_range> range; // reserved with the first weight
        size_t                         nbytes = 0, used = 0, n_weights = 0;
    };
    struct placed_weight;

    rpc_gpu &                      server_;
    std::unique_ptr<address_range> range_;
    size_t                         nbytes_;
    uint8_t                        value_ = 0;     // of what has no memory
    bool                           lost_  = false; // memory was short, so something that was written is not there
    arena                          weights_;

    gpu_memory(rpc_gpu & server, std::unique_ptr<address_range> range, size_t nbytes)
        : server_(server), range_(std::move(range)), nbytes_(nbytes) {}
    size_t offset_of(const void * at) const {
        return static_cast<size_t>(static_cast<const char *>(at) - range_->base());
    }
    int take(const sparse_tensor_info & matrix, size_t nbytes, std::unique_ptr<placed_weight> * out);
};

} // namespace macko::cuda
