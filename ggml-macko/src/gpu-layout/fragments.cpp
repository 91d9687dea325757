#include "gpu-layout/fragments.h"

#include "codec/team.h"

#include <algorithm>

namespace macko::cuda {

fragments_shape fragments_shape_of(const gpu_matrix & matrix, const gpu_device & device) {
    const macko_desc & desc = matrix.desc;
    const int32_t      bits = code_bits(matrix.value_type) <= 4 ? 4 : 8;
    const int64_t      all  = desc.rows * desc.cols,
                  words     = 4 * bits * desc.nnz; // of a stream per chunk, times all
    const int64_t most      = words > 10 * all ? 1 : 5 * words > 12 * all ? 2 : 4;
    const int64_t wanted    = has_little_shared_memory(device.shared_nbytes) && most > 1 ? most / 2 : most;
    const int64_t chunks    = std::min(wanted, fragments_all_chunks(desc.cols));
    return { bits, static_cast<int32_t>(matrix.window), static_cast<int32_t>(chunks), 0 };
}

int64_t fragments_expected_nbytes(const macko_desc & desc, const fragments_shape & shape) {
    const int64_t segments = fragments_segments(desc.cols, shape.tile_chunks), groups = fragments_groups(desc.rows);
    int64_t       nbytes = 0; // without the words
    for (int64_t s = 0; s < segments; s++) {
        nbytes += fragments_words_at(fragments_chunks(desc.cols, shape.tile_chunks, s), shape.window);
    }
    // the last word of a stream is half empty on average, and half a unit pads a tile
    nbytes = groups * (nbytes + segments * (32 * 2 + FRAGMENT_UNIT / 2)) + desc.nnz * shape.code_bits / 8;
    return bind_fragments(desc, shape, 0, nullptr).nbytes + gpu_aligned(nbytes + nbytes / 128 + 4096);
}

fragments_layout bind_fragments(const macko_desc & desc, const fragments_shape & shape, int64_t nbytes, void * memory) {
    fragments_layout m                = {};
    static_cast<fragments_shape &>(m) = shape;
    memory_parts parts(memory);
    parts.take(&m.starts, fragments_groups(desc.rows) * fragments_segments(desc.cols, shape.tile_chunks) + 1);
    parts.take(&m.factors, desc.rows);
    parts.take(&m.tiles, std::max<int64_t>(0, nbytes - parts.nbytes()));
    static_cast<layout_base &>(m) = { desc.rows, desc.cols, desc.type, parts.nbytes() };
    return m;
}

// Byte i: the bits that are set in bytes i, i + 8, i + 16 ... of n bytes; n is at most 8 * 31.
static uint64_t sums_of_bits(const uint8_t * bytes, int64_t n) {
    uint64_t sums = 0;
    for (int64_t i = 0; i < n; i += 8) {
        sums += bits_of_bytes(bytes + i, n - i);
    }
    return sums;
}

fragments_sizes size_fragments(const quantized_arrays & a, const fragments_shape & shape, int n_threads) {
    const int64_t groups     = fragments_groups(a.dense.rows),
                  segments   = fragments_segments(a.dense.cols, shape.tile_chunks),
                  row_nbytes = bitmap_row_nbytes(a.dense.cols), tile_nbytes = shape.tile_chunks * FRAGMENT_CHUNK / 8;
    fragments_sizes sizes;
    sizes.starts.assign(static_cast<size_t>(groups * segments + 1), 0);
    std::vector<int32_t> most(static_cast<size_t>(groups), 0);
    parallel_ranges(n_threads, groups, [&](int64_t begin, int64_t end) {
        for (int64_t group = begin; group < end; group++) {
            for (int64_t s = 0; s < segments; s++) {
                int n_codes[32] = {};
                for (int64_t r = group * FRAGMENT_ROWS; r < std::min(a.dense.rows, (group + 1) * FRAGMENT_ROWS); r++) {
                    const uint8_t * row   = a.row_bitmap(r);
                    int * const     lanes = n_codes + r % 8 * 4;
                    const int64_t   at    = s * tile_nbytes;
                    const uint64_t  sums  = sums_of_bits(row + at, std::min(row_nbytes - at, tile_nbytes));
                    for (int i = 0; i < 8; i++) {
                        lanes[i % 4] += static_cast<int>(sums >> (8 * i) & 0xff);
                    }
                }
                int64_t n_words = 0;
                for (const int n : n_codes) {
                    const int words                  = fragments_stream_words(n, shape.code_bits);
                    most[static_cast<size_t>(group)] = std::max(most[static_cast<size_t>(group)], words);
                    n_words += words;
                }
                const int chunks = fragments_chunks(a.dense.cols, shape.tile_chunks, s);
                sizes.starts[static_cast<size_t>(group * segments + s + 1)] =
                    static_cast<uint32_t>(fragments_tile_nbytes(chunks, shape.window, n_words) / FRAGMENT_UNIT);
            }
        }
    });
    for (size_t i = 1; i < sizes.starts.size(); i++) {
        sizes.starts[i] += sizes.starts[i - 1];
    }
    sizes.most_words = groups ? *std::max_element(most.begin(), most.end()) : 0;
    sizes.nbytes =
        bind_fragments(a.dense, shape, 0, nullptr).nbytes + gpu_aligned(int64_t(sizes.starts.back()) * FRAGMENT_UNIT);
    return sizes;
}

} // namespace macko::cuda
