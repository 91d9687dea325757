// CUDA graphs that were captured from ggml graphs. A repeated graph needs one launch instead of hundreds.
#pragma once

#include "ggml-impl.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include <vector>

namespace macko::cuda {

struct captured_graph {
    std::array<uint64_t, 2> key       = {};
    cudaGraphExec_t         exec      = nullptr; // null: not captured yet
    bool                    failed    = false;   // the graph cannot be captured
    uint64_t                last_used = 0;
};

// Whether capturing is worthwhile. Recording and instantiating 900 nodes takes 5 ms or more.
bool is_worth_capturing(const ggml_cgraph * graph);

// The captures of one context. The device is selected when these functions are called.
class captured_graphs {
public:
    // The entry of a graph, valid until the next call. *is_known: the graph was computed before. If all entries are in
    // use, the least recently used one is replaced.
    captured_graph & find_or_add(const ggml_cgraph * graph, bool * is_known);
    void             drop();

private:
    std::vector<captured_graph> captures_;
    uint64_t                    last_uid_ = 0;
    size_t                      last_     = 0; // index of the last graph's entry; valid with last_uid_
    uint64_t                    clock_    = 0;

    size_t add(); // index of an empty entry
};

} // namespace macko::cuda
