// Packed arrays: check, decode, pack (FORMAT.md section 7).
#include "codec/packed/packed.h"
#include "codec/code-writer.h"
#include "codec/first-bad.h"
#include "codec/macko/encode.h"
#include "codec/nonzero.h"
#include "codec/team.h"

#include <algorithm>

namespace macko {

// ---- structure ----

int check_packed_desc(const packed_desc & desc) {
    TRY(check_desc(desc.dense));
    if (desc.value_type != desc.dense.type && desc.value_type != GGML_MACKO_TYPE_CODED) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "value type %d is neither the dense type %d nor coded (1005)",
                    desc.value_type, desc.dense.type);
    }
    if (!is_index_bits(desc.index_bits)) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "index_bits %d of packed is not 0, 2, 4 or 8", desc.index_bits);
    }
    return GGML_MACKO_STATUS_OK;
}

int64_t max_index_nbytes(const packed_desc & desc) {
    const macko_desc & d = desc.dense;
    if (desc.index_bits == INDEX_BITMAP) {
        return index_nbytes_of_bits(d.rows * bitmap_row_nbytes(d.cols) * 8);
    }
    // <= 2^34 codes
    return index_nbytes_of_bits((d.nnz + d.rows * d.cols / ((1 << desc.index_bits) - 1)) * desc.index_bits);
}

static int check_lengths(const packed_arrays & a) {
    const auto length = [](const char * name, int64_t n, int64_t expected) {
        return n == expected ? static_cast<int>(GGML_MACKO_STATUS_OK)
                             : fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong length (%lld vs %lld)", name,
                                    static_cast<long long>(n), static_cast<long long>(expected));
    };
    if (a.desc.value_type != GGML_MACKO_TYPE_CODED) { // the length of coded values follows from their data
        TRY(length("values", a.n_values, packed_n_values(a.desc.dense.nnz)));
    }
    TRY(length("row_ptr", a.n_row_ptr, a.desc.dense.rows + 1));
    const int64_t most = max_index_nbytes(a.desc);
    return a.desc.index_bits == INDEX_BITMAP || a.n_index % 4 || a.n_index > most
               ? length("index", a.n_index, most)
               : static_cast<int>(GGML_MACKO_STATUS_OK);
}

