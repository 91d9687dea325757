// Messages go where llama.cpp's own go: through the log callback of ggml. The library never prints by itself.
#pragma once

#include "ggml.h"

#include <cstdarg>
#include <cstdio>

namespace macko {

__attribute__((format(printf, 1, 2))) inline void log_error(const char * format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    ggml_log_callback callback  = nullptr;
    void            * user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    if (callback) {
        callback(GGML_LOG_LEVEL_ERROR, text, user_data);
    }
}

} // namespace macko
