// Presents a sparse GGUF as the dense GGUF that it represents. Metadata and dense tensors are copied from the file. A
// sparse tensor reads as dense bytes, which are decoded when its first byte is read, one tensor at a time. If a device
// has claimed the tensor, it reads as a placeholder and zeros instead, and the device's buffer recognizes the
// placeholder and fetches the payload itself.
//
// There are as many zeros as bytes in the dense tensor, and stdio copies all bytes that it reads: one second for 7B.
// llama.cpp reads a stream's position before each read, and reads no further than the end of the file. So the stream
// reports a position that leaves only the placeholder before the end of the file. A reader that does not use the
// position gets the zeros.
#pragma once

#include "load/model-file.h"

#include <cstdio>

namespace macko {

struct tensor_placeholder {
    uint8_t  nonce[16]; // random for each load, so that bytes of a file cannot imitate a placeholder
    uint64_t index;     // into model_file::sparse
};

class dense_stream {
public:
    // file must outlive this object
    [[nodiscard]] static int create(const model_file & file, std::unique_ptr<dense_stream> * out);
    ~dense_stream();

    int64_t size() const;
    // Marks a sparse matrix as claimed: a device will fetch its payload itself. Call it before the matrix is read.
    void claim(int64_t index);
    bool is_claimed(int64_t index) const;
    // From now on, reading an unclaimed matrix is an error.
    void refuse_unclaimed();
    // matrices that were decoded because they were read without a claim: their number, stored bytes and dense bytes
    struct dense_reads {
        int64_t n, nbytes_stored, nbytes_dense;
    };
    dense_reads decoded() const;
    // A stdio stream; nullptr and the last error on failure. The caller closes it before this object is destroyed.
    FILE * open_stream();
    // Index of the sparse matrix if data starts with a placeholder of this load, else -1.
    int64_t match_placeholder(const void * data, size_t n) const;
    // The first I/O error of a read through the stream, with its message; or OK.
    [[nodiscard]] int status() const;
    // The position that the stream reports at offset. Inside a sparse tensor, it pretends that the file ends after the
    // tensor's placeholder; at the end of the stream it is size().
    int64_t reported_offset(int64_t offset) const;
    // How many of the n bytes at offset one read of the stream returns. A sparse tensor is not read ahead, because a
    // device may still claim it; the zeros of a claimed tensor, which no reader needs, are not read together with other
    // bytes.
    int64_t contiguous_bytes(int64_t offset, int64_t n) const;
    // For tests: the same bytes without stdio.
    [[nodiscard]] int read_at(int64_t offset, void * dst, int64_t n) const;

private:
    struct impl;
    std::unique_ptr<impl> impl_;
    explicit dense_stream(std::unique_ptr<impl> p);
};

} // namespace macko
