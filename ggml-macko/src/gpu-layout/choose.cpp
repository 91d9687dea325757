#include "gpu-layout/choose.h"

#include "codec/packed/coded.h"
#include "platform/environment.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace macko::cuda {

__attribute__((format(printf, 1, 2))) static std::string text(const char * format, ...) {
    char    buffer[256];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    return buffer;
}
static long long number(int64_t n) { return static_cast<long long>(n); }

gpu_matrix gpu_matrix_of(const codec & format, const macko_desc & desc, int64_t n_padded, int32_t value_type,
                         int64_t nbytes_values, int64_t window) {
    const bool coded = value_type == GGML_MACKO_TYPE_CODED;
    return { desc,
             n_padded,
             value_type,
             coded ? max_short_outliers(desc.nnz, desc.type, nbytes_values) : -1,
             is_in_blocks(format),
             window };
}

gpu_device gpu_device_of(int64_t shared_nbytes) { return { shared_nbytes, !environment::is_disabled("exp-coded") }; }

// ---- from the header ----

int64_t nbytes_of_rows(const gpu_matrix & matrix) {
    const int64_t as_in_file = bind_macko(matrix.desc, matrix.n_padded, nullptr).nbytes;
    if (matrix.desc.type == GGML_MACKO_TYPE_F32) {
        return as_in_file; // the only layout for F32
    }
    const inline_delta_shape shape = { { 0, inline_delta_lanes(matrix.desc, matrix.n_padded), false } };
    return std::max(as_in_file, bind_inline_delta(matrix.desc, matrix.n_padded, shape, nullptr).nbytes);
}

namespace {

// Builds the list of candidates. survey: see layout_candidate.
struct chooser {
    gpu_plan           plan;
    const gpu_device & device;
    size_t             n_surveys = 0;

    chooser(const gpu_matrix & matrix, const gpu_device & d) : plan{ matrix, d, 0, false, {}, {} }, device(d) {}

    const macko_desc & desc() const { return plan.matrix.desc; }
    bool               is_wide() const { return desc().cols >= WIDE_COLS; }

    void add(const layout_shape & shape, int64_t nbytes, std::string reason) {
        plan.candidates.push_back({ shape, nbytes, n_surveys++, std::move(reason) });
    }
    void leave_out(const char * layout, const std::string & reason) {
        plan.left_out.push_back(std::string(layout) + ": " + reason);
    }

    std::string too_wide() const {
        return text("x of %lld columns does not fit %lld bytes of shared memory", number(desc().cols),
                    number(device.shared_nbytes));
    }

    // Bytes for EXP_CODED if the header shows the number of outliers and the layout is smaller than others; else -1.
    int64_t nbytes_of_exp_coded() const {
        const int64_t x = 32 * bank_width_of(desc().cols) + EXP_CODED_ENTRIES;
        if (plan.matrix.max_outliers < 0 || desc().type == GGML_MACKO_TYPE_F32 || !is_wide() || !device.exp_coded ||
            x + x / 4 > room_of_x(plan.device)) { // a quarter: overshoot
            return -1;
        }
        int64_t       of_groups = 0;
        const int64_t nbytes    = exp_coded_expected_nbytes(desc(), plan.matrix.max_outliers, &of_groups);
        return exp_coded_pays(desc(), plan.matrix.n_padded, of_groups) ? nbytes : -1;
    }

    // all: also add candidates that choose() would not
    void add_exp_coded(int32_t lanes, int64_t nbytes_any, bool all) {
        const int32_t         bits  = exp_coded_delta_bits(desc());
        const exp_coded_shape shape = { { bits, lanes ? lanes : EXP_CODED_LANES, is_wide() && bits < 6 } };
        if (!all && !device.exp_coded) {
            return leave_out("EXP_CODED", "the environment leaves it out");
        }
        if (!is_wide() && !all) {
            return leave_out("EXP_CODED", text("fewer than %lld columns", number(WIDE_COLS)));
        }
        if (x_words_of(bind_exp_coded(desc(), shape, 0, nullptr)) > room_of_x(plan.device)) {
            return leave_out("EXP_CODED", too_wide());
        }
        if (!exp_coded_built_lanes(desc().type, bits, shape.banked).has(shape.lanes)) {
            return leave_out("EXP_CODED", "there are no kernels for it");
        }
        const auto add_in = [&](int64_t nbytes, const char * reason) { // both have the same survey
            if (exp_coded_nbytes_of_rows(desc()) <= nbytes) {
                plan.candidates.push_back({ shape, nbytes, n_surveys, reason });
            }
        };
        if (plan.nbytes < nbytes_any) {
            add_in(plan.nbytes, "the header shows that few values are outliers");
        }
        add_in(nbytes_any, "if it takes fewer bytes than the layouts below");
        n_surveys++;
    }

