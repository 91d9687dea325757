// A ggml context without data, for tensors that only the checks of this folder use.
#pragma once

#include "ggml.h"

#include <memory>

namespace macko {

struct context_deleter {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};
using context = std::unique_ptr<ggml_context, context_deleter>;

// Null if out of memory. nbytes: for objects other than tensors.
inline context make_context(size_t n_tensors, size_t nbytes = 0) {
    return context(ggml_init({ n_tensors * ggml_tensor_overhead() + nbytes, nullptr, true }));
}

} // namespace macko
