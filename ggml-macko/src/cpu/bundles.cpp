// Makes bundles (bundles.h) of packed quantized values, and of the F16 and BF16 values of a bitmap.
#include "cpu/bundles.h"
#include "codec/team.h"
#include "cpu/bitmap.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace macko::cpu {

// Part of the slots that is filled, by density: what random places fill, measured, and where values are not quantized
// what rows of different densities fill, as pruned attention matrices have them. The plan has a margin.
struct measured_fill {
    double density, fill;
};
constexpr measured_fill QUANT_FILLS[] = { { 0.05, 0.22 }, { 0.1, 0.37 }, { 0.3, 0.71 }, { 0.5, 0.82 }, { 1.0, 0.9 } };
constexpr measured_fill FILLS[]       = { { 0.02, 0.25 }, { 0.05, 0.4 }, { 0.1, 0.53 },
                                          { 0.3, 0.78 },  { 0.5, 0.9 },  { 1.0, 0.98 } };

template <size_t N> static double fill_of(const measured_fill (&measured)[N], double density) {
    size_t i = 1;
    for (; i + 1 < N && density > measured[i].density; i++) {
    }
    const measured_fill & a = measured[i - 1];
    const measured_fill & b = measured[i];
    return a.fill + (b.fill - a.fill) * (density - a.density) / (b.density - a.density);
}

int64_t bundles_nbytes(const macko_desc & desc, int32_t value_type) {
    const bool   quantized = is_quant_type(value_type);
    const double density =
        static_cast<double>(desc.nnz) / (static_cast<double>(desc.rows) * static_cast<double>(desc.cols));
    if (!has_bundles(value_type) || desc.cols > BUNDLE_COLS || density < (quantized ? 0.05 : 0.02)) {
        return 0;
    }
    constexpr double margin = 1.05;
    const int64_t    pieces = bundle_pieces(value_type), groups = n_bundle_groups(desc.rows);
    const int64_t    bundles =
        quantized ? (desc.rows + desc.nnz / QUANT_BLOCK) / pieces + groups
                     : (desc.rows + groups * (pieces - 1)) / pieces * ((desc.cols + BUNDLE_SPAN - 1) / BUNDLE_SPAN);
    const double fill = quantized ? fill_of(QUANT_FILLS, density) : fill_of(FILLS, density);
    // of those with which a bundle ends, half of the steps are empty
    const double full    = static_cast<double>(desc.nnz) / (2 * STEP_SLOTS) / fill;
    const auto   vectors = static_cast<int64_t>((full + static_cast<double>(bundles) / 2) * margin) + 1;
    return bundles * bundle_header_nbytes(value_type) + vectors * bundle_vector_nbytes(value_type);
}

namespace {

// ---- quantized values ----

constexpr int PIECES = 4;
static_assert(PIECES == bundle_pieces(GGML_MACKO_TYPE_Q8_0), "of a bundle");

struct piece {
    int32_t  first, n; // of the group's non-zeros
    uint16_t scale;
    uint8_t  row;
};

// The non-zeros of a group of rows, and its bundles.
class quant_packer {
public:
    explicit quant_packer(const packed_view & view) : view_(view), type_(view.arrays().desc.value_type) {}

    // Appends the group's bundles to out. false if a bundle has too many vectors.
    bool pack(int64_t group, std::vector<uint8_t> * out) {
        const int64_t begin = group * BUNDLE_ROWS, end = std::min(begin + BUNDLE_ROWS, view_.desc().rows);
        entries_.clear();
        pieces_.clear();
        for (int64_t r = begin; r < end; r++) {
            add_row(r, static_cast<uint8_t>(r - begin));
        }
        sort();
        for (size_t i = 0; i < order_.size(); i += PIECES) {
            if (!add_bundle(i, out)) {
                return false;
            }
        }
        return true;
    }

private:
    static constexpr size_t SORTED = BUNDLE_BLOCK * PIECES;

