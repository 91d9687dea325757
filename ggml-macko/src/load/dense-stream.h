// Serves a sparse GGUF as the dense GGUF that it stands for. Sparse tensors read as a placeholder and then zeros; the
// backend's buffer
// recognises the placeholder and fetches the payload itself. Dense tensors and metadata read through.
// The zeros are the dense model's size, and stdio copies what it reads: a second for 7B. llama.cpp asks a stream where
// it is before each read, and reads no further than to the
// end of the file; so the stream says that the end is behind the placeholder. Whoever does not ask gets zeros.
#pragma once

#include "load/model-file.h"

#include <cstdio>

namespace macko {

struct tensor_placeholder {
    uint8_t  nonce[16]; // random per load: bytes of a file cannot pass for a placeholder
    uint64_t index;     // into model_file::sparse
};

class dense_stream {
public:
    // file must outlive this object
    [[nodiscard]] static int create(const model_file & file, std::unique_ptr<dense_stream> * out);
    ~dense_stream();

    int64_t size() const;
    // an fopencookie stream (hooks in C++, noexcept); nullptr + last error on failure. The caller closes it before this
    // object goes.
    FILE * open_stream();
    // index of the sparse matrix if data starts with a placeholder of this load, else -1
    int64_t match_placeholder(const void * data, size_t n) const;
    // first I/O error that a read hook met (its text is kept): OK or a status with the message restored
    [[nodiscard]] int status() const;
    // what the stream says when it is asked for its position at offset: in a sparse tensor as if the file ended behind
    // that one's placeholder; at its end size()
    int64_t reported_offset(int64_t offset) const;
    // how many of the n bytes from offset on the stream reads at once: none that nobody will ask for, the rest of a
    // sparse tensor, with others
    int64_t contiguous_bytes(int64_t offset, int64_t n) const;
    // for tests: the same bytes without stdio
    [[nodiscard]] int read_at(int64_t offset, void * dst, int64_t n) const;

private:
    struct impl;
    std::unique_ptr<impl> impl_;
    explicit dense_stream(std::unique_ptr<impl> p);
};

} // namespace macko
