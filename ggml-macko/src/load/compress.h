// Compress on load: dense weights of a model become sparse ones without a sparse file. They are counted when the model
// is opened, because llama.cpp asks for sizes before it loads, and encoded in blocks of rows when a device fetches them
// (read_payload), so that no more than a few blocks are in memory beside the result.
#pragma once

#include "load/model-file.h"

#include <string_view>

namespace macko {

// What llama.cpp does with a weight of a name: enum ggml_macko_weight_use. Allocates nothing, so it cannot fail.
int weight_use(std::string_view name, int n_dims);

// Fills sparse and tensor_sparse_index of a dense model with each multiplied weight of F16, BF16 or F32 that is finite
// and takes fewer bytes as MACKO, with the best delta_bits for it, as `macko convert IN OUT macko` chooses. A -0.0
// counts as zero, unless bit_exact. NOT_SPARSE if there is none. Reads all those weights once; a second call for a file
// that did not change reuses the result of the first.
[[nodiscard]] int compress_weights(model_file * file, bool bit_exact);

} // namespace macko
