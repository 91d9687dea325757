#include "cuda/device/captures.h"
#include "abi/op-numbers.h"

#include <algorithm>

namespace macko::cuda {

namespace {

constexpr size_t MAX_CAPTURES = 24; // graphs kept per context: one per batch shape and window of 256 positions
// larger batches keep the GPU busy while the CPU queues, and rarely repeat
constexpr int64_t MAX_CAPTURE_COLUMNS = 64;

// a 128-bit hash of everything that a launch depends on
struct hasher {
    uint64_t a = 0x9e3779b97f4a7c15ull, b = 0xc2b2ae3d27d4eb4full;
    void     add(uint64_t v) {
        a = (a ^ v) * 0xff51afd7ed558ccdull;
        a ^= a >> 32;
        b = (b + v) * 0xc4ceb9fe1a85ec53ull;
        b ^= b >> 29;
    }
    void add(const ggml_tensor * t) {
        add(static_cast<uint64_t>(t->type) | static_cast<uint64_t>(t->op) << 32);
        add(reinterpret_cast<uint64_t>(t->data));
        add(reinterpret_cast<uint64_t>(t->extra));
        for (int k = 0; k < GGML_MAX_DIMS; k++) {
            add(static_cast<uint64_t>(t->ne[k]));
            add(t->nb[k]);
        }
    }
};

std::array<uint64_t, 2> hash_of(const ggml_cgraph * graph) {
    hasher h;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        h.add(node);
        h.add(static_cast<uint64_t>(node->flags) | static_cast<uint64_t>(ggml_node_get_use_count(graph, i)) << 32);
        for (size_t k = 0; k < GGML_MAX_OP_PARAMS / sizeof(int32_t); k += 2) {
            h.add(static_cast<uint32_t>(node->op_params[k]) |
                  static_cast<uint64_t>(static_cast<uint32_t>(node->op_params[k + 1])) << 32);
        }
        for (const ggml_tensor * src : node->src) {
            if (src) {
                h.add(src);
            }
        }
    }
    return { h.a, h.b };
}

void free_exec(captured_graph & c) {
    if (c.exec) {
        cudaGraphExecDestroy(c.exec);
    }
}

} // namespace

bool is_worth_capturing(const ggml_cgraph * graph) {
    int64_t columns = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        if (op_of(graph->nodes[i]) == GGML_OP_MUL_MAT) {
            return graph->nodes[i]->src[1]->ne[1] <= MAX_CAPTURE_COLUMNS;
        }
        columns = std::max(columns, graph->nodes[i]->ne[1]);
    }
    return columns <= MAX_CAPTURE_COLUMNS; // no product: nodes between two weights that are sent for a prompt
}

captured_graph & captured_graphs::find_or_add(const ggml_cgraph * graph, bool * is_known) {
    *is_known = graph->uid != 0 && graph->uid == last_uid_; // ggml keeps the uid of a graph that did not change
    if (!*is_known) {
        const std::array<uint64_t, 2> key = hash_of(graph);
        const auto                    at =
            std::find_if(captures_.begin(), captures_.end(), [&](const captured_graph & c) { return c.key == key; });
        *is_known            = at != captures_.end();
        last_                = *is_known ? static_cast<size_t>(at - captures_.begin()) : add();
        captures_[last_].key = key;
        last_uid_            = graph->uid;
    }
    captures_[last_].last_used = ++clock_;
    return captures_[last_];
}

void captured_graphs::drop() {
    for (captured_graph & c : captures_) {
        free_exec(c);
    }
    captures_.clear();
    last_uid_ = 0;
}

size_t captured_graphs::add() {
    if (captures_.size() < MAX_CAPTURES) {
        captures_.emplace_back();
        return captures_.size() - 1;
    }
    const auto oldest =
        std::min_element(captures_.begin(), captures_.end(),
                         [](const captured_graph & a, const captured_graph & b) { return a.last_used < b.last_used; });
    free_exec(*oldest);
    *oldest = {};
    return static_cast<size_t>(oldest - captures_.begin());
}

} // namespace macko::cuda
