// Makes one call of the CUDA runtime fail, to test the consequences. The target ggml-macko-failing is the plugin,
// linked so that its calls go through this file (--wrap). inject_cuda_failures.py counts the calls and makes each one
// fail in turn.
#include <cuda_runtime_api.h>
#include <stdatomic.h>

static atomic_long n_calls;
static atomic_long failing_call; // counted from 1; 0: none
static atomic_int  failing_error;

// Counts the next calls from 1 on; call `call` fails with `error`. Returns the number of earlier calls.
__attribute__((visibility("default"))) long ggml_macko_fail_cuda(long call, int error) {
    atomic_store(&failing_error, error);
    atomic_store(&failing_call, call);
    return atomic_exchange(&n_calls, 0);
}

// The last error of the thread, as in the runtime: `<<< >>>` returns none.
static _Thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t next_error(void) {
    if (atomic_fetch_add(&n_calls, 1) + 1 != atomic_load(&failing_call)) {
        return cudaSuccess;
    }
    return last_error = (cudaError_t)atomic_load(&failing_error);
}

cudaError_t __real_cudaGetLastError(void);
cudaError_t __wrap_cudaGetLastError(void) {
    const cudaError_t error = last_error, real = __real_cudaGetLastError();
    last_error = cudaSuccess;
    return error ? error : real;
}

#define WRAP(name, parameters, arguments)               \
    cudaError_t __real_##name parameters;               \
    cudaError_t __wrap_##name parameters {              \
        const cudaError_t error = next_error();         \
        return error ? error : __real_##name arguments; \
    }

WRAP(cudaMalloc, (void ** p, size_t n), (p, n))
WRAP(cudaMallocHost, (void ** p, size_t n), (p, n))
WRAP(cudaMemcpy, (void * to, const void * from, size_t n, enum cudaMemcpyKind kind), (to, from, n, kind))
WRAP(cudaMemcpyAsync, (void * to, const void * from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s),
     (to, from, n, kind, s))
WRAP(cudaMemcpy2DAsync,
     (void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height,
      enum cudaMemcpyKind kind, cudaStream_t s),
     (to, to_pitch, from, from_pitch, width, height, kind, s))
WRAP(cudaMemcpyPeerAsync, (void * to, int d, const void * from, int e, size_t n, cudaStream_t s),
     (to, d, from, e, n, s))
WRAP(cudaMemsetAsync, (void * to, int value, size_t n, cudaStream_t s), (to, value, n, s))
WRAP(cudaStreamCreateWithFlags, (cudaStream_t * s, unsigned flags), (s, flags))
WRAP(cudaStreamCreateWithPriority, (cudaStream_t * s, unsigned flags, int priority), (s, flags, priority))
WRAP(cudaStreamSynchronize, (cudaStream_t s), (s))
WRAP(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned flags), (s, e, flags))
WRAP(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode mode), (s, mode))
WRAP(cudaEventCreateWithFlags, (cudaEvent_t * e, unsigned flags), (e, flags))
WRAP(cudaEventRecord, (cudaEvent_t e, cudaStream_t s), (e, s))
WRAP(cudaEventSynchronize, (cudaEvent_t e), (e))
WRAP(cudaPointerGetAttributes, (struct cudaPointerAttributes * attributes, const void * p), (attributes, p))
WRAP(cudaGraphInstantiate, (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags), (exec, graph, flags))
WRAP(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t s), (exec, s))
WRAP(cudaLaunchKernelExC, (const cudaLaunchConfig_t * config, const void * kernel, void ** arguments),
     (config, kernel, arguments))
WRAP(cudaFuncSetAttribute, (const void * kernel, enum cudaFuncAttribute attribute, int value),
     (kernel, attribute, value))
WRAP(cudaFuncGetAttributes, (struct cudaFuncAttributes * attributes, const void * kernel), (attributes, kernel))
WRAP(cudaSetDevice, (int device), (device))
WRAP(cudaGetDevice, (int * device), (device))
WRAP(cudaGetDeviceCount, (int * count), (count))
WRAP(cudaMemGetInfo, (size_t * free, size_t * total), (free, total))
WRAP(cudaDeviceGetAttribute, (int * value, enum cudaDeviceAttr attribute, int device), (value, attribute, device))
WRAP(cudaDeviceGetStreamPriorityRange, (int * least, int * most), (least, most))

// `<<< >>>`: cudaLaunchKernel, or from CUDA 13 on __cudaLaunchKernel
#if CUDART_VERSION >= 13000
WRAP(__cudaLaunchKernel, (cudaKernel_t kernel, dim3 grid, dim3 block, void ** arguments, size_t shared, cudaStream_t s),
     (kernel, grid, block, arguments, shared, s))
#else
WRAP(cudaLaunchKernel, (const void * kernel, dim3 grid, dim3 block, void ** arguments, size_t shared, cudaStream_t s),
     (kernel, grid, block, arguments, shared, s))
#endif

// a capture must end even if ending it fails
cudaError_t __real_cudaStreamEndCapture(cudaStream_t s, cudaGraph_t * graph);
cudaError_t __wrap_cudaStreamEndCapture(cudaStream_t s, cudaGraph_t * graph) {
    const cudaError_t error = next_error(), real = __real_cudaStreamEndCapture(s, graph);
    return error ? error : real;
}
