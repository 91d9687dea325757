/* How a preloaded library (LD_PRELOAD) takes the place of functions of a program:

       REPLACEMENT(int, some_function, (int i)) { return ((int (*)(int))ORIGINAL(some_function))(i); }

   The preloaded library comes first in the order of search, so programs find this definition. ORIGINAL(f) finds the
   next one, or any function of the program, as a void *; NULL if there is none.

   This header comes before all others. */
#pragma once

#define _GNU_SOURCE // for RTLD_NEXT
#include <dlfcn.h>

#define REPLACEMENT(result, name, parameters) __attribute__((visibility("default"))) result name parameters
#define ORIGINAL(name)                        dlsym(RTLD_NEXT, #name)
