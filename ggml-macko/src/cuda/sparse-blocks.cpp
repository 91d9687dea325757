#include "cuda/sparse-blocks.h"

#include <algorithm>
#include <cmath>

namespace macko {

// ---- shape and size ----

// fraction of independent non-zeros of density d that spill: those with a gap over the reach, and those behind them that do not catch up
static double spill_rate(double d, double reach) {
    const double far   = std::pow(1 - d, reach);
    const double again = far + reach * d * std::pow(1 - d, reach - 1); // fewer than two non-zeros within reach
    return far / std::max(1e-3, 1 - again);
}

static double density_of(const packed_desc & desc) { return static_cast<double>(desc.dense.nnz) / static_cast<double>(desc.dense.rows * desc.dense.cols); }

blocks_shape cuda_blocks_shape(const packed_desc & desc, int64_t shared_nbytes) {
    const int64_t cols = desc.dense.cols, groups = desc.dense.nnz / QUANT_BLOCK / desc.dense.rows; // of a row
    if (!blocks_value_words(desc.value_type)) {
        return { 0, 0 };
    }
    // few lanes: runs of many groups, of which the last one may be missing; many: more warps have a row, and fewer copies of x (measured, notes)
    for (int lanes = groups < 48 || (groups < 96 && desc.dense.rows >= 8192) ? 8 : groups < 512 ? 16 : 32; lanes <= 32; lanes *= 2) {
        const int64_t width = blocks_width(cols, lanes);
        int    bits  = 8;
        double least = 1e300;
        for (const int b : { 3, 4, 8 }) {
            const double cost = b + 8 * sizeof(cuda_sparse_spilled) * spill_rate(density_of(desc), static_cast<double>(blocks_reach(b, width)));
            if (cost < least && (b == 8 || blocks_overshoot(b) < 32 * width)) {
                bits  = b;
                least = cost;
            }
        }
        if (32 * width <= 65536 && blocks_shared_nbytes(width, lanes, blocks_overshoot(bits), 1) <= shared_nbytes) {
            return { bits, lanes };
        }
    }
    return { 0, 0 };
}

int64_t cuda_blocks_max_spill(const packed_desc & desc, const blocks_shape & shape) {
    const double n = spill_rate(density_of(desc), static_cast<double>(blocks_reach(shape.bits, blocks_width(desc.dense.cols, shape.lanes)))) * static_cast<double>(desc.dense.nnz);
    return std::min(desc.dense.nnz, static_cast<int64_t>(1.1 * n + 4 * std::sqrt(n)) + 64);
}

cuda_sparse_matrix cuda_blocks_bind(const packed_desc & desc, const blocks_shape & shape, int64_t n_spill, void * memory) {
    const macko_desc & d = desc.dense;
    cuda_sparse_matrix m = {};
    m.rows       = d.rows;
    m.cols       = d.cols;
    m.type       = d.type;
    m.value_type = desc.value_type;
    m.delta_bits = shape.bits;
    m.layout     = CUDA_SPARSE_LAYOUT_BLOCKS;
    m.lanes      = shape.lanes;
    m.stripe     = static_cast<int32_t>(blocks_width(d.cols, shape.lanes));
    m.overshoot  = static_cast<int32_t>(blocks_overshoot(shape.bits));
    m.n_groups   = d.nnz / QUANT_BLOCK + d.rows + 1;
    cuda_sparse_parts parts(memory);
    parts.take(&m.values, m.n_groups * 4 * blocks_value_words(desc.value_type));
    parts.take(&m.codes, m.n_groups * 4 * shape.bits);
    parts.take(&m.scales, m.n_groups);
    parts.take(&m.bases, d.rows * shape.lanes);
    parts.take(&m.row_ptr, d.rows + 1);
    parts.take(&m.spill_ptr, d.rows + 1);
    parts.take(&m.spill, n_spill);
    m.nbytes = parts.nbytes();
    return m;
}

// ---- words of a group ----
// Entries come in quads: quad i is entries 4 i ... 4 i + 3, entry j of it in byte j of some word.

// q as signed bytes; Q4_0: two quads in the low and high nibbles of a word
static void pack_values(const int8_t * q, int32_t type, uint32_t * words) {
    for (int k = 0; k < QUANT_BLOCK; k++) {
        const int quad = k / 4, byte = k % 4;
        if (type == GGML_MACKO_TYPE_Q8_0) {
            words[quad] |= static_cast<uint32_t>(static_cast<uint8_t>(q[k])) << 8 * byte;
        } else {
            words[quad / 2] |= static_cast<uint32_t>(q[k] & 15) << (8 * byte + quad % 2 * 4);
        }
    }
}

// 8 bits: a word per quad. 4 bits: two quads per word, in low and high nibbles. 3 bits: two quads per word, in bits 0-2 and 3-5 of its bytes; the
// fourth word is cut up into the bits 6-7 of the others.
static void pack_codes(const uint8_t * code, int bits, uint32_t * words) {
    uint32_t field[8] = {};
    for (int k = 0; k < QUANT_BLOCK; k++) {
        const int quad = k / 4, byte = k % 4;
        field[bits == 8 ? quad : quad / 2] |= static_cast<uint32_t>(code[k]) << (8 * byte + (bits == 8 ? 0 : quad % 2 * bits));
    }
    for (int i = 0; i < bits; i++) {
        words[i] = field[i] | (bits == 3 ? (field[3] >> 2 * i & 0x03030303u) << 6 : 0);
    }
}

// to planes of 4, 2 and 1 words
static void put_words(const uint32_t * words, int n, uint8_t * base, int64_t n_groups, int64_t slot) {
    for (int at = 0; at < n;) {
        const int width = n - at >= 4 ? 4 : n - at >= 2 ? 2 : 1;
        memcpy(base + (at * n_groups + width * slot) * 4, words + at, static_cast<size_t>(width) * 4);
        at += width;
    }
}

// ---- a row ----

struct row_maker {
    const packed_view        & view;
    const cuda_sparse_matrix & m;
    std::vector<int64_t>       columns; // of the row
    std::vector<cuda_sparse_spilled> spill; // of all rows so far

