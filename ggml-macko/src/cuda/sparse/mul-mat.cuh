// Sparse times dense on the GPU: y = W x for one or more columns of x, in float32 with float32 sums; W is in one of the
// layouts of gpu-layout/layouts.h. No ggml. Unless stated otherwise, a function only queues work on the given stream:
// it does not allocate or synchronize, so a CUDA graph can capture it. Results do not depend on timing: there are no
// float atomics.
#pragma once

#include "gpu-layout/choose.h"

#include <cuda_runtime.h>
#include <memory>

namespace macko::cuda {

constexpr int CUDA_SPARSE_MAX_BATCH = 4; // matrices in one launch

// Memory for rounded x, which tiles and FRAGMENTS need: CUDA_SPARSE_X16_COLUMNS columns of x in 16 bits, or twice as
// many in 8 bits with a scale for each 64 elements, for matrices of at most CUDA_SPARSE_X16_COLS columns (8 dense rows
// of a wider matrix do not fit shared memory; with FRAGMENTS, fewer columns of x are multiplied at a time).
constexpr int64_t CUDA_SPARSE_X16_COLS = 14336, CUDA_SPARSE_X16_COLUMNS = 32, CUDA_FRAGMENTS_COLUMNS = 64,
                  CUDA_SPARSE_X16_NBYTES =
                      (CUDA_SPARSE_X16_COLS * 2 + CUDA_SPARSE_X16_COLS / 8 + 8) * CUDA_SPARSE_X16_COLUMNS;

// y_i = epilogue(W_i * prologue(x)) for matrices that share x. One launch if have_same_kernel() for all W_i; otherwise
// one launch each, and silu_mul returns cudaErrorNotSupported. x, y and residual are device pointers; columns (one per
// token) are ld* floats apart.
// Sums are float32. If x has several columns and the weights have 16 bits, x is rounded to their type, as in ggml's own
// products; a single column is not. With quantized weights x is always rounded, after the norm: to multiples of max
// |x| / 32639 of its column, or, of a single column, of each 32 elements.
struct cuda_sparse_mul_mat_params {
    int32_t            n_matrices;
    const gpu_layout * w[CUDA_SPARSE_MAX_BATCH];
    float *            y[CUDA_SPARSE_MAX_BATCH]; // row_end - row_begin floats per column, all written
    int64_t            ldy[CUDA_SPARSE_MAX_BATCH];
    // added to y; has the layout of y and may be y itself; or null
    const float * residual[CUDA_SPARSE_MAX_BATCH];
    // row_end - row_begin floats, added to each column; or null
    const float * bias[CUDA_SPARSE_MAX_BATCH];
    int64_t       row_begin[CUDA_SPARSE_MAX_BATCH];
    int64_t       row_end[CUDA_SPARSE_MAX_BATCH];
    const float * x; // cols floats per column
    int64_t       ldx;
    int64_t       n; // columns

    // CUDA_SPARSE_X16_NBYTES bytes that the product may overwrite, aligned to 16 bytes; null: at most 8 columns at a
    // time, and cudaErrorNotSupported for FRAGMENTS if its kernel does not round x itself
    void * x16;

    // Prologue: multiplies each column of x by norm_weight[cols] and by 1 / sqrt(mean(x^2) + norm_eps); null: no
    // prologue. The kernel reads norm_weight, which must be a weight, before the previous kernel ends.
    const float * norm_weight;
    float         norm_eps;

    // Epilogue of two matrices with the same number of rows (gate, up): y[0] = silu(W_0 x) * (W_1 x); y[1] is not
    // written.
    bool silu_mul;

    // Experts (MUL_MAT_ID), or null: column j is multiplied by rows [id * expert_rows + row_begin, id * expert_rows +
    // row_end) with id = *(expert_ids + j * expert_ids_stride), read on the device. An id out of range gives zeros.
    const int32_t * expert_ids;
    int64_t         expert_ids_stride; // in elements
    int64_t         expert_rows;       // rows of one expert

