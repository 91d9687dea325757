// Decides which products a GPU computes with a weight in host memory. The transfer of a weight takes as long as the CPU
// needs for a few dozen columns, so offloading pays only for large batches (prompts).
//
//   dense weights    llama.cpp's scheduler calls the GPU's offload_op() and copies them
//   sparse weights   the GPU device reports support for their buffers, but only for such products; it expands the
//                    weights to dense rows during the transfer (cuda/graph/panels.h)
#pragma once

#include <cstdint>
#include <cstdlib>

struct ggml_tensor;

namespace macko {

constexpr int64_t NEVER_OFFLOAD = INT64_MAX;

// The minimum number of columns for offloading. min_batch: the value of GGML_OP_OFFLOAD_MIN_BATCH, which ggml's other
// GPU backends read, too; may be null.
inline int64_t offload_min_columns(const char * min_batch, bool off) {
    constexpr int64_t MIN_BATCH = 32;
    return off ? NEVER_OFFLOAD : min_batch ? atoi(min_batch) : MIN_BATCH;
}

// A product with a sparse weight of ne[0] * ne[1] * n_matrices. columns: total for all matrices.
struct weight_product {
    int64_t ne[2], n_matrices, columns;
};

// Whether the GPU is faster, including the transfer of the weight. For small matrices, launches and waits cost more.
inline bool pays_to_offload(const weight_product & p, int64_t min_columns) {
    constexpr int64_t MIN_SIDE = 256;
    return p.ne[0] >= MIN_SIDE && p.ne[1] >= MIN_SIDE && min_columns < NEVER_OFFLOAD &&
           p.columns >= min_columns * p.n_matrices;
}

// The number of columns that ggml's GPU backends compare with their limit for dense weights. 0: never offload the node.
int64_t offload_columns(const ggml_tensor * op);

// Whether op is a product with a sparse weight in host memory that a GPU of this process should compute. The GPU must
// also be one of the scheduler's backends and have a kernel for the product.
bool wants_offload(const ggml_tensor * op);

// Minimum columns for offloading, set when a context is made on a GPU with enough memory; NEVER_OFFLOAD before that.
// The last value counts, so a process may try several values.
void    set_offload_columns(int64_t min_columns);
int64_t offload_columns_in_use();

} // namespace macko