    // groups of a row, and the first of its file's blocks
    int64_t first_block(int64_t row) const { return view.arrays().row_ptr[row] / QUANT_BLOCK; }
    int64_t groups(int64_t row) const { return (view.arrays().row_ptr[row + 1] + QUANT_BLOCK - 1) / QUANT_BLOCK - first_block(row); }

    void read_columns(int64_t row) {
        columns.clear();
        view.for_each_column(row, [&](int64_t c) { columns.push_back(c); });
    }

    // entry(slot in the row, code, column or -1 if the slot has no value of its own, column that spills or -1) for each slot of a run's groups begin ... end-1
    template <typename F> int64_t walk_run(int64_t row, int64_t begin, int64_t end, F && entry) const {
        const int64_t k0 = view.arrays().row_ptr[row] - first_block(row) * QUANT_BLOCK, k1 = k0 + static_cast<int64_t>(columns.size());
        const int64_t from = begin * QUANT_BLOCK, to = end * QUANT_BLOCK, reach = blocks_reach(m.delta_bits, m.stripe);
        const int64_t ahead = std::max<int64_t>(0, k0 - from); // entries of the row before
        const int64_t first = from + ahead < k1 ? columns[static_cast<size_t>(from + ahead - k0)] : 0;
        int64_t at = first - ahead; // where the next entry is without a gap
        for (int64_t s = from; s < to; s++) {
            if (s < k0 || s >= k1) {
                entry(s, 0, -1, -1);
                at++;
                continue;
            }
            const int64_t column = columns[static_cast<size_t>(s - k0)], gap = column - at;
            const bool    fits   = gap < reach;
            entry(s, fits ? gap : reach - 1, fits ? column : -1, fits ? -1 : column);
            at += fits ? gap + 1 : reach;
        }
        return first - ahead;
    }

    template <typename F> void for_each_run(int64_t row, F && f) const {
        const int64_t n = groups(row), full = n / m.lanes;
        for (int lane = 0; lane < m.lanes; lane++) {
            const int64_t skip = lane * n / m.lanes, end = (lane + 1) * n / m.lanes;
            f(lane, skip, end, [=, this_lanes = m.lanes](int64_t g) { return g - skip < full ? (g - skip) * this_lanes + lane : full * this_lanes + skip - lane * full; });
        }
    }