static int check_row_ptr(const packed_arrays & a) {
    const macko_desc & desc = a.desc.dense;
    if (a.row_ptr[0] != 0 || a.row_ptr[desc.rows] != desc.nnz) {
        return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr runs from %d to %d, not from 0 to nnz %lld", a.row_ptr[0],
                    a.row_ptr[desc.rows], static_cast<long long>(desc.nnz));
    }
    for (int64_t r = 0; r < desc.rows; r++) {
        if (a.row_ptr[r] > a.row_ptr[r + 1]) {
            return fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row_ptr decreases at row %lld (%d to %d)",
                        static_cast<long long>(r), a.row_ptr[r], a.row_ptr[r + 1]);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_rest_of_index(const packed_arrays & a, int64_t n_bits) {
    unsigned used = n_bits & 7 ? static_cast<unsigned>(a.index[n_bits / 8]) >> (n_bits & 7) : 0;
    for (int64_t i = (n_bits + 7) / 8; i < a.n_index; i++) {
        used |= a.index[i];
    }
    return used ? fail(GGML_MACKO_STATUS_NOT_CANONICAL, "the index is not zero after the last row")
                : static_cast<int>(GGML_MACKO_STATUS_OK);
}

static int check_bitmap(const packed_arrays & a, int n_threads) {
    const macko_desc & desc      = a.desc.dense;
    const int64_t      nbytes    = bitmap_row_nbytes(desc.cols);
    const auto         columns   = [&](int64_t r) { return set_bits(a.index + r * nbytes, nbytes); };
    const auto         past_cols = [&](int64_t r) { return has_bit_past_cols(a.index + r * nbytes, desc.cols); };
    const int64_t      r         = first_bad(desc.rows, n_threads, [&](int64_t row) {
        return past_cols(row) || columns(row) != a.row_ptr[row + 1] - a.row_ptr[row];
    });
    if (r < desc.rows) {
        return past_cols(r) ? fail(GGML_MACKO_STATUS_BAD_COLUMN, "row %lld: a bit past column %lld",
                                   static_cast<long long>(r), static_cast<long long>(desc.cols - 1))
                            : fail(GGML_MACKO_STATUS_BAD_ROW_PTR, "row %lld: %lld bits, but %d values",
                                   static_cast<long long>(r), static_cast<long long>(columns(r)),
                                   a.row_ptr[r + 1] - a.row_ptr[r]);
    }
    return check_rest_of_index(a, desc.rows * nbytes * 8);
}

// Sums of the codes in each possible byte of an index.
class byte_table {
public:
    template <typename F> byte_table(int32_t bits, F && of_code) {
        for (unsigned byte = 0; byte < 256; byte++) {
            unsigned sum = 0;
            for (int32_t bit = 0; bit < 8; bit += bits) {
                sum += of_code((byte >> bit) & ((1u << bits) - 1));
            }
            sums_[byte] = static_cast<uint16_t>(sum);
        }
    }
    int64_t operator[](uint8_t byte) const { return sums_[byte]; }

private:
    uint16_t sums_[256];
};

// Finds where the codes of each row begin: after the row_ptr[r]-th code that stores a value. The first pass counts
// these codes in chunks of the index, and so gives the rows that begin in each. Rows that begin after the end of the
// index get its end. Returns the number of codes that store a value.
static int64_t find_rows(const packed_arrays & a, int n_threads, std::vector<int64_t> * row_codes) {
    constexpr int64_t    CHUNK  = 1 << 14; // bytes
    const int32_t        b      = a.desc.index_bits;
    const uint32_t       escape = (1u << b) - 1;
    const int64_t        rows = a.desc.dense.rows, per_byte = 8 / b, n_chunks = (a.n_index + CHUNK - 1) / CHUNK;
    const byte_table     stored_in(b, [escape](uint32_t code) { return code != escape; });
    std::vector<int64_t> before(static_cast<size_t>(n_chunks) + 1, 0);
    parallel_parts(n_threads, a.n_index, CHUNK, [&](int64_t begin, int64_t end, int) {
        int64_t n = 0;
        for (int64_t i = begin; i < end; i++) {
            n += stored_in[a.index[i]];
        }
        before[static_cast<size_t>(begin / CHUNK) + 1] = n;
    });
    for (size_t p = 1; p < before.size(); p++) {
        before[p] += before[p - 1];
    }
    row_codes->assign(static_cast<size_t>(rows), a.n_index * per_byte);
    parallel_parts(n_threads, a.n_index, CHUNK, [&](int64_t begin, int64_t end, int) {
        int64_t n = before[static_cast<size_t>(begin / CHUNK)];
        // rows that begin after the codes n + 1 ... of this chunk
        auto row =
            std::upper_bound(a.row_ptr, a.row_ptr + rows, n, [](int64_t value, int32_t ptr) { return value < ptr; }) -
            a.row_ptr;
        for (int64_t i = begin; i < end && row < rows; i++) {
            const int64_t in_byte = stored_in[a.index[i]];
            if (n + in_byte < a.row_ptr[row]) {
                n += in_byte;
                continue;
            }
            for (int64_t code = i * per_byte; code < (i + 1) * per_byte; code++) {
                n += delta_code(a.index, code, b) != escape;
                for (; row < rows && a.row_ptr[row] == n && delta_code(a.index, code, b) != escape; row++) {
                    (*row_codes)[static_cast<size_t>(row)] = code + 1;
                }
            }
        }
    });
    for (int64_t r = 0; r < rows && a.row_ptr[r] == 0; r++) {
        (*row_codes)[static_cast<size_t>(r)] = 0;
    }
    return before.back();
}

static int check_gaps(const packed_arrays & a, int n_threads, std::vector<int64_t> * row_bits) {
    const macko_desc & desc    = a.desc.dense;
    const int32_t      b       = a.desc.index_bits;
    const uint32_t     escape  = (1u << b) - 1;
    const int64_t      n_codes = a.n_index * 8 / b;
    const auto         step    = [escape](uint32_t code) { return code == escape ? code : code + 1; };
    struct walk {
        int64_t col, end;
        bool    complete;
    };
    const auto walk_row = [&](int64_t r) {
        walk w = { -1, (*row_bits)[static_cast<size_t>(r)], true };
        for (int32_t k = a.row_ptr[r]; k < a.row_ptr[r + 1] && w.col < desc.cols;) {
            if (w.end == n_codes) {
                w.complete = false;
                break;
            }
            const uint32_t c = delta_code(a.index, w.end++, b);
            w.col += step(c);
            k += c != escape;
        }
        return w;
    };
    const byte_table steps_in(b, step);
    const auto       sum_of_steps = [&](int64_t code, int64_t end) {
        const int64_t per_byte = 8 / b;
        int64_t       sum      = 0;
        for (; code < end && code % per_byte != 0; code++) {
            sum += step(delta_code(a.index, code, b));
        }
        for (; code + per_byte <= end; code += per_byte) {
            sum += steps_in[a.index[code / per_byte]];
        }
        for (; code < end; code++) {
            sum += step(delta_code(a.index, code, b));
        }
        return sum;
    };
    const bool complete = find_rows(a, n_threads, row_bits) >= a.row_ptr[desc.rows];
    int64_t    last     = desc.rows - 1; // the last row with codes
    while (last > 0 && a.row_ptr[last] == a.row_ptr[last + 1]) {
        last--;
    }
    // each code advances the column, so the last column of a row is the sum of all its codes
    const int64_t r = first_bad(desc.rows, n_threads, [&](int64_t row) {
        if (complete && row < last) {
            const int64_t * codes = row_bits->data() + row;
            return sum_of_steps(codes[0], codes[1]) > desc.cols;
        }
        const walk w = walk_row(row);
        return !w.complete || w.col >= desc.cols;
    });
    if (r < desc.rows) {
        const walk w = walk_row(r);
        return w.complete
                   ? fail(GGML_MACKO_STATUS_BAD_COLUMN, "row %lld: column %lld of %lld", static_cast<long long>(r),
                          static_cast<long long>(w.col), static_cast<long long>(desc.cols))
                   : fail(GGML_MACKO_STATUS_BAD_COMPONENT, "row %lld: the index ends after %lld codes",
                          static_cast<long long>(r), static_cast<long long>(n_codes));
    }
    const int64_t n_bits = walk_row(last).end * b;
    if (a.n_index != index_nbytes_of_bits(n_bits)) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "index has the wrong length (%lld vs %lld)",
                    static_cast<long long>(a.n_index), static_cast<long long>(index_nbytes_of_bits(n_bits)));
    }
    for (int64_t & code : *row_bits) {
        code *= b;
    }
    return check_rest_of_index(a, n_bits);
}

