#include "gpu-layout/layouts.h"

namespace macko::cuda {

static const char * name_of(size_t alternative) {
    static constexpr const char * NAMES[] = { "MACKO", "INLINE_DELTA", "EXP_CODED", "ROW_BLOCKS", "FRAGMENTS" };
    static_assert(std::size(NAMES) == std::variant_size_v<layout_shape> &&
                      std::variant_size_v<layout_shape> == std::variant_size_v<gpu_layout>,
                  "a name for each layout");
    return NAMES[alternative];
}
const char * layout_name(const layout_shape & shape) { return name_of(shape.index()); }
const char * layout_name(const gpu_layout & layout) { return name_of(layout.index()); }

namespace {

struct binder {
    const gpu_matrix & matrix;
    int64_t            nbytes;
    void *             memory;

    gpu_layout operator()(const macko_shape &) const { return bind_macko(matrix.desc, matrix.n_padded, memory); }
    gpu_layout operator()(const inline_delta_shape & s) const {
        return bind_inline_delta(matrix.desc, matrix.n_padded, s, memory);
    }
    gpu_layout operator()(const exp_coded_shape & s) const { return bind_exp_coded(matrix.desc, s, nbytes, memory); }
    gpu_layout operator()(const fragments_shape & s) const { return bind_fragments(matrix.desc, s, nbytes, memory); }
    gpu_layout operator()(const row_blocks_shape &) const {
        row_blocks_layout m = {};

        static_cast<layout_base &>(m) = { matrix.desc.rows, matrix.desc.cols, matrix.desc.type, nbytes };
        return m;
    }
};

bool alike(const macko_layout & a, const macko_layout & b) { return a.delta_bits == b.delta_bits; }
bool alike(const row_split_layout & a, const row_split_layout & b) {
    return a.delta_bits == b.delta_bits && a.lanes == b.lanes && a.bank_width == b.bank_width;
}
bool alike(const row_blocks_layout &, const row_blocks_layout &) { return false; } // one launch each
bool alike(const fragments_layout & a, const fragments_layout & b) {
    return a.code_bits == b.code_bits && a.window == b.window && a.tile_chunks == b.tile_chunks;
}

} // namespace

gpu_layout bind_layout(const gpu_matrix & matrix, const layout_shape & shape, int64_t nbytes, void * memory) {
    return std::visit(binder{ matrix, nbytes, memory }, shape);
}

bool have_same_kernel(const gpu_layout & a, const gpu_layout & b) {
    return a.index() == b.index() && base_of(a).cols == base_of(b).cols && base_of(a).type == base_of(b).type &&
           std::visit([&](const auto & l) { return alike(l, std::get<std::decay_t<decltype(l)>>(b)); }, a);
}

} // namespace macko::cuda
