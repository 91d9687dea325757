// Error reporting of the whole library: a status code, and one line of text per thread. Nothing here throws or prints.
#pragma once

#include "ggml-macko.h"

namespace macko {

// Copies text with control characters as \xHH, cut at size - 1 bytes, because names and paths must not reach a terminal
// raw.
void escape_controls(const char * text, char * out, size_t size);

// Sets this thread's message (printf style, cut at 511 bytes, control characters escaped) and returns status.
[[nodiscard]] int fail(int status, const char * format, ...) __attribute__((format(printf, 2, 3)));

// in functions that return a status: returns the status of a call that failed
#define TRY(...)                                  \
    do {                                          \
        const int try_status = (__VA_ARGS__);     \
        if (try_status != GGML_MACKO_STATUS_OK) { \
            return try_status;                    \
        }                                         \
    } while (0)

// Prefixes this thread's message with "prefix: ", for callers with the name of the file or tensor.
void prefix_error(const char * prefix);

// Escapes control characters in a name from a file, and cuts the name at 63 bytes.
struct printable {
    char text[4 * 63 + 1];
    explicit printable(const char * name, size_t n);
    explicit printable(const char * name);
};

// Runs body where C calls C++: bad_alloc becomes OUT_OF_MEMORY, and no exception passes.
template <typename F> int c_boundary(F && body) noexcept;

} // namespace macko

#include <exception>
#include <new>

template <typename F> int macko::c_boundary(F && body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "internal error: %s", e.what());
    } catch (...) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "internal error");
    }
}
