// Preloaded library: lets any program that is linked to a shared libllama open sparse GGUF files with
// llama_model_load_from_file. Dense files are passed to the original function. GGML_MACKO_PLUGIN is the path of the
// plugin (`macko run` sets it); the plugin reads the other variables (platform/environment.h).
//
// A sparse file that cannot be loaded because the plugin does not fit the program's llama.cpp ends the program, so that
// the reason is the last line.
//
// A client of llama.cpp's RPC backend whose server is gone ends with one line; llama.cpp alone would end with a signal.
//
// This file must not depend on any library except libc. The program's own ggml opens the plugin right after its other
// backends, so that options such as --list-devices and -dev MACKO0 accept the plugin's devices. If the program does not
// call ggml_backend_load_all, the plugin is opened when the first model is loaded.
#include "platform/replace.h"

#include "ggml-macko.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// llama_model_params of any version. It is passed on the stack, and a function reads only the bytes of its own version.
struct any_params {
    uint64_t words[32];
};

typedef struct llama_model * (*load_from_file_t)(const char *, struct any_params);
typedef void (*function_t)(void);
typedef void (*backend_load_all_t)(void);
typedef void * (*backend_load_t)(const char *);
typedef int (*load_model_t)(const char *, const struct llama_model_params *, int32_t, const struct ggml_macko_llama *,
                            struct llama_model **);
typedef int (*find_params_layout_t)(function_t, int32_t, struct ggml_macko_params_layout *);
typedef const char * (*last_error_t)(void);
typedef int (*check_t)(void);
typedef void (*abort_t)(const char *, int, const char *, ...);

static struct {
    load_model_t         load_model;
    find_params_layout_t find_params_layout;
    last_error_t         last_error;
} plugin; // all null if there is no plugin; then only dense files can be opened

static void load_plugin(void) {
    const char *   path         = getenv("GGML_MACKO_PLUGIN");
    backend_load_t backend_load = (backend_load_t)FIND(ggml_backend_load);
    if (!path || !backend_load) {
        fprintf(stderr, "ggml-macko: %s\n",
                path ? "this program has no shared libggml" : "GGML_MACKO_PLUGIN is not set");
        return;
    }
    void * library = OPEN_LIBRARY(path);
    if (!library) {
        fprintf(stderr, "ggml-macko: %s\n", LIBRARY_ERROR());
        return;
    }
    // ggml gets no plugin that does not fit; load_model() still passes dense files on, and fails with the reason for
    // others
    const check_t check = (check_t)FIND_IN(library, ggml_macko_check_running_ggml);
    if (check() == GGML_MACKO_STATUS_OK && !backend_load(path)) {
        fprintf(stderr, "ggml-macko: ggml did not accept the plugin %s\n", path);
        return;
    }
    plugin.last_error         = (last_error_t)FIND_IN(library, ggml_macko_last_error);
    plugin.find_params_layout = (find_params_layout_t)FIND_IN(library, ggml_macko_find_params_layout);
    plugin.load_model         = (load_model_t)FIND_IN(library, ggml_macko_load_model);
    end_at_broken_output();
}

REPLACEMENT(_Noreturn void, ggml_abort, (const char * file, int line, const char * format, ...)) {
    char    text[2048]; // as long as llama.cpp's own
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (strstr(text, "Remote RPC server")) {
        fflush(stdout);
        fprintf(
            stderr,
            "ggml-macko: an RPC server was stopped, crashed or gave a malformed answer; llama.cpp cannot continue\n");
        _Exit(EXIT_FAILURE);
    }
    const abort_t original = (abort_t)ORIGINAL(ggml_abort);
    if (original) {
        original(file, line, "%s", text);
    }
    abort();
}

static once_t once = ONCE_INIT;

REPLACEMENT(void, ggml_backend_load_all, (void)) {
    const backend_load_all_t original = (backend_load_all_t)ORIGINAL(ggml_backend_load_all);
    if (original) {
        original();
        RUN_ONCE(&once, load_plugin);
    }
}

REPLACEMENT(struct llama_model *, llama_model_load_from_file, (const char * path, struct any_params params)) {
    RUN_ONCE(&once, load_plugin);
    struct ggml_macko_llama llama = {
        .struct_size        = sizeof(llama),
        .load_from_file     = (function_t)ORIGINAL(llama_model_load_from_file),
        .load_from_file_ptr = (function_t)ORIGINAL(llama_model_load_from_file_ptr),
        .model_free         = (function_t)ORIGINAL(llama_model_free),
    };
    if (!llama.load_from_file || !llama.load_from_file_ptr || !llama.model_free) {
        fprintf(stderr, "ggml-macko: this program is not linked to a shared libllama\n");
        return NULL;
    }
    if (!plugin.load_model) {
        return ((load_from_file_t)llama.load_from_file)(path, params);
    }
    const function_t     default_params = (function_t)ORIGINAL(llama_model_default_params);
    const int32_t        has_load_mode  = ORIGINAL(llama_load_mode_name) != NULL;
    struct llama_model * model          = NULL;
    int                  status         = plugin.find_params_layout(default_params, has_load_mode, &llama.params);
    if (!status) {
        status = plugin.load_model(path, (const struct llama_model_params *)&params, 0, &llama, &model);
    }
    if (status) {
        fflush(stdout);
        fprintf(stderr, "ggml-macko: %s\n", plugin.last_error());
    }
    if (status == GGML_MACKO_STATUS_VERSION_MISMATCH) {
        _Exit(EXIT_FAILURE); // no sparse file can be loaded, and llama.cpp would print another reason after this one
    }
    return model;
}
