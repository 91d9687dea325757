#include "codec/macko/macko.h"
#include "platform/compiler.h"

#include <cstring>

namespace macko {

int check_desc(const macko_desc & desc) {
    if (!is_value_type(desc.type)) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "value type %d is not F32 (0), F16 (1) or BF16 (30)", desc.type);
    }
    if (!is_delta_bits(desc.delta_bits)) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "index_bits %d is not 1, 2, 4 or 8", desc.delta_bits);
    }
    if (desc.rows < 1 || desc.cols < 1) {
        return fail(GGML_MACKO_STATUS_BAD_SHAPE, "matrix of %lld rows and %lld cols", static_cast<long long>(desc.rows),
                    static_cast<long long>(desc.cols));
    }
    if (desc.rows > MAX_DIM || desc.cols > MAX_DIM) {
        return fail(GGML_MACKO_STATUS_LIMIT, "%lld rows x %lld cols (limit %lld each)",
                    static_cast<long long>(desc.rows), static_cast<long long>(desc.cols),
                    static_cast<long long>(MAX_DIM));
    }
    if (desc.rows * desc.cols > MAX_TENSOR_BYTES / value_nbytes(desc.type)) { // both <= 2^24: no overflow
        return fail(GGML_MACKO_STATUS_LIMIT, "%lld dense bytes (limit %lld)",
                    static_cast<long long>(desc.rows * desc.cols * value_nbytes(desc.type)),
                    static_cast<long long>(MAX_TENSOR_BYTES));
    }
    if (desc.nnz < 0 || desc.nnz > desc.rows * desc.cols || desc.nnz > MAX_STORED) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "nnz %lld (limit %lld)", static_cast<long long>(desc.nnz),
                    static_cast<long long>(desc.rows * desc.cols < MAX_STORED ? desc.rows * desc.cols : MAX_STORED));
    }
    return GGML_MACKO_STATUS_OK;
}

int check_row_ptr(const macko_desc & desc, const int32_t * row_ptr, int64_t n_values) {
    if (row_ptr[0] != 0) {
        return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr[0] is %d, not 0", row_ptr[0]);
    }
    int decreasing = 0;
    for (int64_t r = 0; r < desc.rows; r++) {
        decreasing |= row_ptr[r] > row_ptr[r + 1];
    }
    if (decreasing) {
        int64_t r = 0;
        while (row_ptr[r] <= row_ptr[r + 1]) {
            r++;
        }
        return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr decreases at row %lld (%d to %d)",
                    static_cast<long long>(r), row_ptr[r], row_ptr[r + 1]);
    }
    const int64_t n_stored = row_ptr[desc.rows];
    if (n_stored > MAX_STORED) {
        return fail(GGML_MACKO_STATUS_LIMIT, "%lld stored entries (limit %lld)", static_cast<long long>(n_stored),
                    static_cast<long long>(MAX_STORED));
    }
    if (n_padded(n_stored) != n_values) {
        return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr ends at %lld, which needs %lld values, not %lld",
                    static_cast<long long>(n_stored), static_cast<long long>(n_padded(n_stored)),
                    static_cast<long long>(n_values));
    }
    return GGML_MACKO_STATUS_OK;
}

int check_padding(const macko_desc & desc, int64_t n_stored, const void * values, const uint8_t * deltas, int64_t base,
                  int64_t n_values, int64_t n_deltas) {
    const int64_t nbytes = value_nbytes(desc.type);
    const auto *  bytes  = static_cast<const uint8_t *>(values);
    unsigned      used   = 0;
    for (int64_t i = (n_stored - base) * nbytes; i < (n_values - base) * nbytes; i++) {
        used |= bytes[i];
    }
    const int64_t first_bit  = (n_stored - base) * desc.delta_bits;
    const int64_t first_byte = (first_bit + 7) / 8;
    if (first_bit & 7) {
        used |= static_cast<unsigned>(deltas[first_bit >> 3]) >> (first_bit & 7);
    }
    for (int64_t i = first_byte; i < n_deltas - base * desc.delta_bits / 8; i++) {
        used |= deltas[i];
    }
    if (used) {
        return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "padding after the last of %lld entries is not zero",
                    static_cast<long long>(n_stored));
    }
    return GGML_MACKO_STATUS_OK;
}

