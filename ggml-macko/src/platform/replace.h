/* How a preloaded library (LD_PRELOAD) takes the place of functions of a program:

       REPLACEMENT(int, some_function, (int i)) { return ((int (*)(int))ORIGINAL(some_function))(i); }

   The preloaded library comes first in the order of search, so programs find this definition. ORIGINAL(f) finds the
   next one, or any function of the program, as a void *; NULL if there is none.

   This header comes before all others. */
#pragma once

#define _GNU_SOURCE // for RTLD_NEXT
#include <dlfcn.h>
#include <pthread.h>

#define REPLACEMENT(result, name, parameters) __attribute__((visibility("default"))) result name parameters
#define ORIGINAL(name)                        dlsym(RTLD_NEXT, #name)

// A function of the program, or NULL.
#define FIND(name) dlsym(RTLD_DEFAULT, #name)
// A library, or NULL with a reason, and a function in it.
#define OPEN_LIBRARY(path)     dlopen(path, RTLD_NOW | RTLD_LOCAL)
#define LIBRARY_ERROR()        dlerror()
#define FIND_IN(library, name) dlsym(library, #name)

// RUN_ONCE(&once, f) calls f() in the first thread; others wait for its end.
typedef pthread_once_t once_t;
#define ONCE_INIT         PTHREAD_ONCE_INIT
#define RUN_ONCE(once, f) pthread_once(once, f)

// If the reader of stdout or stderr is gone, the program ends as it would without this library. A write to a connection
// fails instead. Has no effect in a program that handles SIGPIPE.
void end_at_broken_output(void);
