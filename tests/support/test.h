// What the C++ tests share: CHECK, which prints file, line and values, and a seeded random source.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

inline int n_failed = 0;
inline int n_passed = 0;

// `--one-thread`, for emulators of a CPU, some of which keep the memory of every thread that has ended.
inline bool one_thread = false;
inline int  threads(int n) { return one_thread ? 1 : n; }

#define CHECK(condition, ...)                                                       \
    do {                                                                            \
        if (condition) {                                                            \
            n_passed++;                                                             \
        } else {                                                                    \
            fprintf(stderr, "%s:%d: failed: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                           \
            fputc('\n', stderr);                                                    \
            if (++n_failed >= 20) {                                                 \
                exit(1);                                                            \
            }                                                                       \
        }                                                                           \
    } while (0)

// Prints the counts; returns the exit code of the test, which is 1 if nothing was checked, too.
inline int test_summary(const char * name) {
    printf("%s: %d passed, %d failed\n", name, n_passed, n_failed);
    return n_failed || !n_passed ? 1 : 0;
}

struct rng {
    std::mt19937_64 engine;
    explicit rng(uint64_t seed) : engine(seed) {}
    uint64_t bits() { return engine(); }
    // lo ... hi, inclusive
    int64_t range(int64_t lo, int64_t hi) { return std::uniform_int_distribution<int64_t>(lo, hi)(engine); }
    double  unit() { return std::uniform_real_distribution<double>(0, 1)(engine); }
};
