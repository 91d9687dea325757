// Attributes that one compiler has for one system.
#pragma once

// Marks a function that gcc compiles twice, the second time for AVX2; WIDE: a third time for AVX-512 (from gcc 12 on).
// The dynamic linker of Linux chooses one (ifunc). Sanitizers cannot start with it.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MACKO_CLONES __attribute__((target_clones("default", "avx2")))
#if __GNUC__ >= 12
#define MACKO_WIDE_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MACKO_WIDE_CLONES MACKO_CLONES
#endif
#else
#define MACKO_CLONES
#define MACKO_WIDE_CLONES
#endif
