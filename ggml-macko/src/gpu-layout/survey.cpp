#include "gpu-layout/survey.h"

#include <algorithm>
#include <mutex>

namespace macko::cuda {

void find_exponent(const int32_t (&changes)[N_EXPONENTS + 1], int end, shape_survey * found) {
    int64_t held  = 0;
    found->n_held = -1;
    for (int i = 0; i < end; i++) {
        held += changes[i];
        if (held > found->n_held) {
            found->n_held   = held;
            found->exponent = i;
        }
    }
}

namespace {

uint32_t widened(uint16_t bits, int32_t type) { return bits_of_float(float_of_value(bits, type)); }

// One row-split layout of a matrix.
template <typename M> struct row_split_survey {
    const codec_view & view;
    int                n_threads;
    M                  m; // sizes and numbers only
    bool               whole_lines;
    // of each row, to compute the overshoot
    std::vector<int32_t>  row_ptr;
    std::vector<uint16_t> trailing;

    template <typename F> int for_each_row(F && f) const {
        return view.for_each_row(
            n_threads, [&](int64_t row, const void * dense) { f(row, static_cast<const uint16_t *>(dense)); });
    }

    int exponent(shape_survey * found) const {
        int32_t    changes[N_EXPONENTS + 1] = {};
        std::mutex mutex;
        const int  status = for_each_row([&](int64_t, const uint16_t * dense) {
            int32_t mine[N_EXPONENTS + 1] = {};
            for (int64_t c = 0; c < m.cols; c++) {
                const uint32_t f = widened(dense[c] & 0x7fff, m.type);
                if (f != 0) {
                    const exponent_range e = exponents_of(m, f);
                    mine[std::min(N_EXPONENTS, std::max(0, e.first))]++;
                    mine[std::min(N_EXPONENTS, std::max(0, e.end))]--;
                }
            }
            const std::lock_guard<std::mutex> lock(mutex);
            std::transform(mine, mine + N_EXPONENTS + 1, changes, changes, std::plus<>());
        });
        find_exponent(changes, end_of_exponents(m), found);
        return status;
    }

    // Calls entry(delta, x_slot of its first step) for the entries of a row in order, including fillers.
    template <typename F> void for_each_entry(const row_order & order, const uint16_t * dense, F && entry) const {
        int next = 0; // the x_slot after the last entry
        for (int q = 0; q < order.x_slots; q++) {
            const int c = order.word(q);
            if (c >= m.cols || dense[c] == 0) {
                continue;
            }
            const int most = (1 << m.delta_bits) - 1;
            for (; q - next > most; next += most + 1) {
                entry(most, next);
            }
            entry(q - next, next);
            next = q + 1;
        }
    }

    int groups(shape_survey * found) {
        row_ptr.assign(static_cast<size_t>(m.rows) + 1, 0);
        trailing.assign(static_cast<size_t>(m.rows), 0);
        std::mutex mutex;
        const int  status = for_each_row([&](int64_t row, const uint16_t * dense) {
            int  entries = 0, outliers = 0;
            bool impossible = false;
            for_each_entry(row_order(m, row), dense, [&](int, int) { entries++; });
            for (int64_t c = 0; c < m.cols; c++) {
                const uint32_t f = widened(dense[c], m.type);
                if (dense[c] != 0 && held_as(m, f) < 0) {
                    outliers++;
                    impossible = impossible || !outlier_fits(m, f);
                }
            }
            const int of_group                    = entries_of_group(m),
                      outlier_groups              = (outliers + OUTLIERS_OF_GROUP - 1) / OUTLIERS_OF_GROUP,
                      used                        = (entries + of_group - 1) / of_group + outlier_groups,
                      unused                      = whole_lines ? -used & (LINE_GROUPS - 1) : 0;
            row_ptr[static_cast<size_t>(row) + 1] = used + unused;
            trailing[static_cast<size_t>(row)] =
                static_cast<uint16_t>(pack_trailing(std::min(outlier_groups, MAX_OUTLIER_GROUPS), unused));
            const std::lock_guard<std::mutex> lock(mutex);
            found->n_groups += used + unused;
            found->n_unused_groups += unused;
            found->impossible = found->impossible || impossible || outlier_groups > MAX_OUTLIER_GROUPS;
        });
        for (size_t r = 0; r < static_cast<size_t>(m.rows) && found->n_groups <= INT32_MAX; r++) {
            row_ptr[r + 1] += row_ptr[r];
        }
        return status;
    }

    // Follows the deltas of a row as a product does; see shape_survey::overshoot.
    int overshoot_of(int64_t row, const uint16_t * dense) const {
        const row_order  order(m, row);
        std::vector<int> deltas, slots;
        for_each_entry(order, dense, [&](int delta, int slot) {
            deltas.push_back(delta);
            slots.push_back(slot);
        });
        const size_t   r = static_cast<size_t>(row);
        const row_span span(row_ptr[r], row_ptr[r + 1], trailing[r]);
        const int      modulus = 32 * m.bank_width - 1, part = entries_of_part(m);
        deltas.resize(static_cast<size_t>(span.groups * entries_of_group(m)), 0);
        int most = 0;
        for (int lane = 0; lane < m.lanes; lane++) {
            const int begin = span.n_before(lane, m.lanes) * entries_of_group(m),
                      end   = span.n_before(lane + 1, m.lanes) * entries_of_group(m);
            int at          = begin < end ? order.word(slots[static_cast<size_t>(begin)]) : 0;
            for (int k = begin; k < end; k += part) {
                int steps = part - 1;
                for (int i = k; i < k + part; i++) {
                    steps += deltas[static_cast<size_t>(i)];
                }
                const int last = at + 32 * steps;
                most           = std::max(most, last + 1 - modulus);
                at             = last + 32;
                at -= at >= modulus ? modulus : 0;
                if (at >= modulus) {
                    return INT32_MAX;
                }
            }
        }
        return most;
    }

    int overshoot(shape_survey * found) const {
        std::mutex mutex;
        return for_each_row([&](int64_t row, const uint16_t * dense) {
            const int                         reach = overshoot_of(row, dense);
            const std::lock_guard<std::mutex> lock(mutex);
            found->overshoot = std::max(found->overshoot, reach);
        });
    }
};

struct surveyor {
    const gpu_plan &   plan;
    const codec_view & view;
    int                n_threads;
    survey_step        step;
    shape_survey *     found;

