// Reads the payload of one sparse tensor in blocks of rows, checks each block, and passes it to a consumer. This file
// also encodes tensors that are compressed on load.
#include "load/payload.h"
#include "codec/first-error.h"
#include "codec/macko/encode.h"
#include "codec/macko/matrix-view.h"
#include "codec/negative-zeros.h"
#include "codec/team.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstring>
#include <mutex>

namespace macko {

// Bytes of payload per block: they fill half of a typical L2 cache, and take a few hundred microseconds to check.
constexpr int64_t BLOCK_NBYTES = 512 << 10;

namespace {

// Memory of at least n bytes, uninitialized, so that the threads that fill it touch new pages first.
uint8_t * at_least(raw_bytes & bytes, size_t n) {
    if (bytes.size() < n) {
        raw_bytes().swap(bytes); // no copy, and no memory beside the larger one
        bytes.resize(n);
    }
    return bytes.data();
}

// A sum over the blocks in their order.
class running_sum {
public:
    void add(int64_t n) {
        const std::lock_guard<std::mutex> lock(mutex_);
        sum_ += n;
    }
    // Adds n for block b and returns the sum of all blocks before it. Waits until those blocks were added; waking up
    // from the wait is slow.
    int64_t add_in_order(int64_t b, int64_t n) {
        std::unique_lock<std::mutex> lock(mutex_);
        turn_.wait(lock, [&] { return next_ == b; });
        const int64_t before = sum_;
        sum_ += n;
        next_++;
        turn_.notify_all();
        return before;
    }
    int64_t sum() const { return sum_; } // of all blocks; only valid after the last one was added

private:
    std::mutex              mutex_;
    std::condition_variable turn_;
    int64_t                 next_ = 0, sum_ = 0;
};

struct payload_reader {
    const byte_source &        source;
    const gguf_header &        header;
    const sparse_tensor_info & m;
    read_memory &              memory;
    std::vector<int32_t>       row_ptr;
    std::vector<int64_t>       blocks;  // first row of each block, and the number of rows at the end
    macko_matrix               recoded; // of another format: its blocks are not read from the file

    const gguf_tensor & component(size_t c) const { return header.tensors[m.first + c]; }
    int64_t             values_offset(int64_t entry) const {
        return component(MACKO_VALUES).offset + entry * value_nbytes(m.desc.type);
    }
    // File offset of the deltas at an entry, which must be a multiple of 8.
    int64_t deltas_offset(int64_t entry) const {
        return component(MACKO_DELTAS).offset + entry * m.desc.delta_bits / 8;
    }

    int read_row_ptr() {
        row_ptr.resize(static_cast<size_t>(m.desc.rows) + 1);
        TRY(source.read(component(MACKO_ROW_PTR).offset, row_ptr.data(), component(MACKO_ROW_PTR).nbytes));
        return check_row_ptr(m.desc, row_ptr.data(), m.n_padded);
    }

    int read_padding() const {
        const int64_t n_stored = row_ptr.back();
        const int64_t base     = n_stored & ~int64_t(7);
        const int64_t n_deltas = component(MACKO_DELTAS).nbytes;
        // These are at most 64 bytes.
        const int64_t      n_values_bytes = (m.n_padded - base) * value_nbytes(m.desc.type);
        const int64_t      n_deltas_bytes = n_deltas - base * m.desc.delta_bits / 8;
        alignas(8) uint8_t values[64];
        uint8_t            deltas[16];
        TRY(source.read(values_offset(base), values, n_values_bytes));
        TRY(source.read(deltas_offset(base), deltas, n_deltas_bytes));
        return check_padding(m.desc, n_stored, values, deltas, base, m.n_padded, n_deltas);
    }

