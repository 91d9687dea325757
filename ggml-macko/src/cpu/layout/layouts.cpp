#include "cpu/layout/layouts.h"

namespace macko::cpu {

namespace {

constexpr int64_t MAX_CODED_COLS = int64_t(UINT16_MAX) + 1;

// Number of coded values with space for the alignment of each row.
int64_t n_coded(const macko_desc & desc) { return desc.nnz + desc.rows * (CODED_ROW_ALIGNMENT - 1); }

int64_t to_lines(int64_t nbytes) { return (nbytes + LAYOUT_ALIGNMENT - 1) & -LAYOUT_ALIGNMENT; }

// Cuts memory into the parts of a layout, which begin at whole cache lines.
struct binder {
    const macko_desc & desc;
    uintptr_t          next;

    template <typename T> T * take(int64_t n) {
        T * part = reinterpret_cast<T *>(next);
        next += static_cast<uintptr_t>(to_lines(n * int64_t(sizeof(T))));
        return part;
    }
    layout_base   base() { return { desc.rows, desc.cols, desc.type, take<uint32_t>(desc.rows + 1) }; }
    masked_layout masked(int64_t nbytes) {
        return { base(), take<uint64_t>(desc.rows * mask_words(desc.cols)), take<uint8_t>(nbytes + VALUES_SLACK) };
    }

    cpu_matrix operator()(const bitmap_shape &) { return bitmap_layout{ masked(desc.nnz * value_nbytes(desc.type)) }; }
    cpu_matrix operator()(const coded_bitmap_shape & s) {
        const int64_t bits_nbytes = (n_coded(desc) + 7) / 8 + CODED_BITS_SLACK;
        return coded_bitmap_layout{ masked(n_coded(desc)),         take<uint8_t>(bits_nbytes),
                                    take<uint8_t>(bits_nbytes),    take<uint32_t>(1),
                                    take<uint32_t>(desc.rows + 1), take<float>(s.max_outliers),
                                    take<uint16_t>(s.max_outliers) };
    }
    cpu_matrix operator()(const bundles_shape &) {
        const int64_t nbytes = to_lines(bundles_nbytes(desc));
        return bundles_layout{ base(), take<uint64_t>(n_bundle_groups(desc.rows) + 1), take<uint8_t>(nbytes), nbytes };
    }
    cpu_matrix operator()(const quantized_shape & s) {
        return quantized_layout{ base(),
                                 s.bits,
                                 s.window,
                                 take<uint8_t>(s.codes_nbytes + CODES_SLACK),
                                 take<uint8_t>(desc.rows * bitmap_row_nbytes(desc.cols) + BITMAP_SLACK),
                                 take<uint8_t>(desc.rows * windows_of_row(desc.cols, s.window) + SCALES_SLACK),
                                 take<uint16_t>(desc.rows),
                                 take<int8_t>(int64_t(1) << s.bits) };
    }
};

} // namespace

const char * layout_name(const cpu_shape & shape) {
    constexpr const char * NAMES[] = { "BITMAP", "CODED_BITMAP", "BUNDLES", "QUANTIZED" };
    static_assert(std::size(NAMES) == std::variant_size_v<cpu_shape> &&
                      std::variant_size_v<cpu_shape> == std::variant_size_v<cpu_matrix>,
                  "a name for each layout");
    return NAMES[shape.index()];
}

int64_t layout_nbytes(const macko_desc & desc, const cpu_shape & shape) {
    binder sizes = { desc, 0 };
    std::visit(sizes, shape);
    return static_cast<int64_t>(sizes.next);
}

cpu_matrix bind_layout(const macko_desc & desc, const cpu_shape & shape, void * memory) {
    return std::visit(binder{ desc, reinterpret_cast<uintptr_t>(memory) }, shape);
}

quantized_arrays arrays_of(const quantized_layout & m) {
    return { { m.rows, m.cols, m.dense_type, 0, 0 },       m.bits,  m.window, m.codes, m.bitmap, m.scales, m.factors,
             reinterpret_cast<const int32_t *>(m.row_off), m.levels };
}

bool can_stay_coded(const macko_desc & desc, int64_t max_outliers) {
    return desc.cols <= MAX_CODED_COLS && n_coded(desc) <= UINT32_MAX && max_outliers >= 0;
}

} // namespace macko::cpu
