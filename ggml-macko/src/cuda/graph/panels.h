// Products of many columns with sparse weights: the weight is made dense, a panel of rows at a time, and multiplied on
// tensor cores. And the copy of x in 16 bits, which products that follow each other share.
#pragma once

#include "cuda/graph/graph.h"
#include "cuda/graph/nodes.h"

#include <vector>

namespace macko::cuda {

// Is this product faster with the weight made dense than with the sparse kernels? Values in float32 always stay sparse,
// because only those kernels are exact for them. A weight in host memory is always made dense: no kernel reads it.
bool densifies(const op_context & ctx, const ggml_tensor * node);

// Products of large experts with several tokens: an ordinary product for each expert that has tokens. One of a sparse
// weight is sparse or dense by how many it has; dense weights are F16 or BF16. The host waits for their numbers, once
// for all products that choose the same experts, so such a graph cannot be captured.
bool   multiplies_by_expert(const op_context & ctx, const ggml_tensor * node);
size_t by_expert_scratch_nbytes(const ggml_tensor * node); // MUL_MAT_ID; what any such product needs

// State of one walk over a graph.
//
//   panels   All panels that the graph's products will multiply, in their order. Two buffers: while panel i is
//            multiplied on ctx.stream, panel i + 1 is made on the buffers' own stream, or, if the weight is in host
//            memory, made by threads of the host and copied on that stream. Which panels a product by expert needs is
//            known when it is queued: until then one without a weight stands for them, and nothing behind it is made.
//   x16      The 16-bit copy of x lies in the scratch memory of the first product that reads it. That product's result
//            is read behind the last product that shares x at the earliest, so the memory is free until then. Where all
//            nodes have one scratch memory, those products leave the copy alone, and any other node makes it forgotten.
class panel_pipeline {
public:
    const op_context & ctx;

    panel_pipeline(const op_context & c, const ggml_cgraph * graph);

    // each queues one node
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
    const ggml_tensor * x16_of_   = nullptr; // product that has x16
    tensor_type         x16_type_ = TYPE_F16;
    std::vector<int>    expert_begin_;         // in the lists of tokens by expert, and behind the last
    const ggml_tensor * expert_ids_ = nullptr; // of those

    static void append_panels(std::vector<panel> & panels, const ggml_tensor * w, int64_t first, int64_t rows);
    void        add_panels(const ggml_tensor * node);
    void        add_panels_of_experts(const ggml_tensor * node);
    void        set_panels_by_expert(const ggml_tensor * node, int max_sparse);
    cudaError_t read_expert_begin(const ggml_tensor * ids, int64_t n_experts, const char * lists);
    cudaError_t make_panel(const panel & p, char * memory);
    cudaError_t make_panels();
    cudaError_t enqueue_panels(const ggml_tensor * w, const op_tensor & x, const char * x16, const op_tensor & y,
                               char * scratch);
    char *      shared_x16(ggml_tensor * node, tensor_type type, bool * is_made);

    template <typename F> cudaError_t use_panel(F && multiply);
};

} // namespace macko::cuda
