/* How a preloaded library (LD_PRELOAD, on macOS DYLD_INSERT_LIBRARIES) takes the place of functions of a program:

       REPLACEMENT(int, some_function, (int i)) { return ((int (*)(int))ORIGINAL(some_function))(i); }

   ORIGINAL(f) is the function whose place such a definition took, OTHER(f) any function of the program; both are
   void *, and NULL if there is none. Linux finds the definition, because the preloaded library comes first in the order
   of search, and RTLD_NEXT finds the original behind it. dyld binds each symbol to a library, but a pair in __interpose
   changes where all others than this library are bound to. A pair whose original is missing (weak_import) is ignored.
   dlsym() would give the replacement, so the original is this library's own reference to it.

   This header comes before all others. */
#pragma once

#if defined(__linux__)

#define _GNU_SOURCE // for RTLD_NEXT
#include <dlfcn.h>

#define REPLACEMENT(result, name, parameters) __attribute__((visibility("default"))) result name parameters
#define ORIGINAL(name)                        dlsym(RTLD_NEXT, #name)
#define OTHER(name)                           dlsym(RTLD_NEXT, #name)

#elif defined(__APPLE__)

#include <dlfcn.h>

#define REPLACEMENT(result, name, parameters)                                       \
    extern result name parameters __attribute__((weak_import));                     \
    static result replacement_of_##name parameters;                                 \
    __attribute__((used, section("__DATA,__interpose"))) static const struct {      \
        const void *replacement, *original;                                         \
    } pair_of_##name = { (const void *)replacement_of_##name, (const void *)name }; \
    static result replacement_of_##name parameters
#define ORIGINAL(name) ((void *)name)
#define OTHER(name)    dlsym(RTLD_DEFAULT, #name)

#else
#error "ggml-macko knows Linux and macOS"
#endif
