// How long a product of one column takes on a GPU with a matrix kept as rows (MACKO) or as blocks and the rest as rows: the one place for the
// model that decides how an EC-CSR matrix is kept on a GPU, and what `convert auto --optimize speed` takes. Plain C++.
#pragma once

#include <cstdint>

namespace macko {

struct gpu_work { // of one product
    int64_t row_nbytes;   // of the part that is kept as rows
    int64_t block_nbytes; // of the part that is kept as blocks; 0: none
    int64_t n_pieces;     // of blocks: at most 8 rows each
    int64_t n_sums;       // rows of all pieces
};

// microseconds on the GPU that the constants were measured on (an H200); what matters is which of two matrices is faster
double gpu_us(const gpu_work & work);

} // namespace macko
