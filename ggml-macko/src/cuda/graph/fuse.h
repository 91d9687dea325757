// Patterns of neighboring nodes that one launch computes. Each pattern has its own file; this file has the shared
// parts.
#pragma once

#include "cuda/graph/nodes.h"
#include "cuda/ops/ops.h"

#include <array>
#include <memory>

namespace macko::cuda {

// The results of inner nodes are not stored, so a pattern must contain every use of its inner nodes.
class fused_pattern {
public:
    virtual ~fused_pattern() = default;

    // Whether the pattern begins at node i, which computes. If so, the object keeps its nodes until the next call. Also
    // called before the graph is allocated: the result may depend on addresses only if all or none are known.
    virtual bool match(const op_context & ctx, const ggml_cgraph * graph, int i) = 0;

    // Whether one launch may compute these nodes at their addresses. The allocator assumes that nodes run one by one,
    // so a result may overwrite an operand of another node of the pattern. graph_optimize() asks ggml to keep such
    // operands; this check protects graphs that did not pass through it.
    virtual bool is_safe() const = 0;

    // Whether graph_optimize() must ask for an operand, because it could be overwritten otherwise.
    virtual bool must_be_kept(const ggml_tensor * /*operand*/) const { return true; }

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
std::unique_ptr<fused_pattern> make_fused_router();
std::unique_ptr<fused_pattern> make_fused_expert_sum();

// All patterns, in the order in which they are tried. Made once per walk over a graph. Matching allocates nothing.
class fused_patterns {
public:
    // The first pattern that begins at node i, or null; valid until the next call.
    fused_pattern * match(const op_context & ctx, const ggml_cgraph * graph, int i) {
        for (const std::unique_ptr<fused_pattern> & pattern : patterns_) {
            if (pattern->match(ctx, graph, i)) {
                return pattern.get();
            }
        }
        return nullptr;
    }

private:
    std::array<std::unique_ptr<fused_pattern>, 7> patterns_ = {
        make_fused_sparse_products(), make_fused_rms_norm(),
        make_fused_rope_attention(), // rope cache plus attention: tried before the rope cache alone
        make_fused_rope_cache(),      make_fused_rope_hadamard_cache(),
        make_fused_router(),          make_fused_expert_sum(),
    };
};

// The node at the source of a chain of views that ends in t.
const ggml_tensor * source_of_views(const ggml_tensor * t);

// Whether t has all elements of x in the same order, in any number of dimensions.
bool is_reshaped(const ggml_tensor * t, const ggml_tensor * x);

// Whether nodes `first` to `last` contain all uses of all nodes before the last, except of `stored`.
bool uses_stay_inside(const ggml_cgraph * graph, int first, int last, const ggml_tensor * stored = nullptr);

// Whether the memory of two tensors overlaps.
inline bool overlaps(const ggml_tensor * a, const ggml_tensor * b) {
    const char * pa = static_cast<const char *>(a->data);
    const char * pb = static_cast<const char *>(b->data);
    return pa < pb + ggml_nbytes(b) && pb < pa + ggml_nbytes(a);
}

// Whether it overlaps in any way other than element on element. A kernel that reads each element before writing it can
// work in place.
inline bool overlaps_not_in_place(const ggml_tensor * a, const ggml_tensor * b) {
    const bool same = a->data == b->data && ggml_are_same_stride(a, b);
    return overlaps(a, b) && !same;
}

} // namespace macko::cuda
