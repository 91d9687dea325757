// The choice of a GPU's layout without a GPU: a table of headers and devices with their plans, the results of settle()
// for surveys, and the survey of values on the CPU against brute force.
#include "codec/macko/encode.h"
#include "codec/registry.h"
#include "gpu-layout/fragments-division.h"
#include "gpu-layout/survey.h"
#include "test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>

using namespace macko;
using namespace macko::cuda;

static const int64_t KB = 1024;

// ---- plans ----

struct plan_case {
    const char *              name;
    gpu_matrix                matrix;
    gpu_device                device;
    std::vector<const char *> candidates; // text_of()
};

static gpu_matrix matrix_of(int64_t rows, int64_t cols, int type, int bits, double density, int64_t outliers = -1,
                            int value_type = -1) {
    const double all    = static_cast<double>(rows * cols);
    const auto   nnz    = static_cast<int64_t>(density * all);
    const auto   stored = static_cast<int64_t>(density * all / (1 - std::pow(1 - density, 1 << bits)));
    return { { rows, cols, type, bits, nnz }, n_padded(stored), value_type < 0 ? type : value_type, outliers };
}

static const int F16 = GGML_MACKO_TYPE_F16, BF16 = GGML_MACKO_TYPE_BF16, F32 = GGML_MACKO_TYPE_F32;

static gpu_matrix windows_of(int64_t rows, int64_t cols, double density, int value_type, int64_t window) {
    gpu_matrix m = matrix_of(rows, cols, F16, 4, density, -1, value_type);
    m.window     = window;
    return m;
}

static const plan_case PLANS[] = {
    { "wide F16",
      matrix_of(4096, 4096, F16, 2, .5),
      { 227 * KB, true },
      { "EXP_CODED: deltas of 2 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 3 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 2 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 2 bits, 8 lanes, columns ascend", "MACKO: the arrays of the file" } },
    { "EXP_CODED switched off",
      matrix_of(4096, 4096, F16, 2, .5),
      { 227 * KB, false },
      { "INLINE_DELTA: deltas of 3 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 2 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 2 bits, 8 lanes, columns ascend", "MACKO: the arrays of the file" } },
    { "narrow F16",
      matrix_of(4096, 1024, F16, 4, .3),
      { 99 * KB, true },
      { "INLINE_DELTA: deltas of 4 bits, 8 lanes, columns ascend", "MACKO: the arrays of the file" } },
    { "few entries",
      matrix_of(4096, 11008, F16, 8, .1),
      { 99 * KB, true },
      { "EXP_CODED: deltas of 6 bits, 16 lanes, columns ascend",
        "INLINE_DELTA: deltas of 6 bits, 16 lanes, columns ascend", "MACKO: the arrays of the file" } },
    { "long rows",
      matrix_of(4096, 28672, F16, 2, .5),
      { 227 * KB, true },
      { "EXP_CODED: deltas of 2 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 3 bits, 32 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 2 bits, 32 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 2 bits, 8 lanes, columns ascend", "MACKO: the arrays of the file" } },
    { "x does not fit shared memory",
      matrix_of(4096, 28672, BF16, 2, .5),
      { 99 * KB, true },
      { "MACKO: the arrays of the file" } },
    { "F32", matrix_of(512, 4096, F32, 4, .2), { 99 * KB, true }, { "MACKO: the arrays of the file" } },
    { "coded values, few outliers",
      matrix_of(4096, 4096, BF16, 4, .5, 8000, GGML_MACKO_TYPE_CODED),
      { 99 * KB, true },
      { "EXP_CODED: deltas of 2 bits, 16 lanes, in the order of banks",
        "EXP_CODED: deltas of 2 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 3 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 4 bits, 16 lanes, in the order of banks",
        "INLINE_DELTA: deltas of 4 bits, 8 lanes, columns ascend", "MACKO: the arrays of the file" } },
    { "windows of columns",
      windows_of(4096, 4096, .5, GGML_MACKO_TYPE_Q4, 64),
      { 227 * KB, true },
      { "FRAGMENTS: codes of 4 bits, windows of 64 columns, tiles of 512" } },
    { "windows of columns, little shared memory",
      windows_of(4096, 4096, .5, GGML_MACKO_TYPE_Q4, 64),
      { 99 * KB, true },
      { "FRAGMENTS: codes of 4 bits, windows of 64 columns, tiles of 256" } },
    { "windows of columns, few entries, one chunk",
      windows_of(4096, 200, .1, GGML_MACKO_TYPE_Q5, 256),
      { 99 * KB, true },
      { "FRAGMENTS: codes of 8 bits, windows of 256 columns, tiles of 256" } },
};

