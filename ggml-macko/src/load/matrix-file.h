// A sparse matrix as a sparse GGUF of its own, without the metadata of a model: the form in which it travels to another
// process, where it is checked as a file is.
#pragma once

#include "load/model-file.h"

namespace macko {

// The GGUF with the matrix `matrix` of `of`, which must outlive it; it passes check_matrix_file(). LIMIT: the matrix is
// within the limits of FORMAT.md section 4 only as a part of the model. BAD_ARGUMENT: it is encoded on load.
[[nodiscard]] int make_matrix_file(const model_file & of, const sparse_tensor_info & matrix,
                                   std::unique_ptr<model_file> * out);

// Reads the header of a GGUF from its bytes, and checks that it is of one sparse matrix, file->sparse[0], and of
// nothing else. The payload is left to read_payload().
[[nodiscard]] int check_matrix_file(model_file * file);

// Bytes of such a GGUF that arrive in pieces. Memory grows with what has arrived.
struct received_file : model_file {
    void append(const void * data, size_t n); // may throw std::bad_alloc

    int64_t           size() const override { return size_; }
    [[nodiscard]] int read(int64_t offset, void * dst, int64_t n) const override;

private:
    struct piece {
        int64_t              begin;
        std::vector<uint8_t> bytes;
    };
    std::vector<piece> pieces_;
    int64_t            size_ = 0;
};

} // namespace macko
