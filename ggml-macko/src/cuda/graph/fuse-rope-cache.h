// The nodes that fuse-rope-cache.cpp draws, which fuse-rope-attention.cpp extends.
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

} // namespace macko::cuda
