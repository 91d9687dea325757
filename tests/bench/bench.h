// Shared by the GPU benchmarks: checked calls, the filter, and times of CUDA graphs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace macko::cuda {

// Both functions print the error and end the program.
void check(cudaError_t error, const char * what);
void check_status(int status); // a ggml_macko_status
#define CHECKED(call) check((call), #call)

struct bench_options {
    std::vector<std::string> filter;    // a case runs if its name contains all of these
    std::vector<std::string> shapes;    // ROWSxCOLS
    std::vector<std::string> densities; // 0 ... 1
    std::vector<std::string> columns;   // of x
    std::vector<std::string> values;
    double                   bandwidth; // of the device's memory, bytes per microsecond

    bool wants(const std::string & name) const;
};

// Median microseconds of one call of run(i), which queues work on the stream. Measured over replays of a graph that
// calls run() with i = 0 ... n-1 in turn.
double time_us(cudaStream_t stream, int n, const std::function<void(int)> & run);
// Number of copies of nbytes bytes that evict each other from the L2 cache when they are used in turn.
int n_copies(int64_t nbytes);
// Fills n words with pairs of F16 values of both signs and magnitudes 1/2 ... 1; zeros would make dense products
// faster.
void   fill(cudaStream_t stream, void * memory, int64_t n);
double read_bandwidth(cudaStream_t stream); // bytes per microsecond

// one line per case on standard output
void bench_products(const bench_options & options, cudaStream_t stream);
void bench_densify(const bench_options & options, cudaStream_t stream);
void bench_layer(const bench_options & options, cudaStream_t stream);
void bench_tune(const bench_options & options, cudaStream_t stream);
void bench_attention(const bench_options & options, cudaStream_t stream);

} // namespace macko::cuda
