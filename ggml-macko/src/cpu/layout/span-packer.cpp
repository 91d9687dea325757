// Converts F16 and BF16 values to bundles (bundles.h).
#include "cpu/layout/span-packer.h"
#include "cpu/layout/group-writer.h"

#include <algorithm>

namespace macko::cpu {

namespace {

constexpr int    PIECES       = STEP_SLOTS;
constexpr int    SORTED       = 2 * PIECES;
constexpr int    SPANS        = 8; // unpacked together: the entries of a group in these spans must stay in L2
constexpr int    CHUNK        = SPANS * BUNDLE_SPAN;
constexpr int    ROW_SIZE     = CHUNK + 1; // NO_ENTRY follows the last entry
constexpr int    NOWHERE      = BUNDLE_ROWS * ROW_SIZE;
constexpr size_t MOST_VECTORS = BUNDLE_SPAN / 2; // each window begins at a different column

// A piece that will go into a bundle.
struct piece {
    int32_t  first; // first entry
    uint16_t n;
    uint8_t  row, middle; // column of the middle entry
};

} // namespace

// The entries of a group in a chunk of columns.
struct span_packer::chunk {
    int32_t  entries[NOWHERE + 1];    // entries of each row
    uint16_t end[BUNDLE_ROWS][SPANS]; // number of entries of a row up to the end of a span
    piece    pieces[BUNDLE_ROWS], sorted[BUNDLE_ROWS];
};

namespace {

// Reads the rows of a MACKO matrix from left to right.
class macko_rows_reader {
public:
    macko_rows_reader(const span_ops & ops, const macko_rows & m, int64_t begin, int64_t end)
        : ops_(ops), delta_bits_(m.desc.delta_bits) {
        const auto * values = static_cast<const uint16_t *>(m.values);
        for (int64_t r = begin; r < end; r++) {
            rows_[r - begin] = { values, m.deltas, m.row_ptr[r] - m.base, m.row_ptr[r + 1] - m.base, -1 };
        }
    }
    int read(int64_t row, int64_t begin, int64_t limit, int32_t * entries, uint16_t * end) {
        return ops_.read_row(delta_bits_, &rows_[row], begin, limit, 0, entries, end);
    }

private:
    const span_ops & ops_;
    const int32_t    delta_bits_;
    macko_row        rows_[BUNDLE_ROWS];
};

// Reads the rows of a packed matrix; columns and values of a group are decoded first.
class packed_rows_reader {
public:
    packed_rows_reader(const packed_view & view, int64_t begin, int64_t end) {
        const int32_t * row_ptr = view.arrays().row_ptr;
        const int64_t   first = row_ptr[begin], n = row_ptr[end] - first;
        cols_.reserve(static_cast<size_t>(n));
        values_.resize(static_cast<size_t>(n));
        for (int64_t r = begin; r < end; r++) {
            at_[r - begin] = { row_ptr[r] - first, row_ptr[r + 1] - first };
            view.for_each_column(r, [&](int64_t col) { cols_.push_back(static_cast<uint16_t>(col)); });
        }
        view.copy_values(first, n, values_.data());
    }
    int read(int64_t row, int64_t begin, int64_t limit, int32_t * entries, uint16_t * end) {
        position & p = at_[row];
        int        n = 0;
        for (; p.k < p.end && cols_[static_cast<size_t>(p.k)] < limit; p.k++) {
            const auto here         = static_cast<int32_t>(cols_[static_cast<size_t>(p.k)] - begin);
            entries[n++]            = here << 16 | values_[static_cast<size_t>(p.k)];
            end[here / BUNDLE_SPAN] = static_cast<uint16_t>(n);
        }
        return n;
    }

private:
    struct position {
        int64_t k, end;
    };
    std::vector<uint16_t> cols_, values_;
    position              at_[BUNDLE_ROWS];
};

// Sorts pieces by key(piece) < BUNDLE_SPAN; the sort is stable.
template <typename KEY> void sort_by(const piece * from, int n, piece * to, KEY && key) {
    uint8_t at[BUNDLE_SPAN + 1] = {};
    for (int i = 0; i < n; i++) {
        at[key(from[i]) + 1]++;
    }
    for (int k = 1; k < BUNDLE_SPAN; k++) {
        at[k] = static_cast<uint8_t>(at[k] + at[k - 1]);
    }
    for (int i = 0; i < n; i++) {
        to[at[key(from[i])]++] = from[i];
    }
}

// Appends the bundles of the group's pieces in a span.
void write_span(const span_ops & ops, span_packer::chunk * c, int64_t rows, int span, int64_t column,
                group_bytes * out) {
    int n = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int  begin = span == 0 ? 0 : c->end[row][span - 1], count = c->end[row][span] - begin;
        const auto first = static_cast<int32_t>(row * ROW_SIZE + begin);
        // if there is no such entry, the piece is not used
        const auto middle = static_cast<uint8_t>(c->entries[first + count / 2] >> 16 & (BUNDLE_SPAN - 1));
        c->pieces[n]      = { first, static_cast<uint16_t>(count), static_cast<uint8_t>(row), middle };
        n += count > 0;
    }
    // Sort by number of non-zeros, so that the pieces of a bundle end together, and each group of SORTED by position.
    sort_by(c->pieces, n, c->sorted, [](const piece & p) { return p.middle; });
    sort_by(c->sorted, n, c->pieces, [](const piece & p) { return BUNDLE_SPAN - p.n; });
    uint8_t block[BUNDLE_ROWS];
    for (int i = 0; i < n; i++) {
        block[c->pieces[i].row] = static_cast<uint8_t>(i / SORTED);
    }
    sort_by(c->sorted, n, c->pieces, [&](const piece & p) { return block[p.row]; });

