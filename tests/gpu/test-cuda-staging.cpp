// Copies by several host threads through pinned memory (cuda/lib/staging.h), byte by byte. Needs a GPU.
#include "cuda/lib/staging.h"
#include "test.h"

#include <atomic>
#include <cstdlib>
#include <vector>

using namespace macko::cuda;

namespace {

void cuda_ok(cudaError_t error, const char * what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

uint8_t byte_of(int64_t row, int64_t i) { return static_cast<uint8_t>(row * 131 + i * 7 + row / 256); }

// Rows must arrive at their addresses for any sizes of pieces, without changes to the bytes between them.
void check_rows(host_staging & staging, cudaStream_t stream, int64_t nbytes, int64_t pitch, int64_t n, int64_t step,
                int n_threads) {
    constexpr int        FILL = 0xa5;
    char *               dst  = nullptr;
    std::atomic<int64_t> done{ 0 }, split{ 0 };
    const auto           size = static_cast<size_t>(pitch * n);
    cuda_ok(cudaMalloc(&dst, size), "memory");
    cuda_ok(cudaMemset(dst, FILL, size), "fill");
    cuda_ok(cudaDeviceSynchronize(), "fill");
    const auto error = staging.copy({ dst, nbytes, pitch, n, step }, n_threads, stream,
                                    [&](int64_t begin, int64_t end, void * memory) {
                                        auto * out = static_cast<uint8_t *>(memory);
                                        for (int64_t row = begin; row < end; row++) {
                                            for (int64_t i = 0; i < nbytes; i++) {
                                                *out++ = byte_of(row, i);
                                            }
                                        }
                                        done += end - begin;
                                        split += begin % step != 0 && step * nbytes <= host_staging::SLOT_NBYTES;
                                    });
    CHECK(error == cudaSuccess && done == n, "%d rows of %d bytes were not filled", static_cast<int>(n),
          static_cast<int>(nbytes));
    CHECK(split == 0, "a piece begins inside of a step");
    std::vector<uint8_t> got(size);
    cuda_ok(cudaMemcpyAsync(got.data(), dst, size, cudaMemcpyDeviceToHost, stream), "result");
    cuda_ok(cudaStreamSynchronize(stream), "result");
    int64_t bad = 0;
    for (int64_t row = 0; row < n; row++) {
        for (int64_t i = 0; i < pitch; i++) {
            bad += got[static_cast<size_t>(row * pitch + i)] != (i < nbytes ? byte_of(row, i) : FILL);
        }
    }
    CHECK(bad == 0, "%d rows of %d bytes, %d apart, %d threads: %d wrong bytes", static_cast<int>(n),
          static_cast<int>(nbytes), static_cast<int>(pitch), n_threads, static_cast<int>(bad));
    cudaFree(dst);
}

} // namespace

TEST(rows_arrive_whole) {
    cudaStream_t stream = nullptr;
    cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    host_staging staging;
    for (const int n_threads : { 1, 2, 5, 16, 40 }) { // also more threads than pieces of memory
        check_rows(staging, stream, 1, 1, (int64_t(37) << 20) + 3, 1, n_threads);
        check_rows(staging, stream, 8192, 8192, 4099, 1, n_threads);
        check_rows(staging, stream, 8190, 8192, 1030, 1, n_threads);
        check_rows(staging, stream, 22016, 22016, 700, 128, n_threads);
        check_rows(staging, stream, 1000, 1008, 77, 128, n_threads);
        check_rows(staging, stream, host_staging::SLOT_NBYTES, host_staging::SLOT_NBYTES + 16, 5, 128, n_threads);
    }
}

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("test-cuda-staging: skipped: no GPU\n");
        return 77;
    }
    run_tests();
    return test_summary("test-cuda-staging");
}
