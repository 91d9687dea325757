// The nodes in the diagram of fuse-rope-cache.cpp, which fuse-rope-attention.cpp extends, and functions that these
// files share with fuse-rope-hadamard-cache.cpp.
#pragma once

#include "cuda/graph/fuse.h"

namespace macko::cuda {

struct rope_cache_nodes {
    ggml_tensor * rope_q = nullptr; // null: the pattern rotates no query
    ggml_tensor * rope_k = nullptr;
    ggml_tensor * set_k  = nullptr;
    ggml_tensor * set_v  = nullptr;
    int           last   = -1; // index of set_v

    bool match(const ggml_cgraph * graph, int i);

    rope_cache_params params() const;
};

// Whether t is a chain of views of node i, and the next view is the only use of the node and of each view.
bool is_only_use(const ggml_cgraph * graph, int i, const ggml_tensor * t);

// Whether two nodes rotate by the same angles.
bool same_rope(const ggml_tensor * a, const ggml_tensor * b);

// Whether `rows` has all elements of x, [head_dim, heads, tokens] in any number of dimensions, with one row per token.
bool are_rows_of(const ggml_tensor * rows, const ggml_tensor * x, int64_t n_tokens);

// Whether ids has row numbers in the form that the kernels read.
bool are_row_numbers(const ggml_tensor * ids);

} // namespace macko::cuda