TEST(plans_of_headers) {
    for (const plan_case & c : PLANS) {
        const gpu_plan plan = choose(c.matrix, c.device);
        CHECK(plan.candidates.size() == c.candidates.size(), "%s:\n%s", c.name, text_of(plan).c_str());
        for (size_t i = 0; i < plan.candidates.size() && i < c.candidates.size(); i++) {
            CHECK(text_of(plan.candidates[i].shape) == c.candidates[i], "%s: candidate %zu is %s", c.name, i,
                  text_of(plan.candidates[i].shape).c_str());
            CHECK(plan.candidates[i].survey < layout_survey().of.size(), "%s", c.name);
        }
    }
}

TEST(every_layout_that_is_left_out_has_a_reason) {
    const auto left_out = [](const gpu_matrix & m, const gpu_device & d) { return choose(m, d).left_out; };
    using reasons       = std::vector<std::string>;
    CHECK(left_out(PLANS[0].matrix, PLANS[0].device).empty(), "all are candidates");
    CHECK(left_out(PLANS[1].matrix, PLANS[1].device) == reasons{ "EXP_CODED: the environment leaves it out" }, "env");
    CHECK(left_out(PLANS[2].matrix, PLANS[2].device) == reasons{ "EXP_CODED: fewer than 2048 columns" }, "narrow");
    CHECK(left_out(PLANS[6].matrix, PLANS[6].device) == reasons{ "EXP_CODED, INLINE_DELTA: values of 32 bits" }, "F32");
    for (const std::string & reason : left_out(PLANS[5].matrix, PLANS[5].device)) {
        CHECK(reason.find(": x of 28672 columns does not fit 101376 bytes of shared memory") != std::string::npos, "%s",
              reason.c_str());
    }
}

// The reservation: a header with a small number of outliers saves memory, and every candidate that is made in the
// reserved bytes fits in them.
TEST(reserved_bytes) {
    for (const int64_t cols : { 64, 2048, 4096, 11008, 28672 }) {
        for (const int bits : { 1, 2, 4, 8 }) {
            for (const int type : { F16, BF16, F32 }) {
                const double     density = bits == 8 ? .08 : bits == 4 ? .3 : .5;
                const gpu_matrix m       = matrix_of(1000, cols, type, bits, density);
                const gpu_plan   plan    = choose(m, { 227 * KB, true });
                for (const layout_candidate & c : plan.candidates) {
                    const gpu_layout bound = bind_layout(m, c.shape, c.nbytes, nullptr);
                    CHECK(base_of(bound).nbytes <= c.nbytes && c.nbytes % GPU_ALIGNMENT == 0, "%s: %lld of %lld bytes",
                          text_of(c.shape).c_str(), static_cast<long long>(base_of(bound).nbytes),
                          static_cast<long long>(c.nbytes));
                }
            }
        }
    }
    gpu_matrix     m    = matrix_of(4096, 4096, BF16, 4, .5);
    const gpu_plan any  = choose(m, { 99 * KB, true });
    m.max_outliers      = 8000;
    const gpu_plan told = choose(m, { 99 * KB, true });
    CHECK(told.nbytes < any.nbytes && told.candidates[0].nbytes == told.nbytes &&
              told.candidates[1].nbytes == any.nbytes,
          "%lld, %lld", static_cast<long long>(told.nbytes), static_cast<long long>(any.nbytes));
    m.max_outliers = m.desc.nnz;
    CHECK(choose(m, { 99 * KB, true }).nbytes == any.nbytes, "all values are outliers");
}

