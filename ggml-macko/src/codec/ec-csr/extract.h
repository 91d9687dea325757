// Chooses the blocks of a matrix: hierarchical block extraction, clipping, and the split of the remaining columns
// (EC-SpMV paper, sections 4, 5 and 6.3.1). Plain C++17: no ggml, no CUDA.
#pragma once

#include "codec/ec-csr/ec-csr.h"

namespace macko {

struct extract_options {
    int32_t max_granularity; // 1 (no extraction), 2, 4 ... 64
    // of an extracted block: a multiple of 128. A larger minimum makes bases cheaper and blocks rarer
    int32_t  min_columns;
    bool     clip; // split blocks with more than twice the elements of an average row
    uint64_t seed; // seed of the order in which rows look for partners
};

// Finds the blocks of dense (desc.rows x desc.cols elements). The result depends only on the matrix and the options.
[[nodiscard]] int extract_blocks(const macko_desc & desc, const void * dense, const extract_options & options,
                                 int n_threads, ec_csr_blocks * out);

} // namespace macko
