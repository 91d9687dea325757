#include "cpu/device/weight.h"
#include "codec/team.h"
#include "cpu/kernels/kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace macko::cpu {

// Bundles are for products: a row that is looked up would have to be picked from a whole group.
static cpu_plan plan_of(const sparse_tensor_info & matrix) {
    layout_traits traits = layout_traits_in_use();
    if (matrix.is_only_looked_up) {
        traits.bundles_below = traits.short_bundles_below = 0;
    }
    return choose_cpu_layout(traits, matrix.desc, matrix.value_type, matrix.nbytes_values, matrix.window);
}

static int64_t columns_nbytes_of(const sparse_tensor_info & matrix) {
    return matrix.by_columns && columns_can_hold(matrix.ne[1], matrix.value_type)
               ? columns_nbytes(matrix.desc, matrix.ne[1])
               : 0;
}

static int64_t norms_nbytes_of(const sparse_tensor_info & matrix) {
    const bool has_norms = matrix.threshold > 0 && matrix.threshold_of_norm && columns_nbytes_of(matrix) > 0;
    return has_norms ? mask_words(matrix.desc.cols) * 64 * int64_t(sizeof(float)) : 0; // aligned
}

size_t weight_nbytes(const sparse_tensor_info & matrix) {
    return sizeof(weight) +
           static_cast<size_t>(norms_nbytes_of(matrix) + columns_nbytes_of(matrix) + plan_of(matrix).nbytes);
}

size_t weight_used_nbytes(const weight & m) {
    const cpu_matrix w = m.matrix();
    if (const auto * bundles = std::get_if<bundles_layout>(&w)) {
        const uint8_t * end = bundles->bundles + bundles->group_off[n_bundle_groups(bundles->rows)];
        return static_cast<size_t>(end - reinterpret_cast<const uint8_t *>(&m));
    }
    return sizeof(weight) + static_cast<size_t>(m.norms_nbytes + m.columns_nbytes + layout_nbytes(m.desc(), m.shape()));
}

void weight_init(weight * m, const sparse_tensor_info & matrix) {
    m->magic           = 0;
    m->plan            = plan_of(matrix);
    m->rows_per_matrix = matrix.ne[1];
    m->columns_nbytes  = columns_nbytes_of(matrix);
    m->threshold       = m->columns_nbytes > 0 ? matrix.threshold : 0;
    m->norms_nbytes    = norms_nbytes_of(matrix);
}

void weight_densify_rows(const weight & m, int64_t row_begin, int64_t row_end, void * dense) {
    densify(m.matrix(), row_begin, row_end, dense, expanders_in_use());
}

int64_t weight_row_step(const weight & m) { return in_bundles(m.matrix()) ? BUNDLE_ROWS : 1; }

void weight_densify(const weight & m, size_t offset, void * data, size_t size) {
    const auto           nbytes = static_cast<size_t>(m.desc().cols * value_nbytes(m.desc().type) * BUNDLE_ROWS);
    std::vector<uint8_t> rows(nbytes);
    for (size_t done = 0; done < size;) {
        const size_t at = offset + done, in_rows = at % nbytes, n = std::min(size - done, nbytes - in_rows);
        const auto   r = static_cast<int64_t>(at / nbytes) * BUNDLE_ROWS;
        weight_densify_rows(m, r, std::min(r + BUNDLE_ROWS, m.desc().rows), rows.data());
        memcpy(static_cast<uint8_t *>(data) + done, rows.data() + in_rows, n);
        done += n;
    }
}

int weight_packer::consume(const macko_view & view, int64_t first_value) {
    packer_->pack(view, first_value);
    return GGML_MACKO_STATUS_OK;
}

void weight_packer::begin() {
    weight_.overflowed = false;
    packer_.emplace(weight_.plan, span_ops_in_use(), weight_.rows_memory());
}

bool weight_packer::end() {
    const bool is_packed = packer_->finish();
    weight_.overflowed   = packer_->overflowed();
    if (!is_packed) {
        return false;
    }
    if (const bitmap_layout columns = weight_.columns(); columns.masks) {
        const int n_threads = threads_for(0, weight_.desc().rows * weight_.desc().cols);
        columns_pack(packer_->matrix(), n_threads, columns, expanders_in_use());
        if (float * norms = weight_.norms()) {
            columns_norms(columns, n_threads, norms);
        }
    }
    return true;
}

int weight_packer::consume_matrix(const codec_view & view) {
    packer_->pack_whole(view, threads_for(0, view.desc().rows * view.desc().cols));
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko::cpu