    // Divides the matrix into blocks of whole rows with about BLOCK_NBYTES each. Blocks begin at a multiple of the
    // given number of rows. An empty row counts as well, because a consumer has work for it, too.
    void make_blocks(int64_t multiple) {
        const int64_t bits_per_entry = 8 * value_nbytes(m.desc.type) + m.desc.delta_bits;
        const int64_t row_nbytes     = m.is_encoded_on_load() ? m.desc.cols * value_nbytes(m.desc.type) : 16;
        int64_t       nbytes         = 0;
        blocks.push_back(0);
        for (int64_t r = 0; r < m.desc.rows; r++) {
            const int64_t n =
                (row_ptr[static_cast<size_t>(r) + 1] - row_ptr[static_cast<size_t>(r)]) * bits_per_entry / 8 +
                row_nbytes;
            // A block whose rows are made here does not contain the deltas of its neighbors. Because consumers copy
            // whole bytes, it must not share a byte of deltas with them.
            const bool may_begin =
                r % multiple == 0 &&
                (!m.is_encoded_on_load() || row_ptr[static_cast<size_t>(r)] * int64_t(m.desc.delta_bits) % 8 == 0);
            if (nbytes > 0 && nbytes + n > BLOCK_NBYTES && may_begin) {
                blocks.push_back(r);
                nbytes = 0;
            }
            nbytes += n;
        }
        blocks.push_back(m.desc.rows);
    }

    int read_block(size_t b, raw_bytes & buffer, macko_view * out) const {
        const int64_t row_begin = blocks[b];
        const int64_t row_end   = blocks[b + 1];
        if (!recoded.values.empty()) {
            return validate(
                { m.desc, row_begin, row_end, row_ptr.data(), 0, recoded.values.data(), recoded.deltas.data() }, out);
        }
        const int64_t base = row_ptr[static_cast<size_t>(row_begin)] & ~int64_t(7);
        const int64_t end  = (row_ptr[static_cast<size_t>(row_end)] + int64_t(7)) & ~int64_t(7); // at most n_padded
        // Both are whole bytes, because base and end are multiples of 8.
        const int64_t    n_values = (end - base) * value_nbytes(m.desc.type);
        const int64_t    n_deltas = (end - base) * m.desc.delta_bits / 8;
        const size_t     slack    = 64; // validate and consumers may load whole vectors
        uint8_t *        values   = at_least(buffer, static_cast<size_t>(n_values + n_deltas) + 2 * slack);
        uint8_t *        deltas   = values + n_values + slack;
        const macko_rows rows     = { m.desc, row_begin, row_end, row_ptr.data(), base, values, deltas };
        if (m.is_encoded_on_load()) {
            TRY(encode_block(rows, values, n_values, deltas, n_deltas));
        } else {
            TRY(source.read(values_offset(base), values, n_values));
            TRY(source.read(deltas_offset(base), deltas, n_deltas));
        }
        return validate(rows, out);
    }

    // Reads dense rows and encodes them.
    int encode_block(const macko_rows & rows, uint8_t * values, int64_t n_values, uint8_t * deltas,
                     int64_t n_deltas) const {
        const int64_t        row_nbytes = m.desc.cols * value_nbytes(m.desc.type);
        std::vector<uint8_t> dense(static_cast<size_t>((rows.row_end - rows.row_begin) * row_nbytes));
        TRY(source.read(component(0).offset + rows.row_begin * row_nbytes, dense.data(),
                        static_cast<int64_t>(dense.size())));
        if (m.n_negative_zeros > 0) {
            drop_negative_zeros(dense.data(), m.desc.type, (rows.row_end - rows.row_begin) * m.desc.cols, 1);
        }
        memset(values, 0, static_cast<size_t>(n_values));
        memset(deltas, 0, static_cast<size_t>(n_deltas));
        return encode(dense.data(), rows, values, deltas);
    }

    // Passes the rows of another format to the consumer, in blocks.
    int read_view(const codec_view & from, int n_team, payload_consumer & consumer) {
        TRY(recode(from, n_team, &recoded));
        row_ptr = std::move(recoded.row_ptr);
        make_blocks(consumer.rows_of_blocks());
        return read_blocks(n_team, consumer);
    }

