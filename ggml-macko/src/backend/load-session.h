// The load that is running on a thread: its file, its sparse tensors, and its first error. Devices use it to look up a
// tensor. Outside a load no data is keyed by tensor name, so models with equal names never mix.
#pragma once

#include "codec/first-error.h"
#include "codec/team.h"
#include "ggml-backend.h"
#include "load/dense-stream.h"
#include "load/link.h"
#include "load/payload.h"
#include "load/weight-cache.h"

#include <functional>
#include <optional>
#include <unordered_map>

namespace macko {

// Data that one thread of a load needs only during the load.
struct load_thread {
    read_memory                                             memory;
    std::unordered_map<const void *, std::shared_ptr<void>> staging; // keyed by device
};

// Passes the payload of a matrix to a consumer, and returns a status.
using payload_source = std::function<int(payload_consumer &)>;

class load_session {
public:
    // Opens and checks a file, or all files of a split model. NOT_SPARSE means that llama.cpp must handle the file: it
    // is not sparse, has no weight to compress, or is broken and has no sign of a sparse file. flags: of enum
    // ggml_macko_load_flags. UNSUPPORTED_ARCH, with LOAD_STRICT, for a sparse file whose architecture has no rules
    // (gguf/model-keys.h); otherwise the log has a warning.
    [[nodiscard]] static int open(const char * path, int32_t flags, bool no_alloc, std::unique_ptr<load_session> * out);
    // Makes this the current load of the thread. *stream is the dense GGUF, owned by this object. sparse_only: fail if
    // llama.cpp places a sparse tensor on a device of another backend; otherwise the tensor becomes dense. cache_for:
    // nullptr for no cache; else a text with everything that the bytes of the devices' weights depend on.
    [[nodiscard]] int begin(bool sparse_only, const char * cache_for, FILE ** stream);
    // Closes the stream, ends the load, and returns its first error. model_loaded: llama.cpp returned a model.
    // with_weights: the caller requested the model's weights.
    [[nodiscard]] int end(bool model_loaded, bool with_weights);
    ~load_session() { stop(); }
    load_session(const load_session &)             = delete;
    load_session & operator=(const load_session &) = delete;

    // The current load of this thread, or nullptr.
    static load_session * current();
    // llama.cpp asks the CPU device for its buffer type at the beginning of each load, and here the device asks for the
    // current load. If the thread has none, but the process has a link (load/link.h) open, then llama.cpp is loading
    // this link without ggml_macko_load_model(), and a load of the model that it names becomes the current one. It ends
    // when llama.cpp has closed the link. check: returns a status, which the load reports. If the load cannot begin,
    // the log has the reason, and the load refuses() its weights.
    static load_session * current_or_linked(const std::function<int()> & check);
    // While an object of this class lives, the thread has no current load.
    class none_current {
    public:
        none_current();
        ~none_current();
        none_current(const none_current &)             = delete;
        none_current & operator=(const none_current &) = delete;

    private:
        load_session * outer_;
    };

    // The sparse tensor with the name, type and shape of a tensor of the dense model, or nullptr.
    const sparse_tensor_info * find(const ggml_tensor * tensor) const;
    // Whether a weight belongs to a device of this plugin.
    bool owns(const ggml_tensor * w) const { return find(w) || (refuses() && w->type == LINK_TYPE); }
    // Whether this is the load of a link that llama.cpp must not complete.
    bool                                    refuses() const { return is_link() && error_.any(); }
    bool                                    is_link() const { return link_.fd >= 0; }
    const std::vector<sparse_tensor_info> & matrices() const { return file_->sparse; }
    // Whether llama.cpp requests only sizes (params.no_alloc), or, with a link, perhaps only sizes.
    bool may_not_alloc() const { return no_alloc_ || is_link(); }
    // nullptr if this load has no cache. Weights for the cache are aligned to platform::page_size().
    weight_cache * cache() const { return cache_.get(); }
    // Adds a received weight to the cache. On failure the log has the reason, and the load drops the cache.
    void add_to_cache(const std::string & name, const void * memory, size_t nbytes);

