// The ops of ggml that the GPU computes, each in one row of one table.
#pragma once

#include "cuda/graph/panels.h"

namespace macko::cuda {

struct op_row {
    ggml_op op;
    bool    sparse; // src[0] is a sparse weight
    int     n_src;  // operands that are not optional

    // types, shapes and parameters only; tensors may have no data
    bool (*supported)(const ggml_tensor * op);
    // memory behind the data of the result that the kernels use; null: none
    size_t (*scratch_nbytes)(const ggml_tensor * op);
    cudaError_t (*enqueue)(panel_pipeline & panels, ggml_tensor * node);
};

// op: of op_of(), so GGML_OP_COUNT, too. null: the op has no kernel
const op_row * find_op(ggml_op op, bool sparse);

} // namespace macko::cuda
