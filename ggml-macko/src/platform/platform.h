// Functions of Linux. Only this folder uses calls, headers and macros that are not in POSIX; test_platform.py checks
// this rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <sys/types.h>

// Marks a function that gcc compiles twice, the second time for AVX2; WIDE: a third time for AVX-512 (from gcc 12 on).
// The dynamic linker of Linux chooses one (ifunc). Sanitizers cannot start with it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
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

namespace macko::platform {

// Fills memory from the system's generator of cryptographic random numbers. Returns false and sets errno on failure.
[[nodiscard]] bool random_bytes(void * out, size_t n);

// Identifies the code of the shared library that contains this function: the bytes of the hash that the linker wrote
// (--build-id), read from memory, because the file at the library's path may be a newer one. "" if there is none.
std::string build_id();
// The user's folder for cached data; "" if there is none.
std::string user_cache_folder();

// Callbacks of a stdio stream. errno holds the reason of a failure. Exceptions must stay inside.
struct stream_functions {
    ssize_t (*read)(void * context, char * buffer, size_t n) noexcept; // bytes, 0 at the end, or -1
    // *offset is relative to whence (SEEK_SET ...) and becomes the new position; returns 0, or -1. ftell() passes 0
    // with SEEK_CUR and returns the new position.
    int (*seek)(void * context, int64_t * offset, int whence) noexcept;
    int (*close)(void * context) noexcept;
};
// A stream for reading. On failure returns nullptr and sets errno, and the caller still owns context.
FILE * open_stream(void * context, const stream_functions & functions);

// Maps zeroed pages; nullptr on failure. reserve: Linux refuses a mapping that would not fit in memory and swap.
// Without it, the mapping reserves only addresses, and each page gets memory at its first write.
void * map_memory(size_t nbytes, bool reserve);
void   unmap_memory(void * memory, size_t nbytes);
// Makes pages of map_memory() read as zeros and frees their memory.
void discard_memory(void * memory, size_t nbytes);
// Maps bytes of a file, from a multiple of the page size on, over pages of map_memory(). A write to these pages does
// not change the file. Returns false on failure. unmap_file() replaces the pages by zeros.
[[nodiscard]] bool map_file(void * at, size_t nbytes, int fd, off_t offset);
void               unmap_file(void * at, size_t nbytes);
// Advise the system about memory that is read repeatedly, and about memory that stays mostly unused.
void use_huge_pages(void * memory, size_t nbytes);
void use_small_pages(void * memory, size_t nbytes);
// Returns freed blocks of malloc to the system, as far as the C library supports it.
void trim_heap();

// A function in a loaded library whose symbols may not be global; nullptr if there is none. library: the name without
// "lib" and suffix. The global symbols are searched first, then the file libNAME.so.0, to which other libraries link.
void * find_function(const char * library, const char * name);

// Whether n bytes at an address lie on the stack of this thread, in a frame of a caller.
bool is_on_stack(const void * at, size_t n);
// Whether two addresses belong to the same library.
bool same_library(const void * a, const void * b);

#if defined(__aarch64__)
// Optional arm64 instructions that this CPU has and that the system lets programs use.
struct arm64_extensions {
    bool dot_product;  // FEAT_DotProd: sdot
    bool f16_products; // FEAT_FP16 and FEAT_FHM: fmlal
};
arm64_extensions find_arm64_extensions();
#endif

} // namespace macko::platform