namespace {

constexpr int64_t CHUNK = 1024; // entries unpacked at a time, on the stack

// The codes in each byte.
template <int bits> struct byte_codes {
    uint8_t codes[256][size_t(8 / bits)] = {};
    constexpr byte_codes() {
        for (int byte = 0; byte < 256; byte++) {
            for (int j = 0; j < 8 / bits; j++) {
                codes[byte][j] = static_cast<uint8_t>((byte >> (j * bits)) & ((1 << bits) - 1));
            }
        }
    }
};
template <int bits> void unpack_bytes(const uint8_t * packed, int64_t n_bytes, uint8_t * codes) {
    static constexpr byte_codes<bits> of;
    for (int64_t i = 0; i < n_bytes; i++) {
        memcpy(codes + i * (8 / bits), of.codes[packed[i]], 8 / bits);
    }
}
// without a table, which is slower for two codes at a time
MACKO_CLONES void unpack_halves(const uint8_t * packed, int64_t n_bytes, uint8_t * codes) {
    for (int64_t i = 0; i < n_bytes; i++) {
        codes[2 * i]     = packed[i] & 15;
        codes[2 * i + 1] = packed[i] >> 4;
    }
}

// Unpacks the codes of entries k ... k+n-1 (n <= CHUNK) to bytes; returns a pointer into buffer, which has CHUNK + 8
// bytes.
const uint8_t * unpack_codes(int bits, const uint8_t * deltas, int64_t k, int64_t n, uint8_t * buffer) {
    if (bits == 8) {
        return deltas + k;
    }
    const int     per_byte = 8 / bits;
    const int64_t first    = k / per_byte;
    const int64_t n_bytes  = (k + n + per_byte - 1) / per_byte - first;
    (bits == 1 ? unpack_bytes<1> : bits == 2 ? unpack_bytes<2> : unpack_halves)(deltas + first, n_bytes, buffer);
    return buffer + (k - first * per_byte);
}

struct row_check {
    int64_t n_zero    = 0; // fillers
    int64_t code_sum  = 0;
    bool    canonical = true;
    bool    finite    = true;
};

// Adds n <= CHUNK entries of a row.
template <typename T>
inline __attribute__((always_inline)) void check_any(const T * v, const uint8_t * codes, int64_t n, T max_code,
                                                     T exponent, row_check * result) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += codes[i];
    }
    T zeros = 0, wrong = 0, special = 0; // n <= CHUNK: counts fit 16 bits
    for (int64_t i = 0; i < n; i++) {
        const T zero = v[i] == 0;
        zeros        = static_cast<T>(zeros + zero);
        wrong        = static_cast<T>(wrong | (zero & static_cast<T>(static_cast<T>(codes[i]) != max_code)));
        special      = static_cast<T>(special | static_cast<T>((v[i] & exponent) == exponent));
    }
    result->code_sum += sum;
    result->n_zero += zeros;
    result->canonical &= !wrong;
    result->finite &= !special;
}
MACKO_CLONES void check_entries(const uint16_t * v, const uint8_t * codes, int64_t n, uint16_t max_code,
                                uint16_t exponent, row_check * result) {
    check_any(v, codes, n, max_code, exponent, result);
}
MACKO_CLONES void check_entries(const uint32_t * v, const uint8_t * codes, int64_t n, uint32_t max_code,
                                uint32_t exponent, row_check * result) {
    check_any(v, codes, n, max_code, exponent, result);
}

// The first bad row, or -1; *n_zero = fillers of all rows. T = uint16_t or uint32_t.
template <typename T> int64_t check_rows(const macko_rows & m, int64_t * n_zero) {
    const T * values   = static_cast<const T *>(m.values);
    const T   exponent = exponent_mask<T>(m.desc.type);
    const T   max_code = static_cast<T>((1 << m.desc.delta_bits) - 1);
    uint8_t   buffer[CHUNK + 8];
    *n_zero = 0;
    for (int64_t r = m.row_begin; r < m.row_end; r++) {
        const int64_t begin = m.row_ptr[r] - m.base;
        const int64_t end   = m.row_ptr[r + 1] - m.base;
        if (begin == end) {
            continue;
        }
        row_check c;
        for (int64_t k = begin; k < end; k += CHUNK) {
            const int64_t   n     = end - k < CHUNK ? end - k : CHUNK;
            const uint8_t * codes = unpack_codes(m.desc.delta_bits, m.deltas, k, n, buffer);
            check_entries(values + k, codes, n, max_code, exponent, &c);
        }
        *n_zero += c.n_zero;
        // columns increase strictly, so checking the last one suffices: sum(code + 1) - 1 < cols
        if (!c.canonical || !c.finite || c.code_sum + (end - begin) > m.desc.cols || values[end - 1] == 0) {
            return r;
        }
    }
    return -1;
}

