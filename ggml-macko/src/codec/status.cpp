#include "codec/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace macko {

static thread_local char last_error[512] = "no error";

static bool is_control(const unsigned char * c) {
    // below a space, DEL, and U+0080...U+009F in UTF-8
    return c[0] < 0x20 || c[0] == 0x7f || (c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0);
}

void escape_controls(const char * text, char * out, size_t size) {
    const auto * in  = reinterpret_cast<const unsigned char *>(text);
    char * const end = out + size - 1;
    for (; *in && out < end; in++) {
        if (!is_control(in)) {
            *out++ = static_cast<char>(*in);
        } else if (end - out < 4) {
            break;
        } else {
            in += *in == 0xc2; // the escape shows the character
            out += snprintf(out, 5, "\\x%02x", *in);
        }
    }
    *out = 0;
}

int fail(int status, const char * format, ...) {
    char    text[sizeof(last_error)]; // the arguments may point into last_error
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    escape_controls(text, last_error, sizeof(last_error));
    return status;
}

void prefix_error(const char * prefix) { (void)!fail(GGML_MACKO_STATUS_OK, "%s: %s", prefix, last_error); }

printable::printable(const char * name, size_t n) {
    char * out = text;
    for (size_t i = 0; i < n && i < 63; i++) {
        const unsigned char c = static_cast<unsigned char>(name[i]);
        if (c >= 0x20 && c != 0x7f && c != '\\') {
            *out++ = static_cast<char>(c);
        } else {
            out += snprintf(out, 5, "\\x%02x", c);
        }
    }
    *out = 0;
}

printable::printable(const char * name) : printable(name, strlen(name)) {}

} // namespace macko

const char * ggml_macko_last_error(void) { return macko::last_error; }

const char * ggml_macko_status_name(int status) {
    switch (status) {
#define CASE(name) \
    case GGML_MACKO_STATUS_##name: return "GGML_MACKO_STATUS_" #name
        CASE(OK);
        CASE(BAD_ARGUMENT);
        CASE(OUT_OF_MEMORY);
        CASE(VERSION_MISMATCH);
        CASE(CANCELLED);
        CASE(LOAD_FAILED);
        CASE(IO);
        CASE(NOT_A_FILE);
        CASE(TRUNCATED);
        CASE(FILE_CHANGED);
        CASE(BAD_MAGIC);
        CASE(BAD_GGUF_VERSION);
        CASE(LIMIT);
        CASE(BAD_KEY);
        CASE(DUPLICATE_KEY);
        CASE(BAD_KEY_TYPE);
        CASE(BAD_KEY_VALUE);
        CASE(MISSING_KEY);
        CASE(BAD_ALIGNMENT);
        CASE(BAD_NAME);
        CASE(DUPLICATE_TENSOR);
        CASE(BAD_TYPE);
        CASE(BAD_SHAPE);
        CASE(BAD_OFFSET);
        CASE(TRAILING_DATA);
        CASE(SPLIT_FILE);
        CASE(UNSUPPORTED_ARCH);
        CASE(NOT_SPARSE);
        CASE(FORMAT_VERSION);
        CASE(BAD_FORMAT);
        CASE(MISSING_COMPONENT);
        CASE(BAD_COMPONENT);
        CASE(BAD_ROW_PTR);
        CASE(BAD_COLUMN);
        CASE(NOT_CANONICAL);
        CASE(NOT_FINITE);
        CASE(BAD_NNZ);
        CASE(BAD_BLOCK);
        CASE(OVERLAP);
#undef CASE
        default: return "unknown";
    }
}
