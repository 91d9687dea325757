// A sparse weight in the memory of a GPU. The buffers (cuda/device) make it, the graph (cuda/graph) multiplies by it.
#pragma once

#include "cuda/sparse/mul-mat.cuh"

#include "ggml.h"

#include <memory>

namespace macko::cuda {

// tensor->extra of a loaded weight. No other tensor in a buffer of the GPU has an extra.
struct stored_matrix {
    gpu_layout     matrix;
    int64_t        rows_per_matrix; // ne1; experts and other stacked matrices follow each other
    gpu_plan       plan;            // what the header decided
    layout_verdict verdict;         // what the values decided: the layout of matrix
    cuda_memory    outgrown;        // memory of a matrix that did not fit the reserved bytes, else null
};

// null: the tensor is dense
inline const stored_matrix * stored(const ggml_tensor * tensor) {
    return static_cast<const stored_matrix *>(tensor->extra);
}

} // namespace macko::cuda
