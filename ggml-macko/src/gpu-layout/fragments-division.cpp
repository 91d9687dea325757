#include "gpu-layout/fragments-division.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace macko::cuda {

namespace {

// Copies of the table: with few, threads wait for the banks of shared memory.
std::vector<int> numbers_of_copies(const fragments_work & w) {
    return has_little_shared_memory(w.room) ? std::vector<int>{ 8, 4 } : std::vector<int>{ w.nx < 8 ? 16 : 8 };
}

class search {
    const fragments_work & w;
    const int              buffer    = fragments_buffer_nbytes(w.tile_chunks, w.window, w.most_words);
    int64_t                best_time = INT64_MAX;

    // Tries a number of copies, of segments in a phase, of warps, and of parts.
    void attempt(int copies, int segments, int warps, int wanted_parts) {
        const int scratch = FRAGMENTS_SCRATCH_NBYTES, sums = 16 * w.nx * 4; // of a part
        const int place = static_cast<int>(sizeof(listed_tile)), x_at = copies * 256 * 8,
                  lists_at = x_at + x_nbytes(segments * w.tile_chunks * 8, w.nx),
                  left     = w.room - lists_at - scratch - warps * 2 * buffer;
        const int length   = (segments + wanted_parts - 1) / wanted_parts,
                  parts    = (segments + length - 1) / length, // none is empty
            places = parts * length, phases = (w.segments + segments - 1) / segments;
        const auto most = [&](int lists) { // stripes of a round
            return std::min({ w.stripes, left / (parts * sums + lists * places * place), MAX_LISTED / places }) /
                   w.matrices * w.matrices;
        };
        const int lists    = phases == 1 && most(1) == w.stripes ? 1 : LISTS;
        const int in_round = most(lists);
        if (in_round < w.matrices) {
            return;
        }
        // The chunks of the warp with the most, times 16 + warps, which is about proportional to the time of a chunk
        // (measured), and 10 % more with 4 copies. A barrier and a copy of x take about as long as a chunk.
        const auto time_of = [&](int n) {
            return static_cast<int64_t>(n * parts + warps - 1) / warps * length * w.tile_chunks * (16 + warps);
        };
        const int     rounds = w.stripes / in_round, rest = w.stripes % in_round;
        const int64_t time = (rounds * time_of(in_round) + time_of(rest)) * phases * (copies == 4 ? 11 : 10) +
                             10 * (24 * (rounds + (rest > 0)) * phases + parts);
        if (time >= best_time) {
            return;
        }
        best_time           = time;
        best.warps          = warps;
        best.table_copies   = copies;
        best.phases         = phases;
        best.phase_segments = segments;
        best.round_stripes  = in_round;
        best.parts          = parts;
        best.part_segments  = length;
        best.stripe_places  = places;
        best.inverse_places = ((1 << 20) + places - 1) / places;
        best.x_at           = x_at;
        best.lists_at       = lists_at;
        best.sums_at        = lists_at + lists * in_round * places * place;
        best.scratch_at     = best.sums_at + in_round * parts * sums;
        best.buffers_at     = best.scratch_at + scratch;
        best.buffer_nbytes  = buffer;
    }

public:
    fragments_division best = {};

    explicit search(const fragments_work & work) : w(work) {
        int last = 0;
        for (int phases = 1; phases <= (w.whole_x ? 1 : w.segments); phases++) {
            const int segments = (w.segments + phases - 1) / phases;
            if (segments == last) {
                continue;
            }
            last = segments;
            for (const int copies : numbers_of_copies(w)) {
                for (int warps = max_warps(w.nx); warps >= 1; warps--) {
                    for (int parts = 1; parts <= std::min(segments, MAX_WARPS); parts++) {
                        attempt(copies, segments, warps, parts);
                    }
                }
            }
        }
    }
};

} // namespace

fragments_division divide_fragments(const fragments_work & w) {
    using key = std::tuple<int32_t, int32_t, int32_t, int32_t, bool, int32_t, int32_t, int32_t, int32_t>;
    static std::map<key, fragments_division> verdicts;
    static std::mutex                        mutex;
    const std::lock_guard<std::mutex>        lock(mutex);
    const key                                of = {
        w.nx, w.stripes, w.matrices, w.segments, w.whole_x, w.tile_chunks, w.window, w.most_words, w.room
    };
    const auto found = verdicts.find(of);
    return found != verdicts.end() ? found->second : verdicts.emplace(of, search(w).best).first->second;
}

} // namespace macko::cuda