TEST(a_layout_that_is_asked_for_is_the_only_candidate) {
    const gpu_matrix m = matrix_of(300, 4096, F16, 4, .3);
    const gpu_device d = { 227 * KB, true };
    CHECK(choose_only(m, d, "MACKO", 0).candidates.size() == 1, "MACKO");
    CHECK(choose_only(m, d, "EXP_CODED", 16).candidates.size() == 1, "EXP_CODED");
    CHECK(choose_only(m, d, "EXP_CODED", 8).candidates.empty(), "no kernels with 8 lanes");
    CHECK(choose_only(m, d, "INLINE_DELTA", 32).candidates.size() == 2, "3 and 4 bits");
    CHECK(choose_only(m, d, "none", 0).candidates.empty(), "no such layout");
    CHECK(settle(choose_only(m, d, "none", 0), {}).candidate == 0, "after the last candidate");
}

// Matrices share a launch if one kernel works for all of them: entries in bank order and ascending columns do not mix.
TEST(same_kernel) {
    const gpu_matrix m       = matrix_of(300, 4096, F16, 4, .3);
    const auto       inlined = [&](int bits, int lanes, bool banked) {
        return bind_layout(m, inline_delta_shape{ { bits, lanes, banked } }, 0, nullptr);
    };
    CHECK(have_same_kernel(inlined(4, 8, true), inlined(4, 8, true)), "equal layouts");
    CHECK(!have_same_kernel(inlined(4, 8, true), inlined(4, 8, false)), "another order");
    CHECK(!have_same_kernel(inlined(4, 8, true), inlined(3, 8, true)), "other deltas");
    CHECK(!have_same_kernel(inlined(4, 8, true), inlined(4, 16, true)), "other lanes");
    CHECK(!have_same_kernel(inlined(4, 8, true), bind_layout(m, macko_shape{}, 0, nullptr)), "another layout");
    gpu_matrix wider = m;
    wider.desc.cols  = 5120;
    CHECK(!have_same_kernel(bind_layout(m, macko_shape{}, 0, nullptr), bind_layout(wider, macko_shape{}, 0, nullptr)),
          "other columns");
}

// ---- settle() ----

// Answers each question of settle() with answer(candidate, step, survey), and returns the text of the layout.
template <typename F> static std::string settled(const gpu_plan & plan, F && answer) {
    layout_survey found = {};
    for (int i = 0; i < 20; i++) {
        const layout_verdict v = settle(plan, found);
        if (v.needs == survey_step::NOTHING) {
            return text_of(v.shape);
        }
        shape_survey & of = found.of[plan.candidates[v.candidate].survey];
        CHECK(of.done < v.needs, "the same survey is requested again");
        answer(v, of);
        of.done = v.needs;
    }
    return "surveys are requested forever";
}

TEST(survey_settles_the_plan) {
    const gpu_plan plan = choose(PLANS[0].matrix, PLANS[0].device); // EXP_CODED, 3 bits, 2 bits, ascending, MACKO
    const int64_t  nnz = plan.matrix.desc.nnz, all = inline_delta_max_groups(plan.matrix.desc, plan.matrix.n_padded);
    // groups of EXP_CODED, and of INLINE_DELTA with 3 bits, 2 bits, and ascending columns
    const auto with = [&](int64_t coded_held, std::array<int64_t, 3> groups, std::array<int32_t, 2> overshoot = {}) {
        return settled(plan, [&](const layout_verdict & v, shape_survey & s) {
            const bool coded = v.candidate == 0;
            s.n_held         = coded ? coded_held : nnz;
            s.n_groups       = coded ? nnz / 16 + 4096 : groups[v.candidate - 1];
            if (v.needs == survey_step::OVERSHOOT && !coded) {
                s.overshoot = overshoot[v.candidate - 1];
            }
        });
    };
    CHECK(with(nnz, { 0, 0, 0 }) == PLANS[0].candidates[0], "EXP_CODED pays");
    CHECK(with(0, { 10, 20, 0 }) == PLANS[0].candidates[1], "fewer groups with 3 bits");
    CHECK(with(0, { 20, 10, 0 }) == PLANS[0].candidates[2], "fewer groups with 2 bits");
    CHECK(with(0, { 20, 20, 0 }) == PLANS[0].candidates[2], "as many");
    CHECK(with(0, { all, all + 1, 0 }) == PLANS[0].candidates[1], "all that fit");
    CHECK(with(0, { all + 1, all + 2, 9 }) == PLANS[0].candidates[3], "neither fits in the order of banks");
    CHECK(with(0, { 10, 20, 9 }, { INT32_MAX, 0 }) == PLANS[0].candidates[3], "a run reaches too far");
    CHECK(with(0, { all + 1, all + 1, all + 1 }) == PLANS[0].candidates[4], "nothing fits");
}

