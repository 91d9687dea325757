// Error reporting of the whole library: a code, and one line of text per thread. Nothing here throws or prints.
#pragma once

#include "ggml-macko.h"

namespace macko {

// copies text with control characters as \xHH, cut at size - 1 bytes: names and paths must not reach a terminal raw
void escape_controls(const char * text, char * out, size_t size);

// sets this thread's message (printf style, cut at 511 bytes, control characters escaped) and returns status
[[nodiscard]] int fail(int status, const char * format, ...) __attribute__((format(printf, 2, 3)));

// puts "prefix: " in front of this thread's message, for callers that know the file or the tensor
void prefix_error(const char * prefix);

// escapes control characters and cuts at 63 bytes, for names that come from files
struct printable {
    char text[4 * 63 + 1];
    explicit printable(const char * name, size_t n);
    explicit printable(const char * name);
};

// runs body where C calls C++: bad_alloc becomes OUT_OF_MEMORY, and no exception passes
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
