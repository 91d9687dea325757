// Reads and checks the payload of one sparse tensor, and passes it to a consumer. The check always runs on a private
// copy, never on the file itself, which may change at any time.
#pragma once

#include "codec/macko/encode.h"
#include "load/model-file.h"

namespace macko {

// Receives a matrix for a device. MACKO rows are streamed: blocks of whole rows of about 512 KiB are read, validated
// and consumed in parallel. Matrices of other formats are read as a whole and offered to the consumer. If the consumer
// does not accept the format, it gets the matrix as MACKO rows (dequantized).
struct payload_consumer {
    virtual ~payload_consumer() = default;
    virtual void begin() {} // called before the first block
    // Called after all blocks were consumed without an error. false: consume all blocks once more.
    [[nodiscard]] virtual bool end() { return true; }
    // May be called from several threads at once, and out of order. first_value: non-zeros in earlier rows, if
    // requested.
    [[nodiscard]] virtual int consume(const macko_view & view, int64_t first_value) = 0;
    // true: a block waits until all blocks before it are validated
    virtual bool wants_first_value() const { return false; }
    // Blocks begin at multiples of this many rows.
    virtual int64_t rows_of_blocks() const { return 1; }
    virtual bool    takes(const codec & format) const {
        (void)format;
        return false;
    }
    // view is in an accepted format and passed all checks
    [[nodiscard]] virtual int consume_matrix(const codec_view & view) {
        (void)view;
        return GGML_MACKO_STATUS_OK;
    }
};

// Memory that reading a matrix needs, for a load to keep: mapping and clearing new pages takes longer than reading.
struct read_memory {
    raw_bytes              arrays[GGML_MACKO_MAX_ARRAYS];
    std::vector<raw_bytes> blocks; // of each thread
};

[[nodiscard]] int read_payload(const model_file & file, const sparse_tensor_info & matrix, int n_threads,
                               payload_consumer & consumer);
// The same without the file system (for fuzzing and tests); header is the header of source.
[[nodiscard]] int read_payload(const byte_source & source, const gguf_header & header,
                               const sparse_tensor_info & matrix, int n_threads, payload_consumer & consumer,
                               read_memory * memory = nullptr);
// Reads n bytes at offset with a team of threads. One thread copies at most 6 GB/s, and page faults of new memory cost
// as much again.
[[nodiscard]] int read_by_all(const byte_source & source, int64_t offset, uint8_t * dst, int64_t n, int n_team);

} // namespace macko