TEST(sizes_of_tiles_settle_the_plan_of_windows) {
    const gpu_plan plan  = choose(PLANS[8].matrix, PLANS[8].device);
    layout_survey  found = {};
    CHECK(settle(plan, found).needs == survey_step::NBYTES, "no survey is requested");
    for (const int64_t nbytes : { plan.nbytes, plan.nbytes + GPU_ALIGNMENT }) { // as reserved, and more
        found.of[0].done       = survey_step::NBYTES;
        found.of[0].nbytes     = nbytes;
        found.of[0].most_words = 17;
        const layout_verdict v = settle(plan, found);
        CHECK(v.needs == survey_step::NOTHING && v.candidate == 0 && v.nbytes == nbytes, "bytes of the survey");
        CHECK(std::get<fragments_shape>(v.shape).most_words == 17, "words of the survey");
    }
}

// ---- the survey ----

struct random_matrix {
    int64_t                         rows, cols;
    int                             type, bits;
    std::vector<uint16_t>           dense;
    std::unique_ptr<encoded_matrix> encoded;
    std::unique_ptr<codec_view>     view;
    gpu_matrix                      matrix = {};

    random_matrix(rng & random, int64_t n_rows, int64_t n_cols, int t, int delta_bits, double density, double binades,
                  bool cut, bool uneven)
        : rows(n_rows), cols(n_cols), type(t), bits(delta_bits), dense(static_cast<size_t>(n_rows * n_cols), 0) {
        for (int64_t r = 0; r < rows; r++) {
            const double d = !uneven ? density : random.unit() < .3 ? 0 : density * random.unit() * 2;
            for (int64_t c = 0; c < cols; c++) {
                if (random.unit() < d) {
                    const double size = std::exp2(-8 + random.unit() * binades); // one draw per statement: their order
                    const auto   v    = static_cast<float>(random.unit() < .5 ? -size : size); // is the same everywhere
                    uint16_t     b    = type == F16 ? f16_of_float(v) : static_cast<uint16_t>(bits_of_float(v) >> 16);
                    b                 = random.unit() < .002 ? uint16_t(0x8000) : cut && type == F16 ? b & 0xfff8 : b;
                    dense[static_cast<size_t>(r * cols + c)] = b;
                }
            }
        }
        const ggml_macko_option option = { "index_bits", bits };
        const macko_desc        desc   = { rows, cols, type, 0, 0 };
        const codec &           format = *find_codec("macko");
        CHECK(encode_matrix(format, dense.data(), desc, &option, 1, 1, &encoded) == 0, "%s", ggml_macko_last_error());
        ggml_macko_matrix m = encoded->matrix();
        m.format            = format.name();
        CHECK(open_matrix(format, m, 1, &view) == 0 && view->check_rows(1) == 0, "%s", ggml_macko_last_error());
        matrix = gpu_matrix_of(format, rows_desc(format, m), format.max_entries(m), m.value_type, m.arrays[0].nbytes,
                               format.window(m));
    }
};

static uint32_t float_bits(uint16_t bits, int type) { return bits_of_float(float_of_value(bits, type)); }

// Number of values that a group can store with an exponent.
template <typename M> static int64_t n_held(const random_matrix & m, M layout, int exponent) {
    layout.exponent = exponent;
    return std::count_if(m.dense.begin(), m.dense.end(),
                         [&](uint16_t v) { return (v & 0x7fff) != 0 && held_as(layout, float_bits(v, m.type)) >= 0; });
}

