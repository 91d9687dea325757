#include "gpu-layout/row-blocks.h"

#include "codec/macko/encode.h"
#include "codec/team.h"
#include "gpu-layout/choose.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace macko::cuda {

namespace {

int32_t segment_rows(const ec_csr_range & s) { return std::min(s.granularity, ROW_BLOCKS_MAX_ROWS); }

int32_t cuts(const ec_csr_range & s) { return s.granularity / segment_rows(s); }

int64_t columns_of(const ec_csr_view & view, const ec_csr_range & s, int64_t block) {
    const int32_t * ptr = view.arrays().blk_ptr + s.blk_ptr + block;
    return ptr[1] - ptr[0];
}

int64_t chunks_of(int64_t n_cols) { return (n_cols + ROW_BLOCKS_CHUNK - 1) / ROW_BLOCKS_CHUNK; }

} // namespace

bool is_in_blocks(const codec & format) { return &format == &ec_csr_codec(); }

row_blocks_layout bind_row_blocks(const ec_csr_view & view, void * memory) {
    const macko_desc & desc = view.arrays().desc;
    row_blocks_layout  b    = {};
    b.rows                  = desc.rows;
    b.cols                  = desc.cols;
    b.type                  = desc.type;
    b.delta_bits            = desc.delta_bits;
    memory_parts parts(memory);
    int64_t      n_slots = 0;
    for (const ec_csr_range & s : view.sets()) {
        row_blocks_set & d = b.sets[b.n_sets++];
        d.granularity      = segment_rows(s);
        d.n_segments       = s.n_blocks * cuts(s);
        d.n_chunks         = 0;
        for (int64_t k = 0; k < s.n_blocks; k++) {
            d.n_chunks += chunks_of(columns_of(view, s, k)) * cuts(s);
        }
        parts.take(&d.chunk_ptr, int64_t(d.n_segments) + 1);
        parts.take(&d.bases, int64_t(d.n_segments) * EC_LANES);
        parts.take(&d.rows, int64_t(d.n_segments) * d.granularity);
        parts.take(&d.slots, int64_t(d.n_segments) * d.granularity);
        parts.take(&d.deltas, d.n_chunks * ROW_BLOCKS_CHUNK * desc.delta_bits / 8);
        parts.take(&d.values, d.n_chunks * ROW_BLOCKS_CHUNK * d.granularity);
        b.n_segments += d.n_segments;
        n_slots += int64_t(d.n_segments) * d.granularity;
    }
    b.n_slots = static_cast<int32_t>(n_slots); // at most the elements of X.rows
    parts.take(&b.slot_ptr, desc.rows + 1);
    b.nbytes_arrays = parts.nbytes();
    parts.take(&b.partial, n_slots * ROW_BLOCKS_MAX_COLUMNS);
    b.nbytes = parts.nbytes();
    return b;
}

namespace {

// Fills the segments of a set.
struct set_filler {
    const ec_csr_arrays &  a;
    const ec_csr_range &   s;
    const row_blocks_set & d;

    void put_delta(int64_t chunk, int64_t lane, int64_t k, uint32_t delta) const {
        const int64_t bit  = ((chunk * EC_LANES + lane) * EC_VECTOR + k) * a.desc.delta_bits;
        d.deltas[bit >> 3] = static_cast<uint8_t>(d.deltas[bit >> 3] | delta << (bit & 7));
    }

    // Writes the values of column k of a lane in a chunk, for all rows of the segment. from: the values of this column
    // in the file.
    void put_values(int64_t chunk, int64_t lane, int64_t k, const float * from) const {
        for (int64_t r = 0; r < d.granularity; r++) {
            const int64_t i = k * d.granularity + r; // in this lane's values of the chunk
            d.values[((chunk * d.granularity + i / 4) * EC_LANES + lane) * 4 + i % 4] = from[r];
        }
    }

    const float * value(int64_t i) const { return static_cast<const float *>(a.values) + s.value + i; }

    uint16_t base(int64_t block, int64_t lane) const {
        return static_cast<const uint16_t *>(a.bases)[(s.block + block) * EC_LANES + lane];
    }

    // Copies the rows from `first` on of a block with vectors of 4 columns, lane by lane.
    void long_segment(int64_t block, int64_t segment, int64_t first) const {
        const int64_t col = a.blk_ptr[s.blk_ptr + block], bits = a.desc.delta_bits;
        const int64_t n = d.chunk_ptr[segment + 1] - d.chunk_ptr[segment];
        memcpy(d.deltas + d.chunk_ptr[segment] * ROW_BLOCKS_CHUNK * bits / 8, a.deltas + (s.col + col) * bits / 8,
               static_cast<size_t>(n * ROW_BLOCKS_CHUNK * bits / 8));
        for (int64_t lane = 0; lane < EC_LANES; lane++) {
            d.bases[segment * EC_LANES + lane] = base(block, lane);
        }
        for (int64_t e = 0; e < n * ROW_BLOCKS_CHUNK; e++) {
            put_values(d.chunk_ptr[segment] + e / ROW_BLOCKS_CHUNK, e / EC_VECTOR % EC_LANES, e % EC_VECTOR,
                       value((col + e) * s.granularity + first));
        }
    }