    const packed_view &   view_;
    const int32_t         type_;
    std::vector<int32_t>  entries_; // column * 256 + q as a byte
    std::vector<piece>    pieces_;
    std::vector<uint32_t> order_, starts_;

    void add_row(int64_t r, uint8_t row) {
        const packed_arrays & a      = view_.arrays();
        const auto *          blocks = static_cast<const uint8_t *>(a.values);
        int64_t               k      = a.row_ptr[r];
        int64_t               stop   = k; // end of the piece
        uint8_t               q[QUANT_BLOCK];
        size_t                n = entries_.size();
        entries_.resize(n + static_cast<size_t>(a.row_ptr[r + 1] - k));
        view_.for_each_column(r, [&](int64_t col) {
            if (k == stop) {
                end_piece(n);
                const int64_t   block = k / QUANT_BLOCK;
                const uint8_t * bytes = blocks + block * quant_block_nbytes(type_);
                for (int64_t i = 0; i < QUANT_BLOCK; i++) {
                    q[i] = static_cast<uint8_t>(quant_at(bytes, type_, i));
                }
                stop = (block + 1) * QUANT_BLOCK;
                pieces_.push_back({ static_cast<int32_t>(n), 0, quant_scale_bits(bytes), row });
            }
            const uint8_t here = q[k++ % QUANT_BLOCK];
            entries_[n]        = static_cast<int32_t>(col << 8 | here);
            n += here != 0;
        });
        end_piece(n);
        entries_.resize(n);
    }

    // the last piece has the non-zeros up to n
    void end_piece(size_t n) {
        if (!pieces_.empty() && pieces_.back().n == 0) {
            pieces_.back().n = static_cast<int32_t>(n) - pieces_.back().first;
            if (pieces_.back().n == 0) {
                pieces_.pop_back();
            }
        }
    }

    int first_col(uint32_t i) const { return entries_[static_cast<size_t>(pieces_[i].first)] >> 8; }
    int last_col(uint32_t i) const { return entries_[static_cast<size_t>(pieces_[i].first + pieces_[i].n - 1)] >> 8; }

    // by the first column, and among SORTED of them by the last one
    void sort() {
        starts_.assign(static_cast<size_t>(view_.desc().cols) + 1, 0);
        for (uint32_t i = 0; i < pieces_.size(); i++) {
            starts_[static_cast<size_t>(first_col(i)) + 1]++;
        }
        for (size_t c = 1; c < starts_.size(); c++) {
            starts_[c] += starts_[c - 1];
        }
        order_.resize(pieces_.size());
        for (uint32_t i = 0; i < pieces_.size(); i++) {
            order_[starts_[static_cast<size_t>(first_col(i))]++] = i;
        }
        for (size_t i = 0; i < order_.size(); i += SORTED) {
            std::sort(order_.begin() + static_cast<int64_t>(i),
                      order_.begin() + static_cast<int64_t>(std::min(i + SORTED, order_.size())),
                      [&](uint32_t a, uint32_t b) {
                          const int x = last_col(a), y = last_col(b);
                          return x != y ? x < y : a < b;
                      });
        }
    }

    // the entries of a bundle, and behind each piece's last some of a column that no window reaches
    struct pieces_in_bundle {
        int32_t entries[PIECES][QUANT_BLOCK + 4];
        int     at[PIECES]; // the next of each

        int next_column() const {
            const auto next = [this](int i) { return entries[i][at[i]]; };
            return std::min(std::min(next(0), next(1)), std::min(next(2), next(3))) >> 8;
        }
        // the next four of each piece, as far as they are in the window: place * 256 + q as a byte, or 0
        void take(int window, int16_t * slots) {
            for (int i = 0; i < PIECES; i++) {
                const int32_t * next = entries[i] + at[i];
                int             n    = 0;
                for (int s = 0; s < STEP_SLOTS / PIECES; s++) {
                    const int32_t slot                 = next[s] - (window << 8);
                    const int32_t here                 = slot < WINDOW << 8;
                    slots[STEP_SLOTS / PIECES * i + s] = static_cast<int16_t>(slot & -here);
                    n += here;
                }
                at[i] += n;
            }
        }
    };
    static constexpr int NO_COLUMN = 1 << 20;

