// A whole MACKO matrix in memory as a codec's view. Plain C++17: no ggml, no CUDA.
#pragma once

#include "codec/codec.h"

namespace macko {

// MACKO's components, in the order of the tensor table
enum macko_component : size_t { MACKO_VALUES, MACKO_DELTAS, MACKO_ROW_PTR };

const codec & macko_codec();

// Checked row_ptr and padding; rows are checked when they are visited.
class macko_matrix_view : public codec_view {
public:
    macko_matrix_view();
    const macko_desc & desc() const override { return desc_; }
    int                check_rows(int n_threads) const override;
    int                for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const override;
    int                decode(void * dense, int n_threads) const override;
    // Validates all rows in n_threads ranges, one per thread, and passes each range to f. Also checks nnz. Reports the
    // error of the first bad row, whatever the number of threads.
    [[nodiscard]] int for_each_range(int n_threads, const std::function<int(const macko_view &)> & f) const;

private:
    friend int      open_macko(const ggml_macko_matrix & m, macko_matrix_view * view);
    macko_desc      desc_    = {};
    const int32_t * row_ptr_ = nullptr;
    const void *    values_  = nullptr;
    const uint8_t * deltas_  = nullptr;
};

[[nodiscard]] int open_macko(const ggml_macko_matrix & m, macko_matrix_view * view);

} // namespace macko
