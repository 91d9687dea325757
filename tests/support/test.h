// Shared by the C++ tests: TEST, which registers a test; CHECK, which prints file, line and values; a seeded random
// source; and the command line of a test program:
//
//     test-NAME [--list] [--one-thread] [--cases N] [--seed N] [SUBSTRING...]
//
// runs the tests whose names contain one of the substrings, in source order; without a substring, all tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

inline int n_failed  = 0;
inline int n_passed  = 0;
inline int n_skipped = 0; // tests that need a missing GPU

// `--one-thread`: for emulators of a CPU, some of which never free the memory of a thread that has ended.
inline bool one_thread = false;
inline int  threads(int n) { return one_thread ? 1 : n; }

// `--cases`: number of random cases of a test (fewer for sanitizers); `--seed`: for tests with a seed.
inline int      n_cases_given = 0;
inline uint64_t seed_given    = 1;
inline int      random_cases(int usual) { return n_cases_given ? n_cases_given : usual; }

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

inline bool few_cases() { return n_cases_given && n_cases_given < 100; }

struct test_case {
    const char * name;
    void (*run)();
    bool on_gpu;
    bool selected;
};

inline std::vector<test_case> & all_tests() {
    static std::vector<test_case> tests;
    return tests;
}

inline bool list_test(const char * name, void (*run)(), bool on_gpu = false) {
    all_tests().push_back({ name, run, on_gpu, true });
    return true;
}

#define TEST(name)                                                                       \
    static void                        test_##name();                                    \
    [[maybe_unused]] static const bool name##_is_listed = list_test(#name, test_##name); \
    static void                        test_##name()

// Reads the command line. Returns an exit code, or -1 if tests must run.
inline int begin_tests(int argc, char ** argv) {
    std::vector<const char *> filters;
    for (int i = 1; i < argc; i++) {
        const char * word = argv[i];
        if (!strcmp(word, "--list")) {
            for (const test_case & test : all_tests()) {
                printf("%s\n", test.name);
            }
            return 0;
        }
        if (!strcmp(word, "--one-thread")) {
            one_thread = true;
        } else if (!strcmp(word, "--cases") && i + 1 < argc) {
            n_cases_given = atoi(argv[++i]);
        } else if (!strcmp(word, "--seed") && i + 1 < argc) {
            seed_given = strtoull(argv[++i], nullptr, 10);
        } else if (!strncmp(word, "--", 2)) {
            fprintf(stderr, "unknown option, or one without its value: %s\n", word);
            return 1;
        } else {
            filters.push_back(word);
        }
    }
    const auto & tests = all_tests();
    for (const char * filter : filters) {
        if (std::none_of(tests.begin(), tests.end(), [&](const test_case & t) { return strstr(t.name, filter); })) {
            fprintf(stderr, "no test has '%s' in its name; --list names all\n", filter);
            return 1;
        }
    }
    for (test_case & test : all_tests()) {
        test.selected = filters.empty() || std::any_of(filters.begin(), filters.end(),
                                                       [&](const char * f) { return strstr(test.name, f); });
    }
    return -1;
}

inline bool all_tests_run() {
    return std::all_of(all_tests().begin(), all_tests().end(), [](const test_case & t) { return t.selected; });
}

inline void run_tests(bool has_gpu = true) {
    for (const test_case & test : all_tests()) {
        if (test.selected && test.on_gpu && !has_gpu) {
            n_skipped++;
        } else if (test.selected) {
            test.run();
        }
    }
}

// Prints the counts. Returns the exit code: 1 also if no check ran, and 77 if tests were skipped.
inline int test_summary(const char * program) {
    printf("%s: %d passed, %d failed\n", program, n_passed, n_failed);
    if (n_skipped) {
        printf("%s: %d tests skipped: no CUDA device\n", program, n_skipped);
    }
    return n_failed ? 1 : n_skipped ? 77 : n_passed ? 0 : 1;
}

inline int test_main(const char * program, int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    run_tests();
    return test_summary(program);
}

struct rng {
    std::mt19937_64 engine;
    explicit rng(uint64_t seed) : engine(seed) {}
    uint64_t bits() { return engine(); }
    // lo ... hi, inclusive
    int64_t range(int64_t lo, int64_t hi) { return std::uniform_int_distribution<int64_t>(lo, hi)(engine); }
    double  unit() { return std::uniform_real_distribution<double>(0, 1)(engine); }
};