    bool add_bundle(size_t first, std::vector<uint8_t> * out) {
        pieces_in_bundle pieces;
        bundle_header    header        = {};
        uint8_t          rows[PIECES]  = {};
        uint16_t         scale[PIECES] = {};
        for (size_t i = 0; i < PIECES; i++) {
            pieces.at[i] = 0;
            size_t n     = 0;
            if (first + i < order_.size()) {
                const piece & p = pieces_[order_[first + i]];
                n               = static_cast<size_t>(p.n);
                std::copy_n(entries_.data() + p.first, n, pieces.entries[i]);
                scale[i] = p.scale;
                rows[i]  = p.row;
            }
            std::fill_n(pieces.entries[i] + n, 4, NO_COLUMN << 8);
        }
        const size_t at = out->size();
        out->resize(at + static_cast<size_t>(bundle_header_nbytes(type_)));
        int window    = pieces.next_column();
        header.first  = static_cast<uint16_t>(window);
        int n_vectors = 0;
        for (int least = window; least != NO_COLUMN; n_vectors++) {
            uint8_t deltas[2];
            int16_t slots[2][STEP_SLOTS] = {};
            for (int step = 0; step < 2; step++) {
                // 0 where all are taken; a window that is farther away takes several steps
                deltas[step] = static_cast<uint8_t>(least == NO_COLUMN ? 0 : std::min(least - window, 255));
                window += deltas[step];
                pieces.take(window, slots[step]);
                least = pieces.next_column();
            }
            add_vector(deltas, slots, out);
        }
        header.n_vectors = static_cast<uint8_t>(n_vectors);
        memcpy(out->data() + at, &header, sizeof(header));
        memcpy(out->data() + at + sizeof(header), rows, sizeof(rows));
        memcpy(out->data() + at + bundle_scales_at(type_), scale, sizeof(scale));
        return n_vectors <= 255;
    }

    void add_vector(const uint8_t * deltas, const int16_t (*slots)[STEP_SLOTS], std::vector<uint8_t> * out) {
        uint8_t vector[bundle_vector_nbytes(GGML_MACKO_TYPE_Q8_0)] = { deltas[0], deltas[1] };
        for (int i = 0; i < STEP_SLOTS; i++) {
            vector[2 + i] = static_cast<uint8_t>(slots[0][i] >> 8 | slots[1][i] >> 8 << 4);
        }
        uint8_t * q = vector + 2 + STEP_SLOTS;
        for (int i = 0; i < STEP_SLOTS; i++) {
            if (type_ == GGML_MACKO_TYPE_Q4_0) {
                q[i] = static_cast<uint8_t>(((slots[0][i] + 8) & 15) | (slots[1][i] + 8) << 4);
            } else {
                q[i]              = static_cast<uint8_t>(slots[0][i]);
                q[STEP_SLOTS + i] = static_cast<uint8_t>(slots[1][i]);
            }
        }
        out->insert(out->end(), vector, vector + bundle_vector_nbytes(type_));
    }
};

// ---- F16 and BF16 values ----

class span_packer {
public:
    explicit span_packer(const bitmap_matrix & from) : from_(from), words_(mask_words(from.cols)) {}