    // init_tensor of a device's buffers. If a load is running and the tensor represents a sparse one, the device
    // promises to receive() it. A link's weight is received at once, with a call of the buffer's set_tensor without
    // data: the data of the link are zeros, and only here llama.cpp accepts an error.
    static ggml_status claim_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor);
    // Whether a device ignores these bytes of a weight that it has claimed: all but the first of a stream, which
    // contain the placeholder, and all of a link. After the last byte of a link's tensor, the tensor gets its dense
    // type.
    bool ignores(ggml_tensor * tensor, const sparse_tensor_info & matrix, size_t offset, size_t size) const;
    // Called by a device's set_tensor with the first bytes that llama.cpp read for the tensor. If they contain this
    // load's placeholder for the tensor's matrix, the function reads and checks the payload, passes it to consumer, and
    // marks the matrix as loaded. end() also reports its error.
    int receive(const ggml_tensor * tensor, const void * data, size_t size, payload_consumer & consumer);
    // Like receive(), but may return before the matrix has arrived: wait() and end() wait for it. A load without a link
    // receives two matrices at once, so a device can work on one while the CPU reads another. take() gets the data of
    // its thread and a source of the payload, and returns a status, which end() reports.
    void receive_soon(const ggml_tensor * tensor, const void * data, size_t size,
                      const std::function<int(load_thread &, const payload_source &)> & take);
    // Waits for all matrices of receive_soon().
    void wait() { second_.wait(); }
    // Like receive(), but take(matrix) decides whether to read the payload, and returns a status.
    int  deliver(const ggml_tensor * tensor, const void * data, size_t size,
                 const std::function<int(const sparse_tensor_info &)> & take);
    bool is_claimed(const ggml_tensor * tensor) const;
    // The matrix as a file of its own (load/matrix-file.h), which must not outlive this object.
    [[nodiscard]] int make_matrix_file(const sparse_tensor_info & matrix, std::unique_ptr<model_file> * out) const;
    // Saves the current error message of a device for end().
    void keep_error(int status) { error_.set(-1, status); }
    // Reports a device that is out of memory to the log, and to end() if a load is running.
    __attribute__((format(printf, 1, 2))) static void keep_out_of_memory(const char * format, ...);

    load_thread & this_thread() { return of_threads_[0]; } // of the thread that loads the model

private:
    struct open_link {
        int                   fd = -1;
        platform::file_status opened;
    };
    static std::vector<open_link> find_links();
    static void                   end_link();
    static bool                   is_open(const open_link & link);

    load_session() = default;
    // Checks that bytes of a tensor are this load's placeholder for *out, or the tensor's bytes of a link.
    int match(const ggml_tensor * tensor, const void * data, size_t size, const sparse_tensor_info ** out);
    // Calls take(), which returns a status, and marks the matrix as loaded. Keeps an error.
    int  finish(const sparse_tensor_info & matrix, const std::function<int()> & take);
    void begin_link(const open_link & link, size_t n_links, const std::function<int()> & check);
    void index_names();
    void stop();
    void open_cache(const char * cache_for);
    void commit_cache();

    load_session *                                              outer_ = nullptr; // current before this load
    open_link                                                   link_;            // of a load without a stream
    std::unique_ptr<model_file>                                 file_;
    std::unique_ptr<dense_stream>                               dense_;
    std::unique_ptr<weight_cache>                               cache_;
    std::optional<kept_threads>                                 threads_; // of a load with a stream
    FILE *                                                      stream_   = nullptr;
    bool                                                        no_alloc_ = false;
    std::unordered_map<std::string, const sparse_tensor_info *> by_name_;
    std::mutex                                                  mutex_;         // guards loaded_
    std::vector<bool>                                           loaded_;        // indexed like file_->sparse
    first_error                                                 error_;         // parts: matrices; others come first
    load_thread                                                 of_threads_[2]; // the caller's and second_
    side_thread                                                 second_;
};

} // namespace macko
