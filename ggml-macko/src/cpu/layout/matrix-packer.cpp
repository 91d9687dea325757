#include "cpu/layout/matrix-packer.h"

#include <algorithm>

namespace macko::cpu {

matrix_packer::matrix_packer(const bitmap_matrix & dst) : dst_(dst) {
    if (dst.group_off) {
        writer_.emplace(dst);
    }
}

std::unique_ptr<span_packer> matrix_packer::take_packer() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (packers_.empty()) {
        return std::make_unique<span_packer>();
    }
    std::unique_ptr<span_packer> packer = std::move(packers_.back());
    packers_.pop_back();
    return packer;
}

void matrix_packer::pack(const macko_view & view, int64_t first_value) {
    if (!writer_) {
        bitmap_pack(view, first_value, dst_);
        return;
    }
    std::unique_ptr<span_packer> packer = take_packer();
    for (int64_t row = view.rows().row_begin; row < view.rows().row_end; row += BUNDLE_ROWS) {
        group_bytes bytes = writer_->take();
        if (writer_->fits()) {
            packer->pack(view, row, dst_.row_off + row + 1, &bytes);
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
        writer_.reset();
        return false;
    }
    dst_.row_off[0] = 0; // the other elements count the non-zeros of all earlier rows
    for (int64_t r = 0; r < dst_.rows; r++) {
        dst_.row_off[r + 1] += dst_.row_off[r];
    }
    return true;
}

} // namespace macko::cpu