template <typename T> static int check_plain_values(const packed_arrays & a, int n_threads) {
    const T *     values   = static_cast<const T *>(a.values);
    const T       exponent = exponent_mask<T>(a.desc.dense.type);
    const int64_t nnz      = a.desc.dense.nnz;
    const int64_t k        = first_bad(a.n_values, n_threads, [&](int64_t i) {
        return i < nnz ? values[i] == 0 || (values[i] & exponent) == exponent : values[i] != 0;
    });
    if (k == a.n_values) {
        return GGML_MACKO_STATUS_OK;
    }
    if (k < nnz && values[k] != 0) {
        return fail(GGML_MACKO_STATUS_NOT_FINITE, "value %lld is Inf or NaN (bits 0x%x)", static_cast<long long>(k),
                    static_cast<unsigned>(values[k]));
    }
    return fail(GGML_MACKO_STATUS_NOT_CANONICAL,
                k < nnz ? "value %lld is zero" : "value %lld, after the last non-zero, is not zero",
                static_cast<long long>(k));
}

static int check_values(const packed_arrays & a, int n_threads, coded_view * coded) {
    const macko_desc & dense = a.desc.dense;
    return a.desc.value_type == GGML_MACKO_TYPE_CODED ? open_coded(static_cast<const uint32_t *>(a.values), a.n_values,
                                                                   dense.type, dense.nnz, n_threads, coded)
           : dense.type == GGML_MACKO_TYPE_F32        ? check_plain_values<uint32_t>(a, n_threads)
                                                      : check_plain_values<uint16_t>(a, n_threads);
}

