// Reads and checks the header of a GGUF file that nobody vouches for (FORMAT.md sections 1 and 4). No ggml: its parser
// aborts or over-allocates on files that we must refuse. Works on bytes in memory, so that a fuzzer can drive it.
#pragma once

#include "codec/limits.h"
#include "codec/status.h"

#include <string>
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
    gguf_type   element_type; // of arrays; else = type
    uint64_t    n;            // elements of an array; else 1
    size_t      begin;        // the whole record (name, type, value) in gguf_header::bytes
    size_t      value;        // where the first element starts (a string starts with its u64 length)
    size_t      end;
};

struct gguf_tensor {
    std::string name;
    int32_t     type; // ggml type id
    int32_t     n_dims;
    int64_t     ne[4];
    int64_t     offset; // from the start of the file
    int64_t     nbytes;
};

struct gguf_header {
    std::vector<uint8_t>     bytes; // magic ... end of the tensor table
    std::vector<gguf_key>    keys;
    std::vector<gguf_tensor> tensors; // table order
    int64_t                  alignment;
    int64_t                  data_offset; // of the data section
    int64_t                  file_size;

    const gguf_key * find(const char * name) const;
    // typed access, false if the key is of another type or out of range of the result
    bool get_int(const gguf_key & key, uint64_t i, int64_t * out) const;  // any integer or bool type
    bool get_float(const gguf_key & key, uint64_t i, double * out) const; // F32, F64
    bool get_string(const gguf_key & key, uint64_t i, std::string * out) const;
    bool get_strings(const gguf_key & key, std::vector<std::string> * out) const;
};

// where the bytes come from: n bytes at offset into dst, or a status (TRUNCATED, IO)
struct byte_source {
    virtual ~byte_source()                                                      = default;
    virtual int64_t           size() const                                      = 0;
    [[nodiscard]] virtual int read(int64_t offset, void * dst, int64_t n) const = 0;
};

[[nodiscard]] int read_gguf_header(const byte_source & source, gguf_header * header);

} // namespace macko