    constexpr auto HEADER = static_cast<size_t>(BUNDLE_HEADER_NBYTES);
    for (int i = 0; i < n; i += PIECES) {
        uint8_t * bytes = out->room_for(HEADER + MOST_VECTORS * sizeof(span_vector));
        int32_t   first[PIECES];
        uint8_t   row[PIECES];
        int32_t   least = NO_ENTRY;
        for (int k = 0; k < PIECES; k++) {
            const bool exists = i + k < n;
            first[k]          = exists ? c->pieces[i + k].first : NOWHERE;
            row[k]            = exists ? c->pieces[i + k].row : 0;
            least             = std::min(least, c->entries[first[k]]);
        }
        const int n_vectors = ops.write_vectors(c->entries, first, (span + 1) * static_cast<int32_t>(BUNDLE_SPAN),
                                                reinterpret_cast<span_vector *>(bytes + HEADER));
        const bundle_header header = { static_cast<uint16_t>(column + (least >> 16)), static_cast<uint8_t>(n_vectors),
                                       0 };
        memcpy(bytes, &header, sizeof(header));
        memcpy(bytes + sizeof(header), row, sizeof(row));
        out->append(HEADER + static_cast<size_t>(n_vectors) * sizeof(span_vector));
    }
}

template <typename READER>
void pack_rows(const span_ops & ops, READER && reader, int64_t rows, int64_t cols, span_packer::chunk * c,
               uint32_t * row_nnz, group_bytes * out) {
    memset(row_nnz, 0, static_cast<size_t>(rows) * sizeof(*row_nnz));
    c->entries[NOWHERE] = NO_ENTRY;
    for (int64_t begin = 0; begin < cols; begin += CHUNK) {
        const int64_t limit = std::min<int64_t>(begin + CHUNK, cols);
        for (int64_t row = 0; row < rows; row++) {
            int32_t *  entries = c->entries + row * ROW_SIZE;
            uint16_t * end     = c->end[row];
            memset(end, 0, sizeof(c->end[row]));
            const int n = reader.read(row, begin, limit, entries, end);
            entries[n]  = NO_ENTRY;
            for (int span = 1; span < SPANS; span++) {
                end[span] = std::max(end[span], end[span - 1]);
            }
            row_nnz[row] += static_cast<uint32_t>(n);
        }
        for (int span = 0; begin + span * BUNDLE_SPAN < limit; span++) {
            write_span(ops, c, rows, span, begin, out);
        }
    }
}

} // namespace

span_packer::span_packer(const span_ops & ops) : ops_(ops), chunk_(new chunk) {}
span_packer::~span_packer() = default;

void span_packer::pack(const macko_view & view, int64_t row, uint32_t * row_nnz, group_bytes * out) {
    const macko_rows & m   = view.rows();
    const int64_t      end = std::min(row + BUNDLE_ROWS, m.row_end);
    pack_rows(ops_, macko_rows_reader(ops_, m, row, end), end - row, m.desc.cols, chunk_.get(), row_nnz, out);
}

void span_packer::pack(const packed_view & view, int64_t group, group_bytes * out) {
    const int64_t row = group * BUNDLE_ROWS, end = std::min(row + BUNDLE_ROWS, view.desc().rows);
    uint32_t      row_nnz[BUNDLE_ROWS];
    pack_rows(ops_, packed_rows_reader(view, row, end), end - row, view.desc().cols, chunk_.get(), row_nnz, out);
}

} // namespace macko::cpu