// Groups and reach of one row, entry by entry.
template <typename M> struct row_walk {
    int groups = 0, outlier_groups = 0, unused = 0, reach = 0;

    row_walk(const random_matrix & m, const M & layout, int64_t row, int first_group, bool lines) {
        const int               W = layout.bank_width, n_slots = W ? 32 * W - 1 : static_cast<int>(m.cols);
        std::map<int, uint16_t> by_slot;
        int                     outliers = 0;
        for (int64_t c = 0; c < m.cols; c++) {
            const uint16_t v = m.dense[static_cast<size_t>(row * m.cols + c)];
            if (v != 0) {
                const int p     = W ? static_cast<int>(c % 32 * W + c / 32) : static_cast<int>(c);
                const int start = static_cast<int>(row % (32 / layout.lanes)) * W;
                by_slot[(p - start + n_slots) % n_slots] = v;
                outliers += held_as(layout, float_bits(v, m.type)) < 0;
            }
        }
        std::vector<std::pair<int, int>> entries; // delta, slot of its first step
        int                              at = 0;
        for (const auto & [slot, value] : by_slot) {
            while (slot - at >= 1 << layout.delta_bits) {
                entries.push_back({ (1 << layout.delta_bits) - 1, at });
                at += 1 << layout.delta_bits;
            }
            entries.push_back({ slot - at, at });
            at = slot + 1;
        }
        const int of_group = entries_of_group(layout);
        groups             = (static_cast<int>(entries.size()) + of_group - 1) / of_group;
        outlier_groups     = (outliers + 3) / 4;
        unused             = lines ? (8 - (groups + outlier_groups) % 8) % 8 : 0;
        if (!W) {
            return;
        }
        // group g of the row is in run (offset + g) mod lanes by position, but runs are consecutive, so count them
        std::vector<int> of_lane(static_cast<size_t>(layout.lanes), 0);
        for (int g = 0; g < groups; g++) {
            of_lane[static_cast<size_t>((first_group % 8 + g) % layout.lanes)]++;
        }
        size_t k = 0;
        for (const int n : of_lane) {
            const int start = static_cast<int>(row % (32 / layout.lanes)) * W;
            int       word  = 0;
            for (int i = 0; i < n * of_group; i++, k++) {
                const auto [delta, slot] = k < entries.size() ? entries[k] : std::pair<int, int>(0, 0);
                if (i == 0) {
                    const int p = (slot + start) % n_slots;
                    word        = p % W * 32 + p / W;
                }
                word += 32 * delta;
                reach = std::max(reach, word + 1 - n_slots);
                word += 32;
                if (i % entries_of_part(layout) == entries_of_part(layout) - 1) {
                    word -= word >= n_slots ? n_slots : 0;
                    reach = word >= n_slots ? INT32_MAX : reach;
                }
                if (reach == INT32_MAX) {
                    return;
                }
            }
        }
    }
};

template <typename M>
static void check_survey(const random_matrix & m, const M & layout, bool lines, const shape_survey & found,
                         const char * name) {
    if (found.done >= survey_step::EXPONENT) {
        int64_t most = -1;
        int     best = 0;
        for (int e = 0; e < end_of_exponents(layout); e++) {
            const int64_t n = n_held(m, layout, e);
            best            = n > most ? e : best;
            most            = std::max(most, n);
        }
        CHECK(found.n_held == most && found.exponent == best, "%s: %lld values with exponent %d, not %lld with %d",
              name, static_cast<long long>(found.n_held), found.exponent, static_cast<long long>(most), best);
    }
    if (found.done >= survey_step::GROUPS) {
        M with        = layout;
        with.exponent = found.exponent;
        int64_t n = 0, unused = 0;
        int     reach = 0;
        for (int64_t r = 0; r < m.rows; r++) {
            const row_walk<M> row(m, with, r, static_cast<int>(n), lines);
            n += row.groups + row.outlier_groups + row.unused;
            unused += row.unused;
            reach = std::max(reach, row.reach);
        }
        CHECK(found.n_groups == n && found.n_unused_groups == unused, "%s: %lld groups, not %lld", name,
              static_cast<long long>(found.n_groups), static_cast<long long>(n));
        if (found.done >= survey_step::OVERSHOOT) {
            CHECK(found.overshoot == reach, "%s: reaches %d words, not %d", name, found.overshoot, reach);
        }
    }
}

