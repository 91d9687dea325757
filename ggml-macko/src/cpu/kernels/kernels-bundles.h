// The products with matrices in bundles (kernels-impl.h): `planes` for a few x, and `panels`.
#pragma once

#include "cpu/kernels/kernels-panels.h"

namespace macko::cpu {
namespace {

constexpr int64_t PLANE_SLACK = 64; // bytes after the last column of a plane: windows may begin at any column

// The planes of an x in the scratch memory.
struct x_planes {
    uint8_t *low, *high;
};
INLINE x_planes planes_of(const layout_base & w, const mul_mat_params & p, int64_t i) {
    const int64_t plane = words_of(w.cols) * 64 + PLANE_SLACK;
    uint8_t *     at    = static_cast<uint8_t *>(p.scratch) + i * 2 * plane;
    return { at, at + plane };
}

template <int TYPE, typename S>
void prepare_bundles(const layout_base & w, const mul_mat_params & p, int64_t col_begin, int64_t col_end) {
    for (int64_t i = 0; i < p.n; i++) {
        const x_planes planes = planes_of(w, p, i);
        for (int64_t c = col_begin; c < col_end; c += W) {
            const int64_t left = w.cols - c;
            float         part[W];
            simd::store(part, load_x<TYPE>(left > 0 ? p.x[i] + c : nullptr, left, true));
            for (int k = 0; k < W; k += S::PLANE_STEP) {
                S::template store_planes<TYPE>(planes.low + c + k, planes.high + c + k, part + k);
            }
        }
    }
}

// Adds the sums of each piece to y, which has one element per row of the group.
template <int TYPE, typename S>
INLINE void add_bundles(const uint8_t * at, const uint8_t * end, const x_planes & planes, float * y) {
    while (at < end) {
        const uint8_t * header = at;
        const uint8_t * first  = at + BUNDLE_HEADER_NBYTES;
        const uint8_t * rows   = header + sizeof(bundle_header);
        uint16_t        column;
        __builtin_memcpy(&column, header, sizeof(column));
        at = first + header[offsetof(bundle_header, n_vectors)] * BUNDLE_VECTOR_NBYTES;
        S::template add_bundle<TYPE>(rows, first, at, planes.low + column, planes.high + column, y);
    }
}

// Computes a whole group, even if the caller needs only some of its rows. The first x loads the group from memory; the
// others find it in the cache.
template <int TYPE, typename S>
void multiply_bundles(const bundles_layout & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    for (int64_t group = row_begin / BUNDLE_ROWS; group * BUNDLE_ROWS < row_end; group++) {
        for (int64_t i = 0; i < p.n; i++) {
            float y[BUNDLE_ROWS] = {};
            add_bundles<TYPE, S>(w.bundles + w.group_off[group], w.bundles + w.group_off[group + 1], planes_of(w, p, i),
                                 y);
            for (int64_t r = 0; r < BUNDLE_ROWS; r++) {
                const int64_t row = group * BUNDLE_ROWS + r;
                if (row >= row_begin && row < row_end) {
                    p.y[i][row - p.row_begin] = y[r];
                }
            }
        }
    }
}

// Panels. Bundles of a group are sorted by their first columns, so the lists of all rows grow together, and the
// elements of a chunk are used before more bundles are decoded.
constexpr int BUNDLE_CHUNK = BUNDLE_SPAN; // columns: a list has the elements of one piece, and those that wait
struct row_list {
    static constexpr int CAPACITY = BUNDLE_CHUNK + 32; // with those that wait (7), and what vectors read and write more
    int                  n;
    alignas(64) uint32_t col[CAPACITY];
    alignas(64) float weight[CAPACITY];
};

// Number of elements of the list to use now, as a multiple of `multiple`: surplus elements wait for the next chunk; in
// the last chunk, zeros are added.
INLINE int usable(row_list & list, bool last, int multiple) {
    int n = list.n;
    if (!last) {
        return n - n % multiple;
    }
    for (; n % multiple; n++) {
        list.col[n]    = 0;
        list.weight[n] = 0;
    }
    return n;
}

// Removes the first n elements of the list.
INLINE void drop(row_list & list, int n) {
    const int rest = list.n - n;
    for (int i = 0; i < rest; i += W) {
        simd::store(list.weight + i, simd::load(list.weight + n + i));
        simd::store(reinterpret_cast<float *>(list.col + i), simd::load(reinterpret_cast<float *>(list.col + n + i)));
    }
    list.n = rest;
}

// Number of tiles that are multiplied by the lists of a group while these are in L2. The accumulators (128 KiB) also
// fit.
constexpr int GROUP_TILES = BLOCK_SIZE / (static_cast<int>(BUNDLE_ROWS) * TILE);

// Products of a group of rows with up to GROUP_TILES tiles of tokens. Only the last tile may be smaller than TILE.
template <int TYPE, typename S> struct bundle_panels {
    const bundles_layout & w;
    const mul_mat_params & p;
    int64_t                group = 0, begin = 0, end = 0;             // rows to compute: begin ... end - 1
    int64_t                token = 0, n_tokens = 0;                   // tokens of these tiles
    alignas(64) float acc[GROUP_TILES][(BUNDLE_ROWS + W - 1) * TILE]; // store_block() reads whole vectors of rows
    row_list lists[BUNDLE_ROWS];
    int      n_used[BUNDLE_ROWS]; // elements of each list in the current chunk

    bundle_panels(const bundles_layout & matrix, const mul_mat_params & params) : w(matrix), p(params) {}

    // Calls f(sums of a tile, its vectors, its first token, its tokens) for each tile of these tokens.
    template <typename F> INLINE void for_each_tile(const F & f) {
        for (int64_t t = 0; t < n_tokens; t += TILE) {
            const int64_t n = smaller(TILE, n_tokens - t);
            f(acc[t / TILE], static_cast<int>((n + W - 1) / W), token + t, n);
        }
    }

    void multiply() {
        const uint8_t * at       = w.bundles + w.group_off[group];
        const uint8_t * at_end   = w.bundles + w.group_off[group + 1];
        const int       multiple = sets_of(((n_tokens - 1) % TILE + W) / W); // of the last tile: the largest
        for_each_tile([&](float * sums, int vecs, int64_t, int64_t) {
            __builtin_memset(sums, 0, static_cast<size_t>(BUNDLE_ROWS * vecs * W) * sizeof(float));
        });
        for (row_list & list : lists) {
            list.n = 0;
        }
        for (int64_t limit = BUNDLE_CHUNK;; limit += BUNDLE_CHUNK) {
            while (at < at_end) {
                uint16_t column;
                __builtin_memcpy(&column, at + offsetof(bundle_header, first), sizeof(column));
                if (column >= limit) {
                    break;
                }
                at = S::template decode_bundle<TYPE>(at, lists);
            }
            const bool last = limit >= w.cols;
            for (int64_t r = 0; r < BUNDLE_ROWS; r++) {
                n_used[r] = usable(lists[r], last, multiple);
            }
            for_each_tile([&](float * sums, int vecs, int64_t first, int64_t) {
                const accumulate_fn add = accumulate_of(vecs);
                const float *       x   = static_cast<const float *>(p.scratch) + first * words_of(w.cols) * 64;
                for (int64_t r = begin; r < end; r++) {
                    add(x, lists[r].col, lists[r].weight, n_used[r], sums + r * vecs * W);
                }
            });
            if (last) {
                break;
            }
            for (int64_t r = 0; r < BUNDLE_ROWS; r++) {
                drop(lists[r], n_used[r]);
            }
        }
        for_each_tile([&](const float * sums, int vecs, int64_t first, int64_t n) {
            store_block(p, sums + begin * vecs * W, vecs, group * BUNDLE_ROWS + begin, end - begin, first, n);
        });
    }
};

template <int TYPE, typename S>
void multiply_bundle_panels(const bundles_layout & w, const mul_mat_params & p, int64_t row_begin, int64_t row_end) {
    bundle_panels<TYPE, S> panels(w, p);
    for (int64_t token = 0; token < p.n; token += GROUP_TILES * TILE) {
        panels.token    = token;
        panels.n_tokens = smaller(GROUP_TILES * TILE, p.n - token);
        for (int64_t group = row_begin / BUNDLE_ROWS; group * BUNDLE_ROWS < row_end; group++) {
            const int64_t row = group * BUNDLE_ROWS;
            panels.group      = group;
            panels.begin      = row > row_begin ? 0 : row_begin - row;
            panels.end        = smaller(BUNDLE_ROWS, row_end - row);
            panels.multiply();
        }
    }
}

} // namespace
} // namespace macko::cpu
