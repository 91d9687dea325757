// Products of many columns with sparse weights: the weight is made dense, one panel of rows at a time, and multiplied
// on tensor cores. Also manages the 16-bit copy of x that consecutive products share.
#pragma once

#include "cuda/graph/graph.h"
#include "cuda/graph/nodes.h"

#include <vector>

namespace macko::cuda {

// Whether this product is faster with a dense copy of the weight than with the sparse kernels. Values in float32 always
// stay sparse, because only the sparse kernels are exact for them. A weight in host memory is always made dense,
// because no kernel reads it.
bool densifies(const op_context & ctx, const ggml_tensor * node);

// Whether a product of large experts with several tokens runs as one ordinary product per expert that has tokens. Each
// expert of a sparse weight stays sparse or becomes dense depending on its number of tokens; dense weights must be F16
// or BF16. The host waits for these numbers once for all products with the same experts, so such a graph cannot be
// captured.
bool   multiplies_by_expert(const op_context & ctx, const ggml_tensor * node);
size_t by_expert_scratch_nbytes(const ggml_tensor * node); // MUL_MAT_ID: enough for any such product

// State of one walk over a graph.
//
//   panels   All panels that the graph's products will multiply, in order. There are two buffers: while panel i is
//            multiplied on ctx.stream, panel i + 1 is filled on the buffers' own stream, or, if the weight is in host
//            memory, filled by host threads and copied on that stream. The panels of a product by expert are known only
//            when it is queued. Until then a panel without a weight represents them, and no later panel is filled.
//   x16      The 16-bit copy of x is in the scratch memory of the first product that reads it. ggml keeps its result
//            at least until the last product that shares x, so the memory is free until then. If all nodes have
//            one scratch memory, these products do not overwrite the copy, and any other node discards it.
class panel_pipeline {
public:
    const op_context & ctx;

    panel_pipeline(const op_context & c, const ggml_cgraph * graph);

    // each function queues one node
    cudaError_t enqueue_densified(ggml_tensor * node);
    cudaError_t enqueue_densified_experts(ggml_tensor * node);
    cudaError_t enqueue_by_expert(ggml_tensor * node);
    cudaError_t enqueue_dense(ggml_tensor * node); // MUL_MAT with a dense weight

    // any other node may overwrite the copy of x
    void forget_x16() { x16_of_ = nullptr; }

private:
    struct panel {
        const ggml_tensor * w;
        int64_t             row_begin, row_end;
    };
    std::vector<panel>  panels_;
    size_t              n_made_ = 0, n_used_ = 0;
    const ggml_tensor * x16_of_   = nullptr; // the product with x16
    tensor_type         x16_type_ = TYPE_F16;
    std::vector<int>    expert_begin_;         // first token of each expert in the lists, and the end
    const ggml_tensor * expert_ids_ = nullptr; // the ids of these lists

    static void append_panels(std::vector<panel> & panels, const ggml_tensor * w, int64_t first, int64_t rows);
    void        add_panels(const ggml_tensor * node);
    void        add_panels_of_experts(const ggml_tensor * node);
    void        set_panels_by_expert(const ggml_tensor * node, int max_sparse);
    cudaError_t read_expert_begin(const ggml_tensor * ids, int64_t n_experts, const char * lists);
    cudaError_t make_panel(const panel & p, char * memory);
    cudaError_t make_panels();
    cudaError_t enqueue_panels(const ggml_tensor * w, const op_tensor & x, const char * x16, const op_tensor & y,
                               char * scratch);
    cudaError_t share_x16(ggml_tensor * node, tensor_type type, char ** x16);

    template <typename F> cudaError_t use_panel(F && multiply);
};

} // namespace macko::cuda
