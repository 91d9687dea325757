#include "format/ec-csr-cost.h"

namespace macko {

// Fitted to bench-spmv-gpu --ec-csr on an H200 (docs/notes-ec-csr.md, "Which one is faster")
constexpr double ROWS_US       = 2.0;
constexpr double ROWS_MB_US    = 0.24; // 4.2 TB/s
constexpr double BLOCKS_US     = 3.0;
constexpr double BLOCKS_MB_US  = 0.26;
constexpr double KILOPIECES_US = 0.1;
constexpr double KILOSUMS_US   = 0.01;

double gpu_us(const gpu_work & w) {
    const double rows   = w.row_nbytes > 0 ? ROWS_US + ROWS_MB_US * 1e-6 * static_cast<double>(w.row_nbytes) : 0;
    const double blocks = BLOCKS_US + BLOCKS_MB_US * 1e-6 * static_cast<double>(w.block_nbytes) + 1e-3 * (KILOPIECES_US * static_cast<double>(w.n_pieces) + KILOSUMS_US * static_cast<double>(w.n_sums));
    return rows + (w.block_nbytes > 0 ? blocks : 0);
}

} // namespace macko
