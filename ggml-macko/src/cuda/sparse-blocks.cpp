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
    if (!is_quant_type(desc.value_type)) {
        return { 0, 0 };
    }
    // few lanes: runs of many groups, of which the last one may be missing; many: more warps have a row, and fewer copies of x, which for wide matrices of
    // few rows are most of the work (measured, notes)
    const bool copies_pay = cols <= 8192 || desc.dense.rows >= 8192;
    for (int lanes = (groups < 48 && copies_pay) || (groups < 96 && desc.dense.rows >= 8192) ? 8 : groups < 512 ? 16 : 32; lanes <= 32; lanes *= 2) {
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
    m.value_type = blocks_value_type(desc.value_type);
    m.delta_bits = shape.bits;
    m.layout     = CUDA_SPARSE_LAYOUT_BLOCKS;
    m.lanes      = shape.lanes;
    m.stripe     = static_cast<int32_t>(blocks_width(d.cols, shape.lanes));
    m.overshoot  = static_cast<int32_t>(blocks_overshoot(shape.bits));
    m.n_groups   = (d.nnz / QUANT_BLOCK + d.rows + CUDA_BLOCKS_TILE) / CUDA_BLOCKS_TILE * CUDA_BLOCKS_TILE;
    cuda_sparse_parts parts(memory);
    parts.take(&m.values, m.n_groups / CUDA_BLOCKS_TILE * blocks_tile_nbytes(blocks_value_words(m.value_type), shape.bits));
    parts.take(&m.bases, d.rows * shape.lanes);
    parts.take(&m.row_ptr, (d.rows + 1) * static_cast<int64_t>(sizeof(cuda_blocks_row) / sizeof(int32_t)));
    parts.take(&m.spill_ptr, d.rows + 1);
    parts.take(&m.spill, n_spill);
    m.nbytes = parts.nbytes();
    return m;
}

// ---- words of a group ----
// Entries come in quads: quad i is entries 4 i ... 4 i + 3, entry j of it in byte j of some word.

// two quads in every four bytes, the second one `shift` bits up
static void pack_quads(const uint8_t * in, int shift, uint8_t * out) {
    for (int i = 0; i < QUANT_BLOCK / 8; i++) {
        for (int j = 0; j < 4; j++) {
            out[4 * i + j] = static_cast<uint8_t>(in[8 * i + j] | in[8 * i + 4 + j] << shift);
        }
    }
}

// Signed bytes as they are; Q4_0: two quads in the low and high nibbles of a word
static void pack_values(const uint8_t * q, int32_t type, uint8_t * words) {
    if (type == GGML_MACKO_TYPE_Q8_0) {
        memcpy(words, q, QUANT_BLOCK);
        return;
    }
    uint8_t nibbles[QUANT_BLOCK];
    std::transform(q, q + QUANT_BLOCK, nibbles, [](uint8_t v) { return static_cast<uint8_t>(v & 15); });
    pack_quads(nibbles, 4, words);
}

// 8 bits: a word per quad. 4 bits: two quads per word, in low and high nibbles. 3 bits: two quads per word, in bits 0-2 and 3-5 of its bytes; the
// fourth word is cut up into the bits 6-7 of the others.
static void pack_codes(const uint8_t * code, int bits, uint8_t * words) {
    if (bits == 8) {
        memcpy(words, code, QUANT_BLOCK);
        return;
    }
    uint8_t fields[16];
    pack_quads(code, bits, fields);
    for (int k = 0; k < 4 * bits; k++) {
        words[k] = static_cast<uint8_t>(fields[k] | (bits == 3 ? (fields[12 + k % 4] >> k / 4 * 2 & 3) << 6 : 0));
    }
}

// to planes of 4, 2 and 1 words; slot: of the tile
static void put_words(const uint8_t * words, int n, uint8_t * base, int64_t slot) {
    for (int at = 0; at < n;) {
        const int width = n - at >= 4 ? 4 : n - at >= 2 ? 2 : 1;
        memcpy(base + (at * CUDA_BLOCKS_TILE + width * slot) * 4, words + 4 * at, static_cast<size_t>(width) * 4);
        at += width;
    }
}

// ---- a row ----

struct row_maker {
    const packed_view        & view;
    const cuda_sparse_matrix & m;
    std::vector<int32_t>       columns; // of the row
    std::vector<cuda_sparse_spilled> spill; // of all rows so far

    // groups of a row, and the first of its file's blocks
    int64_t first_block(int64_t row) const { return view.arrays().row_ptr[row] / QUANT_BLOCK; }
    int64_t groups(int64_t row) const { return (view.arrays().row_ptr[row + 1] + QUANT_BLOCK - 1) / QUANT_BLOCK - first_block(row); }

    void read_columns(int64_t row) {
        columns.resize(static_cast<size_t>(view.arrays().row_ptr[row + 1] - view.arrays().row_ptr[row]));
        int32_t * to = columns.data();
        view.for_each_column(row, [&](int64_t c) { *to++ = static_cast<int32_t>(c); });
    }

