// Rows are bitsets of their non-zero columns; the similarity of two rows is the popcount of their intersection. Each
// level repeatedly pairs blocks and extracts the columns that both share; the extracted parts become the blocks of the
// next level, with twice the granularity (paper, algorithms 1 and 2). Unlike the paper, only distances within a lane
// are limited, because each lane has a base of its own.
#include "codec/ec-csr/extract.h"
#include "codec/nonzero.h"
#include "codec/team.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

namespace macko {

static int check_extract_options(const extract_options & o) {
    if (o.max_granularity < 1 || o.max_granularity > EC_MAX_GRANULARITY ||
        (o.max_granularity & (o.max_granularity - 1))) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "max_granularity %d is not 1, 2, 4 ... %d", o.max_granularity,
                    EC_MAX_GRANULARITY);
    }
    if (o.min_columns < EC_UNIT || o.min_columns % EC_UNIT) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "min_columns %d is not a multiple of %d", o.min_columns,
                    static_cast<int>(EC_UNIT));
    }
    return GGML_MACKO_STATUS_OK;
}

// ---- counting: compiled for several instruction sets, because popcounts vectorize ----

namespace {

// shared[i] = number of columns that candidate shares with rows[i]
inline __attribute__((always_inline)) void count_shared_body(const uint64_t * const * rows, int64_t n,
                                                             const uint64_t * candidate, int64_t words,
                                                             int32_t * shared) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t * row = rows[i];
        int64_t          sum = 0;
        for (int64_t w = 0; w < words; w++) {
            sum += __builtin_popcountll(row[w] & candidate[w]);
        }
        shared[i] = static_cast<int32_t>(sum);
    }
}

using count_function = void (*)(const uint64_t * const *, int64_t, const uint64_t *, int64_t, int32_t *);

void count_shared_plain(const uint64_t * const * rows, int64_t n, const uint64_t * candidate, int64_t words,
                        int32_t * shared) {
    count_shared_body(rows, n, candidate, words, shared);
}

#if defined(__x86_64__)
__attribute__((target("popcnt"))) void count_shared_popcnt(const uint64_t * const * rows, int64_t n,
                                                           const uint64_t * candidate, int64_t words,
                                                           int32_t * shared) {
    count_shared_body(rows, n, candidate, words, shared);
}
#if defined(__clang__) // clang has no preferred width, and would ignore the whole attribute
__attribute__((target("avx512f,avx512vpopcntdq,popcnt")))
#else
__attribute__((target("avx512f,avx512vpopcntdq,popcnt,prefer-vector-width=512")))
#endif
void count_shared_avx512(const uint64_t * const * rows, int64_t n, const uint64_t * candidate, int64_t words,
                    int32_t * shared) {
    count_shared_body(rows, n, candidate, words, shared);
}
count_function best_count() {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vpopcntdq")) {
        return count_shared_avx512;
    }
    return __builtin_cpu_supports("popcnt") ? count_shared_popcnt : count_shared_plain;
}
#else
count_function best_count() { return count_shared_plain; }
#endif

} // namespace

// ---- extraction ----

namespace {

// The blocks of a level before they get the shape that the arrays require: granularity rows each, and their shared
// columns.
struct level {
    int32_t               granularity;
    int64_t               words; // of a mask
    std::vector<uint64_t> masks;
    std::vector<int32_t>  rows; // `granularity` rows per block
    // blocks without a partner in the last round; two of them never become partners, because masks only lose columns
    std::vector<uint8_t> idle;