    int q_at(int64_t block, int64_t i) const {
        const int32_t type = m.value_type;
        return quant_at(static_cast<const uint8_t *>(view.arrays().values) + block * quant_block_nbytes(type), type, i);
    }
    uint16_t scale_bits(int64_t block) const { return quant_scale_bits(static_cast<const uint8_t *>(view.arrays().values) + block * quant_block_nbytes(m.value_type)); }

    void make(int64_t row) {
        const int64_t block0 = first_block(row), group0 = block0 + row, width = m.stripe;
        const int64_t copy = row % (32 / m.lanes) * m.lanes * width; // place of column 0
        read_columns(row);
        for_each_run(row, [&](int lane, int64_t begin, int64_t end, auto && slot_of) {
            int8_t  q[QUANT_BLOCK];
            uint8_t code[QUANT_BLOCK];
            const int64_t start = walk_run(row, begin, end, [&](int64_t s, int64_t c, int64_t column, int64_t spilled) {
                const int64_t i = s % QUANT_BLOCK, block = block0 + s / QUANT_BLOCK;
                const int value = column >= 0 || spilled >= 0 ? q_at(block, i) : 0;
                q[i]    = static_cast<int8_t>(column >= 0 ? value : 0);
                code[i] = static_cast<uint8_t>(c);
                if (spilled >= 0 && value != 0) {
                    spill.push_back({ static_cast<uint32_t>(blocks_word(copy + spilled, width)), float_of_f16(scale_bits(block)) * static_cast<float>(value) });
                }
                if (i == QUANT_BLOCK - 1) {
                    const int64_t slot = group0 + slot_of(s / QUANT_BLOCK);
                    uint32_t words[8] = {};
                    pack_values(q, m.value_type, words);
                    put_words(words, blocks_value_words(m.value_type), m.values, m.n_groups, slot);
                    pack_codes(code, m.delta_bits, words);
                    put_words(words, m.delta_bits, m.codes, m.n_groups, slot);
                    m.scales[slot] = scale_bits(block);
                }
            });
            const int64_t places = 32 * width - 1;
            m.bases[row * m.lanes + lane] = static_cast<uint16_t>(blocks_word((copy + start + places) % places, width));
        });
    }
};

void cuda_blocks_make(const packed_view & view, const blocks_shape & shape, int64_t max_spill, int n_threads, blocks_image * out) {
    const packed_desc & desc = view.arrays().desc;
    const int64_t       rows = desc.dense.rows;
    cuda_sparse_matrix & m   = out->matrix;
    m = cuda_blocks_bind(desc, shape, max_spill, nullptr);
    out->memory.resize(static_cast<size_t>(m.nbytes));
    m = cuda_blocks_bind(desc, shape, max_spill, out->memory.data());
    memcpy(m.row_ptr, view.arrays().row_ptr, static_cast<size_t>(rows + 1) * 4);
    std::vector<row_maker> makers(static_cast<size_t>(n_threads), row_maker { view, m, {}, {} });
    const auto first_row = [&](int64_t i) { return rows * i / n_threads; };
    m.spill_ptr[0] = 0;
#pragma omp parallel for schedule(static, 1) num_threads(n_threads)
    for (int i = 0; i < n_threads; i++) {
        row_maker & maker = makers[static_cast<size_t>(i)];
        for (int64_t r = first_row(i); r < first_row(i + 1); r++) {
            maker.make(r);
            m.spill_ptr[r + 1] = static_cast<int32_t>(maker.spill.size());
        }
    }
    out->n_spill = 0;
    for (int i = 0; i < n_threads; i++) {
        const std::vector<cuda_sparse_spilled> & spill = makers[static_cast<size_t>(i)].spill;
        const int64_t before = out->n_spill;
        for (int64_t r = first_row(i); r < first_row(i + 1); r++) {
            m.spill_ptr[r + 1] += static_cast<int32_t>(before);
        }
        out->n_spill += static_cast<int64_t>(spill.size());
        if (out->n_spill <= max_spill) {
            std::copy(spill.begin(), spill.end(), m.spill + before);
        }
    }
}

} // namespace macko