    // Appends the group's bundles to out.
    bool pack(int64_t group, std::vector<uint8_t> * out) {
        const int64_t begin = group * BUNDLE_ROWS, end = std::min(begin + BUNDLE_ROWS, from_.rows);
        const auto *  values = reinterpret_cast<const uint16_t *>(from_.values);
        for (int64_t r = begin; r < end; r++) {
            values_[r - begin] = values + from_.row_off[r];
        }
        for (int64_t word = 0; word < words_; word += SPAN_WORDS) {
            int n = 0;
            for (int64_t r = begin; r < end; r++) {
                n += add_piece(from_.masks + r * words_ + word, std::min(SPAN_WORDS, words_ - word),
                               static_cast<int>(r - begin), &order_[n]);
            }
            sort(n);
            for (int i = 0; i < n; i += PIECES) {
                add_bundle(order_ + i, std::min(n - i, PIECES), static_cast<int>(word * 64), out);
            }
        }
        return true;
    }

private:
    static constexpr int     PIECES     = bundle_pieces(GGML_MACKO_TYPE_F16);
    static constexpr int64_t SPAN_WORDS = BUNDLE_SPAN / 64;
    static constexpr int     SORTED     = 2 * PIECES;
    static constexpr uint8_t NO_COLUMN  = 255; // which no window reaches

    struct bundle_vector {
        uint8_t  delta[2], place[STEP_SLOTS];
        uint16_t value[2 * STEP_SLOTS];
    };
    static_assert(sizeof(bundle_vector) == bundle_vector_nbytes(GGML_MACKO_TYPE_F16), "no padding");

    // Of the pieces of a bundle, columns that come next, and where the others and the values are.
    struct pieces_in_bundle {
        uint8_t          next[PIECES];
        const uint8_t *  columns[PIECES];
        const uint16_t * values[PIECES];
    };

    const bitmap_matrix & from_;
    const int64_t         words_;
    const uint16_t *      values_[BUNDLE_ROWS]; // the next of each row
    uint8_t               columns_[BUNDLE_ROWS][BUNDLE_SPAN + 1];
    uint8_t               n_[BUNDLE_ROWS];     // non-zeros of each piece
    uint32_t              order_[BUNDLE_ROWS]; // of the pieces: the low byte is the row

    // Writes a number to sort a piece by, if it has non-zeros: more of them first, then the mean of their columns.
    int add_piece(const uint64_t * mask, int64_t words, int row, uint32_t * order) {
        uint8_t * columns = columns_[row];
        unsigned  n = 0, sum = 0;
        for (int64_t word = 0; word < words; word++) {
            for (uint64_t bits = mask[word]; bits; bits &= bits - 1) {
                const auto column = static_cast<unsigned>(word * 64 + __builtin_ctzll(bits));
                columns[n++]      = static_cast<uint8_t>(column);
                sum += column;
            }
        }
        columns[n] = NO_COLUMN;
        n_[row]    = static_cast<uint8_t>(n);
        *order     = (255 - n) << 24 | (n == 0 ? 0 : 16 * sum / n) << 8 | static_cast<unsigned>(row);
        return n > 0;
    }

    // By their number of non-zeros, so that those of a bundle end together, and SORTED of them by where these are.
    void sort(int n) {
        std::sort(order_, order_ + n);
        for (int i = 0; i < n; i += SORTED) {
            const int end = std::min(i + SORTED, n);
            for (int k = i; k < end; k++) {
                order_[k] &= 0xffffff;
            }
            std::sort(order_ + i, order_ + end);
        }
    }

    static int least_of(const uint8_t (&next)[PIECES]) {
        uint8_t least = NO_COLUMN;
        for (const uint8_t column : next) {
            least = std::min(least, column);
        }
        return least;
    }