int check_packed(const packed_arrays & a, int n_threads, packed_view * view) {
    TRY(check_packed_desc(a.desc));
    TRY(check_lengths(a));
    TRY(check_row_ptr(a));
    std::vector<int64_t> row_bits;
    TRY(a.desc.index_bits == INDEX_BITMAP ? check_bitmap(a, n_threads) : check_gaps(a, n_threads, &row_bits));
    TRY(check_values(a, n_threads, &view->coded_));
    view->arrays_   = a;
    view->row_bits_ = std::move(row_bits);
    return GGML_MACKO_STATUS_OK;
}

// ---- decode ----

template <typename T> static void decode_row_type(const packed_view & view, int64_t row, T * dense) {
    const packed_arrays & a = view.arrays();
    int64_t               k = a.row_ptr[row];
    memset(dense, 0, static_cast<size_t>(a.desc.dense.cols) * sizeof(T));
    if (a.desc.value_type == GGML_MACKO_TYPE_CODED) {
        std::vector<T> values(static_cast<size_t>(a.row_ptr[row + 1] - k));
        view.copy_values(k, static_cast<int64_t>(values.size()), values.data());
        const T * next = values.data();
        view.for_each_column(row, [&](int64_t col) { dense[col] = *next++; });
    } else {
        const T * values = static_cast<const T *>(a.values);
        view.for_each_column(row, [&](int64_t col) { dense[col] = values[k++]; });
    }
}

void packed_view::copy_values(int64_t k, int64_t n, void * out) const {
    if (arrays_.desc.value_type == GGML_MACKO_TYPE_CODED) {
        coded_.expand(k, n, out);
    } else if (n > 0) {
        const int64_t nbytes = value_nbytes(arrays_.desc.dense.type);
        memcpy(out, static_cast<const uint8_t *>(arrays_.values) + k * nbytes, static_cast<size_t>(n * nbytes));
    }
}

void packed_view::decode_row(int64_t row, void * dense) const {
    if (arrays_.desc.dense.type == GGML_MACKO_TYPE_F32) {
        decode_row_type(*this, row, static_cast<uint32_t *>(dense));
    } else {
        decode_row_type(*this, row, static_cast<uint16_t *>(dense));
    }
}

int packed_view::for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const {
    for_each_decoded_row(desc(), n_threads, [&](int64_t row, void * dense) { decode_row(row, dense); }, f);
    return GGML_MACKO_STATUS_OK;
}

int packed_view::decode(void * dense, int n_threads) const {
    const int64_t nbytes = desc().cols * value_nbytes(desc().type);
    parallel_parts(n_threads, desc().rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; r++) {
            decode_row(r, static_cast<uint8_t *>(dense) + r * nbytes);
        }
    });
    return GGML_MACKO_STATUS_OK;
}

// ---- MACKO rows ----

const uint8_t * packed_view::bitmap(int n_threads, std::vector<uint8_t> * memory) const {
    if (arrays_.desc.index_bits == INDEX_BITMAP) {
        return arrays_.index;
    }
    const int64_t nbytes = bitmap_row_nbytes(desc().cols);
    memory->assign(static_cast<size_t>(desc().rows * nbytes), 0);
    parallel_ranges(n_threads, desc().rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            uint8_t * bits = memory->data() + r * nbytes;
            for_each_column(r,
                            [&](int64_t col) { bits[col / 8] = static_cast<uint8_t>(bits[col / 8] | 1 << (col & 7)); });
        }
    });
    return memory->data();
}

