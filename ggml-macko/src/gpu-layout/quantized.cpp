#include "gpu-layout/quantized.h"
#include "codec/team.h"

#include <algorithm>
#include <cmath>

namespace macko::cuda {

// ---- shape and size ----

// The fraction of independent non-zeros of density d that become outliers: those with a gap beyond the reach, and those
// behind them that do not catch up.
static double outlier_rate(double d, double reach) {
    const double far   = std::pow(1 - d, reach);
    const double again = far + reach * d * std::pow(1 - d, reach - 1); // fewer than two non-zeros are within reach
    return far / std::max(1e-3, 1 - again);
}

static double density_of(const macko_desc & desc) {
    return static_cast<double>(desc.nnz) / static_cast<double>(desc.rows * desc.cols);
}

// outliers to reserve memory for: enough for random masks
static int64_t max_outliers_of(const macko_desc & desc, int bits, int lanes) {
    const double n =
        outlier_rate(density_of(desc), static_cast<double>(quantized_reach(bits, quantized_width(desc.cols, lanes)))) *
        static_cast<double>(desc.nnz);
    return std::min(desc.nnz, static_cast<int64_t>(1.1 * n + 4 * std::sqrt(n)) + 64);
}

quantized_shape quantized_shape_of(const gpu_matrix & matrix, const gpu_device & device) {
    const macko_desc & desc = matrix.desc;
    const int64_t      cols = desc.cols, groups = desc.nnz / QUANT_BLOCK / desc.rows; // of a row
    // Few lanes: runs of many groups, of which the last one may be missing. Many lanes: more warps share a row, and
    // there are fewer copies of x, which for wide matrices of few rows are most of the work (measured, see the lab
    // notes of quantized weights).
    const bool    copies_pay = cols <= 8192 || desc.rows >= 8192;
    const int64_t few        = desc.rows < 8192 || quantized_value_words(matrix.value_type) == 8 ? 72 : 96;
    for (int lanes = groups < few && copies_pay ? 8 : groups < 512 ? 16 : 32; lanes <= 32; lanes *= 2) {
        const int64_t width = quantized_width(cols, lanes);
        int           bits  = 8;
        double        least = 1e300;
        for (const int b : { 3, 4, 8 }) {
            const double cost = b + 8 * sizeof(cuda_sparse_outlier) *
                                        outlier_rate(density_of(desc), static_cast<double>(quantized_reach(b, width)));
            if (cost < least && (b == 8 || quantized_overshoot(b) < 32 * width)) {
                bits  = b;
                least = cost;
            }
        }
        if (32 * width <= 65536 &&
            quantized_shared_nbytes(width, lanes, quantized_overshoot(bits), 1) <= device.shared_nbytes) {
            return { bits, lanes, max_outliers_of(desc, bits, lanes) };
        }
    }
    return { 0, 0, 0 };
}

quantized_layout bind_quantized(const macko_desc & desc, int32_t value_type, const quantized_shape & shape,
                                void * memory) {
    quantized_layout m   = {};
    m.rows               = desc.rows;
    m.cols               = desc.cols;
    m.type               = desc.type;
    m.value_type         = quantized_value_type(value_type);
    m.delta_bits         = shape.bits;
    m.lanes              = shape.lanes;
    m.width              = static_cast<int32_t>(quantized_width(desc.cols, shape.lanes));
    m.overshoot          = static_cast<int32_t>(quantized_overshoot(shape.bits));
    const int64_t tiles  = (desc.nnz / QUANT_BLOCK + desc.rows + CUDA_QUANTIZED_TILE) / CUDA_QUANTIZED_TILE;
    const int64_t nbytes = tiles * quantized_tile_nbytes(quantized_value_words(m.value_type), shape.bits);
    // what segments take beyond their groups, at most
    const int64_t more = shape.bits < 8 ? desc.rows * static_cast<int64_t>(sizeof(cuda_quantized_segment)) : 0;
    memory_parts  parts(memory);
    parts.take(&m.groups, nbytes + more);
    parts.take(&m.groups_end, 0);
    parts.take(&m.row_heads, desc.rows * quantized_row_nbytes(shape.lanes));
    parts.take(&m.outliers, shape.max_outliers);
    m.nbytes = parts.nbytes();
    return m;
}

// ---- words of a group ----
// Entries come in quads: quad i is entries 4 i ... 4 i + 3, entry j of it in byte j of some word.

// two quads to four bytes, the second one `shift` bits up
static void pack_quads(const uint8_t * in, int shift, uint8_t * out) {
    for (int i = 0; i < QUANT_BLOCK / 8; i++) {
        for (int j = 0; j < 4; j++) {
            out[4 * i + j] = static_cast<uint8_t>(in[8 * i + j] | in[8 * i + 4 + j] << shift);
        }
    }
}

// Signed bytes stay; of Q4_0, two quads are the low and the high nibbles of a word.
static void pack_values(const uint8_t * q, int32_t type, uint8_t * words) {
    if (type == GGML_MACKO_TYPE_Q8_0) {
        memcpy(words, q, QUANT_BLOCK);
        return;
    }
    uint8_t nibbles[QUANT_BLOCK];
    std::transform(q, q + QUANT_BLOCK, nibbles, [](uint8_t v) { return static_cast<uint8_t>(v & 15); });
    pack_quads(nibbles, 4, words);
}

// 8 bits: a word per quad. 4 bits: two quads per word, in low and high nibbles. 3 bits: two quads per word, in bits 0-2
// and 3-5 of its bytes; the fourth word is cut up into bits 6-7 of the others.
static void pack_deltas(const uint8_t * delta, int bits, uint8_t * words) {
    if (bits == 8) {
        memcpy(words, delta, QUANT_BLOCK);
        return;
    }
    uint8_t fields[16];
    pack_quads(delta, bits, fields);
    for (int k = 0; k < 4 * bits; k++) {
        words[k] = static_cast<uint8_t>(fields[k] | (bits == 3 ? (fields[12 + k % 4] >> k / 4 * 2 & 3) << 6 : 0));
    }
}

// copies words to planes of 4, 2 and 1 words; slot: in the tile
static void put_words(const uint8_t * words, int n, uint8_t * base, int64_t slot) {
    for (int at = 0; at < n;) {
        const int width = n - at >= 4 ? 4 : n - at >= 2 ? 2 : 1;
        memcpy(base + (at * CUDA_QUANTIZED_TILE + width * slot) * 4, words + 4 * at, static_cast<size_t>(width) * 4);
        at += width;
    }
}

// ---- where rows are ----

// a row of the file: its entries, counted from the first one of its blocks
struct file_row {
    int64_t block, begin, end;
    file_row(const packed_view & view, int64_t row) {
        const int32_t * row_ptr = view.arrays().row_ptr;
        block                   = row_ptr[row] / QUANT_BLOCK;
        begin                   = row_ptr[row] - block * QUANT_BLOCK;
        end                     = row_ptr[row + 1] - block * QUANT_BLOCK;
    }
    int64_t groups() const { return begin < end ? (end + QUANT_BLOCK - 1) / QUANT_BLOCK : 0; }
    // segments if only n of its groups are in tiles
    int64_t first_segment(int64_t n) const {
        return std::max(n * CUDA_QUANTIZED_SEGMENTS, begin / CUDA_QUANTIZED_SEGMENT);
    }
    int64_t segments(int64_t n) const {
        return groups() > n ? (end + CUDA_QUANTIZED_SEGMENT - 1) / CUDA_QUANTIZED_SEGMENT - first_segment(n) : 0;
    }
};

// All of the head of a row but its outliers. Rows of one warp_rows have equally many full steps. The rest becomes
// segments where there is at most one per lane, as long as there is room (a row may be shorter than its steps then),
// else groups behind all tiles.
static void lay_out_rows(const packed_view & view, const quantized_layout & m) {
    const int64_t warp_rows   = 32 / m.lanes,
                  tile_nbytes = quantized_tile_nbytes(quantized_value_words(m.value_type), m.delta_bits);
    // groups of the rows that are not laid out yet; groups in tiles, and behind them
    int64_t left = 0, tiled = 0, rest = 0, segment = 0;
    for (int64_t r = 0; r < m.rows; r++) {
        left += file_row(view, r).groups();
    }
    const auto room_for = [&](int64_t groups, int64_t segments) {
        const int64_t nbytes = (groups + CUDA_QUANTIZED_TILE - 1) / CUDA_QUANTIZED_TILE * tile_nbytes +
                               segments * static_cast<int64_t>(sizeof(cuda_quantized_segment));
        return nbytes <= m.groups_end - m.groups && segments <= CUDA_QUANTIZED_MAX_SEGMENT;
    };
    for (int64_t r0 = 0; r0 < m.rows; r0 += warp_rows) {
        const int64_t r1    = std::min(r0 + warp_rows, m.rows);
        int64_t       least = CUDA_QUANTIZED_MAX_STEPS * m.lanes, most = 0, segments = 0;
        for (int64_t r = r0; r < r1; r++) {
            least = std::min(least, file_row(view, r).groups());
            most  = std::max(most, file_row(view, r).groups());
        }
        int64_t steps = std::min(most / m.lanes, CUDA_QUANTIZED_MAX_STEPS);
        for (int64_t r = r0; r < r1; r++) {
            segments += file_row(view, r).segments(steps * m.lanes);
            left -= file_row(view, r).groups();
        }
        const bool cut = m.delta_bits < 8 && (most - steps * m.lanes) * CUDA_QUANTIZED_SEGMENTS <= m.lanes &&
                         tiled + steps * CUDA_QUANTIZED_TILE <= CUDA_QUANTIZED_MAX_TILED &&
                         room_for(tiled + steps * CUDA_QUANTIZED_TILE + rest + left, segment + segments);
        if (!cut) {
            steps = r1 - r0 < warp_rows || tiled + least / m.lanes * CUDA_QUANTIZED_TILE > CUDA_QUANTIZED_MAX_TILED
                        ? 0
                        : least / m.lanes;
        }
        for (int64_t r = r0; r < r1; r++) {
            const file_row row(view, r);
            const int64_t  n     = cut ? std::min(row.groups(), steps * m.lanes) : row.groups(),
                          behind = std::max<int64_t>(0, n - steps * m.lanes), cuts = cut ? row.segments(n) : 0;
            const uint32_t           first = static_cast<uint32_t>((tiled + (r - r0) * m.lanes) / 8 << 8 | steps);
            const cuda_quantized_row head  = { first, static_cast<uint16_t>(n), 0, 0,
                                               static_cast<uint32_t>(behind ? rest
                                                                     : cuts ? segment << 8 | cuts
                                                                            : 0) };
            memcpy(quantized_row(m, r), &head, sizeof(head));
            rest += behind;
            segment += cuts;
        }
        tiled += steps * CUDA_QUANTIZED_TILE;
    }
    for (int64_t r = 0; r < m.rows; r++) {
        cuda_quantized_row head;
        memcpy(&head, quantized_row(m, r), sizeof(head));
        head.rest += head.n_groups > quantized_steps(head) * m.lanes ? static_cast<uint32_t>(tiled) : 0;
        memcpy(quantized_row(m, r), &head, sizeof(head));
    }
}

// ---- a row ----

struct row_maker {
    const packed_view &              view;
    const quantized_layout &         m;
    std::vector<int32_t>             columns;       // of the row
    std::vector<cuda_sparse_outlier> outliers;      // of all rows so far
    int64_t                          overshoot = 0; // words behind x that they need

