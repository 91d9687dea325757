// The layouts of sparse matrices in GPU memory, as one variant. They are made from the file's arrays when a matrix is
// loaded, and are never stored in a file. docs/design/gpu-layouts.md draws each of them.
//
// Adding a layout: a struct and a shape in a header of its own, both added to the variants here; one entry in choose()
// (choose.h); an upload in cuda/sparse/uploader.cpp; a family of kernels, which launches and densify visit.
#pragma once

#include "gpu-layout/exp-coded.h"
#include "gpu-layout/fragments.h"
#include "gpu-layout/inline-delta.h"
#include "gpu-layout/macko.h"
#include "gpu-layout/row-blocks.h"

#include <variant>

namespace macko::cuda {

// The decision of choose(): a layout and its numbers.
using layout_shape = std::variant<macko_shape, inline_delta_shape, exp_coded_shape, row_blocks_shape, fragments_shape>;
// A matrix in memory; the alternatives have the order of layout_shape.
using gpu_layout =
    std::variant<macko_layout, inline_delta_layout, exp_coded_layout, row_blocks_layout, fragments_layout>;

const char * layout_name(const layout_shape & shape);
const char * layout_name(const gpu_layout & layout);

inline const layout_base & base_of(const gpu_layout & layout) {
    return std::visit([](const auto & l) -> const layout_base & { return l; }, layout);
}

// Binds a layout of this shape to `nbytes` of memory (null: offsets instead of pointers). The arrays of ROW_BLOCKS
// depend on more than the header: bind_row_blocks() binds them.
gpu_layout bind_layout(const gpu_matrix & matrix, const layout_shape & shape, int64_t nbytes, void * memory);

// Whether products with the matrix support norms, silu_mul and experts (cuda/sparse/mul-mat.cuh).
inline bool has_fused_products(const gpu_layout & layout) { return !std::holds_alternative<row_blocks_layout>(layout); }
// Whether matrices can share a launch: both have the same kernel and the same x in shared memory.
bool have_same_kernel(const gpu_layout & a, const gpu_layout & b);

} // namespace macko::cuda
