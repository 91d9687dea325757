// Patterns of neighbouring nodes that one launch computes. One file per pattern; what they share is here.
#pragma once

#include "cuda/graph/nodes.h"
#include "cuda/ops/ops.h"

#include <array>
#include <memory>

namespace macko::cuda {

// The results of inner nodes are not stored. So a pattern may only contain inner nodes whose every use it contains.
class fused_pattern {
public:
    virtual ~fused_pattern() = default;

    // Does the pattern begin at node i, which computes? If so, the object holds its nodes until the next call.
    // Also called before the graph is allocated: the answer may depend on addresses only where all are known or none.
    virtual bool match(const op_context & ctx, const ggml_cgraph * graph, int i) = 0;

    // May one launch compute these nodes where the allocator placed them? It placed results as if nodes ran one by one,
    // so a result may lie where an operand of another member was. graph_optimize() asks to keep those operands; this
    // check is for graphs that did not go through it.
    virtual bool is_safe() const = 0;

    virtual cudaError_t enqueue(const op_context & ctx) const = 0;

    int last() const { return last_; } // index of the last node

protected:
    int last_ = -1;
};

std::unique_ptr<fused_pattern> make_fused_sparse_products();
std::unique_ptr<fused_pattern> make_fused_rms_norm();
std::unique_ptr<fused_pattern> make_fused_rope_attention();
std::unique_ptr<fused_pattern> make_fused_rope_cache();
std::unique_ptr<fused_pattern> make_fused_rope_hadamard_cache();

// All patterns, in the order in which they are tried. Made once per walk over a graph; matching allocates nothing.
class fused_patterns {
public:
    // the first pattern that begins at node i, or null; valid until the next call
    fused_pattern * match(const op_context & ctx, const ggml_cgraph * graph, int i) {
        for (const std::unique_ptr<fused_pattern> & pattern : patterns_) {
            if (pattern->match(ctx, graph, i)) {
                return pattern.get();
            }
        }
        return nullptr;
    }

private:
    std::array<std::unique_ptr<fused_pattern>, 5> patterns_ = {
        make_fused_sparse_products(), make_fused_rms_norm(),
        make_fused_rope_attention(), // a rope cache with attention behind it: before the one without
        make_fused_rope_cache(),      make_fused_rope_hadamard_cache(),
    };
};

// Does the memory of two tensors overlap?
inline bool overlaps(const ggml_tensor * a, const ggml_tensor * b) {
    const char * pa = static_cast<const char *>(a->data);
    const char * pb = static_cast<const char *>(b->data);
    return pa < pb + ggml_nbytes(b) && pb < pa + ggml_nbytes(a);
}

// Does it, other than element on element? A kernel that reads each element before it writes that one works in place.
inline bool overlaps_not_in_place(const ggml_tensor * a, const ggml_tensor * b) {
    const bool same = a->data == b->data && ggml_are_same_stride(a, b);
    return overlaps(a, b) && !same;
}

} // namespace macko::cuda
