// The payload of one sparse tensor: read, checked, and handed to whoever keeps it. It is always checked on a private
// copy, never on the file itself, which may change meanwhile.
#pragma once

#include "load/model-file.h"

namespace macko {

// What a device does with a matrix. MACKO rows are streamed: blocks of whole rows of about 512 KiB are read, validated
// and consumed in parallel. Matrices of other formats are read as a whole and offered to the consumer; one that does
// not take the format gets MACKO rows that the matrix was recoded to (and dequantized).
struct payload_consumer {
    virtual ~payload_consumer() = default;
    virtual void begin() {} // before anything is consumed
    // After everything has been without an error. false: everything is to be consumed once more.
    [[nodiscard]] virtual bool end() { return true; }
    // May be called from several threads at once, and out of order. first_value: non-zeros in earlier rows, if wanted.
    [[nodiscard]] virtual int consume(const macko_view & view, int64_t first_value) = 0;
    // if so, a block waits until all before it are validated
    virtual bool wants_first_value() const { return false; }
    // Blocks begin at multiples of so many rows.
    virtual int64_t rows_of_blocks() const { return 1; }
    virtual bool    takes(const codec & format) const {
        (void)format;
        return false;
    }
    // view is of a format that this takes, and passed all checks
    [[nodiscard]] virtual int consume_matrix(const codec_view & view) {
        (void)view;
        return GGML_MACKO_STATUS_OK;
    }
};

[[nodiscard]] int read_payload(const model_file & file, const sparse_tensor_info & matrix, int n_threads,
                               payload_consumer & consumer);
// the same without the file system (fuzzing, tests); header is that of source
[[nodiscard]] int read_payload(const byte_source & source, const gguf_header & header,
                               const sparse_tensor_info & matrix, int n_threads, payload_consumer & consumer);
// Reads n bytes from offset on with a team of threads: one copies no faster than 6 GB/s, and page faults of fresh
// memory cost as much again.
[[nodiscard]] int read_by_all(const byte_source & source, int64_t offset, uint8_t * dst, int64_t n, int n_team);

} // namespace macko
