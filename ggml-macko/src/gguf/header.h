// Reads and checks the header of an untrusted GGUF file (FORMAT.md sections 1 and 4). It does not use ggml, whose
// parser aborts or allocates too much memory on files that must be refused. It reads through byte_source, so a fuzzer
// can pass bytes from memory.
#pragma once

#include "codec/limits.h"
#include "codec/status.h"

#include <string>
#include <string_view>
#include <vector>

namespace macko {

enum gguf_type : uint32_t {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
};

struct gguf_key {
    std::string name;
    gguf_type   type;
    gguf_type   element_type; // type of the elements of an array; otherwise equal to type
    uint64_t    n;            // number of elements of an array; otherwise 1
    size_t      begin;        // offset of the record (name, type, value) in gguf_header::bytes
    size_t      value;        // offset of the first element; a string begins with its length as u64
    size_t      end;          // offset after the record
};

struct gguf_tensor {
    std::string name;
    int32_t     type; // number of the ggml_type
    int32_t     n_dims;
    int64_t     ne[4];
    int64_t     offset; // of the data, from the start of the file
    int64_t     nbytes;
};

struct gguf_header {
    std::vector<uint8_t>     bytes; // from the magic to the end of the tensor table
    std::vector<gguf_key>    keys;
    std::vector<gguf_tensor> tensors; // in the order of the tensor table
    int64_t                  alignment;
    int64_t                  data_offset; // of the data section, from the start of the file
    int64_t                  file_size;

    const gguf_key * find(const char * name) const;
    // Element i of a key (i = 0 for a scalar). They return false if the key has another type, or if the number does
    // not fit the type of the result.
    bool get_int(const gguf_key & key, uint64_t i, int64_t * out) const;  // all integer types and bool
    bool get_float(const gguf_key & key, uint64_t i, double * out) const; // F32 and F64
    bool get_string(const gguf_key & key, uint64_t i, std::string * out) const;
    bool get_strings(const gguf_key & key, std::vector<std::string> * out) const;
};

// The source of the bytes. read copies n bytes at an offset to dst; it fails with GGML_MACKO_STATUS_TRUNCATED or
// GGML_MACKO_STATUS_IO.
struct byte_source {
    virtual ~byte_source()                                                      = default;
    virtual int64_t           size() const                                      = 0;
    [[nodiscard]] virtual int read(int64_t offset, void * dst, int64_t n) const = 0;
};

// Reads the header and checks that all tensors lie inside the file without overlap; header is undefined after an error.
[[nodiscard]] int read_gguf_header(const byte_source & source, gguf_header * header);

} // namespace macko
