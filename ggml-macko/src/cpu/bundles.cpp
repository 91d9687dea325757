// Makes bundles (bundles.h) of packed quantized values.
#include "cpu/bundles.h"
#include "codec/team.h"
#include "cpu/bitmap.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace macko::cpu {

// Part of the slots that random places of this density fill, measured; the plan has a margin.
static double fill_of(double density) {
    constexpr struct {
        double density, fill;
    } measured[] = { { 0.05, 0.22 }, { 0.1, 0.37 }, { 0.3, 0.71 }, { 0.5, 0.82 }, { 1.0, 0.9 } };
    size_t i     = 1;
    for (; i + 1 < std::size(measured) && density > measured[i].density; i++) {
    }
    const auto & a = measured[i - 1];
    const auto & b = measured[i];
    return a.fill + (b.fill - a.fill) * (density - a.density) / (b.density - a.density);
}

int64_t bundles_nbytes(const macko_desc & desc, int32_t value_type) {
    const double density =
        static_cast<double>(desc.nnz) / (static_cast<double>(desc.rows) * static_cast<double>(desc.cols));
    if (!is_quant_type(value_type) || desc.cols > BUNDLE_COLS || density < 0.05) {
        return 0;
    }
    constexpr double margin  = 1.05;
    const int64_t    pieces  = desc.rows + desc.nnz / QUANT_BLOCK;
    const int64_t    bundles = pieces / BUNDLE_PIECES + n_bundle_groups(desc.rows);
    // of those with which a bundle ends, half of the steps are empty
    const double full    = static_cast<double>(desc.nnz) / (2 * STEP_SLOTS) / fill_of(density);
    const auto   vectors = static_cast<int64_t>((full + static_cast<double>(bundles) / 2) * margin);
    return bundles * static_cast<int64_t>(sizeof(bundle_header)) + vectors * bundle_vector_nbytes(value_type);
}

namespace {

struct piece {
    int32_t  first, n; // of the group's non-zeros
    uint16_t scale;
    uint8_t  row;
};

// The non-zeros of a group of rows, and its bundles.
class group_packer {
public:
    group_packer(const packed_view & view) : view_(view), type_(view.arrays().desc.value_type) {}

    // Appends the group's bundles to out. false if a bundle has too many vectors.
    bool pack(int64_t group, std::vector<uint8_t> * out) {
        const int64_t begin = group * BUNDLE_ROWS, end = std::min(begin + BUNDLE_ROWS, view_.desc().rows);
        entries_.clear();
        pieces_.clear();
        for (int64_t r = begin; r < end; r++) {
            add_row(r, static_cast<uint8_t>(r - begin));
        }
        sort();
        for (size_t i = 0; i < order_.size(); i += BUNDLE_PIECES) {
            if (!add_bundle(i, out)) {
                return false;
            }
        }
        return true;
    }

private:
    static constexpr size_t SORTED = BUNDLE_BLOCK * BUNDLE_PIECES;

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
        int32_t entries[BUNDLE_PIECES][QUANT_BLOCK + 4];
        int     at[BUNDLE_PIECES]; // the next of each

        int next_column() const {
            const auto next = [this](int i) { return entries[i][at[i]]; };
            return std::min(std::min(next(0), next(1)), std::min(next(2), next(3))) >> 8;
        }
        // the next four of each piece, as far as they are in the window: place * 256 + q as a byte, or 0
        void take(int window, int16_t * slots) {
            for (int i = 0; i < BUNDLE_PIECES; i++) {
                const int32_t * next = entries[i] + at[i];
                int             n    = 0;
                for (int s = 0; s < STEP_SLOTS / BUNDLE_PIECES; s++) {
                    const int32_t slot                        = next[s] - (window << 8);
                    const int32_t here                        = slot < WINDOW << 8;
                    slots[STEP_SLOTS / BUNDLE_PIECES * i + s] = static_cast<int16_t>(slot & -here);
                    n += here;
                }
                at[i] += n;
            }
        }
    };
    static constexpr int NO_COLUMN = 1 << 20;

    bool add_bundle(size_t first, std::vector<uint8_t> * out) {
        pieces_in_bundle pieces;
        bundle_header    header = {};
        for (size_t i = 0; i < BUNDLE_PIECES; i++) {
            pieces.at[i] = 0;
            size_t n     = 0;
            if (first + i < order_.size()) {
                const piece & p = pieces_[order_[first + i]];
                n               = static_cast<size_t>(p.n);
                std::copy_n(entries_.data() + p.first, n, pieces.entries[i]);
                header.scale[i] = p.scale;
                header.row[i]   = p.row;
            }
            std::fill_n(pieces.entries[i] + n, 4, NO_COLUMN << 8);
        }
        const size_t at = out->size();
        out->resize(at + sizeof(header));
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

} // namespace

bool bundles_pack(const packed_view & view, int n_threads, const bitmap_matrix & w) {
    const int64_t                     groups = n_bundle_groups(w.rows);
    std::vector<std::vector<uint8_t>> bytes(static_cast<size_t>(groups));
    std::atomic<int64_t>              total{ 0 };
    parallel_ranges(n_threads, groups, [&](int64_t begin, int64_t end) {
        group_packer packer(view);
        for (int64_t g = begin; g < end && total <= w.bundles_nbytes; g++) { // no more memory than there is room for
            std::vector<uint8_t> & group = bytes[static_cast<size_t>(g)];
            total += packer.pack(g, &group) ? static_cast<int64_t>(group.size()) : w.bundles_nbytes + 1;
        }
    });
    if (total > w.bundles_nbytes || total == 0) {
        return false;
    }
    uint64_t at = 0;
    for (size_t g = 0; g < bytes.size(); g++) {
        w.group_off[g] = at;
        std::copy(bytes[g].begin(), bytes[g].end(), w.bundles + at);
        at += bytes[g].size();
    }
    w.group_off[groups] = at;
    return true;
}

} // namespace macko::cpu