    int64_t    size() const { return static_cast<int64_t>(rows.size()) / granularity; }
    uint64_t * mask(int64_t i) { return masks.data() + i * words; }
    int64_t    count(int64_t i) const {
        int64_t n = 0;
        for (int64_t w = 0; w < words; w++) {
            n += __builtin_popcountll(masks[static_cast<size_t>(i * words + w)]);
        }
        return n;
    }
};

using pairs = std::vector<std::pair<int32_t, int32_t>>;

// Paper, algorithm 2: each row, in the given order, is paired with the free row that shares most columns with it (on a
// tie, the first), if they share at least min_shared. Counts are made for a batch of rows at a time and skipped for two
// idle rows, which changes only the speed.
pairs match_rows(level & l, std::vector<int32_t> order, int64_t min_shared, int n_threads) {
    constexpr int64_t           batch        = 32;
    static const count_function count_shared = best_count();
    pairs                       out;
    std::vector<int32_t>        shared; // n for each row of the batch
    std::vector<int32_t>        busy;   // positions in `order`
    std::vector<uint8_t>        taken;
    while (order.size() > 1) {
        const int64_t n       = static_cast<int64_t>(order.size());
        const int64_t n_batch = std::min(batch, n);
        const auto is_idle = [&](int64_t i) { return l.idle[static_cast<size_t>(order[static_cast<size_t>(i)])] != 0; };
        busy.clear();
        for (int64_t i = 0; i < n; i++) {
            if (!is_idle(i)) {
                busy.push_back(static_cast<int32_t>(i));
            }
        }
        if (busy.empty()) {
            break;
        }
        const uint64_t * rows[batch]; // rows of the batch, the busy ones first
        int64_t          of[batch], n_rows = 0, n_busy = 0;
        for (const bool idle : { false, true }) {
            for (int64_t i = 0; i < n_batch; i++) {
                if (is_idle(i) == idle) {
                    rows[n_rows] = l.mask(order[static_cast<size_t>(i)]);
                    of[i]        = n_rows++;
                }
            }
            n_busy = idle ? n_busy : n_rows;
        }
        shared.resize(static_cast<size_t>(n * n_batch));
        parallel_parts(n_threads, n, 64, [&](int64_t begin, int64_t end, int) {
            for (int64_t j = std::max<int64_t>(begin, 1); j < end; j++) {
                int32_t       counts[batch];
                const int64_t n_counts = is_idle(j) ? n_busy : n_rows;
                count_shared(rows, n_counts, l.mask(order[static_cast<size_t>(j)]), l.words, counts);
                for (int64_t k = 0; k < n_counts; k++) {
                    shared[static_cast<size_t>(k * n + j)] = counts[k];
                }
            }
        });
        taken.assign(order.size(), 0);
        for (int64_t i = 0; i < n_batch; i++) {
            if (taken[static_cast<size_t>(i)]) {
                continue;
            }
            taken[static_cast<size_t>(i)] = 1;
            const int32_t * counts        = shared.data() + of[i] * n;
            int64_t         best = -1, most = min_shared - 1;
            const auto      look_at = [&](int64_t j) {
                if (counts[j] > most && !taken[static_cast<size_t>(j)]) {
                    most = counts[j];
                    best = j;
                }
            };
            if (is_idle(i)) {
                for (auto j = std::upper_bound(busy.begin(), busy.end(), i); j < busy.end(); j++) {
                    look_at(*j);
                }
            } else {
                for (int64_t j = i + 1; j < n; j++) {
                    look_at(j);
                }
            }
            if (best >= 0) {
                taken[static_cast<size_t>(best)] = 1;
                out.emplace_back(order[static_cast<size_t>(i)], order[static_cast<size_t>(best)]);
            }
        }
        size_t kept = 0;
        for (size_t j = 0; j < order.size(); j++) {
            if (!taken[j]) {
                order[kept++] = order[j];
            }
        }
        order.resize(kept);
    }
    return out;
}

void mask_columns(const uint64_t * mask, int64_t words, std::vector<int32_t> * out) {
    out->clear();
    for (int64_t w = 0; w < words; w++) {
        for (uint64_t bits = mask[w]; bits; bits &= bits - 1) {
            out->push_back(static_cast<int32_t>(w * 64 + __builtin_ctzll(bits)));
        }
    }
}

// Picks columns for blocks with several rows: all lanes have the same number of columns, a multiple of EC_VECTOR; no
// distance in a lane exceeds max_delta; a block has 32 lanes.
struct column_picker {
    int64_t              max_delta, min_per_lane, max_per_lane;
    std::vector<int32_t> columns; // in: the shared columns
    std::vector<int32_t> runs;    // begin of each maximal run of columns without a wide gap; then the end
    std::vector<int32_t> picked;  // out: n_blocks * 32 * per_lane of them, ascending
    int64_t              per_lane = 0, n_blocks = 0;