    void read_columns(int64_t row) {
        columns.resize(static_cast<size_t>(view.arrays().row_ptr[row + 1] - view.arrays().row_ptr[row]));
        int32_t * to = columns.data();
        view.for_each_column(row, [&](int64_t c) { *to++ = static_cast<int32_t>(c); });
    }

    template <typename F> void for_each_run(int n, F && f) const {
        for (int lane = 0; lane < m.lanes; lane++) {
            f(lane, quantized_run_of(n, lane, quantized_lane_bits(m.lanes)));
        }
    }

    const uint8_t * block_data(int64_t block) const {
        return static_cast<const uint8_t *>(view.arrays().values) +
               block * quant_block_nbytes(view.arrays().desc.value_type);
    }

    // Signed bytes and deltas of entries begin ... end-1 of a block, which are in columns[0] and so on; 0 for the
    // others. at: where entry `begin` is without a gap; returns where entry `end` is. copy: the x_slot of column 0.
    int64_t encode(const uint8_t * data, int64_t begin, int64_t end, const int32_t * column, int64_t at, int64_t copy,
                   uint8_t (&q)[QUANT_BLOCK], uint8_t (&delta)[QUANT_BLOCK]) {
        const int32_t type  = view.arrays().desc.value_type;
        const int64_t reach = quantized_reach(m.delta_bits, m.width);
        memset(delta, 0, sizeof(delta));
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
        for (int64_t k = begin; k < end; k++) {
            const int64_t gap = column[k - begin] - at;
            if (gap < reach) {
                delta[k] = static_cast<uint8_t>(gap);
                at += gap + 1;
                continue;
            }
            delta[k] = static_cast<uint8_t>(reach - 1);
            at += reach;
            if (q[k] != 0) {
                outliers.push_back(
                    { static_cast<uint32_t>(quantized_word(copy + column[k - begin], m.width)),
                      float_of_f16(quant_scale_bits(data)) * static_cast<float>(static_cast<int8_t>(q[k])) });
                q[k] = 0;
            }
        }
        return at;
    }

