#include "cpu/layout/span-ops.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

namespace {

template <int BITS>
int read_macko_row(macko_row * row, int64_t begin, int64_t limit, int n, int32_t * entries, uint16_t * end) {
    macko_row r = *row;
    for (; r.k < r.end; r.k++) {
        const int64_t col = r.col + delta_code(r.deltas, r.k, BITS) + 1;
        if (col >= limit) {
            break;
        }
        const auto here = static_cast<int32_t>(col - begin);
        entries[n]      = here << 16 | r.values[r.k];
        n += r.values[r.k] != 0; // the next value overwrites a filler
        end[here / BUNDLE_SPAN] = static_cast<uint16_t>(n);
        r.col                   = col;
    }
    *row = r;
    return n;
}

int read_row(int32_t delta_bits, macko_row * row, int64_t begin, int64_t limit, int n, int32_t * entries,
             uint16_t * end) {
    switch (delta_bits) {
        case 1:  return read_macko_row<1>(row, begin, limit, n, entries, end);
        case 2:  return read_macko_row<2>(row, begin, limit, n, entries, end);
        case 4:  return read_macko_row<4>(row, begin, limit, n, entries, end);
        default: return read_macko_row<8>(row, begin, limit, n, entries, end);
    }
}

int write_vectors(const int32_t * entries, const int32_t * first, int32_t end, span_vector * out) {
    const int32_t * next[STEP_SLOTS];
    const auto      least = [&] {
        int32_t all = *next[0];
        for (int i = 1; i < STEP_SLOTS; i++) {
            all = std::min(all, *next[i]);
        }
        return all >> 16;
    };
    for (int i = 0; i < STEP_SLOTS; i++) {
        next[i] = entries + first[i];
    }
    int32_t now = least(), window = now;
    int     n = 0;
    for (; now < end; n++) {
        memset(out[n].place, 0, sizeof(out[n].place));
        for (int step = 0; step < 2; step++, now = least()) {
            const int32_t delta = now < end ? now - window : 0;
            window += delta;
            out[n].delta[step]  = static_cast<uint8_t>(delta);
            const int32_t limit = std::min(window + WINDOW, end) << 16;
            for (int i = 0; i < STEP_SLOTS; i++) { // no branch: the content of the window cannot be predicted
                const int32_t used                     = *next[i] < limit;
                out[n].value[bundle_value_at(step, i)] = static_cast<uint16_t>(*next[i] & -used);
                out[n].place[i] =
                    static_cast<uint8_t>(out[n].place[i] | (((*next[i] >> 16) - window) & -used) << 4 * step);
                next[i] += used;
            }
        }
    }
    return n;
}

} // namespace

const span_ops plain_span_ops = { read_row, write_vectors };

} // namespace macko::cpu