    // Experts of several tokens (if cuda_sparse_groups_experts()), or slots is 0: columns with the same expert are
    // multiplied together. The columns are those of tokens with `slots` experts each: column j belongs to token t = j /
    // slots, its id is at expert_ids + j % slots * expert_ids_stride + t * token_stride, and its x is column t if the
    // slots of a token share x, else j.
    // groups: cuda_sparse_groups_nbytes() bytes that the product may overwrite, aligned to 16 bytes
    int64_t slots;
    int64_t token_stride;
    bool    shares_x;
    void *  groups;

    // Programmatic dependent launch (ignored before cc 9.0): the kernel may start before the previous kernel on the
    // stream has ended, and reads weights early. It accesses x, residual, bias and y only after that kernel is
    // complete.
    bool programmatic;

    cuda_sparse_mul_mat_params matrix(int i) const;                 // the product of w[i] alone
    cuda_sparse_mul_mat_params columns(int64_t j, int64_t n) const; // n columns from column j on
};

// The largest n for which cuda_sparse_mul_mat(), with x16 or with expert_ids, is faster than cuda_sparse_densify() and
// a dense product. It depends on the device and the matrix. Larger n are correct, but slow.
int64_t cuda_sparse_mul_mat_max_n(const gpu_layout & w, bool experts);

cudaError_t cuda_sparse_mul_mat(const cuda_sparse_mul_mat_params & params, cudaStream_t stream);

// Weights from which a product with a single expert fills the GPU.
constexpr int64_t CUDA_SPARSE_LARGE_EXPERT = int64_t(1) << 22;

// Whether products with n columns of several tokens are supported, and faster than other ways.
bool    cuda_sparse_groups_experts(const gpu_layout & w, int64_t n, int64_t n_experts);
int64_t cuda_sparse_groups_nbytes(int64_t cols, int64_t n, int64_t n_experts);

// Writes rows row_begin ... row_end - 1 as dense rows of the matrix's type, `ld` elements apart. Values that are not
// quantized keep their bits.
cudaError_t cuda_sparse_densify(const gpu_layout & w, int64_t row_begin, int64_t row_end, void * dst, int64_t ld,
                                cudaStream_t stream);

struct cuda_free {
    void operator()(void * memory) const { cudaFree(memory); }
};
using cuda_memory = std::unique_ptr<void, cuda_free>;

// Uploads matrices to one device. Owns pinned and device staging memory (up to twice the size of the largest matrix),
// which is reused for the next matrix and freed with the object. One thread calls begin and finish; between them,
// several threads may call rows at the same time. These functions synchronize with the device and return a
// ggml_macko_status.
class cuda_sparse_uploader {
public:
    [[nodiscard]] static int create(int device, std::unique_ptr<cuda_sparse_uploader> * out);
    ~cuda_sparse_uploader();

    // Begins a matrix, which is then passed as MACKO rows or as a whole. dst: plan.nbytes bytes of device memory,
    // aligned to GPU_ALIGNMENT.
    [[nodiscard]] int begin(const gpu_plan & plan, void * dst);
    // Uploads a range of rows. Ranges may come in any order; each row comes once.
    [[nodiscard]] int rows(const macko_view & view);
    // Whether the matrix is passed as a whole if it has this format.
    bool takes(const codec & format) const;
    // Uploads the matrix as a whole. view has passed all checks and is not used after the call.
    [[nodiscard]] int whole(const codec_view & view, int n_threads);
    // Makes the layout that settle() chooses, *verdict, after all rows or the whole. Returns BAD_ARGUMENT if no
    // candidate of a forced plan fits. A matrix of unusual structure that needs more than the reserved bytes gets
    // separate memory, *outgrown, which must live as long as the matrix.
    [[nodiscard]] int finish(gpu_layout * out, layout_verdict * verdict, cuda_memory * outgrown);

private:
    struct impl;
    std::unique_ptr<impl> impl_;
    explicit cuda_sparse_uploader(std::unique_ptr<impl> p);
};

} // namespace macko::cuda