// Fillers between the non-zeros of a row of a bitmap.
static int64_t count_fillers(const uint8_t * bytes, int64_t nbytes) {
    int64_t n = 0, next = 0; // next: the column after the last non-zero
    for (int64_t i = 0; i < nbytes; i++) {
        if (const unsigned byte = bytes[i]) {
            n += (8 * i + __builtin_ctz(byte) - next) >> RECODED_BITS;
            next = 8 * i + 32 - __builtin_clz(byte);
        }
    }
    return n;
}

int packed_view::count_entries(const uint8_t * bitmap, int n_threads, std::vector<int32_t> * row_ptr) const {
    const int64_t nbytes = bitmap_row_nbytes(desc().cols);
    row_ptr->assign(static_cast<size_t>(desc().rows) + 1, 0);
    parallel_ranges(n_threads, desc().rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const int64_t n = arrays_.row_ptr[r + 1] - arrays_.row_ptr[r];
            (*row_ptr)[static_cast<size_t>(r) + 1] =
                static_cast<int32_t>(n + count_fillers(bitmap + r * nbytes, nbytes));
        }
    });
    return sum_row_ptr(row_ptr);
}

// ---- pack ----

packed_arrays packed_matrix::arrays() const {
    return { desc,
             values.data(),
             desc.value_type == GGML_MACKO_TYPE_CODED ? static_cast<int64_t>(values.size()) / 4
                                                      : packed_n_values(desc.dense.nnz),
             index.data(),
             static_cast<int64_t>(index.size()),
             row_ptr.data(),
             static_cast<int64_t>(row_ptr.size()) };
}

namespace {

constexpr int32_t GAP_BITS[3] = { 2, 4, 8 };

int64_t gap_codes(int64_t gap, int32_t b) { return gap / ((1 << b) - 1) + 1; } // with the code of its non-zero

// Non-zeros and gap codes of a row, for all widths.
struct gap_count {
    int64_t nnz, codes[3];
};

// The layout of the index.
struct index_plan {
    int                  width;     // index into GAP_BITS, or -1: a bitmap
    int64_t              n_bits;    // of the whole index
    std::vector<int64_t> first_bit; // of each row
};

template <typename T> std::vector<gap_count> count_gaps(const T * dense, int64_t rows, int64_t cols, int n_threads) {
    std::vector<gap_count> counts(static_cast<size_t>(rows));
    parallel_ranges(n_threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            gap_count n    = {};
            int64_t   next = 0;
            for_each_column(dense + r * cols, cols, [&](int64_t col) {
                n.nnz++;
                n.codes[0] += gap_codes(col - next, GAP_BITS[0]); // no loop: divisions by constants
                n.codes[1] += gap_codes(col - next, GAP_BITS[1]);
                n.codes[2] += gap_codes(col - next, GAP_BITS[2]);
                next = col + 1;
            });
            counts[static_cast<size_t>(r)] = n;
        }
    });
    return counts;
}

int make_row_ptr(const std::vector<gap_count> & counts, std::vector<int32_t> * row_ptr) {
    int64_t nnz = 0;
    row_ptr->assign(1, 0);
    row_ptr->reserve(counts.size() + 1);
    for (const gap_count & n : counts) {
        nnz += n.nnz;
        if (nnz > MAX_STORED) {
            return fail(GGML_MACKO_STATUS_LIMIT, "more than %lld non-zeros (limit)",
                        static_cast<long long>(MAX_STORED));
        }
        row_ptr->push_back(static_cast<int32_t>(nnz));
    }
    return GGML_MACKO_STATUS_OK;
}

