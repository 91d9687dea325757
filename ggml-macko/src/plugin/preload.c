// LD_PRELOAD library: lets any program that is linked to libllama.so open sparse GGUF files with
// llama_model_load_from_file. Dense files are passed to the original function. GGML_MACKO_PLUGIN is the path of
// libggml-macko.so (`macko run` sets it); with GGML_MACKO_COMPRESS=1 dense models are compressed while they are loaded,
// and with GGML_MACKO_KEEP_NEGATIVE_ZEROS=1, too, -0.0 is kept like any other value.
//
// This file must not depend on any library but libc. The program's own ggml opens the plugin right after it has loaded
// its other backends, so that options such as --list-devices and -dev MACKO0 know the plugin's devices, or when the
// first model is loaded if the program does not call ggml_backend_load_all.
#define _GNU_SOURCE
#include "ggml-macko.h"
#include "llama.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct llama_model * (*load_from_file_t)(const char *, struct llama_model_params);
typedef struct llama_model * (*load_from_file_ptr_t)(FILE *, struct llama_model_params);
typedef void (*model_free_t)(struct llama_model *);
typedef void (*backend_load_all_t)(void);
typedef void * (*backend_load_t)(const char *);
typedef int (*load_begin_t)(const char *, int32_t, struct ggml_macko_load **, FILE **);
typedef int (*load_end_t)(struct ggml_macko_load *, bool, bool);
typedef const char * (*last_error_t)(void);

static struct {
    load_begin_t load_begin;
    load_end_t   load_end;
    last_error_t last_error;
} plugin; // all null if there is no plugin; then only dense files can be opened

static void load_plugin(void) {
    const char *   path         = getenv("GGML_MACKO_PLUGIN");
    backend_load_t backend_load = (backend_load_t)dlsym(RTLD_DEFAULT, "ggml_backend_load");
    if (!path || !backend_load) {
        fprintf(stderr, "ggml-macko: %s\n",
                path ? "this program has no shared libggml" : "GGML_MACKO_PLUGIN is not set");
        return;
    }
    void * library = backend_load(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "ggml-macko: ggml did not accept the plugin %s\n", path);
        return;
    }
    plugin.last_error = (last_error_t)dlsym(library, "ggml_macko_last_error");
    plugin.load_end   = (load_end_t)dlsym(library, "ggml_macko_load_end");
    plugin.load_begin = (load_begin_t)dlsym(library, "ggml_macko_load_begin");
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

__attribute__((visibility("default"))) void ggml_backend_load_all(void) {
    const backend_load_all_t original = (backend_load_all_t)dlsym(RTLD_NEXT, "ggml_backend_load_all");
    if (original) {
        original();
        pthread_once(&once, load_plugin);
    }
}

static int is_set(const char * variable) {
    const char * value = getenv(variable);
    return value && strcmp(value, "1") == 0;
}

__attribute__((visibility("default"))) struct llama_model *
llama_model_load_from_file(const char * path, struct llama_model_params params) {
    pthread_once(&once, load_plugin);
    const load_from_file_t     original  = (load_from_file_t)dlsym(RTLD_NEXT, "llama_model_load_from_file");
    const load_from_file_ptr_t from_ptr  = (load_from_file_ptr_t)dlsym(RTLD_NEXT, "llama_model_load_from_file_ptr");
    const model_free_t         free_func = (model_free_t)dlsym(RTLD_NEXT, "llama_model_free");
    if (!original || !from_ptr || !free_func) {
        fprintf(stderr, "ggml-macko: this program is not linked to a shared libllama\n");
        return NULL;
    }
    if (!plugin.load_begin) {
        return original(path, params);
    }
    struct ggml_macko_load * load   = NULL;
    FILE *                   stream = NULL;
    const int                flags  = (is_set("GGML_MACKO_COMPRESS") ? GGML_MACKO_LOAD_COMPRESS : 0) |
                      (is_set("GGML_MACKO_KEEP_NEGATIVE_ZEROS") ? GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS : 0) |
                      (params.no_alloc ? GGML_MACKO_LOAD_NO_ALLOC : 0);
    const int begun = plugin.load_begin(path, flags, &load, &stream);
    if (begun == GGML_MACKO_STATUS_NOT_SPARSE) {
        return original(path, params);
    }
    if (begun) {
        fprintf(stderr, "ggml-macko: %s\n", plugin.last_error());
        return NULL;
    }
    params.load_mode = LLAMA_LOAD_MODE_NONE; // the stream has no file descriptor that could be mapped
    // llama.cpp would check placeholders instead of values; the plugin checks the values of every sparse tensor
    params.check_tensors       = false;
    struct llama_model * model = from_ptr(stream, params);
    if (plugin.load_end(load, model != NULL, !params.vocab_only && !params.no_alloc)) {
        fprintf(stderr, "ggml-macko: %s\n", plugin.last_error());
        if (model) {
            free_func(model);
        }
        return NULL;
    }
    return model;
}
