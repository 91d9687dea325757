#include "cpu/layout/matrix-packer.h"
#include "codec/team.h"
#include "cpu/layout/bitmap.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

matrix_packer::matrix_packer(const cpu_plan & plan, const span_ops & ops, void * memory)
    : plan_(plan), ops_(ops), memory_(memory), matrix_(bind_layout(plan.desc, plan.shape, memory)) {
    if (const auto * bundles = std::get_if<bundles_layout>(&matrix_)) {
        writer_.emplace(*bundles);
    }
}

void matrix_packer::become_bitmap() {
    matrix_     = bind_layout(plan_.desc, bitmap_shape{}, memory_);
    overflowed_ = true;
    writer_.reset();
}

// ---- MACKO rows ----

std::unique_ptr<span_packer> matrix_packer::take_packer() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (packers_.empty()) {
        return std::make_unique<span_packer>(ops_);
    }
    std::unique_ptr<span_packer> packer = std::move(packers_.back());
    packers_.pop_back();
    return packer;
}

void matrix_packer::pack(const macko_view & view, int64_t first_value) {
    if (!writer_) {
        bitmap_pack(view, first_value, std::get<bitmap_layout>(matrix_));
        return;
    }
    std::unique_ptr<span_packer> packer = take_packer();
    for (int64_t row = view.rows().row_begin; row < view.rows().row_end; row += BUNDLE_ROWS) {
        group_bytes bytes = writer_->take();
        if (writer_->fits()) {
            packer->pack(view, row, base_of(matrix_).row_off + row + 1, &bytes);
        }
        writer_->put(row / BUNDLE_ROWS, std::move(bytes));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    packers_.push_back(std::move(packer));
}

bool matrix_packer::finish() {
    if (!writer_) {
        return true;
    }
    if (!writer_->finish()) {
        become_bitmap();
        return false;
    }
    uint32_t * row_off = base_of(matrix_).row_off;
    row_off[0]         = 0; // the other elements count the non-zeros of all earlier rows
    for (int64_t r = 0; r < plan_.desc.rows; r++) {
        row_off[r + 1] += row_off[r];
    }
    return true;
}

// ---- a whole matrix ----

bool matrix_packer::pack_bundles(const packed_view & view, int n_threads) {
    const auto & w = std::get<bundles_layout>(matrix_);
    std::copy(view.arrays().row_ptr, view.arrays().row_ptr + w.rows + 1, w.row_off);
    std::vector<std::optional<span_packer>> packers(static_cast<size_t>(n_threads));
    parallel_parts(n_threads, n_bundle_groups(w.rows), 1, [&](int64_t group, int64_t, int thread) {
        auto & packer = packers[static_cast<size_t>(thread)];
        if (!packer) {
            packer.emplace(ops_);
        }
        group_bytes bytes = writer_->take();
        if (writer_->fits()) {
            packer->pack(view, group, &bytes);
        }
        writer_->put(group, std::move(bytes));
    });
    return writer_->finish();
}

// Copies the arrays with several threads, and zeros behind them.
static void copy_quantized(const quantized_arrays & a, int n_threads, const quantized_layout & m) {
    const auto copy = [&](const void * from, int64_t nbytes, void * to, int64_t slack) {
        constexpr int64_t PART = 1 << 20;
        parallel_parts(n_threads, nbytes, PART, [&](int64_t begin, int64_t end, int) {
            memcpy(static_cast<uint8_t *>(to) + begin, static_cast<const uint8_t *>(from) + begin,
                   static_cast<size_t>(end - begin));
        });
        memset(static_cast<uint8_t *>(to) + nbytes, 0, static_cast<size_t>(slack));
    };
    copy(a.codes, int64_t(a.row_ptr[m.rows]) * m.bits, m.codes, CODES_SLACK);
    copy(a.bitmap, m.rows * bitmap_row_nbytes(m.cols), m.bitmap, BITMAP_SLACK);
    copy(a.scales, m.rows * a.windows(), m.scales, SCALES_SLACK);
    copy(a.factors, m.rows * int64_t(sizeof(*a.factors)), m.factors, 0);
    copy(a.row_ptr, (m.rows + 1) * int64_t(sizeof(*a.row_ptr)), m.row_off, 0);
    copy(a.levels, int64_t(1) << m.bits, m.levels, 0);
}

namespace {

struct whole_packer {
    const codec_view & view;
    int                n_threads;

    template <typename M> void operator()(const M & m) const {
        bitmap_pack(static_cast<const packed_view &>(view), n_threads, m);
    }
    void operator()(const bundles_layout &) const {}
    void operator()(const quantized_layout & m) const {
        copy_quantized(static_cast<const quantized_view &>(view).arrays(), n_threads, m);
    }
};

} // namespace

void matrix_packer::pack_whole(const codec_view & view, int n_threads) {
    if (writer_ && !pack_bundles(static_cast<const packed_view &>(view), n_threads)) {
        become_bitmap();
    }
    writer_.reset();
    std::visit(whole_packer{ view, n_threads }, matrix_);
}

} // namespace macko::cpu
