// Attributes that one compiler has for one system.
#pragma once

// MACKO_CLONES marks a function that gcc compiles twice, the second time for AVX2. MACKO_WITH_WIDTHS(define) defines
// functions for each number of floats in a vector: define(4, attribute), for AVX2 with 8, and for AVX-512 with 16 (from
// gcc 12 on). The dynamic linker of Linux chooses one (ifunc). Sanitizers cannot start with it.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MACKO_CLONES __attribute__((target_clones("default", "avx2")))
#define MACKO_WITH_WIDTHS_TO_8(define) \
    define(4, __attribute__((target("default")))) define(8, __attribute__((target("avx2"))))
#if __GNUC__ >= 12
#define MACKO_WITH_WIDTHS(define) MACKO_WITH_WIDTHS_TO_8(define) define(16, __attribute__((target("arch=x86-64-v4"))))
#else
#define MACKO_WITH_WIDTHS MACKO_WITH_WIDTHS_TO_8
#endif
#else
#define MACKO_CLONES
#define MACKO_WITH_WIDTHS(define) define(4, )
#endif
