// The nodes that the CPU device computes of one graph, as steps for one parallel region: all threads take a step
// together, with a barrier after it, instead of a parallel region for each node.
#pragma once

#include "cpu/kernels.h"

#include "ggml.h"

#include <cstdlib>
#include <memory>
#include <omp.h>
#include <vector>

namespace macko::cpu {

struct weight;

// Whether graph_plan can compute this ADD, MUL, RMS_NORM or GLU (SWIGLU): F32, the elements of a row contiguous, and a
// second operand, if any, whose rows are as long as those of the first.
bool is_row_op(const ggml_tensor * op);

class graph_plan {
public:
    int n_threads = omp_get_max_threads();

    void clear() { n_steps = 0; }
    // Adds a product with a sparse weight, or a row operation. The tensors must exist until run() returns. Logs an
    // error and returns false if the weight has not been loaded or if an expert's number is out of range.
    bool add(const ggml_tensor * node);
    void run();

private:
    struct step {
        const ggml_tensor *        row_op; // nullptr for a product
        const weight *             m;
        int64_t                    matrix; // number among the ne[2] * ne[3] matrices of the weight; of the expert
        std::vector<const float *> x;      // rows to multiply with
        std::vector<float *>       y;      // rows of the result, one for each x
    };
    std::vector<step>                       steps; // the first n_steps are in use; the others keep their vectors
    size_t                                  n_steps        = 0;
    std::unique_ptr<void, void (*)(void *)> scratch        = { nullptr, free };
    int64_t                                 scratch_nbytes = 0;

    step & next_step(const ggml_tensor * row_op, const weight * m, int64_t matrix);
    void   add_mul_mat(const weight * m, const ggml_tensor * dst);
    bool   add_mul_mat_id(const weight * m, const ggml_tensor * dst);
    void   reserve_scratch();
};

} // namespace macko::cpu