    void add_inline_delta(int32_t delta_bits, int32_t lanes, bool banked, int64_t nbytes, const char * reason) {
        const inline_delta_shape  shape = { { delta_bits, lanes, banked } };
        const inline_delta_layout m     = bind_inline_delta(desc(), plan.matrix.n_padded, shape, nullptr);
        if (x_words_of(m) > room_of_x(plan.device)) {
            return leave_out("INLINE_DELTA", too_wide());
        }
        if (!inline_delta_built_lanes(desc().type, delta_bits, banked).has(lanes)) {
            return leave_out("INLINE_DELTA", text("no kernels for deltas of %d bits and %d lanes", delta_bits, lanes));
        }
        add(shape, nbytes, reason);
    }
    // Deltas have about as many bits as in the file, or, in wide matrices, 3 bits for values of few exponents.
    void add_inline_deltas(int32_t wish, int64_t nbytes, bool all) {
        const int32_t lanes = wish ? wish : inline_delta_lanes(desc(), plan.matrix.n_padded);
        if (desc().delta_bits == 8) {
            return add_inline_delta(6, lanes, false, nbytes, "deltas of 8 bits become 6");
        }
        const int32_t bits = std::max(desc().delta_bits, 2);
        if (!is_wide()) {
            return add_inline_delta(bits, lanes, false, nbytes, "columns ascend in narrow matrices");
        }
        add_inline_delta(3, lanes, true, nbytes, "for values of three exponents");
        add_inline_delta(bits, lanes, true, nbytes, "for values of seven exponents");
        if (!all) {
            add_inline_delta(bits, INLINE_DELTA_ASCENDING_LANES, false, nbytes, "for rows of uneven length");
        }
    }
};

} // namespace

gpu_plan choose(const gpu_matrix & matrix, const gpu_device & device) {
    chooser c(matrix, device);
    if (code_bits(matrix.value_type)) {
        const fragments_shape shape = fragments_shape_of(matrix, device);
        c.plan.nbytes               = fragments_expected_nbytes(matrix.desc, shape);
        c.add(shape, c.plan.nbytes, "values with scales for windows of columns");
        return c.plan;
    }
    const int64_t any = nbytes_of_rows(matrix), coded = c.nbytes_of_exp_coded();
    c.plan.nbytes = coded < 0 ? any : std::min(any, coded);
    if (matrix.in_blocks && has_row_blocks(matrix.desc, device)) {
        c.add(row_blocks_shape{}, any, "F32 values in blocks");
    }
    if (matrix.desc.type == GGML_MACKO_TYPE_F32) {
        c.leave_out("EXP_CODED, INLINE_DELTA", "values of 32 bits");
    } else {
        c.add_exp_coded(0, any, false);
        c.add_inline_deltas(0, any, false);
    }
    c.add(macko_shape{}, any, "suits any matrix");
    return c.plan;
}

gpu_plan choose_only(const gpu_matrix & matrix, const gpu_device & device, const std::string & layout, int32_t lanes) {
    chooser c(matrix, device);
    c.plan.nbytes     = choose(matrix, device).nbytes;
    c.plan.forced     = true;
    const int64_t any = nbytes_of_rows(matrix);
    if (layout == layout_name(layout_shape{ macko_shape{} })) {
        c.add(macko_shape{}, any, "requested");
    } else if (layout == layout_name(layout_shape{ exp_coded_shape{} })) {
        c.add_exp_coded(lanes, c.plan.nbytes, true);
    } else if (layout == layout_name(layout_shape{ inline_delta_shape{} })) {
        c.add_inline_deltas(lanes, any, true);
    }
    for (layout_candidate & candidate : c.plan.candidates) { // more lanes than suit the matrix take more bytes
        const gpu_layout bound = bind_layout(matrix, candidate.shape, candidate.nbytes, nullptr);
        candidate.nbytes       = std::max(candidate.nbytes, base_of(bound).nbytes);
        c.plan.nbytes          = std::max(c.plan.nbytes, candidate.nbytes);
    }
    return c.plan;
}

// ---- with a survey of the values ----

namespace {

// Whether a candidate fits: the next step of the survey, or a reason against the candidate, or neither if it fits.
struct judgement {
    survey_step needs   = survey_step::NOTHING;
    std::string against = {};
    std::string fits    = {};
};

double percent(int64_t part, int64_t all) {
    return all ? 100.0 * static_cast<double>(part) / static_cast<double>(all) : 100.0;
}

struct judge {
    const gpu_plan &         plan;
    const layout_candidate & candidate;
    const shape_survey &     found;

    const macko_desc & desc() const { return plan.matrix.desc; }
    bool               knows(survey_step step) const { return found.done >= step; }

    // The last check: whether runs stay within the x in shared memory.
    judgement reach(const row_split_shape & s, std::string fits) const {
        if (s.banked && !knows(survey_step::OVERSHOOT)) {
            return { survey_step::OVERSHOOT };
        }
        const int64_t words = 32 * bank_width_of(desc().cols) - 1;
        if (s.banked && found.overshoot > std::min(words, room_of_x(plan.device) - words)) {
            return { {}, "a run needs more of x than shared memory holds" };
        }
        return { {}, {}, std::move(fits) };
    }

    judgement operator()(const macko_shape &) const { return { {}, {}, candidate.reason }; }