    template <typename F> void for_each_run(int64_t row, F && f) const {
        const int64_t n = groups(row), full = n / m.lanes;
        for (int lane = 0; lane < m.lanes; lane++) {
            const int64_t skip = lane * n / m.lanes, end = (lane + 1) * n / m.lanes;
            f(lane, skip, end, [=, this_lanes = m.lanes](int64_t g) { return g - skip < full ? (g - skip) * this_lanes + lane : full * this_lanes + skip - lane * full; });
        }
    }

    // The group of a block: entries begin ... end-1 of it are the row's, in columns[0] and so on. at: where the next entry is without a gap; returns where
    // it is behind the group. copy: place of column 0.
    int64_t make_group(int64_t block, int64_t slot, int64_t begin, int64_t end, const int32_t * column, int64_t at, int64_t copy) {
        const int32_t   type  = view.arrays().desc.value_type;
        const uint8_t * data  = static_cast<const uint8_t *>(view.arrays().values) + block * quant_block_nbytes(type);
        const int64_t   reach = blocks_reach(m.delta_bits, m.stripe);
        uint8_t q[QUANT_BLOCK], code[QUANT_BLOCK] = {}, words[QUANT_BLOCK]; // q: signed bytes
        const auto read = [&](int32_t as) {
            for (int64_t k = 0; k < QUANT_BLOCK; k++) {
                q[k] = k >= begin && k < end ? static_cast<uint8_t>(quant_at(data, as, k)) : 0;
            }
        };
        switch (type) { // each with its own inner loop
            case GGML_MACKO_TYPE_Q8_0: read(GGML_MACKO_TYPE_Q8_0); break;
            case GGML_MACKO_TYPE_Q4_0: read(GGML_MACKO_TYPE_Q4_0); break;
            default:                   read(type);
        }
        at += begin;
        for (int64_t k = begin; k < end; k++) {
            const int64_t gap = column[k - begin] - at;
            if (gap < reach) {
                code[k] = static_cast<uint8_t>(gap);
                at += gap + 1;
                continue;
            }
            code[k] = static_cast<uint8_t>(reach - 1);
            at += reach;
            if (q[k] != 0) {
                spill.push_back({ static_cast<uint32_t>(blocks_word(copy + column[k - begin], m.stripe)), float_of_f16(quant_scale_bits(data)) * static_cast<float>(static_cast<int8_t>(q[k])) });
                q[k] = 0;
            }
        }
        pack_values(q, m.value_type, words);
        const int     value_words = blocks_value_words(m.value_type);
        uint8_t     * tile = m.values + slot / CUDA_BLOCKS_TILE * blocks_tile_nbytes(value_words, m.delta_bits);
        const int64_t in_tile = slot % CUDA_BLOCKS_TILE;
        put_words(words, value_words, tile, in_tile);
        pack_codes(code, m.delta_bits, words);
        put_words(words, m.delta_bits, tile + CUDA_BLOCKS_TILE * 4 * value_words, in_tile);
        const uint16_t scale = quant_scale_bits(data);
        memcpy(tile + CUDA_BLOCKS_TILE * 4 * (value_words + m.delta_bits) + 2 * in_tile, &scale, 2);
        return at + QUANT_BLOCK - end;
    }

    void make(int64_t row) {
        const int64_t block0 = first_block(row), places = 32 * m.stripe - 1;
        const int64_t copy = row % (32 / m.lanes) * m.lanes * m.stripe; // place of column 0
        read_columns(row);
        const size_t spilled = spill.size();
        // the row's entries among those of its blocks
        const int64_t k0 = view.arrays().row_ptr[row] - block0 * QUANT_BLOCK, k1 = k0 + static_cast<int64_t>(columns.size());
        for_each_run(row, [&](int lane, int64_t begin, int64_t end, auto && slot_of) {
            const int64_t ahead = std::max<int64_t>(0, k0 - begin * QUANT_BLOCK); // entries of the row before
            const int64_t first = begin * QUANT_BLOCK + ahead;
            const int64_t start = (first < k1 ? columns[static_cast<size_t>(first - k0)] : 0) - ahead;
            int64_t at = start;
            for (int64_t g = begin; g < end; g++) {
                const int64_t s = g * QUANT_BLOCK, from = std::max(s, k0), to = std::min(s + QUANT_BLOCK, k1);
                at = make_group(block0 + g, block0 + row + slot_of(g), from - s, to - s, columns.data() + (from - k0), at, copy);
            }
            m.bases[row * m.lanes + lane] = static_cast<uint16_t>(blocks_word((copy + start + places) % places, m.stripe));
        });
        const cuda_blocks_row head = { static_cast<int32_t>(block0 + row), static_cast<uint16_t>(groups(row)), static_cast<uint16_t>(spill.size() - spilled) };
        memcpy(m.row_ptr + 2 * row, &head, sizeof(head));
    }
};

void cuda_blocks_make(const packed_view & view, const blocks_shape & shape, int64_t max_spill, int n_threads, blocks_image * out) {
    const packed_desc & desc = view.arrays().desc;
    const int64_t       rows = desc.dense.rows;
    cuda_sparse_matrix & m   = out->matrix;
    m = cuda_blocks_bind(desc, shape, max_spill, nullptr);
    out->memory.resize(static_cast<size_t>(m.nbytes));
    m = cuda_blocks_bind(desc, shape, max_spill, out->memory.data());
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