    // Counts the words behind x that a kernel which starts at an x_slot reads before it reduces its address. n: entries
    // at `delta`, whole segments.
    void count_overshoot(int64_t x_slot, const uint8_t * delta, int64_t n) {
        if (m.delta_bits == 8) { // reduces its address before each entry
            return;
        }
        for (int64_t s = 0; s < n; s += CUDA_QUANTIZED_SEGMENT) {
            uint64_t deltas;
            memcpy(&deltas, delta + s, sizeof(deltas));
            const int64_t gaps =
                static_cast<int64_t>(deltas * 0x0101010101010101u >> 56); // their sum is at most 8 * 15
            overshoot =
                std::max(overshoot, word_of(x_slot) + (gaps + CUDA_QUANTIZED_SEGMENT) * 32 - (32 * m.width - 1));
            x_slot += gaps + CUDA_QUANTIZED_SEGMENT;
        }
    }

    // Makes the group of a block of which entries begin ... end-1 are in the row. at: where its first entry is without
    // a gap; returns where the group ends.
    int64_t make_group(int64_t block, int64_t slot, int64_t begin, int64_t end, const int32_t * column, int64_t at,
                       int64_t copy) {
        const uint8_t * data = block_data(block);
        uint8_t         q[QUANT_BLOCK], delta[QUANT_BLOCK], words[QUANT_BLOCK];
        const int64_t   from = at;
        at                   = encode(data, begin, end, column, at + begin, copy, q, delta);
        count_overshoot(copy + from, delta, QUANT_BLOCK);
        pack_values(q, m.value_type, words);
        const int     value_words = quantized_value_words(m.value_type);
        uint8_t *     tile = m.groups + slot / CUDA_QUANTIZED_TILE * quantized_tile_nbytes(value_words, m.delta_bits);
        const int64_t in_tile = slot % CUDA_QUANTIZED_TILE;
        put_words(words, value_words, tile, in_tile);
        pack_deltas(delta, m.delta_bits, words);
        put_words(words, m.delta_bits, tile + CUDA_QUANTIZED_TILE * 4 * value_words, in_tile);
        const uint16_t scale = quant_scale_bits(data);
        memcpy(tile + CUDA_QUANTIZED_TILE * 4 * (value_words + m.delta_bits) + 2 * in_tile, &scale, 2);
        return at + QUANT_BLOCK - end;
    }

