// Packs a matrix into its layout: MACKO rows while they arrive, or a whole matrix in the packed format.
#pragma once

#include "cpu/layout/choose.h"
#include "cpu/layout/span-packer.h"

#include <optional>

namespace macko::cpu {

class matrix_packer {
public:
    // memory: plan.nbytes bytes, aligned to LAYOUT_ALIGNMENT
    matrix_packer(const cpu_plan & plan, const span_ops & ops, void * memory);

    // The matrix; its layout is final after finish() or pack_whole().
    const cpu_matrix & matrix() const { return matrix_; }
    // Whether the bundles needed too much memory, and the matrix is a bitmap instead.
    bool overflowed() const { return overflowed_; }

    // If true, all views must be whole groups of rows, and first_value is ignored.
    bool makes_bundles() const { return writer_.has_value(); }
    // Views may be packed in any order and at the same time.
    void pack(const macko_view & view, int64_t first_value);
    // Call after all MACKO rows. Returns false if the bundles overflowed: then all rows must be packed again.
    [[nodiscard]] bool finish();

    // The formats whose matrices are packed as a whole. Matrices of all other formats arrive as MACKO rows.
    static bool takes(const codec & format) { return &format == &packed_codec() || &format == &quantized_codec(); }
    void        pack_whole(const codec_view & view, int n_threads);

private:
    const cpu_plan                            plan_;
    const span_ops &                          ops_;
    void * const                              memory_;
    cpu_matrix                                matrix_;
    bool                                      overflowed_ = false;
    std::optional<group_writer>               writer_;
    std::mutex                                mutex_;
    std::vector<std::unique_ptr<span_packer>> packers_; // not in use by any thread

    void                         become_bitmap();
    std::unique_ptr<span_packer> take_packer();
    bool                         pack_bundles(const packed_view & view, int n_threads);
};

} // namespace macko::cpu
