// Encodes MACKO (FORMAT.md section 3) in two passes: counts the entries, which determine the sizes, then writes them.
#include "codec/macko/encode.h"
#include "codec/code-writer.h"
#include "codec/nonzero.h"
#include "codec/team.h"

#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <vector>

namespace macko {

namespace {

template <typename T> void count_row(const T * row, int64_t cols, T exponent, ggml_macko_count * count) {
    int64_t nnz = 0, next = 0, fill1 = 0, fill2 = 0, fill4 = 0, fill8 = 0;
    for_each_column(row, cols, [&](int64_t col) {
        const int64_t gap = col - next;
        nnz++;
        fill1 += gap >> 1;
        fill2 += gap >> 2;
        fill4 += gap >> 4;
        fill8 += gap >> 8;
        next = col + 1;
    });
    int64_t special = 0;
    for (int64_t c = 0; c < cols; c++) {
        special += (row[c] & exponent) == exponent;
    }
    count->nnz += nnz;
    count->n_stored[0] += nnz + fill1;
    count->n_stored[1] += nnz + fill2;
    count->n_stored[2] += nnz + fill4;
    count->n_stored[3] += nnz + fill8;
    count->n_nonfinite += special;
}

template <typename T>
void count_rows(const T * dense, int64_t rows, int64_t cols, T exponent, int n_threads, ggml_macko_count * count,
                row_count * each_row) {
    ggml_macko_count sum = {};
    std::mutex       sum_mutex;
    parallel_ranges(n_threads, rows, [&](int64_t begin, int64_t end) {
        ggml_macko_count of_range = {};
        for (int64_t r = begin; r < end; r++) {
            ggml_macko_count c = {};
            count_row(dense + r * cols, cols, exponent, &c);
            for (int i = 0; each_row && i < 4; i++) {
                each_row[r].n_stored[i] = static_cast<int32_t>(c.n_stored[i]); // at most cols
            }
            add(of_range, c);
        }
        const std::lock_guard<std::mutex> lock(sum_mutex);
        add(sum, of_range);
    });
    *count = sum;
}

// Counts the entries of a row and its non-zeros.
template <typename T> int64_t count_entries(const T * row, int64_t cols, int bits, int64_t * nnz) {
    int64_t next = 0, n = 0, n_values = 0;
    for_each_column(row, cols, [&](int64_t col) {
        n += 1 + ((col - next) >> bits);
        n_values++;
        next = col + 1;
    });
    *nnz = n_values;
    return n;
}

template <typename T> T * write_entries(const T * row, int64_t cols, int bits, code_writer & codes, T * v) {
    const uint32_t max_code = (1u << bits) - 1;
    int64_t        next     = 0;
    for_each_column(row, cols, [&](int64_t col) {
        int64_t gap = col - next;
        for (; gap > max_code; gap -= max_code + 1) {
            codes.put(max_code, bits);
            *v++ = 0;
        }
        codes.put(static_cast<uint32_t>(gap), bits);
        *v++ = row[col];
        next = col + 1;
    });
    return v;
}

// Writes values and deltas of a matrix with a known row_ptr. Threads process contiguous ranges of rows, which may share
// their first and last byte of deltas.
template <typename T>
void write_rows(const T * dense, const macko_desc & desc, const int32_t * row_ptr, int n_threads, T * values,
                uint8_t * deltas) {
    const int     bits     = desc.delta_bits;
    const int64_t n_stored = row_ptr[desc.rows], padded = n_padded(n_stored);
    memset(deltas, 0, static_cast<size_t>(deltas_nbytes(padded, bits)));
    memset(values + n_stored, 0, static_cast<size_t>(padded - n_stored) * sizeof(T));
    parallel_ranges(n_threads, desc.rows, [&](int64_t begin, int64_t end) {
        code_writer codes(deltas, static_cast<int64_t>(row_ptr[begin]) * bits);
        T *         v = values + row_ptr[begin];
        for (int64_t r = begin; r < end; r++) {
            v = write_entries(dense + r * desc.cols, desc.cols, bits, codes, v);
        }
        codes.finish();
    });
}

constexpr int64_t SLACK = 64; // bytes after values and deltas: validate and consumers may load whole vectors

// Allocates zeros. All threads touch the pages first, which takes longer than clearing them.
void allocate_zeros(raw_bytes * bytes, int64_t n, int n_threads) {
    *bytes = raw_bytes(static_cast<size_t>(n));
    parallel_parts(n_threads, n, 1 << 20, [&](int64_t begin, int64_t end, int) {
        memset(bytes->data() + begin, 0, static_cast<size_t>(end - begin));
    });
}

// Computes row_ptr from the entries of each row, and allocates memory for them.
template <typename N> int allocate(const macko_desc & desc, N && entries_of_row, int n_threads, macko_matrix * m) {
    m->desc = desc;
    m->row_ptr.assign(static_cast<size_t>(desc.rows) + 1, 0);
    for (size_t r = 0; r < static_cast<size_t>(desc.rows); r++) {
        m->row_ptr[r + 1] = static_cast<int32_t>(entries_of_row(r)); // at most cols
    }
    TRY(sum_row_ptr(&m->row_ptr));
    const int64_t n_stored = m->row_ptr.back();
    allocate_zeros(&m->values, n_padded(n_stored) * value_nbytes(desc.type) + SLACK, n_threads);
    allocate_zeros(&m->deltas, deltas_nbytes(n_padded(n_stored), desc.delta_bits) + SLACK, n_threads);
    return GGML_MACKO_STATUS_OK;
}

// Two passes over the rows: count, then write.
template <typename T> int recode_rows(const codec_view & view, macko_desc desc, int n_threads, macko_matrix * m) {
    const int            bits = desc.delta_bits;
    std::vector<int64_t> n_row(static_cast<size_t>(desc.rows));
    std::atomic<int64_t> nnz_total{ 0 };
    if (const int status = view.for_each_row(n_threads, [&](int64_t r, const void * row) {
            int64_t nnz                   = 0;
            n_row[static_cast<size_t>(r)] = count_entries(static_cast<const T *>(row), desc.cols, bits, &nnz);
            nnz_total += nnz;
        })) {
        return status;
    }
    desc.nnz = nnz_total;
    TRY(allocate(desc, [&](size_t r) { return n_row[r]; }, n_threads, m));
    return view.for_each_row(n_threads, [&](int64_t r, const void * row) {
        const int64_t first = m->row_ptr[static_cast<size_t>(r)];
        code_writer   codes(m->deltas.data(), first * bits);
        write_entries(static_cast<const T *>(row), desc.cols, bits, codes,
                      reinterpret_cast<T *>(m->values.data()) + first);
        codes.finish();
    });
}

} // namespace

int sum_row_ptr(std::vector<int32_t> * row_ptr) {
    int64_t n_stored = 0; // at most 2^24 rows of 2^24 entries: no overflow
    for (int32_t & n : *row_ptr) {
        n_stored += n;
        if (n_stored > MAX_STORED) {
            return fail(GGML_MACKO_STATUS_LIMIT, "more than %lld entries (limit)", static_cast<long long>(MAX_STORED));
        }
        n = static_cast<int32_t>(n_stored);
    }
    return GGML_MACKO_STATUS_OK;
}

int count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads, ggml_macko_count * count,
                row_count * each_row) {
    if (type == GGML_MACKO_TYPE_F32) {
        count_rows(static_cast<const uint32_t *>(dense), rows, cols, exponent_mask<uint32_t>(type), n_threads, count,
                   each_row);
    } else {
        count_rows(static_cast<const uint16_t *>(dense), rows, cols, exponent_mask<uint16_t>(type), n_threads, count,
                   each_row);
    }
    return GGML_MACKO_STATUS_OK;
}

