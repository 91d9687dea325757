// The table of functions of a backend, for each device that this plugin registers.
#pragma once

#include "ggml-backend-impl.h"

namespace macko {

// The functions that ggml requires. The others are null: ggml then copies synchronously, and makes no plans of graphs.
constexpr ggml_backend_i backend_functions(decltype(ggml_backend_i::get_name)      get_name,
                                           decltype(ggml_backend_i::free)          free,
                                           decltype(ggml_backend_i::graph_compute) graph_compute) {
    ggml_backend_i table = {};
    table.get_name       = get_name;
    table.free           = free;
    table.graph_compute  = graph_compute;
    return table;
}

} // namespace macko
