// The ggml ops that the GPU computes, one row per op.
#pragma once

#include "cuda/graph/panels.h"

namespace macko::cuda {

struct op_row {
    ggml_op op;
    bool    sparse; // src[0] is a sparse weight
    int     n_src;  // number of required operands

    // checks types, shapes and parameters only; tensors may have no data
    bool (*supported)(const ggml_tensor * op);
    // bytes after the result's data that the kernels use; null: none
    size_t (*scratch_nbytes)(const ggml_tensor * op);
    cudaError_t (*enqueue)(panel_pipeline & panels, ggml_tensor * node);
};

// op: a result of op_of(), which includes GGML_OP_COUNT. Returns null for an op without a kernel.
const op_row * find_op(ggml_op op, bool sparse);

} // namespace macko::cuda