int count_finite(const void * dense, const macko_desc & shape, int n_threads, ggml_macko_count * count,
                 row_count * each_row) {
    TRY(count_dense(dense, shape.type, shape.rows, shape.cols, n_threads, count, each_row));
    return count->n_nonfinite == 0 ? static_cast<int>(GGML_MACKO_STATUS_OK)
                                   : fail(GGML_MACKO_STATUS_NOT_FINITE, "%lld values are Inf or NaN",
                                          static_cast<long long>(count->n_nonfinite));
}

int encode(const void * dense, const macko_desc & desc, const std::vector<row_count> & rows, int n_threads,
           macko_matrix * m) {
    const int width = __builtin_ctz(static_cast<unsigned>(desc.delta_bits));
    TRY(allocate(desc, [&](size_t r) { return rows[r].n_stored[width]; }, n_threads, m));
    if (desc.type == GGML_MACKO_TYPE_F32) {
        write_rows(static_cast<const uint32_t *>(dense), desc, m->row_ptr.data(), n_threads,
                   reinterpret_cast<uint32_t *>(m->values.data()), m->deltas.data());
    } else {
        write_rows(static_cast<const uint16_t *>(dense), desc, m->row_ptr.data(), n_threads,
                   reinterpret_cast<uint16_t *>(m->values.data()), m->deltas.data());
    }
    return GGML_MACKO_STATUS_OK;
}

