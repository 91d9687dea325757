// The stream from which llama.cpp reads a model, on out-of-memory: stdio calls the stream, so an exception must become
// an error of the stream.
#include "gguf-builder.h"
#include "load/dense-stream.h"
#include "temporary.h"
#include "test.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

static std::atomic<long> n_left{ -1 }; // successful allocations before a failure; negative: no failure

static void * allocate(size_t n) {
    if (n_left >= 0 && n_left-- == 0) {
        return nullptr;
    }
    return malloc(n > 0 ? n : 1);
}

// not inline, because the compiler would warn that free() does not match new
[[gnu::noinline]] void * operator new(size_t n) {
    if (void * p = allocate(n)) {
        return p;
    }
    throw std::bad_alloc();
}

[[gnu::noinline]] void operator delete(void * p) noexcept { free(p); }
[[gnu::noinline]] void operator delete(void * p, size_t) noexcept { free(p); }

// Returns whether the failing allocation was reached.
static bool read_with_failing_allocation(const std::string & path, long n) {
    std::unique_ptr<macko::model_file>   file;
    std::unique_ptr<macko::dense_stream> stream;
    CHECK(macko::model_file_open_sparse(path.c_str(), macko::compression::off, false, &file) == 0 &&
              macko::dense_stream::create(*file, &stream) == 0,
          "%s", ggml_macko_last_error());
    FILE *            f = stream->open_stream();
    std::vector<char> buffer(1 << 16);
    n_left = n;
    while (fread(buffer.data(), 1, buffer.size(), f) > 0) {
    }
    const bool failed = n_left < 0;
    n_left            = -1;
    CHECK(failed == (ferror(f) != 0), "allocation %ld: the stream has an error exactly if memory ran out", n);
    CHECK(stream->status() == (failed ? GGML_MACKO_STATUS_OUT_OF_MEMORY : 0), "allocation %ld: status %d", n,
          stream->status());
    fclose(f);
    return failed;
}

TEST(each_failed_allocation_is_a_status) {
    const temporary_folder folder("test-out-of-memory");
    const std::string      path = folder.path + "/model.gguf";
    write_file(path, builder::serialize(builder::sparse_file(builder::tiny_llama(64, 2, 5, true), false, true)));
    long n = 0;
    while (n < 10000 && read_with_failing_allocation(path, n)) {
        n++;
    }
    CHECK(n > 0 && n < 10000, "%ld allocations failed", n);
}

int main(int argc, char ** argv) { return test_main("test-out-of-memory", argc, argv); }
