// The memory of a buffer of a GPU on a server of llama.cpp's RPC backend (rpc/buffer.h). All addresses that the client
// requested are reserved; those that are written or used in a graph get memory. Sparse weights are stored one after the
// other at separate addresses, which no request can name.
#pragma once

#include "cuda/device/gpu.h"
#include "cuda/lib/address-range.h"
#include "cuda/sparse/mul-mat.cuh"
#include "cuda/stored-matrix.h"
#include "rpc/buffer.h"

namespace macko::cuda {

// A GPU of a server, and the data that its buffers share.
struct rpc_gpu {
    gpu & device;
    // uploads arriving weights; freed when a graph is computed
    std::unique_ptr<cuda_sparse_uploader> uploader;
};

class gpu_memory : public rpc_memory {
public:
    // Returns null and logs the reason if the addresses cannot be reserved.
    static std::unique_ptr<gpu_memory> reserve(rpc_gpu & server, size_t nbytes);
    ~gpu_memory() override;

    void * base() const override { return range_->base(); }
    void   write(void * at, const void * data, size_t n) override;
    void   fill(void * at, uint8_t value, size_t n) override;
    void   read(const void * at, void * data, size_t n) override;
    void   copy(void * at, rpc_memory & from, const void * source, size_t n) override;
    void   clear(uint8_t value) override;
    int    make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) override;

    // Allocates memory for n bytes, which keep the content that they read as before. Returns false and logs the reason
    // if an allocation failed, now or earlier; no graph may use this buffer then.
    bool commit(const void * at, size_t n);
    // The GPU matrix behind a weight made by a gpu_memory.
    static stored_matrix * matrix_of(const rpc_weight & weight);

private:
    // Sparse weights, one after the other. Space is reused from the end, or all of it once the last weight is freed.
    struct arena {
        std::unique_ptr<address_range> range; // reserved for the first weight
        size_t                         nbytes = 0, used = 0, n_weights = 0;
    };
    struct placed_weight;

    rpc_gpu &                      server_;
    std::unique_ptr<address_range> range_;
    size_t                         nbytes_;
    uint8_t                        value_ = 0;     // value of addresses without memory
    bool                           lost_  = false; // memory was short, so written data is missing
    arena                          weights_;

    gpu_memory(rpc_gpu & server, std::unique_ptr<address_range> range, size_t nbytes)
        : server_(server), range_(std::move(range)), nbytes_(nbytes) {}
    size_t offset_of(const void * at) const {
        return static_cast<size_t>(static_cast<const char *>(at) - range_->base());
    }
    int take(const sparse_tensor_info & matrix, size_t nbytes, std::unique_ptr<placed_weight> * out);
};

} // namespace macko::cuda
