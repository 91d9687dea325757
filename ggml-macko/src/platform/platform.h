// What operating systems do differently. Only this folder has calls, headers and macros that are not in POSIX;
// test_platform.py checks that. There are two systems: Linux, and macOS, which follows Apple's headers and the
// sources of its libc and dyld, and has never been run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <sys/stat.h>
#include <sys/types.h>

// A function that gcc compiles twice, the second time for AVX2; the dynamic linker of Linux chooses (ifunc, which
// macOS lacks, and with which sanitizers cannot start).
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MACKO_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define MACKO_CLONES
#endif

namespace macko::platform {

// Fills memory from the system's generator for keys. False, and errno, if it cannot.
[[nodiscard]] bool random_bytes(void * out, size_t n);

// When a file was last written, and when that or its name, owner or mode was last changed.
timespec modification_time(const struct stat & file);
timespec change_time(const struct stat & file);
// fstat() of the shared library, or the program, that this function is in. False if it cannot be found.
[[nodiscard]] bool stat_this_library(struct stat * out);
// Where programs keep what they can make again, a folder of the user's; "" if there is none.
std::string user_cache_folder();
// Whether open(2), without creating anything, failed with this errno because the path is a socket: ENXIO on Linux,
// where a device without a driver gives the same; EOPNOTSUPP on macOS.
bool is_socket_error(int error);

// What a stdio stream calls; errno says why something failed. Exceptions must stay inside.
struct stream_functions {
    ssize_t (*read)(void * context, char * buffer, size_t n) noexcept; // bytes, 0 at the end, -1
    // *offset counts from whence (SEEK_SET ...) and becomes the new position; 0, or -1. ftell() passes 0 from SEEK_CUR
    // and takes the answer for the position. Other offsets from SEEK_CUR are not passed on macOS: they become ftell()
    // and SEEK_SET.
    int (*seek)(void * context, int64_t * offset, int whence) noexcept;
    int (*close)(void * context) noexcept;
};
// A stream for reading. nullptr, and errno, if there is none; then context is still the caller's.
FILE * open_stream(void * context, const stream_functions & functions);

// Zeroed pages of their own, nullptr if there are none. reserve: Linux refuses what it could not hold in memory and
// swap; without it, and on macOS, addresses alone are taken, and memory when a page is written.
void * map_memory(size_t nbytes, bool reserve);
void   unmap_memory(void * memory, size_t nbytes);
// Pages of map_memory(), which read as zeros from now on and take no memory.
void discard_memory(void * memory, size_t nbytes);
// Puts bytes of a file, from a multiple of the page size on, in the place of pages of map_memory(); to write to them
// does not change the file. False if that failed. unmap_file() puts zeros there again.
[[nodiscard]] bool map_file(void * at, size_t nbytes, int fd, off_t offset);
void               unmap_file(void * at, size_t nbytes);
// Advice for memory that is read through again and again, and for memory of which most stays unused. macOS takes no
// such advice, and does nothing.
void use_huge_pages(void * memory, size_t nbytes);
void use_small_pages(void * memory, size_t nbytes);
// Gives freed blocks that malloc keeps back to the system, as far as the C library can.
void trim_heap();

// A function of a library that the process may have loaded without making its symbols global, nullptr if there is none.
// library: without "lib" and suffix. Where several files of that name are loaded, it is the one with a version in its
// name (libggml.so.0, libggml.0.dylib), which other libraries are linked to. Linux looks among global symbols first.
void * find_function(const char * library, const char * name);

#if defined(__aarch64__)
// What this CPU has of arm64's optional instructions, and the system lets programs use.
struct arm64_extensions {
    bool dot_product;  // FEAT_DotProd: sdot
    bool f16_products; // FEAT_FP16 and FEAT_FHM: fmlal
};
arm64_extensions find_arm64_extensions();
#endif

} // namespace macko::platform
