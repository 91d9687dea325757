// Which products a GPU computes although the weight lies in host memory. To send a weight takes as long as some tens of
// columns take on the CPU, so this is for large batches: prompts.
//
//   dense weights    llama.cpp's scheduler copies them, and asks the GPU's offload_op() first
//   sparse weights   the GPU device says that it can read their buffers, for such products only; it makes them dense on
//                    the way (cuda/graph/panels.h)
#pragma once

#include <cstdint>
#include <cstdlib>

struct ggml_tensor;

namespace macko {

constexpr int64_t NEVER_OFFLOAD = INT64_MAX;

// The least columns from which products are offloaded. min_batch: GGML_OP_OFFLOAD_MIN_BATCH, which ggml's other GPU
// backends read, too. off: GGML_MACKO_NO_OFFLOAD. Both may be null.
inline int64_t offload_min_columns(const char * min_batch, const char * off) {
    constexpr int64_t MIN_BATCH = 32;
    return off ? NEVER_OFFLOAD : min_batch ? atoi(min_batch) : MIN_BATCH;
}

// A product with a sparse weight of ne[0] * ne[1] * n_matrices. columns: of all matrices together.
struct weight_product {
    int64_t ne[2], n_matrices, columns;
};

// Does the GPU compute it faster, sending the weight included? Small matrices cost more in launches and waits.
inline bool pays_to_offload(const weight_product & p, int64_t min_columns) {
    constexpr int64_t MIN_SIDE = 256;
    return p.ne[0] >= MIN_SIDE && p.ne[1] >= MIN_SIDE && min_columns < NEVER_OFFLOAD &&
           p.columns >= min_columns * p.n_matrices;
}

// The columns of a node by which ggml's GPU backends decide on dense weights. 0: the node is not to be offloaded.
int64_t offload_columns(const ggml_tensor * op);

// Whether op is a product with a sparse weight in host memory that a GPU of this process computes, if it is one of the
// scheduler's backends and has a kernel for it.
bool wants_offload(const ggml_tensor * op);

// What a GPU that has the memory for it says when a context is made: NEVER_OFFLOAD until then. The last one counts, so
// that a process may try several values.
void    set_offload_columns(int64_t min_columns);
int64_t offload_columns_in_use();

} // namespace macko
