// Functions of the system: memory, libraries, streams, threads. Only this folder uses headers and functions that the
// standards of C and C++ lack; test_platform.py checks this rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace macko::platform {

class file; // files.h

// Fills memory from the system's generator of cryptographic random numbers. Returns false and sets errno on failure.
[[nodiscard]] bool random_bytes(void * out, size_t n);

// The environment: NAME=VALUE ..., nullptr.
char ** environment_entries();

// A pointer of each thread, nullptr at first. Not thread_local: the first access allocates memory, and glibc ends the
// process if there is none.
class thread_pointer {
public:
    thread_pointer();
    void * get() const;
    void   set(void * value) const; // has no effect if memory runs out

private:
    uintptr_t key_ = 0;
    bool      exists_;
};

// Callbacks of a stdio stream. errno holds the reason of a failure. Exceptions must stay inside.
struct stream_functions {
    // bytes, 0 at the end, or -1
    int64_t (*read)(void * context, char * buffer, size_t n) noexcept;
    // *offset is relative to whence (SEEK_SET ...) and becomes the new position; returns 0, or -1. ftell() passes 0
    // with SEEK_CUR and returns the new position.
    int (*seek)(void * context, int64_t * offset, int whence) noexcept;
    int (*close)(void * context) noexcept;
};
// A stream for reading. On failure returns nullptr and sets errno, and the caller still owns context. Windows has no
// such streams: errno is ENOSYS.
FILE * open_stream(void * context, const stream_functions & functions);

#if defined(__aarch64__)
// Optional arm64 instructions that this CPU has and that the system lets programs use.
struct arm64_extensions {
    bool dot_product;  // FEAT_DotProd: sdot
    bool f16_products; // FEAT_FP16 and FEAT_FHM: fmlal
};
arm64_extensions find_arm64_extensions();
#endif

// A forked process has another id.
int64_t process_id();

// ---- only the plugin calls the functions below; windows.cpp lacks them ----

// The user's folder for cached data; "" if there is none.
std::string user_cache_folder();

// Maps zeroed pages; nullptr on failure. reserve: Linux refuses a mapping that would not fit in memory and swap.
// Without it, the mapping reserves only addresses, and each page gets memory at its first write.
void * map_memory(size_t nbytes, bool reserve);
void   unmap_memory(void * memory, size_t nbytes);
size_t page_size();
// Makes pages of map_memory() read as zeros and frees their memory.
void discard_memory(void * memory, size_t nbytes);
// Maps bytes of a file, from a multiple of the page size on, over pages of map_memory(). A write to these pages does
// not change the file. Returns false on failure. unmap_file() replaces the pages by zeros.
[[nodiscard]] bool map_file(void * at, size_t nbytes, const file & f, int64_t offset);
void               unmap_file(void * at, size_t nbytes);
// Advise the system about memory that is read repeatedly, and about memory that stays mostly unused.
void use_huge_pages(void * memory, size_t nbytes);
void use_small_pages(void * memory, size_t nbytes);
// Returns freed blocks of malloc to the system, as far as the C library supports it.
void trim_heap();

// Identifies the code of the shared library that contains this function: the bytes of the hash that the linker wrote
// (--build-id), read from memory, because the file at the library's path may be a newer one. "" if there is none.
std::string build_id();
// A function in a loaded library whose symbols may not be global; nullptr if there is none. library: the name without
// "lib" and suffix. The global symbols are searched first, then the file libNAME.so.0, to which other libraries link.
void * find_function(const char * library, const char * name);
// Whether two addresses belong to the same library.
bool same_library(const void * a, const void * b);
// Whether n bytes at an address lie on the stack of this thread, in a frame of a caller.
bool is_on_stack(const void * at, size_t n);
// Loads libNAME.so.VERSION and keeps it loaded; nullptr if there is none. function_of() finds a function in it.
void * open_library(const char * name, int version);
void * function_of(void * library, const char * name);

} // namespace macko::platform
