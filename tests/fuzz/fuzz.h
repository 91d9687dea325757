// Shared by the fuzz targets. A target is one program: its inputs are short byte strings, and it ends the process
// (abort) if the library breaks a rule. It is linked either with libFuzzer (entry-libfuzzer.cpp, GGML_MACKO_FUZZ=ON
// with clang) or with this project's small driver (entry-standalone.cpp, any compiler).
#pragma once

#include "gguf-builder.h"
#include "gguf/header.h"

#include <cstdio>
#include <cstdlib>

// Ends the process with a message; a fuzzer attributes the failure to the input.
#define FUZZ_CHECK(condition, ...)                                                       \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "%s:%d: broken rule: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                                \
            fputc('\n', stderr);                                                         \
            abort();                                                                     \
        }                                                                                \
    } while (0)

// A mutation of either driver: changes up to max_size bytes of data, and returns their new number.
extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

namespace fuzz {

using builder::bytes;

// A generator that is cheap to seed, because a custom mutator is called with a seed for each input (splitmix64).
struct rng {
    uint64_t state;
    explicit rng(uint64_t seed) : state(seed) {}
    uint64_t bits() {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z          = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z          = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    uint64_t below(uint64_t n) { return bits() % n; } // n > 0
    size_t   pick(size_t n) { return static_cast<size_t>(below(n)); }
    bool     one_in(uint64_t n) { return below(n) == 0; }
};

struct target {
    const char * name;
    size_t       max_nbytes;  // of an input
    int64_t      max_memory;  // per input, besides 64 bytes for each byte of the input
    double       max_seconds; // of CPU time for one input, under sanitizers on a slow machine
    // Runs one input. Returns true if the library accepted it and its results were compared.
    bool (*run)(const uint8_t * data, size_t size);
    std::vector<bytes> (*seeds)(); // all are accepted
    // changes an input in a way that respects its structure; nullptr: the driver's mutations are enough
    size_t (*mutate)(uint8_t * data, size_t size, size_t max_size, uint64_t seed);
};
extern const target TARGET; // each program has one

// Bytes in memory as a file, followed by `zeros` zero bytes that are not stored.
struct memory_source : macko::byte_source {
    const uint8_t * data;
    int64_t         n, zeros;
    memory_source(const uint8_t * d, size_t size, int64_t z = 0) : data(d), n(static_cast<int64_t>(size)), zeros(z) {}
    int64_t size() const override { return n + zeros; }
    int     read(int64_t offset, void * dst, int64_t count) const override {
        FUZZ_CHECK(offset >= 0 && count >= 0 && offset <= size() && count <= size() - offset,
                       "%lld bytes at %lld of %lld", static_cast<long long>(count), static_cast<long long>(offset),
                       static_cast<long long>(size()));
        const int64_t stored = std::min(count, std::max<int64_t>(0, n - offset));
        if (stored > 0) {
            memcpy(dst, data + offset, static_cast<size_t>(stored));
        }
        if (count > stored) {
            memset(static_cast<uint8_t *>(dst) + stored, 0, static_cast<size_t>(count - stored));
        }
        return GGML_MACKO_STATUS_OK;
    }
};

// Every failure must have a listed code and a message, and must not be BAD_ARGUMENT.
inline void check_status(int status) {
    FUZZ_CHECK(strcmp(ggml_macko_status_name(status), "unknown") != 0 && status != GGML_MACKO_STATUS_BAD_ARGUMENT,
               "status %d: %s", status, ggml_macko_last_error());
    FUZZ_CHECK(status == GGML_MACKO_STATUS_OK || *ggml_macko_last_error(), "status %d without a message", status);
}

// Reads numbers from the front of an input; zeros after its end.
struct input {
    const uint8_t *         data;
    size_t                  size;
    template <typename T> T take() {
        T            v{};
        const size_t n = std::min(size, sizeof(T));
        if (n > 0) {
            memcpy(&v, data, n);
        }
        data += n;
        size -= n;
        return v;
    }
    bytes take_bytes(size_t n) {
        n = std::min(n, size);
        const bytes b(data, data + n);
        data += n;
        size -= n;
        return b;
    }
};

} // namespace fuzz
