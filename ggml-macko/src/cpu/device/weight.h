// The memory at tensor->data of a sparse weight on the CPU device: a header, the norms of the columns if the threshold
// needs them, the copy by columns (columns.h) if there is one, and the rows in their layout.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/layout/matrix-packer.h"
#include "load/payload.h"

#include "ggml.h"

#include <optional>

namespace macko::cpu {

struct alignas(LAYOUT_ALIGNMENT) weight {
    uint64_t magic; // WEIGHT_MAGIC after the whole payload has been read
    cpu_plan plan;
    bool     overflowed;         // the bundles of the plan became a bitmap; a weight in the cache keeps it
    int64_t  rows_per_matrix;    // ne[1]; the ne[2] * ne[3] matrices of the tensor are stored one after the other
    int64_t  columns_nbytes = 0; // 0: there is no copy by columns
    float    threshold      = 0; // columns_skip_below() of one x; 0: none. Only with a copy by columns
    int64_t  norms_nbytes   = 0; // 0: the threshold applies to x alone

    const macko_desc & desc() const { return plan.desc; }
    uint8_t *          rows_memory() const { return memory() + norms_nbytes + columns_nbytes; }
    cpu_shape          shape() const { return overflowed ? bitmap_shape{} : plan.shape; }
    cpu_matrix         matrix() const { return bind_layout(desc(), shape(), rows_memory()); }
    // the columns of all matrices (columns.h); no masks if there is no copy by columns
    bitmap_layout columns() const {
        return columns_nbytes > 0 ? columns_bind(desc(), rows_per_matrix, memory() + norms_nbytes) : bitmap_layout{};
    }
    // one float per column, or nullptr
    float * norms() const { return norms_nbytes > 0 ? reinterpret_cast<float *>(memory()) : nullptr; }

private:
    uint8_t * memory() const { return reinterpret_cast<uint8_t *>(const_cast<weight *>(this) + 1); }
};
constexpr uint64_t WEIGHT_MAGIC = 0x78697274616d6b6dull;

// nullptr if the tensor's payload has not been read.
inline const weight * weight_of(const ggml_tensor * tensor) {
    const auto * m = static_cast<const weight *>(tensor->data);
    return m && m->magic == WEIGHT_MAGIC ? m : nullptr;
}

// Bytes of a weight with its header, for the kernels in use.
size_t weight_nbytes(const sparse_tensor_info & matrix);

// Bytes in use from the start, including the header; the remaining bytes were reserved but not needed.
size_t weight_used_nbytes(const weight & m);

// Writes the header of a weight, without the magic; keeps m->overflowed, which the packer writes.
void weight_init(weight * m, const sparse_tensor_info & matrix);

// Writes `size` bytes of the weight's dense elements, starting at byte `offset`.
void weight_densify(const weight & m, size_t offset, void * data, size_t size);
// Writes the dense elements of rows row_begin ... row_end - 1.
void weight_densify_rows(const weight & m, int64_t row_begin, int64_t row_end, void * dense);
// Number of rows that are read together: finding one row of a group of bundles requires reading the whole group.
int64_t weight_row_step(const weight & m);

// Fills a weight from a payload.
class weight_packer : public payload_consumer {
public:
    explicit weight_packer(weight & m) : weight_(m) {}
    void    begin() override;
    bool    end() override;
    int     consume(const macko_view & view, int64_t first_value) override;
    bool    wants_first_value() const override { return !packer_->makes_bundles(); }
    int64_t rows_of_blocks() const override { return packer_->makes_bundles() ? BUNDLE_ROWS : 1; }
    bool    takes(const codec & format) const override { return matrix_packer::takes(format); }
    int     consume_matrix(const codec_view & view) override;

private:
    weight &                     weight_;
    std::optional<matrix_packer> packer_;
};

} // namespace macko::cpu
