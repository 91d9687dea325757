#include "cpu/device/weight.h"
#include "codec/team.h"
#include "cpu/kernels/kernels.h"
#include "cpu/layout/codecs.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace macko::cpu {

static bitmap_form form_of(const sparse_tensor_info & matrix) {
    return choose_cpu_layout(matrix.desc, matrix.value_type, matrix.nbytes_values).form;
}

static int64_t columns_nbytes_of(const sparse_tensor_info & matrix) {
    return matrix.by_columns && columns_can_hold(matrix.ne[1], matrix.value_type)
               ? bitmap_nbytes(columns_desc(matrix.desc, matrix.ne[1]), { matrix.desc.type })
               : 0;
}

static int64_t norms_nbytes_of(const sparse_tensor_info & matrix) {
    const bool has_norms = matrix.threshold > 0 && matrix.threshold_of_norm && columns_nbytes_of(matrix) > 0;
    return has_norms ? mask_words(matrix.desc.cols) * 64 * int64_t(sizeof(float)) : 0; // aligned
}

size_t weight_nbytes(const sparse_tensor_info & matrix) {
    return sizeof(weight) + static_cast<size_t>(norms_nbytes_of(matrix) + columns_nbytes_of(matrix) +
                                                bitmap_nbytes(matrix.desc, form_of(matrix)));
}

size_t weight_used_nbytes(const weight & m) {
    const bitmap_matrix w = m.bitmap();
    if (in_bundles(w)) {
        const uint8_t * end = w.bundles + w.group_off[n_bundle_groups(w.rows)];
        return static_cast<size_t>(end - reinterpret_cast<const uint8_t *>(&m));
    }
    return sizeof(weight) + static_cast<size_t>(m.norms_nbytes + m.columns_nbytes + bitmap_nbytes(m.desc, m.form));
}

void weight_init(weight * m, const sparse_tensor_info & matrix) {
    m->magic           = 0;
    m->desc            = matrix.desc;
    m->form            = form_of(matrix);
    m->rows_per_matrix = matrix.ne[1];
    m->columns_nbytes  = columns_nbytes_of(matrix);
    m->threshold       = m->columns_nbytes > 0 ? matrix.threshold : 0;
    m->norms_nbytes    = norms_nbytes_of(matrix);
}

void weight_densify_rows(const weight & m, int64_t row_begin, int64_t row_end, void * dense) {
    bitmap_densify(m.bitmap(), m.desc.type, row_begin, row_end, dense);
}

int64_t weight_row_step(const weight & m) { return in_bundles(m.bitmap()) ? BUNDLE_ROWS : 1; }

void weight_densify(const weight & m, size_t offset, void * data, size_t size) {
    const auto           nbytes = static_cast<size_t>(m.desc.cols * value_nbytes(m.desc.type) * BUNDLE_ROWS);
    std::vector<uint8_t> rows(nbytes);
    for (size_t done = 0; done < size;) {
        const size_t at = offset + done, in_rows = at % nbytes, n = std::min(size - done, nbytes - in_rows);
        const auto   r = static_cast<int64_t>(at / nbytes) * BUNDLE_ROWS;
        weight_densify_rows(m, r, std::min(r + BUNDLE_ROWS, m.desc.rows), rows.data());
        memcpy(static_cast<uint8_t *>(data) + done, rows.data() + in_rows, n);
        done += n;
    }
}

int weight_packer::consume(const macko_view & view, int64_t first_value) {
    packer_->pack(view, first_value);
    return GGML_MACKO_STATUS_OK;
}

bool weight_packer::end() {
    if (packer_ && !packer_->finish()) {
        return false;
    }
    if (const bitmap_matrix columns = weight_.columns(); columns.masks) {
        const int n_threads = threads_for(0, weight_.desc.rows * weight_.desc.cols);
        columns_pack(weight_.bitmap(), n_threads, columns);
        if (float * norms = weight_.norms()) {
            columns_norms(columns, n_threads, norms);
        }
    }
    return true;
}

bool weight_packer::takes(const codec & format) const { return cpu_takes(format); }

int weight_packer::consume_matrix(const codec_view & view) {
    packer_.reset();
    cpu_pack(view, threads_for(0, view.desc().rows * view.desc().cols), weight_.bitmap());
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko::cpu