    // entries s * 8 ... s * 8 + 7 of the blocks of the row
    cuda_quantized_segment make_segment(const file_row & in, int64_t s, int64_t copy) {
        // entries of the block before it
        const int64_t block = s / CUDA_QUANTIZED_SEGMENTS, first = block * QUANT_BLOCK,
                      skip     = s * CUDA_QUANTIZED_SEGMENT - first;
        const int64_t begin    = std::max(s * CUDA_QUANTIZED_SEGMENT, in.begin) - first,
                      end      = std::min(skip + CUDA_QUANTIZED_SEGMENT, in.end - first);
        const int32_t * column = columns.data() + (first + begin - in.begin);
        const uint8_t * data   = block_data(in.block + block);
        uint8_t         q[QUANT_BLOCK], delta[QUANT_BLOCK];
        encode(data, begin, end, column, *column, copy, q, delta);
        cuda_quantized_segment to = {};
        for (int64_t k = 0; k < CUDA_QUANTIZED_SEGMENT; k++) {
            to.values[k] = static_cast<int8_t>(m.value_type == GGML_MACKO_TYPE_Q8_0 ? q[skip + k] : q[skip + k] << 4);
            to.deltas[k % 4] = static_cast<uint8_t>(to.deltas[k % 4] | delta[skip + k] << k / 4 * m.delta_bits);
        }
        to.scale = quant_scale_bits(data);
        to.word  = word_of(copy + *column - (begin - skip));
        count_overshoot(copy + *column - (begin - skip), delta + skip, CUDA_QUANTIZED_SEGMENT);
        return to;
    }

