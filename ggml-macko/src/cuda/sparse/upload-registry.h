// How matrices of the formats that a GPU keeps in a layout of their own come there: one row each, in
// upload-registry.cpp. It and reserved.cpp, which says which matrices these are and how many bytes they get, are the
// only files outside the formats' folders that name them. Matrices of all other formats arrive as MACKO rows. No ggml.
#pragma once

#include "codec/codec.h"
#include "cuda/sparse/mul-mat.cuh"

namespace macko::cuda {

// Where a matrix that arrives as a whole goes, and what is made of it.
struct whole_upload {
    cuda_sparse_uploader &         uploader;
    int64_t                        shared_nbytes = 0;     // shared memory that a block may use on the device
    bool                           stacked       = false; // several matrices (experts) follow each other in the rows
    int                            n_threads     = 1;
    void *                         dst           = nullptr; // device memory, aligned to CUDA_SPARSE_ALIGNMENT
    int64_t                        room          = 0;       // its bytes if they are those of MACKO rows
    cuda_sparse_matrix *           out           = nullptr;
    std::unique_ptr<matrix_part> * part          = nullptr; // owns out->part
    cuda_memory *                  outgrown      = nullptr; // memory of a matrix that did not fit dst
};

struct upload_row {
    const char * format; // codec::name()
    // view has passed all checks of its codec; returns a ggml_macko_status
    int (*upload)(const codec_view & view, const whole_upload & to);
};

// the row of a format, or nullptr
const upload_row * find_upload(const char * format);

} // namespace macko::cuda