    judgement operator()(const inline_delta_shape & s) const {
        if (!knows(survey_step::GROUPS)) {
            return { knows(survey_step::EXPONENT) ? survey_step::GROUPS : survey_step::EXPONENT };
        }
        const int64_t most = inline_delta_max_groups(desc(), plan.matrix.n_padded);
        if (found.impossible || found.n_groups > most) {
            return { {},
                     found.impossible ? "an outlier would lose bits"
                                      : text("%lld groups, of which %lld fit", number(found.n_groups), number(most)) };
        }
        return reach(s, text("%.1f %% of the values fit beside deltas of %d bits", percent(found.n_held, desc().nnz),
                             s.delta_bits));
    }

    judgement operator()(const exp_coded_shape & s) const {
        if (!knows(survey_step::EXPONENT)) {
            return { survey_step::EXPONENT };
        }
        const int64_t group = exp_coded_group_nbytes(s.delta_bits);
        const auto    pays  = [&](int64_t nbytes) {
            return plan.forced || exp_coded_pays(desc(), plan.matrix.n_padded, nbytes);
        };
        // a lower bound, which excludes hopeless cases before groups are counted
        const int64_t least =
            (desc().nnz / EXP_CODED_ENTRIES + (desc().nnz - found.n_held) / OUTLIERS_OF_GROUP) * group;
        const std::string held =
            text("%.1f %% of the values have 8 bits and three exponents", percent(found.n_held, desc().nnz));
        if (!pays(least)) {
            return { {}, "only " + held };
        }
        if (!knows(survey_step::GROUPS)) {
            return { survey_step::GROUPS };
        }
        if (found.n_groups * group > exp_coded_room(desc(), candidate.nbytes)) {
            return { {},
                     text("%lld bytes of groups, of which %lld fit", number(found.n_groups * group),
                          number(exp_coded_room(desc(), candidate.nbytes))) };
        }
        if (found.impossible || !pays((found.n_groups - found.n_unused_groups) * group)) {
            return { {}, found.impossible ? "a row has too many outliers" : "other layouts take fewer bytes" };
        }
        return reach(s, held);
    }

    judgement operator()(const row_blocks_shape &) const {
        if (!knows(survey_step::NBYTES)) {
            return { survey_step::NBYTES };
        }
        const std::string blocks = text("%lld bytes of blocks", number(found.nbytes));
        return found.nbytes > candidate.nbytes ? judgement{ {}, blocks + ", which do not fit" }
                                               : judgement{ {}, {}, blocks };
    }

    judgement operator()(const fragments_shape &) const {
        if (!knows(survey_step::NBYTES)) {
            return { survey_step::NBYTES };
        }
        return { {}, {}, text("%lld bytes of tiles", number(found.nbytes)) };
    }
};

// The next candidate, if it competes with this one by the number of groups; or null.
const layout_candidate * rival_of(const gpu_plan & plan, size_t i) {
    const auto banked = [&](size_t k) {
        const auto * s =
            k < plan.candidates.size() ? std::get_if<inline_delta_shape>(&plan.candidates[k].shape) : nullptr;
        return s && s->banked;
    };
    return banked(i) && banked(i + 1) ? &plan.candidates[i + 1] : nullptr;
}

// Sets the numbers of a shape that depend on the survey, and its memory.
void complete(const shape_survey & found, layout_verdict * v) {
    if (auto * s = std::get_if<fragments_shape>(&v->shape)) {
        s->most_words = found.most_words;
        v->nbytes     = found.nbytes;
    }
}

} // namespace

layout_verdict settle(const gpu_plan & plan, const layout_survey & survey) {
    std::string passed_over;
    size_t      i = 0;
    for (; i < plan.candidates.size(); i++) {
        const layout_candidate & candidate = plan.candidates[i];
        const shape_survey &     found     = survey.of[candidate.survey];
        const auto               pass_over = [&](const layout_candidate & c, const std::string & why) {
            passed_over += std::string("; not ") + layout_name(c.shape) + ": " + why;
        };
        const auto asks = [&](const layout_candidate & c, survey_step step) {
            return layout_verdict{ step, static_cast<size_t>(&c - plan.candidates.data()), c.shape, c.nbytes, {} };
        };
        judgement j = std::visit(judge{ plan, candidate, found }, candidate.shape);
        if (const layout_candidate * rival = rival_of(plan, i); rival && found.done >= survey_step::GROUPS) {
            const shape_survey & other = survey.of[rival->survey];
            if (other.done < survey_step::GROUPS) {
                return asks(*rival, other.done < survey_step::EXPONENT ? survey_step::EXPONENT : survey_step::GROUPS);
            }
            if (other.n_groups <= found.n_groups) {
                continue;
            }
            if (!j.against.empty()) { // the rival takes more
                i++;
            }
        }
        if (j.needs != survey_step::NOTHING) {
            return asks(candidate, j.needs);
        }
        if (j.against.empty()) {
            layout_verdict v = asks(candidate, survey_step::NOTHING);
            v.reason         = j.fits + passed_over;
            complete(found, &v);
            return v;
        }
        pass_over(candidate, j.against);
    }
    return { survey_step::NOTHING, i, {}, 0, passed_over };
}

} // namespace macko::cuda