    int read_blocks(int n_max_team, payload_consumer & consumer) {
        const int64_t n_blocks = static_cast<int64_t>(blocks.size()) - 1;
        first_error   error;
        running_sum   nnz;
        const int     n_team = static_cast<int>(std::min<int64_t>(n_max_team, n_blocks));
        memory.blocks.resize(std::max(memory.blocks.size(), static_cast<size_t>(n_team)));
        // Threads process the blocks in order, so running_sum never waits for a block without a thread.
        parallel_parts(n_team, n_blocks, 1, [&](int64_t b, int64_t, int thread) {
            macko_view rows;
            int        status = GGML_MACKO_STATUS_OK;
            const bool run    = b < error.part;
            if (run) {
                raw_bytes & buffer = memory.blocks[static_cast<size_t>(thread)];
                status             = c_boundary([&] { return read_block(static_cast<size_t>(b), buffer, &rows); });
            }
            int64_t first_value = 0;
            if (consumer.wants_first_value()) {
                first_value = nnz.add_in_order(b, rows.nnz());
            } else {
                nnz.add(rows.nnz());
            }
            if (run && status == GGML_MACKO_STATUS_OK) {
                status = c_boundary([&] { return consumer.consume(rows, first_value); });
            }
            if (status != GGML_MACKO_STATUS_OK) {
                error.set(b, status);
            }
        });
        if (error.any()) {
            return fail(error.status, "%s", error.text.c_str());
        }
        const int64_t expected = recoded.values.empty() ? m.desc.nnz : recoded.desc.nnz;
        if (nnz.sum() != expected) {
            return fail(GGML_MACKO_STATUS_BAD_NNZ, "nnz does not match its payload (%" PRId64 " vs %" PRId64 ")",
                        expected, nnz.sum());
        }
        return GGML_MACKO_STATUS_OK;
    }
};

int read_rows(payload_reader & reader, int n_team, payload_consumer & consumer) {
    const sparse_tensor_info & m = reader.m;
    if (m.is_encoded_on_load()) {
        reader.row_ptr = *m.row_ptr;
    } else if (const int status = reader.read_row_ptr()) {
        return status;
    } else if (const int padding = reader.read_padding()) {
        return padding;
    }
    reader.make_blocks(consumer.rows_of_blocks());
    return reader.read_blocks(n_team, consumer);
}

// Reads the whole matrix into memory that changes of the file cannot affect, and checks it. A consumer that does not
// accept the format of the matrix gets MACKO rows.
int read_whole(payload_reader & reader, int n_team, payload_consumer & consumer) {
    const sparse_tensor_info & m      = reader.m;
    ggml_macko_matrix          matrix = m.matrix(&reader.header.tensors[m.first]);
    for (size_t c = 0; c < m.n_tensors; c++) {
        const gguf_tensor & t    = reader.component(c);
        uint8_t * const     data = at_least(reader.memory.arrays[c], static_cast<size_t>(t.nbytes));
        TRY(read_by_all(reader.source, t.offset, data, t.nbytes, n_team));
        matrix.arrays[c].data = data;
    }
    std::unique_ptr<codec_view> view;
    TRY(open_matrix(*m.format, matrix, n_team, &view));
    if (consumer.takes(*m.format)) {
        const int status = view->check_rows(n_team);
        return status ? status : consumer.consume_matrix(*view);
    }
    return reader.read_view(*view, n_team, consumer);
}

} // namespace

int read_by_all(const byte_source & source, int64_t offset, uint8_t * dst, int64_t n, int n_team) {
    constexpr int64_t CHUNK = 256 << 10;
    first_error       error;
    parallel_parts(n_team, n, CHUNK, [&](int64_t at, int64_t end, int) {
        if (at < error.part) {
            if (const int status = source.read(offset + at, dst + at, end - at)) {
                error.set(at, status);
            }
        }
    });
    return error.any() ? fail(error.status, "%s", error.text.c_str()) : static_cast<int>(GGML_MACKO_STATUS_OK);
}

int read_payload(const byte_source & source, const gguf_header & header, const sparse_tensor_info & matrix,
                 int n_threads, payload_consumer & consumer, read_memory * memory) {
    const int status = c_boundary([&]() -> int {
        const int          n_team = threads_for(n_threads, matrix.desc.rows * matrix.desc.cols);
        const kept_threads threads;
        read_memory        own;
        consumer.begin();
        do {
            payload_reader reader = { source, header, matrix, memory ? *memory : own, {}, {}, {} };
            if (const int bad = matrix.format->streams_rows() ? read_rows(reader, n_team, consumer)
                                                              : read_whole(reader, n_team, consumer)) {
                return bad;
            }
        } while (!consumer.end());
        return GGML_MACKO_STATUS_OK;
    });
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(matrix.name.c_str());
    }
    return status;
}

int read_payload(const model_file & file, const sparse_tensor_info & matrix, int n_threads,
                 payload_consumer & consumer) {
    const int status = read_payload(file, file.header, matrix, n_threads, consumer);
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(file.path.c_str());
    }
    return status;
}

} // namespace macko