    column_picker(int32_t delta_bits, int64_t min_columns, int64_t max_columns)
        : max_delta((1 << delta_bits) - 1),
          min_per_lane(min_columns / EC_LANES),
          max_per_lane(std::max(max_columns, min_columns) / EC_LANES) {}

    // Picks as many columns as possible. On a tie, the longest lanes win, because they give the fewest blocks.
    void pick() {
        const int64_t n = static_cast<int64_t>(columns.size());
        runs.clear();
        for (int64_t i = 0; i < n; i++) {
            if (i == 0 || columns[static_cast<size_t>(i)] - columns[static_cast<size_t>(i) - 1] > max_delta) {
                runs.push_back(static_cast<int32_t>(i));
            }
        }
        runs.push_back(static_cast<int32_t>(n));
        per_lane = n_blocks = 0;
        for (int64_t length = min_per_lane; length <= std::min(max_per_lane, n / EC_LANES); length += EC_VECTOR) {
            int64_t lanes = 0;
            for (size_t r = 0; r + 1 < runs.size(); r++) {
                lanes += (runs[r + 1] - runs[r]) / length;
            }
            const int64_t blocks = lanes / EC_LANES;
            if (blocks > 0 && blocks * length >= n_blocks * per_lane) {
                n_blocks = blocks;
                per_lane = length;
            }
        }
        picked.clear();
        const int64_t wanted = n_blocks * EC_LANES * per_lane;
        for (size_t r = 0; r + 1 < runs.size() && static_cast<int64_t>(picked.size()) < wanted; r++) {
            const int64_t whole =
                std::min((runs[r + 1] - runs[r]) / per_lane * per_lane, wanted - static_cast<int64_t>(picked.size()));
            picked.insert(picked.end(), columns.begin() + runs[r], columns.begin() + runs[r] + whole);
        }
    }
};

// the generator of the row order: splitmix64
uint64_t next_random(uint64_t * state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

struct extractor {
    const macko_desc &      desc;
    const extract_options & options;
    int                     n_threads;
    int64_t                 words;
    int64_t                 max_elements; // of a block
    ec_csr_blocks           out;
    std::mutex              out_mutex;
    level                   rest; // remaining columns, for blocks with one row

    int64_t max_columns(int32_t granularity) const {
        return std::max<int64_t>(EC_UNIT, max_elements / granularity / EC_UNIT * EC_UNIT);
    }

    // f(i, picker) for i < n, in parallel
    template <typename F> void each(int64_t n, int32_t granularity, F && f) const {
        std::vector<column_picker> pickers(
            static_cast<size_t>(n_threads),
            column_picker(desc.delta_bits, options.min_columns, max_columns(granularity)));
        parallel_parts(n_threads, n, 16, [&](int64_t begin, int64_t end, int thread) {
            for (int64_t i = begin; i < end; i++) {
                f(i, pickers[static_cast<size_t>(thread)]);
            }
        });
    }

    // One round: pairs rows of l and moves their shared columns to next. Returns false when no column moved.
    bool extract_round(level & l, level & next) {
        std::vector<int32_t> order;
        for (int64_t i = 0; i < l.size(); i++) {
            if (l.count(i) >= options.min_columns) {
                order.push_back(static_cast<int32_t>(i));
            }
        }
        uint64_t state = options.seed;
        for (size_t i = order.size(); i > 1; i--) {
            std::swap(order[i - 1], order[next_random(&state) % i]);
        }
        l.idle.resize(static_cast<size_t>(l.size()), 0);
        const pairs found = match_rows(l, std::move(order), options.min_columns, n_threads);
        l.idle.assign(l.idle.size(), 1);
        for (const auto & [a, b] : found) {
            l.idle[static_cast<size_t>(a)] = l.idle[static_cast<size_t>(b)] = 0;
        }
        const int64_t first = next.size();
        next.masks.resize(static_cast<size_t>((first + static_cast<int64_t>(found.size())) * words), 0);
        std::vector<uint8_t> used(found.size(), 0);
        each(static_cast<int64_t>(found.size()), next.granularity, [&](int64_t i, column_picker & picker) {
            uint64_t * a = l.mask(found[static_cast<size_t>(i)].first);
            uint64_t * b = l.mask(found[static_cast<size_t>(i)].second);
            uint64_t * s = next.mask(first + i);
            for (int64_t w = 0; w < words; w++) {
                s[w] = a[w] & b[w];
            }
            mask_columns(s, words, &picker.columns);
            picker.pick();
            memset(s, 0, static_cast<size_t>(words) * 8);
            for (const int32_t c : picker.picked) {
                s[c >> 6] |= uint64_t(1) << (c & 63);
            }
            for (int64_t w = 0; w < words; w++) {
                a[w] &= ~s[w];
                b[w] &= ~s[w];
            }
            used[static_cast<size_t>(i)] = !picker.picked.empty();
        });
        int64_t n = first;
        for (size_t i = 0; i < found.size(); i++) {
            if (!used[i]) {
                continue;
            }
            memmove(next.mask(n++), next.mask(first + static_cast<int64_t>(i)), static_cast<size_t>(words) * 8);
            for (const int32_t side : { found[i].first, found[i].second }) {
                next.rows.insert(next.rows.end(), l.rows.begin() + side * l.granularity,
                                 l.rows.begin() + (side + 1) * l.granularity);
            }
            std::sort(next.rows.end() - next.granularity, next.rows.end());
        }
        next.masks.resize(static_cast<size_t>(n * words));
        return n > first;
    }

    void append(const std::vector<ec_csr_block> & blocks, const std::vector<int32_t> & cols, const int32_t * rows) {
        const std::lock_guard<std::mutex> lock(out_mutex);
        for (ec_csr_block b : blocks) {
            b.rows = static_cast<int64_t>(out.rows.size());
            out.rows.insert(out.rows.end(), rows, rows + b.granularity);
            const auto first = cols.begin() + b.cols;
            b.cols           = static_cast<int64_t>(out.cols.size());
            out.cols.insert(out.cols.end(), first, first + b.n_cols);
            out.blocks.push_back(b);
        }
    }

    // Makes blocks with several rows from the rest of a level; columns that do not fill a block return to their rows.
    void emit_level(level & l) {
        each(l.size(), l.granularity, [&](int64_t i, column_picker & picker) {
            uint64_t * mask = l.mask(i);
            mask_columns(mask, words, &picker.columns);
            picker.pick();
            std::vector<ec_csr_block> blocks;
            const int64_t             n = picker.per_lane * EC_LANES;
            for (int64_t b = 0; b < picker.n_blocks; b++) {
                blocks.push_back({ l.granularity, static_cast<int32_t>(EC_VECTOR), 0, b * n, n, n });
            }
            append(blocks, picker.picked, l.rows.data() + i * l.granularity);
            for (const int32_t c : picker.picked) {
                mask[c >> 6] &= ~(uint64_t(1) << (c & 63));
            }
        });
        for (int64_t i = 0; i < l.size(); i++) {
            for (int32_t k = 0; k < l.granularity; k++) {
                uint64_t * row = rest.mask(l.rows[static_cast<size_t>(i * l.granularity + k)]);
                for (int64_t w = 0; w < words; w++) {
                    row[w] |= l.mask(i)[w];
                }
            }
        }
    }

    // Splits the rest of a row into blocks of whole units and a last block. A gap at a split needs no fillers.
    void emit_row(int64_t row, std::vector<int32_t> & cols) {
        const int64_t max_delta = (1 << desc.delta_bits) - 1;
        const int64_t n         = static_cast<int64_t>(cols.size());
        int64_t       left      = 0; // entries from column i on, the first of a block
        const auto    entries   = [&](int64_t i) {
            return 1 + (cols[static_cast<size_t>(i)] - cols[static_cast<size_t>(i) - 1] - 1) / max_delta;
        };
        for (int64_t i = 1; i < n; i++) {
            left += entries(i);
        }
        std::vector<ec_csr_block> blocks;
        for (int64_t i = 0; i < n;) {
            const int64_t units  = (left + 1) / EC_UNIT * EC_UNIT;
            const int64_t room   = units > 0 ? std::min(max_columns(1), units) : left + 1;
            const int64_t begin  = i++;
            int64_t       n_used = 1;
            for (; i < n && n_used + entries(i) <= room; i++) {
                n_used += entries(i);
                left -= entries(i);
            }
            left -= i < n ? entries(i) : 0; // the next one starts a block
            const bool    is_long = n_used > EC_MAX_SHORT;
            const int64_t unit    = is_long ? EC_UNIT : EC_LANES;
            blocks.push_back({ 1, static_cast<int32_t>(is_long ? EC_VECTOR : 1), 0, begin, i - begin,
                               (n_used + unit - 1) / unit * unit });
        }
        const int32_t index = static_cast<int32_t>(row);
        append(blocks, cols, &index);
    }

    template <typename T> void run(const T * dense) {
        level rows = { 1, words, std::vector<uint64_t>(static_cast<size_t>(desc.rows * words)), {}, {} };
        for (int64_t r = 0; r < desc.rows; r++) {
            rows.rows.push_back(static_cast<int32_t>(r));
        }
        std::atomic<int64_t> n_used{ 0 };
        parallel_ranges(n_threads, desc.rows, [&](int64_t begin, int64_t end) {
            int64_t n = 0;
            for (int64_t r = begin; r < end; r++) {
                nonzero_words(dense + r * desc.cols, desc.cols, rows.mask(r));
                n += rows.count(r) > 0;
            }
            n_used += n;
        });
        if (n_used == 0) { // FORMAT.md section 6: one short block of padding
            out.blocks.push_back({ 1, 1, 0, 0, 0, EC_LANES });
            out.rows.push_back(0);
            return;
        }
        max_elements = options.clip ? (2 * desc.nnz / n_used + EC_UNIT - 1) / EC_UNIT * EC_UNIT : INT64_MAX / 2;

        level l     = std::move(rows);
        bool  first = true;
        for (;;) {
            level next = { 2 * l.granularity, words, {}, {}, {} };
            if (next.granularity <= options.max_granularity) {
                while (extract_round(l, next)) {
                }
            }
            if (first) {
                rest  = std::move(l);
                first = false;
            } else {
                emit_level(l);
            }
            if (next.size() == 0) {
                break;
            }
            l = std::move(next);
        }
        each(desc.rows, 1, [&](int64_t r, column_picker & picker) {
            mask_columns(rest.mask(r), words, &picker.columns);
            emit_row(r, picker.columns);
        });
    }
};

} // namespace

int extract_blocks(const macko_desc & desc, const void * dense, const extract_options & options, int n_threads,
                   ec_csr_blocks * out) {
    TRY(check_extract_options(options));
    extractor e{ desc, options, n_threads, (desc.cols + 63) / 64, 0, {}, {}, {} };
    if (desc.type == GGML_MACKO_TYPE_F32) {
        e.run(static_cast<const uint32_t *>(dense));
    } else {
        e.run(static_cast<const uint16_t *>(dense));
    }
    *out = std::move(e.out);
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
