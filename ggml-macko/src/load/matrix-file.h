// A sparse matrix as a sparse GGUF of its own, without the metadata of a model. In this form it travels to another
// process, which checks it like any file.
#pragma once

#include "load/model-file.h"

namespace macko {

// Makes a GGUF with the matrix `matrix` of model `of`, which must outlive it. The result passes check_matrix_file().
// LIMIT: the matrix alone exceeds the limits of SECURITY.md. BAD_ARGUMENT: the matrix is encoded on load.
[[nodiscard]] int make_matrix_file(const model_file & of, const sparse_tensor_info & matrix,
                                   std::unique_ptr<model_file> * out);

// Reads the header of a GGUF from its bytes, and checks that it contains one sparse matrix, file->sparse[0], and
// nothing else. read_payload() checks the payload.
[[nodiscard]] int check_matrix_file(model_file * file);

// Bytes of such a GGUF that arrive in chunks. Memory grows with the bytes that have arrived.
struct received_file : model_file {
    void append(const void * data, size_t n); // may throw std::bad_alloc

    int64_t           size() const override { return size_; }
    [[nodiscard]] int read(int64_t offset, void * dst, int64_t n) const override;

private:
    struct chunk {
        int64_t              begin;
        std::vector<uint8_t> bytes;
    };
    std::vector<chunk> chunks_;
    int64_t            size_ = 0;
};

} // namespace macko
