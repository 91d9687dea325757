// What tensor->data of a sparse weight points to on the CPU device: a header, the norms of its columns if its threshold
// needs them, the memory of its columns (columns.h) if they are kept, too, and that of its rows, both as a
// bitmap_matrix.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/layout/matrix-packer.h"
#include "load/payload.h"

#include "ggml.h"

#include <optional>

namespace macko::cpu {

struct alignas(BITMAP_ALIGNMENT) weight {
    uint64_t    magic; // WEIGHT_MAGIC when the whole payload has been read
    macko_desc  desc;
    bitmap_form form;
    int64_t     rows_per_matrix;    // ne[1]; the ne[2] * ne[3] matrices of the tensor follow each other
    int64_t     columns_nbytes = 0; // 0: it is not kept by columns
    float       threshold      = 0; // columns_skip_below() of one x; 0: not. Only of a weight that is kept by columns
    int64_t     norms_nbytes   = 0; // 0: the threshold is one of x alone

    bitmap_matrix bitmap() const { return bitmap_bind(desc, form, memory() + norms_nbytes + columns_nbytes); }
    // of all matrices (columns.h); no masks if there are none
    bitmap_matrix columns() const {
        return columns_nbytes > 0
                   ? bitmap_bind(columns_desc(desc, rows_per_matrix), { desc.type }, memory() + norms_nbytes)
                   : bitmap_matrix{};
    }
    // a float for each column, or nullptr
    float * norms() const { return norms_nbytes > 0 ? reinterpret_cast<float *>(memory()) : nullptr; }

private:
    uint8_t * memory() const { return reinterpret_cast<uint8_t *>(const_cast<weight *>(this) + 1); }
};
constexpr uint64_t WEIGHT_MAGIC = 0x78697274616d6b6dull;

// nullptr if the tensor's payload has not been read
inline const weight * weight_of(const ggml_tensor * tensor) {
    const auto * m = static_cast<const weight *>(tensor->data);
    return m && m->magic == WEIGHT_MAGIC ? m : nullptr;
}

// bytes of a weight with its header, for the kernels that are in use
size_t weight_nbytes(const sparse_tensor_info & matrix);

// Bytes from the beginning that are in use, the header included; the rest is room that nothing needed.
size_t weight_used_nbytes(const weight & m);

// Writes the header of a weight; it has no magic yet.
void weight_init(weight * m, const sparse_tensor_info & matrix);

// size bytes of the weight's dense elements, from byte `offset` of them on
void weight_densify(const weight & m, size_t offset, void * data, size_t size);
// the dense elements of some rows
void weight_densify_rows(const weight & m, int64_t row_begin, int64_t row_end, void * dense);
// Rows are found so many at a time: to find one row of a group of bundles, all of it is read.
int64_t weight_row_step(const weight & m);

// fills a weight with a payload
class weight_packer : public payload_consumer {
public:
    explicit weight_packer(const weight & m) : weight_(m) {}
    void    begin() override { packer_.emplace(weight_.bitmap()); }
    bool    end() override;
    int     consume(const macko_view & view, int64_t first_value) override;
    bool    wants_first_value() const override { return !packer_->makes_bundles(); }
    int64_t rows_of_blocks() const override { return packer_->makes_bundles() ? BUNDLE_ROWS : 1; }
    bool    takes(const codec & format) const override;
    int     consume_matrix(const codec_view & view) override;

private:
    const weight &               weight_;
    std::optional<matrix_packer> packer_;
};

} // namespace macko::cpu