    // Distributes the columns of a short block over the lanes again, four columns each.
    void short_segment(int64_t block, int64_t segment) const {
        const int64_t col      = a.blk_ptr[s.blk_ptr + block],
                      per_lane = (a.blk_ptr[s.blk_ptr + block + 1] - col) / EC_LANES;
        int64_t before = 0, column = 0;
        for (int64_t i = 0; i < per_lane * EC_LANES; i++, before = column) {
            const int64_t e = i % per_lane * EC_LANES + i / per_lane; // vectors of one column: chunks of 32
            column          = i % per_lane ? column + delta_code(a.deltas, s.col + col + e, a.desc.delta_bits)
                                           : base(block, i / per_lane);
            if (i % EC_VECTOR == 0) {
                d.bases[segment * EC_LANES + i / EC_VECTOR] = static_cast<uint16_t>(column);
            } else {
                put_delta(d.chunk_ptr[segment], i / EC_VECTOR, i % EC_VECTOR, static_cast<uint32_t>(column - before));
            }
            put_values(d.chunk_ptr[segment], i / EC_VECTOR, i % EC_VECTOR, value(col + e));
        }
        // zeros, multiplied by an x that the row also uses
        for (int64_t lane = (per_lane * EC_LANES + EC_VECTOR - 1) / EC_VECTOR; lane < EC_LANES; lane++) {
            d.bases[segment * EC_LANES + lane] = static_cast<uint16_t>(column);
        }
    }
};

} // namespace

void fill_row_blocks(const ec_csr_view & view, int n_threads, const row_blocks_layout & b) {
    const ec_csr_arrays & a = view.arrays();
    for (int32_t i = 0; i < b.n_sets; i++) {
        const ec_csr_range &   s      = view.sets()[static_cast<size_t>(i)];
        const row_blocks_set & d      = b.sets[i];
        const int32_t          n_cuts = cuts(s);
        for (int64_t k = 0, p = 0; k < s.n_blocks; k++) {
            for (int32_t c = 0; c < n_cuts; c++, p++) {
                d.chunk_ptr[p + 1] = d.chunk_ptr[p] + static_cast<int32_t>(chunks_of(columns_of(view, s, k)));
                for (int32_t r = 0; r < d.granularity; r++) {
                    d.rows[p * d.granularity + r] = a.rows[s.row + k * s.granularity + c * d.granularity + r];
                    b.slot_ptr[d.rows[p * d.granularity + r] + 1]++;
                }
            }
        }
        const set_filler filler = { a, s, d };
        parallel_parts(n_threads, d.n_segments, 16, [&](int64_t begin, int64_t end, int) {
            for (int64_t p = begin; p < end; p++) {
                if (s.vector_size == 1) {
                    filler.short_segment(p, p);
                } else {
                    filler.long_segment(p / n_cuts, p, p % n_cuts * d.granularity);
                }
            }
        });
    }
    for (int64_t r = 0; r < b.rows; r++) {
        b.slot_ptr[r + 1] += b.slot_ptr[r];
    }
    std::vector<int32_t> next(b.slot_ptr, b.slot_ptr + b.rows);
    for (int32_t i = 0; i < b.n_sets; i++) {
        const row_blocks_set & d = b.sets[i];
        for (int64_t k = 0; k < int64_t(d.n_segments) * d.granularity; k++) {
            d.slots[k] = next[static_cast<size_t>(d.rows[k])]++;
        }
    }
}

int smallest_rows(const ec_csr_view & view, int n_threads, gpu_matrix * rows) {
    const macko_desc & desc  = view.arrays().desc;
    ggml_macko_count   count = {};
    TRY(count_rows(view, n_threads, &count));
    int64_t least = 0;
    for (const int32_t bits : { desc.delta_bits, 1, 2, 4, 8 }) {
        const int64_t n = count.n_stored[bits == 1 ? 0 : bits == 2 ? 1 : bits == 4 ? 2 : 3];
        if (n > MAX_STORED) {
            continue;
        }
        const gpu_matrix with   = { { desc.rows, desc.cols, desc.type, bits, desc.nnz }, n_padded(n), desc.type };
        const int64_t    nbytes = nbytes_of_rows(with);
        if (least == 0 || nbytes < least) {
            *rows = with;
            least = nbytes;
        }
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko::cuda
