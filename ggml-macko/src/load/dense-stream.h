// Serves a sparse GGUF as the dense GGUF that it stands for. Metadata and dense tensors read through. A sparse tensor
// reads as its dense bytes, which are decoded when its first byte is read, one tensor at a time; unless a device has
// claimed it: then it reads as a placeholder and zeros, and the device's buffer that recognises the placeholder fetches
// the payload itself.
//
// The zeros are as many as the dense model's bytes, and stdio copies what it reads: a second for 7B. llama.cpp asks a
// stream for its position before each read, and reads no further than to the end of the file. So the stream reports a
// position from which the file ends behind the placeholder. A reader that does not ask gets the zeros.
#pragma once

#include "load/model-file.h"

#include <cstdio>

namespace macko {

struct tensor_placeholder {
    uint8_t  nonce[16]; // random per load, so that bytes of a file cannot pass for a placeholder
    uint64_t index;     // into model_file::sparse
};

class dense_stream {
public:
    // file must outlive this object
    [[nodiscard]] static int create(const model_file & file, std::unique_ptr<dense_stream> * out);
    ~dense_stream();

    int64_t size() const;
    // The sparse matrix of this index, of which a device fetches the payload itself. Call it before the matrix is read.
    void claim(int64_t index);
    bool is_claimed(int64_t index) const;
    // A read of a matrix that nobody has claimed is an error from now on.
    void refuse_unclaimed();
    // matrices that were decoded because they were read without a claim: their number, and bytes stored and dense
    struct dense_reads {
        int64_t n, nbytes_stored, nbytes_dense;
    };
    dense_reads decoded() const;
    // a stdio stream, or nullptr and the last error; the caller closes it before this object is destroyed
    FILE * open_stream();
    // index of the sparse matrix if data starts with a placeholder of this load, else -1
    int64_t match_placeholder(const void * data, size_t n) const;
    // the first I/O error of a read through the stream, with its message; or OK
    [[nodiscard]] int status() const;
    // The position that the stream reports at offset: in a sparse tensor as if the file ended behind the tensor's
    // placeholder; at the end of the stream size().
    int64_t reported_offset(int64_t offset) const;
    // How many of the n bytes from offset on one read of the stream returns. A sparse tensor is not read ahead, because
    // nobody may have claimed it yet; and the zeros of a claimed one, which nobody will ask for, are not read together
    // with other bytes.
    int64_t contiguous_bytes(int64_t offset, int64_t n) const;
    // for tests: the same bytes without stdio
    [[nodiscard]] int read_at(int64_t offset, void * dst, int64_t n) const;

private:
    struct impl;
    std::unique_ptr<impl> impl_;
    explicit dense_stream(std::unique_ptr<impl> p);
};

} // namespace macko
