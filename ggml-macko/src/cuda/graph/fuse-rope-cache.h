// The nodes that fuse-rope-cache.cpp draws, which fuse-rope-attention.cpp extends, and what these files and
// fuse-rope-hadamard-cache.cpp share.
#pragma once

#include "cuda/graph/fuse.h"

namespace macko::cuda {

struct rope_cache_nodes {
    ggml_tensor * rope_q = nullptr; // null: no query is rotated here
    ggml_tensor * rope_k = nullptr;
    ggml_tensor * set_k  = nullptr;
    ggml_tensor * set_v  = nullptr;
    int           last   = -1; // index of set_v

    bool match(const ggml_cgraph * graph, int i);

    rope_cache_params params() const;
};

// the node that computed what t is a chain of views of
const ggml_tensor * source_of_views(const ggml_tensor * t);

// Is t a chain of views of node i, and each of them, and the node, used by the next one alone?
bool is_only_use(const ggml_cgraph * graph, int i, const ggml_tensor * t);

// Do two nodes rotate by the same angles?
bool same_rope(const ggml_tensor * a, const ggml_tensor * b);

// Are `rows` all elements of x, [head_dim, heads, tokens] in any number of dimensions, as a row per token?
bool are_rows_of(const ggml_tensor * rows, const ggml_tensor * x, int64_t n_tokens);

// Are these numbers of rows as the kernels read them?
bool are_row_numbers(const ggml_tensor * ids);

} // namespace macko::cuda