template <typename T> static int encode_range(const T * dense, const macko_rows & rows, T * values, uint8_t * deltas) {
    const macko_desc & desc = rows.desc;
    code_writer        codes(deltas, (rows.row_ptr[rows.row_begin] - rows.base) * desc.delta_bits);
    T *                v = values + (rows.row_ptr[rows.row_begin] - rows.base);
    for (int64_t r = rows.row_begin; r < rows.row_end; r++, dense += desc.cols) {
        int64_t nnz = 0;
        if (count_entries(dense, desc.cols, desc.delta_bits, &nnz) != rows.row_ptr[r + 1] - rows.row_ptr[r]) {
            return fail(GGML_MACKO_STATUS_FILE_CHANGED, "row %lld has changed since it was counted",
                        static_cast<long long>(r));
        }
        v = write_entries(dense, desc.cols, desc.delta_bits, codes, v);
    }
    codes.finish();
    return GGML_MACKO_STATUS_OK;
}

int encode(const void * dense, const macko_rows & rows, void * values, uint8_t * deltas) {
    return rows.desc.type == GGML_MACKO_TYPE_F32
               ? encode_range(static_cast<const uint32_t *>(dense), rows, static_cast<uint32_t *>(values), deltas)
               : encode_range(static_cast<const uint16_t *>(dense), rows, static_cast<uint16_t *>(values), deltas);
}

int recode(const codec_view & view, int n_threads, macko_matrix * m) {
    return recode(view, view.desc().delta_bits, n_threads, m);
}

int recode(const codec_view & view, int32_t delta_bits, int n_threads, macko_matrix * m) {
    macko_desc desc = view.desc();
    desc.delta_bits = delta_bits;
    return desc.type == GGML_MACKO_TYPE_F32 ? recode_rows<uint32_t>(view, desc, n_threads, m)
                                            : recode_rows<uint16_t>(view, desc, n_threads, m);
}

int count_rows(const codec_view & view, int n_threads, ggml_macko_count * count) {
    const macko_desc &            desc = view.desc();
    std::vector<ggml_macko_count> rows(static_cast<size_t>(desc.rows));
    const int                     status = view.for_each_row(n_threads, [&](int64_t r, const void * row) {
        ggml_macko_count & c = rows[static_cast<size_t>(r)];
        if (desc.type == GGML_MACKO_TYPE_F32) {
            count_row(static_cast<const uint32_t *>(row), desc.cols, exponent_mask<uint32_t>(desc.type), &c);
        } else {
            count_row(static_cast<const uint16_t *>(row), desc.cols, exponent_mask<uint16_t>(desc.type), &c);
        }
    });
    *count                               = {};
    for (const ggml_macko_count & c : rows) {
        add(*count, c);
    }
    return status;
}

} // namespace macko
