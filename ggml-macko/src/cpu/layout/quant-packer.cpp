// Converts quantized values to bundles (bundles.h).
#include "cpu/layout/quant-packer.h"
#include "platform/compiler.h"

#include <algorithm>

namespace macko::cpu {

namespace {

constexpr int     PIECES      = bundle_pieces(GGML_MACKO_TYPE_Q8_0);
constexpr int     PIECE_SLOTS = STEP_SLOTS / PIECES; // slots of each piece in a step
constexpr int32_t NO_COLUMN   = 1 << 20;             // beyond the reach of any window
constexpr int     SORTED      = BUNDLE_BLOCK * PIECES;
constexpr int     MOST_STEPS  = 2 * UINT8_MAX;

// The steps of a bundle: for each step its slots, place * 256 + q as a byte, or 0.
struct bundle_steps {
    uint8_t delta[MOST_STEPS];
    int16_t slots[MOST_STEPS][STEP_SLOTS];
};

// Moves up to four entries of each piece into each step, if they are in the window. Returns the number of steps, which
// is even, or 0 if there are too many. No branch depends on the content of the window, because that cannot be
// predicted.
MACKO_CLONES int make_steps(const int32_t * const * pieces, bundle_steps * out) {
    const int32_t * next[PIECES];
    for (int i = 0; i < PIECES; i++) {
        next[i] = pieces[i];
    }
    const auto least = [&] { return std::min(std::min(*next[0], *next[1]), std::min(*next[2], *next[3])) >> 8; };
    int32_t    now = least(), window = now;
    int        n = 0;
    for (; now != NO_COLUMN || n % 2 != 0; n++) {
        if (n == MOST_STEPS) {
            return 0;
        }
        // 0 if all entries were moved; a distant window takes several steps
        const int32_t delta = now == NO_COLUMN ? 0 : std::min(now - window, 255);
        window += delta;
        out->delta[n] = static_cast<uint8_t>(delta);
        int32_t slot[STEP_SLOTS], here[STEP_SLOTS];
        for (int i = 0; i < PIECES; i++) {
            for (int s = 0; s < PIECE_SLOTS; s++) {
                slot[PIECE_SLOTS * i + s] = next[i][s] - (window << 8);
            }
        }
        for (int i = 0; i < STEP_SLOTS; i++) {
            here[i]          = -(slot[i] < WINDOW << 8);
            out->slots[n][i] = static_cast<int16_t>(slot[i] & here[i]);
        }
        for (int i = 0; i < PIECES; i++) {
            const int32_t * h = here + PIECE_SLOTS * i;
            next[i] -= h[0] + h[1] + h[2] + h[3];
        }
        now = least();
    }
    return n;
}

// Writes the vectors of a bundle.
template <int TYPE>
inline __attribute__((always_inline)) void write_vectors(const bundle_steps & steps, int n, uint8_t * out) {
    for (int k = 0; k < n; k += 2, out += bundle_vector_nbytes(TYPE)) {
        const int16_t *a = steps.slots[k], *b = steps.slots[k + 1];
        uint8_t *      q = out + BUNDLE_VALUES_AT;
        out[0]           = steps.delta[k];
        out[1]           = steps.delta[k + 1];
        for (int i = 0; i < STEP_SLOTS; i++) {
            out[2 + i] = static_cast<uint8_t>(a[i] >> 8 | b[i] >> 8 << 4);
        }
        for (int i = 0; i < STEP_SLOTS; i++) {
            if constexpr (TYPE == GGML_MACKO_TYPE_Q4_0) {
                q[i] = static_cast<uint8_t>(((a[i] + 8) & 15) | (b[i] + 8) << 4);
            } else {
                q[i]              = static_cast<uint8_t>(a[i]);
                q[STEP_SLOTS + i] = static_cast<uint8_t>(b[i]);
            }
        }
    }
}
MACKO_CLONES void write_nibbles(const bundle_steps & steps, int n, uint8_t * out) {
    write_vectors<GGML_MACKO_TYPE_Q4_0>(steps, n, out);
}
MACKO_CLONES void write_bytes(const bundle_steps & steps, int n, uint8_t * out) {
    write_vectors<GGML_MACKO_TYPE_Q8_0>(steps, n, out);
}

} // namespace

template <int32_t TYPE> static void read_blocks(const uint8_t * blocks, int64_t n, uint8_t * q) {
    for (int64_t b = 0; b < n; b++) {
        for (int64_t i = 0; i < QUANT_BLOCK; i++) {
            q[b * QUANT_BLOCK + i] = static_cast<uint8_t>(quant_at(blocks + b * quant_block_nbytes(TYPE), TYPE, i));
        }
    }
}

void quant_packer::read_quants(const packed_arrays & a, int64_t first_block, int64_t end_block) {
    const int32_t   type   = a.desc.value_type;
    const int64_t   n      = end_block - first_block;
    const uint8_t * blocks = static_cast<const uint8_t *>(a.values) + first_block * quant_block_nbytes(type);
    quants_.resize(std::max(quants_.size(), static_cast<size_t>(n * QUANT_BLOCK)));
    const auto read = type == GGML_MACKO_TYPE_Q8_0   ? read_blocks<GGML_MACKO_TYPE_Q8_0>
                      : type == GGML_MACKO_TYPE_Q5_0 ? read_blocks<GGML_MACKO_TYPE_Q5_0>
                      : type == GGML_MACKO_TYPE_Q4_0 ? read_blocks<GGML_MACKO_TYPE_Q4_0>
                                                     : read_blocks<GGML_MACKO_TYPE_Q4_NL>;
    read(blocks, n, quants_.data());
}

// Makes a piece of a row's values in a block, without zeros.
void quant_packer::add_rows(const packed_view & view, int64_t begin, int64_t end) {
    const packed_arrays & a           = view.arrays();
    const auto *          blocks      = static_cast<const uint8_t *>(a.values);
    const int64_t         first_block = a.row_ptr[begin] / QUANT_BLOCK;
    const int64_t         most_pieces = (a.row_ptr[end] - a.row_ptr[begin]) / QUANT_BLOCK + 2 * (end - begin);
    read_quants(a, first_block, (a.row_ptr[end] + QUANT_BLOCK - 1) / QUANT_BLOCK);
    cols_.resize(std::max(cols_.size(), static_cast<size_t>(view.desc().cols)));
    entries_.resize(std::max(entries_.size(),
                             static_cast<size_t>(a.row_ptr[end] - a.row_ptr[begin] + (most_pieces + 1) * PIECE_SLOTS)));
    int32_t n = 0;
    std::fill_n(entries_.begin(), PIECE_SLOTS, NO_COLUMN << 8); // an empty piece
    n += PIECE_SLOTS;
    for (int64_t r = begin; r < end; r++) {
        int32_t * last_col = cols_.data();
        view.for_each_column(r, [&](int64_t col) { *last_col++ = static_cast<int32_t>(col); });
        const int32_t * col = cols_.data();
        for (int64_t k = a.row_ptr[r], row_end = a.row_ptr[r + 1]; k < row_end;) {
            const int64_t   block = k / QUANT_BLOCK;
            const int64_t   stop  = std::min((block + 1) * QUANT_BLOCK, row_end);
            const uint8_t * q     = quants_.data() + (k - first_block * QUANT_BLOCK);
            const int32_t   first = n;
            for (; k < stop; k++, q++) {
                entries_[static_cast<size_t>(n)] = *col++ << 8 | *q;
                n += *q != 0;
            }
            if (n > first) {
                pieces_.push_back({ first, static_cast<uint16_t>(entries_[static_cast<size_t>(first)] >> 8),
                                    static_cast<uint16_t>(entries_[static_cast<size_t>(n - 1)] >> 8),
                                    quant_scale_bits(blocks + block * quant_block_nbytes(a.desc.value_type)),
                                    static_cast<uint8_t>(r - begin) });
                std::fill_n(entries_.begin() + n, PIECE_SLOTS, NO_COLUMN << 8);
                n += PIECE_SLOTS;
            }
        }
    }
}

// Sorts pieces by first column, and each group of SORTED by last column.
void quant_packer::sort(int64_t cols) {
    starts_.assign(static_cast<size_t>(cols) + 1, 0);
    for (const piece & p : pieces_) {
        starts_[static_cast<size_t>(p.first_col) + 1]++;
    }
    for (size_t c = 1; c < starts_.size(); c++) {
        starts_[c] += starts_[c - 1];
    }
    sorted_.resize(pieces_.size());
    for (const piece & p : pieces_) {
        sorted_[starts_[p.first_col]++] = p;
    }
    for (size_t i = 0; i < sorted_.size(); i += SORTED) {
        const size_t n = std::min<size_t>(SORTED, sorted_.size() - i);
        uint32_t     keys[SORTED];
        for (size_t k = 0; k < n; k++) { // insertion sort
            const uint32_t key = static_cast<uint32_t>(sorted_[i + k].last_col) * SORTED + static_cast<uint32_t>(k);
            size_t         at  = k;
            for (; at > 0 && keys[at - 1] > key; at--) {
                keys[at] = keys[at - 1];
            }
            keys[at] = key;
        }
        for (size_t k = 0; k < n; k++) {
            pieces_[i + k] = sorted_[i + keys[k] % SORTED];
        }
    }
}

bool quant_packer::pack(const packed_view & view, int64_t group, group_bytes * out) {
    const int32_t type  = view.arrays().desc.value_type;
    const int64_t begin = group * BUNDLE_ROWS, end = std::min(begin + BUNDLE_ROWS, view.desc().rows);
    const auto    header_nbytes = static_cast<size_t>(bundle_header_nbytes(type));
    const auto    vector_nbytes = static_cast<size_t>(bundle_vector_nbytes(type));
    bundle_steps  steps;
    pieces_.clear();
    add_rows(view, begin, end);
    sort(view.desc().cols);
    for (size_t i = 0; i < pieces_.size(); i += PIECES) {
        const int32_t * entries[PIECES];
        uint8_t         rows[PIECES]   = {};
        uint16_t        scales[PIECES] = {};
        int32_t         first          = NO_COLUMN;
        for (size_t k = 0; k < PIECES; k++) {
            entries[k] = entries_.data();
            if (i + k < pieces_.size()) {
                const piece & p = pieces_[i + k];
                entries[k] += p.first;
                rows[k]   = p.row;
                scales[k] = p.scale;
                first     = std::min<int32_t>(first, p.first_col);
            }
        }
        const int n = make_steps(entries, &steps);
        if (n == 0) {
            return false;
        }
        uint8_t *           bytes  = out->room_for(header_nbytes + static_cast<size_t>(n / 2) * vector_nbytes);
        const bundle_header header = { static_cast<uint16_t>(first), static_cast<uint8_t>(n / 2), 0 };
        memcpy(bytes, &header, sizeof(header));
        memcpy(bytes + sizeof(header), rows, sizeof(rows));
        memcpy(bytes + bundle_scales_at(type), scales, sizeof(scales));
        (type == GGML_MACKO_TYPE_Q4_0 ? write_nibbles : write_bytes)(steps, n, bytes + header_nbytes);
        out->append(header_nbytes + static_cast<size_t>(n / 2) * vector_nbytes);
    }
    return true;
}

} // namespace macko::cpu
