// The nodes of one graph as steps that all threads of one parallel region take together.
#pragma once

#include "cpu/kernels.h"

#include "ggml.h"

#include <cstdlib>
#include <memory>
#include <omp.h>
#include <vector>

namespace macko::cpu {

struct weight;

// whether graph_plan can do this ADD, MUL, RMS_NORM or GLU: F32, rows without gaps, second operand as wide as the first
bool is_row_op(const ggml_tensor * op);

class graph_plan {
public:
    int n_threads = omp_get_max_threads();

    void clear() { n_steps = 0; }
    // a product with a sparse weight, or a row operation; the tensors must stay until run() is done. False (and logged)
    // if the weight was not
    // loaded or an expert does not exist.
    bool add(const ggml_tensor * node);
    void run();

private:
    struct step {
        const ggml_tensor *        row_op; // nullptr: a product
        const weight *             m;
        int64_t                    matrix; // which of ne2 * ne3 matrices, or which expert
        std::vector<const float *> x;
        std::vector<float *>       y;
    };
    std::vector<step>                       steps; // of the graph being computed; kept for its memory
    size_t                                  n_steps        = 0;
    std::unique_ptr<void, void (*)(void *)> scratch        = { nullptr, free };
    int64_t                                 scratch_nbytes = 0;

    step & next_step(const ggml_tensor * row_op, const weight * m, int64_t matrix);
    void   add_mul_mat(const weight * m, const ggml_tensor * dst);
    bool   add_mul_mat_id(const weight * m, const ggml_tensor * dst);
    void   reserve_scratch();
};

} // namespace macko::cpu
