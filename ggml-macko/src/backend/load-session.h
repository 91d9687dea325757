// The load that is running on a thread: which file, which sparse tensors, and the first error. Devices ask it what a
// tensor is. Nothing is keyed by tensor name outside a load, so that models with equal names never mix.
#pragma once

#include "ggml-backend.h"
#include "load/dense-stream.h"
#include "load/payload.h"
#include "load/weight-cache.h"

#include <functional>
#include <unordered_map>

namespace macko {

class load_session {
public:
    // Opens and vets a file, or all files of a split model. NOT_SPARSE: the file is not sparse, or has nothing to
    // compress, or is broken without claiming to be sparse, so that llama.cpp is to judge it. strict: UNSUPPORTED_ARCH
    // for a sparse file whose architecture has no rules (gguf/model-keys.h); else a warning in the log says so.
    [[nodiscard]] static int open(const char * path, compression how, bool strict, bool no_alloc,
                                  std::unique_ptr<load_session> * out);
    // Makes this the current load of the thread; *stream is the dense GGUF, which this object owns. sparse_only: a
    // sparse tensor that llama.cpp places on a device of another backend is an error; else it becomes dense there.
    // cache_for: nullptr, or what the bytes of devices' weights depend on; then they are kept in a file if possible.
    [[nodiscard]] int begin(bool sparse_only, const char * cache_for, FILE ** stream);
    // Closes the stream and ends the load, and says what was wrong with it. model_loaded: llama.cpp returned a model;
    // with_weights: it was to have its weights.
    [[nodiscard]] int end(bool model_loaded, bool with_weights);
    ~load_session() { stop(); }
    load_session(const load_session &)             = delete;
    load_session & operator=(const load_session &) = delete;

    // the load running on this thread, or nullptr
    static load_session * current();
    // while it lives, no load is current on this thread
    class none_current {
    public:
        none_current();
        ~none_current();
        none_current(const none_current &)             = delete;
        none_current & operator=(const none_current &) = delete;

    private:
        load_session * outer_;
    };

    // the sparse tensor that a tensor of the dense model stands for (same name, type and shape), or nullptr
    const sparse_tensor_info *              find(const ggml_tensor * tensor) const;
    const std::vector<sparse_tensor_info> & matrices() const { return file_->sparse; }
    // whether llama.cpp asks for sizes only (params.no_alloc)
    bool no_alloc() const { return no_alloc_; }
    // nullptr if this load has none. Weights that are to be in it are aligned to weight_cache::page_size().
    weight_cache * cache() const { return cache_.get(); }
    // Takes a weight that was received into the cache. If that fails, the log says why, and there is no cache any more.
    void add_to_cache(const std::string & name, const void * memory, size_t nbytes);

    // The init_tensor of a device's buffers: if a load is running, and the tensor stands for a sparse one, the device
    // will receive() it.
    static ggml_status claim_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor);
    // Called by a device's set_tensor: data is the beginning of what llama.cpp read for the tensor. If it holds this
    // load's placeholder of the tensor's matrix, the payload is read, validated and given to consumer, and the matrix
    // is marked as loaded. An error is also kept for end().
    int receive(const ggml_tensor * tensor, const void * data, size_t size, payload_consumer & consumer);
    // the same, but take(matrix) reads the payload, or not, and returns a status
    int  deliver(const ggml_tensor * tensor, const void * data, size_t size,
                 const std::function<int(const sparse_tensor_info &)> & take);
    bool is_claimed(const ggml_tensor * tensor) const;
    // the matrix as a file of its own (load/matrix-file.h), which must not outlive this object
    [[nodiscard]] int make_matrix_file(const sparse_tensor_info & matrix, std::unique_ptr<model_file> * out) const;
    // keeps the current error message of a device for end(); the first one wins
    void keep_error(int status);
    // reports a device that is out of memory: to the log, and to end() if a load is running
    __attribute__((format(printf, 1, 2))) static void keep_out_of_memory(const char * format, ...);

    // what devices need only while loading, by device; freed with the load
    std::unordered_map<const void *, std::shared_ptr<void>> staging;

private:
    load_session() = default;
    void stop();
    void open_cache(const char * cache_for);
    void commit_cache();

    load_session *                                              outer_ = nullptr; // current before this one began
    std::unique_ptr<model_file>                                 file_;
    std::unique_ptr<dense_stream>                               dense_;
    std::unique_ptr<weight_cache>                               cache_;
    FILE *                                                      stream_   = nullptr;
    bool                                                        no_alloc_ = false;
    std::unordered_map<std::string, const sparse_tensor_info *> by_name_;
    std::vector<bool>                                           loaded_; // by index into file_->sparse
    int                                                         status_ = GGML_MACKO_STATUS_OK;
    std::string                                                 error_;
};

} // namespace macko
