// The five required functions are declared here, so that building does not need cuBLAS either.
#include "cuda/lib/cublas.h"
#include "platform/platform.h"

#include <library_types.h>

namespace macko::cuda {

namespace {

// values of cublasStatus_t
constexpr int STATUS_SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, EXECUTION_FAILED = 13, INTERNAL_ERROR = 14;
// values of cublasOperation_t, cublasComputeType_t and cublasGemmAlgo_t (the same in versions 11 to 13)
constexpr int OP_N = 0, OP_T = 1, COMPUTE_32F = 68, GEMM_DEFAULT = -1;

using handle_t         = void *;
using create_fn        = int (*)(handle_t *);
using destroy_fn       = int (*)(handle_t);
using set_stream_fn    = int (*)(handle_t, cudaStream_t);
using set_workspace_fn = int (*)(handle_t, void *, size_t);
using gemm_fn = int (*)(handle_t, int, int, int, int, int, const void *, const void *, cudaDataType, int, const void *,
                        cudaDataType, int, const void *, void *, cudaDataType, int, int, int);

struct functions {
    void * library = open();

    create_fn        create        = reinterpret_cast<create_fn>(find("cublasCreate_v2"));
    destroy_fn       destroy       = reinterpret_cast<destroy_fn>(find("cublasDestroy_v2"));
    set_stream_fn    set_stream    = reinterpret_cast<set_stream_fn>(find("cublasSetStream_v2"));
    set_workspace_fn set_workspace = reinterpret_cast<set_workspace_fn>(find("cublasSetWorkspace_v2"));
    gemm_fn          gemm          = reinterpret_cast<gemm_fn>(find("cublasGemmEx"));

    bool complete() const { return create && destroy && set_stream && set_workspace && gemm; }

private:
    static void * open() { // the library stays loaded: unloading CUDA libraries at exit is not safe
        void * newest = platform::open_library("cublas", 13);
        return newest ? newest : platform::open_library("cublas", 12);
    }
    void * find(const char * name) const { return library ? platform::function_of(library, name) : nullptr; }
};

// cuBLAS loads kernels at their first use. Without memory for them, it returns any of four codes although the GPU has
// not failed. In this case the runtime has no error, or an error of memory.
cudaError_t error_of(int status) {
    if (status == STATUS_SUCCESS) {
        return cudaSuccess;
    }
    const cudaError_t error = cudaGetLastError();
    const bool        may_be_memory =
        status == NOT_INITIALIZED || status == ALLOC_FAILED || status == EXECUTION_FAILED || status == INTERNAL_ERROR;
    return error != cudaSuccess ? error : may_be_memory ? cudaErrorMemoryAllocation : cudaErrorUnknown;
}

const functions & loaded_functions() {
    static const functions f;
    return f;
}

struct cublas_handle : cublas_library {
    handle_t handle = nullptr;

    ~cublas_handle() override {
        if (handle) {
            loaded_functions().destroy(handle);
        }
    }

    cudaError_t mul_mat(cudaStream_t stream, void * workspace, tensor_type type, int64_t m, int64_t n, int64_t k,
                        const void * w, int64_t ldw, const void * x, int64_t ldx, float * y, int64_t ldy) override {
        const functions &  f      = loaded_functions();
        const cudaDataType values = type == TYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
        const float        one = 1, zero = 0;
        // set_stream drops the workspace
        for (const int status :
             { f.set_stream(handle, stream), f.set_workspace(handle, workspace, CUBLAS_WORKSPACE_NBYTES) }) {
            if (status != STATUS_SUCCESS) {
                return error_of(status);
            }
        }
        // column-major: y^T (m x n) = w (k x m, transposed) * x (k x n)
        const int status = f.gemm(handle, OP_T, OP_N, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                                  &one, w, values, static_cast<int>(ldw), x, values, static_cast<int>(ldx), &zero, y,
                                  CUDA_R_32F, static_cast<int>(ldy), COMPUTE_32F, GEMM_DEFAULT);
        return error_of(status);
    }
};

} // namespace

std::unique_ptr<cublas_library> cublas_open() {
    const functions & f = loaded_functions();
    if (!f.complete()) {
        return nullptr;
    }
    auto result = std::make_unique<cublas_handle>();
    if (f.create(&result->handle) != STATUS_SUCCESS) {
        result->handle = nullptr;
        return nullptr;
    }
    return result;
}

} // namespace macko::cuda