    template <typename M> int row_split(const M & bound) const {
        row_split_survey<M> s{ view, n_threads, bound, has_whole_lines(bound, plan.matrix.desc), {}, {} };
        s.m.exponent = found->exponent;
        switch (step) {
            case survey_step::EXPONENT: return s.exponent(found);
            case survey_step::GROUPS:   return s.groups(found);
            default:
                shape_survey again  = *found; // only the first groups of rows are needed
                const int    status = s.groups(&again);
                return status ? status : s.overshoot(found);
        }
    }
    int operator()(const macko_layout &) const { return GGML_MACKO_STATUS_OK; }
    int operator()(const inline_delta_layout & m) const { return row_split(m); }
    int operator()(const exp_coded_layout & m) const { return row_split(m); }
    int operator()(const row_blocks_layout &) const {
        found->nbytes = bind_row_blocks(static_cast<const ec_csr_view &>(view), nullptr).nbytes;
        return GGML_MACKO_STATUS_OK;
    }
    int operator()(const fragments_layout & m) const {
        const fragments_sizes sizes =
            size_fragments(static_cast<const quantized_view &>(view).arrays(), m, std::max(1, n_threads));
        found->nbytes     = sizes.nbytes;
        found->most_words = sizes.most_words;
        return GGML_MACKO_STATUS_OK;
    }
};

} // namespace

int survey_on_cpu(gpu_plan * plan, const codec_view & view, int n_threads, layout_survey * found,
                  layout_verdict * verdict) {
    for (*found = {};;) {
        *verdict = settle(*plan, *found);
        if (plan->matrix.in_blocks && !std::holds_alternative<row_blocks_shape>(verdict->shape)) {
            gpu_matrix rows = {};
            TRY(smallest_rows(static_cast<const ec_csr_view &>(view), n_threads, &rows));
            *plan  = choose(rows, plan->device);
            *found = {};
            continue;
        }
        if (verdict->needs == survey_step::NOTHING) {
            return GGML_MACKO_STATUS_OK;
        }
        shape_survey &   of    = found->of[plan->candidates[verdict->candidate].survey];
        const gpu_layout bound = bind_layout(plan->matrix, verdict->shape, verdict->nbytes, nullptr);
        TRY(std::visit(surveyor{ *plan, view, n_threads, verdict->needs, &of }, bound));
        of.done = verdict->needs;
    }
}

} // namespace macko::cuda