int64_t check_rows(const macko_rows & m, int64_t * n_zero) {
    return m.desc.type == GGML_MACKO_TYPE_F32 ? check_rows<uint32_t>(m, n_zero) : check_rows<uint16_t>(m, n_zero);
}

// Writes the error message for a row that check_rows found.
template <typename T> int explain_row(const macko_rows & m, int64_t row) {
    const T *       values   = static_cast<const T *>(m.values);
    const T         exponent = exponent_mask<T>(m.desc.type);
    const auto      max_code = (1u << m.desc.delta_bits) - 1;
    const long long r        = row;
    int64_t         col      = -1;
    for (int64_t k = m.row_ptr[row]; k < m.row_ptr[row + 1]; k++) {
        const uint32_t code  = delta_code(m.deltas, k - m.base, m.desc.delta_bits);
        const T        value = values[k - m.base];
        col += code + 1;
        if (col >= m.desc.cols) {
            return fail(GGML_MACKO_STATUS_BAD_COLUMN, "row %lld: column %lld of %lld", r, static_cast<long long>(col),
                        static_cast<long long>(m.desc.cols));
        }
        if (value == 0 && code != max_code) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "row %lld: filler at column %lld with code %u (must be %u)", r,
                        static_cast<long long>(col), code, max_code);
        }
        if (value == 0 && k + 1 == m.row_ptr[row + 1]) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "row %lld: ends with a filler", r);
        }
        if ((value & exponent) == exponent) {
            return fail(GGML_MACKO_STATUS_NOT_FINITE, "row %lld, column %lld: value is Inf or NaN (bits 0x%x)", r,
                        static_cast<long long>(col), static_cast<unsigned>(value));
        }
    }
    return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "row %lld", r);
}

template <typename T> void decode_rows(const macko_rows & m, T * dense) {
    const T * values = static_cast<const T *>(m.values);
    memset(dense, 0, static_cast<size_t>((m.row_end - m.row_begin) * m.desc.cols) * sizeof(T));
    uint8_t buffer[CHUNK + 8];
    for (int64_t r = m.row_begin; r < m.row_end; r++) {
        T *           row = dense + (r - m.row_begin) * m.desc.cols;
        int64_t       col = -1;
        const int64_t end = m.row_ptr[r + 1] - m.base;
        for (int64_t k = m.row_ptr[r] - m.base; k < end; k += CHUNK) {
            const int64_t   n     = end - k < CHUNK ? end - k : CHUNK;
            const uint8_t * codes = unpack_codes(m.desc.delta_bits, m.deltas, k, n, buffer);
            for (int64_t i = 0; i < n; i++) {
                col += codes[i] + 1;
                row[col] = values[k + i];
            }
        }
    }
}

} // namespace

int validate(const macko_rows & rows, macko_view * view) {
    int64_t       n_zero = 0;
    const int64_t bad    = check_rows(rows, &n_zero);
    if (bad >= 0) {
        return rows.desc.type == GGML_MACKO_TYPE_F32 ? explain_row<uint32_t>(rows, bad)
                                                     : explain_row<uint16_t>(rows, bad);
    }
    view->rows_ = rows;
    view->nnz_  = rows.row_ptr[rows.row_end] - rows.row_ptr[rows.row_begin] - n_zero;
    return GGML_MACKO_STATUS_OK;
}

void decode(const macko_view & view, void * dense) {
    if (view.rows().desc.type == GGML_MACKO_TYPE_F32) {
        decode_rows(view.rows(), static_cast<uint32_t *>(dense));
    } else {
        decode_rows(view.rows(), static_cast<uint16_t *>(dense));
    }
}

} // namespace macko
