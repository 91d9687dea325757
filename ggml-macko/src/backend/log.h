// Messages go through ggml's log callback, as llama.cpp's own do. The library never prints by itself.
#pragma once

#include "codec/status.h"
#include "ggml.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace macko {

inline void log_text(ggml_log_level level, const char * format, va_list args) {
    char raw[1024], text[1024];
    vsnprintf(raw, sizeof(raw) - 1, format, args);
    const size_t n       = strlen(raw);
    const bool   newline = n > 0 && raw[n - 1] == '\n';
    raw[n - newline]     = 0;
    escape_controls(raw, text, sizeof(text) - 1);
    strcat(text, newline ? "\n" : "");
    ggml_log_callback callback  = nullptr;
    void *            user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    if (callback) {
        callback(level, text, user_data);
    }
}

__attribute__((format(printf, 1, 2))) inline void log_error(const char * format, ...) {
    va_list args;
    va_start(args, format);
    log_text(GGML_LOG_LEVEL_ERROR, format, args);
    va_end(args);
}

__attribute__((format(printf, 1, 2))) inline void log_warn(const char * format, ...) {
    va_list args;
    va_start(args, format);
    log_text(GGML_LOG_LEVEL_WARN, format, args);
    va_end(args);
}

__attribute__((format(printf, 1, 2))) inline void log_info(const char * format, ...) {
    va_list args;
    va_start(args, format);
    log_text(GGML_LOG_LEVEL_INFO, format, args);
    va_end(args);
}

// llama.cpp shows these messages with --verbose.
__attribute__((format(printf, 1, 2))) inline void log_debug(const char * format, ...) {
    va_list args;
    va_start(args, format);
    log_text(GGML_LOG_LEVEL_DEBUG, format, args);
    va_end(args);
}

} // namespace macko