// The given index_bits, or the narrowest index; a bitmap wins a tie.
index_plan plan_index(const std::vector<gap_count> & counts, int64_t cols, int32_t index_bits) {
    const int64_t bitmap_bits = bitmap_row_nbytes(cols) * 8;
    int64_t       codes[3]    = {};
    for (const gap_count & n : counts) {
        for (int i = 0; i < 3; i++) {
            codes[i] += n.codes[i];
        }
    }
    index_plan plan = { -1, static_cast<int64_t>(counts.size()) * bitmap_bits, {} };
    for (int i = 0; i < 3; i++) {
        const int64_t bits = codes[i] * GAP_BITS[i];
        if (index_bits < 0 ? index_nbytes_of_bits(bits) < index_nbytes_of_bits(plan.n_bits)
                           : index_bits == GAP_BITS[i]) {
            plan.n_bits = bits;
            plan.width  = i;
        }
    }
    plan.first_bit.assign(counts.size() + 1, 0);
    for (size_t r = 0; r < counts.size(); r++) {
        plan.first_bit[r + 1] =
            plan.first_bit[r] + (plan.width < 0 ? bitmap_bits : counts[r].codes[plan.width] * GAP_BITS[plan.width]);
    }
    return plan;
}

// Writes the index of one row; calls store(col) for its non-zeros in order.
template <typename T, typename F>
void write_index(const T * row, int64_t cols, const index_plan & plan, int64_t first_bit, uint8_t * index, F && store) {
    if (plan.width < 0) {
        for_each_column(row, cols, [&](int64_t col) {
            index[first_bit / 8 + col / 8] =
                static_cast<uint8_t>(index[first_bit / 8 + col / 8] | 1 << (col & 7)); // a row has bytes of its own
            store(col);
        });
        return;
    }
    const int32_t bits   = GAP_BITS[plan.width];
    const int64_t escape = (1 << bits) - 1;
    code_writer   codes(index, first_bit);
    int64_t       next = 0;
    for_each_column(row, cols, [&](int64_t col) {
        int64_t gap = col - next;
        for (; gap >= escape; gap -= escape) {
            codes.put(static_cast<uint32_t>(escape), bits);
        }
        codes.put(static_cast<uint32_t>(gap), bits);
        store(col);
        next = col + 1;
    });
    codes.finish();
}

template <typename T>
int pack_type(const T * dense, packed_desc desc, int32_t mantissa_bits, int32_t exponent_bits, int n_threads,
              packed_matrix * out) {
    const int64_t                rows = desc.dense.rows, cols = desc.dense.cols;
    const std::vector<gap_count> counts = count_gaps(dense, rows, cols, n_threads);
    TRY(make_row_ptr(counts, &out->row_ptr));
    const int64_t    nnz  = out->row_ptr.back();
    const index_plan plan = plan_index(counts, cols, desc.index_bits);
    desc.index_bits       = plan.width < 0 ? INDEX_BITMAP : GAP_BITS[plan.width];
    desc.dense.nnz        = nnz;
    out->desc             = desc;
    out->index.assign(static_cast<size_t>(index_nbytes_of_bits(plan.n_bits)), 0);
    const bool     is_coded = desc.value_type == GGML_MACKO_TYPE_CODED;
    std::vector<T> source(is_coded ? static_cast<size_t>(nnz) : 0); // values to code
    out->values.assign(is_coded ? 0 : static_cast<size_t>(packed_n_values(nnz)) * sizeof(T), 0);
    T * values = is_coded ? source.data() : reinterpret_cast<T *>(out->values.data());
    parallel_ranges(n_threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T * row = dense + r * cols;
            int64_t   k   = out->row_ptr[static_cast<size_t>(r)];
            write_index(row, cols, plan, plan.first_bit[static_cast<size_t>(r)], out->index.data(),
                        [&](int64_t col) { values[k++] = row[col]; });
        }
    });
    return is_coded ? encode_coded(source.data(), desc.dense.type, nnz, mantissa_bits, exponent_bits, n_threads,
                                   &out->values)
                    : static_cast<int>(GGML_MACKO_STATUS_OK);
}

} // namespace

int pack(const void * dense, packed_desc desc, int n_threads, packed_matrix * out, int32_t mantissa_bits,
         int32_t exponent_bits) {
    return desc.dense.type == GGML_MACKO_TYPE_F32
               ? pack_type(static_cast<const uint32_t *>(dense), desc, mantissa_bits, exponent_bits, n_threads, out)
               : pack_type(static_cast<const uint16_t *>(dense), desc, mantissa_bits, exponent_bits, n_threads, out);
}

} // namespace macko
