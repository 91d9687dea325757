// Shared by the layouts INLINE_DELTA and EXP_CODED. A row is cut into `lanes` runs of nearly the same number of groups
// of entries, one run per thread. Runs are interleaved group by group, so that the threads read whole lines of memory:
//
//   row        | run 0: g0 g1 g2 | run 1: g3 g4 g5 | ... | run L-1 |
//   in memory  g0 g3 ... g(L-1)0 | g1 g4 ... | g2 g5 ... |              step s of all runs, then step s + 1
//   base       of each run, 16 bits: the column of its first entry
//
// In wide matrices entries are in the order of the shared-memory banks of their columns: by (c % 32) * W + c / 32, W =
// bank_width_of(cols), not by column c. A delta then counts steps of 32 columns, consecutive entries of a lane are in
// the same bank, and gathers of x rarely collide. Columns ascend in narrow matrices, and with deltas of 6 bits, whose
// long steps would pass through all banks.
//
// A value that a group cannot hold is an outlier: it is zero in its group, and groups of outliers follow the groups of
// the row. Rows of wide matrices begin at lines, so unused groups may follow. docs/design/gpu-layouts.md draws all of
// this. Plain C++; the constexpr functions are device code as well.
#pragma once

#include "codec/macko/macko.h"
#include "gpu-layout/desc.h"
#include "gpu-layout/memory.h"

namespace macko::cuda {

struct row_split_shape {
    int32_t delta_bits;
    int32_t lanes;  // runs per row
    bool    banked; // entries are in bank order
};

struct row_split_layout : layout_base {
    int32_t    delta_bits;
    int32_t    lanes;
    int32_t    bank_width; // bank_width_of(cols) if entries are in bank order, else 0
    int32_t    exponent;   // a value is 2^exponent times the stored value
    int32_t    overshoot;  // words after the end of x that a group may access before its position is reduced
    uint8_t *  groups;
    uint16_t * bases;    // rows * lanes
    uint16_t * trailing; // per row: pack_trailing() of the groups after those of its entries
    int32_t *  row_ptr;  // rows + 1: the first group of a row
};

constexpr int64_t WIDE_COLS   = 2048; // minimum columns of a wide matrix, whose entries are in bank order
constexpr int     LINE_GROUPS = 8;    // groups of a line: 128 bytes of INLINE_DELTA

// Columns of x per bank of shared memory: column c is at position (c % 32) * W + c / 32, so c = 32 * position mod (32 *
// W - 1), and 32 * W - 1 is at least cols.
constexpr int64_t bank_width_of(int64_t cols) { return cols / 32 + 1; }

constexpr int OUTLIERS_OF_GROUP  = 4; // values
constexpr int MAX_OUTLIER_GROUPS = 8191;
constexpr int pack_trailing(int outliers, int unused) { return outliers << 3 | unused; } // numbers of groups
constexpr int trailing_outliers(int trailing) { return trailing >> 3; }
constexpr int trailing_unused(int trailing) { return trailing & 7; }

// The runs per row (8, 16, 32) for which kernels are built. Numbers that no real shape would choose are not built.
struct lanes_range {
    int32_t        least, most;
    constexpr bool has(int32_t lanes) const { return least <= lanes && lanes <= most; }
};

// The groups of a row; the first group is `offset` groups after the start of a line. Group g is in the run of lane
// (offset + g) % lanes. A thread reads its run in steps of `lanes` groups, from the start of the line on; in the first
// step, lanes below `offset` have no group. Groups of outliers follow in the same order.
struct row_span {
    int begin = 0, groups = 0, outliers = 0, offset = 0;
    row_span() = default;
    constexpr row_span(int first, int end, int trailing)
        : begin(first),
          groups(end - first - trailing_outliers(trailing) - trailing_unused(trailing)),
          outliers(trailing_outliers(trailing)),
          offset(first % LINE_GROUPS) {}

    constexpr int slot(int lane, int lanes, int step) const { return begin - offset + step * lanes + lane; }
    constexpr int first_step(int lane) const { return lane < offset; }
    constexpr int end_step(int lane, int lanes) const { return steps_to(offset + groups - lane, lanes); }
    // groups of outliers are in steps end_step() ... end_of_outliers() - 1
    constexpr int end_of_outliers(int lane, int lanes) const {
        return steps_to(offset + groups + outliers - lane, lanes);
    }
    // groups in the runs of the lanes below
    constexpr int n_before(int lane, int lanes) const {
        return groups_before(offset + groups, lane, lanes) - least(offset, lane);
    }
    constexpr int run_of(int group, int lanes) const {
        int run = static_cast<int>(static_cast<int64_t>(group) * lanes / groups);
        for (; n_before(run, lanes) > group; run--) {
        }
        for (; n_before(run + 1, lanes) <= group; run++) {
        }
        return run;
    }

private:
    static constexpr int least(int a, int b) { return a < b ? a : b; }
    static constexpr int steps_to(int slot, int lanes) {
        return static_cast<int>(static_cast<unsigned>(slot + lanes - 1) / static_cast<unsigned>(lanes));
    }
    // number of the first n slots that belong to lanes below
    static constexpr int groups_before(int n, int lane, int lanes) { return n / lanes * lane + least(n % lanes, lane); }
};

// The order of the entries of a row. x_slot q is column q, or, in bank order, position (q + start) mod x_slots. start
// differs between the rows of a warp, so that their first runs begin in different banks.
struct row_order {
    int x_slots; // of a row
    int width;   // columns per bank; 0: columns ascend
    int start;

    constexpr row_order(const row_split_layout & m, int64_t row)
        : x_slots(m.bank_width ? 32 * m.bank_width - 1 : static_cast<int>(m.cols)),
          width(m.bank_width),
          start(static_cast<int>(row % (32 / m.lanes)) * m.bank_width) {}
    // the column of this slot, which is its word of x in shared memory
    constexpr int word(int q) const {
        if (!width) {
            return q;
        }
        const int p = q + start < x_slots ? q + start : q + start - x_slots;
        return p % width * 32 + p / width;
    }
};

// The exponents with which a group can hold a value: first ... end - 1.
struct exponent_range {
    int first, end;
};
constexpr int N_EXPONENTS = 128; // exponents whose power of two is a bfloat16 number

// Expected number of groups of `entries` entries in the matrix, if zeros are at random places.
double expected_groups(const macko_desc & desc, int64_t entries, int32_t delta_bits);
// The same per row, with groups of outliers, and with the last group, which is half full.
double expected_groups_of_row(const macko_desc & desc, int64_t entries, int32_t delta_bits, double outliers);
// Groups of a row with the unused groups of its last line. Rows end anywhere in a line, or, if they are pruned to equal
// lengths, all at about the same place.
double with_unused_groups(double groups);

// Binds m to memory, with nbytes_groups bytes for its groups.
void bind_row_split(const macko_desc & desc, const row_split_shape & shape, int64_t nbytes_groups, void * memory,
                    row_split_layout * m);

constexpr double GROUPS_MARGIN = 1.02; // reserved memory, relative to the expected memory

} // namespace macko::cuda