    void add_bundle(const uint32_t * pieces, int n, int column, std::vector<uint8_t> * out) {
        pieces_in_bundle all;
        uint8_t          rows[PIECES] = {};
        for (int i = 0; i < PIECES; i++) {
            rows[i]        = static_cast<uint8_t>(i < n ? pieces[i] & 255 : 0);
            all.columns[i] = i < n ? columns_[rows[i]] : &NO_COLUMN;
            all.values[i]  = values_[rows[i]];
            all.next[i]    = *all.columns[i];
        }
        int           window = least_of(all.next);
        bundle_header header = { static_cast<uint16_t>(column + window), 0, 0 };
        const size_t  at     = out->size();
        out->resize(at + static_cast<size_t>(bundle_header_nbytes(from_.type)));
        for (int least = window; least != NO_COLUMN; header.n_vectors++) { // each window begins at another column
            bundle_vector vector;
            for (int step = 0; step < 2; step++, least = least_of(all.next)) {
                vector.delta[step] = static_cast<uint8_t>(least == NO_COLUMN ? 0 : least - window);
                window += vector.delta[step];
                add_step(step, window, &vector, &all);
            }
            const auto * bytes = reinterpret_cast<const uint8_t *>(&vector);
            out->insert(out->end(), bytes, bytes + sizeof(vector));
        }
        memcpy(out->data() + at, &header, sizeof(header));
        memcpy(out->data() + at + sizeof(header), rows, sizeof(rows));
        for (int i = 0; i < n; i++) {
            values_[rows[i]] += n_[rows[i]];
        }
    }

    // The next of each piece, where it is in the window. No branch: whether it is cannot be predicted. The first loop
    // becomes vector instructions.
    static void add_step(int step, int window, bundle_vector * vector, pieces_in_bundle * all) {
        uint8_t used[PIECES];
        for (int i = 0; i < PIECES; i++) {
            const auto place  = static_cast<uint8_t>(all->next[i] - window);
            const auto before = static_cast<uint8_t>(step == 0 ? 0 : vector->place[i]);
            used[i]           = place < WINDOW;
            vector->place[i]  = static_cast<uint8_t>(before | (used[i] ? place : 0) << 4 * step);
        }
        for (int i = 0; i < PIECES; i++) {
            vector->value[bundle_value_at(step, i)] = static_cast<uint16_t>(*all->values[i] & -used[i]);
            all->values[i] += used[i];
            all->columns[i] += used[i];
            all->next[i] = *all->columns[i];
        }
    }
};

// Calls pack(group, &bytes) of a packer for each group, some at a time, and writes what they give one after the other.
template <typename PACKER, typename SOURCE>
bool pack_groups(const SOURCE & source, int n_threads, const bitmap_matrix & w) {
    const int64_t                     groups = n_bundle_groups(w.rows), most = 8 * static_cast<int64_t>(n_threads);
    std::vector<std::vector<uint8_t>> bytes(static_cast<size_t>(std::min(groups, most)));
    uint64_t                          total = 0;
    for (int64_t first = 0; first < groups; first += most) {
        const int64_t     n = std::min(most, groups - first);
        std::atomic<bool> fits{ true };
        parallel_ranges(n_threads, n, [&](int64_t begin, int64_t end) {
            PACKER packer(source);
            for (int64_t i = begin; i < end; i++) {
                bytes[static_cast<size_t>(i)].clear();
                if (!packer.pack(first + i, &bytes[static_cast<size_t>(i)])) {
                    fits = false;
                }
            }
        });
        for (int64_t i = 0; i < n; i++) {
            w.group_off[first + i] = total;
            total += bytes[static_cast<size_t>(i)].size();
        }
        if (!fits || total > static_cast<uint64_t>(w.bundles_nbytes)) {
            return false;
        }
        parallel_ranges(n_threads, n, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                const std::vector<uint8_t> & group = bytes[static_cast<size_t>(i)];
                std::copy(group.begin(), group.end(), w.bundles + w.group_off[first + i]);
            }
        });
    }
    w.group_off[groups] = total;
    return total > 0;
}

} // namespace

bool bundles_pack(const packed_view & view, int n_threads, const bitmap_matrix & w) {
    return pack_groups<quant_packer>(view, n_threads, w);
}

bool bundles_pack(const bitmap_matrix & from, int n_threads, const bitmap_matrix & w) {
    return pack_groups<span_packer>(from, n_threads, w);
}

} // namespace macko::cpu