    // the word of an x_slot, which may be in the copy before
    uint16_t word_of(int64_t x_slot) const {
        const int64_t x_slots = 32 * m.width - 1;
        return static_cast<uint16_t>(quantized_word((x_slot + x_slots) % x_slots, m.width));
    }

    void make(int64_t row) {
        const int64_t      copy = row % (32 / m.lanes) * m.lanes * m.width; // x_slot of column 0
        const file_row     in(view, row);
        cuda_quantized_row head;
        memcpy(&head, quantized_row(m, row), sizeof(head));
        read_columns(row);
        const size_t before = outliers.size();
        for_each_run(head.n_groups, [&](int lane, const quantized_run & run) {
            const int64_t begin = run.begin, end = begin + run.groups;
            const int64_t ahead = std::max<int64_t>(0, in.begin - begin * QUANT_BLOCK); // entries of the row before
            const int64_t first = begin * QUANT_BLOCK + ahead;
            const int64_t start = (first < in.end ? columns[static_cast<size_t>(first - in.begin)] : 0) - ahead;
            int64_t       at    = start;
            for (int64_t g = begin; g < end; g++) {
                const int64_t s = g * QUANT_BLOCK, from = std::max(s, in.begin), to = std::min(s + QUANT_BLOCK, in.end);
                at = make_group(in.block + g, quantized_group(head, m.lanes, static_cast<int>(g - begin), run.slot),
                                from - s, to - s, columns.data() + (from - in.begin), at, copy);
            }
            const uint16_t base = word_of(copy + start);
            memcpy(quantized_row(m, row) + sizeof(head) + 2 * lane, &base, sizeof(base));
        });
        for (int64_t s = 0; s < quantized_segments(head, m.lanes); s++) {
            const cuda_quantized_segment segment = make_segment(in, in.first_segment(head.n_groups) + s, copy);
            memcpy(m.groups_end -
                       (static_cast<int64_t>(head.rest >> 8) + s + 1) * static_cast<int64_t>(sizeof(segment)),
                   &segment, sizeof(segment));
        }
        head.n_outliers    = static_cast<uint16_t>(outliers.size() - before);
        head.first_outlier = static_cast<int32_t>(before);
        memcpy(quantized_row(m, row), &head, sizeof(head));
    }
};

void make_quantized(const packed_view & view, const quantized_shape & shape, int n_threads, quantized_image * out) {
    const packed_desc & desc = view.arrays().desc;
    const int64_t       rows = desc.dense.rows;
    quantized_layout &  m    = out->matrix;
    m                        = bind_quantized(desc.dense, desc.value_type, shape, nullptr);
    out->memory.resize(static_cast<size_t>(m.nbytes));
    m = bind_quantized(desc.dense, desc.value_type, shape, out->memory.data());
    std::vector<row_maker> makers(static_cast<size_t>(n_threads), row_maker{ view, m, {}, {}, 0 });
    const auto             first_row = [&](int64_t i) { return rows * i / n_threads; };
    lay_out_rows(view, m);
    parallel_parts(n_threads, n_threads, 1, [&](int64_t i, int64_t, int) {
        row_maker & maker = makers[static_cast<size_t>(i)];
        for (int64_t r = first_row(i); r < first_row(i + 1); r++) {
            maker.make(r);
        }
    });
    out->n_outliers = 0;
    m.overshoot     = 0;
    for (int i = 0; i < n_threads; i++) {
        m.overshoot =
            std::max(m.overshoot, static_cast<int32_t>((makers[static_cast<size_t>(i)].overshoot + 31) / 32 * 32));
        const std::vector<cuda_sparse_outlier> & outliers = makers[static_cast<size_t>(i)].outliers;
        const int64_t                            before   = out->n_outliers;
        for (int64_t r = first_row(i); r < first_row(i + 1); r++) {
            cuda_quantized_row head;
            memcpy(&head, quantized_row(m, r), sizeof(head));
            head.first_outlier += static_cast<int32_t>(before);
            memcpy(quantized_row(m, r), &head, sizeof(head));
        }
        out->n_outliers += static_cast<int64_t>(outliers.size());
        if (out->n_outliers <= shape.max_outliers) {
            std::copy(outliers.begin(), outliers.end(), m.outliers + before);
        }
    }
}

} // namespace macko::cuda