TEST(survey_against_brute_force) {
    std::map<std::string, int> chosen;
    for (uint64_t seed = 0; seed < 200; seed++) {
        rng            random(seed);
        const int      type = random.unit() < .5 ? F16 : BF16, bits = 1 << random.range(0, 3);
        const int64_t  cols    = random.unit() < .3 ? random.range(1, 600) : random.range(2048, 4200);
        const double   density = bits == 8 ? .02 + random.unit() * .1 : bits == 4 ? .3 : .3 + random.unit() * .6;
        const int64_t  rows    = random.range(1, 24);
        const double   which   = random.unit();
        const double   binades = which < .3 ? 2.9 : which < .7 ? 7.1 : which < .85 ? 12 : 20;
        const bool     cut = random.unit() < .5, uneven = random.unit() < .3;
        random_matrix  m(random, rows, cols, type, bits, density, binades, cut, uneven);
        gpu_plan       plan = choose(m.matrix, { 99 * KB, true });
        layout_survey  found;
        layout_verdict v;
        CHECK(survey_on_cpu(&plan, *m.view, 1, &found, &v) == 0, "%s", ggml_macko_last_error());
        CHECK(v.candidate < plan.candidates.size() && !v.reason.empty(), "a layout and a reason");
        chosen[layout_name(v.shape)]++;
        for (const layout_candidate & c : plan.candidates) {
            const gpu_layout bound = bind_layout(m.matrix, c.shape, c.nbytes, nullptr);
            if (const auto * i = std::get_if<inline_delta_layout>(&bound)) {
                check_survey(m, *i, has_whole_lines(*i, m.matrix.desc), found.of[c.survey], "INLINE_DELTA");
            } else if (const auto * e = std::get_if<exp_coded_layout>(&bound)) {
                check_survey(m, *e, cols >= WIDE_COLS, found.of[c.survey], "EXP_CODED");
            }
        }
    }
    CHECK(chosen["MACKO"] > 5 && chosen["INLINE_DELTA"] > 5 && chosen["EXP_CODED"] > 5, "%d, %d, %d", chosen["MACKO"],
          chosen["INLINE_DELTA"], chosen["EXP_CODED"]);
}

// Each division covers the work and fits; in 99 KB, as on a GeForce card, a layer of a Llama2-7B keeps enough warps.
TEST(fragments_divisions_cover_the_work_and_keep_warps_in_little_memory) {
    rng random(1);
    for (int i = 0; i < 3000; i++) {
        fragments_work w = {};
        w.nx             = 1 << random.range(0, 6);
        w.matrices       = static_cast<int32_t>(random.range(1, 2));
        w.stripes        = static_cast<int32_t>(random.range(1, 60)) * w.matrices;
        w.segments       = static_cast<int32_t>(random.range(1, 120));
        w.whole_x        = w.nx == 1 && random.unit() < .5;
        w.tile_chunks    = 1 << random.range(0, 2);
        w.window         = 64 << random.range(0, 2);
        w.most_words     = static_cast<int32_t>(random.range(1, 64));
        w.room           = static_cast<int32_t>(random.range(48, 227) * KB);
        const auto d     = divide_fragments(w);
        const bool right = d.nbytes() <= w.room && d.warps <= max_warps(w.nx) &&
                           d.phases * d.phase_segments >= w.segments &&
                           (d.phases - 1) * d.phase_segments < w.segments && (!w.whole_x || d.phases == 1) &&
                           d.parts * d.part_segments >= d.phase_segments &&
                           d.stripe_places == d.parts * d.part_segments && d.round_stripes >= w.matrices &&
                           d.round_stripes % w.matrices == 0 && d.round_stripes * d.stripe_places <= MAX_LISTED;
        CHECK(d.warps == 0 || right, "case %d: %d columns, %d stripes, %d segments", i, w.nx, w.stripes, w.segments);
    }
    const int layer[][3] = { { 12288, 4096, 1 }, { 4096, 4096, 1 }, { 11008, 4096, 2 }, { 4096, 11008, 1 } };
    for (const auto & [rows, cols, matrices] : layer) {
        for (int32_t nx = 1; nx <= 64; nx *= 2) {
            const auto shape =
                fragments_shape_of(windows_of(rows, cols, .5, GGML_MACKO_TYPE_Q4, 64), { 99 * KB, true });
            const int  stripes = (rows / 16 + 81) / 82 * matrices; // of an RTX 3090
            const auto d       = divide_fragments({ nx, stripes, matrices, cols / 256 / shape.tile_chunks, nx == 1,
                                                    shape.tile_chunks, shape.window, 12, 99 * 1024 });
            CHECK(d.warps >= (nx > 16 ? 4 : 8), "%dx%d, %d columns: %d warps", rows, cols, nx, d.warps);
        }
    }
}

