// EC-CSR arrays: check, decode, assemble. FORMAT.md section 6 defines the layout and the names of the component
// tensors.
#include "codec/ec-csr/ec-csr.h"
#include "codec/first-error.h"
#include "codec/team.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace macko {

// ---- structure ----

int check_ec_csr_desc(const macko_desc & desc) {
    TRY(check_desc(desc));
    if (!is_ec_delta_bits(desc.delta_bits)) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "index_bits %d of ec-csr is not 4 or 8", desc.delta_bits);
    }
    return GGML_MACKO_STATUS_OK;
}

static int set_fault(int64_t set, const char * what, int64_t value) {
    return fail(GGML_MACKO_STATUS_BAD_BLOCK, "set %lld: %s %lld", static_cast<long long>(set), what,
                static_cast<long long>(value));
}

static int block_fault(int64_t set, int64_t block, const char * what, int64_t value) {
    return fail(GGML_MACKO_STATUS_BAD_BLOCK, "set %lld, block %lld: %s %lld", static_cast<long long>(set),
                static_cast<long long>(block), what, static_cast<long long>(value));
}

static int check_length(const char * name, int64_t n, int64_t expected) {
    return n == expected ? GGML_MACKO_STATUS_OK
                         : fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong length (%lld, the sets need %lld)",
                                name, static_cast<long long>(n), static_cast<long long>(expected));
}

// Checks X.sets, and the lengths of the other components, which follow from it.
static int check_sets(const ec_csr_arrays & a, std::vector<ec_csr_range> * out) {
    if (a.n_sets < 1 || a.n_sets > EC_MAX_SETS) {
        return fail(GGML_MACKO_STATUS_BAD_BLOCK, "%lld sets (limit %lld)", static_cast<long long>(a.n_sets),
                    static_cast<long long>(EC_MAX_SETS));
    }
    ec_csr_range next = {}; // sums: at most 8 sets of 2^31 blocks or columns times 64 rows
    for (int64_t i = 0; i < a.n_sets; i++) {
        ec_csr_range       s         = next;
        const ec_csr_set & d         = a.sets[i];
        static_cast<ec_csr_set &>(s) = d;
        if (d.granularity < 1 || d.granularity > EC_MAX_GRANULARITY || (d.granularity & (d.granularity - 1))) {
            return set_fault(i, "granularity", d.granularity);
        }
        if (d.vector_size != EC_VECTOR && (d.vector_size != 1 || d.granularity != 1)) {
            return set_fault(i, "vector size", d.vector_size);
        }
        if (i > 0 && d.granularity >= a.sets[i - 1].granularity &&
            (d.granularity != a.sets[i - 1].granularity || d.vector_size >= a.sets[i - 1].vector_size)) {
            return set_fault(i, "out of order: granularity", d.granularity);
        }
        if (d.n_blocks < 1) {
            return set_fault(i, "number of blocks", d.n_blocks);
        }
        if (d.n_cols < 1) {
            return set_fault(i, "number of columns", d.n_cols);
        }
        next.block += d.n_blocks;
        next.row += static_cast<int64_t>(d.n_blocks) * d.granularity;
        next.blk_ptr += static_cast<int64_t>(d.n_blocks) + 1;
        next.col += d.n_cols;
        next.value += static_cast<int64_t>(d.n_cols) * d.granularity;
        out->push_back(s);
    }
    if (next.value > MAX_STORED || next.row > MAX_STORED || next.block * EC_LANES > MAX_STORED) {
        return fail(GGML_MACKO_STATUS_LIMIT, "%lld stored values in %lld blocks (limit %lld)",
                    static_cast<long long>(next.value), static_cast<long long>(next.block),
                    static_cast<long long>(MAX_STORED));
    }
    TRY(check_length("values", a.n_values, next.value));
    TRY(check_length("deltas", a.n_deltas, next.col * a.desc.delta_bits / 8));
    TRY(check_length("bases", a.n_bases, next.block * EC_LANES));
    TRY(check_length("blk_ptr", a.n_blk_ptr, next.blk_ptr));
    return check_length("rows", a.n_rows, next.row);
}

