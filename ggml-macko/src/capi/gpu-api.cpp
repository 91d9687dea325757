// The C API over the GPU's layout of a matrix. Checks arguments, calls one function, and keeps exceptions inside. Needs
// neither CUDA nor a GPU.
#include "capi/struct-size.h"
#include "codec/registry.h"
#include "codec/team.h"
#include "gpu-layout/survey.h"

#include <algorithm>

using namespace macko;

namespace {

int check_arguments(const ggml_macko_matrix * m, int64_t shared_nbytes, const ggml_macko_layout * layout,
                    const codec ** format) {
    TRY(check_size(m));
    TRY(check_size(layout));
    if (shared_nbytes < 0 || shared_nbytes > INT32_MAX) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%lld bytes of shared memory",
                    static_cast<long long>(shared_nbytes));
    }
    TRY(find_format(m->format, format));
    TRY(check_header(**format, *m));
    component_rule rules[GGML_MACKO_MAX_ARRAYS] = {};
    (*format)->component_rules(*m, rules);
    return array_length(m->arrays[0]) > rules[0].length
               ? fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has more elements than the matrix can have",
                      (*format)->components()[0] + 1)
               : GGML_MACKO_STATUS_OK;
}

void describe(const cuda::layout_shape & shape, const std::string & reason, ggml_macko_layout * out) {
    const cuda::shape_numbers numbers = cuda::numbers_of(shape);
    out->name                         = cuda::layout_name(shape);
    out->delta_bits                   = numbers.delta_bits;
    out->lanes                        = numbers.lanes;
    out->bank_order                   = numbers.banked;
    snprintf(out->reason, sizeof(out->reason), "%s", reason.c_str());
}

// Reasons of all decisions that depend only on the header.
std::string reasons_of(const cuda::gpu_plan & plan) {
    std::string reasons;
    for (const cuda::layout_candidate & c : plan.candidates) {
        reasons += (reasons.empty() ? "" : "; ") + cuda::text_of(c.shape) + " (" + c.reason + ")";
    }
    for (const std::string & left_out : plan.left_out) {
        reasons += "; not " + left_out;
    }
    return reasons;
}

} // namespace

int ggml_macko_gpu_layout(const ggml_macko_matrix * m, bool stacked, int64_t shared_nbytes, int n_threads,
                          ggml_macko_layout * layout) {
    return c_boundary([&]() -> int {
        const codec * format = nullptr;
        TRY(check_arguments(m, shared_nbytes, layout, &format));
        cuda::gpu_matrix matrix = cuda::gpu_matrix_of(*format, rows_desc(*format, *m), format->max_entries(*m),
                                                      m->value_type, m->arrays[0].nbytes, format->window(*m));
        matrix.in_blocks        = matrix.in_blocks && !stacked;
        cuda::gpu_plan plan     = cuda::choose(matrix, cuda::gpu_device_of(shared_nbytes));
        *layout                 = sized<ggml_macko_layout>();
        layout->nbytes          = plan.nbytes;
        layout->is_settled      = plan.candidates.size() == 1;
        describe(plan.candidates[0].shape, reasons_of(plan), layout);
        const bool has_data =
            std::all_of(m->arrays, m->arrays + m->n_arrays, [](const ggml_macko_array & a) { return a.data; });
        if (!has_data) {
            return GGML_MACKO_STATUS_OK;
        }
        std::unique_ptr<codec_view> view;
        const int                   threads = threads_for(n_threads, m->rows * m->cols);
        cuda::layout_survey         found;
        cuda::layout_verdict        verdict;
        TRY(open_matrix(*format, *m, threads, &view));
        TRY(view->check_rows(threads));
        TRY(cuda::survey_on_cpu(&plan, *view, threads, &found, &verdict));
        layout->is_settled = true;
        layout->own_nbytes = verdict.nbytes > plan.nbytes ? verdict.nbytes : 0;
        describe(verdict.shape, verdict.reason, layout);
        return GGML_MACKO_STATUS_OK;
    });
}