// The bytes of FRAGMENTS, tile by tile, and the reservation, which holds codes at any places.
TEST(tiles_against_brute_force) {
    for (uint64_t seed = 0; seed < 60; seed++) {
        rng           random(seed);
        const int64_t cols         = random.unit() < .5 ? random.range(1, 600) : random.range(601, 4200),
                      rows         = random.range(1, 70);
        const double       density = random.unit() * random.unit(), stripes = random.unit() < .3 ? .02 : 1;
        const int          bits = seed % 4 == 0 ? 3 : seed % 4 == 1 ? 4 : seed % 4 == 2 ? 5 : 8;
        std::vector<float> dense(static_cast<size_t>(rows * cols), 0.0f);
        macko_desc         desc = { rows, cols, F32, 4, 0 };
        for (size_t i = 0; i < dense.size(); i++) {
            const bool striped = static_cast<int64_t>(i) % cols % 32 < 8;
            if (random.unit() < density * (striped ? 1 : stripes)) {
                dense[i] = static_cast<float>(random.unit() + .5);
                desc.nnz++;
            }
        }
        quantized_matrix file;
        CHECK(quantize(dense.data(), desc, bits, nullptr, 0, nullptr, 1, &file) == 0, "%s", ggml_macko_last_error());
        gpu_matrix m                = { file.dense, 0, type_of_code_bits(bits) };
        m.window                    = file.window;
        const fragments_shape shape = fragments_shape_of(m, { 99 * KB, true });
        const fragments_sizes sizes = size_fragments(file.arrays(), shape, 1);

        const int64_t tile_cols = shape.tile_chunks * FRAGMENT_CHUNK, segments = (cols + tile_cols - 1) / tile_cols;
        uint32_t      at   = 0;
        int32_t       most = 0;
        bool          same = sizes.starts[0] == 0;
        for (int64_t tile = 0; tile < (rows + 15) / 16 * segments; tile++) {
            int64_t       n_codes[32] = {}, words = 0;
            const int64_t row0 = tile / segments * 16, col0 = tile % segments * tile_cols,
                          chunks = std::min<int64_t>(shape.tile_chunks, ((cols + 255) / 256) - col0 / 256);
            for (int64_t r = row0; r < std::min(rows, row0 + 16); r++) {
                for (int64_t c = col0; c < std::min(cols, col0 + tile_cols); c++) {
                    n_codes[r % 8 * 4 + c % 32 / 8] += dense[static_cast<size_t>(r * cols + c)] != 0;
                }
            }
            for (const int64_t n : n_codes) {
                const int64_t w = (n * (bits > 4 ? 8 : 4) + 31) / 32;
                words += w;
                most = std::max(most, static_cast<int32_t>(w));
            }
            const int64_t windows = (chunks * 256 + file.window - 1) / file.window;
            at += static_cast<uint32_t>((64 + windows * 16 + chunks * 512 + words * 4 + 15) / 16);
            same = same && sizes.starts[static_cast<size_t>(tile + 1)] == at;
        }
        CHECK(same && sizes.most_words == most, "seed %d: other tiles", static_cast<int>(seed));
        CHECK(sizes.nbytes <= choose(m, { 99 * KB, true }).nbytes, "seed %d: %lld bytes, %lld reserved",
              static_cast<int>(seed), static_cast<long long>(sizes.nbytes),
              static_cast<long long>(choose(m, { 99 * KB, true }).nbytes));
    }
}

int main(int argc, char ** argv) { return test_main("test-gpu-layout", argc, argv); }
