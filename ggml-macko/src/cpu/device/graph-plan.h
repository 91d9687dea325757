// Turns the CPU device's nodes of one graph into steps of one parallel region with barriers, instead of one parallel
// region per node.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/layout/aligned-memory.h"

#include "ggml.h"

#include <memory>
#include <omp.h>
#include <vector>

namespace macko::cpu {

struct weight;

// Whether graph_plan can compute this ADD, MUL, RMS_NORM, GLU (SWIGLU, REGLU), RELU, SQR, ROPE or GET_ROWS. The tensors
// must be F32, the elements of a row contiguous, and both operands of ADD, MUL or GLU must have rows of equal length.
// False for any other op.
bool is_row_op(const ggml_tensor * op);
// Whether op is MUL_MAT or MUL_MAT_ID.
bool is_product(const ggml_tensor * op);
// Whether op is a GET_ROWS with one list of row numbers, of a matrix of any type. The results are F32.
bool is_lookup(const ggml_tensor * op);
// Whether op is a view or no operation.
bool is_no_op(const ggml_tensor * op);

// Whether the CPU device computes an op: a product that is_ours(), or a row operation that follows one. The device
// computes the operations between two sparse products of a layer, because each change of the backend costs about 3 us.
// It leaves all other operations to their backend; they may belong to a dense model in the same process.
template <typename F> bool is_near_product(const ggml_tensor * op, const F & is_ours, int depth = 5) {
    // 5: norms with weights, bias, residual: the longest chain of any architecture
    if (is_product(op)) {
        return is_ours(op);
    }
    if (is_no_op(op)) {
        return depth > 0 && op->src[0] && is_near_product(op->src[0], is_ours, depth - 1);
    }
    return depth > 0 && is_row_op(op) &&
           (is_near_product(op->src[0], is_ours, depth - 1) ||
            (op->src[1] && is_near_product(op->src[1], is_ours, depth - 1)));
}

class graph_plan {
public:
    int n_threads = omp_get_max_threads();
    // enables skip_closed_rows(), and lets products skip the columns of zeros
    bool skips = true;

    void clear() {
        n_steps          = 0;
        last_products[0] = last_products[1] = {};
    }
    // The tensors must exist until run() returns. Logs an error and returns false if GET_ROWS asks for a row that does
    // not exist.
    bool add_row_op(const ggml_tensor * node);
    // Adds a lookup in the weight m. Logs an error and returns false if m is null because it was not loaded, or if a
    // row does not exist.
    bool add_lookup(const ggml_tensor * node, const weight * m);
    // Adds a product with the weight m. Logs an error and returns false if m is null because it was not loaded, or if
    // an expert's number is out of range; part of the product may have been added then.
    bool add_product(const ggml_tensor * node, const weight * m);
    // Call before adding node i of a graph. If the node is relu(gate) * up, where gate and up are the two most recent
    // products and no other node uses up, then a row of up matters only where the gate is positive. The plan then
    // computes gate first, and for products with one x skips the other rows of up if few rows matter. The result of the
    // node is the same, bit for bit.
    void skip_closed_rows(const ggml_cgraph * graph, int i);
    bool is_empty() const { return n_steps == 0; }
    void run();

private:
    struct step {
        const ggml_tensor *        row_op;      // nullptr for a product
        const weight *             m;           // nullptr for a row operation on floats
        int64_t                    matrix;      // among the ne[2] * ne[3] matrices of the weight, or the expert
        std::vector<const float *> x;           // rows to multiply with
        std::vector<float *>       y;           // rows of the result, one per x
        const float *              gate;        // the gate of mul_mat_params
        bool                       skips_small; // there is one x, and its elements below m's threshold are skipped

        bool is_for_one_thread() const; // false for a product
    };
    struct product_steps {
        const ggml_tensor * node;
        size_t              begin, end;
    };
    std::vector<step>  steps; // the first n_steps are in use; the others keep vectors
    size_t             n_steps          = 0;
    product_steps      last_products[2] = {}; // the two most recent products
    aligned_memory     scratch;
    int64_t            scratch_nbytes = 0;
    std::vector<float> thresholded; // x of a step that skips small elements, which are zero
    float *            thresholded_x = nullptr;

    step & next_step(const ggml_tensor * row_op, const weight * m, int64_t matrix);
    void   add_mul_mat(const weight * m, const ggml_tensor * dst);
    bool   add_mul_mat_id(const weight * m, const ggml_tensor * dst);
    void   reserve_scratch();

    mul_mat_params params_of(const step & s) const;
    void           run_thread(int ith, int nth) const;
};

} // namespace macko::cpu
