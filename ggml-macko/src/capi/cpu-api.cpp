// The C API over the CPU kernels: products of plain arrays, without ggml.
#include "capi/struct-size.h"
#include "codec/macko/encode.h"
#include "codec/macko/matrix-view.h"
#include "codec/registry.h"
#include "codec/team.h"
#include "cpu/kernels/kernels.h"
#include "cpu/layout/aligned-memory.h"
#include "cpu/layout/matrix-packer.h"

using namespace macko;
using namespace macko::cpu;

struct ggml_macko_cpu_matrix {
    aligned_memory memory;
    int64_t        nbytes = 0;
    cpu_matrix     matrix = {};
};

// A packer into the memory of m. value_type, values_nbytes, window: of the values in the file.
static std::unique_ptr<matrix_packer> make_packer(const macko_desc & desc, int32_t value_type, int64_t values_nbytes,
                                                  int64_t window, ggml_macko_cpu_matrix * m) {
    const cpu_plan plan = choose_cpu_layout(layout_traits_in_use(), desc, value_type, values_nbytes, window, false);
    m->nbytes           = plan.nbytes;
    m->memory           = allocate_aligned(plan.nbytes);
    return std::make_unique<matrix_packer>(plan, span_ops_in_use(), m->memory.get());
}

// Packs the rows of a MACKO matrix. The position of a range of rows among the values depends on the ranges before it,
// so the first pass counts and the second pass packs.
static int pack_rows(const macko_matrix_view & view, int n_threads, ggml_macko_cpu_matrix * out) {
    // at the first row of each range: the non-zeros of the range; after the sum, of all ranges before it
    std::vector<int64_t> first(static_cast<size_t>(view.desc().rows) + 1, 0);
    if (const int status = view.for_each_range(n_threads, [&](const macko_view & rows) {
            if (rows.rows().row_begin < rows.rows().row_end) {
                first[static_cast<size_t>(rows.rows().row_begin)] = rows.nnz();
            }
            return 0;
        })) {
        return status;
    }
    int64_t sum = 0;
    for (int64_t & n : first) {
        const int64_t here = n;
        n                  = sum;
        sum += here;
    }
    const auto packer = make_packer(view.desc(), view.desc().type, 0, 0, out);
    out->matrix       = packer->matrix(); // MACKO rows become a bitmap if x is not rounded
    return view.for_each_range(n_threads, [&](const macko_view & rows) { // fails if the caller changed the arrays
        packer->pack(rows, first[static_cast<size_t>(rows.rows().row_begin)]);
        return 0;
    });
}

static int pack_matrix(const codec_view & view, const ggml_macko_matrix & m, int n_threads,
                       ggml_macko_cpu_matrix * out) {
    if (matrix_packer::takes(view.format())) {
        TRY(view.check_rows(n_threads));
        const auto packer = make_packer(view.desc(), m.value_type, m.arrays[0].nbytes, view.format().window(m), out);
        packer->pack_whole(view, n_threads);
        out->matrix = packer->matrix();
        return GGML_MACKO_STATUS_OK;
    }
    if (view.format().streams_rows()) {
        return pack_rows(static_cast<const macko_matrix_view &>(view), n_threads, out);
    }
    macko_matrix      recoded;
    macko_matrix_view rows;
    TRY(recode(view, n_threads, &recoded));
    const int64_t      n_values = n_padded(recoded.row_ptr.back());
    const macko_desc & d        = recoded.desc;
    ggml_macko_matrix  r        = { 0, nullptr, d.rows, d.cols, d.type, d.type, d.delta_bits, d.nnz, 3, {} };
    r.arrays[MACKO_VALUES]      = { recoded.values.data(), n_values * value_nbytes(d.type), d.type };
    r.arrays[MACKO_DELTAS]      = { recoded.deltas.data(), deltas_nbytes(n_values, d.delta_bits), GGML_MACKO_TYPE_I8 };
    r.arrays[MACKO_ROW_PTR]     = { recoded.row_ptr.data(), 4 * (d.rows + 1), GGML_MACKO_TYPE_I32 };
    TRY(open_macko(r, &rows));
    return pack_rows(rows, n_threads, out);
}

int ggml_macko_cpu_matrix_init(const ggml_macko_matrix * m, int n_threads, ggml_macko_cpu_matrix ** out) {
    return c_boundary([&]() -> int {
        TRY(check_size(m));
        if (!out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        const codec * format = nullptr;
        TRY(find_format(m->format, &format));
        const char * kernels = nullptr;
        TRY(select_kernels(&kernels));
        const int                   n_team = threads_for(n_threads, n_elements(*m));
        std::unique_ptr<codec_view> view;
        TRY(open_matrix(*format, *m, n_team, &view));
        auto matrix = std::make_unique<ggml_macko_cpu_matrix>();
        TRY(pack_matrix(*view, *m, n_team, matrix.get()));
        *out = matrix.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_cpu_layout(const ggml_macko_matrix * m, ggml_macko_layout * layout) {
    return c_boundary([&]() -> int {
        TRY(check_size(m));
        TRY(check_size(layout));
        const codec * format = nullptr;
        TRY(find_format(m->format, &format));
        const char * kernels = nullptr;
        TRY(check_header(*format, *m));
        TRY(select_kernels(&kernels));
        const cpu_plan plan = choose_cpu_layout(layout_traits_in_use(), rows_desc(*format, *m), m->value_type,
                                                m->arrays[0].nbytes, format->window(*m));
        *layout             = sized<ggml_macko_layout>();
        layout->nbytes      = plan.nbytes;
        layout->name        = layout_name(plan.shape);
        layout->is_settled  = !std::holds_alternative<bundles_shape>(plan.shape);
        snprintf(layout->reason, sizeof(layout->reason), "%s (%s)", plan.reason, kernels);
        return GGML_MACKO_STATUS_OK;
    });
}

void ggml_macko_cpu_matrix_free(ggml_macko_cpu_matrix * m) { delete m; }

int64_t ggml_macko_cpu_matrix_nbytes(const ggml_macko_cpu_matrix * m) { return m ? m->nbytes : 0; }

int ggml_macko_cpu_mul_mat(const ggml_macko_cpu_matrix * m, const float * x, float * y, int64_t n, int n_threads) {
    return c_boundary([&]() -> int {
        if (!m || !x || !y || n < 0) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer or negative count");
        }
        if (n == 0) {
            return GGML_MACKO_STATUS_OK;
        }
        const layout_base &        w = base_of(m->matrix);
        std::vector<const float *> xs(static_cast<size_t>(n));
        std::vector<float *>       ys(static_cast<size_t>(n));
        for (int64_t j = 0; j < n; j++) {
            xs[static_cast<size_t>(j)] = x + j * w.cols;
            ys[static_cast<size_t>(j)] = y + j * w.rows;
        }
        const auto scratch = allocate_aligned(mul_mat_scratch_nbytes(w.cols, n));
        run_team(threads_for(n_threads, w.rows * w.cols), [&](int ith, int nth, team_barrier & barrier) {
            const mul_mat_params p = { m->matrix, 0, w.rows, n, xs.data(), ys.data(), false, scratch.get(), &barrier };
            mul_mat_thread(p, ith, nth);
        });
        return GGML_MACKO_STATUS_OK;
    });
}

const char * ggml_macko_cpu_kernels(void) {
    const char * name = "";
    return select_kernels(&name) ? "" : name;
}