static int64_t base_at(const ec_csr_arrays & a, int64_t i) {
    return ec_base_nbytes(a.desc.cols) == 2 ? static_cast<const uint16_t *>(a.bases)[i]
                                            : static_cast<const int32_t *>(a.bases)[i];
}

// Whether blocks b-1 and b of a set are in the order of FORMAT.md section 6.
static bool in_order(const ec_csr_arrays & a, const ec_csr_range & s, int64_t b) {
    const int32_t * ptr = a.blk_ptr + s.blk_ptr + b;
    const int32_t   n0 = ptr[0] - ptr[-1], n1 = ptr[1] - ptr[0];
    if (n0 != n1) {
        return n0 > n1;
    }
    const int32_t * row = a.rows + s.row + b * s.granularity;
    for (int32_t k = 0; k < s.granularity; k++) {
        if (row[k - s.granularity] != row[k]) {
            return row[k - s.granularity] < row[k];
        }
    }
    return base_at(a, (s.block + b - 1) * EC_LANES) < base_at(a, (s.block + b) * EC_LANES);
}

static int check_blocks(const ec_csr_arrays & a, const ec_csr_range & s, int64_t set) {
    const int32_t * ptr  = a.blk_ptr + s.blk_ptr;
    const int64_t   unit = EC_LANES * s.vector_size;
    if (ptr[0] != 0 || ptr[s.n_blocks] != s.n_cols) {
        return set_fault(set, ptr[0] != 0 ? "blk_ptr starts at" : "blk_ptr ends at",
                         ptr[0] != 0 ? ptr[0] : ptr[s.n_blocks]);
    }
    for (int64_t b = 0; b < s.n_blocks; b++) {
        const int64_t n = static_cast<int64_t>(ptr[b + 1]) - ptr[b];
        if (n < unit || n % unit || (s.vector_size == 1 && n > EC_MAX_SHORT)) {
            return block_fault(set, b, "number of columns", n);
        }
        const int32_t * row = a.rows + s.row + b * s.granularity;
        for (int32_t k = 0; k < s.granularity; k++) {
            if (row[k] < 0 || row[k] >= a.desc.rows) {
                return block_fault(set, b, "row", row[k]);
            }
            if (k > 0 && row[k] <= row[k - 1]) {
                return block_fault(set, b, row[k] == row[k - 1] ? "repeated row" : "unordered row", row[k]);
            }
        }
        if (b > 0 && !in_order(a, s, b)) {
            return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "set %lld, block %lld: out of order",
                        static_cast<long long>(set), static_cast<long long>(b));
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// The blocks of each row, by a counting sort: row r has entries row_off[r] ... row_off[r+1]-1. n_rows <= 2^31.
static std::vector<ec_csr_view::block_row>
rows_to_blocks(const ec_csr_arrays & a, const std::vector<ec_csr_range> & sets, std::vector<uint32_t> * row_off) {
    row_off->assign(static_cast<size_t>(a.desc.rows) + 1, 0);
    for (int64_t i = 0; i < a.n_rows; i++) {
        (*row_off)[static_cast<size_t>(a.rows[i]) + 1]++;
    }
    for (size_t r = 1; r < row_off->size(); r++) {
        (*row_off)[r] += (*row_off)[r - 1];
    }
    std::vector<uint32_t>               next(row_off->begin(), row_off->end() - 1);
    std::vector<ec_csr_view::block_row> block_rows(static_cast<size_t>(a.n_rows));
    for (size_t i = 0; i < sets.size(); i++) {
        const ec_csr_range & s = sets[i];
        for (int64_t k = 0; k < static_cast<int64_t>(s.n_blocks) * s.granularity; k++) {
            block_rows[next[static_cast<size_t>(a.rows[s.row + k])]++] = { static_cast<uint32_t>(k / s.granularity),
                                                                           static_cast<uint16_t>(i),
                                                                           static_cast<uint16_t>(k % s.granularity) };
        }
    }
    return block_rows;
}

int check_ec_csr(const ec_csr_arrays & a, ec_csr_view * view) {
    std::vector<ec_csr_range> sets;
    TRY(check_ec_csr_desc(a.desc));
    TRY(check_sets(a, &sets));
    for (size_t i = 0; i < sets.size(); i++) {
        TRY(check_blocks(a, sets[i], static_cast<int64_t>(i)));
    }
    if (a.desc.nnz == 0 && (a.n_values != EC_LANES || a.rows[0] != 0 || base_at(a, 0) != 0)) {
        return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "%lld stored values, but nnz is 0",
                    static_cast<long long>(a.n_values));
    }
    view->block_rows_ = rows_to_blocks(a, sets, &view->row_off_);
    view->arrays_     = a;
    view->sets_       = std::move(sets);
    return GGML_MACKO_STATUS_OK;
}

// ---- decode ----

namespace {

enum class fault { none, column, delta, zero, overlap, special };

struct block_data {
    int64_t         cols;     // of the matrix
    int64_t         per_lane; // columns per lane
    int32_t         g;
    int32_t         index; // row within the block
    const void *    bases;
    const void *    values; // of the block
    const uint8_t * deltas;
    bool            empty_matrix;
};

// Position of column k of a lane in the arrays, in columns from the block's first. v should be a compile-time constant,
// because the function divides by it.
inline int64_t position(int64_t lane, int64_t k, int64_t v) { return k / v * (EC_LANES * v) + lane * v + k % v; }

template <typename T> inline fault put(T * dense, int64_t col, T value, T exponent) {
    if (dense[col] != 0) {
        return fault::overlap;
    }
    if ((value & exponent) == exponent) {
        return fault::special;
    }
    dense[col] = value;
    return fault::none;
}

// Decodes one row of a block with several rows; *at: the column of a fault.
template <typename T, int BITS, typename B>
fault decode_shared(const block_data & d, T exponent, T * dense, int64_t * at, int64_t * nnz) {
    const T * values = static_cast<const T *>(d.values) + d.index;
    int64_t   col    = -1;
    for (int64_t lane = 0; lane < EC_LANES; lane++) {
        for (int64_t k = 0; k < d.per_lane; k++) {
            const int64_t  e     = position(lane, k, EC_VECTOR);
            const uint32_t delta = delta_code(d.deltas, e, BITS);
            const int64_t  next  = k ? col + delta : static_cast<int64_t>(static_cast<const B *>(d.bases)[lane]);
            *at                  = next;
            if (next <= col || (k == 0 && delta != 0)) {
                return fault::delta;
            }
            if (next >= d.cols) {
                return fault::column;
            }
            const T value = values[e * d.g];
            if (value == 0) {
                return fault::zero;
            }
            if (const fault f = put(dense, next, value, exponent); f != fault::none) {
                return f;
            }
            col = next;
        }
    }
    *nnz += d.per_lane * EC_LANES;
    return fault::none;
}

// Decodes a block of one row, which may contain fillers and padding.
template <typename T, int BITS, typename B, int V>
fault decode_single(const block_data & d, T exponent, T * dense, int64_t * at, int64_t * nnz) {
    const T *         values    = static_cast<const T *>(d.values);
    constexpr int64_t max       = (1 << BITS) - 1;
    int64_t           n_padding = 0;
    int64_t           col       = -1;
    bool              filler    = false; // the last entry was a filler
    for (int64_t lane = 0; lane < EC_LANES; lane++) {
        for (int64_t k = 0; k < d.per_lane; k++) {
            const int64_t  e     = position(lane, k, V);
            const uint32_t delta = delta_code(d.deltas, e, BITS);
            const int64_t  next  = k ? col + delta : static_cast<int64_t>(static_cast<const B *>(d.bases)[lane]);
            const bool     first = lane + k == 0;
            *at                  = next;
            if (k == 0 && delta != 0) {
                return fault::delta;
            }
            if (next < 0 || next >= d.cols) {
                return fault::column;
            }
            if (const T value = values[e]; value != 0) {
                if (!first && (next <= col || next - col > max || n_padding > 0)) {
                    return n_padding > 0 ? fault::zero : fault::delta;
                }
                if (const fault f = put(dense, next, value, exponent); f != fault::none) {
                    return f;
                }
                ++*nnz;
                filler = false;
            } else if (next == col || (first && d.empty_matrix)) {
                if (filler) {
                    return fault::zero;
                }
                n_padding++;
            } else {
                if (first || n_padding > 0 || next - col != max) {
                    return fault::zero;
                }
                filler = true;
            }
            col = next;
        }
    }
    // a long block has more entries than a short one can have, and less padding than a unit
    const int64_t most = V == 1 || d.per_lane > EC_VECTOR ? EC_LANES * V : EC_LANES;
    return filler || (n_padding >= most && !d.empty_matrix) ? fault::zero : fault::none;
}

template <typename T, int BITS, typename B>
int decode_row(const ec_csr_view & view, int64_t row, T exponent, T * dense, int64_t * nnz) {
    const ec_csr_arrays & a = view.arrays();
    for (const ec_csr_view::block_row * ref = view.row_begin(row); ref < view.row_end(row); ref++) {
        const ec_csr_range & s   = view.sets()[ref->set];
        const int32_t *      ptr = a.blk_ptr + s.blk_ptr + ref->block;
        const block_data     d   = { a.desc.cols,
                                     (ptr[1] - ptr[0]) / EC_LANES,
                                     s.granularity,
                                     ref->index,
                                     static_cast<const B *>(a.bases) + (s.block + ref->block) * EC_LANES,
                                     static_cast<const T *>(a.values) + s.value +
                                         static_cast<int64_t>(ptr[0]) * s.granularity,
                                     a.deltas + (s.col + ptr[0]) * BITS / 8,
                                     a.desc.nnz == 0 };
        int64_t              at  = 0;
        fault                f   = fault::none;
        if (s.granularity > 1) {
            f = decode_shared<T, BITS, B>(d, exponent, dense, &at, nnz);
        } else if (s.vector_size > 1) {
            f = decode_single<T, BITS, B, EC_VECTOR>(d, exponent, dense, &at, nnz);
        } else {
            f = decode_single<T, BITS, B, 1>(d, exponent, dense, &at, nnz);
        }
        if (f == fault::none) {
            continue;
        }
        const long long r = row, c = at, set = ref->set, block = ref->block;
        switch (f) {
            case fault::column:
                return fail(GGML_MACKO_STATUS_BAD_COLUMN, "row %lld: set %lld, block %lld: column %lld of %lld", r, set,
                            block, c, static_cast<long long>(a.desc.cols));
            case fault::delta:
                return fail(GGML_MACKO_STATUS_NOT_CANONICAL,
                            "row %lld: set %lld, block %lld: delta or base at column %lld", r, set, block, c);
            case fault::overlap:
                return fail(GGML_MACKO_STATUS_OVERLAP,
                            "row %lld: set %lld, block %lld: column %lld is in another block too", r, set, block, c);
            case fault::special:
                return fail(GGML_MACKO_STATUS_NOT_FINITE,
                            "row %lld: set %lld, block %lld: value at column %lld is Inf or NaN", r, set, block, c);
            default:
                return fail(GGML_MACKO_STATUS_NOT_CANONICAL, "row %lld: set %lld, block %lld: zero at column %lld", r,
                            set, block, c);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// Decodes a row to dense elements of desc.type. Checks columns, deltas, fillers and padding, that values are finite,
// and that no two blocks contain the same element. *nnz: non-zeros of the row.
template <typename T> int decode_row_type(const ec_csr_view & view, int64_t row, void * dense, int64_t * nnz) {
    T *                out      = static_cast<T *>(dense);
    const macko_desc & desc     = view.desc();
    const T            exponent = exponent_mask<T>(desc.type);
    *nnz                        = 0;
    memset(dense, 0, static_cast<size_t>(desc.cols) * sizeof(T));
    if (ec_base_nbytes(desc.cols) == 2) {
        return desc.delta_bits == 4 ? decode_row<T, 4, uint16_t>(view, row, exponent, out, nnz)
                                    : decode_row<T, 8, uint16_t>(view, row, exponent, out, nnz);
    }
    return desc.delta_bits == 4 ? decode_row<T, 4, int32_t>(view, row, exponent, out, nnz)
                                : decode_row<T, 8, int32_t>(view, row, exponent, out, nnz);
}

} // namespace

int ec_csr_view::for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const {
    const macko_desc & desc = arrays_.desc;
    const auto   decode_any = desc.type == GGML_MACKO_TYPE_F32 ? decode_row_type<uint32_t> : decode_row_type<uint16_t>;
    const size_t nbytes     = static_cast<size_t>(desc.cols * value_nbytes(desc.type));
    first_error  error; // of a row
    std::atomic<int64_t>              nnz{ 0 };
    std::vector<std::vector<uint8_t>> buffers(static_cast<size_t>(n_threads), std::vector<uint8_t>(nbytes));
    parallel_parts(n_threads, desc.rows, 16, [&](int64_t begin, int64_t end, int thread) {
        uint8_t * row      = buffers[static_cast<size_t>(thread)].data();
        int64_t   nnz_part = 0;
        for (int64_t r = begin; r < end; r++) {
            int64_t   n      = 0;
            const int result = decode_any(*this, r, row, &n);
            nnz_part += n;
            if (result) {
                error.set(r, result);
            } else {
                f(r, row);
            }
        }
        nnz += nnz_part;
    });
    if (error.any()) {
        return fail(error.status, "%s", error.text.c_str());
    }
    if (nnz != desc.nnz) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "%lld non-zeros, but nnz is %lld", static_cast<long long>(nnz),
                    static_cast<long long>(desc.nnz));
    }
    return GGML_MACKO_STATUS_OK;
}

int ec_csr_view::check_rows(int n_threads) const {
    return for_each_row(n_threads, [](int64_t, const void *) {});
}

// ---- assemble ----

ec_csr_arrays ec_csr_matrix::arrays() const {
    const auto n = [](const auto & v) { return static_cast<int64_t>(v.size()); };
    return { desc,
             sets.data(),
             n(sets),
             rows.data(),
             n(rows),
             blk_ptr.data(),
             n(blk_ptr),
             bases.data(),
             n(bases) / ec_base_nbytes(desc.cols),
             deltas.data(),
             n(deltas),
             values.data(),
             n(values) / value_nbytes(desc.type) };
}

int64_t ec_csr_matrix::nbytes() const {
    return static_cast<int64_t>(sets.size() * sizeof(ec_csr_set) + (rows.size() + blk_ptr.size()) * 4 + bases.size() +
                                deltas.size() + values.size());
}

namespace {

// The columns of a block in storage order. `source`: index of each entry among the block's columns; -1 for fillers and
// padding.
struct stored_columns {
    std::vector<int32_t> col;
    std::vector<int32_t> source;

    void fill(const ec_csr_blocks & blocks, const ec_csr_block & b, int64_t max_delta) {
        col.clear();
        source.clear();
        for (int64_t i = 0; i < b.n_cols; i++) {
            const int32_t c = blocks.cols[static_cast<size_t>(b.cols + i)];
            while (b.granularity == 1 && !col.empty() && c - col.back() > max_delta) {
                col.push_back(col.back() + static_cast<int32_t>(max_delta));
                source.push_back(-1);
            }
            col.push_back(c);
            source.push_back(static_cast<int32_t>(i));
        }
        const int32_t last = col.empty() ? 0 : col.back();
        col.resize(static_cast<size_t>(b.n_stored), last);
        source.resize(static_cast<size_t>(b.n_stored), -1);
    }
};

template <typename T>
void write_block(const T * dense, const ec_csr_blocks & blocks, const ec_csr_block & b, const stored_columns & columns,
                 int64_t first_block, int64_t first_col, int64_t first_value, ec_csr_matrix * m) {
    const int64_t   bits     = m->desc.delta_bits;
    const int64_t   per_lane = b.n_stored / EC_LANES;
    const int32_t * rows     = blocks.rows.data() + b.rows;
    uint8_t *       deltas   = m->deltas.data() + first_col * bits / 8;
    T *             values   = reinterpret_cast<T *>(m->values.data()) + first_value;
    for (int64_t i = 0; i < b.n_stored; i++) {
        const int64_t lane = i / per_lane, k = i % per_lane, e = position(lane, k, b.vector_size);
        const int32_t col = columns.col[static_cast<size_t>(i)];
        if (k > 0) {
            const int64_t bit = e * bits;
            deltas[bit >> 3] =
                static_cast<uint8_t>(deltas[bit >> 3] | (col - columns.col[static_cast<size_t>(i) - 1]) << (bit & 7));
        } else if (ec_base_nbytes(m->desc.cols) == 2) {
            reinterpret_cast<uint16_t *>(m->bases.data())[first_block * EC_LANES + lane] = static_cast<uint16_t>(col);
        } else {
            reinterpret_cast<int32_t *>(m->bases.data())[first_block * EC_LANES + lane] = col;
        }
        for (int32_t r = 0; r < b.granularity && columns.source[static_cast<size_t>(i)] >= 0; r++) {
            values[e * b.granularity + r] = dense[rows[r] * m->desc.cols + col];
        }
    }
}

} // namespace

// Sorts blocks in the order of FORMAT.md section 6.
static void sort_blocks(ec_csr_blocks & blocks) {
    std::sort(blocks.blocks.begin(), blocks.blocks.end(), [&](const ec_csr_block & x, const ec_csr_block & y) {
        if (x.granularity != y.granularity) {
            return x.granularity > y.granularity;
        }
        if (x.vector_size != y.vector_size) {
            return x.vector_size > y.vector_size;
        }
        if (x.n_stored != y.n_stored) {
            return x.n_stored > y.n_stored;
        }
        const auto row_x = blocks.rows.begin() + x.rows, row_y = blocks.rows.begin() + y.rows;
        const auto [a, b] = std::mismatch(row_x, row_x + x.granularity, row_y);
        if (a != row_x + x.granularity) {
            return *a < *b;
        }
        return x.n_cols && y.n_cols &&
               blocks.cols[static_cast<size_t>(x.cols)] < blocks.cols[static_cast<size_t>(y.cols)];
    });
}

int assemble(const macko_desc & desc, const void * dense, ec_csr_blocks & blocks, int n_threads, ec_csr_matrix * m) {
    *m      = {};
    m->desc = desc;
    sort_blocks(blocks);
    const int64_t        n_blocks = static_cast<int64_t>(blocks.blocks.size());
    std::vector<int64_t> first_col, first_value;
    int64_t              n_cols = 0, n_values = 0;
    for (const ec_csr_block & b : blocks.blocks) {
        if (m->sets.empty() || m->sets.back().granularity != b.granularity ||
            m->sets.back().vector_size != b.vector_size) {
            m->sets.push_back({ b.granularity, b.vector_size, 0, 0 });
            m->blk_ptr.push_back(0);
        }
        ec_csr_set & s = m->sets.back();
        first_col.push_back(n_cols);
        first_value.push_back(n_values);
        n_cols += b.n_stored;
        n_values += b.n_stored * b.granularity;
        if (n_values > MAX_STORED || n_blocks * EC_LANES > MAX_STORED) {
            return fail(GGML_MACKO_STATUS_LIMIT, "more than %lld stored values in %lld blocks",
                        static_cast<long long>(MAX_STORED), static_cast<long long>(n_blocks));
        }
        s.n_blocks++;
        s.n_cols += static_cast<int32_t>(b.n_stored);
        m->blk_ptr.push_back(s.n_cols);
        m->rows.insert(m->rows.end(), blocks.rows.begin() + b.rows, blocks.rows.begin() + b.rows + b.granularity);
    }
    m->bases.assign(static_cast<size_t>(n_blocks * EC_LANES * ec_base_nbytes(desc.cols)), 0);
    m->deltas.assign(static_cast<size_t>(n_cols * desc.delta_bits / 8), 0);
    m->values.assign(static_cast<size_t>(n_values * value_nbytes(desc.type)), 0);
    parallel_parts(n_threads, n_blocks, 64, [&](int64_t begin, int64_t end, int) {
        stored_columns columns;
        for (int64_t i = begin; i < end; i++) {
            const size_t         k = static_cast<size_t>(i);
            const ec_csr_block & b = blocks.blocks[k];
            columns.fill(blocks, b, (1 << desc.delta_bits) - 1);
            if (desc.type == GGML_MACKO_TYPE_F32) {
                write_block(static_cast<const uint32_t *>(dense), blocks, b, columns, i, first_col[k], first_value[k],
                            m);
            } else {
                write_block(static_cast<const uint16_t *>(dense), blocks, b, columns, i, first_col[k], first_value[k],
                            m);
            }
        }
    });
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
